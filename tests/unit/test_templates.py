"""How templates lie on the canvas, read from their files: what tests/browser measures in the page, and more than it."""

import itertools
import json
import re
from collections import Counter
from pathlib import Path

import pytest

LOADER = "SpecARLoadCheckpoint"
WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows"
TEMPLATES = sorted(WORKFLOWS.glob("*.json"))
BLUEPRINTS = sorted((WORKFLOWS.parent / "subgraphs").glob("*.json"))
TITLE = 30  # height of a node's title bar, which is above its position
SIDEBAR, BARS = 70, 110  # ComfyUI's own, on the left and at the top, in pixels of the page
LETTER = 14  # width of a letter of a group's title at its font size of 24
SLOT = 20  # distance of sockets
READABLE = 0.6  # at smaller scales, the canvas of older front ends leaves out widgets and text
LEAST = 0.575  # of templates that beginners do not start with: 1.58.1 leaves them out below 8 of a text's 14 pixels
BEGINNERS = range(1, 15)
FOUR = "03 Compare methods"  # four open samplers, their images and a chart: they need more room
WINDOW = 1600, 1000  # of a browser, in pixels
FITTED, MARGIN = 0.75, 10  # share of it that the front end fits a template into, and what it adds on each side

Box = tuple[float, float, float, float]  # left, top, right, bottom


@pytest.fixture(params=TEMPLATES, ids=lambda path: path.stem)
def graph(request) -> dict:
    return json.loads(request.param.read_text(encoding="utf-8"))


def collapsed(node: dict) -> bool:
    return node["flags"].get("collapsed", False)


def box(node: dict) -> Box:
    """A collapsed node is at most as wide as open: its title, which is cut off there."""
    (x, y), (width, height) = node["pos"], node["size"]
    return x, y - TITLE, x + width, y + (0 if collapsed(node) else height)


def socket(node: dict, slot: int) -> float:
    """Distance from the top of the canvas; all sockets of a collapsed node are in the middle of its title."""
    return node["pos"][1] + (-TITLE / 2 if collapsed(node) else SLOT * slot)


def fitted_scale(graph: dict) -> float:
    """The scale at which the template browser opens it: its front end (1.58.1, fitToBounds) fits the nodes."""
    boxes = [box(node) for node in graph["nodes"]]
    sides = [max(each[axis + 2] for each in boxes) - min(each[axis] for each in boxes) for axis in (0, 1)]
    return min(FITTED * window / (side + 2 * MARGIN) for window, side in zip(WINDOW, sides, strict=True))


def frame(group: dict) -> Box:
    x, y, width, height = group["bounding"]
    return x, y, x + width, y + height


def overlap(a: Box, b: Box) -> bool:
    return min(a[2], b[2]) > max(a[0], b[0]) and min(a[3], b[3]) > max(a[1], b[1])


def contains(outer: Box, inner: Box) -> bool:
    return outer[0] <= inner[0] and outer[1] <= inner[1] and outer[2] >= inner[2] and outer[3] >= inner[3]


def wires(graph: dict) -> list[tuple[dict, int, dict, int]]:
    """Source, output, target and input of every wire."""
    nodes = {node["id"]: node for node in graph["nodes"]}
    return [(nodes[source], output, nodes[target], slot) for _, source, output, target, slot, _ in graph["links"]]


def test_nodes_and_groups_do_not_overlap(graph):
    for boxes in ([box(node) for node in graph["nodes"]], [frame(group) for group in graph["groups"]]):
        assert not [pair for pair in itertools.combinations(boxes, 2) if overlap(*pair)]


@pytest.mark.parametrize("path", [*TEMPLATES, *BLUEPRINTS], ids=lambda path: path.stem)
def test_nodes_inside_of_a_subgraph_do_not_overlap(path):
    for subgraph in json.loads(path.read_text(encoding="utf-8")).get("definitions", {"subgraphs": []})["subgraphs"]:
        pairs = itertools.combinations(map(box, subgraph["nodes"]), 2)
        assert not [pair for pair in pairs if overlap(*pair)], subgraph["name"]


@pytest.mark.parametrize("path", [*TEMPLATES, *BLUEPRINTS], ids=lambda path: path.stem)
def test_the_prompt_of_a_subgraph_is_an_input_and_nothing_else(path):
    """Named among its proxyWidgets too, front end 1.32.9 draws it over the outputs."""
    graph = json.loads(path.read_text(encoding="utf-8"))
    for subgraph in graph.get("definitions", {"subgraphs": []})["subgraphs"]:
        [node] = [node for node in graph["nodes"] if node["type"] == subgraph["id"]]
        assert "text" in [each["name"] for each in subgraph["inputs"]]
        assert "text" not in [name for _, name in node["properties"]["proxyWidgets"]]


@pytest.mark.parametrize("path", [*TEMPLATES, *BLUEPRINTS], ids=lambda path: path.stem)
def test_the_widgets_of_a_subgraph_have_names_of_their_own(path):
    """Of two proxies with one name, front end 1.58.1 keeps the first. An input has the name that it gets."""
    graph = json.loads(path.read_text(encoding="utf-8"))
    for subgraph in graph.get("definitions", {"subgraphs": []})["subgraphs"]:
        [node] = [node for node in graph["nodes"] if node["type"] == subgraph["id"]]
        proxies = [name for _, name in node["properties"]["proxyWidgets"]]
        assert len(proxies) == len({*proxies})
        assert [each["name"] for each in node["inputs"]] == [each["name"] for each in subgraph["inputs"]]
        inside = {each["id"]: each for each in subgraph["nodes"]}
        for link in subgraph["links"]:
            if link["target_id"] in inside:
                assert inside[link["target_id"]]["inputs"][link["target_slot"]]["link"] == link["id"]


def test_every_node_but_the_note_is_inside_of_a_group(graph):
    frames = [frame(group) for group in graph["groups"]]
    notes = [node for node in graph["nodes"] if node["type"] == "MarkdownNote"]
    assert len(notes) == 1 and not any(overlap(box(notes[0]), each) for each in frames)
    outside = [node["type"] for node in graph["nodes"] if not any(contains(each, box(node)) for each in frames)]
    assert outside == ["MarkdownNote"]


def test_notes_have_no_inline_code(graph):
    """The new renderer writes it in blue on dark blue."""
    assert not [node for node in graph["nodes"] if node["type"] == "MarkdownNote" and "`" in node["widgets_values"][0]]


def test_groups_have_colours_and_titles_that_fit(graph):
    for group in graph["groups"]:
        assert group["color"].startswith("#") and len(group["title"]) * LETTER <= group["bounding"][2], group["title"]


def test_wires_lead_to_the_right_or_down_their_column(graph):
    for source, _, target, _ in wires(graph):
        right, below = target["pos"][0] >= box(source)[2], box(target)[1] >= box(source)[3]
        assert right or below and abs(target["pos"][0] - source["pos"][0]) < 100, (source["type"], target["type"])


def test_wires_from_one_column_to_another_do_not_cross(graph):
    """But those of the loader, and of outputs with several wires: three that lead to the same three nodes have to."""
    drawn = [wire for wire in wires(graph) if wire[0]["type"] != LOADER and wire[2]["pos"][0] >= box(wire[0])[2]]
    count = Counter((source["id"], output) for source, output, *_ in wires(graph))
    lines = [
        ((box(source)[2], socket(source, output)), (target["pos"][0], socket(target, slot)))
        for source, output, target, slot in drawn
        if count[source["id"], output] == 1
    ]
    assert not [pair for pair in itertools.combinations(lines, 2) if cross(*pair)]


def cross(first: tuple, second: tuple) -> bool:
    """Whether two straight lines have a point in common, other than an end."""

    def side(line: tuple, point: tuple) -> float:
        (x, y), (u, v) = line
        return (u - x) * (point[1] - y) - (v - y) * (point[0] - x)

    return all(side(a, b[0]) * side(a, b[1]) < 0 for a, b in ((first, second), (second, first)))


@pytest.mark.parametrize("path", [*TEMPLATES, *BLUEPRINTS], ids=lambda path: path.stem)
def test_nodes_name_no_pack_that_the_registry_does_not_have(path):
    """ComfyUI Manager offers to install the pack of that name."""
    assert set(re.findall(r'"cnr_id": "([^"]*)"', path.read_text(encoding="utf-8"))) <= {"comfy-core"}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_the_template_browser_opens_it_readable(path):
    number = int(path.stem.split()[0])
    least = READABLE if number in BEGINNERS and path.stem != FOUR else LEAST
    assert fitted_scale(json.loads(path.read_text(encoding="utf-8"))) >= least


def test_the_first_view_is_readable_and_clear_of_the_bars(graph):
    view = graph["extra"]["ds"]
    assert view["scale"] >= READABLE
    for left, top, _, _ in [*map(box, graph["nodes"]), *map(frame, graph["groups"])]:
        assert (left + view["offset"][0]) * view["scale"] >= SIDEBAR
        assert (top + view["offset"][1]) * view["scale"] >= BARS
