"""Emu3.5-Image and its IBQ image decoder small enough for a test, in the layouts that they were released in."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from .tiny import fill
from .tiny_chameleon import vqgan_shapes
from .tiny_family import FREE, GUIDED, Files, Language, Tiny, Workflow, with_image
from .tiny_folder import byte_tokenizer, layer_shapes, write_folder

CODES, GRID = 32, (4, 4)
WORDS = 256  # bytes, before the special tokens
SPECIALS = ["<|endoftext|>", *(f"<|extra_{number}|>" for number in (100, 200, 201, 203, 204))]
SPECIALS += [f"<|image {part}|>" for part in ("token", "start", "end")]
WIDTHS, CHANNELS, CODE = (1, 1, 2), 32, 16  # of the image decoder, whose tokens are 4 pixels a side
DECODER = "Emu3.5-VisionTokenizer"


def vocabulary(codes: int = CODES) -> dict[str, int]:
    """Ids of the special tokens and the codes."""
    names = [*SPECIALS, *(f"<|visual token {code:06d}|>" for code in range(codes))]
    return {name: WORDS + i for i, name in enumerate(names)}


def config(dim: int = 40, layers: int = 2, grid: tuple[int, int] = GRID) -> dict:
    """config.json, with what only a tiny model has to tell: the ids of its tokens, and under "specar" its grid. All
    heads together are wider than the model, as in the released one."""
    ids = vocabulary()
    return {
        "architectures": ["Emu3ForCausalLM"],
        "model_type": "Emu3",
        "hidden_size": dim,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 512,
        "vocab_size": WORDS + len(ids),
        "tie_word_embeddings": False,
        "vocabulary_map": ids,
        "specar": {"grid": grid},
    }


def shapes(settings: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the language model's tensors."""
    dim, inner, words = (settings[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    head = settings["head_dim"]
    queries, keys = (head * settings[f"num_{part}_heads"] for part in ("attention", "key_value"))
    found = {"model.embed_tokens.weight": (words, dim), "lm_head.weight": (words, dim), "model.norm.weight": (dim,)}
    layers = settings["num_hidden_layers"]
    norms = (f"model.layers.{i}.self_attn.{part}_norm.weight" for i in range(layers) for part in "qk")
    return found | layer_shapes("model.", layers, dim, inner, keys, queries) | dict.fromkeys(norms, (head,))


def weights(settings: dict, seed: int = 0) -> dict[str, Tensor]:
    """Random weights. Embeddings have unit variance, logits a spread that makes greedy choices clear."""
    found = {
        name: fill(f"{name}/{seed} embedding" if "embed" in name else f"{seed}/{name}", shape)
        for name, shape in shapes(settings).items()
    }
    return found | {"lm_head.weight": 3 * found["lm_head.weight"]}


def ibq_shapes(
    codes: int = CODES, widths: tuple[int, ...] = WIDTHS, base: int = CHANNELS, code: int = CODE, blocks: int = 2
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the image decoder's tensors: a VQGAN with attention in the deepest level, too."""
    return vqgan_shapes(codes, widths, base, code, code, blocks, attention=True)


def ibq_weights(codes: int = CODES, seed: int = 0) -> dict[str, Tensor]:
    return {name: fill(f"{seed}/{name}", shape) for name, shape in ibq_shapes(codes).items()}


def write_decoder(folder: Path, codes: int = CODES, seed: int = 0) -> Path:
    """The repository of the image decoder."""
    return write_folder(folder, ibq_weights(codes, seed), {"model_type": "Emu3p5VisionVQ"})


def write(folder: Path, seed: int = 0, shards: int = 1, decoder: bool = True, **sizes) -> Path:
    """A folder as it was released, with tokenizer.json and the image decoder's folder inside. sizes: see ``config``."""
    settings = config(**sizes)
    write_folder(folder, weights(settings, seed), settings, shards)
    byte_tokenizer(list(vocabulary()), WORDS).save(str(folder / "tokenizer.json"))
    if decoder:
        write_decoder(folder / DECODER, seed=seed)
    return folder


def install(models: Path) -> None:
    write(models / "ar_models/Emu3.5-Image", shards=3, decoder=False)
    write_decoder(models / "vae" / DECODER)


TINY = {"emu3.5": Tiny(write, specials=4)}
_IDS = vocabulary()
_FRAME = "<|extra_203|>You are a helpful assistant{}<|extra_100|><|image start|>4*4<|image token|>"
LANGUAGE = {
    "emu3.5": Language(
        ("<|image start|>", "<|extra_100|>"),
        (*FREE, 32) * 4,
        GUIDED | {"cfg": 5.0},
        (512, 16, 4),
        _IDS["<|visual token 000000|>"],
        [_IDS["<|extra_200|>"]],
        (_FRAME.format(" for t2i task. USER: {} ASSISTANT: "), _FRAME.format(". USER: {} ASSISTANT: ")),
        "emu3.tiktoken.*BAAI/Emu3.5-Image",
        DECODER,
        ("<|extra_200|>", "<|image start|>", "<|visual token 000000|>"),
        "<|endoftext|>",
    )
}
FILES = {"Emu3.5-Image": Files(write)}
WORKFLOWS = {
    "27 Emu3.5-Image (download)": Workflow("Emu3.5-Image 34B", install),
    "30 Emu3.5-Image, edit with references (download)": Workflow("Emu3.5-Image 34B edits", with_image(install)),
}
