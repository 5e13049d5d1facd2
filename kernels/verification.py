"""Verification of drafts (windows, trees and chains), from probabilities and random numbers to what is decided.

Shapes: B images, T positions of a window, M drafts of a tree (slot 0 is the root, the last token decided), W children
at most, L levels. Rules are those of samplers/rules/acceptance.py: accept_probability, residual, drift_bound of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..device.dispatch import Accelerated
from .sampling import at, categorical, indices_of, nobody, point_mass, redraw, row_of, rows_where, unless_empty

EPS = 1e-30  # replaces a probability of zero in a denominator
ACCEPTED, RELAXED, RESIDUAL, BONUS = 1, 2, 3, 4  # as samplers.trace.Source has them


@dataclass(frozen=True)
class Verified:
    """The outcome for columns 0 .. L, column i being i positions after the tokens decided so far.

    path [B, L] accepted slots (0 past the end), accepted [B] their number a; token [B, L + 1]: the accepted drafts,
    then the token sampled after them (columns after a are meaningless). Of the last draft tested at each column:
    source (a trace.Source: BONUS where there was none), rank (int64), q, ratio = p/q, and the drift_bound of all tests
    there (fp32).
    """

    path: Tensor
    accepted: Tensor
    token: Tensor
    source: Tensor
    rank: Tensor
    q: Tensor
    ratio: Tensor
    drift_bound: Tensor

    @property
    def tested(self) -> Tensor:
        """Was there a draft [B, L + 1] (bool)."""
        return self.source != BONUS


@dataclass(frozen=True)
class AcceptanceBudget:
    """The probability that a relaxed rule accepts a draft x with, before the division by q(x).

    It is scale * p(x) + c_J, where c_j is the probability of the j codes nearest to x and J the largest j <= neighbours
    with c_j <= absolute + relative * p(x).

    scale, absolute, relative [B, L] (fp32) for the drafts of every level; table [V, neighbours or more] (int32), or
    None where no neighbours count.
    """

    scale: Tensor
    absolute: Tensor
    relative: Tensor
    table: Tensor | None = None
    neighbours: int = 0


@Accelerated
def maximal_coupling(
    p: Tensor, draft_probs: Tensor, position: Tensor, token: Tensor, exists: Tensor, u: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Test every draft of a window by itself with the exact rule, and resample the rejected ones from [p - q]+.

    p [B, T, V]: target probabilities; draft t of image b is token[b, t], sampled from row position[b, t] mod R of
    draft_probs [B, R, V] (token and position [B, T], int64). Where exists [B, T] (bool) is false there is no draft, and
    the token is sampled from p. u, v [B, T]: uniform numbers for the test and for resampling.

    Returns tokens (int64), which of them are accepted drafts (bool), and the drafts' q and p / q, which are 0 where
    there is no draft; all [B, T].
    """
    batch, count, vocab = p.shape
    rows = torch.arange(batch, device=p.device).unsqueeze(1)
    slot = position % draft_probs.shape[1]
    q_token = draft_probs[rows, slot, token]
    ratio = at(p, token) / q_token.clamp(min=EPS)
    accepted = exists & (u < ratio.clamp(max=1))  # SJD++, eq. 2
    rejected = indices_of(~accepted)
    q = draft_probs.reshape(-1, vocab).index_select(0, (rows * draft_probs.shape[1] + slot).reshape(-1)[rejected])
    q = q.mul_(exists.reshape(-1, 1)[rejected])
    resampled = redraw(p.reshape(-1, vocab).index_select(0, rejected), q, v.reshape(-1)[rejected])  # eq. 3
    resampled = token.reshape(-1).scatter(0, rejected, resampled).view(batch, count)
    return torch.where(accepted, token, resampled), accepted, q_token * exists, ratio * exists


def recursive_rejection_sampling(
    probs_after: Callable[[Tensor], Tensor],
    token: Tensor,
    children: Tensor,
    draft_probs: Tensor | None,
    draft_row: Tensor | None,
    u: Tensor,
    v: Tensor,
    strength: Tensor,
    rule: Any,
) -> Verified:
    """Test siblings one after the other, each against what the rejected ones left of p and q.

    From the root down: accept child c with the rule's f(c). On rejection p becomes the rule's residual and, where
    children were sampled without replacement, q loses c and is renormalised (Li et al., EAGLE, ICML 2024; Jeon et al.,
    "Recursive speculative decoding", 2024). The q of a deterministic child is the point mass on it. The token
    after the path is sampled from the p that is left. With the exact rule the output distribution is exactly p.

    probs_after(slot [B]) -> target probabilities [B, V] after a slot of every image; token [B, M + 1]; children
    [B, M + 1, W]: slots in the order they were sampled, -1 for none; draft_probs [B, E, V] and draft_row [M + 1]: slot
    s's children were sampled from row draft_row[s], None if deterministic; u [B, L, W], v [B, L + 1]: uniform
    numbers for the test of a child and for the token after a path of that length; strength [B, L or more]: see
    AcceptanceRule.
    """
    batch, levels, width = u.shape
    node = torch.zeros_like(token[:, 0])
    alive = node == 0
    p = probs_after(node)
    untested = _untested(batch, token.device)
    path, records = [], []
    for level in range(levels):
        if nobody(alive):
            break
        siblings = row_of(children, node)
        q = None if draft_probs is None or draft_row is None else row_of(draft_probs, draft_row[node])
        found, record = torch.zeros_like(alive), untested
        for rank in range(width):
            testing = alive & ~found & (siblings[:, rank] >= 0)
            if nobody(testing):
                break
            child = siblings[:, rank].clamp(min=0)
            test = _SiblingTest.of(p, q, row_of(token, child), level, strength, u[:, level, rank])
            accepted = testing & test.passes(rule)
            record = test.record(record, testing, accepted, rank, rule)
            p, q = test.after_rejection(testing & ~accepted, rule)
            node = torch.where(accepted, child, node)
            found = found | accepted
        alive = found
        if not nobody(alive):
            p = rows_where(alive, probs_after(node), p)
        path.append(torch.where(alive, node, 0))
        records.append(record)
    return _outcome(token, path, records, untested, levels, lambda a: categorical(p, v.gather(1, a)[:, 0]))


@dataclass(frozen=True)
class _SiblingTest:
    """A test of one draft x [B] per image, of q [B, V] against p [B, V], at depth [B] with uniform numbers u [B].

    certain: is x deterministic; then q is the point mass on it.
    """

    p: Tensor
    q: Tensor
    certain: bool
    draft: Tensor
    depth: Tensor
    strength: Tensor
    u: Tensor

    @classmethod
    def of(cls, p: Tensor, q: Tensor | None, draft: Tensor, level: int, strength: Tensor, u: Tensor) -> _SiblingTest:
        """The test of drafts of a level; without q they are deterministic."""
        depth, certain = torch.full_like(draft, level + 1), q is None
        q = point_mass(draft, p.shape[-1]) if certain else q
        return cls(p, q, certain, draft, depth, strength[:, level], u)

    @property
    def case(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The arguments of a rule's functions."""
        return self.p, self.q, self.draft, self.depth, self.strength

    def passes(self, rule: Any) -> Tensor:
        """Is u < f(x) [B] (bool)."""
        return self.u < rule.accept_probability(*self.case)

    def after_rejection(self, rejected: Tensor, rule: Any) -> tuple[Tensor, Tensor | None]:
        """p and q for the next sibling, changed in the images ``rejected`` [B]; no q if they are deterministic."""
        p, q = self.p, None if self.certain else self.q
        if nobody(rejected):
            return p, q
        residual = rule.residual(*self.case)
        p = rows_where(rejected, residual / residual.sum(-1, keepdim=True), p)
        if q is not None:
            without = q.scatter(-1, self.draft.unsqueeze(-1), 0)
            without = unless_empty(without, q)  # x may have had all the mass; q must stay a distribution
            q = rows_where(rejected, without / without.sum(-1, keepdim=True), q)
        return p, q

    def record(self, before: Tensor, testing: Tensor, accepted: Tensor, rank: int, rule: Any) -> Tensor:
        """The record [B, 5] of a column after this test of the images ``testing`` [B]."""
        q_draft = at(self.q, self.draft)
        ratio = at(self.p, self.draft) / q_draft.clamp(min=EPS)
        ranks = torch.full_like(self.draft, rank)
        bound = rule.drift_bound(*self.case)
        return _recorded(before, testing, accepted, self.u >= ratio, ranks, q_draft, ratio, bound)


@Accelerated
def rejection_sampling(
    p: Tensor,
    token: Tensor,
    children: Tensor,
    draft_probs: Tensor | None,
    draft_row: Tensor | None,
    u: Tensor,
    v: Tensor,
    strength: Tensor,
    rule: Any,
) -> Verified:
    """recursive_rejection_sampling() with target probabilities p [B, M + 1, V], and the exact rule or one that has an
    acceptance_budget."""
    given = token, children, draft_probs, draft_row, u, v, strength, rule
    return recursive_rejection_sampling(partial(row_of, p), *given)


def sample_and_match(
    probs_after: Callable[[Tensor], Tensor], token: Tensor, children: Tensor, levels: int, u: Tensor
) -> Verified:
    """Exact verification of deterministic children: sample after the root, and go on while that is a child.

    The distribution is that of recursive rejection sampling with point masses. probs_after, token, children: see
    recursive_rejection_sampling(); u [B, M + 1]: uniform numbers for the token after every slot.
    """
    node = torch.zeros_like(token[:, 0])
    alive = node == 0
    untested = _untested(len(token), token.device)
    p = probs_after(node)
    sampled = categorical(p, row_of(u, node))
    path, records = [], []
    for _ in range(levels):
        if nobody(alive):
            break
        siblings = row_of(children, node)
        exists = siblings >= 0
        sibling_token = token.gather(1, siblings.clamp(min=0))
        matches = alive[:, None] & exists & (sibling_token == sampled[:, None])
        matched = matches.any(1)
        rank = torch.where(matched, matches.long().argmax(1), exists.sum(1) - 1).clamp(min=0)  # else the last sibling
        records.append(_matched(untested, alive & exists.any(1), matched, rank, p, row_of(sibling_token, rank)))
        node = torch.where(matched, row_of(siblings, rank), node)
        alive = matched
        if not nobody(alive):
            p = rows_where(alive, probs_after(node), p)
            sampled = torch.where(alive, categorical(p, row_of(u, node)), sampled)
        path.append(torch.where(alive, node, 0))
    return _outcome(token, path, records, untested, levels, lambda a: sampled)


def _matched(untested: Tensor, testing: Tensor, matched: Tensor, rank: Tensor, p: Tensor, draft: Tensor) -> Tensor:
    """The record [B, 5] of a column of sample_and_match: the draft [B] has q = 1 and nothing is relaxed."""
    ratio = at(p, draft)
    one, nothing = torch.ones_like(ratio), torch.zeros_like(ratio)
    return _recorded(untested, testing, matched, torch.zeros_like(matched), rank, one, ratio, nothing)


@Accelerated
def sample_and_match_rows(p: Tensor, token: Tensor, children: Tensor, levels: int, u: Tensor) -> Verified:
    """sample_and_match() with target probabilities p [B, M + 1, V]."""
    return sample_and_match(partial(row_of, p), token, children, levels, u)


def block(p: Tensor, draft_probs: Tensor, token: Tensor, exists: Tensor, u: Tensor, v: Tensor) -> Verified:
    """Verify a chain as a block (Sun et al., ICLR 2025, algorithm 2): exact, and never shorter on average.

    With w_0 = 1, w_i = min(1, w_(i-1) p_i(x_i) / q_i(x_i)) and S_i = sum [w_i p_(i+1) - q_(i+1)]+, prefix i passes with
    h_i = S_i / (S_i + 1 - w_i), the whole chain with w_L; the longest prefix that passes is taken and the next token
    follows [w p - q]+. Here i counts accepted drafts; p_(i+1) and q_(i+1) are the distributions after them.

    p [B, L + 1, V]: target probabilities after the root and every draft; draft_probs [B, L, V]: the drafts'; token and
    exists [B, L + 1], the root being column 0; u [B, L], v [B, L + 1]: as in recursive_rejection_sampling().
    """
    batch, levels = u.shape
    exists, draft = exists[:, 1:].clone(), token[:, 1:]  # Metal reads no bytes that begin between multiples of four
    q_draft = at(draft_probs, draft)
    ratio = at(p[:, :-1], draft) / q_draft.clamp(min=EPS)
    weight = [torch.ones_like(u[:, 0])]
    for i in range(levels):
        weight.append((weight[-1] * ratio[:, i]).clamp(max=1))
    weight = torch.stack(weight, dim=1)  # w_0 .. w_L
    excess = (weight[:, :-1, None] * p[:, :-1]).sub_(draft_probs).clamp_(min=0)  # after 0 .. L-1 accepted drafts
    mass = excess.sum(-1)  # S_0 .. S_(L-1)
    never = torch.zeros_like(exists[:, :1])
    goes_on = torch.cat((exists[:, 1:], never), dim=1)  # is there a draft after draft i
    inner = torch.cat((mass[:, 1:], torch.zeros_like(mass[:, :1])), dim=1)
    pass_inner = inner / (inner + 1 - weight[:, 1:]).clamp(min=EPS)
    passes = exists & (u < torch.where(goes_on, pass_inner, weight[:, 1:]))
    number = torch.arange(1, levels + 1, device=p.device)
    accepted = torch.where(passes, number, 0).amax(1)
    taken = number <= accepted[:, None]
    rejected = row_of(torch.cat((exists, never), dim=1), accepted) & (
        row_of(torch.cat((mass, torch.zeros_like(mass[:, :1])), dim=1), accepted) > 0
    )
    probs = rows_where(rejected, row_of(excess, accepted.clamp(max=levels - 1)), row_of(p, accepted))
    never, zero = never[:, 0], torch.zeros_like(mass[:, 0])
    untested = _untested(batch, p.device)
    tested = exists & (accepted[:, None] >= number - 1)
    records = [
        _recorded(untested, tested[:, i], taken[:, i], never, zero, q_draft[:, i], ratio[:, i], zero)
        for i in range(levels)
    ]
    path = torch.where(taken, number, 0).unbind(1)
    return _outcome(token, list(path), records, untested, levels, lambda a: categorical(probs, v.gather(1, a)[:, 0]))


def _untested(batch: int, device: torch.device) -> Tensor:
    """The record of a column without a test: source, rank, q, ratio and drift bound [B, 5] (fp32)."""
    values = torch.zeros((batch, 5), device=device)
    values[:, 0] = BONUS
    return values


def _recorded(
    before: Tensor,
    testing: Tensor,
    accepted: Tensor,
    relaxed: Tensor,
    rank: Tensor,
    q: Tensor,
    ratio: Tensor,
    drift_bound: Tensor,
) -> Tensor:
    """The record [B, 5] of a column after one more test, of the images ``testing`` [B]. Drift bounds add up."""
    source = torch.where(accepted, torch.where(relaxed, float(RELAXED), float(ACCEPTED)), float(RESIDUAL))
    now = torch.stack((source, rank.float(), q, ratio, before[:, 4] + drift_bound), dim=1)
    return torch.where(testing.unsqueeze(1), now, before)


def _outcome(
    token: Tensor,
    path: list[Tensor],
    records: list[Tensor],
    untested: Tensor,
    levels: int,
    sample: Callable[[Tensor], Tensor],
) -> Verified:
    """Join the columns; the token after the path is sample(accepted [B, 1]) [B]."""
    missing = levels - len(path)  # levels that no image reached
    slots = torch.stack(path + [torch.zeros_like(token[:, 0])] * missing, dim=1)
    source, rank, q, ratio, drift_bound = torch.stack(records + [untested] * (missing + 1), dim=1).unbind(-1)
    accepted = (slots > 0).sum(1, keepdim=True)
    last = sample(accepted).unsqueeze(1)
    tokens = torch.cat((token.gather(1, slots), last), dim=1).scatter(1, accepted, last)
    return Verified(slots, accepted[:, 0], tokens, source.long(), rank.long(), q, ratio, drift_bound)
