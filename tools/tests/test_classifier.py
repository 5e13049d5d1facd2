"""The classifier of the quality benchmark: its labels, its views, its file, and that it learns."""

from collections import Counter

import pytest
import torch
from comfyui_specar.tests.support.tiny_training import DRAWN, SETTING, images, square, with_portraits
from comfyui_specar.tools.benchmarks import quality_sources
from comfyui_specar.tools.benchmarks.quality_cases import Prompt
from comfyui_specar.tools.training import classifier
from comfyui_specar.tools.training.captions import View
from comfyui_specar.tools.training.classifier import (
    EMOJI_LABELS,
    NO_HAIR,
    PORTRAIT_LABELS,
    Classifier,
    damaged,
    numbered,
    shown,
    train,
    views_of,
)
from comfyui_specar.tools.training.export import half, save
from comfyui_specar.tools.training.settings import BACKGROUNDS, COMMON_CONCEPTS, SETTINGS, STYLES, Augmentation
from comfyui_specar.tools.training.views import Scenes

STILL = Augmentation(scale=(1.0, 1.0), shift=0.0, colour_jitter=0.0)


def test_labels_are_those_of_the_scene():
    views = views_of(images(), SETTING, STILL, seed=0)
    scenes = views.scenes(64)
    labels = numbered(map(shown, views.views(scenes)), EMOJI_LABELS)
    for (subject, style, background), image, wanted in zip(
        labels.tolist(), scenes.image.tolist(), scenes.background, strict=True
    ):
        assert EMOJI_LABELS["subject"][subject] == COMMON_CONCEPTS[views.images.code[image]]
        assert style == views.images.style[image] and background == wanted
    assert {part.shape for part in views.encoded(2)[1]} == {(2, 3, 256, 256)}


def test_portraits_are_told_apart_by_style_and_the_colour_of_hair_or_robot(tmp_path):
    views = views_of(with_portraits(tmp_path), DRAWN, STILL, seed=0)
    scenes = views.scenes(200)
    assert (scenes.image >= views.emoji).all(), "no emoji"
    labels, seen = numbered(map(shown, views.views(scenes)), PORTRAIT_LABELS), Counter()
    for (subject, style, background), view in zip(labels.tolist(), views.views(scenes), strict=True):
        name, words = PORTRAIT_LABELS["subject"][subject], view.words
        assert words[0] == PORTRAIT_LABELS["style"][style] and background == view.background
        colour, kind = name.split()
        if name == NO_HAIR:
            assert "robot" not in words and not any(word.startswith("hair_") for word in words)
        else:
            assert (f"hair_{colour}" if kind == "hair" else colour) in words
            assert (kind == "robot") == (words[0] == "bottts")
        seen[kind] += 1
    assert set(seen) == {"hair", "robot"}


def test_features_do_not_depend_on_how_an_image_is_made_smaller():
    model = Classifier(EMOJI_LABELS).eval()
    small = torch.rand(2, 3, 128, 128) * 2 - 1
    large = small.repeat_interleave(2, 2).repeat_interleave(2, 3)
    with torch.no_grad():
        assert torch.allclose(model.features(small), model.features(large), atol=1e-5)
    assert model.features(small).shape == (2, 128) and model.classes(model.features(small)).shape == (2, 3)


def test_damage_differs_between_images_and_is_bounded():
    generator = torch.Generator().manual_seed(0)
    pixels = torch.zeros(32, 3, 32, 32)
    spread = damaged(pixels, generator).std((1, 2, 3))
    assert spread.min() < 0.02 < 0.08 < spread.max() < classifier.NOISE * 1.1


def test_it_learns_and_another_run_gives_the_same(monkeypatch):
    monkeypatch.setattr(classifier, "BATCH", 16)
    model = train(images(), SETTING, steps=60)
    found = classifier.held_out_accuracy(model, images(), SETTING, 100)
    assert set(found) == {*EMOJI_LABELS, "all"} and found["all"] <= min(found[name] for name in EMOJI_LABELS)
    assert found["background"] > 0.5, "a twelfth by chance; subjects and styles all look the same here"
    assert classifier.held_out_accuracy(model, images(), SETTING, 100) == found
    assert torch.equal(train(images(), SETTING, 2).stem[0].weight, train(images(), SETTING, 2).stem[0].weight)


def test_the_command_writes_a_file_that_says_how_good_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(classifier, "load_images", lambda cache, portraits: images())
    monkeypatch.setattr(classifier, "BATCH", 2)
    monkeypatch.setitem(SETTINGS, "emoji", SETTING)
    monkeypatch.setattr(classifier, "BUNDLED", {"default": SETTING, "continuous": SETTING})
    monkeypatch.setattr(torch, "set_flush_denormal", lambda on: True)  # would stay on for all later tests
    monkeypatch.setattr("sys.argv", ["classifier", "--out", str(tmp_path), "--steps", "2", "--held-out", "10"])
    classifier.main()
    checkpoint = classifier.open_checkpoint(tmp_path / classifier.FILE)
    assert set(checkpoint.metadata["held_out"]) == {"views", "decoded, default", "decoded, continuous"}
    model = Classifier.load(tmp_path / classifier.FILE, EMOJI_LABELS)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, checkpoint.tensors[name].float()) and checkpoint.tensors[name].dtype == torch.float16


def test_a_file_of_other_labels_is_refused(tmp_path):
    save(tmp_path / "x.safetensors", half(Classifier(EMOJI_LABELS).state_dict()), {"labels": PORTRAIT_LABELS})
    with pytest.raises(ValueError, match="train"):
        Classifier.load(tmp_path / "x.safetensors", EMOJI_LABELS)


def test_source_views_show_what_the_prompt_says():
    shown = images()
    shown.rgba = torch.cat([square(256, 40 + 8 * i) for i in range(9)])
    wanted = [Prompt("dog", "flat", "orange"), Prompt("heart", "3d", "black")]
    source = views_of(shown, SETTING, SETTING.model.augmentation, seed=0)
    for prompt, view in zip(wanted, quality_sources.views(shown, SETTING, wanted), strict=True):
        image = next(
            i
            for i in range(9)
            if STYLES[shown.style[i]] == prompt.style and COMMON_CONCEPTS[shown.code[i]] == prompt.subject
        )
        background = list(BACKGROUNDS).index(prompt.background)
        assert torch.equal(view, source.pixels(Scenes(*torch.tensor([[image], [background], [0]]))))
        corner = (view[0, :, 1, 1] + 1) * 127.5
        apart = (corner - torch.tensor(BACKGROUNDS[prompt.background]).float()).abs()
        assert apart.max() <= SETTING.model.augmentation.colour_jitter + 0.01


def test_source_views_of_portraits_show_one_that_is_as_the_prompt_says(tmp_path):
    drawn = with_portraits(tmp_path)
    wanted = [Prompt("red hair", "personas", "orange"), Prompt("blue robot", "bottts", "black")]
    for prompt, view in zip(wanted, quality_sources.views(drawn, DRAWN, wanted), strict=True):
        number = round(float(view[0, 0, 128, 128] + 1) * 127.5)  # two portraits have the same red
        both = (shown(View(0, words=drawn.portraits.words[2 * number + i]))[:2] for i in (0, 1))
        assert prompt[:2] in both
