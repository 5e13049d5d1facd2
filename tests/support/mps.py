"""Apple's GPU, the ``mps`` device of torch, as far as it can be had without one.

    with metal():
        model = load_model(path, device=DEVICE)

Tensors of this device hold their values on the CPU, but say that they are on ``mps``, so that code takes the branches
it takes there. An operator fails on them as it does on the device: where torch has no kernel for it, on types that the
device does not know, and on operands that lie elsewhere. Known wrong results are errors too. What the device computes
is not imitated: results are the CPU's.

Whether there is a kernel is read from native_functions.yaml, which torch ships, and from ``mps_kernels_since_2_5.txt``
for those that came after torch 2.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torchgen
import yaml
from comfyui_specar.device.graphs import leaves, map_tensors
from torch import Tensor
from torch._C import DispatchKey
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

TABLE = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
RECENT = frozenset((Path(__file__).parent / "mps_kernels_since_2_5.txt").read_text(encoding="utf-8").split())
KIND = "metal"  # of device, of which torch knows nothing
DEVICE = f"{KIND}:0"
UNKNOWN = {torch.float64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2}
WHOLE = {  # composite operators that look where their operands lie or change their size -> whose kernel they use there
    "scaled_dot_product_attention": "_scaled_dot_product_attention_math_for_mps",
    "convolution": "_mps_convolution",
    "group_norm": "native_batch_norm",
    "abs": "abs.out",
    "eye": "eye.out",
    "eye.m": "eye.m_out",
    "arange": "arange.start_out",
    "arange.start": "arange.start_out",
    "arange.start_step": "arange.start_out",
}
MOVES = ("copy_", "_to_copy")  # between devices
INTEGERS = 2**24  # from here on integers were divided wrongly, as fp32 (pytorch#154171)


class MetalTensor(Tensor):
    """A tensor on the device; its values are in ``inner``, a tensor on the CPU with the same strides."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> MetalTensor:
        return Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )

    def __init__(self, inner: Tensor):
        self.inner = inner

    def __repr__(self, *, tensor_contents=None):
        return f"{self.inner!r} on mps"

    def tolist(self) -> list:
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        raise AssertionError(f"{operator} was called on the device after the test had left it")


@contextmanager
def metal(exact: bool = True) -> Iterator[Metal]:
    """The device exists while this lasts. exact: are its int64 products right?"""
    register()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(numbers, device=...) makes them on the CPU first
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # moved parameters are MetalTensors
    try:
        with Metal(exact) as mode:
            yield mode
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
        torch.__future__.set_overwrite_module_params_on_conversion(False)


@cache
def register() -> None:
    """Make torch accept this kind of device. Not on import: from then on a process cannot index fake CUDA tensors."""
    backend_registration._setup_privateuseone_for_python_backend(KIND)


class Metal(TorchDispatchMode):
    """What the device does; ``called`` are the operators that ran there."""

    def __init__(self, exact: bool):
        super().__init__()
        self.exact, self.called = exact, set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name, wanted = signature(operator)
        given = dict(zip(wanted, args, strict=False)) | (kwargs or {})
        tensors = leaves(list(given.values()))
        target = torch.device(given["device"]) if given.get("device") is not None else None
        if not any(isinstance(x, MetalTensor) for x in tensors) and (target is None or target.type != KIND):
            return operator(*args, **kwargs or {})
        view = is_view(operator)
        if not view and name not in WHOLE and name not in MOVES and (composite := composite_of(operator)):
            with self:  # for what it consists of
                return operator._op_dk(composite, *args, **kwargs or {})
        if not view:
            self.called.add(name)
            check(name, tensors)
        if target is not None:
            given["device"] = "cpu"
        held = {id(x.inner): x for x in tensors if isinstance(x, MetalTensor)}
        result = operator(**{key: map_tensors(inner, as_tensor(x, wanted[key])) for key, x in given.items()})
        assert all(x.shape == x.inner.shape for x in held.values()), f"{name} changed the size of an operand"
        if name == "mul.Tensor" and not self.exact and result.dtype == torch.int64:
            result = result.float().long()
        if target is not None and target.type != KIND:
            return result
        return map_tensors(lambda x: held[id(x)] if id(x) in held else on_device(x), result)


@cache
def signature(operator: torch._ops.OpOverload) -> tuple[str, dict[str, str]]:
    """The operator's name in the table, and the types of its arguments by name."""
    types = {argument.name: str(argument.type) for argument in operator._schema.arguments}
    return operator.name().removeprefix("aten::"), types


def as_tensor(x: Any, wanted: str) -> Any:
    """Composite operators leave numbers in the places of tensors."""
    return torch.tensor(x) if wanted == "Tensor" and isinstance(x, (bool, int, float)) else x


def inner(x: Tensor) -> Tensor:
    return x.inner if isinstance(x, MetalTensor) else x


def on_device(x: Tensor) -> MetalTensor:
    refuse_type(x)
    with torch.inference_mode(False):  # where views of tensors that were made outside can be had
        return MetalTensor(x)


def refuse_type(x: Tensor) -> None:
    if x.dtype in UNKNOWN:
        raise TypeError(f"the device does not know {x.dtype}")


def check(name: str, given: list[Tensor]) -> None:
    """Raise where the device fails to run the operator, or has computed something wrong."""
    if name not in MOVES and not has_kernel(WHOLE.get(name, name)):
        raise NotImplementedError(f"the device has no kernel for {name}")
    for x in given:
        if not isinstance(x, MetalTensor) and x.ndim and name not in MOVES:
            raise RuntimeError(f"{name}: operands on different devices")
        if isinstance(x, MetalTensor):
            refuse_type(x)
    if limit := LIMITS.get(name.split(".")[0].strip("_")):
        limit(name, [inner(x) for x in given])


def sorts(name: str, given: list[Tensor]) -> None:
    if given[0].dtype == torch.int64:
        raise RuntimeError(f"{name}: int64 numbers behind the 256th were lost (pytorch#155560)")
    if not given[0].is_contiguous():
        raise RuntimeError(f"{name}: strides were ignored (pytorch#175187)")


def divides(name: str, given: list[Tensor]) -> None:
    if not any(x.is_floating_point() for x in given) and any(
        x.numel() and int(x.abs().max()) >= INTEGERS for x in given
    ):
        raise RuntimeError(f"{name}: integers from 2^24 on were divided as fp32 (pytorch#154171)")


def combines_bits(name: str, given: list[Tensor]) -> None:
    shape = torch.broadcast_shapes(*(x.shape for x in given))
    for x in given:
        if x.storage_offset() * x.itemsize % 4 and (x.ndim == 0 or x.expand(shape).is_contiguous()):
            raise RuntimeError(
                f"{name}: operands that do not begin at a multiple of 4 bytes were read from another "
                "place (pytorch#182822)"
            )


LIMITS: dict[str, Callable[[str, list[Tensor]], None]] = {
    "sort": sorts,
    "remainder": divides,
    "div": divides,
    "floor_divide": divides,
    **dict.fromkeys(
        ("and", "or", "xor", "iand", "ior", "ixor", "bitwise_and", "bitwise_or", "bitwise_xor"), combines_bits
    ),
}


@cache
def table() -> dict[str, dict]:
    entries = yaml.load(TABLE.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    return {entry["func"].split("(")[0]: entry for entry in entries}


def kernels(name: str) -> set[str]:
    """The dispatch keys for which an operator has kernels of its own."""
    name = table()[name].get("structured_delegate", name)
    return {key.strip() for keys in table()[name].get("dispatch", {}) for key in keys.split(",")}


@cache
def has_kernel(name: str) -> bool:
    """Has the operator a kernel on the device, in the torch that is installed and in torch 2.5?"""
    return "MPS" in kernels(name) and not {name, table()[name].get("structured_delegate")} & RECENT


@cache
def composite_of(operator: torch._ops.OpOverload) -> DispatchKey | None:
    """The kernel of an operator that consists of others, whatever the device; None for one with a kernel there."""
    name = operator.name()
    if "MPS" in kernels(name.removeprefix("aten::")):
        return None
    keys = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    found = [key for key in keys if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)]
    return getattr(DispatchKey, found[0]) if found else None


@cache
def is_view(operator: torch._ops.OpOverload) -> bool:
    """Does it only look at its operand in another way? (An operator that may also copy is composite.)"""
    if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd"):
        return False
    views = any(x.alias_info and not x.alias_info.is_write for x in operator._schema.returns)
    return views or operator.name() == "aten::_unsafe_view"
