"""The table of look-alike codes: right, in range, and indifferent to whatever happens to its cache file."""

import logging

import pytest
import torch
from comfyui_specar.models import neighbours
from comfyui_specar.models.neighbours import compute_neighbours, neighbour_table
from comfyui_specar.samplers.rules.lantern import Lantern
from safetensors.torch import load_file, save_file

from ..support.tiny import VOCAB, fill, llamagen


def codes(vocab, dim=4, seed=0):
    return torch.randn(vocab, dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("vocab", "dim", "count"), [(2, 1, 1), (50, 3, 49), (300, 8, 20), (1500, 16, 700)])
def test_the_table_is_what_sorting_every_distance_gives(vocab, dim, count):
    book = codes(vocab, dim)
    table = neighbour_table(book, count)
    assert table.shape == (vocab, count) and table.dtype == torch.int64
    assert table.min() >= 0 and table.max() < vocab
    assert (table != torch.arange(vocab)[:, None]).all(), "a code is not its own neighbour"
    assert (table.sort(-1).values.diff(dim=-1) > 0).all(), "nobody twice"
    distance = torch.cdist(book.double(), book.double())
    assert (distance.gather(1, table).diff(dim=-1) > -1e-6).all(), "nearest first"
    distance.fill_diagonal_(torch.inf)
    agree = distance.argsort(dim=-1, stable=True)[:, :count] == table
    assert agree.double().mean() > 0.999


def test_ties_stand_in_the_order_of_the_codes():
    """A lattice, with every vector twice: its own double is 0 apart and comes first, then the others by number."""
    book = torch.cartesian_prod(torch.arange(3.0), torch.arange(3.0)).repeat(2, 1) * 0.25 + 0.75
    table = neighbour_table(book, 17)
    for i, row in enumerate(table.tolist()):
        steps = [round(float((book[i] - book[j]).square().sum()) * 16) for j in row]
        assert steps[0] == 0 and row[0] == (i + 9) % 18
        assert row == sorted(row, key=lambda j: (steps[row.index(j)], j))


def test_equal_vectors_are_nearest_in_the_order_of_the_codes():
    """Five copies of vectors far from the origin, whose products do not round to zero differences by themselves."""
    book = (codes(60, 37) + 100).repeat(5, 1)
    table = neighbour_table(book, 4)
    for i, row in enumerate(table.tolist()):
        assert row == [j for j in range(i % 60, 300, 60) if j != i]


def test_chunks_do_not_show(monkeypatch):
    book = codes(97)
    whole = compute_neighbours(book, 30)
    monkeypatch.setattr(neighbours, "_CHUNK", 200)
    assert torch.equal(compute_neighbours(book, 30), whole)


@pytest.mark.parametrize("count", [0, -1, 50, 1000])
def test_an_illegal_count_is_named(count):
    with pytest.raises(ValueError, match=rf"{count} neighbours.* 1 to 49"):
        neighbour_table(codes(50), count)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, and codebooks of 60 codes already worth keeping, 40 columns of them."""
    monkeypatch.setattr(neighbours, "WORTH_CACHING", 3600)
    monkeypatch.setattr(neighbours, "COLUMNS", 40)
    monkeypatch.setattr(neighbours, "cache_folder", lambda: tmp_path / "user" / "pack")
    return tmp_path / "user" / "pack"


def spy(monkeypatch):
    """Every computation from here on."""
    computed, real = [], neighbours.compute_neighbours
    monkeypatch.setattr(neighbours, "compute_neighbours", lambda *given: computed.append(given[1]) or real(*given))
    return computed


def test_a_table_is_computed_once_and_cut_to_size(cache, monkeypatch):
    book, wanted = codes(60), compute_neighbours(codes(60), 59)
    computed = spy(monkeypatch)
    for count in (5, 40, 1):
        assert torch.equal(neighbour_table(book, count), wanted[:, :count])
    [file] = cache.iterdir()
    assert computed == [40] and load_file(file)["neighbours"].dtype == torch.int32
    assert torch.equal(neighbour_table(book, 50), wanted[:, :50]) and computed == [40, 50]
    assert len(list(cache.iterdir())) == 2, "nothing half-written stays behind"


def test_another_codebook_has_another_file(cache):
    """Even one that differs in the last number alone."""
    book = codes(60)
    other = book.clone()
    other[-1, -1] += 9
    books = (book, other, book[:, :2], codes(60, seed=1))
    assert all(torch.equal(neighbour_table(b, 5), compute_neighbours(b, 5)) for b in books)
    assert len(list(cache.iterdir())) == 4
    assert not torch.equal(neighbour_table(book, 5), neighbour_table(other, 5))


def test_small_tables_leave_no_file(cache):
    neighbour_table(codes(59), 5)
    assert not cache.exists()


def corrupt(file, how):
    content = bytearray(file.read_bytes())
    tensors = load_file(file)
    if how == "truncated":
        file.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "noise":
        file.write_bytes(bytes(range(256)) * 40)
    elif how in ("out of range", "negative"):
        tensors["neighbours"][3, 7] = 60 if how == "out of range" else -1
        save_file(tensors, file)
    elif how == "shape":
        save_file({"neighbours": tensors["neighbours"][:, :7].contiguous()}, file)
    elif how == "name":
        save_file({"table": tensors["neighbours"]}, file)


@pytest.mark.parametrize("how", ["truncated", "empty", "noise", "out of range", "negative", "shape", "name"])
def test_a_damaged_file_is_computed_again_and_replaced(cache, monkeypatch, caplog, how):
    book = codes(60)
    wanted = neighbour_table(book, 20)
    [file] = cache.iterdir()
    corrupt(file, how)
    computed = spy(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(neighbour_table(book, 20), wanted)
        assert len(caplog.records) == 1 and "computed again" in caplog.text
        assert torch.equal(neighbour_table(book, 20), wanted)
    assert computed == [40] and len(caplog.records) == 1, "the new file is good"


@pytest.mark.parametrize("obstacle", ["folder", "disk"])
def test_a_folder_that_cannot_be_written_only_costs_time(cache, monkeypatch, caplog, obstacle):
    """A file stands where the folder should be (this also stops root, whom permissions do not); or the disk is full."""
    if obstacle == "folder":
        cache.parent.write_text("in the way", encoding="utf-8")
    else:

        def full(*given):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(neighbours, "save_file", full)
    book = codes(60)
    computed = spy(monkeypatch)
    with caplog.at_level(logging.WARNING):
        first = neighbour_table(book, 7)
        assert len(caplog.records) == 1 and str(cache) in caplog.text
        assert torch.equal(neighbour_table(book, 7), first)
    assert computed == [40, 40] and torch.equal(first, compute_neighbours(book, 7))
    assert obstacle == "folder" or list(cache.iterdir()) == [], "no half-written file stays behind"


def test_a_cached_file_in_use_is_waited_for(cache, monkeypatch, caplog, locked):
    book = codes(60)
    neighbour_table(book, 7)
    [file] = cache.iterdir()
    corrupt(file, "noise")
    computed, attempts = spy(monkeypatch), locked({file.name: 2})
    neighbour_table(book, 7)
    neighbour_table(book, 7)
    assert attempts[file.name] == 3 and computed == [40] and list(cache.iterdir()) == [file]


@pytest.mark.parametrize(
    ("platform", "variables", "wanted"),
    [
        ("linux", {"XDG_CACHE_HOME": "/elsewhere"}, "/elsewhere/comfyui-specar"),
        ("linux", {"HOME": "/home/me"}, "/home/me/.cache/comfyui-specar"),
        ("darwin", {"HOME": "/Users/me", "XDG_CACHE_HOME": "/elsewhere"}, "/Users/me/Library/Caches/comfyui-specar"),
        ("win32", {"LOCALAPPDATA": "/appdata"}, "/appdata/comfyui-specar"),
    ],
)
def test_the_folder_is_the_platforms_own(monkeypatch, platform, variables, wanted):
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(neighbours.sys, "platform", platform)
    assert neighbours.cache_folder().as_posix() == wanted


def test_a_model_asks_its_own_codebook(tmp_path):
    model = llamagen(tmp_path, text=True)
    model.codebook = None
    with pytest.raises(ValueError, match="(?i)no image decoder"):
        Lantern(5).bind(model)
    book = fill("codebook", (VOCAB, 4))
    model.attach_codebook(book, 16)
    assert torch.equal(model.neighbours(6), neighbour_table(book, 6))
    assert torch.equal(Lantern(6).bind(model).table.long(), model.neighbours(6))
