"""Steps of models and drafters as graphs: captured once and replayed, on memory that outlives a run, looking no further
than promised. Whatever is compared: nothing of it changes a result."""

from __future__ import annotations

import pytest
import torch
from comfyui_specar.device import batch_invariant
from comfyui_specar.device.graphs import leaves, map_tensors
from comfyui_specar.model_loaders.detect import load_drafter
from comfyui_specar.models.networks.cache import BUCKET

from ..support.closeness import fp64
from ..support.models import of_ids
from ..support.tape import TapeGraphs, captured_call
from ..support.tiny import caption_features, fill, llamagen, write_eagle, write_llamagen
from ..support.tiny_text import text_model

pytestmark = pytest.mark.usefixtures("without_gradients")

BATCH, SLACK = 2, 9
TREE = (-1, -1, 0, 2, 1)  # parents of the nodes of a pass
NODES = len(TREE)
DEPTH = torch.tensor([0, 0, 1, 2, 1])
KEPT = ((2, 1), (0, 3), (3, 0), (1, 2), (3, 3))  # how much of its path each row keeps, pass after pass
PATHS = torch.tensor([[0, 2, 3], [1, 4, 4]])


def visible() -> torch.Tensor:
    """Who of the tree sees whom [BATCH, NODES, NODES]."""
    seen = torch.eye(NODES, dtype=torch.bool)
    for node, parent in enumerate(TREE):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen.expand(BATCH, -1, -1)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {"grid": llamagen(tmp_path_factory.mktemp("model"), True), "sequence": text_model()}


@pytest.fixture(scope="module")
def drafters(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafters")
    return {
        "eagle": load_drafter(write_eagle(folder / "eagle", input_type=None, prompt="padded"), models["grid"]),
        "same model": load_drafter(write_llamagen(folder / "model.safetensors", True), models["grid"]),
    }


def begin(model, name: str, prompt: int, into=None, slack: int = SLACK, guided: bool = True):
    """A run after the first or second prompt, of which the second is shorter."""
    if name == "grid":
        conditioning = model.encode_features(caption_features(9)[:, : 9 - 3 * prompt] + prompt)
    else:
        conditioning = of_ids(model, [[35, 37, 36, 39, 34, 5], [36, 5]][prompt])
    return model.start(conditioning, None, BATCH, model.layout(), slack, guided, into)


def feeds(model):
    """What five passes are fed: tokens, positions, counts; the rows drift apart."""
    committed = torch.zeros(BATCH, dtype=torch.int64)
    for turn, kept in enumerate(KEPT):
        tokens = torch.randint(model.vocab, (BATCH, NODES), generator=torch.Generator().manual_seed(turn))
        counts = torch.tensor(kept)
        yield tokens, committed[:, None] + DEPTH, counts
        committed = committed + counts


def tree_step(model, state):
    def step(tokens, positions, counts, seen, paths):
        out = model.step(state, tokens, positions, seen)
        model.commit(state, counts, paths)
        return out

    return step


def run(model, state, graphs=None, reach=False):
    """Results of all passes; as graphs, or called."""
    found, fed, out = [], 0, None
    for inputs in feeds(model):
        if reach:
            assert model.set_attention_length(state, fed + NODES) < state.cache.capacity
        every = *inputs, visible(), PATHS
        step = tree_step(model, state)
        out = captured_call(graphs, "step", step, every, out) if graphs else step(*every)
        found.append(map_tensors(torch.Tensor.clone, out))
        fed += int(inputs[2].max())
    return found


def same(found, wanted, tolerance=1e-6):
    pairs = list(zip(leaves(found), leaves(wanted), strict=True))
    assert pairs
    for a, b in pairs:
        assert torch.allclose(a, b, atol=tolerance), float((a - b).abs().max())


@pytest.mark.parametrize("name", ["grid", "sequence"])
def test_a_captured_step_is_a_called_one_over_trees_and_runs(models, name):
    """Five passes each after three prompts, two of the three in the memory of the first, all with one graph."""
    model, graphs, state = models[name], TapeGraphs(torch.device("cpu")), None
    for number, prompt in enumerate((0, 1, 0)):
        before, state = state, begin(model, name, prompt, state)
        assert before is None or state is before
        same(run(model, state, graphs), run(model, begin(model, name, prompt)))
        assert (graphs.active, graphs.captured) == (True, 1), number
    assert graphs.replayed == 3 * len(KEPT) - 2


@pytest.mark.parametrize("name", ["grid", "sequence"])
@fp64()
def test_looking_no_further_than_promised_changes_nothing(models, name):
    model = models[name]
    same(run(model, begin(model, name, 0), reach=True), run(model, begin(model, name, 0)))


def test_a_promise_is_rounded_up_and_ends_with_the_run(models):
    model = models["grid"]
    state = begin(model, "grid", 0)
    capacity = batch_invariant.padded_length(2 * BUCKET, torch.float32)  # up to 128 tokens of prompt and of image
    assert state.cache.capacity == capacity and state.longest == 9
    lengths = [model.set_attention_length(state, n) for n in (1, 23, 24, 500)]
    assert lengths == [batch_invariant.BUCKET, batch_invariant.BUCKET, 2 * batch_invariant.BUCKET, capacity]
    model.set_attention_length(state, 1)
    assert model.set_attention_length(state, None) == capacity, "nothing is promised"
    model.set_attention_length(state, 1)
    assert begin(model, "grid", 1, state) is state and state.cache.attention_length == capacity


def test_memory_of_other_sizes_is_not_taken_over(models):
    model = models["grid"]
    state = begin(model, "grid", 0)
    for options in ({"slack": SLACK + 1}, {"slack": 2 * BUCKET}, {"guided": False}):
        other = begin(model, "grid", 0, state, **options)
        assert other is not state
        same(run(model, other), run(model, begin(model, "grid", 0, **options)))
    half = begin(model, "grid", 0, guided=False)
    conditioning = model.encode_features(caption_features(9))
    both = model.start(conditioning, None, 1, model.layout(), SLACK, True, half)  # as many rows, of other meaning
    assert both is not half and both.branches == 2


@pytest.mark.parametrize("kind", ["eagle", "same model"])
def test_captured_drafters(models, drafters, kind):
    """Observing, two levels of drafts on one another, and the next run after a shorter prompt in the same memory."""
    model, drafter = models["grid"], drafters[kind]
    layout, graphs, kept, target = model.layout(), TapeGraphs(torch.device("cpu")), None, None
    hidden = fill("hidden embedding", (2 * BATCH, NODES, model.backbone.config.dim))
    first, second = visible()[:, :2, :2], torch.cat((visible()[:, 2:4, :2], visible()[:, 2:4, 2:4]), 2)

    def level(state):
        def step(tokens, positions, counts, hidden):
            root = drafter.observe(state, tokens, positions, hidden, counts)
            place = positions[:, :1] + counts[:, None]
            one = drafter.expand(state, tokens[:, :2], place.expand(-1, 2), root.hidden.expand(-1, 2, -1), first)
            two = drafter.expand(state, tokens[:, 2:4], place.expand(-1, 2) + 1, one.hidden, second)
            return root, one, two

        return step

    def drafted(state, graphs=None):
        found, begun, out = [], torch.zeros(BATCH, 1, dtype=torch.int64), None
        for turn, counts in enumerate(((3, 1), (2, 4), (1, 1), (4, 2))):
            tokens = torch.randint(model.vocab, (BATCH, NODES), generator=torch.Generator().manual_seed(turn))
            inputs = tokens, begun + torch.arange(NODES), torch.tensor(counts), hidden + turn
            out = captured_call(graphs, "k", level(state), inputs, out) if graphs else level(state)(*inputs)
            found.append(map_tensors(torch.Tensor.clone, out))
            begun = begun + torch.tensor(counts)[:, None]
        return found

    for prompt in (0, 1):
        conditioning = model.encode_features(caption_features(9)[:, : 9 - 3 * prompt])
        target = model.start(conditioning, None, BATCH, layout, SLACK, True, target)
        before, kept = kept, drafter.start(target, conditioning, None, BATCH, layout, SLACK, True, kept)
        assert before is None or kept is before
        fresh = drafter.start(target, conditioning, None, BATCH, layout, SLACK, True)
        wanted = drafted(fresh)
        same(drafted(kept, graphs), wanted)
        assert (graphs.active, graphs.captured) == (True, 1)
        narrow = drafter.start(target, conditioning, None, BATCH, layout, SLACK, True)
        cache = narrow.cache if kind == "eagle" else narrow.own.cache
        assert drafter.set_attention_length(narrow, 24) < cache.capacity or kind == "eagle"  # padded prompts are long
        same(drafted(narrow), wanted, 2e-5)  # logits of 12
