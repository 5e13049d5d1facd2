"""The list of images to generate: a CSV or JSON-lines file, one job per row."""

import codecs
import csv
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from ..limits.limits import CELL, COLUMNS, JOBS, NAME, TABLE, parse_json
from ..limits.printable import printable

DELIMITERS = ",;\t|"
STATED = re.compile(r'"?sep=([^\r\n]*)', re.IGNORECASE)  # the first line for Excel, which names the delimiter
ID = re.compile(r"[\w-]{1,100}")  # becomes part of file names, on any system
ID_BYTES = 200  # of the 255 that a file's name may have; prefix, attempt, counter and ending need the others
DEVICE = re.compile(r"con|prn|aux|nul|(com|lpt)[0-9¹²³]", re.IGNORECASE)  # on Windows, whatever the ending of the file
SURROGATE = re.compile("[\ud800-\udfff]")  # which JSON can hold, and no file
SHOWN = 10  # problems or jobs that one message lists
SHOWN_CHARACTERS = 2000  # of one problem, as a cell may have a million
SHOWN_LINES = 3  # that it names of equal problems
Row = tuple[int, dict[str, Any] | ValueError]  # the line it begins on, and its values, or what is wrong with it
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
            f"line{'s' if len(found) > 1 else ''} {first_of(found, SHOWN_LINES)}: "
            + printable(problem, SHOWN_CHARACTERS)
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
    kinds = {".csv": csv_rows, ".tsv": partial(csv_rows, delimiters="\t,;|"), ".jsonl": json_rows, ".ndjson": json_rows}
    if path.suffix.lower() not in kinds:
        raise JobsError(f"{path}: a jobs file is one of {', '.join(kinds)}")
    try:
        if path.stat().st_size > TABLE:
            raise JobsError(f"{path} has more than {TABLE} bytes: split it into several tables")
        text = decode_text(path.read_bytes())
    except OSError as error:
        raise JobsError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeError as error:
        raise JobsError(f"{path} is not UTF-8 text (in Excel: Save As > CSV UTF-8)") from error
    rows = list(islice(kinds[path.suffix.lower()](text), JOBS + 1))
    if len(rows) > JOBS:
        raise JobsError(f"{path.name} has more than {JOBS} jobs: split it into several tables")
    if not rows:
        raise JobsError(f"{path.name} has no jobs")
    try:
        return jobs_of(rows)
    except RowsError as error:
        raise JobsError(f"{path.name}, {error}") from None


def decode_text(content: bytes) -> str:
    """The text of a file. Excel begins "CSV UTF-8" and "Unicode Text", which is UTF-16, with a byte order mark. Raises
    UnicodeError for other encodings."""
    utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = content.decode("utf-16" if utf16 else "utf-8-sig")
    if "\0" in text:
        raise UnicodeError("no text has NUL")
    return text


def csv_rows(text: str, delimiters: str = DELIMITERS) -> Iterator[Row]:
    """The rows of a table with a header, whatever its lines end with. Its delimiter is the one that a first line such
    as `sep=;` states, or else of these the one that gives the header most columns, the first of equal ones."""
    delimiter = max(delimiters, key=lambda each: len(read_header(text, each)))
    if stated := STATED.match(text):
        text = text[stated.end() :]  # the end of the line stays, so that lines are counted
        delimiter = "".join(set(stated[1]) - set('" '))  # also where a program has added empty cells
        if len(delimiter) != 1 or delimiter not in DELIMITERS:
            yield 1, ValueError(f"{stated[0]} names no separator: one of , ; | and tab follows the =")
            return
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header, begun, line = [], 1, 1
    try:
        for cells in reader:
            begun, line = line, reader.line_num + 1
            while cells and not cells[-1].strip() and len(cells) > len(header):
                cells.pop()
            if not any(cell.strip() for cell in cells):
                continue
            if not header:
                header = [cell.strip() for cell in cells]
                check_names(header)
            elif len(cells) == len(header):
                yield begun, {column: cell for column, cell in zip(header, cells, strict=True) if cell.strip()}
            else:
                found = f"{count_of(len(cells), 'value')} for {count_of(len(header), 'column')}, {', '.join(header)}"
                how = "(a text that contains the separator stands in quotation marks, without a space before them)"
                yield begun, ValueError(f"{found} {how}")
    except csv.Error as error:  # where the next row begins is unknown
        yield line, ValueError(f"{error} (a quotation mark inside a quoted text is written twice)")
    except ValueError as error:
        yield begun, error


def read_header(text: str, delimiter: str) -> list[str]:
    """The cells of the first row that has any, if this is the delimiter."""
    with suppress(csv.Error):
        for cells in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter):
            if any(cell.strip() for cell in cells):
                return cells
    return []


def check_names(names: list[str]) -> None:
    """Raises ValueError for names of columns that cannot be used. (They are taken apart at their dots.)"""
    if len(names) > COLUMNS:
        raise ValueError(f"{len(names)} columns; {COLUMNS} is the limit")
    for number, (name, times) in enumerate(Counter(names).items(), 1):
        if not name:
            raise ValueError(f"column {number} has no name")
        if times > 1:
            raise ValueError(f"the column {name} is there twice")
        if len(name) > NAME:
            raise ValueError(f"the column {name:.50}... has a name of {len(name)} characters; {NAME} is the limit")


def json_rows(text: str) -> Iterator[Row]:
    for line, content in enumerate(io.StringIO(text, newline=""), 1):
        if content.strip():
            try:
                yield line, json_row(content)
            except json.JSONDecodeError as error:
                yield line, ValueError(f"not JSON: {error.msg} at character {error.pos + 1}")
            except ValueError as error:
                yield line, error


def json_row(content: str) -> dict[str, Any]:
    """The values of a line. Raises ValueError."""
    row = parse_json(content, object_pairs_hook=unique, parse_constant=not_a_number, parse_float=fraction)
    if not isinstance(row, dict):
        raise ValueError('expected an object such as {"prompt": "cat", "seed": 1}')
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
    check_names([name for name, _ in pairs])
    return dict(pairs)


def not_a_number(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def fraction(text: str) -> float:
    return Scientific(text) if "e" in text.lower() else float(text)


def jobs_of(rows: list[Row]) -> list[Job]:
    """Raises RowsError for rows that are wrong, and for ids that cannot be names of files, or are used twice."""
    jobs, lines, problems = [], {}, []
    for number, (line, values) in enumerate(rows, 1):
        if isinstance(values, ValueError):
            problems.append((line, str(values)))
            continue
        given = values.pop("id", None)
        job_id = automatic_id(number, values) if given is None else str(given).strip()
        if not ID.fullmatch(job_id) or len(job_id.encode()) > ID_BYTES or DEVICE.fullmatch(job_id):
            why = f"(100 at most, {ID_BYTES} bytes), and be no device of Windows: files are named after it"
            problems.append((line, f"the id {job_id!r} may have only letters, digits, _ and - {why}"))
        first = lines.setdefault(job_id.casefold(), line)  # some file systems do not tell A from a
        if first != line:
            problems.append((line, f"the id {job_id!r} was used on line {first} (a and A count as the same)"))
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


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def first_of(items: list[Any], most: int = SHOWN) -> str:
    """The first items, and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more
