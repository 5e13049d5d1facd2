"""Measured costs of passes in a file of ComfyUI's user folder: the same seed gives the same image after a restart."""

from __future__ import annotations

import json
import logging
import os
from collections import UserDict
from dataclasses import asdict
from pathlib import Path

import folder_paths

from ...samplers.drafts.costs import PassCosts

log = logging.getLogger(__name__)
FILE = "specar/pass_costs.json"  # in the user folder


class KeptCosts(UserDict[str, PassCosts]):
    """A dict whose items are those of a file. Without a legible file it is empty; one that cannot be written is left as
    it is."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            self.data = {key: PassCosts.of(costs) for key, costs in found.items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("%s cannot be read, so costs of passes are measured again: %s", path, error)

    def __setitem__(self, key: str, costs: PassCosts) -> None:
        super().__setitem__(key, costs)
        text = json.dumps({key: asdict(costs) for key, costs in self.data.items()}, indent=1)
        part = self.path.with_suffix(f".{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text, encoding="utf-8")
            os.replace(part, self.path)
        except OSError as error:
            log.warning("%s cannot be written, so the next start measures costs of passes again: %s", self.path, error)


def kept_costs() -> KeptCosts:
    """Those of this ComfyUI."""
    return KeptCosts(Path(folder_paths.get_user_directory(), FILE))
