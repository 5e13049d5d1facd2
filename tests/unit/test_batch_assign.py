"""Which server gets a job, by hand: no server, no time, only what the batch knows of both. And what names and writes
its files."""

import hashlib
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from comfyui_specar.batch import cli
from comfyui_specar.batch.dispatch import HELLO, Batch, Lane, Options, Work, write_whole
from comfyui_specar.batch.jobs import Job, automatic_id
from comfyui_specar.batch.journal import naming


def lane(url, foreign=0, sent=0, answered=1.0, **known):
    return Lane(
        SimpleNamespace(url=url),
        foreign=foreign,
        answered=answered,
        sent={f"{url} {n}": None for n in range(sent)},
        **known,
    )


def work(number, **known):
    return Work(SimpleNamespace(id=f"job {number}"), {}, "", **known)


def assigned(lanes, jobs, in_flight=2, begun=None):
    """The jobs of every server, by url, and those that wait."""
    batch = Batch(None, [], Options(in_flight=in_flight))
    batch.lanes, batch.begun = lanes, time.monotonic() if begun is None else begun
    batch.waiting.extend(jobs)
    batch._assign()
    given = {lane.server.url: [work.job.id[4:] for work in lane.given] for lane in lanes}
    assert all(lane.news.is_set() == bool(lane.given) for lane in lanes)
    return given, [work.job.id[4:] for work in batch.waiting]


@pytest.mark.parametrize(
    ("busy", "jobs", "given", "left"),
    [
        ((0, 0), 5, {"a": "02", "b": "13"}, "4"),  # no more than in_flight each, the emptier one first
        ((1, 0), 4, {"a": "13", "b": "02"}, ""),
        ((2, 0), 4, {"a": "2", "b": "01"}, "3"),  # others filled the first: it gets one when the second is as full
        ((3, 0), 4, {"a": "", "b": "01"}, "23"),
        ((3, 3), 3, {"a": "02", "b": "1"}, ""),  # with no shorter queue anywhere
        ((7,), 3, {"a": "01"}, "2"),
    ],
)
def test_the_least_busy_server_gets_the_next_job(busy, jobs, given, left):
    lanes = [lane(url, foreign) for url, foreign in zip("ab", busy)]
    found = assigned(lanes, [work(number) for number in range(jobs)])
    assert found == ({url: list(numbers) for url, numbers in given.items()}, list(left))


def test_what_a_server_has_of_ours_counts():
    assert assigned([lane("a", sent=1), lane("b", sent=2)], [work(0), work(1)]) == ({"a": ["0"], "b": []}, ["1"])
    assert assigned([lane("a", foreign=1), lane("b", sent=1)], [work(0)]) == ({"a": ["0"], "b": []}, [])


@pytest.mark.parametrize("unable", [{"draining": True}, {"failures": 1}])
def test_a_server_that_is_away_or_left_gets_nothing(unable):
    lanes = [lane("a", **unable), lane("b")]
    assert assigned(lanes, [work(0), work(1), work(2)]) == ({"a": [], "b": ["0", "1"]}, ["2"])


def test_all_servers_are_heard_before_the_first_job_is_given_but_not_for_long():
    jobs = [work(0)]
    assert assigned([lane("a", answered=None), lane("b")], jobs) == ({"a": [], "b": []}, ["0"])
    late = time.monotonic() - HELLO - 1
    assert assigned([lane("a", answered=None), lane("b")], jobs, begun=late) == ({"a": [], "b": ["0"]}, [])
    gone = lane("a", answered=None, failures=1), lane("c", answered=None, draining=True)
    assert assigned([*gone, lane("b")], jobs) == ({"a": [], "b": ["0"], "c": []}, [])


def test_a_job_avoids_the_servers_that_refused_or_lost_it():
    refused, lost = work(0, refused={"a": "lacks it"}), work(1, lost={"a"})
    assert assigned([lane("a"), lane("b")], [refused, lost]) == ({"a": [], "b": ["0", "1"]}, [])
    assert assigned([lane("a")], [work(1, lost={"a"})]) == ({"a": ["1"]}, []), "there is no other"
    full = [lane("a"), lane("b", sent=2)]
    assert assigned(full, [work(0, refused={"a": "lacks it"}), work(1, lost={"a"}), work(2)]) == (
        {"a": ["2"], "b": []},
        ["0", "1"],
    ), "those that wait for the other server hold nobody up"


def test_a_batch_that_ends_gives_nothing():
    batch = Batch(None, [], Options())
    batch.lanes, batch.stopping = [lane("a")], True
    batch.waiting.append(work(0))
    batch._assign()
    assert len(batch.waiting) == 1 and not batch.lanes[0].given


def test_a_job_that_no_server_can_make_ends_with_their_reasons():
    ended, batch = [], Batch(None, [], Options())
    batch.journal = SimpleNamespace(prompt_id=lambda *_: "id")
    batch._line, batch._end = lambda lane, work, prompt_id, entry: entry, ended.append
    batch.lanes = [lane("a"), lane("b")]
    batch.waiting.append(work(0, refused={"a": "lacks x", "b": "lacks y"}))
    batch._assign()
    assert not batch.waiting and len(ended) == 1
    assert (ended[0].outcome, ended[0].seconds, ended[0].error) == ("error", 0, "a: lacks x; b: lacks y")


def test_a_row_without_an_id_has_that_of_its_number_and_values_in_any_order():
    """It must stay: a batch that goes on finds its results by it."""
    wanted = "0003-" + hashlib.sha256('{"a": "\u00e4", "b": 1}'.encode()).hexdigest()[:8]
    assert automatic_id(3, {"b": 1, "a": "\u00e4"}) == automatic_id(3, {"a": "\u00e4", "b": 1}) == wanted
    assert automatic_id(3, {"a": "\udc80"}) != automatic_id(3, {"a": "\udc81"}), "no text is refused"


def test_a_file_is_written_whole_into_folders_that_are_made(tmp_path, monkeypatch):
    path, synced = tmp_path / "one/two/image.png", []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size) or real(number))
    for content in (b"first", b"again, and longer"):
        write_whole(path, content)
        assert path.read_bytes() == content and synced.pop() == len(content), "on the disk before it has its name"
    assert [each.name for each in path.parent.iterdir()] == ["image.png"]
    path.parent.joinpath("other.png").mkdir()
    with pytest.raises(OSError):
        write_whole(path.parent / "other.png", b"there is a folder of this name")
    assert sorted(each.name for each in path.parent.iterdir()) == ["image.png", "other.png"]


@pytest.mark.parametrize(("cancelled", "code"), [(True, cli.CANCELLED), (False, cli.FAILED)])
@pytest.mark.parametrize("shown", [True, False])
def test_the_bar_moves_with_every_job_and_the_end_counts_them(monkeypatch, capsys, shown, cancelled, code):
    moved, jobs = [], [Job(name, {}, 1) for name in "abcd"]
    results = {"a": {"status": "success"}, "b": {"status": "error", "error": "before"}}
    journal = SimpleNamespace(results=results, path="r.jsonl", done=lambda name: results[name]["status"] == "success")

    class Bar:
        disable = not shown

        def __init__(self, total, initial, **_):
            moved.append((initial, total))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def update(self):
            moved.append(1)

        @staticmethod
        def write(text, file=None, **_):
            print(text, file=file)

    def work(on_result):
        for record in (
            {"id": "c", "status": "success", "error": "", "warnings": ["odd"]},
            {"id": "d", "status": "error", "error": "why", "warnings": [], "server": "s"},
        ):
            results[record["id"]] = record
            on_result(record)
        return cancelled

    monkeypatch.setattr(cli, "tqdm", Bar)
    assert cli.followed(journal, jobs, jobs[2:], work, several=True) == code
    assert moved == [(2, 4), 1, 1]
    said = capsys.readouterr().err
    assert "b: error before: before" in said.replace("failed", "error") and "c: warning: odd" in said
    assert "d on s: why" in said and "2 of 4 jobs done, 2 failed" in said and "0 still to do" in said
    assert ("c: done (3 of 4 jobs ended)" in said) == (not shown) == ("(4 of 4 jobs ended)" in said)


@pytest.mark.parametrize(("own", "named"), [(None, "results.jsonl"), ("other", "other")])
def test_a_full_disk_is_an_error_with_the_name_of_the_file(own, named):
    with pytest.raises(OSError) as full, naming(Path("results.jsonl")):
        raise OSError(28, "No space left on device", own)
    assert full.value.filename == named
