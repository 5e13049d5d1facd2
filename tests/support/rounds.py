"""Speculative decoding round by round, without the loop around it."""

import torch
from comfyui_specar.kernels.graphs import Graphs
from comfyui_specar.samplers.contract import Request, SamplingParams
from comfyui_specar.samplers.engine.session import Session
from comfyui_specar.samplers.methods.speculative import SpeculativeRun

from .tiny import CAPTION, caption_features, fill


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
    return SpeculativeRun(method, request, Session(Graphs(model.device)))
