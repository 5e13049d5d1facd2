"""Measure how storing weights, or keys and values, in fewer bits changes a model's predictions.

    python -m tools.benchmarks storage [--model default] [--pictures 2] [--out FILE.json]

The model generates images in fp32. For each token, the distribution that it predicts from the previous ones
(temperature 1, no guidance) is compared with that of the model with other weights, another cache or another precision:
by total variation (half the sum of absolute differences) and by whether the most likely token stays the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import comfyui_specar as specar
import torch

from .report import commit, find, machine, versions, write
from .runs import PROMPTS

FP8, INT8, INT4 = torch.float8_e4m3fn, torch.int8, torch.uint4
CASES = {  # name -> dtype that is computed in, storage of the large matrices, whether keys and values are in int8
    "bf16": (torch.bfloat16, None, False),
    "fp16": (torch.float16, None, False),
    "fp8, computed in fp32": (torch.float32, FP8, False),
    "fp8, computed in bf16": (torch.bfloat16, FP8, False),
    "int8, computed in fp32": (torch.float32, INT8, False),
    "int8, computed in bf16": (torch.bfloat16, INT8, False),
    "int4, computed in fp32": (torch.float32, INT4, False),
    "int4, computed in bf16": (torch.bfloat16, INT4, False),
    "KV cache in int8, computed in fp32": (torch.float32, None, True),
    "KV cache in int8, computed in bf16": (torch.bfloat16, None, True),
    "int8 and KV cache in int8, computed in fp32": (torch.float32, INT8, True),
    "int8 and KV cache in int8, computed in bf16": (torch.bfloat16, INT8, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks storage",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", default="default", help="name of a bundled model, or a file or folder of a text model"
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="device (default: %(default)s)"
    )
    parser.add_argument("--pictures", type=int, default=2, help="images per prompt")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own)")
    parser.add_argument("--out", type=Path, help="JSON report to write")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)

    path, device = find(options.model), torch.device(options.device)
    model = specar.load_model(path, device, torch.float32)
    drawn = {
        prompt: specar.sample(model, model.encode_prompt(prompt), batch_size=options.pictures).tokens
        for prompt in PROMPTS
    }
    exact = probs(model, drawn)
    report: dict[str, Any] = {
        "model": options.model,
        "machine": machine(device),
        "versions": versions(),
        "commit": commit(),
        "pictures": len(PROMPTS) * options.pictures,
        "tokens": exact.shape[0],
        "bytes in fp32": weight_bytes(model),
        "cases": {},
    }
    for name, (dtype, storage, int8_cache) in CASES.items():
        other = specar.load_model(path, device, dtype, storage=storage, int8_cache=int8_cache)
        found = compare(probs(other, drawn), exact) | {"bytes": weight_bytes(other)}
        report["cases"][name] = found
        print(
            f"{name:44} mean {found['mean']:.4f}  99 % below {found['99 %']:.4f}  max {found['max']:.4f}  "
            f"likeliest token the same {found['top 1']:.2%}  {found['bytes'] / 2**20:.1f} MiB"
        )
    if options.out:
        write(report, options.out)


def probs(model: Any, drawn: dict[str, torch.Tensor]) -> torch.Tensor:
    """The distribution of every token of every image [N, V], as predicted from the cache of the previous ones."""
    logits = [predict(model, model.encode_prompt(prompt), tokens) for prompt, tokens in drawn.items()]
    return torch.cat(logits).float().softmax(-1).flatten(0, 1)


@torch.inference_mode()
def predict(model: Any, conditioning: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [B, S, V+] for every token of images [B, rows, cols]."""
    layout = model.layout().keeping(tokens, torch.ones_like(tokens, dtype=torch.bool))
    state = model.start(conditioning, None, len(tokens), layout, slack=0, guided=False)
    places = torch.arange(layout.length, device=model.device).expand(len(tokens), -1)
    after = model.step(state, layout.forced.to(model.device), places).logits
    return torch.cat((state.prefill.logits, after[:, :-1]), dim=1)


def compare(found: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """Total variation: mean, 99th percentile, largest; share of distributions whose likeliest token is the same."""
    moved = (found - exact).abs().sum(-1) / 2
    same = (found.argmax(-1) == exact.argmax(-1)).float().mean()
    numbers = {"mean": moved.mean(), "99 %": moved.quantile(0.99), "max": moved.max(), "top 1": same}
    return {name: round(float(number), 5) for name, number in numbers.items()}


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of a model's parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


if __name__ == "__main__":
    main()
