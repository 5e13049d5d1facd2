"""Distances between sets of images, intervals and tests, against values that are known."""

import math

import pytest
import torch
from comfyui_specar.tools.benchmarks import resampling
from comfyui_specar.tools.benchmarks.image_metrics import kernel, kernel_distance, kernel_terms, precision_recall
from comfyui_specar.tools.benchmarks.resampling import bootstrap, exchange_test, jackknife, paired_test, rejected


@pytest.fixture(autouse=True)
def fewer_permutations(monkeypatch):
    monkeypatch.setattr(resampling, "REPEATS", 999)


def test_kernel_terms_are_those_of_the_definition():
    a, b = torch.randn(2, 7, 4, dtype=torch.float64)
    terms = kernel_terms(a, b)
    for i, j in ((0, 1), (5, 2)):
        wanted = sum(
            sign * float((x @ y / 4 + 1) ** 3)
            for sign, x, y in ((1, a[i], a[j]), (1, b[i], b[j]), (-1, a[i], b[j]), (-1, b[i], a[j]))
        )
        assert float(terms[i, j]) == pytest.approx(wanted, abs=1e-12)
    assert terms.diagonal().eq(0).all() and kernel(a, b).shape == (7, 7)
    assert kernel_distance(terms) == pytest.approx(float(terms.sum()) / 42, abs=1e-12)
    swapped = kernel_terms(torch.cat((b[:1], a[1:])), torch.cat((a[:1], b[1:])))
    assert torch.allclose(swapped[0], -terms[0]) and torch.allclose(swapped[1:, 1:], terms[1:, 1:])


def test_the_kernel_distance_is_unbiased_even_if_images_of_an_index_belong_together():
    """Two sets of one distribution, in which both images of an index share most of what they are."""
    distances = []
    for _ in range(400):
        shared = torch.randn(12, 5)
        distances.append(
            kernel_distance(kernel_terms(shared + 0.3 * torch.randn(12, 5), shared + 0.3 * torch.randn(12, 5)))
        )
    values = torch.tensor(distances)
    assert abs(float(values.mean())) < 4 * float(values.std()) / math.sqrt(len(values))
    assert float(values.min()) < 0 < float(values.max())
    shared = torch.randn(12, 5)
    assert kernel_distance(kernel_terms(shared, shared + 2)) > 20 * float(values.std())


def test_precision_and_recall():
    real = torch.randn(200, 2)
    inner = 0.1 * torch.randn(200, 2)  # all of it is real, but it shows little of what is
    precision, recall = precision_recall(real, inner)
    assert precision > 0.9 and recall < 0.2
    assert precision_recall(real, real) == (1.0, 1.0) and precision_recall(real, real + 100) == (0.0, 0.0)
    line = torch.arange(5.0)[:, None]  # radii to the second neighbour: 2, 1, 1, 1, 2
    assert precision_recall(line, torch.tensor([[-1.5], [-2.5], [2.5], [5.9]]), 2)[0] == 0.75
    with pytest.raises(ValueError, match="more than 3"):
        precision_recall(real[:3], real)


def test_bootstrap_and_jackknife_intervals_of_a_mean_are_those_of_its_standard_error():
    values = torch.randn(640) * 2 + 5
    error = float(values.std()) / math.sqrt(640)
    for found, tolerance in ((bootstrap(values), 0.1), (jackknife(lambda i: float(values[i].mean()), 640), 0.6)):
        low, high = found["interval"]
        assert found["value"] == pytest.approx(float(values.mean()), abs=1e-5) and low < found["value"] < high
        assert (high - low) / 2 == pytest.approx(1.96 * error, rel=tolerance)  # 16 blocks know a width to 20 %
    fixed = bootstrap(torch.full((9,), 3, dtype=torch.int32))
    assert fixed == {"value": 3.0, "interval": [3.0, 3.0]}


def uniform(p_values: list[float]) -> bool:
    """Are they as often small as they should be, and not more often?"""
    return all(
        abs(sum(p <= level for p in p_values) / len(p_values) - level)
        < 4 * math.sqrt(level * (1 - level) / len(p_values))
        for level in (0.05, 0.2, 0.5)
    )


def test_tests_have_the_stated_false_alarm_rate_and_see_differences():
    shared = [torch.randn(24, 3) for _ in range(150)]
    pairs = [(each + torch.randn(24, 3), each + torch.randn(24, 3)) for each in shared]
    assert uniform([exchange_test(kernel_terms(a, b)) for a, b in pairs])
    assert uniform([paired_test(a[:, 0] - b[:, 0]) for a, b in pairs])
    assert exchange_test(kernel_terms(pairs[0][0], pairs[0][1] + 2)) == 1 / 1000
    assert paired_test(torch.randn(24) + 2) == 1 / 1000
    assert paired_test(torch.zeros(24)) == 1, "equal images"


def test_holms_procedure():
    assert rejected([0.03, 0.001, 0.004], 0.01) == [False, True, True], "0.001 <= 0.01/3, 0.004 <= 0.01/2"
    assert rejected([0.004, 0.004, 0.004], 0.01) == [False] * 3, "none reaches 0.01/3"
    assert rejected([], 0.01) == []
    with pytest.raises(ValueError, match="permutations"):
        rejected([0.001] * 11, 0.01)
