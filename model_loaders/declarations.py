"""The declarations by which modules of ``families`` and ``decoders`` register. ``families/__init__.py`` and
``decoders/__init__.py`` list them; all other code reads these lists."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class ReleasedDecoder:
    """The image decoder that models were released with; by default it is part of their weights.

    names: file names without the extension, after the folder's name if it has its own folder. home: for messages: the
    file to put beside the model, and its repository. node: the one that decodes instead of VAE Decode, where tokens
    alone do not determine an image.
    """

    names: tuple[str, ...] = ()
    home: str = ""
    node: str = ""


@dataclass(frozen=True)
class Download:
    """Files of a Hugging Face repository, and the folder of ComfyUI's models/ they belong in.

    In ``Family.releases`` the fields are templates of `re.Match.expand`. files: "" means all.
    """

    repository: str
    folder: str
    files: str = ""


@dataclass(frozen=True, eq=False)
class Family:
    """A family of models.

    labels: names of its models. decoders: ``family`` of a model -> the image decoder it was released with. recognise:
    tensors by name -> whether they are of this family. load: (checkpoint, dtype, grid or None, search folders,
    operations) -> the model on the CPU. continuous: whether tokens are vectors. releases: regular expression for a
    loader's choice -> all files that it needs. image_prompt_models: names of the models that read images with a prompt.
    encoder: (checkpoint, model, search folders, operations) -> the module on the CPU that encodes these images, if the
    image decoder's encoder does not. readers: ``family`` of a model -> (checkpoint, model, search folders, operations)
    -> its ImageReader on the CPU, if such models answer questions about images; caption_models: their names. silent:
    why the others do not, after their name. aliases: what a module is called in one layout of the weights and in
    another.
    """

    labels: tuple[str, ...]
    decoders: Mapping[str, ReleasedDecoder]
    recognise: Callable[[Mapping[str, Tensor]], bool]
    load: Callable[..., Any]
    continuous: bool = False
    releases: Mapping[str, tuple[Download, ...]] = field(default_factory=dict)
    image_prompt_models: tuple[str, ...] = ()
    encoder: Callable[..., Any] | None = None
    readers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    caption_models: tuple[str, ...] = ()
    silent: str = "generates images, but does not describe them"
    aliases: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, eq=False)
class DecoderKind:
    """A kind of image decoder.

    recognise: names of tensors -> whether they are of this kind, or of a model that contains one. load: (checkpoint,
    dtype, operations) -> the decoder on the CPU. files: file names of its weights in addition to WEIGHT_FILES.
    """

    recognise: Callable[[Collection[str]], bool]
    load: Callable[..., Any]
    files: tuple[str, ...] = ()
