"""How often a GPU would capture the steps of a method, on which memory, and what a moved slider changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from comfyui_specar.benchmarks import sizes
from comfyui_specar.samplers import loop, session, speculative
from comfyui_specar.samplers.adt_tree import ADTTree
from comfyui_specar.samplers.jacobi import SJD
from comfyui_specar.samplers.next_token import NextToken
from comfyui_specar.samplers.protocols import Request
from comfyui_specar.samplers.skipping import Skipping
from comfyui_specar.samplers.speculative import DraftTree
from comfyui_specar.samplers.structures import Chain, Dynamic, Static

from .tape import LatePoll, TapeGraphs

CPU = torch.device("cpu")
METHODS = {
    "next token": lambda drafter: NextToken(), "sjd": lambda drafter: SJD(8),
    "chain": lambda drafter: DraftTree(drafter, Chain(3)), "static": lambda drafter: DraftTree(drafter, Static()),
    "dynamic": lambda drafter: DraftTree(drafter, Dynamic(3, 4, 12)),
    "adaptive": lambda drafter: DraftTree(drafter, ADTTree()),
    "skipping": lambda drafter: DraftTree(drafter, Static("eagle_25"), skipping=Skipping(guard=0)),
}


@pytest.fixture(scope="module")
def model():
    size = sizes.SIZES["llamagen-b"]
    config = replace(size.config, dim=32, layers=2, heads=4, ffn_dim=64, vocab=64)
    return sizes.build(replace(size, config=config, grid=(12, 12)), torch.float32, CPU)


@pytest.fixture
def on_tape(monkeypatch):
    """Sessions as on a GPU; the graphs they made."""
    made = []

    def graphs(device):
        made.append(TapeGraphs(device))
        return made[-1]

    monkeypatch.setattr(session, "Graphs", graphs)
    for module in (loop, speculative):
        monkeypatch.setattr(module, "Poll", LatePoll)
    return made


def asked(model, seed=0, **changed):
    return Request(model, sizes.prompt(model), model.layout(), replace(model.defaults, top_k=20, **changed), seed=seed)


@pytest.mark.parametrize("name", METHODS)
@torch.inference_mode()
def test_no_capture_frees_what_another_one_took(name, model, on_tape):
    """Or the tape would say so."""
    model.kept.clear()
    method = METHODS[name](sizes.eagle(model))
    for seed in range(2):
        method.sample(asked(model, seed))
    assert sum(graphs.replayed for graphs in on_tape) > 0 and all(graphs.active for graphs in on_tape)
