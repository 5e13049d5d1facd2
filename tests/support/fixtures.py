"""Fixtures of more than one folder of tests; a folder's conftest.py imports those that it needs."""

import itertools
from types import SimpleNamespace

import pytest
from comfyui_specar.device import graphs
from comfyui_specar.samplers.drafts.costs import PassCosts
from comfyui_specar.samplers.methods import speculative
from comfyui_specar.tools.training import loop

from .captured_runs import capture_steps
from .tape import TapeGraphs


@pytest.fixture(autouse=True)
def captures_work():
    """A capture that fails ends capturing for the process, and would hide that a test captures nothing."""
    yield
    failed, graphs._failed = graphs._failed, False
    assert not failed, "a capture failed"


@pytest.fixture
def on_tape(monkeypatch) -> list[TapeGraphs]:
    """Captured runs until ``monkeypatch.undo()``."""
    return capture_steps(monkeypatch)


@pytest.fixture
def costs_of_captures(monkeypatch) -> None:
    """As on a card whose called passes cost something else than its captured ones."""
    costs = {
        False: PassCosts(((1, 1.0), (65, 1.05)), 0.3, ((1, 0.1), (16, 0.1))),
        True: PassCosts(((1, 1.0), (9, 1.2), (17, 1.5), (65, 2.4)), 0.3, ((1, 0.15), (16, 0.2))),
    }
    monkeypatch.setattr(speculative, "pass_costs", lambda run, committed, out, graphs, *_: costs[graphs.active])


@pytest.fixture
def may_fail():
    """In the test captures may fail, which they do for the whole process."""
    yield
    graphs._failed = False


@pytest.fixture
def steady_clock(monkeypatch):
    """Every look at the clock takes 10 ms, so that a time budget of training buys the same steps on any machine."""
    ticks = itertools.count()
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(ticks) / 100))
