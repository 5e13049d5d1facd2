"""Which of two twins runs: the torch reference, or on an NVIDIA GPU the Triton kernel of the same name.

The twin of ``kernels/x.py:f`` is ``kernels/x_triton.py:f``, with the same signature and results. Triton comes with
torch on Linux; where it is missing, the reference runs. A twin earns trust on its first call: both run and must agree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor

from .graphs import leaves

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])
_chosen: dict[str, Callable[..., Any]] = {}  # by full name, decided at the first call on a GPU


def accelerated(reference: F) -> F:
    """Let a torch reference be replaced by its Triton twin where the first argument is a tensor on an NVIDIA GPU."""

    @wraps(reference)
    def call(first: Tensor, *rest: Any, **named: Any) -> Any:
        if not first.is_cuda or (first.requires_grad and torch.is_grad_enabled()):  # twins have no gradients
            return reference(first, *rest, **named)
        name = f"{reference.__module__}.{reference.__qualname__}"
        if name not in _chosen:
            _chosen[name], result = _choose(reference, first, *rest, **named)
            return result
        return _chosen[name](first, *rest, **named)

    return call  # type: ignore[return-value]


@cache
def has_triton() -> bool:
    """Is Triton installed? Said once in the log if it is not."""
    found = find_spec("triton") is not None
    if not found:
        log.info("Triton is not installed: the slower torch versions of the kernels run.")
    return found


def _choose(reference: Callable[..., Any], *given: Any, **named: Any) -> tuple[Callable[..., Any], Any]:
    """The function to use from now on, and the result of this first call."""
    if not has_triton():
        return reference, reference(*given, **named)
    copies = tuple(x.clone() if isinstance(x, Tensor) else x for x in given)  # either may write in its arguments
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
    """Equal up to round-off, which may also turn one decision in a hundred (and one in any case)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point():
        step = torch.finfo(a.dtype).eps  # halves keep few digits
        different = ~torch.isclose(a, b, rtol=max(1e-3, 8 * step), atol=max(1e-5, 2 * step), equal_nan=True)
    else:
        different = a != b
    return int(different.sum()) <= max(1, a.numel() // 100)
