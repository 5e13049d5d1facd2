"""Fixtures of more than one folder of tests; a folder's conftest.py imports those that it needs."""

import itertools
from types import SimpleNamespace

import pytest
from comfyui_specar.device import graphs
from comfyui_specar.samplers.engine import run as engine
from comfyui_specar.samplers.engine import session
from comfyui_specar.tools.training import loop

from .tape import LatePoll, TapeGraphs


@pytest.fixture(autouse=True)
def captures_work():
    """A capture that fails ends capturing for the process, and would hide that a test captures nothing."""
    yield
    failed, graphs._failed = graphs._failed, False
    assert not failed, "a capture failed"


@pytest.fixture
def on_tape(monkeypatch) -> list[TapeGraphs]:
    """Sessions as on a GPU until ``monkeypatch.undo()``: their steps are captured (here: taped), and the host learns
    late what was decided. The list of the graphs they make."""
    made = []

    class Taped(TapeGraphs):
        def __init__(self, device):
            super().__init__(device)
            made.append(self)

    monkeypatch.setattr(session, "Graphs", Taped)
    monkeypatch.setattr(engine, "Poll", LatePoll)
    return made


@pytest.fixture
def steady_clock(monkeypatch):
    """Every look at the clock takes 10 ms, so that a time budget of training buys the same steps on any machine."""
    ticks = itertools.count()
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(ticks) / 100))
