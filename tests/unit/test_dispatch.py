"""A Triton twin runs once it has shown to do what its reference does: in what it returns and in what it writes."""

import inspect
import logging
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from comfyui_specar.kernels import dispatch, switches

KERNELS = Path(dispatch.__file__).parent


def double(x, n):
    """Doubles the first n entries in place and returns them, plus 1."""
    x[:n] *= 2
    return x[:n] + 1


def choose(monkeypatch, twin):
    """What runs from now on (is it the twin?), and what the first call did to its argument."""
    monkeypatch.setitem(sys.modules, f"{double.__module__}_triton", SimpleNamespace(double=twin))
    x = torch.arange(4.0)
    chosen, result = dispatch._choose(double, x, n=3)
    assert result.tolist() == [1, 3, 5] and x.tolist() == [0, 2, 4, 3]  # done once, by the reference
    return chosen is twin


def right(x, n):
    return x[:n].mul_(2) + 1


def wrong_result(x, n):
    return right(x, n) + 1


def wrong_writing(x, n):
    return x[:n] * 2 + 1


def broken(x, n):
    raise RuntimeError("no such instruction")


def test_a_twin_that_agrees_takes_over(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING):
        assert choose(monkeypatch, right)
    assert not caplog.records


@pytest.mark.parametrize(("twin", "words"), [
    (wrong_result, "computes something else"), (wrong_writing, "computes something else"),
    (broken, "does not run here, so its slower torch version does: no such instruction"),
])
def test_a_twin_that_fails_is_named_and_left_aside(twin, words, monkeypatch, caplog):
    with caplog.at_level(logging.WARNING):
        assert not choose(monkeypatch, twin)
    [record] = caplog.records
    assert "double" in record.message and words in record.message


def test_a_twin_is_tried_again_with_other_kinds_of_arguments():
    kinds = [dispatch._kind(x) for x in (torch.ones(1), torch.ones(2), torch.ones(1).half(), None, True, 3, 4, (1,))]
    assert kinds[0] == kinds[1] != kinds[2] and kinds[3:5] == [None, True] and kinds[5] == kinds[6] != kinds[7]


class Gpu:
    """As much of a tensor on a GPU as the choice of a kernel looks at."""

    is_cuda, requires_grad, device = True, False, torch.device("cuda:0")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which everything runs."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv(switches.NO_TRITON, raising=False)
    monkeypatch.setattr(dispatch, "find_spec", lambda name: ModuleSpec(name, None))
    dispatch.runs_triton.cache_clear()
    yield Gpu()
    dispatch.runs_triton.cache_clear()


def test_a_gpu_runs_triton(gpu, caplog):
    with caplog.at_level(logging.INFO):
        assert dispatch.runs_triton(gpu.device) and not dispatch.runs_triton(torch.device("cpu"))
    assert not caplog.records


@pytest.mark.parametrize(("change", "told"), [
    (lambda patch: patch.setattr(dispatch, "find_spec", lambda name: None), "Triton is not installed"),
    (lambda patch: patch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5)), "capability 8.0"),
    (lambda patch: patch.setattr(torch.version, "hip", "6.4"), "for NVIDIA GPUs"),
    (lambda patch: patch.setenv(switches.NO_TRITON, "1"), switches.NO_TRITON),
], ids=["missing", "old", "AMD", "switch"])
def test_where_triton_does_not_run_the_reference_does(change, told, gpu, monkeypatch, caplog):
    """Nothing is compiled, and the log tells why, once."""
    change(monkeypatch)
    monkeypatch.setattr(dispatch, "_choose", lambda *given: pytest.fail("the twin was tried"))
    plain = dispatch.accelerated(lambda x, n: n)
    with caplog.at_level(logging.INFO):
        assert [plain(gpu, 3), plain(gpu, 4)] == [3, 4]
    [record] = caplog.records
    assert told in record.message


def test_an_empty_module_in_the_place_of_triton_is_none(gpu, monkeypatch):
    """Other packs put one there, so that imports of it do not fail."""
    monkeypatch.setattr(dispatch, "find_spec", find_spec)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    with pytest.raises(ValueError, match="__spec__"):
        find_spec("triton")
    assert not dispatch.runs_triton(gpu.device)


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
    token = torch.arange(300)
    for changed, same in ((3, True), (4, False)):
        assert dispatch.alike(token, torch.where(token < changed, -1, token)) == same
    assert not dispatch.alike(token, token.int()) and not dispatch.alike(token, token[:-1])
    assert not dispatch.alike(torch.tensor([1]), torch.tensor([2]))


def accelerated(module):
    """The functions of a module that may have a twin."""
    own = {name: f for name, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__}
    return {name: f for name, f in own.items()
            if hasattr(f, "__wrapped__") and f.__code__.co_filename == dispatch.__file__}


@pytest.mark.parametrize("name", sorted(path.stem for path in KERNELS.glob("*.py") if path.stem[0] != "_"))
def test_twins_take_what_their_references_take(name):
    """Every accelerated function has a twin of the same signature, and every file of twins has references."""
    if name.endswith("_triton"):
        assert accelerated(import_module(f"comfyui_specar.kernels.{name.removesuffix('_triton')}"))
        return
    for function, reference in accelerated(import_module(f"comfyui_specar.kernels.{name}")).items():
        twin = getattr(import_module(f"comfyui_specar.kernels.{name}_triton"), function)
        assert inspect.signature(twin) == inspect.signature(reference)
