"""T5 encoders (flan-t5-xl, LlamaGen's text encoder): a Hugging Face folder, or one file with the encoder alone."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import shorten
from unicodedata import normalize

import torch
from torch import Tensor, nn

from ...limits.limits import CAPTION
from ...models.text.prompt_encoders import SHOWN, PromptEncoder, left_out, special_tokens
from ...models.text.tokenizer import Tokenizer, find_tokenizer
from ..files.checkpoint import PICKLES, SAFETENSORS, WEIGHT_FILES, Checkpoint, open_checkpoint
from ..files.checkpoint import weight_file as weights_in
from ..files.errors import CheckpointError, as_released
from ..files.names import count, meaning
from ..files.weights import load_weights
from .caption_cleaning import clean_caption

_END = "</s>"
_ENDS = {_END: 1}  # in every T5
_TOKENIZERS = ("flan-t5-xl", "t5_tokenizer")  # folders; the second is ComfyUI's, with the same vocabulary


class T5(nn.Module):
    """transformers' encoder with a ``device`` that ComfyUI may set. words: vocabulary size."""

    def __init__(self, words: int, dim: int, layers: int, heads: int, head_dim: int, ffn_dim: int, buckets: int):
        super().__init__()
        from transformers import T5Config, T5EncoderModel

        self.words, self.device = words, torch.device("cpu")
        self.encoder = T5EncoderModel(
            T5Config(
                vocab_size=words,
                d_model=dim,
                num_layers=layers,
                num_heads=heads,
                d_kv=head_dim,
                d_ff=ffn_dim,
                relative_attention_num_buckets=buckets,
                feed_forward_proj="gated-gelu",
            )
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [B, n] without padding -> features [B, n, dim]."""
        return self.encoder(input_ids=ids).last_hidden_state


class T5Encoder(PromptEncoder):
    """The weights are read with the first prompt.

    weights: a file or folder; width: features per token that the model reads; slots: most tokens. ``dtype`` may be set
    before the first prompt; ``place`` is called with the module before each use, to move it to the compute device.
    """

    def __init__(self, weights: Path, tokenizer: Tokenizer, slots: int, width: int):
        self.weights, self.tokenizer, self.slots, self.width = weights, tokenizer, slots, width
        self.dtype = torch.float32
        self.place: Callable[[T5], None] = lambda module: None
        self._module: T5 | None = None

    def ids(self, text: str) -> list[int]:
        """Ids of a caption, at most ``slots``, the end token included.

        Raises FileNotFoundError if there is no tokenizer, CheckpointError for one of another model, ValueError for a
        prompt that is too long.
        """
        return [*self.tokenizer.ids(self.caption(text))[: self.slots - 1], self.tokenizer.id(_END)]

    def caption(self, text: str) -> str:
        """A prompt as the encoder reads it. Raises ValueError for one that is too long."""
        if len(text) > CAPTION:
            raise ValueError(
                f"The prompt has {len(text)} characters, but the model reads {self.slots} tokens, about "
                f"as many words. Shorten it, to at most {CAPTION} characters."
            )
        # Twice, as in LlamaGen's training: the second pass removes what the first leaves (a tag within a tag).
        return clean_caption(clean_caption(text))

    def notices(self, text: str) -> list[str]:
        """Words that cleaning removes, special tokens that it leaves, and what lies beyond the slots."""
        caption = self.caption(text)
        words = re.findall(r"[^\W_]+", normalize("NFKC", html.unescape(text)).lower())  # however they were written
        removed = ", ".join(word for word in words if word not in normalize("NFKC", caption))
        cleaned = f"Removed from the prompt, as from all captions that the model learned: {shorten(removed, SHOWN)}."
        rest = self.tokenizer.beyond(caption, self.slots - 1)
        return [
            *[cleaned] * bool(removed),
            *special_tokens(self.tokenizer, caption),
            *left_out(self.slots, "tokens of a prompt, its end included,", rest),
        ]

    def module(self) -> T5:
        """The encoder, loaded on first use. Raises CheckpointError for an unsupported or damaged file."""
        if self._module is None:
            with as_released(self.weights):
                self._module = load_t5(self.weights, self.width, self.dtype)
        return self._module

    @torch.inference_mode()
    def encode(self, text: str) -> Tensor:
        """Features [1, n, width] (fp32, CPU) of the n tokens of a caption, the end token included."""
        ids, module = self.ids(text), self.module()
        if max(ids) >= module.words:
            raise CheckpointError(
                f"{self.tokenizer.file} is not the tokenizer of {self.weights.name}: its ids exceed "
                f"the encoder's vocabulary of {module.words}."
            )
        self.place(module)
        return module(torch.tensor([ids], device=module.device)).float().cpu()


def find_t5(path: Path, slots: int, width: int, search: Sequence[Path]) -> T5Encoder | None:
    """The encoder of a model at ``path``: a folder or file with flan-t5-xl in its name, beside the model, in the
    search folders or one level below; None if there is none."""
    folders = [path.parent, *search]
    entries = (entry for folder in folders for pattern in ("*", "*/*") for entry in sorted(folder.glob(pattern)))
    weights = next(filter(_is_encoder, entries), None)
    if weights is None:
        return None
    file = find_tokenizer(weights / "x" if weights.is_dir() else weights, _TOKENIZERS, search)
    missing = (
        f"The tokenizer of {weights.name} was not found: tokenizer.json of the repository google/flan-t5-xl. Put it "
        f"into the folder {weights if weights.is_dir() else weights.with_suffix('')}."
    )
    return T5Encoder(weights, Tokenizer(file, missing, _ENDS), slots, width)


def _is_encoder(entry: Path) -> bool:
    if not meaning(entry.name, {"flant5xl": True}):
        return False
    if entry.is_dir():
        return any((entry / name).is_file() for name in WEIGHT_FILES)
    return entry.suffix.lower() in SAFETENSORS + PICKLES


def load_t5(path: Path, width: int, dtype: torch.dtype, name: str = "flan-t5-xl") -> T5:
    """Build the encoder on the CPU; the decoder of a whole T5 is not read.

    name: what it is, for messages. Raises CheckpointError for files that are damaged or not an encoder of ``width``
    features per token.
    """
    checkpoint = open_checkpoint(weights_in(path))
    tensors = encoder_tensors(checkpoint)
    with torch.device("meta"):
        module = build(tensors, width, checkpoint.path, name)
    # One embedding under two names.
    tensors["encoder.encoder.embed_tokens.weight"] = tensors["encoder.shared.weight"]
    load_weights(module, tensors, checkpoint, dtype)
    module.encoder.encoder.embed_tokens.weight = module.encoder.shared.weight
    return module


def encoder_tensors(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The encoder's tensors under the names of our module, whatever their prefix in the file."""
    last = "encoder.final_layer_norm.weight"
    root = next((name.removesuffix(last) for name in checkpoint.tensors if name.endswith(last)), "")
    own = (f"{root}encoder.", f"{root}shared.")
    found = {f"encoder.{n.removeprefix(root)}": t for n, t in checkpoint.tensors.items() if n.startswith(own)}
    copy = found.pop("encoder.encoder.embed_tokens.weight", None)  # a copy of shared.weight, or instead of it
    return found if copy is None else {"encoder.shared.weight": copy} | found


def build(tensors: dict[str, Tensor], width: int, path: Path, name: str = "flan-t5-xl") -> T5:
    """The module in the size of the tensors. Raises CheckpointError unless they are a gated T5 encoder of ``width``
    features per token."""
    block = "encoder.encoder.block.0.layer"
    try:
        words, dim = tensors["encoder.shared.weight"].shape
        buckets, heads = tensors[f"{block}.0.SelfAttention.relative_attention_bias.weight"].shape
        inner = len(tensors[f"{block}.0.SelfAttention.q.weight"])
        ffn_dim = len(tensors[f"{block}.1.DenseReluDense.wi_0.weight"])
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path.name} cannot be read as a T5 encoder ({error} is missing or misshapen). Supported are the files of "
            f"{name}, or its encoder alone in one file."
        ) from error
    if dim != width:
        raise CheckpointError(
            f"{path.name} has {dim} features per token, but the model reads {width}: it is not "
            f"{name}. Put {name} into {path.parent}."
        )
    layers = count(tensors, "encoder.encoder.block.")
    return T5(words, dim, layers, heads, inner // heads, ffn_dim, buckets)
