"""Models and drafters under ComfyUI's management. (Decoders: vae.py. Files: folders.py. Runs: runs.py.)"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import comfy.model_management as mm
import torch
from comfy.cli_args import args
from comfy.model_patcher import ModelPatcher

from ...device import graphs
from ...model_loaders.detect import fastest_dtype, find_image_decoder, load_drafter, load_model, stays_narrow
from ...model_loaders.families import CONTINUOUS_NAMES
from ...model_loaders.text.t5 import T5, T5Encoder
from ...models.conditions import DTYPES, INT8_CACHE, STORAGE
from ...models.continuous_model import ContinuousBase
from ...models.discrete_model import DiscreteModel
from ...models.memory import offload_embedding
from .automatic import Automatic
from .folders import DRAFTERS, LORAS, MODELS, file_stamp, resolve, search_folders
from .memory import Patcher, load_models_gpu
from .operations import Operations
from .vae import LoadedDecoder, manage_decoder, open_decoder

T = TypeVar("T")
SERVER = uuid.uuid4().hex  # wall times are comparable within one
NO_GRAPHS = ("disable_cuda_graphs", "disable_comfy_compiler")  # options of newer ComfyUIs against them


@dataclass(frozen=True)
class LoadedPart(Generic[T]):
    """What only some nodes need of a model's files, and its weights under ComfyUI's memory management."""

    content: T
    patcher: Patcher


# As long as a model is loaded: its parts, by the functions of detect.py that read them.
_parts: WeakKeyDictionary[torch.nn.Module, dict[Callable[..., Any], LoadedPart[Any]]] = WeakKeyDictionary()


@dataclass(frozen=True, repr=False)  # ComfyUI quotes the inputs of a node that failed
class LoadedModel:
    """An AR model under ComfyUI's memory management, its image decoder if one was found, and its name.

    source: equal for models loaded from the same files with the same options. loaded_with: these options, as of
    open_model. sampling: sampling parameters that a node before the sampler chose. choice: which storage dtype "auto"
    chose by memory, and why; empty if it had no choice.
    """

    model: DiscreteModel | ContinuousBase
    patcher: ModelPatcher
    decoder: LoadedDecoder | None
    name: str
    source: Hashable = field(default_factory=object)
    loaded_with: tuple[str, str, tuple[int, int] | None, tuple[tuple[str, float], ...]] = ("", "auto", None, ())
    sampling: Mapping[str, Any] = field(default_factory=dict)
    choice: str = ""

    def part(self, load: Callable[..., T], weights: Callable[[T], torch.nn.Module]) -> LoadedPart[T]:
        """What ``load``, of detect.py, reads from the model's files besides the model, at its first use. weights: those
        of what it reads. Raises ValueError for files without it."""
        parts = _parts.setdefault(self.model, {})
        if load not in parts:
            choice, _, _, loras = self.loaded_with
            adapters = [(resolve(lora, LORAS), strength) for lora, strength in loras]
            content = load(resolve(choice, MODELS), self.model, Operations, search_folders(), adapters)
            parts[load] = LoadedPart(content, patcher_of(weights(content), self.model))
        return parts[load]

    def check_kind(self, continuous: bool) -> None:
        """Raise ValueError if the sampler is for the other kind of models."""
        if self.model.continuous and not continuous:
            raise ValueError(
                f"{self.name} is a continuous model: its tokens are vectors, and this sampler is for token ids. Use AR "
                "Sampler (continuous) or Continuous Speculative Sampler."
            )
        if continuous and not self.model.continuous:
            raise ValueError(
                f"{self.name} generates token ids, and this sampler is for continuous models ({CONTINUOUS_NAMES}), "
                "whose tokens are vectors. Use AR Sampler (next token), SJD++ Sampler or a sampler with a draft tree."
            )


def open_model(
    choice: str, dtype: str, grid: tuple[int, int] | None, loras: tuple[tuple[str, float], ...] = ()
) -> LoadedModel:
    """Load a model, built from ComfyUI's casting layers, so that it can be loaded partially. loras: choices and
    strengths, merged in this order. Raises ValueError."""
    graphs.allow(not any(getattr(args, option, False) for option in NO_GRAPHS))
    path = resolve(choice, MODELS)
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; choose one of: {', '.join(map(repr, DTYPES))}.")
    device = mm.get_torch_device()
    automatic = Automatic(choice, device, stays_narrow(path)) if dtype == "auto" else None
    model = load_model(
        path,
        dtype=DTYPES[dtype] or auto_dtype(device, path),
        grid=grid,
        search_folders=search_folders(),
        operations=Operations,
        storage=automatic or STORAGE.get(dtype),
        int8_cache=dtype == INT8_CACHE,
        adapters=[(resolve(lora, LORAS), strength) for lora, strength in loras],
    )
    offload_embedding(model)
    if isinstance(encoder := getattr(model, "prompt_encoder", None), T5Encoder):
        manage_text_encoder(encoder)
    loaded_with = choice, dtype, grid, loras
    source = loaded_with, file_stamp(choice, MODELS), *(file_stamp(lora, LORAS) for lora, _ in loras)
    why = automatic.why if automatic else ""
    name = " + ".join((choice, *(lora for lora, _ in loras)))
    decoder = decoder_of(model, path)
    return LoadedModel(model, patcher_of(model, model), decoder, name, source, loaded_with=loaded_with, choice=why)


def with_lora(loaded: LoadedModel, lora: str, strength: float) -> LoadedModel:
    """The model with one LoRA more, loaded again from its files: matrices that no LoRA changes are mapped, not copied.
    Raises ValueError."""
    choice, dtype, grid, loras = loaded.loaded_with
    return replace(open_model(choice, dtype, grid, (*loras, (lora, strength))), sampling=loaded.sampling)


def decoder_of(model: DiscreteModel | ContinuousBase, path: Path) -> LoadedDecoder | None:
    """The image decoder of a model: the one in its files, or else one from the search folders."""
    if model.image_decoder is not None:
        return manage_decoder(model.image_decoder)
    found = find_image_decoder(path, model.family, search_folders()) if model.continuous else None
    return found and open_decoder(found)


def manage_text_encoder(encoder: T5Encoder) -> None:
    """Let ComfyUI move a T5 encoder to the compute device for each prompt, and offload it if memory is short.

    It computes in bf16 if the device supports it well, else in fp32: in fp16 it overflows.
    """
    device = mm.text_encoder_device()
    encoder.dtype = torch.bfloat16 if mm.should_use_bf16(device) else torch.float32
    patchers: list[ModelPatcher] = []  # created on first use

    def place(module: T5) -> None:
        if not patchers:
            patchers.append(ModelPatcher(module, device, mm.text_encoder_offload_device()))
        load_models_gpu(patchers, force_full_load=True)

    encoder.place = place


@dataclass(eq=False, repr=False)  # as above
class LoadedDrafter:
    """A drafter under ComfyUI's memory management, its name, and the model it was loaded for."""

    drafter: Any
    patcher: ModelPatcher
    name: str
    target: LoadedModel

    def follow(self, model: LoadedModel) -> None:
        """Attach to ``model``, which is the target or the same files loaded again: if memory is short, ComfyUI may drop
        a model from its cache but keep its drafter. Raises ValueError for another model."""
        if self.target is model:
            return
        if self.target.source != model.source:
            raise ValueError(
                f"The drafter {self.name} was loaded for {self.target.name}, but the sampler's model is {model.name} "
                "from another loader. Connect the same Load AR Checkpoint to the sampler and to Load AR Drafter."
            )
        again = open_drafter(self.name, model)
        self.drafter, self.patcher, self.target = again.drafter, again.patcher, model


def open_drafter(choice: str, target: LoadedModel) -> LoadedDrafter:
    """Load a drafter for a model, in the model's dtype. Raises ValueError if they do not fit."""
    path = resolve(choice, DRAFTERS)
    drafter = load_drafter(path, target.model, device="cpu", operations=Operations)
    offload_embedding(drafter.module)
    return LoadedDrafter(drafter, patcher_of(drafter.module, target.model), choice, target)


def patcher_of(module: torch.nn.Module, model: DiscreteModel | ContinuousBase) -> Patcher:
    """Memory management of a model's weights, or of those of its drafter."""
    return Patcher(module, mm.get_torch_device(), mm.unet_offload_device(), sessions=model.sessions)


def auto_dtype(device: torch.device, path: Path) -> torch.dtype:
    """bf16 or fp16 if the device supports them well (and the user's flags allow them), else fp32.

    ComfyUI takes fp32 on every CPU; here the model's loader decides.
    """
    if mm.is_device_cpu(device) and not mm.FORCE_FP32:
        narrow = fastest_dtype(device, path) == torch.bfloat16
    else:
        narrow = mm.should_use_bf16(device)
    if narrow:
        return torch.bfloat16
    return torch.float16 if mm.should_use_fp16(device) else torch.float32
