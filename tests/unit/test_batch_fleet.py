"""What is asked of Ray and what becomes of what it gives back, without Ray; and how a worker rounds its pixels."""

import io
import os
import signal
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from comfyui_specar.batch import model_worker, ray_cluster
from comfyui_specar.batch.jobs import Job
from comfyui_specar.batch.ray_cluster import RayOptions, generate_all, share_out
from PIL import Image

JOBS = [Job(name, {"seed": 1}, 2) for name in "abcd"]
SETTINGS = {job.id: {"prompt": job.id} for job in JOBS}


class DiedError(RuntimeError):
    """Of an actor."""


class FakeRay:
    """A Ray that notes what it is asked. Of its actors the first `here` are there; `deadly`: prompts that they die of;
    `free`: GPUs that no other program uses. What an actor is asked for is a function, which `get` calls."""

    def __init__(self, here: int = 9, deadly: str = "", gpus: int = 2, free: int = 2):
        self.here, self.deadly, self.asked, self.jobs_at = here, deadly, {}, []
        self.exceptions = SimpleNamespace(RayError=RuntimeError, RayActorError=DiedError)
        self.remote = lambda _worker: SimpleNamespace(options=self.options)
        self.cluster_resources = lambda: {"CPU": 16.0} | ({"GPU": float(gpus)} if gpus else {})
        self.available_resources = lambda: {"CPU": 16.0} | ({"GPU": float(free)} if free else {})
        self.init = lambda **given: self.asked.update(init=given)
        self.shutdown = lambda: self.asked.update(shutdown=True)

    def options(self, **given):
        self.asked["actor"] = given
        return SimpleNamespace(remote=self.actor)

    def actor(self, *given):
        self.asked.setdefault("actors", []).append(given)
        number = len(self.asked["actors"]) - 1

        def ready():
            if "model" in self.deadly:
                raise DiedError("no\nmodel")

        def run(settings):
            assert number not in self.jobs_at, "one job at a time"
            self.jobs_at.append(number)

            def end():
                self.jobs_at.remove(number)
                if settings["prompt"] in self.deadly:
                    raise DiedError
                return {"id": settings["prompt"], "status": "success"}, b"image", b""

            return number, end

        remote = SimpleNamespace(remote=lambda: (number, ready))
        return SimpleNamespace(__ray_ready__=remote, run=SimpleNamespace(remote=run))

    def wait(self, running):
        return [next(each for each in running if each[0] < self.here)], []

    def get(self, asked):
        return asked[1]()


@pytest.fixture
def ray(monkeypatch):
    found = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", found)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_BACKEND_LOG_LEVEL", "fatal")
    return found


def test_a_ray_of_its_own_has_the_processors_that_the_actors_need_and_listens_to_nobody_else(ray):
    handler, init = signal.getsignal(signal.SIGTERM), ray.init

    def with_a_handler_of_its_own(**given):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        init(**given)

    ray.init = with_a_handler_of_its_own
    assert ray_cluster.start_ray(RayOptions(actors=500, cpus=3)) is ray
    given = ray.asked["init"]
    assert given["num_cpus"] == 1500 and given["_node_ip_address"] == "127.0.0.1" and given["address"] == "local"
    assert given["object_store_memory"] == 2**28 and given["include_dashboard"] is False
    assert signal.getsignal(signal.SIGTERM) == handler
    ray_cluster.start_ray(RayOptions())
    assert ray.asked["init"]["num_cpus"] == os.cpu_count()
    ray_cluster.start_ray(RayOptions(address="auto"))
    assert ray.asked["init"] == {"log_to_driver": False, "logging_level": "ERROR", "address": "auto"}


@pytest.mark.parametrize("error", [ConnectionError, RuntimeError, ValueError])
def test_a_ray_that_is_not_there_is_named(ray, error):
    def init(**_):
        raise error("nobody")

    ray.init = init
    with pytest.raises(ray_cluster.RayRunError, match=r"no Ray at auto \(nobody\): start one"):
        ray_cluster.start_ray(RayOptions(address="auto"))


@pytest.mark.parametrize("here", [1, 2, 9])
def test_an_actor_that_is_there_has_one_job_at_a_time_and_one_that_dies_of_it_gets_the_next(here):
    ray = FakeRay(here, deadly="b")
    options = RayOptions(actors=3, cpus=2, gpus=0.5, retries=4)
    found = {job.id: made for job, made in share_out(ray, "model", options, JOBS, SETTINGS, True)}
    assert ray.asked["actor"] == {"num_cpus": 2, "num_gpus": 0.5, "max_restarts": -1, "max_task_retries": 4}
    assert ray.asked["actors"] == 3 * [("model", True)] and not ray.jobs_at
    statuses = {job: record["status"] for job, (record, *_) in found.items()}
    assert statuses == dict.fromkeys("acd", "success") | {"b": "lost"}
    assert found["b"][0]["error"].startswith("given up after 5 attempts:") and found["b"][1:] == (b"", b"")
    assert all(record["id"] == job for job, (record, image, _) in found.items() if image)
    assert len(list(share_out(one := FakeRay(), "model", RayOptions(actors=8), JOBS[:1], SETTINGS, False))) == 1
    assert len(one.asked["actors"]) == 1, "no more than there are jobs"


@pytest.mark.parametrize(
    ("gpus", "free", "options", "actors", "said"),
    [
        (2, 2, RayOptions(actors=3, gpus=0.5), 3, ""),
        (0, 0, RayOptions(actors=3), 3, ""),
        (2, 2, RayOptions(actors=3, gpus=1), 2, "2 actors instead of 3: each needs 1 GPU, and this cluster has 2."),
        (2, 2, RayOptions(actors=3, cpus=8), 2, "2 actors instead of 3: each needs 8 CPU, and this cluster has 16."),
        (2, 0, RayOptions(gpus=1), 1, "Waiting for 1 GPU: this cluster has 2, and others use them."),
    ],
)
def test_there_are_as_many_actors_as_the_cluster_can_hold(caplog, gpus, free, options, actors, said):
    ray = FakeRay(gpus=gpus, free=free)
    assert len(list(share_out(ray, "model", options, JOBS, SETTINGS, False))) == 4
    assert len(ray.asked["actors"]) == actors and caplog.messages == [said] * bool(said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (RayOptions(gpus=1), "an actor needs 1 GPU .--gpus., but this cluster has 0"),
        (RayOptions(cpus=17), "an actor needs 17 CPU .--cpus., but this cluster has 16"),
    ],
)
def test_a_cluster_that_never_has_room_for_an_actor_is_an_error(options, said):
    """Ray would wait in silence."""
    ray = FakeRay(gpus=0, free=0)
    with pytest.raises(ray_cluster.RayRunError, match=said):
        next(share_out(ray, "model", options, JOBS, SETTINGS, False))
    assert "actors" not in ray.asked


def test_a_model_that_cannot_be_loaded_ends_the_batch_and_ray(ray):
    ray.deadly = "model"
    with pytest.raises(ray_cluster.RayRunError, match="Ray gave up: model"):
        list(generate_all(None, RayOptions(), JOBS, SETTINGS, False))
    assert ray.asked["shutdown"]


def test_pixels_are_rounded_as_save_image_does(monkeypatch):
    values = [-0.1, 0.0, 0.4999, 0.5, 0.9999, 1.0, 1.2, 1 / 255, 254.5 / 255]
    decoded = torch.tensor(values * 3).reshape(1, 3, 3, 3)
    worker = object.__new__(model_worker.ModelWorker)
    worker.options = SimpleNamespace(model="m", decoder=None, drafter=None)
    worker.recipe = SimpleNamespace(build=lambda drafter, **_: None)
    worker.model, worker.drafter, worker.maps = SimpleNamespace(encode_prompt=lambda text: text), None, False
    worker.decoder = SimpleNamespace(decode=lambda latent: decoded)
    trace = SimpleNamespace(settings={"method": "x"}, summary=lambda: {"images": 1})
    made = SimpleNamespace(trace=trace, latent=None, notices=["n"])
    monkeypatch.setattr(model_worker.api, "sample", lambda *_, **__: made)
    monkeypatch.setattr(model_worker, "conditions", lambda model: {})
    content, overlay, totals, notices = worker.generate({"prompt": "a"})
    found = np.asarray(Image.open(io.BytesIO(content))).reshape(3, 9)
    wanted = np.clip(255 * np.array(values, dtype=np.float32), 0, 255).astype(np.uint8)
    assert (found == wanted).all() and overlay == b"" and totals == {"method": "x", "images": 1} and notices == ["n"]


def test_a_worker_says_what_became_of_a_job(monkeypatch):
    worker = object.__new__(model_worker.ModelWorker)

    def generate(settings):
        if settings["prompt"] == "bad":
            raise ValueError("no\n such  word")
        return b"image", b"map", {"tokens": 4}, ["a notice"]

    worker.generate = generate
    monkeypatch.setattr(model_worker.time, "monotonic", iter([1.0, 3.5, 4.0, 4.25]).__next__)
    good = {"status": "success", "traces": [{"tokens": 4}], "warnings": ["a notice"], "error": "", "seconds": 2.5}
    assert worker.run({"prompt": "good"}) == (good, b"image", b"map")
    bad = {"status": "error", "traces": [], "warnings": [], "error": "ValueError: no such word", "seconds": 0.25}
    assert worker.run({"prompt": "bad"}) == (bad, b"", b"")
