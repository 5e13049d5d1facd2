"""Reading .safetensors files without a memory map, beside the format's own library, which maps them."""

import random

import pytest
import torch
from comfyui_specar.limits.limits import DIMENSIONS, NAME, FileError
from comfyui_specar.limits.printable import printable
from comfyui_specar.model_loaders.files import safetensors_files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from ..support import fuzz_files

TENSORS = {
    "matrix": torch.arange(15.0).reshape(3, 5),
    "half": torch.arange(4.0).bfloat16(),
    "ids": torch.arange(7),
    "one": torch.tensor(3.5),
    "none": torch.zeros(0, 4),
    "narrow": torch.arange(8.0).to(torch.float8_e4m3fn),
    "flags": torch.tensor([True, False, True]),
    "complex": torch.tensor([1 + 2j], dtype=torch.complex64),
}
CHANGES = (
    fuzz_files.truncate,
    fuzz_files.flip_bits,
    fuzz_files.overwrite,
    fuzz_files.edit_header,
    fuzz_files.lie_about_the_header,
    fuzz_files.edit_metadata,
)
CASES = 500
QUIET = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def mapped(path):
    """What the format's own library makes of a file."""
    with safe_open(str(path), framework="pt", device="cpu") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def bits(tensor):
    return tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def test_the_same_tensors_and_metadata(tmp_path):
    save_file(TENSORS, tmp_path / "a.safetensors", metadata={"specar": "{}", "other": "ü"})
    tensors, metadata = safetensors_files.read(tmp_path / "a.safetensors")
    assert metadata == {"specar": "{}", "other": "ü"} and tensors.keys() == TENSORS.keys()
    assert all(bits(tensors[name]) == bits(tensor) for name, tensor in TENSORS.items())
    shapes, same = safetensors_files.read(tmp_path / "a.safetensors", ())
    assert same == metadata and {tensor.device.type for tensor in shapes.values()} == {"meta"}
    assert shapes.keys() == TENSORS.keys()
    assert all((shapes[name].dtype, shapes[name].shape) == (t.dtype, t.shape) for name, t in TENSORS.items())


def test_damage_is_refused_where_the_library_refuses_it_and_read_alike_where_not(tmp_path):
    file, refused = tmp_path / "a.safetensors", 0
    save_file(TENSORS, file, metadata={"specar": '{"grid": [2, 2]}'})
    sound = file.read_bytes()
    for number in range(CASES):
        file.write_bytes(sound)
        rng = random.Random(number)
        rng.choice(CHANGES)(file, rng)
        try:
            wanted = mapped(file)
        except Exception as error:
            wanted = error
        if isinstance(wanted, Exception):
            refused += 1
            with pytest.raises(ValueError):
                safetensors_files.read(file)
        elif any(t.ndim > DIMENSIONS or len(name) > NAME or printable(name) != name for name, t in wanted[0].items()):
            with pytest.raises(FileError):  # the library has no bounds
                safetensors_files.read(file)
        else:
            tensors, metadata = safetensors_files.read(file)
            assert metadata == wanted[1] and tensors.keys() == wanted[0].keys()
            assert all(bits(tensors[name]) == bits(tensor) for name, tensor in wanted[0].items()), number
    assert 50 < refused < CASES - 50, "both are tested"


@QUIET
@given(
    content=st.one_of(
        st.binary(max_size=100), st.binary(max_size=50).map(lambda header: len(header).to_bytes(8, "little") + header)
    )
)
def test_any_other_bytes_are_refused_with_a_reason(tmp_path, content):
    (tmp_path / "a.safetensors").write_bytes(content)
    try:
        tensors, _ = safetensors_files.read(tmp_path / "a.safetensors")
    except ValueError as error:
        assert str(error)
    else:  # a table without tensors, such as {}
        assert tensors == mapped(tmp_path / "a.safetensors")[0] == {}


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "a.safetensors"
    save_file({"large": torch.zeros(2**20)}, file)  # more than is read ahead
    header = safetensors_files.header_of

    def shrinking(opened, size):
        found = header(opened, size)
        with file.open("r+b") as writing:
            writing.truncate(size - 8)
        return found

    monkeypatch.setattr(safetensors_files, "header_of", shrinking)
    with pytest.raises(ValueError, match="ends.*large"):
        safetensors_files.read(file)
