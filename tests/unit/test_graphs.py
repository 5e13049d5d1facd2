"""Captured steps: the same results as calling them, whatever changes between calls; and what cannot be captured."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from comfyui_specar.kernels.graphs import leaves, mapped
from comfyui_specar.samplers.session import Poll

from .tape import TapeGraphs


@dataclass(frozen=True)
class Carry:
    x: torch.Tensor
    parts: tuple[torch.Tensor, ...]
    name: str = "n"


def test_a_replayed_step_computes_what_a_called_one_does():
    memory, plain = torch.zeros(4), torch.zeros(4)

    def step_over(memory):
        def step(carry: Carry) -> Carry:
            memory.add_(carry.x)
            memory[1:2] += 1
            y = carry.x.view(2, 2).t().reshape(-1) + memory
            return Carry(y, (y[:2].cumsum(0), carry.parts[0] * 2), carry.name)

        return step

    graphs = TapeGraphs(torch.device("cpu"))
    one = two = Carry(torch.arange(4.0), (torch.ones(2), torch.ones(3)))
    for _ in range(6):
        one = graphs("k", step_over(memory), one)
        two = step_over(plain)(two)
        assert all(torch.equal(a, b) for a, b in zip(leaves(one), leaves(two), strict=True))
        assert torch.equal(memory, plain)
        two = mapped(torch.Tensor.clone, two)
    assert (graphs.captured, graphs.replayed) == (1, 4)


def test_values_that_change_places_are_not_lost():
    graphs, pair = TapeGraphs(torch.device("cpu")), (torch.ones(1), torch.ones(1))
    for _ in range(8):  # Fibonacci: the second becomes the first
        pair = graphs("k", lambda pair: (pair[1], pair[0] + pair[1]), pair)
    assert [int(x) for x in pair] == [34, 55]
    for _ in range(4):
        pair = graphs("j", lambda pair: (pair[0] + pair[1], pair[0]), pair)
    assert [int(x) for x in pair] == [34 * 5 + 55 * 3, 34 * 3 + 55 * 2]


def test_a_step_that_reads_the_device_is_not_captured(caplog):
    graphs = TapeGraphs(torch.device("cpu"))
    for _ in range(3):
        assert graphs("k", lambda x: x + int(x.sum()), torch.ones(2)).tolist() == [3, 3]
    assert not graphs.active and "without CUDA graphs" in caplog.text and caplog.text.count("without") == 1


@pytest.mark.parametrize("shape", [lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: x.masked_select(x > 0)])
def test_shapes_that_depend_on_values_are_not_captured(shape):
    graphs = TapeGraphs(torch.device("cpu"))
    for _ in range(2):
        graphs("k", shape, torch.ones(2))
    assert not graphs.active


def test_a_poll_on_the_cpu_is_never_late():
    poll = Poll(torch.device("cpu"), 2)
    assert poll.lag == 0 and poll(torch.tensor([1, 2])).tolist() == [1, 2]
