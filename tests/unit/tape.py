"""CUDA graphs on the CPU: steps are recorded once and then replayed operation by operation, on the memory they had.

What a graph cannot do fails here too: reading a value on the host raises, and whatever Python did while the step was
recorded does not happen again. Used in place of kernels.graphs.Graphs and samplers.session.Poll.
"""

from __future__ import annotations

from typing import Any

import torch
from comfyui_specar.kernels import graphs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "item", "unique", "masked_select", "equal.default")


class Tape(TorchDispatchMode):
    """Operations in order, with their arguments and results. Recording executed them: the first replay is that."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []
        self.executed = True

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = str(operation)
        masks = name.startswith("aten.index") and any(t.dtype == torch.bool for t in graphs.leaves(args[1:2]))
        if masks or any(read in name for read in READS):
            raise RuntimeError(f"the step reads a value on the host, or has a shape that depends on values: {name}")
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        self.calls.append((operation, args, kwargs, result))
        return result

    def replay(self) -> None:
        if self.executed:
            self.executed = False
            return
        for operation, args, kwargs, result in self.calls:
            if operation._schema.name.startswith("aten::lift_fresh"):
                continue  # the same memory still, as for views (though reshaping may also copy)
            for old, new in zip(graphs.leaves(result), graphs.leaves(operation(*args, **kwargs)), strict=True):
                if old is not new and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class TapeGraphs(graphs.Graphs):
    """Graphs that are recorded and replayed on the CPU. ``captured`` counts them, ``replayed`` their uses."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.active, self.captured, self.replayed = True, 0, 0

    def __call__(self, key, step, *inputs):
        self.replayed += self._graphs.get(key) is not None
        return super().__call__(key, step, *inputs)

    def _capture(self, step, inputs):
        places = graphs.placed(inputs)
        tape = Tape()
        with graphs.capturing(), tape:
            outputs = graphs.own_outputs(step(*places), places)
        self.captured += 1
        return graphs._Graph(tape, step, places, outputs)


class LatePoll:
    """What session.Poll does on a GPU: counts are those of the step before."""

    lag = 1

    def __init__(self, device: torch.device, batch: int):
        self.before = torch.zeros(batch, dtype=torch.int64)

    def __call__(self, counts: Tensor) -> Tensor:
        known, self.before = self.before, counts.clone()
        return known
