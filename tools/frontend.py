"""ComfyUI's own page in a headless Chromium: graphs are loaded, changed, run, arranged and captured as screenshots."""

import shutil
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
WIDTH, HEIGHT = 2800, 1800  # large enough for any arrangement beside ComfyUI's own bars
CORNER = (300, 200)  # position of the upper left corner of an arrangement, clear of them
MARGIN, BADGE = 14, 22  # beside and below nodes, and above them
SHARPNESS = 2  # pixels of a screenshot per pixel of the page
RUN_SECONDS = 600

READY = """() => window.app && window.app.graph && window.LiteGraph
    && 'SpecARSJDSampler' in window.LiteGraph.registered_node_types"""

# A node is named by its type, with #n for the n-th of several.
HELPERS = """() => {
    window.ended = [];
    for (const name of ['execution_success', 'execution_error', 'execution_interrupted'])
        app.api.addEventListener(name, event => window.ended.push([name, event.detail.exception_message ?? '']));
    window.find = name => {
        const [type, index] = name.split('#');
        const found = app.graph._nodes.filter(node => node.type === type)[Number(index ?? 0)];
        if (!found) throw new Error('no node ' + name);
        return found;
    };
    window.set = (name, values) => {
        for (const [key, value] of Object.entries(values)) {
            const widget = find(name).widgets.find(each => each.name === key);
            if (!widget) throw new Error(`${name} has no widget ${key}`);
            widget.value = value;
            widget.callback?.(value);
        }
    };
    window.connect = (from, output, to, input) => {
        const link = find(from).connect(find(from).findOutputSlot(output), find(to), find(to).findInputSlot(input));
        if (!link) throw new Error(`cannot connect ${from} ${output} to ${to} ${input}`);
    };
}"""

# Shown nodes are arranged; the others are moved out of sight to their side, so that wires come from there.
ARRANGE = """([shown, corner]) => {
    const nodes = Object.keys(shown).map(find), left = Math.min(...nodes.map(node => node.pos[0]));
    for (const node of app.graph._nodes)
        if (!nodes.includes(node)) node.pos = [node.pos[0] > left ? 9000 : -9000, 0];
    app.graph._groups.length = 0;
    Object.values(shown).forEach(([x, y, width, height], index) => {
        const node = nodes[index], above = nodes[index - 1], least = node.computeSize();
        if (node.type.startsWith('SpecAR')) node.title = node.constructor.title;  // workflows may call it otherwise
        node.pos = [x, y ?? above.pos[1] + (above.flags.collapsed ? 0 : above.size[1]) + 50];
        if (!width) [node.flags.collapsed, node.title] = [true, node.title.replace(/ \\(.*/, '')];  // long ones are cut
        else node.setSize([width, height ?? Math.max(least[1], 60)]);
    });
    app.canvas.deselectAll();
    app.canvas.ds.scale = 1;
    app.canvas.ds.offset = corner;
    app.canvas.draw(true, true);
}"""

MEASURE = "names => names.map(name => [...find(name).getBounding()])"  # of what was drawn: images make nodes taller

COMPLETE = """() => app.graph._nodes.every(node =>
    !node.imgs || node.imgs.every(image => image.complete && image.naturalWidth > 0))"""


class FrontendError(RuntimeError):
    """An action on the page failed; the message is the page's."""


class Frontend:
    """Context manager around one page of the server at `url`."""

    def __init__(self, url: str):
        self._url = url

    def __enter__(self) -> "Frontend":
        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
        self.page: Page = self._browser.new_page(
            viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=SHARPNESS
        )
        self.page.goto(self._url, wait_until="domcontentloaded")
        self.page.wait_for_function(READY, timeout=180_000)
        self.page.evaluate(HELPERS)
        self.page.evaluate("() => { app.canvas.background_image = ''; }")  # its grid takes most of a file's bytes
        self.page.wait_for_timeout(1000)
        return self

    def __exit__(self, *_exc) -> None:
        self._browser.close()
        self._playwright.stop()

    def load(self, graph: dict, name: str = "pictures") -> None:
        """Opens a workflow under a name; seeds stay fixed after a run, so that the shown ones are those of the run."""
        self.page.evaluate(
            "([graph, name]) => app.loadGraphData(graph, true, true, name, {showMissingModelsDialog: "
            "false, showMissingNodesDialog: false, silentAssetErrors: true})",
            [graph, name],
        )
        self.page.evaluate(
            "() => app.graph._nodes.forEach(node => node.widgets?.forEach(widget => "
            "{ if (widget.name === 'control_after_generate') widget.value = 'fixed'; }))"
        )

    def add(self, kind: str) -> None:
        """Puts a node of that type into the graph, far to the left."""
        self.page.evaluate(
            "kind => { const node = LiteGraph.createNode(kind); node.pos = [-5000, 0]; app.graph.add(node); }", kind
        )

    def set(self, name: str, **values: object) -> None:
        self.page.evaluate("([name, values]) => set(name, values)", [name, values])

    def connect(self, source: str, output: str, target: str, input: str) -> None:
        self.page.evaluate("link => connect(...link)", [source, output, target, input])

    def run(self) -> None:
        """Queues the graph and waits until it has run and its images are loaded."""
        self.page.evaluate("() => { window.ended.length = 0; app.queuePrompt(0, 1); }")
        self.page.wait_for_function("() => window.ended.length", timeout=RUN_SECONDS * 1000)
        [[event, message]] = self.page.evaluate("() => window.ended")
        if event != "execution_success":
            raise FrontendError(f"{event}: {message}")
        self.page.wait_for_timeout(500)
        self.page.wait_for_function(COMPLETE, timeout=60_000)

    def photograph(self, shown: dict[str, tuple]) -> bytes:
        """PNG of the named nodes alone, with a margin that shows wires and the badge above a node. They are placed at
        (x, y, width[, height]); y None: below the previous node; width 0: collapsed.
        """
        self.page.evaluate(ARRANGE, [{name: list(place) for name, place in shown.items()}, CORNER])
        self.page.mouse.move(5, HEIGHT // 2)
        self.page.wait_for_timeout(700)
        boxes = self.page.evaluate(MEASURE, list(shown))
        left, top = min(b[0] for b in boxes), min(b[1] for b in boxes)
        width, height = max(b[0] + b[2] for b in boxes) - left, max(b[1] + b[3] for b in boxes) - top
        if width + CORNER[0] > WIDTH - 300 or height + CORNER[1] > HEIGHT - 100:
            raise FrontendError(f"{width:.0f} x {height:.0f} are too large for the page")
        clip = {"x": left + CORNER[0] - MARGIN, "y": top + CORNER[1] - BADGE, "width": width + 2 * MARGIN}
        return self.page.screenshot(clip={**clip, "height": height + BADGE + MARGIN})

    def render(self, html: str, size: tuple[int, int]) -> bytes:
        """PNG of an HTML page."""
        page = self._browser.new_page(viewport={"width": size[0], "height": size[1]})
        page.set_content(html, wait_until="load")
        image = page.screenshot()
        page.close()
        return image


def chromium() -> Path:
    """Raises FrontendError where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if not found:
        raise FrontendError("screenshots need Chromium (Debian: apt-get install chromium fonts-dejavu-core)")
    return Path(found)
