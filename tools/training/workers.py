"""Runs the model stage in one process, or in several that share each batch."""

import logging
import tempfile
from pathlib import Path

import torch

from . import autoregressive, resume, tokenizer
from .captions import Captions
from .data import load_images
from .loop import Team
from .settings import Setting


def train_model(
    setting: Setting, cache: Path, out: Path, minutes: float | None, processes: int, begin: Path | None = None
) -> None:
    """Trains ``out``/model.pt with the tokenizer of ``out``/tokenizer.pt; processes meet through a temporary file.

    begin: folder of an exported model to start from.
    """
    if processes == 1:
        _work(0, setting, cache, out, minutes, begin, 1, "")
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments = (setting, cache, out, minutes, begin, processes, f"{folder}/meeting")
        torch.multiprocessing.spawn(_work, arguments, processes)


def _work(
    rank: int,
    setting: Setting,
    cache: Path,
    out: Path,
    minutes: float | None,
    begin: Path | None,
    size: int,
    meeting: str,
) -> None:
    if size > 1:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
        torch.set_flush_denormal(True)
        torch.set_num_threads(1)
    images = load_images(cache)
    captions = Captions(setting, images.words)
    vq = tokenizer.restore(setting, out)
    weights = begin and resume.autoregressive(begin, captions)
    autoregressive.train(setting, images, captions, vq, out, minutes, Team(rank, size, meeting), weights)
