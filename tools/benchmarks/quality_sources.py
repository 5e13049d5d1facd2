"""Source images that the prompts of ``python -m tools.benchmarks quality`` describe: their features, and what they
show.

    python -m tools.benchmarks.quality_sources [--setting NAME] [--cache DIR]

They are committed with the classifier, so that measuring needs no training data. Write them again after the classifier
has changed.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from comfyui_specar.tools.training.classifier import shown, views_of
from comfyui_specar.tools.training.data import Images, load_images
from comfyui_specar.tools.training.export import half
from comfyui_specar.tools.training.settings import BACKGROUNDS, SETTINGS, Setting
from comfyui_specar.tools.training.views import Scenes
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from .feature_spaces import FOLDER, Spaces
from .quality_cases import PROMPTS, Prompt, prompts
from .report import parsed, plain_command

FILE = "sources.safetensors"


def views(images: Images, setting: Setting, wanted: Sequence[Prompt]) -> Iterator[Tensor]:
    """A view [1, 3, 256, 256] of a source image of each prompt, as those that the models were trained on: of the emoji
    that it names, or of one of the portraits that are as it says."""
    source, rng, numbers = views_of(images, setting, setting.model.augmentation, 0), random.Random(0), defaultdict(list)
    portraits = images.portraits if setting.portraits else None
    begin, count = (source.emoji, len(portraits)) if portraits else (0, source.own)
    every = torch.arange(begin, begin + count)
    for image, view in zip(every.tolist(), source.views(Scenes(every, every * 0, every * 0)), strict=True):
        subject, style, _ = shown(view)
        numbers[subject, style].append(image)
    for prompt in wanted:
        image, background = (
            rng.choice(numbers[prompt.subject, prompt.style]),
            list(BACKGROUNDS).index(prompt.background),
        )
        yield source.pixels(Scenes(*torch.tensor([[image], [background], [0]])))


def read(spaces: Spaces, count: int) -> dict[str, Tensor]:
    """``Spaces.features`` of the first ``count`` prompts' source images. Raises ValueError if they are another
    classifier's."""
    file = FOLDER / spaces.setting.name / FILE
    with safe_open(file, "pt") as stored:
        if stored.metadata()["classifier"] != spaces.checksum:
            raise ValueError(
                f"{file} was written with another classifier: run python -m tools.benchmarks.quality_sources."
            )
        return {name: stored.get_tensor(name)[:count] for name in (*spaces.names, "shown")}


def main() -> None:
    parser = plain_command(".quality_sources", __doc__)
    parser.add_argument("--setting", choices=SETTINGS, default="emoji")
    parser.add_argument("--cache", type=Path, default=Path(".cache/emoji"), help="downloaded and rendered images")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own)")
    options = parsed(parser)
    setting = SETTINGS[options.setting]
    spaces, images = Spaces(setting), load_images(options.cache, setting.portrait_count)
    seen = [spaces.features(view) for view in views(images, setting, prompts(PROMPTS, setting))]
    joined = {name: torch.cat([found[name] for found in seen]) for name in seen[0]}
    features = half({space: joined[space] for space in spaces.names})
    file = FOLDER / setting.name / FILE
    save_file(features | {"shown": joined["shown"].to(torch.uint8)}, file, metadata={"classifier": spaces.checksum})


if __name__ == "__main__":
    main()
