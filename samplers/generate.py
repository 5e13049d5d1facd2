"""Run a method: the one entry point, for the Python API and for ComfyUI."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from .continuous_contract import ContinuousRequest
from .contract import Method, Output, Request
from .engine.first_use import check_captured

log = logging.getLogger(__name__)
AnyRequest = Request | ContinuousRequest
Reserve = Callable[[Method, AnyRequest], AbstractContextManager]


def leave_in_place(method: Method, request: AnyRequest) -> AbstractContextManager:
    """Leave model and drafter where they are."""
    return nullcontext(request.callback)


def generate(method: Method, request: AnyRequest, reserve: Reserve = leave_in_place) -> Output:
    """Generate the images of ``request`` with ``method``.

    reserve(method, request): a context manager that yields the callback of the run; inside it, model and drafter are on
    their device, which has room for ``method.run_bytes(request)``. Raises ValueError for illegal settings, and for a
    method that does not support the model. Log and trace name what is not used of the request.
    """
    if method.continuous != request.continuous:
        kinds = ["token ids", "vectors (continuous models)"]
        needs, has = kinds[method.continuous], kinds[request.continuous]
        raise ValueError(
            f"{type(method).__name__} is for models whose tokens are {needs}, but this model's are {has}. "
            "Choose a method for these."
        )
    method.check(request)
    for notice in request.notices:
        log.warning("%s", notice)
    with torch.inference_mode():
        with reserve(method, request) as callback:
            check_captured(method, request)  # on a GPU, for a model's first image
            result = method.sample(replace(request, callback=callback))
        output = request.output(result)
    if notices := [*request.notices, *output.trace.notices]:
        output.trace.settings["notices"] = notices
    return output
