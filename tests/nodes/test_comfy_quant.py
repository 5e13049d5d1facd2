"""Files in ComfyUI's quantised formats, under ComfyUI."""

from pathlib import Path

import pytest
import torch
from comfyui_specar.model_loaders.files.scaled import with_scales
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ..support.comfy_quant import mark, quantise_file


@pytest.fixture
def put(models):
    """put(kind): the model "tiny" as ComfyUI's tools quantise it, as a choice of the loader."""
    source, folder = models / "tiny", models / "quantised"

    def write(kind):
        folder.mkdir()
        for file in source.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        with safe_open(str(source / "model.safetensors"), "pt") as opened:
            about = opened.metadata()
        tensors, _ = quantise_file(load_file(str(source / "model.safetensors")), kind)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", about)
        return folder.name

    yield write
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


@pytest.mark.parametrize(
    ("kind", "kept"), [("float8_e4m3fn", "float8_e4m3fn"), ("int8_tensorwise", "int8"), ("nvfp4", None)]
)
def test_auto_keeps_what_the_file_stores(put, kind, kept, nodes, run):
    loaded = run(nodes["SpecARLoadCheckpoint"], model_name=put(kind), dtype="auto", grid="auto").result[0]
    [about] = run(nodes["SpecARModelInfo"], model=loaded).ui["specar"]
    assert set(about["bytes_by_dtype"]) == {"float32", kept} - {None}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("float8_e4m3fn", "TensorCoreFP8E4M3Layout"),
        ("int8_tensorwise", "TensorWiseINT8Layout"),
        ("nvfp4", "TensorCoreNVFP4Layout"),
    ],
)
def test_what_comfyui_itself_quantises_is_read_as_it_reads_it(kind, layout):
    pytest.importorskip("comfy_kitchen", reason="this ComfyUI does not write these formats")
    from comfy.quant_ops import QuantizedTensor

    weight = torch.randn(272, 256, generator=torch.Generator().manual_seed(0))
    own = QuantizedTensor.from_float(weight, layout, scale="recalculate")
    tensors = own.state_dict("a.weight") | {"a.comfy_quant": mark({"format": kind})}
    found = with_scales(tensors, Path("file"))["a.weight"]
    assert torch.equal(found.float(), own.dequantize()) and not torch.equal(found.float(), weight)
