"""What the families' workflows ask for, tiny and with random weights: in the released layouts, under the names that the
workflows use. They draw 4 x 4 tokens of 32 codes, so a workflow's picture size, top-k and window do not fit them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from . import tiny, tiny_chameleon, tiny_emu3, tiny_janus, tiny_simplear, tiny_t5

SMALL = {"width": 0, "height": 0, "top_k": 0, "window": 8}  # instead of the real models' sizes: 0 is the tiny one's own


def llamagen(models: Path, name: str, decoder: str, text: bool) -> None:
    """A pickle tells neither heads nor grid of a size that was never released, so this one is no .pt."""
    tiny.write_llamagen(models / "ar_models" / f"{name}.safetensors", text)
    file = models / "vae" / decoder
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(tiny.vq_weights(), file)


def llamagen_text(models: Path) -> None:
    llamagen(models, "t2i_XL_stage2_512", "vq_ds16_t2i.pt", True)
    tiny_t5.write(models / "text_encoders/flan-t5-xl")


def llamagen_class(models: Path) -> None:
    llamagen(models, "c2i_L_384", "vq_ds16_c2i.pt", False)


def janus_pro(models: Path) -> None:
    tiny_janus.write(models / "ar_models/Janus-Pro-1B")


def simplear(models: Path) -> None:
    tiny_simplear.write(models / "ar_models/SimpleAR-0.5B-RL", decoder=False)
    tiny_simplear.write_cosmos(models / "vae" / tiny_simplear.DECODER, ("decoder",), ".jit")


def lumina_mgpt(models: Path) -> None:
    folder = tiny_chameleon.write(models / "ar_models", kind="lumina").rename(models / "ar_models/Lumina-mGPT-7B-768")
    decoder = models / "vae/Anole-7b-v0.1-vqvae-hf"
    decoder.mkdir(parents=True, exist_ok=True)
    (folder / "chameleon_vqgan.safetensors").rename(decoder / "model.safetensors")


def anole(models: Path) -> None:
    folder = tiny_chameleon.write(models / "ar_models", kind="anole", shards=3, width=64, heads=tiny.HEADS)
    folder.rename(models / "ar_models/Anole-7b-v0.1-hf")
    words = len(tiny_chameleon.vocabulary(tiny.VOCAB)) + tiny_chameleon.FIRST
    weights = tiny.eagle_weights(vocab=words, head_norms=tiny.HEADS)
    drafter = tiny.write_eagle(models / "ar_drafters/anole_drafter", weights, vocab_size=words, input_type=None)
    torch.save(weights, drafter / "pytorch_model.bin")
    (drafter / "model.safetensors").unlink()


def emu3(models: Path) -> None:
    tiny_emu3.write(models / "ar_models/Emu3-Gen", shards=7)


FAMILIES: dict[str, Callable[[Path], None]] = {  # workflow -> writes its files into ComfyUI's models folder
    "41_llamagen_class_needs_download": llamagen_class, "42_llamagen_text_needs_download": llamagen_text,
    "43_simplear_needs_download": simplear, "44_janus_pro_needs_download": janus_pro,
    "45_lumina_mgpt_needs_download": lumina_mgpt, "46_anole_needs_download": anole, "47_emu3_needs_download": emu3,
}
CHANGES = {  # what a workflow's inputs must be for the tiny files
    "42_llamagen_text_needs_download": {"model_name": "t2i_XL_stage2_512.safetensors", "text": "a red cat"},
    "41_llamagen_class_needs_download": {"model_name": "c2i_L_384.safetensors", "text": "7"},  # of ten classes
}


class Placed:
    """Files put into ComfyUI's models folder, which can be taken away again. Folders stay: ComfyUI's lists of files
    fail once one of them is gone."""

    def __init__(self, models: Path):
        self.models = models
        self.before = self._files()

    def _files(self) -> set[Path]:
        return {path for path in self.models.rglob("*") if path.is_file()}

    def remove(self) -> None:
        for path in self._files() - self.before:
            path.unlink()
