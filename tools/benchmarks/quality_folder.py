"""Measure any folder of images with their prompts.

    python -m tools.benchmarks quality FOLDER [--real FOLDER] [--clip DIR] [--inception FILE] [--image-reward DIR]
        [--hps FILE] [--out FILE]

The prompt of NAME.png is in NAME.txt beside it, or metadata.jsonl has lines {"file_name": ..., "text": ...}. --real
gives Frechet distance, precision and recall: with --inception those of papers (FID), else in the features of the
bundled classifier, which knows little of the world. The Frechet distance grows as sets get smaller: compare sets of one
size. Nothing is downloaded: every network but the classifier is a file of yours.

    --clip          a folder of CLIP as transformers reads it: cosine of image and prompt (papers: ViT-B/32 or L/14)
    --inception     weights-inception-2015-12-05-6726825d.pth, by the package torch-fidelity
    --image-reward  a folder with ImageReward.pt and med_config.json, by the package image-reward
    --hps           HPS_v2_compressed.pt or HPS_v2.1_compressed.pt, by the package hpsv2
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comfyui_specar.tools.training.classifier import FILE, SIDE, Classifier
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, normalize

from .feature_spaces import FOLDER
from .image_metrics import frechet_distance, precision_recall
from .report import command, measured_on, parsed, write
from .resampling import bootstrap

KINDS = (".png", ".jpg", ".jpeg", ".webp")
Score = Callable[[Path, str], float]  # of an image and its prompt


def add_networks(parser: argparse.ArgumentParser) -> None:
    """The options that name files of networks."""
    parser.add_argument("--real", type=Path, metavar="FOLDER", help="images to compare with")
    parser.add_argument("--clip", type=Path, metavar="DIR", help="CLIP, as transformers reads it")
    parser.add_argument("--inception", type=Path, metavar="FILE", help="Inception's weights (package torch-fidelity)")
    parser.add_argument("--image-reward", type=Path, metavar="DIR", help="ImageReward (package image-reward)")
    parser.add_argument("--hps", type=Path, metavar="FILE", help="HPSv2 (package hpsv2)")


def images_in(folder: Path) -> list[Path]:
    """The images of a folder in the order of their names. Raises ValueError if there are none."""
    found = sorted(file for file in folder.iterdir() if file.suffix.lower() in KINDS)
    if not found:
        raise ValueError(f"{folder} has no images ({', '.join(KINDS)}).")
    return found


def prompts_of(files: Sequence[Path]) -> list[str]:
    """The prompt of every image. Raises ValueError naming the first that has none."""
    listed = files[0].parent / "metadata.jsonl"
    known: dict[str, str] = {}
    if listed.exists():
        lines = map(json.loads, listed.read_text(encoding="utf-8").splitlines())
        known = {line["file_name"]: line["text"] for line in lines}
    for file in files:
        if file.name not in known:
            if not (beside := file.with_suffix(".txt")).exists():
                raise ValueError(f"{file} has no prompt: write it to {beside.name} beside it, or to metadata.jsonl.")
            known[file.name] = beside.read_text(encoding="utf-8").strip()
    return [known[file.name] for file in files]


def pixels(file: Path) -> Tensor:
    """An image [3, H, W] (uint8)."""
    with Image.open(file) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def features(files: Sequence[Path], inception: Path | None, device: torch.device) -> tuple[str, Tensor]:
    """The name of a feature space, and the features [N, D] of images there."""
    if inception is None:
        classifier = Classifier.load(FOLDER / FILE).to(device)

        def described(batch: Tensor) -> Tensor:
            small = interpolate(batch.float(), (2 * SIDE, 2 * SIDE), mode="bilinear", antialias=True)
            return classifier.features(small / 127.5 - 1)
    else:
        extractors = _package("torch_fidelity.feature_extractor_inceptionv3", "torch-fidelity")
        network = extractors.FeatureExtractorInceptionV3("inception", ["2048"], str(inception)).eval().to(device)

        def described(batch: Tensor) -> Tensor:
            return network(batch)[0]

    with torch.inference_mode():
        found = [described(pixels(file)[None].to(device)).float().cpu() for file in files]
    return "classifier" if inception is None else "inception", torch.cat(found)


def clip_score(folder: Path, device: torch.device) -> Score:
    """The cosine of CLIP's embeddings (Hessel et al., 2021, arXiv:2104.08718, without its factor 2.5)."""
    from transformers import CLIPModel, CLIPProcessor

    model = CLIPModel.from_pretrained(folder, local_files_only=True).eval().to(device)
    processor = CLIPProcessor.from_pretrained(folder, local_files_only=True)

    def score(file: Path, prompt: str) -> float:
        image = Image.open(file).convert("RGB")
        given = processor(text=[prompt], images=image, return_tensors="pt", padding=True, truncation=True).to(device)
        found = model(**given)
        return float((normalize(found.image_embeds) * normalize(found.text_embeds)).sum())

    return score


def image_reward(folder: Path, device: torch.device) -> Score:
    """ImageReward (Xu et al., 2023, arXiv:2304.05977)."""
    package = _package("ImageReward", "image-reward")
    model = package.load(str(folder / "ImageReward.pt"), device, med_config=str(folder / "med_config.json"))
    return lambda file, prompt: float(model.score(prompt, str(file)))


def human_preference(file: Path, device: torch.device) -> Score:
    """HPSv2 (Wu et al., 2023, arXiv:2306.09341): the cosine of a CLIP ViT-H/14 that was trained on preferences."""
    package = _package("hpsv2.img_score", "hpsv2")
    package.initialize_model()
    model, read = package.model_dict["model"], package.model_dict["preprocess_val"]
    model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True)["state_dict"])
    model, tokenizer = model.eval().to(device), package.get_tokenizer("ViT-H-14")

    def score(image: Path, prompt: str) -> float:
        found = model(read(Image.open(image))[None].to(device), tokenizer([prompt]).to(device))
        return float((found["image_features"] * found["text_features"]).sum())

    return score


def _package(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(f"This needs the package {package}, which cannot be imported here ({error}).") from error


def scores(options: argparse.Namespace, device: torch.device) -> Iterator[tuple[str, Score]]:
    """The scores whose networks were named."""
    for name, file, load in (
        ("clip", options.clip, clip_score),
        ("image_reward", options.image_reward, image_reward),
        ("hps", options.hps, human_preference),
    ):
        if file is not None:
            yield name, load(file, device)


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Everything that can be said of a folder with the networks at hand."""
    named = options.real, options.clip, options.inception, options.image_reward, options.hps
    if absent := [str(path) for path in named if path is not None and not path.exists()]:
        raise ValueError(f"{', '.join(absent)}: no such file or folder.")
    device, files = torch.device(options.device), images_in(folder)
    found: dict[str, Any] = {"images": len(files)}
    for name, score in scores(options, device):
        with torch.inference_mode():
            each = [score(file, prompt) for file, prompt in zip(files, prompts_of(files), strict=True)]
        found[name] = bootstrap(torch.tensor(each))
    if options.real is not None:
        real = images_in(options.real)
        space, theirs = features(real, options.inception, device)
        own = features(files, options.inception, device)[1]
        precision, recall = precision_recall(theirs, own)
        frechet = frechet_distance(own, theirs)
        found |= {"real": len(real), "features": space, "frechet": frechet, "precision": precision, "recall": recall}
    return found


def main() -> None:
    parser = command("quality", __doc__)
    parser.add_argument("images", type=Path, metavar="FOLDER")
    add_networks(parser)
    options = parsed(parser)
    try:
        found = measure(options.images, options)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(json.dumps(found, indent=1))
    if options.out:
        write(found | {"measured": measured_on(torch.device(options.device))}, options.out)
