"""GLM-Image small enough for a test, in the layout that it was released in: autoregressive stage and decoder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from comfyui_specar.model_loaders.families.glm_image_diffusion import CFG, STEPS, GlmImageDecoder
from comfyui_specar.models.networks.glm_image_dit import DiT, DiTConfig
from comfyui_specar.models.networks.kl_vae import Decoder, Encoder, KLConfig
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from . import tiny_t5
from .closeness import fp64
from .tiny import fill, named_shapes
from .tiny_family import FREE, Files, Language, Tiny, Workflow, with_image
from .tiny_folder import layer_shapes, write_folder

CODES, HEADS, KV_HEADS, GRID = 32, 4, 2, (4, 4)
BEGIN, END = CODES, CODES + 1  # of an image
ROWS = 40  # of the head, some of them unused
SPECIALS = ("<sop>", "<eop>", "<|image|>", "<|endoftext|>")
WORDS = ("<unk>", *"0123456789", "a", "red", "cup", "on", "blue", "cat")
SECTIONS = (1, 1, 2)  # of the 4 pairs of channels that turn, of 8
PREPROCESSOR = {  # source images of 2 to 4 tokens a side
    "patch_size": 16,
    "temporal_patch_size": 1,
    "merge_size": 1,
    "min_pixels": 64**2,
    "max_pixels": 128**2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def vocabulary() -> dict[str, int]:
    """Image codes and their two signs, unused ids, words, special tokens."""
    names = [*(f"<|dit_token_{i}|>" for i in range(ROWS)), *WORDS, *SPECIALS]
    return {name: i for i, name in enumerate(names)}


def tokenizer() -> Tokenizer:
    """One id per known word or digit, and one for all other words."""
    made = Tokenizer(models.WordLevel(vocabulary(), unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(r"\d"), "isolated")]
    )
    made.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIALS])
    return made


def config(dim: int = 64, layers: int = 2, grid: tuple[int, int] = GRID, preview_side: int = 2) -> dict:
    """config.json, with what only a tiny model has to tell under "specar"."""
    ids = vocabulary()
    text = {
        "vocab_size": len(ids),
        "vision_vocab_size": ROWS,
        "hidden_size": dim,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "pad_token_id": ids["<|endoftext|>"],
        "eos_token_id": END,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": list(SECTIONS),
        },
    }
    return {
        "architectures": ["GlmImageForConditionalGeneration"],
        "model_type": "glm_image",
        "text_config": text,
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 128,
            "image_size": 64,
            "patch_size": 16,
        },
        "vq_config": {"embed_dim": 16, "num_embeddings": CODES, "latent_channels": 32},
        "image_start_token_id": BEGIN,
        "image_end_token_id": END,
        "image_token_id": ids["<|image|>"],
        "specar": {"grid": grid, "preview_side": preview_side},
    }


def shapes(settings: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the language model, its head, and of the encoder of source images."""
    text, vision, vq = (settings[f"{part}_config"] for part in ("text", "vision", "vq"))
    dim, hidden, words = (text[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    keys = dim * text["num_key_value_heads"] // text["num_attention_heads"]
    root = "model.language_model"
    found: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (text["vision_vocab_size"], dim),
        f"{root}.embed_tokens.weight": (words, dim),
        f"{root}.norm.weight": (dim,),
    }
    layers = text["num_hidden_layers"]
    found |= layer_shapes(f"{root}.", layers, dim, hidden, keys, bias=True)
    for layer in (f"{root}.layers.{i}" for i in range(layers)):
        del found[f"{layer}.mlp.gate_proj.weight"], found[f"{layer}.mlp.up_proj.weight"]
        found[f"{layer}.mlp.gate_up_proj.weight"] = (2 * hidden, dim)
        found |= {f"{layer}.post_{part}_layernorm.weight": (dim,) for part in ("self_attn", "mlp")}
    return found | vision_shapes(vision, vq)


def vision_shapes(vision: dict, vq: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the encoder of source images."""
    dim, patch, hidden, code = vision["hidden_size"], vision["patch_size"], vision["intermediate_size"], vq["embed_dim"]
    layers = {
        "model.visual.patch_embed.proj": (dim, 3, patch, patch),
        "model.vqmodel.quant_conv": (code, dim, 1, 1),
        "model.vqmodel.post_quant_conv": (dim, code, 1, 1),
    }
    for block in (f"model.visual.blocks.{i}" for i in range(vision["depth"])):
        layers |= {f"{block}.norm{i}": (dim,) for i in (1, 2)}
        layers |= {f"{block}.attn.qkv": (3 * dim, dim), f"{block}.attn.proj": (dim, dim)}
        layers |= {f"{block}.mlp.fc1": (hidden, dim), f"{block}.mlp.fc2": (dim, hidden)}
    found = {f"{layer}.weight": shape for layer, shape in layers.items()}
    found |= {f"{layer}.bias": shape[:1] for layer, shape in layers.items()}
    return found | {
        "model.visual.embeddings.position_embedding.weight": ((vision["image_size"] // patch) ** 2, dim),
        "model.vqmodel.quantize.embedding.weight": (vq["num_embeddings"], code),
    }


def weights(settings: dict, seed: int = 0) -> dict[str, Tensor]:
    """Random weights. Logits have a spread that makes greedy choices clear."""
    found = {
        name: fill(f"{name}/{seed} embedding" if "embed_tokens" in name else f"{seed}/{name}", shape)
        for name, shape in shapes(settings).items()
    }
    return found | {"lm_head.weight": 3 * fill(f"head/{seed}", found["lm_head.weight"].shape)}


def write(folder: Path, seed: int = 0, shards: int = 1, **sizes) -> Path:
    """The folder ``vision_language_encoder`` of a release in ``folder``, with the tokenizer beside it. sizes: see
    ``config``. Returns the former."""
    settings = config(**sizes)
    model, processor = folder / "vision_language_encoder", folder / "processor"
    write_folder(model, weights(settings, seed), settings, shards)
    processor.mkdir(exist_ok=True)
    (processor / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR), encoding="utf-8")
    tokenizer().save(str(processor / "tokenizer.json"))
    return model


# The decoder

DIT = DiTConfig(dim=32, layers=2, heads=2, channels=4, text_dim=24, time_dim=16, size_dim=8, codes=CODES)
WIDTHS = (1, 2, 2, 2)  # of the VAE, in multiples of 32
_DIFFUSERS = (  # latent diffusion's names -> diffusers'
    (r"mid\.block_1", "mid_block.resnets.0"),
    (r"mid\.block_2", "mid_block.resnets.1"),
    (r"\.block\.", ".resnets."),
    ("nin_shortcut", "conv_shortcut"),
    (r"(up|down)sample\.", r"\1samplers.0."),
    (r"down\.(?=\d)", "down_blocks."),
    ("norm_out", "conv_norm_out"),
)
MEAN, STD = [0.1, -0.2, 0.3, 0.0], [1.0, 0.5, 2.0, 1.5]


def vae_shapes(
    multiples: tuple[int, ...] = WIDTHS, base: int = 32, blocks: int = 1, channels: int = DIT.channels
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of diffusers' AutoencoderKL without attention. The deepest level of its decoder
    is the first. multiples: of ``base`` channels, the finest resolution first."""
    config = KLConfig(channels, multiples, base, blocks)
    ours = named_shapes(
        lambda: {
            "encoder.": Encoder(config, blocks, 2 * channels, False, nn, middle_attention=False),
            "decoder.": Decoder(config, blocks, channels, False, nn, middle_attention=False),
        }
    )
    found = {}
    for name, shape in ours.items():
        for pattern, replacement in _DIFFUSERS:
            name = re.sub(pattern, replacement, name)
        found[re.sub(r"up\.(\d)", lambda level: f"up_blocks.{len(multiples) - 1 - int(level[1])}", name)] = shape
    return found


def decoder_weights() -> dict[str, dict[str, Tensor]]:
    """Random weights of the parts of the decoder, by folder."""
    reader = tiny_t5.weights(DIT.text_dim, head_dim=8, ffn=48, words=384)
    tables = ("shared.weight", "relative_attention_bias.weight")
    return {
        "transformer": {name: fill(name, shape) for name, shape in named_shapes(lambda: {"": DiT(DIT)}).items()},
        "vae": {name: fill(name, shape) for name, shape in vae_shapes().items()},
        "text_encoder": {
            name: fill(f"{name} embedding" if name.endswith(tables) else name, tuple(tensor.shape))
            for name, tensor in reader.items()
        },
    }


def write_decoder(folder: Path) -> Path:
    """The folders transformer, vae and text_encoder of a release in ``folder``."""
    configs = {
        "transformer": {"num_attention_heads": DIT.heads, "attention_head_dim": DIT.dim // DIT.heads, "patch_size": 2},
        "vae": {"latents_mean": MEAN, "latents_std": STD},
        "text_encoder": {"model_type": "t5"},
    }
    for part, tensors in decoder_weights().items():
        (folder / part).mkdir(parents=True, exist_ok=True)
        name = "model" if part == "text_encoder" else "diffusion_pytorch_model"
        save_file(tensors, folder / part / f"{name}.safetensors")
        (folder / part / "config.json").write_text(json.dumps(configs[part]), encoding="utf-8")
    return folder


def install(models: Path) -> None:
    write_decoder(write(models / "ar_models/GLM-Image", shards=4).parent)


@fp64()
@torch.inference_mode()
def official(reference: Any, inputs: dict[str, Tensor], length: int, codes: Tensor | None = None) -> tuple[Tensor, ...]:
    """The sequence of transformers' model after ``inputs``, one token at a time: hidden states, logits of codes, and
    the tokens, which are greedy unless ``codes`` [1, length] are given."""
    from transformers import DynamicCache

    cache, fed = DynamicCache(), dict(inputs)
    hidden, logits, tokens = [], [], []
    for i in range(length):
        hidden.append(reference.model(**fed, past_key_values=cache, use_cache=True).last_hidden_state[:, -1:])
        logits.append(reference.lm_head(hidden[-1])[..., :CODES])
        tokens.append(logits[-1].argmax(-1) if codes is None else codes[:, i : i + 1])
        fed = {"input_ids": tokens[-1]}
    return torch.cat(hidden, 1), torch.cat(logits, 1), torch.cat(tokens, 1)


def pixels_of(decoder: GlmImageDecoder, tokens: Tensor, prompt: str, seed: int = 0, steps: int = STEPS) -> Tensor:
    """Pixels [B, 32 * h, 32 * w, 3] (fp32) in 0..1 for tokens [B, h, w] (int64) of images of one prompt."""
    return decoder.vae.decode(decoder.latents(tokens, *decoder.read(prompt), seed, steps, CFG, "cpu"))


TINY = {"glm-image": Tiny(write)}
LANGUAGE = {
    "glm-image": Language(
        ("<sop>", "<eop>"),
        FREE * 5,  # a preview of 4 tokens first
        {"temperature": 0.9, "top_p": 0.75},
        (512, 16, 32),
        0,
        repository="zai-org/GLM-Image",
        stated=("<|image|>", "<|dit_token_32|>"),
        other="<|endoftext|>",
    )
}
FILES = {"GLM-Image": Files(write, "vision_language_encoder")}
WORKFLOWS = {
    "28 GLM-Image (download)": Workflow("GLM-Image 8.9B + 7B", install, {"steps": 2}, tokens=20),
    "31 GLM-Image, edit with references (download)": Workflow(
        "GLM-Image 8.9B + 7B edits", with_image(install), {"steps": 2}
    ),
}
