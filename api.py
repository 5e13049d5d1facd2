"""The headless interface: load a model, encode a prompt, sample, decode. The nodes use the same functions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .model_loaders.ar_model import DiscreteModel
from .model_loaders.detect import bundled, load_image_decoder, load_model
from .samplers.acceptance import Exact
from .samplers.jacobi import SJD, Jacobi
from .samplers.next_token import NextToken
from .samplers.protocols import Callback, Request, TokenLayout
from .samplers.trace import Trace

__all__ = ["Output", "Trace", "bundled", "load_image_decoder", "load_model", "methods", "rules", "sample"]

methods = SimpleNamespace(NextToken=NextToken, Jacobi=Jacobi, SJD=SJD)
rules = SimpleNamespace(Exact=Exact)


@dataclass(frozen=True)
class Output:
    """tokens [B, rows, cols] (int64), latent [B, C, rows, cols] (None if the model has no codebook yet), trace."""

    tokens: Tensor
    latent: Tensor | None
    trace: Trace


def sample(
    model: DiscreteModel,
    conditioning: Any,
    method: Any = SJD(),  # noqa: B008 (frozen)
    negative: Any = None,
    cfg: float | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    batch_size: int = 1,
    layout: TokenLayout | None = None,
    callback: Callback | None = None,
) -> Output:
    """Draw ``batch_size`` images (image i with seed + i); parameters left None are the model's own.

    Raises ValueError where a parameter is outside its range (the message says which).
    """
    given = {"cfg": cfg, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    params = replace(model.defaults, **{name: value for name, value in given.items() if value is not None})
    request = Request(
        model, conditioning, layout or model.layout(), params, negative, seed, batch_size, callback
    )
    with torch.inference_mode():
        decoded = method.sample(request)
        tokens = request.layout.to_grid(decoded.tokens)
        latent = model.dequantize(tokens) if model.codebook is not None else None
    return Output(tokens, latent, decoded.trace)
