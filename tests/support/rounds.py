"""Speculative decoding round by round, without the loop around it."""

from __future__ import annotations

import torch
from comfyui_specar.device.graphs import Graphs
from comfyui_specar.samplers.contract import Request, SamplingParams
from comfyui_specar.samplers.drafts.structures import Extent
from comfyui_specar.samplers.engine import run as engine
from comfyui_specar.samplers.engine.session import Session

from .tiny import CAPTION, caption_features, fill


class Rounds:
    """A run on the host, launched round by round."""

    def __init__(self, method, request, session):
        self.request, self.session = request, session
        self.run, self.state, _ = engine.begin(method.bound(request), request, session)
        self.extent = Extent()

    @property
    def done(self):
        return bool((self.state.committed >= self.run.inputs.end).all())

    @property
    def held(self):
        """Tokens [B] in the target's cache."""
        uncached = getattr(self.state, "uncached", None)
        return self.state.committed - (1 if uncached is None else uncached.count)

    def round(self):
        self.extent = self.run.method.next_extent(self.extent, engine.read_extent(self.state), self.run.pads)
        self.run.model.set_attention_length(self.run.cache, None)
        self.run.drafter.set_attention_length(self.run.memory, None)
        self.state = self.run.method.step(self.run, self.state, self.extent)
        if isinstance(self.state, engine.Halfway):
            self.state = self.run.method.step(self.run, self.state, Extent(engine.read_extent(self.state)))

    def finish(self):
        return self.run.record.finish(
            self.run.inputs.layout, self.request.seed, self.run.method.describe(self.request), 0.0
        )


def begin(model, method, batch=3, seed=0, cfg=2.0, forced=False):
    layout = model.layout()
    if forced:
        keep = torch.zeros((1, 4, 4), dtype=torch.bool)
        keep.view(-1)[[2, 3, 9, 15]] = True
        layout = layout.keeping(torch.full((1, 4, 4), 7), keep)
    negative = model.encode_features(fill("negative embedding", (1, 3, CAPTION)))
    params = SamplingParams(cfg=cfg, top_k=12)
    prompt = model.encode_features(caption_features())
    request = Request(model, prompt, layout, params, negative, seed, batch)
    return Rounds(method, request, Session(Graphs(model.device)))
