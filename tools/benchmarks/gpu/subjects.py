"""The models that the stages run: released shapes, shapes too small for anything but looking whether all works, and the
bundled ones."""

from __future__ import annotations

from dataclasses import replace

import torch
from comfyui_specar.device import dispatch
from comfyui_specar.device.graphs import capturable
from comfyui_specar.models.discrete_model import DiscreteModel

from .. import sizes
from ..passes import Stretch
from ..subjects import METHODS, STORAGES, Subject, subject
from . import packages
from .findings import NotRun

EMU3_IDS = 184_622  # of Emu3's whole vocabulary; released models keep the head's rows of images alone
FAMILIES = ("llamagen-xl", "janus-pro-1b", "lumina-mgpt-7b", "emu3-8b")  # one of each kind
NO_GRAPHS = "steps are not captured as CUDA graphs on this GPU"
FEW = 40  # tokens that are generated where not the whole image is needed
DRY_TOKENS = 18  # that a dry run generates: a window of 16 and a little more
DRY_METHODS = ("next_token", "sjd coupled w16", "chain of 5", "ADT-Tree")  # with a window, a draft, and without a limit


def device_of(dry: bool) -> torch.device:
    """The GPU by its index, as tensors name theirs; in a dry run the CPU."""
    return torch.device("cpu") if dry else torch.device("cuda", torch.cuda.current_device())


def need_kernels(dry: bool) -> None:
    """Raise NotRun where the Triton kernels are not used; in a dry run, where there is no interpreter of them."""
    packages.need("triton")
    if not dry and not dispatch.runs_triton(device_of(dry)):
        raise NotRun("the pack does not use its Triton kernels on this GPU")


def need_graphs(dry: bool) -> None:
    """Raise NotRun on a GPU on which steps are only called."""
    if not dry and not capturable(device_of(dry)):
        raise NotRun(NO_GRAPHS)


def tiny(size: sizes.Size) -> sizes.Size:
    """The same family with two narrow layers, 64 codes and an image of 8 x 8 tokens."""
    config = replace(
        size.config,
        dim=32,
        layers=2,
        heads=4,
        kv_heads=min(size.config.kv_heads, 2),
        ffn_dim=64,
        vocab=64 + sum(size.specials),
        head_dim=0,  # that of these sizes
    )
    return replace(size, config=config, grid=(8, 8), defaults=replace(size.defaults, cfg=3.0, top_k=20))


def flat(size: sizes.Size) -> sizes.Size:
    """One layer of the same shapes: its kernels are called with what those of all layers are."""
    return replace(size, config=replace(size.config, layers=1))


def dtype_of(dry: bool) -> torch.dtype:
    """That of the passes that are measured."""
    return torch.float32 if dry else torch.bfloat16


def size_of(name: str, dry: bool) -> sizes.Size:
    return tiny(sizes.SIZES[name]) if dry else sizes.SIZES[name]


def random_subject(
    name: str,
    dry: bool,
    tokens: int,
    size: sizes.Size | None = None,
    dtype: torch.dtype | None = None,
    dry_tokens: int = DRY_TOKENS,
) -> Subject:
    """A model of a size with random weights that generates ``tokens`` in the middle of an image; in a dry run a tiny
    one and ``dry_tokens``. A name may say how the matrices are stored (X:int8, X:fp8, X:int4)."""
    family, _, storage = name.partition(":")
    stored = STORAGES[storage] if storage else None
    model = sizes.build(size or size_of(family, dry), dtype or dtype_of(dry), device_of(dry), stored)
    return subject_of(name, model, dry, tokens, dry_tokens)


def subject_of(name: str, model: DiscreteModel, dry: bool, tokens: int, dry_tokens: int = DRY_TOKENS) -> Subject:
    """A model with random weights, its prompt and a drafter."""
    stretch = Stretch.middle(model.layout(), dry_tokens if dry else tokens)
    return Subject(name, model, sizes.prompt(model), model.defaults, stretch, sizes.eagle(model))


def bundled_subject(dry: bool, dtype: torch.dtype, name: str = "default") -> Subject:
    """The bundled model (or it widened), which generates whole images; in a dry run a few tokens in the middle."""
    packages.need("safetensors", "einops")
    found = subject(name, 3.0, device_of(dry), dtype)
    return replace(found, stretch=Stretch.middle(found.stretch.layout, DRY_TOKENS)) if dry else found


def trained(size: str, dry: bool) -> Subject:
    """The bundled model widened to a size, if it can be read here; else random weights; in a dry run tiny ones."""
    if dry or not (packages.here("safetensors") and packages.here("einops")):
        return random_subject(size, dry, sizes.SIZES[size].grid[0] ** 2)
    return bundled_subject(dry, dtype_of(dry), f"default@{size}")


def methods(fixed: bool = False) -> list[str]:
    """One method of each kind, as far as the packages here allow. Tables of neighbours need numpy and a file.

    fixed: without those whose trees follow what passes cost here, and so differ from run to run."""
    without = () if packages.here("numpy") and packages.here("safetensors") else ("LANTERN",)
    return [name for name in METHODS if not name.startswith(without) and not (fixed and "auto" in name)]
