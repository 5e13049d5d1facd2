"""The images whose quality is measured: a file per method, which grows batch by batch, so that a run can be stopped.

Kept are tokens, or latents of a continuous model, not pixels: they are small, and decoding gives the same pixels again.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfyui_specar as specar
import torch
from comfyui_specar.common.files import replace
from comfyui_specar.samplers.contract import Output
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from .quality_cases import Prompt, first_seed, settings_of
from .runs import Case

CONTENT = {False: torch.uint16, True: torch.float16}  # is the model continuous -> how its tokens are stored


@dataclass(frozen=True)
class Drawn:
    """The first N images of a method, in the order of the prompts.

    content: tokens [N, rows, cols] (uint16) or latents [N, C, h, w] (fp16); passes [N] (int32): forward passes of each;
    tv_bound [N] (fp32): its drift bound, NaN where that is unknown.
    """

    content: Tensor
    passes: Tensor
    tv_bound: Tensor

    def __len__(self) -> int:
        return len(self.passes)

    def __add__(self, more: Drawn) -> Drawn:
        return Drawn(*(torch.cat(parts) for parts in zip(vars(self).values(), vars(more).values(), strict=True)))

    def first(self, count: int) -> Drawn:
        return Drawn(self.content[:count], self.passes[:count], self.tv_bound[:count])


def file_of(folder: Path, case: Case) -> Path:
    return folder / f"{re.sub('[^a-z0-9.]+', '-', case.name.lower()).strip('-')}.safetensors"


def origin(case: Case, model, weights: Path, parameters: dict[str, Any]) -> str:
    """What a file's images depend on besides their prompts and seeds, as JSON. weights: the model's file."""
    return json.dumps(
        {
            "case": case.name,
            "settings": settings_of(case, model),
            "parameters": parameters,
            "dtype": str(model.dtype),
            "weights": zlib.crc32(weights.read_bytes()),
        },
        sort_keys=True,
    )


def read(file: Path, wanted: str) -> Drawn | None:
    """The images in a file, if there is one. Raises ValueError if they are not of the ``wanted`` origin."""
    if not file.exists():
        return None
    with safe_open(file, "pt") as stored:
        found = stored.metadata()["origin"]
        if found != wanted:
            raise ValueError(
                f"{file} has images of another origin ({found}) than is asked for ({wanted}). Remove it, "
                "or choose another --folder."
            )
        return Drawn(*(stored.get_tensor(name) for name in ("content", "passes", "tv_bound")))


def write(drawn: Drawn, file: Path, about: str) -> None:
    """All of them again, in place of the file that is there."""
    part = file.with_suffix(".part")
    save_file(vars(drawn), part, metadata={"origin": about})
    replace(part, file)


def conditioning(model, prompts: Sequence[Prompt]) -> Any:
    """A prompt for each image of a batch. All have as many words."""
    return model.encode_features(torch.cat([model.encode_prompt(prompt.text)[0][0] for prompt in prompts]))


def drawn_of(out: Output, model) -> Drawn:
    """What is kept of a batch."""
    trace, images = out.trace, out.latent if model.continuous else out.tokens
    passes = torch.tensor(trace.totals["passes_per_image"], dtype=torch.int32)
    known = trace.tv_bound is not None
    bound = trace.positions["tv_bound"].sum(1) if known else torch.full((len(passes),), torch.nan)
    return Drawn(images.cpu().to(CONTENT[model.continuous]).contiguous(), passes, bound)


def draw(
    case: Case, model, prompts: Sequence[Prompt], batch: int, file: Path, about: str, parameters: dict[str, Any]
) -> Drawn:
    """An image for each prompt, in batches: those of the file, and what it lacks."""
    drawn = read(file, about)
    begun = 0 if drawn is None else len(drawn)
    with tqdm(total=len(prompts), initial=min(begun, len(prompts)), desc=case.name, unit="image") as bar:
        for at in range(begun, len(prompts), batch):
            few = prompts[at : at + batch]
            out = specar.sample(
                model,
                conditioning(model, few),
                case.method,
                seed=first_seed(case.name) + at,
                batch_size=len(few),
                **parameters,
            )
            new = drawn_of(out, model)
            drawn = new if drawn is None else drawn + new
            write(drawn, file, about)
            bar.update(len(few))
    return drawn.first(len(prompts))


def pixels(drawn: Drawn, model, decoder, batch: int) -> Iterator[Tensor]:
    """The images [b, 3, H, W] in [-1, 1], in batches, on the CPU."""
    for content in drawn.content.split(batch):
        latent = content.float() if model.continuous else model.dequantize(content.long())
        yield decoder.decode(latent).permute(0, 3, 1, 2).cpu() * 2 - 1
