#!/usr/bin/env bash
# Generates images with the bundled model in a real headless ComfyUI: bash scripts/demo.sh [--help]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec "$PYTHON" "$SPECAR_ROOT/scripts/demo.py" --comfyui "$COMFYUI_PATH" "$@"
