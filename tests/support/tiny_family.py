"""What the module ``tiny_<family>`` of every family declares of its tiny models. Lists of families are made from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from comfyui_specar.model_loaders.families import FAMILIES
from PIL import Image


@dataclass(frozen=True)
class Tiny:
    """A model with random weights, in ``TINY`` under what ``family`` of the loaded model says.

    write: (folder) -> what is to be loaded; of token ids also with seed and layers, and of 4 x 4 tokens then.
    specials: how many tokens are no part of the image.
    """

    write: Callable[..., Path]
    specials: int = 0


@dataclass(frozen=True)
class Language:
    """What a model says of itself that reads prompts through a tokenizer, in ``LANGUAGE`` by its family.

    tokens: two special tokens with a meaning. Of models of token ids also: forced: those of 4 x 4 tokens; params: the
    authors'; sizes: longest sequence, numbers of a code vector, pixels of a token; first: id of the first code;
    specials: ids of the special tokens; prompts: what it reads for the prompt {}, and what for it as a negative prompt,
    if that is another text; repository: that has the tokenizer; decoder: the image decoder beside the weights; stated:
    special tokens whose ids other files state; other: one of the same kind, for an exchange; nonsense: entries of
    config.json that are refused.
    """

    tokens: tuple[str, str]
    forced: Sequence[int] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    sizes: tuple[int, int, int] = (0, 0, 0)
    first: int | None = None
    specials: Sequence[int] = ()
    prompts: tuple[str, ...] = ()
    repository: str = ""
    decoder: str = ""
    stated: tuple[str, ...] = ()
    other: str = "<reserved08796>"
    nonsense: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Files:
    """Sound files of a model and all that it needs, in ``FILES`` by a name of their own: ``write`` puts them into a
    folder, whose file ``name`` (none: itself) is loaded, to be asked for a prompt, with a storage."""

    write: Callable[[Path], Any]
    name: str = ""
    prompt: str = "a red cat"
    storage: torch.dtype | None = None


@dataclass(frozen=True)
class Workflow:
    """What the workflow of a family asks for, in ``WORKFLOWS`` by the workflow's name: ``write`` puts it into ComfyUI's
    models folder. title: of the workflow's card. changes: what its inputs must be for the tiny files. tokens: that its
    model samples."""

    title: str
    write: Callable[[Path], Any]
    changes: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 16


FREE, GUIDED = (-1,) * 4, {"cfg": 3.0, "top_k": 32}  # a row of 4 tokens without forced ones; common parameters


def with_image(install: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Also puts the image there that comes with ComfyUI, which a template loads."""

    def install_both(models: Path) -> None:
        install(models)
        (models.parent / "input").mkdir(exist_ok=True)
        noise = torch.randint(0, 256, (24, 24, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
        Image.fromarray(noise.numpy()).save(models.parent / "input/example.png")

    return install_both


def declared(table: str, continuous: bool | None = None) -> dict[str, Any]:
    """The entries of a table (TINY, LANGUAGE, FILES, WORKFLOWS) of all families, or of those of one kind of tokens."""
    families = [family for family in FAMILIES if continuous in (None, family.continuous)]
    modules = (import_module(f"{__package__}.tiny_{family.load.__module__.rpartition('.')[2]}") for family in families)
    return {name: entry for module in modules for name, entry in getattr(module, table, {}).items()}
