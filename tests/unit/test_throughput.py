"""The throughput benchmark: what it counts, and that its processes generate at the same time and end with an error."""

import json
import queue

import pytest
from comfyui_specar.tools.benchmarks import throughput


def test_a_row_counts_all_processes_and_the_table_has_every_layout(capsys):
    measured = [(10.0, 14.0, 60.0), (11.0, 18.0, 64.0)]
    row = throughput.row("2x1", "sjd", 4, 6, measured)
    assert row == {
        "layout": "2x1",
        "method": "sjd",
        "batch": 4,
        "pictures": 16,
        "seconds_per_picture": 0.5,
        "seconds_until_there": 4.0,
        "passes": 62.0,
    }
    alone = throughput.row("1x1", "sjd", 1, 2, [(0.0, 3.0, 50.0)])
    assert alone["seconds_per_picture"] == alone["seconds_until_there"] == 1.5
    report = {
        "device": "cpu",
        "machine": {"gpu": None, "processor": "P", "torch": "2"},
        "commit": "c",
        "rows": [alone, row],
    }
    assert throughput.table(report).splitlines()[6:] == [
        "| batch | passes | 1x1 | 2x1 |",
        "| --- | --- | --- | --- |",
        "| 1 | 50 | 1.50 (1.5) |  |",
        "| 4 | 62 |  | 0.50 (4.0) |",
    ]


class Together:
    def __init__(self):
        self.waited, self.aborted = 0, False

    def wait(self, _seconds):
        self.waited += 1

    def abort(self):
        self.aborted = True


def test_a_process_measures_every_point_together_with_the_others(monkeypatch):
    drawn = []
    monkeypatch.setattr(throughput, "Worker", lambda *given: given and Drawer(drawn))
    together, answers = Together(), queue.Queue()
    throughput.work(1, "default", "cpu", 1, [("next_token", 1), ("sjd", 4)], 5, together, answers)
    assert drawn == [
        ("next_token", 1, 0),
        *(("next_token", 1, n) for n in range(1, 6)),
        ("sjd", 1, 0),
        ("sjd", 4, 1),
        ("sjd", 4, 2),
    ]
    assert together.waited == 2 and [answers.get()[1:3] for _ in range(2)] == [("next_token", 1), ("sjd", 4)]
    with pytest.raises(ZeroDivisionError):
        throughput.work(0, "default", "cpu", 1, [("next_token", 0)], 5, together, answers)
    assert together.aborted and isinstance(answers.get(), ZeroDivisionError)


class Drawer:
    def __init__(self, drawn):
        self.drawn = drawn

    def draw(self, *what):
        self.drawn.append(what)
        return 60.0


def test_the_command_measures_the_bundled_model(monkeypatch, tmp_path, capsys):
    out = tmp_path / "t.json"
    monkeypatch.setattr(
        "sys.argv",
        [
            "throughput",
            "--layouts",
            "1x1",
            "--methods",
            "sjd coupled w16",
            "--batches",
            "2",
            "--pictures",
            "1",
            "--out",
            str(out),
        ],
    )
    throughput.main()
    report = json.loads(out.read_text(encoding="utf-8"))
    [row] = report["rows"]
    assert row["pictures"] == 2 and 0 < row["seconds_per_picture"] < row["seconds_until_there"]
    assert 256 / 16 <= row["passes"] < 256 and "| 2 |" in out.with_suffix(".md").read_text(encoding="utf-8")
