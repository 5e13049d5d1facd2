"""The plain baseline: how the published next-token loops of LlamaGen's kind work, written anew in eager torch.

One pass per token over a cache as long as the whole sequence, of which a row of a causal mask hides the unused part;
two rows for guidance; top-k by ``topk``, top-p by a sort, ``multinomial``. Nothing of the pack runs here but the
rotation and the prompt's projection.
"""

from __future__ import annotations

import time
from copy import deepcopy
from functools import lru_cache

import torch
import torch.nn.functional as F
from comfyui_specar.device.cpu import unpack
from comfyui_specar.models.networks.positions import Rotation, rotation_at
from einops import rearrange
from torch import Tensor, nn

from .generate import block_weights


@lru_cache(maxsize=1)
def plain_weights(backbone) -> tuple[list[dict[str, Tensor]], nn.Module]:
    """Weights of the blocks, and the head, as they were before a CPU packed them."""
    unpack(backbone)
    blocks = [block_weights(layer) | {"qkv": layer.attention.wqkv.weight} for layer in backbone.layers]
    return blocks, deepcopy(backbone.output)


class PlainModel:
    """The weights of a DiscreteModel without biases and head norms, and caches for ``rows`` x ``length`` tokens."""

    def __init__(self, model, rows: int, prompt: int, length: int, grid: tuple[int, int]):
        backbone, config = model.backbone, model.backbone.config
        self.backbone, self.eps, self.heads = backbone, config.norm_eps, config.heads
        self.blocks, self.head = plain_weights(backbone)
        total = prompt + length
        shape = (config.layers, 2, rows, config.heads, total, config.head_dim)
        self.cache = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.mask = torch.ones((total, total), dtype=torch.bool, device=model.device).tril()
        self.rotation = rotation_at(model.positions, prompt, length, grid, config.head_dim, model.device)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).type_as(x) * weight

    def __call__(self, x: Tensor, at: Tensor) -> Tensor:
        """Logits [rows, vocab] after the last of the embeddings x [rows, T, dim], which stand at ``at`` [T]."""
        rotation = Rotation(self.rotation.cos[:, at], self.rotation.sin[:, at], self.rotation.halves)
        mask = self.mask[at][None, None]
        for w, (keys, values) in zip(self.blocks, self.cache, strict=True):
            q, k, v = (
                rearrange(part, "r t (h d) -> r h t d", h=self.heads)
                for part in F.linear(self.norm(x, w["attention_norm"]), w["qkv"]).chunk(3, dim=-1)
            )
            keys[:, :, at], values[:, :, at] = rotation(k), v
            seen = F.scaled_dot_product_attention(rotation(q), keys, values, attn_mask=mask)
            x = x + F.linear(rearrange(seen, "r h t d -> r t (h d)"), w["o"])
            h = self.norm(x, w["ffn_norm"])
            x = x + F.linear(F.silu(F.linear(h, w["gate"])) * F.linear(h, w["up"]), w["down"])
        return self.head(self.norm(x[:, -1], self.backbone.norm.weight)).float()


def draw(logits: Tensor, params) -> Tensor:
    """One token [B, 1] from logits [B, V]."""
    logits = logits / max(params.temperature, 1e-5)
    if params.top_k:
        least = torch.topk(logits, params.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if params.top_p < 1:
        sorted_logits, order = torch.sort(logits, descending=True)
        share = sorted_logits.softmax(-1)
        outside = share.cumsum(-1) - share > params.top_p
        logits = logits.masked_fill(torch.empty_like(outside).scatter_(1, order, outside), -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1)


@torch.inference_mode()
def plain_loop(model, conditioning, params, layout) -> list[float]:
    """Draw the tokens of an image of a layout, and say when each was there."""
    features = model.unpack_prompt(conditioning, 1, "positive").features
    branches = [model.prefix(features)]
    if params.cfg != 1:
        branches.append(model.prefix.unconditional(features, (layout.rows, layout.cols)))
    x = torch.cat(branches).to(model.dtype)
    prompt = x.shape[1]
    net = PlainModel(model, len(x), prompt, layout.length, (layout.rows, layout.cols))
    logits = net(x, torch.arange(prompt, device=model.device))
    moments, drawn = [], []
    at = torch.tensor([prompt], device=model.device)
    for _ in range(layout.length):
        if params.cfg != 1:
            cond, uncond = logits.chunk(2)
            logits = uncond + (cond - uncond) * params.cfg
        drawn.append(draw(logits, params))
        moments.append(time.perf_counter())
        if len(drawn) < layout.length:
            x = model.backbone.tok_embeddings(drawn[-1].repeat(len(branches), 1)).to(model.dtype)
            logits, at = net(x, at), at + 1
    return moments
