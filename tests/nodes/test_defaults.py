"""One set of defaults: a method of the headless interface without arguments is that of its node as it is dropped on the
canvas, of a job without settings, and what docs/api.md says."""

import inspect
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from comfyui_specar import api
from comfyui_specar.batch.model_worker import RECIPES
from comfyui_specar.nodes import continuous, samplers, tree_samplers
from comfyui_specar.samplers.methods.continuous import ContinuousSpeculative
from comfyui_specar.samplers.methods.continuous_next_token import ContinuousNextToken
from comfyui_specar.samplers.methods.jacobi import AUTOMATIC
from comfyui_specar.samplers.registry import PUBLISHED
from comfyui_specar.tools.benchmarks.runs import cases, drafter_cases
from comfyui_specar.tools.benchmarks.subjects import DEFAULTS

pytestmark = pytest.mark.once

DRAFTER = object()
METHODS = api.methods
MADE = {  # node -> the same in Python
    samplers.ARSampler: METHODS.SJD(),
    samplers.NextTokenSampler: METHODS.NextToken(),
    samplers.SJDSampler: METHODS.SJD(),
    tree_samplers.DraftTreeSampler: METHODS.DraftTree(DRAFTER),
    tree_samplers.LanternSampler: METHODS.LanternPP(DRAFTER),
    tree_samplers.CoolSDSampler: METHODS.CoolSD(DRAFTER),
    tree_samplers.ADTTreeSampler: METHODS.ADTTree(DRAFTER),
    tree_samplers.VVSSampler: METHODS.VVS(DRAFTER),
    continuous.ContinuousNextTokenSampler: ContinuousNextToken(),
    continuous.ContinuousSampler: ContinuousSpeculative(DRAFTER),
}
API = (Path(__file__).parents[2] / "docs" / "api.md").read_text("utf-8")


def python(text: str, **names):
    """The value of a line of the page."""
    return eval(text, vars(api.structures) | vars(api.rules) | names | {"drafter": DRAFTER})  # noqa: S307


def widgets(node) -> dict:
    """What a node's widgets are set to when it is new, without removed ones."""
    fields = [field for field in node.define_schema().inputs if not field.extra_dict.get("hidden")]
    values = {field.id: getattr(field, "default", None) for field in fields}
    return {name: value for name, value in values.items() if value is not None}


def made(node, monkeypatch, **changed):
    """The method that a node runs with its defaults, but for what is ``changed``."""
    monkeypatch.setattr(inspect.getmodule(node), "run_method", lambda method, *_, **__: method)
    model = SimpleNamespace(model=SimpleNamespace(continuous=False))
    sockets = {"model": model, "positive": None, "latent_image": None}
    wanted = {field.id for field in node.define_schema().inputs}
    given = sockets | ({"drafter": SimpleNamespace(drafter=DRAFTER)} if "drafter" in wanted else {})
    return inspect.unwrap(node.execute.__func__)(node, **given, **widgets(node) | changed)


def test_every_sampler_is_compared():
    nodes = {
        node
        for module in (samplers, tree_samplers, continuous)
        for node in vars(module).values()
        if inspect.isclass(node) and hasattr(node, "define_schema") and node.__module__ == module.__name__
    }
    assert nodes == set(MADE)


@pytest.mark.parametrize("node", MADE, ids=lambda node: node.__name__)
def test_a_new_node_is_the_method_without_arguments(node, monkeypatch):
    assert made(node, monkeypatch) == MADE[node]


def test_what_a_choice_on_a_node_stands_for_is_in_python_too(monkeypatch):
    lantern = made(tree_samplers.LanternSampler, monkeypatch, variant=tree_samplers.LANTERN)
    assert lantern == METHODS.Lantern(DRAFTER)
    own = made(tree_samplers.ADTTreeSampler, monkeypatch, preset=tree_samplers.OWN_VALUES)
    assert own == METHODS.ADTTree(DRAFTER, pays=False)
    for option, structure in tree_samplers.STRUCTURES.items():
        built = made(tree_samplers.DraftTreeSampler, monkeypatch, structure=option).structure
        assert built == structure
    assert made(tree_samplers.DraftTreeSampler, monkeypatch, structure="chain").structure == api.structures.Chain()
    assert made(tree_samplers.DraftTreeSampler, monkeypatch, structure=tree_samplers.DYNAMIC).structure == (
        api.structures.Dynamic()
    )


def test_the_benchmarks_have_every_node_at_its_defaults():
    built = {case.name: case.method for case in (*cases((AUTOMATIC,)), *drafter_cases(DRAFTER, None))}
    jacobi = METHODS.SJD(window=AUTOMATIC)
    nodes = [METHODS.NextToken(), jacobi, replace(jacobi, reuse="threshold_paper"), METHODS.Lantern(DRAFTER)]
    nodes += [method for node, method in MADE.items() if node.__module__ == tree_samplers.__name__]
    measured = [built[name] for name in DEFAULTS]
    assert len(measured) == len(nodes) and all(method in measured for method in nodes)


def test_a_job_without_settings_is_the_method_without_arguments():
    for name, each in PUBLISHED.items():
        assert RECIPES[each.name].build(DRAFTER) == getattr(METHODS, name)(DRAFTER)
    for method in MADE.values():
        if method.name in RECIPES:
            assert RECIPES[method.name].build(DRAFTER) == method


def test_the_page_says_what_they_are():
    page = API.split("which is not always its paper's:", 1)[1].split("##", 1)[0]
    rows = re.findall(r"^\| `(.*?)` \| `(.*?)`, `(.*?)` \| `(.*?)`", page, re.MULTILINE)
    assert {call.split("(")[0] for call, *_ in rows} == {"DraftTree", *PUBLISHED}
    for call, structure, rule, published in rows:
        name = call.split("(")[0]
        build = {name: getattr(METHODS, name)}
        method = python(call, **build)
        assert (method.structure, method.rule) == (python(structure), python(rule))
        assert python(published, **build).name == method.name
    listed = re.findall("`(.*?)`", API.split("| `structure` |", 1)[1].split("\n", 1)[0])
    assert [python(text) for text in listed] == list(tree_samplers.STRUCTURES.values())
    bounds = re.search(r"`ADTTree\(drafter, initial=\.\.\., (depths=.*?)\)`", API).group(1)
    assert python(f"ADTTree({bounds})") == api.structures.ADTTree()
