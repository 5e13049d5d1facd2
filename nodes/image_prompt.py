"""AR Image Prompt: a prompt about images, such as one that is to be edited."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io
from torch import Tensor

from ..model_loaders.families import IMAGE_PROMPT_MODELS
from ..models.text.prompt_encoders import ImagePrompts
from ..models.text.prompts import Conditioning
from .checks import show
from .comfy_runtime.glm_image import GlmImageVae
from .comfy_runtime.models import LoadedModel
from .comfy_runtime.progress import notify
from .comfy_runtime.sources import encode_source
from .comfy_runtime.vae import image_tokens
from .latents import empty_latent
from .regions import nearest_grid
from .schema import schema
from .sockets import ARModel
from .widgets import fold_away


class ImagePrompt(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARImagePrompt",
            category="SpecAR/conditioning",
            search=("edit image", "reference image", "image to image", "clip text encode", *IMAGE_PROMPT_MODELS),
            inputs=[
                ARModel.Input("model"),
                io.Vae.Input("vae"),
                io.Image.Input("image1"),
                io.String.Input("text", multiline=True, dynamic_prompts=True),
                fold_away(io.String.Input("negative_text", multiline=True, dynamic_prompts=True, default="")),
                io.Image.Input("image2", optional=True),
                io.Image.Input("image3", optional=True),
            ],
            outputs=[
                io.Conditioning.Output("positive"),
                io.Conditioning.Output("negative"),
                io.Latent.Output("latent"),
            ],
        )

    @classmethod
    def execute(
        cls,
        model: LoadedModel,
        vae: Any,
        image1: Tensor,
        text: str,
        negative_text: str,
        image2: Tensor | None = None,
        image3: Tensor | None = None,
    ) -> io.NodeOutput:
        given = {"image1": image1, "image2": image2, "image3": image3}
        reads = image_prompts_of(model)
        images = one_each(given, reads.most)
        if not text.strip():
            raise ValueError("text is empty. Write what is to become of the image.")
        sources = [encode_image(model, vae, reads, name, image) for name, image in images.items()]
        tokens = [source["tokens"] for source in sources]
        positive = model.model.encode_prompt(text, tokens)
        if reads.seen:  # the decoder reads them, too
            positive[0][1]["ar"]["sources"] = sources
        notify(dict.fromkeys((*model.model.text_notices(text), *model.model.text_notices(negative_text))))
        second = tokens if reads.write_negative else ()
        return io.NodeOutput(positive, negative_of(model, negative_text, second), size_of(model, image1, tokens[0]))


def image_prompts_of(model: LoadedModel) -> ImagePrompts:
    """How the model reads images. Raises ValueError if it cannot."""
    reads = None if model.model.continuous else model.model.image_prompts
    if reads is None:
        raise ValueError(
            f"{model.name} cannot read images with its prompt; these can: {', '.join(IMAGE_PROMPT_MODELS)}. Use CLIP "
            "Text Encode, and VAE Encode with a noise mask (or Continue Image) to keep parts of an image."
        )
    return reads


def one_each(images: dict[str, Tensor | None], most: int) -> dict[str, Tensor]:
    """The images [H, W, 3] that are connected, at most ``most`` of them. Raises ValueError for a batch in one place."""
    for name, image in images.items():
        if image is not None and len(image) != 1:
            raise ValueError(
                f"{name} holds {len(image)} images, but one belongs there. Choose one (ImageFromBatch); more go "
                f"to the other inputs, of which this model reads {most}."
            )
    found = {name: image[0] for name, image in images.items() if image is not None}
    if len(found) > most:
        raise ValueError(
            f"{len(found)} images are connected, but this model reads {most}. Disconnect image2 and image3 as needed."
        )
    return found


def encode_image(model: LoadedModel, vae: Any, reads: ImagePrompts, name: str, image: Tensor) -> dict[str, Tensor]:
    """An image [H, W, 3] as the model was trained to read it: "image", scaled [H, W, 3] (fp32, CPU, 0..1), and
    "tokens", [h, w] (int64, CPU).

    Raises ValueError for the VAE of another model, for a shape that the model does not read, with the ``name`` of the
    image, and for a model that was saved without its encoder.
    """
    if reads.seen and not isinstance(vae, GlmImageVae):
        raise ValueError(f"vae is {show(vae)}, but must be the VAE of Load AR Checkpoint, of the same model.")
    side = model.model.pixels_per_token
    try:
        pixels = reads.scaled(image, side)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if reads.seen:
        tokens = encode_source(model, reads.seen(image, side))
    else:
        tokens = image_tokens(vae, pixels[None], model.model.vocab)[0]
    return {"tokens": tokens, "image": pixels}


def negative_of(model: LoadedModel, text: str, images: list[Tensor] | tuple) -> Conditioning:
    """The negative prompt. An empty text is none: the model's own unconditional prompt, with the images, follows from
    the positive one."""
    return model.model.encode_prompt(text, images) if text.strip() else model.model.encode_prompt("")


def size_of(model: LoadedModel, image: Tensor, tokens: Tensor) -> dict[str, Any]:
    """An empty LATENT of the size of the first image, or of the nearest that the model generates."""
    rows, cols = tokens.shape
    if (rows, cols) not in model.model.grids:
        rows, cols = nearest_grid(model.model, *image.shape[1:3])
    return empty_latent(model.model, rows, cols, 1)
