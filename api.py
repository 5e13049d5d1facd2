"""The headless interface: load a model, encode a prompt, sample, decode. The nodes use the same functions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .model_loaders.ar_model import DiscreteModel
from .model_loaders.continuous_model import ContinuousBase
from .model_loaders.detect import bundled, load_drafter, load_image_decoder, load_model
from .model_loaders.files.trace_files import load_trace, save_trace
from .samplers.continuous_contract import ContinuousRequest
from .samplers.contract import Callback, Request
from .samplers.drafts.adt_tree import ADTTree
from .samplers.drafts.structures import Chain, Dynamic, Static
from .samplers.layout import TokenLayout
from .samplers.methods import published
from .samplers.methods.continuous import ContinuousSpeculative
from .samplers.methods.continuous_next_token import ContinuousNextToken
from .samplers.methods.jacobi import SJD, Jacobi
from .samplers.methods.next_token import NextToken
from .samplers.methods.skipping import Skipping
from .samplers.methods.speculative import DraftTree
from .samplers.rules.acceptance import Exact
from .samplers.rules.cool_sd import CoolSD, UniformRSD
from .samplers.rules.grouped import Grouped
from .samplers.rules.lantern import Lantern, LanternPP
from .samplers.rules.tv_budget import TVMetered
from .samplers.trace import Trace

__all__ = ["Output", "Trace", "bundled", "load_drafter", "load_image_decoder", "load_model", "load_trace",
           "methods", "rules", "sample", "save_trace", "structures"]

methods = SimpleNamespace(
    NextToken=NextToken, Jacobi=Jacobi, SJD=SJD, DraftTree=DraftTree, Lantern=published.lantern,
    LanternPP=published.lantern_pp, CoolSD=published.cool_sd, ADTTree=published.adt_tree, VVS=published.vvs,
    Skipping=Skipping, ContinuousNextToken=ContinuousNextToken, ContinuousSpeculative=ContinuousSpeculative,
)
CONTINUOUS = (ContinuousNextToken, ContinuousSpeculative)
structures = SimpleNamespace(Chain=Chain, Static=Static, Dynamic=Dynamic, ADTTree=ADTTree)
rules = SimpleNamespace(
    Exact=Exact, Lantern=Lantern, LanternPP=LanternPP, UniformRSD=UniformRSD, CoolSD=CoolSD, Grouped=Grouped,
    TVMetered=TVMetered,
)


@dataclass(frozen=True)
class Output:
    """tokens [B, rows, cols] (int64; of continuous models [B, rows, cols, C], fp32), latent [B, C, rows, cols] for the
    image decoder (None while a discrete model has no codebook), trace."""

    tokens: Tensor
    latent: Tensor | None
    trace: Trace


def sample(
    model: DiscreteModel | ContinuousBase,
    conditioning: Any,
    method: Any = None,
    negative: Any = None,
    cfg: float | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    batch_size: int = 1,
    layout: TokenLayout | None = None,
    callback: Callback | None = None,
    strength: Tensor | None = None,
    skippable: Tensor | None = None,
    **head: Any,
) -> Output:
    """Draw ``batch_size`` images (image i with seed + i); parameters left None are the model's own.

    method: one of ``methods`` (None: SJD, for continuous models ContinuousNextToken). strength [rows, cols] (0..1): how
    far a relaxed rule may go at each token of the picture, 0 being exact. skippable [rows, cols] (bool): where a
    skipping schedule may take drafts unverified. Continuous models take no top_k, top_p, layout, strength and
    skippable, but grid (rows, cols), tokens and kept (see ContinuousRequest), and of ContinuousParams cfg_schedule,
    steps and kind. Raises ValueError where a parameter is outside its range (the message says which).
    """
    continuous = isinstance(model, ContinuousBase)
    if method is None:
        method = ContinuousNextToken() if continuous else SJD()
    if isinstance(method, CONTINUOUS) != continuous:
        kind, remedy = ("vectors", "ContinuousNextToken") if continuous else ("token ids", "SJD")
        raise ValueError(f"{type(method).__name__} cannot sample a model that draws {kind}; methods.{remedy} can.")
    given = {"cfg": cfg, "temperature": temperature}
    if continuous:
        of_discrete = {"top_k": top_k, "top_p": top_p, "layout": layout, "strength": strength, "skippable": skippable}
        if unfit := [name for name, value in of_discrete.items() if value is not None]:
            raise ValueError(f"{', '.join(unfit)}: this model draws vectors, for which there is no such parameter.")
        return _sample_vectors(model, conditioning, method, negative, seed, batch_size, callback, given | head)
    if head:
        raise ValueError(f"{', '.join(head)}: this model draws token ids, for which there is no such parameter.")
    given |= {"top_k": top_k, "top_p": top_p}
    params = replace(model.defaults, **{name: value for name, value in given.items() if value is not None})
    layout = layout or model.layout()
    if strength is not None:
        strength = layout.spread(strength[None].float(), fill=1.0)
    if skippable is not None:
        skippable = layout.spread(skippable[None], fill=True)
    request = Request(model, conditioning, layout, params, negative, seed, batch_size, callback, strength, skippable)
    with torch.inference_mode():
        decoded = method.sample(request)
        tokens = request.layout.to_grid(decoded.tokens)
        latent = model.dequantize(tokens) if model.codebook is not None else None
    return Output(tokens, latent, decoded.trace)


def _sample_vectors(
    model: ContinuousBase, conditioning: Any, method: Any, negative: Any, seed: int, batch: int, callback: Any,
    given: dict[str, Any],
) -> Output:
    grid = model.check_grid(*(given.pop("grid", None) or (None, None)))
    tokens, kept = given.pop("tokens", None), given.pop("kept", None)
    tokens, kept = tokens if tokens is None else tokens.flatten(1, -2), kept if kept is None else kept.flatten(1)
    params = replace(model.defaults, **{name: value for name, value in given.items() if value is not None})
    request = ContinuousRequest(model, conditioning, grid, params, negative, seed, batch, callback, tokens, kept)
    with torch.inference_mode():
        decoded = method.sample(request)
        return Output(decoded.tokens.unflatten(1, grid), model.to_latent(decoded.tokens, grid), decoded.trace)
