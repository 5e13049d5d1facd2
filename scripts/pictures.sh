#!/usr/bin/env bash
# Makes the help pages' images and the templates' thumbnails in a real ComfyUI and Chromium: bash scripts/pictures.sh [--help]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec "$PYTHON" "$SPECAR_ROOT/scripts/pictures.py" --comfyui "$COMFYUI_PATH" "$@"
