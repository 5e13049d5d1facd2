"""What a message names as legal is legal: also where the smallest image, batch or codebook leaves no range."""

import re
from types import SimpleNamespace

import pytest
from comfyui_specar.reports.timeline_frames import check_number
from comfyui_specar.samplers.methods.jacobi import SJD, Jacobi
from comfyui_specar.samplers.rules.lantern import Lantern, LanternPP
from comfyui_specar.samplers.settings import within
from hypothesis import given
from hypothesis import strategies as st

from ..support.toy import ToyModel, plain, request


def named(message: str) -> list[int]:
    """The first and the last number that "use .. to .." of a message names; none, if it has other advice."""
    found = re.search(r"[Uu]se (\d+)(?: to (\d+))?", message)
    return [int(number) for number in found.groups() if number is not None] if found else []


@given(st.integers(0, 5), st.integers(-1, 6))
def test_a_range_in_words_is_one(low, high):
    words = within(low, high, "leave it out")
    assert named(words) == sorted({low, high} if low <= high else set())
    assert (words == "leave it out") == (low > high)


@pytest.mark.parametrize("method", [SJD, Jacobi])
@pytest.mark.parametrize("length", [1, 2, 3, 6])
def test_windows(method, length):
    layout = plain(1, length)
    asked = request(ToyModel(layout), layout)
    with pytest.raises(ValueError, match="window is 7") as refused:
        method(window=7).check(asked)
    legal = named(str(refused.value))
    for window in legal or [None]:
        assert method(window=window).sample(asked).tokens.shape == (1, length)
    assert legal or "leave window out" in str(refused.value)


@pytest.mark.parametrize("rule", [Lantern(7), LanternPP(7)], ids=str)
@pytest.mark.parametrize("codes", [1, 2, 3])
def test_neighbours(rule, codes):
    model = SimpleNamespace(vocab=codes)
    with pytest.raises(ValueError, match=f"neighbours is 7.* {codes} codes") as refused:
        rule.bind(model)
    assert named(str(refused.value)) == {1: [], 2: [1], 3: [1, 2]}[codes]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_images_of_a_batch(count, monkeypatch):
    monkeypatch.setattr("comfyui_specar.reports.timeline_frames.check_images", lambda trace, images: None)
    with pytest.raises(ValueError, match="picture is 5") as refused:
        check_number(None, count, 5, "picture")
    assert named(str(refused.value)) == sorted({0, count - 1})
