"""Measure the rows of a paper's main table on a model at hand, in the paper's columns, beside the paper's own numbers.

    python -m tools.benchmarks paper cool-sd                                         # the bundled model and drafter
    python -m tools.benchmarks paper cool-sd --model MODEL --drafter DRAFTER --prompts FILE --images 100
    python -m tools.benchmarks paper vvs --real FOLDER --inception FILE --clip DIR   # fills the columns of quality

The images are kept in --folder, each with its prompt, a folder per row. Times are of single images after a first one
that does not count, in brackets their standard deviation. Columns of quality need networks of yours (see quality FOLDER
--help); "-" is what was not measured, or not printed. --batches: sizes of batches to time, of those in the table.
The papers' numbers are theirs: other models, prompts and GPUs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import comfyui_specar as specar
import torch
from PIL import Image

from . import quality_folder
from .paper_tables import KEYS, TABLES, Table
from .report import command, find, grid, measured_on, parsed, write
from .runs import PROMPTS

NOT_MEASURED = "-"
COUNTED = ("accepted_length", "step_compression", "acceptance_rate", "mean_depth", "draft_tv")  # totals of a trace


class Measured:
    """The images of a table's rows: what each run took, and where the images are."""

    def __init__(self, model: Any, drafter: Any, decoder: Any, prompts: Sequence[str], sampling: dict[str, Any]):
        self.model, self.drafter, self.decoder, self.sampling = model, drafter, decoder, sampling
        self.prompts, self.encoded = prompts, [model.encode_prompt(prompt) for prompt in prompts]

    def run(self, method: Any, number: int, batch: int = 1) -> tuple[Any, float]:
        """The output of image ``number``, or of a batch from there, and its seconds."""
        prompt = self.encoded[number % len(self.encoded)]
        begun = time.perf_counter()
        out = specar.sample(self.model, prompt, method, seed=number, batch_size=batch, **self.sampling)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        return out, time.perf_counter() - begun

    def row(self, method: Any, images: int, batches: Sequence[int], folder: Path) -> dict[str, list[float]]:
        """The values of every image by key; the images go into ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        found: dict[str, list[float]] = {}
        self.run(method, 0)
        for number in range(images):
            out, seconds = self.run(method, number)
            summary = out.trace.summary()
            values = {name: summary[name] for name in COUNTED if name in summary} | {"seconds": seconds}
            for name, value in values.items():
                found.setdefault(name, []).append(value)
            pixels = (self.decoder.decode(out.latent)[0] * 255).round().byte().cpu().numpy()
            Image.fromarray(pixels).save(folder / f"{number:04}.png")
            (folder / f"{number:04}.txt").write_text(self.prompts[number % len(self.prompts)], encoding="utf-8")
        for batch in batches:
            timed = found["seconds"] if batch == 1 else [self.run(method, 0, batch)[1] for _ in range(2)][1:]
            found[f"seconds@{batch}"] = timed
        return found


def cell(found: dict[str, Any], base: dict[str, Any], key: str) -> str:
    """A value as the table prints it: the mean of its images, of times and lengths with the standard deviation."""
    if key.startswith("faster@"):
        seconds = f"seconds{key.removeprefix('faster')}"
        return f"{statistics.mean(base[seconds]) / statistics.mean(found[seconds]):.2f}" if seconds in found else ""
    value = found.get(key)
    if key == "draft_tv" and not any(value or ()):  # of no drafter that samples
        return ""
    if isinstance(value, list):
        spread = statistics.stdev(value) if len(value) > 1 else 0.0
        mean = statistics.mean(value)
        return f"{mean:.2f} ({spread:.2f})" if key in ("seconds", "accepted_length") else f"{mean:.3g}"
    if isinstance(value, dict):  # a mean with its interval
        value = value["value"]
    return "" if value is None else f"{value:.4g}"


def rendered(table: Table, model: str, rows: Sequence[dict[str, Any]]) -> str:
    """The table in Markdown: ours, then the paper's."""
    ours = [[cell(row, rows[0], key) for key in table.columns.values()] for row in rows]
    lines = [[f"{model}, ours", name.name, *cells] for name, cells in zip(table.rows, ours, strict=True)]
    for published, theirs in table.published.items():
        for name, cells in zip(table.rows, theirs, strict=False):
            blank = [""] * (len(table.columns) - len(cells))
            lines.append([f"{published}, the paper's", name.name, *cells, *blank])
    return grid(["model", "method", *table.columns], [[part or NOT_MEASURED for part in line] for line in lines])


def main() -> None:
    parser = command("paper", __doc__)
    parser.add_argument("paper", choices=TABLES)
    parser.add_argument("--model", help="a file, folder or bundled model (default: default, or continuous)")
    parser.add_argument("--drafter", help="its drafter (default: the bundled model's)")
    parser.add_argument("--decoder", help="its image decoder, if it is in a file of its own")
    parser.add_argument("--prompts", type=Path, help="a text file with a prompt per line (default: six of ours)")
    parser.add_argument("--images", type=int, default=6, help="per row (default: %(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1], help="(default: 1)")
    parser.add_argument("--cfg", type=float, help="guidance (default: the model's own)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--folder", type=Path, default=Path("runs/paper"), help="for the images (default: %(default)s)")
    quality_folder.add_networks(parser)
    options = parsed(parser)
    table, device = TABLES[options.paper], torch.device(options.device)
    if unknown := [size for size in options.batches if f"faster@{size}" not in table.columns.values()]:
        parser.error(f"the table has no batches of {', '.join(map(str, unknown))}.")
    try:
        measure = quality_folder.measurer(options)  # before images take hours
    except (OSError, ValueError) as error:
        parser.error(str(error))
    name = options.model or ("continuous" if table.continuous else "default")
    drafter = options.drafter or f"{name}/{'small' if table.continuous else 'eagle'}"
    prompts = options.prompts.read_text(encoding="utf-8").splitlines() if options.prompts else PROMPTS
    model = specar.load_model(find(name), device=device, dtype=getattr(torch, options.dtype))
    decoder = specar.load_image_decoder(find(options.decoder or name))
    sampling = table.sampling | ({} if options.cfg is None else {"cfg": options.cfg})
    if "top_k" in sampling and sampling["top_k"] > model.vocab:
        sampling["top_k"] = 0  # a paper's filter that would keep the whole vocabulary
    measured = Measured(model, specar.load_drafter(find(drafter), model), decoder, prompts, sampling)
    rows = []
    for number, row in enumerate(table.rows):
        folder = options.folder / options.paper / f"{number} {row.name.translate(str.maketrans('', '', '();'))}"
        found: dict[str, Any] = measured.row(row.method(measured.drafter), options.images, options.batches, folder)
        found |= {key: value for key, value in measure(folder).items() if key in KEYS}
        rows.append(found)
        if options.out:
            done = {each.name: values for each, values in zip(table.rows, rows, strict=False)}
            write({"paper": table.title, "model": name, "rows": done, "measured": measured_on(device)}, options.out)
    print(f"{table.title}\n\n{rendered(table, name, rows)}")


if __name__ == "__main__":
    main()
