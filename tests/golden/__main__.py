"""The golden record: what every method generates with fixed seeds, to be the same after a change that changes no
behaviour.

    python -m tests.golden --write                  generate, and note it down in golden.json
    python -m tests.golden --check [--only TEXT]    generate again, and name the cases that differ

For one machine: write, change the code, check. Processors round in their own ways, so on another one fractions are
only compared by closeness, and a near tie may give another token. --only takes the cases whose names contain TEXT.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from comfyui_specar.api import Output
from comfyui_specar.tools.benchmarks.report import cpu_name

from .cases import cases
from .record import differences, entry

GOLDEN = Path(__file__).parent / "golden.json"


def machine() -> dict[str, Any]:
    """What rounding depends on."""
    return {
        "processor": cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def record(wanted: dict[str, Callable[[], Output]]) -> dict[str, Any]:
    """The entries of the cases."""
    found = {}
    for number, (name, draw) in enumerate(wanted.items(), 1):
        print(f"\r{number} of {len(wanted)}: {name}\033[K", end="", file=sys.stderr, flush=True)
        found[name] = entry(draw())
    print(file=sys.stderr)
    return found


def write(path: Path, entries: dict[str, Any]) -> None:
    """A line per case, so that a difference of versions can be read."""
    lines = (f"  {json.dumps(name)}: {json.dumps(content)}" for name, content in entries.items())
    path.write_text(
        f'{{\n "machine": {json.dumps(machine())},\n "cases": {{\n' + ",\n".join(lines) + "\n }\n}\n", encoding="utf-8"
    )


def check(path: Path, entries: dict[str, Any], whole: bool) -> list[str]:
    """The cases that differ from the record in a file, with what differs. whole: are these all that there are?"""
    known = json.loads(path.read_text(encoding="utf-8"))
    same = known["machine"] == machine()
    if not same:
        print(f"written on another machine ({known['machine']}): fractions are compared by closeness")
    found = [
        f"{name}: {'; '.join(unlike)}"
        for name in entries.keys() & known["cases"].keys()
        if (unlike := differences(known["cases"][name], entries[name], same))
    ]
    found += [f"{name}: not in the record" for name in entries.keys() - known["cases"].keys()]
    found += [f"{name}: no longer drawn" for name in known["cases"].keys() - entries.keys() if whole]
    return sorted(found)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true")
    action.add_argument("--check", action="store_true")
    parser.add_argument("--only", default="", metavar="TEXT")
    arguments = parser.parse_args()
    if arguments.write and arguments.only:
        parser.error("a record holds all cases: --only is for --check")
    torch.set_num_threads(1)
    entries = record({name: draw for name, draw in cases().items() if arguments.only in name})
    if arguments.write:
        write(GOLDEN, entries)
        return 0
    found = check(GOLDEN, entries, whole=not arguments.only)
    print("\n".join(found) or f"{len(entries)} cases are as recorded")
    return len(found) > 0


if __name__ == "__main__":
    sys.exit(main())
