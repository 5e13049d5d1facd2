"""The Jacobi samplers and next-token on real (tiny) LlamaGen models: one seed, one image, whatever the way."""

import copy
import threading
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.samplers.contract import SamplingParams
from comfyui_specar.samplers.drafts.guesses import Ring, neighbour_probs
from comfyui_specar.samplers.layout import TokenLayout
from comfyui_specar.samplers.methods import jacobi
from comfyui_specar.samplers.methods.jacobi import INITIAL, REUSE, SJD, Jacobi
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.rules.cool_sd import UniformRSD
from comfyui_specar.samplers.trace import POSITION_FIELDS
from hypothesis import given, settings
from hypothesis import strategies as st

from ..support.tiny import CAPTION, GRID, VOCAB, caption_features, fill, llamagen
from ..support.toy import VOCAB as TOY_VOCAB
from ..support.toy import ToyModel, plain, request
from ..support.windows import SIZE, begun, step, three_passes

METHODS = [NextToken(), *(SJD(window=5, reuse=reuse) for reuse in REUSE), SJD(window=5, settle=0.3)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {text: llamagen(tmp_path_factory.mktemp("model"), text) for text in (True, False)}


def sample(models, method, text=True, **options):
    model = models[text]
    prompt = model.encode_features(caption_features()) if text else model.encode_class(3)
    return api.sample(model, prompt, method, **{"cfg": 2.0, "top_k": 0} | options)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_seed_is_an_image(models, method):
    first, second = sample(models, method, seed=5), sample(models, method, seed=5)
    assert torch.equal(first.tokens, second.tokens)
    assert all(torch.equal(first.trace.positions[k], second.trace.positions[k]) for k in first.trace.positions)
    assert not torch.equal(first.tokens, sample(models, method, seed=6).tokens)
    assert first.tokens.shape == (1, *GRID) and first.tokens.min() >= 0 and first.tokens.max() < VOCAB


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("text", [True, False])
def test_image_i_of_a_batch_is_the_run_with_seed_plus_i(models, method, text):
    batch = sample(models, method, text, seed=40, batch_size=4)
    for i in range(4):
        alone = sample(models, method, text, seed=40 + i)
        assert torch.equal(batch.tokens[i], alone.tokens[0])
        assert torch.equal(batch.trace.positions["finalised_at"][i], alone.trace.positions["finalised_at"][0])


@pytest.mark.parametrize("initial", INITIAL)
@pytest.mark.parametrize("text", [True, False])
def test_gumbel_gives_the_next_token_image(models, text, initial):
    for options in ({}, {"cfg": 1.0}, {"top_k": 5, "temperature": 0.8}, {"top_p": 0.7}, {"entropy": (2.5, 3, 0.6)}):
        wanted = sample(models, NextToken(), text, seed=2, batch_size=3, **options)
        for window in (2, 7, 16):
            found = sample(models, SJD(window, "gumbel", initial), text, seed=2, batch_size=3, **options)
            assert torch.equal(found.tokens, wanted.tokens)


@pytest.mark.parametrize("text", [True, False])
def test_jacobi_is_greedy_decoding(models, text):
    wanted = sample(models, NextToken(), text, temperature=0).tokens
    for initial in INITIAL:
        found = sample(models, Jacobi(window=6, initial=initial), text, temperature=0.9, top_k=3)
        assert torch.equal(found.tokens, wanted)
        assert found.trace.totals["target_passes"] <= 16


def test_a_negative_prompt_of_another_length_is_just_another_branch(models):
    """Also where the negative prompt is longer or shorter than the prompt: next-token and same-seed Jacobi agree."""
    model, images = models[True], []
    for length in (2, 7, 19):
        negative = model.encode_features(fill("negative embedding", (1, length, CAPTION)))
        methods = (NextToken(), SJD(4, "gumbel"))
        image, same = (sample(models, method, negative=negative, seed=8) for method in methods)
        assert torch.equal(image.tokens, same.tokens)
        images.append(image.tokens)
    assert not torch.equal(images[0], images[1]) and not torch.equal(images[1], images[2])


def test_cfg_1_ignores_the_negative_prompt(models):
    negative = models[True].encode_features(fill("negative embedding", (1, 3, CAPTION)))
    without, given = (sample(models, SJD(5), cfg=1.0, negative=n) for n in (None, negative))
    assert torch.equal(without.tokens, given.tokens)


@pytest.mark.parametrize(
    ("window", "device", "dtype", "length", "width"),
    [
        (None, "cpu", torch.float32, 256, 16),
        (None, "cpu", torch.bfloat16, 256, 32),
        (None, "cuda", torch.float32, 256, 32),
        (None, "cuda", torch.bfloat16, 20, 20),
        (None, "cpu", torch.float32, 9, 9),
        (5, "cpu", torch.float32, 256, 5),
    ],
)
def test_the_window_depends_on_device_and_dtype_unless_given(window, device, dtype, length, width):
    asked = SimpleNamespace(model=SimpleNamespace(device=torch.device(device), dtype=dtype), length=length)
    assert SJD(window).width(asked) == width


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (SJD(window=17), "window.*17.*2 to 16"),
        (SJD(window=1), "window.* 1.*2 to 16"),
        (SJD(reuse="magic"), "reuse.*'magic'.*coupled, gumbel"),
        (SJD(threshold=0), "threshold.* 0.*above 0"),
        (SJD(threshold=float("nan")), "threshold.*nan"),
        (Jacobi(window=40), "window.*40.*2 to 16"),
        (SJD(reuse="gumbel", rule=UniformRSD(2)), "'gumbel'.*coupled"),
    ],
)
def test_illegal_settings_are_named(models, method, words):
    with pytest.raises(ValueError, match=words):
        sample(models, method)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cfg": 0.5}, "cfg.*0.5"),
        ({"top_k": VOCAB + 1}, f"top_k.* 0.* to {VOCAB}"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
    ],
)
@pytest.mark.parametrize("method", [NextToken(), SJD()], ids=str)
def test_illegal_parameters_are_named(models, method, options, words):
    with pytest.raises(ValueError, match=words):
        sample(models, method, **options)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_callback_sees_every_pass(models, method):
    seen = []
    out = sample(
        models,
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
def test_an_interruption_leaves_nothing_behind(models, method):
    class InterruptError(Exception):
        pass

    def stop(progress):
        if progress.passes == 2:
            raise InterruptError

    wanted = sample(models, method, seed=1).tokens
    threads = threading.active_count()
    with pytest.raises(InterruptError):
        sample(models, method, seed=1, callback=stop)
    assert threading.active_count() == threads
    assert torch.equal(sample(models, method, seed=1).tokens, wanted)


def test_the_users_tensors_are_not_touched(models):
    model = models[True]
    prompt = model.encode_features(caption_features())
    layout = model.layout()
    features, forced = prompt[0][0].clone(), layout.forced.clone()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    api.sample(model, prompt, SJD(4), layout=layout)
    assert torch.equal(prompt[0][0], features) and torch.equal(layout.forced, forced)
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_kept_tokens_stay_and_the_rest_is_generated_around_them(models, method):
    layout = models[True].layout()
    tokens = torch.randint(VOCAB, (2, *GRID), generator=torch.Generator().manual_seed(0))
    keep = torch.rand((2, *GRID), generator=torch.Generator().manual_seed(1)) < 0.5
    out = sample(models, method, batch_size=2, layout=layout.keeping(tokens, keep))
    assert torch.equal(out.tokens[keep], tokens[keep])
    assert not torch.equal(out.tokens, tokens)
    assert out.trace.summary()["tokens"] == int((~keep).sum())


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([-1, -1, 0, TOY_VOCAB - 1, TOY_VOCAB, TOY_VOCAB + 1]), min_size=12, max_size=12),
    st.integers(2, 6),
    st.sampled_from(list(REUSE)),
    st.sampled_from(INITIAL),
    st.integers(0, 1000),
)
def test_forced_ids_are_in_place_for_any_pattern(forced, window, reuse, initial, seed):
    """Two images, each with its own pattern; specials are sampled nowhere else."""
    layout = TokenLayout(2, 3, 3, torch.tensor(forced).view(2, 6))
    decoded = SJD(window, reuse, initial).sample(request(TOY, layout, seed=seed, batch=2))
    bound = layout.forced >= 0
    assert torch.equal(decoded.tokens[bound], layout.forced[bound])
    assert (decoded.tokens[~bound] < TOY_VOCAB).all()
    assert decoded.trace.totals["target_passes"] <= 6


TOY = ToyModel(plain(2, 3), specials=2)


def test_a_finished_row_stays_untouched():
    """Rows finish at different passes; afterwards neither their tokens, nor their records, nor their caches move."""
    seen = []
    decoded = SJD(window=6).sample(
        request(TOY, plain(2, 3), batch=64, callback=lambda p: seen.append((p.committed.clone(), p.tokens.clone())))
    )
    finish = torch.stack([c for c, _ in seen]).eq(6).float().argmax(0)
    assert finish.min() < finish.max(), "the test needs rows of different pace"
    for row, end in enumerate(finish.tolist()):
        assert all(torch.equal(tokens[row], seen[end][1][row]) for _, tokens in seen[end:])
        assert decoded.trace.positions["finalised_at"][row].max() == end
        assert (decoded.trace.rounds["committed"][end + 1 :, row] == 0).all()
        assert (decoded.trace.rounds["accepted"][end + 1 :, row] == 0).all()


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
        (5, 10, 2, 2),
        (5, 12, 4, 4),  # 5 is the second of row 1
        (3, 4, 0, 0),
        (3, 6, 2, 2),
        (3, 9, 1, 1),
        (7, 8, 4, 4),  # the row is complete: everything fresh lies below it
        (0, 1, 0, 0),
        (0, 3, 0, 0),
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


def test_refinements_of_a_hand_made_run():
    """Windows of three: the first image's passes see 1-3, 3-5 and 4-6, the second's, with two tokens given, 3-5."""
    fixed = torch.tensor([[0, 1, 1, 2, 3, 3], [0, 0, 0, 1, 1, 1]], dtype=torch.int32)
    assert jacobi.refinements(fixed, 3).tolist() == [[0, 0, 0, 1, 1, 1], [0] * 6]


@pytest.mark.parametrize(
    "method", [*(SJD(reuse=reuse) for reuse in REUSE), SJD(initial="repeat"), SJD(settle=0.1)], ids=str
)
def test_a_step_reads_nothing_on_the_host(models, method):
    """On the meta device there is no data to read: whatever would wait for the GPU raises."""
    model = copy.deepcopy(models[True]).to("meta")
    model.device = torch.device("meta")
    with torch.inference_mode():
        run, state = begun(
            method, model, SamplingParams(cfg=2, top_k=9, top_p=0.9), model.encode_features(caption_features())
        )
        run, state = three_passes(step, run, state)
    shapes = [(2,), (2, SIZE + 1), (2, 16), (2, 17, len(POSITION_FIELDS))]
    found = state.committed, state.token, run.record.image, run.record.positions
    assert [tuple(tensor.shape) for tensor in found] == shapes
