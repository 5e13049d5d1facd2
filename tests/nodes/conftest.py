"""Node tests run in this process against a ComfyUI tree on the CPU, with tiny random models made here.

ComfyUI must see its flags and folders before any of its modules is imported, so this happens while pytest collects.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

if "COMFYUI_PATH" not in os.environ:
    raise pytest.UsageError("COMFYUI_PATH does not name a ComfyUI tree: run scripts/test.sh, which sets everything up")
sys.path.insert(0, os.environ["COMFYUI_PATH"])

from comfy.cli_args import args  # noqa: E402

args.cpu = True
args.base_directory = tempfile.mkdtemp(prefix="specar-nodes-")

import folder_paths  # noqa: E402
from comfyui_specar.models.backbone import Backbone, BackboneConfig  # noqa: E402
from comfyui_specar.models.prefix import CaptionPrefix, ClassPrefix  # noqa: E402
from comfyui_specar.models.vq import VQConfig, VQModel  # noqa: E402
from comfyui_specar.nodes import extension  # noqa: E402

for _folder in ("input", "output", "temp", "models/ar_models", "models/vae"):
    (Path(args.base_directory) / _folder).mkdir(parents=True, exist_ok=True)

CODES, GRID, FACTOR = 64, 4, 8
BACKBONE = BackboneConfig(dim=32, layers=2, heads=2, ffn_dim=48, vocab=CODES)
VQ = VQConfig(CODES, 8, (1, 1, 1, 1), base_channels=32, z_channels=32, num_res_blocks=1)


def random_weights(module: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.4 * torch.randn(value.shape, generator=generator) + name.endswith("norm.weight")
            for name, value in module.state_dict().items()}


def model_tensors(prefix: torch.nn.Module) -> dict[str, torch.Tensor]:
    tensors = {f"cls_embedding.{n}": t for n, t in random_weights(prefix, 1).items()}
    return random_weights(Backbone(BACKBONE), 2) | tensors


def metadata(**content) -> dict[str, str]:
    return {"specar": json.dumps(content)}


@pytest.fixture(scope="session")
def models() -> Path:
    """models/ar_models with a text model in a folder, a class model, and one of unknown grid, as single files."""
    root = Path(folder_paths.get_folder_paths("ar_models")[0])
    tiny = root / "tiny"
    tiny.mkdir(exist_ok=True)
    about = {"heads": 2, "grid": [GRID, GRID], "pixels_per_token": FACTOR, "caption_slots": 4}
    defaults = {"cfg": 2.0, "temperature": 0.9, "top_k": 0, "top_p": 1.0}
    save_file(model_tensors(CaptionPrefix(8, 4, 32)), tiny / "model.safetensors", metadata(**about, defaults=defaults))
    save_file(random_weights(VQModel(VQ), 3), tiny / "vq.safetensors")
    save_file(
        {"word_embeddings.weight": torch.randn(3, 8, generator=torch.Generator().manual_seed(4))},
        tiny / "text_encoder.safetensors",
        metadata(words=["red", "apple", "bg_blue"], stop_words=["a"], synonyms={}, backgrounds=["blue"]),
    )
    classes = model_tensors(ClassPrefix(10, 32))
    save_file(classes, root / "classes.safetensors", metadata(heads=2, grid=[GRID, GRID], pixels_per_token=FACTOR))
    save_file(classes, root / "nogrid.safetensors", metadata(heads=2))
    return root


@pytest.fixture(scope="session")
def run():
    """run(node, **inputs) executes a node as ComfyUI does: on a locked clone of its class, in inference mode."""

    def run(node, **inputs):
        with torch.inference_mode():
            return node.PREPARE_CLASS_CLONE(None).EXECUTE_NORMALIZED(**inputs)

    return run


@pytest.fixture(scope="session")
def nodes() -> dict[str, type]:
    """The pack's node classes by id."""
    return {node.GET_SCHEMA().node_id: node for node in extension.node_classes()}


@pytest.fixture(scope="session")
def tiny(models, nodes, run):
    """(AR_MODEL, CLIP, VAE) of the tiny text model."""
    return run(nodes["SpecARLoadCheckpoint"], model_name="tiny", dtype="auto", grid="auto").result


@pytest.fixture(scope="session")
def positive(tiny):
    return tiny[1].encode_from_tokens_scheduled(tiny[1].tokenize("red apple"))


@pytest.fixture
def sample(tiny, nodes, positive, run):
    """sample("SJD" | "NextToken", **inputs) -> (latent, trace), with everything given that is not named."""

    def sample(method: str, **inputs):
        latent = {"samples": torch.zeros(inputs.pop("batch", 1), 8, GRID, GRID)}
        common = {"model": tiny[0], "positive": positive, "latent_image": latent, "seed": 7, "cfg": -1.0,
                  "temperature": -1.0, "top_k": -1, "top_p": -1.0}
        sjd = {"window": 4, "refinement": "coupled (exact)", "threshold": 0.5,
               "initialisation": "left and upper neighbour"}
        return run(nodes[f"SpecAR{method}Sampler"], **common | (sjd if method == "SJD" else {}) | inputs).result

    return sample
