"""The common part of families whose image tokens are ids of a language model's vocabulary.

A family's own module says which tensors are its (``recognise``), what their names are (``Names``), which ids are image
codes, how a prompt is written, which grids the model generates and how its authors sample. ``build_language_model``
does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...models.discrete_model import DiscreteModel
from ...models.image_reader import TokenReader
from ...models.networks.answering import Answering
from ...models.networks.backbone import Backbone, BackboneConfig, TiedHead
from ...models.networks.prefix import TextPrefix
from ...models.sizes import Grid
from ..files.checkpoint import Checkpoint
from ..files.weights import Weights, load_weights
from ..llama import backbone_tensors, matrix, other_tensors, unpad, word_tensors


@dataclass(frozen=True)
class Names:
    """The names of a language model's tensors in a file.

    root: prefix of its embedding, layers and norm; head: name of the head's weight; unread: prefixes of other parts of
    the file, which do not generate.
    """

    root: str
    head: str = "lm_head.weight"
    unread: tuple[str, ...] = ()

    @property
    def table(self) -> str:
        """The name of the embedding's weight."""
        return f"{self.root}embed_tokens.weight"

    def matrices(self, checkpoint: Checkpoint) -> tuple[Tensor, Tensor]:
        """Embedding and head [N, D]. Raises CheckpointError unless both are matrices."""
        table, head = (matrix(checkpoint.tensors, name, checkpoint.path) for name in (self.table, self.head))
        return table, head


@dataclass(frozen=True)
class Ids:
    """The ids of a vocabulary that generate an image, and those that a prompt may hold.

    codes: of the image codes, in order. specials: of the token that ends a row (if ``row_ends``), then of the tokens
    after the last row. words: prompts may hold the ids below this one.
    """

    codes: range
    words: int
    specials: Sequence[int] = ()
    row_ends: bool = False


def build_language_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    operations: Any,
    names: Names,
    ids: Ids,
    config: BackboneConfig,
    null: Callable[[Tensor, Grid], Tensor],
    *,
    tied: bool = False,
    rearranged: Callable[[Weights], Weights] = lambda layers: layers,
    **model: Any,
) -> DiscreteModel:
    """The model of a family on the CPU, with the weights of a checkpoint.

    null: see TextPrefix. tied: is the embedding also the head. rearranged: weights of the layers as the file has them
    -> as our backbone computes with them. model: further arguments of DiscreteModel. Raises CheckpointError for tensors
    that are missing, misshapen or not finite.
    """
    path, tensors = checkpoint.path, checkpoint.tensors
    with torch.device("meta"):
        backbone = Backbone(config, operations)
        if tied:
            backbone.output = TiedHead(backbone.tok_embeddings)
        prefix = TextPrefix(ids.words, config.dim, null, operations)
        if model["prompt_encoder"].images and ids.codes.start == ids.words:  # other models have them among the words
            prefix.read_images(backbone.tok_embeddings, len(ids.codes))
    made = DiscreteModel(
        backbone,
        prefix,
        row_ends=ids.row_ends,
        endings=len(ids.specials) - ids.row_ends,
        word_ids=(*ids.codes, *ids.specials),
        **model,
    )
    made.dtype = dtype
    table = matrix(tensors, names.table, path)
    head = None if tied else matrix(tensors, names.head, path)
    weights = {
        **rearranged(unpad(backbone_tensors(tensors, names.root, path), config)),
        **word_tensors(table, head, ids.words, ids.codes, ids.specials),
        **other_tensors(tensors, names.root, names.table, names.head, names.unread),
    }
    return load_weights(made, weights, checkpoint, dtype)


def token_reader(
    checkpoint: Checkpoint, model: DiscreteModel, names: Names, words: int, operations: Any, *conversation: Any
) -> TokenReader:
    """What of a checkpoint answers questions about images for its loaded ``model``, on the CPU and in the model's
    dtype: the first ``words`` rows of the head.

    conversation: the other arguments of TokenReader. Raises CheckpointError for a head that is missing, misshapen or
    not finite.
    """
    with torch.device("meta"):
        reading = Answering(model.backbone.config.dim, words, operations)
    head = names.matrices(checkpoint)[1][:words]
    return TokenReader(model, load_weights(reading, {"head.weight": head}, checkpoint, model.dtype), *conversation)
