"""What the training scripts feed the model: captions, augmentation, and the loss at their end. No download."""

from dataclasses import replace

import pytest
import torch
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.models.networks.vq import VQModel
from comfyui_specar.tests.support.closeness import assert_as_exact
from comfyui_specar.tests.support.tiny_training import CONCEPTS, SETTING, images, square
from comfyui_specar.tools.training import autoregressive, export, muon
from comfyui_specar.tools.training.autoregressive import Batches, TextToImage
from comfyui_specar.tools.training.captions import Captions
from comfyui_specar.tools.training.data import AS_DRAWN, augment, recolour
from comfyui_specar.tools.training.loop import rate
from comfyui_specar.tools.training.muon import orthogonalise
from comfyui_specar.tools.training.settings import BACKGROUNDS, COLOURS, PLACES, STYLES, Augmentation

STILL = Augmentation(scale=(1.0, 1.0), shift=0.0, colour_jitter=0.0)


@pytest.fixture
def captions() -> Captions:
    return Captions(SETTING, CONCEPTS, seed=1)


def test_word_table_and_synonyms(captions):
    assert captions.words[: len(STYLES)] == list(STYLES)
    assert "bg_blue" in captions.words and "dog" in captions.words
    table = captions.synonyms()
    assert table["puppy"] == "dog" and table["kitten"] == "cat"
    assert table["bg_grey"] == "bg_gray"
    assert "pet" not in table, "two concepts share this tag: it names neither"
    assert all(target in captions.words and word not in captions.words for word, target in table.items())


def test_captions_name_everything_or_drop_all_but_the_subject(captions):
    teal = list(BACKGROUNDS).index("teal")
    assert {captions.words[i] for i in captions.sample("1f436", 1, teal, drop=0.0)} == {"dog", "noto", "bg_teal"}
    seen = [[captions.words[i] for i in captions.sample("1f436", 1, teal, drop=0.15)] for _ in range(600)]
    assert all("dog" in words for words in seen)
    assert sum("noto" not in words for words in seen) / 600 == pytest.approx(0.15, abs=0.05)
    assert len({tuple(words) for words in seen}) > 10, "the order varies"


def test_augmentation_stays_in_its_ranges():
    ranges = Augmentation(scale=(0.9, 1.1), shift=0.05, colour_jitter=5.0)
    black = torch.full((200,), list(BACKGROUNDS).index("black"))
    pixels = augment(square().expand(200, -1, -1, -1), black, ranges, torch.Generator().manual_seed(3))
    inside = pixels[:, 0] > 0.0
    widths = inside.any(1).sum(1)
    assert 57 <= widths.min() < 61 and 67 < widths.max() <= 71
    columns = torch.arange(128.0)
    centres = (inside.any(1) * columns).sum(1) / widths
    offset = (centres - 63.5).abs()
    assert 4.0 < offset.max() <= 0.05 * 128 * 1.1 + 1
    corner = (pixels[:, :, 0, 0] + 1) * 127.5
    assert (corner - torch.tensor(BACKGROUNDS["black"])).abs().max() <= 5.01
    assert corner.std(0).min() > 1.0


def batches(seed: int) -> Batches:
    torch.manual_seed(0)
    vq = VQModel(SETTING.tokenizer.config).eval()
    return Batches(SETTING, images(), Captions(SETTING, CONCEPTS, seed), vq, seed)


def test_places_and_colours_are_shown_and_said():
    source = batches(0)
    scenes = source.scenes(400)
    assert (scenes.place > 0).float().mean() == pytest.approx(SETTING.placed, abs=0.06)
    assert (scenes.image >= source.own).float().mean() == pytest.approx(SETTING.recoloured, abs=0.06)
    for image, place, row in zip(
        scenes.image.tolist(), scenes.place.tolist(), source.words(scenes, held_out=True), strict=True
    ):
        said = {source.captions.words[number] for number in row}
        where = set(list(PLACES)[place - 1]) if place else set()
        assert where <= said and ("small" in said) <= (place > 0)
        assert source.images.colour[image] in (said & set(COLOURS) or {None})
    held_out = source.scenes(50, held_out=True)
    assert held_out.place.max() == 0 and held_out.image.max() < source.own


def test_a_small_thing_stands_where_it_is_put():
    places = torch.arange(1, len(PLACES) + 1)
    black = torch.full((len(places),), list(BACKGROUNDS).index("black"))
    pixels = augment(square().expand(len(places), -1, -1, -1), black, STILL, torch.Generator(), places)
    for shown, (x, y) in zip(pixels[:, 0] > 0.0, PLACES.values(), strict=True):
        rows, columns = shown.any(1).nonzero().flatten(), shown.any(0).nonzero().flatten()
        assert len(rows) == pytest.approx(32, abs=2) and len(columns) == pytest.approx(32, abs=2), "half of 64"
        assert float(columns.float().mean()) == pytest.approx(63.5 + 64 * x, abs=1)
        assert float(rows.float().mean()) == pytest.approx(63.5 + 64 * y, abs=1)


def test_batches_are_determined_by_their_seed():
    first, again, other = (batches(seed).sample(4) for seed in (5, 5, 6))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[2], other[2])
    assert first[2].shape == (4, 256) and first[2].dtype == torch.int64


def test_held_out_pairs_are_never_trained_on():
    source = batches(0)
    trained, unseen = (
        {
            pair[:2]
            for _ in range(20)
            for pair in zip(*(part.tolist() for part in source.scenes(32, held_out)), strict=True)
        }
        for held_out in (False, True)
    )
    assert unseen and trained and not (trained & unseen)


def test_what_stays_as_drawn_is_neither_moved_nor_scaled():
    wild, black = Augmentation(scale=(0.5, 0.8), shift=0.2, colour_jitter=0.0), torch.zeros(4, dtype=torch.int64)
    rgba, places = square().expand(4, -1, -1, -1), torch.full((4,), AS_DRAWN)
    drawn = augment(rgba, black, wild, torch.Generator(), places)
    torch.testing.assert_close(drawn, augment(rgba, black, STILL, torch.Generator()))


def test_padding_does_not_change_the_logits():
    torch.manual_seed(0)
    model = TextToImage(SETTING, 20).eval()
    for block in model.backbone.layers:  # blocks start as the identity; give them something to do
        torch.nn.init.normal_(block.attention.wo.weight, std=0.1)
        torch.nn.init.normal_(block.feed_forward.w2.weight, std=0.1)
    tokens, keep = torch.randint(16, (1, 256)), torch.tensor([False])
    with torch.no_grad():
        short = model(torch.tensor([[3, 7]]), keep, tokens)
        padded = model(torch.tensor([[-1, -1, 3, 7]]), keep, tokens)
        other = model(torch.tensor([[3, 8]]), keep, tokens)
    assert short.shape == (1, 256, 16)
    assert torch.allclose(short, padded, atol=1e-5)
    assert not torch.allclose(short, other, atol=1e-3)


def test_captions_fill_all_slots_or_are_padded():
    filled = Captions(replace(SETTING, fill_slots=True, caption_slots=7), CONCEPTS)
    assert filled.padded([[1, 2, 3], [4]]) == [[1, 2, 3, 1, 2, 3, 1], [4] * 7]
    assert Captions(replace(SETTING, caption_slots=5), CONCEPTS).padded([[1, 2, 3]]) == [[-1, -1, 1, 2, 3]]


@pytest.mark.parametrize(("clock", "bf16"), [((0, 1, 0, 2), True), ((0, 2, 0, 1), False)])
def test_bf16_is_taken_where_it_is_faster(clock, bf16, monkeypatch):
    monkeypatch.setattr(muon.time, "perf_counter", iter(clock).__next__)
    assert muon.multiplies_bf16.__wrapped__("cpu") == bf16


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("shape", [(2, 8, 24), (1, 24, 8)])
def test_muon_directions_have_singular_values_near_one(shape, bf16, monkeypatch):
    monkeypatch.setattr(muon, "multiplies_bf16", lambda _device: bf16)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(*shape, generator=torch.Generator().manual_seed(0))))
    assert values.min() > 0.6 and values.max() < 1.3


def test_only_the_most_frequent_hue_is_exchanged():
    rgba = torch.zeros(4, 8, 8, dtype=torch.uint8)
    rgba[3], rgba[0, :6], rgba[1, 6:] = 255, 200, 200  # mostly red, some green, opaque
    blue = recolour(rgba, 240)
    assert blue[2, :6].float().mean() > 150 and blue[0, :6].float().mean() < 60
    assert torch.equal(blue[:, 6:], rgba[:, 6:])


def test_learning_rate_ends_low_and_starts_warm():
    assert rate(0.0, 0) == pytest.approx(0.02)
    assert rate(0.3, 1000) == 1.0
    assert rate(1.0, 1000) == pytest.approx(0.02)


@pytest.mark.parametrize("prompt_keys", [False, True])
def test_an_exported_model_predicts_what_the_trained_one_does(prompt_keys, tmp_path, captions):
    torch.manual_seed(0)
    setting = replace(SETTING, prompt_keys=prompt_keys)
    model, vq = TextToImage(setting, len(captions.words)).half().float().eval(), VQModel(setting.tokenizer.config)
    for block in model.backbone.layers:  # blocks start as the identity; give them something to do
        for layer in (block.attention.wqkv, block.attention.wo):
            layer.weight.data = torch.randn_like(layer.weight).mul(0.2).half().float()
    for name, module in (("model.pt", model), ("tokenizer.pt", vq)):
        torch.save({"average": module.state_dict()}, tmp_path / name)
    export.write(setting, captions, tmp_path, tmp_path / "default")
    loaded = load_model(tmp_path / "default", dtype=torch.float32)
    tokens, words = torch.randint(16, (1, 256)), torch.tensor([[3, 7, 2]])
    with torch.no_grad():
        wanted = model(words, torch.tensor([False]), tokens)
        assert_as_exact(lambda: loaded(loaded.prefix(loaded.prompt_encoder.table[words]), tokens), wanted)


def test_training_goes_on_from_an_exported_model(tmp_path, captions):
    torch.manual_seed(0)
    model, vq = TextToImage(SETTING, len(captions.words)).half().float(), VQModel(SETTING.tokenizer.config)
    for name, module in (("model.pt", model), ("tokenizer.pt", vq)):
        torch.save({"average": module.state_dict()}, tmp_path / name)
    export.write(SETTING, captions, tmp_path, tmp_path / "default")
    fewer = captions.words[:2] + captions.words[3:]
    another = TextToImage(replace(SETTING, caption_slots=2 * SETTING.caption_slots), len(fewer))
    autoregressive.take_weights(another, fewer, tmp_path / "default" / "model.safetensors")
    for name, tensor in model.state_dict().items():
        wanted = torch.cat((tensor[:2], tensor[3:])) if name == "words.weight" else tensor
        wanted = torch.cat((tensor, tensor)) if name in ("null_caption", "prefix.uncond_embedding") else wanted
        assert torch.equal(another.state_dict()[name], wanted), name
