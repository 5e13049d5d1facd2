"""What to download, and into which folder: the message of the node, the note and the list of the template agree."""

import itertools
import json
import re
from pathlib import Path

import pytest
from comfyui_specar.nodes.comfy_runtime import folders
from comfyui_specar.nodes.downloads import sources_of, where_to_get

TEMPLATES = sorted((Path(__file__).parents[2] / "workflows").glob("* (download).json"))
REPOSITORY = re.compile(r"https://huggingface\.co/([\w.-]+/[\w.-]+)")
OF_CORE_NODES = ("checkpoints", "upscale_models")
PLACE = re.compile(r"into (models/[\w./-]*\w)")


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_reports_what_its_loaders_report(template):
    graph = json.loads(template.read_text(encoding="utf-8"))
    choices = [node["widgets_values"][0] for node in graph["nodes"] if node["type"].startswith("SpecARLoad")]
    instructions = "\n".join(map(where_to_get, choices))
    for loader in (node for node in graph["nodes"] if node["type"] in ("SpecARLoadCheckpoint", "SpecARLoadDrafter")):
        assert loader["properties"]["download"] == where_to_get(loader["widgets_values"][0]), (
            "what web/js/downloads.js shows"
        )
    [note] = [node["widgets_values"][0] for node in graph["nodes"] if node["type"] == "MarkdownNote"]
    repositories = set(REPOSITORY.findall(instructions))
    assert repositories and repositories <= set(REPOSITORY.findall(note))
    ours = [model for model in graph["models"] if model["directory"] not in OF_CORE_NODES]
    assert {REPOSITORY.match(model["url"])[1] for model in ours} <= repositories
    assert all(place in note for place in PLACE.findall(instructions))
    assert {place_of(model) for model in ours} <= {*PLACE.findall(instructions)}
    assert {REPOSITORY.match(model["url"])[1] for model in graph["models"]} <= {*REPOSITORY.findall(note)}
    assert all(place_of(model) in note for model in graph["models"])
    listed = [model for node in graph["nodes"] for model in node["properties"].get("models", [])]
    assert listed == graph["models"], "the front end reads both places, each for other models"
    for model in listed:
        assert "/resolve/main/" in model["url"] and model["url"].endswith(model["name"].split("/")[-1])
        assert model["name"].endswith((".safetensors", ".pt", ".ckpt", ".bin"))
        chosen = {choice.split("/")[0] for choice in choices}
        assert model["directory"] != "ar_models" or model["name"].split("/")[0] in chosen
    for source in itertools.chain(*map(sources_of, choices)):
        names = re.findall(r"\w[\w.-]*\.\w+", source.files) or [f"all files of [{source.repository}]"]
        assert all(name in note for name in names)


def place_of(model: dict) -> str:
    """The folder of its repository, or ComfyUI's own."""
    folders = f"models/{model['directory']}/{model['name']}".split("/")[:-1]
    return "/".join(folders[:3])


NEEDED = {  # choice -> words of what is said
    "c2i_XXL_384.pt": "c2i_XXL_384.pt https://huggingface.co/FoundationVision/LlamaGen models/ar_models vq_ds16_c2i.pt",
    "Janus-Pro-7B/model-00001-of-00002.safetensors": "14.8 models/ar_models/Janus-Pro-7B.",
    "Janus-Pro-7B": "https://huggingface.co/deepseek-community/Janus-Pro-7B models/ar_models/Janus-Pro-7B",
    "Lumina-mGPT-7B-512": "Alpha-VLLM/Lumina-mGPT-7B-512 tokenizer.json Lumina-mGPT-7B-768 "
    "models/ar_models/Lumina-mGPT-7B-512 Anole-7b-v0.1-vqvae-hf",
    "llamagen2_drafter": "jadohu/llamagen2_drafter models/ar_drafters/llamagen2_drafter",
}


@pytest.mark.parametrize("choice", NEEDED)
def test_a_released_model_is_recognised_and_what_it_needs_is_named(choice):
    assert all(word in where_to_get(choice) for word in NEEDED[choice].split())
    with pytest.raises(FileNotFoundError, match=re.escape(choice)) as instructions:
        folders.resolve(choice, folders.MODELS, folders.DRAFTERS)
    assert where_to_get(choice) in str(instructions.value)


@pytest.mark.parametrize("choice", ["", "..", "../Janus-Pro-1B", "my c2i.pt", "n" * 999, "\ud800"])
def test_of_other_names_nothing_is_known(choice):
    assert where_to_get(choice) is None
