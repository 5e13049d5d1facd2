"""Fixtures of more than one folder of tests; a folder's conftest.py imports those that it needs."""

import itertools
from types import SimpleNamespace

import pytest
from comfyui_specar.device import graphs
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
def may_fail():
    """In the test captures may fail, which they do for the whole process."""
    yield
    graphs._failed = False


@pytest.fixture
def steady_clock(monkeypatch):
    """Every look at the clock takes 10 ms, so that a time budget of training buys the same steps on any machine."""
    ticks = itertools.count()
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(ticks) / 100))
