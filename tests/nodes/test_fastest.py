"""Find Fastest and the sampler for what it has chosen, on the tiny model."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from comfyui_specar.nodes import candidates, fastest
from comfyui_specar.reports import quality
from comfyui_specar.reports import trials as trials_of
from comfyui_specar.reports.comparison import WIDTH
from comfyui_specar.reports.run_report import labels
from comfyui_specar.reports.trials import TIME_UP
from comfyui_specar.samplers.drafts.adt_tree import ADTTree
from comfyui_specar.samplers.drafts.auto import Auto
from comfyui_specar.samplers.drafts.costs import PassCosts
from comfyui_specar.samplers.engine import run as engine
from comfyui_specar.samplers.engine import session
from comfyui_specar.samplers.layout import TokenLayout
from comfyui_specar.samplers.methods.jacobi import SJD

from ..support.tape import LatePoll, TapeGraphs
from .conftest import GRID

pytestmark = pytest.mark.once  # the search asks ComfyUI for nothing but room; test_faults_inputs.py runs both nodes

SECONDS = 400  # of the fixture's clock: some rounds of all methods
EXACT = [
    "next token",
    "SJD, coupled, window 8",
    "EAGLE, tree that pays",
    "EAGLE, ADT-Tree, horizontal",
    "EAGLE, chain of 5 by blocks",
]


@pytest.fixture(autouse=True)
def given_costs(monkeypatch):
    """Measured ones would lead to other trees on other machines."""
    costs = PassCosts(((1, 1.0), (65, 10.0)), 0.1, ((1, 0.1), (64, 0.1)))
    monkeypatch.setitem(candidates.STRUCTURES, candidates.AUTO, Auto(costs=costs))
    monkeypatch.setitem(candidates.PRESETS, candidates.AUTO, ADTTree(pays=True).fit(costs))


class Clock:
    """Tells how many rounds were run, so that every machine measures the same."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> Clock:
    """Find Fastest's clock. A round takes a second."""
    clock, report = Clock(), fastest.Report.__call__

    def ended(self, progress):
        clock.now += 1
        report(self, progress)

    monkeypatch.setattr(fastest, "clock", clock)
    monkeypatch.setattr(fastest.Report, "__call__", ended)
    return clock


@pytest.fixture
def find(run_node, tiny, drafter, positive):
    """find(**inputs) -> the node's output."""

    def find(**inputs):
        latent = {"samples": torch.zeros(inputs.pop("batch", 1), 8, GRID, GRID)}
        common = {"model": tiny[0], "positive": positive, "latent_image": latent, "drafter": drafter}
        return run_node("FindFastest", **common | {"seconds": SECONDS} | inputs)

    return find


def request_for(model, tokens: int) -> SimpleNamespace:
    """What candidates read of a request for so many tokens."""
    return SimpleNamespace(model=model.model, length=tokens, layout=TokenLayout.plain(1, tokens))


def trials(out) -> list[dict]:
    return out.ui["specar"][0]["trials"]


def test_every_method_is_tried_and_the_result_is_all_of_a_piece(find, tiny, progress):
    out = find()
    method, chart, report = out.result
    assert [t["method"] for t in trials(out)] == EXACT and all(t["exact"] and not t["drift_bound"] for t in trials(out))
    seconds = [t["seconds_per_token"] for t in trials(out)]
    assert min(map(len, seconds)) >= 2 * fastest.RUNS and len(seconds[0]) - min(map(len, seconds)) <= fastest.RUNS
    for t, runs in zip(trials(out), seconds, strict=True):
        assert t["tokens"] == 16 * len(runs) and t["passes"] == 16 * sum(runs) <= t["tokens"] and not t["note"]
    assert trials(out)[0]["passes"] == trials(out)[0]["tokens"]
    assert method.name == EXACT[out.ui["specar"][0]["chosen"]] and f"| {method.name} (chosen) " in report
    assert chart.shape[::2] == (1, WIDTH) and out.ui["images"] and out.ui["text"][0] in report
    assert "Trials sampled 16 tokens of an image on cpu, cfg 2, temperature 0.9" in report
    json.dumps(out.ui["specar"])
    values = [value for value, _, _ in progress]
    assert values == sorted(values) and progress[-1][0] == progress[-1][1]
    assert not tiny[0].model.sessions


def test_a_budget_brings_relaxed_methods_and_bounds_the_choice(find):
    out = find(leak_budget=1e-4, drafter=None, batch=2)
    assert [t["acceptance"] for t in trials(out)] == [
        "exact",
        "exact",
        "TV budget (epsilon 0.0001)",
        "Cool-SD (delta 1.1, decay 0.2)",
        "Cool-SD (delta 2, decay 0.2)",
        "LANTERN++ (neighbours 10, ratio 2)",
    ]
    for t in trials(out)[2:]:
        assert t["tokens"] % 32 == 0 and t["drift_bound"] > 0
        over = t["drift_bound"] / t["tokens"] > 1e-4 * (1 + 1e-5)
        assert ("over leak_budget" in t["note"]) == over == ("TV budget" not in t["acceptance"])
        assert not over or len(t["seconds_per_token"]) == fastest.RUNS, "it is left out of the next round"
    chosen = trials(out)[out.ui["specar"][0]["chosen"]]
    assert chosen["drift_bound"] / chosen["tokens"] <= 1e-4 * (1 + 1e-5)
    assert "drift bound (per token)" in out.result[2]


def test_what_was_measured_of_images_with_a_setting_is_shown(find, monkeypatch, tmp_path):
    monkeypatch.setattr(quality, "FILE", tmp_path / "quality.json")
    rule = {"rule": "cool_sd", "delta": 2.0, "decay": 0.2, "steps": 5, "schedule": "exponential", "floor": True}
    row = {
        "class": {"drafts": "sjd", "lossless": False, "reuse": "coupled", "rule": rule},
        "quality": {"images": 512, "loss": 0.07, "error": 0.03, "agreement": 0.9, "plain_agreement": 0.95},
    }
    quality.FILE.write_text(json.dumps([row]), encoding="utf-8")
    out = find(leak_budget=1.0, drafter=None)
    shown = {t["acceptance"]: t["quality"] for t in trials(out) if t["quality"]}
    assert shown == {"Cool-SD (delta 2, decay 0.2)": row["quality"]}
    assert "log p loss (bundled model)" in out.result[2] and "| 0.07 " in out.result[2]


def test_methods_run_in_turns(find, monkeypatch):
    order, measure = [], fastest.Search.measure
    monkeypatch.setattr(fastest.Search, "measure", lambda s, t, *a: (order.append(t.method.name), measure(s, t, *a)))
    find()
    assert len(order) > 2 * len(EXACT) and order == [EXACT[i % len(EXACT)] for i in range(len(order))]


def test_when_time_is_up_the_rest_is_named(find, monkeypatch, clock):
    """The clock jumps once the baseline was tried."""
    measure = fastest.Search.measure

    def late(*args):
        measure(*args)
        clock.now += 1e9

    monkeypatch.setattr(fastest.Search, "measure", late)
    out = find()
    assert [bool(t["seconds_per_token"]) for t in trials(out)] == [True] + 4 * [False]
    assert {t["note"] for t in trials(out)[1:]} == {TIME_UP}
    assert out.result[0].name == "next token" and not out.ui["specar"][0]["faster"]
    first, *others = out.ui["text"][0].splitlines()
    assert "next token" in first and re.search(r"\btime\b", first)
    [missing] = [line for line in others if line.lower().startswith(TIME_UP)]
    assert "SJD, coupled, window 8; EAGLE, tree that pays; " in missing


def test_time_that_runs_out_during_a_trial_ends_it(find, monkeypatch, tiny, clock):
    """The clock jumps once the windows are being tried."""
    sample = SJD.sample

    def late(self, request):
        clock.now += 1e9
        return sample(self, request)

    monkeypatch.setattr(SJD, "sample", late)
    assert {t["note"] for t in trials(find())[1:]} == {TIME_UP}
    assert not tiny[0].model.sessions


def test_hopeless_methods_are_given_up(find, monkeypatch, clock):
    """The window's rounds take ten seconds each, all rounds of the next-token sampler 16."""
    sample, took = SJD.sample, []

    def slow(self, request):
        def ended(progress):
            clock.now += 9
            request.callback(progress)

        begun = clock.now
        try:
            return sample(self, replace(request, callback=ended))
        finally:
            took.append(clock.now - begun)

    monkeypatch.setattr(SJD, "sample", slow)
    out = find(drafter=None)
    assert trials(out)[0]["note"] == "" and re.search("2 times.*next token", trials(out)[1]["note"])
    assert not trials(out)[1]["seconds_per_token"] and out.result[0].name == "next token"
    warm, given_up = took
    assert given_up == 40 < warm, "it is not tried again"


def test_memory_that_runs_out_costs_one_method_and_other_errors_are_not_hidden(find, monkeypatch, tiny):
    def fail_with(error):
        def sample(self, request):
            raise error

        monkeypatch.setattr(SJD, "sample", sample)

    fail_with(ValueError("NaN"))
    with pytest.raises(ValueError, match="NaN"):
        find(drafter=None)
    fail_with(torch.OutOfMemoryError("the device is full"))
    monkeypatch.setattr(fastest, "STOP_AFTER", 0.0)
    out = find()
    assert trials(out)[0]["note"] == "" and "memory" in trials(out)[1]["note"]
    assert sum("times as long" in t["note"] for t in trials(out)) == 3, "the search goes on"
    assert not tiny[0].model.sessions
    monkeypatch.setattr(SJD, "run_bytes", lambda self, request: 2**60)  # noticed before it runs
    plain, window = (t["note"] for t in trials(find(drafter=None)))
    assert plain == "" and "memory" in window


def test_runs_on_a_gpu_are_warm_when_they_count(find, monkeypatch, tiny):
    """Steps are captured (here: taped): no run that counts captures any, and in the end nothing is kept."""
    made, captures, counted, before = [], [], [], []

    class Graphs(TapeGraphs):
        def __init__(self, device):
            super().__init__(device)
            made.append(self)

        def _capture(self, *given):
            captures.append(1)
            return super()._capture(*given)

    monkeypatch.setattr(session, "Graphs", Graphs)
    monkeypatch.setattr(engine, "Poll", LatePoll)
    search, run, add = fastest.Search, fastest.Search.run, trials_of.Trial.add

    def ran(*args):
        before.append(len(captures))
        return run(*args)

    def added(*args):
        counted.append(len(captures) - before[-1])
        add(*args)

    monkeypatch.setattr(search, "run", ran)
    monkeypatch.setattr(fastest, "Search", lambda *a: search(*a[:5], True, *a[6:]))
    monkeypatch.setattr(trials_of.Trial, "add", added)
    find(drafter=None)
    assert captures and len(counted) >= 8 and not any(counted), counted
    assert not tiny[0].model.sessions


@pytest.mark.parametrize(("kind", "captured"), [("cuda", True), ("mps", False), ("xpu", False), ("cpu", False)])
def test_only_where_steps_are_captured_runs_are_warmed_up_for_it(kind, captured, tiny, monkeypatch):
    """On an Apple or Intel GPU every run took twice as long for nothing."""
    given = []

    def search(*arguments):
        given.append(arguments[5])
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(fastest, "Search", search)
    monkeypatch.setattr(tiny[0].patcher, "load_device", torch.device(kind))
    with pytest.raises(KeyboardInterrupt):
        fastest.search(request_for(tiny[0], 16), tiny[0], None, 0.0, 16, 1.0)
    assert given == [captured]


METHODS = {  # name of a candidate -> the sampler node that it says to set, and its widgets
    "next token": ("NextToken", {}),
    "SJD, coupled, window 8": ("SJD", {"window": 8}),
    "EAGLE, tree that pays": ("DraftTree", {"structure": "auto"}),
    "EAGLE, chain of 5 by blocks": ("DraftTree", {"structure": "chain, block verification", "depth": 5}),
    "EAGLE, ADT-Tree, horizontal": ("ADTTree", {"preset": "auto"}),
}
RULES = [
    None,
    ("TVMetered", {"epsilon": 0.3}),
    ("CoolSD", {"delta": 1.1}),
    ("CoolSD", {"delta": 2.0}),
    ("LanternPP", {"neighbours": 10, "ratio": 2.0}),
]


def test_what_ar_sampler_also_does_is_named_by_its_choice_first(tiny):
    request = request_for(tiny[0], 64)
    exact = [candidates.sjd(tiny[0], window, request) for window in (8, 16)]
    relaxed = candidates.relaxed_methods(exact, 0.1, 0, request)
    named = [chosen.by_hand for chosen in (*exact, *relaxed) if chosen.simple]
    assert named[0] == "AR Sampler: method fast, same quality; or SJD++ Sampler: window 16, refinement coupled (exact)"
    assert len(named) == 1


@pytest.mark.parametrize("name", METHODS)
def test_chosen_methods_generate_what_their_own_nodes_generate(name, sample, rule, nodes, tiny, drafter):
    request = request_for(tiny[0], 16)
    plain = candidates.next_token(tiny[0], request)
    base = {m.name: m for m in [plain, *candidates.exact_methods(tiny[0], drafter, request)]}[name]
    node, widgets = METHODS[name]
    display = nodes[f"SpecAR{node}Sampler"].GET_SCHEMA().display_name
    methods = [base]
    if name == "SJD, coupled, window 8":  # the rules are the same for all
        methods += candidates.relaxed_methods([base], 0.3, 64, request)
    for chosen, relaxed in zip(methods, RULES, strict=False):
        assert chosen.widgets.startswith(display) and chosen.exact == (relaxed is None)
        for widget in ("structure", "preset"):
            assert widget not in widgets or f"{widget} {widgets[widget]}" in chosen.by_hand
        more = {} if relaxed is None else {"rule": rule(relaxed[0], **relaxed[1])}
        latent, trace = sample(node, **widgets, **more, batch=2)
        found, same = sample("Method", method=chosen, batch=2)
        assert torch.equal(found["ar_tokens"], latent["ar_tokens"])
        assert labels([same]) == [(chosen.name, chosen.acceptance)], "a run is called what was tried"
        assert same.settings | {"method": ""} == trace.settings | {"method": ""}  # "draft_tree" or "cool_sd"


def test_a_method_goes_with_its_model_only(sample, tiny, load, load_drafter, drafters):
    def drawn(method, model):
        return sample("Method", model=model, method=method)[0]["ar_tokens"]

    with pytest.raises(ValueError, match="tiny.*another loader"):
        drawn(candidates.next_token(tiny[0], request_for(tiny[0], 16)), load("tiny", dtype="bf16")[0])
    ours = load_drafter(tiny[0], "eagle")
    request = request_for(tiny[0], 16)
    for method in (candidates.next_token(tiny[0], request), candidates.exact_methods(tiny[0], ours, request)[-1]):
        wanted, again = drawn(method, tiny[0]), load("tiny")[0]
        assert torch.equal(drawn(method, again), wanted), "the same files, loaded again"
    assert ours.target is again


def test_what_cannot_be_tried_is_refused(find, load, continuous):
    with pytest.raises(ValueError, match="Find Fastest.*token ids"):
        find(model=continuous[0], drafter=None)
    with pytest.raises(ValueError, match="eagle.*tiny"):
        find(model=load("tiny", dtype="bf16")[0])
    image = {"samples": torch.ones(1, 8, GRID, GRID), "noise_mask": torch.zeros(1, 1, 32, 32)}
    with pytest.raises(ValueError, match="mask.*nothing"):
        find(latent_image=image)
    with pytest.raises(ValueError, match="cfg.* 0.5"):
        find(cfg=0.5)


def test_methods_for_which_trials_are_too_short_are_named(find, monkeypatch):
    monkeypatch.setattr(candidates, "WINDOWS", (4, 8))
    monkeypatch.setattr(fastest, "FEWEST", 10)
    out = find(drafter=None, seconds=40)  # of which the first trial may take 7
    assert trials(out)[0]["tokens"] % 10 == 0
    assert "10 tokens" in trials(out)[2]["note"]
    assert "10 of 16 tokens" in out.result[2]


def test_a_window_wider_than_a_warming_run_is_tried(find, monkeypatch):
    monkeypatch.setattr(fastest, "FEWEST", 4)
    assert trials(find(drafter=None))[1]["seconds_per_token"]


def test_windows_and_tables_are_those_that_fit(tiny, drafter):
    for tokens, windows in ((256, (16, 32, 8, 64)), (40, (16, 8))):
        names = [m.name for m in candidates.exact_methods(tiny[0], None, request_for(tiny[0], tokens))]
        assert names == [f"SJD, coupled, window {window}" for window in windows]
    request = request_for(tiny[0], 16)
    base = candidates.exact_methods(tiny[0], drafter, request)[:1]
    few, many = (candidates.relaxed_methods(base, 0.1, codes, request) for codes in (10, 64000))
    assert len(few) == len(many) == 3 and not any("LANTERN" in m.acceptance for m in few + many)
