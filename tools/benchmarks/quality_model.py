"""A bundled model whose images are measured: its cases, and where their images are."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfyui_specar as specar
import torch
from torch import Tensor

from . import quality_sources
from .feature_spaces import Spaces
from .quality_cases import Prompt, continuous_cases, discrete_cases, settings_of
from .quality_draw import Drawn, draw, file_of, origin, read
from .quality_measure import Measurement, agreement, look
from .report import find
from .runs import Case

BASE = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}  # of the discrete model, besides guidance


def in_words(value: float | tuple[float, ...], between: str = ", ") -> str:
    """A sampling parameter's value."""
    return between.join(f"{number:g}" for number in (value if isinstance(value, tuple) else (value,)))


@dataclass
class ModelUnderTest:
    """A bundled model, its image decoder and cases, and the sampling parameters of all of them ({}: the model's own).

    folder: of all images; those with these parameters are in a folder inside of it.
    """

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
            return cls(name, model, decoder, continuous_cases(small), {}, folder)
        eagle = specar.load_drafter(find(f"{name}/eagle"), model)
        return cls(name, model, decoder, discrete_cases(eagle, small), {"cfg": cfg, **BASE}, folder)

    @property
    def settings(self) -> dict[str, Any]:
        return self.parameters or vars(self.model.defaults)

    @property
    def images(self) -> Path:
        """The folder of the images with these parameters: "default-2", "default-2-temperature-0.7"."""
        others = [f"-{key}-{in_words(value, '-')}" for key, value in self.parameters.items() if value != BASE.get(key)]
        return self.folder / f"{self.name}{''.join(others).replace('-cfg', '', 1)}"

    def file(self, case: Case, kind: str = "images") -> Path:
        return file_of(self.images / kind, case)

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

    def look(
        self, case: Case, drawn: Drawn, wanted: Sequence[Prompt], spaces: Spaces, cfg: float | None
    ) -> dict[str, Tensor]:
        """What is measured of each image. cfg: the guidance at which the model says how likely its tokens are."""
        file = self.file(case, "seen")
        file.parent.mkdir(parents=True, exist_ok=True)
        return look(drawn, file, self.model, self.decoder, wanted, spaces, cfg, case.name)

    def check_drawn(self, case: Case, count: int) -> None:
        """Raises ValueError unless so many images of the reference ``case`` were drawn."""
        if self.drawn(case, count) is None:
            raise ValueError(
                f"There are no {count} images of {case.name!r} in {self.file(case)}, which the others are "
                "compared with. Draw them, or ask for fewer --images."
            )

    def weights(self) -> dict[str, int]:
        """Checksums of the model's files, those of its drafters among them."""
        folder = find(self.name)
        return {
            file.relative_to(folder).as_posix(): zlib.crc32(file.read_bytes())
            for file in sorted(folder.rglob("*.safetensors"))
        }

    def conditions(self, wanted: Sequence[Prompt], spaces: Spaces) -> dict[str, Any]:
        """What all rows of a report on the model have in common."""
        return {
            "weights": self.weights(),
            "dtype": str(self.model.dtype),
            "images": len(wanted),
            "prompts": zlib.crc32("\n".join(prompt.text for prompt in wanted).encode()),
            "settings": self.settings,
            "spaces": spaces.names,
        }

    def measure(self, wanted: Sequence[Prompt], spaces: Spaces) -> dict[str, Any]:
        """The report on the cases of which enough images were drawn. Raises ValueError without those of the
        reference."""
        reference, *_ = self.cases
        self.check_drawn(reference, len(wanted))
        drawn = {case: found for case in self.cases if (found := self.drawn(case, len(wanted)))}
        cfg = self.parameters.get("cfg")
        seen = {case.name: self.look(case, found, wanted, spaces, cfg) for case, found in drawn.items()}
        settings = {case.name: settings_of(case, self.model) for case in self.cases}
        return self.report(settings, {case.name: found for case, found in drawn.items()}, seen, wanted, spaces)

    def report(
        self,
        cases: dict[str, dict[str, Any]],
        drawn: dict[str, Drawn],
        seen: dict[str, dict[str, Tensor]],
        wanted: Sequence[Prompt],
        spaces: Spaces,
    ) -> dict[str, Any]:
        """cases: settings of all of them, those not ``drawn`` as well; the first is the reference."""
        sources = quality_sources.read(spaces, len(wanted))
        vocab = None if self.model.continuous else self.model.vocab
        table = Measurement(wanted, seen, {space: sources[space] for space in spaces.names}, vocab)
        rows = []
        for case, found in drawn.items():
            rows.append(table.row(case, found, cases[case].get("lossless", False)))
            print(line(rows[-1]), flush=True)
        return {
            "reference": table.reference,
            "sources": {"agreement": agreement(sources["shown"], wanted)},
            "cases": cases,
            "rows": rows,
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
