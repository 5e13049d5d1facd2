"""AR Caption: its answers, what it costs who only generates images, memory, and interruption."""

import gc

import comfy.model_management as mm
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from comfyui_specar.model_loaders.detect import load_model, load_reader
from comfyui_specar.model_loaders.image_reader import ImageReader
from comfyui_specar.nodes.comfy_runtime import captions, runs
from comfyui_specar.nodes.comfy_runtime.operations import Operations

from ..support.lora import write_lora
from ..support.simulated_gpu import CPU, GPU
from ..support.tiny_janus import picture, write

IMAGES = torch.stack([picture(30, 50) + step / 100 for step in range(5)]).clamp(0, 1)


@pytest.fixture
def caption(janus, nodes, run):
    """caption(**inputs) -> the texts."""
    node = nodes["SpecARCaption"]
    given = {
        field.id: field.default for field in node.GET_SCHEMA().inputs if getattr(field, "default", None) is not None
    }

    def caption(**inputs):
        return run(node, **given | {"model": janus[0], "image": IMAGES, "max_tokens": 12} | inputs).result[0]

    return caption


def test_each_image_of_a_batch_has_its_own_text(caption, nodes):
    assert nodes["SpecARCaption"].GET_SCHEMA().outputs[0].is_output_list
    texts = caption(temperature=0.9, seed=3)
    assert len(texts) == 5 and len({*texts}) == 5
    assert caption(image=IMAGES[4:], temperature=0.9, seed=7) == texts[4:], "image i is drawn with seed + i"
    assert caption(seed=1) == caption(seed=2), "temperature 0"
    with_alpha = torch.cat((IMAGES, torch.rand(5, 30, 50, 1)), dim=-1)
    assert caption(image=with_alpha) == caption()
    assert caption(question="Why?") != caption()


def test_an_answer_ends_at_the_end_token(caption, monkeypatch, progress):
    monkeypatch.setattr(ImageReader, "text", lambda reader, ids: list(ids))
    whole = caption(image=IMAGES[:1])[0]
    end = whole[5]
    monkeypatch.setattr(ImageReader, "end", end)
    assert caption(image=IMAGES[:1]) == [whole[: whole.index(end)]]


def test_who_only_generates_images_pays_nothing(load, run, nodes, monkeypatch):
    """Neither memory nor time before the first caption; and the weights go with the model."""
    model = load("janus-to-caption")[0]
    assert model.model not in captions._readers
    run(nodes["SpecARCaption"], model=model, image=IMAGES[:1], question="?", max_tokens=1, temperature=0, seed=0)
    held = captions._readers[model.model]
    assert captions.reader_of(model) is held
    count = len(captions._readers)
    del model, held
    mm.unload_all_models()
    mm.cleanup_models_gc()
    gc.collect()
    assert len(captions._readers) == count - 1


def test_a_lora_changes_what_reads_too(caption, janus, nodes, run, models):
    """One of the vision tower, which only AR Caption uses."""
    name = "vision_model.vision_tower.blocks.0.mlp.fc1"
    file = models / "janus-to-caption/model.safetensors"
    write_lora(models.parent / "loras/eyes", file, [name])
    model = run(nodes["SpecARLoadLora"], model=janus[0], lora_name="eyes", strength=8.0).result[0]
    assert caption(model=model, temperature=0.5) != caption(temperature=0.5)


def test_another_model_says_which_ones_describe_images(caption, tiny):
    with pytest.raises(ValueError, match=r"tiny.*does not describe.*Janus-Pro"):
        caption(model=tiny[0])


def test_an_interruption_ends_it(caption):
    mm.interrupt_current_processing()
    with pytest.raises(mm.InterruptProcessingException):
        caption()
    assert len(caption()) == 5


def test_it_runs_when_half_of_it_stays_in_main_memory(tmp_path, request):
    model = load_model(write(tmp_path), operations=Operations)
    model.offload_embedding()
    reader = load_reader(tmp_path, model, operations=Operations)
    request.getfixturevalue("gpu")
    for part in (model, reader.reading):
        patcher = ModelPatcher(part, GPU, CPU)
        patcher.load(GPU, lowvram_model_memory=patcher.model_size() // 2)
        runs.bring_the_rest(part, GPU)
        assert {parameter.device for parameter in part.parameters()} == {GPU, CPU}
    asked = reader.request(reader.prompt(torch.zeros(1, 3, 64, 64), "?"), 4)
    state = reader.speaker.start(asked.conditioning, None, 1, asked.layout, 1, False)
    places = torch.zeros(1, 1, dtype=torch.int64, device=GPU)
    assert reader.speaker.step(state, places, places).logits.device == GPU
