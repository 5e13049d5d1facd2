"""xAR-B, L and H (Ren et al., arXiv:2502.20388): ImageNet classes, 256 pixels, four cells of 8 x 8 vectors.

Accepts the released .pth files and safetensors. Everything is read from tensor shapes, except the number of heads
(fused attention weights do not show it), which comes from our metadata or from the released sizes, and the side of a
cell, which is 8 unless our metadata say otherwise: 1 for models that generate token by token (the paper's k = 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ...device.continuous_steps import Graphs
from ...limits.limits import bounded_int, quote
from ...models.continuous_model import ContinuousBase
from ...models.discrete_model import Conditioning
from ...models.networks.prefix import check_class
from ...models.networks.xar import GRID, XAR, Flow, XARConfig, cell_order
from ...models.sizes import check_grid, choose_grid
from ...models.text.prompt_encoders import ClassEncoder, PromptEncoder
from ...samplers.continuous_contract import ContinuousParams
from ...samplers.continuous_distributions import Normal
from ..declarations import Family
from ..decoders.kl_vae import KL16
from ..files.checkpoint import Checkpoint
from ..files.errors import CheckpointError
from ..files.names import count
from ..files.weights import load_weights
from .llamagen import class_names
from .mar import defaults_of

SCALE = 0.2325  # of KL-16's latents
SIDES = (1, 2, 4, 8)  # tokens of a side of a cell
_SIZES = {  # (width, encoder blocks) -> heads, guidance and denoising steps of the released models
    (768, 8): (12, 2.7, 40),
    (1024, 16): (16, 2.3, 50),
    (1280, 20): (16, 2.2, 50),
}


@dataclass
class CellState:
    """Class embeddings [branches * B, D] of both guidance branches, conditional ones first. graphs: see
    ContinuousModel.start.
    """

    classes: Tensor
    graphs: Graphs | None


class CellModel(ContinuousBase):
    """xAR, implementing the ContinuousModel protocol of samplers/continuous_contract.py: it generates cells in a fixed
    order.

    The known tokens of a variant must be the first cells of the order, and queried tokens whole cells.
    """

    order: Tensor

    def __init__(self, backbone: XAR, defaults: ContinuousParams, prompt_encoder: PromptEncoder):
        super().__init__("xar", (GRID, GRID), backbone.config.channels, SCALE, defaults, prompt_encoder)
        self.backbone, self.order, self.group = backbone, cell_order(backbone.config.side), backbone.config.cell

    def schedule(self, params: ContinuousParams) -> Flow:
        """The denoising schedule. Raises ValueError for an invalid number of steps or kind."""
        return Flow.of(params.steps, params.kind)

    def guidance(self, params: ContinuousParams, before: Tensor, after: Tensor, length: int) -> Tensor:
        """Constant, or 1 for the first cell, rising linearly to cfg for the last."""
        if params.cfg_schedule == "constant":
            return torch.full_like(before, params.cfg, dtype=torch.float32)
        return 1 + (params.cfg - 1) * (before // self.group).float() / (self.backbone.config.cells - 1)

    def no_prompt(self, empty: Tensor) -> Tensor:
        return torch.tensor([[[float(self.backbone.config.classes)]]])  # the null class

    def start(
        self,
        conditioning: Conditioning,
        negative: Conditioning | None,
        batch: int,
        grid: tuple[int, int],
        guided: bool,
        graphs: Graphs | None = None,
    ) -> CellState:
        """Class embeddings of both guidance branches; without ``negative``, the second is the null class.

        Raises ValueError for the class of another model.
        """
        check_grid(self, *grid)
        numbers = [self.features(conditioning, batch, "positive")[:, 0, 0].long()]
        if guided:
            other, null = self.features(negative, batch, "negative"), self.backbone.config.classes
            numbers.append(torch.full_like(numbers[0], null) if other is None else other[:, 0, 0].long())
        for given in numbers:
            check_class(given, self.backbone.config.classes)
        return CellState(self.backbone.class_emb(torch.cat(numbers)).to(self.dtype), graphs)

    def predict(
        self,
        state: CellState,
        tokens: Tensor,
        known: Tensor,
        query: Tensor,
        seen: int,
        cfg: Tensor,
        temperature: float,
        noise0: Tensor,
        noise_t: Tensor,
        schedule: Flow,
    ) -> Normal:
        """The distribution of the tokens at query [B, V, M] (see ContinuousModel). Raises ValueError unless whole
        cells are queried.

        A clean cell's keys and values depend on earlier cells only, so all variants of an image share them; a mask
        hides the cells that are unknown to a variant.
        """
        (batch, variants, count), cell = query.shape, self.group
        if count % cell:
            raise ValueError(
                f"This model generates cells of {cell} tokens; {count} tokens were requested. Request whole cells."
            )
        order, branches = self.order.to(tokens.device), len(state.classes) // batch
        each = variants * count // cell  # queried cells of an image
        cells = (self.order.argsort().to(query.device)[query[..., ::cell]] // cell).flatten()
        readable = min(-(-seen // cell), self.backbone.config.cells - 1)
        past = mask = None
        if readable:
            clean = tokens[:, order[: readable * cell]].unflatten(1, (readable, cell))
            past = self.backbone.read(clean.repeat(branches, 1, 1, 1), state.classes)
            past = [tuple(t.repeat_interleave(each, dim=0) for t in pair) for pair in past]
            sees = known[..., order[: readable * cell : cell]].repeat_interleave(count // cell, dim=1).flatten(0, 1)
            mask = nn.functional.pad(sees.repeat_interleave(cell, dim=1), (0, cell), value=True)
            mask = mask[:, None, None].repeat(branches, 1, 1, 1)
        end = self.backbone.denoise(
            cells,
            state.classes.repeat_interleave(each, dim=0),
            past,
            mask,
            cfg.reshape(-1, cell, 1),
            temperature,
            noise0.reshape(-1, cell, self.channels),
            noise_t.reshape(schedule.steps, -1, cell, self.channels),
            schedule,
            state.graphs,
        )
        return Normal(*(part.reshape(*query.shape, *part.shape[2:]) for part in end))

    def run_bytes(self, rows: int, tokens: int, draws: int) -> int:
        """Rough bytes (activations and keys) of a forward pass over rows that read ``tokens`` and sample ``draws``."""
        config = self.backbone.config
        activations = rows * max(tokens, draws) * (12 * config.dim + 2 * config.hidden)
        keys = 2 * (config.encoder_layers + config.decoder_layers) * rows * GRID * GRID * config.dim
        return (activations + keys) * self.dtype.itemsize


def recognise(tensors: Mapping[str, Tensor]) -> bool:
    """Whether this is an xAR transformer."""
    return {"class_emb.weight", "time_embed.mlp.0.weight", "pred.weight", "encoder_pos_embed_learned"} <= tensors.keys()


def config_of(tensors: dict[str, Tensor], heads: int | None, side: int, path: Path) -> XARConfig:
    """Sizes from shapes; side: of a cell. Raises CheckpointError if they are unknown."""
    encoder, decoder = (count(tensors, f"{part}_blocks.") for part in ("encoder", "decoder"))
    if not encoder or not decoder:
        raise CheckpointError(f"{path.name} has no transformer blocks. It is incomplete: download it again.")
    hidden, dim = tensors["encoder_blocks.0.mlp.fc1_g.weight"].shape[:2]
    places = tensors["encoder_pos_embed_learned"].shape[1]
    if places != GRID * GRID:
        raise CheckpointError(f"{path.name} generates {places} tokens; xAR models of {GRID * GRID} are supported.")
    heads = heads or _SIZES.get((dim, encoder), (None,))[0]
    if heads is None:
        raise CheckpointError(
            f"{path.name} has width {dim} and {encoder} encoder blocks, which is not a released xAR size, so its "
            'number of attention heads is unknown. Add safetensors metadata specar = {"heads": ...}.'
        )
    if dim % (4 * bounded_int("heads", heads, 1, dim)):
        raise CheckpointError(f"{path.name}: {heads} heads do not fit its width {dim}.")
    classes, channels = tensors["class_emb.weight"].shape[0] - 1, tensors["pred.weight"].shape[0]
    if type(side) is not int or side not in SIDES:
        raise CheckpointError(f"{path.name} has cells {quote(side)} tokens wide; use {', '.join(map(str, SIDES))}.")
    return XARConfig(dim, encoder, decoder, heads, hidden, channels, classes, side)


def load(
    checkpoint: Checkpoint, dtype: torch.dtype, grid: tuple[int, int] | None, search: Sequence[Path], operations=nn
) -> CellModel:
    """Build the model on the CPU. Raises CheckpointError if tensors are missing, unknown, misshapen or not finite, or
    if another grid than 16 x 16 is requested.
    """
    path, meta = checkpoint.path, checkpoint.metadata
    choose_grid(path, grid, (GRID, GRID), [(GRID, GRID)])
    try:
        config = config_of(checkpoint.tensors, meta.get("heads"), meta.get("cell", 8), path)
    except (KeyError, IndexError) as error:  # a tensor that determines a size is missing or misshapen
        raise CheckpointError(f"{path.name} is incomplete or damaged ({error}). Download it again.") from error
    _, cfg, steps = _SIZES.get((config.dim, config.encoder_layers), (None, 2.2, 50))
    defaults = defaults_of({"defaults": {"cfg": cfg, "steps": steps} | meta.get("defaults", {})}, config.dim, path)
    with torch.device("meta"):
        backbone = XAR(config, operations)
    model = CellModel(backbone, defaults, ClassEncoder(config.classes, class_names(config.classes)))
    tensors = {f"backbone.{name}": tensor for name, tensor in checkpoint.tensors.items()}
    model.dtype = dtype
    return load_weights(model, tensors, checkpoint, dtype)


FAMILY = Family(("xAR",), {"xar": KL16}, recognise, load, continuous=True)
