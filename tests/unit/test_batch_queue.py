"""Which server pulls which job, by hand: no server, no time, only what the batch knows of both. And what names and
writes its files."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from comfyui_specar.batch import answers, server
from comfyui_specar.batch.copies import copies_of, write_whole
from comfyui_specar.batch.dispatch import Batch, Options, QueuedJob, Worker
from comfyui_specar.batch.jobs import Job
from comfyui_specar.batch.server import Entry


def worker(url, others=0, own=0, answered=1.0, **known):
    given = {f"{url} {n}": None for n in range(own)}
    return Worker(SimpleNamespace(url=url), others=others, answered=answered, given=given, **known)


def job(number, **known):
    return QueuedJob(Job(str(number), {}, 1), {}, "", **known)


def batch_of(workers, jobs):
    batch = Batch(None, [], Options())
    batch.workers = workers
    batch.waiting.extend(jobs)
    return batch


def pulled(workers, jobs):
    """The jobs of every server, by url, and those that wait: the servers pull in this order until none gets more."""
    batch, found = batch_of(workers, jobs), {each.server.url: "" for each in workers}
    more = True
    while more:
        more = False
        for each in workers:
            while each.answered and not each.failures and (queued := batch._pull(each)):
                each.given[queued.job.id] = queued
                found[each.server.url] += queued.job.id
                more = True
    return found, "".join(queued.job.id for queued in batch.waiting)


@pytest.mark.parametrize(
    ("busy", "jobs", "given", "left"),
    [
        ((0, 0), 5, {"a": "01", "b": "23"}, "4"),  # no more than in_flight each
        ((0, 0), 2, {"a": "0", "b": "1"}, ""),  # a busier server leaves the last ones to others
        ((1, 0), 1, {"a": "", "b": "0"}, ""),
        ((1, 0), 4, {"a": "03", "b": "12"}, ""),
        ((2, 0), 4, {"a": "2", "b": "01"}, "3"),  # others filled the first: it gets one when the second is as full
        ((3, 0), 4, {"a": "", "b": "01"}, "23"),
        ((3, 3), 3, {"a": "0", "b": "12"}, ""),  # with no shorter queue anywhere
        ((7,), 3, {"a": "01"}, "2"),
    ],
)
def test_the_least_busy_server_gets_the_next_job(busy, jobs, given, left):
    workers = [worker(url, others) for url, others in zip("ab", busy, strict=False)]
    assert pulled(workers, map(job, range(jobs))) == (given, left)


def test_jobs_that_a_server_has_count():
    assert pulled([worker("a", own=1), worker("b", own=2)], [job(0), job(1)]) == ({"a": "0", "b": ""}, "1")
    assert pulled([worker("a", own=1), worker("b")], [job(0)]) == ({"a": "", "b": "0"}, "")


@pytest.mark.parametrize("unable", [{"excluded": True}, {"failures": 1}])
def test_a_server_that_is_away_or_excluded_gets_nothing(unable):
    workers = [worker("a", **unable), worker("b")]
    assert pulled(workers, map(job, range(3))) == ({"a": "", "b": "01"}, "2")


def test_a_server_that_has_not_answered_yet_is_left_the_last_job_by_a_busier_one_only():
    silent = {"answered": None}
    assert pulled([worker("a", **silent), worker("b")], [job(0)]) == ({"a": "", "b": "0"}, "")
    assert pulled([worker("a", **silent), worker("b", others=1)], [job(0)]) == ({"a": "", "b": ""}, "0")
    assert pulled([worker("a", **silent), worker("b", others=1)], [job(0), job(1)]) == ({"a": "", "b": "0"}, "1")


def test_a_job_avoids_the_servers_that_refused_or_lost_it():
    refused, lost = job(0, refused={"a": "lacks it"}), job(1, lost={"a"})
    assert pulled([worker("a"), worker("b")], [refused, lost]) == ({"a": "", "b": "01"}, "")
    assert pulled([worker("a")], [job(1, lost={"a"})]) == ({"a": "1"}, ""), "there is no other"
    full = [worker("a"), worker("b", own=2)]
    assert pulled(full, [job(0, refused={"a": "lacks it"}), job(1, lost={"a"}), job(2)]) == (
        {"a": "2", "b": ""},
        "01",
    ), "those that wait for the other server hold nobody up"


def test_a_batch_that_ends_gives_nothing():
    batch = batch_of([worker("a")], [job(0)])
    batch.stop()
    assert batch._pull(batch.workers[0]) is None and len(batch.waiting) == 1


def test_a_job_that_no_server_can_make_ends_with_their_reasons():
    ended, batch = [], batch_of([worker("a"), worker("b")], [job(0, refused={"a": "lacks x", "b": "lacks y"})])
    batch._end = lambda worker, queued, found: ended.append(found)
    assert batch._pull(batch.workers[0]) is None and not batch.waiting
    assert ended == [Entry("error", "a: lacks x; b: lacks y")]


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


def test_copies_are_named_after_the_job_in_the_order_of_the_workflow_whatever_ran_first():
    """A preview is no image of a workflow that saves some."""
    prompt = {node: {"class_type": "SaveImage", "inputs": {}} for node in ("20", "3", "7")}
    image = {"subfolder": "", "type": "output"}
    outputs = {node: {"images": [{**image, "filename": f"{node}.png"}]} for node in ("5.0.1", "7", "3", "20")}
    outputs["9"] = {"images": [{"filename": "preview.png", "type": "temp"}]}
    files = server.entry(answers.read_answer(answers.Ended, {"outputs": outputs}), prompt).files
    assert [file["node"] for file in files] == ["20", "3", "7", "5.0.1"]
    names = [{"filename": name} for name in ("a.png", "b.json", "c.png", "d.PNG", "e.png", "f")]
    found = [path.name for path in copies_of(names, Path("x/job"))]
    assert found == ["job.png", "job.json", "job.2.png", "job.3.PNG", "job.4.png", "job"]


@pytest.mark.parametrize(
    "name", ["a." + 300 * "b", "a.p/ng", "a.\\..\\x", "a..", ".", "", "a.\N{FULLWIDTH SOLIDUS}", "a.nul:x", "a.\n"]
)
def test_a_server_chooses_no_more_of_a_copys_name_than_a_short_ending(name):
    [path] = copies_of([{"filename": name, "node": "9"}], Path("out/job"))
    assert path.parent == Path("out") and re.fullmatch(r"job(\.\w{1,16})?", path.name, re.ASCII)
