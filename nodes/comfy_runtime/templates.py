"""The list of the pack's templates in the order of their numbers: ComfyUI sends it in that of the folder, as it lies on
the disk, and the front end shows what it gets."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

PACK = Path(__file__).parents[2].name  # by which ComfyUI calls it: that of a link, if it is one


@web.middleware
async def sorted_templates(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    response = await handler(request)
    if request.path.removeprefix("/api") != "/workflow_templates" or not isinstance(response, web.Response):
        return response
    templates = json.loads(response.text or "{}")
    if PACK in templates:
        templates[PACK].sort()
    return web.json_response(templates)


def sort_templates() -> None:
    """Let the server sort them, if there is one: before it starts, it takes middlewares."""
    server = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
    if server is not None and not server.app.middlewares.frozen:
        server.app.middlewares.append(sorted_templates)
