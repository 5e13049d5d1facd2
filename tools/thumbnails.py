"""The templates' thumbnails, squares: what a workflow generates, or, if its model does not ship, the model's name."""

import asyncio
import io
import json
import math
import re
from pathlib import Path

from comfy_client import Run, run_prompt, view
from frontend import Frontend, FrontendError
from PIL import Image, ImageOps, ImageSequence

SIDE = 512
QUALITY = 88  # of JPEG
CARD = """<style>
body {{ margin: 0; width: 512px; height: 512px; box-sizing: border-box; padding: 40px; display: flex; color: #fff;
        flex-direction: column; justify-content: center; background: hsl({hue} 60% 30%); font-family: "DejaVu Sans"; }}
b {{ font-size: {size}px; line-height: 1.1; }} p {{ font-size: 42px; margin: 36px 0 0; line-height: 1.35; }}
</style><body><b>{name}</b><p>{pixels}{weights} GB</p></body>"""
WEIGHTS = re.compile(r"([\d.]+) GB of weights")  # in the template's note
GROUND = (24, 24, 24)  # beside a film that is no square


def tiles(images: list[Image.Image]) -> Image.Image:
    """Images in a square."""
    sheet, columns = Image.new("RGB", (SIDE, SIDE), GROUND), math.ceil(len(images) ** 0.5)
    for i, image in enumerate(images):
        left, right = (SIDE * (i % columns + k) // columns for k in (0, 1))
        top, bottom = (SIDE * (i // columns + k) // columns for k in (0, 1))
        sheet.paste(ImageOps.fit(image, (right - left, bottom - top), Image.Resampling.LANCZOS), (left, top))
    return sheet


def halves(left: Image.Image, right: Image.Image) -> Image.Image:
    """The left half of an image beside the right half of another one."""
    sheet = tiles([left])
    sheet.paste(tiles([right]).crop((SIDE // 2, 0, SIDE, SIDE)), (SIDE // 2, 0))
    return sheet


def draws(name: str) -> bool:
    """Whether the workflow's model ships."""
    return not name.endswith(" (download)")


def run(url: str, file: Path) -> tuple[Run, dict]:
    """A workflow's run, and its nodes."""
    prompt = json.loads((file.parent / "api" / file.name).read_text(encoding="utf-8"))
    done = asyncio.run(run_prompt(url, prompt))
    if done.outcome != "success":
        raise FrontendError(f"{file.stem}: {done.message()}")
    return done, prompt


def images(url: str, done: Run, prompt: dict, kind: str) -> list[Image.Image]:
    """What nodes of a class made, in the order of their ids."""
    keys = sorted((key for key in done.outputs if prompt[key]["class_type"] == kind), key=int)
    made = [file for key in keys for file in done.outputs[key].get("images", [])]
    return [Image.open(io.BytesIO(asyncio.run(view(url, file)))) for file in made]


def result(url: str, done: Run, prompt: dict) -> Image.Image:
    """What a run shows: its film after a third, or the images that it saves; half of one beside half of its map."""
    if films := images(url, done, prompt, "SpecARTimeline"):
        frame = ImageSequence.all_frames(films[0])[films[0].n_frames // 3].convert("RGB")
        return ImageOps.pad(frame, (SIDE, SIDE), Image.Resampling.LANCZOS, GROUND)
    saved = images(url, done, prompt, "SaveImage")
    if maps := images(url, done, prompt, "SpecARAcceptanceMap"):
        return halves(saved[0], maps[0].crop((0, 0, maps[0].width, maps[0].width)))  # without its legend
    if charts := images(url, done, prompt, "SpecARFindFastest"):
        return halves(saved[0], charts[0])
    return tiles(saved)


def card(page: Frontend, file: Path) -> Image.Image:
    """The model's name, the size of its images, where the template chooses it, and of its weights."""
    graph = json.loads(file.read_text(encoding="utf-8"))
    widgets = {node["type"]: node["widgets_values"] for node in graph["nodes"]}
    size = widgets["ImageScale"][1:3] if "ImageScale" in widgets else widgets.get("SpecAREmptyLatent", [])[:2]
    pixels = f"{size[0]} x {size[1]}<br>" if size else ""
    [weights] = WEIGHTS.findall(widgets["MarkdownNote"][0])
    number, name = file.stem.removesuffix(" (download)").split(" ", 1)
    letters = 72 if len(name) < 20 else 54
    html = CARD.format(hue=int(number) * 33 % 360, name=name, size=letters, pixels=pixels, weights=weights)
    return Image.open(io.BytesIO(page.render(html, (SIDE, SIDE)))).convert("RGB")
