"""Continuous sampling at its edges: what is recorded, units, headless inputs, pairs that do not belong together."""

import json
import math
from dataclasses import replace

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.detect import load_drafter, load_model
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError
from comfyui_specar.reports import run_report
from comfyui_specar.samplers.methods.continuous import ContinuousSpeculative
from comfyui_specar.samplers.methods.continuous_next_token import ContinuousNextToken
from safetensors.torch import save_file

from ..support.tiny_mar import MAR, write_mar
from ..support.tiny_masked import CHANNELS, LENGTH, SIDE, prompt, request, tiny

KEPT = (torch.arange(LENGTH) < 4).expand(2, -1)
GRID = KEPT.unflatten(1, (SIDE, SIDE))


@pytest.fixture(scope="module")
def models():
    return tiny(1), tiny(2)


def judged(trace):
    """Effective width of the kernel at every judged token: log ratio = -distance^2 / (2 width^2) for equal widths."""
    drafted = trace.positions["depth"] > 0
    ratio, distance = trace.positions["log_ratio"][drafted], trace.positions["distance"][drafted]
    return (distance.square() / (-2 * ratio)).clamp(min=0).sqrt().median()


def test_the_number_of_passes_is_recorded(models):
    trace = api.sample(models[0], prompt(models[0], 3), ContinuousNextToken(4)).trace
    assert trace.totals["target_passes"] == 4 and trace.settings["iterations"] == 4
    assert "4 iterations" in run_report.drafting(trace.settings)


def test_tokens_sampled_without_seeing_each_other_are_not_called_exact(models):
    model = models[0]
    alone, blind = (api.sample(model, prompt(model, 3), ContinuousNextToken(n)).trace for n in (None, 2))
    assert run_report.exact(alone) and not run_report.exact(blind)


@pytest.mark.parametrize("kind", ["ddpm", "ddim"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_tolerance_is_in_units_of_the_latent_at_any_temperature(models, kind, temperature):
    target, drafter = models
    method = ContinuousSpeculative(drafter, 4, 0, condition="drafts", tolerance=1.0)
    with torch.inference_mode():
        trace = method.sample(request(target, 16, kind=kind, temperature=temperature)).trace
    assert float(judged(trace)) == pytest.approx(1.0, rel=0.05)


def test_a_noiseless_head_needs_no_temperature(models):
    method = ContinuousSpeculative(models[1], 4)
    with torch.inference_mode():
        tokens = [method.sample(request(models[0], kind="ddim", temperature=t)).tokens for t in (0.0, 1.0)]
    assert torch.equal(*tokens)


def test_what_a_run_drew_can_be_kept_by_the_next(models):
    """Output.tokens [B, rows, cols, C] and a mask of the same form."""
    model = models[0]
    drawn = api.sample(model, prompt(model, 3), batch_size=2)
    again = api.sample(model, prompt(model, 3), seed=9, batch_size=2, tokens=drawn.tokens, kept=GRID)
    assert again.tokens.shape == (2, SIDE, SIDE, CHANNELS) and torch.equal(again.tokens[GRID], drawn.tokens[GRID])


@pytest.mark.parametrize(
    ("keep", "word"),
    [({"kept": GRID}, "Give both"), ({"kept": GRID.long(), "tokens": torch.zeros(2, SIDE, SIDE, CHANNELS)}, "bool")],
)
def test_illegal_kept_tokens_are_named(models, keep, word):
    with pytest.raises(ValueError, match=word):
        api.sample(models[0], prompt(models[0], 3), batch_size=2, **keep)


@pytest.mark.parametrize("name", ["cfg", "temperature"])
def test_infinite_parameters_are_named(models, name):
    with pytest.raises(ValueError, match=f"{name}.*inf"):
        api.sample(models[0], prompt(models[0], 3), **{name: math.inf})


def test_a_huge_tolerance_ends_as_an_infinite_one(models):
    for tolerance in (1e300, math.inf):
        trace = api.sample(models[0], prompt(models[0], 3), ContinuousSpeculative(models[1], tolerance=tolerance)).trace
        assert trace.summary()["accepted_drafts"] > 0


def test_a_drafter_with_another_table_of_words_is_refused(tmp_path):
    config = replace(MAR, captions=True, conditions=8)
    for number, (name, words) in enumerate((("own", ["red", "apple"]), ("other", ["sky", "sea"]))):
        (tmp_path / name).mkdir()
        write_mar(tmp_path / name / "model.safetensors", config)
        table = torch.randn(2, 8, generator=torch.Generator().manual_seed(number))
        header = {"words": words, "stop_words": [], "synonyms": {}, "backgrounds": []}
        save_file(
            {"word_embeddings.weight": table},
            tmp_path / name / "text_encoder.safetensors",
            {"specar": json.dumps(header)},
        )
    with pytest.raises(CheckpointError, match="text_encoder.safetensors"):
        load_drafter(tmp_path / "other", load_model(tmp_path / "own"))


@pytest.mark.parametrize("scale", [0, -1, math.nan, "large"])
def test_an_illegal_scale_is_refused(tmp_path, scale):
    with pytest.raises(CheckpointError, match="scale"):
        load_model(write_mar(tmp_path / "model.safetensors", scale=scale))
