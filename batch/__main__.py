"""`python -m comfyui_specar.batch`, or, where the pack is not installed, `python custom_nodes/ComfyUI-SpecAR/batch`."""

import importlib.util
import sys
from importlib import import_module
from pathlib import Path

PACKAGE = "comfyui_specar"
NEEDED = ("aiohttp", "pydantic", "tqdm")  # ComfyUI has them


def main() -> int:
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        sys.stderr.write(
            f"error: this Python has no {' and no '.join(missing)}. Use the one that ComfyUI runs with, "
            f"or: pip install {' '.join(missing)}\n"
        )
        return 2
    if __package__ == f"{PACKAGE}.batch":
        from .cli import main as run
    else:
        run = import_as_package().main
    return run()


def import_as_package():
    """This folder's cli module, as a part of the pack although its folder has another name."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]  # its files are not top-level modules
    root = here.parent
    spec = importlib.util.spec_from_file_location(PACKAGE, root / "__init__.py", submodule_search_locations=[str(root)])
    assert spec and spec.loader  # of a file whose name ends in .py
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[PACKAGE])
    return import_module(f"{PACKAGE}.batch.cli")


if __name__ == "__main__":
    sys.exit(main())
