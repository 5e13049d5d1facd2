"""The papers' tables: whole, of methods that exist, and measured on a model at hand in their own columns."""

import sys

import pytest
from comfyui_specar.samplers.contract import Method
from comfyui_specar.tools.benchmarks import paper
from comfyui_specar.tools.benchmarks.paper_tables import KEYS, TABLES
from PIL import Image

from ..support import tiny, tiny_llamagen
from ..support.toy import ToyDrafter, ToyModel, plain


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_tables_are_whole(table):
    """Every column can be measured, every row is a method, and no published row is longer than the table."""
    assert all(key in KEYS or key.startswith("faster@") for key in table.columns.values())
    drafter = ToyDrafter(ToyModel(plain(2, 2)))
    assert all(isinstance(row.method(drafter), Method) for row in table.rows)
    for cells in table.published.values():
        assert len(cells) <= len(table.rows) and all(len(row) <= len(table.columns) for row in cells)
        relative = [title for title, key in table.columns.items() if key == "faster@1"]
        assert cells[0][list(table.columns).index(*relative)] == "1.00"


def test_a_table_is_measured_on_any_model(tmp_path, monkeypatch, capsys):
    model, drafter, prompts = tmp_path / "model", tmp_path / "eagle", tmp_path / "prompts.txt"
    model.mkdir()
    for name in ("HF_HUB_OFFLINE", "TORCH_FORCE_WEIGHTS_ONLY_LOAD"):  # which the command sets
        monkeypatch.setenv(name, "1")
    tiny_llamagen.write_with_words(model)
    tiny.write_eagle(drafter, input_type=None)
    prompts.write_text("red cat\ncat", encoding="utf-8")
    named = {
        "model": model,
        "drafter": drafter,
        "prompts": prompts,
        "folder": tmp_path,
        "images": 2,
        "out": tmp_path / "report.json",
    }
    options = [str(part) for name, value in named.items() for part in (f"--{name}", value)]
    monkeypatch.setattr(
        sys, "argv", ["paper", "cool-sd", *options, "--out", str(tmp_path / "report.json"), "--device", "cpu"]
    )
    paper.main()
    title, _, head, _, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("Cool-SD, table 1") and head.split(" | ")[-2:] == ["speed-up", "TV(p, q) |"]
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in lines]
    ours = {row[1]: row[2:] for row in rows if row[0].endswith("ours")}
    assert ours["next token"][3:] == ["1.00 (0.00)", ours["next token"][4], "1.00", "-"]
    assert all(row[:3] == ["-"] * 3 and 0 < float(row[6]) < 1 for row in list(ours.values())[1:])
    assert rows[-1][:3] == ["LlamaGen-XL, the paper's", "Cool-SD (delta 2)", "0.3154"]
    folders = sorted((tmp_path / "cool-sd").iterdir())
    assert [folder.name for folder in folders][::4] == ["0 next token", "4 Cool-SD delta 2"]
    for folder in folders:
        assert [file.name for file in sorted(folder.glob("*.png"))] == ["0000.png", "0001.png"]
        assert (folder / "0001.txt").read_text(encoding="utf-8") == "cat"
        with Image.open(folder / "0000.png") as image:
            assert image.size[0] > 1


def test_a_cell_is_a_mean_and_only_what_was_measured():
    found, base = {"seconds": [1.0, 3.0], "seconds@1": [1.0, 3.0], "clip": {"value": 0.25}}, {"seconds@1": [4.0]}
    cells = {key: paper.cell(found, base, key) for key in ("seconds", "faster@1", "faster@8", "clip", "frechet")}
    assert cells == {"seconds": "2.00 (1.41)", "faster@1": "2.00", "faster@8": "", "clip": "0.25", "frechet": ""}
