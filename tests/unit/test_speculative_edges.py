"""The corners of speculative decoding: absurd sizes, temperature 0, stops, random numbers."""

from dataclasses import replace

import pytest
import torch
from comfyui_specar.kernels import verification as kernels
from comfyui_specar.models.networks.cache import KVCache
from comfyui_specar.samplers.contract import Request, SamplingParams
from comfyui_specar.samplers.drafts.adt_tree import ADTTree
from comfyui_specar.samplers.drafts.structures import Chain, Dynamic, Static
from comfyui_specar.samplers.layout import TokenLayout
from comfyui_specar.samplers.methods.skipping import Skipping
from comfyui_specar.samplers.methods.speculative import DraftTree
from comfyui_specar.samplers.methods.vvs import VVS
from comfyui_specar.samplers.rng import Stream
from comfyui_specar.samplers.rules.cool_sd import CoolSD, UniformRSD
from comfyui_specar.samplers.rules.lantern import Lantern
from comfyui_specar.samplers.rules.tv_budget import TVMetered
from comfyui_specar.samplers.trace import Source

from ..support.rules import RELAXED
from ..support.tiny import CAPTION, caption_features, fill
from ..support.toy import ToyDrafter, ToyModel, chi_square, draft_tree, plain, request

SMALL = {"depths": (1, 4), "widths": (1, 3), "width_step": 1, "first": (2, 2), "nodes": 12}
STRUCTURES = {
    "chain": Chain(3),
    "blocks": Chain(3, "block"),
    "static": Static("eagle_25"),
    "dynamic": Dynamic(3, 2, 5),
    "adaptive": ADTTree(**SMALL),
}
ABSURD = {
    "longest chain": Chain(64),
    "longest block": Chain(64, "block"),
    "one draft": Dynamic(32, 64, 1),
    "everything": Dynamic(8, 64, 1024),
    "deep": Dynamic(32, 1, 1024),
    "all siblings": Static(tuple((i,) for i in range(64))),
    "spine": Static(tuple((0,) * n for n in range(1, 30))),
    "adaptive": ADTTree(depths=(1, 32), widths=(1, 64), first=(32, 64), nodes=1024),
    "adaptive, any": ADTTree("random", depths=(1, 8), widths=(1, 64), depth_step=32, width_step=64, nodes=64),
}
SKIPS = {
    "always": None,
    "uniform": Skipping(interval=2, guard=0),
    "stale": Skipping("dynamic", threshold=0.0, guard=0, truncate=False, refresh=False),
}
RULES = [*RELAXED, Lantern(2, 0.9), UniformRSD(5.0), CoolSD(3.0, floor=False), TVMetered(1.0)]


def methods(toy, structures=STRUCTURES, rules=()):
    """Every structure with every schedule, and with every relaxed rule."""
    for structure in structures.values():
        for skipping in SKIPS.values():
            yield draft_tree(ToyDrafter(toy, stale=skipping is not None), structure, skipping=skipping)
        for rule in () if structure.block else rules:
            yield DraftTree(ToyDrafter(toy), structure, rule)


@pytest.mark.parametrize("name", ABSURD)
def test_absurd_sizes_sample_whole_images_from_the_distribution(name):
    layout = plain(1, 3)
    toy = ToyModel(layout)
    method = DraftTree(ToyDrafter(toy), ABSURD[name])
    decoded = method.sample(request(toy, layout, batch=500))
    assert chi_square(decoded.tokens, toy.distribution(layout, SamplingParams())).z < 4
    assert decoded.trace.rounds["depth"].max() <= 2


def test_greedy_trees_have_siblings():
    """EAGLE's trees branch at temperature 0 as well: second-best guesses save passes there, too."""
    layout, params = plain(2, 3), SamplingParams(temperature=0)
    toy = ToyModel(layout)
    for structure in (Static("eagle_25"), Dynamic(3, 2, 5)):
        trace = DraftTree(ToyDrafter(toy), structure).sample(request(toy, layout, params)).trace
        assert trace.positions["tree_width"].max() > 1, structure


@pytest.mark.parametrize(
    "structures",
    [
        {"chain": Chain(3), "blocks": Chain(4, "block"), "static": Static("lantern_57")},
        {"dynamic": Dynamic(3, 3, 9), "adaptive": ADTTree("random", **SMALL)},
    ],
    ids=["sampled children", "most likely children"],
)
def test_no_random_number_is_used_twice(structures, monkeypatch):
    """Uniform numbers are distinguished by their values (2^24 are possible), noise by its place in the stream."""
    asked, layout = [], plain(3, 3)
    uniform, gumbel = Stream.uniform, Stream.gumbel

    def uniform_noted(self, *given):
        numbers = uniform(self, *given)
        asked.extend(numbers.flatten().tolist())
        return numbers

    def gumbel_noted(self, positions, vocab, purpose, draw=0):
        numbers = (torch.zeros_like(positions[0]) + draw).flatten().tolist()
        asked.extend((at, int(purpose), number) for at, number in zip(positions[0].tolist(), numbers, strict=True))
        return gumbel(self, positions, vocab, purpose, draw)

    def noted(verify, *places):
        def call(*given):
            asked.extend(number for place in places for number in given[place].flatten().tolist())
            return verify(*given)

        return call

    monkeypatch.setattr(Stream, "uniform", uniform_noted)
    monkeypatch.setattr(Stream, "gumbel", gumbel_noted)
    where = {"recursive_rejection_sampling": (5, 6), "sample_and_match": (4,), "block": (4, 5)}  # they take theirs
    for name, places in where.items():
        monkeypatch.setattr(kernels, name, noted(getattr(kernels, name), *places))
    toy = ToyModel(layout, memory=2)
    for method in methods(toy, structures, [UniformRSD(2.0)]):
        asked.clear()
        method.sample(request(toy, layout))
        assert len(asked) == len(set(asked)) > 9
        assert max((number[2] for number in asked if isinstance(number, tuple)), default=0) < 2**32


def test_a_stopped_run_leaves_nothing_in_memory():
    layout = plain(2, 3)
    toy = ToyModel(layout)

    def stopping(progress):
        raise KeyboardInterrupt

    for method in methods(toy, rules=[Lantern(2, 0.3)]):
        asked = request(toy, layout, batch=2)
        before = method.sample(asked)
        with pytest.raises(KeyboardInterrupt):
            method.sample(replace(asked, callback=stopping))
        after = method.sample(asked)
        assert torch.equal(before.tokens, after.tokens)
        assert before.trace.totals["draft_passes"] == after.trace.totals["draft_passes"]


@torch.inference_mode()
@pytest.mark.parametrize("skips", SKIPS)
def test_caches_hold_whatever_is_fed(text_model, text_drafters, skips, monkeypatch):
    """No slot of a pass lies past the end of a cache: slots that did would be folded onto the last one."""
    furthest, opened = [], KVCache.open

    def measured(self, count, tree_mask=None, uncommitted=0):
        furthest.append(self.capacity - (int(self.lengths.max()) + uncommitted + count))
        return opened(self, count, tree_mask, uncommitted)

    monkeypatch.setattr(KVCache, "open", measured)
    sizes = {
        "blocks": Chain(20, "block"),
        "static": Static("eagle_25"),
        "dynamic": Dynamic(5, 8, 12),
        "adaptive": ADTTree("random", depths=(1, 5), widths=(1, 8), nodes=10),
    }
    prompts = caption_features(), fill("negative embedding", (1, 3, CAPTION))
    prompt, negative = (text_model.encode_features(features) for features in prompts)
    asked = Request(text_model, prompt, text_model.layout(), SamplingParams(2.0, top_k=12), negative, batch=3)
    for name, structure in sizes.items():
        for drafter in text_drafters.values():
            text_model.sessions.clear()
            draft_tree(drafter, structure, skipping=SKIPS[skips]).sample(asked)
            assert min(furthest) >= 0, name


def test_siblings_of_a_certain_draft_are_judged_by_their_own_distribution():
    """The drafter all but rules out what it samples second: exp(-80) is far above zero in fp32, and what it is."""
    layout = plain(1, 2)
    toy = ToyModel(layout)
    drafter = ToyDrafter(toy)
    for table in toy.tables:
        table[:] = torch.tensor([0.2, 0.4, 0.4]).log()
    for table in drafter.model.tables:
        table[:] = torch.tensor([0.0, -80, -84])
    for structure in (Static(((0,), (1,))), Static(((0,), (1,), (2,)))):
        tokens = DraftTree(drafter, structure).sample(request(toy, layout, batch=3000)).tokens
        assert chi_square(tokens, toy.distribution(layout, SamplingParams())).z < 4


@pytest.mark.parametrize("rule", [*RULES, TVMetered(0.05)], ids=str)
def test_rules_stand_the_smallest_probabilities(rule):
    """A token whose p is denormal in fp32 (1e-42), as guidance and low temperatures make them."""
    layout = plain(1, 2)
    toy = ToyModel(layout)
    p = torch.tensor([0.0, -0.5, -95]).softmax(-1).expand(3, -1)
    q = torch.tensor([0.2, 0.3, 0.5]).expand(3, -1)
    token, one = torch.arange(3), torch.ones(3)
    rule, given = rule.bind(toy), (p, q, token, token * 0 + 1, one)
    f, probs = rule.accept_probability(*given), rule.residual(*given)[0]
    assert ((f >= 0) & (f <= 1)).all()
    kept = q[0] * f
    drawn = kept + (1 - kept.sum()) * probs / probs.sum()
    assert (drawn - p[0]).clamp(min=0).sum() <= (rule.drift_bound(*given) * q[0]).sum() + 1e-6


# What the trace says.


def test_drafts_that_nobody_tested_were_not_refused():
    layout = plain(2, 3)
    toy = ToyModel(layout)
    drafter, skipping = ToyDrafter(toy, noise=0, stale=True), Skipping(interval=2, guard=0)
    method = VVS(drafter, Static(((0,), (1,), (2,))), skipping=skipping)
    summary = method.sample(request(toy, layout, batch=20)).trace.summary()
    assert summary["sources"]["skipped"] and "residual" not in summary["sources"]
    assert summary["acceptance_rate"] == 1


def test_a_refused_likely_child_keeps_its_own_ratio():
    """The ratio at a resampled token is that of the draft tested there, not of the token sampled in its place."""
    layout = TokenLayout.plain(1, 4)
    toy = ToyModel(layout)
    trace = DraftTree(ToyDrafter(toy), Dynamic(1, 1, 1)).sample(request(toy, layout, batch=200)).trace
    resampled = trace.positions["source"] == Source.RESIDUAL
    p, ratio, q = (trace.positions[name][resampled] for name in ("p", "ratio", "q"))
    assert (q == 1).all() and not torch.equal(p, ratio)
