"""Measure any folder of images with their prompts.

    python -m tools.benchmarks quality FOLDER [--real FOLDER] [--clip DIR] [--inception FILE] [--image-reward DIR]
        [--hps FILE] [--out FILE]

The prompt of NAME.png is in NAME.txt beside it, or metadata.jsonl has lines {"file_name": ..., "text": ...}. --real
gives Frechet distance, precision and recall: with --inception those of papers (FID), else in the features of the
bundled classifier, which knows little of the world. The Frechet distance grows as sets get smaller: compare sets of one
size. Nothing is downloaded, and pickles are read as weights only: every network but the classifier is a file of yours.

    --clip          a folder of CLIP as transformers reads it: cosine of image and prompt (papers: ViT-B/32 or L/14)
    --inception     weights-inception-2015-12-05-6726825d.pth, by the package torch-fidelity
    --image-reward  a folder with ImageReward.pt and med_config.json, by the package image-reward, which also needs the
                    tokenizer of bert-base-uncased in Hugging Face's cache
    --hps           HPS_v2_compressed.pt or HPS_v2.1_compressed.pt, by the package hpsv2
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
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


def opened(file: Path) -> Image.Image:
    with Image.open(file) as image:
        return image.convert("RGB")


def feature_space(inception: Path | None, device: torch.device) -> Callable[[Sequence[Path]], Tensor]:
    """The features [N, D] of images, by Inception or by the bundled classifier."""
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

    def features(files: Sequence[Path]) -> Tensor:
        pixels = (torch.from_numpy(np.array(opened(file))).permute(2, 0, 1)[None] for file in files)
        return torch.cat([described(each.to(device)).float().cpu() for each in pixels])

    return features


def comparison(real: Path, inception: Path | None, device: torch.device) -> Callable[[Sequence[Path]], dict[str, Any]]:
    """A function that says how far images are from those of a folder, whose features are computed once, here."""
    features, files = feature_space(inception, device), images_in(real)
    with torch.inference_mode():
        theirs = features(files)

    def compare(images: Sequence[Path]) -> dict[str, Any]:
        own = features(images)
        precision, recall = precision_recall(theirs, own)
        space = "classifier" if inception is None else "inception"
        distance = {"frechet": frechet_distance(own, theirs), "precision": precision, "recall": recall}
        return {"real": len(files), "features": space, **distance}

    return compare


def clip_score(folder: Path, device: torch.device) -> Score:
    """The cosine of CLIP's embeddings (Hessel et al., 2021, arXiv:2104.08718, without its factor 2.5)."""
    from transformers import CLIPModel, CLIPProcessor

    model = CLIPModel.from_pretrained(folder, local_files_only=True).eval().to(device)
    processor = CLIPProcessor.from_pretrained(folder, local_files_only=True)

    def score(file: Path, prompt: str) -> float:
        given = processor(text=[prompt], images=opened(file), return_tensors="pt", padding=True, truncation=True)
        found = model(**given.to(device))
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
    model, _, read = package.create_model_and_transforms("ViT-H-14", output_dict=True)  # without weights
    model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True)["state_dict"])
    model, tokenizer = model.eval().to(device), package.get_tokenizer("ViT-H-14")

    def score(image: Path, prompt: str) -> float:
        found = model(read(opened(image))[None].to(device), tokenizer([prompt]).to(device))
        return float((found["image_features"] * found["text_features"]).sum())

    return score


def _package(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ValueError(f"This needs the package {package}, which cannot be imported here ({error}).") from error


def measurer(options: argparse.Namespace) -> Callable[[Path], dict[str, Any]]:
    """A function that says of a folder of images what can be said with the networks at hand, which are loaded here.

    Raises ValueError for what is missing.
    """
    os.environ |= {"HF_HUB_OFFLINE": "1", "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1"}  # packages load in their own ways
    named = options.real, options.clip, options.inception, options.image_reward, options.hps
    if absent := [str(path) for path in named if path is not None and not path.exists()]:
        raise ValueError(f"{', '.join(absent)}: no such file or folder.")
    device = torch.device(options.device)
    loaders = {
        "clip": (options.clip, clip_score),
        "image_reward": (options.image_reward, image_reward),
        "hps": (options.hps, human_preference),
    }
    scores = {name: load(file, device) for name, (file, load) in loaders.items() if file is not None}
    compare = None if options.real is None else comparison(options.real, options.inception, device)

    @torch.inference_mode()
    def measure(folder: Path) -> dict[str, Any]:
        files = images_in(folder)
        found: dict[str, Any] = {"images": len(files)}
        for name, score in scores.items():
            each = [score(file, prompt) for file, prompt in zip(files, prompts_of(files), strict=True)]
            found[name] = bootstrap(torch.tensor(each))
        return found | (compare(files) if compare else {})

    return measure


def main() -> None:
    parser = command("quality", __doc__)
    parser.add_argument("images", type=Path, metavar="FOLDER")
    add_networks(parser)
    options = parsed(parser)
    try:
        found = measurer(options)(options.images)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(json.dumps(found, indent=1))
    if options.out:
        write(found | {"measured": measured_on(torch.device(options.device))}, options.out)
