"""Runs whose steps are captured as on a GPU, compared with plain runs: same tokens, same trace."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from comfyui_specar.device.graphs import Graphs
from comfyui_specar.samplers.engine import run as engine
from comfyui_specar.samplers.engine import session

from .closeness import fp64
from .tape import LatePoll, TapeGraphs


def capture_steps(patch: pytest.MonkeyPatch) -> list[TapeGraphs]:
    """Sessions as on a GPU while this is patched: their steps are captured (here: taped), and the host learns late what
    was decided. The list of the graphs they make."""
    made = []

    class Taped(TapeGraphs):
        def __init__(self, device):
            super().__init__(device)
            made.append(self)

    patch.setattr(session, "Graphs", Taped)
    patch.setattr(engine, "Poll", LatePoll)
    return made


@contextmanager
def captured():
    """As on a GPU. Yields the list of the sessions' graphs."""
    with pytest.MonkeyPatch.context() as patch:
        yield capture_steps(patch)


def assert_same_run(found, wanted):
    """The same tokens and the same trace, but for times."""
    assert torch.equal(found.tokens, wanted.tokens)
    for name, values in wanted.trace.positions.items():
        torch.testing.assert_close(found.trace.positions[name], values, msg=name)  # summed in other shapes
    for name, values in wanted.trace.rounds.items():
        assert torch.equal(found.trace.rounds[name], values), name
    one, two = (
        {key: value for key, value in d.trace.summary().items() if not isinstance(value, float)}
        for d in (found, wanted)
    )
    assert one == two


@fp64()
def assert_captured_as_plain(method, asked, monkeypatch):
    """Runs one after the other, each with what the ones before left; then the same without graphs.

    In fp64, because captured trees have other shapes, in which sums are rounded differently.
    """
    asked[0].model.sessions.clear()
    replayed = [method.sample(one) for one in asked]
    with monkeypatch.context() as plainly:
        plainly.setattr(session, "Graphs", Graphs)
        plainly.setattr(engine, "Poll", session.Poll)
        asked[0].model.sessions.clear()
        for one, found in zip(asked, replayed, strict=True):
            assert_same_tree_run(found, method.sample(one))
    asked[0].model.sessions.clear()


def assert_same_tree_run(one, other):
    """The same images and the same story of them, but for times and the dead drafts that captured trees may have."""
    assert torch.equal(one.tokens, other.tokens)
    for mine, its in ((one.trace.positions, other.trace.positions), (one.trace.rounds, other.trace.rounds)):
        for name in mine.keys() - {"width"}:
            torch.testing.assert_close(mine[name], its[name], msg=name)
    # The others are counted; these sum up what was compared.
    apart = {"seconds": 0, "drift_bound": 0, "mean_log_p": 0, "draft_tv": 0}
    assert one.trace.totals | apart == other.trace.totals | apart
