"""What a batch has done so far, on disk, so that it can be stopped at any moment and goes on where it was.

Two files: the results (a line for every job that has ended) and, beside them, the journal (a line for every prompt
that was handed to a server). Every line is on disk before the next step is taken.
"""

import json
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from ..common.limits import parse_json
from .address import shown, without_logins
from .jobs import listed

SCHEMA = "specar.batch/1"
ENTRY = {"job": str, "attempt": int, "server": str, "prompt_id": str, "fingerprint": str}  # of the journal
FAR = 1 << 30  # a byte beyond the file's contents, to lock on Windows, where locked bytes cannot be read


class JournalError(RuntimeError):
    """The results cannot be continued; the message says why and what to do."""


class Lines:
    """A file of JSON objects, one a line, that only grows. Reading changes nothing; what a crash left of a last line is
    removed by the next one."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a+b")
        self._length: int | None = None  # of what is whole, until the first line is added
        self._end = b""  # what the last line lacks

    def read(self) -> list[dict[str, Any]]:
        self.file.seek(0)
        content = self.file.read()
        *lines, last = content.split(b"\n")
        if parsed(last) is not None:  # only its end is missing, as some editors leave it
            lines.append(last)
            self._end = b"\n"
        elif lines or last.startswith(b"{"):
            self._length = len(content) - len(last)
        elif last:  # the whole file, and none of ours
            lines.append(last)
        records = []
        for number, line in enumerate(lines, 1):
            record = parsed(line)
            if record is None:
                raise JournalError(
                    f"{self.path}, line {number} is damaged: repair it, or move the file away to begin a new batch"
                )
            records.append(record)
        return records

    def append(self, record: dict[str, Any]) -> None:
        with naming(self.path):
            if self._length is not None:
                self.file.truncate(self._length)
            self.file.write(self._end + json.dumps(record, ensure_ascii=False).encode() + b"\n")
            self._length, self._end = None, b""
            self.file.flush()
            os.fsync(self.file.fileno())

    def close(self) -> None:
        with suppress(OSError):  # it tries again to write what `append` could not, which has been said
            self.file.close()


class Journal:
    """Use as a context manager: it holds a lock against other processes, which the system drops with the process.

    `batch` names the batch; `results` has the last line of every job that has ended, `queued` all submissions of a
    job, oldest first.
    """

    def __init__(self, path: Path):
        self.path = path
        self.results: dict[str, dict[str, Any]] = {}
        self.queued: dict[str, list[dict[str, Any]]] = {}

    def __enter__(self) -> "Journal":
        try:
            self._journal = Lines(self.path.with_name(self.path.name + ".journal"))
            lock(self._journal.file)
            self._results = Lines(self.path)
        except BlockingIOError as error:
            raise JournalError(
                f"another process is writing {self.path}: let it end, or choose other --results"
            ) from error
        except OSError as error:
            raise JournalError(f"cannot write {self.path}: {error.strerror}") from error
        entries = self._journal.read()
        if not entries:
            entries = [{"schema": SCHEMA, "batch": uuid.uuid4().hex}]
            self._journal.append(entries[0])
        if entries[0].get("schema") != SCHEMA:
            raise JournalError(f"{self._journal.path} is not the journal of a batch: choose other --results")
        self.batch = entries[0].get("batch")
        if not isinstance(self.batch, str) or not re.fullmatch("[0-9a-f]{32}", self.batch):
            raise JournalError(
                f"{self._journal.path} does not name its batch: repair its first line, or move the file "
                "and its results away to begin a new batch"
            )
        for entry in entries[1:]:
            if not all(isinstance(entry.get(name), kind) for name, kind in ENTRY.items()):
                raise JournalError(
                    f"{self._journal.path} has a line that says of no job where it is: repair it, or "
                    "move the file and its results away to begin a new batch"
                )
            self.queued.setdefault(entry["job"], []).append(without_private(entry))
        for record in self._results.read():
            if not isinstance(record.get("id"), str) or not isinstance(record.get("status"), str):
                raise JournalError(f"{self.path} is there already and holds no results: choose other --results")
            self.results[record["id"]] = without_private(record)
        return self

    def __exit__(self, *_exc) -> None:
        self._journal.close()
        self._results.close()

    def changed(self, job: str, fingerprint: str) -> bool:
        """Was it handed out with other settings, or for another workflow?"""
        return job in self.queued and self.queued[job][-1]["fingerprint"] != fingerprint

    def check(self, prints: dict[str, str]) -> None:
        """Jobs that have their image are those of these fingerprints; what has none may be corrected under its id.
        Raises JournalError with those that are not."""
        if others := [job for job, known in prints.items() if self.done(job) and self.changed(job, known)]:
            raise JournalError(
                f"{listed(others)}: already in {self.path} with an image of other settings or of "
                "another workflow. Give such jobs other ids, or choose other --results"
            )

    def done(self, job: str) -> bool:
        """Does it have its image?"""
        return self.results.get(job, {}).get("status") == "success"

    def ended(self, job: str, fingerprint: str, retry_failed: bool) -> bool:
        """Is it left alone? A failed job that was corrected since is not."""
        failed = job in self.results and not retry_failed and not self.changed(job, fingerprint)
        return self.done(job) or failed

    def prompt_id(self, job: str, attempt: int) -> str:
        """The same again after a crash, and another one for every attempt of every batch."""
        return str(uuid.uuid5(uuid.UUID(self.batch), f"{job}/{attempt}"))

    def write_queued(self, job: str, fingerprint: str, attempt: int, server: str) -> None:
        """To be called before the server is asked."""
        entry = {
            "job": job,
            "attempt": attempt,
            "server": server,
            "prompt_id": self.prompt_id(job, attempt),
            "fingerprint": fingerprint,
            "time": now(),
        }
        self._journal.append(entry)
        self.queued.setdefault(job, []).append(entry)

    def write_result(self, record: dict[str, Any]) -> None:
        """To be called before the server forgets it. A line that is written again keeps the time of the first."""
        record = {**record, "ended": record.get("ended") or now()}
        self._results.append(record)
        self.results[record["id"]] = record


def without_private(record: dict[str, Any]) -> dict[str, Any]:
    """A line without the login of its server, which earlier versions wrote."""
    cleaned = {"server": shown, "error": without_logins}
    return record | {name: clean(record[name]) for name, clean in cleaned.items() if isinstance(record.get(name), str)}


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Puts the file's name into an OSError that has none, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def now() -> str:
    """The time of a line: UTC, to the second, as "2026-11-23T02:14:05Z"."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def lock(file: BinaryIO) -> None:
    """Raises BlockingIOError where another process has it."""
    if os.name == "nt":
        import msvcrt

        file.seek(FAR)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError from error
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
