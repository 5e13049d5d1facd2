#!/usr/bin/env bash
# Tests the pack on another machine with a GPU, which needs Python with torch and Triton, and no network.
#
#   bash tools/gpu.sh pack FOLDER [COMFYUI]     here: writes FOLDER/specar.tar.xz (the last commit, the bundled models)
#                                               and, of a ComfyUI folder, FOLDER/comfyui.tar.xz (with its packages)
#   tar xf specar.tar.xz; tar xf comfyui.tar.xz; bash specar/tools/gpu.sh --minutes 10 --of 30     there
#
# The second archive is for the stages that need ComfyUI. Options are those of `python -m tools.benchmarks gpu`.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
beside="$(dirname "$root")"
PYTHON="${PYTHON:-python3}"
WHEELS_FOR="${WHEELS_FOR:-3.12}" # version of Python on the other machine
MOST=60                         # MiB of an archive
CODE=(__init__.py api.py pyproject.toml LICENSE assets/continuous assets/default batch device kernels limits locales
    model_loaders models nodes reports samplers subgraphs tests/support tools ':!tools/training/checkpoints' web workflows/api)
# What ComfyUI needs beyond torch, transformers and aiohttp: alone, with what it needs itself, and without kernels of its
# own (of 70 MiB). Its front end is not needed.
PACKAGES=(alembic av blake3 comfy-aimdo einops mako safetensors simpleeval spandrel SQLAlchemy torchsde trampoline)
WITH_THEIRS=(pydantic pydantic-settings)
PURE=(comfy-kitchen)
LINUX=(--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64)

compressed() {
    xz -T0 -3 -c >"$1"
    local size=$(($(stat -c %s "$1") / 2 ** 20))
    echo "$1: $size MiB"
    [ "$size" -le "$MOST" ] || { echo "error: that is more than $MOST MiB" >&2 && exit 1; }
}

pack() {
    mkdir -p "$1"
    git -C "$root" archive --prefix=specar/ HEAD "${CODE[@]}" | compressed "$1/specar.tar.xz"
    [ -n "${2:-}" ] || return 0
    local made
    made="$(mktemp -d)"
    mkdir "$made/wheels"
    local fetch=("$PYTHON" -m pip download -q --only-binary=:all: --python-version "$WHEELS_FOR"
        -c "$2/requirements.txt" -d "$made/wheels")
    "${fetch[@]}" "${LINUX[@]}" --no-deps "${PACKAGES[@]}"
    "${fetch[@]}" "${LINUX[@]}" "${WITH_THEIRS[@]}"
    "${fetch[@]}" --platform any --implementation py --abi none --no-deps "${PURE[@]}"
    cp -rL "$2" "$made/tree"
    rm -rf "$made/tree/.git" "$made/tree/models" "$made/tree/comfy_api_nodes" "$made/tree/blueprints"
    tar -C "$made" --exclude __pycache__ --transform "s,^,comfyui/," -c tree wheels | compressed "$1/comfyui.tar.xz"
    rm -rf "$made"
}

if [ "${1:-}" = pack ]; then
    pack "${@:2}"
    exit
fi
mkdir -p "$beside/link"
ln -sfn "$root" "$beside/link/comfyui_specar"
export PYTHONPATH="$beside/link:$root"
if [ -d "$beside/comfyui" ]; then
    [ -d "$beside/site" ] || "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$beside/site" \
        "$beside"/comfyui/wheels/*.whl
    export PYTHONPATH="$PYTHONPATH:$beside/site" COMFYUI_PATH="$beside/comfyui/tree"
fi
cd "$root"
exec "$PYTHON" -m tools.benchmarks gpu "$@"
