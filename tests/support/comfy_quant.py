"""Files as ComfyUI's tools quantise them, written from the definition of the formats."""

import json

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

FP8, INT8 = torch.float8_e4m3fn, torch.int8
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TURNED = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64) / 2
ROTATED = {  # kind -> how a layer of it is marked; groups of 16 fit into tiny models
    "int8 convrot": {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 16}
}
MARKS = ROTATED | {"int8 by row": {"format": "int8_tensorwise"}}  # of kinds that are no names of formats


def mark(about):
    """The tensor that marks a layer."""
    return torch.tensor([*json.dumps(about).encode()], dtype=torch.uint8)


def quantised(weight, kind, **options):
    """Suffix -> tensor of a quantised layer, and the fp32 matrix that these stand for.

    kind: a format, or one of MARKS; "int8 by row" is int8_tensorwise with a scale for every row. nvfp4 and mxfp8 are
    padded to multiples of 16 and 32. Rotated ones hold for
    ``options`` like those of ROTATED.
    """
    weight = weight.float()
    if kind in ROTATED:
        return turned(weight, **(ROTATED[kind] | options))
    if kind == "float8_e4m3fn":
        scale = weight.abs().max() / 448
        numbers = (weight / scale).to(FP8)
        parts = {"weight": numbers, "weight_scale": scale, "input_scale": torch.tensor(1.5)}
        return parts, numbers.float() * scale
    if kind.startswith("int8"):
        scale = weight.abs().amax(1, keepdim=True) / 127 if kind == "int8 by row" else weight.abs().max() / 127
        numbers = (weight / scale).round().to(INT8)
        return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale
    rows, columns = weight.shape
    each = 32 if kind == "mxfp8" else 16
    weight = F.pad(weight, (0, -columns % each, 0, -rows % each))
    if kind == "mxfp8":
        blocks = weight.unflatten(1, (-1, 32))
        power = (blocks.abs().amax(-1, keepdim=True) / 448).log2().ceil().clamp(min=-127)
        numbers = (blocks / 2**power).to(FP8)
        scales = tiled((power[..., 0] + 127).byte()).view(torch.uint8)
        wide = (numbers.float() * 2**power).flatten(1)[:rows, :columns]
        return {"weight": numbers.flatten(1), "weight_scale": scales}, wide
    whole = weight.abs().max() / (448 * 6)
    blocks = weight.unflatten(1, (-1, 16))
    scales = (blocks.abs().amax(-1) / 6 / whole).to(FP8)
    total = whole * scales.float()
    codes = ((blocks.abs() / total.clamp(min=1e-30)[..., None])[..., None] - E2M1).abs().argmin(-1)
    values = E2M1[codes] * total[..., None] * blocks.sign()
    codes = (codes + 8 * (blocks < 0)).flatten(1).to(torch.uint8)
    parts = {"weight": codes[:, 0::2] * 16 + codes[:, 1::2], "weight_scale": tiled(scales), "weight_scale_2": whole}
    return parts, values.flatten(1)[:rows, :columns]


def rotation(size):
    """The matrix of ConvRot: a Kronecker product of 4 x 4 matrices."""
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < size:
        found = torch.kron(found, TURNED)
    return found


def turned(weight, convrot_groupsize, **_marks):
    """As ``quantised``, for a kind of ROTATED."""
    matrix = rotation(convrot_groupsize)
    grouped = weight.double().unflatten(1, (-1, convrot_groupsize)) @ matrix.T
    parts, wide = quantised(grouped.flatten(1).float(), "int8 by row")
    return parts, (wide.double().unflatten(1, (-1, convrot_groupsize)) @ matrix).flatten(1).float()


def tiled(scales):
    """Scales [N, blocks] in cuBLAS's order, number by number: in tiles of 128 x 4, rows 32 apart beside each other."""
    rows, columns = scales.shape
    down, across = -(-rows // 128), -(-columns // 4)
    found = torch.zeros(down * across * 512)
    for row in range(rows):
        for column in range(columns):
            tile = row // 128 * across + column // 4
            found[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = float(scales[row, column])
    return found.view(down * 128, across * 4).to(scales.dtype)


def quantise_file(tensors, kind, chosen=lambda name: ".layers." in f".{name}", about=None):
    """The tensors of a file with its large matrices in a format, marked, and the same with their wide values."""
    narrow, wide = {}, {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        if part == "weight" and tensor.ndim == 2 and "norm" not in name and chosen(name):
            parts, wide[name] = quantised(tensor, kind)
            narrow |= {f"{layer}.{suffix}": part for suffix, part in parts.items()}
            narrow[f"{layer}.comfy_quant"] = mark(MARKS.get(kind, {"format": kind}) | (about or {}))
        else:
            narrow[name] = wide[name] = tensor
    return narrow, wide


def rewritten(path, change):
    """Replace the tensors of every weight file at ``path`` by change(tensors) -> (tensors, metadata to add)."""
    for file in [path] if path.is_file() else sorted(path.glob("model*.safetensors")):
        with safe_open(str(file), "pt") as opened:
            about = opened.metadata() or {}
        tensors, more = change(load_file(str(file)))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(file), about | more)
    return path
