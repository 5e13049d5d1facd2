"""Watching what the kernels are called with, on any device."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from comfyui_specar import kernels
from comfyui_specar.device import dispatch
from comfyui_specar.device.graphs import map_tensors
from torch import Tensor

PACK = kernels.__name__.rpartition(".")[0]
Look = Callable[[str, Callable[..., Any], tuple], Any]  # name, torch reference, arguments -> result


@cache
def accelerated() -> dict[str, dispatch.Accelerated]:
    """The functions that may have a Triton kernel, by ``module.function``, as they are called."""
    found = {}
    for path in sorted(Path(kernels.__path__[0]).glob("[!_]*.py")):
        if path.stem.endswith("_triton"):
            continue
        module = import_module(f"{kernels.__name__}.{path.stem}")
        found |= {
            f"{path.stem}.{name}": value
            for name, value in vars(module).items()
            if isinstance(value, dispatch.Accelerated) and value.reference.__module__ == module.__name__
        }
    return found


def copied(tree: Any) -> Any:
    """The same in memory of its own, with the same strides: slices of a cache stay what they are."""

    def copy(t: Tensor) -> Tensor:
        memory = t.untyped_storage().clone()
        return torch.empty(0, dtype=t.dtype, device=t.device).set_(memory, t.storage_offset(), t.shape, t.stride())

    return map_tensors(copy, tree)


@contextmanager
def watched(look: Look) -> Iterator[None]:
    """Meanwhile ``look`` is called in place of every accelerated function, wherever the pack has imported it."""
    inside = {function: _watch(name, function.reference, look) for name, function in accelerated().items()}
    modules = [module for name, module in sys.modules.items() if name == PACK or name.startswith(f"{PACK}.")]
    with ExitStack() as stack:
        for module in modules:
            for name, value in list(vars(module).items()):
                if isinstance(value, dispatch.Accelerated) and value in inside:
                    stack.enter_context(patch.object(module, name, inside[value]))
        yield


def _watch(name: str, reference: Callable[..., Any], look: Look) -> Callable[..., Any]:
    signature = inspect.signature(reference)

    @wraps(reference)
    def call(*given: Any, **named: Any) -> Any:
        bound = signature.bind(*given, **named)
        bound.apply_defaults()
        return look(name, reference, bound.args)

    call.reference = reference  # type: ignore[attr-defined]  # as Accelerated has one
    return call
