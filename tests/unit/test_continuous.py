"""Identities of continuous speculative decoding, counts, records and error messages.

What must be the same number in tensors of different shapes is compared in fp64, for it may be rounded differently.
"""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from comfyui_specar.samplers.continuous_contract import noises
from comfyui_specar.samplers.methods import continuous
from comfyui_specar.samplers.methods.continuous import ContinuousSpeculative
from comfyui_specar.samplers.methods.continuous_next_token import ContinuousNextToken, mask_schedule
from comfyui_specar.samplers.rng import Purpose, Stream
from comfyui_specar.samplers.trace import Source

from ..support.closeness import fp64
from ..support.toy_heads import ToyHead, ToyMixture, drawing_order, request

GRID = (3, 3)
LENGTH = 9
TARGET = ToyHead(2, GRID, bend=0.3)
DRAFTER = ToyHead(2, GRID, noise=0.3, bend=0.2, widths=(0.4, 0.35, 0.5))
MIXTURE, MIXTURE_DRAFTER = ToyMixture(2, GRID), ToyMixture(2, GRID, noise=0.3)
MODES = [("block", "prefix"), ("block", "drafts"), ("prefix", "drafts"), ("exact", "drafts")]
MODES += [("printed", "drafts"), ("published", "prefix"), ("published", "drafts")]


def method(mode="block", condition=None, drafter=DRAFTER, **settings):
    return ContinuousSpeculative(
        drafter, **{"length": 4, "prefill": 0.2, "mode": mode, "condition": condition, "tolerance": 0.5} | settings
    )


def decided_in_place(mode):
    return continuous.MODES[mode].in_place


def ragged_kept(batch):
    """Tokens, and which are kept: none, some, and all, row by row."""
    g = torch.Generator().manual_seed(3)
    kept = torch.rand(batch, LENGTH, generator=g).argsort(dim=1) < torch.linspace(0, LENGTH, batch)[:, None]
    return torch.randn(batch, LENGTH, 2, generator=g), kept


def assert_whole(decoded, batch):
    """Every token is sampled, and recorded once, in an order that is a permutation."""
    trace, tokens = decoded.trace, decoded.tokens
    assert tokens.shape == (batch, LENGTH, 2) and tokens.dtype == torch.get_default_dtype()
    failed = (trace.positions["tries"] < 0) & (trace.settings.get("mode") == "published")
    assert tokens.isfinite().all() and torch.equal((tokens == 0).all(-1), failed)
    assert torch.equal(drawing_order(decoded).sort(dim=1).values, torch.arange(LENGTH).expand(batch, -1))
    source, order = trace.positions["source"], trace.positions["order"]
    forced = source == Source.FORCED
    kept = forced.sum(1)
    assert torch.equal(trace.rounds["committed"].sum(0), LENGTH - kept)
    turn = trace.positions["finalised_at"].masked_fill(forced, 0).gather(1, drawing_order(decoded))
    assert (turn.diff(dim=1) >= 0).all(), "passes follow the order"
    assert (order[forced] < kept.repeat_interleave(kept)).all(), "kept tokens come first"
    accepted = (source == Source.ACCEPTED) | (source == Source.RELAXED)
    assert torch.equal(trace.rounds["accepted"].sum(0), accepted.sum(1))
    drafted = trace.positions["depth"] > 0
    assert torch.equal(drafted, accepted | (source == Source.RESIDUAL))
    assert (trace.positions["log_ratio"][~drafted] == 0).all() and (trace.positions["distance"][~drafted] == 0).all()
    bonus = (source == Source.BONUS) & (trace.settings["method"] == "continuous_speculative")
    assert torch.equal(trace.positions["block"] > 0, drafted | bonus)
    blocks = trace.positions["block"].unique().tolist()
    assert [n for n in blocks if n] == list(range(1, 1 + max(blocks))), "blocks are numbered one after the other"
    assert (trace.positions["tries"][source != Source.RESIDUAL] == 0).all()


# Rows


@pytest.mark.parametrize("keeping", [False, True])
@pytest.mark.parametrize(
    "sampler",
    [
        *(method(*mode, aligned=aligned) for mode in MODES for aligned in (True, False)),
        *(ContinuousNextToken(iterations) for iterations in (None, 1, 4)),
    ],
)
@fp64()
def test_batch_rows_equal_single_runs(sampler, keeping):
    """Image i of a batch is that of a run of its own with seed + i, in every number that is recorded."""
    batch, seed = 6, 2**33
    tokens, kept = ragged_kept(batch)
    keep = {"tokens": tokens, "kept": kept} if keeping else {}
    together = sampler.sample(request(TARGET, batch, seed, cfg=1.7, **keep))
    assert_whole(together, batch)
    for i in range(batch - keeping):  # the last row keeps everything, which is refused alone
        alone = sampler.sample(request(TARGET, 1, seed + i, cfg=1.7, **{k: v[i : i + 1] for k, v in keep.items()}))
        torch.testing.assert_close(together.tokens[i], alone.tokens[0])
        for name, values in alone.trace.positions.items():
            torch.testing.assert_close(together.trace.positions[name][i], values[0], msg=name)
        assert together.trace.totals["passes_per_image"][i] == alone.trace.totals["target_passes"]
    if keeping:
        assert torch.equal(together.tokens[kept], tokens[kept])
        assert torch.equal(together.trace.positions["source"] == Source.FORCED, kept)


@pytest.mark.parametrize("mode", continuous.MODES)
def test_mixtures_go_through_every_mode(mode):
    decoded = method(mode, "drafts", MIXTURE_DRAFTER).sample(request(MIXTURE, 20))
    assert_whole(decoded, 20)
    assert 0 < decoded.trace.summary()["acceptance_rate"] < 1


# The drafter is the target


@pytest.mark.parametrize(("mode", "condition"), [m for m in MODES if m[1] == "drafts"])
@fp64()
def test_a_drafter_that_is_the_target_is_always_right(mode, condition):
    decoded = method(mode, condition, TARGET, tolerance=1e-3).sample(request(TARGET, 50, cfg=1.7))
    trace = decoded.trace
    drafted = trace.positions["depth"] > 0
    for name in ("log_ratio", "distance"):
        torch.testing.assert_close(trace.positions[name], torch.zeros(50, LENGTH))
    assert (trace.positions["source"][drafted] == (Source.ACCEPTED if mode == "exact" else Source.RELAXED)).all()
    assert trace.summary()["acceptance_rate"] == 1
    # After the prefill of 2: blocks of 4, and with a first rejection that never comes, one token more.
    assert trace.totals["target_passes"] == 2 + math.ceil(7 / (4 if decided_in_place(mode) else 5))
    if not continuous.MODES[mode].noise:  # whose tokens have noise of their own
        torch.testing.assert_close(decoded.tokens, ContinuousNextToken().sample(request(TARGET, 50, cfg=1.7)).tokens)


@fp64()
def test_a_target_that_does_not_see_the_drafts_rejects_its_own():
    """The published code's shortcut: the same model, but it judges the block without its beginning."""
    trace = method("block", "prefix", TARGET).sample(request(TARGET, 50)).trace
    assert 0.2 < trace.summary()["acceptance_rate"] < 0.98
    first = trace.positions["depth"] == 1
    assert trace.positions["log_ratio"][first].abs().max() < 1e-9  # nothing is hidden from it there
    assert (trace.positions["source"][first] == Source.RELAXED).all()


# The two ends of the tolerance


@pytest.mark.parametrize(("mode", "condition"), MODES[:3])
@pytest.mark.parametrize("prefill", [0, 0.5])
@fp64()
def test_an_infinite_tolerance_gives_the_drafters_image(mode, condition, prefill):
    run = method(mode, condition, tolerance=math.inf, prefill=prefill, length=LENGTH)
    decoded = run.sample(request(TARGET, 20, cfg=1.7))
    drawn = drawing_order(decoded).argsort(dim=1)
    begun = drawn < round(prefill * LENGTH)
    whole = ContinuousNextToken().sample(request(TARGET, 20, cfg=1.7)).tokens
    torch.testing.assert_close(decoded.tokens[begun], whole[begun])
    rest = ContinuousNextToken().sample(request(DRAFTER, 20, cfg=1.7, tokens=decoded.tokens, kept=begun))
    torch.testing.assert_close(decoded.tokens, rest.tokens)
    assert decoded.trace.summary()["acceptance_rate"] == 1


@pytest.mark.parametrize("condition", ["prefix", "drafts"])
@fp64()
def test_a_tolerance_of_zero_gives_the_targets_own_predictions(condition):
    """Parallel ones: those of a block see nothing of it, or the drafts of it, which are then thrown away."""
    prefill, length, batch = 2, 4, 20
    decoded = method("block", condition, tolerance=0, length=length, prefill=prefill / LENGTH).sample(
        request(TARGET, batch)
    )
    assert decoded.trace.summary()["acceptance_rate"] == 0
    if condition == "drafts":
        first = decoded.trace.positions["order"] <= prefill  # and what follows it: the first of the first block
        other = method("block", "prefix", tolerance=0, length=length, prefill=prefill / LENGTH)
        torch.testing.assert_close(decoded.tokens[first], other.sample(request(TARGET, batch)).tokens[first])
        return
    rank = decoded.trace.positions["order"].long()
    begin = torch.where(rank < prefill, rank, (rank - prefill) // length * length + prefill)
    seen = rank[:, None] < begin[:, :, None]  # [B, position, S]: each position as a variant of its own
    torch.testing.assert_close(own_prediction(decoded.tokens, seen), decoded.tokens)


def own_prediction(tokens, seen, seed=0):
    """What the target takes at every position if it sees what ``seen`` [B, S, S] says, with the run's own noise."""
    batch, query = len(tokens), torch.arange(LENGTH).expand(len(tokens), -1)
    noise0, noise_t = noises(Stream.of(seed, batch, "cpu"), query, 2, 3)
    schedule = TARGET.schedule(TARGET.defaults)
    distribution = TARGET.predict(
        False,
        tokens,
        seen,
        query[..., None],
        LENGTH,
        torch.ones(batch, LENGTH, 1),
        1.0,
        noise0[:, :, None],
        noise_t[:, :, :, None],
        schedule,
    )
    return distribution.mean[:, :, 0]


@pytest.mark.parametrize("mode", ["block", "prefix"])
def test_more_tolerance_accepts_more(mode):
    """Of the same first block, every draft that passes at some tolerance passes at a larger one."""
    accepted = []
    for tolerance in (0, 0.05, 0.15, 0.4, 1.0):
        run = method(mode, "drafts", tolerance=tolerance, prefill=0, length=LENGTH)
        accepted.append(run.sample(request(TARGET, 80)).trace.rounds["accepted"][0])
    for fewer, more in pairwise(accepted):
        assert (fewer <= more).all() and (fewer < more).any()


# Guidance


class Listener(ToyHead):
    """Notes the guidance scale that every position was last predicted with, by its place in the order."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.scales = {}

    def predict(self, state, tokens, known, query, seen, cfg, *rest):
        self.scales |= dict(zip(query.flatten().tolist(), cfg.flatten().tolist(), strict=True))
        return super().predict(state, tokens, known, query, seen, cfg, *rest)

    def in_order(self, decoded):
        return torch.tensor([self.scales[position] for position in drawing_order(decoded)[0].tolist()])


@pytest.mark.parametrize(("mode", "condition"), MODES)
def test_guidance_is_that_of_each_token_whatever_is_drafted(mode, condition):
    """The published code takes the last draft's for the whole block."""
    target, drafter = Listener(2, GRID), Listener(2, GRID, noise=0.3)
    decoded = method(mode, condition, drafter, length=3).sample(request(target, 1, cfg=3.0))
    wanted = torch.tensor([1 + 2 * min(i + 1, LENGTH - 1) / LENGTH for i in range(LENGTH)])
    assert torch.allclose(target.in_order(decoded), wanted)
    drafter.scales |= {position: target.scales[position] for position in target.scales.keys() - drafter.scales.keys()}
    assert torch.allclose(drafter.in_order(decoded), wanted)


def test_guidance_of_the_plain_sampler_counts_all_tokens_of_a_pass():
    target = Listener(2, GRID)
    counts = mask_schedule(4, LENGTH)
    decoded = ContinuousNextToken(4).sample(request(target, 1, cfg=3.0))
    behind = [sum(counts[: i + 1]) for i, count in enumerate(counts) for _ in range(count)]
    wanted = torch.tensor([1 + 2 * min(known, LENGTH - 1) / LENGTH for known in behind])
    assert torch.allclose(target.in_order(decoded), wanted) and len(set(behind)) == 4
    ContinuousNextToken(4).sample(request(target, 1, cfg=3.0, cfg_schedule="constant"))
    assert set(target.scales.values()) == {3.0}


# Counts


@pytest.mark.parametrize("grid", [(1, 1), (2, 3), (2, 5)])
def test_passes_of_block_mode_follow_their_formula(grid):
    length = grid[0] * grid[1]
    target, drafter = ToyHead(1, grid), ToyHead(1, grid, noise=0.3)
    for drafts in (1, 3, 4, 100):
        for prefill in (0, 0.05, 0.4, 1):
            for condition in ("prefix", "drafts")[: 1 + (drafts == 3)]:
                run = ContinuousSpeculative(drafter, drafts, prefill, condition=condition)
                totals = run.sample(request(target, 2)).trace.totals
                begun = round(prefill * length)
                assert totals["target_passes"] == begun + math.ceil((length - begun) / drafts)
                assert totals["draft_passes"] == length - begun
                assert totals["passes_per_image"] == [totals["target_passes"]] * 2


def test_the_target_runs_once_a_block_over_as_many_variants_as_it_says():
    for mode, condition in MODES:
        model = ToyHead(2, GRID)
        run = method(mode, condition, prefill=0)
        trace = run.sample(request(model, 3)).trace
        assert len(model.calls) == trace.totals["target_passes"]
        assert max(shape[1] for shape in model.calls) == run.variants
        assert {shape[1] * shape[2] for shape in model.calls[:1]} == {4 if decided_in_place(mode) else 5}


@pytest.mark.parametrize(("mode", "condition"), MODES)
def test_every_decision_is_what_its_recorded_ratio_says(mode, condition):
    """A draft stays where log u is below its ratio; a block that ends early ends at its first rejection."""
    trace = method(mode, condition).sample(request(TARGET, 100)).trace
    u = Stream.of(0, 100, "cpu").uniform(torch.arange(LENGTH).expand(100, -1), Purpose.ACCEPT)
    drafted = trace.positions["depth"] > 0
    passed = (1 - u).log() <= trace.positions["log_ratio"]
    stayed = trace.positions["source"] == (Source.ACCEPTED if mode == "exact" else Source.RELAXED)
    assert torch.equal(passed & drafted, stayed) and stayed.any() and (drafted & ~stayed).any()


def test_progress_counts_up_to_the_whole_image():
    for sampler in (method("prefix"), ContinuousNextToken(4)):
        seen = []
        sampler.sample(
            request(
                TARGET,
                3,
                callback=lambda p: seen.append((p.passes, p.committed.tolist(), p.length, p.known.sum(1).tolist())),
            )
        )
        assert [passes for passes, *_ in seen] == list(range(1, len(seen) + 1))
        assert all(committed == known and length == LENGTH for _, committed, length, known in seen)
        assert seen[-1][1] == [LENGTH] * 3


# The plain sampler's schedule


def test_mask_schedule_of_mar():
    assert mask_schedule(256, 256) == [1] * 256
    counts = mask_schedule(64, 256)
    assert counts[:20] == [1] * 13 + [2, 3, 2, 2, 3, 3, 3] and counts[-5:] == [6, 7, 6, 6, 6]
    assert sum(counts) == 256 and len(counts) == 64 and min(counts) == 1


def test_the_mask_schedule_generates_every_token_once():
    for length in (*range(1, 40), 64, 100, 256, 1024):
        for iterations in {*range(1, min(length, 20) + 1), length // 2 or 1, length - 1 or 1, length, length + 5}:
            counts = mask_schedule(iterations, length)
            assert sum(counts) == length and min(counts) >= 1 and len(counts) == min(iterations, length)


def test_iterations_come_from_the_sampler_then_the_model_then_the_tokens():
    def passes(own, model):
        params = {"iterations": model}
        return ContinuousNextToken(own).sample(request(TARGET, 1, **params)).trace.totals["target_passes"]

    assert (passes(None, None), passes(None, 4), passes(3, 4), passes(100, None)) == (LENGTH, 4, 3, LENGTH)


# Cells


class Cells(ToyHead):
    """A model that samples cells of three tokens, row by row."""

    group, order = 3, torch.arange(LENGTH)


@fp64()
def test_cells_are_drafted_judged_and_counted_together():
    target, drafter = Cells(2, GRID), Cells(2, GRID, noise=0.3)
    for length, prefill in ((1, 0), (2, 0), (8, 0), (1, 0.34), (1, 0.15), (1, 0.17), (2, 0.8)):
        for mode, condition in (mode for mode in MODES if decided_in_place(mode[0])):
            run = ContinuousSpeculative(drafter, length, prefill, mode, condition)
            decoded = run.sample(request(target, 4))
            assert_whole(decoded, 4)
            begun = round(prefill * 3)
            assert decoded.trace.totals["target_passes"] == begun + math.ceil((3 - begun) / length)
            assert decoded.trace.totals["draft_passes"] == 3 - begun
            depth = decoded.trace.positions["depth"].unflatten(1, (3, 3))
            assert (depth == depth[..., :1]).all()
    same = ContinuousSpeculative(target, 2, 0, condition="drafts").sample(request(target, 4, cfg=1.7))
    plain = ContinuousNextToken().sample(request(target, 4, cfg=1.7))
    torch.testing.assert_close(same.tokens, plain.tokens)
    assert plain.trace.totals["target_passes"] == 3


# Drafts that are garbage


class Garbage(ToyHead):
    """Its guesses are NaN in some channels of every second position."""

    def __init__(self, bad):
        super().__init__(2, GRID, noise=0.3, bend=0.2, widths=(0.4, 0.35, 0.5))
        self.bad = torch.tensor(bad)

    def predict(self, state, tokens, known, query, *rest):
        distribution = super().predict(state, tokens, known, query, *rest)
        bad = (query % 2 == 0)[..., None] & self.bad
        return replace(distribution, mean=distribution.mean.masked_fill(bad, math.nan))


@pytest.mark.parametrize(("mode", "condition"), MODES)
def test_a_guess_that_is_garbage_in_one_number_is_used_in_none(mode, condition):
    one, all_of_it = (
        method(mode, condition, Garbage(bad)).sample(request(TARGET, 8)) for bad in ([False, True], [True, True])
    )
    assert_whole(one, 8)
    assert torch.equal(one.tokens, all_of_it.tokens)
    ratio = one.trace.positions["log_ratio"]
    assert torch.equal(ratio.isinf(), all_of_it.trace.positions["log_ratio"].isinf()) and ratio.isinf().any()


# Errors


def refuse(text, run=None, model=TARGET, **options):
    with pytest.raises(ValueError, match=text):
        (run or method()).sample(request(model, 1, **options))


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("prefill.*1.1.*0 to 1", {"prefill": 1.1}),
        ("tolerance.*-1.* 0", {"tolerance": -1}),
        ("tolerance.*nan", {"tolerance": math.nan}),
        ("(?i)mode 'prefix'.*condition 'drafts'", {"mode": "prefix", "condition": "prefix"}),
        ("(?i)mode 'exact'.*condition 'drafts'", {"mode": "exact", "condition": "prefix"}),
        ("(?i)mode 'printed'.*condition 'drafts'", {"mode": "printed", "condition": "prefix"}),
        ("(?i)mode 'exact'.*Sigma.*off", {"mode": "exact", "path": "paper"}),
    ],
)
def test_illegal_settings_are_refused(text, settings):
    refuse(text, method(**settings))


def test_settings_that_do_not_go_together_are_refused():
    refuse("temperature.* 0.*above 0", temperature=0.0)
    for mode in ("exact", "printed"):
        refuse(f"(?i)mode '{mode}'.*ddim.*ddpm", method(mode), kind="ddim")
    for mode in ("prefix", "exact", "printed"):
        refuse("cells of 3 tokens.*'block'", method(mode), Cells(2, GRID))
    kept = torch.zeros(1, LENGTH, dtype=torch.bool)
    kept[:, 0] = True
    keep = {"tokens": torch.zeros(1, LENGTH, 2), "kept": kept}
    for sampler in (method(drafter=Cells(2, GRID)), ContinuousNextToken()):
        refuse("cells of 3 tokens.*keep", sampler, Cells(2, GRID), **keep)
    for sampler in (method(), ContinuousNextToken()):
        refuse("mask.*every token", sampler, **keep | {"kept": torch.ones_like(kept)})
        for text, wrong in (("cfg.*inf", {"cfg": math.inf}), ("temperature.*nan", {"temperature": math.nan})):
            refuse(text, sampler, **wrong)
    refuse("drafter.* 1 .* 2 ", method(drafter=ToyHead(1)))
    for iterations in (0, -3):
        refuse(f"iterations.*{iterations}.* 1", ContinuousNextToken(iterations))


def test_without_noise_ddim_goes_through_block_and_prefix():
    for mode, condition in MODES[:3]:
        decoded = method(mode, condition).sample(request(TARGET, 10, kind="ddim"))
        assert_whole(decoded, 10)
        assert (decoded.trace.positions["log_ratio"] <= 0).all()  # the draft is the middle of its own kernel


def test_the_width_of_the_kernel_is_the_tolerance_at_any_temperature():
    for temperature, kind in ((1.0, "ddpm"), (0.5, "ddpm"), (0.5, "ddim")):
        trace = method().sample(request(TARGET, 20, temperature=temperature, kind=kind)).trace
        drafted = trace.positions["depth"] > 0
        ratio, distance = (trace.positions[name][drafted] for name in ("log_ratio", "distance"))
        widths = distance.square().sum() / (-2 * ratio.sum())
        assert widths.sqrt() == pytest.approx(0.5, rel=0.2)  # as the two models' learned widths differ


def test_a_plain_run_says_whether_it_drew_blindly():
    settings = ContinuousNextToken().sample(request(TARGET, 1)).trace.settings
    assert settings["lossless"] and settings["iterations"] is None
    settings = ContinuousNextToken(2).sample(request(TARGET, 1)).trace.settings
    assert not settings["lossless"] and settings["iterations"] == 2


def test_settings_and_parameters_are_recorded():
    settings = method().sample(request(TARGET, 1, cfg=2.0, temperature=0.9)).trace.settings
    assert settings["kappa"] == pytest.approx(0.5 / (0.35 * 0.9)) and not settings["lossless"]
    assert settings["cfg"] == 2.0 and settings["temperature"] == 0.9 and settings["condition"] == "prefix"
    exact = method("exact").sample(request(TARGET, 1)).trace.settings
    assert exact["lossless"] and "kappa" not in exact and exact["condition"] == "drafts"
    for mode, path, condition in (("printed", "paper", "drafts"), ("published", "official", "prefix")):
        for given in continuous.PATHS:  # which these modes do not read
            found = method(mode, path=given).sample(request(TARGET, 1)).trace.settings
            assert (found["path"], found["condition"], found["lossless"]) == (path, condition, False)
            assert ("kappa" in found) == ("tolerance" in found) == (mode == "published")
