"""The training of the continuous pair: masks, captions, losses, and what is exported."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from comfyui_specar import api
from comfyui_specar.model_loaders.files.checkpoint import open_checkpoint
from comfyui_specar.models.image_decoder import ImageDecoder
from comfyui_specar.models.networks.diffusion_head import DiffusionHead, NoiseSchedule
from comfyui_specar.models.networks.kl_vae import KLConfig, KLModel
from comfyui_specar.models.networks.vq import VQConfig, VQModel
from comfyui_specar.tests.support.models import condition_vectors
from comfyui_specar.tests.support.tiny_training import CONCEPTS, SETTING, images
from comfyui_specar.tools.training import autoencoder, export, kl_vae, loop, masked, tokenizer
from comfyui_specar.tools.training.captions import Captions
from comfyui_specar.tools.training.export import save
from comfyui_specar.tools.training.settings import EMOJI, MaskedSetting
from comfyui_specar.tools.training.views import Scenes

TINY = MaskedSetting(1, dim=32, layers=1, heads=2, head_width=32, head_depth=1, batch=4)
CONTINUOUS = replace(
    SETTING,
    kl_vae=replace(EMOJI.kl_vae, config=KLConfig(4, (1, 1, 1, 1, 1, 1), 32, 1), crop_batch=1, whole_batch=1),
    masked=TINY,
    masked_drafter=replace(TINY, dim=16, head_width=16),
)


@pytest.fixture
def captions() -> Captions:
    return Captions(CONTINUOUS, CONCEPTS, seed=1)


@pytest.fixture
def model(captions) -> masked.MaskedTextToImage:
    torch.manual_seed(0)
    model = masked.MaskedTextToImage(CONTINUOUS, TINY, torch.randn(len(captions.words), 16)).requires_grad_(False)
    for block in (*model.backbone.encoder_blocks, *model.backbone.decoder_blocks):
        for layer in (block.attn.proj, block.mlp.fc2):  # blocks start as the identity; give them something to do
            torch.nn.init.normal_(layer.weight, std=0.2)
    return model


def test_every_count_is_visited_and_low_ones_more_often():
    counts = torch.tensor([masked.known_count(64, 1.5, step) for step in range(6400)])
    assert counts.min() == 0 and counts.max() == 63 and len(counts.unique()) == 64
    for share in (0.25, 0.5, 0.75):  # the distribution of u^1.5
        assert (counts < 64 * share).float().mean() == pytest.approx(share ** (1 / 1.5), abs=0.01)


def test_masks_have_the_same_number_in_every_row_at_random_places():
    known = masked.random_known(500, 16, 4, torch.Generator().manual_seed(0))
    assert known.sum(1).eq(4).all()
    assert known.float().mean(0).sub(0.25).abs().max() < 0.08


def test_padded_captions_are_prompts_of_the_model(model):
    backbone, slots = model.backbone, CONTINUOUS.masked_slots
    rows = torch.tensor([[3, 7, -1], [5, 2, 1], [4, -1, -1]])
    found = model.prompt(rows, torch.tensor([False, False, True]))
    assert found.shape == (3, slots, TINY.dim)
    assert torch.allclose(found[:1], backbone.prompt(model.words[[3, 7]][None]))
    assert torch.allclose(found[1:2], backbone.prompt(model.words[[5, 2, 1]][None]))
    assert torch.equal(found[2:], backbone.unconditional(1))


def test_only_unknown_tokens_are_learnt_from_known_ones(model):
    rows, keep, tokens = torch.tensor([[3, 7]]), torch.tensor([False]), torch.randn(1, 64, 4)
    known = torch.zeros(1, 64, dtype=torch.bool)
    known[0, [5, 9]] = True
    z, wanted = model.vectors(rows, keep, tokens, known)
    assert z.shape == (62, TINY.dim) and torch.equal(wanted, tokens[0][~known[0]])
    other = torch.where(known[..., None], tokens, torch.randn_like(tokens))
    assert torch.equal(model.vectors(rows, keep, other, known)[0], z), "the wanted tokens are not seen"
    changed = torch.where(known[..., None], tokens + 1, tokens)
    assert not torch.allclose(model.vectors(rows, keep, changed, known)[0], z, atol=1e-4), "the known ones are"


def test_bound_is_zero_for_the_true_noise_and_width():
    """A head that knows the noise, and predicts the narrowest width, matches the true posterior."""
    schedule, tokens = NoiseSchedule.cosine(1000), torch.randn(500, 4)
    head = DiffusionHead(4, 8, 8, 1)

    class Oracle(torch.nn.Module):
        time_embed, cond_embed = head.net.time_embed, head.net.cond_embed

        def forward(self, noised, time, condition):
            generator = torch.Generator().manual_seed(7)
            torch.randint(1000, (500,), generator=generator)  # the loss samples the steps first
            return torch.cat((torch.randn(500, 4, generator=generator), -torch.ones(500, 4)), dim=-1)

    head.net = Oracle()
    with torch.no_grad():
        loss = masked.diffusion_loss(head, schedule, torch.zeros(500, 8), tokens, torch.Generator().manual_seed(7))
    assert loss.error == 0 and loss.bound == pytest.approx(0.0, abs=1e-3)


def test_bound_does_not_move_the_mean():
    head, tokens = DiffusionHead(4, 8, 8, 1), torch.randn(64, 4)
    loss = masked.diffusion_loss(head, NoiseSchedule.cosine(1000), torch.randn(64, 8), tokens, torch.Generator())
    loss.bound.backward()
    gradient = head.net.final_layer.linear.weight.grad
    assert gradient[:4].abs().max() == 0 and gradient[4:].abs().max() > 0


def test_latents_are_scaled_and_sampled_anew(captions):
    torch.manual_seed(0)
    latents = masked.Latents(CONTINUOUS, TINY, images(), captions, Pooled(), 2.0, seed=3)
    rows, dropped, tokens = latents.sample(4)
    assert rows.shape == (4, captions.slots) and dropped.shape == (4,) and tokens.shape == (4, 64, 4)
    assert (rows[:, 0] >= 0).all(), "words first, padding on the right"
    scenes, encodings = latents.encoded(1)
    views = [part.expand(200, *part.shape[1:]) for part in (*scenes, *encodings)]
    drawn = latents.batch(Scenes(*views[:3]), views[3:])[2]
    mean, log_variance = (part[0].flatten(1).T for part in views[3:])
    assert torch.allclose(drawn.mean(0), 2 * mean, atol=1.0) and not drawn[0].equal(drawn[1])
    assert (drawn.var(0) / (4 * log_variance.exp())).mean() == pytest.approx(1.0, abs=0.05)


class Pooled(torch.nn.Conv2d):
    """Stands for an autoencoder where only its latents matter."""

    def __init__(self):
        super().__init__(3, 4, 32, stride=32)

    def encode_moments(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = self(pixels)
        return mean, torch.full_like(mean, -4.0)


def test_training_ends_on_time_and_goes_on_where_it_stopped(tmp_path, captions, steady_clock, monkeypatch):
    monkeypatch.setattr(loop, "multiplies_bf16", lambda _device: True)  # others take what is faster
    torch.manual_seed(0)
    vae = Pooled()
    words, file = torch.randn(len(captions.words), 16), tmp_path / "masked_model.pt"
    spent = []
    for minutes in (0.005, 0.008):
        masked.train(CONTINUOUS, TINY, images(), captions, words, vae, 1.0, file, minutes)
        spent.append(torch.load(file, weights_only=True)["counters"])
    assert spent[0]["step"] < spent[1]["step"] and spent[0]["spent"] >= 0.3 and spent[1]["spent"] >= 0.48
    start = masked.restore(CONTINUOUS, TINY, words, file).head.net.final_layer.linear.weight
    assert start.isfinite().all() and start.abs().max() > 0, "it has learnt something"


def test_the_autoencoder_trains_from_crops_to_whole_images(tmp_path, steady_clock, monkeypatch):
    monkeypatch.setattr(autoencoder, "HELD_OUT", 2)
    monkeypatch.setattr(autoencoder, "Perception", Blurred)
    torch.manual_seed(0)
    vae = kl_vae.train(CONTINUOUS, images(), tmp_path, 0.004)
    assert all(parameter.isfinite().all() for parameter in vae.parameters())
    again = kl_vae.restore(CONTINUOUS, tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(vae.parameters(), again.parameters(), strict=True))
    scale = kl_vae.latent_scale(again, CONTINUOUS, images(), views=32)
    assert scale == kl_vae.latent_scale(again, CONTINUOUS, images(), views=32)
    mean, log_variance = again.encode_moments(torch.rand(8, 3, 256, 256))
    assert 0.05 < float(kl_vae.noisy(mean, log_variance).std()) * scale < 5


class Blurred(torch.nn.Module):
    """Stands for the perceptual network, whose weights are not at hand: a distance that can be followed downhill."""

    def forward(self, drawn: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return (drawn - wanted).square().mean()


@pytest.mark.parametrize("stage", ["discrete", "continuous"])
def test_sharpening_changes_the_decoder_and_no_token(tmp_path, steady_clock, monkeypatch, stage):
    monkeypatch.setattr(autoencoder, "Perception", Blurred)
    monkeypatch.setattr(autoencoder, "HELD_OUT", 1)
    torch.manual_seed(0)
    setting = replace(CONTINUOUS, tokenizer=replace(CONTINUOUS.tokenizer, whole_batch=2))
    kind, model, name = {
        "discrete": (tokenizer, VQModel(setting.tokenizer.config), "tokenizer.pt"),
        "continuous": (kl_vae, KLModel(setting.kl_vae.config), "kl_vae.pt"),
    }[stage]
    torch.save({"average": model.state_dict()}, tmp_path / name)
    kind.sharpen_decoder(setting, images(), tmp_path, 0.001)
    before, after = model.state_dict(), kind.restore(setting, tmp_path).state_dict()
    decoding = ("decoder.", "post_quant_conv.")
    assert all(torch.equal(before[n], after[n]) for n in before if not n.startswith(decoding))
    assert any(not torch.equal(before[n], after[n]) for n in before if n.startswith(decoding))
    assert all(tensor.isfinite().all() for tensor in after.values())


def test_a_decoder_is_sharpened_with_the_margin_it_is_used_with():
    model, cfg = VQModel(CONTINUOUS.tokenizer.config).eval(), CONTINUOUS.tokenizer
    tokens = torch.randint(cfg.config.codebook_size, (1, 4, 4))
    with torch.no_grad():
        found = autoencoder.decode(model, model.dequantize(tokens), cfg)
    used = ImageDecoder(model, cfg.config.factor, cfg.config.codebook_dim, "vq", cfg.margin)
    expected = used.decode(model.dequantize(tokens)).movedim(-1, 1) * 2 - 1
    assert torch.allclose(found.clamp(-1, 1), expected, atol=1e-5)


def test_divergence_is_that_of_torch():
    mean, log_variance = torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3)
    distribution = torch.distributions.Normal(mean, (0.5 * log_variance).exp())
    expected = torch.distributions.kl_divergence(distribution, torch.distributions.Normal(0.0, 1.0)).mean()
    assert torch.allclose(kl_vae.divergence(mean, log_variance), expected, atol=1e-6)


def test_shallow_layers_come_from_the_vq_tokenizer():
    vq = VQModel(VQConfig(16, 4, (1, 1, 2, 4, 4), 32, 32, 1))
    model = KLModel(EMOJI.kl_vae.config)
    assert kl_vae.copy_shared_layers(model, vq) > 100
    mine, theirs = model.state_dict(), vq.state_dict()
    for new, old in {
        "encoder.down.1.block.0.conv1.weight": "encoder.conv_blocks.1.res.0.conv1.weight",
        "encoder.down.2.downsample.conv.bias": "encoder.conv_blocks.2.downsample.conv.bias",
        "decoder.up.0.block.1.conv2.weight": "decoder.conv_blocks.4.res.1.conv2.weight",
        "decoder.up.2.upsample.conv.weight": "decoder.conv_blocks.2.upsample.conv.weight",
        "decoder.conv_out.weight": "decoder.conv_out.weight",
    }.items():
        assert torch.equal(mine[new], theirs[old])


def test_exported_files_are_the_model_that_was_trained(tmp_path, captions):
    words = torch.randn(len(captions.words), 16)
    table = {"words": captions.words, "stop_words": [], "synonyms": {}}
    discrete = tmp_path / "discrete"
    discrete.mkdir()
    save(discrete / "text_encoder.safetensors", {"word_embeddings.weight": words}, table)
    assert torch.equal(masked.word_vectors(discrete / "text_encoder.safetensors", captions), words)
    torch.manual_seed(0)
    for cfg, name in ((CONTINUOUS.masked, "model"), (CONTINUOUS.masked_drafter, "drafter")):
        model = masked.MaskedTextToImage(CONTINUOUS, cfg, words)
        torch.save({"average": model.state_dict()}, tmp_path / f"masked_{name}.pt")
    vae, out = KLModel(CONTINUOUS.kl_vae.config), tmp_path / "continuous"
    export.write_continuous(CONTINUOUS, vae, 0.5, words, tmp_path, discrete, out)

    target = api.load_model(out)
    small = api.load_drafter(out / "small", target)
    assert (target.grid, target.channels, target.scale, target.pixels_per_token) == ((8, 8), 4, 0.5, 32)
    steps = target.schedule(target.defaults).timesteps
    assert len(steps) == 25 and steps[0] == 0 and steps[-1] == 970
    assert torch.equal(target.head.schedule.timesteps, steps)
    assert target.defaults == CONTINUOUS.masked_sampling and small.backbone.config.dim == 16
    assert api.load_image_decoder(out).factor == 32
    trained = masked.restore(CONTINUOUS, CONTINUOUS.masked, words, tmp_path / "masked_model.pt")
    tokens, known = torch.randn(1, 64, 4), torch.rand(1, 64, generator=torch.Generator().manual_seed(0)) < 0.3
    conditioning = target.encode_prompt("dog bg_red")
    with torch.no_grad():
        numbers = torch.tensor([[captions.number["dog"], captions.number["bg_red"]]])
        expected, _ = trained.vectors(numbers, torch.tensor([False]), tokens, known)
    found = condition_vectors(target, conditioning, tokens, known)[0][~known[0]]
    assert torch.allclose(found, expected, atol=0.02, rtol=0.02), "fp16 weights"


def test_words_of_another_model_are_refused(tmp_path, captions):
    table = {"words": ["other"], "stop_words": [], "synonyms": {}}
    save(tmp_path / "t.safetensors", {"word_embeddings.weight": torch.zeros(1, 4)}, table)
    with pytest.raises(ValueError, match=r"t\.safetensors.*words"):
        masked.word_vectors(tmp_path / "t.safetensors", captions)


def test_the_bundled_pair_says_what_it_is():
    folder = api.bundled("continuous")
    meta = {
        name: open_checkpoint(folder / name).metadata
        for name in ("model.safetensors", "vae.safetensors", "small/model.safetensors")
    }
    assert meta["model.safetensors"]["family"] == meta["small/model.safetensors"]["family"] == "mar"
    assert len({json.dumps(m["scale"]) for m in meta.values()}) == 1, "one unit for all three"
    default = open_checkpoint(api.bundled("default") / "text_encoder.safetensors")
    words = open_checkpoint(folder / "text_encoder.safetensors")
    assert words.metadata["words"] == default.metadata["words"]
    assert all(torch.equal(words.tensors[name], default.tensors[name]) for name in default.tensors)


def test_sharpening_prefers_one_of_two_possible_edges_to_the_blur_between_them():
    def edge(at):
        return torch.where(torch.arange(16) < at, -0.8, 0.8).expand(1, 3, 16, 16)

    def expected(loss, output):
        return (loss(output, edge(6)) + loss(output, edge(10))) / 2

    blur = (edge(6) + edge(10)) / 2
    assert expected(autoencoder.sharp_loss, edge(6)) < expected(autoencoder.sharp_loss, blur)
    assert expected(F.mse_loss, edge(6)) > expected(F.mse_loss, blur), "where a squared error wants the blur"
