"""Settings of every relaxed rule that relax a lot on models of a few codes."""

from __future__ import annotations

from comfyui_specar.samplers.rules.cool_sd import CoolSD, UniformRSD
from comfyui_specar.samplers.rules.entropy import Entropy
from comfyui_specar.samplers.rules.grouped import Grouped
from comfyui_specar.samplers.rules.lantern import Lantern, LanternPP
from comfyui_specar.samplers.rules.tv_budget import TVMetered

RELAXED = [
    Lantern(2, 0.3), LanternPP(2, 3.0), UniformRSD(2.0), CoolSD(1.5), Grouped(14, 0.9, 10.0), TVMetered(0.1),
    Entropy(),
]
