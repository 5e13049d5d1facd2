"""Members of archives and instructions of pickles, one by one at their bounds."""

import io
import pickle
import zipfile

import pytest
import torch
from comfyui_specar.limits.limits import CODES, DIMENSIONS, LAYERS, FileError
from comfyui_specar.model_loaders.files import archives, checkpoint, names, pickles, unpickler
from comfyui_specar.model_loaders.files.archives import members_of, stored
from comfyui_specar.model_loaders.files.unpickler import TensorUnpickler, check_keys, check_view

FULL, LONG = tuple(range(DIMENSIONS)), tuple(range(DIMENSIONS + 1))
NESTED = ((1,),)


def read(code: bytes):
    return TensorUnpickler(io.BytesIO(b"\x80\x02" + code + b"."), 0).load()


def pushed(key) -> bytes:
    """Instructions that leave a key on the stack."""
    return pickle.dumps(key, 2)[2:-1]


@pytest.mark.parametrize("key", [2**60, -(2**60), LONG, NESTED, (1, 2**60), (frozenset(),), frozenset([NESTED])])
def test_keys_that_stop_a_process(key):
    with pytest.raises(FileError, match="keys"):
        check_keys(["first", key])
    check_keys(["a", 1, -(2**60) + 1, 2**60 - 1, FULL, (), ("a", None, True), frozenset([1, 2])])


@pytest.mark.parametrize(
    "put",
    [
        lambda key: b"}" + key + b"K\x01s",  # SETITEM
        lambda key: b"}(K\x01K\x01" + key + b"K\x01u",  # SETITEMS
        lambda key: b"\x8f(K\x01" + key + b"\x90",  # ADDITEMS
        lambda key: b"(K\x01" + key + b"\x91",  # FROZENSET
    ],
)
def test_every_instruction_that_fills_a_table_looks_at_its_keys(put):
    assert FULL in read(put(pushed(FULL)))
    for key in (LONG, NESTED, 2**60):
        with pytest.raises(FileError, match="keys"):
            read(put(pushed(key)))
    assert read(b"}K\x01" + pushed(LONG) + b"s") == {1: LONG} == read(b"}(K\x01" + pushed(LONG) + b"u"), "no keys"


@pytest.mark.parametrize("code", [b"i__main__\nx\n", b"(No", b"\x82\x01", b"P1\n", b"I1\n", b"\x8bX"])
def test_instructions_that_weights_do_not_need_are_named(code):
    with pytest.raises(FileError, match="instruction [0-9]+, which"):
        read(code)


def test_so_many_instructions_are_run():
    """PROTO and STOP are two of them."""
    for extra, runs in ((-3, True), (-2, False)):
        code = b"N" * (CODES + extra)
        if runs:
            assert read(code) is None
        else:
            with pytest.raises(FileError, match=f"more than {CODES}"):
                read(code)


@pytest.mark.parametrize(
    ("sizes", "steps", "elements"),
    [((2, 3), (3, 1), 6), ((2, 3), (1, 2), 6), ((3,), (5,), 11), ((), (), 1), ((0, 9), (9, 1), 0), ((2, 2), (0, 0), 1)],
)
def test_a_tensor_ends_where_its_last_element_does(sizes, steps, elements):
    check_view(elements, 0, sizes, steps)
    check_view(elements + 4, 4, sizes, steps)
    for fewer, begin in ((elements - 1, 0), (elements, 1)):
        with pytest.raises(FileError, match="larger than its storage"):
            check_view(fewer, begin, sizes, steps)
    with pytest.raises(FileError, match="invalid"):
        check_view(99, 0, sizes, (*steps, 1))
    for offset in (-1, None):
        with pytest.raises(FileError, match="place"):
            check_view(99, offset, sizes, steps)


def archive(path, members, compress=()):
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            kind = zipfile.ZIP_DEFLATED if name in compress else zipfile.ZIP_STORED
            file.writestr(f"folder/{name}", content, kind)
    return path


def test_members_are_named_without_their_folder_and_data_is_stored(tmp_path):
    found = members_of(archive(tmp_path / "a.zip", {"data.pkl": b"x", "code/a.py": b"y" * 10**6}, ["code/a.py"]))
    assert list(found) == ["data.pkl", "code/a.py"] and stored(found, "data.pkl").file_size == 1
    with pytest.raises(FileError, match="compressed"):
        stored(found, "code/a.py")
    with pytest.raises(FileError, match="no data/0"):
        stored(found, "data/0")


def test_a_list_of_members_has_a_limit(tmp_path, monkeypatch):
    path = archive(tmp_path / "a.zip", {"data.pkl": b"x"})
    size = 46 + len("folder/data.pkl")
    for limit, fits in ((size, True), (size - 1, False)):
        monkeypatch.setattr(archives, "DIRECTORY", limit)
        if fits:
            assert len(members_of(path)) == 1
        else:
            with pytest.raises(FileError, match=f"has {size} bytes"):
                members_of(path)


def test_names_that_differ_in_case_are_the_same_and_what_is_no_archive_is_named(tmp_path):
    with pytest.raises(FileError, match="same name"):
        members_of(archive(tmp_path / "a.zip", {"data.pkl": b"x", "DATA.pkl": b"y"}))
    (tmp_path / "a.zip").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(FileError, match="no zip file"):
        members_of(tmp_path / "a.zip")


def test_a_pickle_has_a_limit(tmp_path, monkeypatch):
    path = archive(tmp_path / "a.zip", {"data.pkl": b"x" * 9})
    members = members_of(path)
    with zipfile.ZipFile(path) as file:
        monkeypatch.setattr(archives, "PICKLE", 9)
        assert archives.pickle_in(file, members).read() == b"x" * 9
        monkeypatch.setattr(archives, "PICKLE", 8)
        with pytest.raises(FileError, match="9 bytes; 8"):
            archives.pickle_in(file, members)


@pytest.mark.parametrize("code", [b"]}b", b"}]b", b"N}b", b"}Na", b"NNa", b"}(Ne", b"]NNs", b"](NNu", b"N(NNu"])
def test_a_pickle_changes_only_containers_of_its_own(code):
    """BUILD of a list, APPEND to a dict, SETITEM into a list, and all of None."""
    with pytest.raises(FileError, match="tries to change"):
        pickles._PickleUnpickler(io.BytesIO(b"\x80\x02" + code + b"."), 0).load()


@pytest.mark.parametrize("compress", ["data.pkl", "data/0", "version"])
def test_a_pickle_of_compressed_parts_is_refused(tmp_path, compress):
    torch.save({"a": torch.ones(1000)}, tmp_path / "sound.pt")
    with zipfile.ZipFile(tmp_path / "sound.pt") as file:
        members = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    assert pickles.read_pickle(archive(tmp_path / "a.pt", members), False)["a"].sum() == 1000
    with pytest.raises(FileError, match="compressed"):
        pickles.read_pickle(archive(tmp_path / "b.pt", members, [compress]), False)


def test_tensors_of_a_mapped_pickle_are_the_file_itself(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"a": torch.arange(1000.0), "b": torch.ones(3, dtype=torch.bfloat16)}, path)
    for mapped in (True, False):
        content = pickles.read_pickle(path, mapped)
        assert content["a"].tolist() == list(range(1000)) and content["b"].tolist() == [1, 1, 1]
        for tensor in content.values():
            assert (tensor.untyped_storage().nbytes() == path.stat().st_size) == mapped


def test_a_drive_that_cannot_be_mapped_has_its_own_remedy(tmp_path, monkeypatch):
    def refuse(path):
        raise OSError("no such device")

    monkeypatch.setattr(checkpoint, "_map", refuse)
    with pytest.raises(checkpoint.CheckpointError, match="no such device.*--disable-mmap"):
        checkpoint._open_safetensors(tmp_path / "a.safetensors", "map")


@pytest.mark.parametrize(
    ("separator", "name", "said"),
    [("/", "a\\b", "backslash"), ("/", "a/b", "Restore"), ("\\", "a\\b", "Restore"), ("\\", "a/b", "Restore")],
)
def test_a_backslash_is_named_where_it_separates_nothing(monkeypatch, separator, name, said):
    monkeypatch.setattr(checkpoint.os, "sep", separator)
    assert said in checkpoint.remedy_for_missing(name)


@pytest.mark.parametrize(
    ("offset", "size", "stride", "wanted"),
    [
        (3, (1, 2), (2, 1), [[3, 4]]),
        (1, (2, 2), (1, 2), [[1, 3], [2, 4]]),
        (0, (5,), (1,), [0, 1, 2, 3, 4]),
        (5, (0, 2), (2, 1), []),
        (4, (), (), 4),
        (2, (3,), (0,), [2, 2, 2]),
    ],
)
def test_a_tensor_is_the_part_of_its_storage_that_is_stated(offset, size, stride, wanted):
    """Also in a storage that does not begin where the file does."""
    for storage in (torch.arange(5), torch.arange(-2, 5)[2:]):
        assert unpickler.tensor_view(storage, offset, size, stride).tolist() == wanted
    with pytest.raises(FileError, match="invalid"):
        unpickler.tensor_view("storage", 0, (1,), (1,))


def test_a_torchscript_archive_whose_tensors_are_not_in_it_is_refused(tmp_path, monkeypatch):
    path = archive(tmp_path / "a.jit", {"data.pkl": b"x" * 100})
    for copies, sound in ((100, True), (10**6, False)):
        monkeypatch.setattr(checkpoint, "read_torchscript", lambda _, n=copies: {"a": torch.zeros(1).expand(n)})
        if sound:
            assert checkpoint._open_torchscript(path).tensors["a"].shape == (100,)
        else:
            with pytest.raises(checkpoint.CheckpointError, match="larger than the file"):
                checkpoint._open_torchscript(path)


def test_modules_are_counted_by_their_numbers():
    found = ["a.0.weight", "a.0.bias", "a.2.weight", "b.7.weight", "xa.9.weight", "a.b.weight"]
    assert names.count(found, "a.") == 2 and names.count(found, "c.") == 0
    assert names.numbered(found, r"a\.", 3) == 3 and names.numbered(found, r"b\.", 8) == 8
    for before, most in ((r"a\.", 2), (r"c\.", 9)):
        with pytest.raises(ValueError):
            names.numbered(found, before, most)
    assert names.count([f"a.{n}.w" for n in range(LAYERS)], "a.") == LAYERS
    with pytest.raises(FileError, match="number of modules a"):
        names.count([f"a.{n}.w" for n in range(LAYERS + 1)], "a.")
