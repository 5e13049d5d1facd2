"""The command line of batches; docs/batches.md explains it."""

import argparse
import asyncio
import logging
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from ..common.printable import printable
from .address import address_of, shown, without_logins
from .copies import fetch_missing
from .dispatch import FIRST_PATIENCE, PATIENCE, Batch, Options
from .jobs import SHOWN, Job, JobsError, RowsError, counted, read_jobs
from .journal import Journal, JournalError
from .maps import check_ids, has_map, with_maps
from .overrides import ROLES, OverrideError, Workflow, fingerprint, places, prompts_of, read_workflow, texts_reaching
from .server import PORT

WORKFLOW = Path(__file__).resolve().parent.parent / "workflows/api/05 Acceptance map.json"
SERVER = f"http://127.0.0.1:{PORT}"
DONE, LEFT, BAD_INPUT, FAILED, CANCELLED = 0, 1, 2, 3, 130
CANCELLING = (signal.SIGINT, signal.SIGTERM)
WITHOUT_IMAGE = {"error": "failed", "interrupted": "interrupted", "lost": "given up"}  # status of a job -> in words
EPILOG = """A column of the jobs file sets the input of that name in all nodes of the workflow (seed, cfg, window, ...),
`prompt` and `negative` the texts, `Title.input`, `12.input` or `Class.input` one node's input; `id` names the job. The
same command again goes on where it stopped. Exit code: 0 all jobs are done, 1 some are still to do or lack a copy:
repeat the command, 2 nothing was begun, 3 all others are done, but some failed: correct their rows, or were
interrupted or given up: --retry-failed, 130 cancelled."""
CLOCK = "%H:%M:%S"
FOR_SERVERS = ("server", "workflow", "in_flight", "patience")
FOR_RAY = ("model", "decoder", "drafter", "method", "dtype", "actors", "cpus", "gpus")


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    handler = logging.StreamHandler()
    handler.setFormatter(SafeFormatter(f"{'' if sys.stderr.isatty() else '%(asctime)s '}%(message)s", CLOCK))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    try:
        refuse_unused(options, arguments)
        jobs = read_jobs(options.jobs)
        if options.out and options.out.exists() and not options.out.is_dir():
            raise JobsError(f"--out {options.out} is a file: name a folder, which need not be there")
        if options.maps:
            check_ids(jobs)
            if not options.out:
                raise JobsError("--maps needs --out FOLDER, where the maps go")
        return on_ray(options, jobs) if options.ray else on_servers(options, jobs)
    except RowsError as error:
        say(f"error: {options.jobs.name}, {error}")
        return BAD_INPUT
    except (JobsError, OverrideError, JournalError) as error:
        say(f"error: {error}")
        return BAD_INPUT
    except KeyboardInterrupt:
        return CANCELLED
    except (OSError, RuntimeError) as error:
        return stopped(error)


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="python -m comfyui_specar.batch",
        epilog=EPILOG,
        description="Generates an image for every row of a CSV or JSON-lines file.",
    )
    top.add_argument("jobs", type=Path, help="the jobs: .csv with a header, or .jsonl")
    top.add_argument("--results", type=Path, help="a JSON line per job (default: JOBS.results.jsonl)")
    top.add_argument("--out", type=Path, help="folder for the images (of servers: for copies of what they saved)")
    top.add_argument(
        "--maps",
        action="store_true",
        help="save the acceptance map of every image beside it, as ID_map.png (needs --out)",
    )
    top.add_argument(
        "--retry-failed", action="store_true", help="run those again that failed, were interrupted or given up before"
    )
    top.add_argument("--dry-run", action="store_true", help="only check that all jobs fit the workflow")
    top.add_argument(
        "--retries",
        type=count,
        default=Options.retries,
        metavar="N",
        help="how often a job is handed out again whose server or actor was lost (default: %(default)s)",
    )
    comfy = top.add_argument_group("on ComfyUI servers")
    comfy.add_argument("--server", action="append", metavar="URL", help=f"may be repeated (default: {SERVER})")
    comfy.add_argument(
        "--workflow", type=Path, default=WORKFLOW, help=f"in API format (default: {WORKFLOW.name} of this pack)"
    )
    comfy.add_argument(
        "--in-flight",
        type=positive,
        default=Options.in_flight,
        metavar="N",
        help="jobs that a server has at a time (default: %(default)s: one runs, the next one waits)",
    )
    comfy.add_argument(
        "--patience",
        type=amount,
        metavar="SECONDS",
        help=f"give up when no server answered for so long (default: {PATIENCE:g}, but "
        f"{FIRST_PATIENCE:g} if none ever did; give it to wait for one that is starting)",
    )
    fleet = top.add_argument_group('on a Ray cluster (pip install -e ".[ray]" in this repository)')
    fleet.add_argument(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="a cluster's address, or `auto`; without one, Ray is started on this machine",
    )
    fleet.add_argument("--model", default="default", help="bundled name, or a file or folder (default: %(default)s)")
    fleet.add_argument("--decoder", help="image decoder, where the model's files have none")
    fleet.add_argument("--drafter", help="bundled name, file or folder, for methods that need one")
    fleet.add_argument(
        "--method",
        default="sjd",
        help="sjd, next_token, cool_sd, ... (default: %(default)s; a wrong "
        "name lists all); columns of the jobs file set its settings",
    )
    fleet.add_argument(
        "--dtype",
        default="auto",
        metavar="NAME",
        help="fp32, bf16, ..., as in Load AR Checkpoint "
        "(default: %(default)s: fp32 on a CPU, bf16 on a GPU; a wrong name lists all)",
    )
    fleet.add_argument(
        "--actors", type=positive, default=1, metavar="N", help="models that generate at a time (default: %(default)s)"
    )
    fleet.add_argument("--cpus", type=positive, default=1, metavar="N", help="threads of one (default: %(default)s)")
    fleet.add_argument(
        "--gpus", type=amount, default=0, metavar="N", help="GPUs of one; 0.5 if two share it (default: %(default)s)"
    )
    return top


class Parser(argparse.ArgumentParser):
    """It quotes what it does not understand, such as an address after an option that is misspelled."""

    def error(self, message: str) -> NoReturn:
        super().error(safe(message))


def refuse_unused(options: argparse.Namespace, arguments: list[str] | None) -> None:
    """Raises JobsError for options that the chosen way, servers or Ray, would ignore, also where they are given as
    their defaults."""
    nothing = argparse.Namespace(**dict.fromkeys(vars(options)))  # so that no default is filled in
    given = vars(parser().parse_args(arguments, nothing))
    unused = [
        f"--{name.replace('_', '-')}" for name in (FOR_SERVERS if options.ray else FOR_RAY) if given[name] is not None
    ]
    if unused:
        why = "not used with --ray" if options.ray else "only for --ray; on servers the workflow decides"
        raise JobsError(f"{', '.join(unused)}: {why}")


def check_address(url: str) -> None:
    """Raises JobsError for what cannot be the address of a server."""
    if "://" in url and not url.startswith(("http://", "https://")):
        raise JobsError(f"--server {shown(url)}: the address of a server begins with http:// or https://")
    try:
        address_of(url)
    except ValueError as error:
        raise JobsError(f"--server {shown(url)} is no address ({error}): one looks like {SERVER}") from None


def make_folder(out: Path) -> None:
    """Raises JobsError unless images can be written there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise JobsError(f"--out {out}: no file can be written there ({error.strerror}). Name another folder") from error


def positive(text: str) -> int:
    return at_least(1, int(text))


def count(text: str) -> int:
    return at_least(0, int(text))


def amount(text: str) -> float:
    return at_least(0, float(text))


def at_least(low: int, value: Any) -> Any:
    if not value >= low:
        raise argparse.ArgumentTypeError(f"at least {low}")
    return value


def safe(text: str) -> str:
    """What may be written to a terminal or a log: lines that do nothing to it, and no logins."""
    return "\n".join(printable(without_logins(line)) for line in text.split("\n"))


class SafeFormatter(logging.Formatter):
    """Lines of a log, whoever writes them."""

    def format(self, record: logging.LogRecord) -> str:
        return safe(super().format(record))


def say(text: str) -> None:
    """A line for the user; in a log with the time."""
    text = safe(text)
    tqdm.write(text if sys.stderr.isatty() else f"{time.strftime(CLOCK)} {text}", file=sys.stderr)


def stopped(error: Exception) -> int:
    """Says what stopped the batch. Returns the exit code."""
    say(f"error: {error}; the same command goes on where this stopped")
    return LEFT


def tell_of_prompts(workflow: Workflow, jobs: list[Job]) -> None:
    """Says how many rows have no prompt, as the workflow's own, an example, is drawn for them."""
    own = texts_reaching(workflow, ROLES["prompt"])
    without = [
        job.id for job in jobs if not any(place in own for name in job.overrides for place in places(workflow, name))
    ]
    if own and without:
        node, field = own[0]
        say(
            f"no prompt in {len(without)} of {counted(len(jobs), 'row')}, the first being {without[0]}: they use the "
            f"workflow's, {workflow[node]['inputs'][field]!r}"
        )


def tell_of_maps(journal: Journal, jobs: list[Job]) -> None:
    """Says how many jobs are done and have no map, as they were made without."""
    without = [
        job.id
        for job in jobs
        if journal.done(job.id) and not has_map(job.id, journal.results[job.id].get("copies", []))
    ]
    if without:
        say(
            f"{counted(len(without), 'job')} done before without --maps: no maps for them (choose other --results and "
            "another --out)"
        )


def on_servers(options: argparse.Namespace, jobs: list[Job]) -> int:
    urls = list(dict.fromkeys(url.rstrip("/") for url in options.server or [SERVER]))
    for url in urls:
        check_address(url)
    workflow = read_workflow(options.workflow)
    prompts = prompts_of(workflow, jobs)
    if options.maps:
        with_maps(workflow)  # or refuse it before anything is begun
    tell_of_prompts(workflow, jobs)
    if options.dry_run:
        say(f"{fitting(jobs)} {options.workflow.name}")
        return DONE
    if options.out:
        make_folder(options.out)
    chosen = Options(options.in_flight, options.retries, options.out, patience=options.patience, maps=options.maps)
    with Journal(results_of(options)) as journal:
        open_jobs = left(journal, jobs, {job: fingerprint(prompt) for job, prompt in prompts.items()}, options)
        if options.maps:
            tell_of_maps(journal, jobs)
        without: dict[str, str] = {}  # job id -> why it has no copy

        def work(on_result: Callable[[dict], None]) -> bool:
            if options.out:
                done = [job for job in jobs if journal.done(job.id)]
                without.update(asyncio.run(fetch_missing(journal, done, options.out, urls)))
            for job, why in without.items():
                say(f"{job}: done before, but without a copy: {why}")
            return drive(journal, urls, chosen, open_jobs, prompts, on_result)

        code = followed(journal, jobs, open_jobs, work, len(urls) > 1)
        if not options.out and any(journal.done(job.id) for job in jobs):
            say("The images are in the output folders of the servers. The same command with --out FOLDER copies them.")
        if without:
            say(
                f"{counted(len(without), 'job')} done, but without a copy: repeat the command when its server answers; "
                "for copies that no server has any more, leave out --out."
            )
        return LEFT if without and code in (DONE, FAILED) else code


def on_ray(options: argparse.Namespace, jobs: list[Job]) -> int:
    from .fleet import Fleet, generate_all
    from .studio import Studio

    if not options.out:
        raise JobsError("--ray needs --out DIR, where the images go")
    device = "cuda" if options.gpus else "cpu"
    studio = Studio(options.model, options.method, options.decoder, options.drafter, device, options.dtype)
    studio.check()
    settings = studio.settings(jobs)
    if options.dry_run:
        say(f"{fitting(jobs)} {options.method}")
        return DONE
    make_folder(options.out)
    fleet = Fleet(options.ray, options.actors, options.cpus, options.gpus, options.retries)
    prints = {job: fingerprint([asdict(studio), found]) for job, found in settings.items()}
    with Journal(results_of(options)) as journal:
        open_jobs = left(journal, jobs, prints, options)
        if options.maps:
            tell_of_maps(journal, jobs)

        def work(on_result: Callable[[dict], None]) -> bool:
            try:
                with handled_by(signal.default_int_handler):
                    generate_all(
                        journal, studio, fleet, open_jobs, settings, prints, options.out, on_result, options.maps
                    )
            except KeyboardInterrupt:
                return True
            return False

        return followed(journal, jobs, open_jobs, work)


def fitting(jobs: list[Job]) -> str:
    return f"{counted(len(jobs), 'job')} fit{'s' if len(jobs) == 1 else ''}"


def results_of(options: argparse.Namespace) -> Path:
    return options.results or options.jobs.with_suffix(".results.jsonl")


def left(journal: Journal, jobs: list[Job], prints: dict[str, str], options: argparse.Namespace) -> list[Job]:
    """The jobs that are still to be made. Raises JournalError where this would touch what others made."""
    journal.check(prints)
    found = [job for job in jobs if not journal.ended(job.id, prints[job.id], options.retry_failed)]
    if options.out and options.out.is_dir():
        there = {path.name.split(".")[0].casefold() for path in options.out.iterdir()}  # as case-blind systems compare
        if strangers := [job.id for job in found if job.id.casefold() in there and job.id not in journal.queued]:
            raise JournalError(
                f"{options.out} has files of {strangers[0]} already, which are not of this batch: "
                "choose another --out, or give the job another id"
            )
    return found


def followed(
    journal: Journal, jobs: list[Job], open_jobs: list[Job], work: Callable[[Callable], bool], several: bool = False
) -> int:
    """Does the work under a progress bar, says what became of it. `work(on_result)` returns: was it cancelled? several:
    there is more than one server, and what fails may be its fault."""
    before = len(jobs) - len(open_jobs)
    ended: set[str] = set()
    bar = tqdm(total=len(jobs), initial=before, unit="job", disable=None, dynamic_ncols=True)

    def on_result(record: dict[str, Any]) -> None:
        ended.add(record["id"])
        bar.update()
        progress = f" ({before + len(ended)} of {counted(len(jobs), 'job')} ended)" if bar.disable else ""
        if record["status"] != "success":
            say(f"{record['id']}{' on ' + record['server'] if several else ''}: {record['error']}{progress}")
        elif bar.disable:
            say(f"{record['id']}: done{progress}")
        for warning in record["warnings"]:
            say(f"{record['id']}: warning: {warning}")

    begun = {job.id for job in open_jobs}
    with bar, logging_redirect_tqdm():
        failed = [job.id for job in jobs if job.id not in begun and not journal.done(job.id)]
        for job_id in failed[:SHOWN]:
            found = journal.results[job_id]
            say(f"{job_id}: {WITHOUT_IMAGE[found['status']]} before: {found['error']}")
        if len(failed) > SHOWN:
            say(f"... and {len(failed) - SHOWN} more from before")
        try:
            code = CANCELLED if work(on_result) else None
        except (OSError, RuntimeError) as error:
            code = stopped(error)
    still = begun - ended  # what results have of these is of an earlier try
    counts = Counter(journal.results[job.id]["status"] for job in jobs if job.id not in still)
    without = ", ".join(
        f"{counts[status]} {word}" for status, word in WITHOUT_IMAGE.items() if counts[status] or status == "error"
    )
    say(f"{counts['success']} of {counted(len(jobs), 'job')} done, {without}, {len(still)} still to do. {journal.path}")
    if code is not None:
        return code
    if counts["error"]:
        say(
            "Correct the rows of failed jobs, or what is wrong with their server, and repeat the command with "
            "--retry-failed; without it, it runs corrected rows only."
        )
    elif counts["interrupted"] or counts["lost"]:
        say("Repeat the command with --retry-failed to run again what was interrupted or given up.")
    return LEFT if still else DONE if counts["success"] == len(jobs) else FAILED


def drive(
    journal: Journal,
    urls: list[str],
    options: Options,
    jobs: list[Job],
    prompts: dict[str, Workflow],
    on_result: Callable[[dict], None],
) -> bool:
    """Runs the batch; Ctrl-C (or SIGTERM) cancels it, a second one ends the program. Returns: was it cancelled?"""
    cancelled = False

    async def run() -> None:
        batch, loop = Batch(journal, urls, options, on_result), asyncio.get_running_loop()

        def cancel() -> None:
            nonlocal cancelled
            cancelled = True
            for number in CANCELLING:
                signal.signal(number, signal.SIG_DFL)
            say("Cancelling: taking the jobs from the servers (Ctrl-C again: leave them there)")
            batch.stop()

        def handle(*_signal) -> None:
            loop.call_soon_threadsafe(cancel)

        with handled_by(handle):
            await batch.run(jobs, prompts)

    asyncio.run(run())
    return cancelled


@contextmanager
def handled_by(handler: Callable) -> Iterator[None]:
    """Ctrl-C and SIGTERM call the handler, also in a script's background, where Ctrl-C was ignored."""
    before = {number: signal.signal(number, handler) for number in CANCELLING}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
