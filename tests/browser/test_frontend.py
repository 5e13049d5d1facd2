"""The frontend in a real Chromium: templates open, run, and show their images, without an error in the console."""

import json
import os
import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from .pages import (
    BY_CHOICE,
    FINISHED,
    RENDERERS,
    ROOT,
    SCREENSHOTS,
    Problems,
    load,
    missing_models,
    open_page,
    queue,
    run,
    screenshot,
    set_widget,
    setting,
    still,
    take_messages,
)

pytestmark = pytest.mark.browser

TEMPLATES = sorted((ROOT / "workflows").glob("*.json"))
BLUEPRINTS = sorted((ROOT / "subgraphs").glob("*.json"))
DEFAULT = "06 Race"

# The images that a node shows, with either renderer.
IMAGES = """type => app.graph._nodes.filter(node => node.type === type).map(node => [
    ...(node.imgs ?? []), ...document.querySelectorAll(`[data-node-id="${node.id}"] img`)])"""

# Frontend 1.32.9 forgets what packs call their nodes when it loads a language (1.58.1 does not): remind it.
REMIND = """async () => {
    const { provides } = document.getElementById('vue-app').__vue_app__._context;
    const words = Object.getOwnPropertySymbols(provides).map(key => provides[key]?.global)
        .find(each => each?.mergeLocaleMessage);
    const packs = await (await app.api.fetchApi('/i18n')).json();
    for (const [language, messages] of Object.entries(packs)) words.mergeLocaleMessage(language, messages);
    await app.registerNodes();
}"""


# The nodes that the front end marks, but for loaders of a file that is not here: 1.58.1 marks those.
MARKED = """() => app.graph._nodes.filter(node => node.has_errors && !node.widgets?.some(widget =>
    widget.type === 'combo' && !widget.options.values.includes(widget.value))).map(node => node.type)"""


def api_form(prompt: dict, shipped: dict) -> dict:
    """Classes and inputs of a prompt, without those that a newer core has added to its own nodes since the shipped one
    was written (it fills them in itself)."""

    def inputs(key: str, node: dict) -> dict:
        known = node["inputs"] if node["class_type"].startswith("SpecAR") else shipped[key]["inputs"]
        return {name: value for name, value in node["inputs"].items() if name in known}

    return {key: (node["class_type"], inputs(key, node)) for key, node in prompt.items()}


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_loads_and_equals_its_api_version(page, template):
    load(page, template)
    assert page.evaluate(MARKED) == []
    prompt = page.evaluate("async () => (await app.graphToPrompt()).output")
    shipped = json.loads((template.parent / "api" / template.name).read_text("utf-8"))
    assert api_form(prompt, shipped) == api_form(shipped, shipped)


REPORTS = """() => app.graph._nodes.filter(node => node.properties.download)
    .map(node => node.widgets.find(widget => widget.name === 'report_text')?.value)"""


@pytest.mark.parametrize("template", sorted((ROOT / "workflows").glob("* (download).json")), ids=lambda path: path.stem)
def test_template_names_the_models_that_are_missing(page, template):
    """The page what it can; the nodes all that is to be downloaded."""
    load(page, template, missing_models=True)
    loaders = [node for node in json.loads(template.read_text("utf-8"))["nodes"] if "download" in node["properties"]]
    for loader, report in zip(loaders, page.evaluate(REPORTS), strict=True):
        first, *places = report.splitlines()
        name, download = loader["widgets_values"][0], loader["properties"]["download"]
        assert first == f"Missing: {(os.path.dirname(name) or name)}. {download.split(': ')[0]}:", "what, and its size"
        assert places == download.split(": ", 1)[1].split("; ")
    expected = expected_missing(page, template)
    assert missing_models(page, template.stem, some=bool(expected)) == expected


def expected_missing(page: Page, template: Path) -> dict[str, bool]:
    """What the front end can name of a template: 1.32.9 all that is listed in it, and it downloads safetensors alone;
    1.58.1 what a node has chosen, so of several files the first, but pickles too, except .bin."""
    graph = json.loads(template.read_text("utf-8"))
    models = {f"{model['directory']} / {model['name']}": model["name"] for model in graph["models"]}
    if not page.evaluate(BY_CHOICE):
        return {label: name.endswith(".safetensors") for label, name in models.items()}
    chosen = [value for node in graph["nodes"] for value in node.get("widgets_values", [])]
    return {label: not name.endswith(".bin") for label, name in models.items() if name in chosen}


CHOOSE = """([listed, value]) => {
    app.graph.clear();
    const node = LiteGraph.createNode('SpecARLoadCheckpoint');
    app.graph.add(node);
    const graph = app.graph.serialize();
    graph.nodes[0].widgets_values[0] = value;
    const list = LiteGraph.registered_node_types.SpecARLoadCheckpoint.nodeData.input.required.model_name;
    const options = Array.isArray(list[0]) ? list[0] : list[1].options;
    options.push(...listed);
    return app.loadGraphData(graph).then(() => {
        options.splice(-listed.length);
        return app.graph._nodes[0].widgets[0].value;
    });
}"""


@pytest.mark.parametrize("value", ["a/Model", "a/Model/model.safetensors", "a\\Model", "a/Model/pytorch_model.bin"])
def test_a_loader_names_a_model_as_its_list_does(page, value):
    """As workflows of before and of other systems do not; and where another release of it lies in its folder."""
    listed = ["a/Model/model-00001-of-00002.safetensors", "a/other/model.safetensors"]
    assert page.evaluate(CHOOSE, [listed, value]) == listed[0]
    assert page.evaluate(CHOOSE, [listed, "a/Mod"]) == "a/Mod"


def test_template_dialog_finds_a_template_and_opens_it(page):
    page.evaluate("() => app.graph.clear()")
    page.evaluate("() => app.extensionManager.command.execute('Comfy.BrowseTemplates')")
    dialog = page.get_by_role("dialog")
    titles = dialog.locator("h3", has_text=re.compile(r"^\d\d "))
    titles.first.wait_for()
    some = titles.count()  # in the file system's order
    dialog.get_by_role("textbox").first.fill(DEFAULT)
    page.wait_for_function("before => document.querySelectorAll('[role=dialog] h3').length < before", arg=some)
    dialog.get_by_text(DEFAULT, exact=True).first.click()
    page.wait_for_function("() => app.graph._nodes.filter(node => node.type === 'SpecARSampler').length === 2")


PREVIEW_EVERY_IMAGE = """() => {
    const [node] = app.graph._nodes;
    node.outputs.forEach((output, index) => {
        if (output.type !== 'IMAGE') return;
        const preview = LiteGraph.createNode('PreviewImage');
        preview.pos = [node.pos[0] + 500, node.pos[1] + 300 * index];
        app.graph.add(preview);
        node.connect(index, preview, 0);
    });
}"""


def test_blueprints_are_found_by_their_names_and_their_nodes_generate(own_page):
    for blueprint in BLUEPRINTS:
        place_and_run(own_page, blueprint)


def place_and_run(page: Page, blueprint: Path) -> None:
    page.evaluate("() => app.graph.clear()")
    page.evaluate("() => app.extensionManager.command.execute('Workspace.SearchBox.Toggle')")  # as a double click does
    page.locator("input:focus").wait_for()
    page.keyboard.type(blueprint.stem)
    option = page.locator("[role=option]", has_text=blueprint.stem).first
    option.wait_for()
    still(page, "() => [...document.querySelectorAll('[role=option]')].map(option => option.innerText)")
    option.click()
    page.wait_for_function("() => app.graph._nodes.length === 1")
    page.mouse.click(900, 400)  # newer front ends put the node where one clicks
    page.evaluate(PREVIEW_EVERY_IMAGE)
    run(page)
    page.wait_for_function(f"""() => {{
        const shown = ({IMAGES})('PreviewImage').flat();
        return shown.length && shown.every(image => image.complete && image.naturalWidth > 0);
    }}""")
    screenshot(page, f"blueprint-{blueprint.stem}")


TWO = ROOT / "subgraphs/Compare two samplers.json"
SET_ON_SUBGRAPH = """values => {
    const node = app.graph._nodes.find(node => node.subgraph);
    for (const [label, value] of Object.entries(values)) {
        const slot = node.inputs.find(input => (input.label ?? input.name) === label);
        node.widgets.find(widget => widget.name === slot.name).value = value;
    }
}"""


def test_what_is_set_on_a_subgraph_reaches_the_nodes_inside(page):
    load(page, TWO)
    page.evaluate(SET_ON_SUBGRAPH, {"prompt": "a tree"})
    prompt = page.evaluate("async () => (await app.graphToPrompt()).output")
    found = {node["_meta"]["title"]: node["inputs"] for node in prompt.values()}
    assert found["Prompt"]["text"] == "a tree"
    screenshot(page, "subgraph")


MESSAGE = ".p-toast-message, [data-testid=toast]"


def test_words_that_the_model_ignores_inside_a_subgraph_are_a_message(own_page):
    page = own_page
    load(page, TWO)
    page.evaluate(SET_ON_SUBGRAPH, {"prompt": "an aple, apple"})
    queue(page)
    page.locator(MESSAGE).first.wait_for()
    page.evaluate("() => app.api.interrupt()")
    page.wait_for_function(FINISHED)
    assert take_messages(page) == ["The model ignores these words: aple (apple?)."]


NAMED_FOR_APP_MODE = """({inputs, outputs}) => [
    ...inputs.map(([id, name]) => app.graph.getNodeById(id)?.widgets.find(widget => widget.name === name)?.name),
    ...outputs.map(id => app.graph.getNodeById(id)?.type)]"""
TOGGLE_APP_MODE = "() => app.extensionManager.command.execute('Comfy.ToggleLinear')"

ADD_TO_PROMPTS = """words => app.graph._nodes.filter(node => node.type === 'CLIPTextEncode')
    .forEach(node => { node.widgets[0].value += words; })"""


KEEP_MESSAGES = """() => {
    window.messages = [];
    new MutationObserver(changes => {
        for (const node of changes.flatMap(change => [...change.addedNodes])) window.messages.push(node.textContent);
    }).observe(document.body, { childList: true, subtree: true });
}"""


def test_the_first_templates_are_apps_that_run(own_page):
    page = own_page
    for template in reversed(TEMPLATES[:3]):
        load(page, template)
        shown = json.loads(template.read_text("utf-8"))["extra"]["linearData"]
        assert all(page.evaluate(NAMED_FOR_APP_MODE, shown))
    if not page.evaluate(BY_CHOICE):  # 1.32.9 has no such mode and opens the graph
        return
    setting(page, "Comfy.OnboardingCoachmarks.Seen", ["appMode", "firstRun"])  # tours, which would cover the page
    page.evaluate(ADD_TO_PROMPTS, " xyz")
    page.evaluate(TOGGLE_APP_MODE)
    page.locator("[data-testid=app-mode-widget-item]").first.wait_for()
    assert page.locator("[data-testid=app-mode-widget-item]").count() == len(shown["inputs"])
    page.evaluate("() => { window.seen.length = 0; }")
    page.evaluate(KEEP_MESSAGES)  # a run may take longer than one is shown
    page.locator("[data-testid=linear-run-button] button").last.click()
    page.wait_for_function(FINISHED)
    assert "execution_success" in page.evaluate("() => window.seen.map(event => event.name)")
    page.locator("#linearCenterPanel img").first.wait_for()
    notice = "The model ignores these words: xyz. Try: watermelon, 3d, brown background. All 68 words: AR Model Info."
    page.wait_for_function("notice => window.messages.some(text => text.includes(notice))", arg=notice)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"app-{template.stem}.png")


# Images of a node are loaded when it is drawn, so all nodes have to be in view.
FIT = "() => { Object.assign(app.canvas.ds, {scale: 0.3, offset: [200, 300]}); app.canvas.setDirty(true, true); }"


def test_the_map_replaces_the_picture_that_an_earlier_graph_left_under_its_id(own_page, tmp_path):
    """Newer front ends draw what they have of a node's id at once when a graph is loaded over another."""
    page, template = own_page, ROOT / "workflows/07 Acceptance map.json"
    [number] = (
        node["id"] for node in json.loads(template.read_text("utf-8"))["nodes"] if node["type"] == "SpecARAcceptanceMap"
    )
    graph = json.loads(TEMPLATES[0].read_text("utf-8"))
    [saved] = (node["id"] for node in graph["nodes"] if node["type"] == "SaveImage")
    ids = {saved: number} | {node["id"]: node["id"] + 100 for node in graph["nodes"] if node["id"] != saved}
    for node in graph["nodes"]:
        node["id"] = ids[node["id"]]
    for link in graph["links"]:
        link[1], link[3] = ids[link[1]], ids[link[3]]
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(graph), encoding="utf-8")
    for each in (earlier, template):
        load(page, each)
        page.evaluate(FIT)
        page.wait_for_timeout(500)  # for drawing it
        run(page)
    names = "() => nodeOf('SpecARAcceptanceMap').widgets.map(widget => widget.name).join()"
    page.wait_for_function(f"wanted => ({names})() === wanted", arg="metric,opacity,specar_result,specar_view")


@pytest.mark.parametrize("renderer", RENDERERS, indirect=True)
def test_template_runs_and_shows_images_and_map(page, renderer):
    load(page, ROOT / "workflows/07 Acceptance map.json")
    page.evaluate(FIT)
    for batch in (1, 8, 64):  # a run shows previews if it takes more than a moment
        set_widget(page, "SpecAREmptyLatent", "batch_size", batch)
        if "b_preview_with_metadata" in run(page) or renderer == "vue":  # which has the other's results
            break
    else:
        pytest.fail("no preview arrived")
    complete = f"""type => {{
        const shown = ({IMAGES})(type);
        return shown.length && shown.every(images => images.length
            && images.every(picture => picture.complete && picture.naturalWidth > 0));
    }}"""
    for kind in ("SaveImage", "SpecARAcceptanceMap"):
        page.wait_for_function(complete, arg=kind)
    screenshot(page, f"image_and_map-{renderer}")


def test_help_page_of_a_node_opens_with_its_image(page):
    load(page, ROOT / "workflows/07 Acceptance map.json")
    page.evaluate("""() => {
        app.canvas.selectNode(nodeOf('SpecARSJDSampler'));
        app.canvas.centerOnNode(nodeOf('SpecARSJDSampler'));
    }""")
    page.locator("[data-testid=info-button], button:has(.icon-\\[lucide--info\\])").first.click()
    help_text = (ROOT / "web/docs/SpecARSJDSampler/en.md").read_text("utf-8")
    heading = next(line.lstrip("# ").strip() for line in help_text.splitlines() if line.startswith("#"))
    page.get_by_role("heading", name=heading).first.wait_for()
    page.wait_for_function("""() => [...document.images].some(image => image.src.includes('SpecARSJDSampler/picture')
        && image.complete && image.naturalWidth > 0)""")
    screenshot(page, "help")


def open_in_chinese(browser: Browser, comfy, without: str | None = None) -> tuple[Page, Problems]:
    language = f"{comfy.url}/api/settings/Comfy.Locale"
    requests = browser.new_context().request
    requests.post(language, data=json.dumps("zh"))
    opened = open_page(browser, comfy.url, without)
    requests.post(language, data=json.dumps("en"))
    return opened


@pytest.mark.whole
def test_runs_charts_maps_and_notices_are_told_in_chinese(browser, comfy):
    page, problems = open_in_chinese(browser, comfy)
    load(page, ROOT / "workflows/19 Compare three methods.json")
    page.evaluate(ADD_TO_PROMPTS, " xyz")
    page.evaluate(FIT)
    run(page)
    for part, words in ((".specar-result", "前向次数为 1/"), (".specar-chart", "模型前向次数")):
        page.locator(part, has_text=words).first.wait_for()
    assert any("模型忽略这些词：xyz。可以试试：" in text for text in page.locator(".specar-notices").all_inner_texts())
    load(page, ROOT / "workflows/07 Acceptance map.json")
    page.evaluate(FIT)
    run(page)
    for part, words in ((".specar-legend", "接受的草稿"), (".specar-text", "接受方式：精确")):
        page.locator(part, has_text=words).first.wait_for()
    screenshot(page, "chinese")
    assert not problems
    page.close()


def test_a_template_opens_in_chinese(browser, comfy):
    page, problems = open_in_chinese(browser, comfy)
    load(page, ROOT / "workflows/20 SimpleAR (download).json")
    note = "() => nodeOf('MarkdownNote').widgets[0].value"
    assert "按 bf16 计算：GPU 上权重 0.8 GB" in page.evaluate(note)
    titles = page.evaluate("() => app.graph.serialize().nodes.map(node => node.title)")
    assert {"提示词", "请先下载"} <= {*titles} and not {"Prompt", "Download first"} & {*titles}
    assert any("的全部文件，放入 models/ar_models/SimpleAR" in text for text in page.evaluate(REPORTS))
    assert not page.evaluate("() => app.extensionManager.workflow.activeWorkflow.isModified")
    assert not problems
    page.close()


def test_without_its_javascript_and_in_chinese(browser, comfy):
    """Two things that need a page of their own: nodes have their Chinese names, and without web/js the core draws."""
    page, problems = open_in_chinese(browser, comfy, without="**/extensions/*SpecAR*/js/*.js")
    page.evaluate(REMIND)
    names = json.loads((ROOT / "locales/zh/nodeDefs.json").read_text("utf-8"))
    titles = page.evaluate("""() => Object.fromEntries(Object.entries(LiteGraph.registered_node_types)
        .filter(([name]) => name.startsWith('SpecAR')).map(([name, type]) => [name, type.title]))""")
    assert titles and titles == {name: names[name]["display_name"] for name in titles}

    assert problems and all("/js/" in text for text in problems), problems
    problems.clear()
    load(page, ROOT / "workflows/07 Acceptance map.json")
    run(page)
    page.wait_for_function("""() => {
        const node = nodeOf('SpecARAcceptanceMap');
        return node.imgs?.length === 1 && node.imgs[0].naturalWidth > 0
            && node.widgets.map(widget => widget.name).join() === 'metric,opacity,$$canvas-image-preview';
    }""")
    # What would have listened to our messages is missing.
    assert all("Unknown message type specar." in text for text in problems), problems
    screenshot(page, "chinese_without_javascript")
    page.close()
