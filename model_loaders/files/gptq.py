"""Matrices of GPTQ and AutoRound, in 2, 4 or 8 bits.

Documented by intel/auto-round: auto_round_extension/torch/qlinear_torch.py and qlinear_torch_zp.py (QuantLinear: pack
and forward), and which of them a file has, by the packing formats of auto_round/inference/backend.py. The layout is
that of AutoGPTQ and ModelCloud/GPTQModel. Of a matrix [N, K] in b bits with G groups along K, ``<layer>`` has

* ``qweight``, int32 [K b / 32, N]: 32 / b numbers q of a column each, the first in the lowest bits;
* ``qzeros``, int32 [G, N b / 32]: zero points z, packed so along N;
* ``scales`` [G, N]: s;
* ``g_idx``, int32 [K]: the group of each column; without it, a group is K / G columns in a row.

The weight is s x (q - z). Files of checkpoint_format "gptq" and packing_format "auto_round:auto_gptq" store z - 1.
Which it is, stands in the ``quantization_config`` of config.json alone, so that file must lie beside the weights.

Matrices in 4 bits whose groups are multiples of those of kernels/linear.py, in a row, can be kept: a number is then
q x step + minimum with the step s and the minimum - s z, both rounded to bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...common.limits import shown
from ...models.quantised import fits_groups, in_groups
from .errors import CheckpointError
from .quantised import RELEASED, Format, LazyMatrix, mismatch, part_of

CONFIG = "quantization_config"
_WEIGHT = ".qweight"
_STORED = {  # (method, entry that names the layout) -> its values, and what z is more than the stored number
    ("gptq", "checkpoint_format"): {"gptq": 1, "gptq_v2": 0, None: 1},
    ("auto-round", "packing_format"): {"auto_round:auto_gptq": 1, "auto_round": 0, "auto_round:gptqmodel": 0},
}


def with_gptq(
    tensors: Mapping[str, Tensor], path: Path, settings: Callable[[], Mapping[str, Any]]
) -> dict[str, Tensor]:
    """The tensors of a file, in which those of every layer of GPTQ or AutoRound are one LazyMatrix.

    settings: the config.json beside the file (empty without one). Raises CheckpointError for other layouts, and for
    tensors that are missing or of another kind.
    """
    found = dict(tensors)
    layers = [name.removesuffix(_WEIGHT) for name in tensors if name.endswith(_WEIGHT)]
    about = settings().get(CONFIG) if layers else None
    more = _more(about, path) if layers else 0
    in_row = not (isinstance(about, dict) and about.get("desc_act"))
    for layer in layers:
        found[f"{layer}.weight"] = _matrix(layer, more, in_row, tensors, path)
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            found.pop(f"{layer}.{part}", None)
    return found


def _more(about: Any, path: Path) -> int:
    """What zero points are more than the stored numbers. about: the quantization_config."""
    if not isinstance(about, dict):
        raise CheckpointError(
            f"{path.name} is quantised as GPTQ or AutoRound do, and what its zero points mean stands in the "
            f"{CONFIG} of the config.json beside it, which is missing. Download the whole folder, weights and "
            "config.json, under their released names."
        )
    method = about.get("quant_method")
    for (name, entry), values in _STORED.items():
        if method == name and isinstance(value := about.get(entry), (str, type(None))) and value in values:
            return values[value]
    layouts = ", ".join(shown(about[entry]) for _, entry in _STORED if entry in about)
    raise CheckpointError(
        f"{path.name} is quantised by {shown(method)}{f' in the layout {layouts}' if layouts else ''}, which is not "
        f"supported. {RELEASED}, or in GPTQ's layout (gptq, gptq_v2, auto_round:auto_gptq)."
    )


def _matrix(layer: str, more: int, in_row: bool, tensors: Mapping[str, Tensor], path: Path) -> LazyMatrix:
    packed, zeros, scales = (part_of(layer, part, tensors, path) for part in ("qweight", "qzeros", "scales"))
    for part, tensor in (("qweight", packed), ("qzeros", zeros), ("scales", scales)):
        if tensor.ndim != 2 or not tensor.numel() or (tensor.dtype != torch.int32) != (part == "scales"):
            raise mismatch(layer, part, tensor, path)
    groups, rows = scales.shape
    bits = next((bits for bits in (2, 4, 8) if 32 * zeros.shape[1] == rows * bits), 0)
    if not bits or len(zeros) != groups:
        raise mismatch(layer, "qzeros", zeros, path)
    columns = packed.shape[0] * 32 // bits
    if packed.shape[1] != rows:
        raise mismatch(layer, "qweight", packed, path)
    if not scales.is_floating_point():
        raise mismatch(layer, "scales", scales, path)
    order = _order(layer, columns, groups, in_row, tensors, path)
    plain = _unpacked(zeros, bits)
    if more and not plain.is_meta and (plain == 2**bits - 1).any():
        raise CheckpointError(
            f"{path.name}: zero points of {layer} are stored as {2**bits - 1}, which programs read differently (as 0 "
            f"or as {2**bits}). {RELEASED}, or in the layout gptq_v2 or auto_round."
        )
    kept = bits == 4 and order is None and fits_groups(columns, groups)
    form = Format(
        columns,
        partial(_widened, bits=bits, more=more, order=order),
        storage=torch.uint4 if kept else None,
        kept=partial(_kept, more=more) if kept else None,
    )
    return LazyMatrix((packed.t(), plain.t(), scales.t()), form)


def _order(
    layer: str, columns: int, groups: int, in_row: bool, tensors: Mapping[str, Tensor], path: Path
) -> Tensor | None:
    """The group of each column; None if each is the same number of columns in a row. in_row: whether that is so where
    only shapes are known."""
    order = tensors.get(f"{layer}.g_idx")
    whole = columns % groups == 0
    if order is None and whole:
        return None
    if order is None:
        raise CheckpointError(
            f"{path.name}: {layer} has {columns} columns in {groups} groups of unknown sizes, as it lacks "
            f"{layer}.g_idx. {RELEASED}."
        )
    if order.shape != (columns,) or order.dtype not in (torch.int32, torch.int64):
        raise mismatch(layer, "g_idx", order, path)
    if order.is_meta:
        return None if in_row and whole else order
    if order.min() < 0 or order.max() >= groups:
        raise CheckpointError(f"{path.name}: {layer}.g_idx names groups that are not there. Download it again.")
    expected = torch.arange(columns) // (columns // groups)
    return None if whole and torch.equal(order.long(), expected) else order.long()


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """The numbers in each row of words: int32 [n, m] -> uint8 [n, 32 m / bits]."""
    shifts = range(0, 32, bits)
    return torch.stack([(words >> shift & 2**bits - 1).to(torch.uint8) for shift in shifts], dim=-1).flatten(1)


def _widened(words: Tensor, zeros: Tensor, scales: Tensor, *, bits: int, more: int, order: Tensor | None) -> Tensor:
    numbers, zeros, scales = _unpacked(words, bits).float(), zeros.float() + more, scales.float()
    if order is not None:
        return (numbers - zeros[:, order]) * scales[:, order]
    groups = numbers.unflatten(1, (zeros.shape[1], -1))
    return ((groups - zeros[..., None]) * scales[..., None]).flatten(1)


def _kept(words: Tensor, zeros: Tensor, scales: Tensor, *, more: int) -> tuple[Tensor, Tensor]:
    steps = scales.float()
    return in_groups(_unpacked(words, 4), steps, -(zeros.float() + more) * steps)
