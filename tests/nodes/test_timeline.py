"""Decoding Timeline: exact pixels of small films, films of real runs, races, and what it refuses."""

import comfy.model_management as mm
import comfy.utils
import folder_paths
import numpy as np
import pytest
import torch
from comfyui_specar.nodes import timeline
from comfyui_specar.reports import race, timeline_frames
from comfyui_specar.reports.acceptance_map import SOURCES, enlarge
from comfyui_specar.reports.timeline_frames import UNDRAWN
from comfyui_specar.samplers.trace import Source, Trace
from PIL import Image

BLANK = np.divide(UNDRAWN, 255).astype(np.float32)


def trace_of(finished: list, source: list, rows=2, cols=2, stride=2) -> Trace:
    positions = {
        "finalised_at": torch.tensor([finished], dtype=torch.int32),
        "source": torch.tensor([source], dtype=torch.uint8),
    }
    return Trace(rows, cols, stride, positions, {}, {}, {})


SMALL = trace_of([0, 1, 3, 9], [Source.PREFILL, Source.ACCEPTED, Source.RESIDUAL, Source.FORCED])


def film(trace=SMALL, picture=None, after=None, tint=0.5, image=0) -> np.ndarray:
    if picture is None:
        picture = np.random.default_rng(0).random((4, 4, 3), np.float32)
    after = timeline_frames.passes_of(trace, image, 1000) if after is None else after
    return np.stack(list(timeline_frames.draw_frames(trace, image, picture, after, tint)))


def blended(pixels, source, strength):
    return pixels + strength * (np.divide(SOURCES[source][1], 255) - pixels)


def test_every_pixel_of_a_small_film():
    picture = np.random.default_rng(1).random((4, 4, 3), np.float32)
    first, second, third, kept = picture[:2, :2], picture[:2, 2:], picture[2:, :2], picture[2:, 2:]
    drawn = film(picture=picture)
    assert drawn.shape == (4, 4, 4, 3) and drawn.dtype == np.float32, "passes 0 to 3"
    for number, strength in enumerate((0.5, 0.25, 0.125, 0.0625)):
        assert np.allclose(drawn[number, :2, :2], blended(first, Source.PREFILL, strength))
        assert np.array_equal(drawn[number, 2:, 2:], kept), "what was kept is there, untinted, whenever it was passed"
    assert (drawn[0, :2, 2:] == BLANK).all() and (drawn[:3, 2:, :2] == BLANK).all()
    for number, strength in enumerate((0.5, 0.25, 0.125), start=1):
        assert np.allclose(drawn[number, :2, 2:], blended(second, Source.ACCEPTED, strength))
    assert np.allclose(drawn[3, 2:, :2], blended(third, Source.RESIDUAL, 0.5))


def test_fewer_frames_take_passes_together():
    picture = np.random.default_rng(3).random((4, 4, 3), np.float32)
    assert timeline_frames.passes_of(SMALL, 0, 2) == [0, 3]
    drawn = film(picture=picture, after=[0, 3])
    assert np.allclose(drawn[1, :2, 2:], blended(picture[:2, 2:], Source.ACCEPTED, 0.5)), "decided in between"
    assert np.allclose(drawn[1, :2, :2], blended(picture[:2, :2], Source.PREFILL, 0.25))


@pytest.mark.parametrize("most", [1, 2, 7, 199, 1000])
def test_passes_are_even_and_have_both_ends(most):
    trace = trace_of([i + 1 for i in range(200)], [Source.BONUS] * 200, 10, 20, 20)
    chosen = timeline_frames.passes_of(trace, 0, most)
    assert len(chosen) == min(most, 200) and chosen[-1] == 200
    assert most == 1 or chosen[0] == 1
    gaps = np.diff(chosen)
    assert most == 1 or (gaps.min() >= 1 and gaps.max() - gaps.min() <= 1)


def test_ends_of_rows_are_no_part_of_the_image():
    """Positions 2 and 5 are ends of rows, 6 the end of the image."""
    source = [Source.BONUS, Source.BONUS, Source.FORCED] * 2 + [Source.FORCED]
    picture = np.random.default_rng(5).random((4, 4, 3), np.float32)
    drawn = film(trace_of(list(range(7)), source, stride=3), picture, tint=0.0)
    assert len(drawn) == 5
    for number, pieces in enumerate((1, 2, 2, 3, 4)):
        shown = [not (drawn[number, y : y + 2, x : x + 2] == BLANK).all() for y in (0, 2) for x in (0, 2)]
        assert shown == [i < pieces for i in range(4)]
    assert np.array_equal(drawn[-1], picture)


@pytest.mark.parametrize(("size", "count"), [(128, 16), (7, 3), (3, 4), (1, 1)])
def test_tokens_have_the_same_areas_as_in_maps(size, count):
    picture = np.ones((1, size, 3), np.float32)
    drawn = film(trace_of([*range(count)], [Source.BONUS] * count, 1, count, count), picture, tint=0.0)
    areas = enlarge(np.arange(count)[None], 1, size)
    assert len(drawn) == count
    assert all(np.array_equal(drawn[token, ..., 0] == 1, areas <= token) for token in range(count))


def racing(finished: list, seconds: float, passes: int) -> Trace:
    totals = {"seconds": seconds, "target_passes": passes}
    trace = trace_of(finished, [Source.ACCEPTED] * 4)
    return Trace(2, 2, 2, trace.positions, {}, totals, {"method": "next_token"})


def test_a_race_has_one_clock():
    slow, fast = racing([0, 1, 2, 3], 4.0, 4), racing([0, 0, 1, 1], 1.0, 2)
    pictures = [np.full((4, 4, 3), level, np.float32) for level in (0.2, 0.8)]
    frames = list(race.race_frames([slow, fast], 0, pictures, 8, tint=0.0))
    across, down = race.panel_size(4, 4)
    assert len(frames) == 8 and frames[0].shape == (*race.film_size(4, 4), 3) == (down + race.HEAD + race.FOOT, 768, 3)
    assert down % 2 == 0 and frames[0].shape[0] % 2 == 0, "video codecs want even sides"
    for number, frame in enumerate(frames):
        drawn = []
        for place, level in enumerate((51, 204)):
            left = race.MARGIN + place * (across + race.MARGIN)
            panel = frame[race.HEAD : race.HEAD + down, left : left + across]
            drawn.append(float((panel == level).all(-1).mean()))
        seconds = (number + 1) / 2
        assert drawn == pytest.approx([int(seconds) / 4, min(int(2 * seconds), 2) / 2], abs=1e-3)


# The node


@pytest.fixture
def timeline_of(run_node):
    return lambda trace, image, **inputs: run_node("Timeline", trace=trace, image=image, **inputs)


def test_a_run_has_a_frame_for_every_pass_and_ends_with_its_image(sample, tiny, timeline_of):
    latent, trace = sample("SJD", batch=2)
    image = tiny[2].decode(latent["samples"])
    for number in range(2):
        pixels, fps = timeline_of(trace, image, hold=2, picture=number).result
        passes = trace.totals["passes_per_image"][number]
        assert pixels.shape == (passes + 2, *image.shape[1:]) and pixels.dtype == torch.float32
        assert torch.equal(pixels[-2:], image[number].expand(2, -1, -1, -1))
        assert fps == max(1, round(passes / 4))
        at = trace.grid("finalised_at")[number]
        for after in range(passes):
            grey = (pixels[after].unflatten(0, (4, 8)).unflatten(2, (4, 8)) == float(BLANK[0])).all(-1).all(3).all(1)
            assert torch.equal(grey, at > after)


def test_the_node_shows_a_film(sample, tiny, timeline_of, progress):
    latent, trace = sample("SJD")
    shown = timeline_of(trace, tiny[2].decode(latent["samples"]), hold=3)
    [file] = shown.ui["images"]
    assert shown.ui["animated"] == (True,) and file["type"] == "temp"
    webp = Image.open(f"{folder_paths.get_temp_directory()}/{file['subfolder']}/{file['filename']}")
    assert webp.format == "WEBP" and webp.is_animated and webp.size == (32, 32)
    count = len(shown.result[0])
    assert webp.n_frames <= count  # equal ones may be one, shown for longer
    assert progress[-1][:2] == (count - 3, count - 3)


def test_a_full_disk_costs_the_film_on_the_node_and_nothing_else(timeline_of, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    shown = timeline_of(SMALL, torch.rand(1, 4, 4, 3))
    assert shown.ui == {"images": []} and len(shown.result[0]) == 16
    assert "Decoding Timeline" in caplog.text and "[Errno 28]" in caplog.text


def long_run(passes: int) -> Trace:
    side = int(passes**0.5)
    return trace_of(list(range(passes)), [Source.BONUS] * passes, side, side, side)


@pytest.mark.parametrize(
    ("widgets", "count"), [({}, 240), ({"hold": 0}, 240), ({"frames": 1000, "hold": 1}, 400), ({"frames": 1}, 1)]
)
def test_number_of_frames(widgets, count, timeline_of):
    pixels, fps = timeline_of(long_run(400), torch.rand(1, 20, 20, 3), **widgets).result
    assert len(pixels) == count + widgets.get("hold", 12) and fps == min(60, max(1, round(count / 4)))


def test_automatic_frames_are_as_many_as_fit(timeline_of, monkeypatch):
    monkeypatch.setattr(timeline, "PIXELS", 20 * 20 * 30)
    image = torch.rand(1, 20, 20, 3)
    assert len(timeline_of(long_run(400), image).result[0]) == 30  # 18 of the run
    with pytest.raises(ValueError, match=r"19 frames.*20 x 20 pixels.* 12 .* 30 frames"):
        timeline_of(long_run(400), image, frames=19)
    with pytest.raises(ValueError, match="frames and hold"):
        timeline_of(long_run(400), image, hold=29)


def test_what_does_not_belong_together_is_refused(timeline_of):
    assert timeline_of(SMALL, torch.rand(1, 4, 4, 4)).result[0].shape == (16, 4, 4, 3), "alpha is left out"
    with pytest.raises(ValueError, match=r"\b1 image.*\b2\b"):
        timeline_of(SMALL, torch.rand(2, 4, 4, 3))
    with pytest.raises(ValueError, match="picture is 1.*one image.*use 0"):
        timeline_of(SMALL, torch.rand(1, 4, 4, 3), picture=1)


def test_interruption_stops_the_run(timeline_of, monkeypatch, unthrottled):
    def hook(value, *_, **__):
        if value == 3:
            raise mm.InterruptProcessingException

    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", hook)
    with pytest.raises(mm.InterruptProcessingException):
        timeline_of(long_run(100), torch.rand(1, 20, 20, 3))


def test_the_node_makes_a_race_of_two_runs(sample, timeline_of):
    (_, first), (_, second) = sample("NextToken"), sample("SJD")
    image = torch.rand(1, 32, 32, 3)
    frames, fps = timeline_of(first, image, hold=3, other_trace=second, other_image=1 - image).result
    assert frames.shape == (race.FRAMES + 3, *race.film_size(32, 32), 3) and fps == race.FRAMES / 4
    assert torch.equal(frames[-1], frames[-3]), "the end is held"
    with pytest.raises(ValueError, match="both other_trace and other_image"):
        timeline_of(first, image, other_trace=second)
    with pytest.raises(ValueError, match=r"\b1 image.*\b2\b"):
        timeline_of(first, image, other_trace=second, other_image=torch.rand(2, 32, 32, 3))
