"""Reading the answers of servers, which may be any program. Sizes are bounded and types are checked: what is not an
answer of ComfyUI raises UnexpectedAnswerError, with a printable message."""

import json
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import aiohttp

from ..limits.limits import ANSWER_VALUES, NAME, NESTED, SAID, TOTALS, WORD, parse_json
from ..limits.printable import printable

ENDLESS = 2.0**64  # more than any number that is read here
hiding: ContextVar[Callable[[str], str]] = ContextVar("hiding", default=str)  # what is private, in an answer being read


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
    """The object that an answer in JSON must be. Numbers that no answer has (infinite ones, NaN) count as missing."""
    try:
        answer = parse_json(body, ANSWER_VALUES, parse_float=finite, parse_constant=finite)
    except ValueError:
        raise UnexpectedAnswerError(f"not JSON: {excerpt(body)}") from None
    if not isinstance(answer, dict):
        raise UnexpectedAnswerError(f"not an object: {excerpt(body)}")
    return answer


def finite(text: str) -> float | None:
    return number if abs(number := float(text)) < ENDLESS else None


def excerpt(body: bytes) -> str:
    """The beginning of an answer, in one line, for a message."""
    return one_line(body[:NAME].decode(errors="replace"), WORD) or "nothing"


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
        raise UnexpectedAnswerError(f"{name} is {one_line(value, WORD)}")
    return value


def get_text(of: Any, name: str, default: str = "") -> str:
    """A string for messages, in one line."""
    return one_line(get(of, name, str, default))


def one_line(text: str, most: int = SAID) -> str:
    """A text for messages and files: printable, in one line, of at most `most` characters, with nothing private."""
    return printable(" ".join(hiding.get()(text).split()), most)


def bounded(value: Any, nested: int = NESTED) -> Any:
    """A copy of a JSON value for a file: its strings are for files, too, and `nested` levels are allowed."""
    if isinstance(value, str):
        return one_line(value)
    if not isinstance(value, dict | list):
        return value
    if not nested:
        raise UnexpectedAnswerError("totals are nested too deeply")
    if isinstance(value, list):
        return [bounded(item, nested - 1) for item in value]
    return {one_line(key, NAME): bounded(item, nested - 1) for key, item in value.items()}


def get_totals(report: dict[str, Any]) -> dict[str, Any]:
    """The totals of a run, for the results."""
    totals = bounded(get(report, "totals", dict))
    if len(json.dumps(totals)) > TOTALS:
        raise UnexpectedAnswerError("the totals of a run are too long")
    return totals
