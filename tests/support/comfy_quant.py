"""Files as ComfyUI's tools quantise them, written from the definition of the formats."""

import json

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

FP8, INT8 = torch.float8_e4m3fn, torch.int8
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def mark(about):
    """The tensor that marks a layer."""
    return torch.tensor([*json.dumps(about).encode()], dtype=torch.uint8)


def quantised(weight, kind):
    """Suffix -> tensor of a quantised layer, and the fp32 matrix that these stand for.

    kind: a format; "int8 by row" is int8_tensorwise with a scale for every row.
    """
    weight = weight.float()
    if kind == "float8_e4m3fn":
        scale = weight.abs().max() / 448
        numbers = (weight / scale).to(FP8)
        parts = {"weight": numbers, "weight_scale": scale, "input_scale": torch.tensor(1.5)}
        return parts, numbers.float() * scale
    if kind.startswith("int8"):
        scale = weight.abs().amax(1, keepdim=True) / 127 if kind == "int8 by row" else weight.abs().max() / 127
        numbers = (weight / scale).round().to(INT8)
        return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale
    whole = weight.abs().max() / (448 * 6)
    blocks = weight.unflatten(1, (-1, 16))
    scales = (blocks.abs().amax(-1) / 6 / whole).to(FP8)
    total = whole * scales.float()
    codes = ((blocks.abs() / total.clamp(min=1e-30)[..., None])[..., None] - E2M1).abs().argmin(-1)
    values = E2M1[codes] * total[..., None] * blocks.sign()
    codes = (codes + 8 * (blocks < 0)).flatten(1).to(torch.uint8)
    parts = {"weight": codes[:, 0::2] * 16 + codes[:, 1::2], "weight_scale": tiled(scales), "weight_scale_2": whole}
    return parts, values.flatten(1)


def tiled(scales):
    """Scales [N, blocks] in cuBLAS's order, number by number: in tiles of 128 x 4, rows 32 apart beside each other."""
    rows, columns = scales.shape
    down, across = -(-rows // 128), -(-columns // 4)
    found = torch.zeros(down * across * 512)
    for row in range(rows):
        for column in range(columns):
            tile = row // 128 * across + column // 4
            found[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = float(scales[row, column])
    return found.view(down * 128, across * 4).to(FP8)


def quantise_file(tensors, kind, chosen=lambda name: ".layers." in f".{name}", about=None):
    """The tensors of a file with its large matrices in a format, marked, and the same with their wide values."""
    narrow, wide = {}, {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        fits = kind != "nvfp4" or not any(size % 16 for size in tensor.shape)
        if part == "weight" and tensor.ndim == 2 and "norm" not in name and chosen(name) and fits:
            parts, wide[name] = quantised(tensor, kind)
            narrow |= {f"{layer}.{suffix}": part for suffix, part in parts.items()}
            kind_of = "int8_tensorwise" if kind == "int8 by row" else kind
            narrow[f"{layer}.comfy_quant"] = mark({"format": kind_of} | (about or {}))
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
