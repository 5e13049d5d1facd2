"""Every relaxed rule of the registry, with settings that relax a lot on models of a few codes; else its defaults."""

from __future__ import annotations

from comfyui_specar.samplers.registry import RULES
from comfyui_specar.samplers.rules.acceptance import AcceptanceRule, Exact
from comfyui_specar.samplers.rules.cool_sd import CoolSD, UniformRSD
from comfyui_specar.samplers.rules.grouped import Grouped
from comfyui_specar.samplers.rules.lantern import Lantern, LanternPP
from comfyui_specar.samplers.rules.tv_budget import TVMetered

SETTINGS = {
    Lantern: {"neighbours": 2, "delta": 0.3},
    LanternPP: {"neighbours": 2, "ratio": 3.0},
    UniformRSD: {"delta": 2.0},
    CoolSD: {"delta": 1.5},
    Grouped: {"window": 14, "gap": 0.9, "radius": 10.0},
    TVMetered: {"epsilon": 0.1},
}
RELAXED: list[AcceptanceRule] = [rule(**SETTINGS.get(rule, {})) for rule in RULES if rule is not Exact]
