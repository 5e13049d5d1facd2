"""Speculative decoding round by round, without the loop around it."""

from __future__ import annotations

from comfyui_specar.samplers.drafts.structures import Extent
from comfyui_specar.samplers.engine import run as engine


class Rounds:
    """A run on the host, launched round by round."""

    def __init__(self, method, request, session):
        self.run, self.state, _ = engine.begin(method.bind(request), request, session)
        self.extent = Extent()

    @property
    def done(self):
        return bool((self.state.committed >= self.run.inputs.end).all())

    def round(self):
        self.extent = self.run.method.next_extent(self.extent, engine.read_extent(self.state), self.run.pads)
        self.run.model.set_attention_length(self.run.cache, None)
        self.run.drafter.set_attention_length(self.run.draft_state, None)
        self.state = self.run.method.step(self.run, self.state, self.extent)
        if isinstance(self.state, engine.Halfway):
            self.state = self.run.method.step(self.run, self.state, Extent(engine.read_extent(self.state)))
