"""NVIDIA's Cosmos tokenizer DV8x16x16: the published decoder.jit and encoder.jit, autoencoder.jit, or safetensors of
the same names. Sizes are read from tensor shapes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from ...limits.limits import LEVELS
from ...models.image_decoder import ImageDecoder
from ...models.networks.cosmos import Cosmos, CosmosConfig
from ..declarations import DecoderKind
from ..files.checkpoint import SAFETENSORS, TORCHSCRIPT, Checkpoint, open_checkpoint
from ..files.errors import CheckpointError
from ..files.names import count_modules

_LEVELS = CosmosConfig.levels
_CODES = 2**24  # at most
_REPOSITORY = "nvidia/Cosmos-1.0-Tokenizer-DV8x16x16"
_WRAPPERS = (".conv3d", ".norm")  # of a layer's weights, in the names of the files
# Queries and keys of temporal attention, and temporal filters without resampling, do not affect single frames.
_KIND = re.compile(r"(?<![^\W_])[CD][IV]\d+x\d+(?:x\d+)?(?![^\W_])", re.IGNORECASE)  # a word of its own in a name
_IDLE = re.compile(r"\.attn_1\.1\.[qk]\.")


def recognise(tensors: Collection[str]) -> bool:
    """Whether this is a Cosmos tokenizer, or its encoder or decoder."""
    return "post_quant_conv.conv3d.weight" in tensors or "quant_conv.conv3d.weight" in tensors


def flat(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights for single frames under plain names: 3D filters become 2D ones."""
    weights = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if kind not in ("weight", "bias") or _IDLE.search(name):
            continue
        for wrapper in _WRAPPERS:
            layer = layer.removesuffix(wrapper)
        if tensor.ndim == 5:
            tensor = tensor[:, :, 0] if tensor.shape[2] == 1 else tensor.float().sum(2)
        weights[f"{layer}.{kind}"] = tensor
    return weights


def config_of(weights: Mapping[str, Tensor], levels: tuple[int, ...]) -> CosmosConfig:
    """Sizes of a tokenizer from its tensor shapes. Raises KeyError or ValueError for missing tensors."""
    depth = count_modules(weights, r"decoder\.up\.", LEVELS)
    blocks = count_modules(weights, r"decoder\.up\.0\.block\.", LEVELS)
    stem = weights.get("encoder.conv_in.0.weight")
    return CosmosConfig(
        levels,
        tuple(len(weights[f"decoder.up.{i}.block.0.conv1.0.weight"]) for i in range(depth)),
        CosmosConfig.stem if stem is None else len(stem),
        len(weights["post_quant_conv.weight"]),
        blocks - 1,
    )


def load(checkpoint: Checkpoint, dtype: torch.dtype, operations=nn) -> ImageDecoder:
    """Build the tokenizer on the CPU, with the encoder from the same file or the file beside it, if any.

    Raises CheckpointError for missing, unknown, misshapen or non-finite tensors, and for other Cosmos tokenizers.
    """
    path, tensors = checkpoint.path, dict(checkpoint.tensors)
    _check_kind(path)
    if "post_quant_conv.conv3d.weight" not in tensors:
        raise CheckpointError(f"{path.name} holds only the encoder. Load {_other_half(path)}, with this one beside it.")
    why_not = "" if "quant_conv.conv3d.weight" in tensors else _add_encoder(tensors, path)
    levels = _levels(tensors, checkpoint)
    weights = flat(tensors)
    try:
        config = config_of(weights, levels)
    except (KeyError, ValueError) as error:  # tensors that determine a size are missing
        raise CheckpointError(
            f"{path.name} is incomplete ({error}): the decoder is needed. Download it again from {_REPOSITORY}."
        ) from error
    channels = weights["post_quant_conv.weight"].shape[1]
    if channels != len(levels):
        raise CheckpointError(
            f"{path.name} decodes vectors of {channels} channels, but codes have {len(levels)}: it is another Cosmos "
            f"tokenizer. The one needed is {_REPOSITORY}."
        )
    with torch.device("meta"):
        module = Cosmos(config, operations, why_not)
    return ImageDecoder.load(module, config.factor, channels, _used(weights, config), checkpoint, dtype)


def _check_kind(path: Path) -> None:
    """Raise CheckpointError for other Cosmos tokenizers. They have the same tensors, so only the name of the file, or
    else of its folder, tells."""
    found = next(filter(None, (_KIND.findall(name) for name in (path.stem, path.parent.name))), ())
    if other := next((kind for kind in found if kind.lower() != "dv8x16x16"), None):
        raise CheckpointError(
            f"{path.name} is the Cosmos tokenizer {other}, but only DV8x16x16 is supported ({_REPOSITORY})."
        )


def _other_half(path: Path) -> str:
    """File name of the encoder for that of a decoder, and vice versa."""
    name = path.name.lower()
    if "decoder" in name:
        return path.name.replace("decoder", "encoder")
    return path.name.replace("encoder", "decoder") if "encoder" in name else f"encoder{path.suffix}"


def _add_encoder(tensors: dict[str, Tensor], path: Path) -> str:
    """Add the encoder beside a decoder to its tensors. Returns why it cannot encode, or ""."""
    other = path.with_name(_other_half(path))
    files = [other.with_suffix(suffix) for suffix in (path.suffix, *TORCHSCRIPT, *SAFETENSORS)]
    found = next((file for file in files if file != path and file.is_file()), None)
    if found is None:
        return (
            f"{path.name} only decodes. To encode an image, put {other.name} of {_REPOSITORY} beside it, into "
            f"{path.parent}, and load the decoder again."
        )
    encoder = open_checkpoint(found).tensors
    if "quant_conv.conv3d.weight" not in encoder:
        raise CheckpointError(f"{found.name}, beside {path.name}, is not the encoder. Download it from {_REPOSITORY}.")
    tensors |= {n: t for n, t in encoder.items() if n.startswith(("encoder.", "quant_conv."))}
    return ""


def _levels(tensors: dict[str, Tensor], checkpoint: Checkpoint) -> tuple[int, ...]:
    """Levels of each channel of a code: from the quantiser's buffers, our metadata, or the released ones."""
    stored = next((t for n, t in tensors.items() if n.endswith("quantizer._levels")), None)
    levels = checkpoint.metadata.get("levels", _LEVELS) if stored is None else stored.flatten()[: LEVELS + 1].tolist()
    sound = 0 < len(levels) <= LEVELS and all(2 <= level <= _CODES for level in levels)
    if not sound or prod(levels) > _CODES:
        raise CheckpointError(f"{checkpoint.path.name} has invalid levels of codes ({levels!r:.100}). It is damaged.")
    return tuple(int(level) for level in levels)


def _used(weights: dict[str, Tensor], config: CosmosConfig) -> dict[str, Tensor]:
    """Without the temporal filters of spatial resampling."""
    deepest = len(config.widths) - 1
    idle = [f"decoder.up.{i}.upsample.conv1." for i in range(1, deepest + 1) if i != deepest - 1]
    idle += [f"encoder.down.{i}.downsample.conv2." for i in range(1, deepest)]
    return {name: tensor for name, tensor in weights.items() if not name.startswith(tuple(idle))}


KIND = DecoderKind(
    recognise, load, files=("decoder.jit", "autoencoder.jit", "decoder.safetensors", "autoencoder.safetensors")
)
