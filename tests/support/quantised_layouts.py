"""Matrices in the layouts of other programs, written number by number from their definition: bitsandbytes and GPTQ.

Each function returns the tensors of a matrix by name, and the fp32 matrix that they stand for.
"""

import json

import torch

from .comfy_quant import mark, rewritten

NF4 = 0.9677083  # where the quantiles of a normal distribution begin that NF4 is made of (arXiv:2305.14314)
FP4 = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3]) / 12


def table_of(kind):
    """The 16 numbers that codes of "nf4" or "fp4" stand for, in the order of the codes."""
    if kind == "fp4":
        return torch.cat((FP4, -FP4))
    below, above = (torch.linspace(NF4, 0.5, count, dtype=torch.float64)[:-1] for count in (8, 9))
    quantiles = [2**0.5 * torch.erfinv(2 * part - 1) for part in (above, below)]
    values = torch.cat((-quantiles[0], torch.zeros(1), quantiles[1])).sort().values
    return (-values.flip(0) / values.abs().max()).float()


def bitsandbytes(name, weight, kind="nf4", block=64, step=256, nested=True, storage=torch.uint8):
    """A matrix ``name`` in 4 bits; step: blocks that share a scale of scales."""
    table, numbers = table_of(kind), weight.flatten()
    scales = [numbers[at : at + block].abs().max() for at in range(0, len(numbers), block)]
    absmax = torch.stack(scales)
    about = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [*weight.shape]}
    tensors = {"absmax": absmax, "quant_map": table}
    if nested:
        offset, levels = float(absmax.mean()), torch.linspace(-1, 1, 256)
        rest = (absmax - offset).split(step)
        outer = torch.stack([part.abs().max() for part in rest])
        codes = [(part[:, None] / most - levels).abs().argmin(1) for part, most in zip(rest, outer, strict=True)]
        absmax = torch.cat([levels[code] * most for code, most in zip(codes, outer, strict=True)]) + offset
        about |= {"nested_blocksize": step, "nested_dtype": "float32", "nested_offset": offset}
        tensors = {"absmax": torch.cat(codes).byte(), "quant_map": table, "nested_quant_map": levels}
        tensors["nested_absmax"] = outer
    by_number = absmax.repeat_interleave(block)[: len(numbers)]
    codes = ((numbers / by_number)[:, None] - table).abs().argmin(1)
    filled = torch.cat((codes, torch.zeros(len(codes) % 2, dtype=codes.dtype))).byte()
    packed = (filled[0::2] * 16 + filled[1::2]).view(storage)[:, None]
    found = {name: packed} | {f"{name}.{part}": tensor for part, tensor in tensors.items()}
    found[f"{name}.quant_state.bitsandbytes__{kind}"] = mark(about)
    return found, (table[codes] * by_number).view_as(weight)


def llm_int8(name, weight):
    """A matrix ``name`` in 8 bits of bitsandbytes."""
    layer, scale = name.removesuffix(".weight"), weight.abs().amax(1)
    numbers = (weight / scale[:, None] * 127).round().to(torch.int8)
    order = torch.tensor(0, dtype=torch.uint8)
    found = {name: numbers, f"{layer}.SCB": scale, f"{layer}.weight_format": order}
    return found, numbers.float() * (scale / 127)[:, None]


def gptq(name, weight, bits=4, group=128, symmetric=True, more=1, order=None):
    """A matrix ``name`` in GPTQ's layout. more: how much less than the zero points is stored. order: the group of each
    column, stored as g_idx (None: groups in a row, and it is not stored)."""
    layer, (rows, columns), top = name.removesuffix(".weight"), weight.shape, 2**bits - 1
    places = order if order is not None else torch.arange(columns) // group
    scales, zeros = torch.empty(columns // group, rows), torch.empty(columns // group, rows)
    for index in range(columns // group):
        part = weight[:, places == index]
        if symmetric:
            scales[index], zeros[index] = part.abs().amax(1) * 2 / top, 2 ** (bits - 1)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[index] = (high - low) / top
            zeros[index] = (-low / scales[index]).round().clamp(1, top)
    scales = scales.half()
    steps, offsets = scales.float()[places].T, zeros[places].T
    numbers = ((weight / steps).round() + offsets).clamp(0, top)
    found = {"qweight": words(numbers.T.long(), bits).contiguous(), "scales": scales}
    found["qzeros"] = words((zeros - more).T.long(), bits).T.contiguous()
    if order is not None:
        found["g_idx"] = order.int()
    return {f"{layer}.{part}": tensor for part, tensor in found.items()}, (numbers - offsets) * steps


def words(numbers, bits):
    """Numbers [n, m] packed along n into int32 [n bits / 32, m], the first in the lowest bits."""
    each = 32 // bits
    found = torch.zeros(len(numbers) // each, numbers.shape[1], dtype=torch.int64)
    for index, row in enumerate(numbers):
        found[index // each] += row << bits * (index % each)
    return torch.where(found >= 2**31, found - 2**32, found).int()


def config(method, **about):
    """What stands in config.json of a folder."""
    return {"quantization_config": {"quant_method": method} | about}


def in_folder(folder, pack, about=None, chosen=lambda name: ".layers." in name):
    """Rewrite model.safetensors in a folder: matrices that are ``chosen`` as ``pack`` (name, weight) returns them, the
    others as they are, and ``about`` added to config.json. Returns the tensors that those now stand for."""
    wide = {}

    def change(tensors):
        narrow = {}
        for name, tensor in tensors.items():
            matrix = name.endswith(".weight") and tensor.ndim == 2 and "norm" not in name and chosen(name)
            parts, wide[name] = pack(name, tensor.float()) if matrix else ({name: tensor}, tensor)
            narrow |= parts
        return narrow, {}

    rewritten(folder, change)
    if about:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | about), "utf-8")
    return wide
