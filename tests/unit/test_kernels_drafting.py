"""The Triton kernel that gives drafts their children, under Triton's interpreter, and what it says."""

import math

import pytest
import torch
from comfyui_specar.kernels import drafting
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ..support.triton_kernels import agrees, interpreted

INF = math.inf


def rows(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.softmax(3 * torch.randn(shape, generator=generator), -1)


@settings(max_examples=12)
@given(
    st.integers(1, 3), st.integers(1, 4), st.sampled_from([3, 32, 100, 20_000]), st.booleans(), st.integers(0, 10**6)
)
def test_children_of_a_level(batch, drafts, vocab, noisy, seed):
    """Of drafts with different numbers of children, in any order; of rows of larger tensors, some of which are missing,
    some of which may have fewer children than the shape says, and some of more than there are tokens."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 8, (), generator=generator))
    child = torch.randperm(drafts * count, generator=generator)[: 1 + seed % (drafts * count)]
    q = rows(generator, batch, drafts + 1, vocab)[:, 1:]
    noise = torch.randn((batch, drafts + 2, vocab), generator=generator)[:, :drafts] if noisy else None
    score = torch.randn((batch, drafts + 1), generator=generator)[:, :drafts]
    score[0, 0] = -INF
    most = torch.randint(0, vocab + 1, (batch, 3), generator=generator)[:, 1:2]
    agrees("drafting.children", q, noise, score, most, child, count)


@pytest.mark.parametrize("vocab", [16_384, 131_072, 184_622])
def test_children_over_large_vocabularies(vocab):
    """As many as a wide tree has; the chosen ones are in a few lanes of the kernel, one after the other."""
    generator = torch.Generator().manual_seed(vocab)
    q = rows(generator, 1, 2, vocab)
    q[0, 0, 5::4096] += torch.rand(q[0, 0, 5::4096].shape, generator=generator)
    score, most, child = torch.zeros(1, 2), torch.tensor([[vocab]]), torch.arange(128)
    token, probability, _ = agrees("drafting.children", q, None, score, most, child, 64)
    assert torch.equal(probability, q.topk(64).values.flatten(1))
    assert torch.equal(token, q.topk(64).indices.flatten(1))


def test_equal_tokens_come_in_the_order_of_their_ids():
    """Over several lanes and turns, and where the rest has no probability."""
    q, child, count = torch.zeros(1, 1, 30_000), torch.arange(6), 6
    q[0, 0, [29_000, 8_199, 7, 20_808]] = torch.tensor([0.25, 0.25, 0.25, 0.25])  # two of them in one lane
    given = q, None, torch.zeros(1, 1), torch.tensor([[6]]), child, count
    token, probability, score = interpreted("drafting.children", *given)
    assert token.tolist() == [[7, 8_199, 20_808, 29_000, 0, 1]]
    assert probability.tolist() == [[0.25] * 4 + [0.0] * 2]
    torch.testing.assert_close(score, torch.tensor([[math.log(0.25)] * 4 + [-INF] * 2]))


@pytest.mark.parametrize("spoilt", [torch.nan, INF])
def test_children_of_rows_that_are_no_probabilities_do_not_exist(spoilt):
    q = torch.full((1, 1, 40), spoilt)
    q[0, 0, 3] = torch.nan
    given = q, torch.zeros(1, 1, 40), torch.zeros(1, 1), torch.tensor([[0]]), torch.arange(3), 3
    for children in (drafting.children, lambda *given: interpreted("drafting.children", *given)):
        token, _, score = children(*(x.clone() if isinstance(x, torch.Tensor) else x for x in given))
        assert 0 <= int(token.min()) <= int(token.max()) < 40
        assert not (score > -INF).any()


@settings(max_examples=12)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.sampled_from([1, 7, 40, 200]), st.integers(0, 10**6))
@example(2, 3, 40, 60, 1)  # more candidates than the kernel takes at once
def test_the_tree_of_the_best_candidates(batch, levels, top_k, nodes, seed):
    """With ties, which go to the smaller number, and some that do not exist, or none that does."""
    generator = torch.Generator().manual_seed(seed)
    score, scores, frontiers = torch.zeros(batch, 1), [], [torch.zeros((batch, 0), dtype=torch.int64)]
    for level in range(levels):
        less = torch.randint(0, 4, (*score.shape, top_k), generator=generator).sort(-1).values
        score = (score[..., None] - torch.where(less < 3, less, INF)).flatten(1)
        scores.append(score)
        if level + 1 < levels:
            score, chosen = score.topk(top_k)
            frontiers.append(chosen)
    score, expanded = torch.cat(scores, dim=1), torch.cat(frontiers, dim=1)
    score[0] = -INF if seed % 5 == 0 else score[0]
    token = torch.randint(0, 99, score.shape, generator=generator)
    tree = agrees("drafting.keep_best", token, score.exp(), score, expanded, torch.arange(batch), nodes, top_k)
    assert int(tree[4].sum()) == sum(1 + min(nodes, int(row.sum())) for row in score > -INF)
