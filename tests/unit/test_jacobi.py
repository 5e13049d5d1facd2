"""The Jacobi samplers and next-token on real (tiny) LlamaGen models: one seed, one image, whatever the way."""

import threading
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.device.cpu import unpack
from comfyui_specar.samplers.drafts.guesses import DraftState, Ring, first_guesses, neighbour_probs
from comfyui_specar.samplers.layout import TokenLayout
from comfyui_specar.samplers.methods import jacobi
from comfyui_specar.samplers.methods.jacobi import COMPARED, REUSE, SJD, Jacobi
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.rules.cool_sd import UniformRSD

from ..support.tiny import caption_features, llamagen
from ..support.toy import plain

METHODS = [NextToken(), *(SJD(window=5, reuse=reuse) for reuse in REUSE), SJD(window=5, settle=0.3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return llamagen(tmp_path_factory.mktemp("model"), text=True)


def sample(model, method, **options):
    prompt = model.encode_features(caption_features())
    return api.sample(model, prompt, method, **{"cfg": 2.0, "top_k": 0} | options)


@pytest.mark.parametrize(("window", "length", "width"), [(None, 256, 16), (None, 9, 9), (5, 256, 5)])
def test_the_window_is_that_of_16_tokens_unless_given(window, length, width):
    assert SJD(window).width(SimpleNamespace(length=length)) == width


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (SJD(window=17), "window.*17.*2 to 16"),
        (SJD(reuse="magic"), "reuse.*'magic'"),
        (Jacobi(window=40), "window.*40.*2 to 16"),
        *((SJD(reuse=reuse, rule=UniformRSD(2)), f"'{reuse}'.*coupled") for reuse in COMPARED),
        *((SJD(reuse=reuse, settle=0.1), f"settle.*{reuse}.*coupled") for reuse in REUSE if reuse != "coupled"),
    ],
)
def test_illegal_settings_are_named(model, method, words):
    with pytest.raises(ValueError, match=words):
        sample(model, method)


@pytest.mark.parametrize("method", [NextToken(), SJD()], ids=str)
def test_illegal_parameters_are_named(model, method):
    with pytest.raises(ValueError, match="cfg.*0.5"):
        sample(model, method, cfg=0.5)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_callback_sees_every_pass(model, method):
    seen = []
    out = sample(
        model,
        method,
        batch_size=3,
        callback=lambda p: seen.append((p.passes, p.length, p.committed.tolist(), p.tokens.clone())),
    )
    assert [s[0] for s in seen] == list(range(1, out.trace.totals["target_passes"] + 1))
    final = out.tokens.flatten(1)
    for before, after in pairwise(seen):
        assert all(b <= a for b, a in zip(before[2], after[2], strict=True))
    for _, length, committed, tokens in seen:
        assert length == 16
        for row, count in enumerate(committed):
            assert torch.equal(tokens[row, :count], final[row, :count]), "a committed token never changes"
            assert (tokens[row, count:] == 0).all()
    assert seen[-1][2] == [16] * 3


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_an_interruption_leaves_nothing_behind(model, method):
    class InterruptError(Exception):
        pass

    def stop(progress):
        if progress.passes == 2:
            raise InterruptError

    wanted = sample(model, method, seed=1).tokens
    threads = threading.active_count()
    with pytest.raises(InterruptError):
        sample(model, method, seed=1, callback=stop)
    assert threading.active_count() == threads
    assert torch.equal(sample(model, method, seed=1).tokens, wanted)


def test_the_users_tensors_are_not_touched(model):
    prompt = model.encode_features(caption_features())
    layout = model.layout()
    features, forced = prompt[0][0].clone(), layout.forced.clone()
    unpack(model)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    api.sample(model, prompt, SJD(4), layout=layout)
    unpack(model)
    assert torch.equal(prompt[0][0], features) and torch.equal(layout.forced, forced)
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


def probs_of_positions(count, slots, vocab):
    """A ring in which the last ``slots`` of ``count`` positions have distributions of their own."""
    own = torch.rand(count, vocab, generator=torch.Generator().manual_seed(0)).softmax(-1)
    ring = Ring.empty(1, slots, vocab, torch.device("cpu"))
    for position in range(count):
        ring.put(torch.tensor([[position]]), own[None, position : position + 1])
    return own, ring


@pytest.mark.parametrize(
    ("known", "position", "left", "upper"),
    [
        (5, 6, 5, 2),
        (5, 7, 5, 3),
        (5, 8, 4, 4),
        (5, 9, 5, 5),
        (5, 10, 2, 2),
        (5, 11, 3, 3),
        (5, 12, 4, 4),  # 5 is the second of row 1
        (3, 4, 0, 0),
        (3, 6, 2, 2),
        (3, 9, 1, 1),
        (7, 8, 4, 4),  # the row is complete: everything fresh lies below it
        (0, 1, 0, 0),
        (0, 3, 0, 0),
        (1, 2, 1, 1),
        (1, 3, 1, 1),
        (1, 6, 1, 1),
        (0, 5, 0, 0),  # in the first row there is no upper one
    ],
)
def test_neighbour_distributions_are_those_of_the_neighbours(known, position, left, upper):
    layout = plain(4, 4)
    own, ring = probs_of_positions(known + 1, 4, 6)

    def probs(initial, layout=layout):
        last, at = torch.tensor([[known]]), torch.tensor([[position]])
        return neighbour_probs(initial, ring, last, at, layout, 5, layout.forces)[0, 0]

    uniform = torch.tensor([0.2] * 5 + [0])
    assert torch.equal(probs("left"), own[left]) and torch.equal(probs("upper"), own[upper])
    assert torch.allclose(probs("mixed"), (own[left] + own[upper]) / 2)
    assert torch.equal(probs("uniform"), uniform) and torch.equal(probs("repeat"), uniform)
    forced = torch.full((1, 16), -1)
    forced[0, left] = 3
    assert torch.equal(probs("left", TokenLayout(4, 4, 4, forced)), uniform), "a forced token lends none"
    state = DraftState.empty("coupled", "repeat_upper", 1, 4, 6, 6, torch.device("cpu"))
    state.tokens.put(torch.arange(known + 1)[None], torch.arange(known + 1.0)[None, :, None] % 5)
    at = torch.tensor([[known]]), torch.tensor([[0]]), torch.tensor([[position]])
    token, q = first_guesses("repeat_upper", state, *at, torch.zeros(1, 1), None, layout, 5, False)
    assert token.item() == upper % 5 and q[0, 0].tolist() == [float(each == upper % 5) for each in range(6)]


def test_refinements_of_a_hand_made_run():
    """Windows of three: the first image's passes see 1-3, 3-5 and 4-6, the second's, with two tokens given, 3-5."""
    fixed = torch.tensor([[0, 1, 1, 2, 3, 3], [0, 0, 0, 1, 1, 1]], dtype=torch.int32)
    assert jacobi.refinements(fixed, 3).tolist() == [[0, 0, 0, 1, 1, 1], [0] * 6]
