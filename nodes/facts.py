"""What there is to know about a loaded model, as numbers and in words. No ComfyUI."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..kernels.linear import STORED
from ..model_loaders.ar_model import DiscreteModel
from ..model_loaders.continuous_model import ContinuousBase
from ..model_loaders.decoders.image_decoder import Autoencoder
from ..model_loaders.detect import family_of, load_drafter
from ..model_loaders.families import eagle
from ..model_loaders.files.checkpoint import CheckpointError, outline, weight_file
from ..model_loaders.registry import Family

PROMPT = 128  # tokens of the prompt for which caches are counted, where it may have any number
SHOWN_SIZES = 24
TRIED = 64 * 2**20  # bytes of drafters that are loaded to see whether they fit


@dataclass(frozen=True)
class Facts:
    """Bytes by dtype are those of the weights without the table of words, which the nodes leave in main memory.

    caches: bytes of the key/value caches per picture of the model's own size, without and with guidance (of models of
    token ids). picture: rows and columns of its tokens; sequence: how many there are with those that are no part of it.
    sizes: (width, height) in pixels, the model's own first. specials: ids of tokens that are no part of the picture, by
    what they do.
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
    caches: tuple[int, int] | None
    prompt: int
    longest: int | None
    sizes: list[tuple[int, int]]
    defaults: dict[str, Any]
    decoder: str | None
    decoder_bytes: int
    drafters: list[str]


def facts_of(
    model: DiscreteModel | ContinuousBase, decoder: Autoencoder | None = None, drafters: Iterable[str] = ()
) -> Facts:
    """The facts about a model, its image decoder, and the names of drafters for it."""
    side, (rows, cols) = model.pixels_per_token, model.grid
    discrete = isinstance(model, DiscreteModel)
    words = model.words.weight if discrete and model.words else None  # loaded on the compute device, or kept back
    weights = [weight for weight in model.parameters() if weight is not words]
    by_dtype: dict[str, int] = {}
    for weight in weights:
        name = STORED.get(weight.dtype, str(weight.dtype).removeprefix("torch."))
        by_dtype[name] = by_dtype.get(name, 0) + weight.numel() * weight.element_size()
    caches, specials, prompt = None, {}, 0
    if discrete:
        prompt = PROMPT if words is not None else getattr(model.prefix, "slots", 1)
        caches = tuple(model.kv_bytes(1, model.layout(), 0, guided, prompt) for guided in (False, True))
        ids = list(range(model.vocab, model.vocab_total))
        specials = {"end of a row": ids[: model.row_ends], "end of the image": ids[model.row_ends :]}
    grids = [model.grid, *(grid for grid in model.grids if grid != model.grid)] if discrete else [model.grid]
    return Facts(
        family=model.family, tokens="ids" if discrete else "vectors",
        parameters=sum(w.numel() for w in [*weights, *([] if words is None else [words])]), bytes_by_dtype=by_dtype,
        bytes_of_words=0 if words is None else words.numel() * words.element_size(),
        codes=model.vocab if discrete else None, specials={name: ids for name, ids in specials.items() if ids},
        picture=(rows, cols), sequence=model.layout().length if discrete else rows * cols, caches=caches, prompt=prompt,
        longest=model.longest if discrete else None,
        sizes=[(c * side, r * side) for r, c in grids], defaults=asdict(model.defaults),
        decoder=decoder and decoder.name, drafters=list(drafters),
        decoder_bytes=sum(p.numel() * p.element_size() for p in decoder.module.parameters()) if decoder else 0,
    )  # fmt: skip


def in_words(name: str, facts: Facts, missing: str) -> str:
    """The report. missing: what to say where there is no image decoder."""
    memory = ", ".join(f"{size(number)} {dtype}" for dtype, number in facts.bytes_by_dtype.items())
    rows, cols = facts.picture
    lines = [
        f"{name}: {facts.family}, {facts.parameters / 1e6:,.1f} million parameters, tokens are {facts.tokens}",
        f"weights on the compute device: {memory}",
    ]
    if facts.bytes_of_words:
        lines.append(f"word embeddings, in main memory: {size(facts.bytes_of_words)}")
    codes = f" of {facts.codes} codes" if facts.codes else ""
    specials = ", ".join(f"{what} ({', '.join(map(str, ids))})" for what, ids in facts.specials.items())
    lines.append(f"an image: {rows} rows of {cols} tokens{codes}" + (
        f", {facts.sequence} in all with special tokens: {specials}" if specials else f", {facts.sequence} in all"))
    if facts.caches:
        plain, guided = map(size, facts.caches)
        lines.append(f"KV cache per image, after {facts.prompt} prompt tokens: {plain}, with guidance {guided}")
    if facts.longest:
        lines.append(f"prompt and image together: at most {facts.longest} tokens")
    shown = ", ".join(f"{width} x {height}" for width, height in facts.sizes[:SHOWN_SIZES])
    more = len(facts.sizes) - SHOWN_SIZES
    lines.append(f"sizes (width x height): {shown}" + (f" and {more} more" if more > 0 else ""))
    lines.append("default settings: " + ", ".join(
        f"{key} {' then '.join(value) if isinstance(value, tuple) else value}" for key, value in facts.defaults.items()
        if value is not None))
    lines.append(f"image decoder: {facts.decoder} ({size(facts.decoder_bytes)})" if facts.decoder else missing)
    lines.append("compatible drafters: " + (", ".join(facts.drafters) or "none"))
    return "\n".join(lines)


def size(number: int) -> str:
    """Bytes in words."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20)):
        if number >= step:
            return f"{number / step:.2f} {unit}"
    return f"{number / 1024:.1f} KiB"


def fitting(
    drafters: Mapping[str, Path], model: DiscreteModel | ContinuousBase, family: Family | None
) -> list[str]:
    """Which files may draft for a model of a family: small ones are tried, larger ones told by the names and
    shapes of their tensors alone."""
    return [name for name, path in drafters.items() if _fits(path, model, family)]


def _fits(path: Path, model: DiscreteModel | ContinuousBase, family: Family | None) -> bool:
    try:
        checkpoint = outline(weight_file(path))
        if sum(t.numel() * t.element_size() for t in checkpoint.tensors.values()) <= TRIED:
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
