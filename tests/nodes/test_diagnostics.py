"""Acceptance Map, Compare Runs, Save Trace, Load Trace, and the drawing of acceptance_map."""

import json
import re
from pathlib import Path

import folder_paths
import numpy as np
import pytest
import torch
from comfyui_specar.reports import acceptance_map, token_records
from comfyui_specar.reports.acceptance_map import GREY, METRICS, RATIO, SOURCES, gradient, token_map
from comfyui_specar.samplers.trace import Source, Trace

CONTINUOUS, DISCRETE = ([name for name, each in METRICS.items() if each.continuous is kind] for kind in (True, False))


OLDER = "TV leak", "drift bound"  # one metric


def as_json(trace: Trace) -> dict:
    return json.loads(json.dumps(trace.report()))  # tuples become lists


def grids_of(**grids) -> Trace:
    """A 2 x 2 trace of one image."""
    return Trace(2, 2, 2, {name: torch.tensor([values]) for name, values in grids.items()}, {}, {}, {})


def made_trace(**grids) -> Trace:
    """Of a model of token ids: accepted, resampled / bonus, kept."""
    default = {
        "source": [Source.ACCEPTED, Source.RESIDUAL, Source.BONUS, Source.FORCED],
        "finalised_at": [1, 1, 2, 2],
        "depth": [1, 2, 0, 0],
        "ratio": [2.0, 0.125, 0.0, 0.0],
        "entropy": [0.0, 1.0, 2.0, 0.0],
        "top1": [1.0, 0.5, 0.25, 1.0],
        "tree_depth": [3, 3, 0, 0],
        "tree_width": [2, 4, 0, 0],
        "drift_bound": [0.0, 0.5, 0.25, 0.0],
        "similarity": [-0.25, 0.75, 0.0, 0.0],
    }
    return grids_of(**default | grids)


def vector_trace(**grids) -> Trace:
    """Of a continuous model: accepted, replaced / generated alone, kept."""
    default = {
        "source": [Source.RELAXED, Source.RESIDUAL, Source.PREFILL, Source.FORCED],
        "finalised_at": [2, 2, 1, 0],
        "depth": [1, 2, 0, 0],
        "log_ratio": [1.0, -1.0, 0.0, 0.0],
        "distance": [0.5, 1.0, 0.0, 0.0],
        "block": [2, 1, 0, 0],
        "tries": [0, -4, 0, 0],
        "order": [2, 3, 1, 0],
    }
    return grids_of(**default | grids)


def test_sources_have_their_colours_and_a_counted_legend():
    assert set(SOURCES) == set(Source)
    drawn = token_map(made_trace(), "source", 0)
    for cell, kind in zip([(0, 0), (0, 1), (1, 0), (1, 1)], made_trace().positions["source"][0].tolist(), strict=True):
        assert tuple(drawn.colours[cell]) == SOURCES[kind][1]
    assert [s.text for s in drawn.legend if "accepted" in s.text] == ["accepted draft: 1 (25%)"]
    assert drawn.strength.tolist() == [[1, 0], [0, 0]]


def test_an_exact_run_has_no_drift():
    drawn = token_map(made_trace(drift_bound=[0.0] * 4), "drift bound", 0)
    assert not drawn.strength.any() and drawn.title == "Drift bound"
    assert drawn.legend[0].text == "exact: no drift"
    assert token_map(made_trace(), "drift bound", 0).title.startswith("Drift bound, ")


def test_the_similarities_of_a_run_tell_its_quarters():
    """Of the tokens that a tree was drafted for, so that a threshold skips a known share of them."""
    drawn = token_map(made_trace(tree_depth=[1, 1, 1, 0], similarity=[0.9, 0.5, 0.7, 0.0]), "similarity", 0)
    assert drawn.title.endswith("quarters 0.60, 0.70, 0.80") and drawn.legend[-1].text == "not from a tree: 1"
    none = token_map(made_trace(similarity=[0.0] * 4), "similarity", 0)
    assert "no paths were compared" in none.legend[0].text


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("metric", METRICS)
def test_an_image_of_a_batch_that_was_kept_whole_is_grey(metric):
    kept = {name: torch.zeros_like(values) for name, values in made_trace().positions.items()}
    kept["source"] += Source.FORCED
    trace = made_trace()
    trace.positions = {name: torch.cat((values, kept[name])) for name, values in trace.positions.items()}
    drawn = token_map(trace, metric, 1)
    assert (drawn.colours == GREY).all() and not drawn.strength.any()


@pytest.mark.parametrize(("metric", "kind"), [("skipped", Source.SKIPPED), ("accepted by relaxation", Source.RELAXED)])
def test_marked_tokens(metric, kind):
    drawn = token_map(made_trace(source=[kind, Source.ACCEPTED, kind, Source.FORCED]), metric, 0)
    assert drawn.strength.tolist() == [[1, 0], [1, 0]]
    assert tuple(drawn.colours[0, 0]) == SOURCES[kind][1] and tuple(drawn.colours[0, 1]) == (255, 255, 255)
    assert tuple(drawn.colours[1, 1]) == GREY
    assert drawn.legend[0].text.endswith(": 2 (50%)")


@pytest.mark.parametrize(
    ("trace", "metric", "strength", "grey"),
    [
        (made_trace(), "pass", [[0.5, 0.5], [1, 0]], "kept or fixed: 1"),
        (made_trace(), "accepted length", [[1, 1], [0.5, 0]], "kept or fixed: 1"),
        (made_trace(), "ratio p/q", [[1, 0.125], [0, 0]], "no draft was verified: 2"),
        (made_trace(), "entropy", [[0, 0.5], [1, 0]], "kept or fixed: 1"),
        (made_trace(), "top-1 probability", [[1, 0.5], [0.25, 0]], "kept or fixed: 1"),
        (made_trace(), "tree depth", [[1, 1], [0, 0]], "not from a tree: 2"),
        (made_trace(), "tree width", [[0.5, 1], [0, 0]], "not from a tree: 2"),
        (made_trace(), "drift bound", [[0, 1], [0.5, 0]], "kept or fixed: 1"),
        (made_trace(), "similarity", [[0, 0.75], [0, 0]], "not from a tree: 2"),
        (vector_trace(), "source", [[1, 0], [0, 0]], "kept or fixed: 1 (25%)"),
        (vector_trace(), "pass", [[1, 1], [0.5, 0]], "kept or fixed: 1"),
        (vector_trace(), "accepted by relaxation", [[1, 0], [0, 0]], "kept or fixed: 1"),
        (vector_trace(), "distance", [[0.5, 1], [0, 0]], "no draft was verified: 2"),
        (vector_trace(), "log ratio", [[1, np.exp(-1, dtype=np.float32)], [0, 0]], "no draft was verified: 2"),
        (vector_trace(), "order", [[2 / 3, 1], [1 / 3, 0]], "kept or fixed: 1"),
        (vector_trace(), "block", [[1, 0.5], [0, 0]], "no draft was verified: 2"),
        (vector_trace(), "tries", [[0, 1], [0, 0]], "not resampled by tries: 3"),
    ],
)
def test_metrics(trace, metric, strength, grey):
    drawn = token_map(trace, metric, 0)
    assert np.array_equal(drawn.strength, np.array(strength, np.float32))
    assert tuple(drawn.colours[1, 1]) == GREY, "a kept token has no value"
    assert drawn.legend[-1].text == grey


def test_continuous_words_in_legends():
    legend = [item.text for item in token_map(vector_trace(), "source", 0).legend]
    assert "accepted within the tolerance: 1 (25%)" in legend and "sampled by the model alone, first: 1 (25%)" in legend
    assert token_map(vector_trace(), "tries", 0).title.endswith("1 failed")
    assert tuple(gradient(np.array(0.5), RATIO)) == RATIO[2], "ratios diverge around one"
    for drawn in (
        token_map(vector_trace(log_ratio=[np.inf, -np.inf, 0.0, 0.0]), "log ratio", 0),
        token_map(made_trace(ratio=[8.0, 1 / 8, 0.0, 0.0]), "ratio p/q", 0),
    ):
        assert tuple(drawn.colours[0, 0]) == RATIO[-1] and tuple(drawn.colours[0, 1]) == RATIO[0]


@pytest.mark.parametrize(
    ("trace", "others", "kind"), [(vector_trace(), DISCRETE, "vectors"), (made_trace(), CONTINUOUS, "token ids")]
)
def test_metrics_of_the_other_kind_are_grey_and_say_why(trace, others, kind):
    for metric in others:
        drawn = token_map(trace, metric, 0)
        assert metric in drawn.title and kind in drawn.legend[0].text and "another metric" in drawn.legend[0].text
        assert (drawn.colours == GREY).all() and not drawn.strength.any()
    with pytest.raises(ValueError, match="metric.*'magic'") as error:
        token_map(trace, "magic", 0)
    offered = str(error.value).split("one of: ")[1].rstrip(".").split(", ")
    assert set(offered) == set(METRICS) - set(others)


@pytest.mark.once
@pytest.mark.parametrize("kind", ["NextToken", "DraftTree", "Continuous"])
def test_a_loaded_trace_shows_what_the_run_showed(kind, run_node, save, show, draw, rule):
    """Every image, mask, table and report, bit for bit. Also metrics that the run lacks show something, so that nobody
    has to try which ones it has."""
    _, trace = draw(kind, batch=2, **{"rule": rule("TVMetered", epsilon=0.3)} if kind == "DraftTree" else {})
    [file, _] = save(trace, f"specar/{kind}")["files"]
    choice = f"specar/{Path(file['filename']).with_suffix('.safetensors')} [output]"
    (loaded,) = run_node("LoadTrace", trace_name=choice).result
    for metric in METRICS:
        ours, theirs = (show(each, metric) for each in (trace, loaded))
        assert ours.result[1].shape == (2, 64, 64, 3) and ours.result[0].isfinite().all() and ours.ui["images"], metric
        assert all(torch.equal(one, other) for one, other in zip(ours.result[:3], theirs.result[:3], strict=True))
        assert ours.result[3] == theirs.result[3] and ours.ui["text"] == theirs.ui["text"]
        [one, other] = (json.dumps(out.ui["specar"]) for out in (ours, theirs))
        assert one == other
    assert all(numbers_of(trace, i) == numbers_of(loaded, i) for i in range(trace.totals["images"]))
    ours, theirs = (run_node("CompareTraces", trace_1=t, trace_2=t) for t in (trace, loaded))
    assert torch.equal(ours.result[0], theirs.result[0]) and ours.result[1] == theirs.result[1]


def test_an_older_workflow_gets_the_drift_bound_by_its_old_name(show, draw, nodes, rule):
    _, trace = draw("DraftTree", rule=rule("TVMetered", epsilon=0.3))
    validate, maps = nodes["SpecARAcceptanceMap"].validate_inputs, [show(trace, name).result for name in OLDER]
    assert all(torch.equal(*pair) for pair in zip(*(each[:3] for each in maps), strict=True))
    assert [validate(metric=name) for name in OLDER] == [True, True] and "'source'" in validate(metric="magic")


@pytest.mark.parametrize(("kind", "metric"), [("DraftTree", "entropy"), ("Continuous", "distance")])
def test_acceptance_map_node(kind, metric, show, draw, tiny, continuous):
    latent, trace = draw(kind, batch=2)
    vae = (continuous if kind == "Continuous" else tiny)[2]
    out = show(trace, metric, image=vae.decode(latent["samples"]))
    overlay, colours, mask, report = out.result
    assert overlay.shape[0] == 2 and overlay.shape[2] == 512
    assert colours.shape == (2, 32, 32, 3) and mask.shape == (2, 32, 32)
    assert mask.min() >= 0 and mask.max() <= 1
    assert json.loads(report) == as_json(trace)
    assert all(isinstance(value, list | tuple) for value in out.ui.values())  # ComfyUI flattens every value
    assert out.ui["specar"] == [trace.report()] and len(out.ui["images"]) == 2
    for image in out.ui["images"]:
        assert (Path(folder_paths.get_temp_directory()) / image["subfolder"] / image["filename"]).is_file()
    first, second = trace.totals["passes_per_image"]
    assert f"{first}, {second} passes for 16 tokens" in out.ui["text"][0]
    assert len(out.ui["specar_tokens"]) == 2
    for i, (file, preview) in enumerate(zip(out.ui["specar_tokens"], out.ui["images"], strict=True)):
        assert (file["type"], file["subfolder"]) == (preview["type"], preview["subfolder"]) == ("temp", "")
        data = json.loads((Path(folder_paths.get_temp_directory()) / file["filename"]).read_text("utf-8"))
        assert_numbers_equal(data, trace, i)
        assert data["map"] == [512, 512]  # above the legend, which the overlay has too
        relaxed = "accepted within the tolerance" if kind == "Continuous" else SOURCES[Source.RELAXED][0]
        assert data["continuous"] == (kind == "Continuous") and data["sources"][Source.RELAXED] == relaxed
        assert data["sources"][Source.RESIDUAL] == SOURCES[Source.RESIDUAL][0]


def test_of_too_many_maps_the_first_are_shown(show, sample, monkeypatch):
    """An error would take the finished images from nodes that are still to save them."""
    _, trace = sample("NextToken", batch=3)
    whole = show(trace)
    pixels = sum(out[0].shape[0] * out[0].shape[1] for out in whole.result[:2])
    monkeypatch.setattr(acceptance_map, "PIXELS", 2 * pixels)
    out = show(trace)
    assert [len(each) for each in out.result[:3]] == [2] * 3 and len(out.ui["images"]) == 2
    assert torch.equal(out.result[0], whole.result[0][:2])
    assert out.ui["text"][0].endswith("Maps of the first 2 of 3 images: those of all are too large.")


def numbers_of(trace: Trace, image: int = 0) -> dict:
    """The file for the front end, read as strict JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(token_records.token_numbers(trace, image, (8, 4), {}), parse_constant=refuse)


def assert_numbers_equal(data: dict, trace: Trace, image: int) -> None:
    assert (data["rows"], data["cols"]) == (trace.rows, trace.cols)
    assert set(data["fields"]) == {name for name in trace.positions if trace.grid(name)[image].any()}
    for name, values in data["fields"].items():
        np.testing.assert_allclose(values, trace.grid(name)[image].flatten(), rtol=6e-4, err_msg=name)


def test_numbers_are_strict_json_of_four_digits():
    data = numbers_of(made_trace(ratio=[float("inf"), float("nan"), 0.123456, 98765.4321]))
    assert data["fields"]["ratio"] == ["inf", "nan", 0.1235, 98770.0]
    assert numbers_of(vector_trace(log_ratio=[-float("inf"), 1.0, 0.0, 0.0]))["fields"]["log_ratio"][0] == "-inf"


def test_numbers_leave_out_ends_of_lines_and_empty_records():
    rows, cols, stride = 2, 3, 4  # a forced end-of-line token after every row
    order = torch.arange(rows * stride).reshape(1, -1)
    kept = torch.where(order % stride == cols, int(Source.FORCED), int(Source.ACCEPTED))
    trace = Trace(rows, cols, stride, {"source": kept, "finalised_at": order, "drift_bound": 0.0 * order}, {}, {}, {})
    assert numbers_of(trace)["fields"] == {"source": [1] * 6, "finalised_at": [0, 1, 2, 4, 5, 6]}


def test_the_node_offers_every_metric_and_refuses_others(show, nodes, sample):
    [choice] = [i for i in nodes["SpecARAcceptanceMap"].GET_SCHEMA().inputs if i.id == "metric"]
    assert {*choice.options} == {*METRICS}
    _, trace = sample("NextToken")
    with pytest.raises(ValueError, match="metric.*'magic'"):
        show(trace, "magic")
    with pytest.raises(ValueError, match=r"\b1\b.*\b2\b"):
        show(trace, image=torch.rand(2, 32, 32, 3))


def test_traces_survive_saving_and_loading(run_node, nodes, save, sample):
    _, trace = sample("SJD", batch=2)
    files = [save(trace, "specar/t")["files"] for _ in range(2)]
    names = [Path(f["filename"]).stem for pair in files for f in pair]
    assert names == ["t_00001_"] * 2 + ["t_00002_"] * 2
    choice = "specar/t_00002_.safetensors [output]"
    loader = nodes["SpecARLoadTrace"]
    assert choice in loader.INPUT_TYPES()["required"]["trace_name"][1]["options"]
    assert re.fullmatch("[0-9a-f]+", loader.fingerprint_inputs(trace_name=choice)), "in every image: no folder's name"
    (loaded,) = run_node("LoadTrace", trace_name=choice).result
    assert as_json(loaded) == as_json(trace)
    written = json.loads((Path(folder_paths.get_output_directory()) / "specar/t_00001_.json").read_text("utf-8"))
    assert written == as_json(trace)


def test_load_trace_errors(run_node, nodes):
    (Path(folder_paths.get_output_directory()) / "no.safetensors").write_bytes(b"nothing")
    for name, error, words in (
        ("no.safetensors", ValueError, "no.safetensors.*trace"),
        ("gone.safetensors", FileNotFoundError, "trace gone"),
        ("../models/ar_models/tiny/model.safetensors", ValueError, "outside.*folders"),
    ):
        with pytest.raises(error, match=words):
            run_node("LoadTrace", trace_name=f"{name} [output]")
    choices = nodes["SpecARLoadTrace"].INPUT_TYPES()["required"]["trace_name"][1]["options"]
    assert "no.safetensors [output]" not in choices
