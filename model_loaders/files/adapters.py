"""LoRA adapters (Hu et al., arXiv:2106.09685, section 4.1) in PEFT's files, merged into the matrices of a checkpoint.

A folder holds adapter_config.json, which states r and lora_alpha, and adapter_model.safetensors with two matrices for
every layer that it changes: lora_A.weight [r, K] and lora_B.weight [N, r]. The layer's W [N, K] becomes
W + strength * lora_alpha / r * B A (with use_rslora: lora_alpha / sqrt(r)), computed in fp32.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...limits.limits import MATCHED, NAME
from .checkpoint import Checkpoint, open_checkpoint, read_settings, weight_file
from .errors import CheckpointError
from .quantised import Format, LazyMatrix, first
from .unsupported import ADAPTERS

CONFIG = "adapter_config.json"
_FACTOR = re.compile(r"(.+)\.lora_([AB])(?:\.([^.]+))?\.weight")  # the third: the adapter's name, if it has one
_AROUND = re.compile(r"^(?:(?:base_model|model|module|vl_gpt|language_model|text_model|llm)\.)+")  # a language model
_LARGEST = torch.finfo(torch.float16).max  # no weight is larger
_ELSEWHERE = "Merge it with PEFT (merge_and_unload(), then save_pretrained) and load the result as a checkpoint."

# What PEFT's LoraConfig states (0.2 to 0.21). Of what is in neither table, only what is off can be merged: PEFT's
# switches are off if they are null, false or empty, as adapters from before a switch was there must stay as they were.
_FREE = frozenset(  # read here, or without effect on what the saved matrices mean
    (
        *("r", "lora_alpha", "rank_pattern", "alpha_pattern"),
        *("peft_version", "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core"),
        *("lora_dropout", "merge_weights", "runtime_config", "qalora_group_size"),
        *("eva_config", "corda_config", "lora_ga_config"),  # of initialisations, which init_lora_weights names
    )
)
_RIGHT = {  # others of init_lora_weights (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) change W, too
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_rslora": (True, False, None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal", "mica"),
}
# Of regular expressions, those that match in a time proportional to the name: none of their repetitions has a choice.
_PATTERN = re.compile(r"(?:\^|\.\*)?(?:[\w.-]|\\[.d]|\[(?:\w(?:-\w)?)+\]|(?:\\d|\[0-9\])\+(?=\\\.))+")


def with_adapter(
    checkpoint: Checkpoint, path: Path, strength: float, aliases: Sequence[tuple[str, str]] = ()
) -> Checkpoint:
    """The checkpoint with the matrices that an adapter (a file, or the folder of one) changes. aliases: see Family.

    Raises CheckpointError for files that are damaged, of another kind of adapter, or trained for another model, and
    ValueError for a strength that is no finite number.
    """
    if not isfinite(strength):
        raise ValueError(f"strength is {strength}, but must be a finite number.")
    file, model = weight_file(path, ADAPTERS[:2]), checkpoint.path.name
    tensors = _tensors(file)
    settings = _settings(file)
    factors, whole = _factors(tensors, file)
    scales = _scales(factors, settings, file)
    places = _places([*(f"{module}.weight" for module in factors), *whole], checkpoint.tensors, aliases)
    if unknown := [module for module in factors if not places[f"{module}.weight"]]:
        raise CheckpointError(
            f"{file} changes {len(unknown)} layers that {model} does not have, for example {unknown[0]}: it was "
            "trained for another model."
        )
    changed: dict[str, Tensor] = {}
    for module, (down, up) in factors.items():
        shape, names = (len(up), down.shape[1]), places[f"{module}.weight"]
        bases = {name: first(checkpoint.tensors[name], *shape) for name in names}
        fitting = [name for name, base in bases.items() if base.shape == shape]
        if not fitting:
            raise CheckpointError(
                f"{file} changes {module} by a matrix of the shape {[*shape]}, which is {[*bases[names[0]].shape]} in "
                f"{model}: it was trained for another model."
            )
        if len(fitting) > 1 or fitting[0] in changed:
            where = f"could be {' and '.join(fitting[:2])}" if len(fitting) > 1 else f"is {fitting[0]}, changed twice,"
            raise CheckpointError(f"{file} changes {module}, which {where} in {model}. {_ELSEWHERE}")
        scaled = strength * scales[module] * up
        if not scaled.norm(dim=1).amax() * down.norm(dim=0).amax() <= _LARGEST:  # NaN is not, either
            raise CheckpointError(
                f"{file} changes {module} by more than a weight can be: its lora_alpha / r ({scales[module]:g}), its "
                f"matrices or the strength ({strength:g}) are too large. Download it again, or choose a lower strength."
            )
        parts = (bases[fitting[0]], scaled)
        changed[fitting[0]] = LazyMatrix(parts, Format(down.shape[1], partial(_merged, down)))
    for name, tensor in whole.items():
        there = (checkpoint.tensors[place] for place in places[name] or checkpoint.tensors)  # a tied one has one name
        if not any(
            each.shape == tensor.shape and torch.equal(each.to(tensor.dtype).float(), tensor.float()) for each in there
        ):
            raise CheckpointError(
                f"{file} holds {name[:100]} as a whole, other than in {model}, but only changes by lora_A and lora_B "
                f"can be merged. {_ELSEWHERE}"
            )
    return replace(checkpoint, tensors=checkpoint.tensors | changed)


def _merged(down: Tensor, base: Tensor, up: Tensor) -> Tensor:
    """Rows of base + up @ down, fp32."""
    return base.float() + up @ down


def _settings(file: Path) -> dict[str, Any]:
    """The adapter_config.json beside an adapter's weights. Raises CheckpointError without one, and for an adapter that
    is more than products of two matrices, or may be."""
    config = file.parent / CONFIG
    if not config.is_file():
        raise CheckpointError(
            f"{CONFIG}, which states how strong an adapter is, is missing beside {file}. Keep both files in a folder "
            "of their own, as PEFT saves them. LoRAs of diffusion models have none, and do not work here."
        )
    settings = read_settings(config)
    for key, value in settings.items():
        off = value is None or value is False or value in ("", [], {})
        if key not in _FREE and not (value in _RIGHT[key] if key in _RIGHT else off):
            raise CheckpointError(f"{config} says {key[:60]} {value!r:.60}, which is not supported here. {_ELSEWHERE}")
    return settings


def _tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a LoRA's file. Raises CheckpointError for those of other trainers."""
    tensors = open_checkpoint(file, adapter=True).tensors
    if not any(re.search(r"\.lora_(embedding_)?[AB]\b", name) for name in tensors):
        raise CheckpointError(
            f"{file} is no LoRA as PEFT saves it (its first tensors are {', '.join(sorted(tensors)[:2])}), but another "
            "kind or another trainer's. Most of these are for diffusion models, which do not work here."
        )
    return tensors


def _factors(tensors: Mapping[str, Tensor], file: Path) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """The two factors, A [r, K] and B [N, r] (fp32), of every layer that a file changes, and its other tensors, which
    may be whole layers. Raises CheckpointError for what is neither."""
    halves: dict[str, dict[str, Tensor]] = defaultdict(dict)
    whole, adapters = {}, set()
    for name, tensor in tensors.items():
        match = _FACTOR.fullmatch(name)
        if match is None and ".lora_" not in name:
            whole[name] = tensor
            continue
        values = tensor.float() if tensor.is_floating_point() else tensor
        if match is None or tensor.ndim != 2 or not tensor.is_floating_point() or not values.isfinite().all():
            raise CheckpointError(
                f"{file} holds {name[:100]} with the shape {[*tensor.shape]}, but only finite matrices lora_A and "
                f"lora_B of linear layers can be merged. {_ELSEWHERE}"
            )
        halves[match[1]][match[2]] = values
        adapters.add(match[3])
    if len(adapters) > 1:
        several = ", ".join(sorted(map(str, adapters))[:3])
        raise CheckpointError(
            f"{file} holds several adapters ({several}). Save each into a folder of its own with PEFT."
        )
    for module, pair in halves.items():
        if len(pair) < 2 or len(pair["A"]) != pair["B"].shape[1] or not (pair["A"].numel() and pair["B"].numel()):
            raise CheckpointError(f"{file} lacks a half of {module}, or they do not fit. Download it again.")
    return {module: (pair["A"], pair["B"]) for module, pair in halves.items()}, whole


def _places(
    wanted: Iterable[str], tensors: Collection[str], aliases: Sequence[tuple[str, str]]
) -> dict[str, list[str]]:
    """The tensors that names in an adapter may mean: the one of that name; else those whose names end so, as it may
    have been trained on a part of the model; else those that differ only by what is around a language model, or by
    the layout."""

    def bare(name: str) -> str:
        own = _AROUND.sub("", name)
        one, other = next((pair for pair in aliases if own.startswith(f"{pair[0]}.")), ("", ""))
        return _AROUND.sub("", other + own.removeprefix(one))

    ends: dict[str, list[str]] = {name: [] for name in wanted}
    same: dict[str, list[str]] = defaultdict(list)
    for name in tensors:
        same[bare(name)].append(name)
        for dot in re.finditer(r"\.", name):
            if (end := name[dot.end() :]) in ends:
                ends[end].append(name)
    return {name: [name] if name in tensors else found or same[bare(name)] for name, found in ends.items()}


def _scales(modules: Mapping[str, tuple[Tensor, Tensor]], settings: Mapping[str, Any], file: Path) -> dict[str, float]:
    """lora_alpha / r of every layer. Raises CheckpointError for what is no number, and for an r that its factors do
    not have."""
    config, scales = file.parent / CONFIG, {}
    ranks = _of_layers("r", settings, "rank_pattern", modules, config)
    alphas = _of_layers("lora_alpha", settings, "alpha_pattern", modules, config)
    for module, (down, _) in modules.items():
        rank, alpha = len(down), alphas[module]
        if ranks[module] != rank:
            raise CheckpointError(
                f"{config} says r {ranks[module]!r:.60} of {module}, whose matrices have the rank {rank}. Download "
                "both files again."
            )
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not isfinite(alpha):
            raise CheckpointError(f"{config} says lora_alpha {alpha!r:.60} of {module}, which must be a number.")
        scales[module] = alpha / (sqrt(rank) if settings.get("use_rslora") else rank)
    return scales


def _of_layers(
    key: str, settings: Mapping[str, Any], exceptions: str, modules: Collection[str], config: Path
) -> dict[str, Any]:
    """A setting of every layer: of the exceptions, the first whose regular expression matches the name from its
    beginning or a dot to its end (as in peft.utils.get_pattern_key), else that of all layers. Raises CheckpointError
    for exceptions that are not such, and for those that could take long."""
    listed = settings.get(exceptions)
    if not isinstance(listed, (dict, type(None))):
        raise CheckpointError(f"{config} says {exceptions} {listed!r:.60}, which must be an object. {_ELSEWHERE}")
    listed = listed or {}
    if sum(map(len, listed)) * max(sum(map(len, modules)), NAME) > MATCHED:
        raise CheckpointError(f"{config} has {len(listed)} names in {exceptions}: too many to compare. {_ELSEWHERE}")
    found = [(_matching(name, exceptions, config), value) for name, value in listed.items()]
    return {
        module: next((value for pattern, value in found if pattern.match(module)), settings.get(key))
        for module in modules
    }


def _matching(name: str, exceptions: str, config: Path) -> re.Pattern[str]:
    """The pattern of an exception. Raises CheckpointError for others than _PATTERN."""
    before = "" if name.startswith(".*") else r"(?:.*\.)?"
    try:
        if _PATTERN.fullmatch(name):
            return re.compile(rf"{before}(?:{name})$")
    except re.error:  # [z-a]
        pass
    raise CheckpointError(
        f"{config} has {name!r:.60} in {exceptions}, but of regular expressions only names with . \\. \\d [0-9], "
        f"and .* at their beginning are supported here. {_ELSEWHERE}"
    )
