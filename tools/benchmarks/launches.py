"""Count the kernel launches of a pass on a GPU, on tensors without data: no GPU is needed.

    python -m tools.benchmarks launches                 # all entries, to tools/benchmarks/results/launches.json
    python -m tools.benchmarks launches --case "llamagen-xl, next token"     # one entry, by operation

A step is captured as on an NVIDIA GPU with Triton. Counted are torch operations that compute or move numbers (a matrix
product or sort of a library counts as one) and launches of Triton kernels; storing the next state is among them.
Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
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
from comfyui_specar.samplers.engine.prefill import Start
from comfyui_specar.samplers.methods import jacobi, next_token
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.round_step import ROUND, RoundStep
from comfyui_specar.samplers.methods.speculative import DraftTree
from comfyui_specar.samplers.probabilities import DeviceParams
from comfyui_specar.samplers.rng import Stream
from comfyui_specar.samplers.trace import Record
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import sizes

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


class Chosen(dict):
    """In place of the dispatcher's choices: every Triton kernel is taken."""

    def __contains__(self, case: object) -> bool:
        return True

    def __getitem__(self, case: tuple) -> Callable[..., Any]:
        reference = case[0]
        return getattr(import_module(f"{reference.__module__}_triton"), reference.__name__)

    def get(self, case: tuple, default: Any = None) -> Callable[..., Any]:
        return self[case]


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
            (dispatch, "_chosen", Chosen()),
            (torch.cuda, "current_device", lambda: 0),
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
        self.graphs, self.params = CountedGraphs(counts), DeviceParams.of(model.defaults, GPU, None)
        self.prompt = model.encode_features(torch.zeros(1, sizes.PROMPT, sizes.CAPTION)), None, 1
        self.request = Request(model, self.prompt[0], self.layout, model.defaults)

    def begin(self, slack: int) -> tuple[Any, Start, Stream]:
        """The model's state, where sampling begins, and the random numbers."""
        state = self.model.start(*self.prompt, self.layout, slack, True)
        tokens = torch.zeros((1, self.layout.length + 1), dtype=torch.int64, device=GPU)
        return state, Start(torch.zeros(1, dtype=torch.int64), tokens, state.prefill), Stream.of(0, 1, GPU)


def next_token_pass(case: Case) -> Iterator[Any]:
    model_state, start, stream = case.begin(1)
    record = Record.empty(case.layout.length, 1, GPU, round_fields=())
    run = next_token.NextTokenRun(case.model, case.params, case.forcing, model_state, record, next_token.Noise())
    state = next_token.begin(run, start, case.layout, stream)
    while True:
        yield
        state = case.graphs("step", partial(next_token.step, run), state)


def sjd_pass(case: Case) -> Iterator[Any]:
    model_state, start, stream = case.begin(WINDOW)
    model, method = case.model, SJD(WINDOW)
    memory = jacobi.Memory.empty(method.reuse, 1, case.layout.stride, WINDOW, model.vocab_total, GPU)
    record = Record.empty(case.layout.length, 1, GPU, round_fields=())
    run = jacobi.JacobiRun(method, method.rule, case.params, WINDOW, case.forcing, model, model_state, memory, record)
    state = jacobi.begin(run, start, case.layout, stream, None)
    while True:
        yield
        state = case.graphs("step", partial(jacobi.step, run), state)


def chain_round(case: Case) -> Iterator[Any]:
    drafter = sizes.eagle(case.model)
    method = DraftTree(drafter, Chain(CHAIN))
    model_state, start, stream = case.begin(method.width(case.request))
    drafter_state = drafter.start(model_state, *case.prompt, case.layout, method.draft_width, True)
    record = Record.empty(case.layout.length, 1, GPU, round_fields=ROUND)
    step = RoundStep(
        case.model,
        model_state,
        drafter,
        drafter_state,
        method.structure,
        method.rule,
        None,
        case.params,
        None,
        case.layout.length,
        case.forcing,
        method.max_drafter_inputs,
        record,
    )
    strength = torch.ones((1, case.layout.length), device=GPU)
    state = step.begin(start, stream, case.layout, strength, None)
    while True:
        yield
        state = case.graphs("round", step.whole, state)


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


CASES = {
    "llamagen-xl, next token": ("llamagen-xl", next_token_pass),
    "llamagen-xl, sjd 32": ("llamagen-xl", sjd_pass),
    "llamagen-xl, chain of 5": ("llamagen-xl", chain_round),
    "janus-pro-1b, next token": ("janus-pro-1b", next_token_pass),
    "lumina-mgpt-7b, next token": ("lumina-mgpt-7b", next_token_pass),
    "lumina-mgpt-7b, sjd 32": ("lumina-mgpt-7b", sjd_pass),
    "emu3-8b, next token": ("emu3-8b", next_token_pass),
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
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks launches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
