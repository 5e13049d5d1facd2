"""A Harmon-shaped model small enough for a test, with weights that any program can rebuild from a tensor's name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from comfyui_specar.model_loaders.text.qwen2 import Qwen2
from comfyui_specar.models.networks.diffusion_head import DiffusionHead
from comfyui_specar.models.networks.harmon import Harmon
from comfyui_specar.models.networks.mar import MARConfig
from safetensors.torch import save_file
from torch import Tensor

from .tiny import fill, named_shapes
from .tiny_family import Files, Language, Tiny
from .tiny_mar import mar_fill

MAR = MARConfig(dim=32, encoder_layers=2, decoder_layers=2, heads=4, rows=4, cols=4, slots=4, conditions=10)
WIDTH, LAYERS, HEADS, KV_HEADS, HIDDEN, VOCAB = 64, 2, 4, 2, 128, 300  # of the language model
STEPS = 5  # of the diffusion head
SPECIAL = {"<|endoftext|>": 256, "<|im_start|>": 257, "<|im_end|>": 258}


def harmon_shapes(
    config: MARConfig = MAR,
    head: tuple[int, int] = (32, 2),
    llm: tuple[int, ...] = (WIDTH, LAYERS, HEADS, KV_HEADS, HIDDEN, VOCAB),
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a released Harmon file, the text head and the class table that nobody reads included. head:
    width and depth; llm: arguments of Qwen2."""
    whole = named_shapes(
        lambda: {
            "": Harmon(replace(config, conditions=0), Qwen2(*llm)),
            "mar.diffloss.": DiffusionHead(config.channels, config.dim, *head),
        }
    )
    return whole | {"mar.class_emb.weight": (config.conditions, config.dim), "llm.lm_head.weight": (llm[-1], llm[0])}


def harmon_fill(name: str, shape: tuple[int, ...]) -> Tensor:
    """As mar_fill; embeddings have unit variance. The head predicts hardly any noise (x 0.0001) and small variances
    (x 0.2): its first step divides by 0.00005, so that an untrained one would leave all sensible numbers behind.
    """
    if name == "llm.model.embed_tokens.weight":
        return fill(f"{name} embedding", shape)
    values = mar_fill(name, shape)
    if ".final_layer.linear." in name:
        values[: MAR.channels] *= 1e-4
        values[MAR.channels :] *= 0.2
    return values


def harmon_weights() -> dict[str, Tensor]:
    return {name: harmon_fill(name, shape) for name, shape in harmon_shapes().items()}


def write_harmon(path: Path, weights: dict[str, Tensor] | None = None, **metadata) -> Path:
    """A safetensors file of the tiny model, with the metadata that its size needs."""
    header = {"heads": MAR.heads, "llm_heads": HEADS, "grid": (MAR.rows, MAR.cols), "defaults": {"steps": STEPS}}
    weights = harmon_weights() if weights is None else weights
    save_file(weights, str(path), metadata={"specar": json.dumps(header | metadata)})
    return path


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer in the files Qwen2.5's comes in: token = byte, and the special ones."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # the bytes that stand for themselves in such files
    others = [byte for byte in range(256) if byte not in plain]
    symbols = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {symbol: byte for byte, symbol in symbols.items()}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    added = {
        str(number): {
            "content": text,
            "special": True,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
        }
        for text, number in SPECIAL.items()
    }
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": added,
        "pad_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "add_prefix_space": False,
        "bos_token": None,
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write(folder: Path) -> Path:
    """The tiny model in a folder with its tokenizer."""
    write_tokenizer(folder / "qwen25_tokenizer")
    return write_harmon(folder / "harmon.safetensors")


TINY = {"harmon": Tiny(write)}
LANGUAGE = {"harmon": Language(("<|im_start|>", "<|im_end|>"))}
FILES = {"Harmon": Files(write, "harmon.safetensors")}
