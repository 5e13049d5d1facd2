"""Answers of servers, which may be any program and say anything: bounded, and taken apart by their shape. What is not
an answer of ComfyUI raises UnexpectedAnswerError, whose message says why, in printable words."""

import json
import math
from typing import Any

import aiohttp

from ..common.limits import ANSWER_VALUES, NAME, NESTED, SAID, TOTALS, WORD, parse_json
from ..common.printable import printable


class UnexpectedAnswerError(aiohttp.ClientError):
    """Not an answer of ComfyUI; the message says what of it."""


async def body_of(reply: aiohttp.ClientResponse, most: int) -> bytes:
    """Raises UnexpectedAnswerError for more than so many bytes."""
    parts, size = [], 0
    async for part in reply.content.iter_any():
        size += len(part)
        if size > most:
            raise UnexpectedAnswerError(f"it is longer than {most / 2**20:g} MiB")
        parts.append(part)
    return b"".join(parts)


def parsed(body: bytes) -> Any:
    """The value of an answer in JSON. Raises UnexpectedAnswerError."""
    try:
        return parse_json(body, ANSWER_VALUES)
    except ValueError:
        raise UnexpectedAnswerError(f"no JSON: {seen(body)}") from None


def json_of(body: bytes) -> dict[str, Any]:
    """The object that most answers are. Raises UnexpectedAnswerError."""
    answer = parsed(body)
    if not isinstance(answer, dict):
        raise UnexpectedAnswerError(f"not an object: {seen(body)}")
    return answer


def seen(body: bytes) -> str:
    """How an answer begins."""
    return printable(" ".join(body[:NAME].decode(errors="replace").split()), WORD) or "nothing"


def part(of: Any, name: str, kind: type | tuple[type, ...], *default: Any) -> Any:
    """of[name]. default: where it is missing or null. Raises UnexpectedAnswerError for other kinds."""
    if not isinstance(of, dict):
        raise UnexpectedAnswerError(f"there is no object to have {name}")
    value = of.get(name)
    if value is None and default:
        return default[0]
    if not isinstance(value, kind):
        raise UnexpectedAnswerError(f"{name} is {'missing' if value is None else f'a {type(value).__name__}'}")
    return value


def parts(of: Any, name: str, kind: type) -> list[Any]:
    """The items of the list of[name], none where it is missing. Raises UnexpectedAnswerError for other kinds."""
    found = part(of, name, list, [])
    if not all(isinstance(item, kind) for item in found):
        raise UnexpectedAnswerError(f"{name} is not a list of {kind.__name__}s")
    return found


def name_in(of: Any, name: str, *default: str) -> str:
    """A text that is used as it is. Raises UnexpectedAnswerError for one that is none, too long or not printable."""
    value = part(of, name, str, *default)
    if len(value) > NAME or printable(value) != value:
        raise UnexpectedAnswerError(f"{name} is {printable(value, WORD)}")
    return value


def words_in(of: Any, name: str, default: str = "") -> str:
    """A text for people, in one line."""
    return said(part(of, name, str, default))


def said(text: str) -> str:
    return printable(" ".join(text.split()), SAID)


def number_in(of: Any, name: str, default: float) -> float:
    """A time. Raises UnexpectedAnswerError for one that no clock shows."""
    value = part(of, name, (int, float), default)
    if not -(2**63) <= value <= 2**63:
        raise UnexpectedAnswerError(f"{name} is no time")
    return value


def plain(value: Any, nested: int = NESTED) -> Any:
    """A value that goes into a file as it is, its texts printable. Raises UnexpectedAnswerError."""
    if isinstance(value, str):
        return printable(value, SAID)
    if isinstance(value, float) and not math.isfinite(value):
        raise UnexpectedAnswerError("a number is not finite")
    if not isinstance(value, dict | list):
        return value
    if not nested:
        raise UnexpectedAnswerError("totals are nested too deeply")
    if isinstance(value, list):
        return [plain(item, nested - 1) for item in value]
    return {printable(key, NAME): plain(item, nested - 1) for key, item in value.items()}


def totals_in(report: dict[str, Any]) -> dict[str, Any]:
    """The totals of a run, as they go into the results. Raises UnexpectedAnswerError."""
    totals = plain(part(report, "totals", dict))
    if len(json.dumps(totals)) > TOTALS:
        raise UnexpectedAnswerError("the totals of a run are too long")
    return totals
