"""A ComfyUI server without images: queue, history and files as a batch sees them, and what it was asked to generate."""

import asyncio
import functools
import json
import os
import socket
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from comfyui_specar.batch import cli, dispatch, server
from comfyui_specar.batch.dispatch import Batch, Options
from comfyui_specar.batch.jobs import Job
from comfyui_specar.batch.journal import Journal
from comfyui_specar.batch.overrides import fingerprint, with_overrides

from .patience import PATIENCE

QUICK = Options(poll=0.005, grace=0.1, patience=0.4)
WORKFLOW = {
    "1": {"class_type": "Encoder", "inputs": {"text": "cat", "clip": ["2", 0]}},
    "3": {"class_type": "Sampler", "inputs": {"positive": ["1", 0], "seed": 0}},
    "9": {"class_type": "SaveImage", "inputs": {"filename_prefix": "p", "images": ["3", 0]}},
    "10": {"class_type": "Map", "inputs": {"trace": ["3", 1]}},
    "11": {"class_type": "Compare", "inputs": {"trace_1": ["3", 1]}},
}


def without_limits(patch: pytest.MonkeyPatch) -> None:
    """For batches on servers in this process, which answer when their turn comes, and not in a number of seconds.
    Nothing is waited for until it is on the disk: no process is killed."""
    patch.setattr(os, "fsync", lambda _file: None)
    for name in ("CONNECT_SECONDS", "ANSWER_SECONDS", "WHOLE_SECONDS"):
        patch.setattr(server, name, PATIENCE)
    patch.setattr(dispatch, "CLOSE_SECONDS", PATIENCE)


def asynchronous(test: Callable[..., Coroutine]) -> Callable[..., None]:
    """A test that is a coroutine, in a loop of its own."""

    @functools.wraps(test)
    def run(*given, **named) -> None:
        asyncio.run(test(*given, **named))

    return run


async def until(condition: Callable[[], Any]) -> None:
    """Wait until it holds. Others get their turn first."""
    await asyncio.sleep(0.001)
    while not condition():
        await asyncio.sleep(0.001)


@pytest.fixture
def table(tmp_path, monkeypatch) -> Path:
    """The current folder: jobs.csv with 8 jobs, and workflow.json."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "workflow.json").write_text(json.dumps(WORKFLOW), encoding="utf-8")
    (tmp_path / "jobs.csv").write_text("id,prompt,seed\n" + "".join(f"j{i},cat,{i}\n" for i in range(8)), "utf-8")
    return tmp_path


@pytest.fixture
def here(monkeypatch) -> None:
    """For the command in this process. Signals cannot be set outside of the main thread."""
    without_limits(monkeypatch)
    monkeypatch.setattr(cli.signal, "signal", lambda *_given: None)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class FakeComfy:
    """`ends`: may the prompt that runs end yet? A test sets it to hold the server until something else has happened.
    `drawn`: the filename prefix of every image that was finished. A prompt whose `text` is "refuse" is refused,
    "half" accepted in part, "fail" breaks while it runs; "poison" kills the server. `lacks`: classes of nodes, and
    texts, that it refuses as ComfyUI refuses nodes and files that it does not have; `partly`: it makes the other
    outputs of a prompt with such a text. `says`: what it makes of its answers, by the first part of the path. `asked`:
    path, query and login of every request. Its port is its own from now on, whether it listens or not."""

    def __init__(self):
        held = socket.socket()  # so that no other program gets the port while the server is away
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        weakref.finalize(self, held.close)
        self.port = held.getsockname()[1]
        self.says: dict[str, Callable[[web.Response], web.Response]] = {}
        self.asked: list[tuple[str, dict[str, str], str | None]] = []
        self.url = f"http://127.0.0.1:{self.port}"
        self.ends: Callable[[], bool] = lambda: True
        self.drawn: list[str] = []
        self.lacks: set[str] = set()
        self.partly = False
        self.most_queued = 0
        self._runner = None
        self._forget_everything()

    def _forget_everything(self) -> None:
        self.pending: list[tuple[str, dict]] = []
        self.running: str | None = None
        self.history: dict[str, dict] = {}
        self.interrupted = asyncio.Event()

    @property
    def dead(self) -> bool:
        return self._runner is None

    async def __aenter__(self) -> "FakeComfy":
        await self.start()
        return self

    async def __aexit__(self, *_exc) -> None:
        await self.die()

    async def start(self) -> None:
        """Begins with nothing in the queue or the history, as ComfyUI does."""
        self._forget_everything()
        app = web.Application(middlewares=[self._before], client_max_size=1 << 30)
        app.add_routes(
            [
                web.get("/system_stats", self._stats),
                web.get("/object_info/{kind}", self._about),
                web.post("/prompt", self._prompt),
                web.get("/queue", self._queue),
                web.post("/queue", self._delete),
                web.get("/history/{id}", self._history),
                web.post("/history", self._forget),
                web.post("/interrupt", self._interrupt),
                web.get("/view", self._view),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)  # aiohttp takes 0 for no limit
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self._worker = asyncio.ensure_future(self._work())

    async def die(self) -> None:
        if self._runner:
            runner, self._runner = self._runner, None
            self._worker.cancel()
            await runner.cleanup()

    async def _work(self) -> None:
        while True:
            await until(lambda: self.pending)
            self.running, prompt = self.pending.pop(0)
            self.interrupted.clear()
            await until(lambda: self.ends() or self.interrupted.is_set())
            stopped = self.interrupted.is_set()
            if prompt["1"]["inputs"]["text"] == "poison":
                asyncio.ensure_future(self.die())
                return
            self.history[self.running] = self._ended(prompt, stopped)
            self.running = None

    def _ended(self, prompt: dict, stopped: bool) -> dict:
        event, data, outputs = "execution_success", {}, {}
        if stopped:
            event = "execution_interrupted"
        elif prompt["1"]["inputs"]["text"] == "fail":
            event, data = "execution_error", {"node_type": "Encoder", "exception_message": "no such\nword"}
        else:
            prefix = prompt["9"]["inputs"]["filename_prefix"]
            self.drawn.append(prefix)
            settings = {"method": "sjd"}
            if "aple" in prompt["1"]["inputs"]["text"]:
                settings["notices"] = ["The model ignores these words: aple."]
            report = {"schema": "specar.trace/3", "settings": settings, "totals": {"target_passes": 5}}
            image = {"filename": f"{prefix}_00001_.png", "subfolder": "", "type": "output"}
            outputs = {
                "9": {"images": [image]},
                "10": {"specar": [report], "images": [{**image, "type": "temp"}]},
                "11": {"specar": [report]},
            }
            if "9_map" in prompt:
                name = f"{prompt['9_map']['inputs']['filename_prefix']}_00001_.png"
                outputs["9_map"] = {"images": [{**image, "filename": name}]}
        messages = [["execution_start", {"timestamp": 1000}], [event, {"timestamp": 1250, **data}]]
        status = "success" if event == "execution_success" else "error"
        return {"outputs": outputs, "status": {"status_str": status, "messages": messages}}

    @web.middleware
    async def _before(self, request: web.Request, handler: Callable) -> web.StreamResponse:
        self.asked.append((request.path, dict(request.query), request.headers.get("Authorization")))
        answer = await handler(request)
        says = self.says.get(request.path.split("/")[1])
        return says(answer) if says else answer

    async def _stats(self, _request: web.Request) -> web.Response:
        return web.json_response({"system": {"os": "linux", "comfyui_version": "0.1", "pytorch_version": "2.0"}})

    async def _about(self, request: web.Request) -> web.Response:
        inputs = {"required": {"seed": ["INT", {"min": 0}], "cfg": ["FLOAT", {}], "text": "odd", "mode": [["a", "b"]]}}
        known = request.match_info["kind"] == "Sampler"
        return web.json_response({"Sampler": {"input": inputs}} if known else {})

    async def _queue(self, _request: web.Request) -> web.Response:
        running = [[0, self.running]] if self.running else []
        return web.json_response({"queue_running": running, "queue_pending": [[0, key] for key, _ in self.pending]})

    async def _delete(self, request: web.Request) -> web.Response:
        gone = (await request.json())["delete"]
        self.pending = [item for item in self.pending if item[0] not in gone]
        return web.Response()

    async def _prompt(self, request: web.Request) -> web.Response:
        body = await request.json()
        text = body["prompt"]["1"]["inputs"]["text"]
        errors = {"1": {"class_type": "Encoder", "errors": [{"message": "bad value", "details": "text"}]}}
        for node in body["prompt"].values():
            if node["class_type"] in self.lacks:
                gone = {"type": "invalid_prompt", "message": f"node {node['class_type']} does not exist"}
                return web.json_response({"error": gone, "node_errors": []}, status=400)
        if text in self.lacks:
            errors["1"]["errors"] = [
                {
                    "type": "custom_validation_failed",
                    "message": "no such file",
                    "details": text,
                    "extra_info": {"input_name": "text"},
                }
            ]
        if text == "refuse" or (text in self.lacks and not self.partly):
            return web.json_response({"error": {"message": "failed validation"}, "node_errors": errors}, status=400)
        self.pending.append((body["prompt_id"], body["prompt"]))
        self.most_queued = max(self.most_queued, len(self.pending) + bool(self.running))
        refused = errors if text == "half" or text in self.lacks else {}
        return web.json_response({"prompt_id": body["prompt_id"], "node_errors": refused})

    async def _history(self, request: web.Request) -> web.Response:
        key = request.match_info["id"]
        return web.json_response({key: self.history[key]} if key in self.history else {})

    async def _forget(self, request: web.Request) -> web.Response:
        for key in (await request.json())["delete"]:
            self.history.pop(key, None)
        return web.Response()

    async def _interrupt(self, request: web.Request) -> web.Response:
        if (await request.json())["prompt_id"] == self.running:
            self.interrupted.set()
        return web.Response()

    async def _view(self, request: web.Request) -> web.Response:
        return web.Response(body=request.query["filename"].encode())


class Clock:
    """Time passes only where a test says so, however long the machine takes."""

    def __init__(self):
        self.now = 1.0

    def monotonic(self) -> float:
        return self.now

    async def away(self, batch: Batch, seconds: float) -> None:
        """So much time passes once the batch has noticed that its first server does not answer."""
        await until(lambda: batch.workers and batch.workers[0].failures)
        self.now += seconds


def jobs_of(number: int, **overrides) -> list[Job]:
    return [Job(f"j{i}", {"seed": i, **overrides}, i + 2) for i in range(number)]


async def run_batch(path: Path, servers: list, jobs: list[Job], options: Options = QUICK, during=None) -> Journal:
    """One run of the command; `during(batch)` is awaited beside it, and fails the test where it fails."""
    prompts = {job.id: with_overrides(WORKFLOW, job.overrides) for job in jobs}
    with Journal(path) as found:
        found.check({job: fingerprint(prompt) for job, prompt in prompts.items()})
        still = [job for job in jobs if not found.ended(job.id, fingerprint(prompts[job.id]), retry_failed=False)]
        batch = Batch(found, [getattr(one, "url", one) for one in servers], options)

        async def beside() -> None:
            if during:
                await during(batch)
            await asyncio.Event().wait()  # the end is the batch's

        tasks = [asyncio.ensure_future(coroutine) for coroutine in (batch.run(still, prompts), beside())]
        try:
            ended, _ = await asyncio.wait(tasks, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
            assert ended, "the batch hangs"
            for task in ended:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return found


def run_beside(one: FakeComfy, *arguments: str) -> int:
    """The command on jobs.csv and workflow.json in this process, with the server in a loop of its own thread."""

    async def serve() -> int:
        async with one:
            server = () if "--server" in arguments else ("--server", one.url)
            return await asyncio.to_thread(cli.main, ["jobs.csv", "--workflow", "workflow.json", *server, *arguments])

    return asyncio.run(serve())
