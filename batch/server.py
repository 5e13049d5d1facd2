"""A client of one ComfyUI server for batches. Its answers are untrusted: they are read with answers.py."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ..limits.limits import ANSWER_BYTES, FILE_BYTES, FILES, NOTICES, REPORTS
from .address import address_of, shown
from .answers import (
    UnexpectedAnswerError,
    excerpt,
    get,
    get_list,
    get_name,
    get_text,
    get_totals,
    hiding,
    one_line,
    parse_object,
    read_body,
)
from .overrides import Workflow

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
VERSIONS = {"comfyui": "comfyui_version", "torch": "pytorch_version"}  # in a result -> in /system_stats
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
            return queued_ids(reply.parsed())

    async def versions(self) -> dict[str, str]:
        """The versions of ComfyUI and PyTorch, as far as the server tells them."""
        async with self._request("GET", "/system_stats") as reply:
            system = get(reply.parsed(), "system", dict, {}) if reply.status == 200 else {}
            return {name: get_text(system, key) for name, key in VERSIONS.items() if key in system}

    async def submit(self, prompt: Workflow, prompt_id: str, client_id: str) -> Refusal | None:
        """Queues a prompt; returns why the server will not make all of it (None: it will)."""
        body = {"prompt": prompt, "prompt_id": prompt_id, "client_id": client_id}
        async with self._request("POST", "/prompt", body) as reply:
            if reply.status not in (200, 400):  # an error in ComfyUI, or in front of it, maybe because of this prompt
                return Refusal(f"ComfyUI answered {reply.status}: {excerpt(reply.content)}", [], True)
            answer = parse_object(reply.content)
            if unknown := refused_nodes(answer).keys() - prompt.keys():
                raise UnexpectedAnswerError(f"it refuses nodes that it was not sent, such as {one_line(min(unknown))}")
            if reply.status == 400 or refused_nodes(answer):
                lacking = missing(answer, prompt)
                return Refusal(refusal(answer), lacking, elsewhere=bool(lacking))
            if get(answer, "prompt_id", str) != prompt_id:
                raise UnexpectedAnswerError("it does not take the id that the prompt was sent with")
            return None

    async def history(self, prompt_id: str, prompt: Workflow) -> Entry | None:
        """How a prompt ended; None where the server knows of no such prompt, or has not finished it."""
        async with self._request("GET", f"/history/{prompt_id}") as reply:
            answer = reply.parsed()
            return entry(get(answer, prompt_id, dict), prompt) if prompt_id in answer else None

    async def knows(self, prompt_id: str) -> bool:
        """Has it the prompt after all? A load balancer asks several servers in turn, and some keep a connection with
        one: each question has a connection of its own."""
        for path in TIMES * [f"/history/{prompt_id}"] + TIMES * ["/queue"]:
            async with self._request("GET", path, alone=True) as reply:
                answer = reply.parsed()
                if prompt_id in (queued_ids(answer) if path == "/queue" else answer):
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
            target = one_line(shown(reply.headers.get("Location", "nowhere")))
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


def queued_ids(answer: dict[str, Any]) -> set[str]:
    """Ids of the prompts that run or wait; the items of both lists begin with a number and the id. Raises
    UnexpectedAnswerError."""
    found: set[str] = set()
    for name in ("queue_running", "queue_pending"):
        items = get(answer, name, list)
        if not all(isinstance(item, list) and len(item) > 1 and isinstance(item[1], str) for item in items):
            raise UnexpectedAnswerError(f"{name} is not a list of prompts")
        found.update(item[1] for item in items)
    return found


def refused_nodes(answer: dict[str, Any]) -> dict[str, dict]:
    """Node id -> its errors, from the answer of /prompt; old versions send an empty list for none."""
    found = get(answer, "node_errors", (dict, list), {})
    return found if isinstance(found, dict) else dict.fromkeys(map(str, found), {})


def refusal(answer: dict[str, Any]) -> str:
    """Why /prompt refused the workflow. Raises UnexpectedAnswerError where there is no reason."""
    problems = [
        f"{get_text(node, 'class_type')}: {get_text(problem, 'message')} ({get_text(problem, 'details')})"
        for node in refused_nodes(answer).values()
        for problem in get_list(node, "errors", dict)
    ]
    error = get(answer, "error", (dict, str), {})
    message = one_line(error) if isinstance(error, str) else get_text(error, "message")
    if not problems and not message:
        raise UnexpectedAnswerError("it refuses a prompt and gives no reason")
    return one_line("ComfyUI refused the workflow: " + ("; ".join(problems) or message))


def missing(answer: dict[str, Any], prompt: Workflow) -> list[str]:
    """Nodes and values that the server lacks, from the answer of /prompt."""
    error = get(answer, "error", (dict, str), {})
    if isinstance(error, dict) and get(error, "type", str, "") in NO_SUCH_NODE:
        return [get_text(error, "message")]
    names = [
        (node, get(get(problem, "extra_info", dict, {}), "input_name", str, ""))
        for node, about in refused_nodes(answer).items()
        for problem in get_list(about, "errors", dict)
        if get(problem, "type", str, "") in NO_SUCH_VALUE
    ]
    return [str(prompt[node]["inputs"].get(name)) for node, name in names]


def entry(found: dict[str, Any], prompt: Workflow) -> Entry:
    """Reads an entry of the history. Files and traces are in the order of the nodes in the prompt, not of their runs.
    Raises UnexpectedAnswerError."""
    status = get(found, "status", dict, {})
    messages = {}
    for message in get_list(status, "messages", list):
        if len(message) != 2 or not isinstance(message[0], str) or not isinstance(message[1], dict):
            raise UnexpectedAnswerError("messages are not events with their data")
        messages[message[0]] = message[1]
    outcome = next((ENDS[event] for event in messages if event in ENDS), get(status, "status_str", str, "error"))
    if outcome not in ENDS.values():
        raise UnexpectedAnswerError(f"a prompt ended as {one_line(outcome)}")
    data = next((data for event, data in messages.items() if event in ENDS), {})
    begun = get(messages.get("execution_start", data), "timestamp", (int, float), 0)
    seconds = (get(data, "timestamp", (int, float), begun) - begun) / 1000
    order = {node: place for place, node in enumerate(prompt)}
    found_outputs = get(found, "outputs", dict, {})
    nodes = sorted(found_outputs, key=lambda node: order.get(node, len(order)))  # added by nodes: last
    outputs = {node: get(found_outputs, node, dict, {}) for node in nodes}
    error = ""
    if outcome == "error":
        reason = get_text(data, "exception_message", "no reason given")
        error = f"{get_text(data, 'node_type', 'ComfyUI')}: {reason}"
    reports = [found for node, output in outputs.items() for found in reports_of(prompt.get(node), output)]
    if len(reports) > REPORTS:
        raise UnexpectedAnswerError(f"{len(reports)} reports of one prompt")
    return Entry(outcome, error, seconds, files_of(outputs), traces_of(reports), notices_of(outputs))


def notices_of(outputs: dict[str, dict]) -> list[str]:
    """What the samplers did not do of what was asked, once each. Raises UnexpectedAnswerError."""
    told = [run for output in outputs.values() for run in get_list(output, "specar_run", str)]
    samplers = [parse_object(run.encode(errors="replace")) for run in told]
    found = [one_line(notice) for about in samplers for notice in get_list(about, "notices", str)]
    return list(dict.fromkeys(found))[:NOTICES]


def files_of(outputs: dict[str, dict]) -> list[dict[str, str]]:
    """All saved files, with the nodes that saved them; the previews of a workflow that saves nothing. Raises
    UnexpectedAnswerError."""
    listed = [
        (node, file)
        for node, output in outputs.items()
        for value in output.values()
        if isinstance(value, list)
        for file in value
        if isinstance(file, dict) and "filename" in file
    ]
    if len(listed) > FILES:
        raise UnexpectedAnswerError(f"{len(listed)} files of one prompt")
    files = [
        {
            "filename": get_name(file, "filename"),
            "subfolder": get_name(file, "subfolder", ""),
            "type": get_name(file, "type", "output"),
            "node": one_line(node),
        }
        for node, file in listed
    ]
    return [file for file in files if file["type"] == "output"] or files


def reports_of(node: dict | None, output: dict) -> list[tuple[str | None, dict]]:
    """The reports of runs that a node shows, each with the id of the node that its trace came from."""
    reports = [report for report in get_list(output, "specar", dict) if "totals" in report]
    inputs = node["inputs"].items() if node else ()
    sources = [str(value[0]) for name, value in inputs if name.startswith("trace") and isinstance(value, list)]
    if len(sources) != len(reports):  # a node added by another one
        return [(None, report) for report in reports]
    return list(zip(sources, reports, strict=True))


def traces_of(reports: list[tuple[str | None, dict]]) -> list[dict[str, Any]]:
    """Sampler, method and totals of every run that Acceptance Map, Compare Runs or Save Trace reported."""
    found = [
        {"node": node, "method": get_text(get(report, "settings", dict), "method") or None, **get_totals(report)}
        for node, report in reports
    ]
    return [trace for number, trace in enumerate(found) if trace not in found[:number]]
