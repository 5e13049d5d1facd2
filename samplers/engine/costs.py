"""What passes of a model and its drafter cost on this machine, by the tokens they are fed: measured in a run, once.

A measured pass is one of the run's own, after its prompt and prefix were read, whose tokens are not committed: it
leaves no trace in the run, and needs no memory that the run has not. Random numbers are functions of seed, position and
round, so none is used up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...kernels.graphs import Graphs
from ...kernels.sampling import readable
from ..constants import counting
from ..contract import StepOut
from ..drafts.costs import PassCosts
from ..drafts.growing import Drafting
from ..rng import Purpose

if TYPE_CHECKING:
    from .run import Run

WIDTHS = (1, 2, 3, 5, 9, 17, 33, 65)
FRONTIERS = (1, 4, 16)
OBSERVED = 3  # tokens of a round
VISITED = 3  # slots whose probabilities verification asks for, where it asks for them one by one
TRIES = 3  # of each pass at least, in turns; the least counts
MOST_TRIES = 8
LONG = 0.3  # seconds of further tries
SLOW = 0.1  # seconds: a pass that takes longer is tried once
MOST = 3.5  # times the narrowest pass: wider ones than the first that costs as much are not measured

clock = time.perf_counter
_known: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[Hashable, PassCosts]]] = WeakKeyDictionary()


def pass_costs(run: Run, committed: Tensor, out: StepOut, graphs: Graphs, width: int, expansions: int) -> PassCosts:
    """The costs for a run that has ``committed`` [B] tokens, predicted by ``out`` [R, 1, ...], and feeds at most
    ``width`` tokens and expands ``expansions`` drafts.

    Measured if they are not known of this model and drafter for such a run. graphs: those of its session; if these are
    active, captured passes are measured.
    """
    known = _known.setdefault(run.model, WeakKeyDictionary()).setdefault(run.drafter, {})
    shapes = out.logits.shape, run.layout.length, width, expansions, run.params.switches, graphs.active
    key = (*shapes, run.model.dtype, str(run.model.device), torch.get_num_threads())
    if key not in known:
        known[key] = measured(run, committed, out, graphs, width, expansions)
    return known[key]


def measured(run: Run, committed: Tensor, out: StepOut, graphs: Graphs, width: int, expansions: int) -> PassCosts:
    """Times all passes. See pass_costs()."""
    own = type(graphs)(run.model.device)
    own.active = graphs.active
    length = run.layout.length
    middle = (int(committed.max()) + length) // 2 + width
    run.model.set_attention_length(run.cache, None if run.pads else middle)
    target = [_captured(own, ("target", n), _target(run, n), committed) for n in WIDTHS if n <= width]
    seconds = least_times(target, run.model.device, warm_up=2 * own.active)
    assert run.drafter is not None
    run.drafter.set_attention_length(run.memory, None if run.pads else middle)
    frontiers = [n for n in FRONTIERS if n <= expansions]
    hidden = out.hidden.expand(-1, OBSERVED, -1)
    drafter = [_captured(own, ("drafter", n), _drafter(run, n, hidden), committed) for n in (0, *frontiers)]
    observe, *both = least_times(drafter, run.model.device, warm_up=2 * own.active, most=math.inf)
    own.forget()
    expand = [max(each - observe, 0.0) for each in both]
    return PassCosts.rounded(
        list(zip(WIDTHS, seconds, strict=False)), observe, list(zip(frontiers, expand, strict=True))
    )


def _target(run: Run, width: int) -> Callable[[Tensor], Any]:
    """A pass over ``width`` tokens, and the probabilities that verification takes from it."""

    def step(committed: Tensor) -> Tensor:
        position, mask = _chain(committed, width)
        out = run.model.step(run.cache, torch.zeros_like(position), position, mask)
        visited = min(width, VISITED) if readable(position) else width
        return run.probs(out.logits[:, :visited], position[:, :visited])

    return step


def _drafter(run: Run, frontier: int, hidden: Tensor) -> Callable[[Tensor], Any]:
    """The pass that observes the tokens of a round, and then one that expands ``frontier`` drafts (0: none), each with
    what growing does with a prediction. The drafter keeps nothing of either."""
    assert run.drafter is not None
    drafter = run.drafter
    work = Drafting(drafter, run.memory, run.layout, run.params, run.model.vocab, run.stream, run.forcing)

    def children(out: StepOut, position: Tensor) -> Tensor:
        q = work.probs(out.logits, position)
        noise = run.stream.gumbel(position, q.shape[-1], Purpose.DRAFT)
        return q.log().add_(noise).topk(min(4, q.shape[-1])).indices

    def step(committed: Tensor) -> Any:
        position, _ = _chain(committed, OBSERVED)
        tokens, nothing = torch.zeros_like(position), torch.zeros_like(committed)
        out = drafter.observe(run.memory, tokens, position, hidden, nothing)
        found = children(out, position[:, :1])
        if frontier:
            position = position[:, :1].expand(-1, frontier)
            own = torch.eye(frontier, dtype=torch.bool, device=position.device).expand(len(position), -1, -1)
            above = out.hidden.expand(-1, frontier, -1)
            found = children(work.expand(torch.zeros_like(position), position, above, own), position + 1)
        return found

    return step


def _chain(committed: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Positions [B, width] after the committed tokens, and the mask [B, width, width] of a chain."""
    column = counting(width, committed.device)
    return committed[:, None] + column, (column <= column[:, None]).expand(len(committed), -1, -1)


def _captured(graphs: Graphs, key: Hashable, step: Callable[[Tensor], Any], committed: Tensor) -> Callable[[], Any]:
    """A function that computes step(committed), captured by ``graphs`` if they are active."""
    state: tuple[Tensor, Any] = committed, None

    def call() -> None:
        nonlocal state
        state = graphs(key, lambda given: (given[0], step(given[0])), state)

    return call


def least_times(
    passes: list[Callable[[], Any]], device: torch.device, warm_up: int = 0, most: float = MOST
) -> list[float]:
    """The least seconds of each function, in turns (see TRIES); without those after the first that takes ``most`` times
    as long as the first function."""
    for each in passes:
        for _ in range(warm_up):
            each()
    seconds: list[float] = []
    for each in passes:
        again = _seconds(each, device)
        if seconds and again > most * seconds[0] or not seconds:  # a first call may prepare something
            again = min(again, _seconds(each, device))
        seconds.append(again)
        if again > most * seconds[0]:
            break
    quick, began = [place for place, first in enumerate(seconds) if first < SLOW], clock()
    for turn in range(1, MOST_TRIES):
        if turn >= TRIES and clock() - began > LONG:
            break
        for place in quick:
            seconds[place] = min(seconds[place], _seconds(passes[place], device))
    return seconds


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    wait(device)
    began = clock()
    call()
    wait(device)
    return clock() - began


def wait(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
