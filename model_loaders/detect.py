"""Files -> models: detect the family of a file, and explain why a file is not supported."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ..device.placed import Placed
from ..limits.limits import quote
from ..models.continuous_model import ContinuousBase
from ..models.discrete_model import DiscreteModel
from ..models.drafters import ModelDrafter, as_drafter
from ..models.image_decoder import Autoencoder, ImageDecoder
from ..models.image_reader import ImageReader
from ..models.networks.glm_image_vision import SourceEncoder
from ..models.networks.precision import bf16_is_faster
from ..models.networks.quantised import NARROW
from ..models.sizes import legal_grid
from .declarations import Family
from .decoders import KINDS
from .families import CAPTION_MODELS, FAMILIES, NAMES, RELEASED_DECODERS, eagle
from .families import glm_image_diffusion as glm_image
from .families.eagle import EagleDrafter
from .files.adapters import with_adapter
from .files.checkpoint import (
    INDEX,
    PICKLES,
    SAFETENSORS,
    TORCHSCRIPT,
    WEIGHT_FILES,
    Checkpoint,
    StorageChoice,
    open_checkpoint,
    outline,
    tensor_names,
    title,
    weight_file,
)
from .files.errors import CheckpointError, as_released
from .files.quantised import LazyMatrix

P = TypeVar("P", bound=Placed)
logger = logging.getLogger(__name__)

LARGE = 50_000_000  # weights from which a pass on a CPU is mostly products; smaller models stay in fp32
DECODER_FILES = (*WEIGHT_FILES, *(file for kind in KINDS for file in kind.files))  # in the folder of an image decoder
_SUFFIXES = SAFETENSORS + PICKLES + TORCHSCRIPT
_DECODERS = [name for decoder in RELEASED_DECODERS.values() for name in decoder.names]
_IN_FOLDER = (  # all names of an image decoder in a folder, in order of preference; first that of a bundled model
    "vq.safetensors",
    "vae.safetensors",
    *WEIGHT_FILES,
    *(f"{name.rpartition('/')[2]}{suffix}" for name in dict.fromkeys(_DECODERS) for suffix in _SUFFIXES),
)
_ASSETS = Path(__file__).resolve().parent.parent / "assets"


def bundled(name: str = "default") -> Path:
    """Folder of a model or drafter that ships with the pack. Raises FileNotFoundError that lists the available ones."""
    folder = _ASSETS / name
    if not (folder / "model.safetensors").is_file():
        there = sorted(p.parent.relative_to(_ASSETS).as_posix() for p in _ASSETS.rglob("model.safetensors"))
        raise FileNotFoundError(
            f"There is no bundled model or drafter {name!r}; available are: {', '.join(there) or 'none'}."
        )
    return folder


def find_model(name: str) -> Path:
    """A file or folder, or else the bundled model of that name."""
    return Path(name) if Path(name).exists() else bundled(name)


def load_model(
    path: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    grid: tuple[int, int] | None = None,
    operations=nn,
    search_folders: Sequence[Path] = (),
    storage: torch.dtype | StorageChoice | None = None,
    int8_cache: bool = False,
    adapters: Sequence[tuple[str | Path, float]] = (),
) -> DiscreteModel | ContinuousBase:
    """Load an AR image model, of discrete or of continuous tokens, from a file or folder. The family is detected.

    dtype None: see ``fastest_dtype``. grid: (rows, cols), needed if neither metadata nor file name determine it.
    Text encoder and image decoder (``image_decoder`` of a discrete model) are searched for beside the file and in
    ``search_folders``; a missing one raises an error when it is used. storage: format of the large matrices (models of
    token ids): torch.int8 (with a scale per row), torch.float8_e4m3fn or torch.uint4 (4 bits, with step and minimum per
    group of 64); or a function that chooses one, or None, for the model on the meta device, before any weight is read.
    Other weights and all computation have ``dtype``. int8_cache: store keys and values in int8, with a scale each
    (models of token ids). adapters: files or folders of LoRAs (see files/adapters.py) and their strengths.
    Raises CheckpointError (a ValueError) for unsupported or damaged files, ValueError for an invalid grid or storage
    and for a device that is not there, TypeError for a dtype or adapters of another kind.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(
            f"dtype is {dtype!r}, but must be None or a torch.dtype such as torch.bfloat16. Narrower weights: storage."
        )
    if not (storage is None or callable(storage) or storage in NARROW):
        raise ValueError(f"storage is {storage}; choose None or one of {', '.join(map(str, NARROW))}.")
    device, grid = usable_device(device), grid and legal_grid(grid)
    checkpoint = replace(open_with_adapters(path, adapters), storage=storage)
    model = build_model(checkpoint, dtype or fastest_dtype(device, path), grid, search_folders, operations)
    if int8_cache and model.continuous:
        raise CheckpointError(
            f"{title(checkpoint.path)} is a continuous model: an int8 cache is supported only for "
            "models of token ids. Choose another dtype."
        )
    model.int8_cache = int8_cache
    if isinstance(model, DiscreteModel):
        attach_decoder(model, checkpoint.path, search_folders, operations)
    return move_to(model, device)


def attach_decoder(model: DiscreteModel, path: Path, search_folders: Sequence[Path], operations) -> None:
    """Attach the first image decoder with the number of codes of the model in a weight file; log a warning for each
    other one. Raises CheckpointError for one that cannot be read."""
    for file in decoder_files(path, model.family, search_folders):
        decoder = load_image_decoder(file, operations=operations)
        if isinstance(decoder, ImageDecoder) and decoder.codes == model.vocab:
            model.attach_codebook(decoder.codebook, decoder.factor)
            model.image_decoder = decoder
            return
        logger.warning("%s is not the image decoder of this model, which has %d codes.", decoder.name, model.vocab)


def move_to(module: P, device: torch.device) -> P:
    """The module, moved to the device that it computes on."""
    module.to(device)
    module.device = device
    return module


def load_as_released(load: Callable[..., Any], checkpoint: Checkpoint, *arguments: Any) -> Any:
    """What ``load`` makes of a checkpoint, if it is as released. Raises CheckpointError where it cannot."""
    with as_released(checkpoint.path):
        return load(checkpoint, *arguments)


def usable_device(device: str | torch.device) -> torch.device:
    """The device. Raises ValueError for one that is not there."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter from a PyTorch without CUDA
        there = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        there += ["mps"] * torch.backends.mps.is_available()
        raise ValueError(f"device is {str(device)!r}, but must be one that is there: {', '.join(there)}.") from error
    return torch.device(device)


def open_with_adapters(path: str | Path, adapters: Sequence[tuple[str | Path, float]]) -> Checkpoint:
    """The checkpoint of a model's file or folder, with LoRAs. Raises CheckpointError, and TypeError for adapters that
    are no pairs of a path and a number."""
    checkpoint = open_checkpoint(model_file(path))
    family = family_of(checkpoint) if adapters else None
    for each in adapters if isinstance(adapters, (list, tuple)) else [adapters]:
        match each:
            case [str() | os.PathLike() as adapter, Real() as strength]:
                aliases = family.aliases if family else ()
                checkpoint = with_adapter(checkpoint, Path(adapter), float(strength), aliases)
            case _:
                raise TypeError(
                    f"adapters is {adapters!r:.200}, but must be a list of LoRAs (files or folders) with their "
                    "strengths, such as [(path, 1.0)]."
                )
    return checkpoint


def model_file(path: str | Path) -> Path:
    """The weight file of a model or drafter. Raises CheckpointError for a folder without one, and for one of several
    shards."""
    if os.path.isdir(Path(path) / glm_image.MODEL):  # unlike Path.is_dir, it accepts invalid names
        raise CheckpointError(
            f"{path} is a whole release of GLM-Image. Choose its folder {glm_image.MODEL}, which "
            "holds the model; its image decoder is found from there."
        )
    file = weight_file(Path(path))
    part = re.search(r"-\d+-of-(\d+)\.[a-z]+$", file.name)
    if part and int(part[1]) > 1:
        raise CheckpointError(
            f"{file.name} is one of several shards. Choose their folder, {file.parent.name}, which contains "
            f"{' or '.join(name for name in WEIGHT_FILES if name.endswith(INDEX))} as the list of all shards."
        )
    return file


def fastest_dtype(device: torch.device, path: str | Path) -> torch.dtype:
    """bf16 on a GPU, and on a CPU that multiplies it faster for a large model of token ids; else fp32."""
    if device.type == "cpu" and not (count_weights(path) >= LARGE and bf16_is_faster()):
        return torch.float32
    return torch.bfloat16


def build_model(
    checkpoint: Checkpoint, dtype: torch.dtype, grid: tuple[int, int] | None, search: Sequence[Path], operations
) -> DiscreteModel | ContinuousBase:
    """The model of a checkpoint. Raises CheckpointError if it is unsupported or damaged."""
    family = family_of(checkpoint)
    if family is None:
        raise CheckpointError(unknown(checkpoint, "model"))
    if family.continuous and isinstance(checkpoint.storage, torch.dtype):
        raise CheckpointError(
            f"{title(checkpoint.path)} is a continuous model: int8, fp8 and int4 storage are supported only for models "
            "of token ids. Choose another dtype."
        )
    return load_as_released(family.load, checkpoint, dtype, grid, search, operations)


def family_of(checkpoint: Checkpoint) -> Family | None:
    """The family that a checkpoint belongs to."""
    return next((family for family in FAMILIES if family.recognise(checkpoint.tensors)), None)


def load_drafter(
    path: str | Path,
    model: DiscreteModel | ContinuousBase,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    operations=nn,
) -> EagleDrafter | ModelDrafter | ContinuousBase:
    """Load a drafter for ``model`` from a file or folder: an EAGLE drafter, or a smaller model of the same family.

    Device and dtype None: those of the model. Raises CheckpointError (a ValueError) for unsupported or damaged files,
    and for drafters of other models; ValueError for a device that is not there, TypeError for what is no model.
    """
    if not hasattr(model, "request"):
        raise TypeError(f"model is {model!r}, but must be that of load_model(path).")
    device = usable_device(device or model.device)
    checkpoint = open_checkpoint(model_file(path))
    dtype, family = dtype or model.dtype, family_of(checkpoint)
    if eagle.recognise(checkpoint.tensors):
        if model.tokens != DiscreteModel.tokens:
            raise CheckpointError(
                f"{checkpoint.path.name} is an EAGLE drafter, which drafts {DiscreteModel.tokens}, but the model "
                f"generates {model.tokens}. Its drafter is a smaller model of its family."
            )
        drafter = load_as_released(eagle.load, checkpoint, model, dtype, operations)
    elif family is not None:
        drafter = as_drafter(build_model(checkpoint, dtype, None, (), operations), model, checkpoint.path)
    else:
        raise CheckpointError(unknown(checkpoint, "drafter"))
    move_to(drafter.module, device)
    return drafter


def load_reader(
    path: str | Path,
    model: DiscreteModel | ContinuousBase,
    operations=nn,
    search_folders: Sequence[Path] = (),
    adapters: Sequence[tuple[str | Path, float]] = (),
) -> ImageReader:
    """The part of a model's files, a file or folder, that reads images and answers questions about them, in the dtype
    and on the device of the loaded ``model``. search_folders, adapters: those with which it was loaded (see
    ``load_model``).

    Raises CheckpointError (a ValueError) for a model that does not read images, and for damaged files.
    """
    family = next(family for family in FAMILIES if model.family in family.decoders)
    if model.family not in family.readers:
        name = f"{title(model_file(path))} ({model.family})"
        raise CheckpointError(f"{name} {family.silent}. Models that do both: {', '.join(CAPTION_MODELS)}.")
    load = family.readers[model.family]
    reader = load_as_released(load, open_with_adapters(path, adapters), model, search_folders, operations)
    move_to(reader.reading, model.device)
    return reader


def load_encoder(
    path: str | Path,
    model: DiscreteModel,
    operations=nn,
    search_folders: Sequence[Path] = (),
    adapters: Sequence[tuple[str | Path, float]] = (),
) -> SourceEncoder:
    """The part of a model's files that encodes the images of its prompts, where these are ``seen`` (see ImagePrompts);
    the rest as in ``load_reader``. Raises CheckpointError (a ValueError) for files without it, and for damaged ones."""
    family = next(family for family in FAMILIES if model.family in family.decoders)
    if family.encoder is None:
        raise CheckpointError(
            f"{title(model_file(path))} ({model.family}) has no encoder of its own. If it reads images with its "
            "prompt, its image decoder encodes them."
        )
    encoder = load_as_released(family.encoder, open_with_adapters(path, adapters), model, search_folders, operations)
    return move_to(encoder, model.device)


def unknown(checkpoint: Checkpoint, wanted: str) -> str:
    """Error message for a file that is not a ``wanted`` one: a model or a drafter."""
    path, tensors = checkpoint.path, checkpoint.tensors
    name = f"{path.parent.name}/{path.name}" if path.name in WEIGHT_FILES else path.name
    if is_image_decoder(tensors):
        return f"{name} is an image decoder, not a {wanted}. Load it with Load AR Image Decoder."
    if eagle.recognise(tensors):
        return f"{name} is an EAGLE drafter, not a {wanted}. Load it with Load AR Drafter, together with its model."
    if any(tensor.startswith("midlayer.") for tensor in tensors):
        return f"{name} is an EAGLE-3 drafter. Only EAGLE drafters with one hidden state per token are supported."
    if (path.parent.parent / glm_image.MODEL).is_dir():
        return f"{path.parent.name} does not generate GLM-Image's tokens. Choose its folder {glm_image.MODEL}."
    architecture = checkpoint.settings.get("architectures") or checkpoint.settings.get("model_type")
    says = f"Its config.json says {architecture}; its" if architecture else "Its"
    if isinstance(checkpoint.quantisation, dict):  # by a program that gives other names to the tensors
        says = f"It is quantised by {quote(checkpoint.quantisation.get('quant_method'))}, which may be why. {says}"
    names = ", ".join(sorted(tensors)[:4])
    return f"{name} is no {wanted} of a supported model family ({NAMES}). {says} first tensors are: {names}."


def is_image_decoder(tensors: Collection[str]) -> bool:
    """Whether these are the tensors of an image decoder, or of a model that contains one."""
    return any(kind.recognise(tensors) for kind in KINDS)


def load_image_decoder(
    path: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None, operations=nn
) -> Autoencoder:
    """Load a VQ tokenizer or a KL VAE from a file, or from a folder (see ``decoder_in``).

    dtype None: fp32. Raises CheckpointError for unsupported or damaged files, ValueError for a device that is not
    there.
    """
    path, device = Path(path), usable_device(device)
    file = decoder_in(path) if os.path.isdir(path) else path
    checkpoint = open_checkpoint(file or weight_file(path, DECODER_FILES))
    kind = next((kind for kind in KINDS if kind.recognise(checkpoint.tensors)), None)
    if kind is None:
        names = ", ".join(sorted(checkpoint.tensors)[:4])
        raise CheckpointError(
            f"{checkpoint.path.name} is not a supported image decoder. Its first tensors are: {names}."
        )
    decoder = load_as_released(kind.load, checkpoint, dtype or torch.float32, operations)
    decoder.module.to(device)
    return decoder


def decoder_in(folder: Path) -> Path | None:
    """The image decoder in a folder: of the files with a name of one (``vq``, ``vae``, ``model``, released names), the
    first that has the tensors of one, or else the first."""
    there = [folder / name for name in _IN_FOLDER if (folder / name).is_file()]
    return next(filter(holds_decoder, there), there[0] if there else None)


def holds_decoder(file: Path) -> bool:
    """Whether a weight file is or contains an image decoder, by the names of its tensors. TorchScript files, whose
    names are known only after reading all of them, may be; files that cannot be read are if their name is a released
    one, so that loading them says why."""
    if file.suffix.lower() in TORCHSCRIPT:
        return True
    try:
        return is_image_decoder(tensor_names(file))
    except CheckpointError:
        stem = f"/{file.with_suffix('').as_posix()}".lower()
        return any(stem.endswith(f"/{name.lower()}") for name in _DECODERS)


def may_decode(path: Path) -> bool:
    """Whether ``load_image_decoder`` may find an image decoder in a file or folder."""
    file = decoder_in(path) if os.path.isdir(path) else path
    return file is not None and holds_decoder(file)


def find_image_decoder(model_path: str | Path, family: str, search_folders: Sequence[Path] = ()) -> Path | None:
    """The image decoder of a model of ``family``: in the same file, beside it or its folder, or, under a released
    name, in the search folders."""
    return next(iter(decoder_files(model_file(model_path), family, search_folders)), None)


def decoder_files(path: Path, family: str, search_folders: Sequence[Path]) -> list[Path]:
    """Files of the candidates for the image decoder of the model in a weight file, most likely first."""
    bundled_ones = [path.parent / name for name in _IN_FOLDER[:2] if (path.parent / name).is_file()][:1]
    own = [path] if holds_decoder(path) else []
    around = [path.parent, path.parent.parent] if path.name in WEIGHT_FILES else [path.parent]
    named = []
    for folder in (*around, *map(Path, search_folders)):
        for name in RELEASED_DECODERS[family].names:
            home, _, _ = name.rpartition("/")
            files = [decoder_in(folder / home)] if home else [folder / f"{name}{suffix}" for suffix in _SUFFIXES]
            named += [file for file in files if file and file.is_file()]
    return list(dict.fromkeys([*bundled_ones, *own, *named]))


def stays_narrow(path: str | Path) -> torch.dtype | None:
    """The storage in which a model of token ids keeps the numbers of its file: fp8, int8 or 4 bits; None for wide
    files, and for formats that are widened (see files/quantised.py). Only names, shapes and dtypes are read."""
    checkpoint = outline(model_file(path))
    family = family_of(checkpoint)
    if family and family.continuous:
        return None
    tensors, fp8 = checkpoint.tensors.values(), torch.float8_e4m3fn
    kept = {matrix.format.storage for matrix in tensors if isinstance(matrix, LazyMatrix)}
    plain = fp8 if any(tensor.dtype == fp8 for tensor in tensors) else None
    return next((each for each in (torch.int8, fp8, torch.uint4) if each in kept), plain)


def count_weights(path: str | Path) -> int:
    """Number of weights in the files of a model of token ids; 0 for another. Only names, shapes and dtypes are read."""
    checkpoint = outline(model_file(path))
    family = family_of(checkpoint)
    return 0 if family is None or family.continuous else sum(t.numel() for t in checkpoint.tensors.values())


def missing_decoder(model: str, family: str) -> str:
    """Error message for a model without image decoder: which file is needed and where to put it."""
    home = RELEASED_DECODERS[family].home
    if not home:
        return f"{model} has no image decoder, although the released weights contain it. Download all of them again."
    return (
        f"No image decoder was found for {model}. Put {home} beside the model or into models/vae, or load "
        "it from another file with Load AR Image Decoder."
    )
