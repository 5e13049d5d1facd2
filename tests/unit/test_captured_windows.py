"""Steps of next-token and Jacobi decoding as they run on a GPU: compiled as one graph, captured, replayed, read late.

Nothing of that may show: same tokens and same trace as the plain loop, also over several runs in one kept session.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from comfyui_specar import api
from comfyui_specar.samplers.contract import SamplingParams
from comfyui_specar.samplers.layout import TokenLayout
from comfyui_specar.samplers.methods.jacobi import REUSE, SJD
from comfyui_specar.samplers.methods.next_token import NextToken
from comfyui_specar.samplers.rules.cool_sd import CoolSD
from comfyui_specar.samplers.rules.lantern import Lantern

from ..support.captured_runs import assert_same_run, captured
from ..support.tiny import CAPTION, VOCAB, caption_features, fill, llamagen
from ..support.toy import ToyModel, chi_square, plain, request, with_kept_tokens, with_line_ends
from ..support.windows import begun, decided, step, three_passes

LAYOUTS = {"row": (plain(2, 3), 0), "line_ends": (with_line_ends(2, 2), 2), "kept": (with_kept_tokens(2, 3), 0)}
METHODS = [
    NextToken(),
    *(SJD(3, reuse) for reuse in REUSE),
    SJD(4, initial="repeat"),
    SJD(6, "gumbel", "upper"),
    SJD(3, rule=CoolSD(3)),
    SJD(4, "resample", "left", rule=Lantern(2, 0.6, "paper")),
    SJD(4, initial="uniform"),
    SJD(4, settle=0.3),
    SJD(5, settle=0.5),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = llamagen(tmp_path_factory.mktemp("model"), text=True)
    model.attach_codebook(fill("codebook", (VOCAB, 4)), 16)
    return model


# Toy models, whose every distribution is known


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_replaying_a_step_is_the_plain_loop(method, name):
    layout, specials = LAYOUTS[name]
    model, params = ToyModel(layout, specials), SamplingParams(cfg=1.5, temperature=1.2)
    asked = [request(model, layout, params, seed, batch=5) for seed in (0, 40, 0)]
    wanted = [method.sample(one) for one in asked]
    with captured() as made:
        found = [method.sample(one) for one in asked]
    for one, two in zip(found, wanted, strict=True):
        assert_same_run(one, two)
    assert len(made) == made[0].captured == 1, "one graph for all three runs"
    assert made[0].replayed > sum(d.trace.totals["target_passes"] for d in found) - 3


def test_strength_and_kept_tokens_are_inputs_of_a_graph():
    layout, model = with_kept_tokens(2, 3), ToyModel(plain(2, 3))
    other = replace(layout, forced=layout.forced.flip(1))
    strengths = [torch.full((1, 6), 0.3), torch.tensor([[0.0, 1, 1, 0, 1, 0.5]])]
    method = SJD(4, initial="uniform", rule=CoolSD(4))
    asked = [replace(request(model, one, batch=200), strength=s) for one in (layout, other) for s in strengths]
    wanted = [method.sample(one) for one in asked]
    with captured() as made:
        found = [method.sample(one) for one in asked]
    assert made[0].captured == 1
    for one, two in zip(found, wanted, strict=True):
        assert_same_run(one, two)
    assert not torch.equal(found[0].trace.positions["tv_bound"], found[1].trace.positions["tv_bound"])


MOVED = [{"cfg": 2.5}, {"temperature": 0.5}, {"top_k": 1}, {"top_p": 0.6}]
HEATED = [{"temperature": 0.5}, {"entropy": (5.0, 2.0, 0.9)}]


@pytest.mark.parametrize("method", [NextToken(), SJD(3), SJD(3, "gumbel")], ids=str)
@pytest.mark.parametrize(("more", "moves"), [({}, MOVED), ({"entropy": (2.5, 1.0, 0.6)}, HEATED)], ids=str)
def test_moved_sliders_need_no_other_graph(more, moves, method):
    base = SamplingParams(1.5, 1.2, 2, 0.9, **more)
    settings = [base, *(replace(base, **moved) for moved in moves)]
    model = ToyModel(plain(2, 3))
    asked = [request(model, plain(2, 3), params, batch=40) for params in settings]
    wanted = [method.sample(one) for one in asked]
    with captured() as made:
        found = [method.sample(one) for one in asked]
    assert len(made) == made[0].captured == 1
    for one, two in zip(found, wanted, strict=True):
        assert_same_run(one, two)
    assert len({tuple(one.tokens.flatten().tolist()) for one in found}) == len(found), "each was heeded"


@pytest.mark.parametrize(
    "switched", [{"temperature": 0}, {"top_k": 2}, {"top_p": 0.6}, {"entropy": (2.5, 1.0, 0.6)}], ids=str
)
@pytest.mark.parametrize("method", [NextToken(), SJD(3)], ids=str)
def test_what_is_switched_on_is_another_graph_on_the_same_memory(method, switched):
    model = ToyModel(plain(2, 3))
    asked = [
        request(model, plain(2, 3), params, batch=9) for params in (SamplingParams(), SamplingParams(**switched))
    ] * 2
    wanted = [method.sample(one) for one in asked]
    with captured() as made:
        found = [method.sample(one) for one in asked]
    assert len(made) == 1 and made[0].captured == 2
    for one, two in zip(found, wanted, strict=True):
        assert_same_run(one, two)


@pytest.mark.parametrize(
    "changed",
    [
        {"params": SamplingParams(cfg=2.0)},
        {"batch": 3},
        {"layout": with_kept_tokens(2, 3)},
        {"strength": torch.ones(1, 6)},
        {"layout": TokenLayout(3, 2, 2, plain(2, 3).forced)},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", [NextToken(), SJD(3)], ids=str)
def test_a_graph_is_not_replayed_for_another_setting(method, changed):
    model = ToyModel(plain(2, 3))
    asked = request(model, plain(2, 3), batch=2)
    with captured() as made:
        method.sample(asked)
        found = method.sample(replace(asked, **changed))
    assert len(made) == 2
    assert_same_run(found, method.sample(replace(asked, **changed)))


@pytest.mark.parametrize(
    "other",
    [SJD(4), SJD(3, "gumbel"), SJD(3, initial="left"), SJD(3, rule=CoolSD(2)), SJD(3, settle=0.1), NextToken()],
    ids=str,
)
def test_a_graph_is_not_replayed_for_another_method(other):
    asked = request(ToyModel(plain(2, 3)), plain(2, 3), batch=2)
    with captured() as made:
        SJD(3).sample(asked)
        found = other.sample(asked)
    assert len(made) == 2
    assert_same_run(found, other.sample(asked))


def test_a_result_stays_when_its_session_goes_on():
    asked = request(ToyModel(plain(2, 3)), plain(2, 3), batch=2)
    for method in (NextToken(), SJD(3)):
        with captured():
            first = method.sample(asked)
            before = first.tokens.clone()
            method.sample(replace(asked, seed=9))
        assert torch.equal(first.tokens, before)
        assert_same_run(first, method.sample(asked))


@pytest.mark.parametrize(
    "method", [NextToken(), *(SJD(4, reuse) for reuse in REUSE if reuse != "threshold_paper")], ids=str
)
def test_the_captured_path_samples_from_the_distribution(method):
    for layout, specials in LAYOUTS.values():
        model = ToyModel(layout, specials)
        with captured() as made:
            tokens = method.sample(request(model, layout, batch=4000)).tokens
        assert made[0].captured == 1 and chi_square(tokens, model.distribution(layout, SamplingParams())).z < 4


def test_a_late_host_launches_one_step_more_and_reports_what_it_knows():
    layout, seen = plain(2, 3), []
    asked = request(ToyModel(layout), layout, batch=3, callback=lambda p: seen.append((p.passes, p.committed.tolist())))
    with captured() as made:
        found = SJD(3).sample(asked)
    passes = found.trace.totals["target_passes"]
    assert [p for p, _ in seen] == list(range(passes + 1)) and seen[-1][1] == [6] * 3
    assert made[0].replayed == passes - 2, "one step warms up, one is recorded, and the last is launched in vain"
    assert (found.trace.rounds["committed"].sum(1) > 0).all() and len(found.trace.rounds["committed"]) == passes


class Fed(ToyModel):
    """Writes down what it is fed."""

    def step(self, state, tokens, *more, **named):
        self.fed.append(tokens.tolist())
        return super().step(state, tokens, *more, **named)


@pytest.mark.parametrize("reuse", REUSE)
def test_the_callback_is_shown_the_guesses_that_the_next_pass_feeds(reuse):
    """Also where the host learns late: tokens, guesses and their start are those of the newest pass."""
    layout = plain(2, 4)

    def run():
        model, seen = Fed(layout), []
        model.fed = []
        asked = request(
            model,
            layout,
            batch=2,
            callback=lambda p: seen.append((p.start.tolist(), p.draft.tolist(), p.tokens.tolist())),
        )
        SJD(4, reuse).sample(asked)
        return model.fed, seen

    fed, seen = run()
    assert len(seen) == len(fed) + 1 > 3
    for (start, draft, tokens), given in zip(seen, fed, strict=False):
        roots = [row[n - 1] for row, n in zip(tokens, start, strict=True)]
        assert given == [[root, *guesses] for root, guesses in zip(roots, draft, strict=True)]
    with captured():
        late = run()[1]
    assert late[: len(seen)] == seen and len(late) == len(seen) + 1


def test_a_method_without_guesses_shows_none():
    layout, seen = plain(2, 3), []
    NextToken().sample(request(ToyModel(layout), layout, callback=lambda p: seen.append((p.draft, int(p.start)))))
    assert seen == [(None, n + 1) for n in range(6)]


# A real (tiny) backbone


@pytest.mark.parametrize(
    "method",
    [
        NextToken(),
        *(SJD(5, reuse) for reuse in REUSE),
        SJD(7, "gumbel", "repeat"),
        SJD(5, rule=Lantern(5, 0.3)),
        SJD(5, settle=0.3),
    ],
    ids=str,
)
def test_prompts_and_seeds_change_within_a_session(model, method):
    prompts = [model.encode_features(caption_features()), model.encode_features(fill("another", (1, 5, CAPTION)))]

    def runs():
        return [
            api.sample(model, prompt, method, cfg=2.0, top_k=9, batch_size=2, seed=seed)
            for prompt, seed in zip(prompts * 2, (1, 1, 2, 3), strict=True)
        ]

    wanted = runs()
    with captured() as made:
        found = runs()
    model.sessions.clear()
    for one, two in zip(found, wanted, strict=True):
        assert_same_run(one, two)
    assert len(made) == 1 and made[0].replayed > 0 and made[0].active


# Compiling

TOYS = {name: ToyModel(layout, specials) for name, (layout, specials) in LAYOUTS.items()}


@pytest.mark.parametrize(
    ("method", "options", "name"),
    [
        (SJD(), {}, "row"),
        (SJD(settle=0.3), {}, "line_ends"),
        (SJD(reuse="gumbel", initial="left"), {"cfg": 1.0}, "kept"),
        (SJD(reuse="threshold_paper", initial="upper"), {"temperature": 0}, "row"),
        (SJD(reuse="threshold_exact", initial="uniform"), {"top_p": 0.8}, "line_ends"),
        (SJD(reuse="resample", initial="repeat"), {"top_k": 2}, "kept"),
        (SJD(), {"top_p": 0.8, "entropy": (2.5, 1.0, 0.6)}, "row"),
    ],
    ids=str,
)
def test_a_window_compiles_as_one_graph(method, options, name):
    torch.compiler.reset()
    params = SamplingParams(**{"cfg": 2.0} | options)
    with torch.inference_mode():
        plain = three_passes(step, *begun(method, TOYS[name], params, None))
        compiled = torch.compile(step, fullgraph=True, backend="eager")
        found = three_passes(compiled, *begun(method, TOYS[name], params, None))
    assert all(torch.equal(a, b) for a, b in zip(decided(plain), decided(found), strict=True))


def test_next_token_compiles_as_one_graph(model):
    torch.compiler.reset()
    with pytest.MonkeyPatch.context() as patch:
        wanted = api.sample(model, model.encode_features(caption_features()), NextToken(), seed=3)
        patch.setattr(NextToken, "step", torch.compile(NextToken.step, fullgraph=True, backend="eager"))
        found = api.sample(model, model.encode_features(caption_features()), NextToken(), seed=3)
    assert_same_run(found, wanted)
