"""Reading the answers of servers, which may be any program. Sizes are bounded and types are checked: what is not an
answer of ComfyUI raises UnexpectedAnswerError, with a printable message."""

import json
import math
from typing import Any

import aiohttp

from ..common.limits import ANSWER_VALUES, NAME, NESTED, SAID, TOTALS, WORD, parse_json
from ..common.printable import printable


class UnexpectedAnswerError(aiohttp.ClientError):
    """This is not an answer of ComfyUI; the message says why."""


async def read_body(reply: aiohttp.ClientResponse, most: int) -> bytes:
    """Reads the whole body of a reply, of at most `most` bytes."""
    parts, size = [], 0
    async for part in reply.content.iter_any():
        size += len(part)
        if size > most:
            raise UnexpectedAnswerError(f"it is longer than {most / 2**20:g} MiB")
        parts.append(part)
    return b"".join(parts)


def parse_object(body: bytes) -> dict[str, Any]:
    """The object that an answer in JSON must be."""
    try:
        answer = parse_json(body, ANSWER_VALUES)
    except ValueError:
        raise UnexpectedAnswerError(f"not JSON: {excerpt(body)}") from None
    if not isinstance(answer, dict):
        raise UnexpectedAnswerError(f"not an object: {excerpt(body)}")
    return answer


def excerpt(body: bytes) -> str:
    """The beginning of an answer, in one line, for a message."""
    return printable(" ".join(body[:NAME].decode(errors="replace").split()), WORD) or "nothing"


def get(of: Any, name: str, kind: type | tuple[type, ...], *default: Any) -> Any:
    """Returns of[name], which must have this type. default: what is returned where it is missing or null."""
    if not isinstance(of, dict):
        raise UnexpectedAnswerError(f"there is no object to have {name}")
    value = of.get(name)
    if value is None and default:
        return default[0]
    if not isinstance(value, kind):
        raise UnexpectedAnswerError(f"{name} is {'missing' if value is None else f'a {type(value).__name__}'}")
    return value


def get_list(of: Any, name: str, kind: type) -> list[Any]:
    """Returns the list of[name], empty where it is missing. Its items must have this type."""
    found = get(of, name, list, [])
    if not all(isinstance(item, kind) for item in found):
        raise UnexpectedAnswerError(f"{name} is not a list of {kind.__name__}s")
    return found


def get_name(of: Any, name: str, *default: str) -> str:
    """A string that is used unchanged: it must be short and printable."""
    value = get(of, name, str, *default)
    if len(value) > NAME or printable(value) != value:
        raise UnexpectedAnswerError(f"{name} is {printable(value, WORD)}")
    return value


def get_text(of: Any, name: str, default: str = "") -> str:
    """A string for messages, in one line."""
    return one_line(get(of, name, str, default))


def one_line(text: str) -> str:
    """A text for messages and files: printable, in one line, of at most SAID characters."""
    return printable(" ".join(text.split()), SAID)


def get_time(of: Any, name: str, default: float) -> float:
    """A number of milliseconds, within 64 bits."""
    value = get(of, name, (int, float), default)
    if not -(2**63) <= value <= 2**63:
        raise UnexpectedAnswerError(f"{name} is not a time")
    return value


def bounded(value: Any, nested: int = NESTED) -> Any:
    """A copy of a JSON value for a file: strings are made printable, `nested` levels are allowed."""
    if isinstance(value, str):
        return printable(value, SAID)
    if isinstance(value, float) and not math.isfinite(value):
        raise UnexpectedAnswerError("a number is not finite")
    if not isinstance(value, dict | list):
        return value
    if not nested:
        raise UnexpectedAnswerError("totals are nested too deeply")
    if isinstance(value, list):
        return [bounded(item, nested - 1) for item in value]
    return {printable(key, NAME): bounded(item, nested - 1) for key, item in value.items()}


def get_totals(report: dict[str, Any]) -> dict[str, Any]:
    """The totals of a run, for the results."""
    totals = bounded(get(report, "totals", dict))
    if len(json.dumps(totals)) > TOTALS:
        raise UnexpectedAnswerError("the totals of a run are too long")
    return totals
