"""The answers of servers, which may be any program. Sizes are bounded and kinds are checked: what is not an answer of
ComfyUI raises UnexpectedAnswerError, with a printable message."""

import json
from collections.abc import Callable
from contextvars import ContextVar
from typing import Annotated, Any, TypeVar

import aiohttp
from pydantic import (
    AfterValidator,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    model_validator,
)

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


def one_line(text: str, most: int = SAID) -> str:
    """A text for messages and files: printable, in one line, of at most `most` characters, with nothing private."""
    return printable(" ".join(hiding.get()(text).split()), most)


def copy_bounded(value: Any, nested: int = NESTED) -> Any:
    """A copy of a JSON value for a file: its strings are for files, too, and `nested` levels are allowed."""
    if isinstance(value, str):
        return one_line(value)
    if not isinstance(value, dict | list):
        return value
    if not nested:
        raise UnexpectedAnswerError("totals are nested too deeply")
    if isinstance(value, list):
        return [copy_bounded(item, nested - 1) for item in value]
    return {one_line(key, NAME): copy_bounded(item, nested - 1) for key, item in value.items()}


def checked_name(text: str) -> str:
    """A string that is used unchanged: it must be short and printable."""
    if len(text) > NAME or printable(text) != text:
        raise ValueError(f"is {one_line(text, WORD)}")
    return text


def checked_totals(found: dict[str, Any]) -> dict[str, Any]:
    """The totals of a run, for the results."""
    totals = copy_bounded(found)
    if len(json.dumps(totals)) > TOTALS:
        raise ValueError("the totals of a run are too long")
    return totals


def problem(found: Any) -> Any:
    """ComfyUI says some problems of a whole prompt in a text alone."""
    return {"message": found} if isinstance(found, str) else found


def inside(*path: str, default: Any = None) -> Any:
    """A field of an object in the object; without one, the default."""
    return Field(default, validation_alias=AliasPath(*path))


def queued_id(item: Any) -> Any:
    """Items of the queue begin with a number and the id."""
    return item[1] if isinstance(item, list) and len(item) > 1 else None


Text = Annotated[str, AfterValidator(one_line)]  # for messages
Name = Annotated[str, AfterValidator(checked_name)]
Mapped = Annotated[dict[str, Any], BeforeValidator(lambda found: found or {})]  # ComfyUI sends some empty ones as lists
QueuedId = Annotated[str, BeforeValidator(queued_id)]


class Answer(BaseModel):
    """An object in an answer. What is null counts as missing, what is not declared is ignored."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, found: Any) -> Any:
        return {key: value for key, value in found.items() if value is not None} if isinstance(found, dict) else found


class Queue(Answer):
    queue_running: list[QueuedId]
    queue_pending: list[QueuedId]


class Versions(Answer):
    comfyui: Text | None = inside("system", "comfyui_version")
    torch: Text | None = inside("system", "pytorch_version")


class NodeInfo(Answer):
    """Of /object_info: for each kind of input (required, ...) their types and options."""

    input: dict[str, dict[str, Any]] = {}

    @property
    def whole(self) -> set[str]:
        """The inputs that are whole numbers."""
        groups = (group.items() for group in self.input.values())
        return {name for group in groups for name, about in group if isinstance(about, list) and about[:1] == ["INT"]}


class Problem(Answer):
    """Why an input was refused, or the whole prompt."""

    type: str = ""
    message: Text = ""
    details: Text = ""
    input_name: str | None = inside("extra_info", "input_name")


class RefusedNode(Answer):
    class_type: Text = ""
    errors: list[Problem] = []


class Submission(Answer):
    """The answer of /prompt. ComfyUI sends an empty list where it names no node."""

    prompt_id: str | None = None
    node_errors: Annotated[dict[str, RefusedNode], BeforeValidator(lambda found: found or {})] = {}
    error: Annotated[Problem, BeforeValidator(problem)] = Problem()


class Event(Answer):
    timestamp: float | None = None
    node_type: Text = "ComfyUI"
    exception_message: Text = "no reason given"


class Report(Answer):
    method: Text | None = inside("settings", "method")
    notices: list[Text] = inside("settings", "notices", default=[])
    totals: Annotated[dict[str, Any], AfterValidator(checked_totals)]


class Output(Answer):
    """What a node shows, by kind; reports and runs are this pack's."""

    model_config = ConfigDict(extra="allow")
    specar: list[dict[str, Any]] = []
    specar_run: list[str] = []

    @property
    def reports(self) -> list[Report]:
        """Those of runs."""
        return [read_answer(Report, report) for report in self.specar if "totals" in report]


class Ended(Answer):
    """An entry of the history."""

    messages: list[Annotated[tuple[str, Event], Strict(False)]] = inside("status", "messages", default=[])
    status: str = inside("status", "status_str", default="error")
    outputs: dict[str, Output] = {}


class SavedFile(Answer):
    filename: Name
    subfolder: Name = ""
    type: Name = "output"


class Run(Answer):
    notices: list[Text] = []


A = TypeVar("A", bound=Answer)


def read_answer(kind: type[A], found: Any) -> A:
    """What was found, bytes of JSON or its value, as an answer of this kind. Raises UnexpectedAnswerError, which names
    the first part that is of another kind."""
    try:
        return kind.model_validate(parse_object(found) if isinstance(found, bytes) else found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = one_line(".".join(map(str, first["loc"])) or "it", WORD)
        why = "is missing" if first["type"] == "missing" else first["msg"].removeprefix("Value error, ")
        raise UnexpectedAnswerError(f"{where} {why}" if why.startswith("is ") else f"{where}: {why}") from None
