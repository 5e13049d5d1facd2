"""What the front end and node scanners see of the nodes."""

import re
from pathlib import Path

import comfyui_specar.nodes
from comfyui_specar.nodes import extension

IDS = {
    "SpecARLoadCheckpoint", "SpecARLoadImageDecoder", "SpecAREmptyLatent", "SpecARNextTokenSampler", "SpecARSJDSampler",
    "SpecARAcceptanceMap", "SpecARSaveTrace", "SpecARLoadTrace",
}  # fmt: skip
OUTPUT_NODES = {"SpecARAcceptanceMap", "SpecARSaveTrace"}


def test_ids_are_the_released_ones(nodes):
    assert set(nodes) == IDS


def test_ids_are_literals_in_the_source():
    source = "".join(p.read_text() for p in Path(comfyui_specar.nodes.__file__).parent.glob("*.py"))
    assert sorted(re.findall(r'node_id="(\w+)"', source)) == sorted(IDS)


def test_every_node_explains_itself(nodes):
    for name, node in nodes.items():
        schema, info = node.GET_SCHEMA(), node.GET_NODE_INFO_V1()
        assert schema.description and schema.display_name and schema.category.startswith("SpecAR/"), name
        assert all(i.tooltip for i in schema.inputs), name
        assert all(o.tooltip and o.display_name for o in schema.outputs), name
        assert info["output_node"] == (name in OUTPUT_NODES), name


def test_every_number_has_bounds(nodes):
    for name, node in nodes.items():
        for field in node.GET_SCHEMA().inputs:
            if field.io_type in ("INT", "FLOAT"):
                assert field.min is not None and field.max is not None, (name, field.id)
                assert field.min <= field.default <= field.max, (name, field.id)


def test_every_node_has_a_help_page_and_translations(nodes):
    import json

    root = Path(comfyui_specar.nodes.__file__).parent.parent
    english = json.loads((root / "locales/en/nodeDefs.json").read_text(encoding="utf-8"))
    for name, node in nodes.items():
        schema = node.GET_SCHEMA()
        assert (root / f"web/docs/{name}/en.md").is_file()
        assert english[name]["display_name"] == schema.display_name
        assert english[name]["inputs"].keys() == {i.id for i in schema.inputs}
        assert len(english[name].get("outputs", {})) == len(schema.outputs)
    assert set(english) == IDS
    assert {p.name for p in (root / "web/docs").iterdir()} == IDS


def test_bundled_model_is_listed_first(nodes, models):
    loader = nodes["SpecARLoadCheckpoint"].INPUT_TYPES()["required"]["model_name"]
    assert loader[1]["options"] == ["default (bundled)", "tiny", "classes.safetensors", "nogrid.safetensors"]


def test_folders_are_registered_once_with_their_extensions():
    import folder_paths

    before = {key: list(folder_paths.get_folder_paths(key)) for key in ("ar_models", "ar_drafters")}
    extension.host.register_folders()
    for key, paths in before.items():
        assert folder_paths.get_folder_paths(key) == paths
        assert ".safetensors" in folder_paths.folder_names_and_paths[key][1]
