"""The main tables of the five papers: their rows as methods of ours, their columns, and the numbers that they print."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import comfyui_specar as specar

m, s, r = specar.methods, specar.structures, specar.rules

# What can be measured: a key for every column. faster@N: seconds against the first row in batches of N; the second
# line is of quality_folder.
KEYS = (
    *("seconds", "accepted_length", "step_compression", "acceptance_rate", "mean_depth", "draft_tv"),
    *("clip", "frechet", "precision", "recall", "image_reward", "hps"),
)


@dataclass(frozen=True)
class Row:
    """A row: what the paper calls it, and its method, given a drafter."""

    name: str
    method: Callable[[Any], Any]


@dataclass(frozen=True)
class Table:
    """A table. columns: title -> key; the first row is the one that speed is relative to. published: the model, then
    for each row the printed cells in the order of the columns ("": not printed). sampling: of the paper, as far as it
    says."""

    title: str
    columns: dict[str, str]
    rows: tuple[Row, ...]
    published: dict[str, tuple[tuple[str, ...], ...]]
    sampling: dict[str, Any]
    continuous: bool = False


PLAIN: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
NEXT_TOKEN = Row("next token", lambda drafter: m.NextToken())
EAGLE_2 = Row("EAGLE-2", lambda drafter: m.DraftTree(drafter, s.Dynamic()))
LANTERN_57 = s.Static("lantern_57")


def published_code(drafter: Any, length: int) -> Any:
    """Continuous speculative decoding as its authors' code has it."""
    return m.ContinuousSpeculative(drafter, length=length, mode="published")


TABLES = {
    "sjd++": Table(
        "SJD++, table 1 (MS-COCO 2017; CLIP divided by 100)",
        {
            "latency / s": "seconds",
            "latency": "faster@1",
            "step": "step_compression",
            "FID": "frechet",
            "HPSv2": "hps",
            "CLIP": "clip",
        },
        (
            NEXT_TOKEN,
            Row("SJD", lambda drafter: m.SJD(window=32, reuse="resample")),
            Row("SJD++", lambda drafter: m.SJD(window=32, reuse="threshold_paper")),
        ),
        {
            "SimpleAR 0.5B": (
                ("83.06", "1.00", "1.00", "36.78", "0.2393", "0.2832"),
                ("42.81", "1.94", "2.33", "37.00", "0.2365", "0.2820"),
                ("29.88", "2.78", "3.28", "37.20", "0.2344", "0.2810"),
            ),
            "LlamaGen 0.8B": (
                ("46.02", "1.00", "1.00", "32.25", "0.2674", "0.3045"),
                ("33.18", "1.39", "2.10", "32.40", "0.2651", "0.3033"),
                ("19.84", "2.32", "3.26", "32.58", "0.2630", "0.3020"),
            ),
            "Janus-Pro 1B (window 250)": (
                ("14.50", "1.00", "1.00", "33.97", "0.2838", "0.3149"),
                ("8.01", "1.81", "1.96", "34.20", "0.2819", "0.3138"),
                ("6.29", "2.31", "2.47", "34.40", "0.2803", "0.3127"),
            ),
            "Lumina-mGPT 7B (window 96)": (
                ("87.23", "1.00", "1.00", "30.77", "0.2857", "0.3152"),
                ("42.73", "2.04", "2.22", "30.90", "0.2838", "0.3140"),
                ("27.92", "3.12", "6.44", "31.48", "0.2817", "0.3127"),
            ),
            "Emu3-Gen 8B (window 96)": (
                ("375.29", "1.00", "1.00", "35.46", "0.2563", "0.2996"),
                ("207.61", "1.81", "2.01", "35.60", "0.2542", "0.2995"),
                ("124.62", "3.01", "7.50", "35.79", "0.2524", "0.2983"),
            ),
        },
        PLAIN | {"top_k": 2000},
    ),
    "cool-sd": Table(
        "Cool-SD, table 1 (MS-COCO 2017), and the TV of its table 3",
        {
            "CLIP": "clip",
            "FID": "frechet",
            "IR": "image_reward",
            "acc. len.": "accepted_length",
            "latency / s": "seconds",
            "speed-up": "faster@1",
            "TV(p, q)": "draft_tv",
        },
        (
            NEXT_TOKEN,
            Row("EAGLE-1", lambda drafter: m.DraftTree(drafter, LANTERN_57)),
            Row("LANTERN++ (lambda 2, k 10)", m.LanternPP),
            Row("Cool-SD (delta 1.1)", lambda d: m.CoolSD(d, LANTERN_57, delta=1.1, decay=0.7, floor=False)),
            Row("Cool-SD (delta 2)", lambda d: m.CoolSD(d, LANTERN_57, delta=2.0, decay=0.7, floor=False)),
        ),
        {
            "Lumina-mGPT": (
                ("0.3330", "28.99", "0.6855", "1.00 (0.00)", "170.14 (1.32)", "1.00"),
                ("0.3330", "29.05", "0.6883", "2.76 (0.07)", "71.66 (1.80)", "2.37"),
                ("0.3328", "30.31", "0.6697", "2.99 (0.07)", "68.64 (1.86)", "2.48"),
                ("0.3325", "30.30", "0.6699", "3.11 (0.07)", "63.24 (1.83)", "2.69"),
            ),
            "LlamaGen-XL": (
                ("0.3162", "21.08", "-0.0763", "1.00 (0.00)", "10.11 (0.82)", "1.00"),
                ("0.3157", "20.97", "-0.0859", "2.42 (0.15)", "4.99 (0.34)", "2.03"),
                ("0.3157", "21.17", "-0.1155", "2.67 (0.18)", "4.70 (0.38)", "2.15"),
                ("0.3167", "21.02", "-0.0997", "2.73 (0.16)", "4.46 (0.34)", "2.27"),
                ("0.3154", "21.20", "-0.1353", "3.34 (0.20)", "3.72 (0.27)", "2.72"),
            ),
        },
        PLAIN,
    ),
    "adt-tree": Table(
        "ADT-Tree, table I (MS-COCO 2017, temperature 1)",
        {"SR": "faster@1", "tau": "accepted_length", "mean depth": "mean_depth", "HPSv2": "hps", "CLIP": "clip"},
        (
            NEXT_TOKEN,
            EAGLE_2,
            Row("LANTERN", m.Lantern),
            Row("ADT-Tree", lambda drafter: m.ADTTree(drafter, bonus=True)),
            Row("ADT-Tree + LANTERN", lambda drafter: m.ADTTree(drafter, r.Lantern(), bonus=True)),
        ),
        {
            "Anole": (
                ("1.00", "1.00", "1.00", "0.2360", "0.3042"),
                ("0.76", "1.11", "5.00", "0.2361", "0.3047"),
                ("1.38", "2.00", "5.00", "0.2303", "0.3005"),
                ("1.06", "1.10", "2.09", "0.2367", "0.3047"),
                ("1.53", "1.87", "2.10", "0.2331", "0.3016"),
            )
        },
        PLAIN,
    ),
    "vvs": Table(
        "VVS, table 1 (MS-COCO 2017)",
        {
            "l": "faster@1",
            "TPF": "accepted_length",
            "FID": "frechet",
            "CLIP": "clip",
            "precision": "precision",
            "recall": "recall",
            "HPSv2": "hps",
        },
        (
            NEXT_TOKEN,
            EAGLE_2,
            Row("LANTERN (delta 0.3; stage II 0.2)", lambda drafter: m.Lantern(drafter, s.Dynamic(), delta=0.3)),
            Row(
                "VVS-U (i 4, delta 0.2; stage II i 2, 0.1)",
                lambda d: m.VVS(d, s.Dynamic(), rule=r.Lantern(1000, 0.2, redraw="paper"), interval=4, refresh=False),
            ),
        ),
        {
            "LlamaGen-XL, stage I": (
                ("1.00", "1.00", "24.88", "0.3220", "0.5084", "0.6684", "0.2350"),
                ("0.87", "1.22", "25.28", "0.3220", "0.5094", "0.6690", "0.2353"),
                ("1.45", "2.10", "24.97", "0.3223", "0.5494", "0.6438", "0.2293"),
                ("1.63", "2.24", "24.96", "0.3210", "0.5416", "0.6486", "0.2241"),
            ),
            "LlamaGen-XL, stage II": (
                ("1.00", "1.00", "48.23", "0.2939", "0.4028", "0.5784", "0.2386"),
                ("0.92", "1.22", "47.80", "0.2937", "0.4040", "0.5594", "0.2385"),
                ("1.26", "1.83", "50.23", "0.2910", "0.4458", "0.5360", "0.2314"),
                ("1.76", "2.86", "47.19", "0.2886", "0.4856", "0.4588", "0.2172"),
            ),
        },
        PLAIN,
    ),
    "continuous": Table(
        "Continuous speculative decoding, table 1 (ImageNet, 256 pixels)",
        {"alpha": "acceptance_rate", **{f"bs={size}": f"faster@{size}" for size in (1, 8, 128, 256)}},
        (
            Row("one token a pass", lambda drafter: m.ContinuousNextToken()),
            *(
                Row(f"gamma {length}", lambda drafter, length=length: published_code(drafter, length))
                for length in (32, 16, 8, 4)
            ),
        ),
        {
            "MAR-H with MAR-B": (
                ("", "1.00", "1.00", "1.00", "1.00"),
                ("0.19", "1.44", "1.61", "2.17", "2.33"),
                ("0.26", "1.37", "1.51", "2.07", "2.20"),
                ("0.27", "1.26", "1.44", "1.88", "1.96"),
                ("0.30", "1.11", "1.20", "1.56", "1.62"),
            ),
            "xAR-H with xAR-B": (
                ("", "1.00", "1.00", "1.00", "1.00"),
                ("0.22", "1.77", "2.10", "2.52", "2.72"),
                ("0.26", "1.58", "2.06", "2.31", "2.61"),
                ("0.29", "1.61", "1.86", "2.07", "2.18"),
                ("0.36", "1.30", "1.62", "1.92", "2.11"),
            ),
        },
        {},
        continuous=True,
    ),
}
