#!/usr/bin/env bash
# Generates images with the bundled model in a real headless ComfyUI: bash tools/demo.sh [--help]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec "$PYTHON" "$SPECAR_ROOT/tools/demo.py" --comfyui "$COMFYUI_PATH" "$@"
