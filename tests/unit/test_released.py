"""Every released file fits: its names and shapes are those of the official code, and each tensor has its place in a
model that says the same of itself. All on the meta device, so no memory is needed.

Official names and shapes are recorded as numbers of tensors, of the numbers in them, and a SHA-256 of all names and
shapes (see tests/parity for where they come from), or are taken from transformers, live.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from comfyui_specar.model_loaders.decoders import kl_vae, movq, vq
from comfyui_specar.model_loaders.families import (
    chameleon,
    eagle,
    emu3,
    emu35,
    glm_image,
    harmon,
    janus,
    llamagen,
    mar,
    simplear,
    xar,
)
from comfyui_specar.model_loaders.files.checkpoint import Checkpoint
from comfyui_specar.model_loaders.text.qwen2 import HEADS
from comfyui_specar.models.discrete_model import DiscreteModel
from comfyui_specar.models.networks.backbone import Backbone, BackboneConfig
from comfyui_specar.models.networks.kl_vae import KLConfig, KLModel
from comfyui_specar.models.networks.mar import MARConfig
from comfyui_specar.models.networks.positions import SequencePositions
from comfyui_specar.models.networks.prefix import TextPrefix
from comfyui_specar.models.networks.vq import VQConfig, VQModel
from comfyui_specar.samplers.continuous_contract import ContinuousParams
from comfyui_specar.samplers.contract import SamplingParams
from safetensors import safe_open

from ..support import tiny_chameleon, tiny_emu3, tiny_emu35, tiny_janus, tiny_text
from ..support.reference import digest, on_meta
from ..support.tiny import eagle_shapes, llamagen_shapes, named_shapes
from ..support.tiny_harmon import harmon_shapes
from ..support.tiny_mar import mar_shapes
from ..support.tiny_xar import xar_shapes

PARITY = Path(__file__).parents[1] / "parity"
Shapes = Mapping[str, Any]
OFFICIAL = {
    name: json.loads((PARITY / f"{name}.json").read_text(encoding="utf-8")).get("released")
    for name in ("llamagen", "mar", "harmon", "kl_vae", "emu35", "janus", "chameleon", "lumina2")
}
with safe_open(str(PARITY / "xar.safetensors"), framework="pt") as file:
    OFFICIAL["xar"] = json.loads(file.metadata()["released"])


def of(module, *given) -> Callable[[Checkpoint], Any]:
    """Loads with a family or a kind of image decoder, which knows the file for its own."""

    def load(checkpoint: Checkpoint):
        assert module.recognise(checkpoint.tensors)
        return module.load(checkpoint, *given)

    return load


def of_model(module) -> Callable[[Checkpoint], Any]:
    return of(module, torch.bfloat16, None, ())


def of_decoder(module) -> Callable[[Checkpoint], Any]:
    return of(module, torch.float32)


def backbone(**facts: Any) -> dict[str, Any]:
    return {f"backbone.config.{name}": value for name, value in facts.items()}


@dataclass(frozen=True)
class Released:
    """A file under its released name: that of the file, or of its folder and the file.

    shapes: names and shapes of its tensors. official: what these are in the official code, themselves or their digest.
    settings: of its config.json. besides: tensors of the file that are no part of these. facts: attributes of what is
    loaded.
    """

    name: str
    shapes: Callable[[], Shapes]
    official: Any
    load: Callable[[Checkpoint], Any]
    facts: Mapping[str, Any]
    settings: Mapping[str, Any] | None = None
    besides: Shapes = field(default_factory=dict)


INDEX = "model.safetensors.index.json"
USAGE = {"quantize.codebook_used": (65536,)}  # statistics that LlamaGen's and Janus's tokenizers keep


def of_llamagen(name: str, official: str, sizes: tuple[int, ...], heads: int, side: int) -> Released:
    text = name.startswith("t2i")
    shapes = partial(llamagen_shapes, text, *sizes, vocab=16384, classes=1000, caption=2048, slots=120)
    own = {"prefix.slots": 120} if text else {"prefix.classes": 1000}
    facts = {"grid": (side, side), "vocab": 16384} | backbone(heads=heads)
    return Released(name, shapes, OFFICIAL["llamagen"][official], of_model(llamagen), facts | own)


def of_vq(name: str, official: str, config: VQConfig) -> Released:
    shapes = lambda: named_shapes(lambda: {"": VQModel(config)}) | USAGE  # noqa: E731
    facts = {"factor": config.factor, "module.config": config}
    return Released(name, shapes, OFFICIAL["llamagen"][official], of_decoder(vq), facts)


def of_mar(size: str, dim: int, layers: int, heads: int, head: tuple[int, int], cfg: float) -> Released:
    config = MARConfig(dim, layers, layers, heads)
    facts = {
        "backbone.config": config,
        "family": "mar",
        "grid": (16, 16),
        "channels": 16,
        "scale": 0.2325,
        "pixels_per_token": 16,
        "defaults": ContinuousParams(cfg, "linear", 1.0, 100, "ddpm"),
        "head.schedule.steps": 100,
        "dtype": torch.bfloat16,
    }
    shapes = partial(mar_shapes, config, *head)
    return Released("checkpoint-last.pth", shapes, OFFICIAL["mar"][size], of_model(mar), facts)


def of_harmon(size: str, config: MARConfig, head: tuple[int, int], llm: tuple[int, int, int, int]) -> Released:
    dim, layers, keys, hidden = llm
    shapes = partial(harmon_shapes, config, head, (dim, layers, HEADS[dim], keys, hidden, 151936))
    defaults = ContinuousParams(3.0, "constant", 1.0, 100, "ddpm", iterations=64)
    facts = {"family": "harmon", "grid": (32, 32), "scale": 0.2325, "defaults": defaults}
    facts |= {"backbone.llm.vocab": 151936} | backbone(conditions=0)
    return Released(f"Harmon-{size}.pth", shapes, OFFICIAL["harmon"][size], of_model(harmon), facts)


def of_xar(name: str, official: str, sizes: tuple[int, int, int], heads: int, cfg: float, steps: int) -> Released:
    buffers = {
        f"{part}_blocks.{i}.attn.rope.{table}": shape
        for part in ("encoder", "decoder")
        for i in range(sizes[1])
        for table, shape in (("freqs", (16,)), ("freqs_cos", (256, 64)), ("freqs_sin", (256, 64)))
    }
    facts = {"family": "xar", "grid": (16, 16), "group": 64, "scale": 0.2325} | backbone(heads=heads)
    facts["defaults"] = ContinuousParams(cfg, "linear", steps=steps)
    shapes, besides = partial(xar_shapes, *sizes, heads), buffers | {"mask": (1, 1, 256, 256)}
    return Released(name, shapes, OFFICIAL["xar"][official], of_model(xar), facts, besides=besides)


def of_transformers(make: Callable[[], Any]) -> Callable[[], dict[str, tuple[int, ...]]]:
    """Names and shapes of a model of transformers."""

    def shapes():
        with torch.device("meta"):
            return {name: tuple(tensor.shape) for name, tensor in make().state_dict().items()}

    return shapes


def sizes_of(dim: int, ffn: int, layers: int, heads: int, kv_heads: int, words: int) -> dict[str, int]:
    """The sizes of a language model as its config.json names them."""
    return {
        "hidden_size": dim,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": words,
    }


# Janus-Pro

VISION = "vision_model."


def of_janus(size: str, dim: int, layers: int, ffn: int) -> list[Released]:
    """DeepSeek's file, of whose vision tower a few tensors stand for all, and transformers'."""
    heads = dim // 128
    sizes = partial(tiny_janus.shapes, dim, layers, ffn, vision=1024, codes=16384, words=102400, vq=VQConfig())
    language = {"model_type": "llama"} | sizes_of(dim, ffn, layers, heads, heads, 102400)
    config = partial(
        transformers.JanusConfig,
        text_config=language,
        vision_config={"projection_dim": dim},
        vq_config={"projection_dim": dim, "image_token_embed_dim": dim},
    )

    def of_deepseek(seen: bool) -> dict:
        named = tiny_janus.released(sizes()) | {f"gen_vision_model.{name}": shape for name, shape in USAGE.items()}
        return {name: shape for name, shape in named.items() if name.startswith(VISION) == seen}

    live = of_transformers(lambda: transformers.JanusForConditionalGeneration(config()))
    facts = {"grid": (24, 24), "vocab": 16384} | backbone(heads=heads)
    own = f"Janus-Pro-{size}.safetensors", partial(of_deepseek, False), OFFICIAL["janus"][size]
    others = f"Janus-Pro-{size}.safetensors", live, None
    return [
        Released(*file, load, found, besides=of_deepseek(True) if file is own else {})
        for file in (own, others)
        for load, found in ((of_model(janus), facts), (of_decoder(vq), {"module.config": VQConfig()}))
    ]


# The Chameleon family

VQGAN = tiny_chameleon.vqgan_shapes(8192, (1, 1, 2, 2, 4), base=128, latent=256, code=256, blocks=2)
MOVQGAN = tiny_chameleon.movq_shapes(16384, (1, 2, 2, 4), base=256, blocks=2)
WITHOUT_DECODER = {name: shape for name, shape in VQGAN.items() if not name.startswith("decoder.")}
SEVEN = {"width": 4096, "layers": 32, "heads": 32}


def inside(names: Shapes) -> Shapes:
    return {f"model.vqmodel.{name}": shape for name, shape in names.items()}


def of_chameleon(kind: str, name: str, side: int, specials_of_image: int) -> Released:
    """Lumina-mGPT's norms have one row; else it has the tensors of transformers' class, whose default sizes are 7B's.
    Anole's folder holds the tokenizer's decoder besides."""
    settings = tiny_chameleon.config(kind, codes=8192, **SEVEN)
    settings |= {"intermediate_size": 11008, "vocab_size": 65536, "vq_config": {"resolution": 512}, "specar": None}

    rows, ids = (32 if kind == "anole" else 1), settings["vocabulary_map"]
    specials = [ids[name] for name in ("<reserved08799>", "<eoss>")[-specials_of_image:]]

    def official() -> Shapes:
        config = transformers.ChameleonConfig(vocabulary_map={"<image>": 8711})
        found = of_transformers(lambda: transformers.ChameleonForConditionalGeneration(config))()
        return {n: (rows, *shape[1:]) if "_norm." in n and ".self_attn." in n else shape for n, shape in found.items()}

    facts = {
        "grid": (side, side),
        "backbone.output.weight.shape": (8192 + len(specials), 4096),
        "word_ids": (*range(258, 258 + 8192), *specials),
    } | backbone(head_norms=rows)
    shapes = lambda: tiny_chameleon.shapes(kind, settings) | inside(WITHOUT_DECODER)  # noqa: E731
    return Released(f"{name}/{INDEX}", shapes, official, of_model(chameleon), facts, settings, inside(VQGAN))


def of_lumina2(name: str) -> Released:
    """As the first, with a leftover of Chameleon's tokenizer, which is not read, and the vocabulary of an earlier
    model in its config.json."""
    sizes = tiny_chameleon.config("lumina2", **SEVEN) | {"intermediate_size": 11008, "vocab_size": 171385}
    shapes = tiny_chameleon.shapes("lumina2", sizes)
    settings = {"num_attention_heads": 32, "max_position_embeddings": 10240, "mask_image_logits": False}
    settings["vocabulary_map"] = {"IMGIMGAZ": 4}
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == pytest.approx(7.88e9, rel=1e-3)
    facts = {
        "family": "lumina-mgpt-2",
        "grid": (96, 96),
        "pixels_per_token": 8,
        "longest": 10240,
        "word_ids": (*range(155000, 171384), 151670, 151666),
        "defaults.cfg": 4.0,
        "defaults.top_k": 4096,
        "backbone.output.weight.shape": (16386, 4096),
    } | backbone(head_norms=1)
    besides = inside(WITHOUT_DECODER)
    return Released(f"{name}/{INDEX}", lambda: shapes, None, of_model(chameleon), facts, settings, besides)


# Emu3 and Emu3.5


def of_emu3(name: str, side: int) -> Released:
    """As transformers has it, and with the plain names of a language model."""
    vocabulary = {word: 151643 + i for i, word in enumerate(emu3._RANKED)}

    def shapes() -> Shapes:
        config = transformers.Emu3Config(vocabulary_map=vocabulary)
        whole = of_transformers(lambda: transformers.Emu3ForConditionalGeneration(config))()
        if name.endswith("-hf"):
            return whole
        plain = {n.replace(".text_model.", "."): shape for n, shape in whole.items() if ".vq" not in n}
        assert not any(n.endswith("bias") for n in plain)
        return plain

    facts = {
        "grid": (side, side),
        "longest": 9216,
        "vocab_total": 32772,
        "word_ids": (*range(151854, 151854 + 32768), 151846, 151847, 151853, 151850),
    } | backbone(heads=32, kv_heads=8)
    return Released(f"{name}/{INDEX}", shapes, None, of_model(emu3), facts)


def of_movq(codes: int) -> dict[str, Any]:
    return {"factor": 8, "channels": 4, "module.config.codebook_size": codes}


def of_emu3_decoder(original: bool) -> Released:
    """In a file of transformers', and in the original repository's, of which no numbers are recorded."""
    recorded = json.loads((PARITY / "emu3.json").read_text(encoding="utf-8"))["released_vq"]

    def shapes() -> Shapes:
        whole = of_emu3("Emu3-Gen-hf", 90).shapes()
        if not original:
            return whole
        vq_names = {n.removeprefix("model.vqmodel."): shape for n, shape in whole.items() if ".vqmodel." in n}
        return {
            tiny_emu3.original_vq_name(n): (*shape, 1, 1) if n.endswith("_proj.weight") else shape
            for n, shape in vq_names.items()
        }

    return Released("model.safetensors", shapes, recorded if original else None, of_decoder(movq), of_movq(32768))


EMU35 = sizes_of(5120, 25600, 64, 64, 8, 282926) | {"head_dim": 128}


def of_emu35(name: str, cfg: float) -> Released:
    facts = {
        "family": "emu3.5",
        "grid": (55, 73),
        "pixels_per_token": 16,
        "longest": 32768,
        "defaults.cfg": cfg,
        "defaults.top_k": 5120,
        "word_ids": (*range(151854, 282926), 151846),
        "prefix.words": 151854,
    } | backbone(heads=64, kv_heads=8, head_dim=128, head_rms=True)
    shapes, official = partial(tiny_emu35.shapes, EMU35), OFFICIAL["emu35"]["model"]
    return Released(f"{name}/{INDEX}", shapes, official, of_model(emu35), facts, EMU35)


# SimpleAR and GLM-Image: names and shapes are transformers' own


def of_simplear(size: str, dim: int, ffn: int, layers: int, heads: int, millions: float) -> Released:
    config = partial(
        transformers.Qwen2Config, tie_word_embeddings=True, **sizes_of(dim, ffn, layers, heads, 2, 215_672)
    )

    def shapes() -> Shapes:
        whole = of_transformers(lambda: transformers.Qwen2ForCausalLM(config()))()
        found = {name: shape for name, shape in whole.items() if name != "lm_head.weight"}
        assert sum(torch.Size(shape).numel() for shape in found.values()) / 1e6 == pytest.approx(millions, abs=1)
        return found

    facts = {"vocab": 64_000, "prefix.words": 151_672, "grid": (64, 64)}
    facts |= backbone(heads=heads, kv_heads=2, qkv_bias=True)
    return Released(f"SimpleAR-{size}.safetensors", shapes, None, of_model(simplear), facts)


def of_glm_image() -> Released:
    codes = "model.vqmodel.quantize.embedding.weight"  # whose values would be read

    def shapes() -> Shapes:
        pytest.importorskip("transformers", minversion="5.0")
        make = lambda: transformers.GlmImageForConditionalGeneration(transformers.GlmImageConfig())  # noqa: E731
        found = of_transformers(make)()
        assert found.pop(codes) == (16384, 2048)
        return found

    facts = {"vocab": 16384, "prefix.words": 168064, "grid": (32, 32)}
    facts |= {"positions": glm_image.AxisPositions((8, 12, 12))}
    facts |= backbone(heads=32, kv_heads=2, qkv_bias=True, post_norms=True)
    return Released("model.safetensors", shapes, None, of_model(glm_image), facts)


# LANTERN's drafters for Anole, and what its code writes for Lumina-mGPT


def of_lantern(family: str, norms: int, specials: tuple[int, ...]) -> Released:
    dim, ffn, words, codes = 4096, 11008, 65536, 8192
    settings = {"model_type": "chameleon", "hidden_act": "silu"} | sizes_of(dim, ffn, 1, 32, 32, words)
    settings |= {"rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False}
    settings |= {"attention_bias": False, "max_position_embeddings": 4096}

    def load(checkpoint: Checkpoint):
        config = BackboneConfig(dim, 1, 32, ffn, codes + len(specials), head_norms=norms)
        with torch.device("meta"):
            prefix, network = TextPrefix(words, dim, tiny_text.null), Backbone(config)
            places = {"positions": SequencePositions(), "row_ends": len(specials) > 1, "endings": 1}
            ids = (*range(4, 4 + codes), *specials)
            target = DiscreteModel(network, prefix, family, (32, 32), SamplingParams(), None, word_ids=ids, **places)
        assert eagle.recognise(checkpoint.tensors)
        checkpoint = Checkpoint(checkpoint.tensors, settings, Path("pytorch_model.bin"))
        return eagle.load(checkpoint, target, torch.bfloat16)

    shapes = partial(eagle_shapes, dim, ffn, words, head_norms=norms, heads=32)
    # Image tokens stand twice in the table of what is loaded.
    facts = {"reads_words": True, "module.config.norm_eps": 1e-5}
    facts["module.tok_embeddings.weight.shape"] = (words + codes + len(specials), dim)
    return Released(f"drafter of {family}", shapes, None, load, facts)


LLAMAGEN = [
    of_llamagen("c2i_B_384.pt", "c2i GPT-B", (768, 12, 2048), 12, 24),
    of_llamagen("c2i_L_384.pt", "c2i GPT-L", (1024, 24, 2816), 16, 24),
    of_llamagen("c2i_XL_384.pt", "c2i GPT-XL", (1280, 36, 3584), 20, 24),
    of_llamagen("c2i_XXL_384.pt", "c2i GPT-XXL", (1536, 48, 4096), 24, 24),
    of_llamagen("c2i_3B_384.pt", "c2i GPT-3B", (3200, 24, 8704), 32, 24),
    of_llamagen("t2i_XL_stage1_256.pt", "t2i GPT-XL", (1280, 36, 3584), 20, 16),
    of_llamagen("t2i_XL_stage2_512.pt", "t2i GPT-XL", (1280, 36, 3584), 20, 32),
]
OF_VECTORS = [
    of_mar("B", 768, 12, 12, (1024, 6), 2.9),
    of_mar("L", 1024, 16, 16, (1280, 8), 3.0),
    of_mar("H", 1280, 20, 16, (1536, 12), 3.2),
    of_harmon("0.5B", MARConfig(), (1024, 6), (896, 24, 2, 4864)),
    of_harmon("1.5B", MARConfig(1280, 20, 20, 16), (1536, 12), (1536, 28, 2, 8960)),
    of_xar("xAR-B.pth", "base", (768, 8, 2048), 12, 2.7, 40),
    of_xar("xAR-L.pth", "large", (1024, 16, 2730), 16, 2.3, 50),
    of_xar("xAR-H.pth", "huge", (1280, 20, 3413), 16, 2.2, 50),
]
LANGUAGE_MODELS = [
    *of_janus("1B", 2048, 24, 5632),
    *of_janus("7B", 4096, 30, 11008),
    of_chameleon("lumina", "Lumina-mGPT-7B-512", 32, 2),
    of_chameleon("lumina", "Lumina-mGPT-7B-1024", 64, 2),
    of_chameleon("anole", "Anole-7b-v0.1-hf", 32, 1),
    of_lumina2("Lumina-mGPT-2.0"),
    of_lumina2("Lumina-mGPT-2.0-Omni"),
    of_emu3("Emu3-Gen-hf", 90),
    of_emu3("Emu3-Stage1", 64),
    of_emu35("Emu3.5-Image", 5.0),
    of_emu35("Emu3.5", 2.0),
    of_simplear("0.5B", 896, 4864, 24, 14, 551.1),
    of_simplear("1.5B", 1536, 8960, 28, 12, 1641.4),
    of_glm_image(),
    of_lantern("anole", 32, (8196,)),
    of_lantern("lumina-mgpt", 1, (8803, 8196)),
]
DECODERS = [
    of_vq("vq_ds16_c2i.pt", "VQ-16", VQConfig()),
    of_vq("vq_ds8_c2i.pt", "VQ-8", VQConfig(ch_mult=(1, 2, 2, 4))),
    Released(
        "kl16.ckpt",
        lambda: named_shapes(lambda: {"": KLModel(KLConfig())}),
        OFFICIAL["kl_vae"],
        of_decoder(kl_vae),
        {"factor": 16, "module.config": KLConfig()},
        besides={"loss.logvar": ()},  # what its training left behind
    ),
    *(
        Released(
            "vqgan.ckpt",
            lambda prefix=prefix: {f"{prefix}{name}": shape for name, shape in VQGAN.items()},
            None if prefix else OFFICIAL["chameleon"],
            of_decoder(vq),
            {"factor": 16, "channels": 256, "codes": 8192},
        )
        for prefix in ("", "model.vqmodel.", "vqmodel.")
    ),
    Released("movqgan_270M.ckpt", lambda: MOVQGAN, OFFICIAL["lumina2"], of_decoder(movq), of_movq(16384)),
    of_emu3_decoder(False),
    of_emu3_decoder(True),
    Released(
        "emu35_ibq.safetensors",  # under any name
        partial(tiny_emu35.ibq_shapes, 131072, (1, 1, 2, 2, 4), base=256, code=256, blocks=4),
        OFFICIAL["emu35"]["decoder"],
        of_decoder(vq),
        {
            "factor": 16,
            "channels": 256,
            "module.config.by_product": True,
            "module.config.unit_codes": False,
            "module.config.attention": True,
        },
    ),
]


def same_as_recorded(shapes: Shapes, official: Any) -> bool:
    """Compared but for what was not recorded."""
    if isinstance(official, Mapping):
        official = [official.get(entry) for entry in ("tensors", "numbers", "sha256")]
    return all(wanted in (None, found) for found, wanted in zip(digest(shapes), official, strict=True))


@pytest.mark.parametrize(
    "released", [*LLAMAGEN, *OF_VECTORS, *LANGUAGE_MODELS, *DECODERS], ids=lambda released: released.name
)
def test_every_released_file_fits(released, tmp_path, monkeypatch):
    """Loaders take tensors on the meta device, and check that each has its place and its shape, not its values."""
    monkeypatch.setattr(torch, "isfinite", lambda tensor: torch.ones(()))
    monkeypatch.setattr(torch.Tensor, "any", lambda tensor: True)
    shapes = released.shapes()
    if callable(released.official):
        assert shapes == released.official()
    elif released.official:
        assert same_as_recorded(shapes, released.official)
    path = tmp_path / released.name
    path.parent.mkdir(exist_ok=True)
    if released.settings is not None:
        (path.parent / "config.json").write_text(json.dumps(released.settings), encoding="utf-8")
    loaded = released.load(Checkpoint(on_meta({**released.besides, **shapes}), {}, path))
    assert {fact: attrgetter(fact)(loaded) for fact in released.facts} == released.facts
