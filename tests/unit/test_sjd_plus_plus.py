"""SJD++ as printed: the distribution of its images, pass by pass. It is not the model's, as the docs say."""

import itertools
import re
from functools import cache
from pathlib import Path

import pytest
from comfyui_specar.samplers.contract import SamplingParams
from comfyui_specar.samplers.methods.jacobi import SJD

from ..support.toy import VOCAB, ToyModel, chi_square, plain, request

WINDOW, LAYOUT = 6, plain(2, 3)
TOYS = [ToyModel(LAYOUT, sharpness=sharpness, seed=seed) for sharpness in (1.0, 1.5) for seed in range(3)]
PAGE = Path(__file__).parents[2] / "docs" / "methods" / "sjd-plus-plus.md"


@cache
def after(toy: ToyModel, prefix: tuple[int, ...]) -> tuple[float, ...]:
    """The model's distribution of the token after ``prefix``, from its table alone."""
    row = sum(VOCAB**n for n in range(len(prefix)))
    row += sum(token * VOCAB**n for n, token in enumerate(reversed(prefix)))
    return tuple(toy.tables[0][row].double().softmax(-1).tolist())


def passes(toy: ToyModel, decided, guesses, references, threshold: float | None):
    """What a forward pass can make of a window (eqs. 2 to 5), with probabilities: decided tokens, guesses, and after
    which tokens was predicted what each guess is tested with (None: uniform, of a first guess).

    threshold None: every guess is resampled (SJD, eq. 6).
    """

    def drafted(reference: tuple[int, ...] | None) -> tuple[float, ...]:
        return (1 / VOCAB,) * VOCAB if reference is None else after(toy, reference)

    length, contexts = LAYOUT.length, [decided + guesses[:k] for k in range(len(guesses) + 1)]
    reached = 1.0  # the probability that all guesses so far were accepted
    for k, (guess, reference) in enumerate(zip(guesses, references, strict=True)):
        p, q = after(toy, contexts[k]), drafted(reference)
        refused = reached * (1 - min(1.0, p[guess] / q[guess]))
        reached -= refused
        over = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
        if refused == 0:
            continue
        # Guesses after the refused one: kept or resampled. The column after the last guess had none, and is sampled.
        choices = []
        for j in range(k + 1, len(guesses)):
            pj, kept = after(toy, contexts[j]), guesses[j]
            sure = threshold is not None and pj[kept] / drafted(references[j])[kept] > threshold
            choices.append([(kept, 1.0)] if sure else list(enumerate(pj)))
        if len(decided) + len(guesses) < length:
            choices.append(list(enumerate(after(toy, contexts[-1]))))
        for token, share in enumerate(over):
            if share:
                for tail in itertools.product(*choices):
                    chance = refused * share / sum(over)
                    for _, w in tail:
                        chance *= w
                    now, rest = (*decided, *guesses[:k], token), tuple(t for t, _ in tail)
                    yield from filled(now, rest, contexts[k + 1 :], chance)
    bonus = enumerate(after(toy, contexts[-1])) if len(decided) + len(guesses) < length else [(None, 1.0)]
    for token, w in bonus:
        yield from filled(decided + guesses + (() if token is None else (token,)), (), [], reached * w)


def filled(decided, guesses, references, chance: float):
    """The window with uniform first guesses at its end."""
    missing = min(WINDOW - 1, LAYOUT.length - len(decided)) - len(guesses)
    references = (*references[: len(guesses)], *(None,) * missing)
    for new in itertools.product(range(VOCAB), repeat=missing):
        yield (decided, guesses + new, references), chance / VOCAB**missing


@cache
def distribution_of(toy: ToyModel, threshold: float | None) -> dict[tuple[int, ...], float]:
    """The probability of every image. A pass adds to the decided tokens, so states are taken in the order of these."""
    images: dict[tuple[int, ...], float] = {}
    states = [{} for _ in range(LAYOUT.length + 1)]
    for token, p in enumerate(after(toy, ())):
        for state, chance in filled((token,), (), (), p):
            states[1][state] = chance
    for count in range(1, LAYOUT.length):
        for state, chance in states[count].items():
            for new, w in passes(toy, *state, threshold):
                reached, key = (images, new[0]) if len(new[0]) == LAYOUT.length else (states[len(new[0])], new)
                reached[key] = reached.get(key, 0.0) + chance * w
    return images


def bias(toy: ToyModel, threshold: float | None) -> float:
    """The total variation of the distribution of images and the model's own."""
    printed = distribution_of(toy, threshold)
    assert sum(printed.values()) == pytest.approx(1)
    return sum(abs(printed.get(image, 0.0) - p) for image, p in toy.distribution(LAYOUT, SamplingParams()).items()) / 2


def test_resampling_every_guess_is_exact():
    """The enumeration itself, on the variant that is proved: SJD. Both sides are sums in fp64."""
    assert bias(TOYS[0], None) < 1e-12


@pytest.mark.parametrize("threshold", [0.5, 0.1])
def test_the_sampler_has_this_distribution(threshold):
    method = SJD(window=WINDOW, reuse="threshold_paper", threshold=threshold, initial="uniform")
    out = method.sample(request(TOYS[0], LAYOUT, batch=30_000))
    assert chi_square(out.tokens, distribution_of(TOYS[0], threshold)).z < 4
    assert chi_square(out.tokens, TOYS[0].distribution(LAYOUT, SamplingParams())).z > 20
    assert out.trace.drift_bound is None


def test_the_bias_is_as_the_page_says():
    number = r"([\d.]+)"
    said = re.search(
        rf"by {number} to {number} at a\s+`threshold` of 0.5 and by {number} to {number}\s+at 0.1",
        PAGE.read_text("utf-8"),
    )
    low, high, low_01, high_01 = map(float, said.groups())
    for threshold, least, most in ((0.5, low, high), (0.1, low_01, high_01)):
        found = [bias(toy, threshold) for toy in TOYS]
        assert min(found) == pytest.approx(least, abs=0.01) and max(found) == pytest.approx(most, abs=0.01)
