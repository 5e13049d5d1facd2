"""Every family on a real server, through its own workflow, with tiny random files in the released layouts."""

import io
import shutil

import numpy as np
import pytest
from comfyui_specar.batch.maps import SAMPLER
from PIL import Image

from ..support.families import CAPTIONED, CHANGES, FAMILIES, REFINED, SMALL, WORKFLOWS

JANUS, ANOLE = "09 Janus-Pro (download)", "25 Anole (download)"
LLAMAGEN, LUMINA = "21 LlamaGen, text (download)", "23 Lumina-mGPT (download)"
GLM_IMAGE = "28 GLM-Image (download)"


def workflow(comfy, name: str, **inputs) -> dict:
    return comfy.workflow(name, **SMALL | CHANGES.get(name, {}) | inputs)


def images(comfy, run) -> list[np.ndarray]:
    saved = [file for file in run.collect("images") if file["type"] == "output"]
    return [np.asarray(Image.open(io.BytesIO(comfy.view(file))).convert("RGB"), dtype=np.int16) for file in saved]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_workflow_generates(comfy, models, name):
    prompt = workflow(comfy, name, seed=5)
    loader = comfy.node_id(prompt, "SpecARLoadCheckpoint")
    [sampler] = [key for key, node in prompt.items() if SAMPLER.fullmatch(node["class_type"])]
    prompt["info"] = {"class_type": "SpecARModelInfo", "inputs": {"model": [loader, 0]}}
    prompt["trace"] = {"class_type": "SpecARSaveTrace", "inputs": {"trace": [sampler, 1], "filename_prefix": "trace"}}
    run = comfy.run(prompt)
    assert run.outcome == "success", run.message()
    [image] = images(comfy, run)
    assert image.std() > 5, "a flat colour"
    [report] = run.outputs["trace"]["specar"]
    assert report["totals"]["tokens"] == WORKFLOWS[name].tokens and report["settings"]["lossless"]
    [text], [facts] = run.outputs["info"]["text"], run.outputs["info"]["specar"]
    assert text.startswith(f"{prompt[loader]['inputs']['model_name']}: {facts['family']}, ")
    assert "4 rows of 4 tokens of 32 codes" in text
    assert (image.shape[1], image.shape[0]) == tuple(facts["sizes"][0]) and facts["decoder"]
    assert any(choice.startswith("anole_drafter/") for choice in facts["drafters"]) == (name == ANOLE)


def test_the_refining_workflow_is_accepted_and_generates_what_it_refines(comfy, models):
    """Its names and links are those of the core's nodes, which end it because their files are empty here; up to what
    they load, it runs."""
    prompt = comfy.workflow(REFINED, seed=5, top_k=SMALL["top_k"])
    prompt[comfy.node_id(prompt, "SpecAREmptyLatent")]["inputs"] |= {"width": 0, "height": 0}
    empty = {"CheckpointLoaderSimple": "checkpoints", "UpscaleModelLoader": "upscale_models"}
    for node, folder in empty.items():
        [name] = prompt[comfy.node_id(prompt, node)]["inputs"].values()
        (models / folder).mkdir(exist_ok=True)
        (models / folder / name).touch()
    assert comfy.run(prompt).error["node_type"] in empty

    scale = prompt[comfy.node_id(prompt, "ImageScale")]["inputs"]
    assert prompt[scale["image"][0]]["class_type"] == "ImageUpscaleWithModel"
    scale["image"] = prompt[scale["image"][0]]["inputs"]["image"]
    prompt[comfy.node_id(prompt, "SaveImage")]["inputs"]["images"] = [comfy.node_id(prompt, "ImageScale"), 0]
    run = comfy.run(prompt)
    assert run.outcome == "success", run.message()
    [image] = images(comfy, run)
    assert image.shape == (1024, 1024, 3) and image.std() > 5


def asked(comfy, model: str) -> dict:
    """The workflow that describes an image, of a batch of two of them, with the tiny model of another workflow."""
    Image.new("RGB", (50, 30), "red").save(comfy.base / "input/example.png")
    prompt = comfy.workflow(CAPTIONED, max_tokens=8, model_name=model)
    prompt["twice"] = {"class_type": "RepeatImageBatch", "inputs": {"image": ["3", 0], "amount": 2}}
    vae = [comfy.node_id(prompt, "SpecARLoadCheckpoint"), 2]
    prompt[comfy.node_id(prompt, "SpecARCaption")]["inputs"] |= {"image": ["twice", 0], "vae": vae}
    return prompt


@pytest.mark.parametrize("model", ["Janus-Pro-1B", "Lumina-mGPT-7B-768"])
def test_an_image_is_described(comfy, models, model):
    """A text for each image of a batch; by Janus-Pro also with nothing at vae, as in the workflow."""
    prompt = asked(comfy, model)
    shown, inputs = comfy.node_id(prompt, "PreviewAny"), prompt[comfy.node_id(prompt, "SpecARCaption")]["inputs"]
    run = comfy.run(prompt)
    assert run.outcome == "success", run.message()
    first, second = run.outputs[shown]["text"]
    assert first == second and first
    del inputs["vae"]
    run = comfy.run(prompt)
    if model == "Janus-Pro-1B":
        assert run.outputs[shown]["text"] == [first, second]
    else:
        assert run.outcome == "error" and f"{model} reads images as tokens" in run.message()


@pytest.mark.parametrize("method", ["fast, same quality", "slow"])
def test_a_batch_through_the_api_is_the_single_images(comfy, models, method):
    batch = images(comfy, comfy.run(workflow(comfy, JANUS, method=method, seed=20, batch_size=3)))
    assert len(batch) == 3 and (batch[0] != batch[1]).any()
    [last] = images(comfy, comfy.run(workflow(comfy, JANUS, method=method, seed=22)))
    assert np.abs(last - batch[2]).max() <= 1  # the decoder rounds a batch in another order


@pytest.fixture
def without(models, tmp_path):
    """without(path) takes a file or folder of models/ away until the test has ended."""
    away = []

    def take(path: str) -> None:
        away.append((shutil.move(models / path, tmp_path), models / path))

    yield take
    for where, back in away:
        shutil.move(where, back)


SHARD = "ar_models/Anole-7b-v0.1-hf/model-00002-of-00003.safetensors"
MISSING = [  # workflow, what is missing, the node that says so, what it says
    (ANOLE, SHARD, "SpecARLoadCheckpoint", "Anole-7b-v0.1-hf is incomplete"),
    (LLAMAGEN, "text_encoders/flan-t5-xl", "CLIPTextEncode", "Put the folder flan-t5-xl"),
    (LUMINA, "vae/Anole-7b-v0.1-vqvae-hf", "VAEDecode", "No image decoder was found for Lumina-mGPT-7B-768"),
    (GLM_IMAGE, "ar_models/GLM-Image/processor/tokenizer.json", "CLIPTextEncode", "processor/tokenizer.json"),
]


@pytest.mark.parametrize(("name", "file", "node", "says"), MISSING, ids=[file for _, file, *_ in MISSING])
def test_what_is_missing_is_named(comfy, without, name, file, node, says):
    without(file)
    run = comfy.run(workflow(comfy, name, seed=7))
    assert run.outcome == "error" and run.error["node_type"] == node, run.message()
    assert says in run.message() and "Traceback" not in run.message()
