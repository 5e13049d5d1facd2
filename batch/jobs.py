"""The list of images to generate: a CSV or JSON-lines file, one job per row."""

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator
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
SHOWN = 10  # problems or jobs that one message lists
SHOWN_CHARACTERS = 2000  # of one problem, as a cell may have a million
SHOWN_LINES = 3  # that it names of equal problems
Row = tuple[int, dict[str, Any]]  # the line it begins on, and its values


class JobsError(ValueError):
    """The jobs file cannot be used; the message names the lines and what to do about them."""


class RowsError(JobsError):
    """Rows do not fit what is to be run; the message begins with their lines."""


class Scientific(float):
    """A number of a JSON file in scientific notation, which shows only digits that its writer kept."""


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
    rows = list(islice(kinds[path.suffix.lower()](text, path.name), JOBS + 1))
    if len(rows) > JOBS:
        raise JobsError(f"{path.name} has more than {JOBS} jobs: split it into several tables")
    if not rows:
        raise JobsError(f"{path.name} has no jobs")
    return with_ids(rows, path.name)


def csv_rows(text: str, name: str) -> Iterator[Row]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter_of(text), strict=True)
    header, before, problems = None, 0, []
    while len(problems) < PROBLEMS:
        line = before + 1
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error as error:  # where the next row begins is unknown
            problems.append((line, f"{error} (a quotation mark inside a quoted text is written twice)"))
            break
        before = reader.line_num
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) > COLUMNS:
            raise JobsError(f"{name}, line {line}: {len(cells)} columns; {COLUMNS} is the limit")
        if header is None:
            header = column_names(cells, name, line)
            continue
        while len(cells) > len(header) and not cells[-1].strip():
            cells.pop()
        if len(cells) != len(header):
            problems.append(
                (
                    line,
                    f"{counted(len(cells), 'value')} for {counted(len(header), 'column')}, "
                    f"{', '.join(header)} (a text that contains the separator stands in quotation marks)",
                )
            )
            continue
        yield line, {column: cell for column, cell in zip(header, cells, strict=True) if cell.strip()}
    if problems:
        raise JobsError(f"{name}, {several(problems)}")


def delimiter_of(text: str) -> str:
    """The one that divides the header into most columns; the first of them if there is only one column."""
    header = re.search(r"^.*\S.*$", text, re.MULTILINE)
    return max(DELIMITERS, key=header[0].count) if header else DELIMITERS[0]


def column_names(cells: list[str], name: str, line: int) -> list[str]:
    names = [cell.strip() for cell in cells]
    while not names[-1]:
        names.pop()
    if "" in names:
        raise JobsError(f"{name}, line {line}: column {names.index('') + 1} has no name")
    check_names(names)
    if twice := sorted({column for column in names if names.count(column) > 1}):
        raise JobsError(f"{name}, line {line}: the column {', '.join(twice)} is there twice")
    if len(names) == 1 and "|" in names[0]:
        raise JobsError(f"{name}, line {line}: one column, {names[0]!r}; commas, semicolons or tabs divide columns")
    return names


def check_names(columns: Iterable[str]) -> None:
    """Raises JobsError for a name of any length, which is taken apart at its dots."""
    if long := next((column for column in columns if len(column) > NAME), ""):
        raise JobsError(f"the column {long:.50}... has a name of {len(long)} characters; {NAME} is the limit")


def json_rows(text: str, name: str) -> Iterator[Row]:
    problems = []
    for line, content in enumerate(io.StringIO(text, newline="\n"), 1):
        if len(problems) == PROBLEMS:
            break
        if content.strip():
            try:
                yield line, json_row(content)
            except JobsError as error:
                problems.append((line, str(error)))
    if problems:
        raise JobsError(f"{name}, {several(problems)}")


def json_row(content: str) -> dict[str, Any]:
    """The values of a line. Raises JobsError."""
    if len(content) > ROW:
        raise JobsError(f"a row of {len(content)} characters; {ROW} is the limit")
    try:
        row = parse_json(
            content, object_pairs_hook=without_repetition, parse_constant=refuse_constant, parse_float=fraction
        )
    except json.JSONDecodeError as error:
        raise JobsError(f"not JSON: {error.msg} at character {error.pos + 1}") from error
    except ValueError as error:
        raise JobsError(str(error)) from error
    if not isinstance(row, dict):
        raise JobsError('expected an object such as {"prompt": "cat", "seed": 1}')
    if len(row) > COLUMNS:
        raise JobsError(f"{len(row)} values; {COLUMNS} is the limit")
    check_names(row)
    for column, value in row.items():
        if isinstance(value, str) and len(value) > CELL:
            raise JobsError(f"{column!r:.100} has {len(value)} characters; {CELL} is the limit")
        if isinstance(value, dict | list):
            raise JobsError(f"{column} is neither a string nor a number nor true or false")
        if isinstance(value, str) and not is_text(value):
            raise JobsError(f"{column} has half a character (a lone surrogate)")
    return {column: value for column, value in row.items() if value is not None}


def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [key for key, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError("the same name is there twice")
    return dict(pairs)


def fraction(text: str) -> float:
    return Scientific(text) if "e" in text.lower() else float(text)


def refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def is_text(value: str) -> bool:
    """JSON can hold what no file can."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def with_ids(rows: list[Row], name: str) -> list[Job]:
    jobs, lines, problems = [], {}, []
    for number, (line, values) in enumerate(rows, 1):
        given = values.pop("id", None)
        job_id = automatic_id(number, values) if given is None else str(given).strip()
        if not ID.fullmatch(job_id) or len(job_id.encode()) > ID_BYTES:
            problems.append(
                (
                    line,
                    f"the id {job_id!r} may have only letters, digits, _ and - (100 at most, "
                    f"{ID_BYTES} bytes), because files are named after it",
                )
            )
        if DEVICE.fullmatch(job_id):
            problems.append(
                (
                    line,
                    f"the id {job_id!r} is the name of a device on Windows, so it cannot be the name of "
                    "a file there: add something to it",
                )
            )
        first = lines.setdefault(job_id.casefold(), line)  # some file systems do not tell A from a
        if first != line:
            problems.append((line, f"the id {job_id!r} was used on line {first}"))
        jobs.append(Job(job_id, values, line))
    if problems:
        raise JobsError(f"{name}, {several(problems)}")
    return jobs


def automatic_id(number: int, values: dict[str, Any]) -> str:
    content = json.dumps(values, sort_keys=True, ensure_ascii=False)
    return f"{number:04d}-{hashlib.sha256(content.encode(errors='surrogatepass')).hexdigest()[:8]}"


def several(problems: list[tuple[int, str]]) -> str:
    """A few problems, each with the lines that have it, and how many more there are."""
    lines: dict[str, list[int]] = {}
    for line, problem in problems:
        lines.setdefault(problem, []).append(line)
    texts = [
        f"line{'s' if len(found) > 1 else ''} {listed(found, SHOWN_LINES)}: {printable(problem, SHOWN_CHARACTERS)}"
        for problem, found in lines.items()
    ]
    more = [f"... and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return "\n".join([*texts[:SHOWN], *more])


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(items: list[Any], most: int = SHOWN) -> str:
    """The first items, and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more
