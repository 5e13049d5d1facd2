"""Distances between two sets of images, by their features [N, D]."""

from __future__ import annotations

import torch
from torch import Tensor

NEIGHBOURS = 3  # of precision and recall, as in the paper


def kernel(a: Tensor, b: Tensor) -> Tensor:
    """k(x, y) = (x y / D + 1)^3 of all pairs [N, M] (fp64)."""
    return (a.double() @ b.double().T / a.shape[1] + 1) ** 3


def kernel_terms(a: Tensor, b: Tensor) -> Tensor:
    """The terms h(i, j) [N, N] of the kernel distance of a [N, D] and b [N, D], 0 where i = j.

    h(i, j) = k(a_i, a_j) + k(b_i, b_j) - k(a_i, b_j) - k(b_i, a_j). Exchanging a_i and b_i changes the sign of row and
    column i.
    """
    across = kernel(a, b)
    terms = kernel(a, a) + kernel(b, b) - across - across.T
    return terms.fill_diagonal_(0)


def kernel_distance(terms: Tensor) -> float:
    """Squared maximum mean discrepancy of two sets of which images of one index belong together (here: to one prompt):
    the mean of h(i, j) over i != j (Gretton et al., 2012, lemma 6; with this kernel the KID of Binkowski et al., 2018,
    arXiv:1801.01401). It is unbiased, so it is about 0 for two sets of one distribution, and may be negative.
    """
    count = len(terms)
    return float(terms.sum() / (count * (count - 1)))


def precision_recall(real: Tensor, generated: Tensor, neighbours: int = NEIGHBOURS) -> tuple[float, float]:
    """Precision: the fraction of ``generated`` [M, D] in the balls around the ``real`` ones [N, D] that reach to their
    k-th nearest neighbour among themselves; recall: the same with the sets exchanged (Kynkaanniemi et al., 2019,
    arXiv:1904.06991, equations 1 and 2). Raises ValueError unless both sets have more than k."""
    if min(len(real), len(generated)) <= neighbours:
        raise ValueError(f"The sets have {len(real)} and {len(generated)} images; they need more than {neighbours}.")
    return _covered(real, generated, neighbours), _covered(generated, real, neighbours)


def _covered(centres: Tensor, points: Tensor, neighbours: int) -> float:
    """The fraction of points [M, D] within the balls around centres [N, D]."""
    centres, points = centres.double(), points.double()
    radius = torch.cdist(centres, centres).kthvalue(neighbours + 1, dim=1).values  # the nearest is the centre itself
    return float((torch.cdist(points, centres) <= radius).any(1).double().mean())
