"""What a stage finds, written to a file item by item."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ..report import Record

OUT_OF_TIME = "out of time"
MOST_FAILURES = 5  # after which a stage looks no further: a GPU that has failed once may fail in everything
T = TypeVar("T")


class NotRun(Exception):  # noqa: N818 (not an error)
    """A stage cannot run here; the message says why."""


def read(path: Path | None) -> dict[str, Any]:
    """What a stage has written so far."""
    return json.loads(path.read_text(encoding="utf-8")) if path and path.is_file() else {}


class Findings(Record):
    """Rows of results, failures and warnings. ``dry``: there is no device, and models are tiny.

    Where ``out`` exists, an earlier call has begun the stage: what it found is kept, and only the rest is run.
    """

    def __init__(self, out: Path | None, seconds: float, dry: bool):
        super().__init__({"summary": "", "rows": [], "failures": [], "warnings": [], "at": None}, out, seconds)
        self.content |= read(out)
        self.dry = dry

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.content["rows"]

    def failure(self, what: str) -> None:
        self.content["failures"].append(what)
        self.save()

    def warning(self, what: str) -> None:
        self.content["warnings"].append(what)
        self.save()

    def has(self, **about: Any) -> bool:
        """Is there a row with these entries?"""
        return any(about.items() <= row.items() for row in self.rows)

    def of(self, stage: str) -> list[dict[str, Any]]:
        """The rows of another stage, as far as it has come."""
        return read(self.out and self.out.with_name(f"{stage}.json")).get("rows", [])

    def each(self, things: Iterable[T], what: str, key: str = "", **about: Any) -> Iterator[T]:
        """The things, as long as there is time and not too much has failed; the rest is not run. key: the entry of a
        row that is the thing; those that have a row already, with the entries ``about``, are left out."""
        things = [thing for thing in things if not (key and self.has(**about, **{key: thing}))]
        for number, thing in enumerate(things):
            failed = len(self.content["failures"]) >= MOST_FAILURES
            if failed or not self.in_time:
                self.not_run(f"{len(things) - number} {what}", "too much failed before" if failed else OUT_OF_TIME)
                return
            yield thing

    @contextmanager
    def trying(self, title: str) -> Iterator[None]:
        """Whatever is raised meanwhile is a failure of this title, or the reason why it was not run; it ends here."""
        self.content["at"] = title
        self.save()
        try:
            yield
        except NotRun as reason:
            self.not_run(title, str(reason))
        except Exception as error:
            traceback.print_exc()
            self.failure(f"{title}: {type(error).__name__}: {str(error)[:500]}")
        self.content["at"] = None
        self.save()

    @contextmanager
    def item(self, **about: Any) -> Iterator[dict[str, Any]]:
        """A row, to be filled meanwhile. Of an item that fails or cannot be run there is none."""
        row = dict(about)
        with self.trying(", ".join(map(str, about.values()))):
            yield row
            self.rows.append(row)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """What the pack warns of meanwhile (a kernel or a graph that does not work here) is a failure."""
        logger, ears = logging.getLogger("comfyui_specar"), _Ears(self)
        logger.addHandler(ears)
        try:
            yield
        finally:
            logger.removeHandler(ears)


class _Ears(logging.Handler):
    def __init__(self, findings: Findings):
        super().__init__(logging.WARNING)
        self.findings = findings

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()[:500]
        if message not in self.findings.content["failures"]:
            self.findings.failure(message)
