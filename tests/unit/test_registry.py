"""Families and image decoders declare themselves; who adds one cannot forget a list."""

import pkgutil
from pathlib import Path

import comfyui_specar
import pytest
from comfyui_specar.model_loaders import decoders, families
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.model_loaders.files.checkpoint import open_checkpoint, weight_file

from ..support.tiny_family import declared

ROOT = Path(comfyui_specar.__file__).parent
# drafters, parts of a family, what several share
NO_FAMILIES = {"eagle", "glm_image_diffusion", "glm_image_sources", "janus_reading", "language_models"}


def modules(package) -> set[str]:
    return {module.name for module in pkgutil.iter_modules(package.__path__)}


def declared_in(entries) -> list[str]:
    """The modules of which the loaders of these entries are."""
    return [entry.load.__module__.rpartition(".")[2] for entry in entries]


def test_every_module_is_listed_once():
    assert sorted(declared_in(families.FAMILIES)) == sorted(modules(families) - NO_FAMILIES)
    assert sorted(declared_in(decoders.KINDS)) == sorted(modules(decoders))


@pytest.mark.parametrize("continuous", [False, True])
def test_every_family_has_a_tiny_model_that_it_alone_recognises(tmp_path, continuous):
    own = [family for family in families.FAMILIES if family.continuous == continuous]
    tiny = declared("TINY", continuous)
    assert tiny.keys() == {name for family in own for name in family.decoders}
    for name, model in tiny.items():
        (tmp_path / name).mkdir()
        path = model.write(tmp_path / name)
        tensors = open_checkpoint(weight_file(path)).tensors
        assert [name in family.decoders for family in families.FAMILIES if family.recognise(tensors)] == [True], name
        loaded = load_model(path)
        assert loaded.family == name and (loaded.tokens == "vectors") == continuous


@pytest.mark.parametrize("document", ["README.md", "docs/README.zh-CN.md", "docs/models.md"])
def test_the_documents_name_every_family(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    assert [label for family in families.FAMILIES for label in family.labels if label not in text] == []
