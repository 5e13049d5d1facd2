"""Prefix tokens, those given at the beginning of an image, are read with the prompt, by models and drafters. (That the
distribution of what follows is not touched: layouts with kept tokens in test_exact_distributions and test_exact_trees.)
"""

from dataclasses import replace

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.detect import load_drafter
from comfyui_specar.samplers.engine import prefix_tokens
from comfyui_specar.samplers.engine.prefix_tokens import read_prefix
from comfyui_specar.samplers.layout import TokenLayout
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken

from ..support.closeness import fp64
from ..support.tiny import CAPTION, caption_features, fill, llamagen, write_eagle, write_llamagen
from ..support.toy import ToyModel, plain, request, with_line_ends

CASES = {"row": (plain(2, 3), 0), "line_ends": (with_line_ends(2, 2), 2)}
MODELS = {name: ToyModel(layout, specials) for name, (layout, specials) in CASES.items()}


def begun(layout: TokenLayout, *tokens: int) -> TokenLayout:
    """The layout with its first tokens given: some of all images, or [B, n] each image's own (-1: not given)."""
    given = torch.tensor(tokens)
    given = given[None] if given.ndim == 1 else given
    forced = layout.forced.expand(len(given), -1).clone()
    forced[:, : given.shape[1]] = torch.where(given >= 0, given, forced[:, : given.shape[1]])
    return replace(layout, forced=forced)


@pytest.mark.parametrize("method", [NextToken(), SJD(3, "gumbel")], ids=str)
@pytest.mark.parametrize("chunk", [2, 256])
def test_fixed_noise_gives_what_reading_one_by_one_would(method, chunk, monkeypatch):
    """The image whose beginning is given back is generated again, in chunks of any size and at any place."""
    for name, (free, _) in CASES.items():
        asked = request(MODELS[name], free, seed=3, batch=50)
        whole = NextToken().sample(asked).tokens
        monkeypatch.setattr(prefix_tokens, "CHUNK", chunk)
        for count in range(free.length + 1):
            again = method.sample(replace(asked, layout=begun(free, *whole[:, :count].tolist()) if count else free))
            assert torch.equal(again.tokens, whole), count
            assert method != NextToken() or again.trace.totals["target_passes"] == max(
                int(free.end) - count - int(name == "line_ends" and count == 2), 1
            )  # a row's end comes for free


@pytest.mark.parametrize("method", [NextToken(), SJD(3, "gumbel")], ids=str)
def test_an_image_whose_end_is_given_takes_no_passes_for_it(method):
    free, total = plain(2, 3), 6
    asked = request(MODELS["row"], free, seed=3, batch=50)
    whole = method.sample(asked)
    for sampled in range(1, total):
        given = (torch.arange(total) >= sampled).view(2, 3).expand(50, 2, 3)
        layout = free.keeping(whole.tokens.view(50, 2, 3), given)
        again = method.sample(replace(asked, layout=layout))
        assert torch.equal(again.tokens, whole.tokens)
        passes = whole.trace.positions["finalised_at"][:, sampled - 1].long() + 1
        assert again.trace.totals["passes_per_image"] == passes.tolist()
        assert again.trace.totals["prefix_tokens"] == 50 * (total - sampled)


def test_a_pass_reaches_as_far_as_the_image_of_which_most_is_decided():
    """The model refuses a shorter reach."""
    layout = begun(plain(2, 3), [2, 0, 1, 1, 0], [-1] * 5)
    for method in (NextToken(), SJD(2)):
        tokens = method.sample(request(MODELS["row"], layout, batch=2)).tokens
        assert tokens[0, :5].tolist() == [2, 0, 1, 1, 0]


# A tiny backbone with caches, and drafters of both kinds


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(folder):
    return llamagen(folder, text=True)


def test_real_caches_hold_what_was_given(model, monkeypatch):
    """Next-token and Gumbel images are given back from any row of theirs on; one branch has a longer prompt."""
    prompt, negative = model.encode_features(caption_features(7)), model.encode_features(fill("no", (1, 3, CAPTION)))
    monkeypatch.setattr(prefix_tokens, "CHUNK", 5)
    options = {"negative": negative, "cfg": 2.0, "top_k": 12, "batch_size": 2, "seed": 9}
    whole = api.sample(model, prompt, NextToken(), **options).tokens
    keep = torch.zeros_like(whole, dtype=torch.bool)
    for rows in (1, 2, 3):
        keep[:, :rows] = True
        for method in (NextToken(), SJD(5, "gumbel")):
            layout = model.layout().keeping(whole, keep)
            assert torch.equal(api.sample(model, prompt, method, layout=layout, **options).tokens, whole)


def test_reading_what_was_given_can_be_interrupted(model, monkeypatch):
    monkeypatch.setattr(prefix_tokens, "CHUNK", 2)
    layout, seen = begun(model.layout(), 3, 1, 4, 1, 5), []

    class StopError(Exception):
        pass

    def stop(progress):
        seen.append((progress.committed.tolist(), progress.tokens[0, :4].tolist(), progress.passes))
        if len(seen) == 2:
            raise StopError

    for method in (NextToken(), SJD(5)):
        seen.clear()
        with pytest.raises(StopError):
            api.sample(model, model.encode_features(caption_features(7)), method, layout=layout, callback=stop)
        assert seen == [([2], [3, 1, 4, 1], 0), ([4], [3, 1, 4, 1], 0)]


@pytest.mark.parametrize("kind", ["eagle", "same model"])
def test_drafters_know_what_was_given(model, folder, kind, monkeypatch):
    """Read in one go or token by token, a drafter predicts the same after it."""
    path = (
        write_eagle(folder / kind, input_type=None, prompt="padded")
        if kind == "eagle"
        else write_llamagen(folder / "small.safetensors", True)
    )
    drafter, layout = load_drafter(path, model), begun(model.layout(), 3, 1, 4, 1, 5, 9, 2)
    prompt, found = model.encode_features(caption_features(7)), []
    for chunk in (7, 3, 1):
        monkeypatch.setattr(prefix_tokens, "CHUNK", chunk)
        with torch.inference_mode(), fp64():
            target = model.start(prompt, None, 2, layout, slack=9, guided=True)
            state = drafter.start(target, prompt, None, 2, layout, slack=9, guided=True)
            start = read_prefix(model, target, layout, 2, drafter, state)
            token = torch.full((2, 1), 6)
            out = drafter.observe(state, token, token * 0 + 7, start.out.hidden, torch.ones(2, dtype=torch.int64))
        assert start.prefix_length.tolist() == start.committed.tolist() == [7, 7]
        found.append((start.out.logits, start.out.hidden, out.logits, out.hidden))
    for one in found[1:]:
        for a, b in zip(found[0], one, strict=True):
            torch.testing.assert_close(a, b)
