"""Members of archives and instructions of pickles, one by one at their bounds."""

import io
import zipfile

import pytest
import torch
from comfyui_specar.limits.limits import CODES, LAYERS, PARTS, FileError
from comfyui_specar.model_loaders.files import archives, checkpoint, names, pickles
from comfyui_specar.model_loaders.files.archives import get_stored, members_of
from comfyui_specar.model_loaders.files.pickles import check_pickle


def check(code: bytes):
    """What a pickle of these instructions asks for."""
    return check_pickle(io.BytesIO(b"\x80\x02" + code + b"."))


@pytest.mark.parametrize("values", [b"N" * PARTS, b"(N" + b"N" * (PARTS - 2) + b"t", b"N" + b"\x85" * PARTS])
def test_a_tuple_has_so_many_values_as_a_hash_of_it_takes_time(values):
    """Those of the tuples in it count, which may be one tuple many times."""
    with pytest.raises(FileError, match=f"more than {PARTS} values"):
        check(b"(" + values + b"t")
    with pytest.raises(FileError, match=f"more than {PARTS} values"):
        check(b"N" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(10)))
    assert check(b"(" + b"N" * (PARTS - 1) + b"t") == (set(), {})


@pytest.mark.parametrize(
    "code", [b"i__main__\nx\n", b"(No", b"\x82\x01", b"P1\n", b"I1\n", b"\x8c\x01a", b"\x8a\x09" + b"\x01" * 9]
)
def test_instructions_that_weights_do_not_need_are_named(code):
    with pytest.raises(FileError, match="instruction [A-Z]+"):
        check(code)


def test_so_many_instructions_are_run():
    """PROTO and STOP are two of them."""
    check(b"N" * (CODES - 2))
    with pytest.raises(FileError, match=f"more than {CODES}"):
        check(b"N" * (CODES - 1))


def test_what_is_called_is_named():
    torch_call, own = b"ctorch\nload\n", b"csome.script\nArgs\n"
    assert check(own + b")\x81}b") == ({"some.script.Args"}, {})
    for code, said in (
        (torch_call + b")R", "calls 'torch.load'"),
        (b"ctorch\nFloatTensor\n)\x81", "calls"),
        (b"]" + b")R", "calls None"),
        (own + b")R)R", "calls 'some.script.Args'"),
        (own + b"}b", "change"),
        (b"]}b", "change"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n)R}b", "change"),
        (b"NR", "not there"),
        (b"N(R", "not there"),
        (b"(u", "not there"),
    ):
        with pytest.raises(FileError, match=said):
            check(code)


@pytest.mark.parametrize("module", ["__builtin__", "builtins"])
def test_names_of_python_2_are_those_of_today(module):
    assert check(f"c{module}\nset\n(]tR".encode()) == ({"builtins.set"}, {})


def archive(path, members, compress=()):
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            kind = zipfile.ZIP_DEFLATED if name in compress else zipfile.ZIP_STORED
            file.writestr(f"folder/{name}", content, kind)
    return path


def test_members_are_named_without_their_folder_and_data_is_stored(tmp_path):
    found = members_of(archive(tmp_path / "a.zip", {"data.pkl": b"x", "code/a.py": b"y" * 10**6}, ["code/a.py"]))
    assert list(found) == ["data.pkl", "code/a.py"] and get_stored(found, "data.pkl").file_size == 1
    with pytest.raises(FileError, match="compressed"):
        get_stored(found, "code/a.py")
    with pytest.raises(FileError, match="no data/0"):
        get_stored(found, "data/0")


def test_a_list_of_members_has_a_limit(tmp_path, monkeypatch):
    path = archive(tmp_path / "a.zip", {"data.pkl": b"x"})
    size = 46 + len("folder/data.pkl")
    monkeypatch.setattr(archives, "DIRECTORY", size)
    assert len(members_of(path)) == 1
    monkeypatch.setattr(archives, "DIRECTORY", size - 1)
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


@pytest.mark.parametrize("compress", ["data.pkl", "data/0", "version"])
def test_a_pickle_of_compressed_parts_is_refused(tmp_path, compress):
    torch.save({"a": torch.ones(1000)}, tmp_path / "sound.pt")
    with zipfile.ZipFile(tmp_path / "sound.pt") as file:
        members = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    assert pickles.read_pickle(archive(tmp_path / "a.pt", members), False)["a"].sum() == 1000
    with pytest.raises(FileError, match="compressed"):
        pickles.read_pickle(archive(tmp_path / "b.pt", members, [compress]), False)


@pytest.mark.parametrize(
    ("separator", "name", "said"),
    [("/", "a\\b", "backslash"), ("/", "a/b", "Restore"), ("\\", "a\\b", "Restore"), ("\\", "a/b", "Restore")],
)
def test_a_backslash_is_named_where_it_separates_nothing(monkeypatch, separator, name, said):
    monkeypatch.setattr(checkpoint.os, "sep", separator)
    assert said in checkpoint.remedy_for_missing(name)


def test_a_torchscript_archive_whose_tensors_are_not_in_it_is_refused(tmp_path, monkeypatch):
    path = archive(tmp_path / "a.jit", {"data.pkl": b"x" * 100})
    monkeypatch.setattr(checkpoint, "read_torchscript", lambda _: {"a": torch.zeros(1).expand(100)})
    assert checkpoint._open_torchscript(path).tensors["a"].shape == (100,)
    monkeypatch.setattr(checkpoint, "read_torchscript", lambda _: {"a": torch.zeros(1).expand(10**6)})
    with pytest.raises(checkpoint.CheckpointError, match="larger than the file"):
        checkpoint._open_torchscript(path)


def test_modules_are_counted_by_their_numbers():
    found = ["a.0.weight", "a.0.bias", "a.2.weight", "b.7.weight", "xa.9.weight", "a.b.weight"]
    assert names.count(found, "a.") == 2 and names.count(found, "c.") == 0
    assert names.count_modules(found, r"a\.", 3) == 3 and names.count_modules(found, r"b\.", 8) == 8
    for before, most in ((r"a\.", 2), (r"c\.", 9)):
        with pytest.raises(ValueError):
            names.count_modules(found, before, most)
    assert names.count([f"a.{n}.w" for n in range(LAYERS)], "a.") == LAYERS
    with pytest.raises(FileError, match="number of modules a"):
        names.count([f"a.{n}.w" for n in range(LAYERS + 1)], "a.")
