"""Our EAGLE drafters against the official code, on the same random weights, in fp32.

eagle.json holds what https://github.com/jadohu/LANTERN (which has a drafter class for each family of targets) gave at
commit 3a56e45 on a CPU (torch 2.13, transformers 4.45.2). Its Model classes of cnets_llamagen, cnets_anole and
cnets_lumina_mgpt were built with the entries of ``eagle_config`` in tests/support/tiny.py (plus, for the latter two, no
attention or MLP bias, rope_theta 10000, model_parallel_size 1) and filled, in evaluation mode, with the values that
``fill`` derives from the names of the parameters; the head is fill("output.weight", (32, 64)). What they read:
  hidden   fill("hidden embedding", (2, 375, 64)), both guidance branches, and the image tokens 3, 8, 13, ... (mod 32)
  LlamaGen 119 prompt pairs with id 0, then the pairs of the image tokens ("c2i": no prompt pairs)
  Anole,   7 prompt pairs and 12 image tokens (ids 4 + token mod 28); the unconditional branch stands 6 positions lower,
  Lumina   not below 0, and its first 6 pairs are hidden
What came out:
  *_features       features at the positions that the tests name; t2i_no_bias: after image token 1
  *_sums           features summed over their 64 channels, at every position (Anole, Lumina: from 6 on)
  t2i2_*           with an epsilon of 0.01, which is large enough to be noticed
  *_tree_features  three levels of drafts, as TREE says, after 6 (LlamaGen) or 12 image tokens; a draft's hidden state
                   is what the drafter gave for its parent
  t2i_chain_features  after 14 image tokens four drafts in a row, over the end of the grid's first row
  t2i_logits       the head's logits after image tokens 0, 1, 17 and 255, guided with 7.5
  t2i_caption_features  after image tokens 0 .. 5 of a caption of 7 features: the official drafter under the official
                   target (LlamaModel of modeling_llamagen_kv, as llamagen() of tiny.py but on 16 x 16 tokens, in fp32
                   under the attention mask that its 16-bit runs have), which pads the caption to 120 slots
  t2i_dynamic_*    topK_genrate(logits_processor=None): tokens and parents of the trees after image token 0 and, three
                   tokens later, token 3. No choice in them is closer than 0.005. (With exactly equal scores, as at a
                   guidance of 7.5, the official code can keep a child without its parent.)
The official code's own cached passes differ from its uncached one by up to 1.1e-6.
"""

import json
from pathlib import Path

import pytest
import torch
from comfyui_specar.kernels.logits import guide
from comfyui_specar.model_loaders.detect import load_drafter, load_model
from comfyui_specar.models.discrete_model import DiscreteModel
from comfyui_specar.models.networks.backbone import Backbone, BackboneConfig
from comfyui_specar.models.networks.positions import SequencePositions
from comfyui_specar.models.networks.prefix import TextPrefix
from comfyui_specar.samplers.contract import SamplingParams
from comfyui_specar.samplers.drafts.growing import Drafting, Root
from comfyui_specar.samplers.drafts.structures import Dynamic
from comfyui_specar.samplers.rng import Stream

from ..support.closeness import assert_as_exact, decided, fp64
from ..support.models import eagle_features, of_ids
from ..support.tiny import HEADS, SLOTS, VOCAB, caption_features, eagle_weights, fill, write_eagle, write_llamagen

OFFICIAL = json.loads((Path(__file__).parent / "eagle.json").read_text(encoding="utf-8"))
IMAGE = torch.tensor([(5 * i + 3) % VOCAB for i in range(256)])
HIDDEN = fill("hidden embedding", (2, 375, 64))
PROMPT = SLOTS - 1  # pairs before the first image token
TREE = [([7, 11, 2], [-1, -1, -1]), ([1, 30, 5, 5], [0, 0, 1, 2]), ([9, 20], [4, 6])]  # (tokens, parents) by level


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("eagle")


@pytest.fixture(scope="module")
def target(folder):
    return load_model(write_llamagen(folder / "target.safetensors", True, grid=[16, 16]))


@pytest.fixture(scope="module")
def drafter(folder, target):
    return load_drafter(write_eagle(folder / "t2i"), target)


def close(compute, *names):
    assert_as_exact(compute, [torch.tensor(OFFICIAL[name]) for name in names])


def row(*tokens):
    return torch.tensor([tokens])


def ids(prompt, image):
    """Ids of a pass: ``prompt`` pairs of the prompt, then so many image tokens, in both branches."""
    return torch.cat((torch.zeros(prompt, dtype=torch.int64), IMAGE[:image])).repeat(2, 1)


# LlamaGen, one pass


def test_features_of_a_whole_image(drafter):
    def compute():
        found = eagle_features(drafter, HIDDEN, ids(PROMPT, 256), PROMPT)
        logits = drafter.model.backbone.logits(found[:, [119, 120, 136, 374]])
        return found[:, [0, 1, 118, 119, 120, 134, 135, 136, 374]], found.sum(-1), guide(logits, 7.5)

    close(compute, "t2i_features", "t2i_sums", "t2i_logits")


def test_features_without_a_bias(folder, target):
    drafter = load_drafter(write_eagle(folder / "no bias", eagle_weights(bias=False), bias=False), target)
    close(lambda: eagle_features(drafter, HIDDEN[:, :121], ids(PROMPT, 2), PROMPT)[:, -1], "t2i_no_bias")


@pytest.mark.parametrize(
    ("name", "side", "config", "prompt", "image", "places"),
    [
        ("t2i2", 32, {"rms_norm_eps": 0.01}, PROMPT, 70, [118, 119, 150, 151, 188]),
        ("c2i", 24, {}, 0, 60, [0, 1, 23, 24, 59]),
    ],
)
def test_features_of_other_targets(folder, name, side, config, prompt, image, places):
    """Of the large grid, and of classes."""
    model = load_model(write_llamagen(folder / f"{name}.safetensors", name == "t2i2", grid=[side, side]))
    drafter = load_drafter(write_eagle(folder / name, input_type=name, **config), model)

    def compute():
        found = eagle_features(drafter, HIDDEN[:, : prompt + image], ids(prompt, image), prompt)
        return found[:, places], found.sum(-1)

    close(compute, f"{name}_features", f"{name}_sums")


# LlamaGen, as samplers use it: prompt, cached steps, drafts on drafts


def started(drafter, slack=32):
    """State after a caption that fills all slots and whose hidden states are the recorded ones."""
    target = drafter.model
    prompt, layout = target.encode_features(caption_features(SLOTS)), target.layout()
    state = target.start(prompt, None, 1, layout, slack, guided=True)
    state.prefix_hidden = list(HIDDEN[:, :SLOTS].split(1))
    return drafter.start(state, prompt, None, 1, layout, slack, guided=True)


def observe(drafter, state, first, stop, spare=0):
    """Take over image tokens first .. stop - 1, the target having fed ``spare`` rejected ones after them."""
    positions = torch.arange(first, stop + spare)[None]
    tokens = IMAGE[None, first : stop + spare].clone()
    tokens[:, stop - first :] = 0
    hidden = HIDDEN[:, PROMPT + first : PROMPT + stop + spare]
    return drafter.observe(state, tokens, positions, hidden, torch.tensor([stop - first]))


def grow(root, expand):
    """Features [2, 9, 64] of the drafts of TREE below the feature ``root`` [2, 1, 64].

    expand(tokens, depth, hidden, seen [1, T, E + T], E) feeds one level after the E drafts of those above it.
    """
    features, sees, start = root, [], 0
    for depth, (tokens, parents) in enumerate(TREE):
        end = start + len(tokens)
        for node, parent in zip(range(start, end), parents, strict=True):
            sees.append((sees[parent] if parent >= 0 else set()) | {node})
        seen = torch.tensor([[[j in sees[i] for j in range(end)] for i in range(start, end)]])
        hidden = features[:, [parent + 1 for parent in parents]]  # the root's stands first
        features = torch.cat((features, expand(tokens, depth, hidden, seen, start)), dim=1)
        start = end
    return features[:, 1:]


def test_cached_steps(drafter):
    """One by one, several at once, and with rejected tokens after those taken: always the pass over everything."""
    steps = ((1, 0), (2, 0), (3, 4), (6, 0), (7, 9), (16, 0), (17, 1), (18, 0), (64, 0), (256, 0))

    def compute():
        state, outs, done = started(drafter), [], 0
        for stop, spare in steps:
            outs.append(observe(drafter, state, done, stop, spare))
            done = stop
        return torch.cat([out.hidden for out in outs], dim=1), torch.cat([out.logits for out in outs], dim=1)

    with fp64():
        whole = eagle_features(drafter, HIDDEN, ids(PROMPT, 256), PROMPT)[:, [PROMPT + stop - 1 for stop, _ in steps]]
        logits = drafter.model.backbone.logits(whole)
    assert_as_exact(compute, [whole, logits])


def test_drafts_on_drafts(drafter):
    def compute():
        state, found = started(drafter), []
        out = observe(drafter, state, 0, 6)

        def expand(tokens, depth, hidden, seen, behind):
            positions = torch.full((1, len(tokens)), 6 + depth)
            return drafter.expand(state, row(*tokens), positions, hidden, seen).hidden

        for _ in range(2):  # expanding leaves no trace after the next observation
            found.append(grow(out.hidden, expand))
            drafter.rewind(state, torch.tensor([1]))
            out = observe(drafter, state, 5, 6)
        return found

    close(compute, "t2i_tree_features", "t2i_tree_features")


def test_a_chain_over_the_end_of_a_row(drafter):
    def compute():
        state, features = started(drafter), []
        out = observe(drafter, state, 0, 14)
        for i in range(4):
            seen = torch.ones((1, 1, i + 1), dtype=torch.bool)
            out = drafter.expand(state, IMAGE[None, 14 + i, None], row(14 + i), out.hidden, seen)
            features.append(out.hidden)
        return torch.cat(features, dim=1)

    close(compute, "t2i_chain_features")


def test_from_a_caption_to_features(drafter):
    """The official code runs target and drafter over 120 slots, 113 of them padding; our target never sees those."""
    target = drafter.model
    run = target.encode_features(caption_features(7)), None, 1, target.layout(), 8, True

    def compute():
        state = target.start(*run)
        own, hidden, found = drafter.start(state, *run), state.prefill.hidden, []
        for i in range(6):
            token, position = IMAGE[None, i, None], row(i)
            found.append(drafter.observe(own, token, position, hidden, torch.tensor([1])).hidden)
            hidden = target.step(state, token, position).hidden
            target.commit(state, torch.tensor([1]))
        return torch.cat(found, dim=1)

    close(compute, "t2i_caption_features")


@pytest.mark.parametrize(
    ("name", "tree", "cfg"),
    [("small", Dynamic(depth=4, width=4, nodes=12), 3.0), ("default", Dynamic(depth=5, width=10, nodes=58), 4.0)],
)
def test_dynamic_trees(drafter, name, tree, cfg):
    """Node for node the official tree, after the first token and after three more that were accepted."""

    def compute():
        state, layout, found = started(drafter), drafter.model.layout(), []
        work = Drafting(drafter, state, layout, SamplingParams(cfg=cfg), VOCAB, Stream.of(0, 1, "cpu"))
        for first, stop in ((0, 1), (1, 4)):
            root = Root(IMAGE[stop - 1 : stop], torch.tensor([stop]), observe(drafter, state, first, stop))
            grown = tree.grow(work, root, None, (), torch.zeros((1, 1), dtype=torch.int64))
            assert bool(grown.exists.all())
            found.append(torch.stack((grown.token[0], grown.parent[0], grown.depth[0])))
        return torch.stack(found)

    for found, wanted in zip(decided(compute).tolist(), OFFICIAL[f"t2i_dynamic_{name}"], strict=True):
        assert found == [wanted["tokens"], [0, *wanted["parents"][1:]], wanted["depth"]]


# Anole and Lumina-mGPT

LOWER = 6  # positions by which the unconditional branch stands lower, and its pairs that are hidden
CODES = VOCAB - 4  # image tokens are the words 4 .. 31
PROMPT_IDS = [9, 3, 2, 0, 3, 1, 2, 3]  # the first is in no pair
CHAMELEON_HIDDEN = HIDDEN[:, :19]
FAMILIES = [("anole", HEADS), ("lumina", 1)]  # and the rows of their q/k norms


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family[0])
def chameleon(request, folder):
    """(name, drafter)"""
    name, rows = request.param
    path = write_eagle(folder / name, eagle_weights(head_norms=rows), model_type="chameleon", input_type=None)
    prefix = TextPrefix(VOCAB, 64, lambda features, grid: torch.tensor([9.0, 3.0]).view(1, 2, 1))
    target = DiscreteModel(
        Backbone(BackboneConfig(64, 1, HEADS, 256, CODES, head_norms=rows)),
        prefix,
        name,
        (3, 4),
        SamplingParams(),
        None,
        positions=SequencePositions(),
        word_ids=range(4, VOCAB),
    )
    return name, load_drafter(path, target)


def test_chameleon_drafters_after_their_prompts(chameleon):
    """The prompt's words are paired as they are, and the shorter unconditional prompt is cropped, not padded."""
    name, drafter = chameleon
    target = drafter.model
    run = of_ids(target, PROMPT_IDS), None, 1, target.layout(), 16, True
    codes = IMAGE[None, :12] % CODES

    def compute():
        state = target.start(*run)
        state.prefix_hidden = [CHAMELEON_HIDDEN[:1, :8], CHAMELEON_HIDDEN[1:, LOWER:8]]
        own, found, done = drafter.start(state, *run), [], 0
        for stop in (1, 2, 7, 12):
            hidden = CHAMELEON_HIDDEN[:, 7 + done : 7 + stop]
            place = torch.arange(done, stop)[None]
            out = drafter.observe(own, codes[:, done:stop], place, hidden, torch.tensor([stop - done]))
            found.append(out.hidden)
            done = stop

        def expand(tokens, depth, hidden, seen, behind):
            positions = torch.full((1, len(tokens)), 12 + depth)
            return drafter.expand(own, CODES + row(*tokens), positions, hidden, seen).hidden  # some are no image tokens

        features = torch.cat(found, dim=1)
        return features[:, [0, 1, 3]], features.sum(-1), grow(found[-1], expand)

    features = torch.tensor(OFFICIAL[f"{name}_features"]).view(2, 4, 64)[:, 1:]  # after tokens 0, 1 and 11
    sums = torch.tensor(OFFICIAL[f"{name}_sums"]).view(2, 13)[:, [1, 2, 7, 12]]
    assert_as_exact(compute, [features, sums, torch.tensor(OFFICIAL[f"{name}_tree_features"])])
