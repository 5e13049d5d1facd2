"""Fixtures shared by the unit tests."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from comfyui_specar import files


@pytest.fixture
def locked(monkeypatch) -> Callable[[dict[str, int]], Counter]:
    """locked({"a.png": 2}): the first two attempts to replace a file of that name fail as they do on Windows while
    another program has it open. Returns how often each file was tried."""
    replace, attempts = Path.replace, Counter()

    def install(refusals: dict[str, int]) -> Counter:
        def refusing(part: Path, target: Path) -> Path:
            name = Path(target).name
            attempts[name] += 1
            if attempts[name] <= refusals.get(name, 0):
                raise PermissionError(13, "Permission denied", str(part), None, str(target))
            return replace(part, target)

        monkeypatch.setattr(Path, "replace", refusing)
        monkeypatch.setattr(files, "PAUSES", (0.001,) * len(files.PAUSES))
        return attempts

    return install
