"""Count the kernel launches of a pass on a GPU, on tensors without data: no GPU is needed.

    python -m tools.benchmarks launches                 # all entries, to tools/benchmarks/results/launches.json
    python -m tools.benchmarks launches --case "llamagen-xl, next token"     # one entry, by operation

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
from comfyui_specar.kernels import dispatch, graphs, noise
from comfyui_specar.model_loaders.ar_model import DiscreteModel
from comfyui_specar.model_loaders.continuous_model import MaskedModel, MaskedState
from comfyui_specar.model_loaders.text.prompt_encoders import MissingEncoder
from comfyui_specar.models.diffusion_head import DiffusionHead, Schedule
from comfyui_specar.models.mar import MAR, MARConfig
from comfyui_specar.samplers import constants
from comfyui_specar.samplers.continuous_contract import ContinuousParams
from comfyui_specar.samplers.contract import Request
from comfyui_specar.samplers.drafts import trees
from comfyui_specar.samplers.drafts.structures import Chain
from comfyui_specar.samplers.engine import run as engine
from comfyui_specar.samplers.engine.prefill import Start
from comfyui_specar.samplers.engine.run import DiscreteMethod
from comfyui_specar.samplers.engine.session import Session
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.methods.speculative import DraftTree
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import sizes
from .report import plain_command

TABLE = Path(__file__).parent / "results" / "launches.json"
GPU = torch.device("cuda:0")
WINDOW, CHAIN = 32, 5
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
            counts.found[f"triton::{self.__name__}"] += 1

    with ExitStack() as stack:
        for where, name, instead in (
            (JITFunction, "run", launch),
            (dispatch, "runs_triton", lambda device: True),
            (torch.cuda, "current_device", lambda: 0),
            (graphs.Graphs, "_first", lambda self, step, state: step(state)),
            (FakeTensorMode, "avoid_device_init", True),  # whatever other kinds of devices there are
            (fake_tensor, "CONSTANT_NUMEL_LIMIT", -1),  # else the smallest have data, on a GPU that is not there
        ):
            stack.enter_context(patch.object(where, name, instead))
        made_once = constants.counting, constants.numbers, constants.uniform_probs
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

    def passes(self, method: DiscreteMethod) -> Iterator[Any]:
        """Begin a run, and make a step of it whenever asked."""

        def start(model: Any, cache: Any, layout: Any, *_: Any) -> Start:
            tokens = torch.zeros((1, layout.length + 1), dtype=torch.int64, device=GPU)
            return Start(torch.zeros(1, dtype=torch.int64), tokens, cache.prefill)

        session = Session(self.graphs)
        with (
            patch.object(engine, "read_prefix", start),
            patch.object(engine, "check_finite", lambda out: None),
            patch.object(type(self.layout), "forces", self.forcing),
        ):
            run, state, _ = engine.begin(method.bound(self.request), self.request, session)
        inputs, step = engine.StepInputs(run.stream, run.layout, run.end, None, None, state), engine.step_of(run)
        while True:
            yield
            inputs = self.graphs("step", step, inputs)


def mar_b(counts: Launches) -> tuple[MaskedModel, MaskedState]:
    """MAR-B in bf16, its head in fp32, and the state of a guided run of one image."""
    with fake_tensor.unset_fake_temporarily():
        schedule = Schedule.cosine()  # reads a number
    schedule = graphs.mapped(lambda table: torch.empty_like(table, device=GPU), schedule)
    with sizes.built_as(torch.bfloat16, GPU):
        backbone = MAR(MARConfig())
    with sizes.built_as(torch.float32, GPU), patch.object(Schedule, "cosine", return_value=schedule):
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


def chain(case: Case) -> Iterator[Any]:
    return case.passes(DraftTree(sizes.eagle(case.model), Chain(CHAIN)))


CASES = {
    "llamagen-xl, next token": ("llamagen-xl", lambda case: case.passes(NextToken())),
    "llamagen-xl, sjd 32": ("llamagen-xl", lambda case: case.passes(SJD(WINDOW))),
    "llamagen-xl, chain of 5": ("llamagen-xl", chain),
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


def table() -> dict[str, int]:
    """Launches of every case."""
    return {name: launches(name).total() for name in CASES}


def main() -> None:
    parser = plain_command(" launches", __doc__)
    parser.add_argument("--case", choices=CASES, help="count only this entry, and list its launches by operation")
    options = parser.parse_args()
    if options.case:
        for launched, times in launches(options.case).most_common():
            print(f"{times:6} {launched}")
        return
    found = table()
    TABLE.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
