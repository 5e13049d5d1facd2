"""Verifying a draft tree against the target: which path is accepted, and what is drawn behind it.

Every function decides for all images at once and takes the target's laws p [B, M + 1, V+] behind every slot of the tree
(row 0: behind the root). Uniform numbers depend on the image's seed, the position and the round alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.sampling import at, categorical, point_mass, unless_empty
from .acceptance import AcceptanceRule
from .drafting import DRAWS
from .rng import Purpose, Stream
from .trace import Source
from .trees import Tree


@dataclass(frozen=True)
class Verified:
    """The outcome for columns 0 .. L, column i being i positions behind the tokens decided so far.

    path [B, L] accepted slots (0 behind the end), accepted [B] their number a; token [B, L + 1]: the accepted drafts,
    then the token drawn behind them (columns after a are meaningless). Of the last draft tested at each column:
    source, rank (int64), q, ratio = p/q, and the tv_leak of the tests there (fp32); tested (bool): was there a draft.
    """

    path: Tensor
    accepted: Tensor
    token: Tensor
    source: Tensor
    rank: Tensor
    q: Tensor
    ratio: Tensor
    tv_leak: Tensor
    tested: Tensor


@dataclass(frozen=True)
class Numbers:
    """Random numbers of a round: ``turn`` its number, ``committed`` [B] the tokens decided before it."""

    stream: Stream
    turn: Tensor
    committed: Tensor

    def uniform(self, purpose: Purpose, column: Tensor, draw: Tensor | int = 0) -> Tensor:
        """Numbers [B, n] for columns [n] or [B, n] and draws below DRAWS."""
        return self.stream.uniform(self.committed[:, None] + column, purpose, self.turn * DRAWS + draw)


def row_of(values: Tensor, index: Tensor) -> Tensor:
    """Rows values[b, index[b]] of values [B, n, ...] for index [B] (int64)."""
    return values[torch.arange(len(index), device=index.device), index]


def _over(active: Tensor) -> bool:
    """Is nobody active? Asked on the CPU only: elsewhere the answer would cost more than going on."""
    return active.device.type == "cpu" and not bool(active.any())


def recursive_rejection(
    rule: AcceptanceRule, tree: Tree, p: Tensor, strength: Tensor, numbers: Numbers
) -> Verified:
    """Test siblings one after the other, each against what the rejected ones left of p and q.

    From the root down: accept child c with the rule's f(c); on rejection P becomes the rule's residual and, where
    children were drawn without replacement, Q loses c and is renormalised (Li et al., EAGLE, ICML 2024; Jeon et al.,
    "Recursive speculative decoding", 2024). A child that was not drawn but proposed for certain has the point mass on
    itself as Q. With the exact rule the output law is exactly p. strength [B, L]: see AcceptanceRule.
    """
    batch, levels = len(p), tree.levels
    device, children = p.device, tree.children()
    columns = torch.arange(levels, device=device).repeat_interleave(tree.width)
    ranks = torch.arange(tree.width, device=device).repeat(levels)
    u = numbers.uniform(Purpose.ACCEPT, columns, ranks).unflatten(1, (levels, tree.width))
    node = torch.zeros(batch, dtype=torch.int64, device=device)
    alive = torch.ones(batch, dtype=torch.bool, device=device)
    law = p[:, 0]
    path, tests = [], []
    for level in range(levels):
        if _over(alive):
            break
        kids = row_of(children, node)
        left = None if tree.laws is None else row_of(tree.laws, tree.law_of[node])
        depth = torch.full((batch,), level + 1, device=device)
        record = _Test.none(batch, device)
        found, chosen = torch.zeros_like(alive), node
        for rank in range(tree.width):
            child = kids[:, rank].clamp(min=0)
            testing = alive & ~found & (kids[:, rank] >= 0)
            if _over(testing):
                break
            token = row_of(tree.token, child)
            q = point_mass(token, law.shape[-1]) if left is None else left
            f = rule.accept_probability(law, q, token, depth, strength[:, level])
            passed = testing & (u[:, level, rank] < f)
            ratio = at(law, token) / at(q, token).clamp(min=1e-30)
            leak = rule.leak(law, q, token, depth, strength[:, level])
            relaxed = passed & (u[:, level, rank] >= ratio)
            record = record.then(testing, passed, relaxed, rank, at(q, token), ratio, leak)
            failed = (testing & ~passed)[:, None]
            residual = rule.residual(law, q, token, depth, strength[:, level])
            law = torch.where(failed, residual / residual.sum(-1, keepdim=True), law)
            if left is not None:
                without = left.scatter(-1, token[:, None], 0)
                without = unless_empty(without, left)  # its mass may be tiny, and must stay a law's all the same
                left = torch.where(failed, without / without.sum(-1, keepdim=True), left)
            chosen = torch.where(passed, child, chosen)
            found = found | passed
        node, alive = chosen, found
        law = torch.where(found[:, None], row_of(p, node), law)
        path.append(torch.where(found, node, 0))
        tests.append(record)
    return _outcome(tree, path, tests, law, numbers)


def sample_and_match(tree: Tree, p: Tensor, numbers: Numbers) -> Verified:
    """Exact verification of children proposed for certain: draw behind every slot, follow while the draw is a child.

    The law is that of recursive rejection with point masses, at the cost of one draw per slot.
    """
    batch, levels = len(p), tree.levels
    children = tree.children()
    slots = torch.arange(p.shape[1], device=p.device)
    drawn = categorical(p, numbers.uniform(Purpose.REDRAW, tree.depth, slots))
    node = torch.zeros(batch, dtype=torch.int64, device=p.device)
    alive = torch.ones(batch, dtype=torch.bool, device=p.device)
    path, tests = [], []
    for _ in range(levels):
        kids, token = row_of(children, node), row_of(drawn, node)
        child_token = tree.token.gather(1, kids.clamp(min=0))
        equal = alive[:, None] & (kids >= 0) & (child_token == token[:, None])
        found = equal.any(1)
        rank = torch.where(found, equal.long().argmax(1), (kids >= 0).sum(1) - 1).clamp(min=0)  # or the last, refused
        probability = at(row_of(p, node), child_token.gather(1, rank[:, None])[:, 0])
        testing = alive & (kids >= 0).any(1)
        one, nothing = torch.ones_like(probability), torch.zeros_like(probability)
        tests.append(_Test.none(batch, p.device).then(
            testing, found, torch.zeros_like(found), rank, one, probability, nothing
        ))
        node = torch.where(found, kids.gather(1, rank[:, None])[:, 0], node)
        alive = found
        path.append(torch.where(found, node, 0))
    return _outcome(tree, path, tests, None, numbers, row_of(drawn, node))


def block_verification(tree: Tree, p: Tensor, numbers: Numbers) -> Verified:
    """Verify a chain as a block (Sun et al., ICLR 2025, algorithm 2): exact, and never shorter on average.

    With w_0 = 1, w_i = min(1, w_(i-1) p_i(x_i) / q_i(x_i)) and S_i = sum [w_i p_(i+1) - q_(i+1)]+, prefix i passes with
    h_i = S_i / (S_i + 1 - w_i), the whole chain with w_L; the longest prefix that passes is taken and the next token
    follows [w p - q]+. Here i counts accepted drafts, p_(i+1) and q_(i+1) are the laws behind them.
    """
    batch, levels, device = len(p), tree.levels, p.device
    exists, token = tree.exists[:, 1:], tree.token[:, 1:]
    q = tree.laws  # [B, L, V+], of a chain in its order
    p_draft, q_draft = at(p[:, :-1], token), at(q, token)
    ratio = p_draft / q_draft.clamp(min=1e-30)
    weight = [torch.ones(batch, device=device)]
    for i in range(levels):
        weight.append((weight[-1] * ratio[:, i]).clamp(max=1))
    weight = torch.stack(weight, dim=1)  # w_0 .. w_L
    excess = (weight[:, :-1, None] * p[:, :-1] - q).clamp(min=0)  # behind 0 .. L-1 accepted drafts
    mass = excess.sum(-1)
    goes_on = torch.cat((exists[:, 1:], torch.zeros_like(exists[:, :1])), dim=1)  # is there a draft behind draft i
    inner = torch.cat((mass[:, 1:], torch.zeros_like(mass[:, :1])), dim=1)
    pass_inner = inner / (inner + 1 - weight[:, 1:]).clamp(min=1e-30)
    h = torch.where(goes_on, pass_inner, weight[:, 1:])
    passes = exists & (numbers.uniform(Purpose.ACCEPT, torch.arange(levels, device=device)) < h)
    number = torch.arange(1, levels + 1, device=device)
    accepted = torch.where(passes, number, 0).amax(1)
    taken = number <= accepted[:, None]
    rejected = torch.cat((exists, torch.zeros_like(exists[:, :1])), dim=1).gather(1, accepted[:, None])
    residual = row_of(torch.cat((excess, p[:, -1:]), dim=1), accepted)
    law = torch.where(rejected & (residual.sum(-1, keepdim=True) > 0), residual, row_of(p, accepted))
    path = [torch.where(taken[:, i], i + 1, 0) for i in range(levels)]
    no = torch.zeros(batch, dtype=torch.bool, device=device)
    tests = [_Test.none(batch, device).then(exists[:, i] & (accepted >= i), taken[:, i], no, 0, q_draft[:, i],
                                            ratio[:, i], torch.zeros(batch, device=device)) for i in range(levels)]
    return _outcome(tree, path, tests, law, numbers)


@dataclass(frozen=True)
class _Test:
    """The tests at one column [B]: of the last draft tested passed, relaxed, rank, q and ratio; the leaks' sum."""

    tested: Tensor
    passed: Tensor
    relaxed: Tensor
    rank: Tensor
    q: Tensor
    ratio: Tensor
    leak: Tensor

    @classmethod
    def none(cls, batch: int, device: torch.device) -> _Test:
        no = torch.zeros(batch, dtype=torch.bool, device=device)
        zero = torch.zeros(batch, device=device)
        return cls(no, no, no, torch.zeros(batch, dtype=torch.int64, device=device), zero, zero, zero)

    def then(
        self, testing: Tensor, passed: Tensor, relaxed: Tensor, rank: int | Tensor, q: Tensor, ratio: Tensor,
        leak: Tensor,
    ) -> _Test:
        """The record after one more test, of the images ``testing`` [B]."""
        return _Test(
            self.tested | testing, self.passed | passed, self.relaxed | relaxed,
            torch.where(testing, rank, self.rank), torch.where(testing, q, self.q),
            torch.where(testing, ratio, self.ratio), self.leak + torch.where(testing, leak, 0),
        )


def _outcome(
    tree: Tree, path: list[Tensor], tests: list[_Test], law: Tensor | None, numbers: Numbers,
    drawn: Tensor | None = None,
) -> Verified:
    """Put the columns together; the token behind the path is ``drawn`` [B], or drawn from ``law`` [B, V+]."""
    batch, device = len(tree.token), tree.token.device
    missing = tree.levels - len(path)  # levels nobody reached
    path += [torch.zeros(batch, dtype=torch.int64, device=device)] * missing
    tests += [_Test.none(batch, device)] * (missing + 1)  # and the column behind the deepest level
    slots = torch.stack(path, dim=1)
    accepted = (slots > 0).sum(1)
    if drawn is None:
        drawn = categorical(law, numbers.uniform(Purpose.REDRAW, accepted[:, None])[:, 0])
    token = torch.cat((tree.token.gather(1, slots), drawn[:, None]), dim=1)
    token = token.scatter(1, accepted[:, None], drawn[:, None])

    def column(name: str) -> Tensor:
        return torch.stack([getattr(test, name) for test in tests], dim=1)

    tested = column("tested")
    source = torch.where(tested, Source.RESIDUAL, Source.BONUS)
    source = torch.where(column("passed"), Source.ACCEPTED, source)
    source = torch.where(column("relaxed"), Source.RELAXED, source)
    return Verified(
        slots, accepted, token, source, column("rank"), column("q"), column("ratio"), column("leak"), tested
    )
