"""Which of two implementations runs: the torch reference, or on an NVIDIA GPU the Triton kernel of the same name.

The Triton kernel of ``kernels/x.py:f`` is ``kernels/x_triton.py:f``, with the same signature and results. Triton comes
with torch on Linux; where it is missing or of no use, the reference runs (see ``runs_triton``). A Triton kernel is
validated before its first use with arguments of a kind (see ``kind``): it and the reference compute the same trial and
must agree. Only then does one of them compute what was asked for, so that the first call of a process gives what every
later one gives, to the last bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from functools import cache, partial, wraps
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
_chosen: dict[Hashable, Callable[..., Any]] = {}  # by reference and kind of arguments, decided before their first use
_doubted: set[Hashable] = set()  # those whose Triton kernel has failed once


def accelerated(reference: F | None = None, *, trial: Callable[..., tuple] | None = None) -> F:
    """Let a torch reference be replaced by its Triton kernel where its first argument is on a GPU that runs Triton.

    trial: arguments -> those that the two are compared on, for functions that write in their arguments: copies of what
    is written, and no more of it than a comparison needs. None: the arguments themselves.
    """
    if reference is None:
        return partial(accelerated, trial=trial)  # type: ignore[return-value]

    @wraps(reference)
    def call(first: Tensor, *rest: Any) -> Any:
        if not first.is_cuda or not runs_triton(first.device):
            return reference(first, *rest)
        if first.requires_grad and torch.is_grad_enabled():  # Triton kernels have no gradients
            return reference(first, *rest)
        given = first, *rest
        case = reference, first.device, *map(kind, given)
        if case not in _chosen:
            if recording():  # the first call of a step is an ordinary one, so this is rare
                return reference(*given)
            _choose(case, reference, trial, given)
        return _call(case, reference, given)

    call.trial = trial  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def kind(value: Any) -> Hashable:
    """What of an argument may lead to another kernel, or to another way through it: whether it is there, its dtype, its
    sizes rounded up to powers of two (as the tiles of a kernel are), and whether a number is 0 or 1, which switch
    things off."""
    if isinstance(value, Tensor):
        return value.dtype, *(1 << (size - 1).bit_length() if size else 0 for size in value.shape)
    if isinstance(value, tuple):
        return tuple(map(kind, value))
    if value is None or isinstance(value, (bool, str)):
        return value
    return (type(value), value) if isinstance(value, (int, float)) and value in (0, 1) else type(value)


def _choose(case: Hashable, reference: Callable[..., Any], trial: Callable[..., tuple] | None, given: tuple) -> None:
    """Decide what computes a case from now on.

    A number on the edge of two decisions may fall on either side, and memory may be short for a moment: so a kernel
    gets a second try, and until then nothing is decided.
    """
    try:
        kernel = triton_kernel(reference)
        if agree(reference, kernel, trial, given):
            _chosen[case] = kernel
            return
        why = "computes something else than its torch version, which is used instead"
    except torch.OutOfMemoryError as error:
        why = f"cannot be validated for want of memory, so its slower torch version runs: {error}"
    except Exception as error:  # whatever a compiler or driver may raise: the reference is always there
        _leave(case, reference, _does_not_run(error))
        return
    if case in _doubted:
        _leave(case, reference, why)
    _doubted.add(case)


def _call(case: Hashable, reference: Callable[..., Any], given: tuple) -> Any:
    """The result of what was chosen for a case, or of the reference if a kernel proves not to run after all.

    What cannot be compiled or launched has not written anything yet.
    """
    function = _chosen.get(case, reference)
    try:
        return function(*given)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton's compiler has exceptions of its own
        if function is reference:
            raise
        _leave(case, reference, _does_not_run(error))
        return reference(*given)


def _leave(case: Hashable, reference: Callable[..., Any], why: str) -> None:
    """The reference computes a case from now on; the log tells why, once."""
    _chosen[case] = reference
    log.warning("The Triton kernel %s %s", reference.__name__, why)


def _does_not_run(error: Exception) -> str:
    return f"does not run here, so its slower torch version does: {error}"


def triton_kernel(reference: Callable[..., Any]) -> Callable[..., Any]:
    """The function that launches the Triton kernel of a reference."""
    return getattr(import_module(f"{reference.__module__}_triton"), reference.__name__)


def agree(
    reference: Callable[..., Any], kernel: Callable[..., Any], trial: Callable[..., tuple] | None, given: tuple
) -> bool:
    """Do the two return and write the same, up to round-off? Nothing of ``given`` is written."""
    outcomes = []
    for function in (reference, kernel):
        tried = given if trial is None else trial(*given)
        outcomes.append(leaves((function(*tried), tried)))
    return all(alike(a, b) for a, b in zip(*outcomes, strict=True))


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


def alike(a: Tensor, b: Tensor) -> bool:
    """Equal up to round-off, which may also turn one decision in a hundred.

    Sums that nearly cancel keep the error of their terms: so it is compared with the size of all numbers, too.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point():
        step = torch.finfo(a.dtype).eps  # halves keep few digits
        size = float(a.float().nan_to_num(posinf=0, neginf=0).square().mean().sqrt()) if a.numel() else 0.0
        least = max(1e-5, 2 * step) * max(1.0, size)
        different = ~torch.isclose(a, b, rtol=max(1e-3, 8 * step), atol=least, equal_nan=True)
    else:
        different = a != b
    return int(different.sum()) <= a.numel() // 100
