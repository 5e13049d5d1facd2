"""GLM-Image: its tokens, the node that decodes them, and what ComfyUI's own nodes do with them."""

import logging
from pathlib import Path

import comfy.model_management as mm
import folder_paths
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from comfyui_specar.model_loaders.families import glm_image_diffusion as decoders
from comfyui_specar.nodes.comfy_runtime.operations import Operations
from safetensors.torch import load_file, save_file

import nodes as core

from ..support import tiny_glm_image
from ..support.simulated_gpu import CPU, GPU

PROMPT = 'a red cup "7"'


@pytest.fixture(scope="module")
def positive(glm_image):
    return core.CLIPTextEncode().encode(glm_image[1], PROMPT)[0]


@pytest.fixture(scope="module")
def sample(glm_image, positive, run_node):
    """sample(batch, **inputs) -> the LATENT of SJD."""

    def sample(batch: int = 1, **inputs):
        latent = run_node("EmptyLatent", model=glm_image[0], width=0, height=0, batch_size=batch).result[0]
        common = {"model": glm_image[0], "positive": positive, "latent_image": latent, "seed": 3, "window": 4}
        return run_node("SJDSampler", **common | inputs).result[0]

    return sample


@pytest.fixture(scope="module")
def decode(glm_image, positive, run_node):
    """decode(latent, **inputs) -> the IMAGE of GLM-Image Decode."""

    def decode(latent, **inputs):
        common = {"samples": latent, "vae": glm_image[2], "positive": positive, "steps": 2}
        return run_node("DecodeGLMImage", **common | inputs).result[0]

    return decode


@pytest.fixture
def folder(glm_image) -> Path:
    """Its files."""
    return Path(folder_paths.get_folder_paths("ar_models")[0]) / "GLM-Image"


@pytest.fixture(scope="module")
def edit(positive):
    """edit(*sources) -> the prompt with these source images: by default one of 2 x 3 tokens and one of 1 x 1."""

    def edit(*sources):
        seeded = torch.Generator().manual_seed(2)
        codes = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[7]])
        images = [torch.rand(*(32 * side for side in each.shape), 3, generator=seeded) for each in codes]
        made = [{"tokens": each, "image": image} for each, image in zip(codes, images, strict=True)]
        [(features, extra)] = positive
        return [[features, extra | {"ar": extra["ar"] | {"sources": list(sources) or made}}]]

    return edit


def sources_in(prompt):
    return prompt[0][1]["ar"]["sources"]


def test_a_batch_is_decoded_as_its_images_are(sample, decode):
    latent = sample(batch=2)
    assert latent["samples"].shape == (2, 1, 4, 4)
    image = decode(latent)
    assert image.shape == (2, 128, 128, 3) and image.dtype == torch.float32 and 0 <= image.min() < image.max() <= 1
    (second,) = core.LatentFromBatch().frombatch(latent, 1, 1)
    torch.testing.assert_close(decode(second, seed=1), image[1:], rtol=0, atol=1e-4)
    for other in ({"seed": 9}, {"cfg": 1.0}, {"steps": 3}):
        assert not torch.allclose(decode(latent, **other), image, atol=1e-3)


def test_it_is_the_decoder_s_image(sample, decode, folder):
    latent, decoder = sample(), decoders.load(folder, torch.float32)
    wanted, other = (
        tiny_glm_image.pixels_of(decoder, latent["ar_tokens"], prompt, seed=5, steps=2)
        for prompt in (PROMPT, "a red cup")
    )
    torch.testing.assert_close(decode(latent, seed=5), wanted, rtol=0, atol=1e-4)
    assert not torch.allclose(other, wanted)


def test_source_images_are_read(sample, decode, edit, positive, folder):
    latent = sample(batch=2)
    decoder, encoder = decoders.load(folder, torch.float32), decoders.load_latent_encoder(folder)
    sources = [
        decoders.SourceImage(encoder.encode_latent(each["image"][None]), each["tokens"]) for each in sources_in(edit())
    ]
    wanted = decoder.latents(latent["ar_tokens"], *decoder.read(PROMPT), 5, 2, 1.5, "cpu", sources=sources)
    image = decode(latent, positive=edit(), seed=5)
    torch.testing.assert_close(image, decoder.vae.decode(wanted), rtol=0, atol=1e-4)
    plain = decode(latent, seed=5)
    assert not torch.allclose(image, plain, atol=1e-3)
    [(features, extra)] = positive
    assert torch.equal(decode(latent, positive=[[features, {"ar": extra["ar"] | {"sources": []}}]], seed=5), plain)


def test_source_images_that_cannot_be(sample, decode, edit):
    latent, (source, _) = sample(), sources_in(edit())
    for wrong, words in (
        ({"tokens": source["tokens"][:1]}, r"Source image 2.*\[64, 96, 3\].*\[1, 3\].*32 x 32 pixels"),
        ({"image": source["image"][None]}, r"Source image 2.*\[1, 64, 96, 3\]"),
        ({"image": None}, "Source image 2.*NoneType"),
        ({"tokens": source["tokens"][:0], "image": source["image"][:0]}, r"Source image 2.*\[0, 3\]"),
        ({"tokens": source["tokens"] + 30}, "Source image 2.*31 to 36.*0 to 31"),
        ({"tokens": source["tokens"] - 2}, "Source image 2.*-1 to 4.*0 to 31"),
    ):
        with pytest.raises(ValueError, match=words):
            decode(latent, positive=edit(source, source | wrong))


def test_a_vae_without_encoder_is_named_only_if_there_are_source_images(sample, decode, edit, folder):
    latent = sample()
    image = decode(latent)
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name.startswith("decoder.")}, file)
    assert torch.equal(decode(latent), image)
    with pytest.raises(ValueError, match="VAE without encoder"):
        decode(latent, positive=edit())
    tiny_glm_image.write_decoder(folder)
    assert decode(latent, positive=edit()).shape == image.shape


def test_a_saved_latent_has_the_tokens(sample, decode, monkeypatch, tmp_path):
    """As docs/models.md says to those who give them to diffusers."""
    latent = sample()
    saver = core.SaveLatent()
    monkeypatch.setattr(saver, "output_dir", str(tmp_path))
    [file] = saver.save(latent, "glm")["ui"]["latents"]
    tokens = load_file(tmp_path / file["filename"])["latent_tensor"][:, 0].round().long()
    assert torch.equal(tokens, latent["ar_tokens"])
    assert torch.equal(decode({"samples": tokens[:, None].float()}), decode(latent))


def test_a_source_image_is_encoded_in_tiles_if_it_does_not_fit(sample, decode, edit, monkeypatch, caplog):
    wide = {"tokens": torch.arange(10).view(1, 10), "image": torch.linspace(0, 1, 320)[None, :, None].expand(32, -1, 3)}
    latent, plain = sample(), decoders.Latents.encode
    whole = decode(latent, positive=edit(wide))

    def short(self, pixels):
        if pixels.shape[-1] > 256:
            raise mm.OOM_EXCEPTION("CUDA out of memory")
        return plain(self, pixels)

    monkeypatch.setattr(decoders.Latents, "encode", short)
    with caplog.at_level(logging.WARNING):
        tiled = decode(latent, positive=edit(wide))
    assert "tiles of 256 pixels" in caplog.text
    assert (tiled - whole).square().mean() < whole.var() / 100


def test_tiles_if_the_pixels_do_not_fit(sample, decode, monkeypatch, caplog):
    module = decoders.Pixels
    plain = module.decode

    def short(self, latent):
        if latent.shape[-1] > 32:
            raise mm.OOM_EXCEPTION("CUDA out of memory")
        return plain(self, latent)

    monkeypatch.setattr(module, "decode", short)
    with caplog.at_level(logging.WARNING):
        image = decode({"samples": torch.arange(20.0).view(1, 1, 2, 10)})
    assert image.shape == (1, 64, 320, 3) and "tiles of 256 pixels" in caplog.text


def test_core_s_vae_nodes_name_the_node(sample, glm_image):
    vae = glm_image[2]
    for run, words in (
        (lambda: core.VAEDecode().decode(vae, sample()), "GLM-Image Decode"),
        (lambda: core.VAEDecodeTiled().decode(vae, sample(), 512), "GLM-Image"),
        (lambda: core.VAEEncode().encode(vae, torch.rand(1, 128, 128, 3)), "GLM-Image"),
    ):
        with pytest.raises((ValueError, AttributeError), match=words):
            run()


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (torch.zeros(1, 1, 4, 4), "no image, only a size"),
        (torch.randn(1, 16, 4, 4), r"not of GLM-Image.*0 to 31"),
        (torch.full((1, 1, 4, 4), 32.0), "not of GLM-Image"),
        (torch.full((1, 1, 4, 4), 2.5), "not of GLM-Image"),
    ],
)
def test_other_latents_are_refused(samples, words, decode):
    with pytest.raises(ValueError, match=words):
        decode({"samples": samples})


def test_prompts_and_decoders_of_other_models_are_refused(sample, decode, tiny, positive):
    latent = sample()
    for prompt in (tiny[1].encode_from_tokens_scheduled("red apple"), positive * 2, [[torch.zeros(1, 7, 8), {}]]):
        with pytest.raises(ValueError, match="positive is not a prompt of GLM-Image"):
            decode(latent, positive=prompt)
    with pytest.raises(ValueError, match="vae.*GLM-Image.*VAE Decode"):
        decode(latent, vae=tiny[2])


def test_files_are_read_once_and_again_when_they_change(sample, decode, folder, monkeypatch):
    read, load, latent = [], decoders.load, sample()
    monkeypatch.setattr(decoders, "load", lambda *inputs: read.append(inputs) or load(*inputs))
    image = decode(latent)
    assert torch.equal(decode(latent), image) and not read
    moved = (folder / "vae").rename(folder / "elsewhere")
    with pytest.raises(ValueError, match=r"transformer, vae, text_encoder.*GLM-Image"):
        decode(latent)
    tiny_glm_image.write_decoder(folder)
    assert torch.equal(decode(latent), image) and len(read) == 1
    for file in moved.iterdir():
        file.unlink()


@pytest.mark.parametrize("sources", [False, True])
def test_progress_and_interruption(sources, sample, decode, edit, positive, progress):
    latent, prompt = sample(batch=2), edit() if sources else positive
    progress.clear()
    assert decode(latent, positive=prompt, steps=3).shape == (2, 128, 128, 3)
    assert [event[:2] for event in progress] == [(done, 6) for done in range(1, 7)]
    mm.interrupt_current_processing()
    with pytest.raises(mm.InterruptProcessingException):
        decode(latent, positive=prompt)


def test_memory_is_asked_for_before_each_part(sample, decode, edit, loads):
    """The VAE's encoder with each source image, ByT5, the transformer with its activations and what it keeps of the
    sources, the VAE's decoder with a whole image."""
    latent = sample()

    def asked(**inputs):
        loads.clear()
        decode(latent, **inputs)
        return [(type(models[0].model).__name__, options.get("memory_required", 0)) for models, options in loads]

    plain, edited = asked(), asked(positive=edit())
    assert [name for name, _ in plain] == ["T5", "DiT", "Pixels"]
    assert plain[1][1] > 0 and plain[2][1] == 5 * 64 * 128 * 128 * 4
    assert edited[:2] == [("Latents", 12 * 32 * pixels * 4) for pixels in (64 * 96, 32 * 32)]
    kept = 3 * 2 * 4 * (6 + 1) * 32 * 4  # keys and values of two layers, and once more, of 7 codes, in fp32
    assert edited[2:] == [plain[0], ("DiT", plain[1][1] + kept), plain[2]]


def test_the_transformer_runs_when_half_of_it_stays_in_main_memory(tmp_path, request):
    dit = decoders.load(tiny_glm_image.write_decoder(tmp_path), torch.float32, Operations).dit
    request.getfixturevalue("gpu")
    patcher = ModelPatcher(dit, GPU, CPU)
    patcher.load(GPU, lowvram_model_memory=patcher.model_size() // 2)
    assert {parameter.device for parameter in dit.parameters()} == {GPU, CPU}
    noise, text = torch.zeros(1, 4, 8, 8, device=GPU), torch.zeros(1, 1, 24, device=GPU)
    tokens = torch.zeros(1, 2, 2, dtype=torch.int64, device=GPU)
    source = dit.read(noise, tokens)
    assert dit(noise, text, tokens, torch.zeros(1, device=GPU), [source]).device == GPU


def test_about_the_model(glm_image, run_node):
    out = run_node("ModelInfo", model=glm_image[0])
    assert "image decoder: GLM-Image Decode\n" in out.result[0] and "with guidance" not in out.result[0]
    assert "4 rows of 4 tokens of 32 codes, 20 in all with a preview of 4\n" in out.result[0]


def test_guidance_is_refused_and_parts_are_kept(sample):
    with pytest.raises(ValueError, match="cfg is 3.*guidance.*cfg to 1"):
        sample(cfg=3.0)
    first = sample()
    mask = torch.ones(1, 4, 4)
    mask[:, :2] = 0
    again = sample(latent_image={**first, "noise_mask": mask}, seed=8)
    assert torch.equal(again["ar_tokens"][:, :2], first["ar_tokens"][:, :2])
    assert not torch.equal(again["ar_tokens"], first["ar_tokens"])
