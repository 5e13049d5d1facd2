"""The samplers with a drafter and the rules: what widgets become, masks, errors."""

import pytest
import torch
from comfyui_specar.nodes import tree_samplers
from comfyui_specar.samplers.methods.skipping import FEATURES, Skipping
from comfyui_specar.samplers.registry import RULES
from comfyui_specar.samplers.trace import Source

pytestmark = pytest.mark.once  # what widgets become; test_samplers.py runs every one of these nodes

STRUCTURES = [*tree_samplers.STRUCTURES, tree_samplers.OWN]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_structures(structure, sample, load_drafter, tiny):
    widgets = {"structure": structure, "depth": 3, "width": 2, "nodes": 5, "tree_paths": "0; 1; 0,0"}
    _, trace = sample("DraftTree", **widgets)
    shape = trace.settings["structure"]
    kind = structure.split()[0].replace("own", "static").rstrip(",")
    assert shape["kind"] == kind
    if kind == "chain":
        assert shape["length"] == 3 and shape["verification"] == ("block" if "block" in structure else "token")
    if kind == "dynamic":
        assert (shape["depth"], shape["width"], shape["nodes"]) == (3, 2, 5)
    if structure == tree_samplers.OWN:
        assert shape["drafts"] == 3
    small = load_drafter(tiny[0], "small.safetensors")
    assert sample("DraftTree", drafter=small, **widgets)[1].settings["drafter"] == "model"


@pytest.mark.parametrize(("method", "name"), [("SJD", "Grouped"), *(("DraftTree", rule.__name__) for rule in RULES)])
def test_rules_reach_the_sampler_and_mark_what_they_let_pass(name, method, sample, rule):
    chosen = rule(name)
    widgets = {"structure": "chain"} if method == "DraftTree" else {}
    _, trace = sample(method, batch=2, rule=chosen, **widgets)
    assert trace.settings["rule"]["rule"] == chosen.rule.name
    assert trace.settings["lossless"] == (name == "Exact")
    relaxed = trace.positions["source"] == Source.RELAXED
    assert not relaxed.any() or name != "Exact"


def test_the_mask_of_a_rule_says_where_it_counts(sample, rule):
    tree = {"structure": tree_samplers.STATIC, "batch": 4}

    def relaxed(where=None):
        return sample("DraftTree", **tree, rule=rule("UniformRSD", delta=100.0, where=where))

    exact = sample("DraftTree", **tree)[0]["ar_tokens"]
    assert not torch.equal(relaxed()[0]["ar_tokens"], exact)
    assert torch.equal(relaxed(torch.zeros(1, 7, 5))[0]["ar_tokens"], exact)
    lower = torch.zeros(64, 64)  # a MASK may come without a batch
    lower[32:] = 1
    half, trace = relaxed(lower)
    assert torch.equal(half["ar_tokens"][:, :2], exact[:, :2])
    found = trace.grid("source") == Source.RELAXED
    assert found[:, 2:].any() and not found[:, :2].any()
    assert (trace.grid("drift_bound")[:, :2] == 0).all() and trace.grid("drift_bound").sum() > 0


def test_a_mask_per_image(sample, rule):
    chosen = rule("UniformRSD", delta=100.0, where=torch.stack([torch.zeros(8, 8), torch.ones(8, 8)]))
    exact, _ = sample("DraftTree", structure=tree_samplers.STATIC, batch=2)
    mixed, _ = sample("DraftTree", structure=tree_samplers.STATIC, batch=2, rule=chosen)
    assert torch.equal(mixed["ar_tokens"][0], exact["ar_tokens"][0])
    with pytest.raises(ValueError, match="mask.* 2 masks.* 3"):
        sample("DraftTree", structure=tree_samplers.STATIC, batch=3, rule=chosen)


def test_vvs_skips(sample):
    _, trace = sample("VVS", batch=4, structure="chain", interval=2)
    assert (trace.positions["source"] == Source.SKIPPED).any()
    assert trace.settings["skipping"]["interval"] == 2


def test_adt_presets_and_own_values(sample):
    _, trace = sample("ADTTree", preset="Anole")
    assert tuple(trace.settings["structure"]["widths"]) == (4, 13)
    _, trace = sample("ADTTree", preset="own values", depth_max=2, width_max=5)
    assert tuple(trace.settings["structure"]["depths"]) == (1, 2)


def test_alpha_and_base_work_with_every_preset(sample):
    widgets = {"bonus": True, "base_depth": 2, "base_width": 25}
    for preset in (*tree_samplers.PRESETS, tree_samplers.OWN_VALUES):
        shape = sample("ADTTree", preset=preset, **widgets)[1].settings["structure"]
        assert (shape["bonus"], tuple(shape["base"])) == (True, (2, 25))
    assert not {"bonus", "base"} & sample("ADTTree")[1].settings["structure"].keys()


def test_features_are_those_of_the_papers_tables(sample):
    assert [*tree_samplers.FEATURES.values()] == [*FEATURES]
    for option, features in tree_samplers.FEATURES.items():
        skipping = sample("VVS", structure="chain", interval=2, features=option)[1].settings["skipping"]
        assert skipping.get("features", Skipping.features) == features


@pytest.mark.parametrize(
    ("name", "widgets", "message"),
    [("Lantern", {"delta": 2.0}, "delta.* 2.0.* 0.* 1"), ("CoolSD", {"schedule": "magic"}, "schedule.*'magic'")],
)
def test_absurd_numbers_show_on_the_rule_s_own_node(rule, name, widgets, message):
    with pytest.raises(ValueError, match=message):
        rule(name, **widgets)


@pytest.mark.parametrize(
    ("method", "inputs", "message"),
    [
        ("DraftTree", {"structure": "magic"}, "structure.*'magic'"),
        ("DraftTree", {"structure": "own tree", "tree_paths": "0; x"}, "tree_paths.*'0; x'"),
        ("DraftTree", {"structure": "own tree", "tree_paths": ""}, "tree.*list"),
        ("DraftTree", {"structure": "own tree", "tree_paths": "0; 0,1"}, ".0, 1..*.0, 0."),
        ("DraftTree", {"structure": "chain", "depth": 0}, "depth.* 0"),
        ("DraftTree", {"structure": "dynamic tree (EAGLE-2)", "nodes": 10**6}, "nodes.* 1000000"),
        ("Lantern", {"variant": "magic"}, "variant.*'magic'"),
        ("Lantern", {"neighbours": 900}, "neighbours.*900.* 1 to 63"),
        ("CoolSD", {"structure": "own tree"}, "structure.*'own tree'"),
        ("ADTTree", {"preset": "magic"}, "preset.*'magic'"),
        ("ADTTree", {"initialisation": "magic"}, "initialisation.*'magic'"),
        ("ADTTree", {"children": "drawn at random"}, "children.*removed.*Recreate"),
        ("ADTTree", {"preset": "own values", "depth_min": 9, "depth_max": 2}, "depth"),
        ("VVS", {"schedule": "magic"}, "schedule.*'magic'"),
        ("VVS", {"interval": 1}, "interval.* 1"),
        ("VVS", {"path": "magic"}, "path.*'magic'"),
        ("VVS", {"features": "magic"}, "features.*'magic'"),
        ("ADTTree", {"base_depth": 33}, "base.?depth.* 33"),
    ],
)
def test_illegal_inputs_are_named(sample, method, inputs, message):
    with pytest.raises(ValueError, match=message):
        sample(method, **inputs)


def test_block_verification_refuses_a_relaxed_rule(sample, rule):
    with pytest.raises(ValueError, match="(?i)block verification.*exact"):
        sample("DraftTree", structure="chain, block verification", rule=rule("UniformRSD"))
