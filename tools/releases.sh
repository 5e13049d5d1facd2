#!/usr/bin/env bash
# Runs the tests that are marked "releases" on releases of ComfyUI: bash tools/releases.sh [VERSION...]
# Without arguments: the oldest supported one, and one or two of every month since. Their trees come from ComfyUI's git
# repository, or from a clone of it that SPECAR_COMFYUI_GIT names; what each requires gets an environment of its own.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$SPECAR_ROOT"

[ $# -gt 0 ] || set -- 0.3.75 0.3.76 0.5.1 0.10.0 0.15.1 0.17.0 0.18.1 0.20.1 0.22.0 0.23.0 0.27.0 0.28.0 0.30.0 0.33.0

git="${SPECAR_COMFYUI_GIT:-$SPECAR_CACHE/ComfyUI.git}"
[ -d "$git" ] || logged "clone ComfyUI" git clone --bare https://github.com/comfyanonymous/ComfyUI "$git"

# The commit that made a version, found by its file: a clone may lack the tags.
commit_of() {
    git -C "$git" log --all --reverse --format=%H -S"__version__ = \"$1\"" -- comfyui_version.py | sed -n 1p
}

fetch_release() {
    local commit
    commit="$(commit_of "$1")"
    [ -n "$commit" ] || fail "$git has no ComfyUI $1"
    rm -rf "$2.part"
    mkdir -p "$2.part"
    git -C "$git" archive "$commit" | tar -x -C "$2.part"
    mv "$2.part" "$2"
}

failed=()
for version in "$@"; do
    tree="$SPECAR_CACHE/trees/ComfyUI-$version"
    [ -d "$tree" ] || fetch_release "$version" "$tree"
    use_tree "$tree"
    echo "ComfyUI $version"
    "$PYTHON" -m pytest -q -m releases tests/e2e || failed+=("$version")
done
[ ${#failed[@]} = 0 ] || fail "it fails on ${failed[*]}"
