"""The same jobs on Ray, an engine for many machines: actors that hold a model generate, this process writes."""

import json
import logging
import os
import signal
import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.files import FileInUseError
from .copies import write_whole
from .jobs import Job, JobsError, counted
from .journal import Journal
from .maps import map_of
from .model_worker import ModelOptions, ModelWorker

LOCAL = "local"
PROBE_SECONDS = 5.0
STORE_BYTES = 256 << 20  # of a local Ray's shared memory; an image is a few megabytes


@dataclass(frozen=True)
class RayOptions:
    """address: of a cluster, `auto`, or LOCAL for a Ray of this process. actors: how many models generate at a time,
    each with so many CPUs and GPUs. retries: how often a job is repeated whose actor died."""

    address: str = LOCAL
    actors: int = 1
    cpus: int = 1
    gpus: float = 0
    retries: int = 3


class RayRunError(RuntimeError):
    """Ray cannot be used, or has given up; the message says why."""


def generate_all(
    journal: Journal,
    model: ModelOptions,
    options: RayOptions,
    jobs: list[Job],
    settings: dict[str, dict[str, Any]],
    prints: dict[str, str],
    out: Path,
    on_result: Callable[[dict[str, Any]], None],
    maps: bool,
) -> None:
    """Generates the jobs' images, with maps if wanted; returns when every job has ended. settings, prints: by job id;
    the latter are fingerprints. Raises RayRunError."""
    if not jobs:
        return
    ray = started(options)
    try:
        by_id = {job.id: job for job in jobs}
        for row in rows(ray, model, options, jobs, settings, maps):
            record = json.loads(row["record"])
            job = by_id.pop(record["id"])
            on_result(write(journal, job, prints[job.id], record, (row["image"], row["map"]), out))
        error = f"given up after {counted(options.retries + 1, 'attempt')}: the process that ran it died"
        lost = {"status": "lost", "traces": [], "warnings": [], "seconds": 0.0, "error": error}
        for job in by_id.values():
            on_result(write(journal, job, prints[job.id], {"id": job.id, **lost}, (b"", b""), out))
    except (ray.exceptions.RayError, ray.exceptions.RayTaskError) as error:
        raise RayRunError(f"Ray gave up: {str(error).strip().splitlines()[-1]}") from error
    finally:
        ray.shutdown()


def probe(address: str) -> None:
    """Raises RayRunError where nobody listens at HOST:PORT. Ray itself tries for long, and may end the process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host:  # neither LOCAL nor `auto`
        try:
            socket.create_connection((host.strip("[]"), int(port)), PROBE_SECONDS).close()
        except (OSError, ValueError, OverflowError) as error:
            raise RayRunError(f"no Ray at {address}: {error}") from error


def started(options: RayOptions):
    """The ray module, connected. SIGTERM keeps its handler. Raises KeyboardInterrupt where it comes meanwhile."""
    probe(options.address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports home unless told otherwise
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # it calls what happens in every run an error
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise JobsError(f'--ray needs Ray ({error}): pip install -e ".[ray]" in this pack\'s folder') from error
    given = {"address": options.address}
    if options.address == LOCAL:
        cpus = max(os.cpu_count() or 1, options.actors * options.cpus)
        given |= {
            "num_cpus": cpus,
            "include_dashboard": False,
            "object_store_memory": STORE_BYTES,
            "_node_ip_address": "127.0.0.1",
        }  # nobody else may give it work
    cancel = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level="ERROR", **given)
    except SystemExit as error:  # of the handler that Ray sets
        raise KeyboardInterrupt from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise RayRunError(f"no Ray at {options.address}: {error}") from error
    finally:
        signal.signal(signal.SIGTERM, cancel)
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.max_errored_blocks = -1  # a job whose actor dies each time is reported at the end
    return ray


def rows(
    ray, model: ModelOptions, options: RayOptions, jobs: list[Job], settings: dict[str, dict[str, Any]], maps: bool
):
    """The workers' rows as they come. A block has one job, and an actor one block at a time, so that nothing but the
    job that an actor runs dies with it."""
    items = [{"job": json.dumps({"id": job.id, "settings": settings[job.id]})} for job in jobs]
    pool = ray.data.ActorPoolStrategy(size=options.actors, max_tasks_in_flight_per_actor=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*ray_remote_args", DeprecationWarning)  # max_task_retries has no other name
        generated = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
            ModelWorker,
            fn_constructor_args=(model, maps),
            batch_size=1,
            compute=pool,
            num_cpus=options.cpus,
            num_gpus=options.gpus or None,
            max_task_retries=options.retries,
        )
    return generated.iter_rows()


def write(
    journal: Journal, job: Job, fingerprint: str, record: dict[str, Any], images: tuple[bytes, bytes], out: Path
) -> dict[str, Any]:
    """Writes a job's submission, which Ray does not tell earlier; its files; and its result, which is returned. images:
    PNGs of image and map, empty where there is none."""
    attempt = journal.submitted.get(job.id, {}).get("attempt", 0) + 1
    submission = journal.write_submission(job.id, fingerprint, attempt, "ray")
    path, copies = out / f"{job.id}.png", []
    for place, content in zip((path, map_of(path)), images, strict=True):
        if content:
            try:
                write_whole(place, content)
                copies.append(str(place))
            except FileInUseError as error:
                record |= {"status": "error", "error": f"{place} could not be replaced: {error.strerror}"}
    submission = {name: submission[name] for name in ("server", "prompt_id", "attempt")}
    return journal.write_result({**record, "overrides": job.overrides, **submission, "files": [], "copies": copies})
