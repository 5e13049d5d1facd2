"""Files that went wrong, by accident and on purpose: a loader works, or says what is wrong with which file.

A few cases of every kind, and each that once was a defect. SPECAR_LONG=1 tries thousands, with files of every family.
"""

import json
import os
import random
import shutil
import time
from contextlib import suppress
from pathlib import Path

import pytest
import tokenizers
import torch
from comfyui_specar import api
from comfyui_specar.limits.limits import FileError
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError, use_mmap
from comfyui_specar.models.text.tokenizer import Tokenizer
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ..support import fuzz, fuzz_archives, fuzz_files
from ..support.fuzz_seeds import SEEDS, Seed, examine, target
from ..support.patience import many
from ..support.process_memory import forget_peak, held

# Of every format one.
LIGHT = ["LlamaGen with words", "LlamaGen of classes", "Janus-Pro", "Cosmos", "MAR", "Harmon", "Emu3's ranks", "trace"]
LIGHT += ["EAGLE drafter", "VQ", "SimpleAR quantised", "SimpleAR packed"]
MOST_MEMORY = 1 << 30  # bytes beyond the files' own
MOST_SECONDS = 10  # of the processor
LINUX = Path("/proc/self/clear_refs").exists()


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Writes sound files once, and gives a copy each time."""
    written: dict[str, Path] = {}

    def copy(name: str) -> Path:
        if name not in written:
            written[name] = tmp_path_factory.mktemp("sound") / name
            written[name].mkdir()
            SEEDS[name].write(written[name])
            examine(SEEDS[name], written[name])  # also imports what is imported on first use
        return Path(shutil.copytree(written[name], tmp_path_factory.mktemp("case") / name))

    return copy


@pytest.mark.parametrize("number", range(many(4, 400)))
def test_whatever_happens_to_a_file(sound, number):
    dice = random.Random(number)
    for name in dice.choices([*many(LIGHT, SEEDS)], k=10):
        folder = sound(name)
        done = fuzz.mutate(folder, dice)
        size = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
        if LINUX:
            forget_peak()
        before, began = held() if LINUX else 0, time.process_time()
        use_mmap(dice.random() < 0.5)
        try:
            outcome = examine(SEEDS[name], folder)
        finally:
            use_mmap(True)
        shutil.rmtree(folder.parent)
        assert outcome.problem is None, f"{name}: {done}: {outcome}"
        assert time.process_time() - began < MOST_SECONDS, f"{name}: {done}"
        assert not LINUX or held("VmHWM") - before - size < MOST_MEMORY, f"{name}: {done}"


@pytest.mark.parametrize("change", fuzz.MUTATIONS.values(), ids=fuzz.MUTATIONS)
def test_every_change_changes_something(sound, change):
    """mutate() goes on where a change does not fit, so one that never does would not be missed."""
    changed = 0
    for name in ("LlamaGen of classes", "Janus-Pro"):
        folder = sound(name)
        for file in (path for path in sorted(folder.rglob("*")) if path.is_file()):
            before = file.read_bytes()
            try:
                change(file, random.Random(0))
            except fuzz_files.UnfitError:
                continue
            changed += not file.is_file() or file.stat().st_size != len(before) or file.read_bytes() != before
        shutil.rmtree(folder.parent)
    assert changed


# What is no proper end


def fails(error: BaseException):
    def use(folder: Path) -> None:
        raise error

    return use


def runs_code(folder: Path) -> None:
    (folder / fuzz_files.CANARY).touch()


def asks_for_memory(folder: Path) -> None:
    try:
        torch.empty(1 << 50)
    except RuntimeError as error:
        raise CheckpointError(f"{folder.name} is damaged.") from error


class PanicException(BaseException):  # noqa: N818 (as a library in Rust calls it)
    pass


@pytest.mark.parametrize(
    ("use", "problem"),
    [
        (fails(KeyError("weight")), "raised KeyError"),
        (fails(UnicodeDecodeError("utf-8", b"x", 0, 1, "no")), "Unicode"),
        (fails(PanicException("no such word")), "ends the process"),
        (fails(MemoryError()), "raised MemoryError"),
        (lambda folder: int("words"), "not raise on purpose"),
        (asks_for_memory, "asked for the memory"),
        (runs_code, "ran what is in the file"),
        (lambda folder: (folder / "new").write_text("", encoding="utf-8"), "did open"),
    ],
)
def test_what_is_no_proper_end_is_noticed(tmp_path, use, problem):
    assert problem in examine(Seed(lambda folder: None, use), tmp_path).problem


def test_the_files_attack(tmp_path):
    """Were they harmless, nothing would be shown by their doing no harm."""
    import pickle

    ran = 0
    for number in range(300):
        attack = fuzz_archives.hostile(tmp_path / fuzz_files.CANARY, random.Random(number))
        if b"system" in attack and b"nt" not in attack:
            with suppress(Exception):  # the command is run, and what is made of its result is no pickle's business
                pickle.loads(attack)
            ran += (tmp_path / fuzz_files.CANARY).exists()
            (tmp_path / fuzz_files.CANARY).unlink(missing_ok=True)
    assert ran


# Defects that there were


def enormous(name: str):
    return lambda folder: os.truncate(folder / name, 3 << 30)


def in_json(name: str, **changes):
    def change(folder: Path) -> None:
        settings = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps(settings | changes), encoding="utf-8")

    return change


def in_metadata(name: str, **changes):
    def change(folder: Path) -> None:
        with safe_open(str(folder / name), framework="pt") as file:
            metadata = json.loads(file.metadata()["specar"]) | changes
        save_file(load_file(folder / name), str(folder / name), {"specar": json.dumps(metadata)})

    return change


def in_tensors(name: str, change):
    """change: tensors -> what is different about them."""

    def changed(folder: Path) -> None:
        tensors, save = fuzz_archives.opened(folder / name)
        save(tensors | change(tensors))

    return changed


def spread(tensors):
    return {"norm.weight": tensors["norm.weight"][:1].expand(1 << 40)}


def old_format(folder: Path) -> None:
    fuzz_archives.become_tar(folder / "pytorch_model.bin", random.Random(0))


def pipe(folder: Path) -> None:
    (folder / "emu3.tiktoken").unlink()
    os.mkfifo(folder / "emu3.tiktoken")


def no_word_for_the_unknown(folder: Path) -> None:
    file = folder / "flan-t5-xl/tokenizer.json"
    whole = file.read_text(encoding="utf-8")
    file.write_text(whole.replace('"red"', '"blue"').replace('"unk_token": "<unk>"', '"unk_token": "?"'), "utf-8")


DEFECTS = {
    "settings of gigabytes": ("Janus-Pro", enormous("config.json"), "config.json has 3221225472 bytes"),
    "a tokenizer of gigabytes": ("Janus-Pro", enormous("tokenizer.json"), "tokenizer.json has 3221225472 bytes"),
    "a folder of a tokenizer with gigabytes": (
        "Harmon",
        enormous("qwen25_tokenizer/tokenizer_config.json"),
        "tokenizer_config.json has 3221225472 bytes",
    ),
    "ranks of gigabytes": ("Emu3's ranks", enormous("emu3.tiktoken"), "emu3.tiktoken has 3221225472 bytes"),
    "a pipe": ("Emu3's ranks", pipe, "was not found"),
    "a tensor that repeats one number": (
        "LlamaGen of classes",
        in_tensors("pytorch_model.bin", spread),
        "tensors are larger than the file",
    ),
    "a tensor without numbers": (
        "LlamaGen of classes",
        in_tensors("pytorch_model.bin", lambda t: {"norm.weight": t["norm.weight"].to("meta")}),
        "not a plain tensor",
    ),
    "the oldest format, whose reader unpacks": ("LlamaGen of classes", old_format, "PyTorch did not write it"),
    "words that are none": (
        "LlamaGen with words",
        in_metadata("text_encoder.safetensors", synonyms={"crimson": 3}),
        "text_encoder",
    ),
    "a table of words in four dimensions": (
        "MAR",
        in_tensors("text_encoder.safetensors", lambda t: {n: x[..., None, None] for n, x in t.items()}),
        "text_encoder",
    ),
    "a list in place of a number": (
        "LlamaGen of classes",
        in_json("config.json", rms_norm_eps=[1e-5]),
        "rms_norm_eps [1e-05]",
    ),
    "heads too narrow to be turned": (
        "LlamaGen of classes",
        in_json("config.json", num_attention_heads=32),
        "number of attention heads is unknown",
    ),
    "a scale in words": ("MAR", in_metadata("model.safetensors", scale="small"), "scale of latents is 'small'"),
    "a tokenizer without a word for the unknown": ("LlamaGen with T5", no_word_for_the_unknown, "tokenizer.json"),
    "a trace of settings that nobody knows": (
        "trace",
        in_metadata("trace.safetensors", settings={"method": "sjd", "reuse": 3}),
        "does not know",
    ),
}


@pytest.mark.parametrize(("name", "change", "says"), DEFECTS.values(), ids=DEFECTS)
def test_what_once_was_a_defect(sound, name, change, says):
    folder = sound(name)
    change(folder)
    outcome = examine(SEEDS[name], folder)
    assert outcome.problem is None and outcome.error and says in outcome.message, outcome


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "", ".", "/dev/zero", "/dev/stdin"])
@pytest.mark.parametrize(
    "load", [api.load_model, api.load_image_decoder, api.load_trace, lambda path: api.load_drafter(path, target())]
)
def test_names_that_no_file_has(tmp_path, monkeypatch, name, load):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"exist|contains no|is a") as error:
        load(name)
    assert type(error.value) in (ValueError, FileError, CheckpointError)


def test_a_panic_of_the_tokenizer_library_is_an_error_like_others(tmp_path):
    """A pattern in tokenizer.json that takes forever: what the library then raises is no Exception."""
    file = tmp_path / "tokenizer.json"
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    made.save(str(file))
    prompt = "a" * 40 + "!"
    with pytest.raises(BaseException) as panic:
        made.encode(prompt)
    assert not isinstance(panic.value, Exception)
    with pytest.raises(CheckpointError, match="tokenizer.json"):
        Tokenizer(file, "missing").ids(prompt)
