"""A run of a method for token ids: what its steps may ask for, and everything around them.

A method is mathematics: ``begin`` and ``step``, functions of tensors. The rest is here: caches, sessions, captured
steps, random numbers, the record and the loop.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ...device import batch_invariant
from ...device.graphs import Graphs
from ..constants import constant
from ..contract import ARModel, Drafter, Extent, Method, Progress, Request, Result, SamplingParams, StepOut
from ..layout import TokenLayout
from ..probabilities import check_finite, sampling_probs
from ..rng import Stream
from ..trace import Record, Trace
from .memory import run_bytes
from .prefix_tokens import read_prefix
from .session import Poll, Session, session_key, use_session


class StepState(Protocol):
    """What a step passes to the next one: tensors in frozen dataclasses. A step does not write to it."""

    @property
    def committed(self) -> Tensor:
        """[B] (int64), tokens decided so far."""
        ...

    @property
    def draft(self) -> Tensor | None:
        """[B, D] (int64), the guesses after these that the next step feeds; None if it feeds no guess."""
        ...

    @property
    def extent(self) -> Tensor | None:
        """[N] (int64), what the host reads for the next step's Extent; None if it need not know any."""
        ...


class Halfway:
    """The state within a round of two steps.

    The host reads its ``extent`` [N] (int64), which is that of the second step and decides what the step does.
    """

    extent: Tensor


class DiscreteMethod(Method):
    """A method for token ids, as two functions: ``begin`` and ``step``. ``drafter``, if it has one, drafts for it."""

    round_fields: ClassVar[tuple[str, ...]] = ()  # of the record; none where rounds follow from the positions
    feeds_tree: ClassVar[bool] = False  # does a step feed a tree, whose slots may lie past the end of the image
    same_image: ClassVar[bool] = False  # must passes of more tokens round as those of one, to make next token's image

    @abstractmethod
    def begin(self, run: Run, committed: Tensor, out: StepOut) -> StepState:
        """The state after ``committed`` [B] tokens and the one that ``out`` [R, 1, ...] predicts, which is sampled."""

    @abstractmethod
    def step(self, run: Run, state: Any, extent: Extent = Extent()) -> StepState | Halfway:
        """One round: a forward pass. Complete images stay as they are. It may return a Halfway, and be given it next.

        It may be replayed as a CUDA graph, and so reads nothing on the host.
        """

    def next_extent(self, before: Extent, read: tuple[int, ...], pads: bool) -> Extent:
        """The extent by what the host has just read of a state; before: the last one, Extent() at the start of a run;
        pads: see Graphs."""
        return Extent(read)

    def fit(self, run: Run, committed: Tensor, out: StepOut, graphs: Graphs, request: Request) -> DiscreteMethod:
        """The method with what it measures in a run that is about to begin (see ``begin``). graphs: the session's."""
        return self

    def bind(self, request: Request) -> DiscreteMethod:
        """The method with what its settings mean for this request. Raises ValueError if the model lacks something."""
        return self

    def draft_state(self, request: Request, into: Any) -> Any:
        """The Run's draft_state, without a drafter. into: that of an earlier run, which is reused."""
        return None

    def target_passes(self, second: Extent) -> int:
        """Forward passes of the target in a round whose second half has this extent, Extent() if there is none."""
        return 1

    def annotate(self, trace: Trace) -> None:
        """Add to a finished trace what follows from it."""

    def session_key(self, request: Request) -> Hashable:
        return session_key(request, self, self.width(request))

    def run_bytes(self, request: Request) -> int:
        drafter, draft_width = getattr(self, "drafter", None), getattr(self, "draft_width", 0)
        return run_bytes(request, self.width(request), drafter, draft_width)

    def sample(self, request: Request) -> Result:
        self.check(request)
        started = time.perf_counter()
        with use_session(self, request, getattr(self, "drafter", None)) as session:
            run, state, known = begin(self.bind(request), request, session)
            host = run_rounds(run, request, session.graphs, state, known)
            settings = run.method.describe(request) | asdict(request.params)
            seconds, width = time.perf_counter() - started, self.width(request)
            trace = run.record.finish(run.inputs.layout, request.seed, settings, seconds, width=width, **host)
            run.method.annotate(trace)
            return Result(run.record.image.clone(), trace)


@dataclass(frozen=True)
class RunInputs:
    """What a run gives its steps.

    end [B] (int64): see TokenLayout; strength [1 or B, S] (fp32), skippable [B, S] (bool): see Request.
    """

    stream: Stream
    layout: TokenLayout
    end: Tensor
    strength: Tensor | None
    skippable: Tensor | None


@dataclass(frozen=True)
class Run:
    """What steps share: ``inputs``, and what is constant in captured steps.

    cache: the target's state; draft_state: the drafter's, or without one what the method itself keeps of positions;
    codebook [V, C]; pads: see Graphs; forcing: does the layout force any token.
    """

    method: Any
    model: ARModel
    cache: Any
    drafter: Drafter | None
    draft_state: Any
    params: SamplingParams
    codebook: Tensor | None
    pads: bool
    record: Record
    forcing: bool
    inputs: RunInputs

    def predict(self, token: Tensor, position: Tensor, tree_mask: Tensor | None = None) -> Tensor:
        """Feed tokens [B, T] at positions [B, T]; the target's probabilities [B, T, V+] after them."""
        with batch_invariant.asking(self.method.same_image):
            logits = self.model.step(self.cache, token, position, tree_mask).logits
        return self.probs(logits, position)

    def probs(self, logits: Tensor, position: Tensor) -> Tensor:
        """The target's probabilities [B, T, V+] after positions [B, T], from its logits [R, T, V+]."""
        forced = self.inputs.layout.forced_ids(position + 1) if self.forcing else None
        return sampling_probs(logits, self.params, self.model.vocab, forced)

    def keep(self, count: Tensor, path: Tensor | None = None) -> None:
        """Keep the first ``count`` [B] of the tokens fed, or of ``path`` [B, P] (indices), in the target's cache."""
        self.model.commit(self.cache, count, path)

    def count_decided(self, accepted: Tensor, committed: Tensor) -> Tensor:
        """How many tokens [B] images decide: those before the first that is not ``accepted`` [B, W] (bool), and this.

        The last column has no guess and is never accepted.
        """
        columns, device = accepted.shape[1], accepted.device
        last, number = (constant(values, device, torch.int64) for values in ((columns,), tuple(range(1, columns + 1))))
        return torch.where(accepted, last, number).amin(-1).minimum(self.inputs.end - committed)

    def strength_at(self, position: Tensor) -> Tensor:
        """How far a relaxed rule may go at positions [B, T]."""
        strength, last = self.inputs.strength, self.inputs.layout.length - 1
        if strength is None:
            return torch.ones(position.shape, device=position.device)
        return strength.expand(len(position), -1).gather(1, position.clamp(max=last))


@dataclass(frozen=True)
class StepInputs:
    """What a captured step is given: the inputs of its run, and a method's state."""

    inputs: RunInputs
    state: Any


def begin(method: Any, request: Request, session: Session) -> tuple[Run, StepState, Tensor]:
    """Read the prompt and the prefix tokens, and sample the token after them: the run, its state, and how many tokens
    [B] (int64, on the CPU) of every image are then decided."""
    model, params, batch, drafter = request.model, request.params, request.batch, getattr(method, "drafter", None)
    device, layout = model.device, request.layout.to(model.device)
    strength = None if request.strength is None else request.strength.to(device, torch.float32)
    skippable = None if request.skippable is None else request.skippable.to(device).expand(batch, -1)
    prompt = (request.conditioning, request.negative, batch, layout)
    cache = model.start(*prompt, slack=method.width(request), guided=params.guided, into=session.state)
    if drafter is None:
        draft_state = method.draft_state(request, session.draft_state)
    else:
        slack, old = method.draft_width, session.draft_state
        draft_state = drafter.start(cache, *prompt, slack=slack, guided=params.guided, into=old)
    session.adopt(cache, draft_state)
    session.record = session.record or Record.empty(layout.length, batch, device, round_fields=method.round_fields)
    # Without prefix tokens, it starts at the prompt's own prediction.
    start = read_prefix(model, cache, layout, batch, drafter, draft_state, request.callback)
    check_finite(start.out)
    run = Run(
        method,
        model,
        cache,
        drafter,
        draft_state,
        session.params(params, device),
        None if model.codebook is None else model.codebook.to(device),
        session.graphs.pads,
        session.record,
        layout.forces,
        RunInputs(Stream.of(request.seed, batch, device), layout, layout.end.expand(batch), strength, skippable),
    )
    session.record.begin(start.tokens, start.committed, layout)
    run = replace(run, method=method.fit(run, start.committed, start.out, session.graphs, request))
    return run, run.method.begin(run, start.committed, start.out), start.prefix_length + 1


def run_rounds(run: Run, request: Request, graphs: Graphs, state: StepState, known: Tensor) -> dict[str, Any]:
    """Launch rounds until all images are complete; returns what the host counted, as Record.finish takes it.

    known [B] (int64, on the CPU): tokens decided, as far as the host knows. On a GPU one round more than necessary is
    launched.
    """
    method, model, length, end = run.method, run.model, run.inputs.layout.length, run.inputs.end.cpu()
    width, extent = method.width(request), Extent()
    past_end = width if method.feeds_tree else 0
    inputs = StepInputs(run.inputs, state)
    poll, extents = Poll(model.device, request.batch), []
    passes = 1 - poll.lag
    while True:
        state = inputs.state
        known = torch.maximum(known, poll(state.committed))
        if request.callback:
            image, p = run.record.image, run.record.p
            request.callback(Progress(image, known, length, passes, state.draft, state.committed, p))
        if (known >= end).all():
            break
        if len(extents) % extent.lasts == 0:
            extent = method.next_extent(extent, read_extent(state), run.pads)
        # A round decides at most ``width`` tokens, also a round that is launched but not yet known.
        decided = int(known.max()) + poll.lag * width
        longest = None if run.pads else min(length + past_end, decided + width)
        shape = [run.params.switches, model.set_attention_length(run.cache, longest)]
        if run.drafter is not None:
            longest = None if run.pads else decided + method.draft_width + 1
            shape.append(run.drafter.set_attention_length(run.draft_state, longest))
        shape.append(extent.variant)
        inputs, second = graphs(tuple(shape), step_of(run, extent), inputs), Extent()
        if isinstance(inputs.state, Halfway):
            second = Extent(read_extent(inputs.state))
            inputs = graphs((*shape, second), step_of(run, second), inputs)
        passes += method.target_passes(second)
        extents.append(extent)
    needed = extents[: max(0, len(extents) - poll.lag)]
    expected = [extent.expected_tokens for extent in needed]
    return {
        "draft_passes": sum(extent.drafter_passes for extent in needed),
        "expected": [1.0, *expected] if any(expected) else (),
    }


def read_extent(state: StepState | Halfway) -> tuple[int, ...]:
    """What the host must know of a state, () if nothing. Waits for a GPU."""
    return () if state.extent is None else tuple(state.extent.tolist())


def step_of(run: Run, extent: Extent = Extent()) -> Callable[[StepInputs], StepInputs]:
    """A step of the run from its inputs alone."""

    def step(given: StepInputs) -> StepInputs:
        return replace(given, state=run.method.step(replace(run, inputs=given.inputs), given.state, extent))

    return step
