#!/usr/bin/env bash
# Makes the screenshots of docs/getting-started.md in a real ComfyUI and Chromium: bash tools/screenshots.sh [--help]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec "$PYTHON" "$SPECAR_ROOT/tools/screenshots.py" --comfyui "$COMFYUI_PATH" "$@"
