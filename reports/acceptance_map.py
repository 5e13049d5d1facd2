"""Drawing of acceptance maps: numbers per token -> colours, legend, overlay. Pure numpy and PIL.

The palettes stay readable with every common colour-vision deficiency: categories are Okabe and Ito's ("Color universal
design", 2008), amounts run from dark blue to light yellow with rising lightness, ratios from orange over white to blue.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..limits.limits import ENLARGED, LONGEST_MAP, PIXELS
from ..samplers.trace import Source, Trace
from .images import Images, as_bytes, batch_size, check_images

GREY = (150, 150, 150)
PAPER, INK = 34, (221, 221, 221)  # of legends, which fit ComfyUI's dark palette
AMOUNT = ((0, 32, 77), (58, 72, 107), (109, 110, 114), (163, 151, 116), (213, 194, 95), (255, 234, 70))
RATIO = ((230, 97, 1), (253, 184, 99), (247, 247, 247), (146, 197, 222), (5, 90, 170))
SOURCES = {  # Source -> (name in the legend, colour)
    Source.ACCEPTED: ("accepted draft", (86, 180, 233)),
    Source.RELAXED: ("accepted by a relaxed rule", (204, 121, 167)),
    Source.RESIDUAL: ("resampled after rejection", (213, 94, 0)),
    Source.BONUS: ("sampled without a draft", (240, 228, 66)),
    Source.PREFILL: ("from the prompt's pass", (0, 0, 0)),
    Source.SKIPPED: ("accepted unverified", (0, 158, 115)),
    Source.FORCED: ("kept or fixed", GREY),
}
CONTINUOUS_NAMES = {  # the same for runs that sampled vectors, where the names differ
    Source.RELAXED: "accepted within the tolerance",
    Source.PREFILL: "sampled by the model alone, first",
}
LOG_RATIOS = 10  # the log ratio's colours reach from minus this to this
NOT_JUDGED = "no draft was verified"
KEPT = "kept or fixed"
MARGIN, LINE, SWATCH, SWATCH_WIDTH = 10, 30, 21, 25  # pixels of the legend, which shrinks with the map on its node
TITLE, TEXT = 21, 21  # its font sizes
TOKEN_PIXELS = 16  # side of a token in maps without an image
SHORTEST = 512  # pixels of a map's shorter side, where there is room for it


@dataclass(frozen=True)
class Swatch:
    colour: tuple[int, int, int]
    text: str


@dataclass(frozen=True)
class Scale:
    """A colour bar from ``low`` to ``high`` (texts)."""

    colours: tuple[tuple[int, int, int], ...]
    low: str
    high: str


@dataclass(frozen=True)
class TokenMap:
    """One image's map: colours [h, w, 3] (uint8), strength [h, w] (fp32 in 0..1, for the mask), and its legend."""

    colours: np.ndarray
    strength: np.ndarray
    title: str
    legend: tuple[Swatch | Scale, ...]


@dataclass(frozen=True)
class Maps:
    """The maps of all images of a run.

    legends: for the page (see legend_records). overlay [B, H', W', 3] (uint8): each over its image, enlarged, above its
    legend; map_size: (width, height) of what is above the legend. colours [B, H, W, 3] (uint8) and strength [B, H, W]
    (fp32 in 0..1) have the images' size.
    """

    legends: list[dict[str, Any]]
    overlay: np.ndarray
    map_size: tuple[int, int]
    colours: np.ndarray
    strength: np.ndarray


def acceptance_map(
    trace: Trace, image: Images | None = None, metric: str = "source", opacity: float = 0.5
) -> np.ndarray:
    """What happened to every token, laid over the images of a run: [B, H', W', 3] (uint8).

    image: all images of the run, [B, H, W, 3] (floating point in 0..1 as an image decoder returns, or uint8; Tensor or
    numpy; a run of one image also takes [H, W, 3]); None draws the map alone. metric: one of METRICS. opacity: how
    much of a token's width and height the map covers, from 0 (the image) to 1 (the map). The shorter side has at least
    SHORTEST pixels, unless the longer one would exceed LONGEST_MAP, or all maps together ENLARGED (W' and what is above
    the legend are the same multiple of W and H); the legend is below. A metric that the run has no numbers of gives a
    grey map that says so. Raises ValueError where the images are not of this run, for an unknown metric, and for more
    than PIXELS pixels in all.
    """
    return draw_maps(trace, image, metric, opacity).overlay


def draw_maps(trace: Trace, image: Images | None, metric: str, opacity: float, some: bool = False) -> Maps:
    """See :func:`acceptance_map`. Without an image, a token of ``colours`` and ``strength`` has TOKEN_PIXELS. some: of
    too many pixels, draw the maps of the first images."""
    maps = [token_map(trace, metric, number) for number in range(batch_size(trace))]
    images, height, width = [None] * len(maps), trace.rows * TOKEN_PIXELS, trace.cols * TOKEN_PIXELS
    above, across = trace.rows, trace.cols
    if image is not None:
        images = as_bytes(image)
        check_images(trace, len(images))
        above, across = height, width = images.shape[1:3]
    legend = max(map(legend_height, maps))  # legends may differ in length
    factor = enlargement(above, across, len(maps), legend)
    above, across = factor * above, factor * across
    maps = maps[: fitting(len(maps), height, width, (above + legend) * across, some)]
    drawn = np.full((len(maps), above + legend, across, 3), PAPER, np.uint8)
    for each, below, layer in zip(maps, images, drawn, strict=False):
        layer[: above + legend_height(each)] = overlay(each, below, opacity, factor)
    return Maps(
        [legend_records(each) for each in maps],
        drawn,
        (across, above),
        np.stack([enlarge(each.colours, height, width) for each in maps]),
        np.stack([enlarge(each.strength, height, width) for each in maps]),
    )


def fitting(images: int, height: int, width: int, overlay: int, some: bool) -> int:
    """How many of the maps may be drawn: all, or, if ``some`` will do, the first that have PIXELS pixels at most.
    height, width: of an image; overlay: pixels of its map with the legend. Raises ValueError for none."""
    each = height * width + overlay
    if images * each <= PIXELS:
        return images
    if some and each <= PIXELS:
        return PIXELS // each
    raise ValueError(
        f"The maps of {images} images of {width} x {height} pixels have {images * each / 1e6:.0f} million pixels in "
        f"all; the limit is {PIXELS / 1e6:.0f} million. Generate fewer images in a run, or use smaller ones (Upscale "
        "Image By)."
    )


def enlargement(height: int, width: int, images: int = 1, legend: int = 0) -> int:
    """By which whole number images are enlarged, so that their shorter side has SHORTEST pixels, but the longer one no
    more than LONGEST_MAP, and all of them, with ``legend`` lines each, no more than ENLARGED together."""
    factor = max(1, min(-(-SHORTEST // min(height, width)), LONGEST_MAP // max(height, width)))
    while factor > 1 and images * (factor * height + legend) * factor * width > ENLARGED:
        factor -= 1
    return factor


def token_map(trace: Trace, metric: str, image: int) -> TokenMap:
    """The map of one of METRICS for image number ``image``: grey, with the reason, if this run has no such numbers.
    Raises ValueError for another metric."""
    if metric not in METRICS:
        there = ", ".join(name for name in METRICS if not lacking(trace, name))
        raise ValueError(f"metric is {metric!r}; choose one of: {there}.")
    if reason := lacking(trace, metric):
        return _blank(metric, reason, (trace.rows, trace.cols))
    records = {name: trace.grid(name)[image].numpy() for name in trace.positions}
    return METRICS[metric].draw(TokenRecords(records, trace.continuous))


def lacking(trace: Trace, metric: str) -> str:
    """Why this run has no such numbers; empty if it has them."""
    wanted = METRICS[metric]
    if wanted.continuous not in (None, trace.continuous):
        return f"it sampled {'vectors' if trace.continuous else 'token ids'}"
    if wanted.absent and not trace.positions[metric.replace(" ", "_")].any():
        return wanted.absent
    return ""


def _blank(metric: str, reason: str, shape: tuple[int, int]) -> TokenMap:
    """A grey map that says why there is nothing to see."""
    colours = np.full((*shape, 3), GREY, np.uint8)
    legend = (Swatch(GREY, f"{reason}; choose another metric"),)
    return TokenMap(colours, np.zeros(shape, np.float32), f"This run has no {metric}", legend)


@dataclass(frozen=True)
class TokenRecords:
    """The records of an image's tokens, [h, w] each, of a run of vectors if ``continuous``."""

    records: dict[str, np.ndarray]
    continuous: bool

    def __getitem__(self, record: str) -> np.ndarray:
        return self.records[record]

    @property
    def free(self) -> np.ndarray:
        """Neither kept nor fixed."""
        return self["source"] != Source.FORCED

    @property
    def judged(self) -> np.ndarray:
        """Was a draft verified there."""
        return self.free & (self["depth"] > 0) & (self["source"] != Source.SKIPPED)

    def source_name(self, kind: Source) -> str:
        return CONTINUOUS_NAMES[kind] if self.continuous and kind in CONTINUOUS_NAMES else SOURCES[kind][0]


def _sources(tokens: TokenRecords) -> TokenMap:
    source = tokens["source"]
    colours = np.zeros((*source.shape, 3), np.uint8)
    legend = []
    for kind, (_, colour) in SOURCES.items():
        where = source == kind
        colours[where] = colour
        if where.any():
            legend.append(Swatch(colour, f"{tokens.source_name(kind)}: {where.sum()} ({where.mean():.0%})"))
    accepted = (source == Source.ACCEPTED) | (source == Source.RELAXED)
    return TokenMap(colours, accepted.astype(np.float32), "Source of each token", tuple(legend))


def _tokens_per_pass(tokens: TokenRecords) -> TokenMap:
    fixed = tokens["finalised_at"]
    count = np.bincount(fixed[tokens.free].ravel(), minlength=int(fixed.max()) + 1)
    return _numbers(count[fixed], tokens.free, "Tokens fixed in the same pass")


def _ratio(tokens: TokenRecords) -> TokenMap:
    """Colours on a logarithmic scale from 1/8 to 8; strength is the exact rule's acceptance probability min(1, p/q)."""
    ratio, judged = tokens["ratio"], tokens.judged
    position = (np.log2(np.clip(ratio, 1 / 8, 8)) + 3) / 6
    return _ratios(position, np.minimum(ratio, 1), judged, "Ratio p/q (the exact test accepts min(1, p/q))", "1/8", "8")


def _log_ratio(tokens: TokenRecords) -> TokenMap:
    """Colours from -LOG_RATIOS to LOG_RATIOS; strength is the probability of acceptance min(1, exp(log ratio))."""
    ratio, most = tokens["log_ratio"], LOG_RATIOS
    position = (np.clip(ratio, -most, most) / most + 1) / 2
    chance = np.exp(np.minimum(ratio, 0))
    return _ratios(position, chance, tokens.judged, "Log ratio of the test", f"-{most}", f"{most}")


def _entropy(tokens: TokenRecords) -> TokenMap:
    most = max(float(tokens["entropy"].max()), 1e-6)
    title = "Entropy of the prediction (nats)"
    return _amount(tokens["entropy"], most, tokens.free, title, "0, certain", f"{most:.1f}")


def _top1(tokens: TokenRecords) -> TokenMap:
    return _amount(tokens["top1"], 1, tokens.free, "Largest probability of the prediction", "0", "1, certain")


def _tree(record: str, title: str, tokens: TokenRecords) -> TokenMap:
    return _numbers(tokens[record], tokens.free & (tokens[record] > 0), title, "not from a tree")


def _marks(kind: Source, title: str, tokens: TokenRecords) -> TokenMap:
    """Tokens of one source in its colour of the source map, on white."""
    marked, free, colour = tokens["source"] == kind, tokens.free, SOURCES[kind][1]
    colours = np.where(marked[..., None], colour, np.where(free[..., None], 255, GREY)).astype(np.uint8)
    legend = (
        Swatch(colour, f"{tokens.source_name(kind)}: {marked.sum()} ({marked.mean():.0%})"),
        Swatch((255, 255, 255), f"all others: {(free & ~marked).sum()}"),
        *_grey(~free, KEPT),
    )
    return TokenMap(colours, marked.astype(np.float32), title, legend)


def _drift(tokens: TokenRecords) -> TokenMap:
    """Where a run may drift from the model's distribution, and by how much at most."""
    bound, title = tokens["drift_bound"], "Drift bound"
    most, whole = float(bound.max()), f"{title}, {math.fsum(bound.flat):.2f} in all"
    drawn = _amount(bound, most or 1, tokens.free, whole, "0, exact", f"{most:.2g}")
    if most:
        return drawn
    return replace(drawn, title=title, legend=(Swatch(AMOUNT[0], "exact: no drift"), *drawn.legend[1:]))


def _distance(tokens: TokenRecords) -> TokenMap:
    distances, judged = tokens["distance"], tokens.judged
    most = max(float(distances[judged & np.isfinite(distances)].max(initial=0)), 1e-6)  # drafters may fail
    distances, title = np.minimum(distances, most), "Distance of the two models' samples (latent units)"
    return _amount(distances, most, judged, title, "0", f"{most:.2f}", NOT_JUDGED)


def _order(tokens: TokenRecords) -> TokenMap:
    last = tokens["order"].size - 1
    return _amount(tokens["order"], max(last, 1), tokens.free, "Place in the order of sampling", "0, first", str(last))


def _block(tokens: TokenRecords) -> TokenMap:
    drafted = tokens.free & (tokens["block"] > 0)
    return _numbers(tokens["block"], drafted, "Round that drafted the token", NOT_JUDGED)


def _tries(tokens: TokenRecords) -> TokenMap:
    tries, failed = tokens["tries"], int((tokens["tries"] < 0).sum())
    title = "Tries to resample after a rejection" + (f"; {failed} failed" if failed else "")
    return _numbers(np.abs(tries), tries != 0, title, "not resampled by tries")


def _similarity(tokens: TokenRecords) -> TokenMap:
    """With the quartiles in the title, from which to choose a threshold."""
    values, drafted, title = tokens["similarity"], tokens.free & (tokens["tree_depth"] > 0), "Similarity of paths"
    if drafted.any():
        title += ", quarters {:.2f}, {:.2f}, {:.2f}".format(*np.quantile(values[drafted], (0.25, 0.5, 0.75)))
    return _amount(values, 1, drafted, title, "0 or less", "1, alike", "not from a tree")


def _numbers(values: np.ndarray, where: np.ndarray, title: str, grey: str = KEPT) -> TokenMap:
    """Whole numbers from 0 to their largest."""
    most = max(int(values.max()), 1)
    return _amount(values, most, where, title, "0", str(most), grey)


def _amount(
    values: np.ndarray, most: float, where: np.ndarray, title: str, low: str, high: str, grey: str = KEPT
) -> TokenMap:
    """Values from 0 to ``most``, grey where they mean nothing."""
    strength = np.where(where, np.clip(values / most, 0, 1), 0).astype(np.float32)
    colours = np.where(where[..., None], gradient(strength, AMOUNT), GREY).astype(np.uint8)
    return TokenMap(colours, strength, title, (Scale(AMOUNT, low, high), *_grey(~where, grey)))


def _ratios(position: np.ndarray, chance: np.ndarray, judged: np.ndarray, title: str, low: str, high: str) -> TokenMap:
    """Positions in 0..1 on the scale of ratios, with a probability of acceptance as strength."""
    colours = np.where(judged[..., None], gradient(position, RATIO), GREY).astype(np.uint8)
    legend = (Scale(RATIO, f"{low} or less", f"{high} or more"), *_grey(~judged, NOT_JUDGED))
    return TokenMap(colours, np.where(judged, chance, 0).astype(np.float32), title, legend)


def _grey(where: np.ndarray, text: str) -> tuple[Swatch, ...]:
    return (Swatch(GREY, f"{text}: {where.sum()}"),) if where.any() else ()


@dataclass(frozen=True)
class Metric:
    """How to draw it, and the runs that have it: of vectors if ``continuous``, of token ids if not (None: both). With
    an ``absent``, the reason, those lack it whose record of this name is zero everywhere."""

    draw: Callable[[TokenRecords], TokenMap]
    continuous: bool | None = None
    absent: str = ""


NO_TREES = "it drafted no trees"
METRICS = {  # as the node's widget lists them
    "source": Metric(_sources),
    "pass": Metric(lambda t: _numbers(t["finalised_at"], t.free, "Forward pass that fixed the token")),
    "accepted length": Metric(_tokens_per_pass),
    "ratio p/q": Metric(_ratio, False),
    "entropy": Metric(_entropy, False),
    "top-1 probability": Metric(_top1, False),
    "tree depth": Metric(partial(_tree, "tree_depth", "Levels of the token's draft tree"), False, NO_TREES),
    "tree width": Metric(partial(_tree, "tree_width", "Most drafts on one level of the token's tree"), False, NO_TREES),
    "skipped": Metric(partial(_marks, Source.SKIPPED, "Tokens accepted unverified"), False),
    "accepted by relaxation": Metric(partial(_marks, Source.RELAXED, "Draft tokens that only a relaxed rule accepted")),
    "drift bound": Metric(_drift, False),
    "distance": Metric(_distance, True),
    "log ratio": Metric(_log_ratio, True),
    "order": Metric(_order, True),
    "block": Metric(_block, True),
    "tries": Metric(_tries, True, "no token took tries"),
    "similarity": Metric(_similarity, False, "no paths were compared"),
}


def gradient(values: np.ndarray, anchors: tuple[tuple[int, int, int], ...]) -> np.ndarray:
    """Colours [..., 3] (fp64) of values in 0..1 between evenly spaced anchors."""
    stops = np.linspace(0, 1, len(anchors))
    return np.stack([np.interp(values, stops, [a[c] for a in anchors]) for c in range(3)], axis=-1)


def enlarge(grid: np.ndarray, height: int, width: int) -> np.ndarray:
    """A token grid [h, w, ...] at image size, each token a flat rectangle."""
    rows = np.arange(height) * grid.shape[0] // height
    cols = np.arange(width) * grid.shape[1] // width
    return grid[rows][:, cols]


def overlay(token_map: TokenMap, image: np.ndarray | None, opacity: float, factor: int) -> np.ndarray:
    """Map over image [H, W, 3] (uint8; None: map alone), ``factor`` times as large, above its legend.

    The map covers the middle of each token, so that its colours are those of the legend and the image keeps its own.
    """
    rows, cols = token_map.colours.shape[:2]
    height, width = image.shape[:2] if image is not None else (rows, cols)
    height, width = height * factor, width * factor
    canvas = enlarge(token_map.colours, height, width)
    if image is not None:
        covered = middles(height, rows, opacity)[:, None] & middles(width, cols, opacity)
        canvas = np.where(covered[..., None], canvas, enlarge(image, height, width))
    return np.concatenate((canvas, draw_legend(token_map, width)))


def middles(pixels: int, tokens: int, share: float) -> np.ndarray:
    """Which pixels of a side lie in the middle of their token, a ``share`` of it (0..1) wide."""
    place = (np.arange(pixels) + 0.5) * tokens / pixels % 1  # in its token
    return np.abs(place - 0.5) < share / 2


def legend_height(token_map: TokenMap) -> int:
    """Pixels of the legend below the map: title, then one line per swatch or scale."""
    return (1 + len(token_map.legend)) * LINE + 2 * MARGIN


def draw_legend(token_map: TokenMap, width: int) -> np.ndarray:
    """A dark strip [n, width, 3] (uint8): title, then one line per swatch, or a colour bar with its ends."""
    strip = Image.new("RGB", (width, legend_height(token_map)), (PAPER,) * 3)
    draw, bold, font = ImageDraw.Draw(strip), ImageFont.load_default(TITLE), ImageFont.load_default(TEXT)
    draw.text((MARGIN, MARGIN), token_map.title, INK, bold)
    for i, item in enumerate(token_map.legend):
        top = MARGIN + (i + 1) * LINE + 2
        if isinstance(item, Swatch):
            draw.rectangle((MARGIN, top, MARGIN + SWATCH_WIDTH - 1, top + SWATCH - 1), item.colour, GREY)
            draw.text((MARGIN + 34, top - 1), item.text, INK, font)
        else:
            end = width - MARGIN - int(draw.textlength(item.high, font)) - 8
            begin = MARGIN + int(draw.textlength(item.low, font)) + 8
            draw.text((MARGIN, top - 1), item.low, INK, font)
            draw.text((end + 8, top - 1), item.high, INK, font)
            strip.paste(_bar(item.colours, max(1, end - begin)), (begin, top))
    return np.asarray(strip)


def _bar(colours: tuple[tuple[int, int, int], ...], width: int) -> Image.Image:
    bar = gradient(np.linspace(0, 1, width)[None].repeat(SWATCH, 0), colours)
    return Image.fromarray(bar.round().astype(np.uint8))


def legend_records(token_map: TokenMap) -> dict[str, Any]:
    """Title and lines of the legend, JSON-ready: the page draws it in its own colours and language. A line has the
    colours of its swatch or scale, from left to right, and its texts."""
    lines = [
        {"colours": (item.colour, item.colour), "texts": [item.text]}
        if isinstance(item, Swatch)
        else {"colours": item.colours, "texts": [item.low, item.high]}
        for item in token_map.legend
    ]
    return {"title": token_map.title, "lines": lines}
