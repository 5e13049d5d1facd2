"""What a stage finds, written to a file item by item."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ..report import Record

NEEDS_DEVICE = "needs a CUDA device"
OUT_OF_TIME = "out of time"
MOST_FAILURES = 5  # after which a stage looks no further: a GPU that has failed once may fail in everything
T = TypeVar("T")


class NotRun(Exception):  # noqa: N818 (not an error)
    """A stage cannot run here; the message says why."""


class Findings(Record):
    """Rows of results, failures and warnings. ``dry``: there is no device, and models are tiny."""

    def __init__(self, out: Path | None, seconds: float, dry: bool):
        super().__init__({"summary": "", "rows": [], "failures": [], "warnings": [], "at": None}, out, seconds)
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

    def needs_device(self, what: str) -> None:
        """In a dry run, this is not run."""
        if self.dry:
            self.not_run(what, NEEDS_DEVICE)

    def each(self, things: Iterable[T], what: str) -> Iterator[T]:
        """The things, as long as there is time and not too much has failed; the rest is not run."""
        things = list(things)
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
