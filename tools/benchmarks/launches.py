"""Count the kernel launches of a pass on a GPU, on tensors without data: no GPU is needed.

    python -m tools.benchmarks launches     # to tools/benchmarks/results/launches.json

A step is captured as on an NVIDIA GPU with Triton. Counted are torch operations that compute or move numbers (a matrix
product or sort of a library counts as one) and launches of Triton kernels; storing the next state is among them.
Nothing is timed.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
from comfyui_specar.device import dispatch, graphs
from comfyui_specar.kernels import noise
from comfyui_specar.models import discrete_model
from comfyui_specar.models.continuous_model import MaskedModel, MaskedState
from comfyui_specar.models.discrete_model import DiscreteModel
from comfyui_specar.models.networks.diffusion_head import DiffusionHead, NoiseSchedule
from comfyui_specar.models.networks.mar import MAR, MARConfig
from comfyui_specar.models.text.prompt_encoders import MissingEncoder
from comfyui_specar.samplers import constants
from comfyui_specar.samplers.continuous_contract import ContinuousParams
from comfyui_specar.samplers.contract import Request
from comfyui_specar.samplers.drafts import trees
from comfyui_specar.samplers.drafts.structures import Extent
from comfyui_specar.samplers.engine import run as engine
from comfyui_specar.samplers.engine.prefix_tokens import Start
from comfyui_specar.samplers.engine.run import DiscreteMethod
from comfyui_specar.samplers.engine.session import Session
from comfyui_specar.samplers.methods import speculative
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import sizes
from .report import grid, plain_command
from .runs import drafter_cases

TABLE = Path(__file__).parent / "results" / "launches.json"
GPU = torch.device("cuda:0")
WINDOW = 32
_WHOLE = ("aten::linear", "aten::rms_norm", "aten::layer_norm")  # one call of a library each
_IDLE = ("aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::detach", "aten::lift_fresh")


class Launches(TorchDispatchMode):
    """What is launched while this lasts, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.entered = 0

    def __enter__(self) -> Launches:
        self.entered += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.entered -= 1
        super().__exit__(*error)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation._schema.name
        ours = name.startswith("aten::")  # others ask for a tensor's device
        if ours and name not in _WHOLE and operation._can_decompose():
            with self:  # what it consists of
                return operation.decompose(*args, **(kwargs or {}))
        if ours and not operation.is_view and not name.startswith(_IDLE):
            self.found[name] += 1
        return operation(*args, **(kwargs or {}))


class CountedGraphs(graphs.Graphs):
    """Graphs whose launches are counted and never replayed: results are those of the capture."""

    def __init__(self, counts: Launches):
        super().__init__(GPU)
        self.active, self.counts = True, counts

    def _record(self, run: Callable[[], Any]) -> tuple[Any, Any]:
        with graphs.capturing(), self.counts:
            return Mock(), run()


class Prompt(nn.Module):
    """A prompt without words: what stands before the image is not part of a pass."""

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features.new_zeros((1, features.shape[1], self.dim))

    def unconditional(self, features: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        return self(features)


@contextmanager
def without_a_gpu(counts: Launches) -> Iterator[None]:
    """Tensors have no data, and Triton's kernels are counted instead of launched."""
    from triton.runtime import JITFunction

    def launch(self: Any, *given: Any, **options: Any) -> None:
        if counts.entered:
            module = self.fn.__module__.rpartition(".")[2].removesuffix("_triton")
            counts.found[f"{module}::{self.__name__}"] += 1

    with ExitStack() as stack:
        for where, name, instead in (
            (JITFunction, "run", launch),
            (dispatch, "runs_triton", lambda device: True),
            (torch.cuda, "current_device", lambda: 0),
            (FakeTensorMode, "avoid_device_init", True),  # whatever other kinds of devices there are
            (fake_tensor, "CONSTANT_NUMEL_LIMIT", -1),  # else the smallest have data, on a GPU that is not there
            (
                discrete_model,
                "neighbour_table",
                lambda codes, n: torch.empty((len(codes), n), dtype=torch.int64, device=GPU),
            ),
            (speculative, "bind_rule", lambda rule, model: rule.bind(model)),  # without a look at its numbers
        ):
            stack.enter_context(patch.object(where, name, instead))
        made_once = constants.counting, constants.constant, constants.uniform_probs
        for constant in (noise._constants, noise.row, trees.tree_buffers, *made_once):  # no data, of no use to others
            constant.cache_clear()
            stack.callback(constant.cache_clear)
        stack.enter_context(torch.inference_mode())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def built(name: str) -> DiscreteModel:
    """A model of a released size in bf16."""
    model = sizes.build(sizes.SIZES[name], torch.bfloat16, GPU)
    model.prefix = Prompt(model.backbone.config.dim)
    return model


class Case:
    """A run of a model after its prompt, guided as its authors generate, for one image."""

    def __init__(self, name: str, counts: Launches):
        self.model = model = built(name)
        self.layout, self.forcing = model.layout().to(GPU), model.vocab < model.vocab_total
        self.graphs = CountedGraphs(counts)
        prompt = model.encode_features(torch.zeros(1, sizes.PROMPT, sizes.CAPTION))
        self.request = Request(model, prompt, self.layout, model.defaults)

    def passes(self, method: DiscreteMethod, *extents: tuple[int, ...]) -> Iterator[Any]:
        """Begin a run, and make a round of it whenever asked: a step for each of the extents, or one without."""

        def start(model: Any, cache: Any, layout: Any, *_: Any) -> Start:
            tokens = torch.zeros((1, layout.length + 1), dtype=torch.int64, device=GPU)
            return Start(torch.zeros(1, dtype=torch.int64), tokens, cache.prefill)

        session = Session(self.graphs)
        with (
            patch.object(engine, "read_prefix", start),
            patch.object(engine, "check_finite", lambda out: None),
            patch.object(type(self.layout), "forces", self.forcing),
        ):
            run, state, _ = engine.begin(method.bind(self.request), self.request, session)
        inputs = engine.StepInputs(run.inputs, state)
        while True:
            yield
            for extent in extents or ((),):
                inputs = self.graphs(extent, engine.step_of(run, Extent(extent)), inputs)


def mar_b(counts: Launches) -> tuple[MaskedModel, MaskedState]:
    """MAR-B in bf16, its head in fp32, and the state of a guided run of one image."""
    with fake_tensor.unset_fake_temporarily():
        schedule = NoiseSchedule.cosine()  # reads a number
    schedule = graphs.map_tensors(lambda table: torch.empty_like(table, device=GPU), schedule)
    with sizes.built_as(torch.bfloat16, GPU):
        backbone = MAR(MARConfig())
    with sizes.built_as(torch.float32, GPU), patch.object(NoiseSchedule, "cosine", return_value=schedule):
        head = DiffusionHead(backbone.config.channels, backbone.config.dim, width=1024, depth=6)
    encoder = MissingEncoder("Random weights read no prompts.")
    model = MaskedModel(backbone, head, "mar", 0.2325, ContinuousParams(cfg=2.9), encoder)
    model.device, model.dtype = GPU, torch.bfloat16
    prompts = torch.zeros((2, backbone.config.slots, backbone.config.dim), dtype=model.dtype, device=GPU)
    return model.eval(), MaskedState(prompts, 2, backbone.positions(*model.grid), CountedGraphs(counts))


def mar_pass(model: MaskedModel, state: MaskedState) -> Iterator[Any]:
    """Of an image of which half is known."""
    length = math.prod(model.grid)
    tokens = torch.zeros((1, length, model.channels), device=GPU)
    known = torch.arange(length, device=GPU)[None, None] % 2 > 0
    while True:
        yield
        model.condition_vectors(state, tokens, known, length // 2)


def mar_head(model: MaskedModel, state: MaskedState) -> Iterator[Any]:
    """A call for one token: the graph, which is one denoising step, and what is launched between its replays."""
    schedule, z = model.head.schedule, torch.zeros((1, state.prompts.shape[-1]), dtype=model.dtype, device=GPU)
    noise = torch.zeros((1 + schedule.steps, 1, model.channels), device=GPU)
    scale = torch.ones(1, device=GPU)
    while True:
        yield
        model.head.denoise(z, z, scale, 1.0, noise[0], noise[1:], schedule, state.graphs)


def drafted(name: str, *extents: tuple[int, ...]) -> Callable[[Case], Iterator[Any]]:
    """Rounds of a method with an EAGLE drafter, by the name that it is measured under."""

    def passes(case: Case) -> Iterator[Any]:
        eagle = sizes.eagle(case.model)
        [method] = [each.method for each in drafter_cases(eagle, eagle) if each.name == name]
        return case.passes(method, *extents)

    return passes


DRAFTED = (
    "chain of 5",
    "EAGLE-1, 25 drafts",
    "EAGLE-1, 57 drafts",
    "EAGLE-2",
    "LANTERN delta 0.3",
    "LANTERN++ k 10, lambda 2",
    "Cool-SD delta 2",
)
VVS = "VVS every 4th, EAGLE-1"
CASES = {
    "llamagen-xl, next token": ("llamagen-xl", lambda case: case.passes(NextToken())),
    "llamagen-xl, sjd 32": ("llamagen-xl", lambda case: case.passes(SJD(WINDOW))),
    "llamagen-xl, sjd++ 32": ("llamagen-xl", lambda case: case.passes(SJD(WINDOW, "threshold_paper"))),
    **{f"llamagen-xl, {name}": ("llamagen-xl", drafted(name)) for name in DRAFTED},
    "llamagen-xl, ADT-Tree": ("llamagen-xl", drafted("ADT-Tree", (3, 20))),
    "llamagen-xl, VVS, verified": ("llamagen-xl", drafted(VVS, (), (1, 0, 0))),
    "llamagen-xl, VVS, verified after a skipped round": ("llamagen-xl", drafted(VVS, (), (1, 0, 1))),
    "llamagen-xl, VVS, skipped": ("llamagen-xl", drafted(VVS, (), (0, 1, 0))),
    "janus-pro-1b, next token": ("janus-pro-1b", lambda case: case.passes(NextToken())),
    "lumina-mgpt-7b, next token": ("lumina-mgpt-7b", lambda case: case.passes(NextToken())),
    "lumina-mgpt-7b, sjd 32": ("lumina-mgpt-7b", lambda case: case.passes(SJD(WINDOW))),
    "emu3-8b, next token": ("emu3-8b", lambda case: case.passes(NextToken())),
    "mar-b, backbone": ("mar-b", mar_pass),
    "mar-b, head": ("mar-b", mar_head),
}


def launches(name: str) -> Counter[str]:
    """What a replayed pass (or round) of a case launches, by name."""
    size, passes = CASES[name]
    counts = Launches()
    with without_a_gpu(counts):
        going_on = passes(*mar_b(counts)) if size == "mar-b" else passes(Case(size, counts))
        for _ in range(4):  # after the prompt: called, captured, replayed with all its constants
            next(going_on)
        with counts:  # and what the next replay copies
            next(going_on)
    return counts.found


def read() -> dict[str, Any]:
    """Launches by case: of today ("cases"), and before a commit ("before")."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def page() -> str:
    """docs/gpu.md: the cases of LlamaGen-XL."""
    table, model = read(), "llamagen-xl, "
    before, now = table["before"]["cases"], table["cases"]
    rows = [(name.removeprefix(model), before[name], now.get(name, "")) for name in before if name.startswith(model)]
    return grid(("LlamaGen-XL, a round of", f"launches, {table['before']['commit']}", "now"), rows)


def main() -> None:
    plain_command(" launches", __doc__).parse_args()
    table = json.dumps(read() | {"cases": {name: launches(name).total() for name in CASES}}, indent=1)
    TABLE.write_text(table + "\n", encoding="utf-8")
    print(table)
