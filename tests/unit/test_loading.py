"""Loading reads weights once and never holds them twice."""

import json
import os
import subprocess
import sys

import pytest
import torch

from ..support.large_files import qwen2, write

SHAPES = qwen2(512, 1536, 4, 256, 16384)
CONFIG = {
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "tie_word_embeddings": True,
    "specar": {"codes": 8192, "words": 8192},
}
SIZE = sum(torch.Size(shape).numel() for shape in SHAPES.values())  # 21 million, two bytes each in the file
JOINED = sum(  # of which in projections that are joined: queries, keys and values; gate and up
    torch.Size(shape).numel()
    for name, shape in SHAPES.items()
    if any(f"{part}_proj" in name for part in ("q", "k", "v", "gate", "up"))
)
LAYERS = sum(torch.Size(shape).numel() for name, shape in SHAPES.items() if ".layers." in name)
SLACK = 12e6  # bytes of everything else: code that is loaded on first use, the largest tensors in between
CHILD = """
import json, sys
from pathlib import Path
import comfyui_specar as specar, torch
from comfyui_specar.tests.support.large_files import watch
from comfyui_specar.model_loaders.files.checkpoint import open_checkpoint, use_mmap

torch.set_num_threads(1)
folder = Path(sys.argv[1])
specar.load_model(folder)  # imports what is imported on first use
def twice():
    copies = [tensor.clone() for tensor in open_checkpoint(folder / "model.safetensors.index.json").tensors.values()]
    return copies, specar.load_model(folder, dtype=torch.float32)
kept = {"bfloat16": watch(lambda: specar.load_model(folder, dtype=torch.bfloat16)),
        "float32": watch(lambda: specar.load_model(folder, dtype=torch.float32)), "twice": watch(twice),
        "int8": watch(lambda: specar.load_model(folder, dtype=torch.bfloat16, storage=torch.int8)),
        "int4": watch(lambda: specar.load_model(folder, dtype=torch.bfloat16, storage=torch.uint4))}
use_mmap(False)
kept["read"] = watch(lambda: specar.load_model(folder, dtype=torch.bfloat16))
print(json.dumps({name: costs for name, (_, costs) in kept.items()}))
"""


@pytest.fixture(scope="module")
def costs(tmp_path_factory):
    """What loading cost a process of its own, whose allocator gives back what is freed."""
    folder = write(tmp_path_factory.mktemp("loading") / "model", SHAPES, CONFIG)
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", CHILD, str(folder)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)


def test_weights_in_their_own_precision_stay_maps_of_the_file(costs):
    """Only projections that are joined are copied: of queries, keys and values, and of gate and up."""
    assert 2 * JOINED < costs["bfloat16"]["anonymous"] < 2 * JOINED + SLACK < 2 * SIZE
    assert costs["bfloat16"]["anonymous peak"] < 2 * SIZE
    assert costs["bfloat16"]["file-backed"] > 0.9 * 2 * SIZE


def test_weights_in_another_precision_are_held_once(costs):
    assert 0.9 * 4 * SIZE < costs["float32"]["anonymous peak"] < 4 * SIZE + SLACK


def test_rounded_weights_are_held_once_and_never_whole_in_another_precision(costs):
    """The matrices of the layers are there in int8 alone; the rest stays maps of the file."""
    assert LAYERS < costs["int8"]["anonymous peak"] < LAYERS + SLACK < 2 * LAYERS
    assert costs["int8"]["anonymous"] < 1.2 * LAYERS


def test_rounded_to_4_bits_they_take_little_more_than_half_of_that(costs):
    assert 0.56 * LAYERS < costs["int4"]["anonymous peak"] < 0.57 * LAYERS + SLACK


def test_weights_that_are_read_are_held_once_but_for_what_is_joined(costs):
    assert 2 * SIZE < costs["read"]["anonymous peak"] < 2 * SIZE + 2 * JOINED + SLACK
    assert costs["read"]["anonymous"] < 2 * SIZE + SLACK
    assert costs["read"]["file-backed"] < SLACK


def test_weights_held_twice_are_noticed(costs):
    assert costs["twice"]["anonymous peak"] > 4 * SIZE + SLACK
