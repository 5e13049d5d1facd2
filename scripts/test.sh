#!/usr/bin/env bash
# Runs every check of the project: bash scripts/test.sh [pytest arguments]
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

selection=()
if find_chromium >/dev/null || install_chromium; then
    SPECAR_CHROMIUM="$(find_chromium)"
    export SPECAR_CHROMIUM
else
    echo "BROWSER TESTS LEFT OUT: no Chromium here, and it could not be installed (Debian: apt-get install chromium, as root)"
    selection=(-m "not browser")
fi

status=0
"$PYTHON" -m ruff check . || status=1
"$PYTHON" -m pytest "${selection[@]}" "$@" || status=1
exit "$status"
