"""Speed-ups and scores that papers publish, for the models they name, on their GPUs. None was reproduced here."""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """A published ratio to next-token sampling. method: the page in docs/methods; fewer: forward passes saved ("" if
    not given; VVS prints tokens per pass, Cool-SD and ADT-Tree tokens per round); faster: in time; source: a key of
    CONDITIONS."""

    method: str
    what: str
    model: str
    fewer: str
    faster: str
    source: str


class Scores(NamedTuple):
    """What a paper prints of images. case: our name of the setting (quality_cases.py); fewer: forward passes saved
    ("" if not given); scores: each with next token's of the same table."""

    case: str
    what: str
    model: str
    fewer: str
    scores: dict[str, tuple[str, str]]
    source: str


SJD, MC_SJD, LUMINA2 = "SJD++, table 1", "MC-SJD, abstract", "Lumina-mGPT 2.0, README"
COOL, ADT, VVS, CONTINUOUS = "Cool-SD, table 1", "ADT-Tree, table I", "VVS, table 1", "continuous, table 1"
ADT_PARTI, ADT_IMAGES, ADT_CLASSES = "ADT-Tree, table II", "ADT-Tree, tables I and III", "ADT-Tree, table V"
HARMON = "continuous, table 2"
GSD, ENTROPY = "GSD, abstract", "entropy, abstract"
CONDITIONS = {  # what the papers say of how a source's numbers were measured
    SJD: "prompts of MS-COCO 2017, guidance 3, top-k 2000, window 96 (Emu3, Lumina-mGPT), 250 (Janus-Pro) or 32, "
    "SJD++'s threshold 0.5; temperature not stated; one GPU, not named.",
    MC_SJD: "the best case over its image models; for the conditions see the paper.",
    LUMINA2: "one A100: 694 s by next-token sampling, 324 s by SJD (304 s with 4-bit weights, too); its example has "
    "768 pixels, guidance 4, top-k 4096, temperature 1, its code a window of 16.",
    COOL: "5000 captions of MS-COCO 2017, EAGLE-1's static tree, LANTERN's set-up, temperature not "
    "stated; one A100 (40 GB). Fewer passes: its accepted length, tokens per round.",
    ADT: "100 captions of MS-COCO 2017, temperature 1, guidance 3; GPU not named. Fewer passes: its tau, "
    "tokens per cycle. The abstract's 3.13x is with LANTERN at temperature 0, where its authors' code relaxes and "
    "ours does not.",
    ADT_PARTI: "100 prompts of PartiPrompts, otherwise as table I.",
    ADT_CLASSES: "classes of ImageNet, temperature 1; GPU not named. Fewer passes: its tau, tokens per cycle.",
    ADT_IMAGES: "100 captions of MS-COCO 2017, temperature 1, guidance 3; with LANTERN at delta 0.4, k 1000, "
    "as figure 7 says. Fewer passes: its tau, tokens per cycle.",
    VVS: "5000 captions of MS-COCO 2017, stages I (256 pixels) and II (512), temperature 1; one A40. Fewer "
    "passes: its TPF, tokens per pass.",
    GSD: "the mean over its models and settings; for the conditions see the paper.",
    ENTROPY: "about 85 % of the cost of speculative decoding without the rule; for the conditions see the paper.",
    CONTINUOUS: "ImageNet, 256 pixels, draft length 4 to 32; one A100. xAR with cells of one token, whose weights are "
    "not public.",
    HARMON: "draft length 4 to 32; one A100. The models are Harmon-1.5B and Harmon-0.5B.",
}
PUBLISHED = (
    Published("sjd", "SJD", "Emu3", "2.01x", "1.81x", SJD),
    Published("sjd", "SJD", "Lumina-mGPT", "2.22x", "2.04x", SJD),
    Published("sjd", "SJD", "LlamaGen", "2.10x", "1.39x", SJD),
    Published("sjd", "SJD", "Janus-Pro-1B", "1.96x", "1.81x", SJD),
    Published("sjd", "SJD", "SimpleAR-0.5B", "2.33x", "1.94x", SJD),
    Published("sjd", "SJD", "Lumina-mGPT 2.0", "", "2.14x", LUMINA2),
    Published("sjd", "MC-SJD", "images, best case", "", "4.2x", MC_SJD),
    Published("sjd-plus-plus", "SJD++", "Emu3", "7.50x", "3.01x", SJD),
    Published("sjd-plus-plus", "SJD++", "Lumina-mGPT", "6.44x", "3.12x", SJD),
    Published("sjd-plus-plus", "SJD++", "LlamaGen", "3.26x", "2.32x", SJD),
    Published("sjd-plus-plus", "SJD++", "Janus-Pro-1B", "2.47x", "2.31x", SJD),
    Published("sjd-plus-plus", "SJD++", "SimpleAR-0.5B", "3.28x", "2.78x", SJD),
    Published("draft-trees", "EAGLE-1", "Lumina-mGPT", "2.76x", "2.37x", COOL),
    Published("draft-trees", "EAGLE-1", "LlamaGen-XL", "2.42x", "2.03x", COOL),
    Published("draft-trees", "EAGLE-2", "Anole", "1.11x", "0.76x", ADT),
    Published("draft-trees", "EAGLE-2", "Anole", "1.26x", "0.80x", ADT_PARTI),
    Published("draft-trees", "EAGLE-2", "LlamaGen-XL, stage I", "1.22x", "0.87x", VVS),
    Published("lantern", "LANTERN", "Anole", "2.00x", "1.38x", ADT),
    Published("lantern", "LANTERN", "Anole", "2.08x", "1.90x", ADT_PARTI),
    Published("lantern", "LANTERN, delta 0.3", "LlamaGen-XL, stage I", "2.10x", "1.45x", VVS),
    Published("lantern", "LANTERN++, k 10, lambda 2", "Lumina-mGPT", "2.99x", "2.48x", COOL),
    Published("lantern", "LANTERN++, k 10, lambda 2", "LlamaGen-XL", "2.67x", "2.15x", COOL),
    Published("cool-sd", "Cool-SD, delta 1.1", "Lumina-mGPT", "3.11x", "2.69x", COOL),
    Published("cool-sd", "Cool-SD, delta 1.1", "LlamaGen-XL", "2.73x", "2.27x", COOL),
    Published("cool-sd", "Cool-SD, delta 2", "LlamaGen-XL", "3.34x", "2.72x", COOL),
    Published("adt-tree", "ADT-Tree", "Anole", "1.10x", "1.06x", ADT),
    Published("adt-tree", "ADT-Tree with LANTERN", "Anole", "1.87x", "1.53x", ADT),
    Published("adt-tree", "ADT-Tree", "Anole", "1.17x", "1.57x", ADT_PARTI),
    Published("adt-tree", "ADT-Tree with LANTERN", "Anole", "1.78x", "2.20x", ADT_PARTI),
    Published("adt-tree", "ADT-Tree", "LlamaGen-L", "2.85x", "1.32x", ADT_CLASSES),
    Published("adt-tree", "ADT-Tree", "LlamaGen-XL", "2.53x", "1.39x", ADT_CLASSES),
    Published("vvs", "VVS, every 4th, LANTERN delta 0.2", "LlamaGen-XL, stage I", "2.24x", "1.63x", VVS),
    Published("vvs", "VVS, every 2nd, LANTERN delta 0.1", "LlamaGen-XL, stage II", "2.86x", "1.76x", VVS),
    Published("rules", "grouped (GSD)", "mean of its models", "", "3.7x", GSD),
    Published("rules", "entropy, relative to decoding without it", "not named in the abstract", "", "1.2x", ENTROPY),
    Published("continuous", "one image", "MAR-H with MAR-B", "", "1.11x to 1.44x", CONTINUOUS),
    Published("continuous", "256 images", "MAR-H with MAR-B", "", "1.62x to 2.33x", CONTINUOUS),
    Published("continuous", "one image", "xAR-H with xAR-B", "", "1.30x to 1.77x", CONTINUOUS),
    Published("continuous", "256 images", "xAR-H with xAR-B", "", "2.11x to 2.72x", CONTINUOUS),
    Published("continuous", "one image, 256 pixels", "Harmon", "", "1.11x to 1.47x", HARMON),
    Published("continuous", "32 images, 256 pixels", "Harmon", "", "1.42x to 2.05x", HARMON),
    Published("continuous", "one image, 512 pixels", "Harmon", "", "1.20x to 1.63x", HARMON),
    Published("continuous", "32 images, 512 pixels", "Harmon", "", "1.63x to 2.54x", HARMON),
)
SCORES = (
    Scores(
        "sjd resample w32",
        "SJD",
        "LlamaGen",
        "2.10x",
        {"FID": ("32.40", "32.25"), "CLIP": ("30.33", "30.45"), "HPSv2": ("0.2651", "0.2674")},
        SJD,
    ),
    Scores(
        "sjd threshold_paper w32",
        "SJD++",
        "LlamaGen",
        "3.26x",
        {"FID": ("32.58", "32.25"), "CLIP": ("30.20", "30.45"), "HPSv2": ("0.2630", "0.2674")},
        SJD,
    ),
    Scores(
        "SJD++ reuse (paper), window 96",
        "SJD++",
        "Lumina-mGPT",
        "6.44x",
        {"FID": ("31.48", "30.77"), "CLIP": ("31.27", "31.52"), "HPSv2": ("0.2817", "0.2857")},
        SJD,
    ),
    Scores(
        "EAGLE-1, 57 drafts",
        "EAGLE-1",
        "LlamaGen-XL",
        "2.42x",
        {"FID": ("20.97", "21.08"), "CLIP": ("0.3157", "0.3162"), "ImageReward": ("-0.0859", "-0.0763")},
        COOL,
    ),
    Scores(
        "EAGLE-2",
        "EAGLE-2",
        "LlamaGen-XL, stage I",
        "1.22x",
        {
            "FID": ("25.28", "24.88"),
            "CLIP": ("0.3220", "0.3220"),
            "recall": ("0.6690", "0.6684"),
            "HPSv2": ("0.2353", "0.2350"),
        },
        VVS,
    ),
    Scores(
        "ADT-Tree",
        "ADT-Tree",
        "Anole",
        "1.10x",
        {"FID": ("22.20", "20.52"), "CLIP": ("0.3047", "0.3042"), "HPSv2": ("0.2367", "0.2360")},
        ADT_IMAGES,
    ),
    Scores(
        "ADT-Tree, LANTERN delta 0.3",
        "ADT-Tree with LANTERN",
        "Anole",
        "1.87x",
        {"FID": ("22.36", "20.52"), "CLIP": ("0.3016", "0.3042"), "HPSv2": ("0.2331", "0.2360")},
        ADT_IMAGES,
    ),
    Scores(
        "LANTERN delta 0.3, as published",
        "LANTERN, delta 0.3",
        "LlamaGen-XL, stage I",
        "2.10x",
        {
            "FID": ("24.97", "24.88"),
            "CLIP": ("0.3223", "0.3220"),
            "recall": ("0.6438", "0.6684"),
            "HPSv2": ("0.2293", "0.2350"),
        },
        VVS,
    ),
    Scores(
        "LANTERN++ k 10, lambda 2, as published",
        "LANTERN++, k 10, lambda 2",
        "LlamaGen-XL",
        "2.67x",
        {"FID": ("21.17", "21.08"), "CLIP": ("0.3157", "0.3162"), "ImageReward": ("-0.1155", "-0.0763")},
        COOL,
    ),
    Scores(
        "Cool-SD delta 1.1, as published",
        "Cool-SD, delta 1.1",
        "LlamaGen-XL",
        "2.73x",
        {"FID": ("21.02", "21.08"), "CLIP": ("0.3167", "0.3162"), "ImageReward": ("-0.0997", "-0.0763")},
        COOL,
    ),
    Scores(
        "Cool-SD delta 2, as published",
        "Cool-SD, delta 2",
        "LlamaGen-XL",
        "3.34x",
        {"FID": ("21.20", "21.08"), "CLIP": ("0.3154", "0.3162"), "ImageReward": ("-0.1353", "-0.0763")},
        COOL,
    ),
    Scores(
        "VVS every 4th, as published",
        "VVS, every 4th, LANTERN delta 0.2",
        "LlamaGen-XL, stage I",
        "2.24x",
        {
            "FID": ("24.96", "24.88"),
            "CLIP": ("0.3210", "0.3220"),
            "recall": ("0.6486", "0.6684"),
            "HPSv2": ("0.2241", "0.2350"),
        },
        VVS,
    ),
    Scores(
        "VVS every 2nd, as published",
        "VVS, every 2nd, LANTERN delta 0.1",
        "LlamaGen-XL, stage II",
        "2.86x",
        {
            "FID": ("47.19", "48.23"),
            "CLIP": ("0.2886", "0.2939"),
            "recall": ("0.4588", "0.5784"),
            "HPSv2": ("0.2172", "0.2386"),
        },
        VVS,
    ),
)
