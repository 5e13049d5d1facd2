"""What is asked of Ray and what becomes of what it gives back, without Ray; and how a worker rounds its pixels."""

import io
import json
import os
import signal
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from comfyui_specar.batch import model_worker, ray_cluster
from comfyui_specar.batch.jobs import Job
from comfyui_specar.batch.journal import Journal
from comfyui_specar.batch.ray_cluster import RayOptions
from PIL import Image


class Asked:
    """A Ray that notes what it is asked."""

    def __init__(self):
        self.asked = {}
        self.context = SimpleNamespace()
        self.data = ModuleType("ray.data")
        self.data.DataContext = SimpleNamespace(get_current=lambda: self.context)
        self.data.ActorPoolStrategy = lambda **given: self.note("pool", given)
        self.data.from_items = lambda items, **given: self.note("items", {"items": items, **given}) and self
        self.init = lambda **given: self.note("init", given)
        self.exceptions = SimpleNamespace(RayError=ZeroDivisionError, RayTaskError=ZeroDivisionError)
        self.shutdown = lambda: self.note("shutdown", True)

    def note(self, name, given):
        self.asked[name] = given
        return given

    def map_batches(self, worker, **given):
        self.note("map", {"worker": worker, **given})
        return self

    def iter_rows(self):
        return iter(())


@pytest.fixture
def ray(monkeypatch):
    asked = Asked()
    monkeypatch.setitem(sys.modules, "ray", asked)
    monkeypatch.setitem(sys.modules, "ray.data", asked.data)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_BACKEND_LOG_LEVEL", "fatal")
    return asked


def test_a_ray_of_its_own_has_the_processors_that_the_actors_need_and_listens_to_nobody_else(ray):
    handler, init = signal.getsignal(signal.SIGTERM), ray.init

    def with_a_handler_of_its_own(**given):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        init(**given)

    ray.init = with_a_handler_of_its_own
    assert ray_cluster.started(RayOptions(actors=500, cpus=3)) is ray
    given = ray.asked["init"]
    assert given["num_cpus"] == 1500 and given["_node_ip_address"] == "127.0.0.1" and given["address"] == "local"
    assert given["object_store_memory"] == 2**28 and given["include_dashboard"] is False
    assert ray.context.max_errored_blocks == -1 and signal.getsignal(signal.SIGTERM) == handler
    ray_cluster.started(RayOptions())
    assert ray.asked["init"]["num_cpus"] == os.cpu_count()


def test_a_cluster_is_left_as_it_is(ray):
    ray_cluster.started(RayOptions(address="auto"))
    assert ray.asked["init"] == {"log_to_driver": False, "logging_level": "ERROR", "address": "auto"}


@pytest.mark.parametrize("error", [ConnectionError, RuntimeError, ValueError])
def test_a_ray_that_is_not_there_is_named(ray, error):
    def init(**_):
        raise error("nobody")

    ray.init = init
    with pytest.raises(ray_cluster.RayRunError, match="no Ray at auto: nobody"):
        ray_cluster.started(RayOptions(address="auto"))


def test_an_actor_has_one_job_at_a_time(ray):
    jobs = [Job("a", {}, 1), Job("b", {}, 2)]
    ray_cluster.rows(
        ray, "studio", RayOptions(actors=3, cpus=2, gpus=0.5, retries=4), jobs, {"a": {"x": 1}, "b": {}}, True
    )
    assert ray.asked["pool"] == {"size": 3, "max_tasks_in_flight_per_actor": 1}
    assert ray.asked["items"]["override_num_blocks"] == 2
    assert [item["job"] for item in ray.asked["items"]["items"]] == [
        '{"id": "a", "settings": {"x": 1}}',
        '{"id": "b", "settings": {}}',
    ]
    given = ray.asked["map"]
    assert given["batch_size"] == 1 and given["fn_constructor_args"] == ("studio", True)
    assert (given["num_cpus"], given["num_gpus"], given["max_task_retries"]) == (2, 0.5, 4)
    ray_cluster.rows(ray, "studio", RayOptions(), jobs, {"a": {}, "b": {}}, False)
    assert ray.asked["map"]["num_gpus"] is None


@pytest.mark.parametrize(("retries", "attempts"), [(0, "1 attempt:"), (1, "2 attempts:"), (3, "4 attempts:")])
def test_a_job_that_no_actor_survives_says_how_often_it_was_tried(ray, tmp_path, retries, attempts):
    path, jobs, results = tmp_path / "r.jsonl", [Job("a", {"seed": 1}, 1)], []
    with Journal(path) as journal:
        ray_cluster.generate_all(
            journal, None, RayOptions(retries=retries), jobs, {"a": {}}, {"a": "f"}, tmp_path, results.append, False
        )
        assert journal.submitted["a"].items() >= {"attempt": 1, "server": "ray", "fingerprint": "f"}.items()
    assert [json.loads(line) for line in path.read_text("utf-8").splitlines()] == results
    [record] = results
    assert (record["id"], record["status"], record["overrides"]) == ("a", "lost", {"seed": 1})
    assert attempts in record["error"] and record["seconds"] == 0 and ray.asked["shutdown"]


def test_pixels_are_rounded_as_save_image_does(monkeypatch):
    values = [-0.1, 0.0, 0.4999, 0.5, 0.9999, 1.0, 1.2, 1 / 255, 254.5 / 255]
    decoded = torch.tensor(values * 3).reshape(1, 3, 3, 3)
    worker = object.__new__(model_worker.ModelWorker)
    worker.options, worker.recipe = (
        SimpleNamespace(model="m", decoder=None, drafter=None),
        SimpleNamespace(build=lambda drafter, **_: None),
    )
    worker.model, worker.drafter, worker.maps = SimpleNamespace(encode_prompt=lambda text: text), None, False
    worker.decoder = SimpleNamespace(decode=lambda latent: decoded)
    trace = SimpleNamespace(settings={"method": "x"}, summary=lambda: {"images": 1})
    monkeypatch.setattr(
        model_worker.api, "sample", lambda *_, **__: SimpleNamespace(trace=trace, latent=None, notices=["n"])
    )
    monkeypatch.setattr(model_worker, "conditions", lambda model: {})
    content, overlay, totals, notices = worker.generate({"prompt": "a"})
    found = np.asarray(Image.open(io.BytesIO(content))).reshape(3, 9)
    wanted = np.clip(255 * np.array(values, dtype=np.float32), 0, 255).astype(np.uint8)
    assert (found == wanted).all() and overlay == b"" and totals == {"method": "x", "images": 1} and notices == ["n"]


def test_a_worker_says_of_each_job_what_became_of_it(monkeypatch):
    worker = object.__new__(model_worker.ModelWorker)

    def generate(settings):
        if settings["prompt"] == "bad":
            raise ValueError("no\n such  word")
        return b"image", b"map", {"tokens": 4}, ["a notice"]

    worker.generate = generate
    monkeypatch.setattr(model_worker.time, "monotonic", iter([1.0, 3.5, 4.0, 4.25]).__next__)
    jobs = [json.dumps({"id": name, "settings": {"prompt": name}}) for name in ("good", "bad")]
    found = worker({"job": np.array(jobs)})
    good, bad = map(json.loads, found["record"])
    assert good == {
        "id": "good",
        "status": "success",
        "traces": [{"tokens": 4}],
        "warnings": ["a notice"],
        "error": "",
        "seconds": 2.5,
    }
    assert bad == {
        "id": "bad",
        "status": "error",
        "traces": [],
        "warnings": [],
        "error": "ValueError: no such word",
        "seconds": 0.25,
    }
    assert found["image"] == [b"image", b""] and found["map"] == [b"map", b""]
