"""From the tensors of a checkpoint to the parameters of a module."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from ...models.networks.quantised import narrow_matrix, narrow_names, put_narrow, to_bits
from .checkpoint import Checkpoint
from .errors import CheckpointError
from .quantised import LazyMatrix, first

log = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)
Weights = Mapping[str, Tensor | tuple[Tensor, ...]]  # by the names of a module; tuples are concatenated

_CHECKED = 2**20  # values checked at a time

# Which tensors of a file may be left out. A module that lacks one of its tensors (a bias, a norm, a second layer)
# computes something else. So what lies in a part that we build is an error, and so is a norm or an embedding beside
# these parts, which every token would pass. What else lies beside them is not ours: heads of other tasks, other towers,
# the state of a training. Nor are buffers that a module computes itself or that only training reads, wherever they are.
_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|inv_freq|freqs_cis|rope\.freqs(_cos|_sin)?|position_ids|masked_bias|(causal_)?mask|[kv]_cache|"
    r"num_batches_tracked|codebook_used|(ema_)?cluster_size|embed_avg|n_averaged)$"
)
_COUNTER = ".num_batches_tracked"  # of a BatchNorm: the one buffer of ours that evaluation does not read
_TOPS = ("backbone.", "vq.", "")  # prefixes of our names that stand for the top of a file
_PASSED = re.compile(r"norm|embed|(^|_)(ln|pos|pe)(_|$)|^wpe$", re.IGNORECASE)


def load_weights(
    module: M, tensors: Weights, checkpoint: Checkpoint, dtype: torch.dtype, precise: tuple[str, ...] = ()
) -> M:
    """Fill a module built on the meta device, and return it in eval mode, without gradients.

    tensors: of the checkpoint. They are read and cast to ``dtype`` one at a time; those under the prefixes ``precise``
    become fp32. Tensors that the module does not need are left out and logged, if they cannot change what it computes
    (see _BUFFERS and _TOPS), as are biases of zeros, which AutoGPTQ adds to every Linear. With a ``storage`` in the
    checkpoint, or one that it chooses for ``module``, the large Linear modules (see NARROW) are replaced by modules
    with matrices in that dtype. Raises CheckpointError for tensors that are missing, unknown, misshapen or not finite;
    names and shapes are checked before any parameter is read.
    """
    path, wanted = checkpoint.path, module.state_dict()
    found = {name: parts if isinstance(parts, tuple) else (parts,) for name, parts in tensors.items()}
    found |= {name: (torch.zeros_like(wanted[name], device="cpu"),) for name in wanted if name.endswith(_COUNTER)}
    _check_names(module, wanted, found, path)
    found |= {name: _unpadded(found[name], parameter) for name, parameter in wanted.items()}
    _check_shapes(wanted, found, path)
    storage = checkpoint.storage(module) if callable(checkpoint.storage) else checkpoint.storage
    narrow = {f"{layer}.weight": layer for layer in narrow_names(module, storage)} if storage else {}
    weights = {}
    for name in wanted:
        if layer := narrow.get(name):
            weights[name], scale = _narrow(found[name], storage, dtype, name, path)
            put_narrow(module, layer, weights[name], scale)
            if scale is not None:
                weights[f"{layer}.scale"] = scale
        else:
            precision = torch.float32 if name.startswith(precise) else dtype
            parts = (_cast(part, precision, name, path) for part in found[name])
            weights[name] = _joined(list(parts))
    module.load_state_dict(weights, strict=True, assign=True)
    return module.eval().requires_grad_(False)


def _check_names(
    module: nn.Module, wanted: Mapping[str, Tensor], found: Mapping[str, Sequence[Tensor]], path: Path
) -> None:
    linear = {f"{name}.bias" for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    empty = {name for name in linear & found.keys() - wanted.keys() if not any(part.any() for part in found[name])}
    missing, left = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys() - empty)
    parts = {_place(name) for name in wanted}
    unknown = [name for name in left if not _BUFFERS.search(name) and not _is_beside(name, parts)]
    if missing or unknown:
        raise CheckpointError(
            f"{path.name} does not fit this model: {len(missing)} tensors missing {missing[:3]}, "
            f"{len(unknown)} unknown {unknown[:3]}. It is incomplete or of another model family: download it "
            "again, or choose another file."
        )
    if beside := [name for name in left if not _BUFFERS.search(name)]:
        log.info(
            "%s holds %d tensors that this model does not use; they are ignored: %s",
            path.name,
            len(beside),
            ", ".join(f"{name.removeprefix(_place(name)[0])!r:.60}" for name in beside[:3]),
        )


def _unpadded(parts: tuple[Tensor, ...], parameter: Tensor) -> tuple[Tensor, ...]:
    """The parts of a matrix without the columns, and one that is all of it without the rows, that its format added."""
    if parameter.ndim != 2:
        return parts
    rows, columns = parameter.shape
    return tuple(first(part, rows if len(parts) == 1 else len(part), columns) for part in parts)


def _place(name: str) -> tuple[str, str]:
    """The top that a name of ours lies at, and the part below it."""
    top = next(top for top in _TOPS if name.startswith(top))
    return top, name.removeprefix(top).partition(".")[0]


def _is_beside(name: str, parts: Collection[tuple[str, str]]) -> bool:
    """Whether a tensor lies beside the ``parts`` that we build, and is no norm or embedding."""
    top, part = _place(name)
    return (top, part) not in parts and not _PASSED.search(part)


def _check_shapes(wanted: Mapping[str, Tensor], found: Mapping[str, Sequence[Tensor]], path: Path) -> None:
    for name, parameter in wanted.items():
        whole = next((part.dtype for part in found[name] if not part.is_floating_point()), None)
        if whole and parameter.is_floating_point():
            raise CheckpointError(
                f"{path.name}: {name} contains integers ({whole}). This quantisation is not supported: use the weights "
                "as released."
            )
        begin, *others = ([*part.shape] for part in found[name])
        shape = [sum(part[0] for part in (begin, *others)), *begin[1:]] if begin else []
        if shape != [*parameter.shape] or any(other[1:] != begin[1:] for other in others):
            raise CheckpointError(f"{path.name}: {name} has shape {shape}, expected {[*parameter.shape]}.")


def _narrow(
    parts: Sequence[Tensor], storage: torch.dtype, dtype: torch.dtype, name: str, path: Path
) -> tuple[Tensor, Tensor | None]:
    """Weight and scale of a NarrowLinear that stores a matrix in ``storage`` and computes in ``dtype``."""
    rounded, scales = zip(*(_rounded(part, storage, dtype, name, path) for part in parts), strict=True)
    if all(scale is None for scale in scales):
        return _joined(rounded), None
    return _joined(rounded), _joined(
        [torch.ones(len(part)) if scale is None else scale for part, scale in zip(rounded, scales, strict=True)]
    )


def _rounded(
    part: Tensor, storage: torch.dtype, dtype: torch.dtype, name: str, path: Path
) -> tuple[Tensor, Tensor | None]:
    if isinstance(part, LazyMatrix) and part.format.storage == storage:
        return _as_stored(part, dtype, name, path)
    if storage == torch.float8_e4m3fn:
        return to_bits(_cast(part, storage, name, path)), None
    return _quantised(part, storage, dtype, name, path)


def _as_stored(matrix: LazyMatrix, dtype: torch.dtype, name: str, path: Path) -> tuple[Tensor, Tensor]:
    """Numbers and scales of a file in int8, fp8 or 4 bits. Raises CheckpointError as _cast does."""
    rounded, scale = matrix.kept()
    fp8 = matrix.format.storage == torch.float8_e4m3fn
    if not (torch.isfinite(scale).all() and (not fp8 or _finite(rounded.view(torch.float8_e4m3fn)))):
        raise CheckpointError(f"{path.name}: {name} contains NaN or infinite values: download it again, it is damaged.")
    if _largest(scale, torch.finfo(torch.float8_e4m3fn).max if fp8 else 128) > torch.finfo(dtype).max:
        raise CheckpointError(f"{path.name}: {name} has values that are too large for {dtype}. Load it in bf16.")
    return rounded, scale


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(tuple(parts)) if len(parts) > 1 else parts[0]


def _quantised(
    tensor: Tensor, storage: torch.dtype, dtype: torch.dtype, name: str, path: Path
) -> tuple[Tensor, Tensor]:
    """A matrix in int8 or 4 bits, and its scales, for computing in ``dtype``. Raises CheckpointError as _cast does."""
    rounded, scale = narrow_matrix(tensor, storage)
    if not torch.isfinite(scale).all():
        raise CheckpointError(f"{path.name}: {name} contains NaN or infinite values: download it again, it is damaged.")
    if _largest(scale) > torch.finfo(dtype).max:
        raise CheckpointError(f"{path.name}: {name} has values that are too large for {dtype}. Load it in bf16.")
    return rounded, scale


def _largest(scale: Tensor, top: float = 127) -> Tensor:
    """The largest magnitude that the levels of a row or group can have. scale: see linear_narrow. top: the largest
    number that a scale of a row is for."""
    if scale.ndim == 1:
        return top * scale.abs().max()
    step, minimum = scale.float().unbind(-1)
    return torch.maximum(minimum.abs(), (minimum + 15 * step).abs()).max()


def _cast(tensor: Tensor, dtype: torch.dtype, name: str, path: Path) -> Tensor:
    """The tensor in another dtype; unchanged if it already has it.

    Only the result is checked: a second pass over a memory-mapped file may read it again if memory is short. Raises
    CheckpointError for values that are not finite or too large for ``dtype``.
    """
    cast = tensor.to(dtype)
    if not _finite(cast):
        if _finite(tensor):
            raise CheckpointError(f"{path.name}: {name} has values that are too large for {dtype}. Load it in bf16.")
        raise CheckpointError(f"{path.name}: {name} contains NaN or infinite values: download it again, it is damaged.")
    return cast


def _finite(tensor: Tensor) -> bool:
    parts = tensor.flatten().split(_CHECKED)  # the check copies them
    return all(torch.isfinite(part.float() if part.dtype.itemsize == 1 else part).all() for part in parts)
