"""VVS: some drafts are taken without verification.

Dong et al., "VVS: accelerating speculative decoding for visual autoregressive generation via partial verification
skipping", CVPR 2026 (arXiv:2511.13587): when to skip (section 4.4), which path to take and how much of it (4.2, eq. 1),
and which features a drafter gets meanwhile (4.3). Not lossless: bounded afterwards (the trace's drift_bound), not in
advance.

The two listings of the paper contradict each other on the flag that forbids skipping twice; here, as in its text, the
round after a skipped one is always verified. A chain has one path, and a skipped round takes all of it. A single path
has similarity 0, so at any threshold above 0 the dynamic schedule verifies chains, and trees of two leaves (every
second leaf counts).

Drafts that decide themselves whether they are taken are no sample from the drafter any more, and drift by more than the
trace says. Where top-p leaves some siblings out, the number of a draft's children tells which token it is. So how much
of a sampled tree is taken, and with which chances, follows from its shape (``whole_shape``); only the dynamic schedule
looks at the tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ...kernels.sampling import take
from ...kernels.verification import EPS
from ..drafts.trees import Tree
from ..layout import TokenLayout
from ..settings import check_settings, setting

SCHEDULES = ("uniform", "dynamic")
PATHS = ("uniform", "confident", "first")
FEATURES = {  # name -> the paper's s1 and s2, and whether they take turns
    "-1, 0": (-1, 0, False),  # s1 after verified rounds, s2 after skipped ones (tables 3 and 5)
    "-1, 1": (-1, 1, False),
    "-1, 2": (-1, 2, False),
    "-1, 3": (-1, 3, False),
    "0, 0": (0, 0, False),
    "1, 1": (1, 1, False),
    "2, 2": (2, 2, False),
    "3, 3": (3, 3, False),
    "-1 or 0": (-1, 0, True),  # s1 after odd rounds, s2 after even ones (table 6)
    "-1 or 1": (-1, 1, True),
    "-1 or 5": (-1, 5, True),
}
NONE_SKIPPED = (
    "VVS took no draft unverified in this run. With the schedule dynamic, choose a static or dynamic tree instead of "
    "auto, whose trees may be too small, or lower threshold."
)


@dataclass(frozen=True)
class Skipping:
    """When to take drafts unverified, and which.

    schedule: uniform skips every ``interval``-th round (2 or more); dynamic skips when the similarity of the tree's
        paths is at least ``threshold`` (0 or more; eq. 2, where ``decay``, the paper's alpha in (0, 1], gives later
        tokens less weight).
    path: uniform samples a leaf path, confident takes the one of highest draft probability, first that of the first
        children (in a sampled tree these are a sample from the drafter).
    truncate: take at most the mean length of leaf paths.
    refresh: the drafter observes skipped tokens again once their true features are known (ours).
    guard: no skip while at most this many tokens of the image are decided (the authors' code).
    features: one of FEATURES, how stale the features are that the drafter gets of the tokens decided last: -1 the true
        ones, 0 the newest that were cached before the round, n those of n tokens before these (tables 3, 5 and 6).
    """

    schedule: str = setting("uniform", options=SCHEDULES)
    interval: int = setting(4, 2, advice="no two rounds in a row are skipped")
    threshold: float = setting(0.7, 0, advice="above 1 never skips")
    decay: float = setting(0.9, 1e-6, 1)
    path: str = setting("uniform", options=PATHS)
    truncate: bool = True
    refresh: bool = True
    guard: int = setting(5, 0)
    features: str = setting("-1, 0", options=tuple(FEATURES))

    def check(self) -> None:
        """Raise ValueError naming the setting and its legal values."""
        check_settings(self)

    def describe(self) -> dict[str, Any]:
        """The settings, JSON-ready; ``features`` only where it is not the paper's, as earlier reports lack it."""
        return {k: v for k, v in asdict(self).items() if k != "features" or v != Skipping.features}

    def kept_features(self, levels: int) -> int:
        """How many true features are kept for drafts of so many levels."""
        return levels + 1 + max(FEATURES[self.features][:2])

    @property
    def fresh(self) -> bool:
        """Does the drafter always get the true features of what was verified?"""
        first, _, turns = FEATURES[self.features]
        return first < 0 and not turns


def check_codebook(settings: Skipping, codebook: Tensor | None) -> None:
    """Raise ValueError if the schedule compares code vectors and the model has none."""
    if settings.schedule == "dynamic" and codebook is None:
        raise ValueError(
            "The dynamic skipping schedule compares code vectors, but this model has no codebook. "
            "Use the uniform schedule."
        )


def whole_shape(tree: Tree, committed: Tensor, layout: TokenLayout) -> Tree:
    """The tree after ``committed`` [B] tokens with every draft that its shape has within the image, whatever the
    drafter's q; forced tokens are only children. A tree of the most likely tokens, which nothing is sampled for, stays
    as it is."""
    if not tree.sampled:
        return tree
    position = committed[:, None] + tree.depth - 1
    missing = (position >= layout.length) | ((tree.rank > 0) & (layout.forced_ids(position) >= 0))
    return replace(tree, exists=~(tree.tree_mask() & missing[:, None]).any(2))


def similarity(tree: Tree, codebook: Tensor, decay: float) -> Tensor:
    """Similarity of the paths of a tree: S [B] (fp32, -1 .. 1), the mean of eq. (2) over pairs of paths.

    Every second leaf path, in slot order, counts. Tokens are compared by the cosine of their vectors in codebook
    [V, C]; ids >= V, and places past the end of either path, have cosine 0. Level l has weight decay^l, normalised over
    the longest leaf path. 0 with fewer than two paths.

    The sum over pairs at a level is (|sum of unit vectors|^2 - sum of their squared lengths) / 2.
    """
    leaves = tree.leaves()
    compared = leaves & (leaves.cumsum(1) % 2 == 1)
    unit = normalize(codebook[tree.token.clamp(max=len(codebook) - 1)].float(), dim=-1)
    unit = torch.where((tree.token < len(codebook))[..., None], unit, 0)
    length = _lengths(tree, leaves).amax(1)
    paths, count = tree.retrieve_indices(), compared.sum(1)
    pairs = (count * (count - 1) / 2).clamp(min=1)
    total, weights = torch.zeros_like(unit[:, 0, 0]), torch.zeros_like(unit[:, 0, 0])
    for level, slot in enumerate(paths.unbind(2)):
        here = compared & (slot > 0)
        vectors = torch.where(here[..., None], unit.gather(1, slot[..., None].expand(-1, -1, unit.shape[-1])), 0)
        both = (vectors.sum(1).square().sum(-1) - vectors.square().sum((1, 2))) / 2
        weight = decay**level * (level < length)
        total, weights = total + weight * both, weights + weight
    return (total / (weights.clamp(min=EPS) * pairs)).clamp(-1, 1)


def decide(
    settings: Skipping,
    tree: Tree,
    planned: Tree,
    alike: Tensor | None,
    round_index: int | Tensor,
    committed: Tensor,
    end: Tensor,
    last_skipped: Tensor,
    skippable: Tensor | None = None,
) -> Tensor:
    """Which images take their tree unverified [B] (bool).

    planned: whole_shape(); alike [B]: similarity(), which the dynamic schedule needs. round_index (or [B]) is from 1;
    committed [B] of ``end`` [B] tokens are decided; last_skipped [B] (bool). Never twice in a row, on an empty tree,
    early in the image (``guard``), if the longest path that could be taken leaves no token after it, or if a position
    of that path is not ``skippable`` [B, S] (bool; None: all are).
    """
    path_length = _mean_length(planned) if settings.truncate else _lengths(planned, planned.leaves()).amax(1)
    drafted = tree.exists[:, 1:].any(1)
    allowed = ~last_skipped & drafted & (committed > settings.guard) & (committed + path_length < end)
    if skippable is not None:
        step = torch.arange(tree.levels, device=path_length.device)
        here = skippable.gather(1, (committed[:, None] + step).clamp(max=skippable.shape[1] - 1))
        allowed = allowed & (here | (step >= path_length[:, None])).all(1)
    if settings.schedule == "uniform":
        return allowed & (round_index % settings.interval == 0)
    assert alike is not None  # check_codebook() has refused models without one
    return allowed & (alike >= settings.threshold)


def choose_path(settings: Skipping, tree: Tree, planned: Tree, u: Tensor) -> tuple[Tensor, Tensor]:
    """A path's slots [B, levels] and how many of them are taken [B] (int64; 0 of an empty tree), eq. (1).

    planned: whole_shape(); u [B]: a uniform number in [0, 1).
    """
    leaves, paths = tree.leaves(), tree.retrieve_indices()
    if settings.path == "uniform":
        along = _shares(tree, planned).unsqueeze(-1).expand(-1, -1, tree.levels).gather(1, paths)
        chance = (along.prod(-1) * leaves).cumsum(1)
        end = (leaves & (chance > u[:, None] * chance[:, -1:])).long().argmax(1)
    elif settings.path == "confident":
        along = tree.probability.log().unsqueeze(-1).expand(-1, -1, tree.levels).gather(1, paths).sum(-1)
        end = along.masked_fill(~leaves, -torch.inf).argmax(1)
    else:
        ranks = tree.rank.unsqueeze(-1).expand(-1, -1, tree.levels).gather(1, paths).sum(-1)
        end = torch.where(tree.exists & (ranks == 0), tree.depth, 0).argmax(1)
    slots = paths.gather(1, end[:, None, None].expand(-1, -1, tree.levels))[:, 0]
    length = tree.depth.gather(1, end[:, None])[:, 0]  # 0 of the root, which stands for no leaf
    return slots, torch.minimum(length, _mean_length(planned)) if settings.truncate else length


def path_probability(settings: Skipping, tree: Tree, planned: Tree, slots: Tensor) -> Tensor:
    """The probability q [B, levels] (fp32) of each token of a chosen path (slots [B, levels]), given those before it.

    Of a path at random: the token's share (see _shares; planned: whole_shape()); of an only child that was sampled, the
    drafter's q. Of the first children of a sampled tree, which are a sample from the drafter, its q. Otherwise 1, as
    the tree alone decides which token it is; but a sampled chain has no choice of paths, and its tokens keep the
    drafter's q. Meaningless past the end of the path.
    """
    drafted = tree.probability.gather(1, slots)
    if settings.path == "uniform":
        share = _shares(tree, planned).gather(1, slots)
        return torch.where(share == 1, drafted, share) if tree.sampled else share
    if not tree.sampled:
        return torch.ones_like(drafted)
    if settings.path == "first":
        return drafted
    return torch.where((tree.rank * tree.exists).amax(1, keepdim=True) > 0, 1.0, drafted)


def staleness(settings: Skipping, round_index: Tensor, skipped: bool) -> Tensor:
    """How stale the features are that the drafter gets of what round ``round_index`` [] (int64, from 1) decided: []
    (int64), -1 the true ones. Of a skipped round there are none, so it is 0 then."""
    first, second, turns = FEATURES[settings.features]
    if not turns:
        return torch.full_like(round_index, second if skipped else first)
    stale = torch.where(round_index % 2 == 0, second, first)
    return stale.clamp(min=0) if skipped else stale


def stale_features(features: Tensor, available: Tensor, count: Tensor, place: Tensor, extra: Tensor) -> Tensor:
    """Hidden states [R, W, D] in place of the true ones of ``count`` tokens, for numbers ``place`` [B, W] of these.

    features [R, G, D]: true hidden states, the latest last, of which ``available`` are valid. The tokens get the latest
    ``count`` of them in order, then the very latest repeated, as if the ``extra`` [] (int64) latest were not there; of
    fewer, one stays. available, count: [B], with R a multiple of B.
    """
    left_out = (available.clamp(max=features.shape[1]) - 1).minimum(extra)
    end = features.shape[1] - left_out
    used = (available - left_out).minimum(count).minimum(end)
    return take(features, ((end - used)[:, None] + place).minimum(end[:, None] - 1))


def push_features(features: Tensor, new: Tensor, count: Tensor) -> Tensor:
    """features [R, G, D] with the first ``count`` of new [R, T, D] appended, and as many of the oldest dropped.

    count: [R], or [B] with R a multiple of B; at most T.
    """
    index = count[:, None] + torch.arange(features.shape[1], device=features.device)
    return take(torch.cat((features, new), dim=1), index)


def _shares(tree: Tree, planned: Tree) -> Tensor:
    """The probability [B, M + 1] (fp32) that a random path, once at a draft's parent, continues to that draft (1 for
    the root): in proportion, among the siblings that exist, to the leaves ``planned`` below them. Where all of these
    exist, they are equally likely."""
    below = (tree.tree_mask() & planned.leaves()[..., None]).sum(1)  # leaves below every slot, itself included
    below = torch.where(tree.exists, below, 0)
    below[:, 0] = 0
    siblings = torch.zeros_like(below).scatter_add(1, tree.parent, below)
    share = below / siblings.gather(1, tree.parent).clamp(min=1)
    share[:, 0] = 1
    return share


def _lengths(tree: Tree, leaves: Tensor) -> Tensor:
    """Lengths [B, M + 1] (int64) of the paths to leaves, 0 elsewhere."""
    return torch.where(leaves, tree.depth, 0)


def _mean_length(tree: Tree) -> Tensor:
    """The mean length [B] (int64, rounded down) of leaf paths; 0 of an empty tree."""
    leaves = tree.leaves()
    return torch.div(_lengths(tree, leaves).sum(1), leaves.sum(1).clamp(min=1), rounding_mode="floor")
