"""What a file or an answer may state at most, why, and how its strings are shown.

Whatever is read was written by somebody else: every count, size, length, depth and number is compared with one of
these before it is used. They are far above what sound files have; what exceeds them would only take time or memory.
Bytes that are kept are bounded by the size of the file (a tensor's data must be in it), so they have no number here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from typing import Any

from .printable import printable

# Numbers

LARGEST = 2**63 - 1  # of sizes, offsets and steps: PyTorch's are int64
DIMENSIONS = 8  # of a tensor; convolutions of videos have 5, and products of thousands of sizes take minutes
DIGITS = 64  # of an integer in JSON; transformers writes 10**30, and longer ones cannot even be printed
SIDE = 1024  # tokens per side of an image, and pixels per token; the largest released grids have 97, blocks 32
IMAGES = 4096  # of a run: ComfyUI's largest batch
LAYERS = 256  # modules numbered in a row; the deepest released model has 64, and each is built
LEVELS = 16  # of an image decoder, and blocks of a level; released ones have 6 and 4, and each pair is built

# Texts

NAME = 1000  # characters of a tensor's, module's or archive member's name; released ones have 150
MESSAGE = 1200  # characters of an error message, which may quote strings of any length
QUOTED = 200  # characters of a string in a table, a label or a report

PROMPT = 2**17  # characters; the longest that a model reads has 131,072 tokens
CAPTION = 4000  # characters of a prompt that is cleaned like a caption, of which 120 tokens are read: it takes seconds
GROWTH = 100  # characters that a tokenizer's normalizer may write for one; released ones write 1

# Files that are read as a whole, in bytes; reading one takes several times its size

HEADER = 8 * 2**20  # of a .safetensors file: 150 per tensor, and metadata
SETTINGS = 16 * 2**20  # a .json file; tokenizers' settings have 10 MB at most
TOKENIZER = 32 * 2**20  # the released ones have 20 MB at most
ADDED = 2**20  # files that add tokens to it, each of which takes time; those of Qwen2 have 10 kB
RANKS = 8 * 2**20  # a file of ranks for tiktoken; Emu3's has 2.5 MB
QUANTISED = 2**12  # of the description of a quantised layer, which has 50 to 200; each of TENSORS may be one
TABLE = 32 * 2**20  # of jobs: 300 for each of JOBS
DIRECTORY = 2 * 2**20  # of an archive's list of members, 50 to 150 each
PICKLE = 2 * 2**20  # of the description of tensors in a pickle: 200 per tensor

# Counts

VALUES = 400_000  # in one JSON text, all of which is read before another thread runs; a config.json has 70,000 at most
TOKENS = 1_500_000  # the same of a tokenizer's settings; 131,072 image tokens are 1.1 million
DEPTH = 64  # of JSON in JSON; settings have 6. Whatever walks through them may call itself so often
CODES = 500_000  # instructions of a pickle, 32 per tensor: each takes time even where it keeps nothing
PARTS = 1000  # values in a tuple of a pickle, and in the tuples in it; Python's random state has 628
TENSORS = 20_000  # of a file; released models have 1500, training checkpoints of MAR 3000
MODULES = 100  # of TorchScript, one in another; modules may be shared, so that a small file could describe any number
RUN = 2**18  # characters of the settings of a run, in a trace; a long prompt has thousands
CONTAINERS = 3  # tables of a pickle, one in another, in which its weights are looked for
WORDS = 10_000  # of a word table, and of its synonyms; the bundled one has 200
MATCHED = 5 * 10**8  # characters of an adapter's exceptions times those of its layers' names: for 448 layers 4e8
SHARDS = 1000  # of an index; the largest model has 15
SPREAD = 4  # total size of a pickle's tensors, in file sizes: some have two names
NODES = 5000  # of a workflow; large ones have hundreds
JOBS = 100_000  # of a table; more are several batches
COLUMNS = 1000  # of a table; a workflow has a few hundred inputs
CELL = 131_072  # characters of a value in a table, as in Python's csv
PIXELS = 2**31 // 12  # of all images of one output, which are fp32: 2 GiB
LONGEST_MAP = 8192  # pixels of a map's longer side; small images are enlarged up to that, ...
ENLARGED = 2**25  # ... and up to so many pixels of all maps of a run together

# Answers of servers

ANSWER_BYTES = 64 * 2**20  # of JSON: a queue lists its prompts in full, and a thousand have some 50 kB each ...
ANSWER_VALUES = 5_000_000  # ... and 5000 values each
FILE_BYTES = 2**30  # of a copy, which is held in memory: an image of 16384 x 16384 pixels has 0.75 GiB, uncompressed
FILES = 10_000  # that one prompt saves: a video's frames, a large batch
REPORTS = 1_000  # of runs, that one prompt shows
NOTICES = 100  # of what a prompt's runs did not do of what was asked
SAID = 2_000  # characters of a message; those of torch's longest errors about memory are shorter
WORD = 100  # characters that a message shows of what is not as it should be
NESTED = 4  # lists and objects in one another in a run's totals, which have two ...
TOTALS = 100_000  # ... and characters, as JSON: thousands of images have a number of passes each


_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)


class FileError(ValueError):
    """What was read cannot be used. The message may quote it: it is shortened and printable."""

    def __init__(self, message: str):
        if len(message) > MESSAGE:  # the file is named at the beginning, the remedy at the end
            message = f"{message[: MESSAGE - 300]} ... {message[-290:]}"
        super().__init__(printable(message))


def quote(value: Any) -> str:
    """A value for a message. Of a container only its kind: in a pickle, a few bytes make a list with no end."""
    if isinstance(value, int) and value.bit_length() > 1000:  # Python does not write it
        return f"an integer of {value.bit_length()} bits"
    return f"{value!r:.100}" if isinstance(value, (str, int, float, bytes, type(None))) else f"a {type(value).__name__}"


def bounded_int(name: str, value: Any, least: int, most: int) -> int:
    """An integer from a file. Raises FileError for other types, or out of bounds."""
    if type(value) is not int or not least <= value <= most:
        raise FileError(f"{name} is {quote(value)}, but must be an integer from {least} to {most}")
    return value


def legal_name(name: Any) -> str:
    """The name of a tensor or module. Raises FileError for what is no string, too long, or has control characters."""
    if not isinstance(name, str) or len(name) > NAME or printable(name) != name:
        raise FileError(f"the name {quote(name)} is not a printable string of at most {NAME} characters")
    return name


def legal_sizes(name: str, sizes: Any) -> tuple[int, ...]:
    """A tensor's sizes, or its steps, whose product (without zeros) is an int64, too.

    Raises FileError for more than DIMENSIONS, negative ones, and what are no integers.
    """
    if not isinstance(sizes, (list, tuple)) or len(sizes) > DIMENSIONS:
        count = f"{len(sizes)} dimensions" if isinstance(sizes, (list, tuple)) else quote(sizes)
        raise FileError(f"{name} has {count} as its sizes, not at most {DIMENSIONS} integers")
    for size in sizes:
        bounded_int(f"a size of {name}", size, 0, LARGEST)
    if prod(max(1, size) for size in sizes) > LARGEST:
        raise FileError(f"{name} has the sizes {list(sizes)}, more than any file holds")
    return tuple(sizes)


def parse_json(text: str | bytes, values: int = VALUES, **hooks: Any) -> Any:
    """The value of a JSON text (bytes: UTF-8). hooks: as json.loads takes them.

    Raises ValueError for a text that is no JSON, and FileError for more than ``values`` values, DEPTH levels or DIGITS
    digits.
    """
    written = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    text = text.decode("utf-8") if isinstance(text, bytes) else text
    if text.count(",") + text.count("[") + text.count("{") > values:
        raise FileError(f"it lists more than {values} values")
    long = b"0" * (DIGITS + 1) in written.translate(_AS_ZEROS)  # a regular expression tries every digit as the first
    whole = _integer if long else None  # which takes time for each of them
    try:
        value = json.loads(text, parse_int=whole, **hooks)
    except RecursionError as error:
        raise FileError(f"its values are nested more than {DEPTH} deep") from error
    level: Sequence[Any] = [value]
    for _ in range(DEPTH + 1):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list)))
        if not (level := [each for values in inner for each in values]):
            return value
    raise FileError(f"its values are nested more than {DEPTH} deep")


def _integer(digits: str) -> int:
    if len(digits) > DIGITS:
        raise FileError(f"it has an integer of {len(digits)} digits; {DIGITS} is the limit")
    return int(digits)
