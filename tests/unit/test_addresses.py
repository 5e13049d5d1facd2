"""Kernels are launched with addresses where what a capture allocates has no memory yet."""

import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
from comfyui_specar.device import addresses, graphs

X, OUT = torch.ones(2), torch.zeros(2)


class Kernel:
    """A JIT function of Triton, as far as it is launched. newer: it has what Triton has had since 3.3."""

    def __init__(self, newer: bool):
        def source(x, out, count, BLOCK): ...

        self.signature = inspect.signature(source)
        self.params = [SimpleNamespace(name=name, is_constexpr=name == "BLOCK") for name in self.signature.parameters]
        self.launched, self.compiled = [], []
        if newer:
            self.device_caches = {}

    def run(self, *args, grid, warmup, **options):
        (self.compiled if warmup else self.launched).append((grid, args, options))
        return self

    def __getitem__(self, grid):
        return lambda *values: self.launched.append((grid, values))


def launched(kernel, warmup=False):
    addresses.prepare_kernel(kernel)
    kernel.run(X, OUT, 2, grid=(3,), warmup=warmup, BLOCK=16, num_warps=4)
    return kernel.launched


@pytest.mark.parametrize("newer", [True, False])
def test_addresses_are_passed_while_a_graph_is_captured(newer, monkeypatch):
    monkeypatch.setattr(graphs, "allocates_in_graphs", lambda device: True)
    kernel = Kernel(newer)
    with graphs.capturing():
        found = launched(kernel)
    constants = (16,) if newer else ()
    assert found == [((3, 1, 1), (X.data_ptr(), OUT.data_ptr(), 2, *constants))]
    assert kernel.compiled == [((3,), (X, OUT, 2), {"BLOCK": 16, "num_warps": 4})]


@pytest.mark.parametrize(("recording", "in_graphs"), [(False, True), (True, False)])
def test_else_tensors_are(recording, in_graphs, monkeypatch):
    monkeypatch.setattr(graphs, "allocates_in_graphs", lambda device: in_graphs)
    monkeypatch.setattr(graphs, "_recording", recording)
    assert launched(Kernel(True)) == [((3,), (X, OUT, 2), {"BLOCK": 16, "num_warps": 4})]


def test_what_is_only_compiled_is_not_launched(monkeypatch):
    monkeypatch.setattr(graphs, "allocates_in_graphs", lambda device: True)
    with graphs.capturing():
        assert not launched(Kernel(True), warmup=True)


def test_the_kernels_of_a_module_are_prepared_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.runtime", SimpleNamespace(JITFunction=Kernel))
    module = SimpleNamespace(kernel=Kernel(True), function=len, number=1)
    addresses.prepare(module)
    prepared = vars(module.kernel)["run"]
    addresses.prepare(module)
    assert module.kernel.run is prepared and module.function is len
