"""Stage ``ratios``: how much faster every method is than next-token, on images of a large model that was trained.

The bundled model is too small to tell what a pass costs on a GPU. Widened to a larger model's shapes by channels and
layers that add nothing, it generates the same images at the larger one's cost.
"""

from __future__ import annotations

from dataclasses import replace

import comfyui_specar as specar
import torch
from comfyui_specar.samplers.layout import TokenLayout

from .. import sizes
from ..runs import PROMPTS, Case, cases, drafter_cases, measure
from ..subjects import BASE
from ..widen import widen, widen_eagle
from . import packages, subjects
from .findings import NEEDS_DEVICE, Findings

SHAPES = "llamagen-xl"


def run(findings: Findings, **_options: object) -> None:
    packages.need("safetensors", "einops")
    dry = findings.dry
    folder, device = specar.bundled("default"), subjects.device_of(dry)
    small = specar.load_model(folder, device=device, dtype=torch.float32 if dry else torch.bfloat16)
    shapes = sizes.SIZES[SHAPES].config
    if dry:
        findings.not_run("wall-time ratios", NEEDS_DEVICE)
        own = small.backbone.config
        shapes = replace(own, dim=own.dim + own.head_dim, heads=own.heads + 1, layers=own.layers + 1)
    model = widen(small, shapes)
    eagle = widen_eagle(specar.load_drafter(folder / "eagle", small), model)
    listed = {case.name: case for case in (*cases((16, 32)), *drafter_cases(eagle, eagle))}
    settings = {"layout": TokenLayout.plain(2, 16)} if dry else {"cfg": 3.0}

    def measured(case: Case) -> dict:
        return measure(model, case, PROMPTS[:1] if dry else PROMPTS[:3], 1, **settings)

    base = None
    with findings.listening():
        for method in findings.each(subjects.DRY_METHODS[:3] if dry else subjects.methods(), "methods"):
            with findings.item(method=method) as row:
                if not dry:
                    measured(listed[method])  # captures, compiles
                found = measured(listed[method])
                base = base or found
                row |= {"passes": round(found["passes"], 1), "fewer passes": round(base["passes"] / found["passes"], 2)}
                if not dry:
                    faster = base["seconds"] / found["seconds"]
                    row |= {"seconds": round(found["seconds"], 3), "faster": round(faster, 2)}
    timed = [row for row in findings.rows if "faster" in row and row["method"] != BASE]
    best = max(timed, key=lambda row: row["faster"], default=None)
    findings.content["summary"] = (
        f"{best['method']} is {best['faster']} times as fast as next-token"
        if best
        else f"{len(findings.rows)} runs went through"
    )
