"""Measured costs of passes survive a restart of ComfyUI, in a file of its user folder."""

import json
import logging
import math
from pathlib import Path

import folder_paths
import pytest
from comfyui_specar.nodes.comfy_runtime.kept_costs import FILE, KeptCosts
from comfyui_specar.nodes.tree_samplers import DEFAULT
from comfyui_specar.samplers.drafts.costs import PassCosts
from comfyui_specar.samplers.methods import pass_costs

ONE, TWO = (PassCosts(((1, 1.0), (9, cost)), 0.25, ((1, 0.125),)) for cost in (1.4142, 2.0))
A, B = "a" * 16, "0123456789abcdef"


def test_the_nodes_keep_them_in_the_user_folder():
    assert isinstance(pass_costs.known, KeptCosts)
    assert pass_costs.known.path == Path(folder_paths.get_user_directory(), FILE)


def test_what_one_process_measured_the_next_one_knows(tmp_path):
    kept = KeptCosts(tmp_path / FILE)
    assert not kept
    kept[A], kept[B] = ONE, TWO
    assert dict(KeptCosts(tmp_path / FILE)) == {A: ONE, B: TWO}
    assert [file.name for file in (tmp_path / FILE).parent.iterdir()] == ["pass_costs.json"]


def test_servers_with_one_user_folder_keep_each_others(tmp_path):
    first, second = KeptCosts(tmp_path / FILE), KeptCosts(tmp_path / FILE)
    first[A] = ONE
    second[B] = TWO
    assert dict(KeptCosts(tmp_path / FILE)) == {A: ONE, B: TWO}
    assert B in first and first[B] == TWO, "nothing is measured that another server has measured since"


SPOILED = [
    "",
    "{",
    "[]",
    "1",
    "null",
    "\0\x80",
    "[" * 100_000,
    '{"a": ' * 100_000,
    "9" * 100_000,
    json.dumps({A: 1}),
    json.dumps({A: {"target": []}}),
]
COSTS = {"target": [[1, 1.0], [2, 1.5]], "round": 0.25, "expand": [[1, 0.125]]}
WRONG = [
    *({"round": value} for value in (0, -1, math.nan, math.inf, 1e300, True, None, "1", [1], 10**60)),
    *({"target": [[1, value]]} for value in (0, -1.0, math.nan, math.inf, "1", None, [1])),
    *({"expand": [[value, 1.0]]} for value in (0, -1, 1.5, True, "1", None, 2**40, 10**60)),
    *({"target": value} for value in ([], None, 1, {}, "12", [[1]], [[1, 1, 1]], [1, 2], [[1, 1], [1, 1]])),
    {"target": [[2, 1.0], [1, 1.0]]},
]


@pytest.mark.parametrize(
    "content",
    [*SPOILED, *(json.dumps({A: COSTS | wrong}) for wrong in WRONG), json.dumps({"\x1b[2J" * 9: COSTS})],
    ids=range(len(SPOILED) + len(WRONG) + 1),
)
def test_a_file_that_is_no_such_file_is_replaced(tmp_path, caplog, content):
    path = tmp_path / FILE
    path.parent.mkdir()
    path.write_text(content, encoding="latin-1")
    kept = KeptCosts(path)
    assert not kept and "measured again" in caplog.text and "\x1b" not in caplog.text
    kept[A] = ONE
    assert dict(KeptCosts(path)) == {A: ONE}


def test_a_file_without_end_is_not_read(tmp_path, caplog):
    path = tmp_path / FILE
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(2**40)
    assert not KeptCosts(path) and "1099511627776 bytes" in caplog.text


def test_a_file_that_cannot_be_read_now_is_not_replaced(tmp_path, monkeypatch, caplog):
    """Another program may hold it open, on Windows."""
    KeptCosts(tmp_path / FILE)[A] = ONE
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda _: (_ for _ in ()).throw(PermissionError(13, "in use")))
        kept = KeptCosts(tmp_path / FILE)
        kept[B] = TWO
        assert kept[B] == TWO and "cannot be read" in caplog.text and "cannot be written" in caplog.text
    assert dict(KeptCosts(tmp_path / FILE)) == {A: ONE}
    assert len([*(tmp_path / FILE).parent.iterdir()]) == 1


def test_a_folder_that_takes_no_file_costs_nothing_but_a_measurement(tmp_path, caplog):
    (tmp_path / "specar").write_text("a file where the folder should be", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        kept = KeptCosts(tmp_path / FILE)
        kept[A] = ONE
    assert kept[A] == ONE and "cannot be written" in caplog.text


def test_a_sampler_does_not_measure_what_is_kept(sample, monkeypatch, tmp_path):
    def image():
        monkeypatch.setattr(pass_costs, "known", KeptCosts(tmp_path / FILE))
        return sample("DraftTree", seed=3, structure=DEFAULT)[0]["ar_tokens"]

    first = image()
    assert len(KeptCosts(tmp_path / FILE)) == 1
    monkeypatch.setattr(pass_costs, "measure_passes", lambda *_: pytest.fail("measured again"))
    assert image().equal(first)


def test_a_sampler_measures_again_what_is_not_of_its_passes(sample, monkeypatch, tmp_path):
    """A file may be sound and yet hold another run's numbers under the key of this one."""
    path = tmp_path / FILE
    monkeypatch.setattr(pass_costs, "known", KeptCosts(path))
    image = sample("DraftTree", seed=3, structure=DEFAULT)[0]["ar_tokens"]
    [(key, costs)] = json.loads(path.read_text("utf-8")).items()
    for change in ({"target": [[1, 1.0], [7, 1.5]]}, {"expand": [[1, 0.1]]}, {"expand": [[2, 0.1]]}):
        path.write_text(json.dumps({key: costs | change}), "utf-8")
        monkeypatch.setattr(pass_costs, "known", KeptCosts(path))
        monkeypatch.setattr(pass_costs, "measure_passes", lambda *_, costs=costs: pass_costs.PassCosts.of(costs))
        assert sample("DraftTree", seed=3, structure=DEFAULT)[0]["ar_tokens"].equal(image)
        assert json.loads(path.read_text("utf-8")) == {key: costs}
