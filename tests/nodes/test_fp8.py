"""Matrices kept in fp8 or int8."""

import comfy.model_management as mm
import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.detect import load_model, stays_narrow
from comfyui_specar.model_loaders.files.checkpoint import holds_fp8, weight_file
from comfyui_specar.nodes.comfy_runtime import memory
from comfyui_specar.nodes.comfy_runtime.models import DTYPES, open_model
from comfyui_specar.samplers.methods.next_token import NextToken
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ..support import tiny_chameleon
from .conftest import GRID, defaults


def open_fp8(name="tiny"):
    return open_model(name, "fp8 (storage)", None)


def matrices(model):
    return {name: parameter for name, parameter in model.named_parameters() if parameter.dtype == torch.uint8}


def drawn(model):
    return api.sample(model, model.encode_prompt("red apple"), NextToken(), cfg=2.0, seed=3).tokens


def test_the_matrices_of_the_layers_take_a_byte_per_number(models, tiny):
    loaded, whole = open_fp8(), tiny[0]
    stored = matrices(loaded.model)
    assert set(stored) == {n for n, p in whole.model.named_parameters() if ".layers." in n and p.ndim == 2}
    saved = 3 * sum(parameter.numel() for parameter in stored.values())
    assert loaded.patcher.model_size() == whole.patcher.model_size() - saved
    assert loaded.model.dtype == torch.float32 and loaded.model.backbone.output.weight.dtype == torch.float32


def test_images_are_those_of_the_rounded_weights(models):
    loaded, rounded = open_fp8().model, open_model("tiny", "fp32", None).model
    for name in matrices(loaded):
        parameter = rounded.get_parameter(name)
        parameter.copy_(parameter.to(torch.float8_e4m3fn).float())
    assert torch.equal(drawn(loaded), drawn(rounded))


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        ("fp8 (storage)", "float8_e4m3fn"),
        ("int8 (storage)", "int8"),
        ("int8 (storage and KV cache)", "KV cache per image in int8"),
        ("int4 (storage)", "int4"),
    ],
)
def test_the_nodes_generate_with_them_and_say_so(dtype, words, models, nodes, run):
    loaded, clip, _ = run(nodes["SpecARLoadCheckpoint"], model_name="tiny", dtype=dtype, grid="auto").result
    node = nodes["SpecARSJDSampler"]
    latent, trace = run(
        node,
        **defaults(node)
        | {
            "model": loaded,
            "positive": clip.encode_from_tokens_scheduled("red apple"),
            "window": 4,
            "latent_image": {"samples": torch.zeros(1, 8, GRID, GRID)},
            "seed": 1,
        },
    ).result
    assert latent["ar_tokens"].shape == (1, GRID, GRID) and trace.totals["tokens"] == GRID * GRID
    [text] = run(nodes["SpecARModelInfo"], model=loaded).result
    assert words in text


def test_int8_takes_a_byte_per_number_and_four_per_row(models, tiny):
    loaded = open_model("tiny", "int8 (storage)", None)
    whole = tiny[0].model
    kept = {name for name, parameter in loaded.model.named_parameters() if parameter.dtype == torch.int8}
    assert kept == {n for n, p in whole.named_parameters() if p.ndim == 2 and (".layers." in n or ".output." in n)}
    saved = sum(3 * p.numel() - 4 * len(p) for p in map(whole.get_parameter, kept))
    assert loaded.patcher.model_size() == tiny[0].patcher.model_size() - saved
    assert memory.cast_room(loaded.model) == 2 * 4 * max(whole.get_parameter(name).numel() for name in kept)


def test_int4_takes_half_a_byte_per_number(models, tiny):
    loaded = open_model("tiny", "int4 (storage)", None)
    whole = tiny[0].model
    kept = matrices(loaded.model)
    assert set(kept) == {name for name, p in whole.named_parameters() if p.ndim == 2 and ".layers." in name}
    packed = max(parameter.numel() for parameter in kept.values())
    assert memory.cast_room(loaded.model) == 2 * 4 * 2 * packed


def test_int8_caches_too(models):
    loaded = open_model("tiny", "int8 (storage and KV cache)", None)
    other = open_model("tiny", "int8 (storage)", None).model
    assert loaded.model.int8_cache and not other.int8_cache
    for name, parameter in other.named_parameters():
        assert torch.equal(loaded.model.get_parameter(name), parameter)


def test_choices_of_dtype_keep_their_order():
    """Workflows that were saved remember the choice; new ones come last."""
    assert list(DTYPES) == [
        "auto",
        "fp32",
        "bf16",
        "fp16",
        "fp8 (storage)",
        "int8 (storage)",
        "int8 (storage and KV cache)",
        "int4 (storage)",
    ]


def test_a_file_in_fp8_stays_in_fp8(models, tmp_path):
    source = models / "tiny/model.safetensors"
    with safe_open(str(source), "pt") as file:
        about = file.metadata()
    kept = {
        name: tensor.to(torch.float8_e4m3fn) if ".layers." in f".{name}" and tensor.ndim == 2 else tensor
        for name, tensor in load_file(str(source)).items()
    }
    (models / "narrow").mkdir()
    try:
        save_file(kept, models / "narrow/model.safetensors", about)
        (models / "narrow/vq.safetensors").write_bytes((models / "tiny/vq.safetensors").read_bytes())
        (models / "narrow/text_encoder.safetensors").write_bytes(
            (models / "tiny/text_encoder.safetensors").read_bytes()
        )
        auto, wide = open_model("narrow", "auto", None).model, open_model("narrow", "fp32", None).model
        assert matrices(auto).keys() == matrices(open_fp8().model).keys() and not matrices(wide)
        assert torch.equal(drawn(auto), drawn(wide)) and torch.equal(drawn(auto), drawn(open_fp8().model))
    finally:
        for file in (models / "narrow").iterdir():
            file.unlink()
        (models / "narrow").rmdir()


def test_shards_in_fp8_are_noticed(tmp_path):
    folder = tiny_chameleon.write(tmp_path, shards=2)
    assert not holds_fp8(weight_file(folder))
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    tensors = load_file(str(shard))
    save_file({n: t.to(torch.float8_e4m3fn) if t.ndim == 2 else t for n, t in tensors.items()}, str(shard))
    assert holds_fp8(weight_file(folder))
    shard.write_bytes(b"broken")
    assert not holds_fp8(weight_file(folder))


def test_memory_is_kept_for_the_matrices_in_use(models):
    model = open_fp8().model
    largest = max(parameter.numel() for parameter in matrices(model).values())
    assert memory.cast_room(model) == 2 * 4 * largest and memory.cast_room(load_model(models / "tiny")) == 0


def test_continuous_models_have_none(vectors):
    with pytest.raises(ValueError, match="vectors.*continuous.*fp8"):
        open_fp8("vectors")


def test_a_continuous_model_stored_in_fp8_is_widened(vectors, tmp_path):
    file = tmp_path / "vectors.safetensors"
    with safe_open(str(vectors / "model.safetensors"), "pt") as opened:
        about = opened.metadata()
    save_file(
        {
            name: tensor.to(torch.float8_e4m3fn) if tensor.ndim == 2 else tensor
            for name, tensor in load_file(str(vectors / "model.safetensors")).items()
        },
        file,
        about,
    )
    assert holds_fp8(file) and stays_narrow(file) is None


def test_caches_are_reserved_for_the_real_prompts(models, nodes, run, monkeypatch):
    """The unconditional branch of some families is longer than the prompt."""
    asked, load = [], mm.load_models_gpu
    monkeypatch.setattr(
        mm,
        "load_models_gpu",
        lambda models, memory_required=0, **options: (
            asked.append(memory_required) or load(models, memory_required, **options)
        ),
    )
    loaded = open_model("tiny", "auto", None)
    counted = []
    count = type(loaded.model).kv_bytes
    monkeypatch.setattr(type(loaded.model), "kv_bytes", lambda *given: counted.append(given[-1]) or count(*given))
    node = nodes["SpecARNextTokenSampler"]
    prompt, long = map(loaded.model.encode_prompt, ("red apple", "red apple on a blue background"))
    for negative, tokens in ((None, 2), (long, 3)):
        run(
            node,
            **defaults(node)
            | {
                "model": loaded,
                "positive": prompt,
                "negative": negative,
                "seed": 1,
                "latent_image": {"samples": torch.zeros(1, 8, GRID, GRID)},
            },
        )
        assert counted.pop() == tokens
    assert min(asked) > 0
