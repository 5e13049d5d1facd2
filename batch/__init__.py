"""Many images from one list: `python -m comfyui_specar.batch jobs.csv --server URL`; see docs/batches.md."""
