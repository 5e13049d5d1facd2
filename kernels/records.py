"""Recording what a forward pass decided: the tokens of an image, and each token's numbers for the trace."""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import Accelerated
from .sampling import at, entropy


@Accelerated
def write(
    table: Tensor,
    tokens: Tensor,
    position: Tensor,
    meant: Tensor,
    token: Tensor | None,
    p: Tensor | None,
    columns: Tensor,
    values: tuple[Tensor, ...],
) -> None:
    """At positions [B, T] (int64), where ``meant`` [B, T] (bool), store tokens and numbers, in place.

    ``columns`` [n] (int64) of table [B, S + 1, F] (fp32) get the ``values``, each [B, T], integers before floats;
    tokens [B, S + 1] (int64) get token [B, T] (None: unchanged). With probabilities p [B, T, V] the last three columns
    get p of the token, the entropy of p in nats, and its largest probability. The last slot is scratch, for positions
    that are not meant, and is cleared.
    """
    slot = torch.where(meant, position, table.shape[1] - 1)
    if token is not None:
        tokens.scatter_(1, slot, token)
        tokens[:, -1].zero_()
    numbers = [value.float() for value in values]
    if p is not None:
        numbers += [at(p, token), entropy(p), p.amax(-1)]
    rows = torch.arange(len(table), device=table.device)[:, None, None]
    table[rows, slot.unsqueeze(-1), columns] = torch.stack(numbers, dim=-1)
    table[:, -1].zero_()
