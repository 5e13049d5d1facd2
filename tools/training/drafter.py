"""Train a drafter for your own model or the bundled one."""

import argparse
import logging
from pathlib import Path

import torch
from comfyui_specar.model_loaders.detect import bundled, find_image_decoder, find_model, load_image_decoder, load_model
from comfyui_specar.models.discrete_model import DiscreteModel
from comfyui_specar.tools.training import drafter_export
from comfyui_specar.tools.training.command import command, parsed
from comfyui_specar.tools.training.drafter_data import Example, Pool, bundled_images, from_folder, own_samples
from comfyui_specar.tools.training.drafter_training import EagleObjective, SmallObjective, train

log = logging.getLogger(__name__)

HELD_OUT_EVERY = 20  # one example in so many is held out


def main() -> None:
    parser = command("tools.training.drafter", __doc__)
    parser.add_argument("--model", default="default", help="file or folder of the target, or the name of a bundled one")
    parser.add_argument("--kind", choices=("eagle", "small"), required=True)
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--pictures", type=Path, help="folder of images, each with its prompt in a .txt of that name")
    parser.add_argument("--decoder", type=Path, help="image decoder that encodes them, if it is not beside the model")
    parser.add_argument("--prompts", type=Path, help="text file with one prompt (or class) per line, for samples")
    parser.add_argument("--samples", type=int, default=1024, help="images to generate")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--depth", type=int, default=2, help="eagle: draft steps to train on its own predictions")
    parser.add_argument("--width", type=int, default=128, help="small: width")
    parser.add_argument("--layers", type=int, default=2, help="small: layers")
    parser.add_argument("--device", default="cpu")
    arguments = parsed(parser)
    torch.manual_seed(0)
    path = find_model(arguments.model)
    model = load_model(path, arguments.device)
    if not isinstance(model, DiscreteModel):
        raise SystemExit(f"{path} generates vectors, not token ids. Its drafter is a smaller model of its family.")
    eagle = arguments.kind == "eagle"
    try:
        objective = (
            EagleObjective(model, arguments.depth)
            if eagle
            else SmallObjective(model, arguments.width, arguments.layers)
        )
    except ValueError as error:
        raise SystemExit(str(error)) from error
    pool, held_out = pools(arguments, model, path)
    file = arguments.out / f"{arguments.kind}.pt"
    module = train(objective, pool, held_out, file, arguments.minutes, arguments.batch)
    if eagle:
        drafter_export.write_eagle(module, model, arguments.out)
    else:
        drafter_export.write_small(module, arguments.out)
    log.info("written to %s", arguments.out)


def pools(arguments: argparse.Namespace, model: DiscreteModel, path: Path) -> tuple[Pool, Pool]:
    """Training and held-out examples, stored in ``out`` so that a stopped training resumes at once."""
    files = [arguments.out / f"{name}.pool" for name in ("examples", "held_out")]
    if not all(file.is_file() for file in files):
        found = examples(arguments, model, path)
        shown = [example for i, example in enumerate(found) if i % HELD_OUT_EVERY]
        for file, part in zip(files, (shown, found[::HELD_OUT_EVERY]), strict=True):
            Pool.build(model, part).save(file)
            log.info("%d examples in %s", len(part), file)
    return Pool.load(files[0]), Pool.load(files[1])


def examples(arguments: argparse.Namespace, model: DiscreteModel, path: Path) -> list[Example]:
    """Images and samples; by default, the bundled model's training images, and samples for their prompts."""
    images = []
    if arguments.pictures or not arguments.prompts:
        decoder_path = arguments.decoder or find_image_decoder(path, model.family)
        if decoder_path is None:
            raise SystemExit(
                f"Images need an image decoder, and none is beside {path}: set --decoder. Or set --prompts, a file "
                "with one prompt per line, to train on images that the model generates."
            )
        decoder = load_image_decoder(decoder_path, arguments.device)
        if arguments.pictures:
            images = from_folder(model, decoder, arguments.pictures)
        elif path == bundled("default"):
            images = bundled_images(model, decoder, arguments.cache, arguments.samples)
        else:
            raise SystemExit("Set --prompts (one per line), --pictures (with .txt files), or both.")
    prompts = [example.features for example in images]
    if arguments.prompts:
        lines = [line.strip() for line in arguments.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
        prompts = [model.encode_prompt(line)[0][0][0] for line in lines]
    repeated = [prompts[i % len(prompts)] for i in range(arguments.samples)]
    return images + own_samples(model, repeated)


if __name__ == "__main__":
    main()
