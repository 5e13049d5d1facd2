"""The templates' thumbnails: images that a workflow generates, or, if its model does not ship, its graph and files."""

import asyncio
import base64
import io
import json
import re
from collections import Counter
from pathlib import Path

from comfy_client import Run, run_prompt, view
from comfyui_specar.nodes.downloads import sources_of
from comfyui_specar.tests.support.families import REFINED, WORKFLOWS
from frontend import Frontend, FrontendError
from PIL import Image, ImageSequence

GAP = 8  # white, between images
ALONE, PAIR, QUAD, GRID = 512, 384, 256, 200  # side of an image, larger for fewer images
CARD = (776, 388)
WIDEST = 1800  # of a graph on a card; what is to the right of it is not shown

# The upper part of a card is the graph, the lower part lists the files to download.
CARD_PAGE = """<style>
body {{ margin: 0; width: {width}px; height: {height}px; background: #141414; color: #eee; font-family: "DejaVu Sans";
        display: flex; flex-direction: column; }}
img {{ width: 100%; flex: 1; min-height: 0; object-fit: cover; object-position: top left; }}
p {{ margin: 0; padding: 10px 18px 14px; font-size: 24px; font-weight: bold; border-top: 4px solid #d55e00; }}
small {{ display: block; color: #bbb; font-size: 20px; font-weight: normal; margin-top: 3px; }}
</style><body><img src="data:image/png;base64,{graph}"><p>{title}<small>{needs}</small></p></body>"""
TITLES = {name: workflow.title for name, workflow in WORKFLOWS.items()}  # of workflows whose models do not ship
TITLES[REFINED] = "Janus-Pro 1B, refined with SDXL"
WEIGHTS = re.compile(r"In bf16: ([\d.]+ GB) of weights")  # in the workflow's note


def tiles(images: list[Image.Image], side: int, columns: int) -> Image.Image:
    rows = -(-len(images) // columns)
    size = (columns * (side + GAP) - GAP, rows * (side + GAP) - GAP)
    sheet = Image.new("RGB", size, "white")
    for i, image in enumerate(images):
        place = (i % columns * (side + GAP), i // columns * (side + GAP))
        sheet.paste(image.resize((side, side), Image.Resampling.BICUBIC), place)
    return sheet


def layout(images: list[Image.Image]) -> Image.Image:
    count = len(images)
    if count == 1:
        return tiles(images, ALONE, 1)
    if count <= 3:
        return tiles(images, PAIR, count)
    return tiles(images, QUAD, 2) if count == 4 else tiles(images, GRID, 4)


def draws(name: str) -> bool:
    """Whether the workflow's model ships."""
    return name not in TITLES


def beside(chart: Image.Image, images: list[Image.Image]) -> Image.Image:
    """A chart, and images in a column of the same height."""
    side = (PAIR - GAP) // 2
    chart = chart.resize((round(chart.width * PAIR / chart.height), PAIR), Image.Resampling.LANCZOS)
    sheet = Image.new("RGB", (chart.width + GAP + side, PAIR), "white")
    sheet.paste(chart, (0, 0))
    sheet.paste(tiles(images[:2], side, 1), (chart.width + GAP, 0))
    return sheet


def place(key: str) -> list[int]:
    """Of a node's id, in subgraphs "1:8", to sort by."""
    return [int(part) for part in key.split(":")]


def files(url: str, run: Run, prompt: dict, kind: str) -> list[Image.Image]:
    """Outputs of the nodes of a class, in the order of their ids."""
    keys = sorted((key for key in run.outputs if prompt[key]["class_type"] == kind), key=place)
    made = [file for key in keys for file in run.outputs[key].get("images", [])]
    return [Image.open(io.BytesIO(asyncio.run(view(url, file)))) for file in made]


def result(url: str, file: Path) -> Image.Image:
    """The images that a workflow saves; beside a single one its input image, or else its map without legend.

    Two frames of a video; a chart as a whole.
    """
    prompt = json.loads((file.parent / "api" / file.name).read_text(encoding="utf-8"))
    run = asyncio.run(run_prompt(url, prompt))
    if run.outcome != "success":
        raise FrontendError(f"{file.stem}: {run.message()}")
    square = [image for image in files(url, run, prompt, "SaveImage") if image.width == image.height]
    before = [image for image in files(url, run, prompt, "PreviewImage") if square and image.size == square[0].size]
    maps = [image.crop((0, 0, image.width, image.width)) for image in files(url, run, prompt, "SpecARAcceptanceMap")]
    if films := files(url, run, prompt, "SpecARTimeline"):
        return layout([ImageSequence.all_frames(films[0])[i] for i in (films[0].n_frames // 2, -1)])
    if charts := files(url, run, prompt, "SpecARFindFastest"):
        return beside(charts[0], [*square, *maps])
    return layout([*before[:1], *square, *([] if before else maps[:1])] if len(square) == 1 else square)


def needed(graph: dict) -> list[str]:
    """The files and folders that its models are downloaded as, the model first, and last those of core nodes."""
    choices = [node["widgets_values"][0] for node in graph["nodes"] if node["type"].startswith("SpecARLoad")]
    sources = [source for choice in choices for source in sources_of(choice)]
    ours = {source.folder.partition("/")[0] for source in sources}
    names = [source.folder.partition("/")[2] or source.files for source in sources]
    names += [each["name"].removesuffix(".safetensors") for each in graph["models"] if each["directory"] not in ours]
    return list(dict.fromkeys(names))


def card(page: Frontend, file: Path) -> Image.Image:
    """The workflow's graph, or the left of a wide one, with its size and the names of its models' files under it."""
    graph = json.loads(file.read_text(encoding="utf-8"))
    widgets = {node["type"]: node["widgets_values"] for node in graph["nodes"]}
    size = widgets["ImageScale"][1:3] if "ImageScale" in widgets else widgets["SpecAREmptyLatent"]
    stated = WEIGHTS.search(widgets["MarkdownNote"][0])
    if stated is None:
        raise FrontendError(f"{file.stem}: the note does not state the weights")
    model, *others = needed(graph)
    listed = ", ".join([f"{model} ({stated[1]} in bf16, calculated)", *others])
    needs = f"needs {' and '.join(listed.rsplit(', ', 1)) if others else listed}, which you download"
    page.load(graph)
    counted: Counter[str] = Counter()
    shown = {}
    begins = min(node["pos"][0] for node in graph["nodes"])
    for node in graph["nodes"]:
        if node["pos"][0] + node["size"][0] - begins <= WIDEST:
            shown[f"{node['type']}#{counted[node['type']]}"] = (*node["pos"], *node["size"])
        counted[node["type"]] += 1
    photo = base64.b64encode(page.photograph(shown)).decode()
    title = f"{TITLES[file.stem]} · {size[0]} x {size[1]} pixels"
    html = CARD_PAGE.format(width=CARD[0], height=CARD[1], graph=photo, title=title, needs=needs)
    return Image.open(io.BytesIO(page.render(html, CARD))).convert("RGB")
