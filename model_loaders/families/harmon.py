"""Harmon (Wu et al., arXiv:2503.21979) 0.5B and 1.5B: text to image through MAR and Qwen2.5.

Accepts the released .pth files (flat, fp16) and safetensors. The text head, MAR's class table and an image decoder
(``vae.*``) that a file may contain are not read: none is needed to generate tokens. Sizes are read from tensor shapes,
except the numbers of attention heads, which come from our metadata or the released sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...device.continuous_steps import Graphs
from ...limits.limits import bounded_int
from ...models.continuous_model import MaskedModel, MaskedState
from ...models.discrete_model import Conditioning
from ...models.networks.harmon import Harmon
from ...models.sizes import legal_grid
from ...models.text.prompt_encoders import TokenEncoder
from ...models.text.tokenizer import Tokenizer, find_tokenizer
from ..declarations import Family
from ..decoders.kl_vae import KL16
from ..files.checkpoint import Checkpoint
from ..files.errors import CheckpointError
from ..files.names import count, rename
from ..files.weights import load_weights
from ..text.qwen2 import HEADS, Qwen2
from . import mar

_NAME = "harmon"
_LLM = "llm.model."
_UNUSED = ("llm.lm_head.", "mar.class_emb.", "vae.")
_DEFAULTS = {"cfg": 3.0, "cfg_schedule": "constant", "iterations": 64}
_GRID = (32, 32)  # the default of the released models, 512 x 512 pixels
_TOKENIZERS = ("qwen25_tokenizer", "Qwen2.5-0.5B-Instruct", "Qwen2.5-1.5B-Instruct", "Harmon-0_5B", "Harmon-1_5B")
_VOCAB = 151_936  # of the released models
_SPECIALS = {"<|im_start|>": 151_644, "<|im_end|>": 151_645}  # and their ids there
_ANY = "Generate an image."
_BUCKET = 32  # captured passes follow prompts of a multiple of so many tokens


class HarmonModel(MaskedModel):
    """Harmon, implementing the ContinuousModel protocol: MAR with other prompts and grids."""

    any_grid = True  # positions are resized; the released models were trained on 16 x 16 and 32 x 32 tokens
    backbone: Harmon

    @property
    def prompt_kind(self) -> str:
        return f"ids of {self.backbone.llm.vocab} tokens"

    def start(
        self,
        conditioning: Conditioning,
        negative: Conditioning | None,
        batch: int,
        grid: tuple[int, int],
        guided: bool,
        graphs: Graphs | None = None,
    ) -> MaskedState:
        """Encode both guidance branches with the language model. Raises ValueError for CONDITIONING of other models."""
        prompts = [self.features(conditioning, batch, "positive")]
        if guided:
            other = self.features(negative, batch, "negative")
            if other is None:  # the unconditional branch asks for an unspecified image, as an empty prompt does
                other = self.features(self.encode_prompt(""), batch, "positive")
            prompts.append(other)
        lengths = torch.tensor([p.shape[1] for p in prompts], device=self.device).repeat_interleave(batch)
        longest = max(p.shape[1] for p in prompts)
        if graphs is not None:  # few lengths, for few captures
            longest = -(-longest // _BUCKET) * _BUCKET
        ids = torch.cat([F.pad(p[..., 0].long(), (0, longest - p.shape[1])) for p in prompts])
        valid = torch.arange(longest, device=self.device) < lengths[:, None]
        return MaskedState(self.backbone.prompt(ids, valid), len(prompts), self.backbone.positions(*grid), graphs)

    def transform(self, state: MaskedState, tokens: Tensor, known: Tensor, seen: int) -> Tensor:
        """z [R, S, D] of all rows: R = branches * B * V. The V variants of an image share its prompt."""
        return self.backbone(state.prompts, tokens, known, seen, state.positions)

    def run_bytes(self, rows: int, tokens: int, draws: int) -> int:
        """Rough bytes of activations of a pass over rows of ``tokens`` tokens that samples ``draws`` of them."""
        length, llm = tokens + self.backbone.config.slots, self.backbone.llm
        language = rows * length * (4 * llm.width + 3 * llm.hidden + length)
        return super().run_bytes(rows, tokens, draws) + language * self.dtype.itemsize


def prompt_ids(tokenizer: Tokenizer, request: str) -> list[int]:
    """A conversation in which the user says ``request``. Raises CheckpointError for the tokenizer of another model."""
    for token in _SPECIALS:
        tokenizer.id(token)
    return tokenizer.ids(f"<|im_start|>user\n{request}<|im_end|>\n<|im_start|>assistant\n")


def prompt_encoder(tokenizer: Tokenizer, grid: tuple[int, int]) -> TokenEncoder:
    """Formats prompts as the authors do: a prompt becomes "Generate an image: ...", without one any image is asked for;
    a negative prompt is all that the user says."""
    return TokenEncoder(
        tokenizer,
        lambda text, _size: prompt_ids(tokenizer, f"Generate an image: {text}" if text else _ANY),
        grid,
        write_negative=lambda text, _size: prompt_ids(tokenizer, text),
    )


def recognise(tensors: Mapping[str, Tensor]) -> bool:
    """Whether this is Harmon: a MAR and a language model."""
    return "mar.encoder_pos_embed_learned" in tensors and f"{_LLM}embed_tokens.weight" in tensors


def language_model(tensors: dict[str, Tensor], heads: int | None, path: Path) -> Qwen2:
    """The language model by its shapes. Raises CheckpointError if its number of heads cannot be known."""
    vocab, width = tensors[f"{_LLM}embed_tokens.weight"].shape
    heads = heads or HEADS.get(width)
    if heads is None or width % (2 * bounded_int("llm_heads", heads, 1, width)):
        raise CheckpointError(
            f"{path.name} has a language model of width {width}, which is not a released Harmon size, so its number of "
            'attention heads is unknown. Add safetensors metadata specar = {"llm_heads": ...}.'
        )
    layers = count(tensors, f"{_LLM}layers.")
    kv_heads = tensors[f"{_LLM}layers.0.self_attn.k_proj.weight"].shape[0] * heads // width
    hidden = tensors[f"{_LLM}layers.0.mlp.gate_proj.weight"].shape[0]
    return Qwen2(width, layers, heads, kv_heads, hidden, vocab)


def load(
    checkpoint: Checkpoint, dtype: torch.dtype, grid: tuple[int, int] | None, search: Sequence[Path], operations=nn
) -> HarmonModel:
    """Build the model on the CPU. Raises CheckpointError if tensors are missing, unknown, misshapen or not finite."""
    path, meta = checkpoint.path, checkpoint.metadata
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if not name.startswith(_UNUSED)}
    inner = {name.removeprefix("mar."): tensor for name, tensor in tensors.items() if name.startswith("mar.")}
    defaults = mar.defaults_of({"defaults": _DEFAULTS | meta.get("defaults", {})}, 0, path)
    try:
        config = mar.config_of(inner, meta.get("heads"), None, path)
        with torch.device("meta"):
            llm = language_model(tensors, meta.get("llm_heads"), path)
            backbone = Harmon(config, llm, operations)
            head = mar.head_of(inner, config, defaults.steps, path, operations)
    except CheckpointError:
        raise
    except (KeyError, IndexError, ValueError) as error:  # a tensor that determines a size is missing or misshapen
        raise CheckpointError(f"{path.name} is incomplete or damaged ({error}). Download it again.") from error
    grid = legal_grid(grid or meta.get("grid", _GRID))
    encoder = prompt_encoder(open_tokenizer(path, llm.vocab, search), grid)
    model = HarmonModel(backbone, head, _NAME, meta.get("scale", mar.SCALE), defaults, encoder)
    model.grid = grid
    weights = rename(tensors, {"mar.diffloss.": "head.", "": "backbone."})
    model.dtype = dtype
    return load_weights(model, weights, checkpoint, dtype, precise=mar.PRECISE)


def open_tokenizer(path: Path, vocab: int, search: Sequence[Path]) -> Tokenizer:
    """Qwen2.5's tokenizer in the model's folder, or in a folder of a known name there or in the search folders. vocab:
    ids of the language model."""
    return Tokenizer(
        find_tokenizer(path, _TOKENIZERS, search, ("tokenizer.json", "vocab.json")),
        f"{path.name} reads prompts through Qwen2.5's tokenizer, which was not found. Put a folder {_TOKENIZERS[1]} "
        "with its tokenizer.json into models/text_encoders.",
        _SPECIALS if vocab == _VOCAB else None,
        vocab,
    )


FAMILY = Family(("Harmon",), {_NAME: KL16}, recognise, load, continuous=True)
