"""Node tests run in this process against a ComfyUI tree on the CPU, with tiny random models made here.

ComfyUI must see its flags and folders before any of its modules is imported, so this happens while pytest collects.
"""

import json
import os
import sys
import tempfile
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

if "COMFYUI_PATH" not in os.environ:
    raise pytest.UsageError("COMFYUI_PATH does not name a ComfyUI tree: run tools/test.sh, which sets everything up")
sys.path.insert(0, os.environ["COMFYUI_PATH"])

from comfy.cli_args import args  # noqa: E402

args.cpu = True
args.base_directory = tempfile.mkdtemp(prefix="specar-nodes-")

import comfy.model_management  # noqa: E402
import comfy.utils  # noqa: E402
import folder_paths  # noqa: E402
from comfy_execution.utils import CurrentNodeContext  # noqa: E402
from comfyui_specar.models.networks.kl_vae import KLConfig, KLModel  # noqa: E402
from comfyui_specar.models.networks.mar import MARConfig  # noqa: E402
from comfyui_specar.models.networks.vq import VQConfig  # noqa: E402
from comfyui_specar.nodes import extension  # noqa: E402
from comfyui_specar.nodes.comfy_runtime import previews  # noqa: E402
from comfyui_specar.nodes.comfy_runtime import progress as nodes_progress  # noqa: E402

from ..custom_nodes.simulated_dynamic_vram import ENABLED  # noqa: E402
from ..support import tiny_emu35, tiny_glm_image, tiny_janus  # noqa: E402
from ..support.families import Placed  # noqa: E402
from ..support.fixtures import captures_work, costs_of_captures, on_tape  # noqa: E402, F401
from ..support.lora import linear_layers, write_lora  # noqa: E402
from ..support.simulated_gpu import gpu  # noqa: E402, F401
from ..support.tiny import eagle_weights, fill, llamagen_weights, named_shapes, vq_weights  # noqa: E402
from ..support.tiny_mar import mar_weights  # noqa: E402

DYNAMIC_VRAM = ENABLED  # from here on, as on an NVIDIA card

for _folder in ("input", "output", "temp", "models/ar_models", "models/ar_drafters", "models/vae"):
    (Path(args.base_directory) / _folder).mkdir(parents=True, exist_ok=True)

CODES, GRID, FACTOR = 64, 4, 8
SIZES = {"dim": 32, "ffn": 48, "vocab": CODES}
CAPTIONS = {"caption": 8, "slots": 4}
VQ = VQConfig(CODES, 8, (1, 1, 1, 1), base_channels=32, z_channels=32, num_res_blocks=1)
LAYERS = {"dim": 32, "encoder_layers": 2, "decoder_layers": 1, "heads": 2}
MASKED = MARConfig(**LAYERS, rows=GRID, cols=GRID, channels=6, slots=4, conditions=8, captions=True)
ABOUT = {"heads": 2, "grid": [GRID, GRID], "pixels_per_token": FACTOR}  # what a file says of itself
KL = KLConfig(channels=6, ch_mult=(1, 1, 1, 1), base_channels=32, num_res_blocks=1)


def plain_fp8(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict]:
    """Of a file as other tools make it, for comfy_quant.rewritten: the layers' matrices in fp8, without scales."""
    layers = {name for name in tensors if ("layers." in name or "blocks." in name) and tensors[name].ndim == 2}
    return {name: t.to(torch.float8_e4m3fn) if name in layers else t for name, t in tensors.items()}, {}


def metadata(**content) -> dict[str, str]:
    return {"specar": json.dumps(content)}


@pytest.fixture(scope="session")
def models() -> Path:
    """models/ar_models with a text model in a folder, a class model, and one of unknown grid, as single files."""
    root = Path(folder_paths.get_folder_paths("ar_models")[0])
    tiny = root / "tiny"
    tiny.mkdir(exist_ok=True)
    about = metadata(**ABOUT, caption_slots=4, defaults={"cfg": 2.0, "temperature": 0.9, "top_k": 0, "top_p": 1.0})
    save_file(llamagen_weights(True, **SIZES, **CAPTIONS), tiny / "model.safetensors", about)
    save_file(vq_weights(VQ), tiny / "vq.safetensors")
    write_words(tiny)
    classes = llamagen_weights(False, **SIZES)
    save_file(classes, root / "classes.safetensors", metadata(**ABOUT))
    save_file(classes, root / "nogrid.safetensors", metadata(heads=2))
    return root


def write_words(folder: Path) -> None:
    save_file(
        {"word_embeddings.weight": torch.randn(3, 8, generator=torch.Generator().manual_seed(4))},
        folder / "text_encoder.safetensors",
        metadata(words=["red", "apple", "bg_blue"], stop_words=["a"], synonyms={}),
    )


@pytest.fixture(scope="session")
def vectors(models) -> Path:
    """models/ar_models/vectors, a continuous text model, and models/ar_drafters/vectors.safetensors, a smaller one."""
    folder, drafters = models / "vectors", Path(folder_paths.get_folder_paths("ar_drafters")[0])
    folder.mkdir(exist_ok=True)
    steps = {"head_steps": 5, "first_step": 500}  # from there on, an untrained head's tokens stay small
    about = metadata(**ABOUT, **steps, scale=0.5, defaults={"cfg": 2.0, "temperature": 0.9})
    weights = mar_weights(MASKED, width=16, depth=1)
    save_file(weights, folder / "model.safetensors", about)
    decoder = {name: fill(name, shape) for name, shape in named_shapes(lambda: {"": KLModel(KL)}).items()}
    save_file(decoder, folder / "vae.safetensors")
    write_words(folder)
    small = {name: tensor for name, tensor in weights.items() if "encoder_blocks.1." not in name}
    save_file(small, drafters / "vectors.safetensors", about)
    return folder


@pytest.fixture(scope="session")
def continuous(vectors, load):
    """(AR_MODEL, CLIP, VAE) of the continuous model."""
    return load("vectors")


@pytest.fixture(scope="session")
def small_vectors(continuous, load_drafter):
    """AR_DRAFTER of the continuous model."""
    return load_drafter(continuous[0], "vectors.safetensors")


@pytest.fixture(scope="session")
def draw_vectors(continuous, small_vectors, run_node):
    """draw_vectors("" | "NextToken", **inputs) -> (latent, trace) of a continuous sampler, as ``sample``."""

    def draw(method: str, **inputs):
        latent = {"samples": torch.zeros(inputs.pop("batch", 1), MASKED.channels, GRID, GRID)}
        common = {
            "model": continuous[0],
            "positive": continuous[1].encode_from_tokens_scheduled("red apple"),
            "latent_image": latent,
            "seed": 7,
        }
        if not method:
            common |= {"drafter": small_vectors, "draft_length": 4}
        return run_node(f"Continuous{method}Sampler", **common | inputs).result

    return draw


@pytest.fixture(scope="session")
def drafters(models) -> Path:
    """models/ar_drafters with an EAGLE drafter in a folder and a smaller model as a file, both of the text model."""
    root = Path(folder_paths.get_folder_paths("ar_drafters")[0])
    (root / "eagle").mkdir(exist_ok=True)
    save_file(eagle_weights(**SIZES), root / "eagle/model.safetensors")
    (root / "eagle/config.json").write_text(json.dumps({"num_attention_heads": 2, "rms_norm_eps": 1e-5}), "utf-8")
    small = llamagen_weights(True, layers=1, **SIZES, **CAPTIONS)
    save_file(small, root / "small.safetensors", metadata(**ABOUT, caption_slots=4))
    return root


@pytest.fixture(scope="session")
def run():
    """run(node, **inputs) executes a node as ComfyUI does: on a locked clone of its class, in inference mode."""

    def run(node, **inputs):
        with torch.inference_mode():
            return node.PREPARE_CLASS_CLONE(None).EXECUTE_NORMALIZED(**inputs)

    return run


def defaults(node: type) -> dict:
    """The default of every widget of a node."""
    return {i.id: i.default for i in node.GET_SCHEMA().inputs if getattr(i, "default", None) is not None}


@pytest.fixture(scope="session")
def nodes() -> dict[str, type]:
    """The pack's node classes by id."""
    return {node.GET_SCHEMA().node_id: node for node in extension.node_classes()}


@pytest.fixture(scope="session")
def run_node(nodes, run):
    """run_node("Caption", **inputs) -> what SpecARCaption gives, with the default of every widget that is not named."""

    def run_node(name: str, /, **inputs):
        node = nodes[f"SpecAR{name}"]
        return run(node, **defaults(node) | inputs)

    return run_node


@pytest.fixture(scope="session")
def load(models, run_node):
    """load(name) -> (AR_MODEL, CLIP, VAE) of Load AR Checkpoint."""
    return lambda name, **widgets: run_node("LoadCheckpoint", model_name=name, **widgets).result


@pytest.fixture(scope="session")
def load_drafter(run_node):
    """load_drafter(model, name) -> AR_DRAFTER of Load AR Drafter."""
    return lambda model, name: run_node("LoadDrafter", model=model, drafter_name=name).result[0]


@pytest.fixture(scope="session")
def lora(models) -> str:
    """A LoRA of the tiny text model in models/loras."""
    file = models / "tiny/model.safetensors"
    return write_lora(Path(folder_paths.get_folder_paths("loras")[0]) / "style", file, linear_layers(file)).name


@pytest.fixture(scope="session")
def tiny(load):
    """(AR_MODEL, CLIP, VAE) of the tiny text model."""
    return load("tiny")


@pytest.fixture(scope="module")
def glm_image(models, load):
    """(AR_MODEL, CLIP, VAE) of a tiny GLM-Image, whose files are there while the module's tests run."""
    placed = Placed(models.parent)
    tiny_glm_image.install(models.parent)
    yield load("GLM-Image/vision_language_encoder")
    placed.remove()


@pytest.fixture(scope="module")
def emu35(models, load, continuous, drafters):
    """(AR_MODEL, CLIP, VAE) of a tiny Emu3.5-Image, 4 x 4 tokens of 4 pixels a side, whose files are there while the
    module's tests run. (Those of the session's fixtures must be there before, or they would go with them.)"""
    placed = Placed(models.parent)
    tiny_emu35.install(models.parent)
    yield load("Emu3.5-Image")
    placed.remove()


@pytest.fixture(scope="module")
def janus(models, load):
    """(AR_MODEL, CLIP, VAE) of a tiny Janus-Pro, whose files are there while the module's tests run."""
    placed = Placed(models.parent)
    tiny_janus.write(models / "janus-to-caption", original=True)
    yield load("janus-to-caption")
    placed.remove()


@pytest.fixture(scope="session")
def positive(tiny):
    return tiny[1].encode_from_tokens_scheduled(tiny[1].tokenize("red apple"))


@pytest.fixture(scope="session")
def drafter(tiny, drafters, load_drafter):
    """AR_DRAFTER of the tiny text model."""
    return load_drafter(tiny[0], "eagle")


@pytest.fixture
def loads(monkeypatch):
    """Every (models, options) of which ComfyUI is asked to load the weights."""
    asked, load = [], comfy.model_management.load_models_gpu

    def noted(models, **options):
        asked.append((models, options))
        return load(models, **options)

    monkeypatch.setattr(comfy.model_management, "load_models_gpu", noted)
    return asked


WITH_DRAFTER = ("DraftTree", "Lantern", "CoolSD", "ADTTree", "VVS")
SMALL = {  # widgets for images of 16 tokens of 64 codes
    "SJD": {"window": 4},
    "DraftTree": {"structure": "dynamic tree (EAGLE-2)", "depth": 3, "width": 2, "nodes": 6},  # auto follows the clock
    "Lantern": {"neighbours": 5},
    "ADTTree": {"preset": "own values", "depth_max": 3, "width_min": 1, "width_max": 3, "width_step": 1, "nodes": 6},
}


@pytest.fixture(scope="session")
def sample(tiny, drafter, positive, run_node):
    """sample("SJD" | "NextToken" | "DraftTree" | "" (AR Sampler) | ..., **inputs) -> (latent, trace), with SMALL or the
    default for every widget that is not named."""

    def sample(kind: str, /, **inputs):
        latent = {"samples": torch.zeros(inputs.pop("batch", 1), 8, GRID, GRID)}
        common = {"model": tiny[0], "positive": positive, "latent_image": latent, "seed": 7}
        if kind in WITH_DRAFTER:
            common["drafter"] = drafter
        return run_node(f"{kind}Sampler", **common | SMALL.get(kind, {}) | inputs).result

    return sample


@pytest.fixture(scope="session")
def draw(sample, draw_vectors):
    """draw("SJD" | ... | "Continuous" | "ContinuousNextToken", **inputs) -> (latent, trace) of any sampler."""

    def draw(kind: str, /, **inputs):
        vectors = kind.startswith("Continuous")
        return draw_vectors(kind.removeprefix("Continuous"), **inputs) if vectors else sample(kind, **inputs)

    return draw


@pytest.fixture(scope="session")
def show(run_node):
    """show(trace) -> the output of Acceptance Map."""
    return lambda trace, metric="source", **inputs: run_node("AcceptanceMap", trace=trace, metric=metric, **inputs)


@pytest.fixture(scope="session")
def save(run_node):
    """save(trace, prefix) -> what Save Trace shows."""
    return lambda trace, prefix: run_node("SaveTrace", trace=trace, filename_prefix=prefix).ui


@pytest.fixture
def unthrottled(monkeypatch):
    """Every step of a progress bar reaches ComfyUI's progress hook; newer ComfyUIs leave some out."""
    for limit in ("PROGRESS_THROTTLE_MIN_INTERVAL", "PROGRESS_THROTTLE_MIN_PERCENT"):
        monkeypatch.setattr(comfy.utils, limit, 0, raising=False)


@pytest.fixture
def progress(monkeypatch, unthrottled):
    """Every (value, total, preview) that reaches ComfyUI's progress hook."""
    seen = []
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", lambda *event, **_: seen.append(event))
    return seen


@pytest.fixture
def hurried(monkeypatch):
    """Progress and previews after every pass, whatever they cost."""
    monkeypatch.setattr(nodes_progress, "SECONDS", (0.0, 0.0))
    monkeypatch.setattr(previews, "SECONDS", 0.0)
    monkeypatch.setattr(previews, "SHARE", 1e9)


class Page:
    """A server that collects what is sent to the page of a run: (node id, client, text) and (event, data, client)."""

    def __init__(self, client_id):
        self.client_id, self.events = client_id, []

    def send_progress_text(self, text, node_id, sid=None):
        self.events.append((node_id, sid, text))

    def send_sync(self, event, data, sid=None):
        self.events.append((event, data, sid))


@pytest.fixture
def page(monkeypatch):
    """page(client_id) -> a running server; node "7" is executing."""

    def page(client_id: str | None = "a page"):
        server = Page(client_id)
        module = types.SimpleNamespace(PromptServer=types.SimpleNamespace(instance=server))
        monkeypatch.setitem(sys.modules, "server", module)
        return server

    with CurrentNodeContext("prompt", "7"):
        yield page


@pytest.fixture(scope="session")
def rule(run_node):
    """rule("CoolSD", **widgets) -> AR_RULE, with a number of neighbours that the tiny codebook has."""

    def rule(name: str, **widgets):
        near = {"neighbours": 5} if name.startswith("Lantern") else {}
        return run_node(f"Rule{name}", **near | widgets).result[0]

    return rule
