"""Threads on a CPU: steps of a small model take as many as make them faster, and images do not depend on it."""

import time
from contextlib import suppress

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.kernels import cpu, threads
from comfyui_specar.tools.benchmarks.report import find
from torch import nn


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    threads.same_products.cache_clear()
    threads.same_attention.cache_clear()
    yield
    threads.same_products.cache_clear()
    threads.same_attention.cache_clear()
    torch.set_num_threads(before)


@pytest.fixture
def machine(monkeypatch):
    """The seconds of a step by its threads, on a clock that only steps advance; and the threads that steps had."""
    now, seconds, had = [0.0], {1: 1.0, 2: 1.0}, []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def step(value):
        had.append(torch.get_num_threads())
        now[0] += seconds[torch.get_num_threads()]
        return value

    return seconds, had, step


@pytest.mark.parametrize("faster", [1, 2])
def test_the_faster_number_is_taken(machine, faster):
    seconds, had, step = machine
    seconds[faster] = 0.5
    launch = threads.Threads()
    assert [launch("step", step, number) for number in range(20)] == list(range(20))
    assert set(had[: 2 * threads.TURNS]) == {1, 2} and set(had[2 * threads.TURNS :]) == {faster}
    assert torch.get_num_threads() == 2


def test_what_happens_only_once_does_not_decide(machine):
    """The first step of each allocates memory, and another may be interrupted."""
    seconds, had, step = machine
    launch = threads.Threads()
    for number in range(20):
        seconds |= {1: 9.0 if number in (1, 3) else 0.5, 2: 1.0}
        launch("step", step, number)
    assert had[-1] == 1


def test_kinds_of_steps_differ(machine):
    """A drafter's passes are narrow, those of its target are wide."""
    seconds, had, step = machine
    launch, last = threads.Threads(), {}
    for _ in range(20):
        for kind, alone in (("draft", 0.5), ("verify", 2.0)):
            seconds[1] = alone
            launch(kind, step, None)
            last[kind] = had[-1]
    assert last == {"draft": 1, "verify": 2}


def test_a_machine_may_become_busy(machine):
    seconds, had, step = machine
    seconds[2], launch = 0.5, threads.Threads()
    for _ in range(threads.PERIOD):
        launch("step", step, None)
    assert had[-1] == 2
    seconds[2] = 20.0
    for _ in range(2 * threads.TURNS + 1):
        launch("step", step, None)
    assert had[-1] == 1


def test_a_failing_step_leaves_the_threads_as_they_were():
    launch = threads.Threads()
    for _ in range(3):
        with suppress(ZeroDivisionError):
            launch("step", lambda: 1 / 0)
        assert torch.get_num_threads() == 2


def test_only_small_models_and_narrow_passes_are_tried(monkeypatch):
    monkeypatch.setattr(threads, "same_alone", lambda compute, count: True)  # not so on every processor
    model = nn.Sequential(nn.Linear(8, 8))
    assert threads.worth_trying([model], 2)
    assert not threads.worth_trying([model], threads.MOST_ROWS + 1)
    with torch.device("meta"):
        assert not threads.worth_trying([nn.Linear(10_000, 10_000)], 2)
    torch.set_num_threads(1)
    assert not threads.worth_trying([model], 2)


def test_no_other_thread_count_if_results_would_differ(monkeypatch):
    """As with a sum that is divided among threads."""
    product = cpu.linear
    monkeypatch.setattr(
        cpu,
        "linear",
        lambda layer, x, own_weights=False: product(layer, x) + 1e-3 * torch.get_num_threads() * (len(x) == 34),
    )
    assert not threads.same_products(8, 8, torch.float32, False, 2)


def test_nor_if_those_of_attention_would(monkeypatch):
    attend = threads.attend
    monkeypatch.setattr(
        threads,
        "attend",
        lambda q, k, v, mask: attend(q, k, v, mask) + 1e-3 * torch.get_num_threads() * (q.shape[2] == 1),
    )
    monkeypatch.setattr(threads, "same_products", lambda *shape: True)
    assert not threads.worth_trying([nn.Sequential(nn.Linear(8, 8))], 2)


@pytest.mark.parametrize("name", ["next_token", "sjd", "tree"])
def test_images_are_those_of_one_thread(name, monkeypatch):
    model = api.load_model(find("default"))
    drafter = api.load_drafter(find("default/eagle"), model)
    method = {
        "next_token": api.methods.NextToken(),
        "sjd": api.methods.SJD(window=16),
        "tree": api.methods.DraftTree(drafter),
    }[name]
    prompt = model.encode_prompt("red apple, 3d, on a blue background")
    parts = [model, drafter.module] if name == "tree" else [model]
    tried = threads.worth_trying(parts, threads.MOST_ROWS)  # its trials change threads too: before the run's are noted
    used, limited = set(), threads.limited
    monkeypatch.setattr(threads, "limited", lambda count: used.add(count) or limited(count))
    both = api.sample(model, prompt, method, seed=3)
    assert used == ({1, 2} if tried else set())
    torch.set_num_threads(1)
    alone = api.sample(model, prompt, method, seed=3)
    if tried:  # else the processor adds up in another order with two threads, and images may differ
        assert torch.equal(both.tokens, alone.tokens)
        assert torch.equal(both.trace.positions["p"], alone.trace.positions["p"])


def test_products_are_tried_as_the_layers_have_them(monkeypatch):
    tried = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(threads, "same_products", lambda *shape: tried.append(shape) or True)
    monkeypatch.setattr(threads, "same_attention", lambda *kind: tried.append(kind) or True)
    layers = torch.nn.ModuleList(
        [
            torch.nn.Linear(4, 5),
            torch.nn.Linear(4, 5, bias=False),
            torch.nn.Linear(4, 5),
            torch.nn.Linear(2, 3, bias=False, dtype=torch.bfloat16),
        ]
    )
    assert threads.worth_trying([layers, None], threads.MOST_ROWS)
    assert tried == [
        (4, 5, torch.float32, True, 3),
        (4, 5, torch.float32, False, 3),
        (2, 3, torch.bfloat16, False, 3),
        (torch.float32, 3),
        (torch.bfloat16, 3),
    ]
    assert not threads.worth_trying([layers], threads.MOST_ROWS + 1)
    monkeypatch.setattr(threads, "LARGEST", 20 + 5 + 20 + 20 + 5 + 6)
    assert threads.worth_trying([layers], 2)
    monkeypatch.setattr(threads, "LARGEST", 20 + 5 + 20 + 20 + 5 + 5)
    assert not threads.worth_trying([layers], 2)
