"""Measure what every method's images are worth: likelihood, prompt agreement, distances between sets of images.

    python -m benchmarks quality [--models default continuous] [--images 512] [--only NAMES] [--out FILE]
    python -m benchmarks quality --parts draw                  # the images only: hours, can be stopped and goes on
    python -m benchmarks quality --parts measure --out FILE    # of the images drawn so far: minutes

All methods get the same prompts, each image with its own seed, at temperature 1 without filters (continuous models:
with their own settings). A second set of next-token images with other seeds is the floor: no method can come closer.
Lossless methods must be inside of it: permutation tests of likelihood, agreement and kernel distances (image and
next-token image of a prompt are exchanged), by Holm's procedure over all lossless methods of a model. The command fails
if one is outside. A continuous model's exact mode adds the noise of the last denoising step, which its plain sampler
leaves out; it is far below what the features see. See benchmarks/classifier/README.md for the classifier.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfyui_specar as specar
import torch

from . import quality_sources
from .feature_spaces import Spaces
from .quality_cases import PROMPTS, Prompt, continuous_cases, discrete_cases, prompts, settings_of
from .quality_draw import Drawn, draw, file_of, origin, read
from .quality_measure import Measurement, agreement, check, look
from .report import commit, find, machine, versions, write
from .runs import Case

PARTS = ("draw", "measure")
MODELS = ("default", "continuous")
ALARM_RATE = 0.01  # probability that the check fails although every lossless method is exact, for each model


@dataclass
class ModelUnderTest:
    """A bundled model, its image decoder and cases, and the sampling parameters of all of them."""

    name: str
    model: Any
    decoder: Any
    cases: list[Case]
    parameters: dict[str, Any]
    folder: Path

    @classmethod
    def load(cls, name: str, cfg: float, device: torch.device, dtype: torch.dtype, folder: Path) -> ModelUnderTest:
        model = specar.load_model(find(name), device=device, dtype=dtype)
        decoder = specar.load_image_decoder(find(name), device=device)
        small = specar.load_drafter(find(f"{name}/small"), model)
        if model.continuous:
            return cls(name, model, decoder, continuous_cases(small), {}, folder / name)
        eagle = specar.load_drafter(find(f"{name}/eagle"), model)
        parameters = {"cfg": cfg, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        return cls(name, model, decoder, discrete_cases(eagle, small), parameters, folder / f"{name}-{cfg:g}")

    def file(self, case: Case, kind: str = "images") -> Path:
        return file_of(self.folder / kind, case)

    def origin(self, case: Case) -> str:
        return origin(case, self.model, find(self.name) / "model.safetensors", self.parameters)

    def draw(self, case: Case, wanted: Sequence[Prompt], batch: int) -> Drawn:
        file = self.file(case)
        file.parent.mkdir(parents=True, exist_ok=True)
        return draw(case, self.model, wanted, batch, file, self.origin(case), self.parameters)

    def drawn(self, case: Case, count: int) -> Drawn | None:
        """Its first images; None if there are fewer than ``count``."""
        found = read(self.file(case), self.origin(case))
        return None if found is None or len(found) < count else found.first(count)


def measure(tested: ModelUnderTest, wanted: Sequence[Prompt], spaces: Spaces) -> dict[str, Any]:
    """The report on the cases of which enough images were drawn. Raises ValueError without those of the reference."""
    reference, *_ = tested.cases
    drawn = {case.name: (case, found) for case in tested.cases if (found := tested.drawn(case, len(wanted)))}
    if reference.name not in drawn:
        raise ValueError(f"There are no {len(wanted)} images of {reference.name!r} in {tested.file(reference)}, which "
                         "the others are compared with. Draw them, or ask for fewer --images.")
    seen = {}
    for name, (case, found) in drawn.items():
        file = tested.file(case, "seen")
        file.parent.mkdir(parents=True, exist_ok=True)
        seen[name] = look(found, file, tested.model, tested.decoder, wanted, spaces, tested.parameters.get("cfg"),
                          name)
    vocab = None if tested.model.continuous else tested.model.vocab
    sources = quality_sources.read(spaces, len(wanted))
    table = Measurement(wanted, seen, {space: sources[space] for space in spaces.names}, vocab)
    rows = []
    for name, (case, found) in drawn.items():
        rows.append(table.row(name, found, settings_of(case, tested.model)["lossless"]))
        print(line(rows[-1]), flush=True)
    return {
        "name": tested.name, "dtype": str(tested.model.dtype), "images": len(wanted), "reference": reference.name,
        "settings": tested.parameters or vars(tested.model.defaults),
        "missing": [case.name for case in tested.cases if case.name not in drawn],
        "sources": {"agreement": agreement(sources["shown"], wanted)},
        "rows": rows, "outside": check(rows, ALARM_RATE),
    }


def line(row: dict[str, Any]) -> str:
    """A row on the terminal."""
    sources = row["distances"]["own"]["sources"]
    parts = [f"{row['name']:38s} passes {row['passes']['value']:6.1f}"]
    if "log_p" in row:
        parts.append(f"log p {row['log_p']['value']:.3f}")
    parts += [f"{part} {found['value']:.1%}" for part, found in row["agreement"].items()]
    parts.append(f"from sources: Frechet {sources['frechet']['value']:.2f}, kernel {sources['kernel']['value']:.4f}")
    return "  ".join(parts)


def rounded(tree: Any) -> Any:
    """The same report with five significant digits."""
    if isinstance(tree, dict):
        return {key: rounded(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [rounded(value) for value in tree]
    return float(f"{tree:.5g}") if isinstance(tree, float) else tree


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks quality", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="bundled models (default: both)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(default: both)")
    parser.add_argument("--images", type=int, default=PROMPTS,
                        help=f"per method, each of another prompt, at most {PROMPTS} (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="images generated together (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="draw only these cases")
    parser.add_argument("--cfg", type=float, default=2.0, help="guidance of the discrete model (default: %(default)s)")
    parser.add_argument("--without-imagenet", action="store_true",
                        help="compare in the classifier's features only: those of ImageNet need two packages")
    parser.add_argument("--folder", type=Path, default=Path("runs/quality"),
                        help="where the images are kept (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                        help="device (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"),
                        help="precision of the models, for the images and their likelihood (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's own)")
    parser.add_argument("--out", type=Path, help="JSON report to write")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    wanted, device = prompts(options.images), torch.device(options.device)
    dtype = getattr(torch, options.dtype)
    models = [ModelUnderTest.load(name, options.cfg, device, dtype, options.folder) for name in options.models]
    names = [case.name for tested in models for case in tested.cases]
    if unknown := set(options.only or ()) - set(names):
        parser.error(f"there is no case {', '.join(sorted(unknown))}; choose from: {'; '.join(names)}")
    if "draw" in options.parts:
        for tested in models:
            for case in tested.cases:
                if not options.only or case.name in options.only:
                    tested.draw(case, wanted, options.batch)
    if "measure" not in options.parts:
        return
    spaces = Spaces(not options.without_imagenet)
    report = {"machine": machine(device), "versions": versions(), "commit": commit(), "alarm_rate": ALARM_RATE,
              "classifier": spaces.accuracy, "models": []}
    for tested in models:
        report["models"].append(measure(tested, wanted, spaces))
        if options.out:
            write(rounded(report), options.out)
    outside = [f"{model['name']}: {name}" for model in report["models"] for name in model["outside"]]
    if outside:
        sys.exit(f"Lossless methods outside the floor (false-alarm rate {ALARM_RATE:.0%}): {', '.join(outside)}.")


if __name__ == "__main__":
    main()
