"""Words by which ComfyUI's search finds a node, besides its name."""

from __future__ import annotations

from ..model_loaders.families import CONTINUOUS_NAMES, NAMES

FAMILIES, CONTINUOUS = NAMES.split(", "), CONTINUOUS_NAMES.split(", ")
# What many search first. The page lists all nodes that have a word in no order, but first those that have it alone.
START = ("autoregressive model", "text to image", "start")
SAMPLER = ("speculative decoding", "generate image", "fast sampler")
WITH_DRAFTER = (*SAMPLER, "drafter", "draft model", "eagle")
RULE = ("acceptance rule",)
RELAXED = (*RULE, "relaxed", "lossy", "approximate")
REPORT = ("statistics", "diagnostics", "trace")
