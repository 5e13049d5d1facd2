"""The list of images to generate: a CSV or JSON-lines file, one job per row."""

import csv
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ..common.limits import CELL, CELLS, COLUMNS, JOBS, LINES, NAME, PROBLEMS, ROW, TABLE, parse_json
from ..common.printable import printable

DELIMITERS = ",;\t"
ID = re.compile(r"[\w-]{1,100}")  # becomes part of file names, on any system
ID_BYTES = 200  # of the 255 that a file's name may have; prefix, attempt, counter and ending need the others
DEVICE = re.compile(r"con|prn|aux|nul|(com|lpt)[0-9¹²³]", re.IGNORECASE)  # on Windows, whatever the ending of the file
SURROGATE = re.compile("[\ud800-\udfff]")  # which JSON can hold, and no file
SHOWN = 10  # problems or jobs that one message lists
SHOWN_CHARACTERS = 2000  # of one problem, as a cell may have a million
SHOWN_LINES = 3  # that it names of equal problems
Row = tuple[int, dict[str, Any]]  # the line it begins on, and its values
Problem = tuple[int, str]  # the line, and what is wrong with it


class JobsError(ValueError):
    """The jobs file or an option cannot be used; the message says what to do."""


class RowsError(JobsError):
    """Rows cannot be used. The message begins with their lines; equal problems are listed together."""

    def __init__(self, problems: list[Problem]):
        lines: dict[str, list[int]] = {}
        for line, problem in problems:
            lines.setdefault(problem, []).append(line)
        texts = [
            f"line{'s' if len(found) > 1 else ''} {listed(found, SHOWN_LINES)}: {printable(problem, SHOWN_CHARACTERS)}"
            for problem, found in lines.items()
        ]
        more = [f"... and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
        super().__init__("\n".join([*texts[:SHOWN], *more]))


class Scientific(float):
    """A number of a JSON file in scientific notation, which shows only the digits that its writer kept."""


@dataclass(frozen=True)
class Job:
    """`overrides`: column -> value, without the columns that this row leaves empty. CSV values are strings."""

    id: str
    overrides: dict[str, Any]
    line: int


def read_jobs(path: Path) -> list[Job]:
    """The jobs of a .csv (.tsv) file with a header, or of a .jsonl (.ndjson) file with one object per line.

    A column `id` names jobs; where it is missing the id is made of the row's number and contents, so that an edited
    row is a new job. Raises JobsError.
    """
    kinds = {".csv": csv_rows, ".tsv": csv_rows, ".jsonl": json_rows, ".ndjson": json_rows}
    if path.suffix.lower() not in kinds:
        raise JobsError(f"{path}: a jobs file is one of {', '.join(kinds)}")
    try:
        if path.stat().st_size > TABLE:
            raise JobsError(f"{path} has more than {TABLE} bytes: split it into several tables")
        text = path.read_bytes().decode("utf-8-sig")  # Excel begins "CSV UTF-8" with a byte order mark
    except OSError as error:
        raise JobsError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise JobsError(f"{path} is not UTF-8 text (in Excel: Save As > CSV UTF-8)") from error
    for marks, most, what in (("\n\r", LINES, "lines"), (DELIMITERS, CELLS, "values")):
        if max(map(text.count, marks)) > most:
            raise JobsError(f"{path.name} has more than {most} {what}: split it into several tables")
    try:
        jobs = with_ids(islice(kinds[path.suffix.lower()](text), JOBS + 1))
    except RowsError as error:
        raise JobsError(f"{path.name}, {error}") from None
    if len(jobs) > JOBS:
        raise JobsError(f"{path.name} has more than {JOBS} jobs: split it into several tables")
    if not jobs:
        raise JobsError(f"{path.name} has no jobs")
    return jobs


def csv_rows(text: str) -> Iterator[Row]:
    """Raises RowsError after the last row, for all that are wrong."""
    heading = re.search(r"^.*\S.*$", text, re.MULTILINE)
    delimiter = max(DELIMITERS, key=heading[0].count) if heading else DELIMITERS[0]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header, names, line, problems = None, "", 1, []
    try:
        for cells in reader:
            begun, line = line, reader.line_num + 1
            while cells and not cells[-1].strip() and len(cells) > len(header or ()):
                cells.pop()
            if not any(cell.strip() for cell in cells):
                continue
            if header is None:
                header = column_names(cells, begun)
                names = ", ".join(header)[:SHOWN_CHARACTERS]
            elif len(cells) == len(header):
                yield begun, {column: cell for column, cell in zip(header, cells, strict=True) if cell.strip()}
            else:
                problems.append(
                    (
                        begun,
                        f"{counted(len(cells), 'value')} for {counted(len(header), 'column')}, {names} "
                        "(a text that contains the separator stands in quotation marks)",
                    )
                )
            if len(problems) == PROBLEMS:
                break
    except csv.Error as error:  # where the next row begins is unknown
        problems.append((line, f"{error} (a quotation mark inside a quoted text is written twice)"))
    if problems:
        raise RowsError(problems)


def column_names(cells: list[str], line: int) -> list[str]:
    names = [cell.strip() for cell in cells]
    problem = wrong_columns(names)
    if not problem and "" in names:
        problem = f"column {names.index('') + 1} has no name"
    elif twice := [column for column, number in Counter(names).items() if number > 1]:
        problem = problem or f"the column {', '.join(sorted(twice))} is there twice"
    elif len(names) == 1 and "|" in names[0]:
        problem = f"one column, {names[0]!r}; commas, semicolons or tabs divide columns"
    if problem:
        raise RowsError([(line, problem)])
    return names


def wrong_columns(names: Iterable[str]) -> str:
    """What is wrong with the number of columns, or with the length of a name, which is taken apart at its dots."""
    names = list(names)
    if len(names) > COLUMNS:
        return f"{len(names)} columns; {COLUMNS} is the limit"
    long = next((name for name in names if len(name) > NAME), "")
    return long and f"the column {long:.50}... has a name of {len(long)} characters; {NAME} is the limit"


def json_rows(text: str) -> Iterator[Row]:
    """Raises RowsError after the last row, for all that are wrong."""
    problems = []
    for line, content in enumerate(io.StringIO(text, newline="\n"), 1):
        if content.strip():
            try:
                yield line, json_row(content)
            except json.JSONDecodeError as error:
                problems.append((line, f"not JSON: {error.msg} at character {error.pos + 1}"))
            except ValueError as error:
                problems.append((line, str(error)))
        if len(problems) == PROBLEMS:
            break
    if problems:
        raise RowsError(problems)


def json_row(content: str) -> dict[str, Any]:
    """The values of a line. Raises ValueError."""
    if len(content) > ROW:
        raise ValueError(f"a row of {len(content)} characters; {ROW} is the limit")
    row = parse_json(content, object_pairs_hook=unique, parse_constant=not_a_number, parse_float=fraction)
    if not isinstance(row, dict):
        raise ValueError('expected an object such as {"prompt": "cat", "seed": 1}')
    if problem := wrong_columns(row):
        raise ValueError(problem)
    for column, value in row.items():
        if isinstance(value, dict | list):
            raise ValueError(f"{column} is neither a string nor a number nor true or false")
        if isinstance(value, str) and len(value) > CELL:
            raise ValueError(f"{column!r:.100} has {len(value)} characters; {CELL} is the limit")
        if isinstance(value, str) and SURROGATE.search(value):
            raise ValueError(f"{column} has half a character (a lone surrogate)")
    return {column: value for column, value in row.items() if value is not None}


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError where json.loads would take the last of several values of a name."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("the same name is there twice")
    return dict(pairs)


def not_a_number(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def fraction(text: str) -> float:
    return Scientific(text) if "e" in text.lower() else float(text)


def with_ids(rows: Iterable[Row]) -> list[Job]:
    """Raises RowsError for ids that cannot be names of files, or are used twice."""
    jobs, lines, problems = [], {}, []
    for number, (line, values) in enumerate(rows, 1):
        given = values.pop("id", None)
        job_id = automatic_id(number, values) if given is None else str(given).strip()
        if not ID.fullmatch(job_id) or len(job_id.encode()) > ID_BYTES:
            why = f"(100 at most, {ID_BYTES} bytes), because files are named after it"
            problems.append((line, f"the id {job_id!r} may have only letters, digits, _ and - {why}"))
        if DEVICE.fullmatch(job_id):
            why = "is the name of a device on Windows, so it cannot be the name of a file there: add something to it"
            problems.append((line, f"the id {job_id!r} {why}"))
        first = lines.setdefault(job_id.casefold(), line)  # some file systems do not tell A from a
        if first != line:
            problems.append((line, f"the id {job_id!r} was used on line {first}"))
        jobs.append(Job(job_id, values, line))
    if problems:
        raise RowsError(problems)
    return jobs


def automatic_id(number: int, values: dict[str, Any]) -> str:
    content = json.dumps(values, sort_keys=True, ensure_ascii=False)
    return f"{number:04d}-{hashlib.sha256(content.encode(errors='surrogatepass')).hexdigest()[:8]}"


def for_each(jobs: list[Job], function: Callable[[Job], Any]) -> dict[str, Any]:
    """Job id -> function(job). Raises RowsError with all jobs for which it raises ValueError."""
    found, problems = {}, []
    for job in jobs:
        try:
            found[job.id] = function(job)
        except ValueError as error:
            problems.append((job.line, str(error)))
    if problems:
        raise RowsError(problems)
    return found


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(items: list[Any], most: int = SHOWN) -> str:
    """The first items, and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more
