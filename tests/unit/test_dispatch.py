"""A Triton kernel runs once it has shown to do what its reference does: in what it returns and in what it writes."""

import gc
import inspect
import logging
import re
import sys
import weakref
from collections import Counter
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from comfyui_specar.kernels import attention, cache, dispatch, gating, switches

KERNELS = Path(dispatch.__file__).parent
SMALLEST = f"{dispatch.__package__}.gating_triton"


class Gpu(torch.Tensor):
    """A tensor that says it is on a GPU, and computes on the CPU."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self):
        return torch.device("cuda:0")


def on_gpu(*values):
    return torch.tensor(values).as_subclass(Gpu)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which everything runs, and on which nothing has run yet."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv(switches.NO_TRITON, raising=False)
    monkeypatch.setattr(dispatch, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr(dispatch, "_chosen", {})
    monkeypatch.setattr(dispatch, "_differed", Counter())
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **options: zeros(*size, **options))
    monkeypatch.setitem(sys.modules, SMALLEST, SimpleNamespace(gated=gating.gated.__wrapped__))
    for cached in (dispatch.runs_triton, dispatch._warn_once):
        cached.cache_clear()
    yield torch.device("cuda:0")
    for cached in (dispatch.runs_triton, dispatch._warn_once):
        cached.cache_clear()


@pytest.fixture
def kernel_is(monkeypatch):
    """Put a function in the place of the Triton kernels of this module."""

    def put(function):
        kernels = SimpleNamespace(double=function, plain=function)
        monkeypatch.setitem(sys.modules, f"{__name__}_triton", kernels)

    return put


def copied(x, n):
    return x.clone(), n


@dispatch.accelerated(trial=copied)
def double(x, n):
    """Doubles the first n entries in place and returns them, plus 1."""
    x[:n] *= 2
    return x[:n] + 1


@dispatch.accelerated
def plain(x, n):
    return x * n


def right(x, n):
    return x[:n].mul_(2) + (1 + 1e-6)


def wrong_result(x, n):
    return right(x, n) + 1


def wrong_writing(x, n):
    return x[:n] * 2 + 1


def broken(*given):
    raise ImportError("no such instruction")


def test_a_kernel_that_agrees_computes_the_first_call_too(gpu, kernel_is, caplog):
    """An image must not hang on being the first of a process: results and what is written are the kernel's own."""
    kernel_is(right)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            x = on_gpu(0.0, 1.0, 2.0, 3.0)
            assert torch.equal(double(x, 3), torch.tensor([0.0, 2, 4]) + (1 + 1e-6))
            assert x.tolist() == [0, 2, 4, 3]
    assert not caplog.records


@pytest.mark.parametrize(
    ("function", "words"),
    [(wrong_result, "something else"), (wrong_writing, "something else"), (broken, "no such instruction")],
)
def test_a_kernel_that_fails_is_named_and_left_aside(function, words, gpu, kernel_is, caplog):
    kernel_is(function)
    with caplog.at_level(logging.WARNING):
        for _ in range(dispatch.TRIES + 1):
            x = on_gpu(0.0, 1.0, 2.0, 3.0)
            assert double(x, 3).tolist() == [1, 3, 5] and x.tolist() == [0, 2, 4, 3]
    [record] = caplog.records
    assert "double" in record.message and words in record.message
    assert set(dispatch._chosen.values()) == {double.__wrapped__}


def test_a_kernel_that_stops_running_gives_way_to_its_reference(gpu, kernel_is, caplog):
    """Triton compiles anew where it sees fit, and its compiler has exceptions of its own."""

    class OutOfResourcesError(Exception):
        """As Triton's OutOfResources, which is no RuntimeError."""

    def fussy(x, n):
        if n % 16 == 0:
            raise OutOfResourcesError("shared memory")
        return x * n

    kernel_is(fussy)
    assert plain(on_gpu(1.0), 3).tolist() == [3]
    with caplog.at_level(logging.WARNING):
        assert [plain(on_gpu(1.0), n).tolist() for n in (32, 48, 3)] == [[32], [48], [3]]
    [record] = caplog.records
    assert "shared memory" in record.message


def test_memory_that_runs_out_is_an_error_and_no_reason_to_give_up_a_kernel(gpu, kernel_is):
    """ComfyUI frees some and tries again."""
    kernel_is(lambda x, n: x * n)
    plain(on_gpu(1.0), 3)

    def full(x, n):
        raise torch.OutOfMemoryError("CUDA out of memory")

    [case] = dispatch._chosen
    dispatch._chosen[case] = full
    with pytest.raises(torch.OutOfMemoryError):
        plain(on_gpu(1.0), 3)
    assert dispatch._chosen[case] is full


def test_a_kernel_that_cannot_be_validated_for_want_of_memory_runs(gpu, kernel_is, monkeypatch, caplog):
    """Its reference would want more. The copies of the trial are given back, also without the garbage collector."""
    copies, leaves = [], dispatch.leaves

    def full(tree):
        copies.extend(map(weakref.ref, leaves(tree)))
        raise torch.OutOfMemoryError("CUDA out of memory")

    kernel_is(right)
    monkeypatch.setattr(dispatch, "leaves", full)
    given = [on_gpu(*[1.0] * size) for size in (2, 2, 4, 4)]
    gc.disable()
    try:
        for x in given:
            assert torch.equal(double(x, 1), torch.tensor([3 + 1e-6]))
        assert len(copies) == 2 * 2 and not any(copy() is not None for copy in copies), "what a trial has, once a case"
    finally:
        gc.enable()
    assert set(dispatch._chosen.values()) == {right}
    [record] = caplog.records
    assert "Memory" in record.message


def test_a_disagreement_gets_another_try(gpu, kernel_is, caplog):
    """A number on the edge of two decisions may fall on either side."""
    off = iter([1.0] * (dispatch.TRIES - 1))
    kernel_is(lambda x, n: x * n + next(off, 0.0))
    assert [plain(on_gpu(1.0), 3).tolist() for _ in range(5)] == [[3]] * 5
    assert not caplog.records and plain.__wrapped__ not in dispatch._chosen.values()


def test_a_kernel_that_always_disagrees_is_tried_a_few_times(gpu, kernel_is):
    tried = []
    kernel_is(lambda x, n: tried.append(n) or x)
    assert [plain(on_gpu(1.0), 3).tolist() for _ in range(9)] == [[3]] * 9
    assert len(tried) == dispatch.TRIES


def test_arguments_of_another_kind_are_another_kernel():
    """Sizes count as the tiles of a kernel do, and numbers where they switch something off."""
    same = [(torch.ones(5), torch.zeros(8)), (3, 4), (2.5, -1.0), ((1, 7), (1, 9))]
    other = [
        (torch.ones(1), torch.ones(1).half()),
        (torch.ones(8), torch.ones(9)),
        (torch.ones(4), torch.ones(1, 4)),
        (0, 3),
        (1, 3),
        (1.0, 3.0),
        (1, True),
        (None, 0),
        (3, 3.5),
        ("a", "b"),
        (("a", 1), ("b", 1)),
    ]
    assert all(dispatch.kind(a) == dispatch.kind(b) for a, b in same)
    assert all(dispatch.kind(a) != dispatch.kind(b) for a, b in other)


def test_every_kernel_is_validated_for_shapes_of_its_own(gpu, kernel_is, caplog):
    """One that compiles for a small vocabulary may not for a large one."""

    def small(x, n):
        if len(x) > 4:
            raise ImportError("too large")
        return x * n

    kernel_is(small)
    for size in (3, 9, 17, 9):
        assert plain(on_gpu(*[1.0] * size), 3).tolist() == [3] * size
    assert list(dispatch._chosen.values()) == [small, plain.__wrapped__, plain.__wrapped__]
    [record] = caplog.records
    assert "too large" in record.message, "which is said once for all sizes"


def test_a_whole_cache_is_not_copied_for_a_trial():
    buffer, lengths, path = torch.zeros(36, 2, 4, 8, 2), torch.zeros(2), torch.zeros(2, 3)
    tried = cache.keep_path.trial(buffer, lengths, path)
    assert tried[0].shape == (1, 2, 4, 8, 2) and tried[0].data_ptr() != buffer[-1:].data_ptr()
    every, arrived = torch.zeros(1, 2, 3, 4), torch.zeros(2, 2, attention.FEW)
    tried = attention.attend_few.trial(every, None, False, None, buffer[0], None, None, None, arrived)
    assert tried[0] is every and all(tried[i].data_ptr() != t.data_ptr() for i, t in ((4, buffer[0]), (8, arrived)))


def test_a_gpu_runs_triton(gpu, caplog):
    with caplog.at_level(logging.INFO):
        assert dispatch.runs_triton(gpu) and not dispatch.runs_triton(torch.device("cpu"))
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
def test_where_triton_does_not_run_the_reference_does(change, message, gpu, kernel_is, monkeypatch, caplog):
    """Nothing is compiled, and the log tells why, once."""
    change(monkeypatch)
    kernel_is(lambda *given: pytest.fail("the kernel was tried"))
    with caplog.at_level(logging.INFO):
        assert [plain(on_gpu(1.0), n).tolist() for n in (3, 4)] == [[3], [4]]
    [record] = caplog.records
    assert re.search(message, record.message)


def test_memory_that_runs_out_is_no_reason_to_switch_triton_off(gpu, monkeypatch):
    def full(x):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setitem(sys.modules, SMALLEST, SimpleNamespace(gated=full))
        dispatch.runs_triton(gpu)
    assert dispatch.runs_triton(gpu)


def test_an_empty_module_in_the_place_of_triton_is_none(gpu, monkeypatch):
    """Other packs put one there, so that imports of it do not fail."""
    monkeypatch.setattr(dispatch, "find_spec", find_spec)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    with pytest.raises(ValueError, match="__spec__"):
        find_spec("triton")
    assert not dispatch.runs_triton(gpu)


@pytest.mark.parametrize(("value", "on"), [(None, False), ("", False), ("0", False), ("1", True), ("yes", True)])
def test_switches(value, on, monkeypatch):
    if value is None:
        monkeypatch.delenv("SPECAR_TEST", raising=False)
    else:
        monkeypatch.setenv("SPECAR_TEST", value)
    assert switches.on("SPECAR_TEST") is on


def test_round_off_is_no_difference_and_a_decision_in_a_hundred_neither():
    a = torch.linspace(-3, 3, 300)
    assert dispatch.alike(a, a + 1e-6) and not dispatch.alike(a, a + 0.01)
    half = a.bfloat16()
    assert dispatch.alike(half, (a * 1.004).bfloat16()) and not dispatch.alike(half, (a * 1.2).bfloat16())
    generator = torch.Generator().manual_seed(0)
    large, error = (torch.randn(3000, generator=generator) * n for n in (100, 0.3))  # as a product in bf16 has it
    assert dispatch.alike(large.bfloat16(), (large + error).bfloat16())
    assert not dispatch.alike(large.bfloat16(), (large + 100 * error).bfloat16())
    edges = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0])
    assert dispatch.alike(edges, edges) and not dispatch.alike(edges, edges + 0.01)
    token = torch.arange(300)
    for changed, same in ((3, True), (4, False)):
        assert dispatch.alike(token, torch.where(token < changed, -1, token)) == same
    assert not dispatch.alike(token, token.int()) and not dispatch.alike(token, token[:-1])
    assert not dispatch.alike(torch.tensor([1]), torch.tensor([2]))


def accelerated(module):
    """The functions of a module that may have a Triton kernel."""
    own = {name: f for name, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__}
    return {
        name: f for name, f in own.items() if hasattr(f, "__wrapped__") and f.__code__.co_filename == dispatch.__file__
    }


@pytest.mark.parametrize("name", sorted(path.stem for path in KERNELS.glob("*.py") if path.stem[0] != "_"))
def test_triton_kernels_take_what_their_references_take(name):
    """Every accelerated function has a Triton kernel of the same signature, and every Triton module has references."""
    if name.endswith("_triton"):
        assert accelerated(import_module(f"comfyui_specar.kernels.{name.removesuffix('_triton')}"))
        return
    for function, reference in accelerated(import_module(f"comfyui_specar.kernels.{name}")).items():
        kernel = getattr(import_module(f"comfyui_specar.kernels.{name}_triton"), function)
        assert inspect.signature(kernel) == inspect.signature(reference)
