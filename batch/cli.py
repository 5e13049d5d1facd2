"""The command line of batches; docs/batches.md explains it."""

import argparse
import asyncio
import logging
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn

from tqdm import tqdm

from ..limits.printable import printable_lines
from .address import address_of, hide_private, without_logins
from .copies import fetch_missing
from .dispatch import GIVE_UP_SECONDS, NEVER_ANSWERED_SECONDS, Batch, Options
from .jobs import Job, JobsError, RowsError, count_of, first_of, read_jobs
from .journal import Journal, JournalError
from .maps import check_map_names, has_map, with_maps
from .overrides import (
    ROLES,
    OverrideError,
    Place,
    Workflow,
    fingerprint,
    make_prompts,
    read_workflow,
    settable,
    texts_reaching,
)
from .server import PORT, TOKEN, Server, ServerAwayError, open_session

WORKFLOW = Path(__file__).resolve().parent.parent / "workflows/api/07 Acceptance map.json"
SERVER = f"http://127.0.0.1:{PORT}"
DONE, UNFINISHED, BAD_INPUT, FAILED, CANCELLED = 0, 1, 2, 3, 130
CANCEL_SIGNALS = (signal.SIGINT, signal.SIGTERM)
FAILURES = {"error": "failed", "interrupted": "interrupted", "lost": "given up"}  # status of a job -> in words
EPILOG = """A column of the jobs file sets the input of that name in all nodes of the workflow (seed, cfg, window, ...),
`prompt` and `negative` the texts, `Title.input`, `12.input` or `Class.input` one node's input; `id` names the job. The
same command again goes on where it stopped. Exit code: 0 all jobs are done, 1 some are still to do or lack a copy:
repeat the command, 2 nothing was begun, 3 all others are done, but some failed: correct their rows, or were
interrupted or given up: --retry-failed, 130 cancelled."""
OnResult = Callable[[dict[str, Any]], None]
Work = Callable[[Journal, list[Job], OnResult], int | None]  # does these jobs; returns the exit code where it stopped
LEAST = {"retries": 0, "in_flight": 1, "patience": 0, "actors": 1, "cpus": 1, "gpus": 0}
FOR_SERVERS = ("server", "workflow", "in_flight", "patience")
FOR_RAY = ("model", "decoder", "drafter", "method", "dtype", "actors", "cpus", "gpus")


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, handlers=[Reported()], format="%(levelname)s: %(message)s")
    try:
        check_options(options, arguments)
        jobs = read_jobs(options.jobs)
        if options.maps:
            check_map_names(jobs)
        if not options.out and (options.maps or options.ray):
            raise JobsError(f"--{'maps' if options.maps else 'ray'} needs --out FOLDER, where the images go")
        return run(options, jobs)
    except (JobsError, OverrideError, JournalError) as error:
        say(f"error: {options.jobs.name + ', ' if isinstance(error, RowsError) else ''}{error}")
        return BAD_INPUT
    except KeyboardInterrupt:
        return CANCELLED
    except (OSError, RuntimeError) as error:
        return report_stop(error)


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="python -m comfyui_specar.batch",
        epilog=EPILOG,
        description="Generates an image for every row of a CSV or JSON-lines file.",
    )

    add = top.add_argument
    add("jobs", type=Path, help="the jobs: .csv or .tsv with a header, or .jsonl")
    add("--results", type=Path, help="a JSON line per job (default: JOBS.results.jsonl)")
    add("--out", type=Path, help="folder for the images (of servers: for copies of what they saved)")
    text = "save the acceptance map of every image beside it, as ID_map.png (needs --out)"
    add("--maps", action="store_true", help=text)
    text = "run those again that failed, were interrupted or given up before"
    add("--retry-failed", action="store_true", help=text)
    add("--dry-run", action="store_true", help="only check that all jobs fit the workflow")
    text = "how often a job is run again whose server or actor was lost (default: %(default)s)"
    add("--retries", type=int, metavar="N", default=Options.retries, help=text)

    add = top.add_argument_group("on ComfyUI servers").add_argument
    text = f"may be repeated (default: {SERVER}). Login: http://USER:PASSWORD@HOST. Token: environment variable {TOKEN}"
    add("--server", action="append", metavar="URL", help=text)
    text = f"in API format (default: {WORKFLOW.name} of this pack)"
    add("--workflow", type=Path, default=WORKFLOW, help=text)
    text = "jobs that a server has at a time (default: %(default)s: one runs, one waits)"
    add("--in-flight", type=int, metavar="N", default=Options.in_flight, help=text)
    text = (
        f"give up when no server answered for so long (default: {GIVE_UP_SECONDS:g}, but {NEVER_ANSWERED_SECONDS:g} if "
        "none ever did; give it to wait for one that is starting)"
    )
    add("--patience", type=float, metavar="SECONDS", help=text)

    add = top.add_argument_group('on a Ray cluster (pip install -e ".[ray]" in this repository)').add_argument
    text = "a cluster's address, or `auto`; without one, Ray is started on this machine"
    add("--ray", nargs="?", const="local", metavar="ADDRESS", help=text)
    add("--model", default="default", help="bundled name, or a file or folder (default: %(default)s)")
    add("--decoder", help="image decoder, where the model's files have none")
    add("--drafter", help="bundled name, file or folder, for methods that need one")
    text = "sjd, next_token, cool_sd, ... (default: %(default)s; a wrong name lists all); columns of the jobs file set "
    add("--method", default="sjd", help=text + "its settings")
    text = (
        "fp32, bf16, ..., as in Load AR Checkpoint (default: %(default)s, the fastest that it supports; a wrong name "
    )
    add("--dtype", default="auto", metavar="NAME", help=text + "lists all)")
    add("--actors", type=int, metavar="N", default=1, help="models that generate at a time (default: %(default)s)")
    add("--cpus", type=int, metavar="N", default=1, help="threads of one (default: %(default)s)")
    add("--gpus", type=float, metavar="N", default=0, help="GPUs of one; 0.5 if two share it (default: %(default)s)")
    return top


class Parser(argparse.ArgumentParser):
    """Its errors quote what it does not understand, such as an address after a misspelled option, without logins."""

    def error(self, message: str) -> NoReturn:
        super().error(safe(message))


def check_options(options: argparse.Namespace, arguments: list[str] | None) -> None:
    """Raises JobsError for numbers that are too small, and for options that the chosen way, servers or Ray, would
    ignore, also where they are given as their defaults."""
    nothing = argparse.Namespace(**dict.fromkeys(vars(options)))  # so that no default is filled in
    given = {name: value for name, value in vars(parser().parse_args(arguments, nothing)).items() if value is not None}
    for name, low in LEAST.items():
        if not given.get(name, low) >= low:
            raise JobsError(f"--{name.replace('_', '-')}: at least {low}")
    if unused := [f"--{name.replace('_', '-')}" for name in (FOR_SERVERS if options.ray else FOR_RAY) if name in given]:
        why = "not used with --ray" if options.ray else "only for --ray; on servers the workflow decides"
        raise JobsError(f"{', '.join(unused)}: {why}")


def check_address(url: str) -> None:
    """Raises JobsError for what cannot be the address of a server."""
    try:
        address_of(url)
    except ValueError as error:
        raise JobsError(f"--server {hide_private(url)} is no address ({error}): one looks like {SERVER}") from None


def read_token() -> str:
    """The token for servers, from the environment: other users of the machine see the arguments of a program. Raises
    JobsError for one that no request can have."""
    token = os.environ.get(TOKEN, "").strip()
    if not re.fullmatch("[!-~]*", token):
        raise JobsError(f"{TOKEN} is no token: it has other characters than ASCII letters, digits and signs")
    return token


def make_folder(out: Path) -> None:
    """Raises JobsError unless images can be written there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise JobsError(f"--out {out}: no file can be written there ({error.strerror}). Name another folder") from error


def safe(text: str) -> str:
    """A text for a terminal or a log: its lines do nothing to it, and have no logins."""
    return printable_lines(without_logins(text))


class Reported(logging.Handler):
    """Writes a log for the user, whoever it is of."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def say(text: str) -> None:
    """Writes a line for the user; with the time where it goes into a file."""
    now = "" if sys.stderr.isatty() else time.strftime("%H:%M:%S ")
    tqdm.write(now + safe(text), file=sys.stderr)


def report_stop(error: Exception) -> int:
    """Reports what stopped the batch. Returns the exit code."""
    say(f"error: {error}; the same command goes on where this stopped")
    return UNFINISHED


def report_missing_prompts(workflow: Workflow, jobs: list[Job]) -> None:
    """Reports how many rows have no prompt and use the workflow's own, which is an example."""
    own = texts_reaching(workflow, ROLES["prompt"])
    inputs, of_nodes = settable(workflow)
    names = {name for name, places in (of_nodes | inputs).items() if not set(places).isdisjoint(own)}
    without = [job.id for job in jobs if names.isdisjoint(job.overrides)]
    if own and without:
        node, field = own[0]
        say(
            f"no prompt in {len(without)} of {count_of(len(jobs), 'row')}, the first being {without[0]}: they use the "
            f"workflow's, {workflow[node]['inputs'][field]!r}"
        )


def run(options: argparse.Namespace, jobs: list[Job]) -> int:
    """Returns the exit code."""
    prints, work = on_ray(options, jobs) if options.ray else on_servers(options, jobs)
    if options.dry_run:
        what = options.method if options.ray else options.workflow.name
        say(f"{count_of(len(jobs), 'job')} fit{'s' if len(jobs) == 1 else ''} {what}")
        return DONE
    if options.out:
        make_folder(options.out)
    with Journal(options.results or options.jobs.with_suffix(".results.jsonl")) as journal:
        open_jobs = jobs_left(journal, jobs, prints, options)
        bare = [job.id for job in jobs if journal.done(job.id) and not has_map(journal.results[job.id])]
        if options.maps and bare:
            say(
                f"made without --maps, and therefore without a map: {first_of(bare)}. To make these again, delete all "
                "their lines from the results"
            )
        return run_and_report(journal, jobs, open_jobs, work)


def on_servers(options: argparse.Namespace, jobs: list[Job]) -> tuple[dict[str, str], Work]:
    """The jobs' fingerprints, and what is to do."""
    urls = list(dict.fromkeys(options.server or [SERVER]))
    for url in urls:
        check_address(url)
    workflow = read_workflow(options.workflow)
    token = read_token()
    prompts = make_prompts(workflow, jobs, asyncio.run(whole_inputs(urls, token, workflow)))
    if options.maps:
        with_maps(workflow)  # raises OverrideError where there can be none
    report_missing_prompts(workflow, jobs)
    how = {"patience": options.patience, "maps": options.maps, "token": token}
    chosen = Options(options.in_flight, options.retries, options.out, **how)

    def work(journal: Journal, open_jobs: list[Job], on_result: OnResult) -> int | None:
        without: dict[str, str] = {}  # job id -> why it has no copy
        if options.out:
            done = [job for job in jobs if journal.done(job.id)]
            without = asyncio.run(fetch_missing(journal, done, options.out, urls, chosen.token))
        cancelled = run_batch(journal, urls, chosen, open_jobs, prompts, on_result)
        files = [file for job in jobs if journal.done(job.id) for file in journal.results[job.id].get("files", [])]
        if files and not options.out:
            previews = any(file.get("type") == "temp" for file in files)
            say(
                "The images are in the output folders of the servers"
                f"{' (previews only until these end: use Save Image)' * previews}. "
                "The same command with --out FOLDER copies them."
            )
        if without:
            say(
                f"{count_of(len(without), 'job')} done, but without a copy: repeat the command when its server "
                "answers; for copies that no server has any more, leave out --out. "
                + first_of([f"{job}: {why}" for job, why in without.items()])
            )
        return CANCELLED if cancelled else UNFINISHED if without else None

    return {job: fingerprint(prompt) for job, prompt in prompts.items()}, work


async def whole_inputs(urls: list[str], token: str, workflow: Workflow) -> set[Place]:
    """The inputs that are whole numbers, as the first server says that answers. ComfyUI cuts off fractions silently."""
    async with open_session() as session:
        for url in urls:
            with suppress(ServerAwayError):
                return await Server(session, url, token).whole_inputs(workflow)
    say("no server answers yet: which settings must be whole numbers is not checked")
    return set()


def on_ray(options: argparse.Namespace, jobs: list[Job]) -> tuple[dict[str, str], Work]:
    """The jobs' fingerprints, and what is to do."""
    try:
        from .model_worker import ModelOptions
        from .ray_cluster import RayOptions, generate_all, write
    except ImportError as error:  # a client of servers does without them
        raise JobsError(
            f"--ray needs the packages that ComfyUI needs ({error}): use the Python that ComfyUI runs with, or "
            "pip install -r requirements.txt in ComfyUI's folder"
        ) from error

    device = "cuda" if options.gpus else "cpu"
    model = ModelOptions(options.model, options.method, options.decoder, options.drafter, device, options.dtype)
    model.check()
    settings = model.settings(jobs)
    chosen = RayOptions(options.ray, options.actors, options.cpus, options.gpus, options.retries)
    prints = {job: fingerprint([asdict(model), found]) for job, found in settings.items()}

    def work(journal: Journal, open_jobs: list[Job], on_result: OnResult) -> int | None:
        with handle_signals(signal.default_int_handler):
            for job, made in generate_all(model, chosen, open_jobs, settings, options.maps):
                on_result(write(journal, job, prints[job.id], made, options.out))

    return prints, work


def jobs_left(journal: Journal, jobs: list[Job], prints: dict[str, str], options: argparse.Namespace) -> list[Job]:
    """The jobs that are still to do. Raises JournalError where files would replace others."""
    journal.check(prints)
    found = [job for job in jobs if not journal.ended(job.id, prints[job.id], options.retry_failed)]
    if options.out and options.out.is_dir():
        there = {path.name.split(".")[0].casefold() for path in options.out.iterdir()}  # as some file systems compare
        if taken := [job.id for job in found if job.id.casefold() in there and job.id not in journal.submitted]:
            raise JournalError(
                f"{options.out} has files of {taken[0]} already, which are not of this batch: "
                "choose another --out, or give the job another id"
            )
    return found


def run_and_report(journal: Journal, jobs: list[Job], open_jobs: list[Job], work: Work) -> int:
    """Does the work under a progress bar, and reports what became of every job. Returns the exit code."""
    begun, ended = {job.id for job in open_jobs}, set()
    before = len(jobs) - len(begun)
    bar = tqdm(total=len(jobs), initial=before, unit="job", disable=None, dynamic_ncols=True)

    def on_result(record: dict[str, Any]) -> None:
        ended.add(record["id"])
        bar.update()
        progress = f" ({before + len(ended)} of {count_of(len(jobs), 'job')} ended)" if bar.disable else ""
        if record["status"] != "success":
            where = "" if record["server"] in record["error"] else f" on {record['server']}"  # which some name
            say(f"{record['id']}{where}: {record['error']}{progress}")
        elif bar.disable:
            say(f"{record['id']}: done{progress}")
        for warning in record["warnings"]:
            say(f"{record['id']}: warning: {warning}")

    with bar:
        failed = [job.id for job in jobs if job.id not in begun and not journal.done(job.id)]
        for job in failed:
            say(f"{job} failed before: {journal.results[job].get('error')}")
        try:
            code = work(journal, open_jobs, on_result)
        except KeyboardInterrupt:
            say("Cancelled")
            code = CANCELLED
        except (OSError, RuntimeError) as error:
            code = report_stop(error)
    left = begun - ended  # their results, if any, are of an earlier attempt
    counts = Counter(journal.results[job.id]["status"] for job in jobs if job.id not in left)
    failures = [f"{counts[name]} {word}" for name, word in FAILURES.items() if counts[name] or name == "error"]
    say(
        f"{counts['success']} of {count_of(len(jobs), 'job')} done, {', '.join(failures)}, {len(left)} still to do. "
        f"{journal.path}"
    )
    if warned := [job.id for job in jobs if job.id not in left and journal.results[job.id].get("warnings")]:
        say(f"With warnings: {first_of(warned)}")
    if code is not None:
        return code
    if counts["success"] < len(jobs) - len(left):
        say(
            "Repeat the command: it runs failed rows that you corrected, and with --retry-failed also the others that "
            "failed, were interrupted or given up."
        )
    return UNFINISHED if left else DONE if counts["success"] == len(jobs) else FAILED


def run_batch(
    journal: Journal,
    urls: list[str],
    options: Options,
    jobs: list[Job],
    prompts: dict[str, Workflow],
    on_result: OnResult,
) -> bool:
    """Ctrl-C (or SIGTERM) cancels the batch; a second one ends the program. Returns whether it was cancelled."""

    async def run() -> bool:
        batch, loop = Batch(journal, urls, options, on_result), asyncio.get_running_loop()
        cancelled = asyncio.Event()

        def cancel() -> None:
            cancelled.set()
            for number in CANCEL_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            say("Cancelling: taking the jobs from the servers (Ctrl-C again: leave them there)")
            batch.stop()

        with handle_signals(lambda *_signal: loop.call_soon_threadsafe(cancel)):
            await batch.run(jobs, prompts)
        return cancelled.is_set()

    return asyncio.run(run())


@contextmanager
def handle_signals(handler: Callable) -> Iterator[None]:
    """Ctrl-C and SIGTERM call the handler, also in a script's background, where Ctrl-C was ignored."""
    before = {number: signal.signal(number, handler) for number in CANCEL_SIGNALS}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
