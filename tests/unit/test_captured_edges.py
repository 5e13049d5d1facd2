"""Sessions and captured steps at their edges: other kept tokens, smallest images, what is in memory at once."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from comfyui_specar.kernels import dispatch
from comfyui_specar.kernels.graphs import Graphs
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.samplers.drafts.adt_tree import ADTTree
from comfyui_specar.samplers.drafts.structures import Chain, Dynamic
from comfyui_specar.samplers.engine import run as engine
from comfyui_specar.samplers.engine import session
from comfyui_specar.samplers.layout import TokenLayout
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.methods.speculative import DraftTree
from comfyui_specar.samplers.rules.cool_sd import CoolSD
from comfyui_specar.tools.benchmarks import sizes
from torch._subclasses.fake_tensor import FakeTensorMode

from ..support.tiny import write_llamagen
from ..support.toy import ToyDrafter, ToyModel, plain, request

METHODS = {
    "next token": lambda drafter: NextToken(),
    "sjd": lambda drafter: SJD(3),
    "chain": lambda drafter: DraftTree(drafter, Chain(2)),
    "dynamic": lambda drafter: DraftTree(drafter, Dynamic(2, 2, 3)),
}


def plainly(monkeypatch, method, asked):
    """The tokens without graphs."""
    with monkeypatch.context() as patch:
        patch.setattr(session, "Graphs", Graphs)
        patch.setattr(engine, "Poll", session.Poll)
        asked.model.sessions.clear()
        return method.sample(asked).tokens


@pytest.mark.parametrize("name", METHODS)
def test_images_of_a_batch_may_keep_tokens_of_their_own(name, on_tape, monkeypatch):
    """After a run in which all keep the same."""
    target = ToyModel(plain(1, 4))
    method = METHODS[name](ToyDrafter(target))
    keep = torch.zeros((2, 1, 4), dtype=torch.bool)
    keep[0, 0, 0] = keep[1, 0, 2] = True
    tokens = torch.ones((2, 1, 4), dtype=torch.int64)
    layouts = [plain(1, 4).keeping(tokens[:n], keep[:n]) for n in (1, 2)]
    asked = [request(target, layout, seed=seed, batch=2) for seed, layout in enumerate(layouts)]
    found = [method.sample(one).tokens for one in asked]
    for one, mine in zip(asked, found, strict=True):
        assert torch.equal(mine, plainly(monkeypatch, method, one))


@pytest.mark.parametrize("size", [(1, 1), (2, 1)], ids=str)
def test_smallest_images(size, on_tape, monkeypatch):
    """The window chosen by itself is wider than they are long."""
    target = ToyModel(plain(*size))
    drafter = ToyDrafter(target)
    windows = SJD(), SJD(reuse="gumbel"), SJD(reuse="threshold_exact")
    for method in (NextToken(), *windows, DraftTree(drafter, ADTTree())):
        target.sessions.clear()
        asked = [request(target, plain(*size), seed=seed, batch=2) for seed in (3, 4)]
        found = [method.sample(one).tokens for one in asked]
        for one, mine in zip(asked, found, strict=True):
            assert torch.equal(mine, plainly(monkeypatch, method, one)), method


def test_all_tokens_kept(on_tape, monkeypatch):
    target = ToyModel(plain(2, 3))
    layout = TokenLayout(2, 3, 3, torch.tensor([[0, 1, 2, 2, 1, 0]]))
    for name, made in METHODS.items():
        asked = request(target, layout, batch=3)
        assert torch.equal(made(ToyDrafter(target)).sample(asked).tokens, layout.forced.expand(3, -1)), name


def test_a_run_has_no_more_sessions_beside_it_than_are_kept(on_tape):
    """Each holds caches of gigabytes."""
    target = ToyModel(plain(1, 3))
    for batch in range(1, 4):
        with session.open_session(NextToken(), request(target, plain(1, 3), batch=batch)):
            assert len(target.sessions) < session.MAX_SESSIONS
    assert len(target.sessions) == session.MAX_SESSIONS


def test_every_run_has_a_strength_of_its_own(on_tape, monkeypatch):
    target = ToyModel(plain(1, 4))
    for method in (SJD(3, rule=CoolSD(2.0)), DraftTree(ToyDrafter(target), Chain(2), CoolSD(2.0))):
        asked = [
            replace(request(target, plain(1, 4), seed=seed, batch=3), strength=strength)
            for seed, strength in enumerate((None, torch.rand(3, 4), torch.zeros(1, 4)))
        ]
        target.sessions.clear()
        found = [method.sample(one).tokens for one in asked]
        for one, mine in zip(asked, found, strict=True):
            assert torch.equal(mine, plainly(monkeypatch, method, one))


def test_a_device_has_its_number(monkeypatch, tmp_path):
    """That of tensors is cuda:0, which is another one than cuda: weights would seem to lie elsewhere."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, *args: self)
    model = load_model(write_llamagen(tmp_path / "model.safetensors", False), device="cuda", dtype=torch.float32)
    assert model.device == torch.device("cuda:0")


def test_random_models_of_the_benchmark_are_wholly_on_the_gpu_they_name(monkeypatch, caplog):
    """Else their runs would go on without graphs, and what is measured would mean nothing."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(dispatch, "runs_triton", lambda device: False)
    monkeypatch.setattr(FakeTensorMode, "avoid_device_init", True)  # also where other tests know other devices
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = sizes.build(sizes.SIZES["llamagen-b"], torch.bfloat16, torch.device("cuda"))
        drafter = sizes.eagle(model)
        method = SimpleNamespace(session_key=lambda request: "kind")
        with session.open_session(method, SimpleNamespace(model=model), drafter) as opened:
            assert opened.graphs.active and "without CUDA graphs" not in caplog.text
