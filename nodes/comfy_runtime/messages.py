"""Messages to the page of the user whose prompt is running."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from comfy_execution.utils import get_executing_context


def show_run(run: dict[str, Any]) -> None:
    """Show how far a run is (see status.py) on the node that is executing."""
    send("specar.run", run=run)


def notify(notices: Iterable[str]) -> None:
    """Show sentences on the node that is executing, instead of those of its last run; none: take these away."""
    send("specar.notices", notices=list(notices))


def send(event: str, **data: Any) -> None:
    """Send an event to our own JavaScript, with the id of the executing node as ``node``."""
    if found := _page():
        server, node_id = found
        server.send_sync(event, {"node": node_id, **data}, server.client_id)


def _page() -> tuple[Any, str] | None:
    """The server and the id of the executing node; None if no page follows this run: without a server, or for a prompt
    that names no client."""
    module = sys.modules.get("server")  # importing it without a server would import all of ComfyUI's nodes
    server = getattr(getattr(module, "PromptServer", None), "instance", None)
    context = get_executing_context()
    if context is None or getattr(server, "client_id", None) is None:
        return None
    return server, context.node_id
