"""What users run today: ``generate`` of transformers on a model of the same shapes, with our weights.

The counterpart of LlamaGen is transformers' Llama. It shares our embedding and has a copy of our head. Its rotation and
prompt differ, the work per token does not. Two rows stand for the two branches of guidance, which ``generate`` does not
mix: it does less than our samplers.
"""

from __future__ import annotations

import time
from copy import deepcopy
from typing import Any

import torch
from comfyui_specar.device.cpu import unpack
from torch import Tensor

NAMES = {  # of a block's weights in transformers
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


def block_weights(layer) -> dict[str, Tensor]:
    """A block's weights, taken apart."""
    attention, feed = layer.attention, layer.feed_forward
    q, k, v = attention.wqkv.weight.chunk(3)
    gate, up = feed.w1_w3.weight.chunk(2)
    norms = layer.attention_norm.weight, layer.ffn_norm.weight
    return dict(zip(NAMES, (q, k, v, attention.wo.weight, gate, up, feed.w2.weight, *norms), strict=True))


def counterpart(model):
    """The transformers model of a LlamaGen model's shapes and weights (shared; copied where a CPU has packed them)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    unpack(model)
    backbone, config = model.backbone, model.backbone.config
    settings = LlamaConfig(
        vocab_size=config.vocab,
        hidden_size=config.dim,
        intermediate_size=config.ffn_dim,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        rms_norm_eps=config.norm_eps,
        max_position_embeddings=16384,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device("meta"):
        made = LlamaForCausalLM(settings).eval()
    weights = {"model.norm.weight": backbone.norm.weight}
    for i, layer in enumerate(backbone.layers):
        weights |= {f"model.layers.{i}.{NAMES[name]}.weight": tensor for name, tensor in block_weights(layer).items()}
    missing, unknown = made.load_state_dict(weights, strict=False, assign=True)
    if unknown or {*missing} != {"model.embed_tokens.weight", "lm_head.weight"}:
        raise RuntimeError(f"transformers' Llama has other weights than expected: {missing}, {unknown}")
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

    ids = torch.zeros((rows, prompt), dtype=torch.int64, device=made.device)
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
