"""A Triton twin runs once it has shown to do what its reference does: in what it returns and in what it writes."""

import inspect
import logging
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from comfyui_specar.kernels import dispatch

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


def test_without_triton_the_reference_runs(monkeypatch):
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    x = torch.arange(4.0)
    assert dispatch._choose(double, x, n=3)[0] is double and x.tolist() == [0, 2, 4, 3]


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
