"""GLM-Image's autoregressive stage small enough for a test, in the layout that it was released in."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor

from .tiny import fill
from .tiny_folder import write_folder

CODES, HEADS, KV_HEADS, GRID = 32, 4, 2, (4, 4)
BEGIN, END = CODES, CODES + 1  # of an image
ROWS = 40  # of the head, some of them unused
SPECIALS = ("<sop>", "<eop>", "<|image|>", "<|endoftext|>")
WORDS = ("<unk>", *"0123456789", "a", "red", "cup", "on", "blue", "cat")
SECTIONS = (1, 1, 2)  # of the 4 pairs of channels that turn, of 8


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
        "vocab_size": len(ids), "vision_vocab_size": ROWS, "hidden_size": dim, "intermediate_size": 96,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "pad_token_id": ids["<|endoftext|>"], "eos_token_id": END,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                            "mrope_section": list(SECTIONS)},
    }  # fmt: skip
    return {
        "architectures": ["GlmImageForConditionalGeneration"], "model_type": "glm_image", "text_config": text,
        "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "image_size": 64,
                          "patch_size": 16},
        "vq_config": {"embed_dim": 16, "num_embeddings": CODES, "latent_channels": 32},
        "image_start_token_id": BEGIN, "image_end_token_id": END, "image_token_id": ids["<|image|>"],
        "specar": {"grid": grid, "preview_side": preview_side},
    }  # fmt: skip


def shapes(settings: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the language model, its head, and of some tensors that only source images need."""
    text = settings["text_config"]
    dim, hidden, words = (text[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    keys = dim * text["num_key_value_heads"] // text["num_attention_heads"]
    root = "model.language_model"
    found: dict[str, tuple[int, ...]] = {
        "lm_head.weight": (text["vision_vocab_size"], dim), f"{root}.embed_tokens.weight": (words, dim),
        f"{root}.norm.weight": (dim,), "model.vqmodel.quantize.embedding.weight": (CODES, 16),
        "model.visual.patch_embed.proj.bias": (32,),
    }  # fmt: skip
    for layer in (f"{root}.layers.{i}" for i in range(text["num_hidden_layers"])):
        for part, outputs in (("q", dim), ("k", keys), ("v", keys)):
            found |= {f"{layer}.self_attn.{part}_proj.weight": (outputs, dim),
                      f"{layer}.self_attn.{part}_proj.bias": (outputs,)}
        found |= {f"{layer}.{name}.weight": shape for name, shape in (
            ("self_attn.o_proj", (dim, dim)), ("mlp.gate_up_proj", (2 * hidden, dim)), ("mlp.down_proj", (dim, hidden)),
            ("input_layernorm", (dim,)), ("post_attention_layernorm", (dim,)), ("post_self_attn_layernorm", (dim,)),
            ("post_mlp_layernorm", (dim,)),
        )}
    return found


def weights(settings: dict, seed: int = 0) -> dict[str, Tensor]:
    """Random weights. Logits have a spread that makes greedy choices clear."""
    found = {name: fill(f"{name}/{seed} embedding" if "embed_tokens" in name else f"{seed}/{name}", shape)
             for name, shape in shapes(settings).items()}
    return found | {"lm_head.weight": 3 * fill(f"head/{seed}", found["lm_head.weight"].shape)}


def write(folder: Path, seed: int = 0, shards: int = 1, **sizes) -> Path:
    """The folder ``vision_language_encoder`` of a release in ``folder``, with the tokenizer beside it. sizes: see
    ``config``. Returns the former."""
    settings = config(**sizes)
    model, processor = folder / "vision_language_encoder", folder / "processor"
    write_folder(model, weights(settings, seed), settings, shards)
    processor.mkdir(exist_ok=True)
    tokenizer().save(str(processor / "tokenizer.json"))
    return model
