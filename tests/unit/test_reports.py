"""Reports from Python, without ComfyUI: the example of docs/api.md, and what becomes of real and of wrong images."""

import re
from dataclasses import replace
from pathlib import Path

import comfyui_specar as specar
import numpy as np
import pytest
import torch
from comfyui_specar.reports.acceptance_map import GREY, INK, TOKEN_PIXELS, draw_legend, draw_maps, enlarge, token_map
from comfyui_specar.reports.comparison import WIDTH
from comfyui_specar.reports.images import as_bytes
from comfyui_specar.reports.timeline_frames import UNDRAWN
from comfyui_specar.samplers.trace import Source
from PIL import Image

DOCUMENT = Path(specar.__file__).resolve().parent / "docs/api.md"
SHORTEST = 512  # pixels of a map's shorter side
KINDS = {"discrete": "overlay", "continuous": "mar"}  # -> a name that the paragraph of the example assigns


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> dict[str, dict]:
    """The document's example after it has run in a folder of its own: kind of model -> the names at its end."""
    code = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL).group(1)
    names, found = {"folder": tmp_path_factory.mktemp("api")}, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(names["folder"])
        for paragraph in code.split("\n\n"):
            exec(compile(paragraph, DOCUMENT.name, "exec"), names)  # noqa: S102 (the document is our own)
            found |= {kind: dict(names) for kind, name in KINDS.items() if f"{name} = " in paragraph}
    return found


def test_the_documents_example_saves_its_image_and_a_map_as_large_as_it_says(example):
    overlay = example["discrete"]["overlay"]
    assert overlay.dtype == np.uint8 and overlay.shape[0] == 1 and overlay.shape[2:] == (SHORTEST, 3)
    assert overlay.shape[1] > SHORTEST, "the legend is below"
    with Image.open(example["discrete"]["folder"] / "map.png") as saved:
        assert np.array_equal(np.asarray(saved), overlay[0])
    with Image.open(example["discrete"]["folder"] / "image.png") as saved:
        assert saved.size == (256, 256) and np.ptp(np.asarray(saved)) > 100


@pytest.mark.parametrize("kind", KINDS)
def test_a_map_contains_its_image(example, kind):
    trace, pixels = example[kind]["out"].trace, example[kind]["pixels"]
    image = as_bytes(pixels)[0]
    height, width = image.shape[:2]
    factor = -(-SHORTEST // min(height, width))
    clear = specar.acceptance_map(trace, pixels, opacity=0.0)[0, : factor * height]
    assert clear.shape == (factor * height, factor * width, 3)
    assert np.array_equal(clear, enlarge(image, *clear.shape[:2]))
    covered = specar.acceptance_map(trace, pixels, opacity=1.0)[0, : factor * height]
    assert np.array_equal(covered, enlarge(draw_maps(trace, None, "source", 1.0).colours[0], *covered.shape[:2]))
    half = specar.acceptance_map(trace, pixels, opacity=0.5)[0, : factor * height]
    mapped, rows, cols = (half == covered).all(-1), trace.rows, trace.cols
    assert np.array_equal(half, np.where(mapped[..., None], covered, clear))
    tokens = (half != clear).any(-1).reshape(rows, len(half) // rows, cols, half.shape[1] // cols).mean((1, 3))
    assert tokens.max() == 0.25, "the middle of a token, half as wide and high"


@pytest.mark.parametrize("kind", KINDS)
def test_a_map_is_the_same_of_every_form_of_the_image(example, kind):
    trace, pixels = example[kind]["out"].trace, example[kind]["pixels"]
    levels = (pixels * 255).round()
    with_alpha = torch.cat((pixels, pixels[..., :1]), -1)
    forms = pixels, pixels.numpy(), pixels.double(), pixels[0], levels.byte(), levels.byte().numpy(), with_alpha
    first, *others = (specar.acceptance_map(trace, form) for form in forms)
    assert all(np.array_equal(first, other) for other in others)
    assert np.array_equal(as_bytes(levels[0].bfloat16() / 256), as_bytes(levels / 256)), "numpy has no bf16"


def test_a_map_without_an_image_has_its_tokens_only(example):
    trace = example["discrete"]["out"].trace
    assert specar.acceptance_map(trace).shape[2] == SHORTEST
    height, width = trace.rows * TOKEN_PIXELS, trace.cols * TOKEN_PIXELS
    assert draw_maps(trace, None, "pass", 0.5).strength.shape == (1, height, width)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.rand(2, 8, 8, 3), r"\b1 image\b.*\b2\b"),
        (torch.rand(8, 8), r"shape \[8, 8\].*\[B, H, W, 3\]"),
        (torch.rand(1, 3, 8, 8)[..., :2], r"shape.*\[B, H, W, 3\]"),
        (torch.ones((1, 8, 8, 3), dtype=torch.int64), "int64.*uint8"),
    ],
)
def test_what_is_no_image_of_the_run_is_refused(example, image, message):
    trace = example["discrete"]["out"].trace
    for report in (specar.acceptance_map, specar.timeline_frames):
        with pytest.raises(ValueError, match=message):
            report(trace, image)


def test_a_metric_that_the_run_lacks_is_grey_and_says_why(example):
    for kind, metric in (("discrete", "distance"), ("continuous", "entropy")):
        trace = example[kind]["out"].trace
        pixels = specar.acceptance_map(trace, metric=metric, opacity=1.0)[0]
        height = len(pixels) - len(draw_legend(token_map(trace, metric, 0), pixels.shape[1]))
        assert (pixels[:height] == GREY).all() and (pixels[height:] == INK).any(), "a sentence stands in the legend"
    with pytest.raises(ValueError, match="metric.*'magic'.*source"):
        specar.acceptance_map(trace, metric="magic")


@pytest.mark.parametrize("kind", KINDS)
def test_a_timeline_has_a_frame_per_pass_and_ends_with_the_image(example, kind):
    trace, pixels = example[kind]["out"].trace, example[kind]["pixels"]
    frames = specar.timeline_frames(trace, pixels, tint=0.0)
    assert len(frames) == trace.grid("finalised_at")[0].unique().numel()
    assert {(frame.shape, frame.dtype) for frame in frames} == {(tuple(pixels.shape[1:]), np.dtype(np.uint8))}
    assert np.array_equal(frames[-1], as_bytes(pixels)[0])
    undecided = (frames[0] == UNDRAWN).all(-1).mean()
    first = (trace.grid("finalised_at")[0] == trace.grid("finalised_at")[0].min()).float().mean().item()
    assert abs(undecided - (1 - first)) < 0.02  # some decoded pixel may be grey itself
    assert len(specar.timeline_frames(trace, pixels, frames=5)) == 5
    assert (trace.positions["source"] != Source.FORCED).all(), "or kept tokens were in the first frame"
    with pytest.raises(ValueError, match="number is 1.*one image.*use 0"):
        specar.timeline_frames(trace, pixels, number=1)


def test_runs_are_compared_and_reported(example):
    traces = [example[kind]["out"].trace for kind in KINDS]
    chart = specar.comparison_chart(traces)
    assert chart.dtype == np.uint8 and chart.shape[1:] == (WIDTH, 3)
    assert specar.comparison_table(traces).count("\n| ") == 1 + len(traces)
    for trace in traces:
        assert f"{trace.totals['passes_per_image'][0]} passes for" in specar.run_report(trace)
        skipped = replace(trace, totals=trace.totals | {"target_passes": 999})  # images of a batch skip in other rounds
        assert "passes (999 of the batch) for" in specar.run_report(skipped)
