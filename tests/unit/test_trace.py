"""The trace: every token accounted for, numbers that add up, files that survive and files that do not."""

import json

import pytest
import torch
from comfyui_specar.model_loaders.trace_files import load_trace, save_trace
from comfyui_specar.samplers.jacobi import REUSE, SJD
from comfyui_specar.samplers.next_token import NextToken
from comfyui_specar.samplers.protocols import SamplingParams
from comfyui_specar.samplers.trace import Record, Source
from safetensors.torch import save_file

from .toy import VOCAB, ToyModel, plain, request, with_kept_tokens, with_line_ends

LINE_ENDS, KEPT = with_line_ends(2, 2), with_kept_tokens(2, 3)
CASES = {"line_ends": (ToyModel(LINE_ENDS, 2), LINE_ENDS), "kept": (ToyModel(KEPT), KEPT)}


def trace_of(method, case="line_ends", batch=5, **options):
    model, layout = CASES[case]
    return method.sample(request(model, layout, batch=batch, **options)).trace


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", [NextToken(), *(SJD(window=3, reuse=reuse) for reuse in REUSE)], ids=str)
def test_sources_and_passes_add_up(method, case):
    trace, layout = trace_of(method, case), CASES[case][1]
    summary = trace.summary()
    free = int((layout.forced < 0).sum()) * 5
    assert summary["tokens"] == free and summary["images"] == 5
    assert sum(summary["sources"].values()) == 5 * layout.length
    assert summary["sources"]["forced"] == 5 * layout.length - free
    assert sum(summary["passes_per_image"]) == int((trace.rounds["committed"] > 0).sum())
    assert summary["target_passes"] == max(summary["passes_per_image"]) == len(trace.rounds["width"])
    assert (trace.rounds["committed"].sum(0) == layout.length).all()
    assert summary["accepted_drafts"] == summary["sources"].get("accepted", 0) == int(trace.rounds["accepted"].sum())
    assert summary["accepted_length"] == pytest.approx(free / sum(summary["passes_per_image"]))
    given = int(case == "kept")  # its first token is kept: it is read with the prompt
    assert summary["given"] == 5 * given
    assert summary["step_compression"] == pytest.approx(5 * (layout.length - given) / sum(summary["passes_per_image"]))


def test_positions_tell_a_consistent_story():
    trace = trace_of(SJD(window=3, initial="uniform"), batch=200)
    get = trace.positions.__getitem__
    order = get("finalised_at")
    assert (order[:, 1:] >= order[:, :-1]).all() and (order[:, 0] == 0).all()
    for row in range(200):  # passes that committed what the positions say
        committed = order[row].long().bincount(minlength=len(trace.rounds["width"]))
        assert torch.equal(committed, trace.rounds["committed"][:, row])
    accepted, redrawn, bonus = (get("source") == s for s in (Source.ACCEPTED, Source.RESIDUAL, Source.BONUS))
    assert accepted.any() and redrawn.any() and bonus.any()
    assert (get("depth")[accepted | redrawn] > 0).all() and (get("depth")[bonus] == 0).all()
    assert (get("q")[bonus] == 0).all() and (get("q")[accepted] > 0).all()
    assert torch.allclose(get("ratio")[accepted], get("p")[accepted] / get("q")[accepted])
    assert (get("p") > 0).all() and (get("p") <= get("top1") + 1e-6).all() and (get("entropy") >= 0).all()
    assert (get("tv_leak") == 0).all() and (get("refinements") >= 0).all()
    assert get("finalised_at")[get("source") == Source.PREFILL].eq(0).all()


def test_hand_made_run_has_the_hand_made_numbers():
    """Two images of 1 x 3: the first takes 3 passes, the second 2 (one accepted draft of two verified)."""
    record = Record.empty(3, 2, torch.device("cpu"))
    p = torch.full((2, 2, 4), 0.25)
    token = torch.zeros((2, 2), dtype=torch.int64)

    def commit(record, first, count, passes, source, depth):
        place = torch.tensor(first)[:, None] + torch.arange(2)
        record = record.tokens(place, torch.arange(2) < torch.tensor(count)[:, None], token, p, finalised_at=passes,
                               source=torch.tensor(source), depth=torch.tensor(depth), q=0.5, ratio=0.5)
        accepted = torch.tensor([0, count[1] - 1]).clamp(min=0)
        return record.round(accepted=accepted, committed=torch.tensor(count), width=2)

    record = commit(record, [0, 0], [1, 1], 0, [[0, 0], [0, 0]], [[0, 0], [0, 0]])
    record = commit(record, [1, 1], [1, 2], 1, [[3, 4], [1, 4]], [[1, 0], [1, 0]])
    record = commit(record, [2, 3], [1, 0], 2, [[4, 4], [4, 4]], [[0, 0], [0, 0]])
    trace = record.finish(plain(1, 3), 9, {"method": "by hand"}, 1.23456)
    summary = trace.summary()
    wanted = {"target_passes": 3, "passes_per_image": [3, 2], "tokens": 6, "images": 2, "seed": 9, "seconds": 1.235,
              "draft_passes": 0, "accepted_drafts": 1, "acceptance_rate": 0.5, "accepted_length": 6 / 5,
              "step_compression": 6 / 5, "tv_leak": 0,
              "sources": {"prefill": 2, "accepted": 1, "residual": 1, "bonus": 2}}
    assert {key: summary[key] for key in wanted} == wanted
    assert summary["mean_log_p"] == pytest.approx(torch.tensor(0.25).log().item())
    assert trace.grid("finalised_at").tolist() == [[[0, 1, 2]], [[0, 1, 1]]]


def test_forced_tokens_are_left_out_of_the_picture_and_of_the_counts():
    trace = trace_of(SJD(window=3))
    assert trace.grid("source").shape == (5, 2, 2) and not (trace.grid("source") == Source.FORCED).any()
    assert (trace.positions["source"][:, [2, 5, 6]] == Source.FORCED).all()
    kept = trace_of(SJD(window=3), "kept")
    assert kept.grid("source")[0, 0, 0] == Source.FORCED == kept.grid("source")[0, 1, 1]


def test_everything_forced_still_gives_numbers():
    layout = plain(1, 2).keeping(torch.ones((1, 1, 2), dtype=torch.int64), torch.ones((1, 1, 2), dtype=torch.bool))
    for method in (NextToken(), SJD(window=2)):
        summary = method.sample(request(ToyModel(layout), layout)).trace.summary()
        assert summary["tokens"] == 0 and summary["acceptance_rate"] == 0 and summary["mean_log_p"] == 0


def test_save_and_load_give_the_same_trace(tmp_path):
    method = SJD(window=3, reuse="threshold_exact", threshold=0.7)
    trace = trace_of(method, params=SamplingParams(top_k=2, temperature=0.9))
    save_trace(trace, tmp_path / "run")
    loaded = load_trace(tmp_path / "run.safetensors")
    for group in ("positions", "rounds"):
        saved, found = getattr(trace, group), getattr(loaded, group)
        assert saved.keys() == found.keys()
        assert all(torch.equal(saved[key], found[key]) and saved[key].dtype == found[key].dtype for key in saved)
    assert loaded.summary() == trace.summary() and (loaded.rows, loaded.cols, loaded.stride) == (2, 2, 3)
    assert loaded.report() == json.loads(json.dumps(trace.report()))
    report = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert report == loaded.report()
    assert report["schema"] == "specar.trace/1" and report["grid"] == [2, 2, 3]
    assert report["settings"]["threshold"] == 0.7 and report["settings"]["top_k"] == 2
    assert report["settings"]["lossless"] is True and report["totals"]["tokens"] == 20


def test_a_file_in_use_is_waited_for_and_then_named(tmp_path, locked):
    trace = trace_of(NextToken())
    attempts = locked({"a.safetensors": 3, "b.json": 99})
    save_trace(trace, tmp_path / "a")
    assert attempts["a.safetensors"] == 4 and load_trace(tmp_path / "a.safetensors").totals == trace.totals
    with pytest.raises(OSError, match=r"b\.json could not be written \(.*open in another program\)"):
        save_trace(trace, tmp_path / "b")
    assert not list(tmp_path.glob("*.part"))


def test_the_report_says_what_is_not_lossless():
    assert trace_of(SJD(window=3, reuse="threshold_paper")).report()["settings"]["lossless"] is False


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
    for metadata in ("not json", "[]", "3", json.dumps({"schema": "specar.trace/1"})):
        save_file({"positions.p": torch.zeros(2)}, str(path), metadata={"specar": metadata})
        refused(path)
    header = {"schema": "specar.trace/1", "rows": 1, "cols": 2, "stride": 2, "totals": {}, "settings": {}}
    for name in ("positions.p", "unknown.p", "nodot"):
        save_file({name: torch.zeros(1, 2)}, str(path), metadata={"specar": json.dumps(header)})
        refused(path)


def test_damaged_and_missing_files_are_refused_by_name(tmp_path):
    save_trace(trace_of(SJD(window=3)), tmp_path / "run")
    whole = (tmp_path / "run.safetensors").read_bytes()
    path = tmp_path / "damaged.safetensors"
    pickled = b"\x80\x04cos\nsystem\n(S'true'\ntR."
    for content in (whole[: len(whole) // 2], whole[:20], b"", pickled, bytes(range(256)) * 9):
        path.write_bytes(content)
        refused(path)
    refused(tmp_path / "missing.safetensors")


def test_ids_stay_inside_what_the_map_can_show():
    trace = trace_of(SJD(window=3, reuse="gumbel"), batch=50)
    assert set(trace.positions["source"].unique().tolist()) <= {int(s) for s in Source}
    assert trace.positions["top1"].max() <= 1
    assert trace.positions["entropy"].max() <= torch.tensor(float(VOCAB)).log() + 1e-5
