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

from ..limits.limits import parse_json
from .jobs import first_of

SCHEMA = "specar.batch/1"
HEADER = {"schema": str, "batch": str}  # the types of what is read of a line
SUBMISSION = {"job": str, "attempt": int, "server": str, "prompt_id": str, "fingerprint": str}
RESULT = {"id": str, "status": str}
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

    def read(self, kinds: dict[str, type], first: dict[str, type] | None = None) -> list[dict[str, Any]]:
        """All lines. kinds: the types of what each has, and `first` of what the first one has, if it is another.
        Raises JournalError for any other line."""
        self.file.seek(0)
        content = self.file.read()
        *lines, last = content.split(b"\n")
        if parse_line(last) is not None:  # only its end is missing, as some editors leave it
            lines.append(last)
            self._end = b"\n"
        elif lines or last.startswith(b"{"):
            self._length = len(content) - len(last)
        elif last:  # the whole file, which is not ours
            lines.append(last)
        records = []
        for number, line in enumerate(lines, 1):
            record, wanted = parse_line(line), first if first and number == 1 else kinds
            if record is None or not all(isinstance(record.get(name), kind) for name, kind in wanted.items()):
                raise self.damaged(number)
            records.append(record)
        return records

    def damaged(self, number: int) -> JournalError:
        return JournalError(
            f"{self.path}, line {number} is damaged or of another program: repair it, or choose other --results to "
            "begin a new batch"
        )

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
        if self.path.is_dir():
            raise JournalError(f"{self.path} is a folder: choose a file for --results")
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
        entries = self._submissions.read(SUBMISSION, HEADER)
        if not entries:
            entries = [{"schema": SCHEMA, "batch": uuid.uuid4().hex}]
            self._submissions.append(entries[0])
        self.batch = entries[0]["batch"]
        if entries[0]["schema"] != SCHEMA or not re.fullmatch("[0-9a-f]{32}", self.batch):
            raise self._submissions.damaged(1)
        self.submitted = {entry["job"]: entry for entry in entries[1:]}
        self.results = {record["id"]: record for record in self._results.read(RESULT)}
        return self

    def __exit__(self, *_exc) -> None:
        self._submissions.close()
        self._results.close()

    def changed(self, job: str, fingerprint: str) -> bool:
        """Was the job submitted with other settings, or for another workflow?"""
        return job in self.submitted and self.submitted[job]["fingerprint"] != fingerprint

    def underway(self, job: str) -> bool:
        """Was the job submitted, and has that submission no result yet?"""
        last = self.submitted.get(job)
        return last is not None and self.results.get(job, {}).get("prompt_id") != last["prompt_id"]

    def check(self, prints: dict[str, str]) -> None:
        """Raises JournalError for jobs that have an image and another fingerprint (job id -> fingerprint). A job that
        has none may be corrected under its id."""
        if others := [job for job, known in prints.items() if self.done(job) and self.changed(job, known)]:
            raise JournalError(
                f"{first_of(others)}: already in {self.path} with an image of other settings, of another workflow or "
                "of another jobs file. Give such jobs other ids, or choose other --results"
            )

    def done(self, job: str) -> bool:
        """Has the job its image?"""
        return self.results.get(job, {}).get("status") == "success"

    def ended(self, job: str, fingerprint: str, retry_failed: bool) -> bool:
        """Is nothing left to do for the job? A failed job that was corrected or submitted since is run again."""
        again = retry_failed or self.changed(job, fingerprint) or self.underway(job)
        return self.done(job) or (job in self.results and not again)

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


def parse_line(line: bytes) -> dict[str, Any] | None:
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
