"""ComfyUI's page as the tests use it: errors it reports, loading and running workflows, screenshots."""

import json
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Locator, Page

from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
SCREENSHOTS = ROOT / "output/browser"
RENDERERS = ("canvas", "vue")

# What the front end reports by itself on a fresh ComfyUI: files of a user and a templates package that are not there,
# the one error of 1.32.9 at start, look-ups of packs and of the sizes of missing models, which the server's content
# security policy blocks, and a question when the renderer is changed.
KNOWN_ERRORS = (
    "favicon.ico",
    "user.css",
    "comfy.templates.json",
    "/templates/index",
    "core workflow templates",
    "/api/userdata?dir=",
    "reading 'id'",
    "api.comfy.org",
    "huggingface.co",
    "Error fetching file size",
    "Prefer the legacy design?",
    "Proxy.onOptionSelect",  # 1.32.9: the node search closes before it has cleared its input
    "PromptExecutionError",  # of a refused prompt
    "/api/prompt)",
)

READY = """() => window.app?.graph && window.LiteGraph && app.extensionManager?.workflow?.activeWorkflow
    && 'SpecARSJDSampler' in window.LiteGraph.registered_node_types"""
# What the tests' JavaScript uses: the node of a type, and its widget of a name.
FIND = """window.nodeOf = type => app.graph._nodes.find(node => node.type === type);
    window.widgetOf = (type, name) => nodeOf(type).widgets.find(widget => widget.name === name);"""
LISTEN = """() => {
    window.seen = [];
    for (const name of ['execution_success', 'execution_error', 'execution_interrupted', 'b_preview_with_metadata'])
        app.api.addEventListener(name, event =>
            window.seen.push({name, detail: name.startsWith('b_') ? null : event.detail}));
}"""
# Front end 1.58.1 looks whether what nodes have chosen is there; 1.32.9 opens a dialog with the workflow's own list.
BY_CHOICE = "() => 'refreshMissingModels' in app"
STILL = """argument => new Promise(done => {
    const look = LOOK;
    let before, frames = 0;
    const again = () => {
        const seen = look(argument), now = JSON.stringify(seen);
        frames = now === before ? frames + 1 : 0;
        before = now;
        frames < 10 ? requestAnimationFrame(again) : done(seen);
    };
    again();
})"""
FINISHED = "() => window.seen.some(event => event.name.startsWith('execution_'))"


class Problems(list):
    """Errors of the page that are not among the known ones."""

    def console(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.add(f"{message.text} ({message.location.get('url', '')})")

    def add(self, text: object) -> None:
        if not any(known in str(text) for known in KNOWN_ERRORS):
            self.append(str(text))


def open_page(browser: Browser, url: str, without: str | None = None) -> tuple[Page, Problems]:
    """ComfyUI's page, ready; ``without``: addresses (a pattern) that are not served to it."""
    problems = Problems()
    page = browser.new_page(viewport={"width": 1600, "height": 900})
    page.set_default_timeout(1000 * PATIENCE)
    if without:
        page.route(without, lambda route: route.abort())
    page.on("console", problems.console)
    page.on("pageerror", problems.add)
    page.add_init_script(FIND)
    page.goto(url, wait_until="domcontentloaded")
    page.wait_for_function(READY)
    page.evaluate(LISTEN)
    return page, problems


def setting(page: Page, name: str, value: object) -> None:
    page.evaluate("([name, value]) => app.extensionManager.setting.set(name, value)", [name, value])


def take_messages(page: Page) -> list[str]:
    """What the page tells its user (toasts, and 1.58.1's overlay of errors), which is then closed."""
    messages = page.locator(".p-toast-message, [data-testid=toast], [data-testid=error-overlay]").all_inner_texts()
    page.evaluate("""() => {
        const { toast } = app.extensionManager;
        toast.removeAll ? toast.removeAll() : toast.dismissAll();
        document.querySelector('[data-testid=error-overlay-dismiss]')?.click();
    }""")
    return messages


def close_messages(page: Page) -> None:
    """Closes what the page says of a run that failed: a dialog (1.32.9), or an overlay."""
    take_messages(page)
    page.keyboard.press("Escape")


def load(page: Page, template: Path, missing_models: bool = False, name: str = "test") -> None:
    """Opens a template; missing_models: with the dialog or the message that names those, which covers the page."""
    options = {"showMissingModelsDialog": missing_models, "silentAssetErrors": not missing_models}
    page.evaluate(
        "([graph, name, options]) => app.loadGraphData(graph, true, true, name, options)",
        [json.loads(template.read_text("utf-8")), name, options],
    )
    still(page, "() => app.graph._nodes.map(node => [node.id, node.has_errors])")  # some nodes are marked later


def missing_models(page: Page, name: str, some: bool = True) -> dict[str, bool]:
    """What the page calls missing after `load`, as "directory / file", and whether it offers the download. some: is
    there anything to wait for?"""
    if page.evaluate(BY_CHOICE):
        details = page.locator("[data-testid=error-overlay-see-errors]")
        if not some:
            page.wait_for_timeout(1000)  # for what should not appear
            return {} if not details.count() else {"something": True}
        details.click()
        rows = page.locator("[data-testid=missing-model-importable-rows] > *")
        button = "[data-testid=missing-model-download]"
    else:
        rows, button = page.locator(".comfy-missing-models [role=option]"), "button:has-text('Download'):enabled"
    rows.first.wait_for()
    found = {label(row): row.locator(button).count() == 1 for row in rows.all()}
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"missing_models-{name}.png")
    if page.evaluate(BY_CHOICE):
        setting(page, "Comfy.RightSidePanel.IsOpen", False)
    else:
        page.keyboard.press("Escape")
        page.get_by_role("dialog").wait_for(state="hidden")
    return found


def label(row: Locator) -> str:
    """A line of the page's list of missing models, as "directory / file"."""
    lines = row.inner_text().splitlines()
    named = next((line for line in lines if " / " in line), None)
    return named or f"{lines[1]} / {lines[0]}"


def still(page: Page, look: str, argument: object = None) -> Any:
    """What ``look`` (a function in JavaScript) returns, as soon as that is the same in ten frames after each other."""
    return page.evaluate(STILL.replace("LOOK", look), argument)


def set_widget(page: Page, node: str, widget: str, value: object) -> None:
    page.evaluate("([node, widget, value]) => { widgetOf(node, widget).value = value; }", [node, widget, value])


def queue(page: Page) -> None:
    page.evaluate("() => { window.seen.length = 0; app.queuePrompt(0, 1); }")


def run(page: Page) -> list[str]:
    """Queues the open workflow; the events that were seen until it had succeeded."""
    queue(page)
    page.wait_for_function(FINISHED)
    seen = page.evaluate("() => window.seen")
    assert [event["name"] for event in seen if event["name"].startswith("execution_")] == ["execution_success"], seen
    return [event["name"] for event in seen]


def screenshot(page: Page, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.evaluate("() => app.extensionManager.command.execute('Comfy.Canvas.FitView')")
    still(page, "() => [app.canvas.ds.scale, ...app.canvas.ds.offset]")
    page.screenshot(path=SCREENSHOTS / f"{name}.png")
