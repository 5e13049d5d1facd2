"""Models in folders that are not this pack's: those of other packs, and the cache of huggingface_hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import folder_paths
from huggingface_hub.constants import HF_HUB_CACHE

from ...model_loaders.families.glm_image_diffusion import MODEL
from ...model_loaders.files.checkpoint import WEIGHT_FILES
from ..downloads import sources_of

OTHER_PACKS = ("Janus-Pro", "lumina_mgpt", "emu35")  # folders below models/ (docs/models.md says whose)


def folders_of_packs() -> list[str]:
    """The folders of other packs for models like ours that are here, by their default or by extra_model_paths.yaml."""
    known = folder_paths.folder_names_and_paths
    paths = [[os.path.join(folder_paths.models_dir, name), *known.get(name, ([],))[0]] for name in OTHER_PACKS]
    return [path for each in paths for path in each if os.path.isdir(path)]


def released(key: str) -> dict[str, Path]:
    """Released models for one of our folders that lie among others': choice -> folder. Only those, since their
    neighbours are diffusion models or language models."""
    found: dict[str, Path] = {}
    for name, folder in shared_folders():
        for part in ("", MODEL):
            sources, place = sources_of(f"{name}/{part}".rstrip("/")), folder / part
            if sources and sources[0].folder.startswith(f"{key}/") and any((place / f).is_file() for f in WEIGHT_FILES):
                found.setdefault(os.path.normpath(os.path.join(name, part)), place)
    return found


def shared_folders() -> Iterator[tuple[str, Path]]:
    """Names and paths of folders in models/checkpoints, and of the repositories in the cache of huggingface_hub."""
    for root in folder_paths.get_folder_paths("checkpoints"):
        yield from ((path.name, path) for path in sorted(Path(root).glob("*")) if path.is_dir())
    for newest in sorted(Path(HF_HUB_CACHE).glob("models--*/refs/main")):
        repository = newest.parents[1]
        with suppress(OSError, ValueError):  # an error in a list hides its node
            snapshot = repository / "snapshots" / newest.read_text(encoding="utf-8").strip()
            yield repository.name.rpartition("--")[2], snapshot
