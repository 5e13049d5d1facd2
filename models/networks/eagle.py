"""EAGLE's feature drafter (Li et al., arXiv:2401.15077): one transformer block that continues a target's hidden states.

At every position it reads the target's last hidden state (after the final norm) and the token sampled from it, and
predicts the hidden state of the next position. The target's own head turns that into logits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...device.placed import Placed
from .backbone import BackboneConfig, Block
from .cache import KVCache, Mask
from .positions import RotaryTable, Rotation


class Eagle(Placed):
    """``config`` describes the one block and the token table; ``bias`` is that of the layer joining token and
    feature."""

    def __init__(self, config: BackboneConfig, bias: bool = True, operations=nn):
        super().__init__()
        self.config = config
        self.tok_embeddings = operations.Embedding(config.vocab, config.dim)
        self.fc = operations.Linear(2 * config.dim, config.dim, bias=bias)
        self.layer = Block(config, operations)

    def forward(
        self,
        hidden: Tensor,
        ids: Tensor,
        rotation: Rotation | RotaryTable,
        cache: KVCache | None = None,
        mask: Mask = None,
    ) -> Tensor:
        """Predicted features [R, T, dim] one position further, for features [R, T, dim] and the ids [R, T] after them.

        rotation, cache and mask as in Backbone; a pair has the position of its token. There is no final norm.
        """
        x = self.fc(torch.cat((self.tok_embeddings(ids).to(hidden.dtype), hidden), dim=-1))
        return self.layer(x, rotation.table(), 0, cache, mask)
