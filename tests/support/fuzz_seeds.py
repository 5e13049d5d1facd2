"""Sound files of every kind that the pack reads, and what is asked of a loader when they are not sound any more.

A loader may succeed; else it raises ValueError (CheckpointError) or FileNotFoundError, on purpose, with a message that
names what is wrong, soon, and without the memory that the file lies about.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

import comfyui_specar
import torch
from comfyui_specar import api
from comfyui_specar.limits.limits import FileError
from comfyui_specar.model_loaders.detect import find_image_decoder, load_encoder, stays_narrow
from comfyui_specar.model_loaders.families import emu3
from comfyui_specar.model_loaders.families import glm_image_diffusion as glm_image
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError
from comfyui_specar.reports.run_report import check_words
from comfyui_specar.samplers.trace import Source

from . import tiny, tiny_chameleon, tiny_emu3, tiny_glm_image, tiny_mar, tiny_simplear
from .fuzz_files import CANARY
from .tiny_family import declared

ROOT = Path(comfyui_specar.__file__).resolve().parent
LONGEST = 1500  # characters of a message
DRAWN = 4096  # tokens of an image that is worth starting here
WATCHED = ("os.", "subprocess.Popen", "socket.", "shutil.", "ctypes.dlopen", "urllib.")  # events of sys.addaudithook
HARMLESS = ("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.getxattr", "os.listxattr")
HUNGRY = ("allocate memory", "MemoryError", "not enough memory")


class EnoughError(Exception):
    """An image has been generated for long enough."""


@dataclass(frozen=True)
class Seed:
    """Sound files: ``write`` puts them into a folder, ``use`` loads what is there and does with it what users do."""

    write: Callable[[Path], None]
    use: Callable[[Path], None]


def use_model(folder: Path, name: str, prompt: str = "a red cat", storage: torch.dtype | None = None) -> None:
    """What Load AR Checkpoint, CLIP Text Encode, a sampler and VAE Decode do."""
    path = folder / name if name else folder
    model = api.load_model(path, storage=stays_narrow(path) or storage)
    draw(model, prompt)
    decoder = getattr(model, "image_decoder", None)
    if decoder is None and (found := find_image_decoder(path, model.family)):
        decoder = api.load_image_decoder(found)
    if decoder is not None:
        paint(decoder)


def draw(model, prompt: str, method=None) -> None:
    """The first rounds of an image."""
    rounds = 0

    def enough(progress) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 3:
            raise EnoughError

    rows, cols = model.grid
    if rows * cols > DRAWN:
        return  # an image so large is what the file asks for: it would be generated, and can be cancelled
    with contextlib.suppress(EnoughError):
        api.sample(model, model.encode_prompt(prompt), method=method, callback=enough)


def paint(decoder) -> None:
    decoder.decode(torch.zeros(1, decoder.channels, 2, 2))
    if hasattr(decoder, "dequantize"):
        decoder.decode(decoder.dequantize(torch.zeros(1, 2, 2, dtype=torch.int64)))


def use_decoder(folder: Path, name: str) -> None:
    paint(api.load_image_decoder(folder / name if name else folder))


def use_glm_image(folder: Path) -> None:
    decoder = glm_image.load(folder, torch.float32)
    tiny_glm_image.pixels_of(decoder, torch.zeros(1, 1, 1, dtype=torch.int64), 'a "b"', steps=1)
    glm_image.load_latent_encoder(folder).encode_latent(torch.zeros(1, 32, 32, 3))


def use_sources(folder: Path) -> None:
    path = folder / "vision_language_encoder"
    model = api.load_model(path)
    load_encoder(path, model)(model.image_prompts.seen(torch.full((70, 90, 3), 0.5), 32))


@cache
def target():
    """A model that drafters are loaded for."""
    folder = Path(mkdtemp())
    model = tiny.llamagen(folder, False)
    shutil.rmtree(folder)
    return model


def use_drafter(folder: Path, name: str) -> None:
    drafter = api.load_drafter(folder / name, target())
    draw(target(), "3", api.methods.DraftTree(drafter, api.structures.Chain(2)))


def use_trace(folder: Path) -> None:
    """What Load Trace and the nodes after it do."""
    trace = api.load_trace(folder / "trace.safetensors")
    check_words(trace, "trace.safetensors")
    json.dumps(trace.report())
    for name in trace.positions:
        trace.grid(name)
    [Source(int(value)) for value in trace.positions["source"].unique()]


def use_ranks(folder: Path) -> None:
    tokenizer = emu3.open_tokenizer(folder / "model.safetensors", [])
    tokenizer.ids("a red cat")
    tokenizer.id("<|image token|>"), len(tokenizer)


def eagle(folder: Path) -> None:
    tiny.write_eagle(folder / "eagle", input_type=None, grid=[4, 4], target="llamagen-c2i")


def small(folder: Path) -> None:
    tiny.write_llamagen(folder / "small.safetensors", False)


def trace(folder: Path) -> None:
    api.save_trace(api.sample(target(), target().encode_prompt("3")).trace, folder / "trace.safetensors")


SEEDS = {
    **{
        name: Seed(files.write, partial(use_model, name=files.name, prompt=files.prompt, storage=files.storage))
        for name, files in declared("FILES").items()
    },
    "Emu3's ranks": Seed(tiny_emu3.write_ranks, use_ranks),
    "EAGLE drafter": Seed(eagle, partial(use_drafter, name="eagle")),
    "small model as drafter": Seed(small, partial(use_drafter, name="small.safetensors")),
    "VQ": Seed(lambda folder: torch.save(tiny.vq_weights(), folder / "vq.pt"), partial(use_decoder, name="vq.pt")),
    "VQGAN": Seed(lambda folder: tiny_chameleon.write_vqgan(folder / "vq.ckpt"), partial(use_decoder, name="vq.ckpt")),
    "MoVQ": Seed(tiny_emu3.write_decoder, partial(use_decoder, name="")),
    "Cosmos": Seed(lambda folder: tiny_simplear.write_cosmos(folder, suffix=".jit"), partial(use_decoder, name="")),
    "KL": Seed(tiny_mar.write_kl_vae, partial(use_decoder, name="kl16.safetensors")),
    "GLM-Image's decoder": Seed(tiny_glm_image.write_decoder, use_glm_image),
    "GLM-Image's encoder": Seed(tiny_glm_image.write, use_sources),
    "trace": Seed(trace, use_trace),
}


@dataclass(frozen=True)
class Outcome:
    """error: the type that was raised, None if nothing was; problem: what it should not have done, else None."""

    error: str | None
    message: str
    problem: str | None


class Watch:
    """What Python does while this lasts that no loader may: run, write or send something."""

    on: bool = False
    seen: list[str]

    def __enter__(self) -> Watch:
        self.on, self.seen = True, []
        return self

    def __exit__(self, *_error: object) -> None:
        self.on = False

    def hear(self, event: str, arguments: tuple) -> None:
        if not self.on or "__pycache__" in str(arguments[:1]):
            return
        flags = arguments[2] if event == "open" and isinstance(arguments[2], int) else 0
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) or event.startswith(WATCHED) and event not in HARMLESS:
            self.seen.append(f"{event} {arguments!r:.200}")


_watch = Watch()
sys.addaudithook(_watch.hear)


def examine(seed: Seed, folder: Path) -> Outcome:
    """Use what is in a folder, and judge what happens."""
    with _watch:
        outcome = _examined(seed, folder)
    return replace(outcome, problem=outcome.problem or f"did {_watch.seen[0]}") if _watch.seen else outcome


def _examined(seed: Seed, folder: Path) -> Outcome:
    names = {part for path in (folder, *folder.rglob("*")) for part in (path.name, path.stem)}
    try:
        seed.use(folder)
    except Exception as error:
        outcome = Outcome(type(error).__name__, str(error)[: 2 * LONGEST], fault_of(error, names))
    except BaseException as error:  # a panic of a library in Rust is none of Python's exceptions
        if isinstance(error, KeyboardInterrupt):
            raise
        outcome = Outcome(type(error).__name__, str(error)[: 2 * LONGEST], "ends the process")
    else:
        outcome = Outcome(None, "", None)
    if (folder / CANARY).exists():
        return Outcome(outcome.error, outcome.message, "ran what is in the file")
    return outcome


def fault_of(error: Exception, names: set[str]) -> str | None:
    """What is wrong with an exception; None for one that users can act upon."""
    if type(error) not in (ValueError, FileNotFoundError, FileError, CheckpointError):
        return f"raised {type(error).__name__} in {place_of(error)}"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or any(word in str(cause) for word in HUNGRY):
            return f"asked for the memory first, in {place_of(cause)}"
        cause = cause.__cause__ or cause.__context__
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if ROOT not in Path(frame.filename).resolve().parents or not (frame.line or "").startswith("raise"):
        return f"did not raise on purpose, in {place_of(error)}"
    if len(str(error)) > LONGEST:
        return f"said {len(str(error))} characters, in {place_of(error)}"
    if not any(name in str(error) for name in names):
        return f"named no file, in {place_of(error)}"
    return None


def place_of(error: BaseException) -> str:
    """The innermost line of this pack that an exception went through."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "model_loaders" in frame.filename or "samplers" in frame.filename or "/models/" in frame.filename
    ]
    frame = (frames or traceback.extract_tb(error.__traceback__))[-1]
    return f"{Path(frame.filename).name}:{frame.name}"
