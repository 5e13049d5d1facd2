"""What passes of a model and its drafter cost on this machine, by the tokens they are fed: measured in a run, once.

A measured pass is one of the run's own, after its prompt and prefix were read, whose tokens are not committed: it
leaves no trace in the run, and needs no memory that the run has not. Random numbers are functions of seed, position and
round, so none is used up.
"""

from __future__ import annotations

import hashlib
import math
import platform
import time
from collections.abc import Callable, Hashable, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...device.graphs import Graphs
from ..constants import counting
from ..contract import StepOut
from ..drafts.costs import PassCosts
from ..drafts.growing import Root, grow_sampled
from ..drafts.trees import Tree, shape_of
from .tree_rounds import Observed, Round, accept, record_tokens, start_drafting

if TYPE_CHECKING:
    from ..engine.run import Run

WIDTHS = (1, 2, 3, 5, 9, 17, 33, 65)
FRONTIERS = (1, 4, 16)
OBSERVED = 3  # tokens of a round
TRIES = 3  # of each pass at least, in turns; the least counts
MOST_TRIES = 8
LONG = 0.3  # seconds of further tries
SLOW = 0.1  # seconds: a pass that takes longer is tried once
MOST = 3.5  # times the narrowest pass: wider ones than the first that costs as much are not measured

Step = Callable[[Tensor], Any]  # of the committed tokens [B]
clock = time.perf_counter
known: MutableMapping[str, PassCosts] = {}  # by a digest of what they depend on; ComfyUI's nodes keep them in a file


def pass_costs(run: Run, committed: Tensor, out: StepOut, graphs: Graphs, width: int, expansions: int) -> PassCosts:
    """The costs for a run that has ``committed`` [B] tokens, predicted by ``out`` [R, 1, ...], and feeds at most
    ``width`` tokens and expands ``expansions`` drafts.

    Measured if they are not known of such a run, so that a model that is loaded again has the costs, and the images, of
    before. graphs: those of its session; if these are active, captured passes are measured.
    """
    assert run.drafter is not None
    device = torch.cuda.get_device_name(run.model.device) if run.model.device.type == "cuda" else str(run.model.device)
    machine = platform.node(), device, torch.get_num_threads(), torch.__version__
    weights = weights_of(run.model), weights_of(run.drafter.module)
    shapes = tuple(out.logits.shape), run.inputs.layout.length, width, expansions, run.params.switches, graphs.active
    key = hashlib.sha256(repr((machine, weights, shapes, run.method.rule.name)).encode()).hexdigest()[:16]
    if key not in known or not _of_run(known[key], width, expansions):
        known[key] = measure_passes(run, committed, out, graphs, width, expansions)
    return known[key]


def _of_run(costs: PassCosts, width: int, expansions: int) -> bool:
    """Whether costs, perhaps from a file, are of passes that ``measure_passes`` times for such a run."""
    widths, expanded = ([tokens for tokens, _ in curve] for curve in (costs.target, costs.expand))
    return widths == [*WIDTHS[: len(widths)]] and widths[-1] <= width and expanded == _frontiers(expansions)


def _frontiers(expansions: int) -> list[int]:
    """Drafts that passes of the drafter expand, of ``expansions`` at most."""
    return [n for n in FRONTIERS if n <= expansions]


def weights_of(model: Any) -> Any:
    """Sizes and dtypes of a model's weights, on which the cost of its passes depends; of a toy the model itself."""
    return [(*p.shape, p.dtype) for p in model.parameters()] if isinstance(model, nn.Module) else model


def measure_passes(run: Run, committed: Tensor, out: StepOut, graphs: Graphs, width: int, expansions: int) -> PassCosts:
    """Times all passes. See pass_costs()."""
    own = type(graphs)(run.model.device)
    own.active = graphs.active
    middle = None if run.pads else (int(committed.max()) + run.inputs.layout.length) // 2 + width
    run.model.set_attention_length(run.cache, middle)
    assert run.drafter is not None
    run.drafter.set_attention_length(run.draft_state, middle)
    hidden = out.hidden.expand(-1, OBSERVED, -1)

    def seconds(kind: str, steps: dict[int, Step], most: float = math.inf) -> list[tuple[int, float]]:
        passes = [_captured(own, (kind, n), step, committed) for n, step in steps.items()]
        return list(zip(steps, least_times(passes, run.model.device, 2 * own.active, most), strict=False))

    target = seconds("target", {n: _target(run, n) for n in WIDTHS if n <= width}, MOST)
    frontiers = [0, *_frontiers(expansions)]
    (_, observe), *both = seconds("draft", {n: partial(_draft, run, hidden, n) for n in frontiers})
    (_, verify), *_ = seconds("verify", {0: _verification(run, hidden, committed)})
    own.forget()
    return PassCosts.of_seconds(target, observe + verify, [(n, max(both - observe, 0.0)) for n, both in both])


def _target(run: Run, width: int) -> Step:
    """A pass over ``width`` tokens."""

    def step(committed: Tensor) -> Tensor:
        position, mask = _chain(committed, width)
        return run.model.step(run.cache, torch.zeros_like(position), position, mask).logits

    return step


def _draft(run: Run, hidden: Tensor, frontier: int, committed: Tensor) -> Tree:
    """A tree of one level, after the drafter's pass over the tokens of a round; or of ``frontier`` drafts with a child
    each. The drafter keeps nothing."""
    work = start_drafting(run)
    position, _ = _chain(committed, OBSERVED)
    token, none = torch.zeros_like(position), torch.zeros_like(committed)
    out = work.drafter.observe(run.draft_state, token, position, hidden, none)
    first = tuple((rank,) for rank in range(max(frontier, 1)))
    shape = shape_of((*first, *((*path, 0) for path in first[:frontier])))
    return grow_sampled(work, Root(none, committed, out), shape, none[0])


def _verification(run: Run, hidden: Tensor, committed: Tensor) -> Step:
    """Verification of a small tree, and the record of it, which gets no token."""
    tree = _draft(run, hidden, 1, committed)
    position, mask = committed[:, None] + tree.depth, tree.tree_mask()
    logits = run.model.step(run.cache, tree.token, position, mask).logits.clone()
    none = torch.zeros_like(committed)
    observed = Observed(tree.token, committed, none, hidden)  # of no interest here
    state = Round(committed, none, observed, None, None, None, passes=none, index=none[0])

    def step(committed: Tensor) -> Tensor:
        verified, probs_after = accept(run.method.structure, run.method.rule, run, state, tree, logits, position)
        record_tokens(run, state, tree, verified, torch.zeros_like(committed), probs_after)
        return verified.token

    return step


def _chain(committed: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Positions [B, width] after the committed tokens, and the mask [B, width, width] of a chain."""
    column = counting(width, committed.device)
    return committed[:, None] + column, (column <= column[:, None]).expand(len(committed), -1, -1)


def _captured(graphs: Graphs, key: Hashable, step: Step, committed: Tensor) -> Callable[[], Any]:
    """A function that computes step(committed), captured by ``graphs`` if they are active."""
    state: tuple[Tensor, Any] = committed, None

    def call() -> None:
        nonlocal state
        state = graphs(key, lambda given: (given[0], step(given[0])), state)

    return call


def least_times(
    passes: list[Callable[[], Any]], device: torch.device, warm_up: int = 0, most: float = math.inf
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
