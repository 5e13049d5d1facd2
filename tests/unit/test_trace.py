"""The trace: every token accounted for, numbers that add up, files that survive and files that do not."""

import json
from functools import cache, partial

import pytest
import torch
from comfyui_specar.reports.run_report import describe
from comfyui_specar.samplers.contract import SamplingParams
from comfyui_specar.samplers.drafts.adt_tree import ADTTree
from comfyui_specar.samplers.drafts.structures import Chain, Dynamic, Static
from comfyui_specar.samplers.methods.continuous import MODES, ContinuousSpeculative
from comfyui_specar.samplers.methods.continuous_next_token import ContinuousNextToken
from comfyui_specar.samplers.methods.jacobi import SJD, Jacobi
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.methods.skipping import Skipping
from comfyui_specar.samplers.methods.speculative import DraftTree
from comfyui_specar.samplers.rules.acceptance import Exact
from comfyui_specar.samplers.rules.cool_sd import UniformRSD
from comfyui_specar.samplers.rules.lantern import Lantern, LanternPP
from comfyui_specar.samplers.rules.tv_budget import TVMetered
from comfyui_specar.samplers.trace import CONTINUOUS_FIELDS, POSITION_FIELDS, Record, Source, derived_totals
from comfyui_specar.samplers.trace_files import load_trace, save_trace
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ..support import toy_heads
from ..support.toy import ToyDrafter, ToyModel, draft_tree, plain, request, with_kept_tokens, with_line_ends
from ..support.toy_heads import ToyHead

LINE_ENDS, KEPT = with_line_ends(2, 2), with_kept_tokens(2, 3)
CASES = {"line_ends": (ToyModel(LINE_ENDS, 2), LINE_ENDS), "kept": (ToyModel(KEPT), KEPT)}


def trace_of(method, case="line_ends", batch=5, **options):
    model, layout = CASES[case]
    return method.sample(request(model, layout, batch=batch, **options)).trace


def test_hand_made_run_has_the_hand_made_numbers():
    """Two images of 1 x 3: the first takes 3 passes, the second 2 (one accepted draft of two verified)."""
    record = Record.empty(3, 2, torch.device("cpu"))
    p = torch.full((2, 2, 4), 0.25)
    token = torch.zeros((2, 2), dtype=torch.int64)

    def commit(first, count, passes, source, depth):
        place, kept = torch.tensor(first)[:, None] + torch.arange(2), torch.arange(2) < torch.tensor(count)[:, None]
        known = {"finalised_at": passes, "source": torch.tensor(source), "depth": torch.tensor(depth)}
        record.write(place, kept, token, p, q=0.5, ratio=0.5, **known)
        accepted = torch.tensor([0, count[1] - 1]).clamp(min=0)
        record.round(accepted=accepted, committed=torch.tensor(count), width=2)

    commit([0, 0], [1, 1], 0, [[0, 0], [0, 0]], [[0, 0], [0, 0]])
    commit([1, 1], [1, 2], 1, [[3, 4], [1, 4]], [[1, 0], [1, 0]])
    commit([2, 3], [1, 0], 2, [[4, 4], [4, 4]], [[0, 0], [0, 0]])
    trace = record.finish(plain(1, 3), 9, {"method": "by hand"}, 1.23456)
    summary = trace.summary()
    wanted = {
        "target_passes": 3,
        "passes_per_image": [3, 2],
        "tokens": 6,
        "images": 2,
        "seed": 9,
        "seconds": 1.235,
        "draft_passes": 0,
        "accepted_drafts": 1,
        "acceptance_rate": 0.5,
        "accepted_length": 6 / 5,
        "step_compression": 6 / 5,
        "drift_bound": 0,
        "sources": {"prefill": 2, "accepted": 1, "residual": 1, "bonus": 2},
    }
    assert {key: summary[key] for key in wanted} == wanted
    assert summary["mean_log_p"] == pytest.approx(torch.tensor(0.25).log().item())
    assert trace.grid("finalised_at").tolist() == [[[0, 1, 2]], [[0, 1, 1]]]


def test_the_mean_tree_is_that_of_rounds_not_of_tokens():
    """Two images: trees of 3 levels (which decides two tokens) and 1, and of 2; the prompt's pass has none."""
    record = Record.empty(4, 2, torch.device("cpu"), round_fields=("accepted", "committed", "width", "nodes"))
    trees = ([1, 1], [0, 0], [0, 0]), ([2, 3], [3, 2], [4, 2]), ([1, 0], [1, 9], [5, 9])
    begin = torch.zeros(2, dtype=torch.int64)
    for committed, levels, width in trees:
        count, index = torch.tensor(committed), torch.arange(4)
        depth, wide = torch.tensor(levels)[:, None], torch.tensor(width)[:, None]
        record.write(begin[:, None] + index, index < count[:, None], tree_depth=depth, tree_width=wide)
        record.round(accepted=0, committed=count, width=5, nodes=5)
        begin = begin + count
    summary = record.finish(plain(2, 2), 1, {"method": "by hand"}, 1.0).summary()
    assert (summary["mean_depth"], summary["mean_width"]) == pytest.approx((2.0, 11 / 3))
    assert not {"mean_depth", "mean_width"} & trace_of(SJD(window=3)).summary().keys()


def test_forced_tokens_are_left_out_of_the_image_and_of_the_counts():
    trace = trace_of(SJD(window=3))
    assert trace.grid("source").shape == (5, 2, 2) and not (trace.grid("source") == Source.FORCED).any()
    kept = trace_of(SJD(window=3), "kept")
    assert kept.grid("source")[0, 0, 0] == Source.FORCED == kept.grid("source")[0, 1, 1]


def test_everything_forced_still_gives_numbers():
    layout = plain(1, 2).keeping(torch.ones((1, 1, 2), dtype=torch.int64), torch.ones((1, 1, 2), dtype=torch.bool))
    for method in (NextToken(), SJD(window=2)):
        summary = method.sample(request(ToyModel(layout), layout)).trace.summary()
        assert summary["tokens"] == 0 and summary["acceptance_rate"] == 0 and summary["mean_log_p"] == 0


def test_every_tensor_is_counted_where_comfyui_measures_its_cache():
    trace = trace_of(NextToken())
    counted = {tensor.data_ptr() for tensor in trace._comfy_cache_tensors()}
    assert counted == {tensor.data_ptr() for tensor in (trace.positions | trace.rounds).values()} and len(counted) > 10


def test_the_report_lies_beside_the_records(tmp_path):
    method = SJD(window=3, reuse="threshold_exact", threshold=0.7)
    trace = trace_of(method, params=SamplingParams(top_k=2, temperature=0.9))
    save_trace(trace, tmp_path / "run")
    loaded = load_trace(tmp_path / "run.safetensors")
    assert loaded.summary() == trace.summary() and (loaded.rows, loaded.cols, loaded.stride) == (2, 2, 3)
    assert loaded.report() == json.loads(json.dumps(trace.report()))
    report = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert report == loaded.report()
    assert report["schema"] == "specar.trace/3" and report["grid"] == [2, 2, 3]
    assert report["settings"]["threshold"] == 0.7 and report["settings"]["top_k"] == 2
    assert report["settings"]["lossless"] is True and report["totals"]["tokens"] == 20


def test_a_file_in_use_is_waited_for_and_then_named(tmp_path, locked):
    trace = trace_of(NextToken())
    attempts = locked({"a.safetensors": 3, "b.json": 99})
    save_trace(trace, tmp_path / "a")
    assert attempts["a.safetensors"] == 4 and load_trace(tmp_path / "a.safetensors").totals == trace.totals
    with pytest.raises(OSError, match=r"b\.json.*another program"):
        save_trace(trace, tmp_path / "b")
    assert not list(tmp_path.glob("*.part"))


def drafted(structure, *settings, **more):
    model, layout = CASES["line_ends"]
    run = draft_tree(ToyDrafter(model, stale=True), structure, *settings, **more)
    return run.sample(request(model, layout, batch=64)).trace


def vectors(method):
    return method.sample(toy_heads.request(ToyHead(2, (3, 3), bend=0.3), 32)).trace


def speculative(mode):
    drafter = ToyHead(2, (3, 3), noise=0.3, bend=0.2, widths=(0.4, 0.35, 0.5))
    return vectors(ContinuousSpeculative(drafter, length=4, prefill=0.2, mode=mode, tolerance=0.5))


SMALL = {"depths": (1, 3), "widths": (1, 3), "width_step": 1, "first": (2, 3), "nodes": 8}
TREE = Static(((0,), (1,), (2,), (0, 0)))
RUNS = {  # a run of every kind of method
    "next token": lambda: trace_of(NextToken(), batch=64),
    "jacobi": lambda: trace_of(Jacobi(window=3), batch=64),
    "sjd": lambda: trace_of(SJD(window=3), batch=64),
    "sjd, relaxed": lambda: trace_of(SJD(window=3, rule=Lantern(neighbours=2)), batch=64),
    "chain": lambda: drafted(Chain(2)),
    "blocks": lambda: drafted(Chain(3, "block")),
    "static tree": lambda: drafted(TREE),
    "dynamic tree, relaxed": lambda: drafted(Dynamic(2, 3, 5), LanternPP(2, 4)),
    "adt tree, metered": lambda: drafted(ADTTree(**SMALL), TVMetered(0.3)),
    "vvs": lambda: drafted(TREE, UniformRSD(2.0), skipping=Skipping(interval=2, guard=1)),
    "continuous next token": lambda: vectors(ContinuousNextToken()),
    **{f"continuous, {mode}": partial(speculative, mode) for mode in MODES},
}


@cache
def run(name):
    return RUNS[name]()


@pytest.fixture
def threads():
    """Sets the number of threads, until the end of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", RUNS)
def test_every_number_is_read_back_bit_for_bit(name, tmp_path, threads):
    trace = run(name)
    whole = json.dumps(trace.report())  # a float's text has all its bits
    report, record = save_trace(trace, tmp_path / "run")
    assert json.dumps(json.loads(report.read_text(encoding="utf-8"))) == whole
    for number in (1, 2, 4):
        threads(number)
        loaded = load_trace(record)
        assert json.dumps(loaded.report()) == whole
    for saved, found in ((trace.positions, loaded.positions), (trace.rounds, loaded.rounds)):
        assert saved.keys() == found.keys()
        assert all(torch.equal(saved[key], found[key]) and saved[key].dtype == found[key].dtype for key in saved)
    sums = {
        "mean_square_distance": "continuous, " in name,
        "drift_bound": {"relaxed", "metered", "vvs"} & {*name.split()},
        "mean_log_p": name != "jacobi" and not trace.continuous,
    }  # Jacobi decoding is greedy: its p are 1
    assert all(trace.totals[number] for number, expected in sums.items() if expected), "no sum to read back"


def header_of(record):
    """What a saved trace holds besides its arrays."""
    with safe_open(record, "pt") as file:
        return json.loads(file.metadata()["specar"])


def damaged(folder, damage):
    """A saved trace whose header and arrays were changed."""
    _, record = save_trace(trace_of(SJD(window=3)), folder / "run")
    header, tensors = header_of(record), load_file(record)
    damage(header, tensors)
    save_file(tensors, record, metadata={"specar": json.dumps(header)})
    return record


def long_run(continuous):
    """The trace of a run of so many tokens that a sum of their numbers is divided among threads."""
    fields = CONTINUOUS_FIELDS if continuous else POSITION_FIELDS
    record = Record.empty(4096, 16, torch.device("cpu"), fields)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(record.positions.shape, generator=generator)
    integers = torch.tensor([not kind.is_floating_point for kind in fields.values()])
    record.positions.copy_(torch.where(integers, (3 * numbers).floor(), numbers))
    record.round(accepted=0, committed=4096, width=4096)
    return record.finish(plain(64, 64), 1, {"method": "by hand", "lossless": False}, 1.0)


@pytest.mark.parametrize("continuous", [False, True])
def test_sums_of_many_numbers_do_not_depend_on_threads(continuous, tmp_path, threads):
    reports = set()
    for number in (1, 2, 4):
        threads(number)
        trace = long_run(continuous)
        reports.add(json.dumps(trace.report()))
        _, record = save_trace(trace, tmp_path / f"run{number}")
        for other in (1, 2, 4):
            threads(other)
            reports.add(json.dumps(load_trace(record).report()))
    [report] = reports
    totals, positions = json.loads(report)["totals"], trace.positions
    judged = positions["depth"] > 0
    if continuous:
        wanted = {"mean_square_distance": positions["distance"][judged].double().square().mean().item()}
    else:
        wanted = {
            "drift_bound": positions["drift_bound"].double().sum(1).mean().item(),
            "mean_log_p": positions["p"].double().log().mean().item(),
            "draft_tv": positions["draft_tv"][judged].double().mean().item(),
        }
    assert {name: totals[name] for name in wanted} == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    "damage",
    [
        lambda header, tensors: header.update(totals=None),
        lambda header, tensors: header.update(totals=["prefix_tokens"]),
        lambda header, tensors: header["totals"].pop("tokens"),
        lambda header, tensors: header.pop("totals"),
        lambda header, tensors: tensors.pop("positions.drift_bound"),
        lambda header, tensors: tensors.update({"positions.drift_bound": torch.zeros(2)}),
        lambda header, tensors: header.update(schema="specar.trace/1"),
    ],
)
def test_damaged_files_are_refused(damage, tmp_path):
    refused(damaged(tmp_path, damage))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accepted_drafts", 10**6),
        ("prefix_tokens", -1),
        ("prefix_tokens", 0.0),
        ("sources", {"accepted": 1}),
        ("drift_bound", "much"),
        ("acceptance_rate", None),
        ("mean_log_p", 1),
        ("passes_per_image", "many"),
        ("tokens", None),
    ],
)
def test_totals_that_contradict_the_records_are_refused(name, value, tmp_path):
    record = damaged(tmp_path, lambda header, tensors: header["totals"].update({name: value}))
    assert "damaged" in refused(record)


@pytest.mark.parametrize("beyond", [0, 1])
def test_sources_end_with_the_last(beyond, tmp_path):
    """Also in a file whose totals agree with the others."""
    trace = trace_of(SJD(window=3))
    trace.positions["source"][0, -1] = max(Source) + beyond
    trace.totals |= derived_totals(trace.positions, trace.totals)
    _, record = save_trace(trace, tmp_path / "run")
    if beyond:
        assert "unknown token source" in refused(record)
    else:
        assert load_trace(record).totals["sources"]["skipped"] == 1


@pytest.mark.parametrize("rule", [Exact(), UniformRSD(5.0)])
def test_the_drift_bound_is_that_of_an_image_and_unknown_for_sjd_plus_plus_as_printed(rule):
    trace = trace_of(SJD(window=3, rule=rule))
    mean = trace.positions["drift_bound"].double().sum(1).mean().item()
    assert len(trace.positions["drift_bound"]) > 1 and trace.drift_bound == trace.summary()["drift_bound"]
    assert trace.drift_bound == pytest.approx(mean)
    assert (trace.drift_bound > 0) is not rule.lossless
    biased = trace_of(SJD(window=3, reuse="threshold_paper", rule=rule))
    assert biased.drift_bound is None is biased.report()["totals"]["drift_bound"]
    assert "unknown drift" in describe(biased) and "drift bound" not in describe(biased)


@pytest.mark.parametrize("name", RUNS)
def test_the_distance_of_drafter_and_model_is_none_where_nothing_measured_it(name):
    trace = run(name)
    if trace.continuous:
        assert "draft_tv" not in trace.summary()
        return
    measured = name in ("chain", "blocks", "static tree", "vvs")
    assert (trace.summary()["draft_tv"] is not None) == measured == bool(trace.positions["draft_tv"].any())
    assert trace.summary()["draft_tv"] == trace.draft_tv
    assert ("mean total variation" in describe(trace)) == measured


def test_a_drafter_like_the_model_is_at_no_distance_but_never_tested_ones_are_at_none():
    model, layout = CASES["kept"]
    method = DraftTree(ToyDrafter(model, noise=0, stale=True), TREE)
    trace = method.sample(request(model, layout, batch=20)).trace
    assert trace.draft_tv == pytest.approx(0, abs=1e-6) and trace.totals["acceptance_rate"] == 1
    trace.positions["draft_tv"].zero_()
    trace.positions["ratio"][trace.positions["depth"] > 0] = 1
    trace.totals["draft_tv"] = 0.0
    assert trace.draft_tv == 0 and "mean total variation" not in describe(trace)
    trace.positions["depth"].zero_()
    assert trace.draft_tv is None


def refused(path):
    with pytest.raises(ValueError) as error:
        load_trace(path)
    assert path.name in str(error.value) and "Save Trace" in str(error.value), error.value
    return str(error.value)


def test_other_files_are_refused_by_name(tmp_path):
    path = tmp_path / "other.safetensors"
    save_file({"weight": torch.zeros(2)}, str(path))
    assert "found no schema" in refused(path)
    save_file({"positions.p": torch.zeros(2)}, str(path), metadata={"specar": json.dumps({"schema": "specar.trace/9"})})
    assert "specar.trace/9" in refused(path)
    for metadata in ("not json", "[]", "3", json.dumps({"schema": "specar.trace/3"})):
        save_file({"positions.p": torch.zeros(2)}, str(path), metadata={"specar": metadata})
        refused(path)
    header = {"schema": "specar.trace/3", "rows": 1, "cols": 2, "stride": 2, "totals": {}, "settings": {}}
    for name in ("positions.p", "unknown.p", "nodot"):
        save_file({name: torch.zeros(1, 2)}, str(path), metadata={"specar": json.dumps(header)})
        refused(path)


@pytest.mark.parametrize("structure", [Chain(3), Static("eagle_25")], ids=["chain", "tree"])
def test_drafter_and_model_are_apart_by_the_mean_of_what_a_drafted_token_lacks(structure):
    """For x ~ q, the mean of [1 - p(x)/q(x)]+ is the total variation; a tree's distance does not depend on siblings."""
    model, layout = CASES["kept"]
    drafter = ToyDrafter(model)
    runs = {s: DraftTree(drafter, s).sample(request(model, layout, batch=4000)) for s in (Chain(3), structure)}
    known = {}  # by the tokens before
    for run in runs.values():
        distances = run.trace.positions["draft_tv"]
        for row, values in zip(run.tokens.tolist(), distances.tolist(), strict=True):
            for place, value in enumerate(values):
                if value:
                    assert known.setdefault(tuple(row[:place]), value) == pytest.approx(value, abs=1e-6)
    trace = runs[Chain(3)].trace
    tested = (trace.positions["depth"] > 0) & (trace.positions["source"] != Source.FORCED)
    assert trace.totals["draft_tv"] == pytest.approx(float(trace.positions["draft_tv"][tested].mean()))
    lacking = (1 - trace.positions["ratio"][tested]).clamp(min=0) - trace.positions["draft_tv"][tested]
    assert abs(lacking.mean() / lacking.std() * len(lacking) ** 0.5) < 4
    assert "apart (mean total variation)" in describe(trace)
