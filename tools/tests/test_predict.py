"""The model of time agrees with what was measured, and follows launches, cards and storage."""

from dataclasses import replace

import pytest
from comfyui_specar.tools.benchmarks import predict
from comfyui_specar.tools.benchmarks.predict import CHAIN, H200, LUMINA, METHODS, NEXT, SKIPPED, TREE, VVS, XL

WITHIN = 0.25  # of a measured round: what the model leaves out, such as how much shorter the images of ``ratios`` are


def test_rounds_of_the_report_are_predicted():
    lines = predict.table_of_checks().splitlines()[2:]
    assert len(lines) > 15
    assert all(abs(float(line.split("|")[5].strip(" %"))) <= 100 * WITHIN for line in lines)


def test_what_it_is_fitted_to_is_met():
    assert predict.one_round(H200, XL, NEXT, before=True) == pytest.approx(predict.measured("passes", XL, NEXT))
    found = [predict.one_round(H200, XL, method, before=True) for method in (CHAIN, NEXT)]
    took = [predict.measured("ratios", XL, method) for method in (CHAIN, NEXT)]
    assert found[0] - found[1] == pytest.approx(took[0] - took[1])
    chain = [(0,) * length for length in range(1, 6)]
    assert predict.tokens_per_round(chain, predict.accepted()) == pytest.approx(predict.tokens_of(CHAIN), rel=1e-3)


def test_fixed_times_are_those_of_a_launch():
    """Microseconds, and shares of what a card can do: none is negative, or more than all."""
    assert 0.5 < predict.small_us() < 5 and 0 < predict.gap_us() < 500 and 0 < predict.issued() < 1
    for kernel in (predict.OURS, predict.CUBLAS):
        assert all(1 < fixed < 10 and slope > 0.9 for _, fixed, slope in predict.product_times(kernel))


def test_a_launch_more_takes_longer(monkeypatch):
    before, table = predict.one_round(H200, LUMINA, NEXT), dict(predict.counted())
    case = f"{XL.size}, {NEXT.case}"
    table[case] = table[case] | {"launches": table[case]["launches"] + 100}
    small, gap = predict.small_us(), predict.gap_us()
    monkeypatch.setattr(predict, "counted", lambda before=False: table)
    took, others = predict.parts(H200, LUMINA, NEXT, small=small)
    assert (took + small * others + gap) / 1000 - before == pytest.approx(0.1 * small)


def test_less_bandwidth_takes_longer_and_narrow_weights_less():
    slow = replace(H200, bandwidth=H200.bandwidth / 4)
    wide, fast = predict.one_round(slow, LUMINA, NEXT), predict.one_round(H200, LUMINA, NEXT)
    assert 2 < wide / fast < 4
    assert predict.one_round(slow, LUMINA, NEXT, "int8") < 0.7 * wide


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_no_round_takes_less_than_reading_its_weights(method):
    for card in predict.CARDS:
        assert predict.one_round(card, LUMINA, method) > predict.floor(card, LUMINA)


def test_what_does_not_fit_is_left_out():
    table = predict.table_of_cards()
    assert predict.stored(predict.CARDS[-1], LUMINA) == "int8" and "RTX 3060 | Emu3.5" not in table


def test_auto_is_no_slower_than_next_token_and_the_best_of_trees():
    for card in predict.CARDS:
        drafts, times = predict.auto(card, LUMINA, "bf16")
        assert drafts and times >= max(1.0, 0.9 * predict.faster(card, LUMINA, TREE, "bf16"))


def test_between_points():
    points = [(1, 10.0), (3, 20.0), (4, 0.0)]
    assert [predict.between(points, x) for x in (0, 1, 2, 3, 3.5, 9)] == [10, 10, 15, 20, 10, 0]


def test_a_skipped_round_takes_the_drafter_alone():
    """And VVS more than its verified rounds, by less than a skipped one each."""
    alone, verified = (predict.one_round(H200, LUMINA, method) for method in (SKIPPED, VVS))
    assert alone < 0.5 * verified < verified < predict.milliseconds(H200, LUMINA, VVS) < verified + alone
