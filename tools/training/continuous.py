"""Train the bundled pair of continuous models: KL autoencoder, MAR, MAR drafter."""

from pathlib import Path

from comfyui_specar.model_loaders.detect import load_image_decoder
from comfyui_specar.models.networks.vq import VQModel
from comfyui_specar.tools.training import contact_sheet, export, kl_vae, masked
from comfyui_specar.tools.training.captions import Captions
from comfyui_specar.tools.training.command import command, parsed
from comfyui_specar.tools.training.data import load_images
from comfyui_specar.tools.training.settings import SETTINGS

STAGES = ("vae", "decoder", "model", "drafter", "export", "sheet")


def main() -> None:
    parser = command("tools.training.continuous", __doc__)
    parser.add_argument("--setting", choices=SETTINGS, default="emoji")
    parser.add_argument("--stage", choices=STAGES, action="append", help="default: all, in order")
    parser.add_argument("--minutes", type=float, help="time of the stage instead of the setting's")
    parser.add_argument(
        "--discrete",
        type=Path,
        default=Path("assets/default"),
        help="folder of a trained discrete model, for its word embedding and layers of its tokenizer",
    )
    options = parsed(parser)
    setting, out, minutes, exported = (
        SETTINGS[options.setting],
        options.out,
        options.minutes,
        options.out / "continuous",
    )
    for stage in options.stage or STAGES:
        if stage == "sheet":
            contact_sheet.draw(exported, exported / "contact_sheet.jpg")
            continue
        images = load_images(options.cache)
        if stage == "vae":
            vq = load_image_decoder(options.discrete).module
            assert isinstance(vq, VQModel)
            kl_vae.train(setting, images, out, minutes, vq)
            continue
        if stage == "decoder":
            kl_vae.sharpen_decoder(setting, images, out, minutes)
            continue
        captions = Captions(setting, images.words)
        words = masked.word_vectors(options.discrete / "text_encoder.safetensors", captions)
        vae = kl_vae.restore(setting, out).to(setting.device)
        scale = kl_vae.latent_scale(vae, setting, images)
        if stage == "export":
            export.write_continuous(setting, vae, scale, words, out, options.discrete, exported)
        else:
            cfg = setting.masked if stage == "model" else setting.masked_drafter
            file = out / f"masked_{stage}.pt"
            masked.train(setting, cfg, images, captions, words, vae, scale, file, minutes)


if __name__ == "__main__":
    main()
