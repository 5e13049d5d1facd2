"""Verification of drafts, from laws and random numbers to what is decided: of windows, trees and chains.

Shapes: B images, T positions of a window, M drafts of a tree (slot 0 is the root, the last token decided), W children
at most, L levels. Rules are those of samplers/rules/acceptance.py: accept_probability, residual and leak of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .dispatch import accelerated
from .sampling import at, categorical, chosen, entries, nobody, point_mass, redraw, row_of, unless_empty

EPS = 1e-30  # stands in for a probability of zero under a fraction
ACCEPTED, RELAXED, RESIDUAL, BONUS = 1, 2, 3, 4  # as samplers.trace.Source has them


@dataclass(frozen=True)
class Verified:
    """The outcome for columns 0 .. L, column i being i positions behind the tokens decided so far.

    path [B, L] accepted slots (0 behind the end), accepted [B] their number a; token [B, L + 1]: the accepted drafts,
    then the token drawn behind them (columns after a are meaningless). Of the last draft tested at each column:
    source (a trace.Source: BONUS where there was none), rank (int64), q, ratio = p/q, and the tv_leak of all tests
    there (fp32).
    """

    path: Tensor
    accepted: Tensor
    token: Tensor
    source: Tensor
    rank: Tensor
    q: Tensor
    ratio: Tensor
    tv_leak: Tensor

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


@accelerated
def maximal_coupling(
    p: Tensor, laws: Tensor, position: Tensor, token: Tensor, exists: Tensor, u: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Test every draft of a window by itself with the exact rule, and redraw those refused: the maximal coupling.

    p [B, T, V]: laws the tokens must follow; draft t of image b is token[b, t], drawn from the law in the slot
    position[b, t] mod R (laws [B, R, V], token and position [B, T], int64). Where exists [B, T] (bool) is false there
    is none, and the token is drawn from p. u, v [B, T]: uniform numbers for the test and the redraw.

    Returns tokens (int64), which of them are accepted drafts (bool), and the drafts' q and p / q, which are 0 where
    there is no draft; all [B, T].
    """
    batch, count, vocab = p.shape
    rows = torch.arange(batch, device=p.device).unsqueeze(1)
    slot = position % laws.shape[1]
    q_token = laws[rows, slot, token]
    ratio = at(p, token) / q_token.clamp(min=EPS)
    accepted = exists & (u < ratio.clamp(max=1))
    refused = entries(~accepted)
    q = laws.reshape(-1, vocab).index_select(0, (rows * laws.shape[1] + slot).reshape(-1)[refused])
    q = q.mul_(exists.reshape(-1, 1)[refused])
    drawn = redraw(p.reshape(-1, vocab).index_select(0, refused), q, v.reshape(-1)[refused])
    redrawn = token.reshape(-1).scatter(0, refused, drawn).view(batch, count)
    return torch.where(accepted, token, redrawn), accepted, q_token * exists, ratio * exists


def recursive_rejection_sampling(
    behind: Callable[[Tensor], Tensor], token: Tensor, children: Tensor, laws: Tensor | None, law_of: Tensor | None,
    u: Tensor, v: Tensor, strength: Tensor, rule: Any,
) -> Verified:
    """Recursive rejection: test siblings one after the other, each against what the rejected ones left of p and q.

    From the root down: accept child c with the rule's f(c); on rejection P becomes the rule's residual and, where
    children were drawn without replacement, Q loses c and is renormalised (Li et al., EAGLE, ICML 2024; Jeon et al.,
    "Recursive speculative decoding", 2024). A child that was not drawn but proposed for certain has the point mass on
    itself as Q. With the exact rule the output law is exactly p.

    behind(slot [B]) -> the target's laws [B, V] behind a slot of every image; token [B, M + 1]; children [B, M + 1, W]:
    slots in the order they were drawn, -1 where none is; laws [B, E, V] and law_of [M + 1]: slot s's children were
    drawn from row law_of[s], None if proposed for certain; u [B, L, W], v [B, L + 1]: uniform numbers for the test of a
    child and the draw behind a path of that length; strength [B, L or more]: see AcceptanceRule.
    """
    batch, levels, width = u.shape
    node = torch.zeros_like(token[:, 0])
    alive = node == 0
    law = behind(node)
    untested = _untested(batch, token.device)
    path, tests = [], []
    for level in range(levels):
        if nobody(alive):
            break
        kids = row_of(children, node)
        left = None if laws is None else row_of(laws, law_of[node])
        depth = torch.full_like(node, level + 1)
        test, found = untested, torch.zeros_like(alive)
        for rank in range(width):
            testing = alive & ~found & (kids[:, rank] >= 0)
            if nobody(testing):
                break
            child = kids[:, rank].clamp(min=0)
            draft = row_of(token, child)
            q = point_mass(draft, law.shape[-1]) if left is None else left
            case = law, q, draft, depth, strength[:, level]
            q_draft = at(q, draft)
            ratio = at(law, draft) / q_draft.clamp(min=EPS)
            passed = testing & (u[:, level, rank] < rule.accept_probability(*case))
            relaxed, place = u[:, level, rank] >= ratio, torch.full_like(node, rank)
            test = _tested(test, testing, passed, relaxed, place, q_draft, ratio, rule.leak(*case))
            failed = testing & ~passed
            if not nobody(failed):
                rest = rule.residual(*case)
                law = chosen(failed, rest / rest.sum(-1, keepdim=True), law)
                if left is not None:
                    without = left.scatter(-1, draft.unsqueeze(-1), 0)
                    without = unless_empty(without, left)  # its mass may be tiny, and must stay a law's all the same
                    left = chosen(failed, without / without.sum(-1, keepdim=True), left)
            node = torch.where(passed, child, node)
            found = found | passed
        alive = found
        if not nobody(alive):
            law = chosen(alive, behind(node), law)
        path.append(torch.where(alive, node, 0))
        tests.append(test)
    return _outcome(token, path, tests, untested, levels, lambda a: categorical(law, v.gather(1, a)[:, 0]))


@accelerated
def exact_rejection_sampling(
    p: Tensor, token: Tensor, children: Tensor, laws: Tensor | None, law_of: Tensor | None, u: Tensor, v: Tensor,
    strength: Tensor, rule: Any,
) -> Verified:
    """recursive_rejection_sampling() with laws p [B, M + 1, V] and the exact rule."""
    given = token, children, laws, law_of, u, v, strength, rule
    return recursive_rejection_sampling(partial(row_of, p), *given)


@accelerated
def relaxed_rejection_sampling(
    p: Tensor, token: Tensor, children: Tensor, laws: Tensor | None, law_of: Tensor | None, u: Tensor, v: Tensor,
    strength: Tensor, rule: Any,
) -> Verified:
    """recursive_rejection_sampling() with laws p [B, M + 1, V] and a relaxed rule that has an ``acceptance_budget``."""
    given = token, children, laws, law_of, u, v, strength, rule
    return recursive_rejection_sampling(partial(row_of, p), *given)


def sample_and_match(
    behind: Callable[[Tensor], Tensor], token: Tensor, children: Tensor, levels: int, u: Tensor
) -> Verified:
    """Exact verification of children proposed for certain: draw behind the root, and go on while the draw is a child.

    The law is that of recursive rejection with point masses. behind, token, children: see
    recursive_rejection_sampling(); u [B, M + 1]: uniform numbers for the draw behind every slot.
    """
    node = torch.zeros_like(token[:, 0])
    alive = node == 0
    untested = _untested(len(token), token.device)
    law = behind(node)
    drawn = categorical(law, row_of(u, node))
    path, tests = [], []
    for _ in range(levels):
        if nobody(alive):
            break
        kids = row_of(children, node)
        kid_token = token.gather(1, kids.clamp(min=0))
        equal = alive[:, None] & (kids >= 0) & (kid_token == drawn[:, None])
        found = equal.any(1)
        rank = torch.where(found, equal.long().argmax(1), (kids >= 0).sum(1) - 1).clamp(min=0)  # or the last, refused
        ratio = at(law, row_of(kid_token, rank))
        one, nothing = torch.ones_like(ratio), torch.zeros_like(ratio)
        testing = alive & (kids >= 0).any(1)
        tests.append(_tested(untested, testing, found, torch.zeros_like(found), rank, one, ratio, nothing))
        node = torch.where(found, row_of(kids, rank), node)
        alive = found
        if not nobody(alive):
            law = chosen(alive, behind(node), law)
            drawn = torch.where(alive, categorical(law, row_of(u, node)), drawn)
        path.append(torch.where(alive, node, 0))
    return _outcome(token, path, tests, untested, levels, lambda a: drawn)


@accelerated
def sample_and_match_rows(p: Tensor, token: Tensor, children: Tensor, levels: int, u: Tensor) -> Verified:
    """sample_and_match() with laws p [B, M + 1, V]."""
    return sample_and_match(partial(row_of, p), token, children, levels, u)


@accelerated
def block(p: Tensor, laws: Tensor, token: Tensor, exists: Tensor, u: Tensor, v: Tensor) -> Verified:
    """Verify a chain as a block (Sun et al., ICLR 2025, algorithm 2): exact, and never shorter on average.

    With w_0 = 1, w_i = min(1, w_(i-1) p_i(x_i) / q_i(x_i)) and S_i = sum [w_i p_(i+1) - q_(i+1)]+, prefix i passes with
    h_i = S_i / (S_i + 1 - w_i), the whole chain with w_L; the longest prefix that passes is taken and the next token
    follows [w p - q]+. Here i counts accepted drafts, p_(i+1) and q_(i+1) are the laws behind them.

    p [B, L + 1, V]: target laws behind the root and every draft; laws [B, L, V]: drafts' laws; token and exists
    [B, L + 1], the root being column 0; u [B, L], v [B, L + 1]: as in recursive_rejection_sampling().
    """
    batch, levels = u.shape
    exists, draft = exists[:, 1:].clone(), token[:, 1:]  # Metal reads no bytes that begin between multiples of four
    q_draft = at(laws, draft)
    ratio = at(p[:, :-1], draft) / q_draft.clamp(min=EPS)
    weight = [torch.ones_like(u[:, 0])]
    for i in range(levels):
        weight.append((weight[-1] * ratio[:, i]).clamp(max=1))
    weight = torch.stack(weight, dim=1)  # w_0 .. w_L
    excess = (weight[:, :-1, None] * p[:, :-1]).sub_(laws).clamp_(min=0)  # behind 0 .. L-1 accepted drafts
    mass = excess.sum(-1)
    never = torch.zeros_like(exists[:, :1])
    goes_on = torch.cat((exists[:, 1:], never), dim=1)  # is there a draft behind draft i
    inner = torch.cat((mass[:, 1:], torch.zeros_like(mass[:, :1])), dim=1)
    pass_inner = inner / (inner + 1 - weight[:, 1:]).clamp(min=EPS)
    passes = exists & (u < torch.where(goes_on, pass_inner, weight[:, 1:]))
    number = torch.arange(1, levels + 1, device=p.device)
    accepted = torch.where(passes, number, 0).amax(1)
    taken = number <= accepted[:, None]
    rejected = row_of(torch.cat((exists, never), dim=1), accepted) & (
        row_of(torch.cat((mass, torch.zeros_like(mass[:, :1])), dim=1), accepted) > 0
    )
    law = chosen(rejected, row_of(excess, accepted.clamp(max=levels - 1)), row_of(p, accepted))
    never, zero = never[:, 0], torch.zeros_like(mass[:, 0])
    untested = _untested(batch, p.device)
    tested = exists & (accepted[:, None] >= number - 1)
    tests = [_tested(untested, tested[:, i], taken[:, i], never, zero, q_draft[:, i], ratio[:, i], zero)
             for i in range(levels)]
    path = torch.where(taken, number, 0).unbind(1)
    return _outcome(token, list(path), tests, untested, levels, lambda a: categorical(law, v.gather(1, a)[:, 0]))


def _untested(batch: int, device: torch.device) -> Tensor:
    """No test: source, rank, q, ratio and leak [B, 5] (fp32)."""
    values = torch.zeros((batch, 5), device=device)
    values[:, 0] = BONUS
    return values


def _tested(
    before: Tensor, testing: Tensor, passed: Tensor, relaxed: Tensor, rank: Tensor, q: Tensor, ratio: Tensor,
    leak: Tensor,
) -> Tensor:
    """The tests at a column [B, 5] after one more, of the images ``testing`` [B]."""
    source = torch.where(passed, torch.where(relaxed, float(RELAXED), float(ACCEPTED)), float(RESIDUAL))
    now = torch.stack((source, rank.float(), q, ratio, before[:, 4] + leak), dim=1)
    return torch.where(testing.unsqueeze(1), now, before)


def _outcome(
    token: Tensor, path: list[Tensor], tests: list[Tensor], untested: Tensor, levels: int,
    draw: Callable[[Tensor], Tensor],
) -> Verified:
    """Put the columns together; the token behind the path is draw(accepted [B, 1]) [B]."""
    missing = levels - len(path)  # levels nobody reached
    slots = torch.stack(path + [torch.zeros_like(token[:, 0])] * missing, dim=1)
    source, rank, q, ratio, leak = torch.stack(tests + [untested] * (missing + 1), dim=1).unbind(-1)
    accepted = (slots > 0).sum(1, keepdim=True)
    drawn = draw(accepted).unsqueeze(1)
    tokens = torch.cat((token.gather(1, slots), drawn), dim=1).scatter(1, accepted, drawn)
    return Verified(slots, accepted[:, 0], tokens, source.long(), rank.long(), q, ratio, leak)
