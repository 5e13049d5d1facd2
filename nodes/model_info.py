"""AR Model Info: a summary of a loaded model, as numbers and as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from comfy_api.latest import io
from torch import Tensor

from ..kernels.linear import stored_as
from ..model_loaders.declarations import Family
from ..model_loaders.detect import family_of, load_drafter, missing_decoder
from ..model_loaders.families import RELEASED_DECODERS, eagle
from ..model_loaders.files.checkpoint import CheckpointError, outline, weight_file
from ..models.continuous_model import ContinuousBase
from ..models.discrete_model import DiscreteModel
from ..models.image_decoder import Autoencoder
from ..models.memory import word_embedding
from ..models.text.prompt_encoders import WordEncoder
from .comfy_runtime import folders, models
from .memory_table import in_units, memory_lines, memory_table
from .schema import schema
from .search import FAMILIES
from .sockets import ARModel

SHOWN_SIZES = 24
LARGEST_TO_LOAD = 64 * 2**20  # bytes: smaller drafters are loaded to check whether they fit


def summarize(
    model: DiscreteModel | ContinuousBase, decoder: Autoencoder | None = None, drafters: Iterable[str] = ()
) -> dict[str, Any]:
    """A model, its image decoder, and the names of compatible drafters in numbers, JSON-ready.

    bytes_by_dtype: of the weights without the word embeddings (bytes_of_words), which the nodes keep in main memory.
    picture: rows and columns of image tokens; sequence: their number, special tokens and those of a preview included.
    sizes: (width, height) in pixels, the default first. image_defaults: those of prompts with images that differ.
    decoder: name of the image decoder, or of the node that decodes instead. Of models of token ids only: specials: ids
    of the special tokens by what they mark; caches: bytes of the key/value caches per image of the default size after
    ``prompt`` tokens, without and with guidance, if the model has it; longest: most tokens of prompt and image.
    """
    side, defaults = model.pixels_per_token, asdict(model.defaults)
    by_dtype: dict[str, int] = {}
    summary: dict[str, Any] = {
        "family": model.family,
        "tokens": "vectors",
        "bytes_by_dtype": by_dtype,
        "bytes_of_words": 0,
        "codes": None,
        "specials": {},
        "picture": model.grid,
        "sequence": math.prod(model.grid),
        "preview": 0,
        "caches": None,
        "int8_cache": False,
        "prompt": 0,
        "longest": None,
        "sizes": [(cols * side, rows * side) for rows, cols in dict.fromkeys((model.grid, *model.grids))],
        "defaults": defaults,
        "image_defaults": {},
        "decoder": decoder.name if decoder else RELEASED_DECODERS[model.family].node or None,
        "decoder_bytes": sum(map(bytes_of, decoder.module.parameters())) if decoder else 0,
        "drafters": list(drafters),
        "words": model.prompt_encoder.known_words() if isinstance(model.prompt_encoder, WordEncoder) else [],
    }
    words = None
    if isinstance(model, DiscreteModel):
        embedding, layout, prompt = word_embedding(model), model.layout(), model.usual_prompt
        words = None if embedding is None else embedding.weight  # on the compute device, or offloaded
        ids = list(range(model.vocab, model.vocab_total))
        specials = {"end of a row": ids[: model.row_ends], "end of the image": ids[model.row_ends :]}
        own = asdict(model.image_defaults)
        summary |= {
            "tokens": "ids",
            "bytes_of_words": 0 if words is None else bytes_of(words),
            "codes": model.vocab,
            "specials": {name: ids for name, ids in specials.items() if ids},
            "sequence": layout.length,
            "preview": layout.lead,
            "caches": tuple(model.kv_bytes(1, layout, 0, g, prompt) for g in (False, True)[: 1 + model.guidance]),
            "int8_cache": model.int8_cache,
            "prompt": prompt,
            "longest": model.longest,
            "image_defaults": {key: value for key, value in own.items() if value != defaults[key]},
        }
    weights = [weight for weight in model.parameters() if weight is not words]
    for weight in weights:
        name = stored_as(weight) or str(weight.dtype).removeprefix("torch.")
        by_dtype[name] = by_dtype.get(name, 0) + bytes_of(weight)
    return summary | {"parameters": sum(w.numel() for w in (*weights, *([] if words is None else [words])))}


def bytes_of(weight: Tensor) -> int:
    """Bytes of a tensor."""
    return weight.numel() * weight.element_size()


def report(name: str, summary: Mapping[str, Any], missing: str, memory: Sequence[str] = ()) -> str:
    """The summary as text. missing: the line for a model without an image decoder. memory: lines of the table."""
    of = SimpleNamespace(**summary)
    rows, cols = of.picture
    specials = ", ".join(f"{what} ({', '.join(map(str, ids))})" for what, ids in of.specials.items())
    tokens = f" with special tokens: {specials}" if specials else f" with a preview of {of.preview}" * (of.preview > 0)
    codes = f" of {of.codes} codes" * (of.codes is not None)
    sizes, more = of.sizes[:SHOWN_SIZES], len(of.sizes) - SHOWN_SIZES
    lines = [
        f"{name}: {of.family}, {of.parameters / 1e6:,.1f} million parameters, tokens are {of.tokens}",
        "weights on the compute device: "
        + ", ".join(f"{in_units(number)} {dtype}" for dtype, number in of.bytes_by_dtype.items()),
        of.bytes_of_words and f"word embeddings, in main memory: {in_units(of.bytes_of_words)}",
        f"an image: {rows} rows of {cols} tokens{codes}, {of.sequence} in all{tokens}",
        of.caches
        and f"KV cache per image{' in int8' * of.int8_cache}, after {of.prompt} prompt tokens: "
        + ", with guidance ".join(map(in_units, of.caches)),
        *memory,
        of.longest and f"prompt and image together: at most {of.longest} tokens",
        "sizes (width x height): "
        + ", ".join(f"{width} x {height}" for width, height in sizes)
        + f" and {more} more" * (more > 0),
        f"default settings: {settings_text(of.defaults)}",
        of.image_defaults and f"with images in the prompt: {settings_text(of.image_defaults)}",
        f"image decoder: {of.decoder}" + f" ({in_units(of.decoder_bytes)})" * (of.decoder_bytes > 0)
        if of.decoder
        else missing,
        f"compatible drafters: {', '.join(of.drafters) or 'none'}",
        of.words and f"{len(of.words)} words of a prompt: {', '.join(of.words)}",
    ]
    return "\n".join(filter(None, lines))


def settings_text(params: Mapping[str, Any]) -> str:
    """Sampling parameters as text."""
    given = {key: value for key, value in params.items() if value is not None}
    return ", ".join(
        f"{key} {' then '.join(value) if isinstance(value, tuple) else value}" for key, value in given.items()
    )


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
        about = summary | {"memory": [row._asdict() for row in rows], "choice": model.choice}
        return io.NodeOutput(text, ui={"text": [text], "specar": [about]})
