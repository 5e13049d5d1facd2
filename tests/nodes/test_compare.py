"""Compare Runs, and runs in words."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from comfyui_specar.reports import comparison
from comfyui_specar.reports.run_report import describe, labels
from comfyui_specar.samplers.trace import Trace


def changed(trace: Trace, **settings) -> Trace:
    return replace(trace, settings=trace.settings | settings)


@pytest.fixture(scope="module")
def runs(sample, rule) -> list[Trace]:
    relaxed = sample("DraftTree", rule=rule("UniformRSD", delta=50.0))[1]
    return [sample("NextToken")[1], sample("SJD")[1], sample("DraftTree")[1], relaxed]


def test_the_node_draws_all_runs_and_hands_on_their_reports(run_node, runs):
    out = run_node("CompareTraces", **{f"trace_{i}": t for i, t in enumerate(runs, 1)})
    chart, table = out.result
    assert chart.shape[0] == 1 and chart.shape[2] == comparison.WIDTH and chart.min() >= 0 and chart.max() <= 1
    assert [r["settings"]["method"] for r in out.ui["specar"]] == ["next_token", "sjd", "draft_tree", "draft_tree"]
    rows = [line.split("|")[1:-1] for line in table.splitlines()]
    assert [len(row) for row in rows] == [8] * 6  # run, distribution, five measures and the time; head, rule, four runs
    assert rows[2][0].strip() == "next token, exact" and float(rows[2][2]) == 16 and rows[2][5].strip() == "-"
    assert [row[1].strip() for row in rows[2:]] == ["exact", "exact", "exact", "approximate"]
    assert float(rows[5][6]) > 0  # drift bound
    drawn = json.loads(out.ui["specar_chart"][0])
    assert [name for name, _ in drawn["heads"]] == ["model passes", "wall time"] and len(drawn["rows"]) == 4
    assert drawn["rows"][0]["bars"][0] == {"text": "16", "share": 1.0}
    assert [row["fidelity"] for row in drawn["rows"]] == ["same"] * 3 + ["may drift"]
    json.dumps(out.ui["specar"])
    chart, table = run_node("CompareTraces", trace_1=runs[0], trace_5=runs[2]).result
    assert len(table.splitlines()) == 4 and chart.shape[1] == len(comparison.chart([runs[0], runs[2]]))


def test_wall_times_only_of_one_server_and_equal_work(runs, sample):
    names = [column.name for column in comparison.columns(runs)]
    assert "wall time" in names and not comparison.times_compare(runs)
    for strange in (changed(runs[1], server="another"), changed(runs[1], server=None)):
        pair = [runs[0], strange]
        assert "wall time" not in [column.name for column in comparison.columns(pair)]
        assert "same running ComfyUI server" in comparison.table(pair).splitlines()[-1]
        assert len(comparison.chart(pair)) > len(comparison.chart([runs[0], runs[1]]))  # space for the sentence
    more = [runs[0], sample("NextToken", batch=2)[1]]
    assert "different numbers of images" in comparison.table(more)


def test_runs_that_read_alike_are_distinguished(runs, sample):
    tree = runs[2]
    shown = labels([tree, sample("DraftTree", seed=8)[1], runs[0]])
    assert shown[0][1] == "exact; seed 7" and shown[1][1] == "exact; seed 8" and shown[2][1] == "exact"
    same = labels([tree, tree])
    assert len(set(same)) == 2 and same[1][1].endswith("run 2")
    widths = [changed(tree, structure={"kind": "dynamic", "depth": d, "width": 4, "nodes": 9}) for d in (2, 3)]
    assert [second for _, second in labels(widths)] == ["exact; depth 2", "exact; depth 3"]


def test_kept_tokens_are_told_apart_from_sampled_ones(sample):
    """Two of four rows are kept, and half of the last."""
    first, _ = sample("NextToken")
    mask = torch.ones(1, 4, 4)
    mask[:, :2] = mask[:, 3, :2] = 0
    _, trace = sample("SJD", latent_image={**first, "noise_mask": mask})
    [passes] = trace.totals["passes_per_image"]
    wanted = f"\n{passes} passes for 6 tokens of 16 (the others were kept or fixed): {6 / passes:.2f} tokens per pass\n"
    assert wanted in describe(trace)
    words = json.loads((Path(__file__).parents[2] / "locales/en/main.json").read_text("utf-8"))["specar"]
    assert any(re.fullmatch(re.sub(r"\\{\w+\\}", ".+", re.escape(key)), wanted.strip()) for key in words), (
        "untranslated"
    )


def test_continuous_runs_report_their_tolerance_and_their_distance(run_node, draw_vectors, runs):
    plain, block, few = draw_vectors("NextToken")[1], draw_vectors("")[1], draw_vectors("NextToken", iterations=4)[1]
    first, second = zip(*labels([plain, block, few]), strict=True)
    assert first == ("continuous, one token a pass", "small model, blocks of 4", "continuous, 4 iterations")
    assert second[:2] == ("the model alone", "approximate within 0.26 (kappa 45)")
    _, table = run_node("CompareTraces", trace_1=plain, trace_2=block).result
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
    assert "distance (mean square)" in head and not any("drift bound" in name for name in head)
    where = head.index("distance (mean square)")
    assert rows[0][where] == "-" and float(rows[1][where]) > 0
    assert [row[1] for row in rows] == ["exact", "approximate"]
    assert comparison.table([few]).splitlines()[2].split("|")[2].strip() == "approximate"
    mixed = [column.name for column in comparison.columns([plain, runs[0]])]
    assert "drift bound" in mixed and "distance" in mixed
    assert comparison.table([plain, block, runs[0]]).count("-") > 3
    assert comparison.chart([plain, runs[0]]).shape[1] == comparison.WIDTH
