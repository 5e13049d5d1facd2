"""Jobs to servers: each to the least busy one, back into the queue when its server is lost, results as they come."""

import asyncio
import logging
import os
import re
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from ..common.files import FileInUseError, replace
from .jobs import Job, counted
from .journal import Journal, naming
from .maps import MAP, map_of, with_maps
from .overrides import Workflow, fingerprint, named_after
from .server import Entry, Refusal, Server, ServerAwayError

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
WHOLE_SECONDS = 600.0  # of an answer or file: who sends it so slowly keeps others waiting
UNEXPECTED = 2  # answers about our prompts, one after the other, after which a server gets no more of them
GONE = 0.1  # of the grace, where the server has ended: its queue is lost with it
LAST_WORDS = 3.0  # seconds in which the servers are told to forget the last prompts
HELLO = 2.0  # seconds in which all servers are waited for, to find the least busy one
SLOW = 5.0  # seconds: the longest pause before a server is asked again that takes long to answer
PATIENCE = 300.0  # seconds without any server after which a batch gives up ...
FIRST_PATIENCE = 10.0  # ... and where none ever answered: then the address is wrong
ENDING = re.compile(r"\.[A-Za-z0-9]{1,16}")  # of a copy, which a server chooses: .safetensors has 11 letters


@dataclass(frozen=True)
class Options:
    """in_flight: prompts that a server has at a time (with 2 it never waits for the next). retries: how often a job is
    handed out again because its server was lost. grace: seconds after which the jobs of a silent server go to others.
    patience: seconds without any server after which the batch gives up (None: PATIENCE, or FIRST_PATIENCE). download: a
    folder for copies of the files. maps: save and copy acceptance maps, too."""

    in_flight: int = 2
    retries: int = 3
    download: Path | None = None
    grace: float = 20.0
    patience: float | None = None
    poll: float = 0.5
    maps: bool = False


@dataclass(eq=False)
class Work:
    """A job on its way. attempt: how often it was handed out; tries: how often by this process; refused: the servers
    that lack something it names, and what they said; lost: those that got it and did not end it."""

    job: Job
    prompt: Workflow
    fingerprint: str
    attempt: int = 0
    tries: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)


@dataclass
class Lane:
    """A server and what it has of ours: `given` are still to be sent, `sent` are on it, by prompt id. draining: it gets
    no jobs, and is asked only for what it has of them from before."""

    server: Server
    draining: bool = False
    given: deque[Work] = field(default_factory=deque)
    sent: dict[str, Work] = field(default_factory=dict)
    strays: dict[str, Work] = field(default_factory=dict)  # taken back while it was silent
    outdated: list[str] = field(default_factory=list)  # prompts of an earlier run, whose jobs were changed since
    foreign: int = 0
    versions: dict[str, str] | None = None  # None: not asked since it was away
    answered: float | None = None  # when it last did
    failures: int = 0
    unexpected: int = 0  # answers about our prompts that no ComfyUI gives, since one that it does
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def up(self) -> bool:
        return self.answered is not None and not self.failures

    @property
    def unknown(self) -> bool:
        return self.answered is None and not self.failures

    @property
    def own(self) -> int:
        return len(self.given) + len(self.sent)

    @property
    def load(self) -> int:
        return self.own + self.foreign


class Batch:
    """`on_result` is called with the line of every job that ends. `stop()` cancels; `run()` then returns soon."""

    def __init__(
        self,
        journal: Journal,
        urls: list[str],
        options: Options,
        on_result: Callable[[dict[str, Any]], None] = lambda record: None,
    ):
        self.journal, self.urls, self.options, self.on_result = journal, urls, options, on_result
        self.waiting: deque[Work] = deque()
        self.lanes: list[Lane] = []
        self.stopping = False
        self.unfinished = 0
        self.begun = time.monotonic()
        self.over = asyncio.Event()
        self.client = uuid.uuid4().hex

    async def run(self, jobs: list[Job], prompts: dict[str, Workflow]) -> None:
        """Generates all images. Returns when every job has ended, after `stop()`, and with `unfinished` jobs when no
        server answers. Raises OSError where the results cannot be written."""
        async with session_of() as session:
            self._spread(jobs, prompts, session)
            watching = [asyncio.ensure_future(self._watch(lane)) for lane in self.lanes]
            everyone, over = asyncio.gather(*watching), asyncio.ensure_future(self.over.wait())
            try:
                await asyncio.wait([everyone, over], return_when=asyncio.FIRST_COMPLETED)
                if everyone.done():
                    everyone.result()
                else:
                    await asyncio.wait(watching, timeout=LAST_WORDS)
            finally:
                over.cancel()
                for task in watching:
                    task.cancel()
                await asyncio.gather(everyone, *watching, return_exceptions=True)

    def stop(self) -> None:
        self.stopping = True
        self._wake()

    def _wake(self) -> None:
        for lane in self.lanes:
            lane.news.set()

    def _spread(self, jobs: list[Job], prompts: dict[str, Workflow], session: aiohttp.ClientSession) -> None:
        """New jobs into the queue; those that an earlier run handed out, to the server that got them."""
        self.unfinished = len(jobs)
        lanes = {server.url: Lane(server) for server in (Server(session, url) for url in self.urls)}
        for job in jobs:
            work = Work(job, prompts[job.id], fingerprint(prompts[job.id]))
            earlier = self.journal.queued.get(job.id)
            known = self.journal.results.get(job.id)
            if earlier:
                work.attempt = earlier[-1]["attempt"]
            if not earlier or (known and known["prompt_id"] == earlier[-1]["prompt_id"]):
                self.waiting.append(work)
                continue
            url, prompt_id = earlier[-1]["server"], earlier[-1]["prompt_id"]
            if self.journal.changed(job.id, work.fingerprint):
                self.waiting.append(work)
                if url in lanes:
                    lanes[url].outdated.append(prompt_id)
                continue
            lane = lanes.setdefault(url, Lane(Server(session, url), draining=True))
            lane.sent[prompt_id] = work
        self.lanes = list(lanes.values())

    async def _watch(self, lane: Lane) -> None:
        begun = time.monotonic()
        while self.unfinished and not self.stopping and not (lane.draining and not lane.own):
            pause = self.options.poll
            try:
                asked = time.monotonic()
                await self._visit(lane)
                if lane.failures:
                    logger.warning("%s answers%s.", lane.server.url, " again" if lane.answered else "")
                lane.answered, lane.failures = time.monotonic(), 0
                pause = max(pause, min(SLOW, 4 * (lane.answered - asked)))
            except ServerAwayError as error:
                lane.failures, lane.versions = lane.failures + 1, None
                if lane.failures == 1:
                    logger.warning("%s", error)
                    if not self._others(lane):
                        logger.warning("Waiting up to %g s for a server.", self._patience())
                silent = time.monotonic() - (lane.answered or begun)
                if silent > self.options.grace * (GONE if error.gone else 1):
                    self._give_back(lane, silent)
                left = self._patience_left(begun)
                if left <= 0 and not self._others(lane):
                    self._give_up()
                    return
                pause = min(
                    self.options.poll * 2 ** min(lane.failures, 10), self.options.grace, max(left, self.options.poll)
                )
            self._assign()
            if not lane.given or not lane.up:
                try:
                    await asyncio.wait_for(lane.news.wait(), pause)
                except asyncio.TimeoutError:
                    pass
            lane.news.clear()
        if self.stopping:
            await self._cancel(lane)

    def _give_up(self) -> None:
        if not self.stopping:  # other servers may find it out at the same time
            logger.error("No server answers: given up. Start one, or name its address with --server.")
            self.stop()

    async def _visit(self, lane: Lane) -> None:
        """Collects what has ended, hands over what was given to it."""
        if lane.versions is None:
            lane.versions = await lane.server.versions()
        if lane.outdated:
            await lane.server.cancel(lane.outdated)
            lane.outdated.clear()
        running, pending = await lane.server.queue()
        try:
            await self._tend(lane, running | pending)
        except ServerAwayError as error:
            lane.unexpected += error.unexpected
            if lane.unexpected == UNEXPECTED:
                self._set_aside(lane, "its answers about prompts are not those of ComfyUI")
            raise

    async def _tend(self, lane: Lane, here: set[str]) -> None:
        """What is to be done with our prompts; `here`: the ids of all that are on the server."""
        await self._gather_strays(lane, here)
        for prompt_id in [prompt_id for prompt_id in lane.sent if prompt_id not in here]:
            await self._settle(lane, prompt_id)
        lane.foreign = len(here - lane.sent.keys())
        while lane.given and not self.stopping:
            await self._submit(lane, lane.given.popleft())

    async def _gather_strays(self, lane: Lane, here: set[str]) -> None:
        """A server that was silent is back: it goes on with what nobody else has begun, and drops the rest."""
        begun_elsewhere = []
        for prompt_id, work in lane.strays.items():
            if work in self.waiting:
                self.waiting.remove(work)
                lane.sent[prompt_id] = work
            elif prompt_id in here:
                begun_elsewhere.append(prompt_id)
        lane.strays.clear()
        if begun_elsewhere:
            await lane.server.cancel(begun_elsewhere)

    async def _settle(self, lane: Lane, prompt_id: str) -> None:
        """A prompt that is no longer in the queue: it has ended, or the server has lost it."""
        work = lane.sent[prompt_id]
        found = await lane.server.history(prompt_id, self._sent(work))
        interrupted_by_us = found and found.outcome == "interrupted" and not work.tries  # by the run that was stopped
        if not found or interrupted_by_us:
            del lane.sent[prompt_id]
            self._again(work, lane, "was stopped before" if interrupted_by_us else "lost its prompt")
            return
        record = await self._record(lane, work, prompt_id, found)
        lane.unexpected = 0
        del lane.sent[prompt_id]
        self._end(record)
        await lane.server.forget(prompt_id)

    async def _submit(self, lane: Lane, work: Work) -> None:
        work.attempt, work.tries = work.attempt + 1, work.tries + 1
        prompt_id = self.journal.prompt_id(work.job.id, work.attempt)
        self.journal.write_queued(work.job.id, work.fingerprint, work.attempt, lane.server.url)
        lane.sent[prompt_id] = work  # also if the answer is lost: the next visit finds out
        name = work.job.id if work.attempt == 1 else f"{work.job.id}.try{work.attempt}"
        try:
            refused = await lane.server.submit(named_after(self._sent(work), name), prompt_id, self.client)
        except ServerAwayError as error:
            work.tries -= error.unexpected  # which is not the job's fault
            raise
        lane.unexpected = 0
        if refused:
            await lane.server.cancel([prompt_id])  # in case it makes a part of it ...
            await lane.server.forget(prompt_id)  # ... which is not this job's image
            del lane.sent[prompt_id]
            if refused.elsewhere:
                self._elsewhere(lane, work, refused)
            else:
                self._end(self._line(lane, work, prompt_id, Entry("error", 0.0, refused.reason)))

    def _elsewhere(self, lane: Lane, work: Work, refused: Refusal) -> None:
        """The server lacks something, or breaks. Where it lacks what the row does not name, it lacks it for all jobs,
        and being always idle it would get them all."""
        work.refused[lane.server.url] = refused.reason
        work.tries -= 1
        if not {str(value) for value in work.job.overrides.values()}.issuperset(refused.missing):
            self._set_aside(lane, refused.reason)
        self.waiting.appendleft(work)
        self._wake()

    def _set_aside(self, lane: Lane, why: str) -> None:
        lane.draining = True
        while lane.given:
            self.waiting.appendleft(lane.given.pop())
        logger.warning("%s is set aside in this batch: %s", lane.server.url, why)
        if all(lane.draining for lane in self.lanes):
            logger.error(
                "No server is left that can run this workflow. Add what is missing to one, or name another "
                "with --server; then the same command goes on."
            )

    def _sent(self, work: Work) -> Workflow:
        """What a server gets of a job. The fingerprint is that without maps."""
        return with_maps(work.prompt) if self.options.maps else work.prompt

    async def _record(self, lane: Lane, work: Work, prompt_id: str, found: Entry) -> dict[str, Any]:
        record = self._line(lane, work, prompt_id, found)
        if not self.options.download or found.outcome != "success":
            return record
        paths = copies_of(found.files, self.options.download / work.job.id)
        copies, error = await copied(lane.server, list(zip(found.files, paths, strict=True)))
        return record | {"copies": copies} | ({"status": "error", "error": error} if error else {})

    def _line(self, lane: Lane, work: Work, prompt_id: str, found: Entry) -> dict[str, Any]:
        error = "interrupted by someone else" if found.outcome == "interrupted" else found.error
        return {
            "id": work.job.id,
            "status": found.outcome,
            "overrides": work.job.overrides,
            "server": lane.server.url,
            "prompt_id": prompt_id,
            "attempt": work.attempt,
            "seconds": round(found.seconds, 3),
            "files": found.files,
            "traces": found.traces,
            "warnings": found.warnings,
            "error": error,
            "versions": lane.versions or {},
        }

    def _end(self, record: dict[str, Any]) -> None:
        self.journal.write_result(record)
        self.unfinished -= 1
        self.on_result(record)
        if not self.unfinished:
            self.over.set()
            self._wake()

    def _again(self, work: Work, lane: Lane, why: str) -> None:
        logger.info("%s %s: %s", lane.server.url, why, work.job.id)
        work.lost.add(lane.server.url)
        if work.tries > self.options.retries:
            prompt_id = self.journal.prompt_id(work.job.id, work.attempt)
            error = f"given up after {counted(work.tries, 'attempt')}: its server was lost, last {lane.server.url}"
            self._end(self._line(lane, work, prompt_id, Entry("lost", 0.0, error)))
        else:
            self.waiting.appendleft(work)

    def _give_back(self, lane: Lane, silent: float) -> None:
        """The server has been silent for so many seconds: its jobs go to others, those first that it had not come to:
        the job that was running may be what kills servers, and should not take the same neighbours with it each time.
        """
        if lane.own:
            where = "go to servers that answer" if self._others(lane) else "wait for a server that answers"
            logger.warning(
                "%s has not answered for %.0f s. Its jobs (%d) %s.", lane.server.url, silent, lane.own, where
            )
        for prompt_id in list(lane.sent):
            work = lane.strays[prompt_id] = lane.sent.pop(prompt_id)
            self._again(work, lane, "is silent")
        while lane.given:
            self.waiting.appendleft(lane.given.pop())

    def _others(self, lane: Lane) -> list[Lane]:
        """The other servers that answer, or may yet."""
        return [
            other
            for other in self.lanes
            if other is not lane and (other.up or other.unknown) and not (other.draining and not other.own)
        ]

    def _patience_left(self, begun: float) -> float:
        """Seconds until the batch gives up, if no server answers before."""
        answers = (lane.answered for lane in self.lanes if lane.answered)
        return max(answers, default=begun) + self._patience() - time.monotonic()

    def _patience(self) -> float:
        if self.options.patience is not None:
            return self.options.patience
        return PATIENCE if any(lane.answered for lane in self.lanes) else FIRST_PATIENCE

    def _assign(self) -> None:
        """Each waiting job to the least busy server that has what it names, and to one that has lost it only if there
        is no other. Where others have filled a server's queue, it gets jobs only if no server has a shorter one."""
        lanes = [lane for lane in self.lanes if not lane.draining]
        if self.stopping or (any(lane.unknown for lane in lanes) and time.monotonic() - self.begun < HELLO):
            return  # which is the least busy one?
        for work in list(self.waiting):
            able = [lane for lane in lanes if lane.up and lane.server.url not in work.refused]
            ready = [lane for lane in able if lane.server.url not in work.lost] or able
            least = min((lane.load for lane in ready), default=0)
            free = [
                lane
                for lane in ready
                if lane.own < self.options.in_flight and lane.load <= max(least, self.options.in_flight - 1)
            ]
            if free:
                lane = min(free, key=lambda lane: (lane.load, lane.own))
                self.waiting.remove(work)
                lane.given.append(work)
                lane.news.set()
            elif not work.refused and not work.lost:
                return  # nor is there a server for those after it
            elif not ready and any(lane.up for lane in lanes):
                self.waiting.remove(work)
                self._nowhere(work)

    def _nowhere(self, work: Work) -> None:
        """Every server that answers lacks something that this row names."""
        lane = next(lane for lane in self.lanes if lane.server.url in work.refused)
        prompt_id = self.journal.prompt_id(work.job.id, work.attempt)
        error = "; ".join(f"{url}: {reason}" for url, reason in work.refused.items())
        self._end(self._line(lane, work, prompt_id, Entry("error", 0.0, error)))

    async def _cancel(self, lane: Lane) -> None:
        """Takes our prompts from the server, and keeps the images that were finished all the same."""
        deadline = time.monotonic() + self.options.grace
        try:
            await lane.server.cancel(list(lane.sent))
            while lane.sent and time.monotonic() < deadline:
                here = set().union(*await lane.server.queue())
                for prompt_id in [prompt_id for prompt_id in lane.sent if prompt_id not in here]:
                    work = lane.sent[prompt_id]
                    found = await lane.server.history(prompt_id, self._sent(work))
                    if found and found.outcome != "interrupted":
                        self._end(await self._record(lane, work, prompt_id, found))
                    del lane.sent[prompt_id]
                await asyncio.sleep(self.options.poll)
        except ServerAwayError as error:
            logger.warning("%s", error)


async def copied(
    server: Server, copies: list[tuple[dict[str, str], Path]], replacing: bool = True
) -> tuple[list[str], str]:
    """Copies files to paths; returns the paths that succeeded, and what is wrong with another. replacing: files that
    are there already; otherwise those must be the same. Raises ServerAwayError."""
    done, error = [], ""
    for file, path in copies:
        content = await server.fetch(file)
        if content is None:
            error = f"{server.url} no longer has {file['filename']}"
        elif not replacing and path.exists() and path.read_bytes() != content:
            error = f"{path} is there already and is not of this batch: choose another --out"
        else:
            try:
                write_whole(path, content)
                done.append(str(path))
            except FileInUseError as held:  # the others go on
                error = f"{path} could not be replaced: {held.strerror}"
    return done, error


async def fetch_missing(journal: Journal, jobs: list[Job], out: Path, urls: list[str]) -> dict[str, str]:
    """Copies of jobs that were done without them, or whose copies are gone; returns job id -> why it has not all. urls:
    of servers, for those that need a login."""
    problems: dict[str, str] = {}
    away: dict[str, str] = {}  # servers
    async with session_of() as session:
        servers = {server.url: server for server in (Server(session, url) for url in urls)}
        for job in jobs:
            record = journal.results[job.id]
            files, url = record.get("files", []), record.get("server", "")
            copies = list(zip(files, copies_of(files, out / job.id), strict=True))
            ours = {Path(copy).resolve() for copy in record.get("copies", [])}
            missing = [(file, path) for file, path in copies if not (path.exists() and path.resolve() in ours)]
            if not missing:
                continue
            error = away.get(url)
            if not error:
                try:
                    _, error = await copied(servers.get(url) or Server(session, url), missing, replacing=False)
                except (ServerAwayError, ValueError) as gone:  # or its line has no address
                    error = away[url] = str(gone)
            if error:
                problems[job.id] = error
            else:
                journal.write_result(record | {"copies": [str(path) for _, path in copies]})
    return problems


def session_of() -> aiohttp.ClientSession:
    """A session for servers that compute, and may be slow to answer."""
    timeout = aiohttp.ClientTimeout(total=WHOLE_SECONDS, sock_connect=CONNECT_SECONDS, sock_read=ANSWER_SECONDS)
    return aiohttp.ClientSession(timeout=timeout)


def copies_of(files: list[dict[str, str]], stem: Path) -> list[Path]:
    """A path for every file: job.png, job.2.png, job.json, ...; for a map (see maps.py) that beside its image. They
    differ in more than capitals, and of the server's names they have a short ending at most."""
    paths: list[Path] = []
    images: dict[str, list[Path]] = {}  # of a node, those whose map has not come yet
    numbers: Counter[str] = Counter()  # of copies by ending
    for file in files:
        node, (_, dot, ending) = file.get("node", ""), file["filename"].rpartition(".")
        drawn = images.get(node.removesuffix(MAP)) if node.endswith(MAP) else None
        if drawn and (path := map_of(drawn.pop(0))) not in paths:
            paths.append(path)
            continue
        suffix = dot + ending if ENDING.fullmatch(dot + ending) else ""
        numbers[suffix.lower()] += 1
        number = numbers[suffix.lower()]
        paths.append(stem.with_name(stem.name + (f".{number}" if number > 1 else "") + suffix))
        images.setdefault(node, []).append(paths[-1])
    return paths


def write_whole(path: Path, content: bytes) -> None:
    """Write a file with all its bytes or not at all. Raises FileInUseError where it cannot be replaced, OSError where
    nothing can be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        with naming(path), part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        replace(part, path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise
