"""What the families' workflows ask for, tiny and with random weights: in the released layouts, under the names that the
workflows use. They generate 4 x 4 tokens of 32 codes, so a workflow's image size, top-k and window do not fit them."""

from __future__ import annotations

from pathlib import Path

from .tiny_family import declared

SMALL = {"width": 0, "height": 0, "top_k": 0, "window": 8}  # instead of the real models' sizes: 0 is the tiny one's own
REFINED = "10 Janus-Pro, refined with SDXL (download)"  # with models of core nodes, too
CAPTIONED = "29 Describe an image (download)"  # generates no image
WORKFLOWS = declared("WORKFLOWS")
FAMILIES = {name: workflow.write for name, workflow in WORKFLOWS.items()}
CHANGES = {name: workflow.changes for name, workflow in WORKFLOWS.items()}


class Placed:
    """Files put into ComfyUI's models folder, which can be taken away again. Folders stay: ComfyUI's lists of files
    fail once one of them is gone."""

    def __init__(self, models: Path):
        self.models = models
        self.before = self._files()

    def _files(self) -> set[Path]:
        return {path for path in self.models.rglob("*") if path.is_file()}

    def remove(self) -> None:
        for path in self._files() - self.before:
            path.unlink()
