#!/usr/bin/env bash
# Draws the README's animation and the contact sheets, and in a real ComfyUI and Chromium the help pages' images, the
# templates' thumbnails and the screenshots: bash tools/pictures.sh [--help]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec "$PYTHON" "$SPECAR_ROOT/tools/pictures.py" --comfyui "$COMFYUI_PATH" "$@"
