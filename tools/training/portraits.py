"""Portraits in five freely licensed drawing styles of DiceBear (npm ``@dicebear/...``), in any number, with captions.

Their licences are in :data:`~.portrait_styles.PORTRAIT_STYLES`; the packages' code is MIT, Copyright (c) 2024 Florian
Körner. The packages are fetched once with ``npm install``; neither they nor the images are shipped.
"""

from __future__ import annotations

import io
import json
import logging
import random
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .portrait_styles import DARK, EYES, PALETTES, PORTRAIT_STYLES, VERSION, Choice
from .settings import IMAGE_SIZE

log = logging.getLogger(__name__)

CHUNK = 1000  # portraits of a file


def described(choice: Choice, rng: random.Random, colours: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """One of a choice: its words, and the chosen variant or colour of each of its options."""
    words = rng.choice(list(choice))
    return [_word(word, colours) for word in words.split()], _options(choice[words], rng, colours)


def _word(word: str, colours: dict[str, str]) -> str:
    """ "@hair" -> "hair_red"; a robot's colour is a plain word, as that of other objects."""
    place = word.removeprefix("@")
    if place == word:
        return word
    return colours[place] if place == "robot" else f"{place}_{colours[place]}"


def _options(text: str, rng: random.Random, colours: dict[str, str]) -> dict[str, str]:
    found = {}
    for option, variants in (part.split("=") for part in text.split("; ") if part):
        variant = rng.choice(variants.split())
        place = variant.removeprefix("@")
        found[option] = variant if place == variant else PALETTES[place][colours[place]]
    return found


def portrait(style: str, rng: random.Random) -> tuple[list[str], dict[str, str]]:
    """(words, options) of a random portrait; colours in equal shares. The first word is the style."""
    about = PORTRAIT_STYLES[style]
    colours = {place: rng.choice(list(palette)) for place, palette in PALETTES.items()}
    words, options = [style, "robot" if style == "bottts" else "person"], _options(about.fixed, rng, colours)
    for share, choice in (*((1.0, each) for each in about.always), *about.sometimes):
        said, drawn = described(choice, rng, colours)
        if rng.random() < share and not (EYES.intersection(words) and DARK.intersection(said)):
            words += said
            options |= drawn
    return list(dict.fromkeys(words)), options


def words_of_portraits() -> list[str]:
    """Every word that a portrait can have, sorted."""
    words = {"person", "robot"} | PORTRAIT_STYLES.keys()
    for about in PORTRAIT_STYLES.values():
        for choice in (*about.always, *(each for _, each in about.sometimes)):
            for word in (word for text in choice for word in text.split()):
                place = word.removeprefix("@")
                colours = PALETTES[place] if place != word else ("",)
                words |= {_word(word, {place: colour}) for colour in colours}
    return sorted(words)


class Portraits:
    """``count`` portraits, the styles in turn; drawn where ``cache`` lacks them (10,000 in 8 minutes), else read.

    Always the same ones: each thousand has a file, lossless WebP and words, drawn from a seed of its own. ``words``: of
    each portrait.
    """

    def __init__(self, cache: Path, count: int) -> None:
        self._files: list[bytes] = []
        self.words: list[list[str]] = []
        for chunk in range(-(-count // CHUNK)):
            file = cache / f"portraits-{chunk:04}.npz"
            if not file.exists():
                _draw(cache, file, chunk)
            with np.load(file) as data:
                ends = data["ends"].tolist()
                files = data["files"].tobytes()
                self._files += [files[a:b] for a, b in zip([0, *ends], ends, strict=False)]
                self.words += json.loads(str(data["words"]))
        self._files, self.words = self._files[:count], self.words[:count]

    def __len__(self) -> int:
        return len(self._files)

    def rgba(self, numbers: Tensor) -> Tensor:
        """The portraits of these numbers, int64 [B] -> uint8 [B, 4, 256, 256], premultiplied."""
        drawings = [Image.open(io.BytesIO(self._files[i])).convert("RGBA") for i in numbers.tolist()]
        return torch.from_numpy(np.stack([np.asarray(each.convert("RGBa")) for each in drawings])).permute(0, 3, 1, 2)


def _draw(cache: Path, file: Path, chunk: int) -> None:
    """Render a file of portraits."""
    rng, styles = random.Random(chunk), list(PORTRAIT_STYLES)
    chosen = [(style := styles[i % len(styles)], *portrait(style, rng)) for i in range(CHUNK)]
    with ThreadPoolExecutor(1) as pool:
        jobs = ((style, options) for style, _, options in chosen)
        files = list(pool.map(_webp, _drawings(_packages(cache), jobs)))
    words = json.dumps([words for _, words, _ in chosen])
    partial = file.with_suffix(".partial.npz")
    ends = np.cumsum([len(each) for each in files])
    np.savez(partial, files=np.frombuffer(b"".join(files), np.uint8), ends=ends, words=words)
    partial.replace(file)
    log.info("%s: %d portraits, %.1f MB", file.name, CHUNK, ends[-1] / 1e6)


def _packages(cache: Path) -> Path:
    """A folder with the installed packages."""
    folder = cache / "dicebear"
    if not (folder / "node_modules/@dicebear/core").exists():
        folder.mkdir(parents=True, exist_ok=True)
        names = [f"@dicebear/{name}@{VERSION}" for name in ("core", *PORTRAIT_STYLES)]
        command = ["npm", "install", "--prefix", str(folder), "--ignore-scripts", "--no-audit", "--no-fund", *names]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def _drawings(packages: Path, jobs: Iterator[tuple[str, dict[str, str]]]) -> Iterator[str]:
    """(style, options) -> SVG texts."""
    lines = [json.dumps({"style": s, "options": {k: [v] for k, v in o.items()}}) for s, o in jobs]
    script = Path(__file__).with_name("portraits.mjs").resolve()
    done = subprocess.run(
        ["node", str(script)], input="\n".join(lines), cwd=packages, check=True, stdout=subprocess.PIPE, text=True
    )
    return map(json.loads, done.stdout.splitlines())


def _webp(svg: str) -> bytes:
    """An SVG text -> RGBA image as lossless WebP."""
    import resvg_py  # needed for training only

    png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=IMAGE_SIZE, height=IMAGE_SIZE))
    result = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGBA").save(result, "WEBP", lossless=True, quality=50, method=2)
    return result.getvalue()
