#!/usr/bin/env bash
# Executes the Triton kernels on the CPU from what Triton's compiler makes of them, and looks for accesses out of bounds
# and races (see tests/support/execution.py): bash tools/ttsem.sh [pytest arguments]
# Without arguments: what the tests of the kernels call them with. The package ttsem needs Python 3.12 and a Triton of its
# own, so it has an environment of its own; without Python 3.12 the exit status is 77.
set -euo pipefail
unset COMFYUI_PATH # no ComfyUI is needed
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$SPECAR_ROOT"

find_python() {
    local candidate
    for candidate in python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "There is no Python 3.12 here, which ttsem needs (Debian: apt-get install python3.12 python3.12-venv)" >&2
    exit 77
}

use_ttsem_locked() {
    local requirements environment
    requirements="$(mktemp)"
    printf '%s\n' 'ttsem[triton]==0.1.0' hypothesis==6.168.5 pytest-timeout==2.4.0 >"$requirements"
    environment="$SPECAR_CACHE/ttsem-$(hash_of "$requirements" <("$BASE_PYTHON" -VV))"
    [ -f "$environment/.complete" ] || make_shared_environment "$environment" "$requirements"
    use_environment "$SPECAR_ROOT/.venv-ttsem" "$environment"
    rm -f "$requirements"
}

BASE_PYTHON="$(find_python)"
locked use_ttsem_locked
[ $# -gt 0 ] || set -- tests/ttsem tests/unit/test_kernels*.py
# The fixtures of other tests need packages that are not in this environment.
exec "$PYTHON" -m pytest --noconftest --hypothesis-profile=ci -k "not compile" "$@"
