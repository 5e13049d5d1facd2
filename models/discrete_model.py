"""A discrete autoregressive image model as samplers see it: prompt features in, logits per position out.

It joins a backbone, a prefix (what precedes the image tokens) and a token layout. Families pass different ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..limits.limits import SIDE, bounded_int
from ..samplers.contract import (
    Callback,
    Request,
    SamplingParams,
    StepOut,
    check_both,
    check_grids,
    check_masks,
    chosen_params,
)
from ..samplers.layout import TokenLayout
from .branches import PROMPT_PASS, prompt_passes, repeat_rows, take_over
from .image_decoder import ImageDecoder
from .latents import code_vectors
from .neighbours import neighbour_table
from .networks.backbone import Backbone
from .networks.cache import KVCache, cache_slots
from .networks.positions import GridPositions, Positions, Table, rotation_at
from .networks.prefix import TextPrefix
from .sizes import check_grid
from .text.prompt_encoders import Images, PromptEncoder, grids_of
from .text.prompts import Conditioning, EncodedPrompt, Prompted

PROMPT_TOKENS = 128  # assumed of a language model's prompts, which may have any length


@dataclass
class RunState:
    """Caches of one batch and the prediction of the prompt. Guidance doubles the rows, conditional ones first."""

    cache: KVCache
    positions: Positions  # those of the prompt
    table: Table
    branches: int
    grid: tuple[int, int]
    longest: int  # prompt tokens of the longer branch
    prefill: StepOut
    prefix_hidden: list[Tensor]  # one [B, n, D] per branch: the hidden states of its prompt
    prefix_features: list[Tensor | None]  # one [1 or B, n, F] per branch: its prompt; None: unconditional


class DiscreteModel(Prompted):
    """A backbone with a prefix as an ARModel (samplers/contract.py).

    grid: the default (rows, cols); grids: all supported ones (none given: only ``grid``). pixels_per_token: side of a
    token's patch; an attached image decoder overrides it. positions: the positional encoding. row_ends: whether a
    special token follows every row; endings: the number of special tokens after the last row. These special tokens are
    the last ids of the backbone's vocabulary, in this order. longest: maximum number of tokens, prompt included (None:
    no limit). word_ids: if image tokens are part of a language model's vocabulary, their ids in it. preview: grid of an
    image -> grid of the smaller one that the model generates before it, unless its prompt has images. guidance: was it
    trained with a second branch. ``image_defaults``: as ``defaults``, for prompts with images. ``image_decoder``: the
    one loaded with the model, if any; its code vectors are ``codebook``. ``id_latents``: whether latents contain token
    ids although there is a codebook. ``device``: the compute device, set by ComfyUI's model management. ``int8_cache``:
    whether keys and values are stored in int8.
    """

    continuous = any_grid = False
    tokens = "token ids"  # what it samples, in words

    def __init__(
        self,
        backbone: Backbone,
        prefix: nn.Module,
        family: str,
        grid: tuple[int, int],
        defaults: SamplingParams,
        prompt_encoder: PromptEncoder,
        pixels_per_token: int = 16,
        *,
        positions: Positions = GridPositions(),
        grids: Sequence[tuple[int, int]] = (),
        row_ends: bool = False,
        endings: int = 0,
        longest: int | None = None,
        word_ids: Sequence[int] = (),
        preview: Callable[[tuple[int, int]], tuple[int, int]] | None = None,
        guidance: bool = True,
    ):
        super().__init__()
        self.backbone, self.prefix, self.positions = backbone, prefix, positions
        self.family, self.grid, self.defaults = family, grid, defaults
        self.grids = tuple(grids) or (grid,)
        self.prompt_encoder, self.longest = prompt_encoder, longest
        images = self.image_prompts
        self.image_defaults = replace(defaults, **(images.params if images else {}))
        self.pixels_per_token = bounded_int("pixels_per_token", pixels_per_token, 1, SIDE)
        self.row_ends, self.word_ids = row_ends, tuple(word_ids)
        self.vocab_total = backbone.config.vocab
        self.vocab = self.vocab_total - row_ends - endings
        defaults.check(self.vocab)  # a file may name them
        self.preview, self.guidance = preview, guidance
        self.usual_prompt = PROMPT_TOKENS if isinstance(prefix, TextPrefix) else getattr(prefix, "slots", 1)
        self.codebook: Tensor | None = None
        self.id_latents = False
        self.latent_channels = 1
        self.image_decoder: ImageDecoder | None = None
        self._neighbours: Tensor | None = None  # the widest table computed so far
        self.sessions: dict[Hashable, Any] = {}
        self.dtype = torch.float32
        self.int8_cache = False

    def request(
        self,
        conditioning: Conditioning | EncodedPrompt,
        negative: Conditioning | EncodedPrompt | None = None,
        *,
        seed: int = 0,
        batch: int = 1,
        grid: tuple[int, int] | None = None,
        layout: TokenLayout | None = None,
        tokens: Tensor | None = None,
        kept: Tensor | None = None,
        strength: Tensor | None = None,
        skippable: Tensor | None = None,
        callback: Callback | None = None,
        **params: Any,
    ) -> Request:
        """The request for a sampling method, with the prompts encoded.

        The image has the given ``layout``, or that of ``grid`` (rows, cols), or the default. kept [B, rows, cols]
        (bool): keep mask for ``tokens`` [B, rows, cols] (int64). strength and skippable [1 or B, rows, cols]: see
        Request. params: fields of SamplingParams; None: the model's default, with images in the prompt its
        ``image_defaults``. Raises ValueError for unsupported values.
        """
        size = (layout.rows, layout.cols) if layout else check_grid(self, *(grid or self.grid))
        shape = batch, *size
        check_grids(shape, tokens=tokens, kept=kept, strength=strength, skippable=skippable)
        check_both(tokens, kept)
        check_masks(strength, skippable)
        positive, other = self.unpack_prompts(conditioning, negative, batch, size)
        own = self.image_defaults if positive.images else self.defaults
        asked = chosen_params(own, params, "models of token ids")
        if asked.guided and not self.guidance:
            raise ValueError(f"cfg is {asked.cfg}, but this model was trained without guidance. Set cfg to 1.")
        layout = layout or self.layout(*size, positive.images)
        if tokens is not None and kept is not None:
            check_kept(tokens, kept, self.vocab)
            layout = layout.keeping(tokens.expand(shape), kept.expand(shape))
        return Request(
            self,
            positive,
            layout,
            asked,
            other,
            seed,
            batch,
            callback,
            None if strength is None else layout.spread(strength.float(), fill=1.0),
            None if skippable is None else layout.spread(skippable, fill=True),
            self.notices(conditioning, negative, asked.cfg, own.cfg, size),
        )

    def attach_codebook(self, codebook: Tensor, pixels_per_token: int | None = None, id_latents: bool = False) -> None:
        """Set the code vectors [V, C] of the image decoder, and its pixels per token (None: they stay). id_latents: by
        these, codes are compared, but no image decoder reads them. Raises ValueError for another number of codes."""
        if codebook.shape[0] != self.vocab:
            raise ValueError(
                f"The image decoder has {codebook.shape[0]} codes, but the model has {self.vocab}: "
                "they do not match. Load the VQ file that was released with the model."
            )
        self._neighbours = None
        self.sessions.clear()  # captured steps refer to the previous table
        self.codebook, self.id_latents = codebook.detach().float().cpu(), id_latents
        self.latent_channels = 1 if id_latents else codebook.shape[1]
        self.pixels_per_token = pixels_per_token or self.pixels_per_token

    def dequantize(self, tokens: Tensor) -> Tensor:
        """Latents of tokens [B, h, w]: their code vectors [B, C, h, w] (fp32), or the ids themselves as one channel.

        Raises ValueError before a codebook is attached.
        """
        if self.id_latents:
            return tokens[:, None].float().cpu()
        return code_vectors(self.codebook)[tokens.cpu()].movedim(-1, 1).contiguous()

    def neighbours(self, count: int) -> Tensor:
        """Table [V, count] (int64): for each code, the other codes by distance of their code vectors, nearest first.

        Raises ValueError before a codebook is attached, and unless count is in 1 .. V - 1.
        """
        if self.codebook is None:
            raise ValueError(
                "This rule compares code vectors, but the model has no image decoder. Load the VQ file too."
            )
        table = self._neighbours
        if table is None or table.shape[1] < count:
            self._neighbours = table = neighbour_table(self.codebook, count)
            self.sessions.clear()
        return table[:, :count]

    def layout(self, rows: int | None = None, cols: int | None = None, images: Images = ()) -> TokenLayout:
        """The token layout; raises ValueError for a grid the model was not trained on. images: those of the prompt,
        after which no preview is generated."""
        grid = check_grid(self, rows, cols)
        specials = range(self.vocab, self.vocab_total)
        lead = prod(self.preview(grid)) if self.preview and not images else 0
        return TokenLayout.with_row_ends(*grid, specials[: self.row_ends], specials[self.row_ends :], lead)

    def prompt_tokens(
        self,
        conditioning: Conditioning | EncodedPrompt,
        negative: Conditioning | EncodedPrompt | None,
        batch: int,
        layout: TokenLayout,
        guided: bool,
    ) -> int:
        """Prompt tokens of the longer branch, for the size of the caches.

        Raises ValueError for a prompt of another model.
        """
        grid = layout.rows, layout.cols
        positive, other = self.unpack_prompts(conditioning, negative if guided else None, batch, grid)
        features = positive.features
        count = features.shape[1] if other is None else other.features.shape[1]
        if guided and other is None and isinstance(self.prefix, TextPrefix):
            count = self.prefix.null(features, grid).shape[1]
        return max(features.shape[1], count)

    def no_prompt(self, empty: Tensor) -> Tensor:
        return empty if isinstance(self.prefix, TextPrefix) else self.prefix.null_features()

    def activation_bytes(self, rows: int, tokens: int, prompt: int = 0) -> int:
        """Rough bytes of the activations of a forward pass over ``tokens`` tokens in each of ``rows`` rows, or of
        reading a prompt of ``prompt`` tokens, if those are more. A long one is read in several passes, each with a
        mask, between its embeddings and its hidden states."""
        config, numbers = self.backbone.config, 0
        wide = max(tokens, min(prompt, PROMPT_PASS))
        if prompt > PROMPT_PASS:
            numbers = prompt * (3 * config.dim + PROMPT_PASS * config.heads // config.cached_heads)
        return rows * (numbers + wide * (8 * config.dim + 4 * config.ffn_dim)) * self.dtype.itemsize

    def kv_bytes(
        self,
        batch: int,
        layout: TokenLayout,
        slack: int,
        guided: bool,
        prompt: int = 0,
        dtype: torch.dtype | None = None,
        int8_cache: bool | None = None,
    ) -> int:
        """Bytes of the key/value caches of a run with prompts of ``prompt`` tokens (0: any caption or class), and of
        the copy in which a layer reads caches in int8: long prompts and, without Triton, every step. dtype and
        int8_cache: None: this model's."""
        config, itemsize = self.backbone.config, (dtype or self.dtype).itemsize
        prompt = prompt or getattr(self.prefix, "slots", 1)
        slots = cache_slots(prompt, layout.length + slack, dtype or self.dtype, self.device)
        vectors = 2 * batch * (1 + guided) * slots * config.cached_heads  # per layer
        wide = vectors * config.head_dim * itemsize
        if self.int8_cache if int8_cache is None else int8_cache:
            return config.layers * vectors * (config.head_dim + itemsize) + wide
        return config.layers * wide

    # Decoding

    def start(
        self,
        conditioning: Conditioning | EncodedPrompt,
        negative: Conditioning | EncodedPrompt | None,
        batch: int,
        layout: TokenLayout,
        slack: int,
        guided: bool,
        into: RunState | None = None,
    ) -> RunState:
        """Prefill both guidance branches; without ``negative``, the second is unconditional.

        into: the state of an earlier run, whose memory is reused if it fits. Raises ValueError for a prompt of another
        model or one that is too long.
        """
        grid = layout.rows, layout.cols
        positive, other = self.unpack_prompts(conditioning, negative, batch, grid)
        if positive.images and layout.lead:
            raise ValueError(
                f"The sequence begins with {layout.lead} tokens of a preview, but after a prompt with images there is "
                "none. Use model.layout(rows, cols, images)."
            )
        own = positive.features
        features: list[Tensor | None] = [own]
        branches = [self.prefix(own)]
        if guided:
            features.append(None if other is None else other.features)
            branches.append(self.prefix.unconditional(own, grid) if other is None else self.prefix(other.features))
        branches = [branch.expand(batch, -1, -1) for branch in branches]
        lengths = torch.tensor([b.shape[1] for b in branches], device=self.device).repeat_interleave(batch)
        longest = max(b.shape[1] for b in branches)
        check_length(longest, layout.length, self.longest)
        x = torch.cat([nn.functional.pad(b, (0, 0, 0, longest - b.shape[1])) for b in branches]).to(self.dtype)

        config, places = self.backbone.config, layout.length + slack
        if into is not None and into.branches != len(branches):
            into = None
        cache = KVCache.of(
            config.layers,
            len(x),
            config.cached_heads,
            cache_slots(longest, places, self.dtype, self.device),
            config.head_dim,
            self.dtype,
            self.device,
            into and into.cache,
            self.int8_cache,
        )
        positions = self.positions.reading(grids_of(positive.images))
        table = Table.of(positions, places, lengths, grid, config.head_dim, into and into.table)
        rotation = positions.prompt(longest, config.head_dim, self.device)
        passes = prompt_passes(rotation, lengths, cache)
        hidden = torch.cat([self.backbone(x[:, part], turned, cache, mask) for part, turned, mask in passes], dim=1)
        last = hidden[torch.arange(len(x), device=self.device), lengths - 1][:, None]
        prefix_hidden = [h[:, : b.shape[1]] for h, b in zip(hidden.split(batch), branches, strict=True)]
        out = StepOut(self.backbone.logits(last), last)
        state = RunState(cache, positions, table, len(branches), grid, longest, out, prefix_hidden, features)
        return take_over(into, state)

    def set_attention_length(self, state: RunState, tokens: int | None) -> int:
        """Limit the next steps to the first ``tokens`` of the image; returns the attention length (see ARModel)."""
        return state.cache.set_attention_length(None if tokens is None else state.longest + tokens)

    def step(
        self, state: RunState, tokens: Tensor, positions: Tensor, tree_mask: Tensor | None = None, uncommitted: int = 0
    ) -> StepOut:
        """Feed tokens [B, T] at positions [B, T]. Results at positions past the end of the image are meaningless."""
        ids, places = (repeat_rows(each, state.branches) for each in (tokens, positions))
        seen = None if tree_mask is None else repeat_rows(tree_mask, state.branches)
        mask = state.cache.open(tokens.shape[1], seen, uncommitted)
        x = self.backbone.tok_embeddings(ids).to(self.dtype)
        hidden = self.backbone(x, state.table.at(places), state.cache, mask)
        return StepOut(self.backbone.logits(hidden), hidden)

    def commit(self, state: RunState, count: Tensor, path: Tensor | None = None) -> None:
        """Keep ``count`` [B] tokens of the last step (of ``path`` [B, P] if given) in every branch."""
        state.cache.commit(
            repeat_rows(count, state.branches), None if path is None else repeat_rows(path, state.branches)
        )

    def forward(
        self, prefix: Tensor, tokens: Tensor, grid: tuple[int, int] | None = None, images: Images = ()
    ) -> Tensor:
        """For training and tests: logits [B, S, V+] (fp32) for tokens [B, S] after prefix embeddings [B, n, D].

        grid: (rows, cols) of the image (None: the default). images: those of the prompt.
        """
        x = torch.cat((prefix.to(self.dtype), self.backbone.tok_embeddings(tokens[:, :-1]).to(self.dtype)), dim=1)
        count, head_dim = prefix.shape[1], self.backbone.config.head_dim
        positions = self.positions.reading(grids_of(images))
        rotation = rotation_at(positions, count, tokens.shape[1] - 1, grid or self.grid, head_dim, x.device)
        return self.backbone.logits(self.backbone(x, rotation)[:, count - 1 :]).float()


def check_kept(tokens: Tensor, kept: Tensor, vocab: int) -> None:
    """Raise ValueError unless the tokens that ``kept`` keeps are ids from 0 to ``vocab`` - 1."""
    if tokens.is_floating_point():
        raise ValueError(f"tokens are {tokens.dtype}, but must be whole numbers: the ids of an image.")
    ids = torch.where(kept, tokens, 0)
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise ValueError(
            f"tokens to keep are {int(ids.min())} to {int(ids.max())}, but this model has the image "
            f"tokens 0 to {vocab - 1}."
        )


def check_length(prompt: int, image: int, longest: int | None) -> None:
    """Raise ValueError if prompt and image have more tokens than the model reads (None: any number)."""
    if longest is not None and prompt + image > longest:
        raise ValueError(
            f"The prompt has {prompt} tokens and the image {image}, but the model reads at most "
            f"{longest}. Shorten the prompt, or generate a smaller image."
        )
