"""Prompts as ComfyUI's CONDITIONING, for discrete and continuous models."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...device.placed import Placed
from ...limits.limits import PROMPT
from . import prompt_settings, prompt_syntax
from .prompt_encoders import ClassEncoder, ImagePrompts, Images, PromptEncoder, TokenEncoder, WordEncoder, features_of

EMPTY = "The prompt is empty, so nothing says what the image shows."

# ComfyUI's CONDITIONING: [[features [1 or B, n, F], {"ar": {"family": ..., "text": ..., "images": [...]}}]]
Conditioning = list


@dataclass(frozen=True)
class EncodedPrompt:
    """Content of a CONDITIONING: features [1 or B, n, F], and the prompt they encode (None: it is unknown), which may
    be about images: their token grids [h, w] (int64)."""

    features: Tensor
    text: str | None
    images: Images = ()


def prompt_text(prompt: Conditioning | EncodedPrompt | None) -> str | None:
    """The text of a prompt; None if it is unknown (as of one that is not from an ARClip) or there is no prompt."""
    if isinstance(prompt, EncodedPrompt):
        return prompt.text
    return prompt[0][1].get("ar", {}).get("text") if prompt else None


def is_empty(prompt: Conditioning | EncodedPrompt) -> bool:
    """Whether it has no text, or nothing that the model reads."""
    features = prompt.features if isinstance(prompt, EncodedPrompt) else prompt[0][0]
    return prompt_text(prompt) == "" or not features.numel()


def prompt_images(prompt: Conditioning | EncodedPrompt | None) -> Images:
    """The token grids of the images of a prompt."""
    if isinstance(prompt, EncodedPrompt):
        return prompt.images
    return prompt[0][1]["ar"].get("images", ()) if prompt else ()


def is_token_grid(grid: Tensor, codes: int) -> bool:
    """Whether this is a grid [h, w] (int64) of tokens from 0 to codes - 1."""
    return (
        grid.ndim == 2 and grid.dtype == torch.int64 and grid.numel() > 0 and bool(((grid >= 0) & (grid < codes)).all())
    )


def checked_text(text: str, name: str) -> str:
    """A text that a user wrote, as characters alone: JSON may contain lone surrogates.

    name: in messages. Raises ValueError for one that is too long, TypeError for what is no text.
    """
    if not isinstance(text, str):
        raise TypeError(f"The {name} is {text!r}, but must be a text.")
    if len(text) > PROMPT:
        raise ValueError(f"The {name} has {len(text)} characters; at most {PROMPT} are read. Shorten it.")
    return text.encode("utf-8", "replace").decode()


class Prompted(Placed):
    """Base class of models with prompts: encodes CONDITIONING and reads it."""

    family: str
    prompt_encoder: PromptEncoder
    pixels_per_token: int

    @property
    def image_prompts(self) -> ImagePrompts | None:
        """How the model reads images with a prompt; None if it cannot."""
        return self.prompt_encoder.images if isinstance(self.prompt_encoder, TokenEncoder) else None

    def encode_prompt(self, text: str, images: Images = ()) -> Conditioning:
        """CONDITIONING of a prompt (or of a class name or number). As a negative prompt, an empty text is none: the
        model's own unconditional prompt takes its place. images: token grids [h, w] (int64) of images that the prompt
        is about, such as those to be edited, in the order in which it numbers them.

        Raises ValueError with a remedy, also for images if the model cannot read any; TypeError for what is no text.
        """
        text = checked_text(text, "prompt")
        if not text and isinstance(self.prompt_encoder, ClassEncoder):  # which has nothing to encode
            return self.encode_features(torch.zeros(1, 0, 1), text=text)
        if not images:
            return self.encode_features(self.prompt_encoder.encode(text), text=text)
        reads = self.image_prompts
        if reads is None or not isinstance(self.prompt_encoder, TokenEncoder):
            raise ValueError(f"A model of the kind {self.family} cannot read images with its prompt. Leave them out.")
        if len(images) > reads.most:
            raise ValueError(f"The prompt has {len(images)} images; {self.family} reads at most {reads.most}.")
        if not all(is_token_grid(grid, reads.codes) for grid in images):
            raise ValueError(
                f"images must be grids of tokens [h, w] (int64) from 0 to {reads.codes - 1}, as the model's image "
                "decoder encodes them."
            )
        ids = self.prompt_encoder.ids(text, images=images)
        [[features, extra]] = self.encode_features(features_of(ids), text=text)
        extra["ar"]["images"] = [grid.cpu() for grid in images]
        return [[features, extra]]

    def no_prompt(self, empty: Tensor) -> Tensor:
        """Features of the unconditional prompt, where an encoder makes ``empty`` ones [1, 0, 1] of an empty text."""
        return empty

    def unknown_words(self, text: str) -> list[str]:
        """Words of a prompt that the model ignores, because it was not trained with them."""
        return self.prompt_encoder.parse(text)[1] if isinstance(self.prompt_encoder, WordEncoder) else []

    def text_notices(self, text: str) -> list[str]:
        """What the model does not use of a prompt's text, or not as words, a sentence each."""
        text = checked_text(text, "prompt")
        return [*prompt_syntax.notices(text), *self.prompt_encoder.notices(text)]

    def notices(
        self,
        positive: Conditioning | EncodedPrompt,
        negative: Conditioning | EncodedPrompt | None,
        cfg: float,
        own_cfg: float,
        grid: tuple[int, int],
    ) -> tuple[str, ...]:
        """What the model does not use of the prompts of a run on ``grid`` (rows, cols), unpacked before, and a ``cfg``
        far above ``own_cfg``, the model's default, a sentence each."""
        guided = cfg != 1
        if prompt_text(negative) == "":  # which is none
            negative = None
        pixels = grid[0] * self.pixels_per_token, grid[1] * self.pixels_per_token
        prompts = {"positive": positive} | ({"negative": negative} if negative is not None and guided else {})
        found = [EMPTY] * (prompt_text(positive) == "")
        for name, prompt in prompts.items():
            if text := prompt_text(prompt):
                found += self.text_notices(text)
            count = (prompt.features if isinstance(prompt, EncodedPrompt) else prompt[0][0]).shape[1]
            if count > self.prompt_encoder.slots:
                found.append(
                    f"The {name} prompt has {count} words or tokens, as after Conditioning (Concat), but the "
                    f"model learned to read {self.prompt_encoder.slots} at most. Use a shorter prompt."
                )
            if settings := prompt_settings.describe_ignored(prompt[0][1] if isinstance(prompt, list) else {}, pixels):
                found.append(f"AR models do not use what is set on the {name} prompt: {', '.join(settings)}.")
        if negative is not None and not guided:
            found.append("The negative prompt is not used, because cfg is 1. Set cfg above 1 to use it.")
        if 1 < own_cfg < cfg / 2:
            found.append(f"cfg is {cfg:g}, but this model's own is {own_cfg:g}. So high, the image may fall apart.")
        return tuple(dict.fromkeys(found))

    def encode_features(self, features: Tensor, text: str | None = None) -> Conditioning:
        """CONDITIONING of features [1, n, F]. text: the prompt that they encode, if it is known."""
        return [[features, {"ar": {"family": self.family, "text": text}}]]

    def unpack_prompt(
        self,
        conditioning: Conditioning | EncodedPrompt | None,
        batch: int,
        name: str,
        grid: tuple[int, int] | None = None,
    ) -> EncodedPrompt | None:
        """The prompt of a CONDITIONING for ``batch`` images of ``grid`` (rows, cols), on the model's device; None for
        no negative prompt, which an empty one is, too.

        Of an EncodedPrompt only the device changes: it may have been unpacked before the model was moved. Token ids are
        compared with those of the prompt's text, so that a change is noticed, and encoded again for negative prompts
        and for other grids, whose templates may differ. Raises ValueError for a CONDITIONING of another model, or one
        that was changed, TypeError for anything else.
        """
        negative = name == "negative"
        if isinstance(conditioning, EncodedPrompt):
            return replace(conditioning, features=conditioning.features.to(self.device))
        if negative and conditioning is None:
            return None
        if not isinstance(conditioning, list):
            raise TypeError(
                f"The {name} prompt is {conditioning!r}, but must be a CONDITIONING: that of CLIP Text "
                'Encode, or of model.encode_prompt("...").'
            )
        if len(conditioning) != 1:
            raise ValueError(f"{name} combines {len(conditioning)} prompts; AR models take one. Use a single prompt.")
        features, extra = conditioning[0]
        own = extra.get("ar", {})
        family = own.get("family")
        if family != self.family:
            origin = f"was encoded for {family}" if family else "does not come from this pack's CLIP"
            raise ValueError(f"{name} {origin}, but the model is {self.family}. Encode it with this model's CLIP.")
        if brought := prompt_settings.describe_refused(extra):
            raise ValueError(
                f"{name} comes with {brought}, which AR models cannot use. Connect CLIP Text Encode "
                "directly, without the node that adds it."
            )
        text, images = own.get("text"), own.get("images", ())
        if negative and is_empty(conditioning):
            return None
        if not features.numel():
            features = self.no_prompt(features)
        if features.shape[0] not in (1, batch):
            more = f" or {batch}" * (batch > 1)
            raise ValueError(f"{name} holds {features.shape[0]} prompts for a batch of {batch}. Use 1{more}.")
        encoder = self.prompt_encoder
        if text is not None and isinstance(encoder, TokenEncoder):
            if not torch.equal(features.cpu(), features_of(encoder.ids(text, images=images))):
                raise ValueError(
                    f"{name} was changed by another node (zeroed, joined, averaged ...), or encoded by another model's "
                    "CLIP. This model reads token ids: connect CLIP Text Encode with its CLIP directly. For no "
                    "negative prompt, leave its text empty."
                )
            if negative or grid not in (None, encoder.grid):
                features = features_of(encoder.ids(text, grid, negative, images))
        return EncodedPrompt(features.to(self.device), text, images)

    def unpack_prompts(
        self,
        conditioning: Conditioning | EncodedPrompt,
        negative: Conditioning | EncodedPrompt | None,
        batch: int,
        grid: tuple[int, int],
    ) -> tuple[EncodedPrompt, EncodedPrompt | None]:
        """Both prompts of a run (see ``unpack_prompt``). Where the second branch reads the images of the prompt, too,
        one without images gets them, also if there is no negative prompt."""
        positive, other = (
            self.unpack_prompt(conditioning, batch, "positive", grid),
            self.unpack_prompt(negative, batch, "negative", grid),
        )
        assert positive is not None, "only a negative prompt may be missing"
        encoder, reads = self.prompt_encoder, self.image_prompts
        if positive.images and not (other and other.images) and reads and reads.write_negative:
            text = (other and other.text) or ""
            assert isinstance(encoder, TokenEncoder), "it has image prompts"
            ids = encoder.ids(text, grid, negative=True, images=positive.images)
            other = EncodedPrompt(features_of(ids).to(self.device), text, positive.images)
        return positive, other
