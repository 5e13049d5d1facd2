"""Front drafts: several drafts for the first token of a Jacobi window leave the distribution alone, and save passes.

As in test_exact_distributions, every image of a toy model is enumerated, and one large batch is many single runs.
"""

from dataclasses import replace

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.kernels.sampling import at, categorical, residual
from comfyui_specar.samplers.contract import SamplingParams
from comfyui_specar.samplers.drafts.trees import Tree
from comfyui_specar.samplers.methods import front, jacobi
from comfyui_specar.samplers.methods.jacobi import SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.rng import Purpose, Stream
from comfyui_specar.samplers.trace import Source

from ..support.closeness import fp64
from ..support.rules import RELAXED
from ..support.tiny import VOCAB as TINY_VOCAB
from ..support.tiny import caption_features, fill, llamagen
from ..support.toy import ToyModel, chi_square, marginal, plain, request, with_kept_tokens, with_line_ends

RUNS = 16_000
MANY = 120_000  # shows the smallest bias below beyond doubt
LAYOUTS = {"row": (plain(2, 3), 0), "line_ends": (with_line_ends(2, 2), 2), "kept": (with_kept_tokens(2, 3), 0)}
MODELS = {name: ToyModel(layout, specials) for name, (layout, specials) in LAYOUTS.items()}
SHARP = SJD(window=4, initial="uniform", front=2)  # the setting in which biased variants show best


class NoCodebook(ToyModel):
    codebook = None


def draw(method, name, params=None, seed=0, batch=RUNS, model=None, **more):
    asked = request(model or MODELS[name], LAYOUTS[name][0], params, seed, batch)
    return method.sample(replace(asked, **more))


def judge(method, name, params=None, runs=RUNS, model=None):
    """Chi-square of whole images, and of their last free positions."""
    layout = LAYOUTS[name][0]
    tokens = draw(method, name, params, batch=runs, model=model).tokens
    distribution = MODELS[name].distribution(layout, params or SamplingParams())
    late = (layout.forced[0] < 0).nonzero()[-2:, 0].tolist()
    return chi_square(tokens, distribution), chi_square(tokens[:, late], marginal(distribution, late))


def assert_exact(*arguments, **named):
    whole, late = judge(*arguments, **named)
    assert whole.z < 4 and late.z < 4, (whole, late)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("window", [2, 3, 6])
@pytest.mark.parametrize("count", [2, 3])
def test_front_drafts_sample_from_the_distribution(count, window, name):
    assert_exact(SJD(window=window, front=count), name)


@pytest.mark.parametrize("count", [2, 3])
def test_guidance_temperature_and_filters_are_part_of_the_distribution(count):
    method = SJD(window=3, front=count)
    assert_exact(method, "line_ends", SamplingParams(cfg=2.5, temperature=1.3, top_p=0.85))
    assert_exact(method, "row", SamplingParams(cfg=1.5, temperature=0.9, top_k=2))


def test_without_a_codebook_too():
    assert_exact(SHARP, "row", model=NoCodebook(LAYOUTS["row"][0]))


@pytest.mark.parametrize("count", [2, 3])
def test_exact_where_biased_variants_fail(count):
    assert_exact(replace(SHARP, front=count), "row", runs=MANY)


# Variants that must fail. Each is the real sampler with one function replaced.


def likeliest(root, first, q, noise, count, real=front.front_drafts):
    """The likeliest tokens, tested as if they were samples from q."""
    return real(root, first, q, 0 * noise, count)


def with_q_of_the_first(root, first, q, noise, count, real=front.front_drafts):
    """Samples of what is left after the first draft, tested before it."""
    tree = real(root, first, q, noise, count)
    return replace(tree, token=torch.cat((tree.token[:, :1], tree.token[:, 1:].flip(1)), dim=1))


def longest_path(run, window, tree, p, real=jacobi.verify_front):
    """Of all drafts that pass, takes one after which the window's next draft passes, too."""
    outcome, position = real(run, window, tree, p), window.committed[:, None]
    slots = [1, *range(run.method.window, p.shape[1])]
    following, q_following = window.token[:, 2], run.memory.draft_probs.at(position + 1)[:, 0]
    u_following = run.stream.uniform(position + 1, Purpose.ACCEPT, window.passes)[:, 0]
    left_p, left_q, taken = p[:, 0], tree.draft_probs[:, 0], torch.zeros_like(following)
    found, longest = taken > 0, taken > 0
    for number, slot in enumerate(slots, 1):
        draft = tree.token[:, number]
        u = run.stream.uniform(position, Purpose.SKIP, window.passes * 16 + number)[:, 0]
        passes = tree.exists[:, number] & (u < at(left_p, draft) / at(left_q, draft).clamp(min=1e-30))
        longer = passes & (u_following < at(p[:, slot], following) / at(q_following, following))
        taken = torch.where((passes & ~found) | (longer & ~longest), number, taken)
        found, longest = found | passes, longest | longer
        left_p = residual(left_p, left_q)
        left_p = left_p / left_p.sum(-1, keepdim=True)
        left_q = left_q.scatter(1, draft[:, None], 0)
        left_q = left_q / left_q.sum(-1, keepdim=True).clamp(min=1e-30)
    sampled = categorical(left_p, run.stream.uniform(position, Purpose.REDRAW, window.passes)[:, 0])
    token = torch.where(found, tree.token.gather(1, taken[:, None])[:, 0], sampled)
    verified = replace(
        outcome.verified, path=taken[:, None], token=torch.cat((token[:, None], outcome.verified.token[:, 1:]), dim=1)
    )
    slot = torch.where(found, torch.tensor([0, *slots])[taken], outcome.slot)
    return replace(outcome, verified=verified, slot=slot)


def slot_by_the_next_draft(run, window, tree, p, real=jacobi.verify_front):
    """After a rejection, column 1 is predicted after the draft that makes the window's next draft the likeliest."""
    outcome = real(run, window, tree, p)
    slots = [1, *range(run.method.window, p.shape[1])]
    following = window.token[:, 2:3].expand(-1, len(slots))
    best = torch.tensor(slots)[at(p[:, slots], following).argmax(1)]
    return replace(outcome, slot=torch.where(outcome.verified.accepted > 0, outcome.slot, best))


@pytest.mark.parametrize(
    ("module", "replaced", "broken"),
    [
        (front, "front_drafts", likeliest),
        (front, "front_drafts", with_q_of_the_first),
        (jacobi, "verify_front", longest_path),
        (jacobi, "verify_front", slot_by_the_next_draft),
    ],
)
def test_broken_front_drafts_are_caught(module, replaced, broken, monkeypatch):
    monkeypatch.setattr(module, replaced, broken)
    whole, _ = judge(SHARP, "row", runs=MANY)
    assert whole.z > 8, whole


# What they do


def test_siblings_are_samples_without_replacement():
    """Of (x, y) sampled without replacement from q, the frequencies follow q(x) q(y) / (1 - q(x))."""
    q = torch.tensor([0.5, 0.3, 0.2, 0.0])
    first = categorical(q.expand(RUNS, -1), Stream.of(0, RUNS, "cpu").uniform(torch.zeros((RUNS, 1)).long(), 0)[:, 0])
    noise = Stream.of(0, RUNS, "cpu").gumbel(torch.zeros((RUNS, 1), dtype=torch.int64), 4, Purpose.DRAFT)
    tree = front.front_drafts(torch.zeros_like(first)[:, None], first[:, None], q.expand(RUNS, 1, -1), noise, 4)
    assert tree.exists.tolist() == [[True] * 4 + [False]] * RUNS, "the last id has no mass"
    wanted = {(x, y): float(q[x] * q[y] / (1 - q[x])) for x in range(3) for y in range(3) if x != y}
    assert chi_square(tree.token[:, 1:3], wanted).z < 4


def test_the_most_similar_draft_is_one_that_exists():
    """After a rejection: the draft whose code vector is nearest to the token sampled instead; the first of equals."""
    codebook = torch.tensor([[0.0], [1.0], [2.0], [5.0]])
    drafts = [[0, 3, 2, 1], [0, 3, 2, 2], [0, 1, 3, 3], [0, 9, 0, 0]]
    exists = [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
    tree = Tree(torch.tensor(drafts), *[None] * 3, torch.tensor(exists) > 0, None, 1, 3)
    token = torch.tensor([1, 1, 2, 7])
    assert front._nearest(tree, token, codebook).tolist() == [1, 1, 0, 0]  # ids past the codebook count as its last
    assert front._nearest(tree, token, None).tolist() == [0, 0, 0, 0]


def test_with_as_many_drafts_as_tokens_the_first_is_always_accepted():
    positions = draw(SJD(window=4, initial="uniform", front=3), "row").trace.positions
    assert (positions["source"][positions["depth"] == 1] == Source.ACCEPTED).all()
    assert set(positions["rank"].unique().tolist()) == {0, 1, 2}
    assert (positions["rank"][positions["depth"] != 1] == 0).all()


def test_more_front_drafts_need_fewer_passes():
    layout = plain(2, 5)
    model = ToyModel(layout, sharpness=1, memory=1)
    passes = []
    for count in (1, 2, 3):
        trace = SJD(window=4, front=count).sample(request(model, layout, batch=4000)).trace
        passes.append(sum(trace.totals["passes_per_image"]))
    assert passes[0] > 1.05 * passes[1] > 1.05 * passes[2], passes


def test_greedy_is_the_argmax_image():
    for name in LAYOUTS:
        greedy = draw(NextToken(), name, SamplingParams(temperature=0), batch=2).tokens
        for params in (SamplingParams(top_k=1), SamplingParams(temperature=0)):
            found = draw(SJD(window=3, front=3), name, params, batch=16).tokens
            assert torch.equal(found, greedy[:1].expand_as(found))


@pytest.mark.parametrize("name", LAYOUTS)
def test_passes_never_exceed_the_tokens_and_forced_ones_are_in_place(name):
    layout = LAYOUTS[name][0]
    for window in (2, 3, layout.length):
        decoded = draw(SJD(window=window, front=3), name, batch=500)
        assert min(decoded.trace.totals["passes_per_image"]) >= 2
        assert max(decoded.trace.totals["passes_per_image"]) <= layout.length
        forced = layout.forced.expand(500, -1)
        assert torch.equal(decoded.tokens[forced >= 0], forced[forced >= 0])
        assert ((decoded.trace.positions["source"] == Source.FORCED) == (forced >= 0)).all()


def test_the_trace_tells_of_front_drafts():
    trace = draw(SJD(window=3, front=2), "row", batch=4).trace
    assert trace.settings["front"] == 2 and trace.settings["window"] == 3 and trace.settings["lossless"]
    assert trace.rounds["width"].tolist() == [1] + [4] * (len(trace.rounds["width"]) - 1)
    assert SJD.in_words(trace.settings) == "SJD, coupled, window 3, 2 front drafts"
    assert "front" not in draw(SJD(window=3), "row", batch=4).trace.settings


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (SJD(front=0), "front.* 0.*1 to 16"),
        (SJD(front=17), "front.*17.*1 to 16"),
        (SJD(front=4), "front.* 4.* 3"),
        *((SJD(reuse=reuse, front=2), f"front.* 2.*{reuse}.*coupled") for reuse in jacobi.REUSE if reuse != "coupled"),
    ],
    ids=str,
)
def test_illegal_settings_are_named(method, words):
    with pytest.raises(ValueError, match=words):
        draw(method, "row", batch=1)


# With relaxed rules


@pytest.mark.parametrize("rule", RELAXED, ids=str)
def test_relaxed_rules_keep_their_bound(rule):
    relaxed, exact = (draw(replace(SHARP, rule=each), "row") for each in (rule, SHARP.rule))
    distribution = MODELS["row"].distribution(LAYOUTS["row"][0], SamplingParams())
    noise = chi_square(exact.tokens, distribution).tv
    tv_bound = relaxed.trace.positions["tv_bound"].sum(1)
    bound = float(tv_bound.mean() + 4 * tv_bound.std() / RUNS**0.5)
    assert chi_square(relaxed.tokens, distribution).tv <= bound + noise
    assert sum(relaxed.trace.totals["passes_per_image"]) < sum(exact.trace.totals["passes_per_image"])
    sources = relaxed.trace.positions["source"]
    assert (sources == Source.RELAXED).any() and not (exact.trace.positions["source"] == Source.RELAXED).any()
    assert float(tv_bound.min()) >= 0 and float(exact.trace.positions["tv_bound"].sum()) == 0


@pytest.mark.parametrize("rule", RELAXED, ids=str)
def test_strength_zero_is_the_exact_image(rule):
    strength = torch.zeros(1, LAYOUTS["row"][0].length)
    relaxed = draw(replace(SHARP, rule=rule), "row", batch=500, strength=strength)
    assert torch.equal(relaxed.tokens, draw(SHARP, "row", batch=500).tokens)
    assert not relaxed.trace.positions["tv_bound"].any()


# On a real (tiny) backbone


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = llamagen(tmp_path_factory.mktemp("model"), text=True)
    model.attach_codebook(fill("codebook", (TINY_VOCAB, 4)), 16)
    return model


def test_the_cache_holds_what_was_accepted(model):
    """Every token's probability is that of one forward pass over the whole image, also past drafts of higher rank."""
    prompt = model.encode_features(caption_features())
    with fp64():
        out = api.sample(model, prompt, SJD(5, front=4), cfg=1.0, top_k=0, batch_size=3)
        p = model.teacher_forced(prompt, out.tokens).softmax(-1)
        wanted = at(p, out.tokens.flatten(1))
    accepted = out.trace.positions["source"] == Source.ACCEPTED
    assert (accepted & (out.trace.positions["rank"] > 0)).any()
    torch.testing.assert_close(out.trace.positions["p"], wanted)
