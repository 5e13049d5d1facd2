"""What a request counts, refuses and shows of a run, by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from comfyui_specar.samplers.continuous_contract import Canvas, ContinuousParams, masked_guidance, noise_bytes
from comfyui_specar.samplers.contract import SamplingParams, check_grids, check_masks, chosen_params
from comfyui_specar.samplers.layout import TokenLayout
from comfyui_specar.samplers.rng import Stream

from ..support import toy, toy_heads

LAYOUT = TokenLayout.plain(2, 3)
FORCED = torch.tensor([[1, 2, -1, -1, 1, -1]])
KEPT = torch.tensor([[True, False, False, True], [False, False, False, False]])


def discrete(forced=FORCED, batch=2):
    layout = replace(LAYOUT, forced=forced)
    return toy.request(toy.ToyModel(layout), layout, batch=batch)


def continuous(kept=KEPT, **options):
    tokens = torch.zeros(2, 4, 2) if kept is not None else None
    return toy_heads.request(toy_heads.ToyHead(2, (2, 2)), 2, kept=kept, tokens=tokens, **options)


def test_images_force_tokens_of_their_own():
    assert discrete(torch.cat((FORCED, torch.full((1, 6), -1)))).count_sampled(torch.tensor([6, 6])) == 4.5


@pytest.mark.parametrize(("tokens", "length"), [(1, 3), (2, 4), (3, 6), (4, 6), (0, 1)])
def test_the_beginning_of_an_image_has_so_many_tokens_to_sample_in_every_image(tokens, length):
    forced = torch.cat((FORCED, torch.tensor([[-1, -1, 0, 0, 0, -1]])))
    layout = replace(LAYOUT, forced=forced)
    assert torch.equal(layout.beginning(tokens).forced, forced[:, :length])
    assert layout.sampled_tokens == 3 and layout.beginning(9) is layout, "there are no more"
    assert (layout.beginning(tokens).rows, layout.beginning(tokens).cols) == (2, 3)


def test_tokens_of_continuous_models_that_are_sampled_are_those_not_kept():
    committed = torch.tensor([4, 2])
    assert continuous().count_sampled(committed) == 2 and continuous(None).count_sampled(committed) == 3
    assert continuous().length == 4 and continuous().guided == (continuous().params.cfg != 1)


@pytest.mark.parametrize(
    "changed", [{"tokens": torch.full((2, 4, 2), torch.nan)}, {"kept": torch.ones(2, 4) > 0}, {"batch": 0}]
)
def test_kept_tokens_that_cannot_be_meant_are_refused(changed):
    asked = replace(continuous(), **changed)
    with pytest.raises(ValueError, match="kept|keeps|batch"):
        Canvas(asked, Stream.of(0, asked.batch, "cpu"))


@pytest.mark.parametrize("group", [1, 2])
def test_a_model_with_a_fixed_order_keeps_nothing(group):
    asked = continuous()
    asked.model.group, asked.model.order = group, torch.arange(asked.length)
    with pytest.raises(ValueError, match=f"cells of {group} tokens in a fixed order"):
        Canvas(asked, Stream.of(0, 2, "cpu"))


def test_what_is_kept_comes_first_and_stays():
    tokens = torch.arange(1.0, 17).reshape(2, 4, 2)
    tokens[0, 1] = torch.nan  # is not kept, and so is nobody's business
    canvas = Canvas(replace(continuous(), tokens=tokens), Stream.of(0, 2, "cpu"))
    assert canvas.done.tolist() == [2, 0] and canvas.extent() == (0, 2)
    assert sorted(canvas.order[0, :2].tolist()) == [0, 3]
    assert canvas.rank.gather(1, canvas.order).tolist() == [[0, 1, 2, 3]] * 2
    assert canvas.tokens.tolist() == [[[1, 2], [0, 0], [0, 0], [7, 8]], [[0, 0]] * 4]
    assert torch.equal(canvas.known_mask()[:, 0], KEPT)
    assert canvas.known_mask(torch.tensor([0, 1, 2])).sum(-1).tolist() == [[2, 3, 4], [0, 1, 2]]
    positions, exist = canvas.upcoming(3)
    assert exist.tolist() == [[True, True, False], [True, True, True]]
    assert torch.equal(positions[0, :2], canvas.order[0, 2:]) and torch.equal(positions[1], canvas.order[1, :3])
    canvas.write(positions, torch.full((2, 3, 2), 9.0), exist)
    assert (canvas.tokens == 9).all(-1).sum(1).tolist() == [2, 3]
    assert canvas.final_tokens() is not canvas.tokens and torch.equal(canvas.final_tokens(), canvas.tokens)
    canvas.write(positions[:, :1], torch.full((2, 1, 2), torch.inf), exist[:, :1])
    with pytest.raises(ValueError, match="not finite"):
        canvas.final_tokens()


def test_images_may_keep_parts_of_their_own_of_one_image():
    tokens = torch.arange(1.0, 9).reshape(1, 4, 2)
    canvas = Canvas(replace(continuous(), tokens=tokens), Stream.of(0, 2, "cpu"))
    assert canvas.tokens.tolist() == [[[1, 2], [0, 0], [0, 0], [7, 8]], [[0, 0]] * 4]


def test_guidance_of_a_masked_model_is_that_of_the_share_it_knows_after_the_pass_but_never_all():
    params, after = ContinuousParams(cfg=3.0), torch.tensor([0, 1, 3, 4])
    assert masked_guidance(params, after, after, 4).tolist() == [1, 1.5, 2.5, 2.5]
    assert masked_guidance(replace(params, cfg_schedule="constant"), after, after, 4).tolist() == [3] * 4


def test_the_noise_of_a_pass_takes_its_bytes():
    asked = continuous()
    assert noise_bytes(asked, 3) == 40 * 2 * 3 * (asked.params.steps + 1) * 2


def test_grids_fit_the_images():
    fits = torch.zeros(1, 2, 3), torch.zeros(4, 2, 3), None
    for grid in fits:
        check_grids((4, 2, 3), mask=grid)
    for shape in ((2, 2, 3), (4, 3, 2), (4, 2, 3, 1), (1, 2)):
        with pytest.raises(ValueError, match=r"mask.*\[4, 2, 3\]"):
            check_grids((4, 2, 3), mask=torch.zeros(shape))


def test_masks_are_masks():
    tokens = torch.zeros(1, 2, 3)
    mask = tokens > 0
    check_masks(None, None)
    check_masks(torch.tensor([[0, 0.5, 1]], dtype=torch.float64), mask)
    for value in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"strength.*0.* to 1"):
            check_masks(torch.tensor([[0, value, 1]]), None)
    with pytest.raises(ValueError, match=r"skippable.*float32.*torch.bool"):
        check_masks(None, tokens)


def test_chosen_parameters_replace_the_models_own():
    own = SamplingParams(cfg=3.0, top_k=7)
    assert chosen_params(own, {"cfg": None, "top_k": 0, "temperature": 2}, "it") == replace(own, top_k=0, temperature=2)


def test_a_sketch_shows_what_is_decided_and_what_is_guessed():
    asked = discrete(torch.cat((FORCED, torch.full((1, 6), 2))))  # the second image is none of a sketch's business
    asked.model.dequantize = lambda tokens: tokens[:, None].float()
    zeros, two = torch.zeros((2, 6), dtype=torch.int64), torch.tensor([2, 0])
    draft = torch.tensor([[0, 2, 2, 2], [1, 0, 1, 0]])
    zeros[1] = 2
    run = SimpleNamespace(tokens=zeros, committed=torch.tensor([3, 0]), start=None, draft=draft)
    for start, guessed, tokens in ((None, [3, 5], [1, 2, 0, 0, 1, 2]), (two, [2, 3, 5], [1, 2, 0, 2, 1, 2])):
        run.start = start
        sketch = asked.sketch(run)
        known = [n in (0, 1, 4) or n < (3 if start is None else 2) for n in range(6)]
        assert sketch.known.flatten().tolist() == known
        assert sketch.guessed.flatten().nonzero()[:, 0].tolist() == guessed
        assert sketch.latent.flatten().tolist() == tokens
    run.draft = None
    assert not asked.sketch(run).guessed.any()
