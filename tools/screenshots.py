"""The screenshots of docs/getting-started.md: ComfyUI's page as a person sees it.

Take them again (`COMFYUI_PATH=... bash tools/pictures.sh screenshots`, with the newest ComfyUI) when the front end, the
nodes or the templates have changed.
"""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

from comfy_server import PACK, PACK_FOLDER, ComfyServer
from frontend import SHARPNESS, Frontend, FrontendError
from PIL import Image

SCREENSHOTS = PACK / "docs/pictures/screenshots"
WORKFLOWS = PACK / "workflows"
VIEW = {"width": 1400, "height": 860}
QUALITY = 82
FIRST = min(path.stem for path in WORKFLOWS.glob("*.json"))
NO_NEWS = "div:has(> div > i[class*=rocket]) { display: none }"  # a banner of the front end's own
SHOWN = """() => app.graph._nodes.filter(node => node.type === 'SaveImage').every(node =>
    node.imgs?.length && node.imgs.every(image => image.complete && image.naturalWidth > 0))"""
PLAIN = {
    "Comfy.Minimap.Visible": False,
    "Comfy.Graph.CanvasInfo": False,  # nothing over the graph
    "Comfy.Graph.CanvasMenu": False,
    "Comfy.OnboardingCoachmarks.Seen": ["appMode", "firstRun"],
}
HAS_APP_MODE = "() => app.extensionManager.command.commands.some(({ id }) => id === 'Comfy.ToggleLinear')"


def browse(page: Frontend) -> None:
    """The dialog of templates, at this pack's in their order."""
    page.page.set_viewport_size(VIEW)
    page.page.evaluate("() => { app.extensionManager.command.execute('Comfy.BrowseTemplates'); }")
    dialog = page.page.get_by_role("dialog")
    dialog.get_by_text(PACK_FOLDER).first.click()
    dialog.get_by_text("Default", exact=True).locator("visible=true").click()
    page.page.get_by_role("option").filter(has_text=re.compile("A.+Z")).first.click()
    dialog.get_by_text(FIRST, exact=True).first.wait_for()
    page.page.wait_for_timeout(3000)  # for thumbnails


def after_run(workflow: str) -> Callable[[Frontend], None]:
    """A template after one run."""

    def draw(page: Frontend) -> None:
        page.page.set_viewport_size(VIEW)
        page.load(json.loads((WORKFLOWS / f"{workflow}.json").read_text(encoding="utf-8")), workflow)
        page.run()
        page.page.evaluate("() => app.extensionManager.command.execute('Comfy.Canvas.FitView')")
        page.page.wait_for_function(SHOWN)
        page.page.get_by_text("0 active").wait_for()
        page.page.wait_for_timeout(8000)  # until the message that it has run is gone

    return draw


def as_app(page: Frontend) -> None:
    """The first template in app mode, after a run."""
    if not page.page.evaluate(HAS_APP_MODE):
        raise FrontendError("this front end has no app mode; set COMFYUI_PATH to a newer ComfyUI")
    page.page.keyboard.press("Escape")  # closes the dialog of templates
    after_run(FIRST)(page)
    page.page.evaluate("() => app.extensionManager.command.execute('Comfy.ToggleLinear')")
    page.page.locator("#linearCenterPanel img").first.wait_for()
    page.page.wait_for_timeout(1000)


SHOTS: dict[str, Callable[[Frontend], None]] = {
    "first-image": after_run(FIRST),
    "same-image": after_run("06 Race"),
    "acceptance-map": after_run("07 Acceptance map"),
    "templates": browse,  # its dialog stays open
    "app-mode": as_app,  # last: the page stays in it
}


def draw(comfyui: Path, log: Path, names: list[str]) -> None:
    """Takes these in the order of SHOTS, on a server with previews, as a person's has them."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    with ComfyServer(comfyui, log) as server, Frontend(server.url) as page:
        for setting, value in PLAIN.items():
            page.page.evaluate("setting => app.extensionManager.setting.set(...setting)", [setting, value])
        page.page.add_style_tag(content=NO_NEWS)
        for name in [name for name in SHOTS if name in names]:
            SHOTS[name](page)
            file = SCREENSHOTS / f"{name}.webp"
            image = Image.open(io.BytesIO(page.page.screenshot())).convert("RGB")
            image.reduce(SHARPNESS).save(file, quality=QUALITY, method=6)
            print(f"{file.relative_to(PACK)}: {file.stat().st_size // 1024} KB", flush=True)
