"""Folders of the Chameleon family and image tokenizers in the released layouts, small enough for a test."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import torch
from comfyui_specar.models.networks.kl_vae import Decoder, Encoder, KLConfig
from safetensors.torch import save_file
from torch import Tensor, nn

from . import tiny
from .tiny import fill
from .tiny_family import FREE, GUIDED, Files, Language, Tiny, Workflow
from .tiny_folder import byte_tokenizer, layer_shapes, write_folder

KINDS = ("lumina", "anole")
FIRST = 256  # id of the first special token; bytes are below
WIDTHS = (1, 1, 2)  # channel multipliers of the image tokenizer, whose tokens are 4 pixels a side
CHANNELS, CODE = 32, 6  # its base channels, and the size of its code vectors
MOVQ_WIDTHS, MOVQ_CODE = (1, 1), 4  # of the image tokenizer of Lumina-mGPT 2.0, whose tokens are 2 pixels a side


def vocabulary(codes: int, kind: str = "lumina") -> dict[str, int]:
    """Special tokens after the bytes; the codes stand in the midst of them, or, in Lumina-mGPT 2.0, after them."""
    sizes = [f"<reserved{n:05}>" for n in range(8796, 8810)]
    if kind == "lumina2":
        images = [f"<MOVQGAN{code}>" for code in range(codes)]
        names = ["<|endoftext|>", "<racm3:break>", "<eoss>", *sizes, "<reserved08706>", *images, "<|image|>"]
    else:
        letters = str.maketrans("0123456789", "ABCDEFGHIJ")
        images = [f"IMGIMG{str(code).translate(letters)}Z" for code in range(codes)]
        names = ["<s>", "<pad>", *images, "<eoss>", "<racm3:break>", "<reserved08706>", "<image>", *sizes]
    return {name: FIRST + i for i, name in enumerate(names)}


def config(kind: str, codes: int = 32, width: int = 32, layers: int = 2, heads: int = 2) -> dict:
    ids = vocabulary(codes, kind)
    return {
        "architectures": ["ChameleonForConditionalGeneration"],
        "model_type": "chameleon",
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": FIRST + len(ids),
        "vocabulary_map": ids,
        "swin_norm": False,
        "tie_word_embeddings": False,
        "vq_config": {
            "resolution": 16,
            "channel_multiplier": list(WIDTHS),
            "base_channels": CHANNELS,
            "num_res_blocks": 1,
            "latent_channels": CHANNELS,
            "embed_dim": CODE,
            "num_embeddings": codes,
        },
        **({"mask_image_logits": False, "specar": {"grid": [4, 4]}} if kind != "anole" else {}),
    }


def shapes(kind: str, config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the language model's tensors."""
    width, inner, words = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    rows = (heads if kind == "anole" else 1, width // heads)
    found = {
        "model.embed_tokens.weight": (words, width),
        "lm_head.weight": (words, width),
        "model.norm.weight": (width,),
    }
    layers, norms = config["num_hidden_layers"], [f"{part}_norm.{kind}" for part in "qk" for kind in ("weight", "bias")]
    found |= {f"model.layers.{i}.self_attn.{norm}": rows for i in range(layers) for norm in norms}
    return found | layer_shapes("model.", layers, width, inner)


def vqgan_shapes(
    codes: int,
    widths: tuple[int, ...] = WIDTHS,
    base: int = CHANNELS,
    latent: int = CHANNELS,
    code: int = CODE,
    blocks: int = 1,
    attention: bool = False,
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a VQGAN, as CompVis named them. attention: in the deepest level, too."""
    config = KLConfig(latent, widths, base, blocks)
    with torch.device("meta"):
        parts = {
            "encoder": Encoder(config, blocks, latent, attention, nn),
            "decoder": Decoder(config, blocks, latent, attention, nn),
            "quant_conv": nn.Conv2d(latent, code, 1),
            "post_quant_conv": nn.Conv2d(code, latent, 1),
            "quantize.embedding": nn.Embedding(codes, code),
        }
    return {f"{part}.{name}": tuple(t.shape) for part, made in parts.items() for name, t in made.state_dict().items()}


def movq_shapes(
    codes: int, widths: tuple[int, ...] = MOVQ_WIDTHS, base: int = CHANNELS, blocks: int = 1
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a MoVQGAN: a VQGAN with attention in the deepest level, too, whose decoder's
    norms are modulated by the codes."""
    plain = vqgan_shapes(codes, widths, base, MOVQ_CODE, MOVQ_CODE, blocks, attention=True)
    found = {}
    for name, shape in plain.items():
        norm = re.fullmatch(r"(decoder\..*norm[^.]*)\.(weight|bias)", name)
        if norm is None:
            found[name] = shape
        else:
            found[f"{norm[1]}.norm_layer.{norm[2]}"] = shape
            for part in ("conv_y", "conv_b"):
                found[f"{norm[1]}.{part}.{norm[2]}"] = (*shape, MOVQ_CODE, 1, 1) if norm[2] == "weight" else shape
    return found


def movq_weights(codes: int = 32, seed: int = 0) -> dict[str, Tensor]:
    weights = random_weights(movq_shapes(codes), seed)
    return {name: 1 + tensor if name.endswith("conv_y.bias") else tensor for name, tensor in weights.items()}


def values(name: str, shape: tuple[int, ...]) -> Tensor:
    """As ``fill``, for the names of this family; the head is sharper, so that arg-maxima are clear."""
    if "_norm." in name:
        return fill(name, (shape[0] * shape[1],)).view(shape)
    x = fill(name.replace("embed_tokens", "embedding"), shape)
    return 3 * x if "lm_head" in name else x


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    return {name: values(f"{seed}.{name}", shape) for name, shape in shapes.items()}


def vqgan_weights(codes: int = 32, seed: int = 0) -> dict[str, Tensor]:
    return random_weights(vqgan_shapes(codes), seed)


def write_vqgan(path: Path, codes: int = 32, seed: int = 0) -> Path:
    """The image tokenizer as a .safetensors file, or as the .ckpt of a training: in a container, with the networks of
    its loss."""
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = vqgan_weights(codes, seed)
    if path.suffix == ".safetensors":
        save_file(weights, str(path))
    else:
        of_training = {"loss.discriminator.main.0.weight": torch.zeros(4, 3, 4, 4)}
        torch.save({"state_dict": weights | of_training, "global_step": 1}, path)
    return path


def write(
    folder: Path,
    seed: int = 0,
    shards: int = 1,
    kind: str = "lumina",
    tokenizer: bool = True,
    codes: int = 32,
    **sizes: int,
) -> Path:
    """A model in ``folder``/<released name>: Lumina-mGPT for images of 64 x 64 pixels (4 x 4 tokens of 16 pixels)
    with its decoder beside it, Lumina-mGPT 2.0 for 32 x 32 pixels (4 x 4 of 8) likewise, or Anole for 4 x 4 tokens
    with the decoder inside. Returns that folder."""
    settings = config(kind, codes, **sizes)
    weights = random_weights(shapes(kind, settings), seed)
    folder = folder / {"lumina": "Lumina-mGPT-tiny", "lumina2": "Lumina-mGPT-2.0-tiny", "anole": "Anole-tiny-hf"}[kind]
    if kind == "anole":
        weights |= {f"model.vqmodel.{name}": tensor for name, tensor in vqgan_weights(codes, seed).items()}
    write_folder(folder, weights, settings, shards)
    if kind == "lumina":
        write_vqgan(folder / "chameleon_vqgan.safetensors", codes, seed)
    if kind == "lumina2":
        torch.save(movq_weights(codes, seed), folder / "movqgan_270M.ckpt")
        words = {"bos_token": None, "eos_token": "<|endoftext|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(words), encoding="utf-8")
    if tokenizer:
        byte_tokenizer(list(vocabulary(codes, kind)), FIRST).save(str(folder / "tokenizer.json"))
    return folder


def install_lumina(models: Path) -> None:
    folder = write(models / "ar_models", kind="lumina").rename(models / "ar_models/Lumina-mGPT-7B-768")
    decoder = models / "vae/Anole-7b-v0.1-vqvae-hf"
    decoder.mkdir(parents=True, exist_ok=True)
    (folder / "chameleon_vqgan.safetensors").rename(decoder / "model.safetensors")


def install_lumina2(models: Path) -> None:
    folder = write(models / "ar_models", kind="lumina2", shards=2).rename(models / "ar_models/Lumina-mGPT-2.0")
    (models / "vae").mkdir(exist_ok=True)
    (folder / "movqgan_270M.ckpt").rename(models / "vae/movqgan_270M.ckpt")


def install_anole(models: Path) -> None:
    folder = write(models / "ar_models", kind="anole", shards=3, width=64, heads=tiny.HEADS)
    folder.rename(models / "ar_models/Anole-7b-v0.1-hf")
    words = len(vocabulary(tiny.VOCAB)) + FIRST
    weights = tiny.eagle_weights(vocab=words, head_norms=tiny.HEADS)
    drafter = tiny.write_eagle(models / "ar_drafters/anole_drafter", weights, vocab_size=words, input_type=None)
    torch.save(weights, drafter / "pytorch_model.bin")
    (drafter / "model.safetensors").unlink()


TINY = {
    "lumina-mgpt": Tiny(partial(write, kind="lumina"), specials=4 + 1),
    "lumina-mgpt-2": Tiny(partial(write, kind="lumina2"), specials=4 + 1),
    "anole": Tiny(partial(write, kind="anole"), specials=1),
}
_OLD, _NEW, _ENDS = vocabulary(32), vocabulary(32, "lumina2"), ("<reserved08799>", "<eoss>")
_ASKED = "Generate an image of {0}x{0} according to the following prompt:\n{{}}"
LANGUAGE = {
    "lumina-mgpt": Language(
        ("<racm3:break>", "<eoss>"),
        (*(*FREE, 32) * 4, 33),
        GUIDED,
        (512, 6, 4),
        _OLD["IMGIMGAZ"],
        [_OLD[name] for name in _ENDS],
        (f"<s>{_ASKED.format(64)}<reserved08706><racm3:break><reserved08802><reserved08802>",),
        "Alpha-VLLM/Lumina-mGPT-7B-768",
        "chameleon_vqgan.safetensors",
        ("<reserved08799>", "<s>", "<reserved08706>", "<reserved08804>"),
        nonsense=(("vocabulary_map", [1, "a"]), ("num_attention_heads", -2), ("max_position_embeddings", [])),
    ),
    "lumina-mgpt-2": Language(
        ("<|endoftext|>", "<eoss>"),
        (*(*FREE, 32) * 4, 33),
        GUIDED | {"cfg": 4.0},
        (512, 4, 2),
        _NEW["<MOVQGAN0>"],
        [_NEW[name] for name in _ENDS],
        (f"<|endoftext|>{_ASKED.format(32)}<reserved08706><racm3:break><reserved08801><reserved08801>",),
        "Alpha-VLLM/Lumina-mGPT-2.0",
        "movqgan_270M.ckpt",
        ("<reserved08799>", "<eoss>", "<racm3:break>"),
    ),
    "anole": Language(
        ("<racm3:break>", "<reserved08706>"),
        (*FREE * 4, 32),
        GUIDED,
        (512, 6, 4),
        _OLD["IMGIMGAZ"],
        [_OLD["<eoss>"]],
        ("<s>{}<reserved08706><racm3:break>",),
        "leloy/Anole-7b-v0.1-hf",
        stated=("<s>", "<eoss>", "<racm3:break>", "<reserved08706>"),
        nonsense=(("vq_config", "x"), ("rope_theta", [1]), ("vq_config", {"resolution": 10**12})),
    ),
}
FILES = {
    "Lumina-mGPT": Files(partial(write, kind="lumina"), "Lumina-mGPT-tiny"),
    "Lumina-mGPT 2.0": Files(partial(write, kind="lumina2"), "Lumina-mGPT-2.0-tiny"),
    "Anole": Files(partial(write, kind="anole", shards=3), "Anole-tiny-hf"),
}
WORKFLOWS = {
    "23 Lumina-mGPT (download)": Workflow("Lumina-mGPT 7B", install_lumina),
    "24 Lumina-mGPT 2 (download)": Workflow("Lumina-mGPT 2.0, 7.9B", install_lumina2),
    "25 Anole (download)": Workflow("Anole 7B with a drafter", install_anole),
}
