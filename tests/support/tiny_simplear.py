"""SimpleAR and its Cosmos image decoder small enough for a test, in the layouts that they were released in."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import torch
from comfyui_specar.models.networks.cosmos import Cosmos, CosmosConfig
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from . import quantised_layouts
from .comfy_quant import quantise_file, rewritten
from .tiny import fill, named_shapes
from .tiny_family import FREE, Files, Language, Tiny, Workflow
from .tiny_folder import byte_tokenizer, layer_shapes, write_folder

SPECIALS = ("<|endoftext|>", "<|t2i|>", "<|i2t|>", "<|soi|>", "<|vtokens|>", "<|t2v|>", "<|v2t|>", "<|sov|>")
WORDS, UNUSED = 256 + len(SPECIALS), 5  # of the tokenizer; rows of the table after the image codes
COSMOS = CosmosConfig(levels=(4, 4, 2), widths=(32, 32, 64), stem=32, z_channels=4, num_res_blocks=1)
CODES = COSMOS.codebook_size
GRID = (4, 4)
HEADS, KV_HEADS = 4, 2
DECODER = "Cosmos-1.0-Tokenizer-DV8x16x16"
_IN_TIME = re.compile(r"(conv_in|conv_out|conv\d)\.1\.|downsample\.conv2|upsample\.conv1")  # names of filters


def tokenizer() -> Tokenizer:
    return byte_tokenizer(SPECIALS)


def config(dim: int = 32, layers: int = 2, codes: int = CODES, grid: tuple[int, int] = GRID, tied: bool = True) -> dict:
    """config.json, with what only a tiny model has to tell under "specar"."""
    return {
        "architectures": ["SimpARForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": dim,
        "intermediate_size": 2 * dim,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 512,
        "vocab_size": WORDS + codes + UNUSED,
        "tie_word_embeddings": tied,
        "specar": {"codes": codes, "words": WORDS, "grid": grid},
    }


def qwen2_shapes(settings: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Qwen2 file of these sizes; lm_head only where it is not tied."""
    dim, hidden, words = (settings[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    keys = dim * settings["num_key_value_heads"] // settings["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (words, dim), "model.norm.weight": (dim,)}
    if not settings["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (words, dim)
    shapes |= layer_shapes("model.", settings["num_hidden_layers"], dim, hidden, keys, bias=True)
    return shapes


def weights(settings: dict, seed: int = 0) -> dict[str, Tensor]:
    """Random weights. Embeddings are short, or a head that is tied to them would always repeat the last token."""
    return {
        name: fill(f"{name} embedding {seed}", shape) / 8
        if "embed" in name or "head" in name
        else fill(f"{seed}/{name}", shape)
        for name, shape in qwen2_shapes(settings).items()
    }


def cosmos_shapes(sizes: CosmosConfig = COSMOS) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters of a whole tokenizer, as in autoencoder.jit: filters in space or in time, also
    those that a single frame does not need."""
    ours = named_shapes(lambda: {"": Cosmos(sizes)})
    for name in (name for name in list(ours) if ".attn_1.1.v." in name):
        ours |= {name.replace(".v.", f".{part}."): ours[name] for part in "qk"}
    for name in (name for name in list(ours) if "sample.conv3." in name):
        ours[re.sub(r"(down|up)(sample\.conv)3", lambda at: at[1] + at[2] + "21"[at[1] == "up"], name)] = ours[name]
    found = {}
    for name, shape in ours.items():
        if "norm" in name:
            found[re.sub(r"\.(weight|bias)$", r".norm.\1", name)] = shape
        elif len(shape) == 1:
            found[name.replace(".bias", ".conv3d.bias")] = shape
        else:
            kernel = (3, 1, 1) if _IN_TIME.search(name) else (1, *shape[2:])
            found[name.replace(".weight", ".conv3d.weight")] = (*shape[:2], *kernel)
    return found


def cosmos_weights(half: str = "autoencoder", sizes: CosmosConfig = COSMOS) -> dict[str, Tensor]:
    """Random weights, and the buffers of the quantiser, as in encoder.jit, decoder.jit or autoencoder.jit."""
    parts = {"encoder": ("encoder.", "quant_conv."), "decoder": ("decoder.", "post_quant_conv."), "autoencoder": ("",)}
    found = {name: fill(name, shape) for name, shape in cosmos_shapes(sizes).items() if name.startswith(parts[half])}
    quantizer = "inv_quant.quantizer" if half == "decoder" else "quantizer"
    return found | {f"{quantizer}._levels": torch.tensor(sizes.levels, dtype=torch.int32)}


def write_cosmos(
    folder: Path,
    halves: tuple[str, ...] = ("decoder", "encoder"),
    suffix: str = ".safetensors",
    sizes: CosmosConfig = COSMOS,
) -> Path:
    """A folder with decoder and encoder, as safetensors, or (slower) as TorchScript archives (.jit)."""
    folder.mkdir(parents=True, exist_ok=True)
    for half in halves:
        tensors, path = cosmos_weights(half, sizes), folder / f"{half}{suffix}"
        if suffix == ".jit":
            torch.jit.save(torch.jit.script(module_tree(tensors)), path)
        else:
            save_file(tensors, str(path))
    return folder


def module_tree(tensors: dict[str, Tensor]) -> nn.Module:
    """Modules that hold these tensors under these names, and do nothing."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        module = root
        for step in path:
            if step not in module._modules:
                module.add_module(step, nn.Module())
            module = module._modules[step]
        if tensor.is_floating_point():
            module.register_parameter(leaf, nn.Parameter(tensor))
        else:
            module.register_buffer(leaf, tensor)
    return root


def write(folder: Path, seed: int = 0, shards: int = 1, decoder: bool = True, **sizes) -> Path:
    """A folder as it was released, with the image decoder's folder inside. sizes: see ``config``."""
    settings = config(**sizes)
    write_folder(folder, weights(settings, seed), settings, shards)
    tokenizer().save(str(folder / "tokenizer.json"))
    if decoder:
        write_cosmos(folder / DECODER)
    return folder


def write_files(folder: Path) -> None:
    """As released: the image decoder is a TorchScript archive."""
    write(folder, decoder=False)
    write_cosmos(folder / DECODER, ("decoder",), ".jit")


def install(models: Path) -> None:
    write(models / "ar_models/SimpleAR-0.5B-RL", decoder=False)
    write_cosmos(models / "vae" / DECODER, ("decoder",), ".jit")


TINY = {"simplear": Tiny(write)}
LANGUAGE = {
    "simplear": Language(
        ("<|t2i|>", "<|soi|>"),
        FREE * 4,
        {"cfg": 6.0},
        (512, 3, 16),
        WORDS,
        prompts=("<|t2i|>A highly realistic image of {}<|soi|>", "<|t2i|>{}<|soi|>"),
        repository="Daniel0724/SimpleAR-1.5B-RL",
        decoder=DECODER,
        stated=("<|t2i|>", "<|soi|>"),
        other="<|sov|>",
        nonsense=(
            *((key, wrong) for key in ("rope_theta", "rms_norm_eps") for wrong in ("x", -7)),
            *((key, "x") for key in ("max_position_embeddings", "rope_parameters")),
            ("specar", 3),
            ("num_attention_heads", 3),
        ),
    )
}


def write_quantised(folder: Path) -> None:
    """As ComfyUI's tools store it: the first layer in int8, the others in nvfp4."""
    write_files(folder)
    for kind, first in (("int8_tensorwise", True), ("nvfp4", False)):
        rewritten(
            folder,
            lambda tensors, kind=kind, first=first: (
                quantise_file(tensors, kind, lambda name: ".layers." in name and (".layers.0." in name) == first)[0],
                {},
            ),
        )


def write_packed(folder: Path) -> None:
    """The first layer in bitsandbytes' NF4, the second as AutoRound stores it."""
    write_files(folder)
    about = quantised_layouts.config("auto-round", packing_format="auto_round:auto_gptq")
    four = partial(quantised_layouts.gptq, group=32)
    quantised_layouts.in_folder(folder, quantised_layouts.bitsandbytes, chosen=lambda name: ".layers.0." in name)
    quantised_layouts.in_folder(folder, four, about, chosen=lambda name: ".layers.1." in name)


FILES = {
    "SimpleAR": Files(write_files),
    "SimpleAR quantised": Files(write_quantised),
    "SimpleAR packed": Files(write_packed),
}
WORKFLOWS = {"20 SimpleAR (download)": Workflow("SimpleAR 0.5B, 1.5B", install)}
