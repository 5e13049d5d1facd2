"""Calculate what a round of every method takes on a GPU, beside what was measured on the one that ran it.

``python -m tools.benchmarks documents`` writes the tables. Nothing is timed.

A round takes what its products, its attention, its other launches and the gap before it take:

products   of a layer's four matrices, the head, and the drafter: a fixed time each, and the bytes of the weights over
           the card's bandwidth, or their instructions or operations over its speed, whichever takes longest
attention  by kernels that were timed (one launch a layer), or else its launches, the bytes of keys and values at the
           speed of torch's own attention, and its operations
others     launches, which are counted (launches.py), times a fixed time

Fixed times and shares of a card's speed come from the H200's report, by the functions below, and are taken to be the
same on other cards. So a report of another day changes them, and a change of the code changes the launches. Tokens per
round are the H200's, of the bundled model; other models and drafters accept other numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import ceil
from typing import Any

from comfyui_specar.model_loaders.storage import Plan, choose_storage
from comfyui_specar.samplers.drafts.auto import RANKS, Acceptance, Auto, best_paths, sibling_chances, tokens_per_round
from comfyui_specar.samplers.drafts.costs import PassCosts
from comfyui_specar.samplers.drafts.trees import Path, published_paths
from comfyui_specar.samplers.methods.pass_costs import FRONTIERS, WIDTHS

from . import sizes
from .automatic import GIB, TAKEN, plans
from .launches import TABLE
from .report import grid
from .results_tables import cases, results

REPORT, OURS, CUBLAS = "gpu-nvidia-h200", "product alone, us", "cuBLAS, us"
ROWS = 2  # of a token: with guidance
BITS = {"bf16": 16, "int8": 8, "int4": 4.5}  # of a number, with step and minimum of its group
TILE = 32  # rows that few_rows multiplies at once
DRAFTED = 8  # tokens of a pass of the drafter (a chain's has 1, a tree's at most 15)
CALLED = "ADT-Tree", "VVS every 4th, EAGLE-1"  # not captured by the code of the report


@dataclass(frozen=True)
class Card:
    """A GPU: GiB, bytes per second of its data sheet, operations per second of its tensor cores (bf16, summed in fp32)
    that matrices of some hundred rows reach, and instructions of warps per second (4 of a multiprocessor in a cycle).
    """

    name: str
    memory: float
    bandwidth: float
    operations: float
    instructions: float


@dataclass(frozen=True)
class Model:
    """A released model: its name in sizes.SIZES, and the row of the attention that was measured on its shapes or on
    those most like them."""

    name: str
    size: str
    attention: str

    @property
    def shapes(self) -> Any:
        return sizes.SIZES[self.size].config

    @property
    def layer(self) -> int:
        """Numbers of a layer's matrices."""
        c = self.shapes
        heads = c.heads + 2 * c.cached_heads
        return c.dim * (c.head_dim * heads + 3 * c.ffn_dim) + c.heads * c.head_dim * c.dim

    @property
    def head(self) -> int:
        """Numbers of the head's matrices."""
        c = self.shapes
        return c.dim * (c.vocab + (c.dim if self.size.startswith("janus") else 0))

    @property
    def slots(self) -> float:
        """Keys in the middle of an image."""
        rows, columns = sizes.SIZES[self.size].grid
        return sizes.PROMPT + rows * (columns + sizes.SIZES[self.size].specials[0]) / 2


@dataclass(frozen=True)
class Method:
    """A round: its case of launches.py, its row of the report's ratios, the tokens it feeds, and passes of the drafter
    in it."""

    name: str
    case: str
    measured: str
    tokens: int
    drafted: int = 0


H200 = Card("H200", 139.8, 4.8e12, 400e12, 132 * 4 * 1.98e9)
# 0.8 of the data sheet's operations: not measured.
CARDS = (
    H200,
    Card("RTX 4090", 24, 1.008e12, 0.8 * 165e12, 128 * 4 * 2.52e9),
    Card("RTX 3060", 12, 0.36e12, 0.8 * 25.5e12, 28 * 4 * 1.78e9),
)
XL, LUMINA = Model("LlamaGen-XL", "llamagen-xl", "xl"), Model("Lumina-mGPT-7B", "lumina-mgpt-7b", "lumina")
MODELS = (
    XL,
    Model("Janus-Pro-7B", "janus-pro-7b", "lumina"),
    LUMINA,
    Model("Emu3.5-34B, 512 pixels", "emu3.5-34b", "emu3"),
)
NEXT = Method("next token", "next token", "next_token", 1)
CHAIN = Method("EAGLE, chain of 5", "chain of 5", "chain of 5", 6, 5)
TREE = Method("EAGLE-1, 57 drafts", "EAGLE-1, 57 drafts", "EAGLE-1, 57 drafts", 58, 5)
VVS = Method("VVS, every 4th, tree of 57", "VVS, verified", "VVS every 4th, EAGLE-1", 58, 5)
AFTER = Method("", "VVS, verified after a skipped round", "", 63, 5)
SKIPPED = Method("", "VVS, skipped", "", 0, 5)
METHODS = (
    NEXT,
    Method("SJD, window 16", "sjd 32", "sjd coupled w16", 16),
    Method("SJD, window 32", "sjd 32", "sjd coupled w32", 32),
    Method("SJD++ (paper), window 32", "sjd++ 32", "sjd threshold_paper w32", 32),
    CHAIN,
    Method("EAGLE-1, 25 drafts", "EAGLE-1, 25 drafts", "EAGLE-1, 25 drafts", 26, 5),
    TREE,
    Method("EAGLE-2, 58 drafts", "EAGLE-2", "EAGLE-2", 59, 5),
    Method("LANTERN, delta 0.3", "LANTERN delta 0.3", "LANTERN delta 0.3", 59, 5),
    Method("Cool-SD, delta 2", "Cool-SD delta 2", "Cool-SD delta 2", 58, 5),
    VVS,
    Method("ADT-Tree", "ADT-Tree", "ADT-Tree", 59, 3),
)


# What was measured and counted


def rows(stage: str) -> list[dict[str, Any]]:
    """Those of a stage of the report."""
    [found] = [found for found in results(REPORT)["stages"] if found["stage"] == stage]
    return found["rows"]


def measured(stage: str, model: Model, method: Method) -> float:
    """Milliseconds of a round in the stage ``passes`` or ``ratios``."""
    if stage == "passes":
        names = model.size, method.measured
        return next(row["ms"] for row in rows(stage) if (row["model"], row["method"]) == names)
    return 1000 * ratio(method)["seconds"] / ratio(method)["passes"]


def ratio(method: Method) -> dict[str, Any]:
    """The row of a method's images."""
    return next(row for row in rows("ratios") if row["method"] == method.measured)


def tokens_of(method: Method) -> float:
    """Tokens per forward pass of the target."""
    return ratio(method)["fewer passes"]


@cache
def counted(before: bool = False) -> dict[str, dict[str, int]]:
    """Launches by case; before: of the code that the report is of."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    return table["before"]["cases"] if before else table["cases"]


# What follows from the report


def bytes_us(card: Card, count: float) -> float:
    """Microseconds to read bytes: at the share of the data sheet's bandwidth that copying reached."""
    found = next(row["value"] for row in rows("device") if row["fact"] == "copying moves")
    return count / (card.bandwidth * float(found.split()[0]) * 1e9 / H200.bandwidth) * 1e6


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Of two points: y at x = 0, and the slope."""
    slope = (y[1] - y[0]) / (x[1] - x[0])
    return y[0] - slope * x[0], slope


def between(points: Sequence[tuple[float, float]], x: float) -> float:
    """On the lines through points, which rise in x; outside of these as at the nearest."""
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if x < x1:
            return y0 + (y1 - y0) * max(0.0, (x - x0) / (x1 - x0))
    return points[-1][1]


@cache
def product_times(kernel: str, storage: str = "bf16") -> list[tuple[int, float, float]]:
    """By rows: microseconds of a product whatever its size, and those of the four of a layer of 7B without these four,
    by the two layers of the stage ``products`` (a line through their bytes)."""
    found = []
    for count in (2, 16, 64):
        own = [row for row in rows("products") if (row["rows"], row["storage"]) == (count, storage)]
        sums = [sum(row[kernel] for row in own if row["matrix"].startswith(name)) for name in ("xl", "7b")]
        fixed, slope = line([bytes_us(H200, model.layer * BITS[storage] / 8) for model in (XL, LUMINA)], sums)
        found.append((count, fixed / 4, slope))
    return found


@cache
def instructions(storage: str, count: int) -> float:
    """Of a warp per number of a narrow matrix (the compiled table), times its row tiles."""
    loops = results("compiled")["tritons"]["3.9.0"]["86"]["loops"]
    each = [n for name, n in loops.items() if name.startswith(f"{storage}, {2 if count <= 16 else 64} rows")]
    return max(each) / 1000 * ceil(count / TILE)


@cache
def issued() -> float:
    """The share of its instructions per second that a card reaches, by 7B products of 64 rows with int8."""
    _, fixed, slope = product_times(OURS, "int8")[-1]
    took = slope * bytes_us(H200, LUMINA.layer)
    return LUMINA.layer * instructions("int8", 64) / (took * H200.instructions * 1e-6)


def products(card: Card, numbers: float, count: float, tokens: float, storage: str, kernel: str) -> float:
    """Microseconds of ``count`` products with ``numbers`` in all, by the rows of so many tokens."""
    fed = ROWS * tokens
    read, operations = bytes_us(card, numbers * BITS[storage] / 8), 2 * fed * numbers / card.operations * 1e6
    times = product_times(OURS if storage != "bf16" else kernel)
    fixed, slope = (between([(each[0], each[i]) for each in times], fed) for i in (1, 2))
    if storage == "bf16":
        return count * fixed + max(slope * read, operations)
    worked = numbers * instructions(storage, ceil(fed)) / (card.instructions * issued()) * 1e6
    return count * times[0][1] + max(read, worked, operations)


@cache
def attention_times(column: str) -> dict[str, list[tuple[float, float]]]:
    """(tokens, microseconds) of attention by model."""
    return {
        model: [(row["tokens"], row[column]) for row in rows("attention") if row["model"] == model]
        for model in ("xl", "lumina", "emu3")
    }


def cached(model: Model, tokens: float) -> float:
    """Bytes of the keys and values of a layer."""
    c = model.shapes
    return 2 * ROWS * 2 * c.cached_heads * c.head_dim * (model.slots + tokens)


@cache
def of_bandwidth() -> float:
    """How much longer than copying its bytes torch's attention of one token takes: a line through two models."""
    times = attention_times("scaled_dot_product_attention, us")
    return line([bytes_us(H200, cached(m, 1)) for m in (XL, LUMINA)], [times[n][0][1] for n in ("xl", "lumina")])[1]


def attention(card: Card, model: Model, tokens: float, launched: int, small: float) -> float:
    """Microseconds of a layer's attention. One launch: the kernel that was measured, two warps for one tile."""
    moved = of_bandwidth() * bytes_us(card, cached(model, tokens))
    if launched == 1:
        queries = tokens * model.shapes.heads / model.shapes.cached_heads
        column = "two warps, us" if queries <= TILE else "four warps, us"
        return max(between(attention_times(column)[model.attention], tokens), moved)
    c = model.shapes
    operations = 4 * ROWS * tokens * c.heads * c.head_dim * (model.slots + tokens)
    return launched * small + moved + 2 * operations / card.operations * 1e6


def parts(
    card: Card, model: Model, method: Method, storage: str = "bf16", before: bool = False, small: float = 0.0
) -> tuple[float, int]:
    """Microseconds of a round's products and attention, and the number of its other launches. The drafter, a layer
    before the model's own head, is in bf16."""
    c, matrices = model.shapes, 1 + model.size.startswith("janus")  # of the head
    case, launched = (
        counted(before)[f"{XL.size}, {method.case}"],
        counted(before)[f"{XL.size}, next token"]["attention"],
    )
    layers = c.layers if method.tokens else 0
    multiplied = partial(products, card, tokens=method.tokens, kernel=OURS if case["few rows"] else CUBLAS)
    took = multiplied(layers * model.layer, 4 * layers, storage=storage)
    took += multiplied(model.head, matrices, storage="bf16") if layers else 0.0
    took += layers * attention(card, model, method.tokens, launched, small)
    drafter = products(card, model.layer + 2 * c.dim**2 + model.head, 5 + matrices, DRAFTED, "bf16", OURS)
    took += method.drafted * (drafter + attention(card, model, DRAFTED, launched, small))
    known = layers * (4 + launched) + matrices * (layers > 0) + method.drafted * (5 + matrices + launched)
    return took, case["launches"] + (c.layers - XL.shapes.layers) * case["of a layer"] - known


@cache
def small_us() -> float:
    """Microseconds of any other launch: what a chain of 5 takes longer than next token (``ratios``), for its launches
    beyond next token's and the drafter's products and attention."""
    (chain, more), (plain, fewer) = (parts(H200, XL, method, before=True) for method in (CHAIN, NEXT))
    took = 1000 * (measured("ratios", XL, CHAIN) - measured("ratios", XL, NEXT))
    return (took - (chain - plain)) / (more - fewer)


@cache
def gap_us() -> float:
    """Microseconds of a round that nothing else explains: of LlamaGen-XL's next token (``passes``)."""
    took, others = parts(H200, XL, NEXT, before=True)
    return 1000 * measured("passes", XL, NEXT) - took - small_us() * others


# What is predicted


@cache
def one_round(card: Card, model: Model, method: Method, storage: str = "bf16", before: bool = False) -> float:
    """Milliseconds of a round."""
    took, others = parts(card, model, method, storage, before, small_us())
    return (took + small_us() * others + gap_us()) / 1000


def milliseconds(card: Card, model: Model, method: Method, storage: str = "bf16") -> float:
    """Of a round; of VVS of a verified one with its part of those skipped, which are as many as on a CPU."""
    if method is not VVS:
        return one_round(card, model, method, storage)
    row = cases("default-cpu", 2.0)[VVS.measured]
    skipped = row["draft_passes"] / (VVS.drafted * row["passes"]) - 1
    verified, after, alone = (one_round(card, model, each, storage) for each in (VVS, AFTER, SKIPPED))
    return (1 - skipped) * verified + skipped * (after + alone)


def floor(card: Card, model: Model, storage: str = "bf16") -> float:
    """Milliseconds to read what a pass of one token must."""
    layers = model.shapes.layers
    weights = layers * model.layer * BITS[storage] / 8 + 2 * model.head
    return bytes_us(card, weights + layers * cached(model, 1)) / 1000


def solved(value: Callable[[float], float], wanted: float) -> float:
    """Where a function that rises reaches ``wanted``, between 0 and 1."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if value(middle) > wanted else (middle, high)
    return low


def acceptance(first: float, sibling: float) -> Acceptance:
    """Of first children, and of a sibling relative to the one before it."""
    return (tuple(first * sibling**rank for rank in range(RANKS)),) * Auto.depth


def tokens_with(paths: Sequence[Path], accepts: Acceptance) -> float:
    """Tokens that a round with a tree decides."""
    return tokens_per_round(tuple(paths), [sibling_chances(row) for row in accepts])


@cache
def accepted() -> Acceptance:
    """The acceptance with which a chain of 5 and the tree of 57 take the passes that they took."""
    chain = [(0,) * length for length in range(1, CHAIN.drafted + 1)]
    first = solved(lambda rate: tokens_with(chain, acceptance(rate, 0.0)), tokens_of(CHAIN))
    tree = published_paths("lantern_57")
    return acceptance(first, solved(lambda rate: tokens_with(tree, acceptance(first, rate)), tokens_of(TREE)))


def auto(card: Card, model: Model, storage: str) -> tuple[int, float]:
    """Drafts of the tree that *auto* chooses for these passes, and how many times as fast as next token it is."""

    def target(tokens: int) -> float:
        return one_round(card, model, Method("", "next token" if tokens <= 8 else "sjd 32", "", tokens), storage)

    drafter = (one_round(card, model, CHAIN, storage) - target(CHAIN.tokens)) / CHAIN.drafted
    costs = PassCosts.of_seconds([(n, target(n)) for n in WIDTHS], drafter, [(n, drafter) for n in FRONTIERS])
    paths, _, rate = best_paths(accepted(), costs, Auto.nodes)
    return len(paths), rate


@cache
def ways_of(size: str) -> tuple[Plan, ...]:
    return tuple(plans(size))


def stored(card: Card, model: Model) -> str | None:
    """The widest way to store a model with which it fits the card (None: it does not)."""
    free = card.memory * GIB - TAKEN
    way = choose_storage(list(ways_of(model.size)), free, True)
    return None if way.bytes_streamed(free) else way.name.removesuffix(" (storage)")


# Tables


def faster(card: Card, model: Model, method: Method, storage: str) -> float:
    """How many times as fast as next token."""
    times = (milliseconds(card, model, each, storage) for each in (NEXT, method))
    return next(times) / next(times) * tokens_of(method)


def table_of_cards() -> str:
    """How many times as fast as next token all methods are, on every card that a model fits."""
    lines = []
    for card in CARDS:
        for model in MODELS:
            if storage := stored(card, model):
                ms, least = one_round(card, model, NEXT, storage), floor(card, model, storage)
                times = (f"{faster(card, model, method, storage):.1f}" for method in METHODS[1:])
                about = card.name, f"{model.name}, {storage}", f"{ms:.1f}", f"{ms / least:.2f}"
                lines.append((*about, *times, f"{auto(card, model, storage)[1]:.1f}"))
    head = "card", "model", "next token, ms", "over its floor", *(method.name for method in METHODS[1:]), "auto"
    return grid(head, lines)


def table_of_checks() -> str:
    """What the report measured of the code of its day, beside what is predicted of that code."""
    lines = []
    for model, stage in ((XL, "ratios"), (XL, "passes"), (LUMINA, "passes")):
        for method in METHODS:
            there = [row for row in rows(stage) if row["method"] == method.measured]
            if any(row.get("model", XL.size) == model.size for row in there) and method.measured not in CALLED:
                found = one_round(H200, model, method, before=True)
                took = measured(stage, model, method)
                lines.append((model.name, method.name, f"{found:.2f}", f"{took:.2f}", f"{found / took - 1:+.0%}"))
    return grid(("model", "method", "predicted, ms", "measured, ms", "difference"), lines)


def table_of_launches() -> str:
    """Launches of every case of LlamaGen-XL, before and today."""
    before, now = counted(before=True), counted()
    lines = [
        (name.removeprefix(f"{XL.size}, "), before[name]["launches"], now[name]["launches"] if name in now else "")
        for name in before
        if name.startswith(XL.size)
    ]
    commit = json.loads(TABLE.read_text(encoding="utf-8"))["before"]["commit"]
    return grid(("LlamaGen-XL, a round of", f"launches, {commit}", "now"), lines)
