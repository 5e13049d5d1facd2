"""Which of two implementations runs: the torch reference, or on an NVIDIA GPU the Triton kernel of the same name.

The Triton kernel of ``kernels/x.py:f`` is ``kernels/x_triton.py:f``, with the same signature and results. Triton comes
with torch on Linux; where it is missing or not supported, the reference runs (see ``runs_triton``). A Triton kernel is
validated before its first use with arguments of a kind (see ``kind``): it and the reference compute the same trial and
must agree. Only then does one of them compute the result, so the first call of a process gives what every later one
gives, to the last bit.
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
_chosen: dict[Hashable, Callable[..., Any]] = {}  # by reference and kind of arguments, set before their first use
_doubted: set[Hashable] = set()  # cases whose Triton kernel has failed validation once


def accelerated(reference: F | None = None, *, trial: Callable[..., tuple] | None = None) -> F:
    """Replace a torch reference by its Triton kernel if its first argument is on a GPU that runs Triton.

    trial: arguments -> the arguments that the two are compared on, for functions that write to their arguments: copies
    of what is written, no larger than a comparison needs. None: the arguments themselves.
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
            if recording():  # rare: the first call of a step is not captured
                return reference(*given)
            _choose(case, reference, trial, given)
        return _call(case, reference, given)

    call.trial = trial  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def kind(value: Any) -> Hashable:
    """The properties of an argument that may select another kernel, or another path through it: whether it is None, its
    dtype, its sizes rounded up to powers of two (as a kernel's tiles are), and whether a number is 0 or 1, which switch
    features off."""
    if isinstance(value, Tensor):
        return value.dtype, *(1 << (size - 1).bit_length() if size else 0 for size in value.shape)
    if isinstance(value, tuple):
        return tuple(map(kind, value))
    if value is None or isinstance(value, (bool, str)):
        return value
    return (type(value), value) if isinstance(value, (int, float)) and value in (0, 1) else type(value)


def _choose(case: Hashable, reference: Callable[..., Any], trial: Callable[..., tuple] | None, given: tuple) -> None:
    """Choose what computes a case from now on.

    A near tie may be decided either way, and memory may be short for a moment: so a kernel gets a second try, and until
    then nothing is chosen.
    """
    try:
        kernel = triton_kernel(reference)
        if agree(reference, kernel, trial, given):
            _chosen[case] = kernel
            return
        why = "computes something else than its torch version, which is used instead"
    except torch.OutOfMemoryError as error:
        why = f"cannot be validated: out of memory, so its slower torch version runs: {error}"
    except Exception as error:  # compilers and drivers raise anything; the reference is always available
        _leave(case, reference, _does_not_run(error))
        return
    if case in _doubted:
        _leave(case, reference, why)
    _doubted.add(case)


def _call(case: Hashable, reference: Callable[..., Any], given: tuple) -> Any:
    """The result of the function chosen for a case, or of the reference if the kernel fails to run.

    A kernel that cannot be compiled or launched has not written anything yet.
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
    """The reference computes a case from now on; the reason is logged once."""
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
    """Do the two return and write the same, up to round-off? ``given`` is not written."""
    outcomes = []
    for function in (reference, kernel):
        tried = given if trial is None else trial(*given)
        outcomes.append(leaves((function(*tried), tried)))
    return all(alike(a, b) for a, b in zip(*outcomes, strict=True))


@cache
def runs_triton(device: torch.device) -> bool:
    """Do the Triton kernels run on this device? If a GPU does not run them, the reason is logged once.

    A compiler may end the process over code it cannot compile, so unsupported devices are not tried: AMD GPUs, and
    NVIDIA GPUs before compute capability 8.0, whose registers the kernels overflow.
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
    except ValueError:  # another package has put an empty module in its place
        return False


def alike(a: Tensor, b: Tensor) -> bool:
    """Equal up to round-off, which may change one decision in a hundred.

    A sum that nearly cancels has the absolute error of its terms, so errors are also compared with the size of all
    numbers.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point():
        step = torch.finfo(a.dtype).eps  # large for 16-bit floats
        size = float(a.float().nan_to_num(posinf=0, neginf=0).square().mean().sqrt()) if a.numel() else 0.0
        least = max(1e-5, 2 * step) * max(1.0, size)
        different = ~torch.isclose(a, b, rtol=max(1e-3, 8 * step), atol=least, equal_nan=True)
    else:
        different = a != b
    return int(different.sum()) <= a.numel() // 100
