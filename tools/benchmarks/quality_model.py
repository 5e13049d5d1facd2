"""A bundled model whose images are measured: its cases, their images in files, and what is measured of each image.

An image is kept as tokens, or as latents of a continuous model, not as pixels: they are small, and decoding gives the
same pixels again. Files grow batch by batch, so that a run can be stopped and goes on. What belongs to one image is
kept in a file beside them, so that the rest can be computed again in seconds.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfyui_specar as specar
import torch
from comfyui_specar.api import Output
from comfyui_specar.limits.replacing import replace
from comfyui_specar.model_loaders.detect import find_model
from comfyui_specar.samplers.contract import SamplingParams
from comfyui_specar.samplers.probabilities import sampling_probs
from comfyui_specar.tools.training.classifier import numbered
from comfyui_specar.tools.training.settings import BUNDLED, Setting
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from . import quality_sources
from .feature_spaces import Spaces
from .quality_cases import Prompt, continuous_cases, discrete_cases, first_seed, settings_of
from .quality_measure import Measurement, agreement
from .runs import Case

BASE = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}  # of the discrete model, besides guidance
CONTENT = {False: torch.uint16, True: torch.float16}  # is the model continuous -> how its tokens are stored
BATCH = 16  # images that are decoded and looked at together


@dataclass(frozen=True)
class Images:
    """The first N images of a method, in the order of the prompts.

    content: tokens [N, rows, cols] (uint16) or latents [N, C, h, w] (fp16); passes [N] (int32): forward passes of each;
    drift_bound [N] (fp32): its drift bound, NaN where that is unknown.
    """

    content: Tensor
    passes: Tensor
    drift_bound: Tensor

    def __len__(self) -> int:
        return len(self.passes)

    def __add__(self, more: Images) -> Images:
        return Images(*(torch.cat(parts) for parts in zip(vars(self).values(), vars(more).values(), strict=True)))

    def first(self, count: int) -> Images:
        return Images(self.content[:count], self.passes[:count], self.drift_bound[:count])

    @classmethod
    def of(cls, out: Output, continuous: bool) -> Images:
        """What is kept of a batch."""
        trace, images = out.trace, out.latent if continuous else out.tokens
        passes = torch.tensor(trace.totals["passes_per_image"], dtype=torch.int32)
        known = trace.drift_bound is not None
        bound = trace.positions["drift_bound"].sum(1) if known else torch.full((len(passes),), torch.nan)
        return cls(images.cpu().to(CONTENT[continuous]).contiguous(), passes, bound)


def save(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    """Write a file in place of one that is there, which stays whole until then."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    save_file(tensors, part, metadata=metadata)
    replace(part, file)


def conditioning(model: Any, prompts: Sequence[Prompt]) -> Any:
    """A prompt for each image of a batch. All have as many words."""
    return model.encode_features(torch.cat([model.encode_prompt(prompt.text)[0][0] for prompt in prompts]))


@torch.inference_mode()
def log_probs(model: Any, prompts: Sequence[Prompt], tokens: Tensor, cfg: float) -> Tensor:
    """Mean log-probability [B] (fp64, nats) of the tokens [B, rows, cols] of an image under the model, each given those
    before it: guided, at temperature 1, without filters, so that it is finite. One forward pass."""
    layout = model.layout()
    tokens = layout.keeping(tokens.long(), torch.ones_like(tokens, dtype=torch.bool)).forced.to(model.device)
    batch, length = tokens.shape
    state = model.start(conditioning(model, prompts), None, batch, layout.to(model.device), length, cfg != 1)
    positions = torch.arange(length - 1, device=model.device).expand(batch, -1)
    logits = torch.cat((state.prefill.logits, model.step(state, tokens[:, :-1], positions).logits), dim=1)
    p = sampling_probs(logits, SamplingParams(cfg=cfg), model.vocab, None).gather(-1, tokens[..., None]).squeeze(-1)
    free = (layout.forced < 0).expand(batch, -1)
    return torch.where(free.to(p.device), p.double().log(), 0).sum(1).cpu() / free.sum(1)


def checksum(tensors: Iterable[Tensor]) -> str:
    found = 0
    for tensor in tensors:
        found = zlib.crc32(tensor.cpu().contiguous().numpy().tobytes(), found)
    return str(found)


@dataclass
class ModelUnderTest:
    """A bundled model, its image decoder and cases, and the sampling parameters of all of them ({}: the model's own).

    folder: of all images; those of this model and guidance are in a folder inside of it.
    """

    name: str
    model: Any
    decoder: Any
    cases: list[Case]
    parameters: dict[str, Any]
    folder: Path

    @classmethod
    def load(cls, name: str, cfg: float, device: torch.device, dtype: torch.dtype, folder: Path) -> ModelUnderTest:
        model = specar.load_model(find_model(name), device=device, dtype=dtype)
        decoder = specar.load_image_decoder(find_model(name), device=device)
        small = specar.load_drafter(find_model(f"{name}/small"), model)
        if model.continuous:
            return cls(name, model, decoder, continuous_cases(small), {}, folder / name)
        cases = discrete_cases(specar.load_drafter(find_model(f"{name}/eagle"), model), small)
        return cls(name, model, decoder, cases, {"cfg": cfg, **BASE}, folder / f"{name}-{cfg:g}")

    @property
    def setting(self) -> Setting:
        """What it was trained on."""
        return BUNDLED[self.name]

    def file(self, case: Case, kind: str = "images") -> Path:
        return self.folder / kind / f"{re.sub('[^a-z0-9.]+', '-', case.name.lower()).strip('-')}.safetensors"

    def origin(self, case: Case) -> str:
        """What a file's images depend on besides their prompts and seeds, as JSON."""
        about = {
            "case": case.name,
            "settings": settings_of(case, self.model),
            "parameters": self.parameters,
            "dtype": str(self.model.dtype),
            "weights": zlib.crc32((find_model(self.name) / "model.safetensors").read_bytes()),
        }
        return json.dumps(about, sort_keys=True)

    def stored(self, case: Case) -> Images | None:
        """The images in a case's file, if there is one. Raises ValueError if they are of another origin."""
        file, wanted = self.file(case), self.origin(case)
        if not file.exists():
            return None
        with safe_open(file, "pt") as stored:
            if (found := stored.metadata()["origin"]) != wanted:
                raise ValueError(
                    f"{file} has images of another origin ({found}) than is asked for ({wanted}). Remove it, "
                    "or choose another --folder."
                )
            return Images(*(stored.get_tensor(name) for name in ("content", "passes", "drift_bound")))

    def images(self, case: Case, count: int) -> Images | None:
        """Its first images; None if there are fewer than ``count``."""
        found = self.stored(case)
        return None if found is None or len(found) < count else found.first(count)

    def check_reference(self, count: int) -> None:
        """Raises ValueError unless so many images of the reference, the first case, were drawn."""
        if self.images(self.cases[0], count) is None:
            raise ValueError(
                f"There are no {count} images of {self.cases[0].name!r} in {self.file(self.cases[0])}, which the "
                "others are compared with. Draw them, or ask for fewer --images."
            )

    def draw(self, case: Case, prompts: Sequence[Prompt], batch: int) -> None:
        """An image for each prompt, in batches: those that the case's file lacks."""
        images = self.stored(case)
        begun = len(images) if images else 0
        with tqdm(total=len(prompts), initial=min(begun, len(prompts)), desc=case.name, unit="image") as bar:
            for at in range(begun, len(prompts), batch):
                few = prompts[at : at + batch]
                out = specar.sample(
                    self.model,
                    conditioning(self.model, few),
                    case.method,
                    seed=first_seed(case.name) + at,
                    batch_size=len(few),
                    **self.parameters,
                )
                new = Images.of(out, self.model.continuous)
                images = images + new if images else new
                save(vars(images), self.file(case), {"origin": self.origin(case)})
                bar.update(len(few))

    def pixels(self, images: Images) -> Iterator[Tensor]:
        """The images [b, 3, H, W] in [-1, 1], BATCH at a time, on the CPU."""
        for content in images.content.split(BATCH):
            latent = content.float() if self.model.continuous else self.model.dequantize(content.long())
            yield self.decoder.decode(latent).permute(0, 3, 1, 2).cpu() * 2 - 1

    def look(self, case: Case, images: Images, prompts: Sequence[Prompt], spaces: Spaces) -> dict[str, Tensor]:
        """Spaces.features of every image [N, ...], and of models of token ids its ``log_p`` [N]; read from a file where
        they are of the same images and networks."""
        cfg, file = self.parameters.get("cfg"), self.file(case, "seen")
        of = {
            "content": checksum([images.content]),
            "decoder": checksum(self.decoder.module.state_dict().values()),
            "classifier": spaces.checksum,
            "spaces": " ".join(spaces.names),
            "cfg": str(cfg),
        }
        if file.exists():
            with safe_open(file, "pt") as stored:
                if stored.metadata() == of:
                    return load_file(file)
        seen: list[dict[str, Tensor]] = []
        with tqdm(total=len(images), desc=f"look at {case.name}", unit="image") as bar:
            for pixels, content in zip(self.pixels(images), images.content.split(BATCH), strict=True):
                found = spaces.features(pixels)
                if cfg is not None:
                    found["log_p"] = log_probs(self.model, prompts[bar.n : bar.n + len(content)], content, cfg)
                seen.append(found)
                bar.update(len(content))
        joined = {key: torch.cat([found[key] for found in seen]) for key in seen[0]}
        save(joined, file, of)
        return joined

    def conditions(self, prompts: Sequence[Prompt], spaces: Spaces) -> dict[str, Any]:
        """What all rows of a report on the model have in common: checksums of the model's files, those of its drafters
        among them, and how the images were drawn and looked at."""
        folder = find_model(self.name)
        files = sorted(folder.rglob("*.safetensors"))
        return {
            "weights": {file.relative_to(folder).as_posix(): zlib.crc32(file.read_bytes()) for file in files},
            "dtype": str(self.model.dtype),
            "images": len(prompts),
            "prompts": zlib.crc32("\n".join(prompt.text for prompt in prompts).encode()),
            "settings": self.parameters or vars(self.model.defaults),
            "spaces": spaces.names,
            "classifier": {"checksum": spaces.checksum, "held_out": spaces.accuracy},
        }

    def measure(self, prompts: Sequence[Prompt], spaces: Spaces) -> dict[str, Any]:
        """The report on the cases of which enough images were drawn. Raises ValueError without those of the
        reference."""
        self.check_reference(len(prompts))
        drawn = {case: found for case in self.cases if (found := self.images(case, len(prompts)))}
        seen = {case.name: self.look(case, found, prompts, spaces) for case, found in drawn.items()}
        settings = {case.name: settings_of(case, self.model) for case in self.cases}
        sources = quality_sources.read(spaces, len(prompts))
        wanted = numbered(prompts, spaces.classifier.labels)
        table = Measurement(wanted, seen, {space: sources[space] for space in spaces.names})
        rows = []
        for case, found in drawn.items():
            lossless = settings[case.name].get("lossless", False)
            bound = found.drift_bound / found.content[0].numel()
            rows.append(table.row(case.name, found.passes, bound, lossless))
            print(line(rows[-1]), flush=True)
        return {
            "reference": table.reference,
            "sources": {"agreement": agreement(sources["shown"], wanted)},
            "cases": settings,
            "rows": rows,
        }


def line(row: dict[str, Any]) -> str:
    """A row on the terminal."""
    sources = row["distances"]["own"]["sources"]
    parts = [f"{row['name']:38s} passes {row['passes']['value']:6.1f}"]
    if "log_p" in row:
        parts.append(f"log p {row['log_p']['value']:.3f}")
    parts += [f"{part} {found['value']:.1%}" for part, found in row["agreement"].items()]
    parts.append(f"kernel distance from sources {sources['kernel']['value']:.4f}")
    return "  ".join(parts)
