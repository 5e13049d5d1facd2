"""What the bundled models are trained on, and in which sizes."""

from dataclasses import dataclass, replace

from ...models.networks.kl_vae import KLConfig
from ...models.networks.vq import VQConfig
from ...samplers.continuous_contract import ContinuousParams

IMAGE_SIZE = 256
STYLES = ("3d", "noto", "flat")
BACKGROUNDS = {
    "white": (250, 250, 250),
    "black": (24, 24, 26),
    "gray": (136, 138, 142),
    "red": (214, 48, 49),
    "orange": (245, 140, 40),
    "yellow": (250, 214, 72),
    "green": (70, 168, 82),
    "teal": (40, 166, 164),
    "blue": (52, 112, 216),
    "purple": (128, 76, 184),
    "pink": (246, 150, 190),
    "brown": (128, 84, 54),
}

# Common concepts that are recognisable in 16 x 16 tokens: Unicode code point -> usual name.
COMMON_CONCEPTS = {
    "2764": "heart",
    "1f604": "smiley",
    "2600": "sun",
    "1f319": "moon",
    "2b50": "star",
    "1f431": "cat",
    "1f436": "dog",
    "1f98a": "fox",
    "1f43c": "panda",
    "1f437": "pig",
    "1f438": "frog",
    "1f427": "penguin",
    "1f420": "fish",
    "1f98b": "butterfly",
    "1f34e": "apple",
    "1f34c": "banana",
    "1f352": "cherry",
    "1f353": "strawberry",
    "1f349": "watermelon",
    "1f355": "pizza",
    "1f354": "burger",
    "1f369": "donut",
    "2615": "coffee",
    "1f697": "car",
    "1f680": "rocket",
    "26f5": "sailboat",
    "1f3e0": "house",
    "1f333": "tree",
    "1f335": "cactus",
    "1f339": "rose",
    "1f344": "mushroom",
    "26c4": "snowman",
    "2602": "umbrella",
    "26bd": "ball",
    "1f381": "gift",
    "1f388": "balloon",
    "1f451": "crown",
    "1f47b": "ghost",
    "1f916": "robot",
    "1f480": "skull",
}

# An object's colour, where it has one that can be exchanged: word -> hue in degrees.
COLOURS = {"red": 0, "orange": 28, "yellow": 50, "green": 120, "teal": 178, "blue": 216, "purple": 272, "pink": 328}
COLOURED = (
    "heart",
    "star",
    "apple",
    "cherry",
    "fish",
    "butterfly",
    "car",
    "rose",
    "mushroom",
    "umbrella",
    "gift",
    "balloon",
    "crown",
)

# Positions of a small object: words -> its centre, from the middle of the image, in half sides.
SMALL = 0.5
PLACES = {
    (): (0.0, 0.0),
    ("top",): (0.0, -0.5),
    ("bottom",): (0.0, 0.5),
    ("left",): (-0.5, 0.0),
    ("right",): (0.5, 0.0),
    ("top", "left"): (-0.5, -0.5),
    ("top", "right"): (0.5, -0.5),
    ("bottom", "left"): (-0.5, 0.5),
    ("bottom", "right"): (0.5, 0.5),
}
PLACE_WORDS = ("small", "top", "bottom", "left", "right")


@dataclass(frozen=True)
class Augmentation:
    """Ranges of the random augmentation (shift as a fraction of the image)."""

    scale: tuple[float, float] = (0.92, 1.05)
    shift: float = 0.04
    colour_jitter: float = 6.0


MILD = Augmentation(scale=(0.98, 1.02), shift=0.012, colour_jitter=4.0)


@dataclass(frozen=True)
class AutoencoderSetting:
    """Settings of both tokenizers."""

    minutes: float
    config: VQConfig | KLConfig
    crop_batch: int
    whole_batch: int
    learning_rate: float = 2e-3
    augmentation: Augmentation = Augmentation()
    crop: int = 128
    margin: int = 1  # tokens to repeat around an image before decoding: decoders produce a spike in a corner
    sharpening_minutes: float = 30.0
    sharpening_rate: float = 5e-4
    perception: float = 0.1  # weight of the perceptual distance of whole images
    other_images: float = 0.15  # fraction of images of other concepts, so that other images can be encoded too


@dataclass(frozen=True)
class TokenizerSetting(AutoencoderSetting):
    config: VQConfig
    warm_start_steps: int = 200


@dataclass(frozen=True)
class KLSetting(AutoencoderSetting):
    config: KLConfig
    kl_weight: float = 6e-3  # weight of the mean divergence per latent channel, relative to the mean loss per pixel


@dataclass(frozen=True)
class ModelSetting:
    """contrastive: weight of the contrastive loss of an image's caption and a hard negative (see autoregressive.py)."""

    minutes: float
    dim: int
    layers: int
    heads: int
    batch: int
    augmentation: Augmentation
    learning_rate: float = 3e-3
    ema: float = 0.998
    weight_decay: float = 0.02
    contrastive: float = 0.0


@dataclass(frozen=True)
class MaskedSetting:
    """MAR and its diffusion head: ``layers`` blocks in the encoder and as many in the decoder."""

    minutes: float
    dim: int
    layers: int
    heads: int
    head_width: int
    head_depth: int
    batch: int
    augmentation: Augmentation = MILD
    repeats: int = 4  # denoising steps trained per token and forward pass
    known_power: float = 1.5  # above 1: few known tokens are more frequent
    learning_rate: float = 3e-3
    ema: float = 0.998
    weight_decay: float = 0.02


@dataclass(frozen=True)
class Sampling:
    """Default sampling settings of the exported model."""

    cfg: float = 2.0
    temperature: float = 0.9
    top_k: int = 0
    top_p: float = 0.9


@dataclass(frozen=True)
class Setting:
    name: str
    device: str
    compile: bool  # the transformer, by torch.compile, which needs a C++ compiler on the CPU
    concepts: tuple[str, ...]  # code points
    tokenizer: TokenizerSetting
    model: ModelSetting
    kl_vae: KLSetting
    masked: MaskedSetting
    masked_drafter: MaskedSetting
    sampling: Sampling = Sampling()
    masked_sampling: ContinuousParams = ContinuousParams(2.0, "constant", 1.0, steps=25)
    masked_first_step: int = 970  # first denoising step: earlier ones amplify the smallest error of a head
    caption_slots: int = 10
    fill_slots: bool = False  # with the words of a caption, again and again
    prompt_keys: bool = False  # see GridPositions
    masked_slots: int = 8  # of the continuous model; unused ones hold the null embedding
    caption_dim: int = 128
    placed: float = 0.2  # fraction of images with a small object somewhere
    recoloured: float = 0.15  # fraction of images with an object in another colour
    portraits: float = 0.0  # fraction of images that are portraits, of so many different ones
    portrait_count: int = 0
    views: int = 0  # of the model's training images, where they are encoded beforehand
    drop_part: float = 0.10
    drop_caption: float = 0.10


EMOJI = Setting(
    name="emoji",
    device="cpu",
    compile=True,
    concepts=tuple(COMMON_CONCEPTS),
    tokenizer=TokenizerSetting(
        minutes=36,
        config=VQConfig(1024, 8, (1, 1, 2, 4, 4), base_channels=32, z_channels=128, num_res_blocks=1),
        crop_batch=16,
        whole_batch=4,
    ),
    model=ModelSetting(minutes=64, dim=256, layers=8, heads=4, batch=32, augmentation=MILD),
    kl_vae=KLSetting(
        minutes=25,
        config=KLConfig(16, (1, 1, 2, 4, 4, 4), base_channels=32, num_res_blocks=1),
        crop_batch=16,
        whole_batch=4,
        augmentation=Augmentation(scale=(0.96, 1.04), shift=0.03),
        other_images=0.1,
    ),
    masked=MaskedSetting(minutes=46, dim=192, layers=4, heads=3, head_width=256, head_depth=3, batch=32, repeats=2),
    masked_drafter=MaskedSetting(
        minutes=34, dim=128, layers=2, heads=2, head_width=192, head_depth=2, batch=32, repeats=2
    ),
)

# Portraits, and emoji as before; start its tokenizer from a trained one (--from).
PORTRAITS = replace(
    EMOJI,
    name="portraits",
    tokenizer=replace(
        EMOJI.tokenizer,
        minutes=150,
        config=replace(EMOJI.tokenizer.config, codebook_size=2048),
        learning_rate=8e-4,
        crop_batch=8,
        whole_batch=2,
        sharpening_minutes=60,
    ),
    model=replace(EMOJI.model, minutes=200, contrastive=0.06),
    caption_slots=16,
    fill_slots=True,
    prompt_keys=True,
    portraits=0.7,
    portrait_count=12_000,
    views=60_000,
)

SETTINGS = {each.name: each for each in (EMOJI, PORTRAITS)}
BUNDLED = {"default": EMOJI, "continuous": EMOJI}  # what the bundled models were trained on
