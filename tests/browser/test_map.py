"""Acceptance Map on its node: the image, the numbers of the token pointed at, and the report, with both renderers."""

from pathlib import Path

import pytest
from comfyui_specar.samplers.trace import Source, Trace
from comfyui_specar.samplers.trace_files import load_trace
from playwright.sync_api import Page

from .pages import RENDERERS, ROOT, SCREENSHOTS, load, run, screenshot, set_widget, still

pytestmark = [pytest.mark.browser, pytest.mark.whole]

MAP, SJD, CONTINUOUS = "SpecARAcceptanceMap", "07 Acceptance map", "17 Continuous tokens"
NAMES = {  # record of the trace -> what the map calls it
    "finalised_at": "decided in pass",
    "depth": "position in the draft",
    "p": "p of the token",
    "q": "q of the draft token",
    "ratio": "p/q of the draft token",
    "refinements": "passes as a draft token",
    "entropy": "entropy, nats",
    "top1": "top-1 probability",
    "order": "position in the order",
    "block": "drafted in round",
    "distance": "distance",
    "log_ratio": "log ratio",
}
OF_GUESSES = ("depth", "q", "ratio", "block", "distance", "log_ratio")  # shown where a guess was judged
PARTS = "[...document.querySelectorAll('.specar-map')].filter(map => map.checkVisibility())"
IS_SHOWN = (
    f"() => {PARTS}.length && {PARTS}.every(map => map.querySelector('img').naturalWidth && "
    "map.querySelector('.specar-hint')?.textContent === 'Point at a token to see its values.')"
)


SAVE_TRACE = """() => {
    if (app.graph._nodes.some(node => node.type === 'SpecARSaveTrace')) return;
    const save = LiteGraph.createNode('SpecARSaveTrace');
    save.pos = [0, 1000];
    app.graph.add(save);
    app.graph._nodes.find(node => node.outputs?.[1]?.type === 'AR_TRACE').connect(1, save, 0);
}"""


def open_and_run(page: Page, name: str, batch: int = 1) -> None:
    load(page, ROOT / "workflows" / f"{name}.json", name=name)
    page.evaluate(SAVE_TRACE)
    set_widget(page, "SpecAREmptyLatent", "batch_size", batch)
    run(page)
    page.wait_for_function(IS_SHOWN)
    come_near(page)


def come_near(page: Page) -> None:
    """The first map in the middle of the window, at its own size."""
    page.evaluate("""() => {
        const node = nodeOf('SpecARAcceptanceMap');
        app.canvas.ds.scale = 0.9;
        app.canvas.ds.offset = [620 - node.pos[0], 110 - node.pos[1]];
        app.canvas.setDirty(true, true);
    }""")
    still(page, "() => document.querySelector('.specar-map')?.getBoundingClientRect()")


def newest_trace(output: Path) -> Trace:
    return load_trace(max((output / "specar").glob("*trace_*.safetensors"), key=lambda path: path.stat().st_mtime))


def point_at(page: Page, trace: Trace, row: int, column: int) -> None:
    """Moves the mouse over a token of the first map."""
    x, y = page.evaluate(
        """([row, column, rows, cols]) => {
        const box = document.querySelector('.specar-sheet').getBoundingClientRect();
        return [box.x + (column + 0.5) / cols * box.width, box.y + (row + 0.5) / rows * box.height];
    }""",
        [row, column, trace.rows, trace.cols],
    )
    page.mouse.move(x, y)


def text(page: Page) -> str:
    return page.locator(".specar-text").first.inner_text()


def tooltip(page: Page) -> tuple[str, dict[str, str]]:
    """Title and numbers of the first map."""
    pairs = page.locator(".specar-text").first.locator(".specar-pair")
    return (
        page.locator(".specar-title").first.inner_text(),
        dict(zip(pairs.locator("dt").all_inner_texts(), pairs.locator("dd").all_inner_texts(), strict=True)),
    )


def assert_tells(page: Page, trace: Trace, image: int, row: int, column: int) -> None:
    page.wait_for_function(
        "place => document.querySelector('.specar-title')?.innerText.startsWith(place)",
        arg=f"row {row + 1}, column {column + 1}: ",
    )
    title, pairs = tooltip(page)
    values = {name: trace.grid(name)[image, row, column].item() for name in trace.positions}
    assert title.endswith("resampled after rejection") == (values["source"] == Source.RESIDUAL)
    expected = {
        NAMES[name]: value
        for name, value in values.items()
        if name in NAMES and (values["depth"] or name not in OF_GUESSES)
    }
    assert set(expected) <= set(pairs) <= set(expected) | {"tries to resample", "drift bound"}
    assert {name: float(pairs[name]) for name in expected} == pytest.approx(expected, rel=6e-4)


@pytest.mark.parametrize(
    ("renderer", "name"), [("canvas", SJD), ("vue", SJD), ("vue", CONTINUOUS)], indirect=["renderer"]
)
def test_pointing_at_a_token_shows_its_numbers(page, comfy, renderer, name):
    open_and_run(page, name, batch=2)
    trace = newest_trace(comfy.output)
    report = text(page)
    assert f"seed {trace.totals['seed']}" in report and "passes for" in report
    last = trace.rows - 1, trace.cols - 1
    for row, column in ((0, 0), (trace.rows // 2, 1), last):
        point_at(page, trace, row, column)
        assert_tells(page, trace, 0, row, column)
    page.screenshot(path=SCREENSHOTS / f"map_{name}-{renderer}.png")

    page.locator(".specar-turn").nth(1).click()  # to the second image
    page.wait_for_function(IS_SHOWN)
    assert page.locator(".specar-page").first.inner_text() == "image 2 of 2"
    assert text(page) == report
    point_at(page, trace, *last)
    assert_tells(page, trace, 1, *last)


@pytest.mark.parametrize("renderer", RENDERERS, indirect=True)
def test_the_map_is_shown_once_and_kept_nowhere_and_arrow_keys_walk_over_its_tokens(page, comfy, renderer):
    open_and_run(page, SJD)
    widgets, images, saved = page.evaluate("""() => {
        const node = nodeOf('SpecARAcceptanceMap');
        const elsewhere = [...document.querySelectorAll(`[data-node-id="${node.id}"] img`)];
        return [node.widgets.map(widget => widget.name), elsewhere.filter(image => image.checkVisibility()).length,
            node.serialize().widgets_values];
    }""")
    assert widgets == ["metric", "opacity", "specar_result", "specar_view"] and saved == ["source", 0.5]
    assert images == int(renderer == "vue")
    prompt = page.evaluate("async () => (await app.graphToPrompt()).output")
    [inputs] = [set(node["inputs"]) for node in prompt.values() if node["class_type"] == MAP]
    assert inputs == {"metric", "opacity", "trace", "image"}

    trace = newest_trace(comfy.output)
    place = "type => [...nodeOf(type).pos]"
    before = page.evaluate(place, MAP)
    page.evaluate("type => app.canvas.selectNode(nodeOf(type))", MAP)
    point_at(page, trace, 1, trace.cols - 2)
    page.mouse.down()
    page.mouse.up()
    for key in ("ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert_tells(page, trace, 0, 2, trace.cols - 1)
    page.keyboard.press("ArrowRight")  # over the edge
    assert_tells(page, trace, 0, 2, 0)
    assert page.evaluate(place, MAP) == before, "arrow keys move a node that is selected"


def test_the_map_comes_back_with_its_workflow_unless_the_server_has_lost_it(page, opened, comfy):
    open_and_run(page, SJD, batch=3)  # not cached: of results sooner than its queue answers the frontend keeps none
    report = text(page)

    def switch(direction: str, maps: int) -> None:
        page.evaluate("name => app.extensionManager.command.execute(name)", f"Workspace.{direction}OpenedWorkflow")
        page.wait_for_function("maps => document.querySelectorAll('.specar-map').length === maps", arg=maps)
        if maps:
            come_near(page)

    load(page, ROOT / "workflows/22 LlamaGen, classes (download).json", name="other")
    switch("Previous", maps=1)
    page.wait_for_function(IS_SHOWN)
    assert text(page) == report
    switch("Next", maps=0)
    for file in (comfy.base / "temp").iterdir():
        file.unlink()
    switch("Previous", maps=1)
    page.get_by_text("The server no longer has this map").wait_for()
    assert report.splitlines()[-1] in text(page)
    _, problems = opened
    missing = [text for text in problems if "404" in text and "/view?" in text]
    assert 1 <= len(missing) == len(problems) <= 2, problems  # the image and its numbers, at most once each
    problems.clear()


def test_a_collapsed_or_removed_node_takes_its_map_along(page):
    open_and_run(page, CONTINUOUS)
    for maps in (0, 1):  # and unfolded again
        page.evaluate("type => nodeOf(type).collapse()", MAP)
        page.wait_for_function(f"() => {PARTS}.length === {maps}")
    page.evaluate("type => app.graph.remove(nodeOf(type))", MAP)
    page.wait_for_function(f"() => {PARTS}.length === 0")
    screenshot(page, "map_collapsed_and_removed")
