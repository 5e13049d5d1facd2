"""What is reported of all images of a method, from what was seen of each one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from .image_metrics import kernel_distance, kernel_terms, precision_recall
from .resampling import bootstrap, exchange_test, jackknife, paired_test, rejected

PARTS = ("subject", "style", "background")  # of what an image shows


def right(shown: Tensor, wanted: Tensor) -> dict[str, Tensor]:
    """Whether each image shows what was asked for, both [N, 3]: fp64 [N] for each of PARTS, and "all" of them."""
    each = shown == wanted
    return {**dict(zip(PARTS, each.double().unbind(1), strict=True)), "all": each.all(1).double()}


def agreement(shown: Tensor, wanted: Tensor) -> dict[str, dict[str, Any]]:
    """The fraction of images that show what was asked for, by part."""
    return {part: bootstrap(values) for part, values in right(shown, wanted).items()}


class Measurement:
    """The rows of a report on one model.

    wanted: the classes [N, 3] that the prompts name; seen: features, shown classes and likelihood of every image, by
    case; sources [N, D]: features of source images of the same prompts by space. The reference is the first case.
    Features are divided by the root mean square of the sources', so that the kernel's scale does not depend on the
    network.
    """

    def __init__(self, wanted: Tensor, seen: dict[str, dict[str, Tensor]], sources: dict[str, Tensor]):
        self.wanted, self.seen = wanted, seen
        self.reference = next(iter(seen))
        self.scale = {space: features.double().square().mean().sqrt() for space, features in sources.items()}
        self.sources = {space: features.double() / self.scale[space] for space, features in sources.items()}

    def features(self, case: str, space: str) -> Tensor:
        return self.seen[case][space].double() / self.scale[space]

    def row(self, case: str, passes: Tensor, drift_bound: Tensor, lossless: bool) -> dict[str, Any]:
        """What is reported of a case, by its images' passes [N] and drift bounds per token [N] (NaN: unknown)."""
        seen, bound = self.seen[case], float(drift_bound.mean())
        return {
            "name": case,
            "lossless": lossless,
            "images": len(passes),
            "passes": bootstrap(passes),
            "drift_bound_per_token": None if math.isnan(bound) else bound,
            **({"log_p": bootstrap(seen["log_p"])} if "log_p" in seen else {}),
            "agreement": agreement(seen["shown"], self.wanted),
            "distances": {space: self.distances(case, space) for space in self.sources},
            **(
                {"changes": {}, "p_values": {}}
                if case == self.reference
                else {"changes": self.changes(case), "p_values": self.tests(case)}
            ),
        }

    def distances(self, case: str, space: str) -> dict[str, dict[str, Any]]:
        """From the source images, and from the reference (which has no distance from itself)."""
        own, others = self.features(case, space), {"sources": self.sources[space]}
        if case != self.reference:
            others["reference"] = self.features(self.reference, space)
        found = {}
        for name, other in others.items():
            terms = kernel_terms(own, other)
            precision, recall = precision_recall(other, own)
            found[name] = {
                "kernel": jackknife(partial(_kernel, terms), len(own)),
                "precision": precision,
                "recall": recall,
            }
        return found

    def differences(self, case: str) -> dict[str, Tensor]:
        """What each image [N] has more than the reference's of its prompt: whether it shows all that was asked for, and
        its log-probability."""
        own, base = self.seen[case], self.seen[self.reference]
        agree, agree_base = (right(seen["shown"], self.wanted)["all"] for seen in (own, base))
        return {"agreement": agree - agree_base, **({"log_p": own["log_p"] - base["log_p"]} if "log_p" in own else {})}

    def changes(self, case: str) -> dict[str, dict[str, Any]]:
        """The means of the differences."""
        return {name: bootstrap(values) for name, values in self.differences(case).items()}

    def tests(self, case: str) -> dict[str, float]:
        """How probable each difference from the reference is, if image and reference of a prompt are of one
        distribution."""
        found = {
            f"kernel, {space}": exchange_test(
                kernel_terms(self.features(case, space), self.features(self.reference, space))
            )
            for space in self.sources
        }
        found |= {name: paired_test(values) for name, values in self.differences(case).items()}
        return found


def _kernel(terms: Tensor, index: Tensor) -> float:
    return kernel_distance(terms[index][:, index])


def check(rows: Sequence[dict[str, Any]], alarm_rate: float) -> list[str]:
    """Mark each row that was tested as "inside" (indistinguishable from the reference) or not: lossless methods
    together, with a probability of ``alarm_rate`` that any of them is found outside although all are exact; every other
    method by itself. Returns the names of lossless methods that are outside."""
    lossless = [row for row in rows if row["lossless"] and row["p_values"]]
    for group in (lossless, *([row] for row in rows if not row["lossless"])):
        outside = iter(rejected([p for row in group for p in row["p_values"].values()], alarm_rate))
        for row in group:
            row["inside"] = not any([next(outside) for _ in row["p_values"]])
    return [row["name"] for row in lossless if not row["inside"]]
