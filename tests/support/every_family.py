"""A tiny model of every discrete family with drafters of either kind, every method, and one thing to ask them."""

import json
from dataclasses import dataclass, replace

import torch
from comfyui_specar.model_loaders.detect import load_drafter, load_model
from comfyui_specar.model_loaders.families.eagle import EagleDrafter
from comfyui_specar.models.discrete_model import Conditioning, DiscreteModel
from comfyui_specar.models.drafters import ModelDrafter
from comfyui_specar.models.networks.eagle import Eagle
from comfyui_specar.models.text.prompts import prompt_images
from comfyui_specar.samplers.contract import Request, SamplingParams
from comfyui_specar.samplers.drafts.structures import Chain, Dynamic, Static
from comfyui_specar.samplers.methods import published
from comfyui_specar.samplers.methods.jacobi import REUSE, SJD, Jacobi
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.methods.speculative import DraftTree
from comfyui_specar.samplers.rules.lantern import Lantern
from comfyui_specar.tools.training import drafter_export
from safetensors.torch import load_file, save_file

from .rules import RELAXED
from .tiny import GRID, caption_features, fill
from .tiny_family import declared

FAMILIES = declared("TINY", continuous=False)
ROWS, COLS = GRID
TREE, FEW = Static(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))), Dynamic(3, 3, 8)
BOUNDS = {"depths": (1, 3), "widths": (1, 4), "width_step": 1, "first": (2, 3), "nodes": 8}
METHODS = {
    "next token": lambda d: NextToken(),
    "jacobi": lambda d: Jacobi(window=6),
    **{f"sjd {reuse}": lambda d, reuse=reuse: SJD(window=7, reuse=reuse) for reuse in REUSE},
    "sjd settle": lambda d: SJD(window=7, settle=0.2),
    "sjd lantern": lambda d: SJD(window=7, rule=Lantern(neighbours=5)),
    "chain": lambda d: DraftTree(d.small, Chain(3)),
    "blocks": lambda d: DraftTree(d.eagle, Chain(3, "block")),
    "static": lambda d: DraftTree(d.eagle, TREE),
    "dynamic": lambda d: DraftTree(d.small, FEW),
    "lantern": lambda d: published.lantern(d.eagle, FEW, neighbours=5),
    "lantern++": lambda d: published.lantern_pp(d.eagle, TREE, neighbours=5),
    "cool-sd": lambda d: published.cool_sd(d.eagle, TREE, delta=2.0),
    **{f"chain, {rule.label}": lambda d, rule=rule: DraftTree(d.small, Chain(3), rule) for rule in RELAXED},
    "adt": lambda d: published.adt_tree(d.eagle, **BOUNDS),
    "vvs": lambda d: published.vvs(d.eagle, FEW, Lantern(neighbours=5), interval=2, guard=1),
    "vvs dynamic": lambda d: published.vvs(d.small, TREE, schedule="dynamic", threshold=0.0, guard=1),
}


@dataclass
class Family:
    """A tiny model with a drafter of either kind, and a prompt."""

    model: DiscreteModel
    small: ModelDrafter
    eagle: EagleDrafter
    prompt: Conditioning


def write_eagle(model: DiscreteModel, folder):
    """A random EAGLE drafter: in our own layout, or for Chameleon's family in that of LANTERN's."""
    official = model.family in ("anole", "lumina-mgpt")
    module = Eagle(replace(model.backbone.config, layers=1, attention_norm=official, post_norms=False))
    for name, parameter in module.named_parameters():
        parameter.data.copy_(fill(f"drafter {name}", tuple(parameter.shape)))
    drafter_export.write_eagle(module, model, folder)
    if official:
        tensors = load_file(folder / "model.safetensors")
        tensors["embed_tokens.weight"] = fill("words embedding", (model.prefix.words, model.backbone.config.dim)).half()
        save_file(tensors, folder / "model.safetensors")
        config = {"model_type": "chameleon", "vocab_size": model.prefix.words}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def make_family(name, folder, device="cpu", title=""):
    """The model of a family, with its drafters, from files that are written to a folder. title: other than its own."""
    write = FAMILIES[name].write
    folders = [folder / part for part in ("target", "small", "eagle")]
    for each in folders:
        each.mkdir(exist_ok=True)
    target = write(folders[0], layers=1)
    model = load_model(target.rename(target.with_name(title)) if title else target, device, torch.float32)
    small = load_drafter(write(folders[1], seed=1, layers=1), model)
    if model.codebook is None:
        model.attach_codebook(fill("codebook embedding", (model.vocab, 4)), 16)
    eagle = load_drafter(write_eagle(model, folders[2]), model)
    if name == "llamagen-t2i":
        return Family(model, small, eagle, model.encode_features(caption_features()))
    return Family(model, small, eagle, model.encode_prompt("3"))


def asked(family: Family, guided: bool, seed: int = 0, temperature: float = 1.0) -> Request:
    """Two images of which different tokens are kept, the second one's last rows among them."""
    model = family.model
    keep = torch.zeros((2, ROWS, COLS), dtype=torch.bool)
    keep[0, 1:3], keep[1, 2:], keep[1, 0, 3] = True, True, True
    whole = model.layout(images=prompt_images(family.prompt))
    layout = whole.keeping(torch.arange(2 * ROWS * COLS).view(2, ROWS, COLS) % model.vocab, keep)
    params = SamplingParams(cfg=2.0 if guided and model.guidance else 1.0, temperature=temperature, top_k=16)
    return Request(model, family.prompt, layout, params, seed=seed, batch=2)
