"""A discrete autoregressive image model as samplers see it: prompt features in, logits per position out.

It joins a backbone, a prefix (what stands before the image) and a token layout. Families differ in what they pass here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..models.backbone import Backbone, Rotation, grid_rotation
from ..models.cache import KVCache
from ..samplers.protocols import SamplingParams, StepOut, TokenLayout
from .neighbours import neighbour_table
from .prompt_encoders import PromptEncoder
from .prompts import Conditioning, Prompted


@dataclass
class State:
    """Caches of one batch (guidance doubles the rows: conditional ones first) and the prompt's own prediction."""

    cache: KVCache
    angles: Tensor  # [S, head_dim / 2]
    branches: int
    prefill: StepOut
    prefix_hidden: list[Tensor]  # one [B, n, D] per branch: the hidden states of its prompt

    def rotation(self, positions: Tensor) -> Rotation:
        """Rotation [R, T, ...] of tokens at positions [B, T]; beyond the image any rotation will do."""
        angles = self.angles[positions.clamp(0, len(self.angles) - 1)].repeat(self.branches, 1, 1)
        return Rotation(angles.cos(), angles.sin())


class DiscreteModel(Prompted, nn.Module):
    """See ARModel in samplers/protocols.py for the contract.

    grid: the (rows, cols) the model was trained on. pixels_per_token: side of a token's patch, known for certain once
    an image decoder is attached. ``device`` is where the model computes (ComfyUI's model management sets it).
    """

    def __init__(
        self, backbone: Backbone, prefix: nn.Module, family: str, grid: tuple[int, int], defaults: SamplingParams,
        prompt_encoder: PromptEncoder, pixels_per_token: int = 16,
    ):
        super().__init__()
        self.backbone, self.prefix = backbone, prefix
        self.family, self.grid, self.defaults = family, grid, defaults
        self.prompt_encoder, self.pixels_per_token = prompt_encoder, pixels_per_token
        self.vocab = self.vocab_total = backbone.config.vocab
        self.codebook: Tensor | None = None
        self._neighbours: Tensor | None = None  # the widest table asked for so far
        self.device = torch.device("cpu")
        self.dtype = torch.float32

    def attach_codebook(self, codebook: Tensor, pixels_per_token: int) -> None:
        """Take over the code vectors [V, C] of the image decoder. Raises ValueError if their number does not fit."""
        if codebook.shape[0] != self.vocab:
            raise ValueError(
                f"The image decoder has {codebook.shape[0]} codes but the model draws {self.vocab}: "
                "they do not belong together. Load the VQ file that was released with the model."
            )
        self._neighbours = None
        self.codebook, self.pixels_per_token = codebook.detach().float().cpu(), pixels_per_token

    def dequantize(self, tokens: Tensor) -> Tensor:
        """Code vectors [B, C, h, w] (fp32) of tokens [B, h, w]. Raises ValueError before a codebook is attached."""
        if self.codebook is None:
            raise ValueError("No image decoder is attached to this model, so its tokens have no code vectors yet.")
        return self.codebook[tokens.cpu()].movedim(-1, 1).contiguous()

    def neighbours(self, count: int) -> Tensor:
        """Table [V, count] (int64): for each code the others by distance of their code vectors, nearest first.

        Raises ValueError before a codebook is attached, and unless count is in 1 .. V - 1.
        """
        if self.codebook is None:
            raise ValueError(
                "This rule compares code vectors, but no image decoder is attached to the model. Load the VQ file too."
            )
        if self._neighbours is None or self._neighbours.shape[1] < count:
            self._neighbours = neighbour_table(self.codebook, count)
        return self._neighbours[:, :count]

    def layout(self, rows: int | None = None, cols: int | None = None) -> TokenLayout:
        """The token layout; raises ValueError for a grid the model was not trained on."""
        if (rows or self.grid[0], cols or self.grid[1]) != self.grid:
            height, width = (side * self.pixels_per_token for side in self.grid)
            raise ValueError(
                f"This model draws {self.grid[1]} x {self.grid[0]} tokens ({width} x {height} pixels) and nothing "
                f"else; {cols or self.grid[1]} x {rows or self.grid[0]} tokens were asked for."
            )
        return TokenLayout.plain(*self.grid)

    def kv_bytes(self, batch: int, layout: TokenLayout, slack: int, guided: bool) -> int:
        """Bytes of the key/value caches of a run (the longest possible prompt included)."""
        config = self.backbone.config
        slots = getattr(self.prefix, "slots", 1) + layout.length + slack
        return 2 * config.layers * batch * (1 + guided) * slots * config.dim * self.dtype.itemsize

    def _prefix(self, conditioning: Conditioning, batch: int, name: str) -> Tensor:
        """Prefix embeddings [batch, n, D] of a CONDITIONING."""
        return self.prefix(self.read(conditioning, batch, name)).expand(batch, -1, -1)

    # Decoding

    def start(
        self, conditioning: Conditioning, negative: Conditioning | None, batch: int, layout: TokenLayout, slack: int,
        guided: bool,
    ) -> State:
        """Prefill both guidance branches; without ``negative`` the second is the model's own unconditional one."""
        branches = [self._prefix(conditioning, batch, "positive")]
        if guided and negative is not None:
            branches.append(self._prefix(negative, batch, "negative"))
        elif guided:
            branches.append(self.prefix.unconditional(branches[0].shape[1], self.device).expand(batch, -1, -1))
        lengths = torch.tensor([b.shape[1] for b in branches], device=self.device).repeat_interleave(batch)
        longest = max(b.shape[1] for b in branches)
        # A shorter branch is padded behind its end: causal attention keeps the padding out of sight, and the image
        # tokens overwrite it.
        x = torch.cat([nn.functional.pad(b, (0, 0, 0, longest - b.shape[1])) for b in branches]).to(self.dtype)

        config = self.backbone.config
        capacity = longest + layout.length + slack
        cache = KVCache(config.layers, len(x), config.heads, capacity, config.head_dim, self.dtype, self.device)
        mask = cache.open(longest)
        nothing = torch.zeros((1, longest, config.head_dim // 2), device=self.device)
        hidden = self.backbone(x, Rotation(nothing, nothing), cache, mask)
        cache.commit(lengths)
        last = hidden[torch.arange(len(x), device=self.device), lengths - 1][:, None]
        angles = grid_rotation(layout.rows, layout.cols, config.head_dim, device=self.device)
        prefix_hidden = [h[:, : b.shape[1]] for h, b in zip(hidden.split(batch), branches, strict=True)]
        return State(cache, angles, len(branches), StepOut(self.backbone.logits(last), last), prefix_hidden)

    def step(
        self, state: State, tokens: Tensor, positions: Tensor, tree_mask: Tensor | None = None, behind: int = 0
    ) -> StepOut:
        """Feed tokens [B, T] standing at positions [B, T]; positions behind the image are harmless and meaningless."""
        x = self.backbone.tok_embeddings(tokens).to(self.dtype).repeat(state.branches, 1, 1)
        seen = None if tree_mask is None else tree_mask.repeat(state.branches, 1, 1)
        mask = state.cache.open(tokens.shape[1], seen, behind)
        hidden = self.backbone(x, state.rotation(positions), state.cache, mask)
        return StepOut(self.backbone.logits(hidden), hidden)

    def commit(self, state: State, count: Tensor, path: Tensor | None = None) -> None:
        """Keep ``count`` [B] tokens of the last step (of ``path`` [B, P] if given) in every branch."""
        state.cache.commit(
            count.repeat(state.branches), None if path is None else path.repeat(state.branches, 1)
        )

    def forward(self, prefix: Tensor, tokens: Tensor) -> Tensor:
        """Training and checking: logits [B, S, V] (fp32) for tokens [B, S] behind prefix embeddings [B, n, D]."""
        x = torch.cat((prefix.to(self.dtype), self.backbone.tok_embeddings(tokens[:, :-1]).to(self.dtype)), dim=1)
        angles = grid_rotation(*self.grid, self.backbone.config.head_dim, device=x.device)[: tokens.shape[1] - 1]
        nothing = torch.zeros((prefix.shape[1], angles.shape[1]), device=x.device)
        rotation = Rotation(torch.cat((nothing, angles.cos()))[None], torch.cat((nothing, angles.sin()))[None])
        return self.backbone.logits(self.backbone(x, rotation)[:, prefix.shape[1] - 1 :])

    @torch.inference_mode()
    def teacher_forced(self, conditioning: Conditioning, tokens: Tensor) -> Tensor:
        """The prediction [B, S, V] (fp32) for each image token given those before it; tokens [B, S] or [B, h, w]."""
        tokens = tokens.to(self.device).flatten(1)
        return self(self._prefix(conditioning, tokens.shape[0], "conditioning"), tokens)


def resolve_dtype(dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype asked for, or fp32 on a CPU and bf16 elsewhere."""
    return dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)


def legal_grid(grid: Sequence[int]) -> tuple[int, int]:
    """A grid of two positive sides. Raises ValueError otherwise."""
    if len(grid) != 2 or min(grid) < 1:
        raise ValueError(f"grid is {tuple(grid)}, but must be two positive numbers (rows, columns).")
    return int(grid[0]), int(grid[1])


