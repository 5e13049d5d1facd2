"""Fetch the images, train tokenizer and model, export them."""

import logging
from functools import partial
from pathlib import Path

from comfyui_specar.tools.training import autoregressive, contact_sheet, export, tokenizer
from comfyui_specar.tools.training.captions import Captions
from comfyui_specar.tools.training.command import command, parsed
from comfyui_specar.tools.training.data import load_images
from comfyui_specar.tools.training.settings import SETTINGS

log = logging.getLogger(__name__)

STAGES = ("tokenizer", "decoder", "model", "export", "sheet")
# Writes the tokenizer alone and measures it; encodes the model's training images, so that it can be trained elsewhere;
# measures what words of portraits mean to the model.
OTHER_STAGES = ("vq", "views", "words")

WORD_IMAGES = 256


def main() -> None:
    parser = command("tools.training", __doc__)
    parser.add_argument("--setting", choices=SETTINGS, default="emoji")
    parser.add_argument("--stage", choices=(*STAGES, *OTHER_STAGES), action="append", help="default: all, in order")
    parser.add_argument("--minutes", type=float, help="time of the stage; 0: leave its weights as they are")
    parser.add_argument(
        "--from", dest="start", type=Path, help="trained file from which to begin the tokenizer or the model"
    )
    options = parsed(parser)
    setting, out, exported = SETTINGS[options.setting], options.out, options.out / "default"
    for stage in options.stage or STAGES:
        if stage == "sheet":
            contact_sheet.draw(exported, exported / "contact_sheet.jpg")
            continue
        views = out / autoregressive.VIEWS_FOLDER
        if stage == "model" and views.exists():
            captions = Captions(setting)
            source = partial(autoregressive.Stored, setting, captions, views)
            autoregressive.train(setting, captions, source, out, options.minutes, options.start)
            continue
        images = load_images(options.cache, setting.portrait_count)
        captions = Captions(setting, images.words)
        if stage == "tokenizer":
            tokenizer.train(setting, images, out, options.minutes, options.start)
        elif stage == "decoder":
            tokenizer.sharpen_decoder(setting, images, out, options.minutes)
        elif stage == "vq":
            vq = tokenizer.restore(setting, out)
            export.write_tokenizer(setting, vq, exported)
            found = tokenizer.measure_styles(setting, images, vq, exported / "vq.png")
            log.info(", ".join(f"{style} {psnr:.2f} dB" for style, psnr in found.items()))
        elif stage == "export":
            export.write(setting, captions, out, exported)
        else:
            vq = tokenizer.restore(setting, out).to(setting.device).eval()
            source = partial(autoregressive.Batches, setting, images.select(setting.concepts), captions, vq)
            if stage == "views":
                autoregressive.encode(setting, source, views)
            elif stage == "words":
                model = autoregressive.restore(setting, len(captions.words), out)
                for style, kinds in autoregressive.measure_words(model, captions, source(10**6), WORD_IMAGES).items():
                    log.info("%s: %s", style, ", ".join(f"{kind} {nats:.2f} nats" for kind, nats in kinds.items()))
            else:
                autoregressive.train(setting, captions, source, out, options.minutes, options.start)


if __name__ == "__main__":
    main()
