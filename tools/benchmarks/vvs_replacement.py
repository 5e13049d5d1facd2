"""Replace verification results as in table 4 of VVS, and see what that costs (Dong et al., CVPR 2026, section 3).

    python -m tools.benchmarks vvs_replacement [--images 128] [--delta 0.2] [--out FILE.json]

In a share r of the rounds, the drafts that the model accepted are replaced by as many from the path of the draft tree
that the drafter finds most probable; here every n-th round, for the paper's r of 25, 33, 50 and 100 %. The token after
them is sampled from the model's prediction after the replaced ones, and nothing is replaced where both paths are the
same. Where the paper does not say: the tree is EAGLE-2's, and the rule LANTERN (--delta).

The columns are the paper's: tokens per forward pass (TPF), the Frechet distance from the source images of the prompts
(FID), how many images show what was asked for (in place of the CLIP score), precision and recall; and the images'
log-probability per token under the model. Features are those of the bundled classifier: numbers compare with each
other, not with the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import comfyui_specar as specar
import torch
from comfyui_specar.kernels.sampling import categorical
from comfyui_specar.samplers.constants import counting
from comfyui_specar.samplers.methods.skipping import Skipping, choose_path
from comfyui_specar.samplers.methods.speculative import DraftTree
from comfyui_specar.samplers.rng import Purpose

from .feature_spaces import Spaces
from .quality_cases import PROMPTS, prompts
from .quality_model import ModelUnderTest
from .report import command, find, measured_on, parsed, write
from .runs import Case

EVERY = {"0%": 0, "25%": 4, "33%": 3, "50%": 2, "100%": 1}  # r -> of how many rounds one is replaced
PAPER = {  # r -> TPF, FID, CLIP score, precision, recall (table 4)
    "0%": (2.27, 26.63, 0.3223, 0.5370, 0.5962),
    "25%": (2.27, 26.36, 0.3218, 0.5344, 0.6118),
    "33%": (2.27, 26.23, 0.3225, 0.5334, 0.6120),
    "50%": (2.27, 26.55, 0.3225, 0.5364, 0.6128),
    "100%": (2.25, 26.19, 0.3220, 0.5502, 0.6158),
}


@dataclass(frozen=True)
class Replacing(DraftTree):
    """A DraftTree that replaces what it verified in one of ``every`` rounds (0: never)."""

    every: int = 0

    def accept(self, run, state, tree, logits, position):
        verified, probs_after = super().accept(run, state, tree, logits, position)
        if not self.every:
            return verified, probs_after
        likeliest = Skipping(path="confident", truncate=False)
        slots, length = choose_path(likeliest, tree, torch.zeros_like(tree.probability[:, 0]))
        count = verified.accepted.minimum(length)
        slots = torch.where(counting(tree.levels, count.device) < count[:, None], slots, 0)
        replaced = (state.index % self.every == 0) & (slots != verified.path).any(1)

        last = torch.nn.functional.pad(slots, (1, 0)).gather(1, count[:, None])
        u = run.stream.uniform((state.committed + count)[:, None], Purpose.SKIP, state.index)
        token = tree.token.gather(1, torch.nn.functional.pad(slots, (0, 1)))
        token = token.scatter(1, count[:, None], categorical(probs_after(last), u))
        changed = replace(
            verified,
            path=torch.where(replaced[:, None], slots, verified.path),
            accepted=torch.where(replaced, count, verified.accepted),
            token=torch.where(replaced[:, None], token, verified.token),
        )
        return changed, probs_after

    def describe(self, request) -> dict[str, Any]:
        return super().describe(request) | {"every": self.every, "lossless": False}


def main() -> None:
    parser = command("vvs_replacement", __doc__)
    parser.add_argument("--images", type=int, default=128, help=f"per share, at most {PROMPTS} (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="images generated together (default: %(default)s)")
    parser.add_argument("--delta", type=float, default=0.2, help="LANTERN's; 0 is exact (default: %(default)s)")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/vvs_replacement"), help="for the images (default: %(default)s)"
    )
    options = parsed(parser)
    wanted, device = prompts(options.images), torch.device(options.device)
    tested = ModelUnderTest.load("default", 2.0, device, torch.float32, options.folder / f"delta {options.delta:g}")
    eagle, rule = specar.load_drafter(find("default/eagle"), tested.model), specar.rules.Lantern(1000, options.delta)
    tree = specar.structures.Dynamic()
    tested.cases = [Case(f"r {share}", Replacing(eagle, tree, rule, every=every)) for share, every in EVERY.items()]
    for case in tested.cases:
        tested.draw(case, wanted, options.batch)
    rows = {row["name"].removeprefix("r "): row for row in tested.measure(wanted, Spaces(imagenet=False))["rows"]}
    report: dict[str, Any] = {**measured_on(device), "images": options.images, "delta": options.delta, "rows": {}}
    names = ("TPF", "FID", "as asked", "precision", "recall", "log p")
    print("".join(f"{name:>10}" for name in ("r", *names)), "  the paper's")
    for share, row in rows.items():
        apart = row["distances"]["own"]["sources"]
        passes, asked = row["passes"]["value"], row["agreement"]["all"]["value"]
        found = [tested.model.layout().length / passes, apart["frechet"]["value"], asked]
        found += [apart["precision"], apart["recall"], row["log_p"]["value"]]
        report["rows"][share] = dict(zip(names, found, strict=True)) | {"log p, 95 %": row["log_p"]["interval"]}
        print(f"{share:>10}" + "".join(f"{value:10.3f}" for value in found), f"  {PAPER[share]}")
    if options.out:
        write(report, options.out)


if __name__ == "__main__":
    main()
