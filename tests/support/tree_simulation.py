"""Which draft trees *auto* takes in a few images, and the tokens per cost, beside taking the best one at every look.

No model is needed: a draft that is tested is accepted with a probability that depends on its rank. Costs are those
measured of LlamaGen-XL and Lumina-mGPT-7B on an H200 (tools/benchmarks/results/gpu-nvidia-h200.md; the drafter's follow
from the rounds of a chain), and of LlamaGen-B on a CPU (measured.md; the drafter's are a guess).
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

from comfyui_specar.samplers.drafts.auto import (
    LASTS,
    MEMORY,
    RANKS,
    UNIT,
    Auto,
    Paths,
    acceptance_by,
    best_paths,
    sibling_chances,
    tokens_per_round,
)
from comfyui_specar.samplers.drafts.costs import PassCosts
from comfyui_specar.samplers.drafts.structures import Extent
from comfyui_specar.samplers.drafts.trees import Path

IMAGES = 5
MACHINES = {  # costs, and tokens of an image
    "LlamaGen-XL, H200": (PassCosts(((1, 1.0), (17, 1.2), (33, 1.75), (65, 1.8)), 0.1, ((1, 0.05),)), 1024),
    "Lumina-mGPT-7B, H200": (PassCosts(((1, 1.0), (17, 1.26), (33, 1.67), (65, 1.9)), 0.2, ((1, 0.07),)), 2352),
    "LlamaGen-B, bf16, CPU": (
        PassCosts(((1, 1.0), (5, 1.11), (9, 1.28), (17, 1.57), (33, 2.35), (58, 3.28)), 0.15, ((1, 0.06), (16, 0.12))),
        256,
    ),
}
RATES = 0.72, 0.4, 0.33, 0.27  # acceptance by rank of the bundled drafter, that of the last for all others


class AlwaysBest(Auto):
    """The tree with the most tokens per cost, of all, at every look at the counts."""

    def best(self, read: tuple[int, ...]) -> tuple[Paths, float]:
        assert isinstance(self.costs, PassCosts)
        paths, tokens, rate = best_paths(acceptance_by(read), self.costs, self.nodes)
        return paths, tokens / rate


def simulated(structure: Auto, tokens: int) -> tuple[float, set[Paths]]:
    """Expected tokens per cost of the trees that are taken, and these."""
    chance = random.Random(0)
    row = [RATES[min(rank, len(RATES) - 1)] for rank in range(RANKS)]
    levels = structure.size()[1]
    reached = [sibling_chances(row)] * levels
    taken: set[Paths] = set()
    gained = spent = 0.0
    for _ in range(IMAGES):
        counts, extent, decided = [0.0] * (2 * levels * RANKS), Extent(), 0
        while decided < tokens:
            read = tuple(round(count * UNIT) for count in counts)
            if isinstance(structure, AlwaysBest):
                paths, cost = structure.best(read)
            else:
                extent = structure.next_extent(extent, read)
                paths, cost = structure.trees()[extent.values[0]]
            taken.add(paths)
            children, value = children_of(paths), tokens_per_round(paths, reached)
            for _ in range(LASTS):
                counts = [count * (1 - 1 / MEMORY) for count in counts]
                node: Path | None = ()
                while node is not None:
                    decided += 1
                    node = verified(children[node], row, counts, chance)
                gained, spent = gained + value, spent + cost
    return gained / spent, taken


def children_of(paths: Paths) -> defaultdict[Path, list[Path]]:
    """By parent, in the order in which they are tested."""
    found: defaultdict[Path, list[Path]] = defaultdict(list)
    for path in sorted(paths):
        found[path[:-1]].append(path)
    return found


def verified(siblings: list[Path], row: Sequence[float], counts: list[float], chance: random.Random) -> Path | None:
    """The one that is accepted, if any. Adds to the counts of tests, and after these of acceptances."""
    for path in siblings:
        place = (len(path) - 1) * RANKS + path[-1]
        counts[place] += 1
        if chance.random() < row[path[-1]]:
            counts[len(counts) // 2 + place] += 1
            return path
    return None
