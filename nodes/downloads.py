"""Where a released model is to be had: words for the message that names a missing one. Nothing is fetched."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """Files of a Hugging Face repository, and the folder of ComfyUI's models/ where they are looked for.

    In `RELEASES` the fields are templates of `re.Match.expand`. files: "" stands for all.
    """

    repository: str
    folder: str
    files: str = ""

    def expanded(self, match: re.Match[str]) -> str:
        files = match.expand(self.files) or "all files"
        repository, folder = match.expand(self.repository), match.expand(self.folder)
        return f"{files} of https://huggingface.co/{repository} into models/{folder}"


LLAMAGEN, LLAMAGEN_TEXT = "FoundationVision/LlamaGen", "peizesun/llamagen_t2i"
CHAMELEON_DECODER = Source("leloy/Anole-7b-v0.1-vqvae-hf", "vae/Anole-7b-v0.1-vqvae-hf", "model.safetensors")

RELEASES: dict[str, tuple[Source, ...]] = {  # a choice of a loader -> all that a run of it needs
    r"c2i_\w+\.pt": (Source(LLAMAGEN, "ar_models", r"\g<0>"), Source(LLAMAGEN, "vae", "vq_ds16_c2i.pt")),
    r"t2i_XL_stage\w+\.pt": (
        Source(LLAMAGEN_TEXT, "ar_models", r"\g<0>"), Source(LLAMAGEN_TEXT, "vae", "vq_ds16_t2i.pt"),
        Source("google/flan-t5-xl", "text_encoders/flan-t5-xl",
               "config.json, tokenizer.json, both *.safetensors and their index"),
    ),
    r"vq_ds16_c2i\.pt": (Source(LLAMAGEN, "vae", r"\g<0>"),),
    r"vq_ds16_t2i\.pt": (Source(LLAMAGEN_TEXT, "vae", r"\g<0>"),),
    r"Janus-Pro-[17]B": (Source(r"deepseek-community/\g<0>", r"ar_models/\g<0>"),),
    r"SimpleAR-(0\.5|1\.5)B-(RL|SFT)": (
        Source(r"Daniel0724/\g<0>", r"ar_models/\g<0>"),
        Source("nvidia/Cosmos-1.0-Tokenizer-DV8x16x16", "vae/Cosmos-1.0-Tokenizer-DV8x16x16", "decoder.jit"),
    ),
    r"Lumina-mGPT-7B-768": (Source(r"Alpha-VLLM/\g<0>", r"ar_models/\g<0>"), CHAMELEON_DECODER),
    r"Lumina-mGPT-7B-(512|1024|768-Omni)": (
        Source(r"Alpha-VLLM/\g<0>", r"ar_models/\g<0>"),
        Source("Alpha-VLLM/Lumina-mGPT-7B-768", r"ar_models/\g<0>", "tokenizer.json"), CHAMELEON_DECODER,
    ),
    r"Anole-7b-v0\.1-hf": (Source(r"leloy/\g<0>", r"ar_models/\g<0>"),),
    r"Emu3-(Gen|Stage1)": (
        Source(r"BAAI/\g<0>", r"ar_models/\g<0>"), Source("BAAI/Emu3-VisionTokenizer", "vae/Emu3-VisionTokenizer"),
    ),
    r"(anole|llamagen2?)_drafter": (Source(r"jadohu/\g<0>", r"ar_drafters/\g<0>"),),
}  # fmt: skip


def where_to_get(choice: str) -> str | None:
    """What to download, from where, into which folders, for a choice of Load AR Checkpoint, Load AR Drafter or Load AR
    Image Decoder that is a released model under its own name; None for others."""
    for name, sources in RELEASES.items():
        if match := re.fullmatch(name, choice):
            return f"Download {'; '.join(source.expanded(match) for source in sources)}. Then press R in ComfyUI."
    return None
