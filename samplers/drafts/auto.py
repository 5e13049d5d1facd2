"""Trees that pay: the size of every round's tree follows what passes cost here, and what was accepted so far.

A tree is worth its tokens per second. Where draft n is tested and accepted with the probability P(n), a round decides
1 + sum P(n) tokens on average, for one pass of the target over the root and N drafts, one of the drafter for every
level that has children, and what every round takes:

    tokens per cost = (1 + sum_n P(n)) / (target(1 + N) + round + sum_levels expand(inner drafts of the level))

P is a product: that of the parent, times a(d, r) for a child of rank r at depth d if it is tested (its parent is
accepted and the siblings before it are not), times 1 - a(d, s) for each sibling s before it. For every greatest depth,
the drafts with the largest P are the tree of N drafts with the largest sum (Chen et al., "Sequoia", NeurIPS 2024,
arXiv:2402.12374, section 3.1, there for one table of ranks). So best_paths() compares all N and all depths.

a(d, r) is counted in the verified rounds of the run, of all its images, which are forgotten exponentially (MEMORY);
where little was counted, neighbours in the table tell. A run chooses among the best trees of a few tables, and changes
its tree for a clear gain only: on a GPU every other tree is another CUDA graph, whose capture takes as long as some
twenty rounds, and the best trees of all tables that are counted gain nothing (tests/unit/test_auto.py). As a tree
depends on verified rounds only, an exact rule stays exact. Children are sampled as in EAGLE-1, as sampled ones are
accepted more often than the most likely ones unless the temperature is low.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ...kernels.verification import Verified
from ..constants import counting
from ..contract import Extent
from ..layout import TokenLayout
from ..settings import setting
from .costs import PassCosts, cost_of
from .growing import Drafting, Root, grow_sampled
from .structures import Plan, Structure
from .trees import Path, Shape, Tree, shape_of

RANKS = 8  # siblings whose acceptance is counted: the most a draft has
MEMORY = 48  # rounds after which a count has lost 63 %
LASTS = 8  # rounds between two looks at the counts
UNIT = 1000  # of counts and expected tokens on the host
# Before anything was counted. The bundled models accept (exact rule, temperature 1, guidance 2) 0.72 of the first
# children at every depth, 0.4 of the second, 0.33 of the third and 0.27 of the fourth; other drafters accept less.
FIRST = 0.6  # of the first children
NEXT = 0.7  # times that of the sibling before
DEEPER = 0.97  # times that of the same rank one level above
EVIDENCE = 4.0  # tests that such a guess is worth
# The tables whose best trees are compared: first children are accepted with 0 / TABLES to (TABLES - 1) / TABLES.
TABLES = 10
SIBLING = 0.6  # times that of the sibling before, at every depth
GAIN = 1.03  # tokens per cost of another tree, times those of the present one, from which on it is taken
Acceptance = tuple[tuple[float, ...], ...]  # [depth][rank]
Paths = tuple[Path, ...]  # a tree, every draft after its parent


@dataclass(frozen=True)
class Counts:
    """Tests and acceptances [2, depth, RANKS] (fp32), the latest weighing most."""

    values: Tensor


@dataclass(frozen=True)
class Auto(Structure):
    """A sampled tree of the size that is expected to decide most tokens per second, a chain and nothing among them.

    nodes, depth: the most drafts and levels. costs: what passes cost; None: measured at the start of a run (see
    methods/pass_costs.py). Given ones, such as those of a trace's settings (a dict), make an image the same
    on every machine.
    """

    nodes: int = setting(64, 1, 1024)
    depth: int = setting(8, 1, 32)
    costs: PassCosts | Mapping[str, Any] | None = None
    kind: ClassVar[str] = "auto"
    sampled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.costs, Mapping):
            object.__setattr__(self, "costs", PassCosts.of(self.costs))

    @property
    def measures(self) -> bool:
        return self.costs is None

    def fit(self, costs: PassCosts) -> Auto:
        return replace(self, costs=costs)

    def describe(self) -> dict[str, Any]:
        """Settings, JSON-ready; the costs once they are known."""
        settings = {"kind": self.kind, "nodes": self.nodes, "depth": self.depth}
        return settings | ({"costs": asdict(self.costs)} if isinstance(self.costs, PassCosts) else {})

    @staticmethod
    def in_words(settings: dict[str, Any]) -> str:
        return "tree that pays"

    def size(self) -> tuple[int, int]:
        return self.nodes, min(self.depth, self.nodes)

    def expansions(self) -> int:
        return max(self.nodes - 1, 1)

    def trees(self) -> tuple[tuple[Paths, float], ...]:
        """Those to choose among, and what a round with each costs."""
        assert isinstance(self.costs, PassCosts), "the costs are given or measured"
        return short_list(self.costs, *self.size())

    def next_extent(self, before: Extent, read: tuple[int, ...], pads: bool = True) -> Extent:
        """Its one value is the place of the tree among trees(), by the counts that were read; its variant the tree's
        shape, () without drafts."""
        reached = [sibling_chances(row) for row in acceptance_by(read)]
        tokens = [tokens_per_round(paths, reached) for paths, _ in self.trees()]
        rates = [each / cost for each, (_, cost) in zip(tokens, self.trees(), strict=True)]
        place = rates.index(max(rates))
        if before.values and rates[place] <= GAIN * rates[before.values[0]]:
            [place] = before.values
        paths, _ = self.trees()[place]
        shape = shape_of(paths) if paths else ()
        passes = 1 + sum(level.inner > 0 for level in shape)
        return Extent((place,), shape, passes, round(tokens[place] * UNIT) / UNIT, LASTS)

    @property
    def opening(self) -> Extent:
        """The one at the start of a run."""
        return self.next_extent(Extent(), (0,) * (2 * self.size()[1] * RANKS))

    def start(self, batch: int, layout: TokenLayout, device: torch.device) -> Counts:
        return Counts(torch.zeros((2, self.size()[1], RANKS), device=device))

    def plan(self, history: Counts, committed: Tensor, layout: TokenLayout, stream: Any, round_index: Tensor) -> None:
        return None

    def extent(self, history: Counts, plan: Plan, left: Tensor) -> Tensor:
        """The counts in 1 / UNIT."""
        return (history.values * UNIT).round().long().flatten()

    def grow(self, work: Drafting, root: Root, plan: None, extent: Extent, round_index: Tensor) -> Tree:
        return grow_sampled(work, root, cast(Shape, extent.variant), round_index)

    def learn(
        self,
        history: Counts,
        plan: None,
        tree: Tree,
        verified: Verified | None,
        before: Tensor,
        after: Tensor,
        accepted: Tensor,
        update: Tensor,
    ) -> Counts:
        """Rounds without drafts forget, too: in time, drafts are tried again."""
        if verified is None:
            return history
        return Counts(
            history.values * (1 - 1 / MEMORY) + count_tests(verified, accepted, update, history.values.shape[1])
        )


def count_tests(verified: Verified, accepted: Tensor, update: Tensor, depth: int) -> Tensor:
    """Tests and acceptances [2, depth, RANKS] (fp32) in a round, of the images ``update`` [B] (bool).

    The last draft tested at every depth is known: the siblings before it were rejected, and it was itself, too, unless
    its depth is one of the ``accepted`` [B] first.
    """
    level = verified.path.shape[1]
    device = accepted.device
    column, rank = counting(level, device), counting(RANKS, device)
    last = verified.rank[:, :level, None]  # [B, L, 1]
    here = (verified.tested[:, :level] & (column <= accepted[:, None]) & update[:, None])[..., None]
    hit = (rank == last) & (column < accepted[:, None])[..., None]
    both = torch.stack(((rank <= last) & here, hit & here)).sum(1).float()  # [2, L, RANKS]
    return torch.nn.functional.pad(both, (0, 0, 0, depth - level))


def acceptance_of(first: float, depth: int) -> Acceptance:
    """a(d, r) [depth][RANKS] for the acceptance of first children, before anything was counted."""
    nothing = [0.0] * (depth * RANKS)
    return acceptance(nothing, nothing, depth, first)


def acceptance(tests: Sequence[float], hits: Sequence[float], depth: int, first: float = FIRST) -> Acceptance:
    """a(d, r) [depth][RANKS], from tests and acceptances in that order (flat), never rising with the rank.

    A guess from the same rank above, or at the root's children from the sibling before, counts as EVIDENCE tests.
    """
    table: list[tuple[float, ...]] = []
    for level in range(depth):
        row: list[float] = []
        for rank in range(RANKS):
            guess = DEEPER * table[-1][rank] if table else (NEXT * row[-1] if row else first)
            place = level * RANKS + rank
            rate = (hits[place] + EVIDENCE * guess) / (tests[place] + EVIDENCE)
            row.append(min(rate, row[-1]) if row else rate)
        table.append(tuple(row))
    return tuple(table)


def acceptance_by(read: Sequence[int]) -> Acceptance:
    """The table for counts in 1 / UNIT, tests before acceptances."""
    half = len(read) // 2
    tests, hits = ([n / UNIT for n in part] for part in (read[:half], read[half:]))
    return acceptance(tests, hits, half // RANKS)


@lru_cache
def short_list(costs: PassCosts, nodes: int, depth: int) -> tuple[tuple[Paths, float], ...]:
    """Distinct trees, the best ones of TABLES tables, and their costs. The first is the one without drafts."""
    firsts = (place / TABLES for place in range(TABLES))
    tables = ((tuple(first * SIBLING**rank for rank in range(RANKS)),) * depth for first in firsts)
    found = (best_paths(table, costs, nodes) for table in tables)
    return tuple({paths: tokens / rate for paths, tokens, rate in found}.items())


def tokens_per_round(paths: Paths, reached: Sequence[Sequence[float]]) -> float:
    """Tokens per round of a tree; reached [depth][rank]: see sibling_chances()."""
    value: dict[Path, float] = {(): 1.0}
    for path in paths:
        value[path] = value[path[:-1]] * reached[len(path) - 1][path[-1]]
    return sum(value.values())


def best_paths(accepts: Acceptance, costs: PassCosts, nodes: int) -> tuple[Paths, float, float]:
    """The tree with the most tokens per cost; its expected tokens per round, and these per cost.

    accepts [depth][rank]: never rising with the rank, so that a draft's P is never above its parent's or its earlier
    siblings', and taking drafts by their P leaves out none of these.
    """
    reached = [sibling_chances(row) for row in accepts]
    best: tuple[Paths, float, float] = ((), 1.0, 1 / (cost_of(costs.target, 1) + costs.round))
    for deepest in range(1, len(accepts) + 1):
        tokens, drafter = 1.0, costs.round
        paths: list[Path] = []
        inner = [0] * (deepest + 1)
        queue: list[tuple[float, Path]] = [(-reached[0][0], (0,))]
        while queue and len(paths) < nodes:
            value, path = heappop(queue)
            if not value:
                break
            paths.append(path)
            tokens -= value
            level, rank, above = len(path), path[-1], path[:-1]
            if rank == 0 and above:  # its parent is expanded for it
                drafter -= cost_of(costs.expand, inner[level - 1]) if inner[level - 1] else 0.0
                inner[level - 1] += 1
                drafter += cost_of(costs.expand, inner[level - 1])
            rate = tokens / (cost_of(costs.target, 1 + len(paths)) + drafter)
            if rate > best[2]:
                best = tuple(paths), tokens, rate
            if rank + 1 < RANKS:
                row = reached[level - 1]
                ratio = row[rank + 1] / row[rank]
                heappush(queue, (value * ratio, (*above, rank + 1)))
            if level < deepest:
                heappush(queue, (value * reached[level][0], (*path, 0)))
    return best


def sibling_chances(row: Sequence[float]) -> list[float]:
    """The probability that each sibling is the one accepted, given that their parent is."""
    found, left = [], 1.0
    for rate in row:
        found.append(rate * left)
        left *= 1 - rate
    return found
