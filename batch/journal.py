"""What a batch has done so far, on disk, so that it can be stopped at any time and resumed.

Two files of JSON lines that only grow: the results (a line for every job that has ended) and, next to them, the journal
(a line for every submission to a server). Every line is on disk before the next step is taken.
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
SUBMISSION = {"job": str, "attempt": int, "server": str, "prompt_id": str, "fingerprint": str}  # and the time
LOCKED_BYTE = 1 << 30  # past the file's contents: on Windows, locked bytes cannot be read


class JournalError(RuntimeError):
    """The results cannot be continued; the message says why and what to do."""


class JsonLines:
    """A file of JSON objects, one a line. Reading changes nothing; the first `append` removes what a crash has left of
    a last line."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a+b")
        self._length: int | None = None  # of the complete lines, where something else follows
        self._end = b""  # what the last line lacks

    def read(self) -> list[dict[str, Any]]:
        """Raises JournalError for a damaged line."""
        self.file.seek(0)
        content = self.file.read()
        *lines, last = content.split(b"\n")
        if parsed(last) is not None:  # only its end is missing, as some editors leave it
            lines.append(last)
            self._end = b"\n"
        elif lines or last.startswith(b"{"):
            self._length = len(content) - len(last)
        elif last:  # the whole file, which is not ours
            lines.append(last)
        records = []
        for number, line in enumerate(lines, 1):
            if (record := parsed(line)) is None:
                remedy = "repair it, or move the file away to begin a new batch"
                raise JournalError(f"{self.path}, line {number} is damaged: {remedy}")
            records.append(record)
        return records

    def append(self, record: dict[str, Any]) -> None:
        """Raises OSError, with the file's name."""
        with naming(self.path):
            if self._length is not None:
                self.file.truncate(self._length)
            self.file.write(self._end + json.dumps(record, ensure_ascii=False).encode() + b"\n")
            self._length, self._end = None, b""
            self.file.flush()
            os.fsync(self.file.fileno())

    def close(self) -> None:
        with suppress(OSError):  # it tries again to write what `append` could not, which has been reported
            self.file.close()


class Journal:
    """A context manager that locks the files against other processes, until this one ends.

    submitted: job id -> its last submission. results: job id -> its last result.
    """

    def __init__(self, path: Path):
        self.path = path
        self.results: dict[str, dict[str, Any]] = {}
        self.submitted: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> "Journal":
        try:
            self._submissions = JsonLines(self.path.with_name(self.path.name + ".journal"))
            lock(self._submissions.file)
            self._results = JsonLines(self.path)
        except BlockingIOError as error:
            raise JournalError(
                f"another process is writing {self.path}: let it end, or choose other --results"
            ) from error
        except OSError as error:
            raise JournalError(f"cannot write {self.path}: {error.strerror}") from error
        self._read_submissions()
        for record in self._results.read():
            if not isinstance(record.get("id"), str) or not isinstance(record.get("status"), str):
                raise JournalError(f"{self.path} exists and holds no results: choose other --results")
            self.results[record["id"]] = without_private(record)
        return self

    def __exit__(self, *_exc) -> None:
        self._submissions.close()
        self._results.close()

    def _read_submissions(self) -> None:
        path, entries = self._submissions.path, self._submissions.read()
        if not entries:
            entries = [{"schema": SCHEMA, "batch": uuid.uuid4().hex}]
            self._submissions.append(entries[0])
        remedy = "repair it, or move the file and its results away to begin a new batch"
        if entries[0].get("schema") != SCHEMA:
            raise JournalError(f"{path} is not the journal of a batch: choose other --results")
        self.batch = entries[0].get("batch")
        if not isinstance(self.batch, str) or not re.fullmatch("[0-9a-f]{32}", self.batch):
            raise JournalError(f"{path}: its first line does not name its batch: {remedy}")
        for number, entry in enumerate(entries[1:], 2):
            if not all(isinstance(entry.get(name), kind) for name, kind in SUBMISSION.items()):
                raise JournalError(f"{path}, line {number} is not the submission of a job: {remedy}")
            self.submitted[entry["job"]] = without_private(entry)

    def changed(self, job: str, fingerprint: str) -> bool:
        """Was the job submitted with other settings, or for another workflow?"""
        return job in self.submitted and self.submitted[job]["fingerprint"] != fingerprint

    def check(self, prints: dict[str, str]) -> None:
        """Raises JournalError for jobs that have an image and another fingerprint (job id -> fingerprint). A job that
        has none may be corrected under its id."""
        if others := [job for job, known in prints.items() if self.done(job) and self.changed(job, known)]:
            raise JournalError(
                f"{listed(others)}: already in {self.path} with an image of other settings or of "
                "another workflow. Give such jobs other ids, or choose other --results"
            )

    def done(self, job: str) -> bool:
        """Has the job its image?"""
        return self.results.get(job, {}).get("status") == "success"

    def ended(self, job: str, fingerprint: str, retry_failed: bool) -> bool:
        """Is nothing left to do for the job? A failed job that was corrected since is run again."""
        failed = job in self.results and not retry_failed and not self.changed(job, fingerprint)
        return self.done(job) or failed

    def prompt_id(self, job: str, attempt: int) -> str:
        """The id of an attempt: the same after a crash, and different for every attempt of every batch."""
        return str(uuid.uuid5(uuid.UUID(self.batch), f"{job}/{attempt}"))

    def write_submission(self, job: str, fingerprint: str, attempt: int, server: str) -> dict[str, Any]:
        """Appends a line to the journal, before the server is asked. Returns it."""
        entry = {"job": job, "attempt": attempt, "server": server, "prompt_id": self.prompt_id(job, attempt)}
        entry |= {"fingerprint": fingerprint, "time": now()}
        self._submissions.append(entry)
        self.submitted[job] = entry
        return entry

    def write_result(self, record: dict[str, Any]) -> dict[str, Any]:
        """Appends a line to the results, before the server forgets the job. A line that is written again keeps the time
        of the first. Returns it."""
        record = {**record, "ended": record.get("ended") or now()}
        self._results.append(record)
        self.results[record["id"]] = record
        return record


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
    """The object that a line holds; None for any other line."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def lock(file: BinaryIO) -> None:
    """Locks a file until it is closed. Raises BlockingIOError where another process has locked it."""
    if os.name == "nt":
        import msvcrt

        file.seek(LOCKED_BYTE)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError from error
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
