"""Measured costs of passes survive a restart of ComfyUI, in a file of its user folder."""

import logging
from pathlib import Path

import folder_paths
import pytest
from comfyui_specar.nodes.comfy_runtime.kept_costs import FILE, KeptCosts
from comfyui_specar.samplers.drafts.costs import PassCosts
from comfyui_specar.samplers.methods import pass_costs

ONE, TWO = (PassCosts(((1, 1.0), (9, cost)), 0.25, ((1, 0.125),)) for cost in (1.4142, 2.0))


def test_the_nodes_keep_them_in_the_user_folder():
    assert isinstance(pass_costs.known, KeptCosts)
    assert pass_costs.known.path == Path(folder_paths.get_user_directory(), FILE)


def test_what_one_process_measured_the_next_one_knows(tmp_path):
    kept = KeptCosts(tmp_path / FILE)
    assert not kept
    kept["a"], kept["b"] = ONE, TWO
    assert dict(KeptCosts(tmp_path / FILE)) == {"a": ONE, "b": TWO}
    assert [file.name for file in (tmp_path / FILE).parent.iterdir()] == ["pass_costs.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}', '{"a": {"target": []}}', "\0\x80"])
def test_a_file_that_is_no_such_file_is_replaced(tmp_path, caplog, content):
    path = tmp_path / FILE
    path.parent.mkdir()
    path.write_text(content, encoding="latin-1")
    kept = KeptCosts(path)
    assert not kept and "measured again" in caplog.text
    kept["a"] = ONE
    assert dict(KeptCosts(path)) == {"a": ONE}


def test_a_folder_that_takes_no_file_costs_nothing_but_a_measurement(tmp_path, caplog):
    (tmp_path / "specar").write_text("a file where the folder should be", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        kept = KeptCosts(tmp_path / FILE)
        kept["a"] = ONE
    assert kept["a"] == ONE and "cannot be written" in caplog.text


def test_a_sampler_does_not_measure_what_is_kept(sample, monkeypatch, tmp_path):
    def image():
        monkeypatch.setattr(pass_costs, "known", KeptCosts(tmp_path / FILE))
        return sample("DraftTree", seed=3)[0]["ar_tokens"]

    first = image()
    monkeypatch.setattr(pass_costs, "measured", lambda *_: pytest.fail("measured again"))
    assert image().equal(first)
