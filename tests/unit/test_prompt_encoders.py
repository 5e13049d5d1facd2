"""Prompt to features: the word table of the bundled model, class names and numbers."""

import json
import re
import time

import pytest
import torch
from comfyui_specar.limits.printable import printable
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.model_loaders.families.llamagen import class_names
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError
from comfyui_specar.models.text.prompt_encoders import ClassEncoder, WordEncoder
from safetensors.torch import save_file

from ..support.tiny import CAPTION, SLOTS, write_llamagen, write_words

WORDS = ["cat", "dog", "red", "bus", "face", "grin", "glasses", "bg_blue", "bg_dark-red", "heart"]
STOP = ["a", "an", "the", "with", "and", "of"]
SYNONYMS = {"kitten": "cat", "smiley": "grin face", "crimson": "red"}


@pytest.fixture
def encoder():
    table = torch.arange(len(WORDS), dtype=torch.float16)[:, None] * torch.ones(CAPTION, dtype=torch.float16)
    return WordEncoder(table, WORDS, STOP, SYNONYMS, {"background": "bg"}, slots=6)


@pytest.mark.parametrize("fills", [False, True])
def test_words_fill_all_slots_if_the_file_says_so(tmp_path, fills):
    write_words(tmp_path, CAPTION, fills=fills)
    encoder = WordEncoder.open(tmp_path / "text_encoder.safetensors", slots=5)
    red, cat = encoder.table[:2]
    assert torch.equal(encoder.encode("red cat")[0], torch.stack([red, cat, red, cat, red] if fills else [red, cat]))
    assert encoder.encode("").shape == (1, 0, CAPTION)


@pytest.mark.parametrize(
    ("prompt", "known", "unknown"),
    [
        ("a red cat", ["red", "cat"], []),
        ("A RED Cat!", ["red", "cat"], []),
        ("red cat, on a blue background", ["red", "cat", "bg_blue"], []),
        ("a dog on the dark-red background.", ["dog", "bg_dark-red"], []),
        ("a dog with blue background", ["dog", "bg_blue"], []),
        ("a dog against an blue background", ["dog", "bg_blue"], []),
        ("blue background, dog", ["bg_blue", "dog"], []),
        ("a blue dog", ["dog"], ["blue"]),
        ("cats and dogs and buses", ["cat", "dog", "bus"], []),
        ("glasses", ["glasses"], []),
        ("two kittens", ["cat"], ["two"]),
        ("a crimson smiley", ["red", "grin", "face"], []),
        ("cat cat cats kitten", ["cat"], []),
        ("a quantum cat of the deep", ["cat"], ["quantum", "deep"]),
        ("", [], []),
        ("the of and", [], []),
        ("猫 ♥ 12%", [], ["猫", "♥", "12"]),
        ("红色cat❤️，Café — 🐼👍", ["cat"], ["红色", "❤", "café", "🐼", "👍"]),
        ("'cat' - dog--", ["cat", "dog"], []),
        ("a red cat on a (blue) background", ["red", "cat", "bg_blue"], []),
        ("[red:0.2] {cat} on a ((blue)) background", ["red", "cat", "bg_blue"], []),
    ],
)
def test_words_of_a_prompt(encoder, prompt, known, unknown):
    assert encoder.parse(prompt) == (known, unknown)


@pytest.mark.parametrize(
    ("word", "known"),
    [("catt", "cat"), ("kiten", "kitten"), ("backgroud", "background"), ("bleu", "blue"), ("quantum", "")],
)
def test_a_misspelled_word_resembles_a_known_one(encoder, word, known):
    assert encoder.resembling(word) == known


@pytest.fixture
def portraits():
    """An encoder whose hair, clothes and backgrounds have colours of their own."""
    words = ["person", "curly", "long", "shirt", "red", "bg_blue", "hair_red", "hair_black", "clothes_blue"]
    nouns = {"background": "bg", "hair": "hair", "curly": "hair", "long": "hair", "shirt": "clothes", "tee": "clothes"}
    synonyms = {"tee": "shirt", "hair_dark": "hair_black", "blond": "hair_red"}
    return WordEncoder(torch.zeros(len(words), 4), words, [*STOP, "hair"], synonyms, nouns, slots=16)


@pytest.mark.parametrize(
    ("prompt", "known", "unknown"),
    [
        ("person with red hair, blue shirt", ["person", "hair_red", "clothes_blue", "shirt"], []),
        ("red curly hair", ["hair_red", "curly"], []),
        ("curly red hair", ["curly", "hair_red"], []),
        ("long curly red hair", ["long", "curly", "hair_red"], []),
        ("red long curly hair", ["hair_red", "long", "curly"], []),
        ("a blue tee on a blue background", ["clothes_blue", "shirt", "bg_blue"], []),
        ("dark hair", ["hair_black"], []),
        ("a blond person", ["hair_red", "person"], []),
        ("a red person", ["red", "person"], []),
        ("red shirt", ["red", "shirt"], []),
        ("blue hair", [], ["blue"]),
    ],
)
def test_a_colour_belongs_to_the_noun_after_it(portraits, prompt, known, unknown):
    assert portraits.parse(prompt) == (known, unknown)


def test_notices_name_the_nouns_of_colours(portraits):
    [notice] = portraits.notices("a blue person, quantum")
    assert "blue (only as the colour of background, shirt)" in notice
    assert portraits.known_words()[-4:] == ["blue background", "red hair", "black hair", "blue shirt"]


def test_features_are_rows_of_the_table_in_order_as_many_as_there_are_slots(encoder):
    features = encoder.encode("a dog with glasses on a blue background")
    assert features.shape == (1, 3, CAPTION) and features.dtype == torch.float32
    assert features[0, :, 0].tolist() == [1, 6, 7]
    assert encoder.encode(" ".join(WORDS[:7])).shape == (1, 6, CAPTION)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a red cat", []),
        ("a cat, catt", [r"ignores .*: catt \(cat\?\)\.$"]),
        ("a quantum cat, catt", [r"ignores .*: quantum, catt \(cat\?\)\. Try: .*\. All \d+ words: AR Model Info\.$"]),
        ("a blue cat", [r"ignores these words: blue \(only as the colour of background\)\.$"]),
        (" ".join(WORDS[:6]), []),
        ("red cat dog bus face grin on a dark-red background", [r"leaves out: dark-red background\.$"]),
        (f"quantum {', '.join(WORDS[:7])}, heart", ["ignores .*: quantum", r"at most 6 words .*: glasses, heart\.$"]),
    ],
)
def test_what_is_left_out_of_a_prompt_is_said(encoder, prompt, expected):
    found = encoder.notices(prompt)
    assert len(found) == len(expected) and all(map(re.search, expected, found))


@pytest.mark.parametrize("prompt", ["quantum entanglement", "the", "猫", "a red quantum", "a quantum cat"])
def test_where_a_word_resembles_none_those_that_are_known_are_named(encoder, prompt):
    [notice] = encoder.notices(prompt)
    assert " Try: heart, cat, dark-red background. All 10 words: AR Model Info." in notice


@pytest.mark.parametrize("prompt", ["quantum", "the"])
def test_a_prompt_without_a_known_word_is_as_an_empty_one(encoder, prompt):
    assert not encoder.encode(prompt).numel() and not encoder.encode("").numel()
    assert encoder.notices(prompt)[0].startswith(f"The model knows none of these words: {prompt}. ")
    assert encoder.notices("") == []


def test_the_word_table_beside_a_model_reads_its_prompts(tmp_path):
    path = write_llamagen(tmp_path / "model.safetensors", True, caption_slots=SLOTS)
    write_words(tmp_path, CAPTION)
    model = load_model(path)
    [[features, extra]] = model.encode_prompt("a red cat")
    assert features.shape == (1, 2, CAPTION) and extra["ar"] == {"family": "llamagen-t2i", "text": "a red cat"}


def test_other_files_are_no_word_tables(tmp_path):
    save_file({"x": torch.zeros(1)}, str(tmp_path / "text_encoder.safetensors"))
    with pytest.raises(CheckpointError, match="text_encoder.safetensors.*word-table"):
        WordEncoder.open(tmp_path / "text_encoder.safetensors", 6)


def test_a_missing_text_encoder_is_reported_when_it_is_used(tmp_path):
    model = load_model(write_llamagen(tmp_path / "model.safetensors", True))
    with pytest.raises(FileNotFoundError, match="model.safetensors.*flan-t5-xl.*text_encoders"):
        model.encode_prompt("a cat")
    assert model.encode_features(torch.zeros(1, 2, CAPTION))


# Classes


@pytest.fixture
def classes():
    return ClassEncoder(4, ["tench, Tinca tinca", "goldfish", "great white shark, white shark", "hammerhead"])


NUMBERS = [("0", 0), ("3", 3), (" 2 ", 2), ("goldfish", 1), ("Goldfish", 1), ("tinca tinca", 0), ("white shark", 2)]


@pytest.mark.parametrize(("text", "number"), [*NUMBERS, ("great white shark, white shark", 2)])
def test_class_names_and_numbers(classes, text, number):
    features = classes.encode(text)
    assert features.shape == (1, 1, 1) and features.item() == number


NEITHER = [("4", "0 to 3"), ("-1", "0 to 3"), ("", "class"), ("²", "class"), ("1.5", "class name")]


@pytest.mark.parametrize(("text", "words"), [*NEITHER, ("shark", "great white shark")])
def test_other_class_prompts_are_errors(classes, text, words):
    with pytest.raises(ValueError) as error:
        classes.encode(text)
    assert words in str(error.value) and repr(text) in str(error.value)


def test_without_names_only_numbers_are_offered():
    assert class_names(10) is None, "ImageNet's are of 1000 classes"
    with pytest.raises(ValueError) as error:
        ClassEncoder(10).encode("cat")
    assert str(error.value).endswith("number from 0 to 9.")


def test_a_gap_of_any_length_is_one(encoder):
    """Found with the prompt " " * 20_000, whose square takes the processor 12 seconds."""
    begun = time.process_time()
    prompt = "a dog on" + " " * 50_000 + "a blue" + "\t" * 50_000 + "background"
    assert encoder.parse(prompt) == (["dog", "bg_blue"], [])
    assert time.process_time() - begun < 5


def test_a_prompt_of_unknown_words_has_a_short_notice(encoder):
    [notice] = encoder.notices(" ".join([f"zq{i}" for i in range(5000)] * 2) + " cat " + "y" * 100_000)
    assert len(notice) < 500 and "zq5 and 4995 more." in notice


WRONG = [{"words": ["\x1b[31m"] * 2}, {"synonyms": {"x": "\u202ecat"}}, {"synonyms": {"x": "cat " * 500}}]


@pytest.mark.parametrize("part", [*WRONG, {"nouns": {"\n": "bg"}}, {"stop_words": ["a"] * 10_001}, {"words": ["cat"]}])
def test_words_of_a_table_are_short_printable_and_as_many_as_it_has_rows(tmp_path, part):
    """Notices quote them, and a synonym stands for as many words as it has."""
    table = {"words": ["cat", "dog"], "stop_words": [], "synonyms": {}} | part
    file = tmp_path / "text.safetensors"
    save_file({"word_embeddings.weight": torch.zeros(2, 4)}, file, {"specar": json.dumps(table)})
    with pytest.raises(ValueError, match="printable string|not a word-table") as refused:
        WordEncoder.open(file, 4)
    assert printable(str(refused.value)) == str(refused.value)


def test_a_prompt_has_an_end(tmp_path):
    model = load_model(write_llamagen(tmp_path / "model.safetensors", True))
    with pytest.raises(ValueError, match="has 131073 characters; at most 131072 are read"):
        model.encode_prompt("x" * 131_073)
