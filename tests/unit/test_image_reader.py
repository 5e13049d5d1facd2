"""Reading images: conversations, where an answer ends, and files and requests that are refused."""

import json

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.model_loaders.detect import load_reader
from comfyui_specar.model_loaders.files.checkpoint import open_checkpoint, weight_file
from comfyui_specar.model_loaders.files.errors import CheckpointError
from comfyui_specar.models.image_reader import square
from comfyui_specar.samplers.ending import generate_until
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken

from ..support import tiny_chameleon, tiny_emu3, tiny_emu35, tiny_llamagen, tiny_simplear
from ..support.bad_files import refused
from ..support.models import teacher_forced
from ..support.tiny_folder import edited, write_folder
from ..support.tiny_janus import BEGIN, FIRST, IMAGE, SPECIALS, config, picture, released, weights, write

END, SHOWN, STOP = FIRST + 1, FIRST + SPECIALS.index("<image_placeholder>"), FIRST + SPECIALS.index("<end_of_image>")
NEVER = -2  # the id of no token


KINDS = {"janus": write, "lumina": tiny_chameleon.write, "emu3": tiny_emu3.write}
janus = pytest.mark.parametrize("folder", ["janus"], indirect=True)


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return KINDS[request.param](tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder):
    return api.load_model(folder)


@pytest.fixture(scope="module")
def reader(model, folder):
    return load_reader(folder, model)


@pytest.fixture(scope="module")
def prompt(reader):
    if reader.tokens:
        return reader.prompt(torch.arange(16).view(2, 2, 4), "What is it?")
    return reader.prompt(torch.stack([square(picture(20, 30), 64), square(picture(9, 9), 64)]), "What is it?")


def answers(reader, prompt, method=NextToken(), end=NEVER, most=24, callback=None, **options):
    return generate_until(method, reader.request(prompt, most, callback=callback, **options), end)


# Conversations


@janus
def test_only_our_own_placeholder_stands_for_the_image(reader):
    ids, place = reader._write("Is <image_placeholder> a word?", 16)
    assert ids[0] == BEGIN and ids[place - 1 : place + 17] == [IMAGE, *[SHOWN] * 16, STOP]
    assert ids.count(SHOWN) == 17 and ids.count(IMAGE) == 1
    assert reader._write("", 16)[0] == reader._write(" \n", 16)[0]


def test_an_image_of_any_shape_becomes_a_square():
    for height, width in ((1, 1), (3, 700), (700, 3), (384, 384)):
        pixels = square(picture(height, width), 64)
        assert pixels.shape == (3, 64, 64) and pixels.abs().max() <= 1
    assert (square(torch.full((5, 5, 3), 7.0), 64) == 1).all(), "values above 1, as after some nodes"


# Where an answer ends


def test_a_run_stops_when_every_answer_has_ended(reader, prompt):
    whole, seen = answers(reader, prompt), []
    assert [len(row) for row in whole] == [24, 24]
    end = next(token for token in whole[0] if token in whole[1])
    places = [row.index(end) for row in whole]
    found = answers(reader, prompt, end=end, callback=seen.append)
    assert found == [row[:place] for row, place in zip(whole, places, strict=True)]
    assert seen[-1].passes == max(places) + 1 and not reader.speaker.sessions


def test_a_sampled_answer_is_the_same_alone_in_a_batch_and_with_jacobi_decoding(reader, prompt):
    sampled = answers(reader, prompt, temperature=0.8, seed=5)
    assert sampled != answers(reader, prompt, temperature=0.8, seed=6)
    assert sampled == answers(reader, prompt, SJD(reuse="gumbel", window=4), temperature=0.8, seed=5)
    second = type(prompt)(prompt.features[1:], None)
    assert answers(reader, second, temperature=0.8, seed=6) == sampled[1:]


def test_captured_steps_answer_the_same(reader, prompt, request):
    """As on a GPU, where a word's embedding is looked up in the step, and the host learns late what was decided."""
    whole = answers(reader, prompt)
    end = whole[0][9]
    cut = answers(reader, prompt, end=end)
    made = request.getfixturevalue("on_tape")
    assert answers(reader, prompt) == whole and made[-1].replayed > 15
    sessions = len(made)
    for _ in range(2):
        assert answers(reader, prompt, end=end) == cut
    assert len(made) == sessions and made[-1].captured == 1, "an answer that has ended leaves its session to the next"
    reader.speaker.sessions.clear()


def test_reading_leaves_the_model_as_it_was(model, reader, prompt):
    image = torch.zeros(1, 4, 4, dtype=torch.int64)
    before = teacher_forced(model, model.encode_prompt("a fox"), image)
    answers(reader, prompt)
    assert torch.equal(teacher_forced(model, model.encode_prompt("a fox"), image), before)
    assert model.vocab == 32 and model.backbone.config.vocab == model.vocab_total
    words = model.prefix.embedding.weight
    of_reading, of_speaker = ({id(p) for p in part.parameters()} for part in (reader.reading, reader.speaker))
    shared = {id(p) for p in model.parameters()} & of_speaker
    assert len(shared) == len([*model.backbone.layers.parameters(), model.backbone.norm.weight, words])
    assert shared & of_reading == {id(words)}, "the model's own blocks and codes do not move with what reads"


# What is refused


def test_a_request_beyond_what_the_model_reads(reader, prompt):
    count = prompt.features.shape[1]
    longest = reader.speaker.longest
    refused(prompt, f"{count} tokens", str(longest), loader=lambda p: reader.request(p, longest), error=ValueError)
    refused("?" * 2**18, "question", "Shorten", loader=lambda q: reader.prompt(torch.empty(0), q), error=ValueError)


SILENT = {
    tiny_llamagen: "does not describe",
    tiny_simplear: "does not describe",
    tiny_emu35: "AR Image Prompt.*published.*not for an answer in words",
}


@pytest.mark.parametrize("family", SILENT, ids=lambda family: family.__name__)
def test_models_that_do_not_answer_say_why_and_which_do(family, tmp_path):
    [written] = list(family.TINY.values())[:1]
    path = written.write(tmp_path)
    with pytest.raises(CheckpointError, match=f"{SILENT[family]}.*Janus-Pro, Lumina-mGPT, Emu3-Stage1"):
        load_reader(path, api.load_model(path))


def test_those_of_a_family_that_generate_only(tmp_path):
    for kind in ("lumina2", "anole"):
        path = tiny_chameleon.write(tmp_path, kind=kind)
        refused(path, "does not describe", "Lumina-mGPT,", loader=lambda p: load_reader(p, api.load_model(p)))
    path = tiny_emu3.write(tmp_path / "Emu3-Gen")
    refused(path, "not to describe", "BAAI/Emu3-Stage1", loader=lambda p: load_reader(p, api.load_model(p)))


def test_damaged_heads(tmp_path):
    path = tiny_chameleon.write(tmp_path)
    model, tensors = api.load_model(path), dict(open_checkpoint(weight_file(path)).tensors)
    settings = json.loads((path / "config.json").read_text(encoding="utf-8"))
    for head in (torch.full_like(tensors["lm_head.weight"], torch.nan), torch.zeros(3), None):
        changed = {name: tensor for name, tensor in (tensors | {"lm_head.weight": head}).items() if tensor is not None}
        write_folder(path, changed, settings)
        refused(path, "head", loader=lambda p: load_reader(p, model))


@janus
@pytest.mark.parametrize("original", [False, True])
def test_files_without_what_reads(original, tmp_path, model):
    tensors = released(weights()) if original else weights()
    for part, says in (("vision_model.", "vision tower"), ("lm_head.", "head for words")):
        kept = {name: tensor for name, tensor in tensors.items() if part not in name}
        folder = write_folder(tmp_path / part, kept, config(original))
        assert api.load_model(folder).family == "janus-pro", "which still generates"
        refused(folder, says, "deepseek-community/Janus-Pro-1B", loader=lambda p: load_reader(p, model))


@janus
def test_damaged_towers(tmp_path, model):
    def refuse(*words, folder=None, **tensors):
        changed = {name: tensor for name, tensor in (weights() | tensors).items() if tensor is not None}
        folder = folder or write_folder(tmp_path / "damaged", changed, config(False))
        refused(folder, *words, loader=lambda p: load_reader(p, model))

    root = "model.vision_model"
    refuse("q_norm", **{f"{root}.encoder.layers.0.self_attn.q_norm.weight": torch.ones(2)})
    refuse("k_proj", **{f"{root}.encoder.layers.1.self_attn.k_proj.bias": None})
    refuse("NaN", **{f"{root}.post_layernorm.weight": torch.full((32,), torch.nan)})
    refuse("15 patches", **{f"{root}.embeddings.position_embedding.weight": torch.zeros(15, 32)})
    for heads in (5, 0, "16"):
        settings = json.loads(json.dumps(config(False)["vision_config"])) | {"num_attention_heads": heads}
        refuse(f"{heads} heads", folder=edited(write(tmp_path / "heads"), vision_config=settings))
