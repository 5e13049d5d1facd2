"""Opening weight files without executing anything in them."""

from __future__ import annotations

import logging
import os
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...limits.limits import (
    CONTAINERS,
    SETTINGS,
    SHARDS,
    TENSORS,
    VALUES,
    FileError,
    legal_name,
    legal_sizes,
    parse_json,
    quote,
)
from .bitsandbytes import with_bitsandbytes
from .errors import CheckpointError, raise_if_out_of_memory
from .gptq import with_gptq
from .names import unwrap_names
from .pickles import read_pickle, refuse_unreal
from .quantised import DESCRIPTIONS
from .safetensors_files import header_of, read
from .scaled import marks, with_scales
from .torchscript import read_torchscript
from .unsupported import ADAPTERS, MERGE, refuse_unsupported

log = logging.getLogger(__name__)

SAFETENSORS = (".safetensors", ".sft")
PICKLES = (".pt", ".pth", ".bin", ".ckpt")
TORCHSCRIPT = (".jit",)
INDEX = ".index.json"
WEIGHT_FILES = (  # of a Hugging Face folder, in order of preference
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Entries of a pickle that hold its weights, in order of preference. Averaged weights come first, as in the scripts that
# read such files: LlamaGen's take "ema", MAR's "model_ema", those of BasicSR "params_ema". Then the weights of the last
# step: of training scripts, DeepSpeed ("module"), Lightning ("state_dict") and pairs of networks ("generator").
_CONTAINERS = (
    "ema",
    "model_ema",
    "ema_model",
    "ema_state_dict",
    "state_dict_ema",
    "params_ema",
    "g_ema",
    "shadow",
    "model",
    "module",
    "state_dict",
    "model_state_dict",
    "model_state",
    "net",
    "network",
    "params",
    "weights",
    "generator",
)

StorageChoice = Callable[[torch.nn.Module], torch.dtype | None]  # model on the meta device -> storage


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, the ``specar`` metadata of the pack's files (else empty), and the file they came from.

    The path of a sharded checkpoint is its index. Tensors may be memory-mapped (see use_mmap); then the data is read on
    first use. Those of quantised files are LazyMatrix. storage: a dtype of NARROW for the large matrices, or what
    chooses it (see weights.load_weights).
    """

    tensors: dict[str, Tensor]
    metadata: dict[str, Any] = field(default_factory=dict)
    path: Path = Path()
    storage: torch.dtype | StorageChoice | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The config.json beside a file in a Hugging Face folder; else empty.

        Raises CheckpointError for one that cannot be read.
        """
        return read_settings(self.path.parent / "config.json") if self.path.name in WEIGHT_FILES else {}

    @property
    def quantisation(self) -> Any:
        """What is said beside it of how it was quantised: in config.json, or in the file of AutoGPTQ that was before
        that; None if in neither. Raises CheckpointError for one that cannot be read."""
        before = read_settings(self.path.parent / "quantize_config.json")
        return self.settings.get("quantization_config") or (before and {"quant_method": "gptq"} | before) or None

    @property
    def own_settings(self) -> dict[str, Any]:
        """Settings in the pack's files: the metadata, which overrides the ``specar`` object of config.json."""
        return (self.settings.get("specar") or {}) | self.metadata


def read_settings(file: Path, values: int = VALUES) -> dict[str, Any]:
    """The object in a .json file of at most so many ``values``; empty if there is no file. Raises CheckpointError for
    one that cannot be read."""
    if not file.is_file():
        return {}
    try:
        refuse_large(file, SETTINGS)
        settings = parse_json(
            file.read_bytes().removeprefix(BOM_UTF8), values
        )  # editors on Windows put a mark in front
    except CheckpointError:
        raise
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Download it again.") from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{file} is not a JSON object. Download it again.")
    return settings


def refuse_large(file: Path, most: int) -> None:
    """Raise CheckpointError for a file of more than ``most`` bytes, which would be read into memory, and for a pipe or
    device, which has no end."""
    if not os.path.isfile(file):
        raise CheckpointError(f"{file} is missing. Restore it.")
    if (size := file.stat().st_size) > most:
        raise CheckpointError(f"{file} has {size} bytes; the limit for its kind is {most}. Download it again.")


def title(path: Path) -> str:
    """Name of the model in a weight file: its Hugging Face folder, which the cache of huggingface_hub calls by a hash
    (models--ORGANISATION--NAME/snapshots/HASH), or else the file without its extension."""
    if path.name not in WEIGHT_FILES:
        return path.stem
    snapshots = path.parent.parent
    return snapshots.parent.name.rpartition("--")[2] if snapshots.name == "snapshots" else path.parent.name


def weight_file(path: Path, names: Sequence[str] = WEIGHT_FILES) -> Path:
    """The file itself, or the first of ``names`` in a folder. Raises CheckpointError if there is none."""
    if not os.path.isdir(path):  # unlike Path.is_dir, it accepts invalid names
        return path
    for name in names:
        if (path / name).is_file():
            return path / name
    if ADAPTERS[0] not in names and any((path / name).is_file() for name in ADAPTERS):
        raise CheckpointError(f"The folder {path} holds an adapter alone. {MERGE}")
    inside = sorted({each.parent.name for name in names for each in path.glob(f"*/{name}")})
    choose = f" Choose one of the folders in it that have weights: {', '.join(inside[:5])}." if inside else ""
    raise CheckpointError(f"The folder {path} contains no {' and no '.join(names)}.{choose}")


_mapped = True


def use_mmap(enabled: bool) -> None:
    """Choose, for this process, whether weights are memory-mapped (the default) or read into memory.

    Mapped weights need no additional memory if they are used in the file's dtype. But Windows cannot replace or delete
    a mapped file until the model is unloaded, and reserves memory for all of it; and not all network drives support it.
    """
    global _mapped
    _mapped = enabled


def open_checkpoint(path: Path, mapped: bool | None = None, adapter: bool = False) -> Checkpoint:
    """Read a .safetensors file, a pickle of tensors (weights only, of either format), the tensors of a TorchScript
    archive, or all shards of an index. mapped: see use_mmap (None: as set there). adapter: it may be a LoRA.

    Raises CheckpointError for a missing, truncated, empty or code-carrying file, and if memory is short.
    """
    mapped = _mapped if mapped is None else mapped
    checkpoint = _open(path, "map" if mapped else "read")
    tensors = with_matrices(checkpoint.tensors, path, lambda: checkpoint.quantisation)
    if not adapter:
        refuse_unsupported(tensors, path)
    return replace(checkpoint, tensors=tensors)


def outline(path: Path) -> Checkpoint:
    """A checkpoint whose tensors are on the meta device: names, shapes and dtypes. Raises as open_checkpoint does."""
    checkpoint = _open(path, "outline")
    tensors = {
        name: tensor if name.endswith(DESCRIPTIONS) else tensor.to("meta")
        for name, tensor in checkpoint.tensors.items()
    }
    return replace(checkpoint, tensors=with_matrices(tensors, path, lambda: checkpoint.quantisation))


def with_matrices(tensors: dict[str, Tensor], path: Path, about: Callable[[], Any]) -> dict[str, Tensor]:
    """The tensors of a file without the names of wrappers around the model, in which those of a quantised matrix are
    one: each reader takes tensors, and gives tensors. about: what is said beside the file of how it was quantised.

    Raises CheckpointError for tensors that are missing, or not as their format says.
    """
    try:
        tensors = {own: tensors[name] for name, own in unwrap_names(tensors).items()}
        for read_format in (with_scales, with_bitsandbytes, partial(with_gptq, about=about)):
            tensors = read_format(tensors)
    except CheckpointError:
        raise
    except FileError as error:
        raise CheckpointError(f"{path.name}: {error}") from error
    return tensors


Data = Literal["map", "read", "outline"]  # the data: memory-mapped, read into memory, or left in the file


def _map(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with path.open("rb") as file:
        header_of(file, path.stat().st_size)
    with safe_open(str(path), framework="pt", device="cpu") as file:
        tensors = {legal_name(name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        for name, tensor in tensors.items():
            legal_sizes(name, tensor.shape)
        return tensors, file.metadata() or {}


def _open(path: Path, data: Data) -> Checkpoint:
    if not os.path.isfile(path):
        raise CheckpointError(f"{path} does not exist. {remedy_for_missing(path.name)}")
    if path.name.endswith(INDEX):
        return _open_shards(path, data)
    suffix = path.suffix.lower()
    if suffix in SAFETENSORS:
        return _open_safetensors(path, data)
    if suffix in PICKLES:
        return _open_pickle(path, data)
    if suffix in TORCHSCRIPT:
        return _open_torchscript(path)
    kinds = ", ".join(SAFETENSORS + PICKLES + TORCHSCRIPT)
    raise CheckpointError(f"{path.name} is not a supported weight file ({kinds}).")


def remedy_for_missing(name: str) -> str:
    """What to do about a file or folder that is not there."""
    if os.sep == "/" and "\\" in name:
        return "It has a backslash, which separates folders on Windows alone: write / instead."
    return "Restore it, or choose another one."


def shard_of(index: Path) -> dict[str, str]:
    """Tensor name -> file name of its shard. Raises CheckpointError for an index with other paths."""
    listed = read_settings(index).get("weight_map")
    shards: dict[str, str] = listed if isinstance(listed, dict) else {}
    files = set(shards.values()) if all(isinstance(name, str) for name in shards.values()) else set()
    if (
        not 0 < len(files) <= SHARDS
        or len(shards) > TENSORS
        or not all(
            PurePath(name).name == PureWindowsPath(name).name == name
            and name not in ("", "..")
            and not name.endswith(INDEX)
            and len(name) < 256
            for name in files
        )
    ):
        raise CheckpointError(
            f"{index} does not list the shard of each tensor ({TENSORS} at most), a file beside it ({SHARDS} at most). "
            "Download it again."
        )
    return shards


def _open_shards(index: Path, data: Data) -> Checkpoint:
    """Each tensor from the shard that the index names: others may hold a copy of before. What the index does not name,
    such as scales and marks, lies beside tensors of its layer that it does, or is left out."""
    shards = shard_of(index)
    tensors: dict[str, Tensor] = {}
    files = sorted(set(shards.values()))
    missing = [file for file in files if not (index.parent / file).is_file()]
    if missing:
        raise CheckpointError(
            f"{index.parent.name} is incomplete: of its {len(files)} shards, {len(missing)} are missing "
            f"({', '.join(missing[:3])}). Download them into the folder {index.parent}."
        )
    layers = {(file, _layer(name)) for name, file in shards.items()}
    for file in files:
        tensors |= {
            name: tensor
            for name, tensor in _open(index.parent / file, data).tensors.items()
            if (shards[name] == file if name in shards else (file, _layer(name)) in layers)
        }
    absent = [name for name in shards if name not in tensors]
    if absent:
        raise CheckpointError(
            f"{index.parent.name} is incomplete: {len(absent)} tensors are not in the shards that its index names, for "
            f"example {absent[0]}, which should be in {shards[absent[0]]}. Download that file and the index again."
        )
    return Checkpoint(tensors, {}, index)


def _layer(name: str) -> str:
    """The layer of a tensor. Those of a matrix in bitsandbytes' layout have names that begin with the matrix's own."""
    return name.partition(".weight.")[0] if ".weight." in name else name.rpartition(".")[0]


def _open_safetensors(path: Path, data: Data) -> Checkpoint:
    try:
        tensors, strings = _map(path) if data == "map" else read(path, DESCRIPTIONS if data == "outline" else None)
        metadata = parse_json(strings.get("specar", "{}"))
        tensors |= marks(strings)
    except CheckpointError:
        raise
    except (SafetensorError, ValueError, RuntimeError, OSError, MemoryError) as error:
        raise_if_out_of_memory(error, path)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{path} cannot be read: {error}. If its drive does not support memory mapping, start ComfyUI with "
                "--disable-mmap."
            ) from error
        size = path.stat().st_size
        raise CheckpointError(
            f"{path.name} ({size} bytes) is damaged or not a safetensors file: {error}. Download or copy it again."
        ) from error
    if not tensors:
        raise CheckpointError(f"{path.name} contains no tensors. Download it again.")
    return Checkpoint(tensors, metadata if isinstance(metadata, dict) else {}, path)


def _open_pickle(path: Path, data: Data) -> Checkpoint:
    try:
        content = read_pickle(path, mapped=data != "read", data=data != "outline")
        tensors = _weights_in(content, path.name, set())
        refuse_unreal(tensors, path)
    except ValueError as error:
        raise_if_out_of_memory(error, path)
        raise CheckpointError(
            f"{path.name} ({path.stat().st_size} bytes) cannot be read as plain weights: it is damaged or contains "
            f"code, which is never run. If you trust it, convert it to .safetensors ({error})."
        ) from error
    if not tensors:
        parts = content if isinstance(content, dict) else {}
        refuse_unsupported([f"{a}.{b}" for a, part in parts.items() if isinstance(part, dict) for b in part], path)
        found = ", ".join(quote(part) for part in [*parts][:6])
        raise CheckpointError(
            f"{path.name} contains no named tensors{f', but {found}' if found else ''}. Weights are looked for at its "
            f"top and in its entries {', '.join(_CONTAINERS)}: save them so, or choose the file of the model."
        )
    return Checkpoint(tensors, {}, path)


def _weights_in(content: Any, file: str, seen: set[int], depth: int = CONTAINERS) -> dict[str, Tensor]:
    """The named tensors of a pickle's content, in the most preferred of its containers or, without one, at its top.
    Which one is logged if there are several. seen: ids of those looked at, as one may be everywhere in itself."""
    if not isinstance(content, dict) or id(content) in seen:
        return {}
    seen.add(id(content))
    inner = {key: _weights_in(content[key], file, seen, depth - 1) for key in _CONTAINERS if depth and key in content}
    sound = [key for key, tensors in inner.items() if any(tensor.ndim for tensor in tensors.values())]
    if len(sound) > 1:
        log.info("%s holds several sets of weights (%s): %r is used.", file, ", ".join(sound), sound[0])
    if sound:
        return inner[sound[0]]
    return {
        legal_name(name): tensor.detach()
        for name, tensor in content.items()
        if isinstance(name, str) and isinstance(tensor, Tensor)
    }


def _open_torchscript(path: Path) -> Checkpoint:
    try:
        tensors = read_torchscript(path)
        refuse_unreal(tensors, path)
    except ValueError as error:
        raise_if_out_of_memory(error, path)
        raise CheckpointError(
            f"{path.name} ({path.stat().st_size} bytes) cannot be read as the weights of a TorchScript archive (its "
            f"code is never run): {error}. Download it again from where it was released."
        ) from error
    if not tensors:
        raise CheckpointError(f"{path.name} contains no tensors. Download it again.")
    return Checkpoint(tensors, {}, path)


def tensor_names(path: Path) -> set[str]:
    """Names of the tensors in a file or in the shards of an index, without reading their data; empty for TorchScript.
    Raises CheckpointError as open_checkpoint does."""
    if path.name.endswith(INDEX):
        return set(unwrap_names(shard_of(path)).values())
    return set() if path.suffix.lower() in TORCHSCRIPT else set(outline(path).tensors)
