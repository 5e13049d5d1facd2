"""The same jobs on Ray, an engine for many machines: actors that hold a model generate, this process writes."""

import logging
import os
import signal
import socket
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..limits.replacing import FileInUseError
from .copies import write_whole
from .jobs import Job, JobsError, count_of
from .journal import Journal
from .maps import map_of
from .model_worker import Made, ModelOptions, ModelWorker

logger = logging.getLogger(__name__)

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
    model: ModelOptions, options: RayOptions, jobs: list[Job], settings: dict[str, dict[str, Any]], maps: bool
) -> Iterator[tuple[Job, Made]]:
    """Every job and what was made of it, as it ends. settings: by job id. Raises RayRunError."""
    if not jobs:
        return
    ray = start_ray(options)
    try:
        yield from share_out(ray, model, options, jobs, settings, maps)
    except ray.exceptions.RayError as error:
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
            raise RayRunError(no_ray(address, error)) from error


def no_ray(address: str, why: object) -> str:
    return (
        f"no Ray at {address} ({why}): start one there (ray start --head), or use this machine alone (--ray without an "
        "address)"
    )


def start_ray(options: RayOptions):
    """The ray module, connected. SIGTERM keeps its handler. Raises KeyboardInterrupt where it comes meanwhile."""
    probe(options.address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports home unless told otherwise
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # it calls what happens in every run an error
    try:
        import ray
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
        raise RayRunError(no_ray(options.address, str(error).split(":")[0])) from error
    finally:
        signal.signal(signal.SIGTERM, cancel)
    return ray


def room(ray, options: RayOptions) -> int:
    """How many of the actors the cluster can hold at a time. Raises RayRunError where it can hold none, which Ray would
    wait for in silence, and says where others leave no room for one yet."""
    count, has, free = options.actors, ray.cluster_resources(), ray.available_resources()
    for name, need in (("GPU", options.gpus), ("CPU", options.cpus)):
        there = f"this cluster has {has.get(name, 0):g}"
        if has.get(name, 0) < need:
            raise RayRunError(f"an actor needs {need:g} {name} (--{name.lower()}s), but {there}")
        if free.get(name, 0) < need:
            logger.warning("Waiting for %g %s: %s, and others use them.", need, name, there)
        if need and (most := int(has[name] / need)) < count:
            logger.warning("%d actors instead of %d: each needs %g %s, and %s.", most, count, need, name, there)
            count = most
    return count


def share_out(
    ray, model: ModelOptions, options: RayOptions, jobs: list[Job], settings: dict[str, dict[str, Any]], maps: bool
) -> Iterator[tuple[Job, Made]]:
    """An actor that is there gets one job at a time, so that nothing but the job that it runs dies with it."""
    actor = ray.remote(ModelWorker).options(
        num_cpus=options.cpus, num_gpus=options.gpus, max_restarts=-1, max_task_retries=options.retries
    )
    waiting = deque(jobs)
    actors = [actor.remote(model, maps) for _ in range(min(room(ray, options), len(jobs)))]
    running: dict[Any, tuple[Any, Job | None]] = {worker.__ray_ready__.remote(): (worker, None) for worker in actors}
    ended = 0
    while ended < len(jobs):
        [first], _ = ray.wait(list(running))
        worker, job = running.pop(first)
        try:
            made = ray.get(first)
        except ray.exceptions.RayActorError:
            if not job:  # there is no model
                raise
            error = f"given up after {count_of(options.retries + 1, 'attempt')}: the process that ran it died"
            made = {"status": "lost", "traces": [], "warnings": [], "seconds": 0.0, "error": error}, b"", b""
        if waiting:
            following = waiting.popleft()
            running[worker.run.remote(settings[following.id])] = worker, following
        if job:
            ended += 1
            yield job, made


def write(journal: Journal, job: Job, fingerprint: str, made: Made, out: Path) -> dict[str, Any]:
    """Writes a job's submission, which Ray does not tell earlier; its files; and its result, which is returned."""
    record, *images = made
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
    about = {"overrides": job.overrides, **submission, "files": [], "copies": copies}
    return journal.write_result({"id": job.id, **record, **about})
