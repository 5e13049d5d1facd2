"""Draws assets/overview.png, the README's first image, from real runs of the bundled model: one seed, sampled token by
token and by speculative Jacobi decoding.

    python scripts/overview.py
"""

from pathlib import Path

import comfyui_specar as specar
import numpy as np
from comfyui_specar.reports import acceptance_map, timeline_frames
from PIL import Image, ImageDraw, ImageFont

PROMPT, SEED = "strawberry, 3d, on a teal background", 7
SIDE, MARGIN, HEAD = 288, 16, 58  # pixels
INK, QUIET = (25, 25, 25), (95, 95, 95)


def panel(canvas: Image.Image, number: int, pixels: np.ndarray, title: str, note: str) -> None:
    draw, left = ImageDraw.Draw(canvas), MARGIN + number * (SIDE + MARGIN)
    draw.text((left, MARGIN - 4), title, INK, ImageFont.load_default(19))
    draw.text((left, MARGIN + 22), note, QUIET, ImageFont.load_default(14))
    image = Image.fromarray(pixels)
    scale = Image.Resampling.NEAREST if min(image.size) < SIDE // 4 else Image.Resampling.LANCZOS
    canvas.paste(image.resize((SIDE, SIDE), scale), (left, HEAD))


def main() -> None:
    path = specar.bundled("default")
    model, vae = specar.load_model(path), specar.load_image_decoder(path)
    prompt = model.encode_prompt(PROMPT)
    plain = specar.sample(model, prompt, method=specar.methods.NextToken(), seed=SEED)
    fast = specar.sample(model, prompt, method=specar.methods.SJD(window=32, reuse="gumbel"), seed=SEED)
    same = bool((plain.tokens == fast.tokens).all())
    passes = [run.trace.summary()["target_passes"] for run in (plain, fast)]
    images = [(vae.decode(run.latent)[0].numpy() * 255).round().astype(np.uint8) for run in (plain, fast)]
    source = acceptance_map.token_map(fast.trace, "source", 0)
    until = list(range(passes[1] // 2 + 1))
    *_, halfway = timeline_frames.draw_frames(fast.trace, 0, images[1].astype(np.float32) / 255, until, 0.6)

    canvas = Image.new("RGB", (4 * SIDE + 5 * MARGIN, HEAD + SIDE + MARGIN), "white")
    panel(canvas, 0, images[0], f"{passes[0]} passes", "AR Sampler (next token)")
    panel(canvas, 1, (halfway * 255).round().astype(np.uint8), f"pass {passes[1] // 2} of {passes[1]}",
          "SJD++ Sampler: runs of guesses are taken")
    panel(canvas, 2, images[1], f"{passes[1]} passes{', the same image' if same else ''}",
          "SJD++ Sampler, same seed")
    accepted = float(source.strength.mean())
    panel(canvas, 3, source.colours, f"{100 * accepted:.0f} % were good guesses (blue)", "Acceptance Map")
    canvas.save(Path(path).parent / "overview.png", optimize=True)


if __name__ == "__main__":
    main()
