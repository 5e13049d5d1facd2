"""How close fp32 results can be asked to come to each other, on any processor.

No two processors round alike: the order in which a dot product is summed, fused multiply-adds and the polynomial behind
exp() depend on instruction set, number of threads and shape. So no limit here is a number that somebody's machine
passed. Two results in fp32 are compared by way of a third, which the same code computes in fp64 (``fp64``), and the
distance that is allowed comes from what rounding to fp32 does to that computation (``rounding_error``).

The estimate is Monte Carlo arithmetic (Parker, 1997): the computation runs in fp64, and the result of every operation
is rounded to fp32, at random to one neighbour or the other, as often as their distances ask for. What varies is the
error that fp32 cannot avoid, condition of the problem included. It is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from comfyui_specar.device import cpu
from comfyui_specar.device.graphs import leaves
from comfyui_specar.samplers import constants
from torch import Tensor
from torch.overrides import TorchFunctionMode

FP32_BITS = 24
ROUNDS = 3
# Errors are 0.5 to 2 times the estimate in a model's own order of operations, and up to 4 times in another one (as of
# MAR's official DDIM, which goes from the noise to the clean token and back). An epsilon of 1e-5 in place of 1e-6 in
# LayerNorm makes 15 times the estimate or more, bf16 in one layer thousands of times.
FACTOR = 6.0


@contextmanager
def fp64(bits: int | None = None, seed: int = 0) -> Iterator[None]:
    """Inside, what is written for fp32 computes in fp64: ``with fp64(): model(x)``, for fp32 weights and inputs.

    Tensors of fp32 are widened where they are used, and ``.float()``, ``dtype=torch.float32`` and the default dtype
    mean fp64. bits: round the result of every operation at random to so many significant bits, as seeded.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    _forget_constants()
    try:
        with patch.object(cpu, "packable", lambda layer: False), _Widening(bits, seed):
            yield
    finally:
        torch.set_default_dtype(default)
        _forget_constants()


def _forget_constants() -> None:
    """Those that samplers keep would be of the other precision."""
    for kept in (constants.constant, constants.uniform_probs):
        kept.cache_clear()


class _Widening(TorchFunctionMode):
    def __init__(self, bits: int | None, seed: int):
        super().__init__()
        self.bits, self.generator = bits, torch.Generator().manual_seed(seed)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name == "float":
            function = Tensor.double
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if writes and any(x.dtype == torch.float32 for x in leaves((*args, *kwargs.values())[0])):
            raise TypeError(f"{name} writes fp64 results into a tensor that was made outside, in fp32")
        args = _widened(args)
        kwargs = {key: _widened(value) for key, value in kwargs.items()}
        result = function(*args, **kwargs)
        if self.bits is not None:
            given = set() if writes else {_memory(tensor) for tensor in leaves((args, *kwargs.values()))}
            for tensor in leaves(result):
                if _memory(tensor) not in given:  # views hold no results
                    self._round(tensor, _roundings(name, args))
        return result

    def _round(self, tensor: Tensor, roundings: float) -> None:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if tensor.dtype == torch.float64:
            dice = torch.rand(tensor.shape, generator=self.generator).mul_(2).sub_(1)
            moved = torch.addcmul(tensor, tensor, dice, value=roundings * 2.0**-self.bits)
            tensor.copy_(torch.where(_nearest(tensor, self.bits) == tensor, tensor, _nearest(moved, self.bits)))


def _nearest(tensor: Tensor, bits: int) -> Tensor:
    """The nearest numbers of so many bits, by Veltkamp's splitting. Those at the end of the range stay as they are."""
    large = tensor * (2.0 ** (53 - bits) + 1)
    return torch.where(large.isfinite(), large - (large - tensor), tensor)


def _roundings(name: str, args: tuple) -> float:
    """How many times the error of one rounding, relative to its result, an operation has in fp32.

    Adding up n terms in L lanes makes that of sqrt(n / 2L): the sums of a lane grow like a random walk, and every one
    of them is rounded. L is 4 where vectors are short.
    """
    if name in ("linear", "matmul", "__matmul__", "bmm"):
        terms = args[0].shape[-1]
    elif name.startswith("conv"):
        terms = args[1][0].numel()
    elif name == "scaled_dot_product_attention":
        terms = args[0].shape[-1] + args[1].shape[-2]
    elif name == "interpolate":
        return max(args[0].shape[2:])  # weights are differences of coordinates that go up to the size
    else:
        terms = 1
    return max(1.0, (terms / 8) ** 0.5)


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor) and not value.is_mkldnn:  # a packed weight is unpacked first
        return value.double() if value.dtype == torch.float32 else value
    if isinstance(value, (tuple, list)):
        return type(value)(map(_widened, value))
    return torch.float64 if value is torch.float32 else value


def _memory(tensor: Tensor) -> int:
    return 0 if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


def rounding_error(compute: Callable[[], Any], exact: Any) -> list[Tensor]:
    """Root mean square of what rounding to fp32 changes in the results ``exact`` of compute() in fp64, elementwise."""
    squares = [torch.zeros_like(tensor) for tensor in leaves(exact)]
    for seed in range(ROUNDS):
        with fp64(FP32_BITS, seed):
            found = leaves(compute())
        for square, tensor, right in zip(squares, found, leaves(exact), strict=True):
            square += (tensor - right).square() / ROUNDS
    return [square.sqrt() for square in squares]


@torch.inference_mode()
def assert_as_exact(compute: Callable[[], Any], reference: Any, apart: int = 0) -> None:
    """compute(), and ``reference``, are as close to compute() in fp64 as their precision allows: the root mean squares
    of their errors are at most FACTOR times those of randomly rounded operations.

    compute returns one tensor or several, each time the same ones. reference: what another program found for them, in
    fp32, or in fp64 where it runs here and now (``fp64``); recorded numbers may be flat. apart: so many leading
    dimensions are compared entry by entry, because their numbers are of very different sizes.
    """
    with fp64():
        exact = compute()
    allowed = rounding_error(compute, exact)
    for who, results in (("this code", compute()), ("the reference", reference)):
        for found, right, error in zip(leaves(results), leaves(exact), allowed, strict=True):
            assert found.shape == right.shape or found.ndim == 1, f"{who}: {found.shape} for {right.shape}"
            precision = torch.finfo(found.dtype).eps / torch.finfo(torch.float32).eps
            off = _size(found.view_as(right) - right, apart)
            limit = FACTOR * precision * _size(error, apart)
            assert (off <= limit).all(), f"{who} is off by {off}, where rounding explains {limit}"


def _size(errors: Tensor, apart: int) -> Tensor:
    return errors.flatten(apart).square().mean(-1).sqrt()


@torch.inference_mode()
def decided(compute: Callable[[], Tensor]) -> Tensor:
    """compute(), whose result (tokens) must not hang on rounding: it is the same in fp64, and where the result of every
    operation is rounded at random, 16 times as coarsely as in fp32. So it is the same on every processor."""
    found = compute()
    for mode in (fp64(), *(fp64(FP32_BITS - 4, seed) for seed in range(ROUNDS))):
        with mode:
            assert torch.equal(compute(), found), "rounding decides here"
    return found
