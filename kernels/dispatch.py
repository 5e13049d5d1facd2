"""Which of two twins runs: the torch reference, or on an NVIDIA GPU the Triton kernel of the same name.

The twin of ``kernels/x.py:f`` is ``kernels/x_triton.py:f``, with the same signature and results. Triton comes with
torch on Linux; where it is missing or of no use, the reference runs (see ``runs_triton``). A twin earns trust on its
first call with arguments of a kind (dtypes, switches, what is left out): both run and must agree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import switches
from .graphs import leaves, recording

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])
OLDEST = 8, 0  # compute capability, that of GPUs since 2020
_chosen: dict[Hashable, Callable[..., Any]] = {}  # by name and kind of arguments, decided at their first call on a GPU
_doubted: set[Hashable] = set()  # those whose twin has failed once


def accelerated(reference: F) -> F:
    """Let a torch reference be replaced by its Triton twin where its first argument is on a GPU that runs Triton."""

    @wraps(reference)
    def call(first: Tensor, *rest: Any, **named: Any) -> Any:
        if not first.is_cuda or not runs_triton(first.device):
            return reference(first, *rest, **named)
        if first.requires_grad and torch.is_grad_enabled():  # twins have no gradients
            return reference(first, *rest, **named)
        case = reference, *map(_kind, (first, *rest, *named.values()))
        if case in _chosen:
            return _chosen[case](first, *rest, **named)
        if recording():  # the first call of a step is an ordinary one, so this is rare
            return reference(first, *rest, **named)
        choice, result = _choose(reference, first, *rest, **named)
        if choice is reference and case not in _doubted:
            _doubted.add(case)  # a number on the edge of two decisions may fall on either side: it gets another try
        else:
            _chosen[case] = choice
        return result

    return call  # type: ignore[return-value]


def _kind(value: Any) -> Hashable:
    """What of an argument may lead to another kernel, or to another way through it."""
    if isinstance(value, Tensor):
        return value.dtype
    return value if value is None or isinstance(value, (bool, str)) else type(value)


@cache
def runs_triton(device: torch.device) -> bool:
    """Do Triton's kernels run on this device? The log tells once why a GPU has to do without.

    Compilers may end the process over what they cannot compile, so that nothing is tried where nothing was written
    for: on AMD's GPUs, and on NVIDIA's before compute capability 8.0, whose registers the kernels overflow.
    """
    if device.type != "cuda":
        return False
    if switches.on(switches.NO_TRITON):
        missing = f"{switches.NO_TRITON} is set"
    elif torch.version.hip:
        missing = "the Triton kernels are for NVIDIA GPUs"
    elif torch.cuda.get_device_capability(device) < OLDEST:
        missing = f"the Triton kernels are for GPUs of compute capability {OLDEST[0]}.{OLDEST[1]} or higher"
    elif not has_triton():
        missing = "Triton is not installed"
    else:
        return True
    log.info("The slower torch versions of the kernels run: %s.", missing)
    return False


def has_triton() -> bool:
    """Is Triton installed?"""
    try:
        return find_spec("triton") is not None
    except ValueError:  # somebody has put an empty module in its place
        return False


def _choose(reference: Callable[..., Any], *given: Any, **named: Any) -> tuple[Callable[..., Any], Any]:
    """The function to use from now on, and the result of this first call."""
    try:
        copies = tuple(x.clone() if isinstance(x, Tensor) else x for x in given)  # either may write in its arguments
    except torch.cuda.OutOfMemoryError as error:
        log.warning("No memory to try the Triton kernel %s, so its torch version runs: %s", reference.__name__, error)
        return reference, reference(*given, **named)
    result = reference(*given, **named)
    name = reference.__name__
    try:
        twin = getattr(import_module(f"{reference.__module__}_triton"), name)
        there, here = leaves((result, given)), leaves((twin(*copies, **named), copies))
        agree = all(alike(a, b) for a, b in zip(there, here, strict=True))
    except Exception as error:  # whatever a compiler or driver may raise: the reference is always there
        log.warning("The Triton kernel %s does not run here, so its slower torch version does: %s", name, error)
        return reference, result
    if not agree:
        log.warning("The Triton kernel %s computes something else than its torch version, which is used instead.", name)
        return reference, result
    return twin, result


def alike(a: Tensor, b: Tensor) -> bool:
    """Equal up to round-off, which may also turn one decision in a hundred."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point():
        step = torch.finfo(a.dtype).eps  # halves keep few digits
        different = ~torch.isclose(a, b, rtol=max(1e-3, 8 * step), atol=max(1e-5, 2 * step), equal_nan=True)
    else:
        different = a != b
    return int(different.sum()) <= a.numel() // 100
