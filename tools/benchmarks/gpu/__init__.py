"""Prove or break the pack on this GPU, in one command.

    python -m tools.benchmarks gpu --minutes 10    # or 3, or 30: stages that do not fit are cut short, and say so
    python -m tools.benchmarks gpu --minutes 10 --of 30    # the first ten of thirty; again: the next ten
    python -m tools.benchmarks gpu --dry           # without a GPU: all that can be tried on a CPU, on tiny models

It needs no installation: torch, Triton and a checkout that Python finds under the pack's name are enough.

    p=$(mktemp -d); ln -sfn "$PWD" "$p/comfyui_specar"; export PYTHONPATH="$p:$PWD"

Stages run in order, each in a process of its own. The report (JSON, and as a page) is written after every stage.
README.md beside this file explains stages and verdicts.
"""

from __future__ import annotations


def main() -> None:
    """The command."""
    from . import packages

    packages.go_on_without()
    from .command import main as command

    command()
