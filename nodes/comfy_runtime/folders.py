"""Files in ComfyUI's folders: choices of the loaders, the paths behind them, traces. (models.py does the rest.)"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from inspect import getfile
from pathlib import Path

import folder_paths
from comfy.cli_args import args

from ...limits.printable import printable
from ...model_loaders.detect import DECODER_FILES, bundled, may_decode
from ...model_loaders.families import RELEASED_DECODERS
from ...model_loaders.files.checkpoint import (
    INDEX,
    PICKLES,
    SAFETENSORS,
    TORCHSCRIPT,
    WEIGHT_FILES,
    remedy_for_missing,
    use_mmap,
)
from ...model_loaders.files.unsupported import ADAPTERS
from ..downloads import where_to_get
from .elsewhere import folders_of_packs, released

NAME = 99  # characters of one in a message
MODELS = "ar_models"
DRAFTERS = "ar_drafters"
LORAS = "loras"  # ComfyUI's own
MARKS = {  # files that make a folder one model, in order of preference
    MODELS: WEIGHT_FILES,
    DRAFTERS: WEIGHT_FILES,
    LORAS: ADAPTERS[:2],
    "vae": DECODER_FILES,
}
USED = (*SAFETENSORS, *PICKLES, *TORCHSCRIPT, ".json", ".tiktoken", ".txt", ".model")  # extensions of read files
COMPANIONS = (  # file names beside a model, except released names of image decoders
    "vq",
    "vae",
    "encoder",
    "decoder",
    "autoencoder",
    "text_encoder",
    "tokenizer",
    "vocab",
    "merges",
    "added_tokens",
)
SHARD = re.compile(r"-\d+-of-\d+\.")
BUNDLED = "default (bundled)"
BUNDLED_DRAFTER = "EAGLE drafter (bundled)"
BUNDLED_MODELS = {BUNDLED: "default", "continuous MAR (bundled)": "continuous"}  # choice -> folder in the pack
BUNDLED_DRAFTERS = {
    BUNDLED_DRAFTER: "default/eagle",
    "small model (bundled)": "default/small",
    "small continuous MAR (bundled)": "continuous/small",
}


def register_folders() -> None:
    """Register the pack's model folders, in addition to those of extra_model_paths.yaml, and the folders in which other
    packs have put models that this one reads."""
    for key in (MODELS, DRAFTERS):
        folder_paths.add_model_folder_path(key, os.path.join(folder_paths.models_dir, key))
        paths, extensions = folder_paths.folder_names_and_paths[key]
        folder_paths.folder_names_and_paths[key] = (paths, set(extensions) | set(SAFETENSORS + PICKLES))
    for path in folders_of_packs():
        folder_paths.add_model_folder_path(MODELS, path)


def set_mmap() -> None:
    """Disable memory mapping of weights if ComfyUI was started with --disable-mmap."""
    use_mmap(not args.disable_mmap)


def search_folders() -> list[Path]:
    """Where image decoders and text encoders are searched for, besides the model's folder.

    Includes ComfyUI's folder of tokenizers, which contains that of Harmon's language model.
    """
    own = Path(getfile(folder_paths)).parent / "comfy" / "text_encoders"
    return [Path(p) for key in (MODELS, "vae", "text_encoders") for p in folder_paths.get_folder_paths(key)] + [own]


def model_choices() -> list[str]:
    """The bundled models, then what is in models/ar_models and elsewhere."""
    return [*BUNDLED_MODELS, *choices_and_released(MODELS)]


def drafter_choices() -> list[str]:
    """The bundled drafters, then what is in models/ar_drafters and elsewhere."""
    return [*BUNDLED_DRAFTERS, *choices_and_released(DRAFTERS)]


def choices_and_released(key: str) -> list[str]:
    """What is in the model folders ``key``, then released models that lie elsewhere."""
    others = (f"{name}/{main_file(os.listdir(folder), MARKS[key])}" for name, folder in released(key).items())
    return list(dict.fromkeys((*choices_in([key], SAFETENSORS + PICKLES), *others)))


def lora_choices() -> list[str]:
    """What is in models/loras, folders of PEFT first."""
    return choices_in([LORAS], SAFETENSORS)


def decoder_choices() -> list[str]:
    """The decoders of the bundled models, then those in models/vae and models/ar_models, where a model's folder or
    file may contain its decoder."""
    endings, keys = SAFETENSORS + PICKLES + TORCHSCRIPT, ["vae", MODELS]
    found = choices_in(keys, endings, inside=True)
    return [*BUNDLED_MODELS, *(choice for choice in found if _decodes(choice, file_stamp(choice, *keys)))]


@lru_cache(maxsize=1000)
def _decodes(choice: str, fingerprint: str) -> bool:
    """Whether an image decoder can be loaded from a choice, as long as its files are not replaced."""
    return may_decode(resolve(choice, "vae", MODELS))


def choices_in(keys: Sequence[str], endings: tuple[str, ...], inside: bool = False) -> list[str]:
    """Weight files in the model folders ``keys``, with / between folders on every system. First those that stand for
    the folder of one model (see ``main_file``), whose other files are not listed.

    inside: also list other weight files in or below such a folder (an image decoder).
    """
    mains, files, marks = set(), set(), MARKS[keys[0]]
    for root in dict.fromkeys(root for key in keys for root in folder_paths.get_folder_paths(key)):
        by_folder: dict[str, set[str]] = {}
        for file in files_below(root):
            by_folder.setdefault(os.path.dirname(file), set()).add(os.path.basename(file))
        own = {folder: main for folder, names in by_folder.items() if folder and (main := main_file(names, marks))}
        mains |= {os.path.join(folder, main) for folder, main in own.items()}
        for folder, names in by_folder.items():
            weights = {
                name
                for name in names
                if name.lower().endswith(endings) and os.path.exists(os.path.join(root, folder, name))
            }  # not a link that leads nowhere
            if folder in own:
                weights = {name for name in weights if inside and name not in marks and not SHARD.search(name)}
            elif not inside and any(folder.startswith(model + os.sep) for model in own):
                weights = set()
            files |= {os.path.join(folder, name) for name in weights}
    return [name.replace(os.sep, "/") for name in (*sorted(mains), *sorted(files))]


_listed: dict[str, tuple[list[str], dict[str, float]]] = {}  # root -> files, and modification times of its folders


def files_below(root: str) -> list[str]:
    """Every file below a folder, relative to it; cached until a folder changes, like ComfyUI's lists."""
    files, folders = _listed.get(root, ([], {}))
    if not folders or any(not os.path.isdir(f) or os.path.getmtime(f) != time for f, time in folders.items()):
        files, folders = folder_paths.recursive_search(root, excluded_dir_names=[".git", ".cache"])
        _listed[root] = files, folders
    return files


def main_file(names: Collection[str], marks: Sequence[str]) -> str:
    """The file that stands for a folder with these files: the first of ``marks`` or, of a model in shards, the first
    shard (ComfyUI's page knows weight files by their extension, so not an index). Empty for a folder that is no model.

    An index may be missing beside a config.json; loading the model then says so.
    """
    found = next((mark for mark in marks if mark in names), "")
    if not found.endswith(INDEX) and (found or "config.json" not in names):
        return found
    shards = (name for name in names if SHARD.search(name) and not name.endswith(INDEX))
    return min((name for name in shards if name.startswith(found.partition(".")[0])), default="")


def resolve(choice: str, *keys: str) -> Path:
    """File or folder of a loader's choice. A weight file of a folder that is one model stands for the folder, whichever
    release lies there. Raises FileNotFoundError if it is not in the folders ``keys``."""
    if choice in (shipped := BUNDLED_MODELS | BUNDLED_DRAFTERS):
        return bundled(shipped[choice])
    inside = os.path.relpath(os.path.join("/", choice), "/")  # "../" cannot leave the folder
    roots = [Path(root) for key in keys for root in folder_paths.get_folder_paths(key)]
    folder, name = os.path.split(inside)
    if folder and (name in MARKS[keys[0]] or SHARD.search(name)):
        inside = next((folder for root in roots if _is_model(root / folder, MARKS[keys[0]])), inside)
    found = next((root / inside for root in roots if inside != "." and os.path.exists(root / inside)), None)
    elsewhere = (path for key in keys for name, path in released(key).items() if name in (inside, folder))
    found = found or next(elsewhere, None)
    if found is None:
        looked = ", ".join(map(str, roots))
        remedy = where_to_get(choice) or f"{remedy_for_missing(choice)} Press R to refresh the list."
        raise FileNotFoundError(f"{printable(choice, NAME)} is not in {looked}. {remedy}")
    return found


def _is_model(folder: Path, marks: Sequence[str]) -> bool:
    return os.path.isdir(folder) and bool(main_file(os.listdir(folder), marks))


def file_stamp(choice: str, *keys: str) -> str:
    """Changes when a file of a choice is replaced."""
    path = resolve(choice, *keys)
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    return stamp(files)


def companions() -> str:
    """Changes when a file is added, removed or replaced that a model may use besides its own: image decoders, text
    encoders and tokenizers in all search folders."""
    roots = [root for key in (MODELS, "vae", "text_encoders") for root in folder_paths.get_folder_paths(key)]
    files = [Path(root, file) for root in roots for file in files_below(root) if may_be_used(file)]
    return stamp([file for file in files if file.is_file()])


def may_be_used(file: str) -> bool:
    """Whether a model beside this file would load it as its image decoder, text encoder or tokenizer. (Loading a model
    again because an unrelated VAE is downloaded could take minutes.)"""
    path = Path(file.lower())
    stem = path.with_suffix("").as_posix()
    released = any(stem.endswith(name.lower()) for decoder in RELEASED_DECODERS.values() for name in decoder.names)
    return path.suffix in USED and (released or path.stem in COMPANIONS or "t5" in stem or path.suffix == ".tiktoken")


def stamp(files: list[Path]) -> str:
    """A hash of paths, modification times and sizes of files. ComfyUI writes it into every image that it saves, and
    nobody's folders belong there."""
    known = [(str(f), f.stat().st_mtime_ns, f.stat().st_size) for f in files]
    return hashlib.sha256(str(known).encode()).hexdigest()


# Traces


def outside_output(prefix: str) -> str | None:
    """Error message for a file name prefix outside the output folder; None if it is valid."""
    root = Path(os.path.abspath(folder_paths.get_output_directory()))
    name = os.path.normpath(prefix) if "\0" not in prefix else "."
    if root in Path(os.path.abspath(root / name)).parents:
        return None
    return f"filename_prefix is {prefix[:80]!r}, but must be a name inside ComfyUI's output folder, as in Save Image."


def next_output(prefix: str) -> tuple[Path, str]:
    """The next free numbered file name (without suffix) for a prefix, as Save Image counts, and its subfolder."""
    folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(prefix, folder_paths.get_output_directory())
    return Path(folder) / f"{name}_{counter:05}_", subfolder


def save_beside(preview: Mapping[str, str], text: str) -> dict[str, str]:
    """Write a .json of the same name next to a preview in ComfyUI's temp folder. Returns its URL parameters."""
    path = Path(folder_paths.get_temp_directory(), preview["subfolder"], preview["filename"]).with_suffix(".json")
    path.write_text(text, encoding="utf-8")
    return {**preview, "filename": path.name}


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
    """File of a choice of Load Trace. Raises FileNotFoundError if it is missing, ValueError if it is elsewhere."""
    name, root = folder_paths.annotated_filepath(choice.replace("\0", ""))
    root = Path(os.path.abspath(root or folder_paths.get_output_directory()))
    path = Path(os.path.abspath(root / name))
    if not path.is_relative_to(root):  # by its name: a link inside may lead elsewhere, and Save Trace writes there
        raise ValueError(
            f"{printable(choice, NAME)} lies outside ComfyUI's folders. Choose one from the output or input folder."
        )
    if not os.path.isfile(path):  # unlike Path.is_file, it accepts invalid names
        raise FileNotFoundError(
            f"There is no trace {printable(choice, NAME)}. Write one with Save Trace, or press R to refresh."
        )
    return path
