"""Models as tests ask them."""

from __future__ import annotations

from collections.abc import Sequence

from comfyui_specar.models.text.prompt_encoders import features_of
from comfyui_specar.models.text.prompts import Conditioning, Prompted


def of_ids(model: Prompted, ids: Sequence[int]) -> Conditioning:
    """CONDITIONING of a language model's token ids, special tokens included, without a template."""
    return model.encode_features(features_of(ids))
