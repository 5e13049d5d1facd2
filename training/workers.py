"""Runs the model stage in one process, or in several that share every batch."""

import logging
import tempfile
from pathlib import Path

import torch

from . import autoregressive, tokenizer
from .captions import Captions
from .data import load_pictures
from .loop import Team
from .settings import Setting


def train_model(setting: Setting, cache: Path, out: Path, minutes: float | None, processes: int) -> None:
    """Trains ``out``/model.pt with the tokenizer of ``out``/tokenizer.pt; processes meet through a temporary file."""
    if processes == 1:
        _work(0, setting, cache, out, minutes, 1, "")
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments = (setting, cache, out, minutes, processes, f"{folder}/meeting")
        torch.multiprocessing.spawn(_work, arguments, processes)


def _work(rank: int, setting: Setting, cache: Path, out: Path, minutes: float | None, size: int, meeting: str) -> None:
    if size > 1:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
        torch.set_flush_denormal(True)
        torch.set_num_threads(1)
    pictures = load_pictures(cache)
    captions = Captions(setting, pictures.words)
    vq = tokenizer.restore(setting, out)
    autoregressive.train(setting, pictures, captions, vq, out, minutes, Team(rank, size, meeting))
