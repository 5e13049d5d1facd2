"""The image of AR Example Image, by the bundled model, its right half masked as the mask editor saves it.

After a change of the model: `bash tools/pictures.sh example`, then the thumbnails of the templates that begin with it.
"""

from pathlib import Path

import comfyui_specar as specar
from PIL import Image

PROMPT, SEED = "purple heart, 3d, on a green background", 1


def draw(file: Path) -> None:
    path = specar.bundled("default")
    model, decoder = specar.load_model(path), specar.load_image_decoder(path)
    out = specar.sample(model, model.encode_prompt(PROMPT), specar.methods.SJD(), seed=SEED)
    image = Image.fromarray((decoder.decode(out.latent)[0].numpy() * 255).round().astype("uint8"))
    alpha = Image.new("L", image.size, 255)
    alpha.paste(0, (image.width // 2, 0, *image.size))
    image.putalpha(alpha)
    image.save(file, optimize=True)
