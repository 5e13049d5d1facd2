"""The only file that talks to ComfyUI's core: folders, model management, progress, previews, interruption."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.model_management as mm
import comfy.ops
import comfy.utils
import folder_paths
import torch
from comfy.cli_args import LatentPreviewMethod, args
from comfy.model_patcher import ModelPatcher
from PIL import Image
from torch import Tensor

from ..model_loaders.ar_model import DiscreteModel
from ..model_loaders.checkpoint import PICKLES, SAFETENSORS
from ..model_loaders.detect import bundled, find_image_decoder, load_drafter, load_image_decoder, load_model
from ..model_loaders.image_decoder import ImageDecoder
from ..samplers.protocols import Progress, TokenLayout

MODELS = "ar_models"
DRAFTERS = "ar_drafters"
BUNDLED = "default (bundled)"
BUNDLED_DRAFTER = "EAGLE drafter (bundled)"
ASSETS = {  # choices that ship with the pack -> their folders
    BUNDLED: "default",
    BUNDLED_DRAFTER: "default/eagle",
    "small model (bundled)": "default/small",
}
SERVER = uuid.uuid4().hex  # wall times of runs with the same one may be compared
DTYPES = {"auto": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PREVIEW_SECONDS = 0.25  # at least this long between two previews ...
PREVIEW_SHARE = 0.1  # ... and at most this share of the run spent on them
GREY = 0.5  # what is not drawn yet, in previews


# Folders


def register_folders() -> None:
    """Give the pack its model folders, next to those that extra_model_paths.yaml may have named."""
    for key in (MODELS, DRAFTERS):
        folder_paths.add_model_folder_path(key, os.path.join(folder_paths.models_dir, key))
        paths, extensions = folder_paths.folder_names_and_paths[key]
        folder_paths.folder_names_and_paths[key] = (paths, set(extensions) | set(SAFETENSORS + PICKLES))


def search_folders() -> list[Path]:
    """Where image decoders and text encoders are looked for, beside the model's own folder."""
    return [Path(p) for key in (MODELS, "vae", "text_encoders") for p in folder_paths.get_folder_paths(key)]


def model_choices() -> list[str]:
    """The bundled model, model folders (with a model.safetensors), then the other weight files of models/ar_models."""
    return [BUNDLED, *_folders_and_files(MODELS, "model.safetensors")]


def drafter_choices() -> list[str]:
    """The bundled drafters, drafter folders, then the other weight files of models/ar_drafters."""
    shipped = [choice for choice in ASSETS if choice != BUNDLED]
    return [*shipped, *_folders_and_files(DRAFTERS, "model.safetensors", "pytorch_model.bin")]


def _folders_and_files(key: str, *weights: str) -> list[str]:
    """Folders of a model folder that hold one of the files ``weights``, then the weight files in no such folder."""
    files = folder_paths.get_filename_list(key)
    folders = sorted({os.path.dirname(f) for f in files if os.path.basename(f) in weights} - {""})
    return [*folders, *(f for f in files if os.path.dirname(f) not in folders)]


def decoder_choices() -> list[str]:
    """The bundled decoder, then the weight files of models/vae and models/ar_models."""
    files = {*folder_paths.get_filename_list("vae"), *folder_paths.get_filename_list(MODELS)}
    return [BUNDLED, *sorted(f for f in files if f.endswith(SAFETENSORS + PICKLES))]


def resolve(choice: str, *keys: str) -> Path:
    """File or folder behind a choice of a loader. Raises FileNotFoundError if it is not in the folders ``keys``."""
    if choice in ASSETS:
        return bundled(ASSETS[choice])
    inside = os.path.relpath(os.path.join("/", choice), "/")  # "../" cannot leave the folder
    roots = [Path(root) for key in keys for root in folder_paths.get_folder_paths(key)]
    found = next((root / inside for root in roots if (root / inside).exists()), None)
    if found is None:
        looked = ", ".join(map(str, roots))
        raise FileNotFoundError(f"{choice} is not in {looked}. Choose another file, or press R to refresh the list.")
    return found


def fingerprint(choice: str, *keys: str) -> str:
    """Changes when a file behind a choice is replaced."""
    path = resolve(choice, *keys)
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    return stamp(files)


def stamp(files: list[Path]) -> str:
    """Path, modification time and size of files."""
    return str([(str(f), f.stat().st_mtime_ns, f.stat().st_size) for f in files])


# Traces


def next_output(prefix: str) -> tuple[Path, str]:
    """The next free numbered file name (without suffix) for a prefix, as Save Image counts, and its subfolder."""
    folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(prefix, folder_paths.get_output_directory())
    return Path(folder) / f"{name}_{counter:05}_", subfolder


def trace_choices() -> list[str]:
    """Traces of the output and the input folder: .safetensors files beside a .json of the same name."""
    roots = {"output": folder_paths.get_output_directory(), "input": folder_paths.get_input_directory()}
    choices = []
    for kind, root in roots.items():
        files, _ = folder_paths.recursive_search(root)
        reports = {os.path.splitext(f)[0] for f in files if f.endswith(".json")}
        names = (os.path.splitext(f) for f in files)
        choices += sorted(f"{stem}{end} [{kind}]" for stem, end in names if end == ".safetensors" and stem in reports)
    return choices


def trace_path(choice: str) -> Path:
    """File behind a choice of Load Trace. Raises FileNotFoundError if it is gone, ValueError if it is elsewhere."""
    name, root = folder_paths.annotated_filepath(choice)
    root = Path(root or folder_paths.get_output_directory()).resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise ValueError(f"{choice} lies outside ComfyUI's folders. Choose a trace from the output or input folder.")
    if not path.is_file():
        raise FileNotFoundError(f"There is no trace {choice}. Write one with Save Trace, or press R to refresh.")
    return path


# Models


@dataclass(frozen=True)
class LoadedDecoder:
    """An image decoder under ComfyUI's memory management."""

    decoder: ImageDecoder
    patcher: ModelPatcher

    def load(self, pixels: int) -> ImageDecoder:
        """Bring it to the compute device, with room for a picture batch of ``pixels`` in all, and return it."""
        # The widest maps have base_channels channels at full resolution; about sixteen of them live at once (fp32).
        memory = 16 * self.decoder.module.config.base_channels * pixels * 4
        mm.load_models_gpu([self.patcher], memory_required=memory, force_full_load=True)
        return self.decoder


@dataclass(frozen=True)
class LoadedModel:
    """An AR model under ComfyUI's memory management, its image decoder where one was found, and what it is called."""

    model: DiscreteModel
    patcher: ModelPatcher
    decoder: LoadedDecoder | None
    name: str


def open_model(choice: str, dtype: str, grid: tuple[int, int] | None) -> LoadedModel:
    """Load a model, built from ComfyUI's casting layers, so that it may be loaded in part. Raises ValueError."""
    path = resolve(choice, MODELS)
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}.")
    device, offload = mm.get_torch_device(), mm.unet_offload_device()
    model = load_model(
        path, dtype=DTYPES[dtype] or auto_dtype(device), grid=grid, operations=comfy.ops.disable_weight_init,
        search_folders=search_folders(),
    )
    decoder = find_image_decoder(path, search_folders())
    return LoadedModel(model, ModelPatcher(model, device, offload), decoder and open_decoder(decoder), choice)


@dataclass(frozen=True)
class LoadedDrafter:
    """A drafter under ComfyUI's memory management, what it is called, and the model it was loaded for."""

    drafter: Any
    patcher: ModelPatcher
    name: str
    target: LoadedModel

    def check(self, model: LoadedModel) -> None:
        """Raise ValueError unless ``model`` is the one this drafter belongs to."""
        if self.target is not model:
            raise ValueError(
                f"The drafter {self.name} was loaded for {self.target.name}, but the sampler's model is {model.name} "
                "from another loader. Connect the same Load AR Checkpoint to the sampler and to Load AR Drafter."
            )


def open_drafter(choice: str, target: LoadedModel) -> LoadedDrafter:
    """Load a drafter for a model, in its precision. Raises ValueError where the two do not fit."""
    path = resolve(choice, DRAFTERS)
    drafter = load_drafter(path, target.model, device="cpu", operations=comfy.ops.disable_weight_init)
    patcher = ModelPatcher(drafter.module, mm.get_torch_device(), mm.unet_offload_device())
    return LoadedDrafter(drafter, patcher, choice, target)


def open_decoder(path: Path) -> LoadedDecoder:
    """Load an image decoder in fp32 (it is small, and rounding would change tokens). Raises ValueError."""
    decoder = load_image_decoder(path, dtype=torch.float32, operations=comfy.ops.disable_weight_init)
    return LoadedDecoder(decoder, ModelPatcher(decoder.module, mm.vae_device(), mm.vae_offload_device()))


def auto_dtype(device: torch.device) -> torch.dtype:
    """bf16 or fp16 where the device computes well in them (and the user's flags allow), else fp32."""
    if mm.should_use_bf16(device):
        return torch.bfloat16
    return torch.float16 if mm.should_use_fp16(device) else torch.float32


def output(tensor: Tensor) -> Tensor:
    """A tensor where ComfyUI wants the results of nodes."""
    return tensor.to(mm.intermediate_device())


@contextmanager
def sampling(
    loaded: LoadedModel, layout: TokenLayout, batch: int, width: int, guided: bool,
    drafter: LoadedDrafter | None = None, draft_width: int = 0,
) -> Iterator[Report]:
    """Model and drafter on the compute device with room for their caches, and a callback for the sampler.

    width, draft_width: tokens that model and drafter work on in a round. The callback draws progress and previews and
    raises when the user interrupts.
    """
    model = loaded.model
    rows = batch * (1 + guided) * (max(width, draft_width) + 1)
    memory = model.kv_bytes(batch, layout, width, guided) + 8 * rows * model.vocab_total * 4  # eight rows of fp32 laws
    together = [loaded.patcher]  # in one call, so that none evicts another
    if drafter is not None:
        memory += drafter.drafter.kv_bytes(batch, layout, draft_width, guided)
        together.append(drafter.patcher)
    shown = loaded.decoder if args.preview_method != LatentPreviewMethod.NoPreviews else None
    mm.load_models_gpu([*together, shown.patcher] if shown else together, memory_required=memory)
    for patcher in together:
        for module in patcher.model.modules():  # a partly loaded model leaves the buffers behind
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(name, buffer.to(model.device))
    try:
        yield Report(model, layout, shown and shown.decoder)
    finally:
        mm.soft_empty_cache()


class Report:
    """The sampler's callback: progress bar, previews of what is drawn, interruption; once per pass."""

    def __init__(self, model: DiscreteModel, layout: TokenLayout, decoder: ImageDecoder | None):
        self.model, self.layout, self.decoder = model, layout, decoder
        self.bar = comfy.utils.ProgressBar(layout.length)
        self.next_preview = time.perf_counter() + PREVIEW_SECONDS

    def __call__(self, progress: Progress) -> None:
        mm.throw_exception_if_processing_interrupted()
        done = int(progress.committed.float().mean())
        self.bar.update_absolute(done, progress.length, self.preview(progress))

    def preview(self, progress: Progress) -> tuple[str, Image.Image, int] | None:
        """The first image of the batch so far, the rest grey, if a preview is due (the finished one always is)."""
        started = time.perf_counter()
        finished = bool((progress.committed >= progress.length).all())
        if self.decoder is None or (started < self.next_preview and not finished):
            return None
        picture = partial_picture(self.model, self.decoder, self.layout, progress)
        cost = time.perf_counter() - started
        self.next_preview = started + max(PREVIEW_SECONDS, cost / PREVIEW_SHARE)
        return "JPEG", picture, args.preview_size


def partial_picture(
    model: DiscreteModel, decoder: ImageDecoder, layout: TokenLayout, progress: Progress
) -> Image.Image:
    """The first image of a batch as far as it is drawn (kept tokens are there from the start), the rest grey."""
    forced = layout.forced[0].cpu()
    known = (torch.arange(layout.length) < progress.committed[0].cpu()) | (forced >= 0)
    tokens = torch.where(forced >= 0, forced, progress.tokens[0].cpu())
    pixels = decoder.decode(model.dequantize(layout.to_grid(tokens)[None]))[0].cpu()
    drawn = layout.to_grid(known).repeat_interleave(decoder.factor, 0).repeat_interleave(decoder.factor, 1)
    pixels = torch.where(drawn[..., None], pixels, GREY)
    return Image.fromarray((pixels * 255).round().byte().numpy())
