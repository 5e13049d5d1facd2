"""Weights as memory maps of their files, or read into memory: Windows refuses to replace or delete a mapped file."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.families import glm_image_diffusion as glm_image
from comfyui_specar.model_loaders.files import checkpoint, weights
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError
from safetensors.torch import save_file

from ..support.fuzz_seeds import SEEDS
from ..support.mapped_files import maps
from ..support.models import teacher_forced
from ..support.tiny import VOCAB, llamagen, vq_weights, write_llamagen

LOADERS = [(api, name) for name in ("load_model", "load_drafter", "load_image_decoder", "load_trace")]
LOADERS += [(glm_image, "load"), (glm_image, "load_latent_encoder")]
KINDS = [name for name in SEEDS if name != "MAR as released"]  # too small to be known without metadata
COPIED = {"Emu3's ranks", "Cosmos", "trace"}  # that keep no map in any case
WITH_TEXT = "text_encoder.safetensors"


@pytest.fixture(autouse=True)
def maps_are_allowed_afterwards():
    yield
    checkpoint.use_mmap(True)


@pytest.fixture
def kept(monkeypatch):
    """What the loaders of the headless interface and of GLM-Image's decoder return, kept alive."""
    found = []
    for module, name in LOADERS:

        def load(*given, loader=getattr(module, name), **more):
            found.append(loader(*given, **more))
            return found[-1]

        monkeypatch.setattr(module, name, load)
    return found


@pytest.mark.parametrize("name", KINDS)
def test_with_maps_only_weights_are_some_and_without_them_nothing(tmp_path, kept, name):
    """Of models, the text encoders and image decoders beside them, drafters and traces of every kind, after their
    use."""
    SEEDS[name].write(tmp_path)
    for allowed in (True, False):
        checkpoint.use_mmap(allowed)
        SEEDS[name].use(tmp_path)
        found = maps(tmp_path)
        assert WITH_TEXT not in found and bool(found) == (allowed and name not in COPIED)
        kept.clear()
        assert not maps(tmp_path)


@pytest.mark.parametrize("write", [save_file, torch.save], ids=["safetensors", "pickle"])
def test_a_file_that_was_refused_can_be_replaced(tmp_path, write):
    """The message asks for another download: nothing may hold the file that it is to replace."""
    tensors = vq_weights()
    tensors["post_quant_conv.bias"][0] = torch.nan
    path = tmp_path / ("vq.pt" if write is torch.save else "vq.safetensors")
    write(tensors, path)
    with pytest.raises(CheckpointError, match=f"{path.name}.*NaN") as caught:
        api.load_image_decoder(path)
    del caught
    assert not maps(tmp_path)


def test_the_outline_of_a_file_has_its_names_shapes_and_dtypes(tmp_path):
    for kind in ("LlamaGen of classes", "Janus-Pro", "Cosmos"):
        folder = tmp_path / kind
        folder.mkdir()
        SEEDS[kind].write(folder)
        path = next(
            path
            for path in sorted(folder.iterdir())
            if path.suffix in (".bin", ".jit", ".json") and path.name != "config.json"
        )
        whole, outline = checkpoint.open_checkpoint(path), checkpoint.outline(path)
        assert {tensor.device.type for tensor in outline.tensors.values()} == {"meta"}
        assert outline.metadata == whole.metadata and outline.path == whole.path
        assert {name: (t.shape, t.dtype) for name, t in outline.tensors.items()} == {
            name: (t.shape, t.dtype) for name, t in whole.tensors.items()
        }
        del whole
        assert not maps(folder)


# What goes wrong


PAGE_FILE = {  # error 1455, as a German Windows words it by safetensors, and by PyTorch and Python
    "safetensors": OSError("Die Auslagerungsdatei ist zu klein, um diesen Vorgang durchzuführen. (os error 1455)"),
    "PyTorch": RuntimeError("Couldn't open file mapping: <C:\\x.pt>, error code: <1455>"),
    "Python": OSError("[WinError 1455] The paging file is too small for this operation to complete"),
}
NO_MEMORY = {
    "Windows": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: not enough memory: you "
        "tried to allocate 134217728 bytes."
    ),
    "Linux": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 134217728 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "map": RuntimeError("unable to mmap 23802932552 bytes from file </x>: Cannot allocate memory (12)"),
    "Python": MemoryError(),
}


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        api.load_model(path)
    assert path.name in str(caught.value) and "damaged" not in str(caught.value)
    assert "ownload" not in str(caught.value) and "code" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", PAGE_FILE)
def test_a_page_file_that_is_too_small_is_no_damage(tmp_path, monkeypatch, kind):
    path = write_llamagen(tmp_path / "model.safetensors", False)
    torch.save({}, tmp_path / "model.pt")
    monkeypatch.setattr(checkpoint, "safe_open", Mock(side_effect=PAGE_FILE[kind]))
    monkeypatch.setattr(torch, "load", Mock(side_effect=PAGE_FILE[kind]))
    for file in (path, tmp_path / "model.pt"):
        message = refused(file)
        assert "page file" in message and "1455" in message and "--disable-mmap" in message


@pytest.mark.parametrize("kind", NO_MEMORY)
def test_too_little_memory_is_no_damage(tmp_path, monkeypatch, kind):
    path = write_llamagen(tmp_path / "model.safetensors", False)
    torch.save({}, tmp_path / "model.pt")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "safe_open", Mock(side_effect=NO_MEMORY[kind]))
        patch.setattr(torch, "load", Mock(side_effect=NO_MEMORY[kind]))
        for file in (path, tmp_path / "model.pt"):
            assert "not enough memory" in refused(file)
    monkeypatch.setattr(weights, "_cast", Mock(side_effect=NO_MEMORY[kind]))
    assert "not enough memory" in refused(path)


def test_a_drive_that_cannot_map_is_no_damage(tmp_path, monkeypatch):
    path = write_llamagen(tmp_path / "model.safetensors", False)
    monkeypatch.setattr(checkpoint, "safe_open", Mock(side_effect=OSError(19, "No such device (os error 19)")))
    checkpoint.use_mmap(False)
    assert api.load_model(path).family == "llamagen-c2i"
    checkpoint.use_mmap(True)
    message = refused(path)
    assert "No such device" in message and "--disable-mmap" in message


def test_a_model_generates_after_its_file_was_overwritten(tmp_path):
    """Where it was mapped, the system would end the process."""
    checkpoint.use_mmap(False)
    model = llamagen(tmp_path, False)
    prompt, tokens = model.encode_prompt("3"), torch.arange(16)[None] % VOCAB
    wanted = teacher_forced(model, prompt, tokens)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert torch.equal(teacher_forced(model, prompt, tokens), wanted)
