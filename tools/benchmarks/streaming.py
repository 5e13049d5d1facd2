"""Count the bytes of weights that an image costs if half of them are streamed from main memory.

    COMFYUI_PATH=/path/to/ComfyUI python -m tools.benchmarks streaming [--out FILE.json]

The bundled model is loaded partially, as ComfyUI loads a model that does not fit, and generates images on a CPU. There
nothing has to be copied; what a GPU would have to is counted whenever a layer is used whose weights were left in main
memory. The time of the copies is calculated from the speed of a link.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import comfyui_specar as specar
import torch
from comfyui_specar.models import products
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from torch import nn

from .report import commit, machine, versions, write
from .runs import PROMPTS

SCHEMA = "specar.streaming/1"
LINK = 25e9  # bytes per second: what PCIe 4.0 x16 reaches
STORAGES = ("fp32", "int8 (storage)")
METHODS = {"next token": NextToken(), "SJD, window 16": SJD(window=16), "SJD, window 32": SJD(window=32)}
KEPT = 0.5  # share of the weights on the device


class Link:
    """Between main memory and the device. copied: bytes so far."""

    def __init__(self) -> None:
        self.copied = 0

    def carry(self, layer: nn.Module, _inputs: Any) -> None:
        """A layer whose weights are in main memory is used."""
        self.copied += sum(weight.numel() * weight.element_size() for weight in layer.parameters(recurse=False))


def streamed(model: nn.Module) -> list[nn.Module]:
    """Layers that ComfyUI left in main memory when it loaded a model partially."""
    return [
        layer
        for layer in model.modules()
        if any(True for _ in layer.parameters(recurse=False))
        and hasattr(layer, "comfy_cast_weights")
        and not getattr(layer, "comfy_patched_weights", False)
    ]


@contextmanager
def counted(model: nn.Module) -> Iterator[Link]:
    """The link across which a partially loaded model's weights are copied meanwhile."""
    link, layers, at_hand = Link(), set(streamed(model)), products._at_hand
    hooks = [layer.register_forward_pre_hook(link.carry) for layer in layers]
    try:
        # Their weights would be on another device, so each layer is called.
        with patch.object(products, "_at_hand", lambda layer, x: layer not in layers and at_hand(layer, x)):
            yield link
    finally:
        for hook in hooks:
            hook.remove()


def load_partially(choice: str, dtype: str) -> Any:
    """A model of the loader's choices as LoadedModel, with half of its weights loaded."""
    from comfyui_specar.nodes.comfy_runtime.models import open_model

    loaded = open_model(choice, dtype, None)
    patcher = loaded.patcher
    patcher.load(patcher.load_device, lowvram_model_memory=int(KEPT * patcher.model_size()))
    return loaded


def measure(choice: str, dtype: str, prompts: tuple[str, ...] = PROMPTS) -> dict[str, Any]:
    """Bytes of the weights, of those that are streamed, and a row for each method: means of an image per prompt."""
    loaded = load_partially(choice, dtype)
    model, rows = loaded.model, []
    for name, method in METHODS.items():
        passes, copied = [], []
        for seed, prompt in enumerate(prompts):
            conditioning = model.encode_prompt(prompt)
            with counted(model) as link:
                out = specar.sample(model, conditioning, method, seed=seed, cfg=2.0)
            passes.append(out.trace.summary()["target_passes"])
            copied.append(link.copied)
        rows.append(
            {
                "method": name,
                "passes": statistics.fmean(passes),
                "copied": statistics.fmean(copied),
                "seconds, calculated": statistics.fmean(copied) / LINK,
            }
        )
    left = [weight for layer in streamed(model) for weight in layer.parameters(recurse=False)]
    return {
        "dtype": dtype,
        "weights": loaded.patcher.model_size(),
        "streamed": sum(weight.numel() * weight.element_size() for weight in left),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks streaming",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="JSON report to write")
    options = parser.parse_args()
    sys.path.insert(0, os.environ["COMFYUI_PATH"])
    from comfy.cli_args import args

    args.cpu = True
    from comfyui_specar.nodes.comfy_runtime.folders import register_folders

    register_folders()
    report = {
        "schema": SCHEMA,
        "machine": machine(torch.device("cpu")),
        "versions": versions(),
        "commit": commit(),
        "link, bytes per second": LINK,
        "images": len(PROMPTS),
        "guidance": 2.0,
        "loaded": [],
    }
    for dtype in STORAGES:
        found = measure("default (bundled)", dtype)
        report["loaded"].append(found)
        print(f"{dtype}: {found['streamed'] / 2**20:.1f} of {found['weights'] / 2**20:.1f} MiB are streamed")
        for row in found["rows"]:
            print(f"  {row['method']:16} {row['passes']:6.1f} passes, {row['copied'] / 2**30:.2f} GiB copied")
    if options.out:
        write(report, options.out)


if __name__ == "__main__":
    main()
