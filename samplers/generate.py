"""The one way to run a method: headless and in ComfyUI."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from .continuous_contract import ContinuousRequest
from .contract import Method, Output, Request

AnyRequest = Request | ContinuousRequest
Reserve = Callable[[Method, AnyRequest], AbstractContextManager]


def unmanaged(method: Method, request: AnyRequest) -> AbstractContextManager:
    """Model and drafter stay where they are."""
    return nullcontext(request.callback)


def generate(method: Method, request: AnyRequest, reserve: Reserve = unmanaged) -> Output:
    """The images that ``request`` asks for, by ``method``.

    reserve(method, request): a context in which model and drafter are on their device with room for
    ``method.run_bytes(request)``; it gives the callback of the run. Raises ValueError for illegal settings, and for a
    method of models of another kind.
    """
    if method.continuous != request.continuous:
        kinds = ["token ids", "vectors (continuous models)"]
        needs, has = kinds[method.continuous], kinds[request.continuous]
        raise ValueError(f"{type(method).__name__} is for models whose tokens are {needs}; this model's are {has}.")
    method.check(request)
    with torch.inference_mode():
        with reserve(method, request) as callback:
            result = method.sample(replace(request, callback=callback))
        return request.output(result)
