"""Jacobi decoding pass by pass, without the loop around it."""

from __future__ import annotations

from dataclasses import replace

import torch
from comfyui_specar.samplers.drafts.guesses import Memory
from comfyui_specar.samplers.engine.run import Run, RunInputs
from comfyui_specar.samplers.rng import Stream
from comfyui_specar.samplers.trace import Record

SIZE = 4  # of the window


def begun(method, model, params, prompt, strength=None, layout=None):
    """Run and state of a batch of two after the prompt's own prediction, on the model's device."""
    layout, forcing = (layout or model.layout()).to(model.device), (layout or model.layout()).forces
    method = replace(method, window=SIZE, rule=method.rule.bind(model))
    cache = model.start(prompt, None, 2, layout, slack=SIZE, guided=params.cfg != 1)
    memory = Memory.empty(method.reuse, method.initial, 2, layout.stride, SIZE, model.vocab_total, model.device)
    record = Record.empty(layout.length, 2, model.device, round_fields=())
    codebook = None if model.codebook is None else model.codebook.to(model.device)
    inputs = RunInputs(Stream.of(3, 2, model.device), layout, layout.end.expand(2), strength, None)
    run = Run(method, model, cache, None, memory, params, codebook, None, record, forcing, inputs)
    nothing = torch.zeros((2, layout.length + 1), dtype=torch.int64, device=model.device)
    record.begin(nothing, nothing[:, 0], layout)
    return run, method.begin(run, nothing[:, 0], cache.prefill)


def step(run, state):
    return run.method.step(run, state)


def decided(outcome):
    """All of the outcome of passes and that means something: the last places are there to be written to in vain."""
    run, window = outcome
    record = run.record
    return [record.image, record.positions[:, :-1], window.passes, window.committed, window.token[:, :-1]]


def three_passes(step, run, state):
    """The run and what the passes leave, with nothing but tensors of the model's device."""
    for _ in range(3):
        state = step(run, state)
    return run, state
