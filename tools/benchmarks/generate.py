"""What users run today: ``generate`` of transformers on a model of the same shapes, with our weights.

A counterpart is transformers' own class for the family: Llama (LlamaGen; Janus' language model is one), Chameleon,
Emu3. It shares our embedding and has a copy of our head, so it samples from the image tokens alone, though the released
classes compute the logits of all words. Rotation and prompt of LlamaGen differ, the work per token does not. Two rows
stand for the two branches of guidance, which ``generate`` does not mix: it does less than our samplers.
"""

from __future__ import annotations

import time
from copy import deepcopy
from typing import Any

import torch
from comfyui_specar.device.cpu import unpack
from torch import Tensor


def block_weights(layer) -> dict[str, Tensor]:
    """A block's weights, taken apart: q, k, v, o, gate, up, down, the two norms, and those of the heads if any."""
    attention, feed = layer.attention, layer.feed_forward
    head_dim = attention.wqkv.weight.shape[0] // (attention.heads + 2 * attention.kv_heads)
    rows = [heads * head_dim for heads in (attention.heads, attention.kv_heads, attention.kv_heads)]
    q, k, v = attention.wqkv.weight.split(rows)
    gate, up = feed.w1_w3.weight.chunk(2)
    found = {
        "q": q,
        "k": k,
        "v": v,
        "o": attention.wo.weight,
        "gate": gate,
        "up": up,
        "down": feed.w2.weight,
        "attention_norm": layer.attention_norm.weight,
        "ffn_norm": layer.ffn_norm.weight,
    }
    for part, norm, heads in (("q", attention.q_norm, attention.heads), ("k", attention.k_norm, attention.kv_heads)):
        found |= {f"{part}_norm.{kind}": tensor.expand(heads, -1) for kind, tensor in norm.named_parameters()}
    return found


def counterpart_class(family: str, sizes: dict[str, Any]) -> tuple[type, Any]:
    """(class, config) of transformers for a family."""
    import transformers as t

    if family == "emu3":
        return t.Emu3ForCausalLM, t.Emu3TextConfig(**sizes)  # its base of the rotation is 1e6
    if family in ("lumina-mgpt", "anole"):
        vq = {"resolution": 16, "channel_multiplier": [1], "base_channels": 32, "num_res_blocks": 1}
        return t.ChameleonForConditionalGeneration, t.ChameleonConfig(
            **sizes, vq_config=vq, vocabulary_map={"<image>": 0}
        )
    return t.LlamaForCausalLM, t.LlamaConfig(**sizes)


def counterpart(model):
    """The transformers model of a DiscreteModel's shapes and weights (shared; copied where a CPU has packed them)."""
    unpack(model)
    backbone, config = model.backbone, model.backbone.config
    kind, settings = counterpart_class(
        model.family,
        {
            "vocab_size": config.vocab,
            "hidden_size": config.dim,
            "intermediate_size": config.ffn_dim,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.cached_heads,
            "rms_norm_eps": config.norm_eps,
            "max_position_embeddings": 16384,
            "bos_token_id": 0,
            "eos_token_id": None,
            "pad_token_id": 0,
        },
    )
    with torch.device("meta"):
        made = kind(settings).eval()
    names = {
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    weights = {"model.norm.weight": backbone.norm.weight}
    for i, layer in enumerate(backbone.layers):
        for name, tensor in block_weights(layer).items():
            part = f"{names[name]}.weight" if name in names else f"self_attn.{name}"
            weights[f"model.layers.{i}.{part}"] = tensor
    missing, unknown = made.load_state_dict(weights, strict=False, assign=True)
    left = [name for name in missing if "vqmodel" not in name and "embed_tokens" not in name and "lm_head" not in name]
    if left or unknown:
        raise RuntimeError(f"transformers' {kind.__name__} has other weights than expected: {(left + unknown)[:4]}")
    made.model.embed_tokens, made.lm_head = backbone.tok_embeddings, deepcopy(backbone.output)
    made.model.rotary_emb = type(made.model.rotary_emb)(settings).to(model.device)
    return made.requires_grad_(False)


class Stamps:
    """The moments when tokens were generated; a stopping criterion of ``generate`` that never stops."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.at.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


@torch.inference_mode()
def generate(made, rows: int, prompt: int, tokens: int, params, cache: str) -> list[float]:
    """Draw ``tokens`` after a prompt of ``prompt`` tokens in ``rows`` rows, and say when each was there.

    cache: "static" or "dynamic". The filters are those of ``params``; guidance is not.
    """
    from transformers import StoppingCriteriaList

    device = made.lm_head.weight.device if hasattr(made.lm_head, "weight") else next(made.lm_head.parameters()).device
    ids = torch.zeros((rows, prompt), dtype=torch.int64, device=device)
    stamps = Stamps()
    made.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=params.temperature > 0,
        temperature=params.temperature or None,
        top_k=params.top_k,
        top_p=params.top_p,
        cache_implementation="static" if cache == "static" else None,
        stopping_criteria=StoppingCriteriaList([stamps]),
    )
    return stamps.at
