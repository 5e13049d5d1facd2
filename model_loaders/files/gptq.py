"""Matrices of GPTQ and AutoRound, in 2, 4 or 8 bits.

Documented by intel/auto-round: auto_round_extension/torch/qlinear_torch.py and qlinear_torch_zp.py (QuantLinear: pack
and forward), and which of them a file has, by the packing formats of auto_round/inference/backend.py. The layout is
that of AutoGPTQ and ModelCloud/GPTQModel. Of a matrix [N, K] in b bits with G groups along K, ``<layer>`` has

* ``qweight``, int32 [K b / 32, N]: 32 / b numbers q of a column each, the first in the lowest bits;
* ``qzeros``, int32 [G, N b / 32]: zero points z, packed so along N;
* ``scales`` [G, N]: s;
* ``g_idx``, int32 [K]: the group of each column; without it, a group is K / G columns in a row.

The weight is s x (q - z). Files of the format "gptq" and of packing_format "auto_round:auto_gptq" store z - 1. Which it
is, stands in the ``quantization_config`` of config.json, or in the quantize_config.json that AutoGPTQ wrote before, so
one of them must lie beside the weights. Where it says ``sym``, each z is 2^(b - 1), so that the numbers tell, as they
do if they are all so and it does not say ``sym``. What it says of bits and groups must hold for them.

Matrices in 4 bits whose groups are multiples of those of kernels/linear.py, in a row, can be kept: a number is then
q x step + minimum with the step s and the minimum - s z, both rounded to bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...limits.limits import FileError, quote
from ...models.networks.quantised import fits_groups, join_groups
from .quantised import RELEASED, Format, LazyMatrix, mismatch, part_of

_BITS = (2, 4, 8)
_WEIGHT = ".qweight"
_METHOD = ("method", "quant_method")  # GPTQModel's name of an entry, and that of others
_STORED = {  # (method, entries that name the layout) -> its values, and what z is more than the stored number
    ("gptq", ("format", "checkpoint_format")): {"gptq": 1, "gptq_v2": 0, None: 1},
    ("auto-round", ("packing_format",)): {"auto_round:auto_gptq": 1, "auto_round": 0, "auto_round:gptqmodel": 0},
}
_OTHER = "It belongs to other weights: use the one that was released with these."


@dataclass(frozen=True)
class _Stated:
    """What a description says of the layers. more: what z is more than the stored number. symmetric, bits, group_size:
    None if it does not say, or says something else of some; group_size -1: a row."""

    more: int
    symmetric: bool | None
    ordered: bool
    bits: int | None
    group_size: int | None


def with_gptq(tensors: Mapping[str, Tensor], about: Callable[[], Any]) -> dict[str, Tensor]:
    """The tensors of a file, in which those of every layer of GPTQ or AutoRound are one LazyMatrix.

    about: the description beside the file (None: there is none). Raises FileError for other layouts, for tensors
    that are missing or of another kind, and for those of which the description is wrong.
    """
    found = dict(tensors)
    layers = [name.removesuffix(_WEIGHT) for name in tensors if name.endswith(_WEIGHT)]
    if not layers:
        return found
    stated = _stated(about())
    for layer in layers:
        found[f"{layer}.weight"] = _matrix(layer, stated, tensors)
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            found.pop(f"{layer}.{part}", None)
    return found


def _stated(about: Any) -> _Stated:
    """What a quantization_config or quantize_config.json says. Raises FileError for other layouts."""
    if not isinstance(about, dict):
        raise FileError(
            "it is quantised as GPTQ or AutoRound do. What its zero points mean stands in the "
            "quantization_config of config.json, or in quantize_config.json, neither of which is beside it. Download "
            "the whole folder, weights and config.json, under their released names."
        )
    method = _entry(about, _METHOD)
    entries, values = next(((entries, known) for (name, entries), known in _STORED.items() if name == method), ((), {}))
    layout = _entry(about, entries)
    if layout not in [*values]:
        named = f" in the layout {quote(layout)}" if layout is not None else ""
        raise FileError(
            f"it is quantised by {quote(method)}{named}, which is not supported. {RELEASED}, or in GPTQ's "
            "layout (gptq, gptq_v2, auto_round:auto_gptq)."
        )
    mixed = any(about.get(entry) for entry in ("dynamic", "extra_config"))
    bits, size = (each if type(each) is int and not mixed else None for each in map(about.get, ("bits", "group_size")))
    if bits not in (None, *_BITS):
        raise _other_bits(bits)
    ordered = bool(about.get("desc_act")) and not about.get("static_groups")
    sym = about.get("sym")
    symmetric = None if sym is None or (sym and mixed) else bool(sym)
    return _Stated(values[layout], symmetric, ordered, bits, size)


def _entry(about: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """The entry of a description that has one of these names (None: neither). Raises FileError if two differ."""
    stated = [about[name] for name in names if about.get(name) is not None]
    if any(each != stated[0] for each in stated):
        raise FileError(
            f"the description beside it contradicts itself: {' and '.join(names)} are "
            f"{' and '.join(map(quote, stated))}. Remove the wrong one, or use the description that was released."
        )
    return stated[0] if stated else None


def _other_bits(bits: int) -> FileError:
    return FileError(
        f"it is quantised in {bits} bits, but only {', '.join(map(str, _BITS))} are supported. {RELEASED}."
    )


def _matrix(layer: str, stated: _Stated, tensors: Mapping[str, Tensor]) -> LazyMatrix:
    packed, zeros, scales = (part_of(layer, part, tensors) for part in ("qweight", "qzeros", "scales"))
    for part, tensor in (("qweight", packed), ("qzeros", zeros), ("scales", scales)):
        if tensor.ndim != 2 or not tensor.numel() or (tensor.dtype != torch.int32) != (part == "scales"):
            raise mismatch(layer, part, tensor)
    groups, rows = scales.shape
    bits, rest = divmod(32 * zeros.shape[1], rows)
    if rest or len(zeros) != groups or not 0 < bits <= 8:
        raise mismatch(layer, "qzeros", zeros)
    if bits not in _BITS:
        raise _other_bits(bits)
    columns = packed.shape[0] * 32 // bits
    if packed.shape[1] != rows:
        raise mismatch(layer, "qweight", packed)
    if not scales.is_floating_point():
        raise mismatch(layer, "scales", scales)
    size = columns if stated.group_size == -1 else stated.group_size
    if stated.bits not in (None, bits) or (size is not None and (size < 1 or groups != -(-columns // size))):
        raise FileError(
            f"{layer} has {columns} columns of {bits} bits in {groups} groups, but the description beside "
            f"it says {stated.bits or bits} bits and group_size {stated.group_size}. {_OTHER}"
        )
    order = _order(layer, columns, groups, size, stated, tensors)
    plain = _unpacked(zeros, bits)
    more = _more(layer, plain, bits, stated)
    kept = bits == 4 and order is None and fits_groups(columns, groups)
    form = Format(
        columns,
        partial(_widened, bits=bits, more=more, order=order),
        storage=torch.uint4 if kept else None,
        kept=partial(_kept, more=more) if kept else None,
    )
    return LazyMatrix((packed.t(), plain.t(), scales.t()), form)


def _more(layer: str, plain: Tensor, bits: int, stated: _Stated) -> int:
    """What zero points are more than the stored numbers: as the numbers tell, or else the description.

    Raises FileError for a description that is wrong, and where programs differ.
    """
    if plain.is_meta:
        return stated.more
    middle, top = 2 ** (bits - 1), 2**bits - 1
    for more in () if stated.symmetric is False else (0, 1):
        if (plain == middle - more).all():
            return more
    if stated.symmetric:
        raise FileError(f"zero points of {layer} are not {middle}, but the description beside it says sym. {_OTHER}")
    if stated.more and (plain == top).any():
        raise FileError(
            f"zero points of {layer} are stored as {top}, which programs read differently (as 0 or as "
            f"{top + 1}). {RELEASED}, or in the layout gptq_v2 or auto_round."
        )
    return stated.more


def _order(
    layer: str, columns: int, groups: int, size: int | None, stated: _Stated, tensors: Mapping[str, Tensor]
) -> Tensor | None:
    """The group of each column; None if each is the same number of columns in a row. size: that number as stated."""
    order, whole = tensors.get(f"{layer}.g_idx"), columns % groups == 0
    size = columns // groups if size is None and whole else size
    if order is not None and (order.shape != (columns,) or order.dtype not in (torch.int32, torch.int64)):
        raise mismatch(layer, "g_idx", order)
    if order is not None and order.is_meta:
        return None if whole and not stated.ordered else order
    if order is None or (groups > 1 and not order.any()):  # some programs write zeros for groups in a row
        if groups > 1 and (stated.ordered or size is None):
            known = "in the order of activations (desc_act)" if stated.ordered else "of unknown sizes"
            raise FileError(
                f"{layer} has {columns} columns in {groups} groups {known}, but {layer}.g_idx, which says "
                f"which is in which, {'is missing' if order is None else 'holds zeros only'}. {RELEASED}, or save it "
                "again with the program that quantised it."
            )
        order = torch.arange(columns) // (size or columns)
    if order.min() < 0 or order.max() >= groups:
        raise FileError(f"{layer}.g_idx names groups that are not there. {RELEASED}.")
    counts = order.bincount(minlength=groups)
    size = size or int(counts[0])
    if (counts[:-1] != size).any() or counts[-1] != columns - (groups - 1) * size:
        raise FileError(f"{layer}.g_idx has groups of other sizes than {size} columns. {RELEASED}.")
    in_row = whole and torch.equal(order.long(), torch.arange(columns) // (columns // groups))
    return None if in_row else order.long()


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
    return join_groups(_unpacked(words, 4), steps, -(zeros.float() + more) * steps)
