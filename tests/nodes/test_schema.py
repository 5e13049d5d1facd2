"""What the front end and node scanners see of the nodes."""

import json
import re
from dataclasses import fields
from pathlib import Path

import comfyui_specar.nodes
import pytest
from comfy.cli_args import args
from comfy_api.latest import io
from comfyui_specar.model_loaders.families import CONTINUOUS_NAMES
from comfyui_specar.nodes import extension
from comfyui_specar.samplers.registry import RULES
from comfyui_specar.samplers.settings import settings_of

from ..support import other_systems

ROOT = Path(comfyui_specar.nodes.__file__).parent.parent
IDS = set(json.loads((ROOT / "tests/e2e/object_info.json").read_text(encoding="utf-8")))  # the released interface


def test_ids_are_literals_in_the_source():
    source = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "nodes").glob("*.py"))
    assert sorted(re.findall(r'node_id="(\w+)"', source)) == sorted(IDS)


def shown(schema):
    return [field for field in schema.inputs if not field.extra_dict.get("hidden")]


def test_every_node_explains_itself(nodes):
    for name, node in nodes.items():
        schema = node.GET_SCHEMA()
        assert schema.description and schema.display_name and schema.category.startswith("SpecAR/"), name
        assert all(i.tooltip for i in shown(schema)), name
        assert all(o.tooltip and o.display_name for o in schema.outputs), name


def test_every_number_has_bounds(nodes):
    for name, node in nodes.items():
        for field in node.GET_SCHEMA().inputs:
            if field.io_type in ("INT", "FLOAT"):
                assert field.min is not None and field.max is not None, (name, field.id)
                assert field.min <= field.default <= field.max, (name, field.id)


def test_the_tooltip_of_every_number_names_values(nodes):
    """The default and a usual value or a range, so that nobody has to guess which numbers make sense."""
    for name, node in nodes.items():
        for field in shown(node.GET_SCHEMA()):
            if field.io_type in ("INT", "FLOAT") and "seed" not in field.id:
                usual, default = re.fullmatch(r"(.+) Default: (-?[\d.]*\d)\b.*", field.tooltip).groups()
                assert float(default) == field.default, (name, field.id)
                assert re.search(r"\d|as for", usual), (name, field.id)


def test_a_number_that_stands_for_an_automatic_one_says_so(nodes):
    """On the node, where the bare number looks like a mistake, in its tooltip and in both languages."""
    chinese = json.loads((ROOT / "locales/zh/nodeDefs.json").read_text(encoding="utf-8"))
    marked = set()
    for name, node in nodes.items():
        for field in shown(node.GET_SCHEMA()):
            if "(auto)" in field.tooltip or field.display_name:
                marked.add(field.id)
                assert field.display_name == f"{field.id} ({field.default}: auto)", (name, field.id)
                assert f"Default: {field.default} (auto)" in field.tooltip, (name, field.id)
                assert f"（{field.default}：自动）" in chinese[name]["inputs"][field.id]["name"], (name, field.id)
    assert {"cfg", "temperature", "top_k", "top_p", "window", "width", "neighbours", "head_steps", "frames"} <= marked


def test_there_are_words_of_nothing_that_is_gone(nodes):
    """Nodes read their words from this file, which fails where one is missing; here, whether it has any besides."""
    expected = {}
    for name, node in nodes.items():
        schema = node.GET_SCHEMA()
        expected[name] = {
            "display_name": schema.display_name,
            "description": schema.description,
            "inputs": {i.id: {"name": i.display_name or i.id, "tooltip": i.tooltip} for i in shown(schema)},
        }
        if schema.outputs:
            outputs = enumerate(schema.outputs)
            expected[name]["outputs"] = {str(i): {"name": o.display_name, "tooltip": o.tooltip} for i, o in outputs}
    assert json.loads((ROOT / "locales/en/nodeDefs.json").read_text(encoding="utf-8")) == expected


def test_words_that_list_the_continuous_families_list_all():
    texts = [text for text in (ROOT / "locales/en/nodeDefs.json").read_text("utf-8").splitlines() if "(MAR" in text]
    assert len(texts) >= 3 and all(CONTINUOUS_NAMES in text for text in texts)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_widgets_of_a_rule_are_its_settings(nodes, rule):
    """One for each, with its default; they offer no illegal value, and every legal one of a choice."""
    node, settings = nodes[f"SpecARRule{rule.__name__}"], settings_of(rule)
    widgets = {field.id: field for field in node.GET_SCHEMA().inputs if field.id != "where"}
    assert settings.keys() <= widgets.keys()
    defaults = {name: widget.default for name, widget in widgets.items()}

    def chosen(**values):
        return node.execute(**defaults | values).result[0].rule

    assert chosen() == rule()
    for name, setting in settings.items():
        widget = widgets[name]
        if setting.options:
            values = [getattr(chosen(**{name: option}), name) for option in widget.options]
            assert sorted(values) == sorted(setting.options)
        else:
            assert setting.low <= widget.min and widget.max <= setting.high


def test_bundled_models_and_drafters_are_listed_first(nodes, drafters, vectors):
    choices = {
        name: nodes[name].INPUT_TYPES()["required"][widget][1]["options"]
        for name, widget in (("SpecARLoadCheckpoint", "model_name"), ("SpecARLoadDrafter", "drafter_name"))
    }
    shipped = ["default (bundled)", "continuous MAR (bundled)"]
    own = ["tiny/model.safetensors", "vectors/model.safetensors", "classes.safetensors", "nogrid.safetensors"]
    assert choices["SpecARLoadCheckpoint"] == [*shipped, *own]
    shipped = ["EAGLE drafter (bundled)", "small model (bundled)", "small continuous MAR (bundled)"]
    assert choices["SpecARLoadDrafter"] == [
        *shipped,
        "eagle/model.safetensors",
        "small.safetensors",
        "vectors.safetensors",
    ]


def test_folders_are_registered_once_with_their_extensions():
    import folder_paths

    before = {key: list(folder_paths.get_folder_paths(key)) for key in ("ar_models", "ar_drafters")}
    extension.folders.register_folders()
    for key, paths in before.items():
        assert folder_paths.get_folder_paths(key) == paths
        assert ".safetensors" in folder_paths.folder_names_and_paths[key][1]


@pytest.mark.once
def test_every_module_can_be_imported_without_posix():
    flags = f"from comfy.cli_args import args\nargs.cpu, args.base_directory = True, {args.base_directory!r}"
    assert other_systems.imported(["nodes"], flags) > 25


SEARCHED = "speculative autoregressive janus lumina llamagen emu3 anole simplear mar fast sampler".split()


def test_words_that_people_type_find_the_sampler(nodes):
    """In versions of ComfyUI that search in more than names; the others must not be given what they do not know."""
    knows = "search_aliases" in {field.name for field in fields(io.Schema)}
    for name, node in nodes.items():
        assert bool(node.GET_NODE_INFO_V1().get("search_aliases")) == knows, name
    if knows:
        aliases = nodes["SpecARSampler"].GET_SCHEMA().search_aliases
        for word in ("autoregressive", "speculative"):  # alone: the page lists such nodes first
            first = [name for name, node in nodes.items() if word in node.GET_SCHEMA().search_aliases]
            assert first == ["SpecARSampler"]
        others = [name for name in nodes if "Sampler" not in name and "Load" not in name]
        for name in others:  # they would hide the samplers
            assert "speculative" not in " ".join(nodes[name].GET_SCHEMA().search_aliases), name
        for word in SEARCHED:
            assert any(word in alias.lower() for alias in aliases), word


def test_advanced_inputs_are_told_to_the_front_end(nodes):
    """Never a socket, and never so many that a sampler shows nothing but its seed."""
    for name, node in nodes.items():
        inputs = {key: spec for kind in node.GET_NODE_INFO_V1()["input"].values() for key, spec in kind.items()}
        folded = {key for key, (_, *options) in inputs.items() if options and options[0].get("advanced")}
        assert folded <= {i.id for i in node.GET_SCHEMA().inputs if hasattr(i, "default")}, name
        if name.endswith("Sampler"):
            assert {"cfg", "temperature"} <= inputs.keys() - folded
            assert ({"guidance", "head_sampler"} if "Continuous" in name else {"top_k", "top_p"}) <= folded
