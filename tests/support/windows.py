"""Jacobi decoding pass by pass, without the loop around it."""

from __future__ import annotations

from dataclasses import replace

import torch
from comfyui_specar.samplers.engine.prefill import Start
from comfyui_specar.samplers.methods import jacobi
from comfyui_specar.samplers.rng import Stream
from comfyui_specar.samplers.trace import Record

SIZE = 4  # of the window


def begun(method, model, params, prompt, strength=None, layout=None):
    """Run and state of a batch of two after the prompt's own prediction, on the model's device."""
    layout, forcing = (layout or model.layout()).to(model.device), (layout or model.layout()).forces
    method = replace(method, rule=method.rule.bind(model))
    state = model.start(prompt, None, 2, layout, slack=SIZE + method.front - 1, guided=params.cfg != 1)
    memory = jacobi.Memory.empty(method.reuse, 2, layout.stride, SIZE, model.vocab_total, model.device)
    record = Record.empty(layout.length, 2, model.device, round_fields=())
    codebook = None if model.codebook is None else model.codebook.to(model.device)
    run = jacobi.JacobiRun(method, method.rule, params, SIZE, forcing, model, state, memory, record, codebook)
    nothing = torch.zeros((2, layout.length + 1), dtype=torch.int64, device=model.device)
    start = Start(nothing[:, 0], nothing, state.prefill)
    return run, jacobi.begin(run, start, layout, Stream.of(3, 2, model.device), strength)


def decided(outcome):
    """All of the outcome of passes and that means something: the last places are there to be written to in vain."""
    run, state = outcome
    record, window = run.record, state.window
    return [record.image, record.positions[:, :-1], state.step_index, window.committed, window.token[:, :-1]]


def three_passes(step, run, state):
    """The run and what the passes leave, with nothing but tensors of the model's device."""
    for _ in range(3):
        state = step(run, state)
    return run, state
