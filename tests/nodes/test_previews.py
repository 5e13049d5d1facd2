"""Previews: what they show, when, what they cost, and where they give way."""

import comfy.model_management as mm
import comfyui_specar as specar
import numpy as np
import pytest
import torch
from comfy.cli_args import LatentPreviewMethod, args
from comfyui_specar.nodes.comfy_runtime import previews
from comfyui_specar.nodes.comfy_runtime.previews import Palette, Previews, measure_palette
from comfyui_specar.nodes.comfy_runtime.progress import Report
from comfyui_specar.nodes.comfy_runtime.runs import LoadedDecoder
from comfyui_specar.samplers.contract import Sketch

WHOLE = torch.ones(2, 2, dtype=torch.bool)
TOP = torch.tensor([[True, True], [False, False]])
NONE = torch.zeros(2, 2, dtype=torch.bool)
GREEN, DIM_GREEN, DIM_RED = (0, 255, 0), (77, 179, 77), (179, 77, 77)  # dimmed: 40 % over grey


class Clock:
    """A clock that is moved by hand; everything takes the time it is set to take."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(previews.time, "perf_counter", lambda: self.now)

    def passing(self, seconds: float, result=None):
        """A function that takes so many seconds."""

        def function(*_):
            self.now += seconds
            return result

        return function


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


class Decoder:
    """Decodes everything to green, in 0.2 s an image."""

    def __init__(self, clock, factor=8):
        self.clock, self.factor, self.decoded = clock, factor, 0

    def decode(self, latent):
        self.clock.now += 0.2
        self.decoded += 1
        rows, cols = latent.shape[2] * self.factor, latent.shape[3] * self.factor
        return torch.tensor([0.0, 1.0, 0.0]).expand(1, rows, cols, 3)


def sketch_of(known, guessed=NONE):
    return Sketch(torch.zeros(1, 1, 2, 2), known, guessed)


def red_and_more(known, sketch_seconds, clock, decoder, pace=0.05, guessed=NONE):
    """Previews of a 2 x 2 image whose palette knows only red."""
    palette = Palette(torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]), pace)
    sketch = clock.passing(sketch_seconds, sketch_of(known, guessed))
    return Previews(sketch, palette, decoder, decoder.factor if decoder else 8, 512)


class Step:
    """Progress whose tokens nobody may read."""

    length, passes = 4, 1
    committed = torch.tensor([2])


@pytest.mark.parametrize("decoding", [False, True])
def test_two_percent_are_overdrawn_by_one_preview_at_most(decoding, clock):
    shown = red_and_more(WHOLE, 0.002, clock, Decoder(clock) if decoding else None)
    dearest = 0.21 if decoding else 0.002
    began, spent, times = clock.now, 0.0, []
    for _ in range(20000):  # passes of 10 ms
        clock.now += 0.01
        before = clock.now
        if shown(Step()):
            times.append(before)
            spent += clock.now - before
        assert spent <= 0.02 * (clock.now - began) + dearest
    assert all(later - earlier >= 0.25 for earlier, later in zip(times, times[1:], strict=False))
    assert spent > (0.5 if decoding else 0.3) * 0.02 * (clock.now - began) and len(times) > 100
    assert not decoding or 5 < shown.decoder.decoded < 25


def test_the_cost_of_showing_counts(clock):
    shown = red_and_more(WHOLE, 0.0, clock, None)
    clock.now += 1.0
    shown.spent = 0.03
    assert shown(Step()) is None
    clock.now += 1.0
    assert shown(Step()) is not None


@pytest.mark.parametrize("decoded", [False, True])
def test_the_last_preview_shows_the_finished_image(decoded, clock, progress):
    """It stays on the node, beside the image: it is the decoder's, if there is one, however short the run was."""
    shown = red_and_more(TOP, 0.0, clock, Decoder(clock) if decoded else None)
    report = Report(4, shown)
    clock.now += 1.0
    report(Step())
    assert (np.array(progress[-1][2][1])[-1] == 128).all(), "a part is not decided yet"
    shown.sketch = clock.passing(0.0, sketch_of(WHOLE))
    report.finish()
    value, total, (_, image, longest) = progress[-1]
    assert (value, total) == (4, 4) and longest == 16, "the image is not shown larger than it is"
    assert near(np.array(image), GREEN if decoded else (255, 0, 0))


def near(pixels, colour):
    return (np.abs(pixels.astype(int) - colour) <= 1).all()


def test_guesses_are_dimmed_colours_then_decoded_then_both(clock):
    """The upper row is decided, the lower left token guessed, the last one neither."""
    left = torch.tensor([[False, False], [True, False]])
    shown = red_and_more(TOP, 0.0, clock, Decoder(clock), guessed=left)
    clock.now += 0.25
    first = np.array(shown(Step()))
    assert near(first[:4], (255, 0, 0)) and near(first[4:, :4], DIM_RED) and near(first[4:, 4:], 128)
    clock.now += 12
    second = np.array(shown(Step()))
    assert near(second[:8], GREEN) and near(second[8:, :8], DIM_GREEN) and near(second[8:, 8:], 128)
    for guessed, lower in ((left, (DIM_RED, (128,) * 3)), (NONE, ((128,) * 3, (128,) * 3)), (~TOP, (DIM_RED, DIM_RED))):
        shown.sketch = clock.passing(0.0, sketch_of(TOP, guessed))
        clock.now += 0.25
        later = np.array(shown(Step()))
        assert near(later[:8], GREEN) and near(later[8:, :8], lower[0]) and near(later[8:, 8:], lower[1])
    assert shown.decoder.decoded == 1, "guesses that changed since are not shown as they were decoded"


@pytest.mark.parametrize(
    ("method", "inputs", "guesses"),
    [
        ("NextToken", {}, False),
        ("SJD", {}, True),
        ("SJD", {"refinement": "redraw (SJD, exact)"}, True),
        ("DraftTree", {}, False),
    ],
)
def test_only_windows_stand_between_passes(method, inputs, guesses, sample, progress, hurried, monkeypatch):
    """The guesses of an SJD run go into its next pass; a run with a drafter guesses anew in every round."""
    seen = []
    monkeypatch.setattr(previews.Previews, "__call__", lambda self, state: seen.append(self.sketch(state)))
    monkeypatch.setattr(args, "preview_method", LatentPreviewMethod.Auto)
    sample(method, batch=2, **inputs)
    assert not any(bool((found.known & found.guessed).any()) for found in seen)
    for found in seen[:-1]:
        decided = int(found.known.sum())
        assert int(found.guessed.sum()) == (min(3, 16 - decided) if guesses else 0)
    assert seen[-1].known.all()


def test_a_preview_is_no_larger_than_asked_for(clock):
    shown = red_and_more(WHOLE, 0.0, clock, Decoder(clock, factor=16), pace=0.0)
    for size, expected in ((512, 32), (9, 8), (1, 2)):
        shown.size = size
        clock.now += 20
        assert shown(Step()).size == (expected, expected)


def test_most_passes_read_nothing(clock, progress):
    """The bar moves at most twenty times a second, and tokens are read for previews alone, four times a second."""
    read = []
    shown = red_and_more(WHOLE, 0.0, clock, None)
    shown.sketch = lambda progress: (read.append(clock.now), sketch_of(WHOLE))[1]
    report = Report(4, shown)
    for _ in range(10000):  # passes of a millisecond
        clock.now += 0.001
        report(Step())
    assert 35 <= len(read) <= 40 and 190 <= len(progress) <= 200
    report.finish()
    assert progress[-1][:2] == (4, 4)


@pytest.mark.once
@pytest.mark.parametrize("bundled", ["default", "continuous"])
def test_colours_resemble_the_image(bundled):
    """Measured once, they explain most of what differs between the tokens of images that were never seen."""
    model = specar.load_model(specar.bundled(bundled))
    decoder = getattr(model, "image_decoder", None) or specar.load_image_decoder(specar.bundled(bundled))
    palette = measure_palette(decoder, model)
    side = decoder.factor
    rows, cols = (torch.linspace(-1, 1, side * tokens) for tokens in model.grid)
    y, x = torch.meshgrid(rows, cols, indexing="ij")
    disc, stripes = (x.square() + y.square() < 0.5).float(), (x * 4).sin() / 2 + 0.5
    image = torch.stack((disc, stripes * 0.8, 0.9 - 0.7 * disc), dim=-1)[None]
    latent = decoder.encode_latent(image)
    truth = decoder.decode(latent)[0].unflatten(0, (-1, side)).unflatten(2, (-1, side)).mean((1, 3))
    error = (palette.colours(latent) - truth).square().mean()
    assert error < 0.35 * (truth - truth.mean((0, 1))).square().mean()
    assert palette.pace > 0


def test_none_colours_decoded(sample, progress, hurried, tiny, monkeypatch):
    decoder, decodings = tiny[0].decoder, []
    decode = type(decoder.decoder).decode
    monkeypatch.setattr(type(decoder.decoder), "decode", lambda self, z: decodings.append(z.shape) or decode(self, z))
    monkeypatch.setattr(decoder, "palette", None)
    whole = sample("NextToken")[0]["ar_tokens"]
    assert decoder.palette is None and not any(preview for *_, preview in progress)
    for method, size, decoded in (
        (LatentPreviewMethod.Latent2RGB, 16, 2),
        (LatentPreviewMethod.Latent2RGB, 16, 0),
        (LatentPreviewMethod.TAESD, 32, 16),
        (LatentPreviewMethod.Auto, 32, 16),
    ):
        monkeypatch.setattr(args, "preview_method", method)
        progress.clear(), decodings.clear()
        assert torch.equal(sample("NextToken")[0]["ar_tokens"], whole)
        assert {preview[1].size for *_, preview in progress} == {(size, size)} and len(progress) == 16
        assert len(decodings) == decoded  # the palette is measured once: a warm-up and an image


def short(*_):
    raise mm.OOM_EXCEPTION("CUDA out of memory")


@pytest.mark.parametrize("measuring", [False, True])
def test_previews_stop_where_memory_runs_out(measuring, sample, progress, hurried, tiny, monkeypatch, caplog):
    monkeypatch.setattr(args, "preview_method", LatentPreviewMethod.Auto)
    whole = sample("NextToken")[0]["ar_tokens"]
    if measuring:
        monkeypatch.setattr(tiny[0].decoder, "palette", None)
    monkeypatch.setattr(type(tiny[0].decoder.decoder), "decode", short)
    progress.clear()
    with caplog.at_level("INFO"):
        assert torch.equal(sample("NextToken")[0]["ar_tokens"], whole)
    assert sum("preview" in record.message.lower() for record in caplog.records) == 1
    assert not any(preview for *_, preview in progress)


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("enough", [False, True])
def test_no_model_makes_way_for_previews(enough, measured, sample, progress, hurried, tiny, loads, monkeypatch):
    decoder: LoadedDecoder = tiny[0].decoder
    monkeypatch.setattr(decoder, "palette", Palette(torch.zeros(9, 3), 0.0) if measured else None)
    mm.unload_all_models()
    pixels = previews.measured_tokens(8) * 64
    need = 1.1 * decoder.patcher.model_size() + decoder.bytes_for(pixels) + mm.minimum_inference_memory()
    monkeypatch.setattr(args, "preview_method", LatentPreviewMethod.Auto)
    monkeypatch.setattr(mm, "get_free_memory", lambda *_, **__: need + 2**20 if enough else need)
    sample("NextToken")
    assert any(preview for *_, preview in progress) == (enough or measured)
    assert [models for models, _ in loads] == [[tiny[0].patcher]] + [[decoder.patcher]] * enough
    assert not enough or loads[1][1]["force_full_load"], "a decoder in part would mix devices"


@pytest.mark.parametrize(("cost", "moves"), [(0.0001, 20), (0.002, 5), (0.05, 2)])
def test_the_bar_takes_a_hundredth_of_a_run_and_moves_twice_a_second_at_least(cost, moves, clock, monkeypatch):
    shown = red_and_more(WHOLE, 0.0, clock, None)
    report, moved = Report(4, shown), []
    monkeypatch.setattr(report.bar, "update_absolute", lambda *_: (moved.append(clock.now), clock.passing(cost)()))
    for _ in range(10000):
        clock.now += 0.001
        report(Step())
    assert 0.9 * moves <= len(moved) / 10 <= moves + 0.1
    assert shown.spent == pytest.approx(cost * len(moved)), "the time of the bar is reported to the previews"
