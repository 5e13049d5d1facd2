"""Verification: the Triton kernels decide as the torch references do, draft by draft."""

from dataclasses import fields

import pytest
import torch
from comfyui_specar.device.graphs import leaves
from comfyui_specar.kernels import verification
from comfyui_specar.samplers import trace
from comfyui_specar.samplers.drafts.trees import Tree
from comfyui_specar.samplers.rules.acceptance import Exact
from comfyui_specar.samplers.rules.cool_sd import CoolSD, UniformRSD
from comfyui_specar.samplers.rules.lantern import Lantern, LanternPP

from ..support.random_trees import random_tree, tree_of_paths
from ..support.triton_kernels import agrees

ENDS = (0.0, 1 - 2**-12)


def rows(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Random distributions, one in three with few tokens, one in six with a single one."""
    probs = (torch.randn(shape, generator=generator) * 2).softmax(-1)
    kind = torch.rand(shape[:-1], generator=generator).unsqueeze(-1)
    probs = torch.where((kind < 1 / 3) & (torch.rand(shape, generator=generator) < 0.6), 0.0, probs)
    probs = torch.where(kind < 1 / 6, torch.zeros_like(probs).scatter(-1, probs.argmax(-1, keepdim=True), 1.0), probs)
    return probs / probs.sum(-1, keepdim=True)


def uniforms(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Random numbers, one in four at an end."""
    u = rand(generator, *shape)
    return torch.where(u < 0.1, ENDS[0], torch.where(u > 0.85, ENDS[1], u))


def rand(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=generator)


def sampled(tree: Tree, vocab: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """(token, draft_probs, draft_row): siblings that differ and have mass, as when sampling without replacement."""
    draft_probs = (torch.randn((len(tree.token), tree.token.shape[1], vocab), generator=generator) * 2).softmax(-1)
    order = draft_probs.argsort(-1, descending=True)
    batch = torch.arange(len(tree.token))[:, None]
    return order[batch, tree.parent, tree.rank], draft_probs, torch.arange(tree.token.shape[1])


def neighbours(vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand((vocab - 2, vocab - 2), generator=generator).argsort(1)[:, :4].to(torch.int32)  # two specials


def test_sources_are_those_of_the_trace():
    names = "ACCEPTED", "RELAXED", "RESIDUAL", "BONUS"
    assert all(getattr(verification, name) == getattr(trace.Source, name) for name in names)


@pytest.mark.parametrize("vocab, batch, seed", [(8, 3, 0), (8, 2, 1), (2500, 2, 2)])
def test_windows_are_decided_alike(vocab, batch, seed):
    """Draft distributions are in a ring buffer; some drafts do not exist, and some are sampled from p itself."""
    generator = torch.Generator().manual_seed(seed)
    count, ring = 4, 6
    p, draft_probs = rows(generator, batch, count, vocab), rows(generator, batch, ring, vocab)
    slot = torch.stack([torch.randperm(ring, generator=generator)[:count] for _ in range(batch)])
    token = draft_probs[torch.arange(batch)[:, None], slot].argmax(-1)
    p[0, 0] = draft_probs[0, slot[0, 0]]  # nothing is left of p where the draft is refused
    exists = torch.arange(count) < torch.tensor([count, 1, 0])[:batch, None]
    position = slot + ring * torch.randint(0, 9, slot.shape, generator=generator)
    u, v = uniforms(generator, batch, count), uniforms(generator, batch, count)
    given = p, draft_probs, position, token, exists, u, v
    agrees("verification.maximal_coupling", *given, rtol=0, atol=0)


@pytest.mark.parametrize("sampling", [True, False], ids=["sampled", "certain"])
@pytest.mark.parametrize("rule", [Exact(), UniformRSD(2.5), CoolSD(4.0), Lantern(4, 0.4), LanternPP(3, 4.0)], ids=str)
def test_trees_are_decided_alike(rule, sampling):
    vocab = 9
    if not isinstance(rule, (Exact, UniformRSD, CoolSD)):
        rule = type(rule)(**{f.name: getattr(rule, f.name) for f in fields(rule)} | {"table": neighbours(vocab)})
    seen = set()
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        tree = random_tree(seed, batch=5, drafts=9, vocab=vocab)
        token, draft_probs, draft_row = sampled(tree, vocab, generator)
        batch, slots = token.shape
        share = torch.rand((batch, slots, 1), generator=generator)
        p = share * rows(generator, batch, slots, vocab) + (1 - share) * draft_probs
        p[:, ::4] = draft_probs[:, ::4]  # every draft is accepted there, unless one before it was refused
        u = (uniforms if seed == 0 else rand)(generator, batch, tree.levels, tree.width)
        strength = torch.rand((batch, tree.levels + 1), generator=generator)
        given = (
            p,
            token,
            tree.children(),
            draft_probs if sampling else None,
            draft_row if sampling else None,
            u,
            uniforms(generator, batch, tree.levels + 1),
            strength,
            rule,
        )
        found = agrees("verification.rejection_sampling", *given, rtol=1e-4)
        seen |= set(found.source.flatten().tolist())
    assert {verification.ACCEPTED, verification.RESIDUAL, verification.BONUS} <= seen
    assert (verification.RELAXED in seen) == (not isinstance(rule, Exact))


def test_masses_that_underflow_are_decided_alike():
    """Distributions of one token, of which nothing is left, and drafts of a mass that division must not make NaN."""
    tree = tree_of_paths(1, 1, 1, 2)
    p = torch.tensor([1e-30, 1 - 1e-6, 1e-6, 0.0]).expand(1, 6, -1).clone()
    p[:, 4] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    draft_probs = torch.tensor([[[1e-30, 1.0, 1e-38, 0.0], [0.0, 0.0, 1.0, 0.0]]])
    token, draft_row = torch.tensor([[0, 1, 0, 2, 3, 2]]), torch.tensor([0, 1, 1, 1, 1, 1])
    for u in (0.0, 0.4, ENDS[1]):
        numbers = torch.full((1, tree.levels, tree.width), u), torch.full((1, tree.levels + 1), u)
        given = p, token, tree.children(), draft_probs, draft_row, *numbers, torch.ones(1, 3), Exact()
        agrees("verification.rejection_sampling", *given, rtol=1e-4)


def test_likeliest_children_are_matched_alike():
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        vocab = 8 if seed else 2500
        tree = random_tree(seed, drafts=9, vocab=vocab)
        token, draft_probs, _ = sampled(tree, vocab, generator)
        given = draft_probs, token, tree.children(), tree.levels, uniforms(generator, *token.shape)
        agrees("verification.sample_and_match_rows", *given, rtol=1e-4)


def test_the_drift_of_all_siblings_tested_is_recorded():
    """min(1, 1.5 p) of two certain drafts: 0.75 and, of what is left of p, 0.9; at u = 0.8 the second is accepted."""
    p, tree = torch.tensor([[[0.5, 0.3, 0.2]] * 3]), tree_of_paths(1, 1)
    token, u = torch.tensor([[2, 0, 1]]), torch.full((1, 1, 2), 0.8)
    given = p, token, tree.children(), None, None, u, torch.zeros(1, 2), torch.ones(1, 2), UniformRSD(1.5)
    found = verification.rejection_sampling(*given)
    assert found.accepted.tolist() == [1] and found.rank[0, 0] == 1
    assert float(found.drift_bound[0, 0]) == pytest.approx(0.75 - 0.5 + 0.9 - 0.6)
    assert float(found.ratio[0, 0]) == pytest.approx(0.6) and not found.drift_bound[0, 1]


def test_where_no_child_is_the_sample_the_last_one_is_recorded():
    p, tree = torch.tensor([[[0.1, 0.2, 0.3, 0.4]] * 4]), tree_of_paths(1, 1, 1)
    for u, rank in ((0.95, 2), (0.05, 0), (0.5, 2)):  # the samples are 3, which is no child, 0 and 2
        found = verification.sample_and_match_rows(
            p, torch.tensor([[3, 0, 1, 2]]), tree.children(), tree.levels, torch.full((1, 4), u)
        )
        assert int(found.rank[0, 0]) == rank
        assert float(found.ratio[0, 0]) == pytest.approx(float(p[0, 0, rank]))
        assert int(found.source[0, 0]) == (verification.RESIDUAL if u > 0.9 else verification.ACCEPTED)


def test_the_draft_that_ends_a_block_is_recorded_and_none_after_it():
    """The target never takes the second of three drafts."""
    p, draft_probs = torch.tensor([[[0.5, 0.5, 0.0]] * 4]), torch.tensor([[[0.5, 0.0, 0.5]] * 3])
    token = torch.tensor([[0, 0, 2, 0]])
    found = verification.block(p, draft_probs, token, token >= 0, torch.full((1, 3), 0.5), torch.zeros(1, 4))
    assert found.accepted.tolist() == [1]
    wanted = verification.ACCEPTED, verification.RESIDUAL, verification.BONUS, verification.BONUS
    assert found.source.tolist() == [list(wanted)]
    assert found.q.tolist() == [[0.5, 0.5, 0, 0]] and found.ratio.tolist() == [[1, 0, 0, 0]]


def test_after_the_last_draft_of_a_block_nothing_is_left_out_of_the_target():
    """The second draft does not exist, so that what its column says of a drafter means nothing."""
    p, draft_probs = torch.tensor([[[0.5, 0.5]] * 3]), torch.tensor([[[0.5, 0.5], [1.0, 0.0]]])
    exists = torch.tensor([[True, True, False]])
    found = verification.block(p, draft_probs, torch.zeros(1, 3).long(), exists, torch.zeros(1, 2), torch.zeros(1, 3))
    assert found.accepted.tolist() == [1] and found.token[0, :2].tolist() == [0, 0]


def test_probabilities_can_be_asked_for_one_by_one():
    """Slot by slot, as the CPU does, the same is decided, and no more than the path is asked for."""
    tree, vocab = random_tree(5, batch=1, vocab=9), 9
    generator = torch.Generator().manual_seed(5)
    token, draft_probs, draft_row = sampled(tree, vocab, generator)
    p, asked = draft_probs.roll(1, 0) * 0.5 + draft_probs * 0.5, []
    numbers = torch.rand((1, tree.levels, tree.width), generator=generator) * 0.5, torch.rand((1, tree.levels + 1))

    def probs_after(slot: torch.Tensor) -> torch.Tensor:
        asked.append(int(slot))
        return p[torch.arange(1), slot]

    given = token, tree.children(), draft_probs, draft_row, *numbers, torch.ones(1, tree.levels), Exact()
    one_by_one = verification.recursive_rejection_sampling(probs_after, *given)
    at_once = verification.rejection_sampling(p, *given)
    for mine, its in zip(leaves(one_by_one), leaves(at_once), strict=True):
        torch.testing.assert_close(mine, its)
    assert asked == [0, *one_by_one.path[0, : int(one_by_one.accepted)].tolist()] and len(asked) > 1
