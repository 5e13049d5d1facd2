"""Which of two implementations runs: the torch reference, or on an NVIDIA GPU the Triton kernel of the same name.

The Triton kernel of ``kernels/x.py:f`` is ``kernels/x_triton.py:f``, with the same signature and results, which tests
and ``python -m tools.benchmarks gpu`` compare. Triton comes with torch on Linux; where it is missing or not supported,
the reference runs (see ``runs_triton``), and also in place of a kernel that does not compile or launch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, cached_property, update_wrapper
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from . import addresses, switches

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
MIN_CAPABILITY = 8, 0  # compute capability, that of GPUs since 2020
NEEDS = (
    "a C compiler and the headers of this Python (Debian and Ubuntu: install gcc and python3-dev; Windows: see the "
    "instructions of triton-windows)"
)


class Accelerated(Generic[P, R]):
    """Decorates a torch function, the ``reference``, with its Triton ``kernel``, which computes the calls whose first
    argument is on a GPU that runs Triton. Triton kernels have no gradients, so those that need one are the reference's.
    """

    def __init__(self, reference: Callable[P, R]):
        update_wrapper(self, reference)
        self.reference = reference
        self.fails = False

    @cached_property
    def kernel(self) -> Callable[P, R]:
        """The function that launches the Triton kernel."""
        module = import_module(f"{self.reference.__module__}_triton")
        addresses.prepare(module)
        return getattr(module, self.reference.__name__)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        no_gradients = not (first.requires_grad and torch.is_grad_enabled())
        if self.fails or not (first.is_cuda and no_gradients and runs_triton(first.device)):
            return self.reference(*args, **kwargs)
        try:
            return self.kernel(*args, **kwargs)
        except torch.OutOfMemoryError:  # ComfyUI frees some and tries again
            raise
        except Exception as error:  # compilers and drivers raise anything, before a kernel has written
            self.fails = True
            name = self.reference.__name__
            log.warning("The Triton kernel %s does not run here, so its slower torch version does: %s", name, error)
            return self.reference(*args, **kwargs)


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
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return (
            f"the Triton kernels are for GPUs of compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or higher"
        )
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
