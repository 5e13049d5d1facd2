"""Drafters of language models that generate: words of the prompt, ragged branches, shared heads, training, export."""

import json
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from comfyui_specar.device.graphs import Graphs
from comfyui_specar.model_loaders.detect import load_drafter, load_image_decoder, load_model
from comfyui_specar.models.drafters import as_drafter
from comfyui_specar.models.networks.backbone import BackboneConfig
from comfyui_specar.models.networks.eagle import Eagle
from comfyui_specar.models.text.prompt_encoders import MissingEncoder
from comfyui_specar.samplers.contract import Request, SamplingParams
from comfyui_specar.samplers.drafts.structures import Chain, Dynamic, Static
from comfyui_specar.samplers.engine.session import Session
from comfyui_specar.samplers.methods.speculative import DraftTree
from comfyui_specar.tools.training import drafter as command_line
from comfyui_specar.tools.training import drafter_export
from comfyui_specar.tools.training.drafter_data import Pool, from_folder, own_samples
from comfyui_specar.tools.training.drafter_training import EagleObjective, overlap
from PIL import Image
from safetensors.torch import load_file, save_file

from ..support import tiny_chameleon, tiny_janus, tiny_simplear
from ..support.bad_files import refused
from ..support.models import eagle_features, of_ids, teacher_forced
from ..support.rounds import Rounds
from ..support.tiny import fill
from ..support.tiny_text import CODES, WORDS, null, text_model

LONG, SHORT = [35, 37, 36, 39, 34, 38, 2, 5], [36, 5]
STRUCTURES = {"chain": Chain(3), "static": Static("eagle_25"), "dynamic": Dynamic(3, 4, 12)}


@pytest.fixture(scope="module")
def target():
    return text_model()


def randomise(module: torch.nn.Module) -> None:
    for name, parameter in module.named_parameters():
        parameter.data.copy_(fill(f"drafter {name}", tuple(parameter.shape)).half())


def write(model, folder, words: bool, config: BackboneConfig | None = None, **settings):
    """A random drafter: one of ours, or (``words``) one with a table of all words, as LANTERN's have."""
    config = config or replace(model.backbone.config, layers=1, attention_norm=False)
    module = Eagle(config)
    randomise(module)
    drafter_export.write_eagle(module, model, folder)
    if words or settings:
        path = folder / "model.safetensors"
        tensors, written = load_file(path), json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if words:
            tensors["embed_tokens.weight"] = fill("words embedding", (WORDS, config.dim)).half()
            written["vocab_size"] = WORDS
        save_file(tensors, path)
        (folder / "config.json").write_text(json.dumps(written | settings), encoding="utf-8")
    return folder


@pytest.fixture(scope="module", params=[True, False], ids=["words", "tokens"])
def drafter(request, target, tmp_path_factory):
    return load_drafter(write(target, tmp_path_factory.mktemp("drafter"), request.param), target)


def table_rows(target, drafter, prompt):
    """Rows of the drafter's table for the words after the first of a prompt."""
    if not drafter.reads_words:
        return torch.zeros(len(prompt) - 1, dtype=torch.int64)
    return torch.tensor(prompt[1:]) + target.vocab_total


def features_after(target, drafter, prompt, tokens):
    """The drafter's features [n, D] after each of n tokens, by one pass of the target and one of the drafter."""
    words = torch.tensor([*prompt, *(target.word_ids[t] for t in tokens.tolist())])
    rotation = target.positions.prompt(len(words), target.backbone.config.head_dim, "cpu")
    hidden = target.backbone(target.prefix.embedding(words)[None], rotation)
    ids = torch.cat((table_rows(target, drafter, prompt), tokens))
    return eagle_features(drafter, hidden[:, :-1], ids[None], len(prompt) - 1)[0, len(prompt) - 1 :]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize(("prompt", "negative"), [(LONG, None), (SHORT, None), (SHORT, LONG)])
@torch.inference_mode()
def test_it_continues_the_true_pairs_of_both_branches(target, drafter, structure, prompt, negative, monkeypatch):
    layout = target.layout(4, 3)
    second = negative and of_ids(target, negative)
    method = DraftTree(drafter, STRUCTURES[structure])
    asked = Request(target, of_ids(target, prompt), layout, SamplingParams(2.0), second, 1, 2)
    run = Rounds(method, asked, Session(Graphs(target.device)))
    prompts = [prompt, negative or null(torch.zeros(1, 1, 1), (4, 3)).flatten().long().tolist()]
    seen, observe = [], drafter.observe

    def watched(*inputs):
        out = observe(*inputs)
        seen.append((run.state.committed.tolist(), out.hidden.view(2, 2, -1)))
        return out

    monkeypatch.setattr(drafter, "observe", watched)
    while not run.done:
        run.round()
    for branch, words in enumerate(prompts):
        for image in range(2):
            wanted = features_after(target, drafter, words, run.run.record.tokens[image, :-1])
            for counts, found in seen:
                if counts[image] < run.run.inputs.end[image]:
                    assert torch.allclose(found[branch, image], wanted[counts[image] - 1], atol=1e-4)
    forced = layout.forced[0]
    assert torch.equal(run.run.record.image[:, forced >= 0], forced[forced >= 0].expand(2, -1))


def test_image_tokens_are_words(target, tmp_path):
    drafter = load_drafter(write(target, tmp_path, True), target)
    table = fill("words embedding", (WORDS, 32)).half().float()
    assert torch.equal(drafter.module.tok_embeddings.weight, torch.cat((table[list(target.word_ids)], table)))


@pytest.mark.parametrize("negative", [None, LONG])
def test_memory_is_what_was_announced(target, drafter, negative):
    second = negative and of_ids(target, negative)
    run = of_ids(target, SHORT), second, 2, target.layout(), 8, True
    cache = drafter.start(target.start(*run), *run).cache
    longest = target.prompt_tokens(run[0], second, 2, target.layout(), True)
    assert drafter.kv_bytes(2, target.layout(), 8, True, longest) == cache.keys.nbytes + cache.values.nbytes


# Other drafters' files


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        ({}, {"vocab_size": 15}, ("vocab_size", "40")),
        ({"head_norms": 0}, {}, ("norms", "0", "4")),
        ({"dim": 48}, {}, ("width", "48", "32")),
        ({}, {"num_key_value_heads": 4}, ("num_key_value_heads", "2")),
        ({"heads": 2, "head_norms": 2, "kv_heads": 1, "dim": 32}, {}, ("norms",)),
        ({"head_norms": 4, "kv_heads": 3}, {}, ("32, 24 and 24 channels",)),
        ({}, {"target": "anole"}, ("anole", "text")),
        ({}, {"grid": [9, 9]}, ("9, 9",)),
        ({}, {"rms_norm_eps": 2.0}, ("rms_norm_eps",)),
    ],
    ids=str,
)
def test_a_drafter_of_another_model_is_refused(target, tmp_path, config, settings, words):
    block = replace(target.backbone.config, layers=1, attention_norm=False, **config)
    refused(write(target, tmp_path, True, block, **settings), *words, loader=load_drafter, model=target)


def test_a_table_that_lacks_words_is_refused(target, tmp_path):
    path = write(target, tmp_path, True)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"embed_tokens.weight": tensors["embed_tokens.weight"][:-1]}, path / "model.safetensors")
    refused(path, "tokens", " 39", loader=load_drafter, model=target)


def test_every_size_of_the_target_may_be_named(target, tmp_path):
    for grid in target.grids:
        load_drafter(write(target, tmp_path / str(grid), False, grid=list(grid)), target)


# A smaller model


def test_a_smaller_model_without_its_tokenizer_borrows_the_targets(target, tmp_path):
    small = text_model(dim=16, layers=1)
    small.prompt_encoder, small.prefix.null = MissingEncoder("no tokenizer"), None
    drafter = as_drafter(small, target, tmp_path)
    assert small.prompt_encoder is target.prompt_encoder and small.prefix.null is target.prefix.null
    assert drafter.family == "text" and not drafter.own_words


def test_a_smaller_model_reads_prompts_with_its_own_tokenizer(target, tmp_path):
    """Its special tokens may have other ids. What was given as ids stays as it is."""
    small = text_model(dim=16, layers=1)
    small.prompt_encoder = replace(small.prompt_encoder, write=lambda text, grid: [*map(ord, text), *grid, 6])
    drafter = as_drafter(small, target, tmp_path)
    for prompt, negative, wanted in (
        (target.encode_prompt("#"), None, [[35, 4, 3, 6], None]),
        (target.encode_prompt("#"), target.encode_prompt("$"), [[35, 4, 3, 6], [36, 4, 3, 6]]),
        (of_ids(target, LONG), target.encode_prompt("$"), [LONG, [36, 4, 3, 6]]),
    ):
        run = prompt, negative, 2, target.layout(4, 3), 4, True
        state = drafter.start(target.start(*run), *run)
        assert [x if x is None else x.flatten().tolist() for x in state.own.prefix_features] == wanted


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m, "grids", m.grids[:2]), ("3 x 2", "3 x 4")),
        (lambda m: setattr(m.prefix, "words", 44), ("44 words", "40 words")),
        (lambda m: setattr(m, "word_ids", range(9, 24)), ("from 9 on", "from 8 on")),
        (lambda m: setattr(m, "vocab", 11), ("image tokens", "11")),
        (lambda m: setattr(m, "family", "emu3"), ("emu3",)),
    ],
    ids=["grids", "words", "ids", "codes", "family"],
)
def test_a_smaller_model_of_other_words_is_refused(target, tmp_path, change, words):
    small = text_model(dim=16, layers=1)
    change(small)
    refused(small, "small", *words, loader=partial(as_drafter, target=target, path=tmp_path / "small"))


# Training


@pytest.fixture(scope="module")
def pool(target):
    prompts = [of_ids(target, ids)[0][0][0] for ids in (LONG, LONG, SHORT)]
    return Pool.build(target, own_samples(target, prompts))


def test_a_pool_keeps_both_branches(target, pool):
    assert sorted(batch.prompts() for batch in pool.batches) == [[2, 4], [8, 4]]
    for batch in pool.all(2):
        assert batch.states(1).shape == (2 * len(batch.tokens), target.layout().length - 1, 32)
        wanted = teacher_forced(target, target.encode_features(batch.features), batch.tokens)
        found = target.backbone.logits(batch.states(0)[: len(batch.tokens)])
        assert torch.allclose(found, wanted, atol=0.02)  # the pool holds half precision


@torch.inference_mode()
def test_training_sees_what_a_draft_will_see(target, pool, tmp_path):
    objective = EagleObjective(target, depth=2)
    with torch.no_grad():
        randomise(objective.module)
    drafter_export.write_eagle(objective.module, target, tmp_path)
    drafter = load_drafter(tmp_path, target)
    assert not drafter.reads_words
    for batch in pool.all(2):
        count = len(batch.tokens)
        run = target.encode_features(batch.features), None, count, target.layout(), 8, True
        state = target.start(*run)
        state.prefix_hidden = [h[:, :n] for h, n in zip(batch.hidden, batch.prompts(), strict=True)]
        own = drafter.start(state, *run)
        places = torch.arange(4).expand(count, -1)
        out = drafter.observe(own, batch.tokens[:, :3], places[:, :3], batch.states(0)[:, :3], torch.full((count,), 3))
        for depth, features in enumerate(objective.features(objective.module, batch, 2)):
            assert features.shape == (2 * count, target.layout().length - 1, 32)
            assert torch.allclose(out.hidden[:, 0], features[:, 2 + depth], atol=1e-4)
            seen = torch.ones((count, 1, depth + 1), dtype=torch.bool)
            out = drafter.expand(own, batch.tokens[:, 3 + depth, None], places[:, 3:] + depth, out.hidden, seen)


def test_objectives_are_about_tokens_that_are_sampled(target, pool):
    torch.manual_seed(0)
    objective = EagleObjective(target, 2)
    assert objective.module.config.attention_norm is False and objective.module.config.kv_heads == 2
    first = overlap(objective, objective.module, pool, 1.0)
    optimiser = torch.optim.Adam(objective.module.parameters(), 3e-3)
    choice = random.Random(0)
    for _ in range(25):
        loss = objective.loss(pool.sample(2, choice), 1.0)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert overlap(objective, objective.module, pool, 1.0) > first + 0.03
    (batch, *_) = pool.all(2)
    assert objective.predict(objective.module, batch).shape[-1] == CODES


def test_images_become_sequences_with_their_forced_tokens(tmp_path):
    path = tiny_chameleon.write(tmp_path, kind="lumina", layers=1)
    model, decoder = load_model(path), load_image_decoder(path / "chameleon_vqgan.safetensors")
    Image.new("RGB", (20, 30), "red").save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a cup", encoding="utf-8")
    (example,) = from_folder(model, decoder, tmp_path)
    layout = model.layout()
    assert torch.equal(example.tokens[layout.forced[0] >= 0], layout.forced[layout.forced >= 0])
    assert layout.to_grid(example.tokens).max() < model.vocab
    assert torch.equal(example.features, model.encode_prompt("a cup")[0][0][0])


def test_the_command_line_trains_a_drafter_for_a_language_model(tmp_path, monkeypatch):
    model, prompts = tiny_simplear.write(tmp_path / "model", layers=1), tmp_path / "prompts.txt"
    prompts.write_text("a cup\n", encoding="utf-8")
    command = ["drafter", *"--kind eagle --samples 3 --minutes 0.005".split(), "--model", str(model)]
    command += ["--out", str(tmp_path / "out"), "--prompts", str(prompts)]
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setattr(torch, "set_flush_denormal", lambda on: True)  # would stay on for all later tests
    command_line.main()
    drafter = load_drafter(tmp_path / "out", load_model(model))
    assert drafter.kind == "eagle" and not drafter.reads_words
    monkeypatch.setattr("sys.argv", [*command, "--kind", "small"])
    with pytest.raises(SystemExit, match="--kind eagle"):
        command_line.main()


def test_a_model_with_its_own_way_to_embed_codes_is_taught_for(tmp_path):
    """Janus has no table of image tokens, but layers that make its embeddings from code vectors."""
    model = load_model(tiny_janus.write(tmp_path / "model", layers=1))
    objective = EagleObjective(model, 1)
    with torch.no_grad():  # where linear layers may take another kernel
        wanted = model.backbone.tok_embeddings(torch.arange(model.vocab))
    assert torch.equal(objective.module.tok_embeddings.weight, wanted)
    drafter_export.write_eagle(objective.module, model, tmp_path / "drafter")
    drafter = load_drafter(tmp_path / "drafter", model)
    assert torch.allclose(drafter.module.tok_embeddings.weight, wanted, atol=0.01)
    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    del tensors["embed_tokens.weight"]
    save_file(tensors, tmp_path / "bare.safetensors")
    assert torch.equal(load_drafter(tmp_path / "bare.safetensors", model).module.tok_embeddings.weight, wanted)
