"""Stages ``kernels`` and ``races``: every Triton kernel beside its torch reference, on what the methods call it with.

The methods generate a few tokens in the middle of an image of models of released widths, with one layer: more of them
call kernels with nothing new. Each call with shapes, dtypes or settings that were not seen before runs the reference
and, on the same arguments in the same strides, the kernel: what they return and what they write must agree. In a dry
run the kernels run in Triton's interpreter, which the tests use, on tiny shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import comfyui_specar as specar
import torch
from comfyui_specar.device.graphs import capturing, leaves
from torch import Tensor

from .. import sizes
from ..runs import PROMPTS
from ..subjects import BASE
from . import calls, packages, subjects
from .findings import Findings, NotRun
from .graphs import Eager

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DRY_DTYPES = (torch.float32,)  # whole numbers in bf16 are beyond the interpreter
MORE = ("LANTERN delta 0.3", "SJD coupled, Cool-SD delta 2, w32")  # kernels of their own
CONTINUOUS = "continuous"  # the bundled pair
PASSES = 3  # of every run: the prompt's is followed by a first and a repeated step
LARGEST_TABLE = 2**16  # codes for which a table of neighbours is made here
SETTINGS: tuple[dict[str, Any], ...] = (  # that lead to other ways through a kernel than the authors' own
    {"cfg": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 0},
    {"top_p": 0.9},
    {"top_p": 0.9, "order": ("top_p", "top_k")},
    {"top_k": 0},
)


class Enough(Exception):  # noqa: N818 (not an error)
    """A run has called its kernels."""


def enough(state: Any) -> None:
    if state.passes > PASSES:
        raise Enough


@dataclass
class Comparison:
    """Calls that were compared, by kernel: how many, how many did not agree, the largest difference. Decisions on an
    edge may fall on either side, so what does not agree is tried once more with the next call of its kind."""

    kernel: Callable[..., Any]  # name, arguments -> result, writing in the arguments as the reference does
    kind_of: Callable[[Any], Hashable]  # what of an argument makes a call another one
    about: dict[str, str]
    failure: Callable[[str], None]  # reports what is wrong
    tries: dict[Hashable, int]  # by kind of call: 0, it agrees; else how often it did not
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __call__(self, name: str, reference: Callable[..., Any], given: tuple) -> Any:
        kind = name, *map(self.kind_of, given)
        if self.tries.get(kind) in (0, 2):
            return reference(*given)
        with torch.inference_mode(False):
            copies = calls.copied(given)
        result = reference(*given)
        row = self.rows.setdefault(name, self.about | {"kernel": name, "calls": 0, "disagreed": 0, "largest": 0.0})
        row["calls"] += 1
        try:
            with torch.inference_mode(False):
                found = self.kernel(name, copies)
            pairs = list(zip(leaves((result, given)), leaves((found, copies)), strict=True))
            row["largest"] = max([row["largest"], *(difference(a, b) for a, b in pairs)])
            agree, why = all(alike(a, b) for a, b in pairs), f"differs from its reference by {row['largest']}"
        except Exception as error:  # whatever a compiler or driver may raise: it is what is looked for
            agree, why = False, f"{type(error).__name__}: {str(error)[:300]}"
        self.tries[kind] = 0 if agree else self.tries.get(kind, 0) + 1
        if self.tries[kind] == 2:
            row["disagreed"] += 1
            self.failure(f"{', '.join(self.about.values())}: {name} of {kind[1:]} {why}")
        return result


def shape(value: Any) -> Hashable:
    """Dtype and sizes of a tensor, all else itself."""
    if isinstance(value, Tensor):
        return str(value.dtype).removeprefix("torch."), *value.shape
    if is_dataclass(value):
        return type(value).__name__, *(shape(getattr(value, f.name)) for f in fields(value))
    if isinstance(value, (tuple, list)):
        return tuple(map(shape, value))
    return value if isinstance(value, Hashable) else type(value).__name__


def dtype_of(value: Any) -> Hashable:
    """Dtype of a tensor, of all else what a kernel is compiled for."""
    if isinstance(value, Tensor):
        return value.dtype
    return value if value is None or isinstance(value, (bool, str)) else type(value)


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference of numbers (relative to those above 1), or the share of other values that differ."""
    if not a.numel() or a.shape != b.shape:
        return 0.0
    if not a.is_floating_point():
        return float((a != b).double().mean())
    a, b = a.double(), b.double()
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0, (a - b).abs() / a.abs().clamp(min=1))
    return float(apart.nan_to_num(nan=torch.inf).max())


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


def models(dry: bool) -> dict[str, sizes.Size]:
    """What is run, by name."""
    first, *others = subjects.FAMILIES
    if dry:
        return {name: subjects.flat(subjects.tiny(sizes.SIZES[first])) for name in (first, f"{first}:int8")}
    found = {name: subjects.flat(sizes.SIZES[name]) for name in (first, *others)}
    found |= {f"{first}:{storage}": found[first] for storage in subjects.STORAGES}
    emu3 = found["emu3-8b"]
    return found | {"emu3-8b, all ids": replace(emu3, config=replace(emu3.config, vocab=subjects.EMU3_IDS))}


def run(findings: Findings) -> None:
    """The stage ``kernels``."""
    compare(findings, models(findings.dry), DRY_DTYPES if findings.dry else DTYPES)


def run_races(findings: Findings) -> None:
    """The stage ``races``: tiny models, because a sanitizer makes everything a hundred times slower."""
    try:
        torch.zeros(1, device=subjects.device_of(dry=False))
    except RuntimeError as error:
        raise NotRun(f"the sanitizer does not work on this machine: {error}") from error
    compare(findings, {name: subjects.tiny(sizes.SIZES[name]) for name in subjects.FAMILIES}, DTYPES[:1])


def compare(findings: Findings, listed: dict[str, sizes.Size], dtypes: tuple[torch.dtype, ...]) -> None:
    """All methods on all models, and the continuous pair, whose numbers are fp32."""
    subjects.need_kernels(findings.dry)
    tries: dict[Hashable, int] = {}
    with findings.listening():
        for dtype in dtypes:
            dtype_name = str(dtype).removeprefix("torch.")
            for name in findings.each(listed, f"models in {dtype_name}", "model", dtype=dtype_name):
                with findings.trying(f"{name}, {dtype_name}"), comparing(findings, tries, name, dtype_name) as title:
                    discrete_runs(findings, title, name, listed[name], dtype)
        for _ in findings.each([CONTINUOUS], "continuous models", "model"):
            with findings.trying(CONTINUOUS), comparing(findings, tries, CONTINUOUS, "float32"):
                continuous_runs(subjects.device_of(findings.dry))
    called = {row["kernel"] for row in findings.rows}
    if never := sorted(set(calls.accelerated()) - called):
        findings.not_run(", ".join(never), "nothing that was run calls it")
    wrong = sum(row["disagreed"] for row in findings.rows)
    findings.content["summary"] = (
        f"{len(called)} kernels, {sum(row['calls'] for row in findings.rows)} calls with "
        f"different arguments, {wrong} did not agree"
    )


@contextmanager
def comparing(findings: Findings, tries: dict[Hashable, int], model: str, dtype: str) -> Iterator[str]:
    """Kernels that are called meanwhile are compared, and what was found is reported in the end. Yields a title."""
    how = (interpreted, dtype_of) if findings.dry else (launched, shape)  # the interpreter is slow
    found = Comparison(*how, {"model": model, "dtype": dtype}, findings.failure, tries)
    try:
        # On a CPU steps would look at values and take short cuts, which a GPU cannot.
        with torch.inference_mode(), calls.watched(found), capturing() if findings.dry else nullcontext():
            yield f"{model}, {dtype}"
    finally:
        findings.rows.extend(found.rows.values())
        findings.save()


def discrete_runs(findings: Findings, title: str, name: str, size: sizes.Size, dtype: torch.dtype) -> None:
    """A few passes of all methods with called steps, and of next-token with other settings."""
    case = subjects.random_subject(name, findings.dry, subjects.FEW, size, dtype, dry_tokens=subjects.FEW)
    methods = [
        method
        for method in (*subjects.methods(fixed=True), *MORE)
        if size.codes <= LARGEST_TABLE or not method.startswith("LANTERN")
    ]
    runs = [*((method, {}) for method in methods), *((BASE, settings) for settings in SETTINGS)]
    for method, settings in findings.each(runs, f"runs of {title}"):
        with findings.trying(", ".join((title, method, *map(str, settings.items())))):
            case.model.defaults = replace(case.params, **settings)
            contestant = replace(case, params=case.model.defaults).sampler(method)
            contestant.staged.sessions = Eager()
            with suppress(Enough):
                contestant.output(0, enough)


def continuous_runs(device: torch.device) -> None:
    """A few passes of the bundled continuous pair, verified block by block and by the exact rule."""
    packages.need("safetensors", "einops")
    model = specar.load_model(specar.bundled(CONTINUOUS), device=device, dtype=torch.float32)
    drafter = specar.load_drafter(specar.bundled(f"{CONTINUOUS}/small"), model)
    for mode in ("block", "exact"):
        method = specar.methods.ContinuousSpeculative(drafter, 4, prefill=0.0, mode=mode)
        with suppress(Enough):
            specar.sample(model, model.encode_prompt(PROMPTS[0]), method, callback=enough)


def launched(name: str, given: tuple) -> Any:
    """The kernel on the device."""
    return calls.accelerated()[name].kernel(*given)


def interpreted(name: str, given: tuple) -> Any:
    """The kernel in Triton's interpreter, in a process of its own."""
    from comfyui_specar.tests.support import triton_kernels

    return triton_kernels.interpreted(name, *given)
