"""Which of two implementations runs: the torch reference, or on an NVIDIA GPU the Triton kernel of the same name.

The Triton kernel of ``kernels/x.py:f`` is ``kernels/x_triton.py:f``, with the same signature and results. Triton comes
with torch on Linux; where it is missing or not supported, the reference runs (see ``runs_triton``). A Triton kernel is
validated before its first use with arguments of a kind (see ``kind``), if memory allows: it and the reference compute
the same trial and must agree. Only then does one of them compute the result, so the first call of a process gives what
every later one gives, to the last bit.
"""

from __future__ import annotations

import logging
from collections import Counter
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
TRIES = 4  # calls with a near tie: even if one in a hundred has one, four one after the other are one case in 10^8
NEEDS = (
    "a C compiler and the headers of this Python (Debian and Ubuntu: install gcc and python3-dev; Windows: see the "
    "instructions of triton-windows)"
)
_chosen: dict[Hashable, Callable[..., Any]] = {}  # by reference and kind of arguments, set before their first use
_differed: Counter[Hashable] = Counter()  # by case, calls in which its Triton kernel differed from its reference
_warn_once = cache(log.warning)


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
    """Choose what computes a case from now on, or nothing as long as its kernel is in doubt.

    A near tie may be decided either way, so a kernel is left once it has differed in TRIES calls. Where memory is too
    short for a validation, the kernel is chosen without one: its reference, which needs more, would run out of it, too.
    """
    try:
        kernel = triton_kernel(reference)
        if agree(reference, kernel, trial, given):
            _chosen[case] = kernel
            return
        _differed[case] += 1
        if _differed[case] == TRIES:
            _use_reference(case, reference, "computes something else than its torch version, which is used instead")
    except torch.OutOfMemoryError:
        _chosen[case] = kernel
        _warn_once("Memory is too short to compare Triton kernels with their torch versions: they run unvalidated")
    except Exception as error:  # compilers and drivers raise anything; the reference is always available
        _use_reference(case, reference, _does_not_run(error))


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
        _use_reference(case, reference, _does_not_run(error))
        return reference(*given)


def _use_reference(case: Hashable, reference: Callable[..., Any], why: str) -> None:
    """The reference computes a case from now on; the reason is logged once, also if it is that of several cases."""
    _chosen[case] = reference
    _warn_once("The Triton kernel %s %s", reference.__name__, why)


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
    """Do the Triton kernels run on this device? If a GPU does not run them, the reason is logged once."""
    if device.type != "cuda":
        return False
    if missing := _missing(device):
        log.info("The slower torch versions of the kernels run: %s.", missing)
    return not missing


def _missing(device: torch.device) -> str | None:
    """Why no Triton kernel runs on a GPU.

    A compiler may end the process over code it cannot compile, so unsupported devices are not tried: AMD GPUs, and
    NVIDIA GPUs before compute capability 8.0, whose registers the kernels overflow. On the others the smallest kernel
    is tried: without a C compiler, with which Triton builds what launches kernels, every one would fail for itself.
    """
    if switches.on(switches.NO_TRITON):
        return f"{switches.NO_TRITON} is set"
    if torch.version.hip:
        return "the Triton kernels are for NVIDIA GPUs"
    if torch.cuda.get_device_capability(device) < OLDEST:
        return f"the Triton kernels are for GPUs of compute capability {OLDEST[0]}.{OLDEST[1]} or higher"
    if not has_triton():
        return "Triton is not installed"
    try:
        import_module(".gating_triton", __package__).gated(torch.zeros(1, 2, device=device))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"Triton cannot launch a kernel. It needs {NEEDS}. It said: {type(error).__name__}: {error}"
    return None


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
