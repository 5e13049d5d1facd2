"""A client of one ComfyUI server for batches. Its answers are untrusted: answers.py checks them."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import aiohttp

from ..limits.limits import ANSWER_BYTES, FILE_BYTES, FILES, NOTICES, REPORTS
from .address import address_of, hide_private
from .answers import (
    Ended,
    Event,
    NodeInfo,
    Output,
    Queue,
    Report,
    Run,
    SavedFile,
    Submission,
    UnexpectedAnswerError,
    Versions,
    excerpt,
    hiding,
    one_line,
    parse_object,
    read_answer,
    read_body,
)
from .overrides import Place, Workflow

PORT = 8188  # ComfyUI's default
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0
WHOLE_SECONDS = 600.0  # of an answer or file; a slower one would keep jobs waiting
BUSY_GATEWAY = (502, 503, 504)  # of a proxy whose server is away
LOGIN_NEEDED = (401, 403)
TOKEN = "SPECAR_BATCH_TOKEN"  # noqa: S105 (the environment variable that has it)
TIMES = 4  # that a server is asked again, where another one may answer
UNTRUSTED = (18, 19, 20, 21)  # OpenSSL's codes for a certificate that nobody vouches for, such as a self-signed one
NO_SUCH_NODE = ("invalid_prompt", "missing_node_type")  # types of ComfyUI's errors: of old and newer versions
NO_SUCH_VALUE = ("value_not_in_list", "custom_validation_failed")  # of combos: models, images, options
ENDS = {"execution_success": "success", "execution_error": "error", "execution_interrupted": "interrupted"}


class ServerAwayError(ConnectionError):
    """The server cannot be reached, or does not answer as ComfyUI does. gone: nobody is listening there. unexpected:
    another program answers."""

    def __init__(self, message: str, gone: bool = False, unexpected: bool = False):
        super().__init__(message)
        self.gone, self.unexpected = gone, unexpected


@dataclass(frozen=True)
class Entry:
    """How a prompt ended, from the server's history. outcome: success, error or interrupted; lost, where there is no
    such entry."""

    outcome: str
    error: str = ""
    seconds: float = 0.0
    files: list[dict[str, str]] = field(default_factory=list)
    traces: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Refusal:
    """Why a server will not make all of a prompt. missing: what it lacks and another server may have, that is nodes and
    values of combos (models, images). elsewhere: another server may make it; where not, it is wrong everywhere."""

    reason: str
    missing: list[str]
    elsewhere: bool


@dataclass(frozen=True)
class Reply:
    """An answer that has been read. kind: its content type."""

    status: int
    kind: str
    content: bytes

    def parsed(self) -> dict[str, Any]:
        """Its object. Raises UnexpectedAnswerError."""
        if self.status != 200:
            raise UnexpectedAnswerError(f"status {self.status}, {excerpt(self.content)}")
        return parse_object(self.content)


def open_session() -> aiohttp.ClientSession:
    """A session for servers that compute, and may be slow to answer."""
    timeout = aiohttp.ClientTimeout(total=WHOLE_SECONDS, sock_connect=CONNECT_SECONDS, sock_read=ANSWER_SECONDS)
    return aiohttp.ClientSession(timeout=timeout)


class Server:
    """The requests that a batch makes of a server. Every method raises ServerAwayError when the server cannot be
    reached, and when it answers as no ComfyUI does. url: its address without what is private in it, which no message
    and no file has."""

    def __init__(self, session: aiohttp.ClientSession, url: str, token: str = ""):
        self._session, self._address = session, address_of(url, token)
        self.url = self._address.name

    async def queue(self) -> set[str]:
        """Ids of the prompts that run or wait."""
        async with self._request("GET", "/queue") as reply:
            return queued_ids(reply)

    async def versions(self) -> dict[str, str]:
        """The versions of ComfyUI and PyTorch, as far as the server tells them."""
        async with self._request("GET", "/system_stats") as reply:
            return read_answer(Versions, reply.content).model_dump(exclude_none=True) if reply.status == 200 else {}

    async def whole_inputs(self, workflow: Workflow) -> set[Place]:
        """The inputs of its nodes that the server takes as whole numbers."""
        whole = set()
        for kind in {node["class_type"] for node in workflow.values()}:
            async with self._request("GET", f"/object_info/{quote(kind, safe='')}") as reply:
                about = reply.parsed() if reply.status == 200 else {}
                named = read_answer(NodeInfo, about.get(kind, {})).whole
            whole |= {(key, name) for key, node in workflow.items() if node["class_type"] == kind for name in named}
        return whole

    async def submit(self, prompt: Workflow, prompt_id: str, client_id: str) -> Refusal | None:
        """Queues a prompt; returns why the server will not make all of it (None: it will)."""
        body = {"prompt": prompt, "prompt_id": prompt_id, "client_id": client_id}
        async with self._request("POST", "/prompt", body) as reply:
            if reply.status not in (200, 400):  # an error in ComfyUI, or in front of it, maybe because of this prompt
                return Refusal(f"ComfyUI answered {reply.status}: {excerpt(reply.content)}", [], True)
            answer = read_answer(Submission, reply.content)
            if unknown := answer.node_errors.keys() - prompt.keys():
                raise UnexpectedAnswerError(f"it refuses nodes that it was not sent, such as {one_line(min(unknown))}")
            if reply.status == 400 or answer.node_errors:
                lacking = missing(answer, prompt)
                return Refusal(refusal(answer), lacking, elsewhere=bool(lacking))
            if answer.prompt_id != prompt_id:
                raise UnexpectedAnswerError("it does not take the id that the prompt was sent with")
            return None

    async def history(self, prompt_id: str, prompt: Workflow) -> Entry | None:
        """How a prompt ended; None where the server knows of no such prompt, or has not finished it."""
        async with self._request("GET", f"/history/{prompt_id}") as reply:
            answer = reply.parsed()
            return entry(read_answer(Ended, answer[prompt_id]), prompt) if prompt_id in answer else None

    async def knows(self, prompt_id: str) -> bool:
        """Has it the prompt after all? A load balancer asks several servers in turn, and some keep a connection with
        one: each question has a connection of its own."""
        for path in TIMES * [f"/history/{prompt_id}"] + TIMES * ["/queue"]:
            async with self._request("GET", path, alone=True) as reply:
                if prompt_id in (queued_ids(reply) if path == "/queue" else reply.parsed()):
                    return True
        return False

    async def cancel(self, prompt_ids: list[str]) -> None:
        """Takes waiting prompts out of the queue, and interrupts the one that runs if it is among these."""
        await self._tell("/queue", {"delete": prompt_ids})
        for prompt_id in prompt_ids:
            await self._tell("/interrupt", {"prompt_id": prompt_id})

    async def forget(self, prompt_id: str) -> None:
        """Takes a finished prompt out of the history, which the server keeps in memory."""
        await self._tell("/history", {"delete": [prompt_id]})

    async def fetch(self, file: dict[str, str]) -> Reply:
        """The reply that has a file, where its status is 200."""
        query = {key: file[key] for key in ("filename", "subfolder", "type")}
        async with self._request("GET", "/view", query=query, most=FILE_BYTES) as reply:
            page = reply.kind == "text/html" and not file["filename"].lower().endswith((".html", ".htm"))
            if reply.status == 200 and page:
                raise UnexpectedAnswerError("a page instead of a file")
            return reply

    async def _tell(self, path: str, body: dict[str, Any]) -> None:
        async with self._request("POST", path, body):
            pass

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        query: dict[str, str] | None = None,
        most: int = ANSWER_BYTES,
        alone: bool = False,
    ) -> AsyncIterator[Reply]:
        """The reply, of at most `most` bytes. alone: the connection serves no other request after it. Whoever reads the
        reply raises UnexpectedAnswerError where it is not ComfyUI's."""
        address = self._address
        token = hiding.set(address.hide)
        headers = address.headers | ({"Connection": "close"} if alone else {})
        given = {"json": body, "params": address.query | (query or {}), "headers": headers}
        try:
            async with self._session.request(method, address.base + path, allow_redirects=False, **given) as reply:
                self._check(reply)
                content = await read_body(reply, most)
            yield Reply(reply.status, reply.content_type, content)
        except UnexpectedAnswerError as error:
            what = f"/{path.split('/')[1]}: {error}"
            raise ServerAwayError(f"{self.url} does not answer as ComfyUI does, {what}", unexpected=True) from None
        except ServerAwayError:
            raise
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            raise self._away(error) from None  # as its text may have the whole address
        finally:
            hiding.reset(token)

    def _check(self, reply: aiohttp.ClientResponse) -> None:
        """Raises ServerAwayError for answers of a proxy in front of ComfyUI."""
        if reply.status in BUSY_GATEWAY:
            raise ServerAwayError(f"{self.url} answered {reply.status}")
        if reply.status in LOGIN_NEEDED:
            raise ServerAwayError(f"{self.url} answered {reply.status}: {self._login()}", unexpected=True)
        if reply.status // 100 == 3:
            target = one_line(hide_private(reply.headers.get("Location", "nowhere")))
            raise ServerAwayError(
                f"{self.url} refers to {target}: if ComfyUI is there, name that address. Else {self._login()}",
                unexpected=True,
            )

    def _login(self) -> str:
        if self._address.headers:
            return "it does not take the login or token that it was sent"
        address = self._address.base.replace("://", "://USER:PASSWORD@")
        return f"does it need a login? --server {address}, or a token in the environment variable {TOKEN}"

    def _away(self, error: Exception) -> ServerAwayError:
        if isinstance(getattr(error, "os_error", None), ConnectionRefusedError):  # aiohttp's, which has the port
            return ServerAwayError(
                f"{self.url}: no ComfyUI answers on port {getattr(error, 'port', PORT)}. Start it (python main.py in "
                f"its folder: port {PORT}), or name another address with --server.",
                gone=True,
            )
        tls = getattr(error, "certificate_error", None) or getattr(error, "os_error", None)
        if isinstance(tls, ssl.SSLCertVerificationError):
            why = f"{self.url}: its certificate is not trusted, {one_line(tls.verify_message)}"
            remedy = ". If it is yours, name its file (PEM) in the environment variable SSL_CERT_FILE"
            return ServerAwayError(why + remedy * (tls.verify_code in UNTRUSTED))
        if isinstance(tls, ssl.SSLError):
            return ServerAwayError(f"{self.url}: no HTTPS there ({one_line(str(tls))}). Is it http://?")
        if isinstance(error, asyncio.TimeoutError):
            return ServerAwayError(f"{self.url} does not answer in time.")
        text = getattr(error, "message", error)  # of a status; as a text it has the whole address
        return ServerAwayError(f"{self.url}: {one_line(str(text)) or type(error).__name__}")


def queued_ids(reply: Reply) -> set[str]:
    """Ids of the prompts that run or wait. Raises UnexpectedAnswerError."""
    queue = read_answer(Queue, reply.parsed())
    return {*queue.queue_running, *queue.queue_pending}


def refusal(answer: Submission) -> str:
    """Why /prompt refused the workflow. Raises UnexpectedAnswerError where there is no reason."""
    problems = [
        f"{node.class_type}: {problem.message} ({problem.details})"
        for node in answer.node_errors.values()
        for problem in node.errors
    ]
    if not problems and not answer.error.message:
        raise UnexpectedAnswerError("it refuses a prompt and gives no reason")
    return one_line("ComfyUI refused the workflow: " + ("; ".join(problems) or answer.error.message))


def missing(answer: Submission, prompt: Workflow) -> list[str]:
    """Nodes and values that the server lacks, from the answer of /prompt."""
    if answer.error.type in NO_SUCH_NODE:
        return [answer.error.message]
    return [
        str(prompt[node]["inputs"].get(problem.input_name))
        for node, about in answer.node_errors.items()
        for problem in about.errors
        if problem.type in NO_SUCH_VALUE
    ]


def entry(found: Ended, prompt: Workflow) -> Entry:
    """Reads an entry of the history. Files and traces are in the order of the nodes in the prompt, not of their runs.
    Raises UnexpectedAnswerError."""
    events = dict(found.messages)
    outcome = next((ENDS[event] for event in events if event in ENDS), found.status)
    if outcome not in ENDS.values():
        raise UnexpectedAnswerError(f"a prompt ended as {one_line(outcome)}")
    end = next((data for event, data in events.items() if event in ENDS), Event())
    begun = events.get("execution_start", end).timestamp or 0
    seconds = ((end.timestamp or begun) - begun) / 1000
    order = {node: place for place, node in enumerate(prompt)}
    nodes = sorted(found.outputs, key=lambda node: order.get(node, len(order)))  # added by nodes: last
    outputs = {node: found.outputs[node] for node in nodes}
    error = f"{end.node_type}: {end.exception_message}" if outcome == "error" else ""
    reports = [found for node, output in outputs.items() for found in reports_of(prompt.get(node), output)]
    if len(reports) > REPORTS:
        raise UnexpectedAnswerError(f"{len(reports)} reports of one prompt")
    return Entry(outcome, error, seconds, files_of(outputs), traces_of(reports), notices_of(outputs))


def notices_of(outputs: dict[str, Output]) -> list[str]:
    """What runs did not do of what was asked, once each: from the samplers, and from the reports of their traces, as a
    sampler that ComfyUI need not run again says nothing. Raises UnexpectedAnswerError."""
    samplers = [run.encode(errors="replace") for output in outputs.values() for run in output.specar_run]
    reports = [report for output in outputs.values() for report in output.reports]
    runs = [*(read_answer(Run, run) for run in samplers), *reports]
    return list(dict.fromkeys(notice for run in runs for notice in run.notices))[:NOTICES]


def files_of(outputs: dict[str, Output]) -> list[dict[str, str]]:
    """All saved files, with the nodes that saved them; the previews of a workflow that saves nothing. Raises
    UnexpectedAnswerError."""
    listed = [
        (node, file)
        for node, output in outputs.items()
        for value in (output.model_extra or {}).values()
        if isinstance(value, list)
        for file in value
        if isinstance(file, dict) and "filename" in file
    ]
    if len(listed) > FILES:
        raise UnexpectedAnswerError(f"{len(listed)} files of one prompt")
    files = [read_answer(SavedFile, file).model_dump() | {"node": one_line(node)} for node, file in listed]
    return [file for file in files if file["type"] == "output"] or files


def reports_of(node: dict | None, output: Output) -> list[tuple[str | None, Report]]:
    """The reports of runs that a node shows, each with the id of the node that its trace came from."""
    reports = output.reports
    inputs = node["inputs"].items() if node else ()
    sources = [str(value[0]) for name, value in inputs if name.startswith("trace") and isinstance(value, list)]
    if len(sources) != len(reports):  # a node added by another one
        return [(None, report) for report in reports]
    return list(zip(sources, reports, strict=True))


def traces_of(reports: list[tuple[str | None, Report]]) -> list[dict[str, Any]]:
    """Sampler, method and totals of every run that Acceptance Map, Compare Runs or Save Trace reported."""
    found = [{"node": node, "method": report.method or None, **report.totals} for node, report in reports]
    return [trace for number, trace in enumerate(found) if trace not in found[:number]]
