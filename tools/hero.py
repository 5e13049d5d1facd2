"""The README's first image, an animation: one prompt and seed, sampled token by token and by speculative Jacobi
decoding side by side, at the relative speed of the real runs, and the map of accepted draft tokens."""

import time
from dataclasses import dataclass
from pathlib import Path

import comfyui_specar as specar
import numpy as np
import torch
from comfyui_specar.api import Output
from comfyui_specar.reports import acceptance_map as maps
from comfyui_specar.reports.timeline_frames import draw_frames
from comfyui_specar.samplers.trace import Source
from comfyui_specar.tools.benchmarks.report import cpu_name
from PIL import Image, ImageDraw, ImageFont

MOST_BYTES = 2_000_000
PROMPT, SEED = "red car, 3d, on a teal background", 3
METHODS = {  # by their names on AR Sampler
    "slow": specar.methods.NextToken(),
    "fast, same image as slow": specar.methods.SJD(reuse="gumbel"),
}
RUNS = 5  # of each method, in turns; the fastest one is shown: the one that other programs disturbed least
LENGTH, HOLD, FPS = 8.0, 4.0, 12.5  # seconds of the slowest run and of the finished images after it, frames per second
TINT = 0.6
MARGIN, HEAD, FOOT = 24, 76, 88  # pixels beside, above and below the images
GROUND, INK, QUIET, BAR = (24, 24, 24), (230, 230, 230), (150, 150, 150), (60, 60, 60)
ACCEPTED = maps.SOURCES[Source.ACCEPTED][1]


@dataclass(frozen=True)
class Run:
    """An image by one method, and when its forward passes ended (seconds from the beginning, rising)."""

    method: str
    out: Output
    ends: list[float]

    def passes(self, seconds: float) -> int:
        """How many were over then."""
        return int(np.searchsorted(self.ends, seconds, side="right"))


def timed(model, prompt, method: str) -> Run:
    ends, begun = [], time.perf_counter()
    out = specar.sample(
        model, prompt, METHODS[method], seed=SEED, callback=lambda _: ends.append(time.perf_counter() - begun)
    )
    return Run(method, out, ends)


def fastest(model) -> list[Run]:
    """The fastest run of each method. Raises ValueError where they sampled different tokens."""
    prompt = model.encode_prompt(PROMPT)
    rounds = [[timed(model, prompt, method) for method in METHODS] for _ in range(1 + RUNS)][1:]  # the first warms up
    runs = [min(tries, key=lambda run: run.ends[-1]) for tries in zip(*rounds, strict=True)]
    if not all(torch.equal(run.out.tokens, runs[0].out.tokens) for run in runs):
        raise ValueError(f"rounding led to different tokens: choose another seed than {SEED}")
    return runs


def animation(run: Run, picture: np.ndarray, clock: np.ndarray, tint: float) -> list[Image.Image]:
    """The picture [H, W, 3] (fp32 in 0..1) as far as the run was after these seconds, and once more without tint."""
    after = [run.passes(seconds) - 1 for seconds in clock]  # the trace counts from the prompt's pass, 0
    drawn = draw_frames(run.out.trace, 0, picture, after, tint)
    return [Image.fromarray((frame * 255).round().astype(np.uint8)) for frame in (*drawn, picture)]


def panel(canvas: Image.Image, number: int, image: Image.Image, title: str, share: float, *lines: str) -> None:
    """An image below its title, above a bar that is filled to a share, and two lines of text."""
    draw, left, below = ImageDraw.Draw(canvas), MARGIN + number * (image.width + MARGIN), HEAD + image.height
    canvas.paste(image, (left, HEAD))
    draw.text((left, HEAD - 30), title, INK, ImageFont.load_default(19))
    draw.rectangle((left, below + 8, left + image.width - 1, below + 13), BAR)
    if share:
        draw.rectangle((left, below + 8, left + share * image.width - 1, below + 13), ACCEPTED)
    for line, (down, size, colour) in zip(lines, ((19, 17, INK), (42, 14, QUIET)), strict=True):
        draw.text((left, below + down), line, colour, ImageFont.load_default(size))


def draw(file: Path) -> None:
    """Raises ValueError if the file would be too large."""
    path = specar.bundled("default")
    model, vae = specar.load_model(path), specar.load_image_decoder(path)
    slow, fast = runs = fastest(model)
    picture = vae.decode(fast.out.latent)[0].numpy()
    source = maps.token_map(fast.out.trace, "source", 0)
    colours = maps.enlarge(source.colours, *picture.shape[:2]).astype(np.float32) / 255
    pace = slow.ends[-1] / LENGTH
    clock = pace * np.arange(1, LENGTH * FPS + 1) / FPS
    clock[-1] = slow.ends[-1]  # whatever rounding made of it
    animations = [
        animation(*each)
        for each in ((slow, picture, clock, TINT), (fast, picture, clock, TINT), (fast, colours, clock, 0.0))
    ]
    decided_in, tokens = fast.out.trace.grid("finalised_at")[0].numpy(), source.strength.size
    threads = torch.get_num_threads()
    measured = (
        f"{cpu_name()}, {threads} thread{'s' * (threads > 1)}, fp32; fastest of {RUNS} runs each, "
        f"played at {pace:.2g} times their speed"
    )

    sheets = []
    for seconds, *images in zip([*clock, clock[-1]], *animations, strict=True):
        height, width = picture.shape[:2]
        canvas = Image.new("RGB", (3 * width + 4 * MARGIN, HEAD + height + FOOT), GROUND)
        write = ImageDraw.Draw(canvas).text
        write((MARGIN, 10), f"“{PROMPT}”, seed {SEED}", INK, ImageFont.load_default(19))
        write((MARGIN, HEAD + height + 66), measured, QUIET, ImageFont.load_default(13))
        for number, run in enumerate(runs):
            done, most = run.passes(seconds), len(run.ends)
            same = ", the same image" if run is fast and done == most else ""
            panel(
                canvas,
                number,
                images[number],
                run.method,
                done / most,
                f"{done} of {most} forward passes",
                f"{min(seconds, run.ends[-1]):.2f} s{same}",
            )
        accepted = int((source.strength > 0)[decided_in < fast.passes(seconds)].sum())
        panel(
            canvas,
            2,
            images[2],
            "Acceptance Map",
            accepted / tokens,
            f"{accepted} of {tokens} tokens accepted",
            "blue: accepted, orange: resampled",
        )
        sheets.append(canvas)
    durations = [round(1000 / FPS)] * len(clock) + [round(1000 * HOLD)]
    sheets[0].save(file, save_all=True, append_images=sheets[1:], duration=durations, loop=0, quality=80, method=4)
    if file.stat().st_size > MOST_BYTES:
        raise ValueError(f"{file} has {file.stat().st_size} bytes, more than {MOST_BYTES}")
