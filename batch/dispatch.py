"""One queue of jobs, from which every ComfyUI server pulls. A server that fails or is silent gives its jobs back."""

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from .copies import NO_FILE, copied, copies_of
from .jobs import Job, count_of
from .journal import Journal
from .maps import with_maps
from .overrides import Workflow, fingerprint, name_files
from .server import Entry, Server, ServerAwayError, open_session

logger = logging.getLogger(__name__)

GIVE_UP_SECONDS = 300.0  # default of --patience: seconds without any server after which a batch gives up ...
NEVER_ANSWERED_SECONDS = 10.0  # ... and where none ever answered: then the address is wrong
MAX_UNEXPECTED = 2  # successive answers about our prompts that are not ComfyUI's, after which a server is excluded
GONE_GRACE = 0.1  # of the grace, where nobody listens any more: the server has ended, and its queue with it
LONGEST_PAUSE = 5.0  # seconds between two visits to a server that does not answer
SEVERAL = (
    "another ComfyUI answers there, too (a load balancer?): only some answers know a job that it took. Name the "
    "address of each with --server"
)
CLOSE_SECONDS = 3.0  # for requests that are under way when the last job has ended


@dataclass(frozen=True)
class Options:
    """How a batch uses its servers.

    in_flight: prompts that a server has at a time; with 2 it never waits for the next. retries: how often a job whose
    server was lost is queued again. grace: seconds after which a silent server gives its jobs back. patience: seconds
    without any server after which the batch gives up (None: GIVE_UP_SECONDS, or NEVER_ANSWERED_SECONDS). poll: seconds
    between two visits to a server. download: a folder for copies of the files. maps: save and copy acceptance maps,
    too. token: for servers whose address has no login."""

    in_flight: int = 2
    retries: int = 3
    download: Path | None = None
    grace: float = 20.0
    patience: float | None = None
    poll: float = 0.5
    maps: bool = False
    token: str = field(default="", repr=False)


@dataclass(eq=False)
class QueuedJob:
    """A job until it ends. prompt_id: of its last submission; "" where none counts. attempt: how often it was
    submitted, tries: by this process. refused: servers that lack something it names, and what they said. lost: servers
    that got it and did not end it."""

    job: Job
    prompt: Workflow
    fingerprint: str
    prompt_id: str = ""
    attempt: int = 0
    tries: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)

    def to_send(self, maps: bool) -> Workflow:
        """The prompt as a server gets it. The fingerprint is that without maps."""
        return with_maps(self.prompt) if maps else self.prompt


@dataclass(eq=False)
class Worker:
    """A server, and the jobs that it was given, by prompt id. A prompt that is not the last one of its job is outdated.
    excluded: it gets no more jobs. others: prompts of other clients that it has. versions: None until it is asked.
    answered: when it last did. failures: since then. unexpected: see MAX_UNEXPECTED."""

    server: Server
    excluded: bool = False
    given: dict[str, QueuedJob] = field(default_factory=dict)
    others: int = 0
    versions: dict[str, str] | None = None
    answered: float | None = None
    failures: int = 0
    unexpected: int = 0

    @property
    def load(self) -> int:
        return len(self.given) + self.others


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
        self.waiting: deque[QueuedJob] = deque()
        self.workers: list[Worker] = []
        self.unfinished = 0
        self.stopping = False
        self.over = asyncio.Event()
        self.begun = time.monotonic()
        self.client = uuid.uuid4().hex

    async def run(self, jobs: list[Job], prompts: dict[str, Workflow]) -> None:
        """Generates all images. Returns when every job has ended, after `stop()`, and with `unfinished` jobs when no
        server answers. Raises OSError where the results cannot be written."""
        async with open_session() as session:
            self._fill(jobs, prompts, session)
            tasks = [asyncio.ensure_future(self._serve(worker)) for worker in self.workers if jobs]
            everyone, over = asyncio.gather(*tasks), asyncio.ensure_future(self.over.wait())
            try:
                await asyncio.wait([everyone, over], return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait([everyone], timeout=None if self.stopping else CLOSE_SECONDS)
                if everyone.done():
                    everyone.result()
            finally:
                for task in (over, *tasks):
                    task.cancel()
                await asyncio.gather(everyone, *tasks, return_exceptions=True)

    def stop(self) -> None:
        """Cancels the batch: the servers' visits end, and they are asked to drop our prompts."""
        self.stopping = True
        self.over.set()

    def _fill(self, jobs: list[Job], prompts: dict[str, Workflow], session: aiohttp.ClientSession) -> None:
        """Puts jobs into the queue, except those that an earlier run gave to a server and that have no result yet."""
        self.unfinished = len(jobs)
        servers = [Server(session, url, self.options.token) for url in self.urls]
        workers = {server.url: Worker(server) for server in servers}
        for job in jobs:
            queued = QueuedJob(job, prompts[job.id], fingerprint(prompts[job.id]))
            if not (last := self.journal.submitted.get(job.id)):
                self.waiting.append(queued)
                continue
            queued.attempt, url, prompt_id = last["attempt"], last["server"], last["prompt_id"]
            underway = self.journal.underway(job.id)
            if not underway or self.journal.changed(job.id, queued.fingerprint):
                self.waiting.append(queued)
            else:
                queued.prompt_id = prompt_id
                workers.setdefault(url, Worker(Server(session, url), excluded=True))
            if underway and url in workers:
                workers[url].given[prompt_id] = queued
        self.workers = list(workers.values())

    async def _serve(self, worker: Worker) -> None:
        """Visits the server until the batch is over, or it is excluded and has no job of ours."""
        pause = self.options.poll
        while not self.over.is_set() and (worker.given or not worker.excluded):
            try:
                await self._visit(worker)
                pause = self.options.poll
            except ServerAwayError as error:
                self._note_failure(worker, error)
                pause = min(2 * pause, LONGEST_PAUSE)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.over.wait(), pause)
        if self.stopping and _not_given_back(worker, self.waiting):
            await self._cancel(worker)

    async def _visit(self, worker: Worker) -> None:
        """Collects results, then submits jobs."""
        if worker.versions is None:
            worker.versions = await worker.server.versions()
        here = await worker.server.queue()
        try:
            await self._collect(worker, here)
            if worker.failures and not worker.excluded:
                logger.warning("%s answers%s.", worker.server.url, " again" if worker.answered else "")
            worker.answered, worker.failures = time.monotonic(), 0
            while queued := self._pull(worker):
                await self._submit(worker, queued)
        except ServerAwayError as error:
            worker.unexpected += error.unexpected
            if worker.unexpected == MAX_UNEXPECTED:
                self._exclude(worker, "its answers about prompts are not those of ComfyUI")
            raise

    def _note_failure(self, worker: Worker, error: ServerAwayError) -> None:
        """After a while the server's jobs go to others; after a longer one without any server the batch is stopped."""
        worker.failures, worker.versions = worker.failures + 1, None
        others = any(
            each is not worker and not each.failures and (each.given or not each.excluded) for each in self.workers
        )
        answers = [each.answered for each in self.workers if each.answered]
        patience = GIVE_UP_SECONDS if answers else NEVER_ANSWERED_SECONDS
        if self.options.patience is not None:
            patience = self.options.patience
        if worker.failures == 1:
            logger.warning("%s", error)
            if not others and not all(each.excluded for each in self.workers):
                logger.warning("Waiting up to %g s for a server.", patience)
        silent = time.monotonic() - (worker.answered or self.begun)
        if silent > self.options.grace * (GONE_GRACE if error.gone else 1):
            self._give_back(worker, silent, others)
        if not others and not self.stopping and time.monotonic() - max(answers, default=self.begun) >= patience:
            logger.error("No server can be used: given up. %s", error)
            self.stop()

    def _give_back(self, worker: Worker, silent: float, others: bool) -> None:
        """The last job goes to the front: the first one was running, may be what ends servers, and should not take the
        same others with it each time. All stay in `given`, for a server that was only silent."""
        own = _not_given_back(worker, self.waiting)
        if own:
            where = "go to servers that answer" if others else "wait for a server that answers"
            logger.warning(
                "%s has not answered for %.0f s. Its jobs (%d) %s.", worker.server.url, silent, len(own), where
            )
        for queued in own.values():
            self._queue_again(worker, queued)
        if worker.excluded:
            worker.given.clear()

    async def _collect(self, worker: Worker, here: set[str]) -> None:
        """Records what has ended. here: ids of all prompts in the server's queue."""
        for prompt_id, queued in list(worker.given.items()):
            if queued.prompt_id != prompt_id:  # its row was changed, or another server began it meanwhile
                if prompt_id in here:
                    await worker.server.cancel([prompt_id])
                del worker.given[prompt_id]
                continue
            if worker.failures and queued in self.waiting:  # no other server began it meanwhile
                self.waiting.remove(queued)
            if prompt_id not in here:
                await self._finish(worker, queued)
        worker.others = len(here - worker.given.keys())

    async def _finish(self, worker: Worker, queued: QueuedJob) -> None:
        """A prompt that is no longer in the server's queue has ended, or the server has lost it."""
        prompt_id = queued.prompt_id
        found = await worker.server.history(prompt_id, queued.to_send(self.options.maps))
        restarted = worker.failures  # which loses prompts, too
        if not (found or restarted or worker.excluded or self.stopping) and await worker.server.knows(prompt_id):
            self._exclude(worker, SEVERAL)
        if found and found.outcome == "interrupted" and (self.stopping or not queued.tries):
            found = None  # by this command, or by an earlier one that was stopped
        copies: dict[str, Any] = {}
        if found and self.options.download and found.outcome == "success":
            paths = copies_of(found.files, self.options.download / queued.job.id)
            copies["copies"], error = await copied(worker.server, list(zip(found.files, paths, strict=True)))
            error = error if found.files else NO_FILE
            copies |= {"status": "error", "error": error} if error else {}
        elif found and found.outcome == "success" and not found.files:
            copies["warnings"] = [*found.warnings, NO_FILE]
        del worker.given[prompt_id]
        if found:
            worker.unexpected = 0
            self._end(worker, queued, found, copies)
            await worker.server.forget(prompt_id)
        elif not self.stopping:
            self._queue_again(worker, queued)

    def _pull(self, worker: Worker) -> QueuedJob | None:
        """Takes the next job for the server out of the queue. A server that has lost a job gets it only if there is no
        other. A job for which every server lacks something ends."""
        if self.over.is_set() or worker.excluded or len(worker.given) >= self.options.in_flight:
            return None
        for queued in list(self.waiting):
            able = [
                each
                for each in self.workers
                if not each.excluded and not each.failures and each.server.url not in queued.refused
            ]
            able = [each for each in able if each.server.url not in queued.lost] or able
            if not able:
                self.waiting.remove(queued)
                error = "; ".join(f"{url}: {reason}" for url, reason in queued.refused.items())
                self._end(worker, queued, Entry("error", error))
            elif worker in able and _is_its_turn(worker, able, len(self.waiting), self.options.in_flight):
                self.waiting.remove(queued)
                return queued
            elif not queued.refused and not queued.lost:
                return None  # nor are those after it
        return None

    async def _submit(self, worker: Worker, queued: QueuedJob) -> None:
        """Gives the server a job, which ends or goes back into the queue where it is refused."""
        job, server = queued.job, worker.server
        queued.attempt, queued.tries = queued.attempt + 1, queued.tries + 1
        queued.prompt_id = prompt_id = self.journal.prompt_id(job.id, queued.attempt)
        self.journal.write_submission(job.id, queued.fingerprint, queued.attempt, server.url)
        worker.given[prompt_id] = queued  # also if the answer is lost: the next visit finds out
        name = job.id if queued.attempt == 1 else f"{job.id}.try{queued.attempt}"
        try:
            refused = await server.submit(name_files(queued.to_send(self.options.maps), name), prompt_id, self.client)
        except ServerAwayError as error:
            queued.tries -= error.unexpected  # which is not the job's fault
            raise
        worker.unexpected = 0
        if not refused:
            return
        await server.cancel([prompt_id])  # in case it makes a part of it ...
        await server.forget(prompt_id)  # ... which is not this job's image
        del worker.given[prompt_id]
        if not refused.elsewhere:
            self._end(worker, queued, Entry("error", refused.reason))
            return
        queued.refused[server.url] = refused.reason
        queued.tries -= 1
        self.waiting.appendleft(queued)
        if not {str(value) for value in job.overrides.values()}.issuperset(refused.missing):
            self._exclude(worker, refused.reason)  # it lacks what every job needs

    def _exclude(self, worker: Worker, why: str) -> None:
        """The server gets no more jobs in this batch."""
        worker.excluded = True
        logger.warning("%s is set aside in this batch: %s", worker.server.url, why)
        if all(each.excluded for each in self.workers):
            logger.error(
                "No server is left that can run this workflow. Mend what is said above, or name another with --server; "
                "then the same command goes on."
            )

    def _queue_again(self, worker: Worker, queued: QueuedJob) -> None:
        """A job that its server has lost goes to the front of the queue, or ends where it was tried too often."""
        queued.lost.add(worker.server.url)
        if queued.tries <= self.options.retries:
            self.waiting.appendleft(queued)
            return
        error = f"given up after {count_of(queued.tries, 'attempt')}: its server was lost, last {worker.server.url}"
        self._end(worker, queued, Entry("lost", error))

    def _end(self, worker: Worker, queued: QueuedJob, found: Entry, copies: dict[str, Any] | None = None) -> None:
        """Records the one result of a job. copies: fields of the result about its files."""
        record = {
            "id": queued.job.id,
            "status": found.outcome,
            "overrides": queued.job.overrides,
            "server": worker.server.url,
            "prompt_id": queued.prompt_id,
            "attempt": queued.attempt,
            "seconds": round(found.seconds, 3),
            "files": found.files,
            "copies": [],
            "traces": found.traces,
            "warnings": found.warnings,
            "error": "interrupted by someone else" if found.outcome == "interrupted" else found.error,
            "versions": worker.versions or {},
            **(copies or {}),
        }
        self.journal.write_result(record)
        queued.prompt_id = ""
        self.unfinished -= 1
        self.on_result(record)
        if not self.unfinished:
            self.over.set()

    async def _cancel(self, worker: Worker) -> None:
        """Takes our prompts from the server, and keeps the images that were finished all the same."""
        deadline = time.monotonic() + self.options.grace
        try:
            await worker.server.cancel(list(worker.given))
            while worker.given and time.monotonic() < deadline:
                await self._collect(worker, await worker.server.queue())
                await asyncio.sleep(self.options.poll)
        except ServerAwayError as error:
            logger.warning("%s", error)


def _not_given_back(worker: Worker, waiting: deque[QueuedJob]) -> dict[str, QueuedJob]:
    """The jobs that the server has and has not given back."""
    return {
        prompt_id: queued
        for prompt_id, queued in worker.given.items()
        if queued.prompt_id == prompt_id and queued not in waiting
    }


def _is_its_turn(worker: Worker, able: list[Worker], waiting: int, in_flight: int) -> bool:
    """A server whose queue is full, by prompts of others, too, gets a job only if none has a shorter queue; another
    one leaves as many jobs as make shorter queues as long as its own."""
    if worker.load >= in_flight:
        return worker.load == min(each.load for each in able)
    return waiting > sum(max(0, worker.load - each.load) for each in able)
