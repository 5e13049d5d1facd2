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
from .studio import Painter, Studio

LOCAL = "local"
PROBE_SECONDS = 5.0
STORE_BYTES = 256 << 20  # of a local Ray's shared memory; an image is a few megabytes


@dataclass(frozen=True)
class Fleet:
    """address: of a cluster, `auto`, or LOCAL for a Ray of this process. actors: how many models generate at a time,
    each with so many CPUs and GPUs. retries: how often a job is repeated whose actor died."""

    address: str = LOCAL
    actors: int = 1
    cpus: int = 1
    gpus: float = 0
    retries: int = 3


class FleetError(RuntimeError):
    """Ray is not there, or has given up; the message says why."""


def generate_all(
    journal: Journal,
    studio: Studio,
    fleet: Fleet,
    jobs: list[Job],
    settings: dict[str, dict[str, Any]],
    prints: dict[str, str],
    out: Path,
    on_result: Callable[[dict[str, Any]], None],
    maps: bool,
) -> None:
    """Generates the jobs' images, with maps if wanted; returns when every job has ended. Raises FleetError."""
    if not jobs:
        return
    ray = started(fleet)
    try:
        by_id = {job.id: job for job in jobs}
        for row in rows(ray, studio, fleet, jobs, settings, maps):
            record = json.loads(row["record"])
            job = by_id.pop(record["id"])
            begin(journal, job, prints)
            write(journal, job, record, (row["image"], row["map"]), out, on_result)
        for job in by_id.values():
            begin(journal, job, prints)
            attempts = counted(fleet.retries + 1, "attempt")
            record = {
                "status": "lost",
                "traces": [],
                "warnings": [],
                "seconds": 0.0,
                "error": f"given up after {attempts}: the process that ran it died",
            }
            write(journal, job, record, (b"", b""), out, on_result)
    except (ray.exceptions.RayError, ray.exceptions.RayTaskError) as error:
        raise FleetError(f"Ray gave up: {str(error).strip().splitlines()[-1]}") from error
    finally:
        ray.shutdown()


def probe(address: str) -> None:
    """Raises FleetError where nobody listens at HOST:PORT. Ray itself tries for long, and may end the process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host:  # neither LOCAL nor `auto`
        try:
            socket.create_connection((host.strip("[]"), int(port)), PROBE_SECONDS).close()
        except (OSError, ValueError, OverflowError) as error:
            raise FleetError(f"no Ray at {address}: {error}") from error


def started(fleet: Fleet):
    """The ray module, connected. SIGTERM keeps its handler. Raises KeyboardInterrupt where it comes meanwhile."""
    probe(fleet.address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports home unless told otherwise
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # it calls what happens in every run an error
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise JobsError(f'--ray needs Ray ({error}): pip install -e ".[ray]" in this pack\'s folder') from error
    given = {"address": fleet.address}
    if fleet.address == LOCAL:
        cpus = max(os.cpu_count() or 1, fleet.actors * fleet.cpus)
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
        raise FleetError(f"no Ray at {fleet.address}: {error}") from error
    finally:
        signal.signal(signal.SIGTERM, cancel)
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.max_errored_blocks = -1  # a job whose actor dies each time is reported at the end
    return ray


def rows(ray, studio: Studio, fleet: Fleet, jobs: list[Job], settings: dict[str, dict[str, Any]], maps: bool):
    """The painters' rows as they come. A block has one job, and an actor one block at a time, so that nothing but the
    job that an actor runs dies with it."""
    items = [{"job": json.dumps({"id": job.id, "settings": settings[job.id]})} for job in jobs]
    pool = ray.data.ActorPoolStrategy(size=fleet.actors, max_tasks_in_flight_per_actor=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*ray_remote_args", DeprecationWarning)  # max_task_retries has no other name
        generated = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
            Painter,
            fn_constructor_args=(studio, maps),
            batch_size=1,
            compute=pool,
            num_cpus=fleet.cpus,
            num_gpus=fleet.gpus or None,
            max_task_retries=fleet.retries,
        )
    return generated.iter_rows()


def begin(journal: Journal, job: Job, prints: dict[str, str]) -> None:
    """Ray does not tell when a job starts, so it is known only from its end on, before its first file is written."""
    journal.write_queued(job.id, prints[job.id], len(journal.queued.get(job.id, ())) + 1, "ray")


def write(
    journal: Journal,
    job: Job,
    record: dict[str, Any],
    images: tuple[bytes, bytes],
    out: Path,
    on_result: Callable[[dict[str, Any]], None],
) -> None:
    """The files first, so that a line of the results always has its image. images: PNGs of image and map, empty where
    there is none."""
    entry, path, copies = journal.queued[job.id][-1], out / f"{job.id}.png", []
    for place, content in zip((path, map_of(path)), images, strict=True):
        if content:
            try:
                write_whole(place, content)
                copies.append(place)
            except FileInUseError as error:
                record |= {"status": "error", "error": f"{place} could not be replaced: {error.strerror}"}
    full = {
        "id": job.id,
        "status": record["status"],
        "overrides": job.overrides,
        "server": entry["server"],
        "prompt_id": entry["prompt_id"],
        "attempt": entry["attempt"],
        "seconds": record["seconds"],
        "files": [],
        "traces": record["traces"],
        "warnings": record["warnings"],
        "error": record["error"],
        "copies": [str(path) for path in copies],
    }
    journal.write_result(full)
    on_result(full)
