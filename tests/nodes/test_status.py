"""What a node says of its run while it runs: the words, when they are sent, and to whom."""

import json
import sys

import pytest
import torch
from comfyui_specar.nodes.comfy_runtime import progress
from comfyui_specar.nodes.comfy_runtime.progress import Report, Status, finished_run
from comfyui_specar.samplers.contract import Progress, Request
from comfyui_specar.samplers.layout import TokenLayout


@pytest.fixture
def clock(monkeypatch):
    """The time in seconds, as a list of one number."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


def request(layout=None, batch=1):
    layout = layout or TokenLayout.plain(4, 4)
    return Request(None, None, layout, None, batch=batch)


def after(passes, *committed, length=16):
    return Progress(torch.zeros(len(committed), length, dtype=torch.int64), torch.tensor(committed), length, passes)


def test_passes_tokens_and_the_time_left(clock):
    said = Status(request())
    assert said(after(1, 1)) == {"images": 1, "passes": 1, "done": 1, "total": 16}
    clock[0] += 2  # 8 tokens took 2 s, 7 are left
    assert said(after(3, 9)) == {"images": 1, "passes": 3, "done": 9, "total": 16, "left": "1.8 s"}


def test_tokens_are_the_sampled_ones_without_row_ends(clock):
    layout = TokenLayout.with_row_ends(4, 4, (64,), (65,))  # 21 positions, the last two of which are forced
    ruled = Status(request(layout))
    assert [ruled(after(4, 10, length=21))[name] for name in ("done", "total")] == [8, 16], "two rows"
    both = Status(request(batch=2))(after(2, 4, 8))
    assert (both["images"], both["done"], both["total"]) == (2, 6, 16), "the mean over a batch"


def keeping(*indices) -> Status:
    """Of an image of which these tokens are kept."""
    keep = torch.zeros(16, dtype=torch.bool).index_fill(0, torch.tensor(indices), True).view(1, 4, 4)
    return Status(request(TokenLayout.plain(4, 4).keeping(torch.zeros(1, 4, 4, dtype=torch.int64), keep)))


def test_kept_tokens_do_not_count(clock):
    half = keeping(*range(8))
    assert [half(after(4, 12))[name] for name in ("done", "total")] == [4, 8]
    assert keeping(*range(16))(after(1, 16))["total"] == 0


def test_kept_vectors_do_not_count(clock, continuous):
    model = continuous[0].model
    keep = torch.zeros(1, 4, 4, dtype=torch.bool)
    keep[0, :2] = True
    wanted = model.request(
        continuous[1].encode_from_tokens_scheduled("red apple"), tokens=torch.zeros(1, 4, 4, model.channels), kept=keep
    )
    run = Status(wanted)(after(2, 12))
    assert (run["done"], run["total"]) == (4, 8)


def test_numbers_go_to_the_node_and_the_page_of_the_run_twice_a_second(page, clock, progress):
    server, report = page(), Report(16, None, Status(request()).show)
    for passes in range(1, 1001):  # 10 s
        clock[0] += 0.01
        report(after(passes, min(15, passes)))
    assert 18 <= len(server.events) <= 21
    assert {(event, data["node"], client) for event, data, client in server.events} == {("specar.run", "7", "a page")}


@pytest.mark.parametrize("method", ["SJD", "Continuous"])
def test_a_run_ends_with_what_it_took_and_what_auto_was(method, draw, tiny, continuous):
    loaded, clip, _ = continuous if method == "Continuous" else tiny
    _, trace = draw(method, batch=2)
    asked = loaded.model.request(clip.encode_from_tokens_scheduled("red apple"), batch=2)
    run = finished_run(asked, trace, 16)
    assert (run["images"], run["passes"]) == (2, trace.totals["target_passes"])
    assert run["done"] == run["total"] == run["plain"] == 16 and run["size"] == [64, 64]
    assert f"temperature {trace.settings['temperature']:g}" in run["used"] and "cfg" in run["used"]


def test_a_sampler_leaves_its_run_for_the_page_also_when_it_is_cached(nodes, run_node, tiny, positive):
    latent = {"samples": torch.zeros(1, 8, 4, 4)}
    out = run_node("NextTokenSampler", model=tiny[0], positive=positive, latent_image=latent)
    assert json.loads(out.ui["specar_run"][0])["passes"] == 16
    resent = getattr(nodes["SpecARNextTokenSampler"].GET_SCHEMA(), "has_intermediate_output", True)
    assert resent, "by newer versions"


def test_kept_tokens_are_not_counted_as_passes_saved(sample, tiny, positive):
    first, _ = sample("NextToken")
    mask = torch.ones(1, 4, 4)
    mask[:, :2] = mask[:, 3, :2] = 0
    latent = {**first, "noise_mask": mask}
    _, trace = sample("SJD", latent_image=latent)
    kept = TokenLayout.plain(4, 4).keeping(torch.zeros(1, 4, 4, dtype=torch.int64), mask == 0)
    run = finished_run(tiny[0].model.request(positive, layout=kept), trace, 16)
    assert run["plain"] == run["total"] == 6


def test_nobody_is_told_without_a_page(page, sample, monkeypatch):
    server = page(None)
    sample("SJD")
    assert not server.events
    monkeypatch.delitem(sys.modules, "server")
    sample("SJD")


def test_find_fastest_shows_no_passes_of_its_trials(page, run_node, tiny, positive):
    server, latent = page(), {"samples": torch.zeros(1, 8, 4, 4)}
    run_node("FindFastest", model=tiny[0], positive=positive, latent_image=latent, tokens=16, seconds=1)
    assert {event for event, *_ in server.events} <= {"specar.notices"}
