"""How often a GPU would capture the steps of a method, on which memory, and what a moved slider changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from comfyui_specar.samplers.contract import Request
from comfyui_specar.samplers.drafts.adt_tree import ADTTree
from comfyui_specar.samplers.drafts.structures import Chain, Dynamic, Static
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.methods.skipping import Skipping
from comfyui_specar.samplers.methods.speculative import DraftTree
from comfyui_specar.tools.benchmarks import sizes

ADT = ADTTree(depths=(1, 4), widths=(2, 16), width_step=3, nodes=16)
CPU = torch.device("cpu")
METHODS = {  # and how many graphs each needs for images of one size
    "next token": (lambda drafter: NextToken(), 1),
    "sjd": (lambda drafter: SJD(8), 1),
    "chain": (lambda drafter: DraftTree(drafter, Chain(3)), 1),
    "static": (lambda drafter: DraftTree(drafter, Static(((0,), (1,), (0, 0), (0, 1), (1, 0)))), 1),
    "dynamic": (lambda drafter: DraftTree(drafter, Dynamic(3, 3, 8)), 1),
    "skipping": (lambda drafter: DraftTree(drafter, Chain(3), skipping=Skipping(guard=0)), 0),  # shapes vary
    "adaptive": (lambda drafter: DraftTree(drafter, ADT), 0),
}


@pytest.fixture(scope="module")
def model():
    size = sizes.SIZES["llamagen-b"]
    config = replace(size.config, dim=32, layers=2, heads=4, ffn_dim=64, vocab=64)
    return sizes.build(replace(size, config=config, grid=(6, 6)), torch.float32, CPU)


def asked(model, seed=0, **changed):
    params = replace(model.defaults, **{"top_k": 20} | changed)
    return Request(model, sizes.prompt(model), model.layout(), params, seed=seed)


@pytest.mark.parametrize("name", METHODS)
@torch.inference_mode()
def test_two_images_and_two_moved_sliders_need_the_graphs_of_one_image(name, model, on_tape):
    model.sessions.clear()
    make, graphs = METHODS[name]
    method, counts = make(sizes.eagle(model)), []
    for seed, moved in enumerate(({}, {}, {"cfg": 5.0}, {"temperature": 0.9, "top_k": 30})):
        method.sample(asked(model, seed, **moved))
        counts.append(on_tape[0].captured)
    assert len(on_tape) == 1 and on_tape[0].active and (on_tape[0].replayed > 20) == (graphs > 0)
    assert counts == [graphs] * 4


@torch.inference_mode()
def test_prompts_of_other_lengths_need_no_other_graph(model, on_tape):
    model.sessions.clear()
    for tokens in (sizes.PROMPT, 3, 60):
        prompt = model.encode_features(torch.randn(1, tokens, sizes.CAPTION))
        NextToken().sample(replace(asked(model), conditioning=prompt))
    assert len(on_tape) == on_tape[0].captured == 1
