"""The classifier of the quality benchmark: its labels, its views, its file, and that it learns."""

import pytest
import torch
from comfyui_specar.tests.support.tiny_training import SETTING, images, square
from comfyui_specar.tools.benchmarks import quality_sources
from comfyui_specar.tools.benchmarks.quality_cases import Prompt
from comfyui_specar.tools.training import classifier
from comfyui_specar.tools.training.classifier import LABELS, Classifier, damaged, halved, labels_of, train, views_of
from comfyui_specar.tools.training.export import half, save
from comfyui_specar.tools.training.settings import BACKGROUNDS, COMMON_CONCEPTS, Augmentation
from comfyui_specar.tools.training.views import Scenes

STILL = Augmentation(scale=(1.0, 1.0), shift=0.0, colour_jitter=0.0)


def test_labels_are_those_of_the_scene():
    views = views_of(images(), SETTING, STILL, seed=0)
    scenes = views.scenes(64)
    labels = labels_of(views, scenes)
    for (subject, style, background), image, wanted in zip(
        labels.tolist(), scenes.image.tolist(), scenes.background, strict=True
    ):
        assert LABELS["subject"][subject] == COMMON_CONCEPTS[views.images.code[image]]
        assert LABELS["style"][style] == LABELS["style"][views.images.style[image]] and background == wanted
    assert {part.shape for part in views.encoded(2)[1]} == {(2, 3, 256, 256)}


def test_features_do_not_depend_on_how_an_image_is_made_smaller():
    model = Classifier().eval()
    small = torch.rand(2, 3, 128, 128) * 2 - 1
    large = small.repeat_interleave(2, 2).repeat_interleave(2, 3)
    with torch.no_grad():
        assert torch.allclose(model.features(small), model.features(large), atol=1e-5)
    assert model.features(small).shape == (2, 128) and model.classes(model.features(small)).shape == (2, 3)


def test_halved_images_are_the_same_at_half_the_size():
    whole = images()
    found = halved(whole)
    assert found.rgba.shape == (9, 4, 128, 128) and found.rgba.dtype == torch.uint8 and found.code == whole.code
    assert torch.equal(found.rgba, whole.rgba[:, :, ::2, ::2])  # of squares with even borders


def test_damage_differs_between_images_and_is_bounded():
    generator = torch.Generator().manual_seed(0)
    pixels = torch.zeros(32, 3, 32, 32)
    spread = damaged(pixels, generator).std((1, 2, 3))
    assert spread.min() < 0.02 < 0.08 < spread.max() < classifier.NOISE * 1.1


def test_it_learns_and_another_run_gives_the_same(monkeypatch):
    monkeypatch.setattr(classifier, "BATCH", 16)
    model = train(images(), SETTING, steps=60)
    found = classifier.held_out_accuracy(model, images(), SETTING, 100)
    assert set(found) == {*LABELS, "all"} and found["all"] <= min(found[name] for name in LABELS)
    assert found["background"] > 0.5, "a twelfth by chance; subjects and styles all look the same here"
    assert classifier.held_out_accuracy(model, images(), SETTING, 100) == found
    assert torch.equal(train(images(), SETTING, 2).stem[0].weight, train(images(), SETTING, 2).stem[0].weight)


def test_the_command_writes_a_file_that_says_how_good_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(classifier, "load_images", lambda cache: images())
    monkeypatch.setattr(classifier, "BATCH", 2)
    monkeypatch.setattr(classifier, "CPU", SETTING)
    monkeypatch.setattr(torch, "set_flush_denormal", lambda on: True)  # would stay on for all later tests
    monkeypatch.setattr("sys.argv", ["classifier", "--out", str(tmp_path), "--steps", "2", "--held-out", "10"])
    classifier.main()
    checkpoint = classifier.open_checkpoint(tmp_path / classifier.FILE)
    assert set(checkpoint.metadata["held_out"]) == {"views", "decoded, default", "decoded, continuous"}
    model = Classifier.load(tmp_path / classifier.FILE)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, checkpoint.tensors[name].float()) and checkpoint.tensors[name].dtype == torch.float16


def test_a_file_of_other_labels_is_refused(tmp_path):
    labels = {name: list(names) for name, names in LABELS.items()}
    save(tmp_path / "x.safetensors", half(Classifier().state_dict()), {"labels": labels | {"style": ["oil"]}})
    with pytest.raises(ValueError, match="train"):
        Classifier.load(tmp_path / "x.safetensors")


def test_source_views_show_what_the_prompt_says(monkeypatch):
    monkeypatch.setattr(quality_sources, "CPU", SETTING)
    subjects, shown = LABELS["subject"], images()
    shown.rgba = torch.cat([square(256, 40 + 8 * i) for i in range(9)])
    wanted = [Prompt(subjects.index("dog"), 2, 4), Prompt(subjects.index("heart"), 0, 1)]
    source = views_of(shown, SETTING, SETTING.model.augmentation, seed=0)
    for prompt, view in zip(wanted, quality_sources.views(shown, wanted), strict=True):
        image = next(
            i
            for i in range(9)
            if shown.style[i] == prompt.style and COMMON_CONCEPTS[shown.code[i]] == subjects[prompt.subject]
        )
        assert torch.equal(view, source.pixels(Scenes(*torch.tensor([[image], [prompt.background], [0]]))))
        corner = (view[0, :, 1, 1] + 1) * 127.5
        apart = (corner - torch.tensor(list(BACKGROUNDS.values())[prompt.background]).float()).abs()
        assert apart.max() <= SETTING.model.augmentation.colour_jitter + 0.01
