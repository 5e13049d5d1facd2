"""Shared by families built on language models: Hugging Face's names and sizes, and tokenizers."""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import inf, prod
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from ...common.limits import ADDED, GROWTH, TOKENIZER, TOKENS, FileError
from ...models.backbone import BackboneConfig, join_gates
from ..files.checkpoint import Checkpoint, read_settings, refuse_large
from ..files.errors import CheckpointError
from ..files.names import count, renamed, root_of
from ..files.quantised import first

_ADDING = ("added_tokens.json", "tokenizer_config.json")
D = TypeVar("D", float, None)
_STACKED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_NAMES = {
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_up_proj": "feed_forward.w1_w3",  # GLM-4's, as are the norms behind a block's two parts
    "post_self_attn_layernorm": "attention_post_norm",
    "post_mlp_layernorm": "ffn_post_norm",
}


def language_root(tensors: Collection[str], roots: Sequence[str], attention: str = "q_proj.weight") -> str | None:
    """Prefix of a Llama-type model: the first of ``roots`` with an embedding and this attention tensor of the first
    layer; None if there is none."""
    return root_of(tensors, roots, "embed_tokens.weight", f"layers.0.self_attn.{attention}")


def layer_tensors(tensors: Mapping[str, Tensor], root: str, path: Path) -> dict[str, Tensor | tuple[Tensor, ...]]:
    """Layers of a Llama-type model with the prefix ``root``, under the names of LlamaGen and of our backbone.

    The query, key and value projections are stacked. Other tensors of layers keep their names, for load_weights to
    refuse. Raises CheckpointError if one of the three is missing.
    """
    found: dict[str, Tensor | tuple[Tensor, ...]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(re.escape(root) + r"(layers\.\d+)\.(?:(.+)\.)?([^.]+)", name)
        if match is None:
            continue
        layer, part, kind = match.groups(default="")
        if part in _STACKED:
            stacked = (named(tensors, f"{root}{layer}.{each}.{kind}", path) for each in _STACKED)
            found[f"{layer}.attention.wqkv.{kind}"] = tuple(stacked)
        else:
            found[".".join(filter(None, (layer, _NAMES.get(part, part), kind)))] = tensor
    return found


def others(
    tensors: Mapping[str, Tensor], root: str, table: str, head: str, parts: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """What a file has beside the layers and the norm of the Llama-type model with the prefix ``root``, the weights of
    its embedding and head, and other ``parts`` (prefixes), under the names of a DiscreteModel: load_weights refuses
    what would change the result.

    table, head: names of the weights of embedding and head.
    """
    read = (f"{root}layers.", f"{root}norm.", *parts)
    left = {name: tensor for name, tensor in tensors.items() if name not in (table, head) and not name.startswith(read)}
    prefix = {table.removesuffix("weight"): "backbone.tok_embeddings.", head.removesuffix("weight"): "backbone.output."}
    return renamed(left, prefix | {root: "backbone.", "": ""})


def backbone_tensors(tensors: Mapping[str, Tensor], root: str, path: Path) -> dict[str, Tensor | tuple[Tensor, ...]]:
    """Layers and final norm of a Llama-type model with the prefix ``root``, under the names of a DiscreteModel.

    Raises CheckpointError if the norm, or a query, key or value projection is missing.
    """
    layers = join_gates(layer_tensors(tensors, root, path))
    named(tensors, f"{root}norm.weight", path)
    norm = renamed(
        {name: tensor for name, tensor in tensors.items() if name.startswith(f"{root}norm.")}, {root: "backbone."}
    )
    return norm | {f"backbone.{name}": tensor for name, tensor in layers.items()}


def text_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """The language model's part of config.json, or all of it if there is no such part."""
    whole = checkpoint.settings
    return whole.get("text_config") or whole.get("language_config") or whole


def backbone_config(
    checkpoint: Checkpoint, root: str, vocab: int, known_heads: Mapping[int, int], norm_eps: float
) -> BackboneConfig:
    """Sizes of a Llama-type model: from its weights, and the number of heads from config.json or, for a file without
    one, from ``known_heads`` (width -> heads of the released sizes).

    Raises CheckpointError for a model without layers, and for an unknown number of heads.
    """
    tensors, path = checkpoint.tensors, checkpoint.path
    settings = text_settings(checkpoint)
    layers = count(tensors, f"{root}layers.")
    fused = f"{root}layers.0.mlp.gate_up_proj.weight" in tensors
    q, k, gate = (
        matrix(tensors, f"{root}layers.0.{part}.weight", path)
        for part in ("self_attn.q_proj", "self_attn.k_proj", f"mlp.{'gate_up' if fused else 'gate'}_proj")
    )
    dim = first(q, len(q), named(tensors, f"{root}norm.weight", path).numel()).shape[1]
    head_norm = tensors.get(f"{root}layers.0.self_attn.q_norm.weight")
    head_rms = head_norm is not None and head_norm.ndim == 1  # LayerNorms have a row for every head, or one for all
    stated = settings.get("num_attention_heads") or known_heads.get(dim)
    heads = stated if type(stated) is int and stated > 0 else 0
    queries = _rows(q, settings, "head_dim", heads, dim // max(1, heads))
    even = bool(heads) and queries % (2 * heads) == 0  # positions rotate channels in pairs
    keys = _rows(k, settings, "num_key_value_heads", queries // heads, heads) if even else 0
    kv_heads, rest = divmod(keys, queries // heads) if even else (0, 0)
    if not kv_heads or rest or heads % kv_heads:
        raise CheckpointError(
            f"{path.name} has width {dim} and an unknown number of attention heads ({stated}). Keep it "
            "under its released name, together with its config.json, in a separate folder."
        )
    return BackboneConfig(
        dim,
        layers,
        heads,
        _rows(gate, settings, "intermediate_size", 1 + fused) // (1 + fused),
        vocab,
        positive(settings, "rms_norm_eps", norm_eps),
        kv_heads=kv_heads,
        qkv_bias=f"{root}layers.0.self_attn.q_proj.bias" in tensors,
        head_norms=0 if head_norm is None or head_rms else len(head_norm),
        head_rms=head_rms,
        head_dim=queries // heads if head_rms else 0,  # Qwen3's heads may be wider than its width divided by them
        post_norms=f"{root}layers.0.post_self_attn_layernorm.weight" in tensors,
    )


def _rows(matrix: Tensor, settings: Mapping[str, Any], name: str, each: int, usual: int = 0) -> int:
    """Rows of a matrix: its own or, where its format padded it, those for as many as config.json states (else
    ``usual``), with ``each`` rows."""
    stated = settings.get(name) or usual
    return len(first(matrix, stated * each if type(stated) is int else 0, matrix.shape[1]))


def unpadded(weights: Mapping[str, Tensor | tuple[Tensor, ...]], config: BackboneConfig) -> dict[str, Tensor | tuple]:
    """Weights of layers, each of whose stacked matrices has the rows that a model of these sizes has of it."""
    keys = config.cached_heads * config.head_dim
    rows = {
        "attention.wqkv.weight": (config.heads * config.head_dim, keys, keys),
        "feed_forward.w1_w3.weight": (config.ffn_dim,) * 2,
    }
    found = dict(weights)
    for name, parts in weights.items():
        sizes = next((sizes for part, sizes in rows.items() if name.endswith(f".{part}")), ())
        if isinstance(parts, tuple) and len(parts) == len(sizes):
            found[name] = tuple(first(part, size, config.dim) for part, size in zip(parts, sizes, strict=True))
    return found


def positive(settings: Mapping[str, Any], name: str, default: D) -> float | D:
    """A number of config.json, or the default. Raises CheckpointError for an invalid one."""
    value = settings.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < inf:
        raise CheckpointError(f"config.json says {name} {value!r}, which must be a positive number.")
    return value


def rope_theta(settings: Mapping[str, Any], default: float = 10000.0) -> float:
    """Base of the rotary frequencies by a config.json of either generation of transformers, or the default.

    Raises CheckpointError for scaled positions.
    """
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise CheckpointError(f"config.json sets rotary positions of type {kind!r}, which is not supported.")
    return float(positive(rope, "rope_theta", positive(settings, "rope_theta", default)))


def word_tensors(
    embedding: Tensor, head: Tensor | None, words: int, codes: range, specials: Sequence[int] = ()
) -> dict[str, Tensor | tuple[Tensor, ...]]:
    """Embedding and head [N, D] of a model with image codes in its vocabulary, under the names of a DiscreteModel.

    The first ``words`` rows are for prompts, the others for image codes and special tokens. head None: tied.
    """

    def image_rows(table: Tensor) -> tuple[Tensor, ...]:
        return (table[codes.start : codes.stop], *(table[special : special + 1] for special in specials))

    found = {"prefix.embedding.weight": embedding[:words], "backbone.tok_embeddings.weight": image_rows(embedding)}
    return found if head is None else found | {"backbone.output.weight": image_rows(head)}


def matrix(tensors: Mapping[str, Tensor], name: str, path: Path, columns: int | None = None) -> Tensor:
    """The tensor of that name. Raises CheckpointError unless it is a matrix (with so many columns)."""
    tensor = named(tensors, name, path)
    if tensor.ndim != 2 or not tensor.numel() or columns not in (None, tensor.shape[1]):
        wanted = "a matrix" if columns is None else f"a matrix with {columns} columns"
        raise CheckpointError(f"{path.name}: {name} has shape {list(tensor.shape)}, expected {wanted}.")
    return tensor


def named(tensors: Mapping[str, Tensor], name: str, path: Path) -> Tensor:
    """The tensor of that name. Raises CheckpointError if it is missing."""
    if name not in tensors:
        raise CheckpointError(f"{path.name} lacks {name}. It is incomplete: download it again.")
    return tensors[name]


# Tokenizers


def find_tokenizer(
    path: Path, names: Sequence[str], search: Sequence[Path], files: Sequence[str] = ("tokenizer.json",)
) -> Path | None:
    """The first of ``files`` in the model's Hugging Face folder, in the folder named as the weight file, or in one of
    the folders ``names`` beside it or in the search folders."""
    own = [path.parent, path.parent / path.stem]
    folders = [*own, *(folder / name for folder in (path.parent, path.parent.parent, *search) for name in names)]
    return next((folder / file for folder in folders for file in files if (folder / file).is_file()), None)


@contextmanager
def readable(path: Path, wanted: str = "") -> Iterator[None]:
    """Convert errors of the tokenizer library to CheckpointError: plain exceptions, and Rust panics, which do not
    derive from Exception and would end the thread."""
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{path} cannot be read{wanted}: {error}. Download it again.") from error


def check_ids(file: Path, stated: Mapping[str, int], id_of: Callable[[str], int | None]) -> None:
    """Raise CheckpointError unless the tokenizer ``file`` gives special tokens the ids ``stated`` by the model's own
    files (or, where these state none, those of the released models)."""
    for token, wanted in stated.items():
        if (found := id_of(token)) != wanted:
            has = "has no token" if found is None else f"has the id {found} for"
            raise CheckpointError(
                f"{file} {has} {token}, which has the id {wanted} in the model's files: it is the "
                "tokenizer of another model. Use the one released with it."
            )


class Tokenizer:
    """A language model's tokenizer, opened on first use: its tokenizer.json, or the vocab.json of Qwen2 with merges.txt
    and added_tokens.json beside it.

    file None: it was not found; ``missing`` is the error message. stated: see check_ids. words: ids that the model has
    for text (None: not known here). What the file says about cutting or padding texts is not used: programs save there
    how they called the tokenizer last. Nor is what it puts around them.
    """

    def __init__(
        self, file: Path | None, missing: str, stated: Mapping[str, int] | None = None, words: int | None = None
    ):
        self.file, self.missing, self.stated, self.words = file, missing, stated or {}, words
        self._opened = None

    @property
    def _path(self) -> Path:
        if self.file is None:
            raise FileNotFoundError(self.missing)
        return self.file

    def _open(self) -> Any:
        path = self._path
        if self._opened is None:
            with readable(path):
                opened = _read_tokenizer(path)
                refuse_growth(opened.normalizer)
            opened.no_truncation()
            opened.no_padding()
            opened.post_processor = _alone()
            count = opened.get_vocab_size()
            if self.words is not None and count > self.words:
                raise CheckpointError(
                    f"{path} has {count} tokens, but the model {self.words}: it is the "
                    "tokenizer of another model. Use the one released with it."
                )
            check_ids(path, self.stated, opened.token_to_id)
            self._opened = opened
        return self._opened

    def ids(self, text: str) -> list[int]:
        """Ids of a string, which may contain special tokens; none are added."""
        opened = self._open()
        with readable(self._path):
            return opened.encode(text, add_special_tokens=False).ids

    def specials_in(self, text: str) -> list[str]:
        """The special tokens in a string, each once. Some files also list plain letters among the tokens that were
        added."""
        ids = dict.fromkeys(self.ids(text))
        with readable(self._path):
            added = self._open().get_added_tokens_decoder()
        tokens = (added[id] for id in ids if id in added)
        marked = [token.content for token in tokens if token.special or token.content.startswith("<")]
        return [name for name in marked if name in text]  # an unknown letter has the id of a special token, too

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens and ids that stand for nothing."""
        opened = self._open()
        with readable(self._path):
            return opened.decode(list(ids), skip_special_tokens=True)

    def beyond(self, text: str, count: int) -> str:
        """The part of a string that lies beyond its first ``count`` tokens."""
        opened = self._open()
        with readable(self._path):
            ends = [end for _, end in opened.encode(text, add_special_tokens=False).offsets]
        return text[ends[count - 1] :].strip() if len(ends) > count else ""

    def id(self, token: str) -> int:
        """Id of one token. Raises CheckpointError if the tokenizer does not have it."""
        opened = self._open()
        with readable(self._path):
            found = opened.token_to_id(token)
        if found is None:
            raise CheckpointError(
                f"{self.file} has no token {token}: it is the tokenizer of another model. Use the one released with it."
            )
        return found

    @cached_property
    def first(self) -> int:
        """Id of the token before every text: the bos_token of the tokenizer_config.json beside it or, as Qwen has none,
        the eos_token.

        Raises FileNotFoundError without a tokenizer, CheckpointError if that file is missing or names neither.
        """
        self._open()
        file = self._path.parent / "tokenizer_config.json"
        settings = read_settings(file, TOKENS)
        token = settings.get("bos_token") or settings.get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if not isinstance(token, str):
            raise CheckpointError(
                f"{file}, which names the first token of every prompt, is missing or names none. "
                "Download the one that belongs to tokenizer.json."
            )
        return self.id(token)

    def __len__(self) -> int:
        return self._open().get_vocab_size()


def refuse_growth(normalizer: Any) -> None:
    """Raise FileError for a normalizer that makes much of little: each step may write a text for a character."""
    growth, steps = 1, [json.loads(normalizer.__getstate__())] if normalizer else []
    while steps:
        step = steps.pop()
        steps += step.get("normalizers", ())
        growth *= prod(max(1, len(step.get(text, ""))) for text in ("content", "prepend"))
    if growth > GROWTH:
        raise FileError(f"it writes more than {GROWTH} characters for one")


def _alone():
    """A post-processor that puts nothing around a text."""
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])


def _read_tokenizer(file: Path):
    """The tokenizers.Tokenizer of a file. Raises exceptions of its libraries, CheckpointError for files that are too
    large."""
    import tokenizers

    if file.name != "vocab.json":
        refuse_large(file, TOKENIZER)
        return tokenizers.Tokenizer.from_buffer(file.read_bytes().removeprefix(BOM_UTF8))
    from transformers import Qwen2TokenizerFast

    for each in (*file.parent.glob("*.json"), *file.parent.glob("*.txt"), *file.parent.glob("*.jinja")):
        refuse_large(each, ADDED if each.name in _ADDING else TOKENIZER)
    with readable(file, " as Qwen2's tokenizer, to which merges.txt and tokenizer_config.json belong"):
        return Qwen2TokenizerFast.from_pretrained(file.parent, local_files_only=True).backend_tokenizer
