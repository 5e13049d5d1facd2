"""Measured costs of passes in a file of ComfyUI's user folder: the same seed gives the same image after a restart."""

from __future__ import annotations

import json
import logging
import re
from collections import UserDict
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from uuid import uuid4

import folder_paths

from ...limits.limits import SETTINGS, FileError, parse_json
from ...limits.replacing import replace
from ...samplers.drafts.costs import PassCosts

log = logging.getLogger(__name__)
FILE = "specar/pass_costs.json"  # in the user folder
KEY = re.compile("[0-9a-f]{16}")


class KeptCosts(UserDict[str, PassCosts]):
    """A dict whose items are those of a file, to which other servers may add theirs. What is no such file is replaced;
    one that cannot be read or written is left as it is."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        self._read()

    def __contains__(self, key: object) -> bool:
        if key not in self.data:
            self._read()
        return key in self.data

    def __setitem__(self, key: str, costs: PassCosts) -> None:
        self.data[key] = costs
        part = self.path.with_suffix(f".{uuid4().hex}.part")
        try:
            self._merge()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps({key: asdict(each) for key, each in self.data.items()}, indent=1), "utf-8")
            replace(part, self.path)
        except OSError as error:
            log.warning("%s cannot be written, so the next start measures costs of passes again: %s", self.path, error)
            with suppress(OSError):
                part.unlink()

    def _read(self) -> None:
        try:
            self._merge()
        except OSError as error:
            log.warning("%s cannot be read, so costs of passes are measured again: %s", self.path, error)

    def _merge(self) -> None:
        """Add what the file has and this process has not. Raises OSError for one that cannot be read."""
        try:
            self.data = read_costs(self.path) | self.data
        except FileNotFoundError:
            pass
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("%s is damaged, so costs of passes are measured again: %s", self.path, error)


def read_costs(path: Path) -> dict[str, PassCosts]:
    """The items of a file. Raises OSError for one that cannot be read, and ValueError, TypeError, KeyError or
    AttributeError for one that is not of costs."""
    if (size := path.stat().st_size) > SETTINGS:
        raise FileError(f"it has {size} bytes, but costs of passes have {SETTINGS} at most")
    found = parse_json(path.read_bytes())
    if strange := [key for key in found if not KEY.fullmatch(key)]:
        raise FileError(f"it has the entry {strange[0]!r:.40}")
    return {key: PassCosts.of(costs) for key, costs in found.items()}


def load_costs() -> KeptCosts:
    """Those of this ComfyUI."""
    return KeptCosts(Path(folder_paths.get_user_directory(), FILE))
