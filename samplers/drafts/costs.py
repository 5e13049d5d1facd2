"""What forward passes cost, from which a draft structure may choose its size. methods/pass_costs.py measures them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

STEPS = 4  # of the grid of costs in a factor of two: the noise of a measurement is mostly below half a step
MOST, LONGEST = 1e6, 2**20  # a cost, where a pass over one token costs 1, and the tokens of a pass
Curve = tuple[tuple[int, float], ...]  # (tokens, cost), rising


@dataclass(frozen=True)
class PassCosts:
    """Costs in units of one target pass over one token per image.

    target: of a pass by its tokens; round: of what a round has besides, whatever its tree: the drafter's pass over the
    tokens of the round before, its first drafts, verification and record; expand: of a pass of the drafter that expands
    so many drafts, with the children of these.
    """

    target: Curve
    round: float
    expand: Curve

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> PassCosts:
        """From what a trace has of them (``asdict``, as lists after JSON). Raises KeyError, TypeError or ValueError for
        what is no such thing."""
        return cls(_curve(settings["target"]), _cost(settings["round"]), _curve(settings["expand"]))

    @classmethod
    def of_seconds(
        cls, target: Sequence[tuple[int, float]], round: float, expand: Sequence[tuple[int, float]]
    ) -> PassCosts:
        """From seconds, or any other unit. Rounded to a grid, so that another measurement mostly leads to the same
        costs. A narrower pass costs no more: whatever disturbs a measurement makes it longer."""
        one = min(seconds for _, seconds in target)

        def curve(points: Sequence[tuple[int, float]]) -> Curve:
            least = reversed([*accumulate((seconds for _, seconds in reversed(points)), min)])
            return tuple((tokens, _on_grid(cost / one)) for (tokens, _), cost in zip(points, least, strict=True))

        return cls(curve(target), _on_grid(round / one), curve(expand))


USUAL = PassCosts(((1, 1.0), (9, 1.2), (65, 2.4)), 0.3, ((1, 0.15), (16, 0.2)))  # about those of a small model on a GPU


def _curve(points: Sequence[Sequence[Any]]) -> Curve:
    """Points of a file. Raises TypeError or ValueError unless their tokens rise."""
    tokens = [count for count, _ in points]
    whole = tokens and all(type(count) is int and 1 <= count <= LONGEST for count in tokens)
    if not whole or tokens != sorted({*tokens}):
        raise ValueError(f"costs are of {tokens!r:.100} tokens, but must be of 1 to {LONGEST}, which rise")
    return tuple((count, _cost(cost)) for count, cost in points)


def _cost(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= MOST:
        raise ValueError(f"a cost is {value!r:.40}, but must be a number above 0, at most {MOST:g}")
    return float(value)


def _on_grid(cost: float) -> float:
    return round(2 ** (round(STEPS * math.log2(max(cost, 1e-3))) / STEPS), 4)


def cost_of(curve: Curve, tokens: int) -> float:
    """On the line through the measured points around ``tokens``; past the last one, on the line through the last
    two."""
    if len(curve) == 1:
        return curve[0][1]
    place = min(max(bisect_left(curve, (tokens,)), 1), len(curve) - 1)
    (n, low), (m, high) = curve[place - 1 : place + 1]
    return max(low + (high - low) * (tokens - n) / (m - n), 0.0)
