"""Whether a latent was changed after it was generated or encoded, as far as it tells by itself.

Tokens stand for patches with their own content. Latents of diffusion models can be scaled and blended; among code
vectors, this gives vectors that no decoder was trained on, or patches that are repeated. (Tokens that were only moved
or left out, by a rotation or a crop, tell nothing.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from .networks.vq import nearest_codes

_LOOKED_AT = 256  # vectors, spread over all images: a large codebook makes more of them slow
_ROUNDING = 0.02  # of the largest number in the codebook, as a latent may have been stored in half precision
_WHOLE = 0.1  # how far an id may be from a whole number
_FEWEST = 0.85  # of the rows and columns may be left of a scaled latent: fewer repetitions may be an image's own

REMEDY = "Connect VAE Decode directly and change the image instead: Upscale Image By in place of Upscale Latent By."
CHANGED = (
    "The latent is not as it was generated or encoded, which tears the image: another node scaled, blended or "
    f"changed it, or it is another model's. {REMEDY}"
)


def whole_ids(latent: Tensor) -> Tensor:
    """Token ids [B, h, w] (int64) of a latent [B, 1, h, w]. Raises ValueError for one that was blended or scaled."""
    ids = latent[:, 0].round()
    if ((latent[:, 0] - ids).abs() > _WHOLE).any():
        raise ValueError(f"The latent holds token ids that are no whole numbers: another node changed it. {REMEDY}")
    return ids.long()


def is_changed(latent: Tensor, codebook: Tensor | None) -> bool:
    """Whether a latent [B, C, h, w], of vectors of a codebook [V, C] if there is one, was scaled or blended."""
    return is_repeated(latent) or (codebook is not None and is_off_codebook(latent, codebook))


def is_off_codebook(latent: Tensor, codebook: Tensor) -> bool:
    """Whether vectors of a latent [B, C, h, w] are none of the codebook [V, C]."""
    vectors = latent.movedim(1, -1).flatten(0, -2)
    places = torch.linspace(0, len(vectors) - 1, min(len(vectors), _LOOKED_AT)).long()
    vectors, codebook = vectors[places.to(vectors.device)].float().cpu(), codebook.float().cpu()
    nearest = codebook[nearest_codes(vectors[:, :, None, None], codebook).flatten()]
    return bool(((vectors - nearest).abs() > _ROUNDING * codebook.abs().max()).any())


def is_repeated(latent: Tensor) -> bool:
    """Whether a latent [B, C, h, w] is a smaller one, scaled without blending: its rows and columns are repeated at
    regular distances."""
    return all(_repeats(latent, axis) for axis in (-2, -1))


def _repeats(latent: Tensor, axis: int) -> bool:
    slices = latent.movedim(axis, 0).flatten(1)
    same = (slices[1:] == slices[:-1]).all(1).cpu()
    if same.all():  # of one colour, or a single row
        return False
    places = torch.arange(len(slices)) + 0.5
    sources = ((places * size / len(slices)).long() for size in range(1, int(_FEWEST * len(slices)) + 1))
    return any(bool(same[source[1:] == source[:-1]].all()) for source in sources)
