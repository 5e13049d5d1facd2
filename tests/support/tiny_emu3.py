"""Emu3 small enough for a test, in the layouts that it was released in."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor

from .tiny import fill
from .tiny_family import FREE, GUIDED, Files, Language, Tiny, Workflow
from .tiny_folder import layer_shapes, write_folder

CODES, HEADS, KV_HEADS, FACTOR = 32, 4, 2, 2
GRID = (4, 4)
WORDS = ["<unk>", "<|endoftext|>", "<image>", *"0123456789*.,", "a", "red", "cup", "masterpiece", "film", "grained"]
WORDS += ["best", "quality", "low", "worst", "bad", "blurry"]
SPECIALS = [f"<|extra_{number}|>" for number in (200, 201, 203, 204)]
SPECIALS += [f"<|image {part}|>" for part in ("token", "start", "end")]
VQ = {
    "codebook_size": CODES,
    "embed_dim": 4,
    "latent_channels": 4,
    "base_channels": 32,
    "channel_multiplier": [1, 1],
    "num_res_blocks": 1,
    "attn_resolutions": [1],
    "hidden_size": 32,
    "temporal_downsample_factor": 4,
}
RELEASED_WORDS = 184622
NEW = ("model.text_model.", "", "model.vqmodel.")  # where transformers keeps language model, head and image decoder
OLD = ("text_model.model.", "text_model.", "vqmodel.")  # ... and where its older versions kept them


def vocabulary(codes: int = CODES) -> dict[str, int]:
    names = [*WORDS, *SPECIALS, *(f"<|visual token {k:06d}|>" for k in range(codes))]
    return {name: i for i, name in enumerate(names)}


def text_config(words: int, dim: int = 32, layers: int = 2) -> dict:
    return {
        "vocab_size": words,
        "hidden_size": dim,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
    }


def language_shapes(config: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the language model after the root of its layout."""
    dim, hidden, words = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    keys = dim * config["num_key_value_heads"] // config["num_attention_heads"]
    return {"embed_tokens.weight": (words, dim), "norm.weight": (dim,)} | layer_shapes(
        "", config["num_hidden_layers"], dim, hidden, keys
    )


def language_weights(config: Mapping[str, int], root: str, head: str, seed: int = 0) -> dict[str, Tensor]:
    """Random weights. Embeddings have unit variance, logits a spread that makes greedy choices clear."""
    shapes = language_shapes(config)
    found = {
        f"{root}{name}": fill(f"{name}/{seed} embedding" if "embed" in name else f"{seed}/{name}", shape)
        for name, shape in shapes.items()
    }
    return found | {f"{head}lm_head.weight": 3 * fill(f"head/{seed}", shapes["embed_tokens.weight"])}


@cache
def vq_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the image decoder in transformers."""
    from transformers import Emu3VQVAE, Emu3VQVAEConfig

    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Emu3VQVAE(Emu3VQVAEConfig(**VQ)).state_dict().items()}


def vq_weights(seed: int = 0, codes: int = CODES) -> dict[str, Tensor]:
    """Random weights of the image decoder, named as in transformers."""
    found = {}
    for name, shape in (vq_shapes() | {"quantize.embedding.weight": (codes, VQ["embed_dim"])}).items():
        values = fill(f"{seed}/{name}", shape) if shape else torch.tensor(3)  # else batches seen in training
        found[name] = 1 + values if name.endswith(("running_var", "conv_y.bias")) else values
    return found


def tokenizer() -> Tokenizer:
    """One id per known word, digit or sign, and one for all other words."""
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(r"\d|[.,*]"), "isolated")]
    )
    made.add_special_tokens([AddedToken(name, normalized=False) for name in list(vocabulary())[len(WORDS) :]])
    return made


def write(folder: Path, seed: int = 0, shards: int = 1, layout: tuple[str, str, str] = NEW, **sizes: int) -> Path:
    """A folder as transformers writes it: language model and image decoder together, config.json, tokenizer.json.

    sizes: dim, layers.
    """
    vocab = vocabulary()
    text = text_config(len(vocab), **sizes) | {"pad_token_id": vocab["<|endoftext|>"]}
    root, head, decoder = layout
    weights = language_weights(text, root, head, seed)
    weights |= {f"{decoder}{name}": tensor for name, tensor in vq_weights(seed).items()}
    config = {
        "architectures": ["Emu3ForConditionalGeneration"],
        "model_type": "emu3",
        "text_config": text,
        "vq_config": VQ,
        "vocabulary_map": vocab,
        "image_area": (GRID[0] * FACTOR) ** 2,
    }
    write_folder(folder, weights, config, shards)
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


# The original repositories


def original_vq_name(name: str) -> str:
    """What the original repository calls a tensor of the image decoder."""
    for native, original in (
        ("encoder.down_block.", "encoder."),
        ("decoder.up_block.", "decoder."),
        (".middle_block.", ".mid."),
        (".attn_norm.", ".attn_1.norm."),
        ("_proj.", "."),
        (".out.", ".proj_out."),
    ):
        name = name.replace(native, original)
    if ".attn_norms." in name:
        before, after = name.split(".attn_norms.")
        name = f"{before}.attn.{after[0]}.norm{after[1:]}"
    return name


def original_vq_weights(seed: int = 0, codes: int = CODES) -> dict[str, Tensor]:
    """The same weights as the original repository has them: attention projects by convolutions."""
    return {
        original_vq_name(name): tensor[..., None, None] if name.endswith("_proj.weight") else tensor
        for name, tensor in vq_weights(seed, codes).items()
    }


def write_decoder(folder: Path, seed: int = 0, codes: int = CODES) -> Path:
    """The repository of the image decoder."""
    return write_folder(folder, original_vq_weights(seed, codes), {"model_type": "Emu3VisionVQ"})


RANKS = [*(bytes([byte]) for byte in range(256)), b" a", b"re", b" re", b" red", b"es", b"est", b" b", b" best"]


def write_ranks(folder: Path, ranks: list[bytes] = RANKS) -> Path:
    """The original tokenizer's files, with few words."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(ranks))
    (folder / "emu3.tiktoken").write_text("".join(lines), encoding="ascii")
    return folder


def write_original(folder: Path, seed: int = 0, shards: int = 1, **sizes: int) -> Path:
    """A folder of the original repository without its tokenizer: all words of the released models, but 16 wide."""
    text = text_config(RELEASED_WORDS, **{"dim": 16, **sizes}) | {"max_position_embeddings": 9216}
    shapes = language_shapes(text)
    weights = language_weights(text | {"vocab_size": 64}, "model.", "", seed)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):  # the same 61 rows over and over
        weights[name] = weights[name][:61].repeat(-(-RELEASED_WORDS // 61), 1)[: shapes["embed_tokens.weight"][0]]
    config = {"architectures": ["Emu3ForCausalLM"], "model_type": "Emu3", "image_area": 518400, **text}
    return write_folder(folder, weights, config, shards)


TINY = {"emu3": Tiny(write, specials=4 + 3)}
_IDS, _FIRST = vocabulary(), "<|visual token 000000|>"
LANGUAGE = {
    "emu3": Language(
        ("<|image start|>", "<|extra_203|>"),
        (*(*FREE, 32) * 4, 33, 34, 35),
        GUIDED,
        (256, 4, 2),
        _IDS[_FIRST],
        [_IDS[f"<|{name}|>"] for name in ("extra_200", "extra_201", "image end", "extra_204")],
        (
            "<|extra_203|>{} masterpiece, film grained, best quality.<|image start|>4*4<|image token|>",
            "<|extra_203|>{}<|image start|>4*4<|image token|>",
        ),
        "emu3.tiktoken.*BAAI/Emu3-Gen ",
        stated=("<|extra_200|>", "<|extra_203|>", _FIRST),
        other="<|image end|>",
        nonsense=(("text_config", -7), ("vq_config", "x"), ("vocabulary_map", {_FIRST: "x"}), ("image_area", 10**30)),
    )
}
FILES = {"Emu3": Files(write)}
WORKFLOWS = {"26 Emu3 (download)": Workflow("Emu3 8B", lambda models: write(models / "ar_models/Emu3-Gen", shards=7))}
