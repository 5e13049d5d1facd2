"""Sound files of every kind that the pack reads, and what is asked of a loader when they are not sound any more.

A loader may succeed; else it raises ValueError (CheckpointError) or FileNotFoundError, on purpose, with a message that
names what is wrong, soon, and without the memory that the file lies about.
"""

from __future__ import annotations

import json
import shutil
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

import comfyui_specar
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.detect import find_image_decoder, stays_fp8
from comfyui_specar.model_loaders.families import emu3
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError
from comfyui_specar.model_loaders.text.tiktoken_file import RankTokenizer
from comfyui_specar.models.kl_vae import KLConfig, KLModel
from comfyui_specar.reports.run_report import check_words
from comfyui_specar.samplers.trace import Source
from safetensors.torch import save_file

from . import tiny, tiny_chameleon, tiny_emu3, tiny_harmon, tiny_janus, tiny_mar, tiny_simplear, tiny_t5, tiny_xar
from .fuzz_files import CANARY

ROOT = Path(comfyui_specar.__file__).resolve().parent
LONGEST = 1500  # characters of a message
DRAWN = 4096  # tokens of a picture that is worth starting here
HUNGRY = ("allocate memory", "MemoryError", "not enough memory")
KL = KLConfig(channels=16, ch_mult=(1, 1), base_channels=32, num_res_blocks=1)


class EnoughError(Exception):
    """A picture has been drawn for long enough."""


@dataclass(frozen=True)
class Seed:
    """Sound files: ``write`` puts them into a folder, ``use`` loads what is there and does with it what users do."""

    write: Callable[[Path], None]
    use: Callable[[Path], None]


def use_model(folder: Path, name: str, prompt: str = "a red cat", storage: torch.dtype | None = None) -> None:
    """What Load AR Checkpoint, CLIP Text Encode, a sampler and VAE Decode do."""
    path = folder / name if name else folder
    model = api.load_model(path, storage=torch.float8_e4m3fn if stays_fp8(path) else storage)
    draw(model, prompt)
    decoder = getattr(model, "image_decoder", None)
    if decoder is None and (found := find_image_decoder(path, model.family)):
        decoder = api.load_image_decoder(found)
    if decoder is not None:
        paint(decoder)


def draw(model, prompt: str, method=None) -> None:
    """The first rounds of a picture."""
    rounds = 0

    def enough(progress) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 3:
            raise EnoughError

    rows, cols = model.grid
    if rows * cols > DRAWN:
        return  # a picture so large is what the file asks for: it would be drawn, and can be cancelled
    try:
        api.sample(model, model.encode_prompt(prompt), method=method, callback=enough)
    except EnoughError:
        pass


def paint(decoder) -> None:
    decoder.decode(torch.zeros(1, decoder.channels, 2, 2))
    if hasattr(decoder, "decode_tokens"):
        decoder.decode_tokens(torch.zeros(1, 2, 2, dtype=torch.int64))


def use_decoder(folder: Path, name: str) -> None:
    paint(api.load_image_decoder(folder / name if name else folder))


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
    """What Load Trace and the nodes behind it do."""
    trace = api.load_trace(folder / "trace.safetensors")
    check_words(trace, "trace.safetensors")
    json.dumps(trace.report())
    for name in trace.positions:
        trace.grid(name)
    [Source(int(value)) for value in trace.positions["source"].unique()]


def use_ranks(folder: Path) -> None:
    tokenizer = RankTokenizer(folder / "emu3.tiktoken", emu3._PATTERN, emu3._RANKED)
    tokenizer.ids("a red cat")
    tokenizer.id("<|image token|>"), len(tokenizer)


def llamagen_captions(folder: Path) -> None:
    tiny.write_llamagen(folder / "t2i_XL_stage2_512.safetensors", True)
    torch.save(tiny.vq_weights(), folder / "vq_ds16_t2i.pt")
    tiny_t5.write(folder / "flan-t5-xl")


def llamagen_words(folder: Path) -> None:
    """In the layout of the bundled model."""
    defaults = {"cfg": 2.0, "temperature": 1.0, "top_k": 8, "top_p": 1.0}
    tiny.write_llamagen(folder / "model.safetensors", True, caption_slots=tiny.SLOTS, defaults=defaults,
                        pixels_per_token=2)
    save_file(tiny.vq_weights(), str(folder / "vq.safetensors"), metadata={"specar": json.dumps({"margin": 1})})
    write_words(folder, tiny.CAPTION)


def write_words(folder: Path, width: int) -> None:
    words = ["red", "cat", "bg_blue"]
    header = {"words": words, "stop_words": ["a"], "synonyms": {"crimson": "red"}, "backgrounds": ["blue"]}
    save_file({"word_embeddings.weight": tiny.fill("words embedding", (3, width))},
              str(folder / "text_encoder.safetensors"), metadata={"specar": json.dumps(header)})


def llamagen_classes(folder: Path) -> None:
    """A pickle with config.json, as conversions have them."""
    torch.save({"model": tiny.llamagen_weights(False), "steps": 5}, folder / "pytorch_model.bin")
    settings = {"num_attention_heads": tiny.HEADS, "block_size": 16, "rms_norm_eps": 1e-5, "model_type": "llamagen"}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")


def simplear(folder: Path) -> None:
    tiny_simplear.write(folder, decoder=False)
    tiny_simplear.write_cosmos(folder / tiny_simplear.DECODER, ("decoder",), ".jit")


def mar(folder: Path) -> None:
    config = replace(tiny_mar.MAR, encoder_layers=1, conditions=tiny.CAPTION, captions=True)
    defaults = {"cfg": 2.0, "steps": 5, "iterations": 4}
    tiny_mar.write_mar(folder / "model.safetensors", config, caption_slots=4, defaults=defaults)
    write_words(folder, tiny.CAPTION)
    kl_vae(folder / "kl16.safetensors")


def kl_vae(file: Path) -> None:
    torch.manual_seed(0)
    save_file(KLModel(KL).state_dict(), str(file))


def mar_pickle(folder: Path) -> None:
    """No metadata tells the heads of this tiny one: it is refused, though never for another reason while sound."""
    torch.save({"model": tiny_mar.mar_weights(), "model_ema": tiny_mar.mar_weights()}, folder / "mar.pth")


def harmon(folder: Path) -> None:
    tiny_harmon.write_harmon(folder / "harmon.safetensors")
    tiny_harmon.write_tokenizer(folder / "qwen25_tokenizer")


def xar(folder: Path) -> None:
    metadata = {"heads": tiny_xar.HEADS, "defaults": {"steps": 3}}
    save_file(tiny_xar.xar_weights(blocks=1), str(folder / "xar.safetensors"), {"specar": json.dumps(metadata)})


def eagle(folder: Path) -> None:
    tiny.write_eagle(folder / "eagle", input_type=None, grid=[4, 4], target="llamagen-c2i")


def small(folder: Path) -> None:
    tiny.write_llamagen(folder / "small.safetensors", False)


def trace(folder: Path) -> None:
    api.save_trace(api.sample(target(), target().encode_prompt("3")).trace, folder / "trace.safetensors")


SEEDS = {
    "LlamaGen with T5": Seed(llamagen_captions, partial(use_model, name="t2i_XL_stage2_512.safetensors")),
    "LlamaGen with words": Seed(llamagen_words, partial(use_model, name="")),
    "LlamaGen of classes": Seed(llamagen_classes, partial(use_model, name="", prompt="3")),
    "Janus-Pro": Seed(partial(tiny_janus.write, shards=2), partial(use_model, name="")),
    "Janus-Pro as released": Seed(partial(tiny_janus.write, original=True, pickled=True), partial(use_model, name="")),
    "Janus-Pro in int8": Seed(tiny_janus.write, partial(use_model, name="", storage=torch.int8)),
    "SimpleAR": Seed(simplear, partial(use_model, name="")),
    "Lumina-mGPT": Seed(partial(tiny_chameleon.write, kind="lumina"), partial(use_model, name="Lumina-mGPT-tiny")),
    "Anole": Seed(partial(tiny_chameleon.write, kind="anole", shards=3), partial(use_model, name="Anole-tiny-hf")),
    "Emu3": Seed(tiny_emu3.write, partial(use_model, name="")),
    "Emu3's ranks": Seed(tiny_emu3.write_ranks, use_ranks),
    "MAR": Seed(mar, partial(use_model, name="")),
    "MAR as released": Seed(mar_pickle, partial(use_model, name="mar.pth", prompt="3")),
    "Harmon": Seed(harmon, partial(use_model, name="harmon.safetensors")),
    "xAR": Seed(xar, partial(use_model, name="xar.safetensors", prompt="3")),
    "EAGLE drafter": Seed(eagle, partial(use_drafter, name="eagle")),
    "small model as drafter": Seed(small, partial(use_drafter, name="small.safetensors")),
    "VQ": Seed(lambda folder: torch.save(tiny.vq_weights(), folder / "vq.pt"), partial(use_decoder, name="vq.pt")),
    "VQGAN": Seed(lambda folder: tiny_chameleon.write_vqgan(folder / "vq.ckpt"), partial(use_decoder, name="vq.ckpt")),
    "MoVQ": Seed(tiny_emu3.write_decoder, partial(use_decoder, name="")),
    "Cosmos": Seed(lambda folder: tiny_simplear.write_cosmos(folder, suffix=".jit"), partial(use_decoder, name="")),
    "KL": Seed(lambda folder: kl_vae(folder / "kl16.safetensors"), partial(use_decoder, name="kl16.safetensors")),
    "trace": Seed(trace, use_trace),
}


@dataclass(frozen=True)
class Outcome:
    """error: the type that was raised, None if nothing was; problem: what it should not have done, else None."""

    error: str | None
    message: str
    problem: str | None


def examine(seed: Seed, folder: Path) -> Outcome:
    """Use what is in a folder, and judge what happens."""
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
    if type(error) not in (ValueError, FileNotFoundError, CheckpointError):
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
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if "model_loaders" in frame.filename or "samplers" in frame.filename or "/models/" in frame.filename]
    frame = (frames or traceback.extract_tb(error.__traceback__))[-1]
    return f"{Path(frame.filename).name}:{frame.name}"
