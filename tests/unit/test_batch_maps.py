"""Acceptance maps beside the images of a batch: for which workflows, under which names, on servers and without."""

import asyncio
import io
import json
from pathlib import Path

import comfyui_specar as specar
import numpy as np
import pytest
from comfyui_specar.batch import ray_cluster
from comfyui_specar.batch.dispatch import Batch, Options
from comfyui_specar.batch.jobs import Job
from comfyui_specar.batch.journal import Journal
from comfyui_specar.batch.maps import SAMPLER, has_map, sampler_of, with_maps
from comfyui_specar.batch.model_worker import ModelOptions, ModelWorker
from comfyui_specar.batch.overrides import OverrideError, fingerprint, read_workflow
from comfyui_specar.tests.support.fake_comfy import FakeComfy
from comfyui_specar.tests.support.patience import PATIENCE
from PIL import Image

ROOT = Path(specar.__file__).resolve().parent
SHIPPED = sorted((ROOT / "workflows/api").glob("*.json"))
CAPTION = "29 Describe an image (download).json"


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def workflow() -> dict:
    return {
        "1": node("Encoder", text="cat", clip=["2", 0]),
        "3": node("SpecARSJDSampler", positive=["1", 0], seed=0),
        "6": node("VAEDecode", samples=["3", 0], vae=["2", 2]),
        "9": node("SaveImage", filename_prefix="p", images=["6", 0]),
    }


def test_the_nodes_that_are_taken_for_samplers_are_those_with_a_latent_image_and_its_trace():
    contract = json.loads((ROOT / "tests/e2e/object_info.json").read_text(encoding="utf-8"))
    outputs = {name: [kind for kind, _ in about["outputs"]] for name, about in contract.items()}
    named = {name for name in outputs if SAMPLER.fullmatch(name)}
    assert named == {name for name, kinds in outputs.items() if kinds == ["LATENT", "AR_TRACE"]} and len(named) > 8


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_workflows_get_a_map_of_every_image_that_they_save_and_of_no_chart(path):
    plain = read_workflow(path)
    if path.name == CAPTION:
        with pytest.raises(OverrideError, match="--maps.*Save Image.*trace"):
            with_maps(plain)
        return
    mapped = with_maps(plain)
    assert {key: mapped[key] for key in plain} == plain
    kinds = {key: content["class_type"] for key, content in plain.items()}
    images = {
        key: content["inputs"]
        for key, content in plain.items()
        if kinds[key] == "SaveImage" and kinds[content["inputs"]["images"][0]].startswith(("VAEDecode", "SpecARDecode"))
    }
    assert images and mapped.keys() - plain.keys() == {key + end for key in images for end in ("_map", "_overlay")}
    for key, saved in images.items():
        overlay, prefix = mapped[key + "_overlay"]["inputs"], saved["filename_prefix"] + "_map"
        assert overlay["image"] == saved["images"] and SAMPLER.fullmatch(kinds[overlay["trace"][0]])
        assert mapped[key + "_map"]["inputs"] == {"images": [key + "_overlay", 0], "filename_prefix": prefix}


@pytest.mark.parametrize(
    ("added", "sampler"),
    [
        ({}, "3"),
        ({"6": node("ImageScale", image=["7", 0]), "7": node("VAEDecode", samples=["3", 0])}, "3"),
        ({"6": node("SpecARCompareTraces", trace_1=["3", 1])}, None),  # a chart
        (
            {
                "6": node("SpecARAcceptanceMap", trace=["3", 1], image=["7", 0]),
                "7": node("VAEDecode", samples=["3", 0]),
            },
            None,
        ),  # a map
        ({"6": node("ImageBatch", image1=["3", 0], image2=["4", 0]), "4": node("SpecARSampler")}, None),  # whose trace?
        ({"6": node("LoadImage", image="a.png")}, None),
        ({"6": node("Circle", image=["6", 0], other=["gone", 0])}, None),
    ],
)
def test_the_sampler_of_an_image(added, sampler):
    assert sampler_of(workflow() | added, "9") == sampler


def test_a_server_draws_the_maps_and_their_copies_lie_beside_the_images(tmp_path):
    """The fingerprint is that without maps: a batch may go on with or without them."""

    async def check():
        async with FakeComfy() as one:
            with Journal(tmp_path / "r.jsonl") as found:
                for job, maps in (("plain", False), ("mapped", True)):
                    options = Options(poll=0.005, download=tmp_path / "out", maps=maps)
                    batch = Batch(found, [one.url], options)
                    await asyncio.wait_for(batch.run([Job(job, {}, 1)], {job: workflow()}), PATIENCE)
                assert {entry["fingerprint"] for entry in found.submitted.values()} == {fingerprint(workflow())}
                return found.results

    results = asyncio.run(check())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["mapped.png", "mapped_map.png", "plain.png"]
    assert (tmp_path / "out/mapped_map.png").read_bytes() == b"p_map_mapped_00001_.png"
    assert [file["filename"] for file in results["mapped"]["files"]] == [
        "p_mapped_00001_.png",
        "p_map_mapped_00001_.png",
    ]
    assert results["mapped"]["copies"] == [str(tmp_path / f"out/{name}.png") for name in ("mapped", "mapped_map")]
    assert has_map(results["mapped"]) and not has_map(results["plain"])


def test_a_worker_draws_the_map_of_its_image(monkeypatch):
    settings, made = {"prompt": "star, 3d, on a blue background", "seed": 1}, []
    sample = specar.api.sample
    monkeypatch.setattr(specar.api, "sample", lambda *given, **named: made.append(sample(*given, **named)) or made[-1])
    worker = ModelWorker(ModelOptions("default", "sjd"), maps=True)
    image, drawn, totals, _ = worker.generate(settings)
    [out] = made
    wanted = specar.acceptance_map(out.trace, worker.decoder.decode(out.latent))[0]
    opened = [Image.open(io.BytesIO(content)) for content in (image, drawn)]
    assert np.array_equal(np.asarray(opened[1]), wanted)
    assert opened[0].text == opened[1].text and json.loads(opened[1].text["specar"])["totals"] == totals


def test_a_blank_negative_prompt_is_none(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "comfyui_specar.batch.model_worker.api.sample", lambda *_, negative, **__: drawn.append(negative)
    )
    worker = ModelWorker(ModelOptions("default", "sjd"))
    for settings in ({}, {"negative": ""}, {"negative": " "}, {"negative": "dog"}):
        with pytest.raises(AttributeError):  # nothing is generated
            worker.generate({"prompt": "star", **settings})
    assert drawn[:3] == [None] * 3 and drawn[3][0][1]["ar"]["text"] == "dog"


def test_both_files_of_a_job_are_written_with_its_submission_and_one_that_is_held_open_costs_the_job(tmp_path, locked):
    locked({"b_map.png": 99})
    made = {"status": "success", "traces": [], "warnings": [], "seconds": 1.0, "error": ""}
    with Journal(tmp_path / "r.jsonl") as journal:
        records = []
        for job in (Job("a", {"seed": 1}, 1), Job("b", {}, 2), Job("a", {}, 1)):
            records.append(ray_cluster.write(journal, job, "f", (dict(made), b"image", b"map"), tmp_path / "out"))
            wanted = {"attempt": records[-1]["attempt"], "server": "ray", "fingerprint": "f"}
            assert journal.submitted[job.id].items() >= wanted.items()
    assert [record["status"] for record in records] == ["success", "error", "success"]
    assert [(record["id"], record["attempt"]) for record in records] == [("a", 1), ("b", 1), ("a", 2)]
    assert "b_map.png" in records[1]["error"] and records[0]["overrides"] == {"seed": 1}
    assert [len(record["copies"]) for record in records] == [2, 1, 2]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.png", "a_map.png", "b.png"]
