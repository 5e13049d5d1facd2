"""What a model computes for an image when its tokens come in several steps."""

from __future__ import annotations

from typing import Any

import torch
from comfyui_specar.models.discrete_model import DiscreteModel
from comfyui_specar.samplers.layout import TokenLayout
from torch import Tensor


def stepwise(
    model: DiscreteModel, conditioning: Any, tokens: Tensor, layout: TokenLayout, negative: Any = None
) -> tuple[Tensor, Tensor]:
    """Hidden states [2, S, D] and logits [2, S, V+] of both guidance branches that predict the tokens [1, S].

    The prompt comes first, then one token, seven at once, and all the others.
    """
    state = model.start(conditioning, negative, 1, layout, slack=0, guided=True)
    out = [state.prefill]
    for first, count in ((0, 1), (1, 7), (8, layout.length - 9)):
        places = torch.arange(first, first + count)[None]
        out.append(model.step(state, tokens[:, places[0]], places))
        model.commit(state, torch.tensor([count]))
    return torch.cat([step.hidden for step in out], dim=1), torch.cat([step.logits for step in out], dim=1)
