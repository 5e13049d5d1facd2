"""The Triton kernel runs on the GPUs that run Triton, its torch reference elsewhere and where the kernel fails."""

import inspect
import logging
import re
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from comfyui_specar.device import dispatch, switches
from comfyui_specar.kernels import gating
from comfyui_specar.samplers.drafts.structures import Chain
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.speculative import DraftTree
from comfyui_specar.tools.benchmarks.gpu import calls

from ..support.every_family import asked, make_family

GPU = torch.device("cuda:0")
SMALLEST = f"{dispatch.__package__}.gating_triton"


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which everything runs: tensors say that they are on it, and compute on the CPU."""
    runs_triton, zeros = dispatch.runs_triton, torch.zeros

    def zeros_here(*size, device=None, **options):
        return zeros(*size, device=None if device == GPU else device, **options)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: dispatch.MIN_CAPABILITY)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv(switches.NO_TRITON, raising=False)
    monkeypatch.setattr(dispatch, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr(torch, "zeros", zeros_here)
    monkeypatch.setitem(sys.modules, SMALLEST, SimpleNamespace(gated=gating.gated.reference))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(dispatch, "runs_triton", lambda device: runs_triton(GPU))
    runs_triton.cache_clear()
    yield runs_triton
    runs_triton.cache_clear()


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    return make_family("llamagen-c2i", tmp_path_factory.mktemp("tiny"))


def times(x, n):
    return x * n


@pytest.fixture
def times_with(monkeypatch):
    """times_with(kernel) -> ``times`` with that function in the place of its Triton kernel."""

    def make(kernel):
        monkeypatch.setitem(sys.modules, f"{__name__}_triton", SimpleNamespace(times=kernel))
        return dispatch.Accelerated(times)

    return make


def broken(*given):
    raise ImportError("no such instruction")


def full(*given):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_kernel_runs_on_a_gpu_alone_and_where_no_gradient_is_needed(gpu, times_with, monkeypatch):
    accelerated, x = times_with(lambda x, n: x * n + 100), torch.ones(1)
    assert accelerated(x, 3).tolist() == [103]
    assert accelerated(x.clone().requires_grad_(), 3).tolist() == [3]
    with torch.no_grad():
        assert accelerated(x.clone().requires_grad_(), 3).tolist() == [103]
    monkeypatch.setattr(torch.Tensor, "is_cuda", False)
    assert accelerated(x, 3).tolist() == [3]


def test_a_kernel_that_fails_gives_way_to_its_reference(gpu, times_with, caplog):
    """Triton compiles anew where it sees fit, and its compiler has exceptions of its own."""
    accelerated = times_with(lambda x, n: broken() if n == 32 else x * n)
    with caplog.at_level(logging.WARNING):
        assert [accelerated(torch.ones(1), n).item() for n in (3, 32, 32, 3)] == [3, 32, 32, 3]
    [record] = caplog.records
    assert "times" in record.message and "no such instruction" in record.message


def test_memory_that_runs_out_is_an_error_and_no_reason_to_give_up_a_kernel(gpu, times_with, monkeypatch):
    """ComfyUI frees some and tries again."""
    kernels = iter((full, lambda x, n: x + 7))
    accelerated = times_with(lambda x, n: next(kernels)(x, n))
    with pytest.raises(torch.OutOfMemoryError):
        accelerated(torch.ones(1), 3)
    assert accelerated(torch.ones(1), 3).tolist() == [8]
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        gpu.cache_clear()
        patch.setitem(sys.modules, SMALLEST, SimpleNamespace(gated=full))
        gpu(GPU)
    assert gpu(GPU)


def test_a_gpu_runs_triton(gpu, caplog):
    with caplog.at_level(logging.INFO):
        assert gpu(GPU) and not gpu(torch.device("cpu"))
    assert not caplog.records


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda patch: patch.setattr(dispatch, "find_spec", lambda name: None), "not installed"),
        (lambda patch: patch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5)), "capability 8.0"),
        (lambda patch: patch.setattr(torch.version, "hip", "6.4"), "NVIDIA"),
        (lambda patch: patch.setenv(switches.NO_TRITON, "1"), switches.NO_TRITON),
        (lambda patch: patch.setitem(sys.modules, SMALLEST, SimpleNamespace(gated=broken)), "gcc.*no such instruction"),
    ],
    ids=["missing", "old", "AMD", "switch", "compiler"],
)
def test_where_triton_does_not_run_the_reference_does(change, message, gpu, times_with, monkeypatch, caplog):
    """Nothing is compiled, and the log tells why, once."""
    change(monkeypatch)
    accelerated = times_with(lambda *given: pytest.fail("the kernel was tried"))
    with caplog.at_level(logging.INFO):
        assert [accelerated(torch.ones(1), n).item() for n in (3, 4)] == [3, 4]
    [record] = caplog.records
    assert re.search(message, record.message)


def test_an_empty_module_in_the_place_of_triton_is_none(gpu, monkeypatch):
    """Other packs put one there, so that imports of it do not fail."""
    monkeypatch.setattr(dispatch, "find_spec", find_spec)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    with pytest.raises(ValueError, match="__spec__"):
        find_spec("triton")
    assert not gpu(GPU)


@pytest.mark.parametrize(("value", "on"), [(None, False), ("", False), ("0", False), ("1", True), ("yes", True)])
def test_switches(value, on, monkeypatch):
    if value is None:
        monkeypatch.delenv("SPECAR_TEST", raising=False)
    else:
        monkeypatch.setenv("SPECAR_TEST", value)
    assert switches.on("SPECAR_TEST") is on


@pytest.mark.parametrize("name", sorted(path.stem for path in Path(gating.__file__).parent.glob("*_triton.py")))
def test_every_triton_module_has_references(name):
    assert any(function.startswith(name.removesuffix("triton").replace("_", ".")) for function in calls.accelerated())


@pytest.mark.parametrize("name", calls.accelerated())
def test_triton_kernels_take_what_their_references_take(name):
    kernel = getattr(
        import_module(f"comfyui_specar.kernels.{name.replace('.', '_triton.')}".rpartition(".")[0]),
        name.partition(".")[2],
    )
    assert inspect.signature(kernel) == inspect.signature(calls.accelerated()[name].reference)


@pytest.mark.parametrize("drafts", ["window", "chain"])
def test_an_image_where_triton_fails_is_that_of_the_references(drafts, family, gpu, monkeypatch, caplog):
    """Every kernel is its own reference until it fails; the log has one sentence about each."""
    called, failing = set(), set()
    method = SJD(4) if drafts == "window" else DraftTree(family.eagle, Chain(3))

    def kernel(self):
        called.add(self.reference.__name__)
        return broken if self.reference.__name__ in failing else self.reference

    for function in calls.accelerated().values():
        monkeypatch.setattr(function, "fails", False)
    monkeypatch.setattr(dispatch.Accelerated, "kernel", property(kernel))
    wanted = method.sample(asked(family, guided=True)).tokens
    assert {"attend_few", "probabilities"} < called and not caplog.records
    failing |= called
    for _ in range(2):
        assert torch.equal(method.sample(asked(family, guided=True)).tokens, wanted)
    failed = [record.args[0] for record in caplog.records if record.name == dispatch.log.name]
    assert sorted(failed) == sorted(called)
