"""Operations on rows of probabilities, used at every position of every forward pass (torch reference)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..device.dispatch import Accelerated
from ..device.graphs import recording


def at(rows: Tensor, token: Tensor) -> Tensor:
    """Entries rows[..., token] for rows [..., V] and token [...] (int64)."""
    return rows.gather(-1, token.unsqueeze(-1)).squeeze(-1)


def take(rows: Tensor, index: Tensor) -> Tensor:
    """rows [R, n, ...] at index [B, m] (int64; R a multiple of B, in blocks of B) -> [R, m, ...]."""
    index = index.expand(len(rows) // len(index), *index.shape).flatten(0, 1)
    shape = (*index.shape, *[1] * (rows.ndim - 2))
    return rows.gather(1, index.reshape(shape).expand(*index.shape, *rows.shape[2:]))


def images_where(condition: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Rows of ``yes`` where condition [B], else of ``no`` (both [R] or [R, n, ...]; a shorter n is padded)."""
    if yes.ndim == 1:
        return torch.where(condition, yes, no)
    longest = max(yes.shape[1], no.shape[1])

    def padded(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, longest - x.shape[1]))

    rows = condition.repeat(len(yes) // len(condition)).reshape(-1, *[1] * (yes.ndim - 1))
    return torch.where(rows, padded(yes), padded(no))


def inverse(order: Tensor) -> Tensor:
    """The inverses [B, n] of permutations ``order`` [B, n] (int64): the index of each number."""
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty(order.shape, dtype=order.dtype, device=order.device).scatter_(1, order, places)


def point_mass(token: Tensor, vocab: int) -> Tensor:
    """Rows [..., vocab] (fp32) with all mass on ``token`` [...] (int64)."""
    return torch.zeros((*token.shape, vocab), device=token.device).scatter_(-1, token.unsqueeze(-1), 1.0)


@Accelerated
def categorical(weights: Tensor, u: Tensor) -> Tensor:
    """Sample one index per row of non-negative ``weights`` [..., V] by inverting the cumulative sum at u [...] in
    [0, 1).

    Rows need not be normalised. The result is the first index whose cumulative weight exceeds u times the total. On a
    GPU the parallel sum is not monotone to the last bit, so an entry of weight zero can be hit. Such an id may be
    illegal, so the largest entry replaces it.
    """
    return _inverted(weights, weights.cumsum(-1), u)


@Accelerated
def redraw(p: Tensor, q: Tensor, v: Tensor) -> Tensor:
    """categorical(residual(p, q), v) [...] (int64) for rows p and q [..., V]: the exact rule's sample after a
    rejection. If q is a row of zeros, it is a sample from p."""
    weights = (p - q).clamp_(min=0)
    cumulative = weights.cumsum(-1)
    empty = ~(cumulative[..., -1:] > 0)
    if not nobody(empty):
        weights = torch.where(empty, p, weights)
        cumulative = weights.cumsum(-1)
    return _inverted(weights, cumulative, v)


@Accelerated
def perturbed_argmax(p: Tensor, noise: Tensor) -> Tensor:
    """The first largest entry of log p + noise for rows p [..., V] and Gumbel noise [..., V]: a sample from p, [...]
    (int64). For a row of NaN, the first entry."""
    return p.log().add_(noise).argmax(-1)


def _inverted(weights: Tensor, cumulative: Tensor, u: Tensor) -> Tensor:
    """categorical() of weights [..., V] whose cumulative sums are known."""
    threshold = u.unsqueeze(-1) * cumulative[..., -1:]
    token = torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)
    missed = ~(at(weights, token) > 0)
    return token if nobody(missed) else torch.where(missed, weights.argmax(-1), token)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Unnormalised residual distribution [p - q]+ [..., V]; where round-off leaves no mass (p equals q), p itself."""
    return unless_empty((p - q).clamp_(min=0), p)


def unless_empty(weights: Tensor, fallback: Tensor) -> Tensor:
    """Non-negative rows ``weights`` [..., V], replaced by ``fallback`` [..., V] where they are all zero."""
    empty = ~(weights.sum(-1, keepdim=True) > 0)
    return weights if nobody(empty) else torch.where(empty, fallback, weights)


def entropy(p: Tensor) -> Tensor:
    """Entropy in nats [...] of rows p [..., V]."""
    return -torch.special.xlogy(p, p).sum(-1)


def may_read(value: Tensor) -> bool:
    """May values be read on the host? On the CPU this is free and saves work. Elsewhere, and while a step is being
    compiled or captured, it would cost more than it saves."""
    return value.device.type == "cpu" and not torch.compiler.is_compiling() and not recording()


def nobody(mask: Tensor) -> bool:
    """Is no entry of a mask set? False where the mask may not be read."""
    return may_read(mask) and not bool(mask.any())


def indices_of(mask: Tensor) -> Tensor:
    """Flat indices [n] (int64) of the entries set in a mask; of all entries where the mask may not be read."""
    if may_read(mask):
        return mask.reshape(-1).nonzero()[:, 0]
    return torch.arange(mask.numel(), device=mask.device)


def row_of(values: Tensor, index: Tensor) -> Tensor:
    """Rows values[b, index[b]] of values [B, n, ...] for index [B] (int64). Read-only: it may be a view."""
    if len(index) == 1 and may_read(index):
        return values[:, int(index)]
    return values[torch.arange(len(index), device=index.device), index]


def rows_where(mask: Tensor, these: Tensor, others: Tensor) -> Tensor:
    """Rows [B, V] of ``these`` where mask [B] (bool), of ``others`` elsewhere."""
    if may_read(mask) and bool(mask.all()):
        return these
    return torch.where(mask.unsqueeze(-1), these, others)
