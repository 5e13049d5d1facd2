"""LoRAs of PEFT: every family computes with the merged matrices, and what cannot be merged is refused."""

import json
import math
import re

import pytest
import torch
from comfyui_specar.model_loaders.detect import load_model, model_file, open_with_adapters
from comfyui_specar.model_loaders.files.adapters import with_adapter
from comfyui_specar.model_loaders.files.checkpoint import open_checkpoint
from comfyui_specar.model_loaders.files.errors import CheckpointError
from comfyui_specar.model_loaders.files.quantised import LazyMatrix
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ..support import tiny_emu3, tiny_janus
from ..support.comfy_quant import quantise_file, rewritten
from ..support.every_family import FAMILIES
from ..support.lora import RANK, factors, linear_layers, merged, write_lora
from ..support.tiny_family import declared
from ..support.tiny_simplear import write, write_quantised

Q = "model.layers.1.self_attn.q_proj"


WRITTEN = json.loads(  # what PEFT 0.21 states of a LoRA, beside what write_lora does
    """{"alora_invocation_tokens": null, "alpha_pattern": {}, "arrow_config": null, "auto_mapping": {"parent_library":
    "transformers"}, "base_model_name_or_path": "x/y", "corda_config": null, "ensure_weight_tying": false,
    "eva_config": null, "exclude_modules": null, "fan_in_fan_out": false, "inference_mode": true, "init_lora_weights":
    true, "kasa_config": null, "layer_replication": null, "layers_pattern": null, "layers_to_transform": [1],
    "loftq_config": {}, "lora_bias": false, "lora_dropout": 0.1, "lora_ga_config": null, "megatron_config": null,
    "megatron_core": "megatron.core", "monteclora_config": null, "peft_version": "0.21.2", "qalora_group_size": 16,
    "rank_pattern": {}, "revision": null, "target_modules": ["q_proj"], "target_parameters": null, "task_type":
    "CAUSAL_LM", "trainable_token_indices": null, "use_bdlora": null, "use_dora": false, "use_qalora": false,
    "use_rslora": false, "velora_config": null}"""
)


@pytest.fixture
def simplear(tmp_path):
    return model_file(write(tmp_path / "model", decoder=False))


def test_a_lora_changes_the_matrices_of_every_family(tmp_path):
    for name, tiny in declared("TINY").items():
        (tmp_path / name).mkdir()
        file = model_file(tiny.write(tmp_path / name))
        modules = linear_layers(file)
        lora = write_lora(tmp_path / f"{name} lora", file, modules)
        adapted = load_model(file, dtype=torch.float32, adapters=[(lora, 0.5)]).state_dict()
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        save_file(merged(load_file(file), modules, 0.5 * 6 / RANK), file, metadata)
        by_hand = load_model(file, dtype=torch.float32).state_dict()
        assert adapted.keys() == by_hand.keys()
        for key, tensor in by_hand.items():
            assert torch.equal(adapted[key], tensor), (name, key)


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 6 / RANK),
        ({"use_rslora": True}, 6 / math.sqrt(RANK)),
        ({"alpha_pattern": {"self_attn.q_proj": 12}}, 12 / RANK),
        ({"alpha_pattern": {"k_proj": 12}}, 6 / RANK),
        ({"alpha_pattern": {"self.attn.q_proj": 12}}, 12 / RANK),
        ({"alpha_pattern": {r"layers\.\d+\.self_attn\.[qk]_proj": 12}}, 12 / RANK),
        ({"alpha_pattern": {".*proj": 12, "q_proj": 3}}, 12 / RANK),
        ({"alpha_pattern": {"^self_attn.q_proj": 12, "attn.q_proj": 12, "proj": 12}}, 6 / RANK),
        ({"alpha_pattern": {"^model.layers.1.self_attn.q_proj": -12}, "use_rslora": True}, -12 / math.sqrt(RANK)),
        ({"r": 64, "rank_pattern": {"[q-v]_proj": RANK}}, 6 / RANK),
        ({"lora_alpha": 0}, 0),
        *(({"init_lora_weights": kind}, 6 / RANK) for kind in (False, None, "gaussian", "eva", "orthogonal", "mica")),
        ({"use_rslora": None}, 6 / RANK),
        ({"setting_of_tomorrow": False, "another": None, "third": {}}, 6 / RANK),
        (WRITTEN, 6 / RANK),
    ],
)
def test_the_scale_is_that_of_the_adapters_config(tmp_path, simplear, config, scale):
    lora = write_lora(tmp_path / "lora", simplear, [Q], **config)
    checkpoint = open_checkpoint(simplear)
    a, b = factors(Q, checkpoint.tensors[f"{Q}.weight"].shape)
    wanted = checkpoint.tensors[f"{Q}.weight"] + scale * (b @ a)
    assert torch.equal(with_adapter(checkpoint, lora, 1.0).tensors[f"{Q}.weight"].float(), wanted)


def test_a_quantised_matrix_takes_a_lora(tmp_path):
    (tmp_path / "model").mkdir()
    write_quantised(tmp_path / "model")
    checkpoint = open_checkpoint(file := model_file(tmp_path / "model"))
    lora, base = write_lora(tmp_path / "lora", file, [Q]), checkpoint.tensors[f"{Q}.weight"]
    a, b = factors(Q, base.shape)
    assert type(base) is LazyMatrix
    found = with_adapter(checkpoint, lora, 1.0).tensors[f"{Q}.weight"]
    assert torch.equal(found.float(), base.float() + 6 / RANK * (b @ a))
    assert torch.equal(found[8:24].float(), found.float()[8:24]), "its rows are lazy, too"


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_a_lora_changes_the_rows_and_columns_that_a_format_did_not_pad(tmp_path, kind):
    file = model_file(FAMILIES["emu3.5"].write(tmp_path))
    modules, wide = linear_layers(file), {}
    shapes = {module: open_checkpoint(file).tensors[f"{module}.weight"].shape for module in modules}
    loras = [(write_lora(tmp_path / f"lora {i}", file, modules), strength) for i, strength in enumerate((1.0, -0.5))]

    def narrowed(tensors):
        narrow, found = quantise_file(tensors, kind)
        wide.update(found)
        return narrow, {}

    rewritten(file, narrowed)
    assert any(open_checkpoint(file).tensors[f"{name}.weight"].shape != shape for name, shape in shapes.items())
    by_hand = merged(merged(wide, modules, 6 / RANK), modules, -0.5 * 6 / RANK)
    changed = open_with_adapters(file, loras).tensors
    assert all(torch.equal(changed[f"{module}.weight"].float(), by_hand[f"{module}.weight"]) for module in modules)
    assert load_model(file, dtype=torch.float32, adapters=loras)


def test_a_head_that_a_lora_changes_is_no_longer_the_embedding(tmp_path):
    file = model_file(write(tmp_path / "model", tied=False, decoder=False))
    settings = json.loads((file.parent / "config.json").read_text(encoding="utf-8")) | {"tie_word_embeddings": True}
    (file.parent / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    lora = write_lora(tmp_path / "lora", file, ["lm_head"])
    plain, adapted = (load_model(file, dtype=torch.float32, adapters=each).backbone for each in ((), [(lora, 1.0)]))
    assert torch.equal(adapted.tok_embeddings.weight, plain.tok_embeddings.weight)
    hidden = torch.ones(1, 1, plain.config.dim)
    assert not torch.equal(adapted.output(hidden), plain.output(hidden))


@pytest.mark.parametrize(
    "name", [Q, "layers.1.self_attn.q_proj", "1.self_attn.q_proj", f"vl_gpt.language_model.{Q}", f"_orig_mod.{Q}"]
)
def test_a_layer_is_found_under_the_name_that_it_was_trained_with(tmp_path, simplear, name):
    lora = write_lora(tmp_path / "lora", simplear, [Q], {Q: name})
    changed = with_adapter(open_checkpoint(simplear), lora, 1.0).tensors
    assert [key for key, tensor in changed.items() if type(tensor) is not torch.Tensor] == [f"{Q}.weight"]


def test_several_adapters_add_up_and_matrices_are_stored_in_few_bits(tmp_path, simplear):
    loras = [(write_lora(tmp_path / f"{i}", simplear, [Q]), strength) for i, strength in enumerate((1.0, -0.75))]
    plain = twice = open_checkpoint(simplear)
    for lora, strength in loras:
        twice = with_adapter(twice, lora, strength)
    by_hand = merged(merged(plain.tensors, [Q], 6 / RANK), [Q], -0.75 * 6 / RANK)
    assert torch.equal(twice.tensors[f"{Q}.weight"].float(), by_hand[f"{Q}.weight"])
    narrow = load_model(simplear, dtype=torch.float32, storage=torch.int8, adapters=loras)
    assert narrow.backbone.layers[1].attention.wqkv.weight.dtype == torch.int8


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"use_dora": True}, "use_dora True"),
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_alpha": "much"}, "lora_alpha 'much'"),
        ({"lora_alpha": True}, "lora_alpha True"),
        ({"lora_alpha": math.inf}, "lora_alpha inf"),
        ({"lora_alpha": 1e300}, "lora_alpha"),
        ({"lora_alpha": 1e9}, "lora_alpha"),
        ({"r": RANK + 1}, "r 5 of"),
        ({"r": "four"}, "r 'four' of"),
        ({"rank_pattern": {"q_proj": 2}}, "r 2 of"),
        ({"alpha_pattern": [["q_proj", 2]]}, "alpha_pattern"),
        ({"alpha_pattern": {"q_proj": None}}, "lora_alpha None"),
        ({"alpha_pattern": {".*": 2}}, re.escape("'.*' in alpha_pattern")),
        ({"alpha_pattern": {"(q|k)_proj": 2}}, "alpha_pattern"),
        ({"alpha_pattern": {"[z-a]": 2}}, "alpha_pattern"),
        ({"alpha_pattern": {r"(.*\.)*" * 9 + "x": 2}}, "alpha_pattern"),
        ({"rank_pattern": {r"\d+.": 2}}, "rank_pattern"),
        ({"alpha_pattern": {f"{'x' * 900}{i}": 2 for i in range(600)}}, "600 names in alpha_pattern"),
        ({"bias": "lora_only"}, "bias 'lora_only'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights 'pissa_niter_16'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights 'loftq'"),
        ({"init_lora_weights": ["gaussian"]}, "init_lora_weights"),
        ({"use_rslora": "yes"}, "use_rslora 'yes'"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"loftq_config": {"loftq_bits": 4}}, "loftq_config"),
        ({"setting_of_tomorrow": 0.5}, "setting_of_tomorrow 0.5"),
        ({"setting_of_tomorrow": 0}, "setting_of_tomorrow 0"),
    ],
)
def test_other_adapters_are_refused(tmp_path, simplear, config, words):
    lora = write_lora(tmp_path / "lora", simplear, [Q], **config)
    with pytest.raises(CheckpointError, match=words):
        with_adapter(open_checkpoint(simplear), lora, 1.0)


def changed(tensors):
    """Damaged contents of an adapter, and what is said of each."""
    down, up = (f"base_model.model.{Q}.lora_{half}.weight" for half in "AB")
    yield {down: tensors[down]}, "lacks a half"
    yield tensors | {up: tensors[up][:, :1].contiguous()}, "do not fit"
    yield tensors | {up: tensors[up] * math.nan}, "finite"
    yield tensors | {"base_model.model.lm_head.weight": torch.zeros(2, 2)}, "lm_head"
    yield (
        tensors | {"base_model.model.model.embed_tokens.weight": torch.zeros(301, 32)},
        "embed_tokens.weight as a whole",
    )
    yield tensors | {f"base_model.model.{Q}.lora_magnitude_vector": torch.ones(32)}, "lora_magnitude_vector"
    yield tensors | {name.replace("model.layers", "layers"): each.clone() for name, each in tensors.items()}, "twice"
    yield {name.replace(".weight", f".{i}.weight"): t.clone() for i in "ab" for name, t in tensors.items()}, r"\(a, b\)"
    yield {name: tensor.int() for name, tensor in tensors.items()}, "finite"
    yield {down: tensors[down][:, :0].contiguous(), up: tensors[up]}, "do not fit"
    yield {name.replace("model.layers", "vision_tower.layers"): t for name, t in tensors.items()}, "does not have"
    yield tensors | {up: tensors[up][:4].contiguous()}, "another model"
    yield {name.replace("layers.1", "layers.7"): each for name, each in tensors.items()}, "does not have"


def test_damaged_adapters_and_those_of_other_models_are_refused(tmp_path, simplear):
    lora = write_lora(tmp_path / "lora", simplear, [Q])
    checkpoint, file = open_checkpoint(simplear), lora / "adapter_model.safetensors"
    for tensors, words in [*changed(load_file(file))]:
        save_file(tensors, file)
        with pytest.raises(CheckpointError, match=words):
            with_adapter(checkpoint, lora, 1.0)
    (lora / "adapter_config.json").write_text(json.dumps([]), encoding="utf-8")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        with_adapter(checkpoint, lora, 1.0)
    (lora / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match="Keep both files"):
        with_adapter(checkpoint, lora, 1.0)
    with pytest.raises(ValueError, match="strength is nan"):
        with_adapter(checkpoint, lora, math.nan)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float64])
def test_factors_of_any_floating_point_dtype_and_name_are_merged_in_fp32(tmp_path, simplear, dtype):
    lora = write_lora(tmp_path / "lora", simplear, [Q])
    file, plain = lora / "adapter_model.safetensors", open_checkpoint(simplear)
    save_file({n.replace(".weight", ".my_lora.weight"): t.to(dtype) for n, t in load_file(file).items()}, file)
    wanted = merged(plain.tensors, [Q], 6 / RANK)[f"{Q}.weight"]
    assert torch.equal(with_adapter(plain, lora, 1.0).tensors[f"{Q}.weight"].float(), wanted)


@pytest.mark.parametrize(("entry", "fits"), [(65504, True), (-65504, True), (65536, False), (1e30, False)])
def test_a_change_is_at_most_what_a_weight_can_be(tmp_path, simplear, entry, fits):
    lora, plain = write_lora(tmp_path / "lora", simplear, [Q], lora_alpha=RANK), open_checkpoint(simplear)
    file = lora / "adapter_model.safetensors"
    tensors = {name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}
    for half, value in ("A", 1), ("B", entry):
        tensors[f"base_model.model.{Q}.lora_{half}.weight"][0, 0] = value
    save_file(tensors, file)
    if fits:
        changed = with_adapter(plain, lora, 1.0).tensors[f"{Q}.weight"].float() - plain.tensors[f"{Q}.weight"]
        assert changed.abs().max() == abs(entry)
    else:
        with pytest.raises(CheckpointError, match="lora_alpha"):
            with_adapter(plain, lora, 1.0)


def test_layers_that_are_those_of_the_model_may_be_beside_the_factors(tmp_path, simplear):
    lora, file = write_lora(tmp_path / "lora", simplear, [Q]), tmp_path / "lora/adapter_model.safetensors"
    table = open_checkpoint(simplear).tensors["model.embed_tokens.weight"]
    names = ("base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight")  # which are tied
    save_file(load_file(file) | {name: table.bfloat16() for name in names}, file)
    changed = with_adapter(open_checkpoint(simplear), lora, 1.0).tensors
    assert changed.keys() == open_checkpoint(simplear).tensors.keys()
    assert changed["model.embed_tokens.weight"].dtype == table.dtype


LM = "model.language_model.layers.1.self_attn.q_proj"  # of Janus in transformers' layout
TOWER = "model.vision_model.encoder.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "module"),
    [
        (LM, LM),
        ("language_model.model.layers.1.self_attn.q_proj", LM),  # DeepSeek's
        ("vl_gpt.language_model.model.layers.1.self_attn.q_proj", LM),
        ("model.layers.1.self_attn.q_proj", LM),  # the language model alone
        ("language_model.layers.1.self_attn.q_proj", LM),
        (TOWER, TOWER),
        ("vision_model.encoder.layers.1.self_attn.q_proj", TOWER),
        ("encoder.layers.1.self_attn.q_proj", TOWER),
        ("language_model.lm_head", "lm_head"),
        ("gen_head.output_mlp_projector", "model.generation_head.proj_out"),
        ("gen_aligner.layers.0", "model.generation_aligner.fc1"),
        ("gen_aligner.layers.2", "model.generation_aligner.hidden_layers.0"),
        ("aligner.layers.2", "model.aligner.hidden_layers.0"),
    ],
)
def test_a_lora_of_either_layout_of_janus_changes_the_part_that_it_names(tmp_path, name, module):
    file = model_file(tiny_janus.write(tmp_path / "model", vision=64))  # its two towers have the same shapes
    lora = write_lora(tmp_path / "lora", file, [module], {module: name})
    changed = open_with_adapters(file, [(lora, 1.0)]).tensors
    assert [key for key, tensor in changed.items() if type(tensor) is not torch.Tensor] == [f"{module}.weight"]


def test_a_lora_under_transformers_names_changes_deepseeks_layout(tmp_path):
    file = model_file(tiny_janus.write(tmp_path / "model", original=True))
    modules = {
        "language_model.model.layers.1.self_attn.q_proj": LM,
        "gen_head.output_mlp_projector": "model.generation_head.proj_out",
        "aligner.layers.0": "model.aligner.fc1",
        "language_model.lm_head": "lm_head",
    }
    lora = write_lora(tmp_path / "lora", file, [*modules], modules)
    changed = open_with_adapters(file, [(lora, 1.0)]).tensors
    lazy = [key.removesuffix(".weight") for key, tensor in changed.items() if type(tensor) is not torch.Tensor]
    assert sorted(lazy) == sorted(modules)


def test_a_lora_of_any_layout_of_emu3_changes_any_other(tmp_path):
    roots = ("model.text_model.", "text_model.model.", "model.")
    for own in roots:
        module = f"{own}layers.1.mlp.up_proj"
        file = model_file(tiny_emu3.write(tmp_path / own, layout=(own, "", "model.vqmodel.")))
        for theirs in roots:
            name = f"{theirs}layers.1.mlp.up_proj"
            lora = write_lora(tmp_path / f"{own} {theirs}", file, [module], {module: name})
            assert type(open_with_adapters(file, [(lora, 1.0)]).tensors[f"{module}.weight"]) is LazyMatrix


def test_where_a_name_may_mean_two_places_their_shapes_decide_or_both_are_told(tmp_path):
    name = "layers.1.self_attn.q_proj"
    for vision in (32, 64):
        file = model_file(tiny_janus.write(tmp_path / f"{vision}", vision=vision))
        lora = write_lora(tmp_path / f"lora {vision}", file, [LM], {LM: name})
        if vision == 32:
            assert type(open_with_adapters(file, [(lora, 1.0)]).tensors[f"{LM}.weight"]) is LazyMatrix
        else:
            with pytest.raises(
                CheckpointError, match=rf"{LM}.weight and {TOWER}.weight|{TOWER}.weight and {LM}.weight"
            ):
                open_with_adapters(file, [(lora, 1.0)])


def test_an_entry_for_a_tower_that_a_model_lacks_changes_nothing_else(tmp_path):
    file = model_file(tiny_janus.write(tmp_path / "model", original=True))
    own = "language_model.model.layers.1.self_attn.q_proj"
    lora = write_lora(tmp_path / "lora", file, [own], {own: "vision_tower.model.layers.1.self_attn.q_proj"})
    with pytest.raises(CheckpointError, match="does not have"):
        open_with_adapters(file, [(lora, 1.0)])


OTHERS = {
    "kohya": {"lora_unet_x.lora_down.weight": (4, 8), "lora_unet_x.lora_up.weight": (8, 4), "lora_unet_x.alpha": ()},
    "LyCORIS": {"lycoris_x.lokr_w1": (4, 4), "lycoris_x.hada_w1_a": (4, 4)},
    "full": {"diffusion_model.x.diff": (4, 4), "diffusion_model.x.diff_b": (4,)},
    "diffusers": {"transformer.x.lora_A.weight": (4, 8), "transformer.x.lora_B.weight": (8, 4)},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_loras_of_diffusion_models_are_said_to_be_such(tmp_path, simplear, kind):
    save_file({name: torch.zeros(shape) for name, shape in OTHERS[kind].items()}, tmp_path / "style.safetensors")
    with pytest.raises(CheckpointError, match="diffusion models"):
        with_adapter(open_checkpoint(simplear), tmp_path / "style.safetensors", 1.0)


def test_missing_files_are_said_to_be_missing(tmp_path, simplear):
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        with_adapter(open_checkpoint(simplear), tmp_path / "nowhere", 1.0)
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="contains no adapter_model.safetensors"):
        with_adapter(open_checkpoint(simplear), tmp_path, 1.0)


def test_adapters_of_another_form_are_refused(tmp_path, simplear):
    lora = write_lora(tmp_path / "lora", simplear, [Q])
    for given in (lora, str(lora), [lora], [(lora, "1")], {lora: 1.0}, (lora, 1.0), [(lora, 1.0, 2)], [(1, 1.0)], 1):
        with pytest.raises(TypeError, match=r"adapters .*\[\(path, 1.0\)\]"):
            load_model(simplear, adapters=given)
    by_text, by_list = ([*open_with_adapters(simplear, given).tensors] for given in ([(str(lora), 1)], ([lora, 1.0],)))
    assert by_text == by_list
