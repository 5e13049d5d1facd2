"""AR Model Info: a summary of a loaded model, as numbers and as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from comfy_api.latest import io

from ..kernels.linear import stored_as
from ..model_loaders.declarations import Family
from ..model_loaders.detect import family_of, load_drafter, missing_decoder
from ..model_loaders.families import RELEASED_DECODERS, eagle
from ..model_loaders.files.checkpoint import CheckpointError, outline, weight_file
from ..models.ar_model import DiscreteModel
from ..models.continuous_model import ContinuousBase
from ..models.image_decoder import Autoencoder
from ..models.memory import word_embedding
from ..models.requests import image_defaults
from .comfy_runtime import folders, models
from .comfy_runtime.memory import total_memory
from .memory_table import MemoryRow, memory_table
from .schema import schema
from .search import FAMILIES
from .sockets import ARModel

SHOWN_SIZES = 24
LARGEST_TO_LOAD = 64 * 2**20  # bytes: smaller drafters are loaded to check whether they fit


@dataclass(frozen=True)
class ModelSummary:
    """bytes_by_dtype: of the weights without the word embeddings, which the nodes keep in main memory.

    caches: bytes of the key/value caches per image of the default size, without and with guidance (models of token ids
    only; one number for models without guidance). int8_cache: whether these are stored in int8. prompt: the prompt
    tokens that they include. picture: rows and columns of image tokens; sequence: their number, special tokens and
    those of a preview included; preview: how many of the latter. sizes: (width, height) in pixels, the default first.
    specials: ids of the special tokens by what they mark. longest: maximum tokens of prompt and image together.
    image_defaults: those of prompts with images that differ. decoder: name of the image decoder, or of the node that
    decodes instead.
    """

    family: str
    tokens: str
    parameters: int
    bytes_by_dtype: dict[str, int]
    bytes_of_words: int
    codes: int | None
    specials: dict[str, list[int]]
    picture: tuple[int, int]
    sequence: int
    preview: int
    caches: tuple[int, ...] | None
    int8_cache: bool
    prompt: int
    longest: int | None
    sizes: list[tuple[int, int]]
    defaults: dict[str, Any]
    image_defaults: dict[str, Any]
    decoder: str | None
    decoder_bytes: int
    drafters: list[str]


def summarize(
    model: DiscreteModel | ContinuousBase, decoder: Autoencoder | None = None, drafters: Iterable[str] = ()
) -> ModelSummary:
    """The summary of a model, its image decoder, and the names of compatible drafters."""
    side, (rows, cols) = model.pixels_per_token, model.grid
    discrete = isinstance(model, DiscreteModel)
    embedding = word_embedding(model) if discrete else None
    words = None if embedding is None else embedding.weight  # on the compute device, or offloaded
    weights = [weight for weight in model.parameters() if weight is not words]
    by_dtype: dict[str, int] = {}
    for weight in weights:
        name = stored_as(weight) or str(weight.dtype).removeprefix("torch.")
        by_dtype[name] = by_dtype.get(name, 0) + weight.numel() * weight.element_size()
    caches, specials, prompt = None, {}, 0
    if discrete:
        prompt = model.usual_prompt
        branches = (False, True)[: 1 + model.guidance]
        caches = tuple(model.kv_bytes(1, model.layout(), 0, guided, prompt) for guided in branches)
        ids = list(range(model.vocab, model.vocab_total))
        specials = {"end of a row": ids[: model.row_ends], "end of the image": ids[model.row_ends :]}
    defaults = asdict(model.defaults)
    others = asdict(image_defaults(model)) if discrete else {}
    grids = [model.grid, *(grid for grid in model.grids if grid != model.grid)] if discrete else [model.grid]
    return ModelSummary(
        family=model.family,
        tokens="ids" if discrete else "vectors",
        parameters=sum(w.numel() for w in [*weights, *([] if words is None else [words])]),
        bytes_by_dtype=by_dtype,
        bytes_of_words=0 if words is None else words.numel() * words.element_size(),
        codes=model.vocab if discrete else None,
        specials={name: ids for name, ids in specials.items() if ids},
        picture=(rows, cols),
        sequence=model.layout().length if discrete else rows * cols,
        preview=model.layout().lead if discrete else 0,
        caches=caches,
        int8_cache=discrete and model.int8_cache,
        prompt=prompt,
        longest=model.longest if discrete else None,
        sizes=[(c * side, r * side) for r, c in grids],
        defaults=defaults,
        image_defaults={key: value for key, value in others.items() if value != defaults[key]},
        decoder=decoder.name if decoder else RELEASED_DECODERS[model.family].node or None,
        drafters=list(drafters),
        decoder_bytes=sum(p.numel() * p.element_size() for p in decoder.module.parameters()) if decoder else 0,
    )


def report(name: str, summary: ModelSummary, missing: str, memory: Sequence[str] = ()) -> str:
    """The summary as text. missing: the line for a model without an image decoder. memory: lines of the table."""
    weights = ", ".join(f"{in_units(number)} {dtype}" for dtype, number in summary.bytes_by_dtype.items())
    rows, cols = summary.picture
    lines = [
        f"{name}: {summary.family}, {summary.parameters / 1e6:,.1f} million parameters, tokens are {summary.tokens}",
        f"weights on the compute device: {weights}",
    ]
    if summary.bytes_of_words:
        lines.append(f"word embeddings, in main memory: {in_units(summary.bytes_of_words)}")
    codes = f" of {summary.codes} codes" if summary.codes else ""
    specials = ", ".join(f"{what} ({', '.join(map(str, ids))})" for what, ids in summary.specials.items())
    preview = f" with a preview of {summary.preview}" if summary.preview else ""
    lines.append(
        f"an image: {rows} rows of {cols} tokens{codes}"
        + (
            f", {summary.sequence} in all with special tokens: {specials}"
            if specials
            else f", {summary.sequence} in all{preview}"
        )
    )
    if summary.caches:
        cache = "KV cache per image in int8" if summary.int8_cache else "KV cache per image"
        sizes = ", with guidance ".join(map(in_units, summary.caches))
        lines.append(f"{cache}, after {summary.prompt} prompt tokens: {sizes}")
    lines += memory
    if summary.longest:
        lines.append(f"prompt and image together: at most {summary.longest} tokens")
    shown = ", ".join(f"{width} x {height}" for width, height in summary.sizes[:SHOWN_SIZES])
    more = len(summary.sizes) - SHOWN_SIZES
    lines.append(f"sizes (width x height): {shown}" + (f" and {more} more" if more > 0 else ""))
    lines.append(f"default settings: {settings_of(summary.defaults)}")
    if summary.image_defaults:
        lines.append(f"with images in the prompt: {settings_of(summary.image_defaults)}")
    decoder = f"image decoder: {summary.decoder}"
    if summary.decoder_bytes:
        decoder += f" ({in_units(summary.decoder_bytes)})"
    lines.append(decoder if summary.decoder else missing)
    lines.append("compatible drafters: " + (", ".join(summary.drafters) or "none"))
    return "\n".join(lines)


def settings_of(params: Mapping[str, Any]) -> str:
    """Sampling parameters as text."""
    given = {key: value for key, value in params.items() if value is not None}
    return ", ".join(
        f"{key} {' then '.join(value) if isinstance(value, tuple) else value}" for key, value in given.items()
    )


def memory_lines(rows: Iterable[MemoryRow], device: torch.device, guided: bool) -> list[str]:
    """The memory table as text."""
    total = total_memory(device)
    has = "" if math.isinf(total) else f" of {in_units(int(total))}"
    image = "one image with guidance" if guided else "one image"
    return [
        f"memory by dtype on {device}{has} (weights + KV cache of {image}, calculated):",
        *(
            f"  {row.dtype}: {in_units(row.weights)} + {in_units(row.cache)} = {in_units(row.weights + row.cache)}"
            + (f", {row.verdict}" if row.verdict else "")
            for row in rows
        ),
    ]


def in_units(number: int) -> str:
    """A number of bytes in KiB, MiB or GiB."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20)):
        if number >= step:
            return f"{number / step:.2f} {unit}"
    return f"{number / 1024:.1f} KiB"


def compatible(drafters: Mapping[str, Path], model: DiscreteModel | ContinuousBase, family: Family | None) -> list[str]:
    """Names of the drafters that fit a model of this family. Small ones are loaded; of larger ones only the names and
    shapes of the tensors are checked."""
    return [name for name, path in drafters.items() if _is_compatible(path, model, family)]


def _is_compatible(path: Path, model: DiscreteModel | ContinuousBase, family: Family | None) -> bool:
    try:
        checkpoint = outline(weight_file(path))
        if sum(t.numel() * t.element_size() for t in checkpoint.tensors.values()) <= LARGEST_TO_LOAD:
            load_drafter(path, model, device="cpu")
        elif not eagle.recognise(checkpoint.tensors):
            smaller = sum(t.numel() for t in checkpoint.tensors.values()) < sum(p.numel() for p in model.parameters())
            return smaller and family is not None and family_of(checkpoint) is family
        elif isinstance(model, DiscreteModel):
            eagle.block_config(checkpoint.tensors, model, path)
            eagle.check_target(checkpoint.settings | checkpoint.metadata, model, path)
        else:
            return False
    except CheckpointError:
        return False
    return True


class ModelInfo(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARModelInfo",
            category="SpecAR/loaders",
            search=("model information", "sizes", "parameters", *FAMILIES),
            inputs=[ARModel.Input("model")],
            outputs=[io.String.Output("info")],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, model: models.LoadedModel) -> io.NodeOutput:
        path = folders.resolve(model.name, folders.MODELS)
        family = family_of(outline(weight_file(path)))
        drafters = {name: folders.resolve(name, folders.DRAFTERS) for name in folders.drafter_choices()}
        decoder = model.decoder and model.decoder.decoder
        summary = summarize(model.model, decoder, compatible(drafters, model.model, family))
        device, rows, lines = model.patcher.load_device, [], []
        if isinstance(model.model, DiscreteModel):
            rows = memory_table(model.model, models.auto_dtype(device, path), device)
            lines = memory_lines(rows, device, model.model.guidance)
        lines = [*([f"dtype {model.choice}"] if model.choice else []), *lines]
        text = report(model.name, summary, missing_decoder(model.name, model.model.family), lines)
        about = asdict(summary) | {"memory": [asdict(row) for row in rows], "choice": model.choice}
        return io.NodeOutput(text, ui={"text": [text], "specar": [about]})
