"""The vocabulary of the model, and random training captions.

A caption is a bag of words: a style, the object, and the background as one word (``bg_blue`` for "on a blue
background"), because LlamaGen's attention averages a prompt. So a portrait's hair, clothes, hat and skin have their
colours in one word, too.
"""

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .portrait_styles import HAIR, NOUNS, PALETTES
from .portraits import words_of_portraits
from .settings import BACKGROUNDS, COLOURS, COMMON_CONCEPTS, PLACE_WORDS, PLACES, STYLES, Setting

STOP_WORDS = (
    "a an and at background beautiful big by cartoon center centre colored coloured corner cute drawing emoji for from "
    "front funny icon illustration image in is it large lovely middle nice of old on one over photo photograph picture "
    "please pretty side simple single some sticker style the this to very with"
).split()


def _by_synonym(words: dict[str, str]) -> dict[str, str]:
    """word -> its synonyms, turned around."""
    return {synonym: word for word, synonyms in words.items() for synonym in synonyms.split()}


# Synonyms of background colours and of other words. Only entries whose target is in the vocabulary are shipped.
COLOUR_SYNONYMS = _by_synonym(
    {
        "gray": "grey",
        "purple": "violet lilac",
        "teal": "cyan turquoise",
        "blue": "navy",
        "red": "crimson",
        "yellow": "golden gold",
        "pink": "magenta rosa",
        "black": "dark",
    }
)
SYNONYMS = _by_synonym(
    {
        "3d": "render rendered fluent",
        "noto": "google",
        "flat": "2d vector",
        "smiley": "smile emoticon grin laugh",
        "heart": "love",
        "sun": "sunshine",
        "moon": "crescent",
        "cat": "kitten kitty",
        "dog": "puppy doggy hound",
        "pig": "piglet piggy",
        "frog": "toad",
        "penguin": "bird",
        "fish": "goldfish",
        "watermelon": "melon",
        "burger": "hamburger cheeseburger",
        "donut": "doughnut",
        "coffee": "cup mug espresso tea",
        "car": "automobile auto vehicle",
        "rocket": "spaceship spacecraft missile",
        "sailboat": "boat ship yacht",
        "house": "home cottage building",
        "tree": "oak forest",
        "rose": "flower tulip",
        "mushroom": "toadstool fungus",
        "umbrella": "parasol",
        "ball": "football soccer",
        "gift": "present package",
        "crown": "tiara king",
        "ghost": "spirit",
        "robot": "android bot",
        "skull": "skeleton",
        "small": "little tiny",
        "top": "upper above",
        "bottom": "lower below",
    }
)

# The same for portraits, whose words have precedence, and words that say nothing in their prompts.
PORTRAIT_SYNONYMS = _by_synonym(
    {
        "person": "people human avatar somebody someone adult man men woman women boy girl guy lady kid child",
        "avataaars": "avataaar avataars",
        "personas": "persona",
        "pixel-art": "pixel pixelart pixelated 8-bit",
        "bottts": "botts",
        "bald": "hairless",
        "curly": "curls wavy frizzy",
        "fringe": "bangs",
        "bun": "topknot",
        "pigtails": "bunches",
        "braids": "braid braided plaits plait cornrows",
        "mohawk": "mohican",
        "spiky": "spiked spikes",
        "dreadlocks": "dreads locs",
        "beard": "bearded",
        "moustache": "mustache",
        "glasses": "spectacles eyeglasses",
        "sunglasses": "shades",
        "beanie": "bobble-hat",
        "headscarf": "hijab scarf veil",
        "headband": "hairband",
        "earrings": "earring",
        "smiling": "smile smiles happy cheerful grin grinning joyful",
        "laughing": "laugh laughs laughter",
        "sad": "unhappy frowning frown sorrowful",
        "surprised": "surprise astonished amazed shocked",
        "angry": "furious mad cross",
        "neutral": "serious calm expressionless",
        "sleepy": "sleeping asleep tired drowsy",
        "loving": "in-love lovestruck",
        "shirt": "tshirt t-shirt tee blouse",
        "sweater": "jumper pullover",
        "jacket": "blazer coat suit",
        "hoodie": "hoody sweatshirt",
        "overalls": "dungarees",
        "collar": "collared",
        "checkered": "checked chequered plaid",
        "antenna": "aerial antennae",
        "horns": "horned",
        "bulb": "lightbulb lamp",
        "visor": "goggles",
        "square": "boxy",
        "hair_blond": "blond blonde",
        "hair_brown": "brunette",
        "hair_red": "redhead ginger",
        "skin_tan": "tanned",
    }
)
NOUN_SYNONYMS = {"clothing": "clothes", "outfit": "clothes", "skinned": "skin", "haired": "hair"}  # stop words, too
COLOURS_OF = {  # synonyms of the colours of one noun
    "hair": _by_synonym(
        {"black": "dark", "blond": "blonde golden yellow", "red": "ginger auburn orange", "gray": "silver"}
    ),
    "skin": _by_synonym({"light": "pale fair", "tan": "tanned"}),
}
PORTRAIT_STOP_WORDS = (
    "art character clothes face faced hair has head looking portrait skin wearing wears who whose".split()
)

# Tags that describe rather than name: "happy dog" must not become a smiley and a dog.
VAGUE = frozenset(
    "adorbs antarctica bamboo body bright celebrate christmas cold country creature dead desert diet drought eat "
    "elegant emotion excited eye eyes face family fantasy farm fast grinning happy haunting health hot lmao lol man "
    "medium morning mouth nature open potassium pretty rain rays ripe royal scary sea settle shedding silly smiling "
    "snow sport steaming surprise sweet travel tropical weather where win without wrapped yolo".split()
)


GLASSES = {"glasses", "sunglasses"}
EXPRESSIONS = {"smiling", "laughing", "sad", "surprised", "angry", "sleepy", "loving"}
ROBOTS = {"smiling", "laughing", "neutral", "teeth"}  # their mouths
MOST_WORDS = 7  # of an emoji's caption: style, subject, background, colour, and three of a place
FEW_WORDS, MOST_DROPPED = 0.5, 0.8  # share of captions of portraits with few words; the most that one leaves out


def background_word(colour: str) -> str:
    return f"bg_{colour}"


def on_background(colour: str) -> str:
    """How prompts ask for it."""
    return f"on {'an' if colour == 'orange' else 'a'} {colour} background"


def split_words(text: str) -> list[str]:
    """Lower-case words of letters and digits, without stop words."""
    return [word for word in re.findall(r"[a-z0-9]+", text.lower()) if word not in STOP_WORDS]


class View(NamedTuple):
    """What an image shows, in what a caption is made of: an emoji, or (code "") a portrait with its words."""

    background: int
    code: str = ""
    style: int = 0
    colour: str | None = None
    place: int = 0
    words: Sequence[str] = ()


class Captions:
    """The vocabulary of a setting, and random captions."""

    def __init__(self, setting: Setting, concepts: Mapping[str, dict] | None = None, seed: int = 0) -> None:
        """concepts: code point -> label and tags, of which synonyms are made."""
        concepts = concepts or dict.fromkeys(setting.concepts, {"label": "", "tags": []})
        self.names = {code: COMMON_CONCEPTS[code] for code in setting.concepts}
        described = {
            code: {name, *(word for text in _texts(concepts[code]) for word in split_words(text))}
            for code, name in self.names.items()
        }
        owners = Counter(word for words in described.values() for word in words)
        portraits = words_of_portraits() if setting.portraits else []
        unsuitable = VAGUE | BACKGROUNDS.keys() | {*PLACE_WORDS, *portraits}
        self.tags = {
            word: self.names[code]
            for code, words in described.items()
            for word in words - {self.names[code]} - unsuitable
            if owners[word] == 1 and len(word) > 2
        }
        known = (*STYLES, *map(background_word, BACKGROUNDS), *COLOURS, *PLACE_WORDS)
        self.words = [*known, *sorted({*self.names.values(), *portraits} - set(known))]
        self.number = {word: i for i, word in enumerate(self.words)}
        self.fills = setting.fill_slots
        self.slots = setting.caption_slots if portraits else min(setting.caption_slots, MOST_WORDS)
        self.random = random.Random(seed)

    def synonyms(self) -> dict[str, str]:
        """Unknown word -> known word: the tables above, and tags of a single concept."""
        table = {**self.tags, **SYNONYMS, **COLOUR_SYNONYMS}
        for prefix in ("bg", *PALETTES):
            colours = COLOUR_SYNONYMS | COLOURS_OF.get(prefix, {})
            table |= {f"{prefix}_{word}": f"{prefix}_{colour}" for word, colour in colours.items()}
        known = self.number
        table |= {word: target for word, target in PORTRAIT_SYNONYMS.items() if target in known}
        table |= {f"{colour}-haired": f"hair_{colour}" for colour in HAIR}
        return {word: target for word, target in sorted(table.items()) if word not in known and target in known}

    def stop_words(self) -> list[str]:
        """Words of prompts that say nothing."""
        return [word for word in (*STOP_WORDS, *PORTRAIT_STOP_WORDS, *NOUN_SYNONYMS) if word not in self.number]

    def nouns(self) -> dict[str, str]:
        """Noun before which a colour is one word with it -> the prefix of that word."""
        known = {noun: prefix for noun, prefix in NOUNS.items() if any(w.startswith(f"{prefix}_") for w in self.words)}
        others = {**PORTRAIT_SYNONYMS, **NOUN_SYNONYMS}
        return known | {word: known[noun] for word, noun in others.items() if noun in known}

    def padded(self, rows: list[list[int]]) -> list[list[int]]:
        """Captions of one length: repeated until they fill all slots, or with -1 on the left."""
        if self.fills:
            return [(row * self.slots)[: self.slots] for row in rows]
        return [[-1] * (self.slots - len(row)) + row for row in rows]

    def of(self, view: View, drop: float) -> list[int]:
        """Word numbers of one random caption of a view: see :meth:`sample_portrait` and :meth:`sample`."""
        if not view.code:
            return self.sample_portrait(view.words, view.background, drop)
        return self.sample(view.code, view.style, view.background, drop, view.colour, view.place)

    def sample(
        self, code: str, style: int, background: int, drop: float, colour: str | None = None, place: int = 0
    ) -> list[int]:
        """Word numbers of one random caption, in random order.

        Style and background are left out with probability ``drop`` each. colour: the new hue of the object, if any;
        place: 0 = large, i = small, at the i-th of PLACES; both are always in the caption ("top" implies "small",
        which half of these captions leave out).
        """
        parts = (STYLES[style], background_word(list(BACKGROUNDS)[background]))
        words = [self.names[code], *(word for word in parts if self.random.random() >= drop)]
        if colour is not None:
            words.append(colour)
        if place > 0:
            where = list(PLACES)[place - 1]
            words += [*where, *(("small",) if not where or self.random.random() < 0.5 else ())]
        self.random.shuffle(words)
        return [self.number[word] for word in words[-self.slots :]]

    def sample_portrait(self, words: Sequence[str], background: int, drop: float) -> list[int]:
        """Word numbers of one random caption of a portrait, in random order.

        Each of its words is left out with probability ``drop``; in half the captions with a larger one, because prompts
        are short. drop 0: none is left out. Glasses are never left out, so that a prompt without them gets none.
        """
        if drop and self.random.random() < FEW_WORDS:
            drop = self.random.uniform(drop, MOST_DROPPED)
        said = [*words, background_word(list(BACKGROUNDS)[background])]
        kept = [word for word in said if word in GLASSES or self.random.random() >= drop] or said[1:2]
        self.random.shuffle(kept)
        return [self.number[word] for word in kept[: self.slots]]

    def hard_negatives(self, row: list[int]) -> dict[str, list[int]]:
        """Captions that differ from a portrait's in one word of a kind, by kind: another expression, glasses (others,
        added, or left out), another colour of the hair. Other captions have none."""
        said, found = [self.words[i] for i in row], {}
        faces = ROBOTS if {"robot", "bottts"}.intersection(said) else EXPRESSIONS
        kinds = {"expression": faces, "glasses": {*GLASSES, ""}, "hair": {f"hair_{colour}" for colour in HAIR}}
        for kind, words in kinds.items():
            old = next((word for word in said if word in words), "")
            if old or (kind == "glasses" and "hair" in {word.partition("_")[0] for word in said}):
                new = self.random.choice(sorted(words - {old}))
                if changed := [*(word for word in said if word != old), *filter(None, [new])]:
                    self.random.shuffle(changed)
                    found[kind] = [self.number[word] for word in changed]
        return found


def _texts(concept: dict) -> list[str]:
    """The label, and the tags of one word: longer tags are phrases that prompts rarely contain."""
    return [concept["label"], *(tag for tag in concept["tags"] if re.fullmatch(r"[a-z0-9]+", tag.lower()))]
