"""Makes the images of the documentation: the README's animation, the contact sheets of the bundled models' cards, the
example that templates begin with, and, in a real ComfyUI, the README's canvas, one per help page, a thumbnail per
template, and, if they are asked for, screenshots.

Run it again when models, nodes or workflows have changed (with tools/pictures.sh), for all of them or those given.
"""

import argparse
import io
import itertools
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import example
import hero
import screenshots
import thumbnails
from comfy_server import PACK, ComfyServer, ServerError
from comfyui_specar.tools.training import contact_sheet
from frontend import Frontend, FrontendError
from PIL import Image

DOCS = PACK / "web/docs"
CANVAS = PACK / "docs/pictures/canvas.webp"
WORKFLOWS = PACK / "workflows"
LOG = PACK / "output/pictures.log"
MOST_BYTES = 40 * 1024
DECODER = "vq_default.safetensors"  # the bundled model's decoder under another name, for Load AR Image Decoder

CHECKPOINT, DRAFTER, LATENT = "SpecARLoadCheckpoint", "SpecARLoadDrafter", "SpecAREmptyLatent"
EXAMPLE, LORA, STYLE = "SpecARExampleImage", "SpecARLoadLora", "my style"
MAP, SAMPLER = "SpecARAcceptanceMap", "SpecARSampler"
TREE, SJD = "SpecARDraftTreeSampler", "SpecARSJDSampler"
TEXT, DECODE, SAVE, PREVIEW = "CLIPTextEncode", "VAEDecode", "SaveImage", "PreviewImage"
COLUMN = 350  # distance between columns of nodes


@dataclass
class Scene:
    """An image of nodes, of a help page or the README: a shipped workflow, changes to it, and the nodes that are shown.

    `shown`: name -> place, see Frontend.photograph; `added`: new nodes and their widgets;
    `values`: other widgets; `wires`: (from, output, to, input); `prepare` makes other changes before the run.
    """

    workflow: str
    shown: dict[str, tuple]
    added: dict[str, dict] = field(default_factory=dict)
    values: dict[str, dict] = field(default_factory=dict)
    wires: tuple[tuple[str, str, str, str], ...] = ()
    run: bool = True
    prepare: Callable[[Frontend], None] = lambda page: None

    def draw(self, page: Frontend) -> bytes:
        page.load(json.loads((WORKFLOWS / f"{self.workflow}.json").read_text(encoding="utf-8")), self.workflow)
        for name in self.added:
            page.add(name)
        for name, values in {**self.added, **self.values}.items():
            page.set(name, **values)
        for wire in self.wires:
            page.connect(*wire)
        self.prepare(page)
        if self.run:
            page.run()
        return page.photograph(self.shown)


def saved(x: int, y: int | None, width: int, height: int) -> dict[str, tuple]:
    """VAE Decode, collapsed, and Save Image below it."""
    return {DECODE: (x, y, 0), SAVE: (x, None, width, height)}


def beside_its_image(workflow: str, kind: str, **changes: Any) -> Scene:
    return Scene(workflow, {kind: (0, 0, 330), **saved(380, 0, 240, 265)}, **changes)


def sampler(workflow: str, kind: str) -> Scene:
    """A sampler above its image, beside its acceptance map."""
    return Scene(workflow, {kind: (0, 0, 330), **saved(0, None, 330, 270), MAP: (380, 0, 330, 760)})


def fed(kind: str) -> tuple[tuple[str, str, str, str], ...]:
    """The wires of a sampler that takes the place of the workflow's."""
    return (
        (CHECKPOINT, "AR_MODEL", kind, "model"),
        (TEXT, "CONDITIONING", kind, "positive"),
        (LATENT, "LATENT", kind, "latent_image"),
        (kind, "LATENT", DECODE, "samples"),
    )


def rule(
    kind: str,
    metric: str = "accepted by relaxation",
    workflow: str = "11 Method - EAGLE draft tree",
    target: str = TREE,
    **values: object,
) -> Scene:
    """A rule beside the map of tokens that it accepted by relaxation."""
    shown = {kind: (0, 0, 300), target: (0, None, 0), **saved(0, None, 300, 270), MAP: (COLUMN, 0, 330, 680)}
    return Scene(
        workflow,
        shown,
        added={kind: values},
        values={MAP: {"metric": metric}},
        wires=((kind, "AR_RULE", target, "rule"),),
    )


def read_saved_trace(page: Frontend) -> None:
    """Saves a trace first, then has Load Trace read it."""
    page.run()
    page.add("SpecARLoadTrace")
    page.page.evaluate("() => app.refreshComboInNodes()")
    page.page.wait_for_timeout(1000)
    names = page.page.evaluate("() => find('SpecARLoadTrace').widgets[0].options.values")
    page.set("SpecARLoadTrace", trace_name=next(name for name in names if name.startswith("specar/trace")))
    page.connect("SpecARLoadTrace", "AR_TRACE", MAP, "trace")


SCENES = {
    CANVAS.stem: Scene(
        "01 Text to image",
        {
            CHECKPOINT: (0, 0, 225),
            TEXT: (255, 0, 210, 110),
            LATENT: (255, None, 210),
            SAMPLER: (495, 0, 250),
            DECODE: (775, 0, 220),
            SAVE: (775, None, 220, 270),
        },
    ),
    CHECKPOINT: Scene(
        "07 Acceptance map",
        {
            CHECKPOINT: (0, 0, 320),
            TEXT: (370, 0, 300, 110),
            LATENT: (370, 160, 300),
            SJD: (720, 0, 0),
            DECODE: (720, 160, 0),
        },
        run=False,
    ),
    DRAFTER: Scene(
        "11 Method - EAGLE draft tree", {CHECKPOINT: (0, 0, 300), DRAFTER: (0, 210, 300), TREE: (360, 40, 0)}, run=False
    ),
    LORA: Scene(
        "01 Text to image",
        {CHECKPOINT: (0, 0, 300), LORA: (350, 170, 270), SAMPLER: (670, 0, 300)},
        added={LORA: {"lora_name": STYLE}},
        wires=((CHECKPOINT, "AR_MODEL", LORA, "model"), (LORA, "AR_MODEL", SAMPLER, "model")),
        run=False,
    ),
    "SpecARLoadImageDecoder": Scene(
        "01 Text to image",
        {"SpecARLoadImageDecoder": (0, 0, 300), SAMPLER: (0, 110, 0), DECODE: (350, 0, 200), SAVE: (600, 0, 270, 265)},
        added={"SpecARLoadImageDecoder": {"decoder_name": DECODER}},
        wires=(("SpecARLoadImageDecoder", "VAE", DECODE, "vae"),),
    ),
    LATENT: Scene(
        "02 Four images at once",
        {CHECKPOINT: (0, 0, 0), LATENT: (240, 0, 260), SAMPLER: (240, None, 0), **saved(550, 0, 330, 340)},
    ),
    "SpecARContinuePicture": Scene(
        "05 Continue an image",
        {
            EXAMPLE: (0, 0, 300, 330),
            "SpecARContinuePicture": (COLUMN, 0, 300),
            SAMPLER: (COLUMN, None, 0),
            **saved(COLUMN, None, 300, 300),
        },
    ),
    EXAMPLE: Scene(
        "03 Inpaint your image", {EXAMPLE: (0, 0, 300, 330), SAMPLER: (COLUMN, 0, 0), **saved(COLUMN, None, 300, 270)}
    ),
    "SpecARDecodeGLMImage": Scene(
        "28 GLM-Image (download)",
        {
            CHECKPOINT: (0, 0, 320),
            TEXT: (370, 0, 300, 110),
            LATENT: (370, 160, 300),
            SAMPLER: (720, 0, 0),
            "SpecARDecodeGLMImage": (720, 60, 300),
        },
        run=False,
    ),
    "SpecARImagePrompt": Scene(
        "30 Emu3.5-Image, edit with references (download)",
        {
            CHECKPOINT: (0, 0, 320, 270),
            "LoadImage": (0, None, 320, 250),
            "SpecARImagePrompt": (370, 0, 320, 330),
            SAMPLER: (740, 0, 0),
        },
        run=False,
    ),
    "SpecARCaption": Scene(
        "29 Describe an image (download)",
        {
            CHECKPOINT: (0, 0, 300, 250),
            "LoadImage": (0, None, 300, 260),
            "SpecARCaption": (COLUMN, 0, 330, 290),
            "PreviewAny": (COLUMN, None, 330, 160),
        },
        run=False,
    ),
    "SpecARModelInfo": Scene(
        "07 Acceptance map",
        {CHECKPOINT: (0, 0, 300), "SpecARModelInfo": (370, 0, 560, 240)},
        added={"SpecARModelInfo": {}},
        wires=((CHECKPOINT, "AR_MODEL", "SpecARModelInfo", "model"),),
    ),
    SAMPLER: beside_its_image("01 Text to image", SAMPLER),
    "SpecARNextTokenSampler": beside_its_image(
        "01 Text to image",
        "SpecARNextTokenSampler",
        added={
            "SpecARNextTokenSampler": {
                "seed": 2,
                "control_after_generate": "fixed",
                "cfg": 2,
                "temperature": 0.9,
                "top_k": 0,
                "top_p": 0.9,
            }
        },
        wires=fed("SpecARNextTokenSampler"),
    ),
    SJD: sampler("07 Acceptance map", SJD),
    TREE: sampler("11 Method - EAGLE draft tree", TREE),
    "SpecARLanternSampler": sampler("13 Method - LANTERN", "SpecARLanternSampler"),
    "SpecARCoolSDSampler": sampler("14 Method - Cool-SD", "SpecARCoolSDSampler"),
    "SpecARADTTreeSampler": sampler("15 Method - ADT-Tree", "SpecARADTTreeSampler"),
    "SpecARVVSSampler": sampler("16 Method - VVS", "SpecARVVSSampler"),
    "SpecARContinuousNextTokenSampler": beside_its_image(
        "17 Continuous tokens",
        "SpecARContinuousNextTokenSampler",
        added={"SpecARContinuousNextTokenSampler": {}},
        wires=fed("SpecARContinuousNextTokenSampler"),
    ),
    "SpecARContinuousSampler": sampler("17 Continuous tokens", "SpecARContinuousSampler"),
    "SpecARMethodSampler": Scene(
        "08 Find the fastest method",
        {"SpecARFindFastest": (0, 0, 0), "SpecARMethodSampler": (0, None, 330), **saved(380, 0, 270, 270)},
    ),
    "SpecARRuleExact": rule("SpecARRuleExact", "source"),
    "SpecARRuleLantern": rule("SpecARRuleLantern", neighbours=30, delta=0.3),
    "SpecARRuleUniformRSD": rule("SpecARRuleUniformRSD", delta=2),
    "SpecARRuleCoolSD": rule("SpecARRuleCoolSD", delta=4),
    "SpecAREntropyTemperature": Scene(
        "01 Text to image",
        {"SpecAREntropyTemperature": (0, 0, 300), SAMPLER: (COLUMN, 0, 300), **saved(2 * COLUMN, 0, 240, 265)},
        added={"SpecAREntropyTemperature": {"strength": 1, "decay": 1}},
        wires=(
            (CHECKPOINT, "AR_MODEL", "SpecAREntropyTemperature", "model"),
            ("SpecAREntropyTemperature", "AR_MODEL", SAMPLER, "model"),
        ),
    ),
    MAP: Scene("07 Acceptance map", {SAVE: (0, 0, 240, 250), MAP: (300, 0, 420, 640)}),
    "SpecARTimeline": Scene("06 Race", {"SpecARTimeline": (0, 0, 520, 560)}),
    "SpecARFindFastest": Scene(
        "08 Find the fastest method",
        {"SpecARFindFastest": (0, 0, 480, 900)},
        values={"SpecARFindFastest": {"seconds": 120}},
    ),
    "SpecARCompareTraces": Scene("19 Compare three methods", {"SpecARCompareTraces": (0, 0, 760, 560)}),
    "SpecARSaveTrace": Scene("07 Acceptance map", {SJD: (0, 0, 0), "SpecARSaveTrace": (300, 0, 340, 240)}),
    "SpecARLoadTrace": Scene(
        "07 Acceptance map", {"SpecARLoadTrace": (0, 0, 340), MAP: (400, 0, 340, 620)}, prepare=read_saved_trace
    ),
}
for _page in DOCS.glob("SpecARRule*"):
    SCENES.setdefault(_page.name, rule(_page.name))

WITHOUT_COMFYUI: dict[str, tuple[Path, Callable[[Path], object]]] = {
    "hero": (PACK / "assets/hero.webp", hero.draw),
    "example": (PACK / "assets/example.png", example.draw),
}
for _model in ("default", "continuous"):
    _folder = PACK / "assets" / _model
    WITHOUT_COMFYUI[f"sheet_{_model}"] = (_folder / "contact_sheet.jpg", partial(contact_sheet.draw, _folder))


def as_webp(png: bytes) -> bytes:
    """Encoded within MOST_BYTES, as sharp as possible. Raises FrontendError if it would be unreadable."""
    whole = Image.open(io.BytesIO(png)).convert("RGB")
    for scale, quality in itertools.product((1, 0.75, 0.6, 0.5), (80, 70, 60, 50)):
        image = whole.resize((round(whole.width * scale), round(whole.height * scale)), Image.Resampling.LANCZOS)
        image.save(file := io.BytesIO(), "WEBP", quality=quality, method=6)
        if file.tell() <= MOST_BYTES:
            return file.getvalue()
    raise FrontendError(f"{whole.width} x {whole.height} pixels do not fit into {MOST_BYTES} bytes")


def save(name: str, image: Image.Image | bytes) -> None:
    """Saves the encoded image of a scene, or a workflow's thumbnail."""
    if isinstance(image, bytes):
        file = CANVAS if name == CANVAS.stem else DOCS / name / "picture.webp"
        file.write_bytes(image)
    else:
        file = WORKFLOWS / f"{name}.jpg"
        image.save(file, quality=thumbnails.QUALITY)
    report(file)


def report(file: Path) -> None:
    print(f"{file.relative_to(PACK)}: {Image.open(file).size}, {file.stat().st_size // 1024} KB", flush=True)


def draw_without_comfyui(names: list[str]) -> None:
    for name in names:
        file, make = WITHOUT_COMFYUI[name]
        make(file)
        report(file)


def draw(url: str, names: list[str]) -> None:
    """Runs on a server first, then in its page (whose event loop excludes that of a client)."""
    for name in names:
        if name not in SCENES and thumbnails.draws(name):
            save(name, thumbnails.result(url, *thumbnails.run(url, WORKFLOWS / f"{name}.json")))
    with Frontend(url) as page:
        for name in names:
            if name in SCENES:
                save(name, as_webp(SCENES[name].draw(page)))
            elif not thumbnails.draws(name):
                save(name, thumbnails.card(page, WORKFLOWS / f"{name}.json"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="pictures.sh", description=__doc__)
    workflows = sorted(path.stem for path in WORKFLOWS.glob("*.json"))
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"a node's id, a workflow's name, {', '.join([*WITHOUT_COMFYUI, *screenshots.SHOTS])}, canvas, help (all "
        "nodes), thumbnails (all workflows) or screenshots; default: all but the last",
    )
    parser.add_argument("--comfyui", type=Path, required=True, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    groups = {"help": list(SCENES), "thumbnails": workflows, "screenshots": list(screenshots.SHOTS)}
    wanted = arguments.names or [*WITHOUT_COMFYUI, "help", "thumbnails"]
    names = [each for name in wanted for each in groups.get(name, [name])]
    if unknown := set(names).difference(WITHOUT_COMFYUI, *groups.values()):
        parser.error(f"no picture is called {', '.join(sorted(unknown))}")
    # First: a server would disturb the seconds that the animation shows.
    draw_without_comfyui([name for name in names if name in WITHOUT_COMFYUI])
    shots = [name for name in names if name in screenshots.SHOTS]
    names = [name for name in names if name not in WITHOUT_COMFYUI and name not in shots]
    try:
        if shots:
            screenshots.draw(arguments.comfyui, LOG, shots)
        if not names:
            return 0
        # Without previews, which make samplers taller.
        with ComfyServer(arguments.comfyui, LOG, previews="none") as server:
            vae = server.base / "models/vae"
            vae.mkdir(parents=True, exist_ok=True)
            shutil.copy(PACK / "assets/default/vq.safetensors", vae / DECODER)
            (lora := server.base / "models/loras" / STYLE).mkdir(parents=True, exist_ok=True)
            (lora / "adapter_model.safetensors").touch()  # listed, never read
            draw(server.url, names)
    except (ServerError, FrontendError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
