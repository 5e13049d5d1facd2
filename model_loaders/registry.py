"""What the modules of ``families`` and ``decoders`` declare of themselves. ``families/__init__.py`` and
``decoders/__init__.py`` list them; everything else reads these lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class ReleasedDecoder:
    """The image decoder that models were released with; by default it is in their own weights.

    names: of its file, without the ending, behind a folder's name where it has one to itself. home: what is to be put
    beside the model, and its repository, in words.
    """

    names: tuple[str, ...] = ()
    home: str = ""


@dataclass(frozen=True)
class Source:
    """Files of a Hugging Face repository, and the folder of ComfyUI's models/ where they are looked for.

    In ``Family.releases`` the fields are templates of `re.Match.expand`. files: "" stands for all.
    """

    repository: str
    folder: str
    files: str = ""


@dataclass(frozen=True, eq=False)
class Family:
    """A family of models.

    labels: what its models are called. decoders: ``family`` of a model -> the image decoder it was released with.
    recognise: tensors by name -> are they of this family? load: (checkpoint, dtype, grid or None, folders to search,
    operations) -> the model on the CPU. continuous: are its tokens vectors? releases: regular expression of a choice of
    a loader -> all that a run of it needs.
    """

    labels: tuple[str, ...]
    decoders: Mapping[str, ReleasedDecoder]
    recognise: Callable[[Mapping[str, Tensor]], bool]
    load: Callable[..., Any]
    continuous: bool = False
    releases: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class DecoderKind:
    """A kind of image decoder.

    recognise: tensors by name -> are they of this kind, or of a model that contains one? load: (checkpoint, dtype,
    operations) -> the decoder on the CPU. files: names of its weights in a folder, beyond WEIGHT_FILES.
    """

    recognise: Callable[[Mapping[str, Tensor]], bool]
    load: Callable[..., Any]
    files: tuple[str, ...] = ()
