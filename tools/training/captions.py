"""The vocabulary of the model, and random training captions.

A caption is a bag of words: a style, the object, and the background as one word (``bg_blue`` for "on a blue
background"), because LlamaGen's attention averages a prompt.
"""

import random
import re
from collections import Counter

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

# Tags that describe rather than name: "happy dog" must not become a smiley and a dog.
VAGUE = frozenset(
    "adorbs antarctica bamboo body bright celebrate christmas cold country creature dead desert diet drought eat "
    "elegant emotion excited eye eyes face family fantasy farm fast grinning happy haunting health hot lmao lol man "
    "medium morning mouth nature open potassium pretty rain rays ripe royal scary sea settle shedding silly smiling "
    "snow sport steaming surprise sweet travel tropical weather where win without wrapped yolo".split()
)


MOST_WORDS = 7  # of a caption: style, subject, background, colour, and three of a place


def background_word(colour: str) -> str:
    return f"bg_{colour}"


def split_words(text: str) -> list[str]:
    """Lower-case words of letters and digits, without stop words."""
    return [word for word in re.findall(r"[a-z0-9]+", text.lower()) if word not in STOP_WORDS]


class Captions:
    """The vocabulary of a setting, and random captions."""

    def __init__(self, setting: Setting, concepts: dict[str, dict], seed: int = 0) -> None:
        self.names = {code: COMMON_CONCEPTS[code] for code in setting.concepts}
        described = {
            code: {name, *(word for text in _texts(concepts[code]) for word in split_words(text))}
            for code, name in self.names.items()
        }
        owners = Counter(word for words in described.values() for word in words)
        unsuitable = VAGUE | BACKGROUNDS.keys() | set(PLACE_WORDS)
        self.tags = {
            word: self.names[code]
            for code, words in described.items()
            for word in words - {self.names[code]} - unsuitable
            if owners[word] == 1 and len(word) > 2
        }
        known = (*STYLES, *map(background_word, BACKGROUNDS), *COLOURS, *PLACE_WORDS)
        self.words = [*known, *sorted(set(self.names.values()) - set(known))]
        self.number = {word: i for i, word in enumerate(self.words)}
        self.slots = min(setting.caption_slots, MOST_WORDS)
        self.random = random.Random(seed)

    def synonyms(self) -> dict[str, str]:
        """Unknown word -> known word: the tables above, and tags of a single concept."""
        colours = {background_word(word): background_word(colour) for word, colour in COLOUR_SYNONYMS.items()}
        table = {**self.tags, **SYNONYMS, **COLOUR_SYNONYMS, **colours}
        known = self.number
        return {word: target for word, target in sorted(table.items()) if word not in known and target in known}

    def padded(self, rows: list[list[int]]) -> list[list[int]]:
        """Captions of one length, -1 on the left."""
        return [[-1] * (self.slots - len(row)) + row for row in rows]

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


def _texts(concept: dict) -> list[str]:
    """The label, and the tags of one word: longer tags are phrases that prompts rarely contain."""
    return [concept["label"], *(tag for tag in concept["tags"] if re.fullmatch(r"[a-z0-9]+", tag.lower()))]
