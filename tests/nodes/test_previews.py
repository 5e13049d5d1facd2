"""Previews: what they show, when, what they cost, and where they give way."""

import comfy.model_management as mm
import comfyui_specar as specar
import numpy as np
import pytest
import torch
from comfy.cli_args import LatentPreviewMethod, args
from comfyui_specar.nodes import previews
from comfyui_specar.nodes.host import LoadedDecoder
from comfyui_specar.nodes.previews import Palette, Previews, measure_palette
from comfyui_specar.nodes.progress import Report

WHOLE = torch.ones(2, 2, dtype=torch.bool)
TOP = torch.tensor([[True, True], [False, False]])


class Clock:
    """A clock that is moved by hand; everything takes the time it is told to take."""

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
    """Decodes everything to green, in 0.2 s a picture."""

    def __init__(self, clock, factor=8):
        self.clock, self.factor, self.decoded = clock, factor, 0

    def decode(self, latent):
        self.clock.now += 0.2
        self.decoded += 1
        rows, cols = latent.shape[2] * self.factor, latent.shape[3] * self.factor
        return torch.tensor([0.0, 1.0, 0.0]).expand(1, rows, cols, 3)


def red_and_more(known, sketch_seconds, clock, decoder, pace=0.05):
    """Previews of a 2 x 2 picture whose palette knows only red."""
    palette = Palette(torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]), pace)
    sketch = clock.passing(sketch_seconds, (torch.zeros(1, 1, 2, 2), known))
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


def test_colours_then_decoded_then_both(clock):
    shown = red_and_more(TOP, 0.0, clock, Decoder(clock))
    clock.now += 0.25
    first = np.array(shown(Step()))
    assert first.shape == (8, 8, 3)  # four pixels a token, for ComfyUI to enlarge
    assert (first[:4] == (255, 0, 0)).all() and (first[4:] == 128).all()
    clock.now += 12  # 2 % of which are enough for one decoding
    second = np.array(shown(Step()))
    assert second.shape == (16, 16, 3) and (second[:8] == (0, 255, 0)).all() and (second[8:] == 128).all()
    shown.sketch = clock.passing(0.0, (torch.zeros(1, 1, 2, 2), WHOLE))
    clock.now += 0.25
    third = np.array(shown(Step()))
    assert (third[:8] == (0, 255, 0)).all() and (third[8:] == (255, 0, 0)).all() and shown.decoder.decoded == 1


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
    shown.sketch = lambda progress: (read.append(clock.now), (torch.zeros(1, 1, 2, 2), WHOLE))[1]
    report = Report(4, shown)
    for _ in range(10000):  # passes of a millisecond
        clock.now += 0.001
        report(Step())
    assert 35 <= len(read) <= 40 and 190 <= len(progress) <= 200
    report.finish()
    assert progress[-1][:2] == (4, 4)


def test_interruption_is_looked_for_in_every_pass(clock, progress):
    report = Report(4, None)
    report(Step())
    mm.interrupt_current_processing()
    with pytest.raises(mm.InterruptProcessingException):
        report(Step())
    assert not progress


@pytest.mark.parametrize("bundled", ["default", "continuous"])
def test_colours_resemble_the_picture(bundled):
    """Measured once, they explain most of what differs between the tokens of pictures that were never seen."""
    model = specar.load_model(specar.bundled(bundled))
    decoder = getattr(model, "image_decoder", None) or specar.load_image_decoder(specar.bundled(bundled))
    palette = measure_palette(decoder, model)
    y, x = torch.meshgrid(torch.linspace(-1, 1, 64), torch.linspace(-1, 1, 64), indexing="ij")
    disc, stripes = (x.square() + y.square() < 0.5).float(), (x * 4).sin() / 2 + 0.5
    picture = torch.stack((disc, stripes * 0.8, 0.9 - 0.7 * disc), dim=-1)[None]
    latent = decoder.encode_latent(picture)
    side = decoder.factor
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
    for method, size, decoded in ((LatentPreviewMethod.Latent2RGB, 16, 2), (LatentPreviewMethod.Latent2RGB, 16, 0),
                                  (LatentPreviewMethod.TAESD, 32, 16), (LatentPreviewMethod.Auto, 32, 16)):
        monkeypatch.setattr(args, "preview_method", method)
        progress.clear(), decodings.clear()
        assert torch.equal(sample("NextToken")[0]["ar_tokens"], whole)
        assert {preview[1].size for *_, preview in progress} == {(size, size)} and len(progress) == 16
        assert len(decodings) == decoded  # the palette is measured once: a warm-up and a picture


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
    assert caplog.text.count("No previews: " if measuring else "goes on without them") == 1
    assert not any(preview for *_, preview in progress)


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("room", [False, True])
def test_no_model_makes_way_for_previews(room, measured, sample, progress, hurried, tiny, monkeypatch):
    decoder: LoadedDecoder = tiny[0].decoder
    monkeypatch.setattr(decoder, "palette", Palette(torch.zeros(9, 3), 0.0) if measured else None)
    mm.unload_all_models()
    pixels = previews.measured_tokens(8) * 64
    need = 1.1 * decoder.patcher.model_size() + decoder.bytes_for(pixels) + mm.minimum_inference_memory()
    monkeypatch.setattr(args, "preview_method", LatentPreviewMethod.Auto)
    monkeypatch.setattr(mm, "get_free_memory", lambda *_, **__: need + 2**20 if room else need)
    loads, load = [], mm.load_models_gpu
    monkeypatch.setattr(mm, "load_models_gpu", lambda models, **how: loads.append((models, how)) or load(models, **how))
    sample("NextToken")
    assert any(preview for *_, preview in progress) == (room or measured)
    assert [models for models, _ in loads] == [[tiny[0].patcher]] + [[decoder.patcher]] * room
    assert not room or loads[1][1]["force_full_load"], "a decoder in part would mix devices"


@pytest.mark.parametrize(("cost", "moves"), [(0.0001, 20), (0.002, 5), (0.05, 2)])
def test_the_bar_takes_a_hundredth_of_a_run_and_moves_twice_a_second_at_least(cost, moves, clock, monkeypatch):
    shown = red_and_more(WHOLE, 0.0, clock, None)
    report, moved = Report(4, shown), []
    monkeypatch.setattr(report.bar, "update_absolute", lambda *_: (moved.append(clock.now), clock.passing(cost)()))
    for _ in range(10000):
        clock.now += 0.001
        report(Step())
    assert 0.9 * moves <= len(moved) / 10 <= moves + 0.1
    assert shown.spent == pytest.approx(cost * len(moved)), "the time of the bar is told to the previews"
