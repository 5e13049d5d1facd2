"""Which files of a folder this process has mapped into its memory."""

import gc
import sys
from pathlib import Path

import pytest


def maps(folder: Path) -> set[str]:
    """Names of the files in a folder that this process has mapped."""
    if sys.platform != "linux":
        pytest.skip("only Linux lists maps in a file")
    gc.collect()
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {Path(line.split(maxsplit=5)[5]).name for line in lines if f"{folder}/" in line}
