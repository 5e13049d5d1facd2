"""An image on a GPU where Triton fails: it is that of the torch references, the log has one sentence about it, and
nothing is tried that cannot work.

The GPU is simulated: tensors say that they are on one, and every kernel is its own reference until it is made to fail.
"""

import logging
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from comfyui_specar.kernels import dispatch, switches
from comfyui_specar.samplers.drafts.structures import Chain
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.speculative import DraftTree

from ..support.every_family import asked, make_family

METHODS = {"window": lambda family: SJD(4), "chain": lambda family: DraftTree(family.eagle, Chain(3))}


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    return make_family("llamagen-c2i", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(params=METHODS)
def sample(request, family):
    """sample() -> the tokens of two images."""
    return lambda: METHODS[request.param](family).sample(asked(family, guided=True)).tokens


@pytest.fixture
def gpu(monkeypatch, caplog):
    """Kernels by name, each of which is its reference, and how often each was called."""
    failing, calls, zeros, runs_triton = {}, Counter(), torch.zeros, dispatch.runs_triton

    def kernel(reference):
        def run(*given):
            calls[reference.__name__] += 1
            return failing.get(reference.__name__, reference)(*given)

        return run

    def smallest(x):
        calls["smallest"] += 1
        return failing.get("smallest", torch.clone)(x)

    def on_one(*size, device=None, **options):
        return zeros(*size, device=None if device == torch.device("cuda:0") else device, **options)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch, "zeros", on_one)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: dispatch.OLDEST)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv(switches.NO_TRITON, raising=False)
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    monkeypatch.setattr(dispatch, "runs_triton", lambda device: runs_triton(torch.device("cuda:0")))
    monkeypatch.setitem(sys.modules, f"{dispatch.__package__}.gating_triton", SimpleNamespace(gated=smallest))
    monkeypatch.setattr(dispatch, "triton_kernel", kernel)
    monkeypatch.setattr(dispatch, "_chosen", {})
    monkeypatch.setattr(dispatch, "_differed", Counter())
    caplog.set_level(logging.INFO, dispatch.log.name)
    for cached in (runs_triton, dispatch._warn_once):
        cached.cache_clear()
    yield SimpleNamespace(failing=failing, calls=calls)
    for cached in (runs_triton, dispatch._warn_once):
        cached.cache_clear()


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == dispatch.log.name]


def test_kernels_run_where_nothing_fails(sample, gpu, caplog):
    """So the tests below can see them fail."""
    assert sample().shape[0] == 2 and not said(caplog)
    assert {"attend_few", "probabilities"} < set(gpu.calls)


def test_without_a_compiler(sample, gpu, monkeypatch, caplog):
    """It is missing for every kernel: one is tried, once."""

    def no_compiler(*given):
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(torch.Tensor, "is_cuda", False)
    wanted = sample()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    gpu.failing["smallest"] = no_compiler
    assert torch.equal(sample(), wanted) and torch.equal(sample(), wanted)
    assert gpu.calls == {"smallest": 1}
    [sentence] = said(caplog)
    assert "C compiler" in sentence and "gcc" in sentence


def test_without_the_memory_for_validations(sample, gpu, monkeypatch, caplog):
    """Each is tried once, and all kernels run."""
    wanted, tried = sample(), []
    dispatch._chosen.clear()

    def full(reference, kernel, trial, given):
        tried.append(reference)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(dispatch, "agree", full)
    assert torch.equal(sample(), wanted) and torch.equal(sample(), wanted)
    assert len(tried) == len(dispatch._chosen) and all(f is not case[0] for case, f in dispatch._chosen.items())
    [sentence] = said(caplog)
    assert "Memory" in sentence


def test_one_shape_that_does_not_compile(sample, gpu, caplog):
    """Its reference computes it from then on, and the kernel all other shapes."""
    wanted = sample()
    attempts = Counter()
    [shape, *_] = [case for case in dispatch._chosen if case[0].__name__ == "attend_few"]

    def fussy(*given):
        case = shape[0], given[0].device, *map(dispatch.kind, given)
        attempts[case == shape] += 1
        if case == shape:
            raise ImportError("too large")
        return shape[0](*given)

    dispatch._chosen.clear()
    gpu.failing["attend_few"] = fussy
    assert torch.equal(sample(), wanted) and torch.equal(sample(), wanted)
    assert attempts[True] == 1 and attempts[False] > 1
    [sentence] = said(caplog)
    assert "attend_few" in sentence and "too large" in sentence
