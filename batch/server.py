"""One ComfyUI server, as a batch talks to it."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from .overrides import Workflow

PORT = 8188  # ComfyUI's default
BUSY_GATEWAY = (502, 503, 504)  # what a proxy says whose server is away
NO_SUCH_NODE = ("invalid_prompt", "missing_node_type")  # types of ComfyUI's errors: of old and newer versions
NO_SUCH_VALUE = ("value_not_in_list", "custom_validation_failed")  # of combos: models, images, options
VERSIONS = {"comfyui": "comfyui_version", "torch": "pytorch_version"}  # in a result -> in /system_stats
ENDS = {"execution_success": "success", "execution_error": "error", "execution_interrupted": "interrupted"}


class ServerAwayError(ConnectionError):
    """The server cannot be reached, or does not answer as ComfyUI does. gone: nobody is listening there."""

    def __init__(self, message: str, gone: bool = False):
        super().__init__(message)
        self.gone = gone


@dataclass(frozen=True)
class Entry:
    """What the server's history keeps about a prompt that ended. outcome: success, error or interrupted; or lost, with
    its server."""

    outcome: str
    seconds: float
    error: str = ""
    files: list[dict[str, str]] = field(default_factory=list)
    traces: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Refusal:
    """Why a server will not make all of a prompt. missing: what it lacks and another server may have, that is nodes and
    values of combos (models, images); empty where the prompt is wrong everywhere."""

    reason: str
    missing: list[str]


class Server:
    """Every method raises ServerAwayError when the server cannot be reached."""

    def __init__(self, session: aiohttp.ClientSession, url: str):
        self._session, self.url = session, url
        self._base = url if "://" in url else f"http://{url}"

    async def queue(self) -> tuple[set[str], set[str]]:
        """Ids of the prompts that are running, and of those that wait."""
        state = await self._json("GET", "/queue")
        running, pending = ({item[1] for item in state[f"queue_{name}"]} for name in ("running", "pending"))
        return running, pending

    async def versions(self) -> dict[str, str]:
        """Of ComfyUI and PyTorch, as far as the server tells them."""
        _, answer = await self._request("GET", "/system_stats")
        system = answer.get("system") if isinstance(answer, dict) else None
        return {name: system[key] for name, key in VERSIONS.items() if key in system} if system else {}

    async def submit(self, prompt: Workflow, prompt_id: str, client_id: str) -> Refusal | None:
        """Queues a prompt; returns why the server will not make all of it (None: it will)."""
        body = {"prompt": prompt, "prompt_id": prompt_id, "client_id": client_id}
        status, answer = await self._request("POST", "/prompt", body)
        if status == 200 and not answer.get("node_errors"):
            return None
        return Refusal(refusal(status, answer), missing(answer, prompt))

    async def history(self, prompt_id: str, prompt: Workflow) -> Entry | None:
        """None: the server knows of no such prompt, or has not finished it."""
        found = (await self._json("GET", f"/history/{prompt_id}")).get(prompt_id)
        return found and entry(found, prompt)

    async def cancel(self, prompt_ids: list[str]) -> None:
        """Takes waiting prompts out of the queue, and interrupts the one that runs if it is among these."""
        await self._request("POST", "/queue", {"delete": prompt_ids})
        for prompt_id in prompt_ids:
            await self._request("POST", "/interrupt", {"prompt_id": prompt_id})

    async def forget(self, prompt_id: str) -> None:
        """Takes a finished prompt out of the history, which the server keeps in memory."""
        await self._request("POST", "/history", {"delete": [prompt_id]})

    async def fetch(self, file: dict[str, str]) -> bytes | None:
        """The bytes of a file; None where the server does not give it."""
        query = {key: file[key] for key in ("filename", "subfolder", "type")}
        try:
            async with self._session.get(f"{self._base}/view", params=query) as reply:
                if reply.status in BUSY_GATEWAY:
                    raise ServerAwayError(f"{self.url} answered {reply.status}")
                return await reply.read() if reply.status == 200 else None
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise self._away(error) from error

    async def _json(self, method: str, path: str) -> Any:
        status, answer = await self._request(method, path)
        if status != 200 or not isinstance(answer, dict):
            raise ServerAwayError(f"{self.url}{path} answered {status}: is that ComfyUI?")
        return answer

    async def _request(self, method: str, path: str, body: dict | None = None) -> tuple[int, Any]:
        try:
            async with self._session.request(method, self._base + path, json=body) as reply:
                if reply.status in BUSY_GATEWAY:
                    raise ServerAwayError(f"{self.url} answered {reply.status}")
                if reply.content_type == "application/json":
                    return reply.status, await reply.json()
                return reply.status, await reply.text(errors="replace")
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            raise self._away(error) from error

    def _away(self, error: Exception) -> ServerAwayError:
        if isinstance(error, ServerAwayError):
            return error
        if isinstance(getattr(error, "os_error", None), ConnectionRefusedError):
            return ServerAwayError(f"{self.url}: no ComfyUI answers on port {error.port}. Start it (python main.py in "
                                   f"its folder: port {PORT}), or name another address with --server.", gone=True)
        if isinstance(error, asyncio.TimeoutError):
            return ServerAwayError(f"{self.url} does not answer in time.")
        return ServerAwayError(f"{self.url}: {str(error) or type(error).__name__}")


def refusal(status: int, answer: Any) -> str:
    if not isinstance(answer, dict):
        return f"ComfyUI answered {status}: {' '.join(str(answer).split())[:200]}"
    problems = [f"{node['class_type']}: {problem['message']} ({problem['details']})"
                for node in (answer.get("node_errors") or {}).values() for problem in node["errors"]]
    error = answer.get("error")
    message = error.get("message", "") if isinstance(error, dict) else str(error or "")
    return "ComfyUI refused the workflow: " + ("; ".join(problems) or message or "no reason given")


def missing(answer: Any, prompt: Workflow) -> list[str]:
    """Nodes and values that this answer to a prompt says are not there."""
    if not isinstance(answer, dict):
        return []
    error = answer.get("error")
    if isinstance(error, dict) and error.get("type") in NO_SUCH_NODE:
        return [error["message"]]
    return [str(prompt[node]["inputs"].get(problem.get("extra_info", {}).get("input_name")))
            for node, about in (answer.get("node_errors") or {}).items() for problem in about["errors"]
            if problem.get("type") in NO_SUCH_VALUE]


def entry(found: dict[str, Any], prompt: Workflow) -> Entry:
    """Files and traces in the order of the prompt's nodes: ComfyUI's is that in which they happened to run."""
    status = found.get("status") or {}
    messages = dict(status.get("messages") or [])
    outcome = next((ENDS[event] for event in messages if event in ENDS), status.get("status_str", "error"))
    data = next((data for event, data in messages.items() if event in ENDS), {})
    begun = messages.get("execution_start", data).get("timestamp", 0)
    seconds = (data.get("timestamp", begun) - begun) / 1000
    order = {node: place for place, node in enumerate(prompt)}
    nodes = sorted(found.get("outputs") or {}, key=lambda node: order.get(node, len(order)))  # added by nodes: last
    outputs = {node: found["outputs"][node] for node in nodes}
    error = ""
    if outcome == "error":
        text = " ".join(str(data.get("exception_message", "no reason given")).split())
        error = f"{data.get('node_type', 'ComfyUI')}: {text}"
    reports = [found for node, output in outputs.items() for found in reports_of(prompt.get(node), output)]
    notices = dict.fromkeys(notice for _, report in reports for notice in report["settings"].get("notices", []))
    return Entry(outcome, seconds, error, files_of(outputs), traces_of(reports), list(notices))


def files_of(outputs: dict[str, dict]) -> list[dict[str, str]]:
    """Everything that was saved, with the node that saved it; of workflows that save nothing, what they show."""
    listed = [(node, file) for node, output in outputs.items() for value in output.values() if isinstance(value, list)
              for file in value if isinstance(file, dict) and "filename" in file]
    files = [{"filename": file["filename"], "subfolder": file.get("subfolder", ""),
              "type": file.get("type", "output"), "node": node} for node, file in listed]
    return [file for file in files if file["type"] == "output"] or files


def reports_of(node: dict | None, output: dict) -> list[tuple[str | None, dict]]:
    """What a node reported of the runs whose traces it got, each with the id of the node that the trace came from."""
    reports = [report for report in output.get("specar", []) if "totals" in report]
    inputs = node["inputs"].items() if node else ()
    sources = [str(value[0]) for name, value in inputs if name.startswith("trace") and isinstance(value, list)]
    if len(sources) != len(reports):  # a node added by another one
        return [(None, report) for report in reports]
    return list(zip(sources, reports, strict=True))


def traces_of(reports: list[tuple[str | None, dict]]) -> list[dict[str, Any]]:
    """Sampler, method and totals of every run that Acceptance Map, Compare Runs or Save Trace reported."""
    found = [{"node": node, "method": report["settings"].get("method"), **report["totals"]} for node, report in reports]
    return [trace for number, trace in enumerate(found) if trace not in found[:number]]
