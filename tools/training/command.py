"""What the training commands have in common."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch


def command(module: str, about: str | None) -> argparse.ArgumentParser:
    """The command line of ``python -m MODULE`` with the options of all training commands."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints and finished files")
    parser.add_argument("--cache", type=Path, default=Path(".cache/emoji"), help="downloaded and rendered images")
    parser.add_argument("--threads", type=int, help="CPU threads")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, after threads and logging were set and the folder ``--out`` was made."""
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_flush_denormal(True)
    if options.threads:
        torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    return options
