#!/usr/bin/env bash
# Runs the tests: bash tools/test.sh [pytest arguments]
# Without arguments: everything on the ComfyUI that this fetches (or on COMFYUI_PATH), then what touches ComfyUI on every
# tree of SPECAR_COMFYUI_TREES (folders or archives, separated by colons), without tests that are marked "once".
# Chromium (for the browser tests) comes from Debian's packages when this runs as root.
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

markers=""
if find_chromium >/dev/null || install_chromium; then
    SPECAR_CHROMIUM="$(find_chromium)"
    export SPECAR_CHROMIUM
else
    echo "BROWSER TESTS LEFT OUT: no Chromium here, and it could not be installed (Debian: apt-get install chromium, as root)"
    markers="not browser"
fi

if [ $# -gt 0 ]; then
    exec "$PYTHON" -m pytest -m "$markers" "$@"
fi

# Everything: what computes beside what waits for ComfyUI and the browser, each on half of the processors.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((($(nproc) + 1) / 2))}"
status=0
report="$(mktemp)"
trap 'rm -f "$report"; kill "${computing:-}" 2>/dev/null || true' EXIT
"$PYTHON" -m pytest tests/unit tests/parity tests/golden >"$report" 2>&1 &
computing=$!

test_with_comfyui() {
    echo "ComfyUI in $COMFYUI_PATH, front end $("$PYTHON" -c \
        'from importlib.metadata import version; print(version("comfyui-frontend-package"))')"
    "$PYTHON" -m pytest -m "$1" tests/nodes tests/e2e tests/browser || status=1
}

test_with_comfyui "$markers"
IFS=: read -ra trees <<<"${SPECAR_COMFYUI_TREES:-}"
for tree in "${trees[@]}"; do
    use_tree "$tree"
    test_with_comfyui "${markers:+$markers and }not once" # the marker is explained in pyproject.toml
done

wait "$computing" || status=1
cat "$report"
exit "$status"
