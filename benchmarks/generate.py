"""What users run today: ``generate`` of transformers on a Llama of the same size, with its dynamic cache.

Rotation and prompt differ from LlamaGen's, the work per token does not: two rows stand for the two guidance branches,
and the weights are ours.
"""

from __future__ import annotations

import statistics
import time

import torch
from einops import rearrange


def llama_twin(model):
    """A transformers LlamaForCausalLM with the backbone's sizes and weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    backbone, config = model.backbone, model.backbone.config
    twin = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab, hidden_size=config.dim, intermediate_size=config.ffn_dim,
            num_hidden_layers=config.layers, num_attention_heads=config.heads, rms_norm_eps=config.norm_eps,
            max_position_embeddings=4096, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip
    names = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
    weights = {f"{names[k]}.weight": getattr(backbone, k).weight for k in names}
    for i, layer in enumerate(backbone.layers):
        q, k, v = rearrange(layer.attention.wqkv.weight, "(three d) c -> three d c", three=3)
        weights |= {
            f"model.layers.{i}.self_attn.q_proj.weight": q,
            f"model.layers.{i}.self_attn.k_proj.weight": k,
            f"model.layers.{i}.self_attn.v_proj.weight": v,
            f"model.layers.{i}.self_attn.o_proj.weight": layer.attention.wo.weight,
            f"model.layers.{i}.mlp.gate_proj.weight": layer.feed_forward.w1.weight,
            f"model.layers.{i}.mlp.up_proj.weight": layer.feed_forward.w3.weight,
            f"model.layers.{i}.mlp.down_proj.weight": layer.feed_forward.w2.weight,
            f"model.layers.{i}.input_layernorm.weight": layer.attention_norm.weight,
            f"model.layers.{i}.post_attention_layernorm.weight": layer.ffn_norm.weight,
        }
    twin.load_state_dict({name: tensor.detach().clone() for name, tensor in weights.items()})
    return twin.eval().to(model.device, model.dtype)


@torch.inference_mode()
def seconds_of_generate(model, guided: bool, repeats: int = 3) -> float:
    """Median seconds for one picture's tokens through ``generate``."""
    twin, length = llama_twin(model), model.layout().length
    prompt = torch.zeros((1 + guided, 4), dtype=torch.int64, device=model.device)
    times = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        twin.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=length, do_sample=True, top_k=0)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])
