"""The first image of a model on a GPU: its first steps are captured and called, and must be the same.

A driver, a card or a version of torch that nobody has tried may replay something else than it captured. The image would
be wrong without an error, so the first steps are compared, once per process and model: two prompts' passes and a few
steps.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import replace
from weakref import WeakSet

import torch
from torch import Tensor

from ...device import graphs
from ..continuous_contract import ContinuousProgress, ContinuousRequest
from ..contract import Method, Progress, Request
from . import session

PASSES = 8  # that are compared: the second is captured, and the later ones are replayed
SEEDS = 2  # a near tie may be decided either way, but hardly twice
# Of two probabilities. The launches are the same, but a library may sum in another order while it is captured: in bf16
# that changes a logit of 10 by 2^-8 of it, and so a probability by 4 %.
RELATIVE, ABSOLUTE = 0.05, 1e-3
# Of two vectors, relative to their length. Captured steps are padded, which is 0.6 % in bf16 on a CPU. The median
# counts: a draft near the limit of acceptance may be decided either way.
VECTORS = 0.1
_checked: WeakSet = WeakSet()  # models


class _StoppedError(Exception):
    """The first passes are over."""


def check_captured(method: Method, request: Request | ContinuousRequest) -> None:
    """Capture nothing any more in this process if captured steps of the run are not those that are called."""
    model = request.model
    if model in _checked or not session.Graphs.may_capture(model.device):
        return
    _checked.add(model)
    key = method.session_key(request)
    method = method.without_measuring()  # called passes cost something else: other trees
    requests = (replace(request, seed=request.seed + number) for number in range(SEEDS))
    if not any(agree(*(first_passes(method, each, captured) for captured in (False, True))) for each in requests):
        graphs.give_up(
            "captured steps compute something else here than the same steps called. The image is generated "
            f"without them. Please report this with the GPU, its driver and torch {torch.__version__}."
        )
    if method.session_key(request) != key:  # the run has caches of its own, and no room for these
        model.sessions.pop(method.session_key(request), None)


def first_passes(method: Method, request: Request | ContinuousRequest, captured: bool) -> tuple[Tensor, Tensor]:
    """Tokens of a run's first passes, [B, S] and -1 where not decided, and their probabilities [B, S]. Of a continuous
    model 0 or -1, and their vectors [B, S, C]."""
    found: list[tuple[Tensor, Tensor]] = []

    def stop(progress: Progress | ContinuousProgress) -> None:
        if isinstance(progress, ContinuousProgress):
            found[:] = [(progress.known.cpu().long() - 1, progress.tokens.to("cpu", copy=True))]
        else:
            assert progress.p is not None, "which every method reports"
            decided = torch.arange(progress.length) < progress.committed[:, None]
            found[:] = [(torch.where(decided, progress.tokens.cpu(), -1), progress.p.to("cpu", copy=True))]
        if progress.passes >= PASSES:
            raise _StoppedError

    with nullcontext() if captured else graphs.eager(), suppress(_StoppedError):
        method.sample(replace(request, callback=stop))
    return found[0]


def agree(called: tuple[Tensor, Tensor], captured: tuple[Tensor, Tensor]) -> bool:
    """Are the tokens the same, and their probabilities or vectors up to round-off?"""
    both = (called[0] >= 0) & (captured[0] >= 0)
    (tokens, values), (others, theirs) = ((token[both], value[both]) for token, value in (called, captured))
    if values.dim() == 1:
        return torch.equal(tokens, others) and torch.allclose(values, theirs, rtol=RELATIVE, atol=ABSOLUTE)
    return bool(((values - theirs).norm(dim=-1) / values.norm(dim=-1)).median() < VECTORS)
