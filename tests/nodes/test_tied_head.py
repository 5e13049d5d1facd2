"""SimpleAR's head and token table are one tensor: ComfyUI counts and moves it once, wherever it loads it."""

import torch
from comfy.model_patcher import ModelPatcher
from comfyui_specar import api
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.nodes.comfy_runtime.operations import Operations
from comfyui_specar.samplers.methods.next_token import NextToken

from ..support.tiny_simplear import write


def drawn(model):
    return api.sample(model, model.encode_prompt("a red cup"), NextToken(), cfg=6.0, temperature=0).tokens.tolist()


def test_under_partial_loading(tmp_path):
    folder = write(tmp_path / "model", decoder=False)
    wanted = drawn(load_model(folder))
    model, cpu = load_model(folder, operations=Operations), torch.device("cpu")
    patcher = ModelPatcher(model, cpu, cpu)
    numbers = sum(tensor.numel() for tensor in model.state_dict().values())
    assert patcher.model_size() == 4 * numbers == 4 * sum(p.numel() for p in set(model.parameters()))
    patcher.load(cpu, lowvram_model_memory=1)  # nothing fits: every layer casts its weights when it is used
    assert model.backbone.tok_embeddings.comfy_cast_weights and drawn(model) == wanted
    patcher.unpatch_model(cpu)
    assert drawn(model) == wanted


def test_a_head_computes_in_the_dtype_of_what_it_reads(tmp_path):
    model = load_model(write(tmp_path / "model", decoder=False), dtype=torch.bfloat16)
    hidden = torch.randn(1, 2, 32)
    logits = model.backbone.output(hidden)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, hidden @ model.backbone.tok_embeddings.weight.float().T)
