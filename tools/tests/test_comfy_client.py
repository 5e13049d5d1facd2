"""The client of the demo and of tests, on a server of two messages: what it notes, passes over and refuses."""

import struct

import pytest
from aiohttp import ClientConnectionError, web
from comfyui_specar.batch.answers import UnexpectedAnswerError
from comfyui_specar.tests.support.fake_comfy import WORKFLOW, asynchronous
from comfyui_specar.tests.support.patience import PATIENCE
from comfyui_specar.tools import comfy_client

PREVIEW = struct.pack(">II", comfy_client.PREVIEW_WITH_METADATA, 2) + b"{}image"
OTHER_BINARY = struct.pack(">II", comfy_client.PREVIEW_WITH_METADATA + 1, 2) + b"{}image"


async def run(
    *odd: bytes | str, end: str = "execution_success", asked: dict | None = None, status: int = 200, **given
) -> comfy_client.Run:
    """A prompt whose server says these odd messages and the end. asked: gets the body that the server was sent."""
    asked = {} if asked is None else asked
    app, runner = web.Application(), None

    async def events(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        while "prompt_id" not in asked:
            await comfy_client.asyncio.sleep(0.001)
        for message in odd:
            await (socket.send_bytes(message) if isinstance(message, bytes) else socket.send_str(message))
        for event in (end, "executing") if end else ():
            data = {"prompt_id": asked["prompt_id"], "node": None, "exception_message": "no memory"}
            await socket.send_json({"type": event, "data": data})
        await socket.close()
        return socket

    async def prompt(request: web.Request) -> web.Response:
        asked.update(await request.json())
        answer = {"prompt_id": asked["prompt_id"], "node_errors": {}, "error": {"type": "no"}}
        return web.json_response(answer, status=status)

    async def history(request: web.Request) -> web.Response:
        return web.json_response({request.match_info["id"]: {"outputs": {"9": {"images": [1]}, "8": {"images": [2]}}}})

    app.add_routes([web.get("/ws", events), web.post("/prompt", prompt), web.get("/history/{id}", history)])
    runner = web.AppRunner(app, shutdown_timeout=0.01)  # aiohttp takes 0 for no limit
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return await comfy_client.run_prompt(url, WORKFLOW, timeout=PATIENCE, **given)
    finally:
        await runner.cleanup()


@asynchronous
async def test_messages_of_other_kinds_and_prompts_are_passed_over():
    asked, heard = {}, []

    async def follow(_run, event, data):
        heard.append((event, data))

    odd = [b"", b"\0\0\0\4", b"\0\0\0\4\xff\xff\xff\xffab", OTHER_BINARY, PREVIEW, '{"type": "status"}']
    odd += ['{"type": "a", "data": [1]}', '{"type": "executing", "data": {"prompt_id": {}, "node": null}}']
    found = await run(*odd, asked=asked, follow=follow)
    assert found.outcome == "success" and b"image" in found.previews and found.collect("images") == [1, 2]
    assert [event for event, _ in heard] == ["execution_success", "executing"] and heard == found.events
    assert asked["prompt"] == WORKFLOW and asked["prompt_id"] == found.prompt_id


@pytest.mark.parametrize("odd", ["[]", "<html>", "[" * 9**6, '{"type": 5, "data": {}}', "{}"])
@asynchronous
async def test_what_no_comfyui_says_is_unexpected(odd):
    with pytest.raises(UnexpectedAnswerError):
        await run(odd)


@asynchronous
async def test_how_a_prompt_ends():
    failed = await run(end="execution_error")
    assert failed.outcome == "error" and failed.message() == "no memory"
    assert (await run(end="execution_interrupted")).outcome == "interrupted"
    refused = await run(status=400)
    assert refused.outcome == "rejected" and refused.error == {"type": "no"} and "no" in refused.message()
    for status in (500, 201):
        with pytest.raises(UnexpectedAnswerError, match=f"/prompt answered {status}"):
            await run(status=status)
    with pytest.raises(ClientConnectionError, match="before the prompt ended"):
        await run(end="")
