"""Source images that the prompts of ``python -m tools.benchmarks quality`` describe: their features, and what they
show.

    python -m tools.benchmarks.quality_sources [--cache DIR]

They are committed with the classifier, so that measuring needs no training data. Write them again after the classifier
has changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from comfyui_specar.tools.training.classifier import views_of
from comfyui_specar.tools.training.data import Images, load_images
from comfyui_specar.tools.training.export import half
from comfyui_specar.tools.training.settings import COMMON_CONCEPTS, CPU
from comfyui_specar.tools.training.views import Scenes
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .feature_spaces import FOLDER, Spaces
from .quality_cases import PROMPTS, Prompt, prompts
from .report import parsed, plain_command

FILE = FOLDER / "sources.safetensors"


def views(images: Images, wanted: Sequence[Prompt]) -> Iterator[Tensor]:
    """A view [1, 3, 256, 256] of the source image of each prompt, as those that the models were trained on."""
    source = views_of(images, CPU, CPU.model.augmentation, seed=0)
    codes, shown = list(COMMON_CONCEPTS), source.images
    number = {(shown.code[i], shown.style[i]): i for i in range(source.own)}
    for prompt in wanted:
        image = number[codes[prompt.subject], prompt.style]
        yield source.pixels(Scenes(*torch.tensor([[image], [prompt.background], [0]])))


def read(spaces: Spaces, count: int) -> dict[str, Tensor]:
    """``Spaces.features`` of the first ``count`` prompts' source images. Raises ValueError if they are another
    classifier's."""
    with safe_open(FILE, "pt") as stored:
        if stored.metadata()["classifier"] != spaces.checksum:
            raise ValueError(
                f"{FILE} was written with another classifier: run python -m tools.benchmarks.quality_sources."
            )
        return {name: stored.get_tensor(name)[:count] for name in (*spaces.names, "shown")}


def main() -> None:
    parser = plain_command(".quality_sources", __doc__)
    parser.add_argument("--cache", type=Path, default=Path(".cache/emoji"), help="downloaded and rendered images")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own)")
    options = parsed(parser)
    spaces = Spaces()
    seen = [spaces.features(view) for view in views(load_images(options.cache), prompts(PROMPTS))]
    joined = {name: torch.cat([found[name] for found in seen]) for name in seen[0]}
    features = half({space: joined[space] for space in spaces.names})
    save_file(features | {"shown": joined["shown"].to(torch.uint8)}, FILE, metadata={"classifier": spaces.checksum})


if __name__ == "__main__":
    main()
