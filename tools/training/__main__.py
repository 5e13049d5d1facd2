"""``python -m tools.training``: fetch the images, train tokenizer and model, export them."""

import argparse
import logging
from pathlib import Path

import torch
from comfyui_specar.tools.training import contact_sheet, export, resume, tokenizer, workers
from comfyui_specar.tools.training.captions import Captions
from comfyui_specar.tools.training.data import load_images
from comfyui_specar.tools.training.settings import SETTINGS

STAGES = ("tokenizer", "decoder", "model", "export", "sheet")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.training", description=__doc__)
    parser.add_argument("--setting", choices=SETTINGS, default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="checkpoints and exported files go here")
    parser.add_argument("--cache", type=Path, default=Path(".cache/emoji"), help="downloaded and rendered images")
    parser.add_argument("--stage", choices=STAGES, action="append", help="default: all, in order")
    parser.add_argument("--minutes", type=float, help="time budget of the stage instead of the setting's")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--processes", type=int, default=1, help="one-thread processes sharing the batch")
    parser.add_argument("--resume-from", type=Path, help="folder of an exported model to start from")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_flush_denormal(True)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    setting, begin = SETTINGS[arguments.setting], arguments.resume_from
    arguments.out.mkdir(parents=True, exist_ok=True)
    exported = arguments.out / "default"
    for stage in arguments.stage or STAGES:
        if stage == "tokenizer":
            weights = begin and resume.tensors_of(begin / "vq.safetensors")
            tokenizer.train(setting, load_images(arguments.cache), arguments.out, arguments.minutes, weights)
        elif stage == "decoder":
            tokenizer.sharpen_decoder(setting, load_images(arguments.cache), arguments.out, arguments.minutes)
        elif stage == "model":
            workers.train_model(setting, arguments.cache, arguments.out, arguments.minutes, arguments.processes, begin)
        elif stage == "export":
            captions = Captions(setting, load_images(arguments.cache).words)
            export.write(setting, captions, arguments.out, exported)
        else:
            contact_sheet.draw(exported, exported / "contact_sheet.jpg")


if __name__ == "__main__":
    main()
