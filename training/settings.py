"""The two sizes in which the bundled model can be trained. One code path; only these numbers differ."""

from dataclasses import dataclass

from ..models.vq import VQConfig

IMAGE_SIZE = 128
STYLES = ("3d", "noto", "flat")
BACKGROUNDS = {
    "white": (250, 250, 250), "black": (24, 24, 26), "gray": (136, 138, 142), "red": (214, 48, 49),
    "orange": (245, 140, 40), "yellow": (250, 214, 72), "green": (70, 168, 82), "teal": (40, 166, 164),
    "blue": (52, 112, 216), "purple": (128, 76, 184), "pink": (246, 150, 190), "brown": (128, 84, 54),
}  # fmt: skip

# What people type first, and what stays recognisable in 16 x 16 tokens: Unicode code point -> the usual name.
COMMON_CONCEPTS = {
    "2764": "heart", "1f604": "smiley", "2600": "sun", "1f319": "moon",
    "2b50": "star", "1f431": "cat", "1f436": "dog", "1f98a": "fox", "1f43c": "panda",
    "1f437": "pig", "1f438": "frog", "1f427": "penguin", "1f420": "fish", "1f98b": "butterfly",
    "1f34e": "apple", "1f34c": "banana", "1f352": "cherry", "1f353": "strawberry",
    "1f349": "watermelon", "1f355": "pizza", "1f354": "burger", "1f369": "donut", "2615": "coffee",
    "1f697": "car", "1f680": "rocket", "26f5": "sailboat", "1f3e0": "house", "1f333": "tree",
    "1f335": "cactus", "1f339": "rose", "1f344": "mushroom", "26c4": "snowman",
    "2602": "umbrella", "26bd": "ball", "1f381": "gift", "1f388": "balloon", "1f451": "crown",
    "1f47b": "ghost", "1f916": "robot", "1f480": "skull",
}  # fmt: skip


@dataclass(frozen=True)
class Augmentation:
    """Ranges of the random changes a picture gets every time it is shown (shift as a share of the picture)."""

    scale: tuple[float, float] = (0.92, 1.05)
    shift: float = 0.04
    colour_jitter: float = 6.0
    flip: bool = False


@dataclass(frozen=True)
class TokenizerSetting:
    minutes: float
    config: VQConfig
    crop_batch: int
    whole_batch: int
    learning_rate: float = 2e-3
    augmentation: Augmentation = Augmentation()
    crop: int = 64
    warm_start_steps: int = 200
    margin: int = 1  # tokens to repeat around a picture before decoding it: a corner is where decoders leave a spike
    other_pictures: float = 0.15  # share of pictures outside the concepts, so that foreign pictures can be encoded too


@dataclass(frozen=True)
class ModelSetting:
    minutes: float
    dim: int
    layers: int
    heads: int
    batch: int
    augmentation: Augmentation
    learning_rate: float = 3e-3
    ema: float = 0.998
    weight_decay: float = 0.02


@dataclass(frozen=True)
class Sampling:
    """What the exported model asks its samplers to use unless told otherwise."""

    cfg: float = 2.0
    temperature: float = 0.9
    top_k: int = 0
    top_p: float = 0.9


@dataclass(frozen=True)
class Setting:
    name: str
    device: str
    autocast: bool
    concepts: tuple[str, ...] | None  # code points; None = every one
    tokenizer: TokenizerSetting
    model: ModelSetting
    sampling: Sampling = Sampling()
    caption_slots: int = 10
    caption_dim: int = 128
    learn_tags: bool = False  # give tags word vectors of their own; otherwise they become synonyms of the name
    drop_part: float = 0.10
    drop_caption: float = 0.10


CPU = Setting(
    name="cpu",
    device="cpu",
    autocast=False,
    concepts=tuple(COMMON_CONCEPTS),
    tokenizer=TokenizerSetting(
        minutes=36,
        config=VQConfig(1024, 8, (1, 1, 2, 4), base_channels=32, z_channels=128, num_res_blocks=1),
        crop_batch=16,
        whole_batch=4,
    ),
    model=ModelSetting(
        minutes=64,
        dim=192,
        layers=6,
        heads=3,
        batch=16,
        ema=0.995,
        augmentation=Augmentation(scale=(0.98, 1.02), shift=0.012, colour_jitter=4.0),
    ),
)

GPU = Setting(
    name="gpu",
    device="cuda",
    autocast=True,
    concepts=None,
    tokenizer=TokenizerSetting(
        minutes=6,
        config=VQConfig(1024, 8, (1, 2, 2, 4), base_channels=32, z_channels=128, num_res_blocks=2),
        crop_batch=256,
        whole_batch=128,
        other_pictures=0.0,
        augmentation=Augmentation(scale=(0.9, 1.05), colour_jitter=8.0, flip=True),
    ),
    model=ModelSetting(
        minutes=12,
        dim=384,
        layers=12,
        heads=6,
        batch=256,
        augmentation=Augmentation(scale=(0.9, 1.05), colour_jitter=8.0, flip=True),
        ema=0.999,
    ),
    learn_tags=True,
)

SETTINGS = {setting.name: setting for setting in (CPU, GPU)}
