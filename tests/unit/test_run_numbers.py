"""What is counted around a run: bytes before it, and its seconds."""

import itertools
import time
from types import SimpleNamespace

import pytest
import torch
from comfyui_specar.samplers.engine import session
from comfyui_specar.samplers.engine.memory import LOGITS, PROBABILITIES, run_bytes
from comfyui_specar.samplers.engine.prefix_tokens import CHUNK
from comfyui_specar.samplers.engine.run import Run
from comfyui_specar.samplers.layout import TokenLayout
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.trace import Record, Source, rounds_of

from ..support.toy import ToyModel, plain, request


class Bytes:
    """A model and a drafter whose bytes tell what they were asked for."""

    vocab_total = 50

    def prompt_tokens(self, conditioning, negative, batch, layout, guided):
        return 30

    def activation_bytes(self, rows, tokens, prompt=0):
        return 10**6 * rows * max(tokens, prompt)

    def kv_bytes(self, batch, layout, slack, guided, prompt):
        return 10**12 * batch * (slack + prompt) * (1 + guided)


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize(
    ("width", "draft_width", "first", "widest", "prefix"),
    [(5, 0, 0, 6, 0), (5, 9, 0, 10, 0), (40, 9, 0, 41, 0), (2, 0, 20, 3, 20), (2, 0, 2 * CHUNK, 3, CHUNK)],
)
def test_the_bytes_of_a_run_are_those_of_its_widest_pass(guided, width, draft_width, first, widest, prefix):
    """Prompt of 30 tokens, and ``first`` tokens of the image are given."""
    layout = TokenLayout.plain(1, 3 * CHUNK)
    layout.forced[:, :first] = 1
    run = {"layout": layout, "batch": 3, "params": SimpleNamespace(guided=guided)}
    asked = SimpleNamespace(model=Bytes(), conditioning=None, negative=None, **run)
    rows = 3 * (1 + guided)
    wanted = 4 * rows * max(PROBABILITIES * widest, LOGITS * prefix) * 50
    wanted += 10**6 * rows * max(30, widest, prefix) + 10**12 * rows * (width + 30)
    assert run_bytes(asked, width, None, draft_width) == wanted
    assert run_bytes(asked, width, Bytes(), draft_width) == wanted + 10**12 * rows * (draft_width + 30)
    assert (PROBABILITIES, LOGITS) == (8, 4)


def test_the_seconds_of_a_run(monkeypatch):
    layout, looks = plain(2, 3), itertools.count()
    asked = request(ToyModel(layout), layout, batch=2)
    monkeypatch.setattr(time, "perf_counter", lambda: next(looks) / 4)
    assert SJD(window=3).sample(asked).trace.totals["seconds"] == 0.25


def test_a_round_too_many_is_written_past_the_others():
    """A GPU is one step ahead when it learns that the images are complete."""
    record = Record.empty(2, 3, torch.device("cpu"))
    for number in range(1, 9):
        record.round(accepted=0, committed=torch.tensor([number, 0, number]), width=number)
    assert record.rounds[:3, :, 1].tolist() == [[n, 0, n] for n in (1, 2, 3)]
    assert record.rounds[3, 0].tolist() == [0, 8, 8] and int(record.count) == 8


class Event:
    """Of a GPU: may be waited for only when something was recorded before."""

    recorded = waited = 0

    def record(self):
        self.recorded += 1

    def synchronize(self):
        assert self.recorded, "nothing will ever arrive"
        self.waited += 1


def test_on_a_gpu_the_host_reads_the_step_before(monkeypatch):
    zeros = torch.zeros
    monkeypatch.setattr(session.torch.cuda, "Event", Event)
    monkeypatch.setattr(session.torch, "zeros", lambda *given, pin_memory, **named: zeros(*given, **named))
    poll, read = session.Poll(torch.device("cuda"), 2), []
    for step in range(1, 5):
        read.append(poll(torch.tensor([step, 10 * step])))
    assert [counts.tolist() for counts in read] == [[0, 0], [1, 10], [2, 20], [3, 30]]
    assert poll.lag == 1 and len(poll.counts) == len(poll.arrived) == 2
    assert sum(event.waited for event in poll.arrived) == 3


@pytest.mark.parametrize("strength", [torch.tensor([[0.1, 0.2, 0.3, 0.4]]), torch.arange(8.0).reshape(2, 4), None])
def test_the_strength_of_a_rule_is_that_of_the_position_and_past_the_end_that_of_the_last(strength):
    run = SimpleNamespace(inputs=SimpleNamespace(strength=strength, layout=plain(2, 2)))
    position = torch.tensor([[0, 3, 4], [2, 3, 9]])
    of_images = torch.ones(2, 4) if strength is None else strength.expand(2, -1)
    wanted = torch.stack([of_image[at.clamp(max=3)] for of_image, at in zip(of_images, position, strict=True)])
    assert torch.equal(Run.strength_at(run, position), wanted)


def test_rounds_are_counted_from_what_stands_at_the_positions():
    """The last token of the second image is forced."""
    fixed = torch.tensor([[0, 1, 1, 3], [0, 1, 2, 0]])
    first = Source.PREFILL, Source.ACCEPTED, Source.RESIDUAL, Source.RELAXED
    second = Source.FORCED, Source.RESIDUAL, Source.ACCEPTED, Source.FORCED
    rounds = rounds_of({"finalised_at": fixed, "source": torch.tensor([first, second])}, 5, torch.tensor([4, 3]))
    assert rounds["accepted"].tolist() == [[0, 0], [1, 0], [0, 1], [1, 0]]
    assert rounds["committed"].tolist() == [[1, 1], [2, 1], [0, 1], [1, 0]]
    assert rounds["width"].tolist() == [1, 5, 5, 5]


@pytest.mark.parametrize(
    ("states", "forgotten"),
    [
        ([("a", "b"), ("a", "b")], 1),
        ([("a", "b"), ("c", "b")], 2),
        ([("a", "b"), ("a", "c")], 2),
        ([("a", None), ("a", None), ("a", "b")], 2),
    ],
)
def test_graphs_over_other_memory_are_dropped(states, forgotten):
    dropped = []
    held = session.Session(SimpleNamespace(forget=lambda: dropped.append(1)))
    for state, draft_state in states:
        held.adopt(state, draft_state)
        assert (held.state, held.draft_state) == (state, draft_state)
    assert len(dropped) == forgotten
