"""One tensor on its way from a file into a module, and the header that says where it is."""

import io
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from comfyui_specar.limits.limits import HEADER, QUANTISED, FileError
from comfyui_specar.model_loaders.files import quantised, safetensors_files, scaled, weights
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError

PATH = Path("model.safetensors")


@pytest.fixture
def header_of(tmp_path):
    """Names and metadata that the reader finds in a file with this header and so many bytes of data."""

    def found(tensors, data: int, metadata=None):
        content = json.dumps(tensors if metadata is None else {"__metadata__": metadata} | tensors).encode()
        (tmp_path / PATH).write_bytes(len(content).to_bytes(8, "little") + content + bytes(data))
        read, about = safetensors_files.read(tmp_path / PATH)
        return [*read], about

    return found


def at(begin: int, end: int, shape=None, dtype="F32"):
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def test_tensors_fill_the_file_in_any_order(header_of):
    assert header_of({"b": at(8, 12), "a": at(0, 8)}, 12, {"k": "v"}) == (["a", "b"], {"k": "v"})
    assert header_of({"a": at(0, 0), "b": at(0, 4), "c": at(4, 4)}, 4) == (["a", "b", "c"], {})
    assert header_of({}, 0) == ([], {})


@pytest.mark.parametrize(
    ("tensors", "data", "said"),
    [
        ({"a": at(0, 8), "b": at(12, 16)}, 16, "b has 4 bytes from byte 8 on, not those of its place .12, 16"),
        ({"a": at(0, 8), "b": at(4, 12)}, 12, "b has 8 bytes from byte 8 on"),
        ({"a": at(4, 8)}, 8, "a has 4 bytes from byte 0 on"),
        ({"a": at(0, 8)}, 9, "have 8 bytes, but 9 follow"),
        ({"a": at(0, 8)}, 7, "a has 8 bytes from byte 0 on"),
        ({"a": at(0, 8, [3])}, 8, "a has 12 bytes from byte 0 on"),
        ({"a": at(0, 8, dtype="F33")}, 8, "a has the dtype 'F33'"),
        *(({"a": at(0, 8) | {"data_offsets": place}}, 8, "a is at the place") for place in ([0, 4, 8], 8, [8])),
        ({"a": [0, 8]}, 8, "a has the dtype None"),
    ],
)
def test_a_header_that_lies_is_refused(header_of, tensors, data, said):
    with pytest.raises(FileError, match=said):
        header_of(tensors, data)


@pytest.mark.parametrize("metadata", [["k"], {"k": 1}, {"k": None}, "k"])
def test_metadata_is_an_object_of_strings(header_of, metadata):
    with pytest.raises(FileError, match="metadata is not a JSON object of strings"):
        header_of({}, 0, metadata)
    assert header_of({}, 0, None) == ([], {})


@pytest.mark.parametrize(
    ("length", "size", "legal"),
    [(2, 10, True), (1, 10, False), (3, 10, False), (HEADER, 8 + HEADER, True), (HEADER + 1, 9 + HEADER, False)],
)
def test_the_length_of_a_header_has_both_limits(length, size, legal):
    file = io.BytesIO(length.to_bytes(8, "little") + b"{}" + b" " * (length - 2))
    if legal:
        assert len(safetensors_files.header_of(file, size)) == length == file.tell() - 8
    else:
        with pytest.raises(FileError, match=f"invalid length of {length}"):
            safetensors_files.header_of(file, size)


def test_every_number_is_looked_at(monkeypatch):
    monkeypatch.setattr(weights, "_CHECKED", 4)
    for size in (1, 4, 5, 9):
        for place in range(size):
            numbers = torch.zeros(size)
            assert weights._finite(numbers)
            numbers[place] = (torch.nan, torch.inf, -torch.inf)[place % 3]
            assert not weights._finite(numbers) and not weights._finite(numbers[None, :, None].to(torch.float8_e5m2))


def test_the_description_of_a_layer_is_a_short_object_in_bytes():
    def as_tensor(text, dtype=torch.uint8):
        return torch.tensor(list(text.encode()), dtype=dtype)

    assert quantised.description('{"a": 1}', "it") == quantised.description(as_tensor('{"a": 1}'), "it") == {"a": 1}
    assert quantised.description(as_tensor('{"a": 1}'.ljust(QUANTISED)), "it") == {"a": 1}
    long, wide = as_tensor('{"a": 1}'.ljust(QUANTISED + 1)), as_tensor('{"a": 1}', torch.int32)
    for text in (wide, long, "[1]", "{", as_tensor("[]")):
        with pytest.raises(FileError, match="it cannot be read.*Download"):
            quantised.description(text, "it")


@pytest.mark.parametrize(("scale", "top"), [(600.0, 127), (-600.0, 127), (511.0, 128)])
def test_stored_numbers_fit_with_their_scales(scale, top):
    """128 times a scale of 511 is the last that fp16 holds, whatever its sign."""
    matrix = scaled.scale_matrix(torch.tensor([[top - 128]], dtype=torch.int8), torch.tensor([[scale]]))
    if abs(scale) < 512:
        assert weights._as_stored(matrix, torch.float16, "w", PATH)[1].tolist() == [scale]
    else:
        with pytest.raises(CheckpointError, match="too large for torch.float16"):
            weights._as_stored(matrix, torch.float16, "w", PATH)
    assert weights._as_stored(matrix, torch.bfloat16, "w", PATH)[1].tolist() == [scale]
    for bad in (torch.nan, torch.inf):
        matrix = scaled.scale_matrix(torch.ones(1, 1, dtype=torch.int8), torch.tensor([[bad]]))
        with pytest.raises(CheckpointError, match="NaN or infinite"):
            weights._as_stored(matrix, torch.bfloat16, "w", PATH)


@pytest.mark.parametrize(
    ("step", "minimum", "fits"),
    [(8000.0, -60000.0, True), (8500.0, -60000.0, False), (8700.0, -66000.0, False), (-8500.0, 60000.0, False)],
)
def test_both_ends_of_a_group_fit(step, minimum, fits):
    """Its largest number is minimum + 15 x step, or the minimum itself."""
    scale = torch.tensor([[[0.0, 0.0], [step, minimum]]])
    assert float(weights._largest(scale)) == max(abs(minimum), abs(minimum + 15 * step))
    assert (weights._largest(scale) <= torch.finfo(torch.float16).max) == fits
    matrix = torch.arange(16.0).repeat(4)[None] * step + minimum
    with nullcontext() if fits else pytest.raises(CheckpointError, match="too large for torch.float16"):
        weights._quantised(matrix, torch.uint4, torch.float16, "w", PATH)
