"""The command for a new GPU: its verdicts, what it compares, and that its dry run tries every stage."""

import json
import logging
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from comfyui_specar.kernels import linear, sampling
from comfyui_specar.samplers.methods import jacobi
from comfyui_specar.tests.support.patience import PATIENCE
from comfyui_specar.tools.benchmarks import sizes
from comfyui_specar.tools.benchmarks.gpu import calls, graphs, kernels, passes, stages, subjects
from comfyui_specar.tools.benchmarks.gpu.command import page
from comfyui_specar.tools.benchmarks.gpu.findings import MOST_FAILURES, NEEDS_DEVICE, Findings, NotRun
from comfyui_specar.tools.benchmarks.gpu.stages import CUT, FAILED, NOT_RUN, OK, STAGES, WARNING, Stage

CPU = torch.device("cpu")
NOTHING = {"summary": "all well", "rows": [], "failures": [], "warnings": [], "not_run": {}, "at": None}


@pytest.fixture
def findings():
    return Findings(None, PATIENCE, dry=True)


# Findings


def test_what_goes_wrong_with_an_item_is_noted_and_the_next_goes_on(findings, tmp_path):
    findings.out = tmp_path / "stage.json"
    for thing in findings.each([0, 1, 2], "things"):
        with findings.item(thing=thing) as row:
            assert json.loads(findings.out.read_text(encoding="utf-8"))["at"] == str(thing)
            if thing == 1:
                raise NotRun("it is odd")
            row["inverse"] = 2 / thing
    assert findings.rows == [{"thing": 2, "inverse": 1.0}]
    assert findings.content["failures"] == ["0: ZeroDivisionError: division by zero"]
    assert findings.content["not_run"] == {"1": "it is odd"}
    assert json.loads(findings.out.read_text(encoding="utf-8")) == findings.content


def test_a_stage_begins_nothing_new_when_its_time_is_over_or_too_much_has_failed(findings):
    late = Findings(None, 0.0, dry=True)
    assert list(late.each("abc", "letters")) == [] and late.content["not_run"] == {"3 letters": "out of time"}
    for thing in findings.each(range(9), "numbers"):
        findings.failure(str(thing))
    assert len(findings.content["failures"]) == MOST_FAILURES and list(findings.content["not_run"]) == ["4 numbers"]


def test_a_warning_of_the_pack_is_a_failure_while_it_is_listened_to(findings):
    log = logging.getLogger("comfyui_specar.kernels.graphs")
    with findings.listening():
        for _ in range(2):
            log.warning("no graphs: %s", "why")
        log.info("fine")
    log.warning("nobody listens")
    assert findings.content["failures"] == ["no graphs: why"]


# Verdicts


@pytest.mark.parametrize(
    ("found", "code", "verdict", "reported"),
    [
        ({"rows": [{}]}, 0, OK, "all well"),
        ({"rows": [{}], "warnings": ["slow"]}, 0, WARNING, "slow"),
        ({"rows": [{}], "failures": ["wrong"], "warnings": ["slow"]}, 0, FAILED, "wrong"),
        ({"not_run": {"all": "no ComfyUI"}}, 0, NOT_RUN, "no ComfyUI"),
        ({"rows": [{}]}, 86, FAILED, "code 86: last words"),
        ({"rows": [{}], "at": "ADT-Tree"}, None, CUT, "after 9 s at: ADT-Tree"),
        ({"failures": ["x"]}, None, FAILED, "x"),
    ],
)
def test_verdicts(found, code, verdict, reported):
    given, why = stages.judged(NOTHING | found, code, 9.0, " last words\n")
    assert given == verdict and reported in why


def test_a_process_that_dies_hangs_or_is_not_there(tmp_path):
    def run(*before, seconds=PATIENCE):
        return stages.process(Stage("device", "", 1, "device.run", before=before), seconds, tmp_path, [], True)

    died = run("/bin/sh", "-c", "echo no memory; exit 3")
    assert died["verdict"] == FAILED and "code 3: no memory" in died["why"]
    begun = time.perf_counter()
    assert run("/bin/sh", "-c", "sleep 6000 & wait", seconds=1)["verdict"] == CUT
    assert time.perf_counter() - begun < PATIENCE  # nothing is waited for
    absent = run("no-such-sanitizer")
    assert absent["verdict"] == NOT_RUN and "no-such-sanitizer is not installed" in absent["why"]


def test_where_a_stage_fails_the_later_ones_are_not_run(monkeypatch, tmp_path):
    times = {}

    def process(stage, seconds, *_given):
        times[stage.name] = seconds
        return stages.not_run(stage, "") | {"verdict": FAILED if stage.name == "graphs" else OK}

    monkeypatch.setattr(stages, "process", process)
    found = {e["stage"]: e for e in stages.in_turn(STAGES, 3600, tmp_path, [], dry=False)}
    assert list(found) == [stage.name for stage in STAGES] and list(times) == ["device", "graphs"]
    assert all(found[name]["why"] == "the stage graphs failed" for name in ("kernels", "passes", "prompts"))
    assert times["device"] >= stages.STARTING
    assert times["graphs"] > 3600 * 6 / sum(stage.share for stage in STAGES)  # what is left over is handed on
    assert list(stages.in_turn(STAGES, 0, tmp_path, [], dry=False))[0]["why"] == "out of time"
    races = tuple(stage for stage in STAGES if stage.name == "races")
    dry = {e["stage"]: e["why"] for e in stages.in_turn(races, 60, tmp_path, [], dry=True)}
    assert dry == {"races": NEEDS_DEVICE}


# What is compared


def test_calls_are_watched_wherever_a_kernel_was_imported():
    before, seen = jacobi.__dict__.copy(), []

    def look(name, reference, given):
        seen.append((name, len(given)))
        return reference(*given)

    with calls.watched(look):
        sampling.redraw(torch.rand(2, 5), q=torch.rand(2, 5), v=torch.rand(2))
        from comfyui_specar.kernels import verification

        verification.maximal_coupling(
            torch.rand(1, 2, 5),
            torch.rand(1, 2, 5),
            *(torch.zeros(1, 2, dtype=torch.int64),) * 2,
            torch.ones(1, 2, dtype=torch.bool),
            torch.rand(1, 2),
            torch.rand(1, 2),
        )
    assert seen == [("sampling.redraw", 3), ("verification.maximal_coupling", 7), ("sampling.redraw", 3)]
    assert jacobi.__dict__ == before
    sampling.redraw(torch.rand(2, 5), torch.rand(2, 5), torch.rand(2))
    assert len(seen) == 3


def test_references_call_those_of_others_while_watched():
    gated = torch.randn(2, 8), torch.randn(6, 8), None, None, True
    with calls.watched(lambda name, reference, given: reference(*given)):
        found = linear.few_rows(*gated)
    assert torch.equal(found, linear.few_rows(*gated))


def test_round_off_is_no_difference_and_a_decision_in_a_hundred_neither():
    a = torch.linspace(-3, 3, 300)
    assert kernels.alike(a, a + 1e-6) and not kernels.alike(a, a + 0.01)
    half = a.bfloat16()
    assert kernels.alike(half, (a * 1.004).bfloat16()) and not kernels.alike(half, (a * 1.2).bfloat16())
    generator = torch.Generator().manual_seed(0)
    large, error = (torch.randn(3000, generator=generator) * n for n in (100, 0.3))  # as a product in bf16 has it
    assert kernels.alike(large.bfloat16(), (large + error).bfloat16())
    assert not kernels.alike(large.bfloat16(), (large + 100 * error).bfloat16())
    edges = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0])
    assert kernels.alike(edges, edges) and not kernels.alike(edges, edges + 0.01)
    token = torch.arange(300)
    for changed, same in ((3, True), (4, False)):
        assert kernels.alike(token, torch.where(token < changed, -1, token)) == same
    assert not kernels.alike(token, token.int()) and not kernels.alike(token, token[:-1])
    assert not kernels.alike(torch.tensor([1]), torch.tensor([2]))


@dataclass
class Pair:
    a: torch.Tensor
    n: int = 3


def reference(x, pair):
    """Writes in x, and returns something else."""
    x += pair.a
    return x * 2


def test_a_kernel_must_return_and_write_what_its_reference_does():
    def comparison(kernel):
        reported.clear()
        about = {"model": "toy"}
        return kernels.Comparison(lambda name, given: kernel(*given), kernels.shape, about, reported.append, {})

    def call(found, size=4):
        x = torch.zeros(size, 2)[:, 0]  # a slice of something wider
        assert torch.equal(found("k", reference, (x, Pair(torch.ones(size)))), torch.full((size,), 2.0))
        assert x.eq(1).all() and x.stride() == (2,)

    def sliced(x, pair):
        assert x.stride() == (2,) and isinstance(pair, Pair) and pair.n == 3
        return reference(x, pair)

    reported = []
    right = comparison(sliced)
    for size in (4, 4, 5):
        call(right, size)
    assert right.rows["k"] == {"model": "toy", "kernel": "k", "calls": 2, "disagreed": 0, "largest": 0.0}

    for wrong in (lambda x, pair: reference(x, pair) + 0.5, lambda x, pair: x * 0 + 2, lambda x, pair: 1 / 0):
        found = comparison(wrong)
        call(found)
        assert not reported  # a decision on an edge may fall on either side: it gets another try
        for _ in range(2):
            call(found)
        assert found.rows["k"]["disagreed"] == 1 and found.rows["k"]["calls"] == 2
        [failure] = reported
        assert failure.startswith("toy: k of ") and "('float32', 4)" in failure


class Drawn:
    """A sampler whose runs give these tokens."""

    def __init__(self, *runs):
        self.runs, self.staged = iter(runs), SimpleNamespace()

    def output(self, seed):
        return SimpleNamespace(tokens=torch.tensor([next(self.runs)]))


@pytest.mark.parametrize(
    ("runs", "row"),
    [
        (([1, 2, 3], [1, 2, 3]), {"same": True, "first": None, "again": None}),
        (([1, 0, 0], [1, 2, 3]), {"same": False, "first": 1, "again": None}),
        (([1, 2, 3], [1, 2, 0]), {"same": False, "first": None, "again": 2}),
    ],
)
def test_tokens_of_captured_steps_are_compared(runs, row):
    assert graphs.compared(Drawn([1, 2, 3]), Drawn(*runs), graphs.Captures()) == row | {"captures": 0}


def test_rows_of_a_device(monkeypatch):
    """What a dry run leaves out, on a CPU that stands for a GPU."""
    for name, value in {
        "MODELS": ("llamagen-xl",),
        "METHODS": ("next_token", "chain of 5"),
        "TOKENS": 8,
        "REPETITIONS": 2,
        "PROFILED": 8,
        "SLOWEST": 0,
    }.items():
        monkeypatch.setattr(passes, name, value)
    monkeypatch.setattr(subjects, "device_of", lambda dry: CPU)
    monkeypatch.setitem(sizes.SIZES, "llamagen-xl", subjects.tiny(sizes.SIZES["llamagen-xl"]))
    findings = Findings(None, PATIENCE, dry=False)
    passes.run(findings, generate=True)
    assert findings.content["failures"] == [] and findings.content["not_run"] == {}
    first, chain, *others = findings.rows
    assert [row["method"] for row in others] == ["generate, static cache", "generate, dynamic cache", "plain loop"]
    columns = {"model", "method", "ms", "floor, ms", "times the floor", "cost", "launches", "synchronisations"}
    assert set(first) == columns
    assert first["cost"] == 1 and first["synchronisations"] == "none" and chain["floor, ms"] > first["floor, ms"] > 0
    assert [reported for reported in findings.content["warnings"] if "are its graphs replayed?" in reported]
    assert findings.content["summary"].startswith("llamagen-xl: ")


def test_what_the_pack_does_without_is_not_tried(monkeypatch):
    """On an older GPU, or AMD's: there is nothing to compare."""
    for name in ("subjects.dispatch.runs_triton", "subjects.capturable"):
        monkeypatch.setattr(f"{subjects.__package__}.{name}", lambda device: False)
    monkeypatch.setattr(subjects, "device_of", lambda dry: CPU)
    for stage in (kernels.run, graphs.run, graphs.run_failed, graphs.run_captures):
        with pytest.raises(NotRun, match="on this GPU"):
            stage(Findings(None, PATIENCE, dry=False))


# The whole


BARE = """
import importlib.util, sys

ABSENT = {"numpy", "PIL", "safetensors", "einops", "transformers", "aiohttp"}
known = importlib.util.find_spec

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Finder())
importlib.util.find_spec = lambda name, package=None: None if name in ABSENT else known(name, package)
from tools.benchmarks import gpu
gpu.main()
"""


def test_it_runs_where_there_is_nothing_but_torch(tmp_path):
    """Random weights need neither files nor images; what does is not run, and says why."""
    found = {}
    for stage in ("device", "captures"):
        out = tmp_path / f"{stage}.json"
        options = ["--stage", stage, "--into", str(out), "--seconds", str(PATIENCE), "--dry"]
        subprocess.run([sys.executable, "-c", BARE, *options], check=True, cwd=stages.ROOT, timeout=PATIENCE)
        found[stage] = json.loads(out.read_text(encoding="utf-8"))
        assert found[stage]["failures"] == []
    assert "einops is not installed" in found["device"]["not_run"].values()
    assert len(found["captures"]["rows"]) == 2


def test_a_dry_run_tries_every_stage(tmp_path):
    out = tmp_path / "gpu.json"
    environment = {name: value for name, value in os.environ.items() if name != "COMFYUI_PATH"}
    ran = subprocess.run(
        [sys.executable, "-m", "tools.benchmarks", "gpu", "--dry", "--minutes", "60", "--out", str(out)],
        cwd=stages.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    reported = json.loads(out.read_text(encoding="utf-8"))
    found = {entry["stage"]: entry for entry in reported["stages"]}
    verdicts = {name: entry["verdict"] for name, entry in found.items()}
    assert verdicts.pop("captures") in (OK, WARNING), ran.stdout
    assert verdicts == dict.fromkeys(verdicts, OK) | dict.fromkeys(
        ("failed-async", "plain", "races", "prompts"), NOT_RUN
    ), ran.stdout
    assert found["prompts"]["why"] == "COMFYUI_PATH does not name a ComfyUI tree"
    needed = {
        name for name, entry in found.items() if NEEDS_DEVICE in (*entry.get("not_run", {}).values(), entry["why"])
    }
    assert needed == set("device failed-async storages plain races allocator captures passes ratios".split())
    compared = {row["kernel"] for row in found["kernels"]["rows"]}
    assert compared >= {"attention.attend_few", "linear.few_rows", "verification.rejection_sampling"}
    asked = {"prompt", "guidance", "temperature", "top-k", "top-p"}
    assert found["captures"]["rows"] and not found["captures"]["failures"]
    for row in found["captures"]["rows"]:
        assert set(row) == {"method", "captures", "second image", *asked}
        assert row["captures"] > 0 and row["second image"] == row["prompt"] == 0
    text = out.with_suffix(".md").read_text(encoding="utf-8")
    assert text == page(reported) and "Dry run, without a CUDA device" in text
    assert all(f"| {stage.title} | **" in text for stage in STAGES)


def test_synchronisations_between_polls_are_counted():
    events = [
        (0, "cudaStreamSynchronize"),
        (2, "cudaEventSynchronize"),
        (1, "cudaLaunchKernel"),
        (3, "Memcpy DtoH (Device -> Pageable)"),
        (4, "Memcpy DtoH (Device -> Pinned)"),
        (5, "cudaEventSynchronize"),
        (6, "cudaDeviceSynchronize"),
    ]
    assert passes.between_polls(events) == {"polls": 2, "between": {"Memcpy DtoH (Device -> Pageable)": 1}}
    assert passes.between_polls([]) == {"polls": 0, "between": {}}


def test_what_the_device_does_between_polls_is_counted():
    assert passes.per_pass([4, 2, 6], [1, 3, 3, 5, 7]) == 1.5
    assert passes.per_pass([4], [1, 3]) is None and passes.per_pass([], []) is None


def test_differences():
    a = torch.tensor([1.0, 100.0, torch.inf, torch.nan])
    assert kernels.difference(a, a) == 0
    assert kernels.difference(a, a + torch.tensor([0.5, 1.0, 0, 0])) == 0.5
    assert kernels.difference(a, torch.zeros(4)) == torch.inf
    assert kernels.difference(torch.arange(4), torch.tensor([0, 1, 2, 9])) == 0.25
