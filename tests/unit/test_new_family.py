"""A family of models in two functions and a declaration: a Llama that generates image tokens from a class number.

The pack has no such family. It is here to be read, and copied, when adding one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders import detect
from comfyui_specar.model_loaders.declarations import Family, ReleasedDecoder
from comfyui_specar.model_loaders.files.checkpoint import Checkpoint
from comfyui_specar.model_loaders.files.weights import load_weights
from comfyui_specar.model_loaders.llama import backbone_config, backbone_tensors, matrix, other_tensors, unpad
from comfyui_specar.models.discrete_model import DiscreteModel
from comfyui_specar.models.networks.backbone import Backbone
from comfyui_specar.models.networks.positions import SequencePositions
from comfyui_specar.models.networks.prefix import ClassPrefix
from comfyui_specar.models.sizes import choose_grid
from comfyui_specar.models.text.prompt_encoders import ClassEncoder
from comfyui_specar.samplers.contract import SamplingParams
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..support.bad_files import refused
from ..support.tiny import fill, vq_weights
from ..support.tiny_folder import layer_shapes, write_folder

TABLE, HEAD, CLASSES = "model.embed_tokens.weight", "lm_head.weight", "class_table.weight"
GRID, CODES = (4, 4), 32


def recognise(tensors: Mapping[str, Tensor]) -> bool:
    """Only names, shapes and dtypes are known here. No file of another family may have all of these."""
    return {TABLE, HEAD, CLASSES} <= tensors.keys()


def load(
    checkpoint: Checkpoint, dtype: torch.dtype, grid: tuple[int, int] | None, search: Sequence[Path], operations=nn
) -> DiscreteModel:
    """Modules on the meta device, and the tensors under their names: load_weights refuses what does not fit."""
    path, tensors = checkpoint.path, checkpoint.tensors
    classes = len(matrix(tensors, CLASSES, path)) - 1  # the last row is the null class
    config = backbone_config(checkpoint, "model.", len(matrix(tensors, HEAD, path)), {}, norm_eps=1e-5)
    with torch.device("meta"):
        backbone, prefix = Backbone(config, operations), ClassPrefix(classes, config.dim, operations)
    model = DiscreteModel(
        backbone,
        prefix,
        "new",
        choose_grid(path, grid, GRID, [GRID]),
        SamplingParams(**{"cfg": 2.0} | checkpoint.own_settings.get("defaults", {})),
        ClassEncoder(classes),
        positions=SequencePositions(10_000.0),
    )
    model.dtype = dtype
    weights = unpad(backbone_tensors(tensors, "model.", path), config)
    weights |= {"backbone.tok_embeddings.weight": tensors[TABLE], "backbone.output.weight": tensors[HEAD]}
    weights |= {"prefix.embedding_table.weight": tensors[CLASSES]}
    weights |= other_tensors(tensors, "model.", TABLE, HEAD, (CLASSES,))  # which none may be
    return load_weights(model, weights, checkpoint, dtype)


FAMILY = Family(
    labels=("New",),
    decoders={"new": ReleasedDecoder(("new_vq",), "new_vq.safetensors (repository somebody/new)")},
    recognise=recognise,
    load=load,
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The released layout with small random weights. A family is registered by its line in families/__init__.py."""
    monkeypatch.setattr(detect, "FAMILIES", (*detect.FAMILIES, FAMILY))
    monkeypatch.setitem(detect.RELEASED_DECODERS, "new", FAMILY.decoders["new"])
    shapes = {TABLE: (CODES, 32), HEAD: (CODES, 32), CLASSES: (11, 32), "model.norm.weight": (32,)}
    shapes |= layer_shapes("model.", 2, 32, 64)
    save_file(vq_weights(), str(tmp_path / "new_vq.safetensors"))
    weights = {name: fill(f"{name} embedding", shape) for name, shape in shapes.items()}
    return write_folder(tmp_path, weights, {"num_attention_heads": 4})


def test_it_generates_and_its_image_decoder_is_found(folder):
    model = api.load_model(folder)
    out = api.sample(model, model.encode_prompt("3"), cfg=1.5)
    assert out.tokens.shape == (1, *GRID) and model.image_decoder is not None
    assert model.image_decoder.decode(out.latent).isfinite().all()
    again = api.sample(model, model.encode_prompt("3"), api.methods.NextToken(), temperature=0)
    assert torch.equal(again.tokens, api.sample(model, model.encode_prompt("3"), temperature=0).tokens)


def test_what_does_not_fit_is_refused(folder):
    refused(folder, "grid to auto", grid=(5, 5))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, change, says in (
        ("model.norm.weight", None, "model.norm.weight"),
        ("model.layers.0.surplus.weight", torch.ones(3), "surplus"),
        (HEAD, torch.full((CODES, 32), torch.nan), "finite"),
    ):
        save_file({key: t for key, t in (tensors | {name: change}).items() if t is not None}, str(file))
        refused(folder, says)
