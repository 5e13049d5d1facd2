"""Replacing files on systems where other programs may hold them open."""

import time
from pathlib import Path

PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8)  # seconds between attempts; a virus scanner holds a new file for less than that


class FileInUseError(PermissionError):
    """A file cannot be replaced; ``strerror`` says why."""


def replace(part: Path, path: Path) -> None:
    """Move ``part`` to ``path``, in place of what is there.

    Windows refuses this while any program has one of the two open, if only to scan or to show it, so it is tried for
    1.5 seconds. Raises FileInUseError after that, and OSError for any other reason at once.
    """
    for pause in (*PAUSES, None):
        try:
            part.replace(path)
            return
        except PermissionError as error:
            if pause is None:
                raise FileInUseError(error.errno, "it is read-only, or open in another program", str(path)) from error
        time.sleep(pause)
