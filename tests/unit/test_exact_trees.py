"""Do draft trees leave the model's distribution alone? Toy models again, with a toy drafter: every image is enumerated.

As in test_exact_distributions, one large batch is many single runs, each at its own pace.
"""

from dataclasses import replace

import pytest
import torch
from comfyui_specar.samplers.contract import SamplingParams
from comfyui_specar.samplers.drafts.adt_tree import ADTTree
from comfyui_specar.samplers.drafts.auto import Auto
from comfyui_specar.samplers.drafts.costs import PassCosts
from comfyui_specar.samplers.drafts.structures import Chain, Dynamic, Static
from comfyui_specar.samplers.methods.speculative import DraftTree
from comfyui_specar.samplers.rules.acceptance import Exact
from comfyui_specar.samplers.trace import Source

from ..support import enumerated
from ..support.enumerated import LAYOUTS, MODELS, assert_exact, distance
from ..support.rules import RELAXED
from ..support.toy import ToyDrafter, request

RUNS = 10_000
DRAFTERS = {name: ToyDrafter(model) for name, model in MODELS.items()}
SMALL = {"depths": (1, 4), "widths": (1, 3), "width_step": 1, "first": (2, 2), "nodes": 12}
TWO_LEVELS = Static(((0,), (1,), (0, 0), (0, 1), (1, 0)))


def costs(slope):
    """Of a machine on which every token of a pass costs ``slope`` times the first."""
    return PassCosts(((1, 1.0), (65, 1 + 64 * slope)), 0.1, ((1, 0.1), (64, 0.1)))


STRUCTURES = {
    "chain of one": Chain(1),
    "chain": Chain(3),
    "blocks": Chain(3, "block"),
    "long blocks": Chain(8, "block"),
    "siblings": Static(((0,), (1,), (2,))),
    "two levels": TWO_LEVELS,
    "eagle_25": Static("eagle_25"),
    "top-k lookup": Dynamic(1, 2, 2),
    "top-k": Dynamic(3, 2, 5),
    "top-k, wide": Dynamic(3, 10, 58),
    "auto, free drafts": Auto(costs=costs(0)),
    "auto": Auto(costs=costs(0.1)),
    "auto, dear drafts": Auto(costs=costs(0.5)),
    "auto, no drafts": Auto(costs=costs(5)),
    "adaptive": ADTTree(**SMALL),
    "adaptive, any shape": ADTTree(initial="random", **SMALL),
}


def draw(structure, name, params=None, batch=RUNS, **more):
    return enumerated.draw(DraftTree(DRAFTERS[name], structure, **more), name, params, batch=batch)


@pytest.mark.parametrize("name", ["row", "line_ends", "kept"])
@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
def test_every_structure_samples_from_the_distribution(structure, name):
    assert_exact(draw(structure, name).tokens, name)


@pytest.mark.parametrize(
    "structure", [Chain(2), Chain(3, "block"), TWO_LEVELS, Dynamic(2, 2, 4), Auto(costs=costs(0.1))], ids=str
)
def test_guidance_temperature_and_filters_are_part_of_the_distribution(structure):
    for name, params in (
        ("line_ends", SamplingParams(cfg=2.5, temperature=1.3, top_p=0.85)),
        ("row", SamplingParams(cfg=1.5, temperature=0.9, top_k=2)),
    ):
        assert_exact(draw(structure, name, params).tokens, name, params)


class SortedSiblings(Static):
    """Tests siblings in the order of their probability instead of the order they were sampled: biased."""

    def grow(self, work, root, plan, extent, round_index):
        tree = super().grow(work, root, plan, extent, round_index)
        drafts = tree.probability[:, 1:] * tree.exists[:, 1:]
        rank = (-drafts).argsort(1).argsort(1)  # all are children of the root
        return replace(tree, rank=torch.cat((tree.rank[:, :1], rank), dim=1), fixed_children=None)


class LikeliestAsDrawn(Dynamic):
    """Treats the likeliest tokens as samples from q: biased."""

    def grow(self, work, root, plan, extent, round_index):
        tree = super().grow(work, root, plan, extent, round_index)
        distribution = work.probs(root.out.logits, work.forced_ids(root.committed[:, None]), 0)
        return replace(tree, draft_probs=distribution, draft_row=torch.zeros(tree.token.shape[1], dtype=torch.int64))


@pytest.mark.parametrize("broken", [SortedSiblings(((0,), (1,), (2,))), LikeliestAsDrawn(1, 2, 2)], ids=str)
def test_broken_trees_are_caught(broken):
    assert distance(draw(broken, "row").tokens, "row").z > 8


def test_a_residual_of_unnormalised_distributions_is_caught():
    """The classic mistake: after a rejection, Q without the rejected token but not renormalised."""

    class Unnormalised(Exact):
        def residual(self, p, q, token, depth, strength):
            return super().residual(p, q * 0.7, token, depth, strength)

    assert distance(draw(Static(((0,), (1,), (2,))), "row", rule=Unnormalised()).tokens, "row").z > 8


def test_the_target_as_its_own_drafter_is_always_accepted():
    perfect = ToyDrafter(MODELS["row"], noise=0)
    for structure in (Chain(5), Chain(5, "block"), Static(((0,), (1,), (0, 0)))):
        decoded = DraftTree(perfect, structure).sample(request(MODELS["row"], LAYOUTS["row"][0], batch=200))
        sources = decoded.trace.positions["source"]
        assert not (sources == Source.RESIDUAL).any() and (decoded.trace.positions["rank"] == 0).all()


def test_blocks_accept_no_less_than_tokens():
    """Sun et al., theorem 2: on average over many images."""
    passes = {}
    for verification in ("token", "block"):
        trace = draw(Chain(4, verification), "row", batch=20_000).trace
        passes[verification] = sum(trace.totals["passes_per_image"]) / 20_000
    assert passes["block"] < passes["token"]


@pytest.mark.parametrize("rule", RELAXED, ids=str)
@pytest.mark.parametrize("structure", [Chain(3), TWO_LEVELS, Dynamic(2, 2, 4)], ids=str)
def test_relaxed_rules_keep_their_bound_and_accept_more(structure, rule):
    """The distance from the distribution is at most the mean of the trace's drift bounds."""
    relaxed, exact = draw(structure, "row", rule=rule), draw(structure, "row")
    noise = distance(exact.tokens, "row").tv
    drift_bound = relaxed.trace.positions["drift_bound"].sum(1)
    bound = float(drift_bound.mean() + 4 * drift_bound.std() / RUNS**0.5)
    assert distance(relaxed.tokens, "row").tv <= bound + noise
    assert sum(relaxed.trace.totals["passes_per_image"]) < sum(exact.trace.totals["passes_per_image"])
    sources = relaxed.trace.positions["source"]
    assert (sources == Source.RELAXED).any() and not (exact.trace.positions["source"] == Source.RELAXED).any()
    assert float(exact.trace.positions["drift_bound"].sum()) == 0
