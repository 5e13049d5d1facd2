"""Measure time and memory to load checkpoints of released sizes.

    python -m tools.benchmarks loading [--models janus-pro-1b simplear-1.5b] [--folder /tmp] [--out FILE.json]
    python -m tools.benchmarks loading --models janus-pro-7b --cases bfloat16 float8_e4m3fn  # 15 GB; fp32 needs 28

Writes a checkpoint with the names and shapes of the released model and random bf16 weights, in two shards, to a
temporary folder. A separate process loads it twice, the first time with the file dropped from the page cache (as far as
the kernel follows the request). Anonymous memory is what the process holds; file-backed memory is the checkpoint in the
page cache, which the kernel can reclaim. Then the first token of an image is generated, without guidance, which reads
all weights: in bf16 they are mapped, so it reads from the disk what loading has left there.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import comfyui_specar as specar
import torch
from comfyui_specar.models.vq import VQConfig, VQModel
from safetensors.torch import save_file

from .report import commit, machine
from .report import write as save
from .sizes import PROMPT

Shapes = dict[str, tuple[int, ...]]
SHARDS = 2
CASES = (("float32", None), ("bfloat16", None), ("bfloat16", "float8_e4m3fn"))  # dtype, storage of large matrices
KINDS = {"anonymous": "RssAnon", "file-backed": "RssFile"}
COSTS = ("anonymous peak", "anonymous", "file-backed peak", "file-backed")


# Checkpoints


def language_model(root: str, dim: int, ffn: int, layers: int, keys: int, words: int, biased: bool) -> Shapes:
    """Tensors of a Llama-type model as transformers names them; ``keys``: width of keys and values."""
    found = {f"{root}embed_tokens.weight": (words, dim), f"{root}norm.weight": (dim,)}
    for layer in (f"{root}layers.{i}." for i in range(layers)):
        for part, height in (("q", dim), ("k", keys), ("v", keys)):
            found[f"{layer}self_attn.{part}_proj.weight"] = (height, dim)
            if biased:
                found[f"{layer}self_attn.{part}_proj.bias"] = (height,)
        found |= {
            f"{layer}{name}.weight": shape
            for name, shape in (
                ("self_attn.o_proj", (dim, dim)),
                ("mlp.gate_proj", (ffn, dim)),
                ("mlp.up_proj", (ffn, dim)),
                ("mlp.down_proj", (dim, ffn)),
                ("input_layernorm", (dim,)),
                ("post_attention_layernorm", (dim,)),
            )
        }
    return found


def janus(dim: int = 2048, ffn: int = 5632, layers: int = 24, words: int = 102400, codes: int = 16384) -> Shapes:
    """Janus-Pro-1B as DeepSeek released it: with the head for words, a vision tower's share, and the image decoder."""
    found = language_model("language_model.model.", dim, ffn, layers, dim, words, biased=False)
    found |= {"language_model.lm_head.weight": (words, dim), "gen_embed.weight": (codes, 8)}
    for name, outer, inner in (
        ("gen_aligner.layers.0", dim, 8),
        ("gen_aligner.layers.2", dim, dim),
        ("gen_head.vision_head", codes, dim),
        ("gen_head.output_mlp_projector", dim, dim),
        ("aligner.layers.0", dim, 1024),
        ("aligner.layers.2", dim, dim),
        *((f"vision_model.vision_tower.blocks.{i}.mlp", 1024, 12 * 1024) for i in range(layers)),
    ):
        found |= {f"{name}.weight": (outer, inner), f"{name}.bias": (outer,)}
    with torch.device("meta"):
        decoder = VQModel(VQConfig(codebook_size=codes)).state_dict()
    return found | {f"gen_vision_model.{name}": tuple(tensor.shape) for name, tensor in decoder.items()}


def simplear(dim: int = 1536, ffn: int = 8960, layers: int = 28, words: int = 215672) -> Shapes:
    """SimpleAR-1.5B: a Qwen2.5 whose head is tied to its words."""
    return language_model("model.", dim, ffn, layers, 256, words, biased=True)


MODELS: dict[str, tuple[Shapes, dict[str, Any]]] = {  # name -> shapes, config.json
    "janus-pro-1b": (janus(), {"model_type": "multi_modality", "language_config": {"num_attention_heads": 16}}),
    "janus-pro-7b": (
        janus(4096, 11008, 30),
        {"model_type": "multi_modality", "language_config": {"num_attention_heads": 32}},
    ),
    "simplear-1.5b": (simplear(), {"model_type": "qwen2", "num_attention_heads": 12, "tie_word_embeddings": True}),
}


def write(folder: Path, shapes: Shapes, config: dict[str, Any], shards: int = SHARDS) -> Path:
    """Random bf16 weights in a folder as Hugging Face lays it out. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    block = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    where, names = {}, sorted(shapes)
    per_shard = -(-sum(map(_size, shapes.values())) // shards)
    part: dict[str, torch.Tensor] = {}
    held, number = 0, 1
    for name in names:
        count = _size(shapes[name])
        part[name] = block.repeat(-(-count // len(block)))[:count].view(shapes[name]).clone()
        held += count
        where[name] = f"model-{number:05}-of-{shards:05}.safetensors"
        if held >= number * per_shard or name == names[-1]:
            save_file(part, folder / where[name])
            part, number = {}, number + 1
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}), encoding="utf-8")
    return folder


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


# Measuring


def memory() -> dict[str, int]:
    """Bytes that this process holds, by kind."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return {kind: int(lines[entry].split()[0]) * 1024 for kind, entry in KINDS.items()}


def watch(load: Callable[[], Any], interval: float = 0.002) -> tuple[Any, dict[str, Any]]:
    """What ``load`` returns, and what it cost: seconds; bytes above those before it, at most and in the end."""
    gc.collect()
    before, peak, done = memory(), memory(), threading.Event()

    def look() -> None:
        while not done.wait(interval):
            for kind, held in memory().items():
                peak[kind] = max(peak[kind], held)

    watcher = threading.Thread(target=look)
    watcher.start()
    began = time.perf_counter()
    try:
        loaded = load()
    finally:
        seconds = time.perf_counter() - began
        done.set()
        watcher.join()
    gc.collect()
    after = memory()
    costs = {"seconds": round(seconds, 2)}
    for kind in KINDS:
        costs |= {f"{kind} peak": max(peak[kind], after[kind]) - before[kind], kind: after[kind] - before[kind]}
    return loaded, costs


def measure(folder: Path, dtype: str, storage: str | None, threads: int) -> dict[str, Any]:
    """Load a model in this process, which has loaded nothing yet, and say what it cost."""
    torch.set_num_threads(threads)
    options = {"dtype": getattr(torch, dtype), "storage": storage and getattr(torch, storage)}
    model, costs = watch(lambda: specar.load_model(folder, **options))
    held = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    read = dict(line.split(": ") for line in Path("/proc/self/io").read_text("utf-8").splitlines())["read_bytes"]
    weights, used = sum(held.values()), sum(tensor.numel() for tensor in model.parameters())
    return (
        {"dtype": dtype, "storage": storage, "parameters": used, "weights": weights, "read": int(read)}
        | costs
        | {"first token": round(first_token(model), 2)}
    )


def first_token(model: Any) -> float:
    """Seconds of the prompt's pass and of the token after it."""

    class DecidedError(Exception):
        """There is a token."""

    def stop(progress: Any) -> None:
        if progress.committed.any():
            raise DecidedError

    began = time.perf_counter()
    try:
        specar.sample(model, model.encode_ids(range(1, PROMPT + 1)), specar.methods.NextToken(), cfg=1, callback=stop)
    except DecidedError:
        return time.perf_counter() - began
    raise RuntimeError("The image is finished, and no callback has seen a token of it.")


def forget(folder: Path) -> None:
    """Ask the kernel to drop a folder's files from its page cache."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def elsewhere(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns, called in a new process."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def runs(folder: Path, threads: int, cases: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every case, each in a new process: with the files out of the page cache, then with them in it."""
    for dtype, storage in CASES:
        if (storage or dtype) not in cases:
            continue
        for cached in (False, True):
            if not cached:
                forget(folder)
            yield {"cached": cached} | elsewhere(measure, folder, dtype, storage, threads)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks loading",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--models",
        choices=MODELS,
        nargs="+",
        default=["janus-pro-1b", "simplear-1.5b"],
        help="models to load (default: %(default)s)",
    )
    parser.add_argument(
        "--cases",
        choices=(names := [storage or dtype for dtype, storage in CASES]),
        nargs="+",
        default=names,
        help="precisions, or that of weights stored in fewer bits (default: all)",
    )
    parser.add_argument("--folder", type=Path, help="folder for the temporary checkpoints, of 3 to 5 GB each (7B: 15)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: %(default)s)")
    parser.add_argument("--note", help="remark to store in the report")
    parser.add_argument("--out", type=Path, help="JSON report to write")
    options = parser.parse_args()
    about = machine(torch.device("cpu")) | {"threads": options.threads}
    report = {"machine": about, "commit": commit(), "note": options.note, "models": {}}
    for name in options.models:
        with tempfile.TemporaryDirectory(dir=options.folder) as place:
            folder = elsewhere(write, Path(place) / name, *MODELS[name])
            size = sum(file.stat().st_size for file in folder.iterdir())
            print(f"{name}: {size / 1e9:.2f} GB in {SHARDS} shards, bf16")
            report["models"][name] = {"bytes": size, "shards": SHARDS, "runs": []}
            for run in runs(folder, options.threads, options.cases):
                report["models"][name]["runs"].append(run)
                case = f"{run['dtype']}{', stored as ' + run['storage'] if run['storage'] else ''}"
                sizes = ", ".join(f"{key} {run[key] / 1e9:.2f}" for key in ("weights", "read", *COSTS))
                print(
                    f"  {case}, cached {run['cached']}: {run['seconds']} s, first token "
                    f"{run['first token']} s; GB: {sizes}",
                    flush=True,
                )
    if options.out:
        save(report, options.out)
        print(f"written to {options.out}")


if __name__ == "__main__":
    main()
