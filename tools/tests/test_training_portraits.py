"""Portraits: their words, their colours and captions, and training on encoded views. No download."""

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from comfyui_specar.models.networks.vq import VQModel
from comfyui_specar.models.text.prompt_encoders import WordEncoder
from comfyui_specar.tests.support.tiny_training import CONCEPTS, DRAWN, SETTING, some_portraits, with_portraits
from comfyui_specar.tools.training import autoregressive, contact_sheet, tokenizer
from comfyui_specar.tools.training.autoencoder import HELD_OUT_EVERY, Sampler
from comfyui_specar.tools.training.autoregressive import Batches, Stored
from comfyui_specar.tools.training.captions import EXPRESSIONS, GLASSES, Captions
from comfyui_specar.tools.training.contact_sheet import first_words, portrait_prompts
from comfyui_specar.tools.training.data import AS_DRAWN
from comfyui_specar.tools.training.export import half, save
from comfyui_specar.tools.training.portrait_styles import DARK, EYES, PALETTES, PORTRAIT_STYLES, SKIN
from comfyui_specar.tools.training.portraits import portrait, words_of_portraits
from comfyui_specar.tools.training.settings import BACKGROUNDS, PORTRAITS
from PIL import Image


@pytest.fixture
def encoder() -> WordEncoder:
    captions = Captions(PORTRAITS, {code: {"label": "", "tags": []} for code in PORTRAITS.concepts})
    table = torch.zeros(len(captions.words), 4)
    return WordEncoder(
        table, captions.words, captions.stop_words(), captions.synonyms(), captions.nouns(), PORTRAITS.caption_slots
    )


@pytest.fixture
def drawn(tmp_path):
    return with_portraits(tmp_path)


def test_words_of_portraits_are_known_and_fit_a_caption():
    known = set(words_of_portraits())
    seen = Counter(word for words, _ in some_portraits(400) for word in words)
    assert seen.keys() == known and min(seen.values()) > 5
    assert max(len(words) for words, _ in some_portraits(400)) < PORTRAITS.caption_slots, "and a background"


def test_skin_tones_have_equal_shares():
    tones = Counter(word for words, _ in some_portraits(1000) for word in words if word.startswith("skin_"))
    assert tones.keys() == {f"skin_{tone}" for tone in SKIN}
    for count in tones.values():
        assert count / tones.total() == pytest.approx(1 / len(SKIN), abs=0.02)


def test_words_say_what_the_options_draw():
    for words, options in some_portraits(300):
        if options.get("hairColor") and (colour := next((w[5:] for w in words if w.startswith("hair_")), "")):
            assert PALETTES["hair"][colour] in options.values()
        assert not (EYES & set(words) and DARK & set(words)), "eyes behind dark glasses"
        assert ("robot" in words) == (words[0] == "bottts")


def test_prompts_of_the_contact_sheet_are_read_as_they_are_meant(encoder):
    rng = random.Random("contact sheet")
    styles = list(PORTRAIT_STYLES)
    prompts = portrait_prompts()
    assert len(prompts) == 64
    for text, colour in prompts:
        known, unknown = encoder.parse(text)
        assert not unknown and f"bg_{colour}" in known and len(known) <= PORTRAITS.caption_slots
    for i, (text, _) in enumerate(prompts[:48]):
        words = first_words(portrait(styles[i % len(styles)], rng)[0])
        background = rng.choice([each for each in BACKGROUNDS if not {each, f"hair_{each}"}.intersection(words)])
        assert {*words, f"bg_{background}"} == set(encoder.parse(text)[0]) and words[0] in PORTRAIT_STYLES


def test_first_words_are_style_hair_glasses_and_expression():
    words = "avataaars person short hair_red glasses sad shirt clothes_blue skin_tan beard".split()
    assert first_words(words) == "avataaars short hair_red glasses sad".split()
    assert first_words("personas person bald sad beard hair_red".split()) == "personas bald sad".split()
    assert first_words("bottts robot round green antenna smiling".split()) == "bottts robot round green smiling".split()


@pytest.mark.parametrize(
    ("prompt", "known"),
    [
        ("a person with wavy ginger hair", ["person", "curly", "hair_red"]),
        ("red-haired", ["hair_red"]),
        ("black suit, grey beanie", ["clothes_black", "jacket", "hat_gray", "beanie"]),
        ("dark hair, dark skin", ["hair_black", "skin_dark"]),
        ("smile, pixel art", ["smiling", "pixel-art"]),
        ("red heart, 3d, on a blue background", ["red", "heart", "3d", "bg_blue"]),
        ("a green robot with goggles", ["green", "robot", "visor"]),
    ],
)
def test_what_people_type(encoder, prompt, known):
    assert encoder.parse(prompt) == (known, [])


def test_captions_of_portraits_are_complete_or_short():
    captions = Captions(DRAWN, CONCEPTS)
    words, _ = some_portraits(1)[0]
    teal = list(BACKGROUNDS).index("teal")
    complete = captions.sample_portrait(words, teal, drop=0.0)
    assert {captions.words[i] for i in complete} == {*words, "bg_teal"}
    lengths = [len(captions.sample_portrait(words, teal, drop=0.1)) / len(complete) for _ in range(600)]
    assert min(lengths) < 0.4 and max(lengths) == 1 and np.mean(lengths) == pytest.approx(0.72, abs=0.05)
    glasses = captions.number["glasses"]
    assert all(glasses in captions.sample_portrait([*words, "glasses"], teal, drop=0.9) for _ in range(50))


def test_batches_have_portraits_in_their_share(drawn):
    sampler = Sampler(DRAWN, DRAWN.tokenizer, drawn, 0)
    assert sampler.whole(6).shape == (6, 3, 256, 256)
    held_out = sampler._portraits(100, held_out=True)[:, 0, 0, 0]
    assert set(held_out.tolist()) == {number // 2 for number in range(0, 357, HELD_OUT_EVERY)}
    assert {drawn.portraits.words[number][0] for number in range(0, 357, HELD_OUT_EVERY)} == PORTRAIT_STYLES.keys()
    vq = VQModel(DRAWN.tokenizer.config).eval()
    source = Batches(DRAWN, drawn, Captions(DRAWN, CONCEPTS), vq, 0)
    scenes = source.scenes(400)
    portraits = scenes.image >= source.emoji
    assert portraits.float().mean() == pytest.approx(0.5, abs=0.06) and (scenes.place[portraits] == AS_DRAWN).all()
    assert len(source.words(scenes)) == 400
    number = int(scenes.image[portraits][0]) - source.emoji
    [pixels] = source.pixels(type(scenes)(*(values[portraits][:1] for values in scenes)))
    assert float((pixels[0, 128, 128] + 1) * 127.5) == pytest.approx(number // 2, abs=1)


def test_views_that_were_encoded_beforehand_have_captions_drawn_anew(drawn, tmp_path, monkeypatch):
    monkeypatch.setattr(autoregressive, "VIEWS", 2)
    monkeypatch.setattr(autoregressive, "HELD_OUT_VIEWS", 2)
    captions, vq = Captions(DRAWN, CONCEPTS), VQModel(DRAWN.tokenizer.config).eval()
    batches = Batches(DRAWN, drawn, captions, vq, 1)
    scenes, [tokens] = batches.encoded(2)
    autoregressive.encode(DRAWN, lambda seed: Batches(DRAWN, drawn, captions, vq, seed), tmp_path / "views")
    stored = Stored(DRAWN, Captions(DRAWN), tmp_path / "views", 0)
    rows, dropped, found = stored.sample(8)
    assert rows.shape == (8, captions.slots) and dropped.shape == (8,) and found.dtype == torch.int64
    assert {tuple(row) for row in found.tolist()} <= {tuple(row) for row in tokens.tolist()}
    complete = {frozenset(row) for row in batches.words(scenes, held_out=True)}
    for row in rows.tolist():
        assert any(set(row) - {-1} <= words for words in complete)
    assert stored.sample(3, held_out=True)[2].shape == (3, 256)


def test_a_tokenizer_starts_from_a_trained_one(tmp_path):
    torch.manual_seed(0)
    trained, config = VQModel(SETTING.tokenizer.config), SETTING.tokenizer.config
    file = tmp_path / "vq.safetensors"
    save(file, half(trained.state_dict()), {"family": "vq", "config": {}, "margin": 1})
    same, larger = VQModel(config), VQModel(replace(config, codebook_size=32))
    assert tokenizer.take_weights(same, file) and not tokenizer.take_weights(larger, file)
    for model in (same, larger):
        assert torch.equal(model.encoder.conv_in.weight, trained.encoder.conv_in.weight.half().float())
    assert torch.equal(same.quantize.embedding.weight, trained.quantize.embedding.weight.half().float())
    assert len(larger.quantize.embedding.weight) == 32


def test_a_tokenizer_is_measured_by_style(drawn, tmp_path):
    torch.manual_seed(0)
    vq = VQModel(SETTING.tokenizer.config).eval()
    setting = replace(SETTING, portraits=0.5)
    found = tokenizer.measure_styles(setting, drawn, vq, tmp_path / "sheet.png", count=2)
    assert found.keys() == {"emoji", *PORTRAIT_STYLES} and all(0 < psnr < 30 for psnr in found.values())
    assert Image.open(tmp_path / "sheet.png").size == (1024, 256 * (1 + len(PORTRAIT_STYLES)))


def test_prompts_of_equal_length_are_a_batch_and_stand_in_their_place(encoder, tmp_path, monkeypatch):
    asked, batches = portrait_prompts(), []

    def sample(_model, rows, _method, seed, batch_size):
        batches.append(batch_size)
        assert len(rows) == batch_size and asked[seed][0] == texts[int(rows[0, 0, 0])]
        return SimpleNamespace(latent=rows[:, 0, 0])

    def decode(numbers):
        colours = [BACKGROUNDS[asked[int(i)][1]] for i in numbers]
        return torch.tensor(colours)[:, None, None].expand(-1, 256, 256, 3) / 255.0

    def encode_prompt(text):
        count = len(encoder.parse(text)[0])
        return [[torch.full((1, count, 1), float(texts.index(text))), {}]]

    texts = [text for text, _ in asked]
    model = SimpleNamespace(prompt_encoder=encoder, encode_prompt=encode_prompt, encode_features=lambda rows: rows)
    monkeypatch.setattr(contact_sheet.api, "load_model", lambda _: model)
    monkeypatch.setattr(contact_sheet.api, "load_image_decoder", lambda _: SimpleNamespace(decode=decode))
    monkeypatch.setattr(contact_sheet.api, "sample", sample)
    assert contact_sheet.draw(tmp_path, tmp_path / "sheet.jpg") == 1.0
    assert sum(batches) == 64 and max(batches) == 8 and len(batches) < 24
    last = np.asarray(Image.open(tmp_path / "sheet.jpg"))[-128, -128].astype(int)
    assert np.abs(last - BACKGROUNDS[asked[-1][1]]).max() < 8


def test_hard_negatives_differ_in_one_word():
    captions = Captions(replace(DRAWN, fill_slots=True, caption_slots=9), CONCEPTS)
    said = "avataaars person long hair_red smiling glasses bg_teal".split()
    own, seen = [captions.number[word] for word in said], set()
    for _ in range(200):
        negatives = captions.hard_negatives(own)
        for kind, gone in {"expression": "smiling", "glasses": "glasses", "hair": "hair_red"}.items():
            other = {captions.words[i] for i in negatives[kind]}
            [new] = other - {*said} or [""]
            assert {*said} - other == {gone} and (new or kind == "glasses")
            seen.add((kind, new))
    news = {kind: {new for each, new in seen if each == kind} for kind in negatives}
    assert news["glasses"] == {"sunglasses", ""} and news["expression"] == EXPRESSIONS - {"smiling"}
    assert len(news["hair"]) == 9 and all(new.startswith("hair_") for new in news["hair"])
    bare = [number for number in own if number != captions.number["glasses"]]
    assert {captions.words[i] for i in captions.hard_negatives(bare)["glasses"]} & GLASSES, "added"
    assert captions.hard_negatives([captions.number[word] for word in ("dog", "bg_teal")]) == {}
    rows = torch.tensor(captions.padded([own[-1:], own]))
    negatives, index = autoregressive.hard_negatives(captions, rows, torch.tensor([False, False]), 3)
    assert index.tolist() == [1, 1, 1] and negatives.shape == (3, 9)
    assert all({*row.tolist()} != {*own} for row in negatives)
    negatives, index = autoregressive.hard_negatives(captions, rows, torch.tensor([False, True]), 2)
    assert torch.equal(negatives, rows[index]), "no portrait"
    p = torch.tensor([0.2, 0.6])
    posterior = (p / p.sum()).log().neg().mean()
    torch.testing.assert_close(autoregressive.contrastive_loss(-p.log(), -p.flip(0).log()), posterior)


def test_words_are_measured_by_style(drawn):
    torch.manual_seed(0)
    captions, vq = Captions(DRAWN, CONCEPTS), VQModel(DRAWN.tokenizer.config).eval()
    model = autoregressive.TextToImage(DRAWN, len(captions.words)).eval()
    batches = Batches(DRAWN, drawn, captions, vq, 0)
    found = autoregressive.measure_words(model, captions, batches, 20)
    assert found.keys() <= PORTRAIT_STYLES.keys() and {kind for each in found.values() for kind in each} >= {"hair"}
    assert any(abs(nats) > 0.01 for each in found.values() for nats in each.values())
    torch.nn.init.zeros_(model.words.weight)
    found = autoregressive.measure_words(model, captions, batches, 20)
    assert all(abs(nats) < 1e-3 for each in found.values() for nats in each.values()), "all words are the same"
