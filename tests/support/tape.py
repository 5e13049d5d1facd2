"""CUDA graphs on the CPU: steps are recorded once and then replayed operation by operation, on the memory they had.

What a graph cannot do fails here too: reading a value on the host raises, whatever Python did while the step was
recorded does not happen again, and memory that one capture took must not be given back in another. Used in place of
kernels.graphs.Graphs and samplers.engine.session.Poll.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from comfyui_specar.kernels import graphs
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "item", "unique", "masked_select", "equal.default")


class Tape(TorchDispatchMode):
    """Operations in order, with their arguments and results. Recording executed them: the first replay is that.

    The tape notes down other tensors on the same memory, so that it can tell who else still holds what. ``taken``: the
    memory that recorded operations asked for, by its address, and what asked for it.
    """

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []
        self.executed = True
        self.taken: dict[int, tuple[UntypedStorage, str]] = {}
        self.noted: Counter[int] = Counter()  # tensors of its own on some memory

    def note(self, tree: Any) -> Any:
        """The same arguments or results in tensors of the tape's own."""
        self.noted.update(t.untyped_storage()._cdata for t in graphs.leaves(tree))
        return graphs.mapped(torch.Tensor.detach, tree)

    def held(self) -> dict[int, str]:
        """Memory taken while this was recorded that somebody else than the tape still holds."""
        return {address: name for address, (memory, name) in self.taken.items()
                if torch._C._storage_Use_Count(address) > self.noted[address] + 1}  # one for ``memory``

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = str(operation)
        masks = name.startswith("aten.index") and any(t.dtype == torch.bool for t in graphs.leaves(args[1:2]))
        if masks or any(read in name for read in READS):
            raise RuntimeError(f"the step reads a value on the host, or has a shape that depends on values: {name}")
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        before = {t.untyped_storage()._cdata for t in graphs.leaves((args, *kwargs.values()))}
        for memory in (t.untyped_storage() for t in graphs.leaves(result)):
            if memory._cdata not in before:
                self.taken[memory._cdata] = memory, name
        named = dict(zip(kwargs, self.note(tuple(kwargs.values())), strict=True))
        self.calls.append((operation, self.note(args), named, self.note(result)))
        return result

    def replay(self) -> None:
        if self.executed:
            self.executed = False
            return
        for operation, args, kwargs, result in self.calls:
            if operation._schema.name.startswith("aten::lift_fresh"):
                continue  # the same memory still, as for views (though reshaping may also copy)
            for old, new in zip(graphs.leaves(result), graphs.leaves(operation(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class TapeGraphs(graphs.Graphs):
    """Graphs that are recorded and replayed on the CPU. ``captured`` counts them, ``replayed`` their uses.

    Under cudaMallocAsync, what a capture takes and gives back are nodes of its graph: another graph cannot free it.
    """

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.active = self.one_shape = True
        self.captured = self.replayed = 0
        self.tapes: list[Tape] = []

    def __call__(self, key, step, *inputs):
        self.replayed += self._graphs.get(key) is not None
        outputs = super().__call__(key, step, *inputs)
        if self._graphs.get(key) is not None:
            for place, given in self._graphs[key].held.items():
                assert torch.equal(self._graphs[key].places[place], given), "an input that is copied once has changed"
        return outputs

    def _capture(self, step, inputs):
        places = graphs.placed(inputs)
        tape, before = Tape(), [(other, other.held()) for other in self.tapes]
        with graphs.capturing(), tape:
            outputs = graphs.own_outputs(step(*places), places)
        dropped = [name for other, held in before for address, name in held.items() if address not in other.held()]
        assert not dropped, f"this capture gives back what another one took: {dropped}"
        self.captured += 1
        self.tapes.append(tape)
        return graphs._Graph(tape, step, places, outputs)


class LatePoll:
    """What session.Poll does on a GPU: counts are those of the step before."""

    lag = 1

    def __init__(self, device: torch.device, batch: int):
        self.before = torch.zeros(batch, dtype=torch.int64)

    def __call__(self, counts: Tensor) -> Tensor:
        known, self.before = self.before, counts.clone()
        return known
