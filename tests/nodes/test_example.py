"""AR Example Image: what it gives, and what it shows."""

import folder_paths
import numpy as np
import torch
from comfyui_specar.nodes.example import FILE
from PIL import Image


def test_the_right_half_is_masked_and_shown_faintly(nodes, run):
    shown = run(nodes["SpecARExampleImage"])
    image, mask = shown.result
    assert image.shape == (1, 256, 256, 3) and mask.shape == (1, 256, 256)
    assert not mask[..., :128].any() and (mask[..., 128:] == 1).all()
    pixels = np.array(Image.open(FILE))
    assert torch.equal((image[0] * 255).round().byte(), torch.from_numpy(pixels[..., :3]))
    [file] = shown.ui["images"]
    with Image.open(f"{folder_paths.get_temp_directory()}/{file['subfolder']}/{file['filename']}") as preview:
        alpha = np.asarray(preview)[..., 3]
    assert (alpha[:, :128] == 255).all() and ((alpha[:, 128:] > 0) & (alpha[:, 128:] < 128)).all()
