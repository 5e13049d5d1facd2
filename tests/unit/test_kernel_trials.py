"""Which way is the fastest: the same answer on a busy machine."""

import pytest
import torch
from comfyui_specar.kernels import half, trials


def test_the_shortest_of_all_runs_counts(monkeypatch):
    """Each way runs on every number, by one thread; a run that other programs delay does not count."""
    now, asked, threads = [0.0], [], torch.get_num_threads()

    def way(name, seconds):
        def run(number):
            asked.append((name, number, torch.get_num_threads()))
            now[0] += seconds + 100 * (number != 1)

        return run

    monkeypatch.setattr(trials.time, "perf_counter", lambda: now[0])
    found = trials.shortest({"one": way("one", 3), "two": way("two", 2)}, 3, 2)
    assert {name: round(seconds, 6) for name, seconds in found.items()} == {"one": 3, "two": 2}
    assert asked == [(name, number, 1) for _ in range(2) for name in ("one", "two") for number in range(3)]
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("fp32", "bf16", "faster"),
    [
        (1.26, 1.0, True),
        (1.25, 1.0, False),
        (0.63, 0.5, True),
        (0.62, 0.5, False),
        (2.51, 2.0, True),
        (2.49, 2.0, False),
    ],
)
def test_bf16_is_faster_only_by_a_quarter(monkeypatch, fp32, bf16, faster):
    monkeypatch.setattr(trials, "shortest", lambda *_: {torch.float32: fp32, torch.bfloat16: bf16})
    assert half.bf16_is_faster.__wrapped__() == faster
