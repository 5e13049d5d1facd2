"""What is measured of drawn images: of each one (its features, what it shows, its likelihood), then of all of them.

What belongs to one image is kept in a file beside the images, so that the rest can be computed again in seconds.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from comfyui_specar.common.files import replace
from comfyui_specar.samplers.contract import SamplingParams
from comfyui_specar.samplers.probabilities import probabilities
from comfyui_specar.tools.training.classifier import LABELS
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from .feature_spaces import Spaces
from .image_metrics import entropy, frechet_distance, kernel_distance, kernel_terms, precision_recall
from .quality_cases import Prompt
from .quality_draw import Drawn, conditioning, pixels
from .resampling import bootstrap, exchange_test, jackknife, paired_test, rejected

BATCH = 16  # images that are decoded and looked at together
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@torch.inference_mode()
def log_probs(model, prompts: Sequence[Prompt], tokens: Tensor, cfg: float) -> Tensor:
    """Mean log-probability [B] (fp64, nats) of the tokens [B, rows, cols] of an image under the model, each given those
    before it: guided, at temperature 1, without filters, so that it is finite. One forward pass."""
    layout = model.layout()
    tokens = layout.keeping(tokens.long(), torch.ones_like(tokens, dtype=torch.bool)).forced.to(model.device)
    batch, length = tokens.shape
    state = model.start(conditioning(model, prompts), None, batch, layout.to(model.device), length, cfg != 1)
    positions = torch.arange(length - 1, device=model.device).expand(batch, -1)
    logits = torch.cat((state.prefill.logits, model.step(state, tokens[:, :-1], positions).logits), dim=1)
    p = probabilities(logits, SamplingParams(cfg=cfg), model.vocab, None).gather(-1, tokens[..., None]).squeeze(-1)
    free = (layout.forced < 0).expand(batch, -1)
    return torch.where(free.to(p.device), p.double().log(), 0).sum(1).cpu() / free.sum(1)


def look(
    drawn: Drawn, file: Path, model, decoder, prompts: Sequence[Prompt], spaces: Spaces, cfg: float | None, name: str
) -> dict[str, Tensor]:
    """Spaces.features of every image [N, ...], and of models of token ids its ``log_p`` [N]; read from ``file`` if they
    are there."""
    of = _checksums(drawn, decoder, spaces, cfg)
    if file.exists():
        with safe_open(file, "pt") as stored:
            if stored.metadata() == of:
                return load_file(file)
    seen: list[dict[str, Tensor]] = []
    with tqdm(total=len(drawn), desc=f"look at {name}", unit="image") as bar:
        for images, content in zip(pixels(drawn, model, decoder, BATCH), drawn.content.split(BATCH), strict=True):
            at = bar.n
            found = spaces.features(images)
            if not model.continuous:
                found["log_p"] = log_probs(model, prompts[at : at + len(images)], content, cfg)
            seen.append(found)
            bar.update(len(images))
    joined = {key: torch.cat([found[key] for found in seen]) for key in seen[0]}
    part = file.with_suffix(".part")
    save_file(joined, part, metadata=of)
    replace(part, file)
    return joined


def _checksums(drawn: Drawn, decoder, spaces: Spaces, cfg: float | None) -> dict[str, str]:
    """Of everything that ``look`` depends on; that images are of the model says their own file."""
    content, weights = (_crc(tensors) for tensors in ([drawn.content], decoder.module.state_dict().values()))
    return {
        "content": content,
        "decoder": weights,
        "classifier": spaces.checksum,
        "spaces": " ".join(spaces.names),
        "cfg": str(cfg),
    }


def _crc(tensors: Iterable[Tensor]) -> str:
    found = 0
    for tensor in tensors:
        found = zlib.crc32(tensor.cpu().contiguous().numpy().tobytes(), found)
    return str(found)


def right(shown: Tensor, prompts: Sequence[Prompt]) -> dict[str, Tensor]:
    """Whether each image shows what was asked for: fp64 [N] for each of LABELS, and "all" of them."""
    each = shown == torch.tensor(prompts)
    return {**dict(zip(LABELS, each.double().unbind(1), strict=True)), "all": each.all(1).double()}


def agreement(shown: Tensor, prompts: Sequence[Prompt]) -> dict[str, dict[str, Any]]:
    """The fraction of images that show what was asked for, by part."""
    return {part: bootstrap(values) for part, values in right(shown, prompts).items()}


class Measurement:
    """The rows of a report on one model.

    seen: what ``look`` found, by case; sources [N, D]: features of source images of the same prompts by space. The
    reference is the first case. Features are divided by the root mean square of the sources', so that the kernel's
    scale does not depend on the network.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seen: dict[str, dict[str, Tensor]],
        sources: dict[str, Tensor],
        vocab: int | None,
    ):
        self.prompts, self.seen, self.vocab = prompts, seen, vocab
        self.reference = next(iter(seen))
        self.scale = {space: features.double().square().mean().sqrt() for space, features in sources.items()}
        self.sources = {space: features.double() / self.scale[space] for space, features in sources.items()}

    def features(self, case: str, space: str) -> Tensor:
        return self.seen[case][space].double() / self.scale[space]

    def row(self, case: str, drawn: Drawn, lossless: bool) -> dict[str, Any]:
        """Everything that is reported of a case."""
        seen, bound = self.seen[case], float(drawn.tv_bound.mean()) / drawn.content[0].numel()
        return {
            "name": case,
            "lossless": lossless,
            "images": len(drawn),
            "passes": bootstrap(drawn.passes),
            "tv_bound_per_token": None if math.isnan(bound) else bound,
            **({"log_p": self.likelihood(seen["log_p"], drawn.content)} if "log_p" in seen else {}),
            "agreement": agreement(seen["shown"], self.prompts),
            "distances": {space: self.distances(case, space) for space in self.sources},
            **(
                {"changes": {}, "p_values": {}}
                if case == self.reference
                else {"changes": self.changes(case), "p_values": self.tests(case)}
            ),
        }

    def likelihood(self, log_p: Tensor, tokens: Tensor) -> dict[str, Any]:
        """Per token: mean and distribution over images; and the entropy of the codes in all of them."""
        tokens = tokens.long()
        return {
            **bootstrap(log_p),
            "std": float(log_p.std()),
            "quantiles": dict(
                zip(map(str, QUANTILES), log_p.quantile(log_p.new_tensor(QUANTILES)).tolist(), strict=True)
            ),
            "token_entropy": jackknife(lambda index: entropy(tokens[index], self.vocab), len(tokens)),
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
                "frechet": jackknife(partial(_frechet, own, other), len(own)),
                "kernel": jackknife(partial(_kernel, terms), len(own)),
                "precision": precision,
                "recall": recall,
            }
        return found

    def differences(self, case: str) -> dict[str, Tensor]:
        """What each image [N] has more than the reference's of its prompt: whether it shows all that was asked for, and
        its log-probability."""
        own, base = self.seen[case], self.seen[self.reference]
        agree, agree_base = (right(seen["shown"], self.prompts)["all"] for seen in (own, base))
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


def _frechet(own: Tensor, other: Tensor, index: Tensor) -> float:
    return frechet_distance(own[index], other[index])


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
