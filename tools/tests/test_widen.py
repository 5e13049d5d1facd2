"""A widened model is the bundled one at another cost: the same distributions, tokens and acceptance."""

from dataclasses import replace

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.samplers.layout import TokenLayout
from comfyui_specar.tools.benchmarks import sizes, subjects
from comfyui_specar.tools.benchmarks.passes import Stretch
from comfyui_specar.tools.benchmarks.widen import config_of

CPU = torch.device("cpu")
ROWS = TokenLayout.plain(2, 16)  # an image's first tokens
METHODS = ("next_token", "sjd coupled w16", "sjd gumbel w32", "chain of 5", "chain of 5, small model", "EAGLE-2")


@pytest.fixture(scope="module")
def pair():
    """The bundled model, and the same with more channels, heads, columns and layers, as subjects."""
    own = subjects.subject("default", 2.0, CPU, torch.float32)
    config = own.model.backbone.config
    # A whole multiple of the width, which a small model needs; heads of another width than the bundled model's.
    shapes = replace(
        config, dim=2 * config.dim, heads=config.heads, layers=config.layers + 1, ffn_dim=2 * config.ffn_dim + 64
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sizes.SIZES, "wide", replace(sizes.SIZES["llamagen-b"], config=shapes))
        return own, subjects.subject("default@wide", 2.0, CPU, torch.float32)


def test_the_widened_model_has_the_larger_shapes(pair):
    own, wide = (case.model.backbone.config for case in pair)
    assert (wide.dim, wide.layers, wide.head_dim) == (2 * own.dim, own.layers + 1, own.head_dim)
    assert pair[1].eagle.module.config.dim == wide.dim
    assert pair[1].small.module.backbone.config.dim == 2 * pair[0].small.module.backbone.config.dim
    assert all(any(weight.any() for weight in layer.parameters()) for layer in pair[1].model.backbone.layers)


def test_every_distribution_is_the_same(pair):
    seen = {}
    for case in pair:
        logits, step = [], case.model.step
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                case.model, "step", lambda *given, s=step, x=logits, **named: x.append(s(*given, **named)) or x[-1]
            )
            api.sample(case.model, case.conditioning, api.methods.NextToken(), cfg=2.0, seed=3, layout=ROWS)
        seen[case.name] = torch.cat([out.logits.flatten(0, 1) for out in logits]).log_softmax(-1)
    narrow, wide = seen.values()
    assert len(narrow) == len(wide) > ROWS.length
    # Sums over more channels are rounded differently; the distributions agree to 1e-5.
    assert (narrow.exp() - wide.exp()).abs().max() < 1e-5


@pytest.mark.parametrize("name", METHODS)
def test_every_method_generates_the_same_tokens_in_the_same_passes(pair, name):
    found = []
    for case in pair:
        run = case.sampler(name, Stretch(ROWS, 0, ROWS.length))
        out = run.output(5)
        found.append((out.tokens, out.trace.totals["target_passes"], out.trace.totals["draft_passes"]))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1:] == found[1][1:]


def test_shapes_that_are_smaller_or_split_a_head_are_refused(pair):
    own = pair[0].model.backbone.config
    for sizes_of in ({"layers": own.layers - 1}, {"ffn_dim": own.ffn_dim - 1}, {"dim": own.dim + 1}):
        with pytest.raises(ValueError, match="it can be widened"):
            config_of(replace(own, **sizes_of), own)
