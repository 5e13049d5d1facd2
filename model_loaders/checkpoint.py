"""Opening weight files without executing anything in them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

SAFETENSORS = (".safetensors", ".sft")
PICKLES = (".pt", ".pth", ".bin", ".ckpt")
# Averaged weights go before those of the last step; the others are of DDP, DeepSpeed and Lightning.
_CONTAINERS = ("model_ema", "model", "module", "state_dict")


class CheckpointError(ValueError):
    """A weight file that cannot be used; the message names the file, the reason and the remedy."""


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, the ``specar`` metadata of our own files (else empty), and the file or folder they came from."""

    tensors: dict[str, Tensor]
    metadata: dict[str, Any] = field(default_factory=dict)
    path: Path = Path()


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a .safetensors file or a pickle of tensors (weights only), whichever container it uses.

    Raises CheckpointError for a missing, truncated, empty or code-carrying file.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist. Put the file there or choose another one.")
    suffix = path.suffix.lower()
    if suffix in SAFETENSORS:
        return _open_safetensors(path)
    if suffix in PICKLES:
        return Checkpoint(_unwrap(_open_pickle(path), path), {}, path)
    kinds = ", ".join(SAFETENSORS + PICKLES)
    raise CheckpointError(f"{path.name} is not a weight file of a known kind ({kinds}).")


def _open_safetensors(path: Path) -> Checkpoint:
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            metadata = json.loads((file.metadata() or {}).get("specar", "{}"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        size = path.stat().st_size
        raise CheckpointError(
            f"{path.name} ({size} bytes) is damaged or not a safetensors file: {error}. Download or copy it again."
        ) from error
    if not tensors:
        raise CheckpointError(f"{path.name} holds no tensors.")
    return Checkpoint(tensors, metadata if isinstance(metadata, dict) else {}, path)


def tensor_names(path: Path) -> set[str]:
    """Names of the tensors in a safetensors file, without reading them; none for other files."""
    if path.suffix.lower() not in SAFETENSORS:
        return set()
    with safe_open(str(path), framework="pt", device="cpu") as file:
        return set(file.keys())


class _InertNamespace:
    """Stands in for argparse.Namespace, which training scripts save beside the weights; ignores its content."""

    def __setstate__(self, state: Any) -> None:
        pass


def _open_pickle(path: Path) -> Any:
    options = {"map_location": "cpu", "weights_only": True}
    try:
        try:
            return torch.load(path, mmap=True, **options)
        except RuntimeError:  # a file from before the zip format cannot be mapped
            return torch.load(path, **options)
    except Exception as error:
        unsafe = _unsafe_globals(path)
        if unsafe == {"argparse.Namespace"}:
            with torch.serialization.safe_globals([(_InertNamespace, "argparse.Namespace")]):
                return torch.load(path, mmap=True, **options)
        raise CheckpointError(
            f"{path.name} ({path.stat().st_size} bytes) cannot be read as plain weights: it is damaged or contains "
            "code, which is never run. Convert it to .safetensors where you trust it."
            + (f" (It asks for {', '.join(sorted(unsafe)[:3])}.)" if unsafe else "")
        ) from error


def _unsafe_globals(path: Path) -> set[str]:
    try:
        return set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # noqa: BLE001 (any failure means: not a readable zip checkpoint)
        return set()


def _unwrap(content: Any, path: Path) -> dict[str, Tensor]:
    for _ in range(2):
        if isinstance(content, dict):
            content = next((content[key] for key in _CONTAINERS if isinstance(content.get(key), dict)), content)
    tensors = {k: v for k, v in content.items() if isinstance(v, Tensor)} if isinstance(content, dict) else {}
    if not tensors:
        raise CheckpointError(f"{path.name} holds no named tensors.")
    return tensors


def load_weights(module: nn.Module, tensors: dict[str, Tensor], path: Path, dtype: torch.dtype,
                 ignore: Iterable[str] = (), precise: tuple[str, ...] = ()) -> None:
    """Put tensors into a module built on the meta device, cast to ``dtype``, but to fp32 under prefixes ``precise``.

    Raises CheckpointError for missing, unknown, misshapen or non-finite tensors (names in ``ignore`` are left out).
    """
    ignore = set(ignore)
    wanted = {name: tensor.shape for name, tensor in module.state_dict().items()}
    found = {name: tensor for name, tensor in tensors.items() if name not in ignore}
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or unknown:
        raise CheckpointError(
            f"{path.name} does not fit this model: {len(missing)} tensors missing {missing[:3]}, "
            f"{len(unknown)} unknown {unknown[:3]}. It is incomplete or of another family."
        )
    for name, shape in wanted.items():
        if found[name].shape != shape:
            raise CheckpointError(f"{path.name}: {name} has shape {list(found[name].shape)}, expected {list(shape)}.")
        if not torch.isfinite(found[name]).all():
            raise CheckpointError(f"{path.name}: {name} contains NaN or infinite values. The file is damaged.")
    cast = {name: found[name].to(torch.float32 if name.startswith(precise) else dtype) for name in wanted}
    module.load_state_dict(cast, strict=True, assign=True)
