"""The command for a new GPU: its verdicts, what it compares, and that its dry run tries every stage."""

import json
import logging
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from comfyui_specar.kernels import linear, sampling
from comfyui_specar.samplers.methods import jacobi
from comfyui_specar.tests.support.patience import PATIENCE
from comfyui_specar.tools.benchmarks import sizes
from comfyui_specar.tools.benchmarks.gpu import calls, faults, graphs, kernels, passes, replays, stages, subjects
from comfyui_specar.tools.benchmarks.gpu.command import begun, page
from comfyui_specar.tools.benchmarks.gpu.findings import MOST_FAILURES, OUT_OF_TIME, Findings, NotRun
from comfyui_specar.tools.benchmarks.gpu.stages import CUT, FAILED, NEEDS_DEVICE, NOT_RUN, OK, STAGES, WARNING, Stage

ROOT = Path(__file__).resolve().parents[2]
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
    log = logging.getLogger("comfyui_specar.device.graphs")
    with findings.listening():
        for _ in range(2):
            log.warning("no graphs: %s", "why")
        log.info("fine")
    log.warning("nobody listens")
    assert findings.content["failures"] == ["no graphs: why"]


def test_what_an_earlier_call_found_is_kept_and_not_run_again(tmp_path):
    first = Findings(tmp_path / "stage.json", PATIENCE, dry=True)
    for thing in first.each([0, 1], "things", "thing", of="all"):
        with first.item(of="all", thing=thing) as row:
            row["half"] = thing / 2
    again = Findings(tmp_path / "stage.json", PATIENCE, dry=True)
    assert list(again.each([1, 2, 0], "things", "thing", of="all")) == [2] and again.rows == first.rows
    assert list(again.each([1], "things", "thing", of="none")) == [1]
    other = Findings(tmp_path / "other.json", PATIENCE, dry=True)
    assert other.of("stage") == first.rows and other.of("absent") == []


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
        return stages.process(Stage("device", "", 1, "device.run", before=before), seconds, tmp_path, True)

    died = run("/bin/sh", "-c", "echo no memory; exit 3")
    assert died["verdict"] == FAILED and "code 3: no memory" in died["why"]
    begun = time.perf_counter()
    assert run("/bin/sh", "-c", "sleep 6000 & wait", seconds=1)["verdict"] == CUT
    assert time.perf_counter() - begun < PATIENCE  # nothing is waited for
    absent = run("no-such-sanitizer")
    assert absent["verdict"] == NOT_RUN and "no-such-sanitizer is not installed" in absent["why"]


@pytest.fixture
def calls_of(monkeypatch, tmp_path):
    """Goes through all stages as a call of the command does: (verdict of a stage, seconds, ...) -> its entries, and the
    seconds that were given to each stage, in order."""

    def call(verdict, seconds, known=None, plan=0.0, dry=False, names=()):
        given = {}

        def process(stage, limit, *_given):
            given[stage.name] = limit
            return stages.not_run(stage, "") | {"verdict": verdict(stage.name), "seconds": 9.0}

        monkeypatch.setattr(stages, "process", process)
        chosen = tuple(stage for stage in STAGES if not names or stage.name in names)
        found = stages.in_turn(chosen, seconds, tmp_path, dry, known, plan)
        return {entry["stage"]: entry for entry in found}, given

    return call


def test_stages_share_the_time_and_one_that_fails_ends_no_other(calls_of):
    found, given = calls_of(lambda name: FAILED if name == "graphs" else OK, 3600)
    assert list(found) == list(given) == [stage.name for stage in STAGES]
    assert given["device"] >= stages.STARTING
    minutes = {stage.name: stage.minutes for stage in STAGES}
    assert given["passes"] > 3600 * minutes["passes"] / sum(minutes.values())  # what is left over is handed on
    assert sum(minutes.values()) == pytest.approx(30)
    found, given = calls_of(lambda name: OK, 0)
    assert found["device"]["why"] == OUT_OF_TIME and not given
    found, _ = calls_of(lambda name: OK, 60, dry=True, names=("races",))
    assert found["races"]["why"] == NEEDS_DEVICE


def test_a_later_call_begins_what_was_not_begun_and_then_goes_on(calls_of, tmp_path):
    names = ("device", "passes", "ratios")
    known, given = calls_of(lambda name: CUT if name == "passes" else OK, 600, plan=1800, names=names)
    of_passes = 1791 * 1.5 / 4.5
    assert given["passes"] == pytest.approx(of_passes)  # its part of all calls
    known["passes"] |= {"rows": [{"ms": 1}], "not_run": {"2 models": OUT_OF_TIME, "x": "no x"}}
    known["ratios"] = stages.not_run(STAGES[0], OUT_OF_TIME) | {"stage": "ratios"}
    found, given = calls_of(lambda name: OK, 600, known, 1800, names=names)
    assert list(given) == ["ratios", "passes"] and found["passes"]["seconds"] == 18.0
    written = json.loads((tmp_path / "passes.json").read_text(encoding="utf-8"))
    assert written == {"rows": [{"ms": 1}], "not_run": {"x": "no x"}}
    assert not calls_of(lambda name: OK, 600, known | found, 1800, names=names)[1]


def test_a_report_is_gone_on_with_for_the_same_code_and_gpu(tmp_path):
    out, about = tmp_path / "gpu.json", {"device": "a", "commit": "1"}
    assert begun(out, about) == []
    out.write_text(json.dumps(about | {"stages": [{"stage": "device"}]}), encoding="utf-8")
    assert begun(out, about) == [{"stage": "device"}] and begun(out, about | {"commit": "2"}) == []


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
    passes.run(findings)
    assert findings.content["failures"] == [] and findings.content["not_run"] == {}
    first, chain = findings.rows
    columns = {"model", "method", "ms", "floor, ms", "times the floor", "cost", "launches", "synchronisations"}
    assert set(first) == columns
    assert first["cost"] == 1 and first["synchronisations"] == "none" and chain["floor, ms"] > first["floor, ms"] > 0
    assert [reported for reported in findings.content["warnings"] if "are its graphs replayed?" in reported]
    assert findings.content["summary"].startswith("llamagen-xl: ")


def test_an_allocator_that_makes_passes_slower_is_warned_of(findings, tmp_path):
    def rows(ms):
        return [{"model": "xl", "method": "a", "ms": ms}, {"model": "xl", "method": "b", "ms": 1.0}]

    findings.out = tmp_path / "passes-async.json"
    (tmp_path / "passes.json").write_text(json.dumps({"rows": rows(2.0)}), encoding="utf-8")
    for ms, warned in ((2.08, False), (2.2, True)):
        findings.content |= {"rows": rows(ms), "warnings": []}
        passes.compare_allocators(findings)
        assert bool(findings.content["warnings"]) == warned
    assert "a +10 %; b +0 %" in findings.content["summary"]
    assert [row["slower, %"] for row in findings.rows] == [10.0, 0.0]


def test_what_the_pack_does_without_is_not_tried(monkeypatch):
    """On an older GPU, or AMD's: there is nothing to compare."""
    for name in ("subjects.dispatch.runs_triton", "subjects.capturable"):
        monkeypatch.setattr(f"{subjects.__package__}.{name}", lambda device: False)
    monkeypatch.setattr(subjects, "device_of", lambda dry: CPU)
    for stage in (kernels.run, graphs.run, graphs.run_captures, faults.run_failed, faults.run_full):
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
    assert "einops" in found["device"]["not_run"]
    assert len(found["captures"]["rows"]) == 2


ON_A_GPU = {stage.name for stage in STAGES if not stage.on_a_cpu}


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
    assert verdicts == dict.fromkeys(verdicts, OK) | dict.fromkeys((*ON_A_GPU, "prompts", "half"), NOT_RUN), ran.stdout
    for name in ("prompts", "half"):
        assert found[name]["why"] == "COMFYUI_PATH does not name a ComfyUI tree"
    assert {name for name, entry in found.items() if entry["why"] == NEEDS_DEVICE} == ON_A_GPU
    compared = {row["kernel"] for row in found["kernels"]["rows"]}
    assert compared >= {"attention.attend_few", "linear.few_rows", "verification.rejection_sampling"}
    asked = {"prompt", "guidance", "temperature", "top-k", "top-p"}
    assert found["captures"]["rows"] and not found["captures"]["failures"]
    for row in found["captures"]["rows"]:
        assert set(row) == {"method", "captures", "later images", *asked}
        assert row["captures"] > 0 and row["later images"] == row["prompt"] == 0
    assert [row["outcome"] for row in found["full"]["rows"]] == ["out of memory"]
    assert {row["interruption"] for row in found["interrupted"]["rows"]} == {*faults.WAYS}
    assert len(found["products"]["rows"]) == 8 * 3 * 7
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


def test_what_a_replay_consists_of():
    events = [(1, 9, "early"), (12, 14, "a"), (13, 15, "b"), (17, 18, "a"), (22, 23, "b" * 90), (31, 33, "late")]
    assert replays.by_kernel([10, 20, 30], events) == [
        {"kernel": "a", "launches": 1.0, "us": 1.5},
        {"kernel": "b", "launches": 0.5, "us": 1.0},
        {"kernel": "b" * replays.NAME, "launches": 0.5, "us": 0.5},
        {"kernel": replays.GAPS, "us": 4.0},
    ]
    assert replays.by_kernel([10], events) == []


def test_time_in_which_anything_runs():
    spans = [(0, 2), (1, 3), (5, 6), (5, 5.5)]
    assert passes.busy([(*span, "a kernel") for span in spans]) == 4 and passes.busy([]) == 0


def test_differences():
    a = torch.tensor([1.0, 100.0, torch.inf, torch.nan])
    assert kernels.difference(a, a) == 0
    assert kernels.difference(a, a + torch.tensor([0.5, 1.0, 0, 0])) == 0.5
    assert kernels.difference(a, torch.zeros(4)) == torch.inf
    assert kernels.difference(torch.arange(4), torch.tensor([0, 1, 2, 9])) == 0.25


def test_the_whole_pack_goes_to_another_machine():
    script = (ROOT / "tools/gpu.sh").read_text(encoding="utf-8")
    [packed] = re.findall(r"^CODE=\(([^)]*)\)", script, re.MULTILINE)
    assert all((ROOT / name.strip("':!")).exists() for name in packed.split()), packed
    assert {package.parent.name for package in ROOT.glob("*/__init__.py")} <= set(packed.split())
