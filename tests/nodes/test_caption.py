"""AR Caption: its answers, what it costs who only generates images, memory, and interruption."""

import gc
import weakref

import comfy.model_management as mm
import pytest
import torch
from comfyui_specar.model_loaders.detect import load_model, load_reader
from comfyui_specar.models.image_reader import ImageReader, TokenReader
from comfyui_specar.models.memory import offload_embedding
from comfyui_specar.nodes.comfy_runtime.models import _parts
from comfyui_specar.nodes.comfy_runtime.operations import Operations

from ..support import tiny_chameleon, tiny_emu3
from ..support.families import Placed
from ..support.lora import write_lora
from ..support.simulated_gpu import GPU, load_half
from ..support.tiny_folder import edited
from ..support.tiny_janus import picture, write

IMAGES = torch.stack([picture(30, 50) + step / 100 for step in range(5)]).clamp(0, 1)


@pytest.fixture
def caption(janus, run_node):
    """caption(**inputs) -> the texts."""
    common = {"model": janus[0], "image": IMAGES, "max_tokens": 12}
    return lambda **inputs: run_node("Caption", **common | inputs).result[0]


@pytest.fixture(scope="module")
def readers(models, load):
    """What Load AR Checkpoint makes of tiny models that read images as tokens, whose files are there while the module's
    tests run."""
    placed = Placed(models.parent)
    tiny_chameleon.write(models).rename(models / "lumina-to-caption")
    edited(tiny_emu3.write(models / "emu3-to-caption"), specar={"grid": [4, 4]})
    yield {name: load(name) for name in ("lumina-to-caption", "emu3-to-caption")}
    placed.remove()


def test_each_image_of_a_batch_has_its_own_text(caption, nodes):
    assert nodes["SpecARCaption"].GET_SCHEMA().outputs[0].is_output_list
    texts = caption(temperature=0.9, seed=3)
    assert len(texts) == 5 and len({*texts}) == 5
    assert caption(image=IMAGES[4:], temperature=0.9, seed=7) == texts[4:], "image i is drawn with seed + i"
    assert caption(seed=1) == caption(seed=2), "temperature 0"
    with_alpha = torch.cat((IMAGES, torch.rand(5, 30, 50, 1)), dim=-1)
    assert caption(image=with_alpha) == caption()
    assert caption(question="Why?") != caption()


def test_what_is_no_word_of_a_question_is_said(caption, page, hurried):
    server = page()
    caption(question="Is <image_placeholder> a word?")
    notices = [data["notices"] for event, data, _ in server.events if event == "specar.notices"]
    assert notices and all("<image_placeholder>" in notice for [notice] in notices)


def test_an_answer_ends_at_the_end_token(caption, monkeypatch):
    monkeypatch.setattr(ImageReader, "text", lambda reader, ids: list(ids))
    whole = caption(image=IMAGES[:1])[0]
    end = whole[5]
    monkeypatch.setattr(ImageReader, "end", end)
    assert caption(image=IMAGES[:1]) == [whole[: whole.index(end)]]


def test_who_only_generates_images_pays_nothing(load, caption):
    """Neither memory nor time before the first caption; and the weights go with the model."""
    model = load("janus-to-caption")[0]
    assert model.model not in _parts
    caption(model=model, image=IMAGES[:1], max_tokens=1)
    held = _parts[model.model][load_reader]
    assert model.part(load_reader, pytest.fail) is held
    reader = weakref.ref(held)
    del model, held
    mm.unload_all_models()
    mm.cleanup_models_gc()
    gc.collect()
    assert reader() is None


def test_a_lora_changes_what_reads_too(caption, janus, run_node, models):
    """One of the vision tower, which only AR Caption uses."""
    name = "vision_model.vision_tower.blocks.0.mlp.fc1"
    file = models / "janus-to-caption/model.safetensors"
    write_lora(models.parent / "loras/eyes", file, [name])
    model = run_node("LoadLora", model=janus[0], lora_name="eyes", strength=8.0).result[0]
    assert caption(model=model, temperature=0.5) != caption(temperature=0.5)


def test_another_model_says_which_ones_describe_images(caption, tiny):
    with pytest.raises(ValueError, match=r"tiny.*does not describe.*Janus-Pro"):
        caption(model=tiny[0])


@pytest.mark.parametrize("name", ["lumina-to-caption", "emu3-to-caption"])
def test_models_that_read_tokens_take_their_vae(caption, readers, name, monkeypatch):
    """Whose tokens reach the reader, of images that are scaled as the authors do."""
    model, _, vae = readers[name]
    asked, prompt = [], TokenReader.prompt

    def noted(reader, tokens, question):
        asked.append((tokens, question))
        return prompt(reader, tokens, question)

    monkeypatch.setattr(TokenReader, "prompt", noted)
    texts = caption(model=model, vae=vae, temperature=0.9, seed=3)
    assert [len(tokens) for tokens, _ in asked] == [4, 1] and len({*texts}) > 1
    reader, pixels = _parts[model.model][load_reader].content, model.model.pixels_per_token
    scaled = torch.stack([reader.scale(image, pixels) for image in IMAGES])
    assert torch.equal(torch.cat([tokens for tokens, _ in asked]), vae.tokens(scaled, 32).cpu())
    assert caption(model=model, vae=vae, image=IMAGES[4:], temperature=0.9, seed=7) == texts[4:]


def test_models_that_read_tokens_without_their_vae(caption, readers, tiny):
    model = readers["lumina-to-caption"][0]
    for vae, says in ((None, "lumina-to-caption.*vae is not connected"), (tiny[2], "64 codes.*32")):
        with pytest.raises(ValueError, match=f"{says}.*VAE of Load AR Checkpoint"):
            caption(model=model, vae=vae)
    model, _, vae = readers["emu3-to-caption"]
    with pytest.raises(ValueError, match="60 x 10 pixels.*5:1"):
        caption(model=model, vae=vae, image=torch.rand(1, 10, 60, 3))


def test_an_interruption_ends_it(caption):
    mm.interrupt_current_processing()
    with pytest.raises(mm.InterruptProcessingException):
        caption()
    assert len(caption()) == 5


def test_it_runs_when_half_of_it_stays_in_main_memory(tmp_path, request):
    model = load_model(write(tmp_path), operations=Operations)
    offload_embedding(model)
    reader = load_reader(tmp_path, model, operations=Operations)
    request.getfixturevalue("gpu")
    for part in (model, reader.reading):
        load_half(part)
    asked = reader.request(reader.prompt(torch.zeros(1, 3, 64, 64), "?"), 4)
    state = reader.speaker.start(asked.conditioning, None, 1, asked.layout, 1, False)
    places = torch.zeros(1, 1, dtype=torch.int64, device=GPU)
    assert reader.speaker.step(state, places, places).logits.device == GPU
