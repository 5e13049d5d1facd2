"""EAGLE drafters: the layout that LANTERN's authors released (Jang et al., arXiv:2410.03355), and the pack's.

A folder with config.json and the weights, or the weights alone. Sizes are read from the weights; the epsilon of the
norms and the target come from config.json, or from our metadata, which has the same entries.

A prompt is also read as pairs: each hidden state with the next token. Drafters of language models (LANTERN's for Anole
and Lumina-mGPT) have embeddings for the whole vocabulary, and pair hidden states with the tokens of the prompt. Others
embed image tokens only, and use id 0 for every slot of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models.branches import prompt_passes, repeat_rows, take_over
from ...models.discrete_model import Conditioning, DiscreteModel, RunState
from ...models.networks.backbone import BackboneConfig, join_gates
from ...models.networks.cache import KVCache, Mask, cache_slots
from ...models.networks.eagle import Eagle
from ...models.networks.positions import Table
from ...samplers.contract import StepOut
from ...samplers.layout import TokenLayout
from ..files.checkpoint import Checkpoint
from ..files.errors import CheckpointError
from ..files.weights import load_weights
from ..llama import layer_tensors, matrix

_TABLE, _LAYER = "embed_tokens.weight", "layers.0."
_QKV = [f"{_LAYER}self_attn.{part}_proj.weight" for part in "qkv"]
_INPUT_TYPES = {  # LANTERN's config entry -> (family, grid) of the target
    "c2i": ("llamagen-c2i", [24, 24]),
    "t2i": ("llamagen-t2i", [16, 16]),
    "t2i2": ("llamagen-t2i", [32, 32]),
}
_NORM_EPS = 1e-6  # default if config.json has none


def recognise(tensors: dict[str, Tensor]) -> bool:
    """Whether this is an EAGLE-1 or EAGLE-2 drafter."""
    return "fc.weight" in tensors and _QKV[0] in tensors


@dataclass
class EagleState:
    """Cache over the pairs of one batch, and the target's state. expanded: drafts since the last observation."""

    target: RunState
    cache: KVCache
    table: Table
    longest: int  # pairs of the longer prompt
    expanded: int = 0


class EagleDrafter:
    """An EAGLE drafter as a Drafter (samplers/contract.py). ``model`` is the target, whose head gives the logits.

    padded: the drafter was trained with prompts padded to the target's full number of slots (as LANTERN's for
    LlamaGen), so the padding is added again. The embedding of ``module`` starts with the target's image tokens; the
    text vocabulary, if any, follows.
    """

    kind = "eagle"

    def __init__(self, module: Eagle, model: DiscreteModel, dtype: torch.dtype, padded: bool):
        self.module, self.model, self.dtype, self.padded = module, model, dtype, padded
        self.family, self.reads_words = model.family, module.config.vocab > model.vocab_total

    @property
    def device(self) -> torch.device:
        return self.module.device

    def prompt_pairs(self, slots: int) -> int:
        """Number of pairs before the first image token, for a prompt of ``slots`` slots."""
        return (max(slots, self.model.prefix.slots) if self.padded else slots) - 1

    def kv_bytes(self, batch: int, layout: TokenLayout, slack: int, guided: bool, prompt: int = 0) -> int:
        """Bytes of the key/value caches of a run with prompts of ``prompt`` tokens (0: any caption or class)."""
        config = self.module.config
        pairs = self.prompt_pairs(prompt or getattr(self.model.prefix, "slots", 1))
        slots = cache_slots(pairs, layout.length + slack + 1, self.dtype, self.device)
        return 2 * batch * (1 + guided) * slots * config.cached_heads * config.head_dim * self.dtype.itemsize

    def start(
        self,
        target_state: RunState,
        conditioning: Conditioning,
        negative: Conditioning | None,
        batch: int,
        layout: TokenLayout,
        slack: int,
        guided: bool,
        into: EagleState | None = None,
    ) -> EagleState:
        """Feed the pairs of the prompt. The first observation feeds its last hidden state, with the next token."""
        branches = [  # without features: the target's unconditional branch
            self._padding(hidden, learned=features is None)
            for hidden, features in zip(target_state.prefix_hidden, target_state.prefix_features, strict=True)
        ]
        pairs = [branch.shape[1] - 1 for branch in branches]
        longest = max(pairs)
        missing = [longest - count for count in pairs]
        hidden = torch.cat([F.pad(b[:, :-1], (0, 0, 0, m)) for b, m in zip(branches, missing, strict=True)]).to(
            self.dtype
        )
        ids = torch.cat(
            [
                F.pad(self._prompt_ids(target_state, index, b)[:, 1:], (0, m))
                for index, (b, m) in enumerate(zip(branches, missing, strict=True))
            ]
        )
        config = self.module.config
        # Observations may carry one more token than was drafted: the one the target added.
        places = layout.length + slack + 1
        cache = KVCache.of(
            1,
            len(hidden),
            config.cached_heads,
            cache_slots(longest, places, self.dtype, self.device),
            config.head_dim,
            self.dtype,
            self.device,
            into and into.cache,
        )
        counts = torch.tensor(pairs, device=self.device).repeat_interleave(batch)
        positions = target_state.positions
        table = Table.of(positions, places, counts, target_state.grid, config.head_dim, into and into.table)
        rotations = positions.prompt(longest, config.head_dim, self.device)
        for part, rotation, mask in prompt_passes(rotations, counts, cache):
            self.module(hidden[:, part], ids[:, part], rotation, cache, mask)
        return take_over(into, EagleState(target_state, cache, table, longest))

    def set_attention_length(self, state: EagleState, tokens: int | None) -> int:
        """Limit the next steps to the first ``tokens`` of the image; returns the attention length (see ARModel)."""
        return state.cache.set_attention_length(None if tokens is None else state.longest + tokens)

    def _prompt_ids(self, target_state: RunState, branch: int, hidden: Tensor) -> Tensor:
        """Ids [B, n] in the drafter's embedding for the prompt of a branch with the hidden states [B, n, D]."""
        if not self.reads_words:
            return torch.zeros(hidden.shape[:2], dtype=torch.int64, device=self.device)
        features = target_state.prefix_features[branch]
        if features is None:
            features = self.model.prefix.null(target_state.prefix_features[0], target_state.grid)
        ids, words = features[..., 0].long().to(self.device), self.model.prefix.words
        own = torch.where(ids < words, self.model.vocab_total + ids, ids - words)  # image codes follow the words
        return own.expand(len(hidden), -1)

    def _padding(self, hidden: Tensor, learned: bool) -> Tensor:
        """Hidden states [B, n, D] of a prompt after those of its padding, if the drafter was trained with it.

        Padded slots of a caption are zero in every layer. Those of the learned null caption attend causally to each
        other: LANTERN's drafters were trained without a mask there, and in its target, a row whose keys are all masked
        attends to all of them. (In LlamaGen's code such a slot attends only to itself.)
        """
        missing = self.prompt_pairs(hidden.shape[1]) + 1 - hidden.shape[1]
        if missing == 0:
            return hidden
        if not learned:
            return F.pad(hidden, (0, 0, missing, 0))
        prefix = self.model.prefix
        slots = prefix.unconditional(prefix.uncond_embedding[None], self.model.grid)[:, :missing]
        rotation = self.model.positions.prompt(missing, self.module.config.head_dim, self.device)
        padding = self.model.backbone(slots.to(self.model.dtype), rotation)
        return torch.cat((padding.expand(len(hidden), -1, -1), hidden), dim=1)

    def observe(self, state: EagleState, tokens: Tensor, positions: Tensor, hidden: Tensor, count: Tensor) -> StepOut:
        """One causal forward pass over pairs (hidden, token) after all earlier ones. Returns the prediction after the
        last of ``count`` [B] tokens, which are kept."""
        state.expanded = 0
        mask = state.cache.open(tokens.shape[1])
        feature = self._pass(state, tokens, positions, hidden, mask)
        count = repeat_rows(count, state.target.branches)
        state.cache.commit(count)
        last = feature[torch.arange(len(feature), device=self.device), (count - 1).clamp(min=0)][:, None]
        return self._output(last)

    def expand(
        self, state: EagleState, tokens: Tensor, positions: Tensor, hidden: Tensor, tree_mask: Tensor
    ) -> StepOut:
        """Feed pairs of drafted tokens with the features predicted at their parents. tree_mask: which drafts since the
        last observation each one sees (see Drafter)."""
        mask = state.cache.open(tokens.shape[1], repeat_rows(tree_mask, state.target.branches), state.expanded)
        state.expanded += tokens.shape[1]
        return self._output(self._pass(state, tokens, positions, hidden, mask))

    def _pass(self, state: EagleState, tokens: Tensor, positions: Tensor, hidden: Tensor, mask: Mask) -> Tensor:
        ids, places = (repeat_rows(each, state.target.branches) for each in (tokens, positions))
        return self.module(hidden.to(self.dtype), ids, state.table.at(places), state.cache, mask)

    def _output(self, feature: Tensor) -> StepOut:
        return StepOut(self.model.backbone.logits(feature.to(self.model.dtype)), feature)

    def rewind(self, state: EagleState, count: Tensor) -> None:
        """Forget the last ``count`` [B] tokens observed, and what was expanded."""
        state.expanded = 0
        state.cache.commit(-repeat_rows(count, state.target.branches))


def load(checkpoint: Checkpoint, model: DiscreteModel, dtype: torch.dtype, operations=nn) -> EagleDrafter:
    """Build the drafter of ``model`` on the CPU. Raises CheckpointError if it is damaged or of another model."""
    path, tensors = checkpoint.path, checkpoint.tensors
    settings = {name: value for name, value in (checkpoint.settings | checkpoint.metadata).items() if value is not None}
    config = block_config(tensors, model, path)
    check_target(settings, model, path)
    check_sizes(settings, config, path)
    table = token_table(tensors.get(_TABLE), model)
    config = replace(config, norm_eps=norm_eps(settings, path), vocab=sum(map(len, table)))
    weights: dict[str, Tensor | tuple[Tensor, ...]] = {"tok_embeddings.weight": table}
    weights |= {n: tensor for n, tensor in tensors.items() if n != _TABLE and not n.startswith("layers.")}
    weights |= {
        n.replace(_LAYER, "layer.").replace("layers.", "layer.layers."): part
        for n, part in layer_tensors(tensors, "", path).items()
    }  # a second layer has no place in ours
    with torch.device("meta"):
        module = Eagle(config, "fc.bias" in tensors, operations)
    load_weights(module, join_gates(weights), checkpoint, dtype)
    padded = settings.get("prompt") != "cropped" and hasattr(model.prefix, "slots")
    return EagleDrafter(module, model, dtype, padded)


def token_table(own: Tensor | None, model: DiscreteModel) -> tuple[Tensor, ...]:
    """The parts of a drafter's embedding: rows for the target's image tokens, then those for text, if any.

    own: the embedding in the file; None: the target's.
    """
    if own is None:
        images = image_embeddings(model).cpu()
        return (images, model.prefix.embedding.weight.detach().cpu()) if model.word_ids else (images,)
    if len(own) == model.vocab_total:
        return (own,)
    return own[list(model.word_ids)], own


def image_embeddings(model: DiscreteModel) -> Tensor:
    """The embeddings [V+, D] of a model's image tokens, whichever module holds them."""
    with torch.no_grad():
        return model.backbone.tok_embeddings(torch.arange(model.vocab_total, device=model.device))


def block_config(tensors: dict[str, Tensor], model: DiscreteModel, path: Path) -> BackboneConfig:
    """Sizes of the drafter, from its weights. Raises CheckpointError if they differ from the target's."""
    target = model.backbone.config
    fc, gate = (matrix(tensors, name, path) for name in ("fc.weight", "layers.0.mlp.gate_proj.weight"))
    dim = len(fc)
    if fc.shape != (dim, 2 * dim):
        raise CheckpointError(
            f"{path.name}: fc.weight has shape {list(fc.shape)}, but an EAGLE drafter joins a token and one hidden "
            "state of the same width."
        )
    q_norm = "layers.0.self_attn.q_norm.weight"
    rows = len(matrix(tensors, _TABLE, path)) if _TABLE in tensors else target.vocab
    # A text embedding starts with the language model's vocabulary; more rows than that are padding.
    words = max(*model.word_ids, model.prefix.words - 1) + 1 if model.word_ids else target.vocab
    head_rms = q_norm in tensors and tensors[q_norm].ndim == 1
    head_norms = len(matrix(tensors, q_norm, path)) if q_norm in tensors and not head_rms else 0
    for what, mine, its in (
        ("width", dim, target.dim),
        ("number of tokens", rows, rows if model.word_ids and rows >= words else target.vocab),
        ("number of query norms", head_norms + head_rms, target.head_norms + target.head_rms),
    ):
        if mine != its:
            raise CheckpointError(
                f"{path.name} was trained for another model: its {what} is {mine}, this model's is {its}. Choose the "
                "drafter of this model."
            )
    q, k, v = (len(matrix(tensors, name, path, dim)) for name in _QKV)
    kv_heads, rest = divmod(k, target.head_dim)
    if q != target.heads * target.head_dim or k != v or rest or kv_heads == 0 or target.heads % kv_heads:
        raise CheckpointError(
            f"{path.name}: queries, keys and values have {q}, {k} and {v} channels, which do not give heads of "
            f"{target.head_dim} channels as in this model."
        )
    return replace(
        target,
        layers=1,
        ffn_dim=len(gate),
        attention_norm="layers.0.input_layernorm.weight" in tensors,
        head_norms=head_norms,
        head_rms=head_rms,
        kv_heads=kv_heads,
        vocab=rows,
        qkv_bias=f"{_LAYER}self_attn.q_proj.bias" in tensors,
        post_norms=False,
    )


def check_sizes(settings: dict[str, Any], config: BackboneConfig, path: Path) -> None:
    """Raise CheckpointError if config.json contradicts the weights or the target."""
    for entry, its in {
        "hidden_size": config.dim,
        "intermediate_size": config.ffn_dim,
        "vocab_size": config.vocab,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.cached_heads,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
    }.items():
        if settings.get(entry, its) != its:
            raise CheckpointError(
                f"{path.name}: config.json says {entry} {settings[entry]!r}, but this model and the "
                f"weights need {its!r}. Choose the drafter of this model, with its config.json."
            )


def norm_eps(settings: dict[str, Any], path: Path) -> float:
    """Epsilon of the norms. Raises CheckpointError for an invalid one."""
    eps = settings.get("rms_norm_eps", _NORM_EPS)
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise CheckpointError(f"{path.name}: config.json says rms_norm_eps {eps!r}; it must be between 0 and 1.")
    return eps


def check_target(settings: dict[str, Any], model: DiscreteModel, path: Path) -> None:
    """Raise CheckpointError if the drafter was trained for another family or grid."""
    kind = settings.get("input_type")
    if kind is not None and kind not in tuple(_INPUT_TYPES):
        raise CheckpointError(
            f"{path.name}: config.json says input_type {kind!r}, not one of {', '.join(_INPUT_TYPES)}. Its "
            "target is of an unsupported model family."
        )
    own = settings.get("target", model.family), settings.get("grid", list(model.grid))
    family, grid = own if kind is None else _INPUT_TYPES[kind]
    if family != model.family or grid not in [list(legal) for legal in model.grids]:
        raise CheckpointError(
            f"{path.name} drafts for {family} on a token grid of {grid} (rows, columns)"
            + (f" (config.json: input_type {kind})" if kind else "")
            + f", but the model is {model.family} on {list(model.grid)}. Choose the drafter of this model."
        )
