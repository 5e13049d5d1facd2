"""Copies of the files that servers saved: what they are called, and how they are fetched and written."""

import os
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path

from ..limits.replacing import FileInUseError, replace
from .jobs import Job
from .journal import Journal, naming
from .maps import MAP, map_of
from .server import Server, ServerAwayError, open_session

NO_FILE = "the workflow saved no file: connect its image to a Save Image node (other results are not kept)"
ENDING = re.compile(r"\.[A-Za-z0-9]{1,16}")  # of a copy, which a server chooses: .safetensors has 11 letters


async def copied(
    server: Server, copies: list[tuple[dict[str, str], Path]], replacing: bool = True
) -> tuple[list[str], str]:
    """Copies files of a server to paths. Returns the paths that were written, and an error message if one was not.
    replacing: existing files are replaced; otherwise they must be equal. Raises ServerAwayError."""
    done, error = [], ""
    for file, path in copies:
        reply = await server.fetch(file)
        if reply.status != 200:
            error = not_given(server.url, file["filename"], reply.status)
        elif not replacing and path.exists() and path.read_bytes() != reply.content:
            error = f"{path} is there already and is not of this batch: choose another --out"
        else:
            try:
                write_whole(path, reply.content)
                done.append(str(path))
            except FileInUseError as held:  # the others go on
                error = f"{path} could not be replaced: {held.strerror}"
    return done, error


def not_given(url: str, name: str, status: int) -> str:
    """Why a server does not give a file."""
    if ".." in name:
        return f"{url} gives no file with two dots in its name, such as {name}: choose another filename_prefix"
    return f"{url} {'no longer has' if status == 404 else f'answered {status} when asked for'} {name}"


async def fetch_missing(
    journal: Journal, jobs: list[Job], out: Path, urls: list[str], token: str = ""
) -> dict[str, str]:
    """Copies the files of finished jobs whose copies are missing. Returns job id -> why some still are. urls: of
    servers, with their logins. token: for these."""
    problems: dict[str, str] = {}
    away: dict[str, str] = {}  # servers
    async with open_session() as session:
        servers = {server.url: server for server in (Server(session, url, token) for url in urls)}
        for job in jobs:
            record = journal.results[job.id]
            files, url = record.get("files", []), record.get("server", "")
            copies = list(zip(files, copies_of(files, out / job.id), strict=True))
            if not (files or record.get("copies")):
                problems[job.id] = NO_FILE
                continue
            ours = {Path(copy).resolve() for copy in record.get("copies", [])}
            missing = [(file, path) for file, path in copies if not (path.exists() and path.resolve() in ours)]
            if not missing:
                continue
            error = away.get(url)
            if not error:
                try:
                    _, error = await copied(servers.get(url) or Server(session, url), missing, replacing=False)
                except (ServerAwayError, ValueError) as gone:  # or its line has no address
                    error = away[url] = str(gone)
            if error:
                problems[job.id] = error
            else:
                journal.write_result(record | {"copies": [str(path) for _, path in copies]})
    return problems


def copies_of(files: list[dict[str, str]], stem: Path) -> list[Path]:
    """A path for every file: job.png, job.2.png, job.json, ...; a map (see maps.py) is named after its image. Paths
    differ in more than capitals. The server chooses no more of them than a short ending."""
    paths: list[Path] = []
    images: dict[str, list[Path]] = {}  # node -> its images whose maps have not been listed yet
    numbers: Counter[str] = Counter()  # of copies by ending
    for file in files:
        node, (_, dot, ending) = file.get("node", ""), file["filename"].rpartition(".")
        unmapped = images.get(node.removesuffix(MAP)) if node.endswith(MAP) else None
        if unmapped and (path := map_of(unmapped.pop(0))) not in paths:
            paths.append(path)
            continue
        suffix = dot + ending if ENDING.fullmatch(dot + ending) else ""
        numbers[suffix.lower()] += 1
        number = numbers[suffix.lower()]
        paths.append(stem.with_name(stem.name + (f".{number}" if number > 1 else "") + suffix))
        images.setdefault(node, []).append(paths[-1])
    return paths


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file with all its bytes or not at all. Raises FileInUseError where it cannot be replaced, OSError where
    nothing can be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        with naming(path), part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        replace(part, path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise
