"""What a node says of its run while it runs: the words, when they are sent, and to whom."""

import sys

import pytest
import torch
from comfyui_specar.nodes.comfy_runtime import progress as nodes_progress
from comfyui_specar.nodes.comfy_runtime import status as nodes_status
from comfyui_specar.nodes.comfy_runtime.progress import Report
from comfyui_specar.nodes.comfy_runtime.status import Status
from comfyui_specar.samplers.contract import Progress, Request
from comfyui_specar.samplers.layout import TokenLayout

from .conftest import defaults


@pytest.fixture
def clock(monkeypatch):
    """The time in seconds, as a list of one number."""
    now = [100.0]
    for module in (nodes_progress, nodes_status):
        monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def request(layout=None, batch=1):
    layout = layout or TokenLayout.plain(4, 4)
    return Request(None, None, layout, None, batch=batch)


def after(passes, *committed, length=16):
    return Progress(torch.zeros(len(committed), length, dtype=torch.int64), torch.tensor(committed), length, passes)


def test_passes_tokens_and_the_time_left(clock):
    status = Status(request())
    assert status(after(1, 1)) == "1 forward pass\n1.0 tokens per pass"
    clock[0] += 2  # 8 tokens took 2 s, 7 are left
    assert status(after(3, 9)) == "3 forward passes instead of 9\n3.0 tokens per pass, about 1.8 s left"
    clock[0] += 1
    assert status.finished(after(5, 16)) == "5 forward passes instead of 16\n3.2 tokens per pass, 3.0 s in all"


def test_one_token_per_pass_saves_nothing(clock):
    status = Status(request())
    clock[0] += 20
    assert status.finished(after(16, 16)) == "16 forward passes\n1.0 tokens per pass, 20 s in all"


def test_tokens_are_those_of_an_image_that_the_model_samples(clock):
    ruled = Status(request(TokenLayout.ruled(4, 4, (64,), (65,))))  # 21 positions, 16 of which are sampled
    said = ruled.finished(after(8, 21, length=21))
    assert said.startswith("8 forward passes instead of 21\n2.0 tokens per pass"), "next-token sampling spends 21"
    assert "2.0 tokens per pass" in ruled(after(4, 10, length=21)), "two rows"
    both = Status(request(batch=2))(after(2, 4, 8))
    assert both == "2 forward passes instead of 6, 2 images together\n3.0 tokens per pass", "the mean over a batch"


def keeping(*indices) -> Status:
    """Of an image of which these tokens are kept."""
    keep = torch.zeros(16, dtype=torch.bool).index_fill(0, torch.tensor(indices), True).view(1, 4, 4)
    return Status(request(TokenLayout.plain(4, 4).keeping(torch.zeros(1, 4, 4, dtype=torch.int64), keep)))


def test_kept_tokens_do_not_count(clock):
    status = keeping(*range(8))
    assert "kept" in status(after(0, 8)), "no pass counts yet"
    assert "1.0 tokens per pass" in status(after(4, 12))
    assert status.finished(after(4, 16)).startswith("4 forward passes instead of 8\n2.0 tokens per pass")
    status = keeping(*range(8), 12, 13)  # two on the way, on which next-token sampling spends a pass each
    assert status.finished(after(4, 16)).startswith("4 forward passes instead of 8\n1.5 tokens per pass")
    assert "mask is empty" in keeping(*range(16)).finished(after(1, 16))


def test_kept_vectors_do_not_count(clock, continuous):
    model = continuous[0].model
    keep = torch.zeros(1, 4, 4, dtype=torch.bool)
    keep[0, :2] = True
    wanted = model.request(
        continuous[1].encode_from_tokens_scheduled("red apple"), tokens=torch.zeros(1, 4, 4, model.channels), kept=keep
    )
    assert "2.0 tokens per pass" in Status(wanted)(after(2, 12))


def test_texts_go_to_the_node_and_the_page_of_the_run_twice_a_second(page, clock, progress):
    server, report = page(), Report(16, None, Status(request()))
    for passes in range(1, 1001):  # 10 s
        clock[0] += 0.01
        report(after(passes, min(15, passes)))
    assert 18 <= len(server.texts) <= 21
    report.finish()
    assert {text[:2] for text in server.texts} == {("7", "a page")}
    assert server.texts[-1][2].endswith("10 s in all")
    assert server.events == [("specar.result", {"node": "7", "text": server.texts[-1][2]}, "a page")]


@pytest.mark.parametrize("method", ["SJD", "vectors"])
def test_a_sampler_ends_with_its_passes(method, page, sample, draw_vectors):
    server = page()
    _, trace = draw_vectors("", batch=2) if method == "vectors" else sample(method, batch=2)
    totals = trace.totals
    each = totals["tokens"] / 2 / totals["target_passes"]
    text = server.texts[-1][2]
    assert text.startswith(f"{totals['target_passes']} forward passes") and f"{each:.1f} tokens per pass" in text


def test_nobody_is_told_without_a_page(page, sample, monkeypatch):
    server = page(None)
    sample("SJD")
    assert not server.texts
    monkeypatch.delitem(sys.modules, "server")
    sample("SJD")


def test_find_fastest_shows_no_passes_of_its_trials(page, nodes, run, tiny, positive):
    server = page()
    latent = {"samples": torch.zeros(1, 8, 4, 4)}
    node = nodes["SpecARFindFastest"]
    inputs = {"model": tiny[0], "positive": positive, "latent_image": latent, "tokens": 16, "seconds": 1}
    run(node, **defaults(node) | inputs)
    assert not server.texts
