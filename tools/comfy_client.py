"""A small client of ComfyUI's HTTP and websocket API: queue a prompt, follow it, fetch what it made."""

import asyncio
import json
import struct
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from comfyui_specar.batch.answers import (
    Answer,
    Mapped,
    UnexpectedAnswerError,
    excerpt,
    parse_object,
    read_answer,
    read_body,
)
from comfyui_specar.limits.limits import ANSWER_BYTES

PREVIEW_WITH_METADATA = 4  # binary event: length of the JSON, the JSON, the encoded image
FINAL_EVENTS = {"execution_success": "success", "execution_error": "error", "execution_interrupted": "interrupted"}


@dataclass
class Run:
    """The result of one queued prompt.

    `outcome` is success, error, interrupted, or rejected (refused by /prompt; `error` is then the reply's body).
    `events` are the websocket messages about this prompt, in order; `outputs` is what /history keeps, by node id.
    """

    prompt_id: str
    outcome: str = "rejected"
    error: dict = field(default_factory=dict)
    node_errors: dict = field(default_factory=dict)
    events: list[tuple[str, dict]] = field(default_factory=list)
    previews: list[bytes] = field(default_factory=list)
    outputs: dict = field(default_factory=dict)

    def message(self) -> str:
        """The server's whole message about a failure."""
        if self.outcome == "error":
            return self.error.get("exception_message", "no reason given")
        return json.dumps([self.error, self.node_errors])

    def collect(self, key: str) -> list[dict]:
        """The entries of one UI key (`images`, `specar`, ...) over all nodes."""
        return [entry for output in self.outputs.values() for entry in output.get(key, [])]


class Submitted(Answer):
    node_errors: Mapped = {}
    error: Mapped = {}


class Message(Answer):
    type: str
    data: Any = None


class History(Answer):
    outputs: dict[str, dict[str, Any]]


Follower = Callable[[Run, str, dict], Awaitable[None]]


async def run_prompt(url: str, prompt: dict, follow: Follower | None = None, timeout: float = 600.0) -> Run:
    """Queues an API-format prompt and waits for its end. `follow` is awaited with (run, event, data) for every message
    about this prompt.

    Raises asyncio.TimeoutError after `timeout` seconds, and aiohttp.ClientError when the server goes away, or answers
    as no ComfyUI does (UnexpectedAnswerError).
    """
    return await asyncio.wait_for(_run_prompt(url, prompt, follow), timeout)


async def _run_prompt(url: str, prompt: dict, follow: Follower | None) -> Run:
    client_id, run = uuid.uuid4().hex, Run(str(uuid.uuid4()))
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{url}/ws?clientId={client_id}", max_msg_size=ANSWER_BYTES) as socket,
    ):
        await socket.send_json({"type": "feature_flags", "data": {"supports_preview_metadata": True}})
        body = {"prompt": prompt, "client_id": client_id, "prompt_id": run.prompt_id}
        async with session.post(f"{url}/prompt", json=body) as reply:
            content = await read_body(reply, ANSWER_BYTES)
            if reply.status not in (200, 400):
                raise UnexpectedAnswerError(f"/prompt answered {reply.status}: {excerpt(content)}")
            answer = read_answer(Submitted, content)
            run.node_errors = answer.node_errors
            if reply.status == 400:
                run.error = answer.error
                return run
        await _follow_to_the_end(socket, run, follow)
        async with session.get(f"{url}/history/{run.prompt_id}") as reply:
            answer = parse_object(await read_body(reply, ANSWER_BYTES))
            run.outputs = read_answer(History, answer.get(run.prompt_id)).outputs
    return run


async def _follow_to_the_end(socket: aiohttp.ClientWebSocketResponse, run: Run, follow: Follower | None) -> None:
    while True:
        message = await socket.receive()
        if message.type == aiohttp.WSMsgType.BINARY:
            kind, metadata_size = struct.unpack(">II", message.data[:8].ljust(8, b"\0"))
            if kind == PREVIEW_WITH_METADATA:
                run.previews.append(message.data[8 + metadata_size :])
            continue
        if message.type != aiohttp.WSMsgType.TEXT:
            raise aiohttp.ClientConnectionError("ComfyUI closed the connection before the prompt ended")
        content = read_answer(Message, message.data.encode())
        event, data = content.type, content.data
        if not isinstance(data, dict) or data.get("prompt_id") != run.prompt_id:
            continue
        run.events.append((event, data))
        if event in FINAL_EVENTS:
            run.outcome = FINAL_EVENTS[event]
            run.error = data if run.outcome == "error" else {}
        if follow is not None:
            await follow(run, event, data)
        # The history is written between the final event and this message.
        if event == "executing" and data.get("node") is None:
            return


async def interrupt(url: str, prompt_id: str) -> None:
    """Stops that prompt if it is running."""
    body = {"prompt_id": prompt_id}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/interrupt", json=body) as reply:
        reply.raise_for_status()


async def get_json(url: str, path: str):
    async with aiohttp.ClientSession() as session, session.get(url + path) as reply:
        reply.raise_for_status()
        return await reply.json()


async def view(url: str, file: dict) -> bytes:
    """The bytes of one file that a node reported (an entry of `images`)."""
    query = {key: file[key] for key in ("filename", "subfolder", "type")}
    async with aiohttp.ClientSession() as session, session.get(f"{url}/view", params=query) as reply:
        reply.raise_for_status()
        return await reply.read()
