"""The same jobs on Ray, started on this machine; and what is refused before Ray is started."""

import functools
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import comfyui_specar as specar
import numpy as np
import pytest
from comfyui_specar.batch import cli, ray_cluster
from comfyui_specar.batch.jobs import Job, RowsError, read_jobs
from comfyui_specar.batch.journal import Journal
from comfyui_specar.batch.model_worker import RECIPES, ModelOptions, ModelWorker
from comfyui_specar.batch.overrides import fingerprint
from comfyui_specar.models.conditions import VERSION, precision
from comfyui_specar.tests.support.fake_comfy import lines
from comfyui_specar.tests.support.mortal import MortalWorker
from comfyui_specar.tests.support.patience import PATIENCE
from PIL import Image

pytestmark = pytest.mark.whole

TABLE = """id,prompt,seed,window,top_k
before,"star, 3d, on a blue background",1,,
star,"star, 3d, on a blue background",1,16,
refused,star,1,,9999
poison,poison,1,,
late,"heart, 3d, aple, on a red background",2,,
"""
COMMAND = ["jobs.csv", "--ray", "--out", "out"]
MODEL = ModelOptions("default", "sjd")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def table(table) -> Path:
    (table / "jobs.csv").write_text(TABLE, encoding="utf-8")
    return table


def test_actors_run_the_jobs_but_not_those_that_were_run_before(table, monkeypatch, capsys):
    jobs = read_jobs(table / "jobs.csv")
    prints = {job: fingerprint([asdict(MODEL), found]) for job, found in MODEL.settings(jobs).items()}
    with Journal(table / "jobs.results.jsonl") as journal:
        journal.write_submission("before", prints["before"], 1, "ray")
        journal.write_result({"id": "before", "status": "success"})
    monkeypatch.setattr(ray_cluster, "ModelWorker", MortalWorker)
    assert cli.main([*COMMAND, "--retries", "1"]) == cli.FAILED
    said = capsys.readouterr().err
    assert "late: done" in said and "3 of 5 jobs done, 1 failed, 1 given up, 0 still" in said
    records = {record["id"]: record for record in lines(table / "jobs.results.jsonl")}
    assert len(lines(table / "jobs.results.jsonl")) == len(records) == len(jobs)
    assert records["star"]["status"] == records["late"]["status"] == "success"
    assert "aple" in records["late"]["warnings"][0] and records["star"]["warnings"] == []
    assert records["refused"]["warnings"] == [] and "refused: warning" not in said
    assert "0 to 1024" in records["refused"]["error"] and "2 attempts" in records["poison"]["error"]
    [trace] = records["star"]["traces"]
    assert trace["method"] == "sjd" and 0 < trace["target_passes"] < 256 and trace["seed"] == 1
    assert sorted(path.name for path in Path("out").iterdir()) == ["late.png", "star.png"]
    monkeypatch.setattr(ray_cluster, "start_ray", lambda _fleet: pytest.fail("there is nothing left to draw"))
    assert cli.main(COMMAND) == cli.FAILED

    model, decoder = (load(specar.bundled("default")) for load in (specar.load_model, specar.load_image_decoder))
    prompt = model.encode_prompt("heart, 3d, aple, on a red background")
    out = specar.sample(model, prompt, specar.methods.SJD(), seed=2)
    image = Image.open("out/late.png")
    difference = np.asarray(image) / 255 - decoder.decode(out.latent)[0].numpy()
    assert abs(difference).max() < 1.5 / 255
    about = json.loads(image.text["specar"])
    assert about["settings"]["seed"] == 2 and about["totals"]["target_passes"] == out.trace.summary()["target_passes"]
    assert json.dumps([about["totals"]]) == json.dumps(records["late"]["traces"])
    assert about["method"] == json.loads(json.dumps(out.trace.settings))  # and it can be generated again
    made_with = {"model": "default", "decoder": None, "drafter": None, "dtype": "fp32", "device": "cpu"}
    assert about.items() >= (made_with | {"pack": VERSION}).items()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signal for one process")
def test_control_c_cancels(table):
    """Also in a script's background, where Ctrl-C is ignored at first. SIGTERM is treated alike."""
    rows = "".join(f'j{i},"star, 3d, on a blue background"\n' for i in range(60))
    (table / "jobs.csv").write_text(f"id,prompt\n{rows}", encoding="utf-8")
    run = subprocess.Popen(
        [sys.executable, str(ROOT / "batch"), *COMMAND],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    assert any(": done" in line for line in run.stderr)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=PATIENCE)
    assert run.returncode == cli.CANCELLED and "of 60 jobs done" in said and "***" not in said, said


def test_sigterm_while_ray_starts_cancels(table, monkeypatch, capsys):
    """Ray has its own handler of it then, which raises SystemExit."""
    ray = SimpleNamespace(init=lambda **_given: sys.exit(signal.SIGTERM))
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert cli.main(COMMAND) == cli.CANCELLED and "0 of 5 jobs" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "127.0.0.1:port", "127.0.0.1:99999"])
def test_where_no_cluster_listens_it_says_so_at_once(table, monkeypatch, capsys, address):
    monkeypatch.setitem(sys.modules, "ray", None)  # which is not asked
    (table / "jobs.csv").write_text("prompt\ncat\n", encoding="utf-8")
    assert cli.main(["jobs.csv", "--ray", address, "--out", "out"]) == cli.UNFINISHED
    assert f"no Ray at {address} (" in capsys.readouterr().err


def test_a_job_that_ray_never_ended_is_no_job_of_the_batch(table, monkeypatch, capsys):
    """So its row may still be changed."""

    def dies(*_given):
        raise ConnectionError("the cluster went away")

    ray = SimpleNamespace(exceptions=SimpleNamespace(RayError=ConnectionError), shutdown=lambda: None)
    monkeypatch.setattr(ray_cluster, "start_ray", lambda _fleet: ray)
    monkeypatch.setattr(ray_cluster, "share_out", dies)
    assert cli.main(COMMAND) == cli.UNFINISHED and "went away" in capsys.readouterr().err
    with Journal(table / "jobs.results.jsonl") as journal:
        assert journal.submitted == {} == journal.results


def test_it_asks_for_ray(table, monkeypatch, capsys):
    assert cli.main([*COMMAND, "--dry-run"]) == cli.DONE
    monkeypatch.setitem(sys.modules, "ray", None)  # not installed
    assert cli.main(COMMAND) == cli.BAD_INPUT
    assert 'pip install -e ".[ray]"' in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "comfyui_specar.batch.model_worker", None)  # which imports numpy
    assert cli.main(COMMAND) == cli.BAD_INPUT
    assert "pip install -r requirements.txt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "column", "value", "said"),
    [
        ("sjd", "window", "-3", "window is -3"),
        ("sjd", "cfg", "0", "cfg is 0.*at least 1"),
        ("sjd", "temperature", "-1", "temperature is -1.*0 is greedy"),
        ("sjd", "top_p", "3", "top_p is 3.*at most 1"),
        ("continuous_next_token", "temperature", "-1", "temperature is -1.*at least 0"),
        ("continuous_next_token", "top_p", "0.9", "top_p: .*continuous"),
    ],
)
def test_numbers_out_of_range_are_refused_before_anything_runs(method, column, value, said):
    with pytest.raises(RowsError, match=f"line 5: {said}"):
        ModelOptions("default", method).settings([Job("a", {"prompt": "cat", column: value}, 5)])


LOADERS = {name: functools.cache(getattr(specar.api, name)) for name in ("load_model", "load_image_decoder")}


@pytest.mark.parametrize("method", RECIPES)
def test_every_method_generates_with_its_settings(method, monkeypatch):
    """Each by its name, with all of its settings given as their defaults; what it generates is shown elsewhere."""
    drawn = []
    for name, loader in LOADERS.items():
        monkeypatch.setattr(specar.api, name, loader)
    monkeypatch.setattr(
        "comfyui_specar.batch.model_worker.api.sample", lambda *given, **named: drawn.append((given, named))
    )
    continuous = method.startswith("continuous")
    bundled, drafter = ("continuous", "continuous/small") if continuous else ("default", "default/eagle")
    studio = ModelOptions(bundled, method, drafter=drafter if RECIPES[method].needs_drafter else None)
    columns = RECIPES[method].columns()
    made = RECIPES[method].settings
    defaults = {name: getattr(made, name) for name in columns if getattr(made, name) is not None}
    defaults.pop("pays", None)  # ADT-Tree's follows from its bounds
    settings = studio.settings([Job("a", {"prompt": "cat", "negative": "dog", "cfg": "2", **defaults}, 1)])["a"]
    with pytest.raises(AttributeError):  # nothing is generated
        ModelWorker(studio).generate(settings)
    [((_, prompt, built), named)] = drawn
    assert named["cfg"] == 2 and named["negative"] is not None and prompt is not None and "seed" not in named
    assert built == RECIPES[method].build(built.drafter if hasattr(built, "drafter") else None)


@pytest.mark.parametrize("dtype", ["bf16", "int8 (storage)", "int8 (storage and KV cache)"])
def test_a_precision_is_that_of_the_loader(dtype):
    worker = ModelWorker(ModelOptions("default", "cool_sd", drafter="default/eagle", dtype=dtype))
    assert precision(worker.model).split(", ")[-1] == dtype and worker.model.int8_cache == ("KV" in dtype)


def test_a_setting_of_a_method_that_needs_a_drafter_reaches_it():
    studio = ModelOptions("default", "cool_sd", drafter="default/eagle")
    settings = studio.settings([Job("a", {"prompt": "cat", "delta": "2", "floor": "no"}, 1)])["a"]
    worker = ModelWorker(studio)
    assert worker.recipe.build(worker.drafter, delta=settings["delta"], floor=settings["floor"]).rule == (
        specar.rules.CoolSD(delta=2.0, floor=False)
    )
