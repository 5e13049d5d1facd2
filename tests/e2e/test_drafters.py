"""Drafters, rules and the comparison on a real server."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tools.comfy_client import interrupt

DRAFTER = Path(__file__).resolve().parents[2] / "assets/default/eagle"
WORKFLOW = "21 Draft tree (EAGLE)"


@pytest.fixture
def folder(comfy):
    """models/ar_drafters of the server, emptied once the test has ended."""
    folder = comfy.base / "models/ar_drafters"
    folder.mkdir(exist_ok=True)
    yield folder
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def truncated(folder: Path) -> str:
    data = (DRAFTER / "model.safetensors").read_bytes()
    (folder / "truncated.safetensors").write_bytes(data[: len(data) // 2])
    return "truncated.safetensors"


def of_another_model(folder: Path) -> str:
    """The same drafter, half as wide."""
    halves = {
        name: tensor[tuple(slice(n // 2) for n in tensor.shape)].clone().contiguous()
        for name, tensor in load_file(DRAFTER / "model.safetensors").items()
    }
    save_file(halves, folder / "of_another_model.safetensors")
    return "of_another_model.safetensors"


def image_decoder(folder: Path) -> str:
    shutil.copy(DRAFTER.parent / "vq.safetensors", folder / "image_decoder.safetensors")
    return "image_decoder.safetensors"


@pytest.mark.parametrize(
    ("make", "says"), [(truncated, "damaged"), (of_another_model, "another model"), (image_decoder, "image decoder")]
)
def test_bad_drafter_is_named(comfy, folder, make, says):
    name = make(folder)
    run = comfy.run(comfy.workflow(WORKFLOW, seed=600, drafter_name=name))
    assert run.outcome == "error", f"{name} was accepted"
    assert name in run.message() and says in run.message() and "Traceback" not in run.message()
    assert run.error["node_type"] == "SpecARLoadDrafter"


def test_a_drafter_loaded_for_another_model_is_refused(comfy):
    prompt = comfy.workflow(WORKFLOW, seed=601)
    loader = comfy.node_id(prompt, "SpecARLoadCheckpoint")
    prompt["other"] = {"class_type": "SpecARLoadCheckpoint", "inputs": prompt[loader]["inputs"] | {"dtype": "fp32"}}
    prompt[comfy.node_id(prompt, "SpecARLoadDrafter")]["inputs"]["model"] = ["other", 0]
    run = comfy.run(prompt)
    assert run.outcome == "error" and "Load AR Checkpoint" in run.message()


PAIRS = [  # workflow, what is loaded instead, what is said about it
    ("31 Continuous tokens", {"drafter_name": "EAGLE drafter (bundled)"}, "token ids"),
    ("31 Continuous tokens", {"drafter_name": "small model (bundled)"}, "generates token ids"),
    ("21 Draft tree (EAGLE)", {"drafter_name": "small continuous MAR (bundled)"}, "generates vectors"),
    ("05 Acceptance map", {"model_name": "continuous MAR (bundled)"}, "Continuous Speculative Sampler"),
]


@pytest.mark.parametrize(("workflow", "other", "says"), PAIRS)
def test_token_ids_and_vectors_do_not_mix(comfy, workflow, other, says):
    run = comfy.run(comfy.workflow(workflow, seed=605, **other))
    assert run.outcome == "error" and says in run.message() and "Traceback" not in run.message()


def test_interrupt_in_the_middle_of_a_tree_and_the_next_prompt_works(comfy):
    """After all the errors above."""
    prompt = comfy.workflow("27 Compare all methods", value=602)
    tree = next(key for key, node in prompt.items() if node["class_type"] == "SpecARADTTreeSampler")
    keep = {tree: prompt[tree]}  # only what the tree sampler needs, and a node that shows its trace
    while (
        missing := {link[0] for node in keep.values() for link in node["inputs"].values() if isinstance(link, list)}
        - keep.keys()
    ):
        keep |= {key: prompt[key] for key in missing}
    keep["map"] = {
        "class_type": "SpecARAcceptanceMap",
        "inputs": {"trace": [tree, 1], "metric": "tree depth", "opacity": 1.0},
    }
    asked = []

    async def follow(run, event, data):
        state = data.get("nodes", {}).get(tree) if event == "progress_state" else None
        if state and 3 <= state["value"] < state["max"] and not asked:
            asked.append(state["value"])
            await interrupt(comfy.url, run.prompt_id)

    run = comfy.run(keep, follow)
    assert run.outcome == "interrupted" and not run.outputs, run.message()
    again = comfy.run(keep)
    assert again.outcome == "success", again.message()
    [report] = again.collect("specar")
    assert report["totals"]["tokens"] == 256 and report["settings"]["lossless"]


def test_comparison_shows_passes_and_times_of_one_server(comfy):
    prompt = comfy.workflow("21 Draft tree (EAGLE)", seed=604)
    tree = comfy.node_id(prompt, "SpecARDraftTreeSampler")
    inputs = {
        k: v
        for k, v in prompt[tree]["inputs"].items()
        if k in ("model", "positive", "latent_image", "seed", "cfg", "temperature", "top_k", "top_p")
    }
    prompt["plain"] = {"class_type": "SpecARNextTokenSampler", "inputs": inputs}
    prompt["compare"] = {"class_type": "SpecARCompareTraces", "inputs": {"trace_1": ["plain", 1], "trace_3": [tree, 1]}}
    prompt["table"] = {"class_type": "PreviewAny", "inputs": {"source": ["compare", 1]}}
    run = comfy.run(prompt)
    assert run.outcome == "success", run.message()
    plain, tree = run.outputs["compare"]["specar"]
    assert plain["settings"]["server"] == tree["settings"]["server"]
    assert tree["totals"]["target_passes"] < plain["totals"]["target_passes"] == 256
    assert run.outputs["compare"]["images"]
    [text] = run.outputs["table"]["text"]
    assert "wall time" in text and len(text.splitlines()) == 4
