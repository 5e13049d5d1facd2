"""``python -m tools.training.continuous``: train the bundled pair of continuous models: KL autoencoder, MAR, MAR
drafter."""

import argparse
import logging
from pathlib import Path

import torch
from comfyui_specar.model_loaders.detect import load_image_decoder
from comfyui_specar.tools.training import contact_sheet, continuous_export, kl_vae, masked, resume
from comfyui_specar.tools.training.captions import Captions
from comfyui_specar.tools.training.data import load_images
from comfyui_specar.tools.training.settings import SETTINGS

STAGES = ("vae", "decoder", "model", "drafter", "export", "sheet")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.training.continuous", description=__doc__)
    parser.add_argument("--setting", choices=SETTINGS, default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="checkpoints and exported files go here")
    parser.add_argument("--cache", type=Path, default=Path(".cache/emoji"), help="downloaded and rendered images")
    parser.add_argument(
        "--discrete",
        type=Path,
        default=Path("assets/default"),
        help="folder of a trained discrete model, for its word embedding and layers of its tokenizer",
    )
    parser.add_argument("--resume-from", type=Path, help="folder of an exported pair to start from")
    parser.add_argument("--stage", choices=STAGES, action="append", help="default: all, in order")
    parser.add_argument("--minutes", type=float, help="time budget of the stage instead of the setting's")
    parser.add_argument("--threads", type=int, help="CPU threads")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_flush_denormal(True)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    setting, out, begin = SETTINGS[arguments.setting], arguments.out, arguments.resume_from
    out.mkdir(parents=True, exist_ok=True)
    exported = out / "continuous"
    for stage in arguments.stage or STAGES:
        if stage == "sheet":
            contact_sheet.draw(exported, exported / "contact_sheet.jpg")
            continue
        images = load_images(arguments.cache)
        captions = Captions(setting, images.words)
        words = masked.word_vectors(arguments.discrete / "text_encoder.safetensors", captions)
        if stage == "vae":
            vq = load_image_decoder(arguments.discrete).module if setting.kl_vae.start_from_vq else None
            weights = begin and resume.tensors_of(begin / "vae.safetensors")
            kl_vae.train(setting, images, out, arguments.minutes, vq, weights)
            continue
        if stage == "decoder":
            kl_vae.sharpen_decoder(setting, images, out, arguments.minutes)
            continue
        vae = kl_vae.restore(setting, out).to(setting.device)
        scale = kl_vae.latent_scale(vae, setting, images)
        if stage == "export":
            continuous_export.write(setting, vae, scale, words, out, arguments.discrete, exported)
        else:
            cfg = setting.masked if stage == "model" else setting.masked_drafter
            weights = begin and resume.masked(begin / ("" if stage == "model" else "small") / "model.safetensors")
            file, minutes = out / f"masked_{stage}.pt", arguments.minutes
            masked.train(setting, cfg, images, captions, words, vae, scale, file, minutes, weights)


if __name__ == "__main__":
    main()
