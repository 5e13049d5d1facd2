#!/usr/bin/env bash
# Runs the tests: bash tools/test.sh [--rest | --all | pytest arguments]
# Without arguments: what shows in minutes whether the pack works, on the ComfyUI that this fetches (or on COMFYUI_PATH).
# --rest: what that leaves out: tests that are marked "whole", those of the tools, and what touches ComfyUI on every tree
# of SPECAR_COMFYUI_TREES (folders or archives, separated by colons), without tests that are marked "once".
# --all: both. Chromium (for the browser tests) comes from Debian's packages when this runs as root.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$SPECAR_ROOT"

find_chromium() {
    command -v chromium || command -v chromium-browser || command -v google-chrome
}

install_chromium() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
    echo "Installing Chromium for the browser tests"
    { apt-get update && apt-get install -y --no-install-recommends chromium fonts-dejavu-core; } \
        >"$SPECAR_CACHE/chromium.log" 2>&1 || return 1
}

browser=""
if find_chromium >/dev/null || install_chromium; then
    SPECAR_CHROMIUM="$(find_chromium)"
    export SPECAR_CHROMIUM
else
    echo "BROWSER TESTS LEFT OUT: no Chromium here, and it could not be installed (Debian: apt-get install chromium, as root)"
    browser=" and not browser"
fi

case "${1:-}" in
"" | --rest | --all) ;;
*) exec "$PYTHON" -m pytest -m "${browser# and }" "$@" ;;
esac

# A process per processor, each with one thread. A file's tests stay together: they share servers and models.
export OMP_NUM_THREADS=1
status=0
run() {
    echo "ComfyUI in $COMFYUI_PATH, front end $("$PYTHON" -c \
        'from importlib.metadata import version; print(version("comfyui-frontend-package"))')"
    "$PYTHON" -m pytest -n "$(getconf _NPROCESSORS_ONLN)" --dist loadfile --no-loadscope-reorder -m "$1$browser" "${@:2}" || status=1
}

# What imports ComfyUI has processes of its own: it changes PyTorch's settings and the log for what follows.
if [ "${1:-}" != --rest ]; then
    run "not whole" tests/nodes tests/e2e tests/browser
    run "not whole" tests/unit tests/parity tests/golden
fi
if [ $# -gt 0 ]; then
    run whole tools/tests tests/unit tests/parity tests/golden
    run whole tests/nodes tests/e2e tests/browser
    IFS=: read -ra trees <<<"${SPECAR_COMFYUI_TREES:-}"
    for tree in "${trees[@]}"; do
        use_tree "$tree"
        run "not once" tests/nodes tests/e2e tests/browser
    done
fi
exit "$status"
