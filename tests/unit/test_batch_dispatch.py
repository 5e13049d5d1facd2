"""Batches on servers that are slow, busy, silent, dying or refusing, and batches that crash: what matters is that every
job has exactly one image in the end."""

import asyncio
import gc
import json
import random
import socket
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from comfyui_specar.batch import dispatch, journal, server
from comfyui_specar.batch.dispatch import Batch, Options
from comfyui_specar.batch.jobs import Job
from comfyui_specar.limits import replacing as files
from comfyui_specar.tests.support.fake_comfy import (
    QUICK,
    WORKFLOW,
    Clock,
    FakeComfy,
    asynchronous,
    jobs_of,
    lines,
    run_batch,
    until,
    without_limits,
)
from comfyui_specar.tests.support.patience import PATIENCE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

LOST = 0.05  # seconds after which the jobs of a server that has ended go to others ...
SILENT = 0.2  # ... and those of one that only says nothing


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> Clock:
    """The clock of every batch, and no limits of real time."""
    without_limits(monkeypatch)
    clock = Clock()
    monkeypatch.setattr(dispatch, "time", clock)
    return clock


@pytest.fixture
def silent(monkeypatch) -> set[str]:
    """Urls of servers that do not answer."""
    return silenced(monkeypatch)


def silenced(patch: pytest.MonkeyPatch) -> set[str]:
    """Urls of servers that do not answer while this is patched."""
    ask, silent = server.Server._request, set()

    @asynccontextmanager
    async def request(self, *given, **named):
        if self.url in silent:
            raise server.ServerAwayError("no answer")
        async with ask(self, *given, **named) as reply:
            yield reply

    patch.setattr(server.Server, "_request", request)
    return silent


def given_back(batch: Batch) -> bool:
    """Have the jobs of its first server been put back into the queue?"""
    given = batch.workers[0].given.values()
    return bool(given) and all(queued in batch.waiting or not queued.prompt_id for queued in given)


async def abandon(path: Path, one: FakeComfy, jobs: list[Job]) -> set[str | None]:
    """A run that ends as by kill -9 when its server has two of its jobs. Returns the ids of their prompts."""
    batch = asyncio.ensure_future(run_batch(path, [one], jobs))
    await asyncio.wait_for(until(lambda: one.running and one.pending), PATIENCE)
    batch.cancel()
    await asyncio.gather(batch, return_exceptions=True)
    return {one.running, *(prompt_id for prompt_id, _ in one.pending)}


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the batch has logged, and not what asyncio says of something else."""
    return [record.getMessage() for record in caplog.records if record.name == dispatch.__name__]


def jobs_drawn(*servers: FakeComfy) -> Counter:
    return Counter(name.removeprefix("p_").split(".")[0] for one in servers for name in one.drawn)


def assert_each_once(path: Path, jobs: list[Job], *servers: FakeComfy) -> None:
    assert Counter(record["id"] for record in lines(path)) == Counter(job.id for job in jobs)
    assert {record["status"] for record in lines(path)} == {"success"}
    assert jobs_drawn(*servers) == Counter(job.id for job in jobs)


@asynchronous
async def test_a_result_has_files_seconds_and_each_trace_once(tmp_path):
    async with FakeComfy() as one:
        journal_of = await run_batch(tmp_path / "r.jsonl", [one], jobs_of(1))
        assert one.history == {}  # the server need not keep it
        [record] = lines(tmp_path / "r.jsonl")
        assert (
            record
            == journal_of.results["j0"]
            == {
                "id": "j0",
                "status": "success",
                "overrides": {"seed": 0},
                "server": one.url,
                "attempt": 1,
                "prompt_id": journal_of.prompt_id("j0", 1),
                "seconds": 0.25,
                "error": "",
                "files": [{"filename": "p_j0_00001_.png", "subfolder": "", "type": "output", "node": "9"}],
                "copies": [],
                "traces": [{"node": "3", "method": "sjd", "target_passes": 5}],
                "warnings": [],
                "versions": {"comfyui": "0.1", "torch": "2.0"},
                "ended": record["ended"],
            }
        )
        assert one.drawn == ["p_j0"]
        one.says["system_stats"] = lambda _answer: web.Response(status=404)
        assert (await run_batch(tmp_path / "s.jsonl", [one], jobs_of(1))).results["j0"]["versions"] == {}


@pytest.mark.parametrize(
    ("answered", "given", "patience"),
    [
        (False, None, dispatch.NEVER_ANSWERED_SECONDS),
        (True, None, dispatch.GIVE_UP_SECONDS),  # where a server once answered
        (False, 60.0, 60.0),
    ],
)
@asynchronous
async def test_without_a_server_it_says_how_to_get_one_waits_and_can_go_on(
    tmp_path, clock, caplog, answered, given, patience
):
    one, jobs = FakeComfy(), jobs_of(3)
    options = Options(poll=QUICK.poll, grace=QUICK.grace, patience=given)
    if answered:
        await one.start()
        one.ends = lambda: not one.drawn

    async def wait(batch):
        if answered:
            await until(lambda: one.drawn and one.running)
            await one.die()
        await until(lambda: len(said(caplog)) > 1)  # at once
        await clock.away(batch, patience - 1)
        noticed = batch.workers[0].failures
        await until(lambda: batch.workers[0].failures > noticed + 1)
        assert not batch.stopping
        clock.now += 2

    await run_batch(tmp_path / "r.jsonl", [one], jobs, options, during=wait)
    first, second, *_, last = said(caplog)
    assert answered or all(part in first for part in (one.url, f"port {one.port}", "main.py", "--server"))
    assert second == f"Waiting up to {patience:g} s for a server." and "given up" in last
    assert len(lines(tmp_path / "r.jsonl")) < 3
    one.ends = lambda: True
    async with one:
        await run_batch(tmp_path / "r.jsonl", [one], jobs)
        assert {record["id"] for record in lines(tmp_path / "r.jsonl")} == {"j0", "j1", "j2"}


@asynchronous
async def test_patience_is_not_lost_while_another_server_works(tmp_path, clock, caplog):
    """However long a job takes there, and however long the other server has been away."""
    async with FakeComfy() as one:
        one.ends, jobs, nobody = lambda: False, jobs_of(2), FakeComfy()

        async def begin(batch):
            await until(lambda: batch.workers and batch.workers[0].failures and one.running)
            clock.now += 10 * QUICK.patience
            await until(lambda failures=batch.workers[0].failures: batch.workers[0].failures > failures + 1)
            one.ends = lambda: True

        await run_batch(tmp_path / "r.jsonl", [nobody, one], jobs, during=begin)
        assert_each_once(tmp_path / "r.jsonl", jobs, one)
        assert not any("given up" in line for line in said(caplog))


def test_a_server_that_never_answers_holds_nobody_up(tmp_path, monkeypatch, caplog):
    """It accepts connections, as one that hangs; at the end nothing is left of asking it."""
    monkeypatch.setattr(dispatch, "CLOSE_SECONDS", 0.01)

    async def check():
        with socket.create_server(("127.0.0.1", 0)) as hung:
            async with FakeComfy() as one:
                servers = [f"http://127.0.0.1:{hung.getsockname()[1]}", one]
                await run_batch(tmp_path / "r.jsonl", servers, jobs_of(2))
                assert_each_once(tmp_path / "r.jsonl", jobs_of(2), one)

    gc.collect()  # what other tests left
    caplog.clear()
    with caplog.at_level("ERROR"):
        asyncio.run(check())
        gc.collect()  # an exception that nobody has looked at is reported when it is thrown away
    assert caplog.messages == []


@asynchronous
async def test_a_server_that_others_keep_busy_is_left_to_them(tmp_path):
    async with FakeComfy() as busy, FakeComfy() as free:
        busy.ends = lambda: False
        busy.pending += [(f"someone's {i}", WORKFLOW) for i in range(5)]
        await run_batch(tmp_path / "r.jsonl", [busy, free], jobs_of(8))
        assert_each_once(tmp_path / "r.jsonl", jobs_of(8), free)


@pytest.mark.parametrize(
    ("text", "error"),
    [("refuse", "Encoder: bad value (text)"), ("half", "Encoder: bad value (text)"), ("fail", "Encoder: no such word")],
)
@asynchronous
async def test_a_job_that_cannot_be_made_fails_once_and_stops_nobody(tmp_path, text, error):
    async with FakeComfy() as one:
        jobs = [Job("bad", {"prompt": text}, 2), *jobs_of(3)]
        for _ in range(2):  # the second run has nothing to do
            await run_batch(tmp_path / "r.jsonl", [one], jobs)
            records = {record["id"]: record for record in lines(tmp_path / "r.jsonl")}
            assert len(lines(tmp_path / "r.jsonl")) == 4 and error in records.pop("bad")["error"]
            assert {record["status"] for record in records.values()} == {"success"}
            # What was accepted in part may have been drawn before it was cancelled.
            assert [name for name in one.drawn if name != "p_bad"] == ["p_j0", "p_j1", "p_j2"]


@pytest.mark.parametrize("missing", ["Sampler", "cat"])
@asynchronous
async def test_a_server_that_lacks_a_node_or_file_of_the_workflow_is_set_aside(tmp_path, caplog, missing):
    """Where it is the only one, the batch stops, and no job has failed."""
    async with FakeComfy() as lacking, FakeComfy() as other:
        lacking.lacks, jobs = {missing}, jobs_of(6)
        other.ends = lambda: False  # so that the one that is always idle would get the jobs

        async def go_on(batch):
            await until(lambda: batch.workers and batch.workers[0].excluded)
            other.ends = lambda: True

        await run_batch(tmp_path / "r.jsonl", [lacking, other], jobs, during=go_on)
        assert_each_once(tmp_path / "r.jsonl", jobs, other)
        [line] = said(caplog)
        assert lacking.url in line and "set aside" in line and missing in line

        await run_batch(tmp_path / "s.jsonl", [lacking], jobs)
        assert lines(tmp_path / "s.jsonl") == [] and "--server" in said(caplog)[-1]
        lacking.lacks = set()
        await run_batch(tmp_path / "s.jsonl", [lacking], jobs)
        assert_each_once(tmp_path / "s.jsonl", jobs, lacking)


@asynchronous
async def test_what_a_server_made_of_a_prompt_that_it_refused_in_part_is_no_image_of_the_job(tmp_path, monkeypatch):
    """It was quicker than the cancelling; the next command does not take it for the job's."""
    async with FakeComfy() as one:
        one.lacks, one.partly = {"cat"}, True
        with monkeypatch.context() as patch:
            patch.setattr(server.Server, "cancel", lambda *_given: until(lambda: one.history))
            await run_batch(tmp_path / "r.jsonl", [one], jobs_of(1))
        assert lines(tmp_path / "r.jsonl") == [] and one.history == {}
        one.lacks = set()
        await run_batch(tmp_path / "r.jsonl", [one], jobs_of(1))
        assert [record["attempt"] for record in lines(tmp_path / "r.jsonl")] == [2]


@asynchronous
async def test_a_file_that_a_row_names_is_looked_for_on_every_server(tmp_path):
    async with FakeComfy() as one, FakeComfy() as other:
        one.lacks, other.lacks = {"here", "nowhere"}, {"nowhere"}
        jobs = [Job("bad", {"prompt": "nowhere"}, 1), Job("good", {"prompt": "here"}, 2), *jobs_of(4)]
        await run_batch(tmp_path / "r.jsonl", [one, other], jobs)
        records = {record["id"]: record for record in lines(tmp_path / "r.jsonl")}
        bad = records.pop("bad")
        assert bad["status"] == "error" and one.url in bad["error"] and other.url in bad["error"]
        assert {record["status"] for record in records.values()} == {"success"} and len(records) == 5
        assert any("good" in name for name in other.drawn)


@asynchronous
async def test_jobs_of_a_dying_server_go_to_the_other(tmp_path, clock, caplog):
    """It dies while it generates its second image."""
    async with FakeComfy() as mortal, FakeComfy() as other:
        mortal.ends = lambda: not mortal.drawn

        async def kill(batch):
            await until(lambda: mortal.drawn and mortal.running)
            await mortal.die()
            await clock.away(batch, LOST)

        jobs = jobs_of(10)
        await run_batch(tmp_path / "r.jsonl", [mortal, other], jobs, during=kill)
        records = lines(tmp_path / "r.jsonl")
        assert {record["status"] for record in records} == {"success"}
        assert len({record["files"][0]["filename"] for record in records}) == len(records) == 10
        assert not any("Waiting" in line for line in said(caplog))
        assert any("go to servers that answer" in line for line in said(caplog))
        # Only an image that was finished, but not yet fetched, when the server died may have been generated again.
        assert set(jobs_drawn(mortal, other)) == {job.id for job in jobs}
        assert max(jobs_drawn(other).values()) == 1 and jobs_drawn(mortal, other).total() <= 11


@pytest.mark.parametrize("fault", ["restarts", "is missed and restarts", "is silent"])
@asynchronous
async def test_a_server_that_comes_back_gets_its_jobs_again_under_another_name_or_goes_on(
    tmp_path, silent, clock, caplog, fault
):
    """Also where it was away for so long that its jobs were taken back; that is said, and that it is back. Where it was
    only silent, nobody else could begin them, and it has them still."""
    async with FakeComfy() as one:
        one.ends = lambda: False

        async def hurt(batch):
            await until(lambda: one.running and one.pending)  # nothing is on its way there
            if fault == "is silent":
                silent.add(one.url)
            else:
                await one.die()
            if fault != "restarts":
                await clock.away(batch, SILENT)
                await until(lambda: given_back(batch))
            silent.clear()
            if one.dead:
                await one.start()
            one.ends = lambda: True

        await run_batch(tmp_path / "r.jsonl", [one], jobs_of(4), during=hurt)
        assert_each_once(tmp_path / "r.jsonl", jobs_of(4), one)
        assert ("p_j0.try2" in one.drawn) == (fault != "is silent")
        if fault != "restarts":
            waiting, moved, again = said(caplog)[1:]
            assert waiting == "Waiting up to 0.4 s for a server." and again == f"{one.url} answers again."
            assert moved.startswith(one.url) and "jobs (2) wait for a server" in moved


@pytest.mark.parametrize("missed", [False, True])
@asynchronous
async def test_a_job_that_kills_servers_is_given_up(tmp_path, clock, missed):
    async with FakeComfy() as one:
        one.ends = lambda: not one.history  # what is finished is fetched before the server can die

        async def revive(batch):
            while True:
                await until(lambda: one.dead)
                if missed:
                    await clock.away(batch, LOST)
                    await until(lambda: given_back(batch))
                await one.start()

        jobs = [Job("bad", {"prompt": "poison"}, 1), *jobs_of(3)]
        options = Options(retries=2, poll=QUICK.poll, grace=QUICK.grace, patience=QUICK.patience)
        await run_batch(tmp_path / "r.jsonl", [one], jobs, options, during=revive)
        records = {record["id"]: record for record in lines(tmp_path / "r.jsonl")}
        assert records["bad"]["status"] == "lost" and "3 attempts" in records["bad"]["error"]
        assert {record["status"] for job, record in records.items() if job != "bad"} == {"success"}
        assert set(jobs_drawn(one)) == {"j0", "j1", "j2"}  # although each was on the server when it died


def of_another(answer: web.Response) -> web.Response:
    """What a ComfyUI says that has none of our prompts."""
    if not answer.body:
        return answer
    empty = {"queue_running": [], "queue_pending": []} if "queue_running" in json.loads(answer.body) else {}
    return web.json_response(empty)


@pytest.mark.parametrize("turns", ["every request", "every question", "a connection", 0, 1, 2])
@pytest.mark.parametrize("runs", [True, False])
@asynchronous
async def test_behind_a_load_balancer_the_cause_is_said_before_anything_is_generated_again(
    tmp_path, caplog, monkeypatch, turns, runs
):
    """Another ComfyUI answers some questions about what the one has, while a prompt runs there, or has ended."""
    async with FakeComfy() as one, FakeComfy() as other:
        chance, asked, peers, misled = random.Random(turns), Counter(), [], []
        one.ends = lambda: not runs

        def balanced(where: str):
            def says(answer: web.Response) -> web.Response:
                asked[where] += 1
                another = len(one.asked) % 2 if turns == "every request" else asked[where] % 2
                if turns == "a connection":
                    another = peers[-1] == peers[0]  # which is kept as long as there is none to close it
                if type(turns) is int:
                    another = chance.random() < 0.5
                other = of_another(answer)
                wrong = other.body != answer.body and (another or not misled)  # once at least, whatever is asked when
                misled.extend([where] * wrong)
                return other if wrong else answer

            return says

        @web.middleware
        async def before(request, handler):
            peers.append(request.transport.get_extra_info("peername"))
            return await FakeComfy._before(one, request, handler)

        await one.die()
        monkeypatch.setattr(one, "_before", before)
        await one.start()
        one.says = {where: balanced(where) for where in ("queue", "history")}

        async def end(batch):
            await until(lambda: batch.workers and batch.workers[0].excluded)
            one.ends = lambda: True

        await run_batch(tmp_path / "r.jsonl", [one], jobs_of(4), during=end)
        assert max(jobs_drawn(one).values(), default=0) <= 1 and one.most_queued <= 2
        assert {record["status"] for record in lines(tmp_path / "r.jsonl")} <= {"success"}
        assert any(f"{one.url} is set aside" in line and "load balancer" in line for line in said(caplog))
        await run_batch(tmp_path / "r.jsonl", [other], jobs_of(4))
        assert {record["id"] for record in lines(tmp_path / "r.jsonl")} == {job.id for job in jobs_of(4)}


@asynchronous
async def test_cancelling_takes_ours_and_leaves_what_others_queued(tmp_path):
    async with FakeComfy() as one:
        one.ends = lambda: not one.drawn

        async def stop(batch):
            await until(lambda: one.drawn and one.running)
            one.pending.append(("someone's", WORKFLOW))
            batch.stop()

        jobs = jobs_of(6)
        found = await run_batch(tmp_path / "r.jsonl", [one], jobs, during=stop)
        here = {key for key, _ in one.pending} | {one.running}
        assert "someone's" in here and not {entry["prompt_id"] for entry in found.submitted.values()} & here
        assert [(record["id"], record["status"]) for record in lines(tmp_path / "r.jsonl")] == [("j0", "success")]
        one.ends = lambda: True
        await run_batch(tmp_path / "r.jsonl", [one], jobs)
        ours = Counter(job for job, count in jobs_drawn(one).items() for _ in range(count) if job.startswith("j"))
        assert ours == Counter(job.id for job in jobs)


@asynchronous
async def test_results_of_a_server_that_is_no_longer_named_are_fetched_all_the_same(tmp_path):
    async with FakeComfy() as first, FakeComfy() as second:
        first.ends = lambda: False
        jobs = jobs_of(4)
        await abandon(tmp_path / "r.jsonl", first, jobs)
        first.ends = lambda: True
        await run_batch(tmp_path / "r.jsonl", [second], jobs)
        assert_each_once(tmp_path / "r.jsonl", jobs, first, second)
        assert first.drawn and second.drawn


@asynchronous
async def test_a_row_that_was_changed_while_its_server_had_it_is_run_as_it_is_now(tmp_path):
    async with FakeComfy() as one:
        one.ends, jobs = lambda: False, jobs_of(2)
        outdated = await abandon(tmp_path / "r.jsonl", one, jobs)
        one.ends = lambda: one.running not in outdated
        changed = [Job(job.id, {"seed": 7}, job.line) for job in jobs]
        await run_batch(tmp_path / "r.jsonl", [one], changed)
        assert [record["overrides"] for record in lines(tmp_path / "r.jsonl")] == [{"seed": 7}] * 2
        assert sorted(one.drawn) == ["p_j0.try2", "p_j1.try2"]


def test_an_image_that_another_program_holds_open_is_waited_for_and_then_costs_that_job_alone(tmp_path, locked):
    """j1.png is free again after a moment, j2.png never is."""
    attempts = locked({"j1.png": 2, "j2.png": 99})

    async def check():
        async with FakeComfy() as one:
            options = Options(poll=0.005, download=tmp_path / "out")
            return await run_batch(tmp_path / "r.jsonl", [one], jobs_of(4), options)

    results = asyncio.run(check()).results
    done = dict.fromkeys(("j0", "j1", "j3"), "success")
    assert {job: record["status"] for job, record in results.items()} == done | {"j2": "error"}
    assert "j2.png" in results["j2"]["error"] and "another program" in results["j2"]["error"]
    assert results["j2"]["copies"] == [] and results["j1"]["copies"] == [str(tmp_path / "out/j1.png")]
    assert attempts == {"j0.png": 1, "j1.png": 3, "j2.png": 1 + len(files.PAUSES), "j3.png": 1}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["j0.png", "j1.png", "j3.png"]


class CrashError(BaseException):
    """As abrupt as kill -9, inside of this process."""


class Fate:
    """Crashes at the n-th step. A step is a line half written, a line written, a request sent or answered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.left = None
        append, submit, forget = journal.JsonLines.append, server.Server.submit, server.Server.forget

        def torn(lines, record):
            if self.strikes():
                lines.file.write(json.dumps(record).encode()[:-5])
                lines.file.flush()
                raise CrashError
            append(lines, record)
            self.step()

        def around(method):
            async def wrapped(*given):
                self.step()
                answer = await method(*given)
                self.step()
                return answer

            return wrapped

        monkeypatch.setattr(journal.JsonLines, "append", torn)
        monkeypatch.setattr(server.Server, "submit", around(submit))
        monkeypatch.setattr(server.Server, "forget", around(forget))

    def strikes(self) -> bool:
        if self.left is None:
            return False
        self.left -= 1
        return self.left < 0

    def step(self) -> None:
        if self.strikes():
            raise CrashError


ANY_TIME = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=25, deadline=None, suppress_health_check=ANY_TIME)
@given(crashes=st.lists(st.integers(0, 24), min_size=1, max_size=4), number=st.integers(1, 5), two=st.booleans())
def test_after_any_crashes_every_job_has_exactly_one_image(tmp_path_factory, crashes, number, two):
    path = tmp_path_factory.mktemp("batch") / "r.jsonl"

    async def check(fate):
        async with FakeComfy() as one, FakeComfy() as other:
            servers, jobs = [one, other][: 1 + two], jobs_of(number)
            for crash in crashes:
                await crashes_at(crash, fate, path, servers, jobs)
            fate.left = None
            await run_batch(path, servers, jobs)
            assert_each_once(path, jobs, *servers)

    with pytest.MonkeyPatch.context() as patch:
        asyncio.run(check(Fate(patch)))


async def crashes_at(step: int, fate: Fate, path: Path, servers: list, jobs: list[Job]) -> bool:
    """One run of the command, which crashes at this step if it has so many."""
    fate.left = step
    try:
        await run_batch(path, servers, jobs)
    except CrashError:
        return True
    return False


@settings(max_examples=25, deadline=None, suppress_health_check=ANY_TIME)
@given(
    faults=st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from(["dies", "is silent", "loses its history"]), st.integers(0, 3)),
        min_size=1,
        max_size=5,
    )
)
@asynchronous
async def test_whatever_fails_on_two_servers_every_job_has_one_result(tmp_path_factory, faults):
    """One fault after the other, each after so many more images, and over before the next one begins."""
    path, jobs = tmp_path_factory.mktemp("batch") / "r.jsonl", jobs_of(6)
    clock = Clock()

    async with FakeComfy() as one, FakeComfy() as other:

        async def break_and_mend(batch):
            for number, fault, images in faults:
                broken, wanted = (one, other)[number], len(one.drawn) + len(other.drawn) + images
                await until(lambda wanted=wanted: len(one.drawn) + len(other.drawn) >= wanted)
                worker = batch.workers[number]
                if fault == "loses its history":
                    broken.history.clear()
                    continue
                silent.update([broken.url] if fault == "is silent" else [])
                await (broken.die() if fault == "dies" else asyncio.sleep(0))
                await until(lambda worker=worker: worker.failures)
                clock.now += SILENT
                await until(lambda worker=worker, failures=worker.failures: worker.failures > failures)
                silent.clear()
                await (broken.start() if fault == "dies" else asyncio.sleep(0))
                await until(lambda worker=worker: not worker.failures)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatch, "time", clock)
            patch.setattr(dispatch, "CLOSE_SECONDS", 0.01)  # a server that died may still hold a request
            silent = silenced(patch)
            options = Options(poll=0.002, grace=QUICK.grace, patience=100.0, retries=9)
            await run_batch(path, [one, other], jobs, options, during=break_and_mend)
        assert Counter(record["id"] for record in lines(path)) == Counter(job.id for job in jobs)
        assert {record["status"] for record in lines(path)} == {"success"}
