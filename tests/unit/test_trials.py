"""Which method Find Fastest chooses, and what it says: decided on made-up measurements."""

from dataclasses import dataclass

import pytest
from comfyui_specar.reports import trials
from comfyui_specar.reports.comparison import CHOSEN, EXACT, HEAD, ROW, WIDTH, draw
from comfyui_specar.reports.quality import Quality
from comfyui_specar.reports.trials import Trial, judge


@dataclass(frozen=True)
class Method:
    name: str
    acceptance: str = "exact"
    by_hand: str = "a node"
    quality: Quality | None = None

    @property
    def exact(self) -> bool:
        return self.acceptance == "exact"


def trial(name: str, *milliseconds: float, drift_bound: float | None = None, note: str = "") -> Trial:
    method = Method(name) if drift_bound is None else Method(name, "relaxed")
    tokens = 100 * len(milliseconds)
    return Trial(method, [m / 1000 for m in milliseconds], tokens, tokens // 2, (drift_bound or 0.0) * tokens, note)


PLAIN = trial("next token", 10, 11, 12)


def choice(*others: Trial, budget: float = 0.0, plain: Trial = PLAIN) -> tuple[str, bool, list[str]]:
    verdict = judge([plain, *others], budget)
    return verdict.chosen.method.name, verdict.faster, [t.method.name for t in verdict.alike]


@pytest.mark.parametrize(
    ("others", "budget", "wanted"),
    [
        ([], 0, ("next token", False, [])),
        ([trial("a", 5, 6, 7), trial("b", 8, 9)], 0, ("a", True, [])),
        ([trial("a", 5, 6, 7), trial("b", 4, 5, 6)], 0, ("b", True, ["a"])),
        ([trial("a", 5, 5, 10)], 0, ("next token", False, [])),  # one run no faster than the fastest plain one
        ([trial("a", 9, 9, 9.9)], 0, ("a", True, [])),
        ([trial("a", 5, 5, 6, 99)], 0, ("a", True, [])),  # of four, the slowest and the fastest do not count
        ([trial("a", 5, 5, 99, 99)], 0, ("next token", False, [])),
        ([trial("a", 13, 14)], 0, ("next token", False, [])),
        ([trial("a", 1)], 0, ("next token", False, [])),  # a single run proves nothing
        ([trial("a"), trial("b", 5, 6)], 0, ("b", True, [])),
        ([trial("a", 1, 1, drift_bound=0.2), trial("b", 5, 6)], 0.1, ("b", True, [])),
        ([trial("a", 1, 1, drift_bound=0.2), trial("b", 5, 6)], 0.2, ("a", True, [])),
        ([trial("a", 1, 1, drift_bound=0.0), trial("b", 5, 6)], 0, ("a", True, [])),  # relaxed, but without drift
        ([trial("a", 4, 6, drift_bound=0.1), trial("b", 5, 7)], 0.2, ("b", True, ["a"])),  # alike: the exact one
        ([trial("a", 4, 4.5, drift_bound=0.1), trial("b", 5, 7)], 0.2, ("a", True, [])),
    ],
)
def test_the_choice(others, budget, wanted):
    assert choice(*others, budget=budget) == wanted


def test_a_single_run_of_the_baseline_proves_nothing_either():
    assert choice(trial("a", 1, 1), plain=trial("next token", 10)) == ("next token", False, [])


def test_what_is_said_is_what_was_measured():
    tried = [PLAIN, trial("a", 4, 5, 6), trial("b", 5, 5), trial("c", note="not tried, as time was up")]
    verdict = judge(tried, 0)
    text = trials.in_words(tried, verdict, "The setting.", 0)
    # 11 / 5, 10 / 6, 12 / 4
    assert text.startswith("Chosen: a. 2.20 times as fast as next token in these trials (1.67 to 3.00 in 3 runs, ")
    assert any(": b." in line for line in text.splitlines()) and "By hand: a node." in text
    assert "\nThe setting.\nNot tried, as time was up: c.\n" in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    units = ["time (ms per token)", "speed (times next token)", "model passes (per token)"]
    assert rows[0] == ["method", "acceptance", *units, "runs"]
    assert rows[2] == ["a (chosen)", "exact", "5 (4 to 6)", "2.20 (1.67 to 3.00)", "0.50", "3"]
    assert rows[3][2] == "5", "the fastest first"
    assert rows[4] == ["next token", "exact", "11 (10 to 12)", "1.00", "0.50", "3"]
    assert rows[5] == ["c", "exact", "-", "-", "-", "0"]
    report = trials.trials_report(tried, verdict)
    assert report["chosen"] == 1 and report["faster"] and report["schema"] == "specar.trials/2"
    assert report["trials"][2]["seconds_per_token"] == [0.005, 0.005]


@pytest.mark.parametrize("budget", [0.0, 0.1])
def test_no_speed_up_is_claimed_that_was_not_measured(budget):
    tried = [PLAIN, trial("a", 9, 11), trial("b", 2), trial("c", 1, 1, drift_bound=0.5)]
    text = trials.in_words(tried, judge(tried, budget), "", budget)
    first, second, third = text.splitlines()[:3]
    assert first.startswith("Too noisy to tell; probably b (5.5 times). Raise seconds")
    assert second.startswith("Chosen: next token. No other method") and "clearly faster" in second
    assert ("leak_budget" in second) == bool(budget) and "times as fast" not in text.split("\n\n")[0]
    assert third == "b ran only once."


def test_what_the_medians_say_is_told_with_its_doubt():
    tried = [trial("next token", 6, 7, 9), trial("a", 8, 8), trial("b", 3, 4, 8), trial("c", 1, 1, drift_bound=0.5)]
    first, _, third = trials.summary(tried, judge(tried, 0), "", 0).splitlines()[:3]
    assert "probably b (1.8 times)" in first and third == "b was 0.75 to 3.00 times as fast."
    slower = [trial("next token", 6, 7), trial("a", 8, 8)]
    assert "probably" not in trials.summary(slower, judge(slower, 0), "", 0)


def test_next_token_for_want_of_time_is_no_verdict_on_the_others():
    tried = [PLAIN, *(trial(name, note=trials.TIME_UP) for name in "ab")]
    text = trials.summary(tried, judge(tried, 0), "", 0)
    assert text.startswith("Chosen: next token, ") and "no time" in text.splitlines()[0] and "was faster" not in text
    assert text.endswith("Not tried, as time was up: a; b.")


def test_drift_bounds_are_shown_where_a_relaxed_method_was_tried():
    tried = [PLAIN, trial("a", 5, 6, drift_bound=0.03)]
    row = trials.trials_table(tried, judge(tried, 0.1)).splitlines()[2]
    assert "a (chosen)" in row and "| 0.030 " in row and "relaxed" in row
    assert trials.trial_title(tried[1]) == "a, relaxed"


def test_quality_is_shown_where_it_was_measured():
    tried = [PLAIN, trial("a", 5, 6, drift_bound=0.03), trial("b", 7, 8, drift_bound=0.03), trial("c", 9, 9)]
    verdict = judge(tried, 0.1)
    text = trials.in_words(tried, verdict, "", 0.1)
    assert "bundled model" not in text and trials.trials_report(tried, verdict)["trials"][1]["quality"] is None
    tried[0].method = Method("next token", quality=Quality(512, 0.0, 0.0, 0.95, 0.95))
    tried[3].method = Method("c", quality=Quality(512, 0.004, 0.03, 0.95, 0.95))
    assert "bundled model" not in trials.in_words(tried, verdict, "", 0.1), "exact methods alone need no column"
    tried[1].method = Method("a", "relaxed", quality=Quality(512, 0.13, 0.03, 0.9, 0.95))
    text = trials.in_words(tried, verdict, "", 0.1)
    assert "bundled model (512 images): log p per token -0.13 ± 0.03 from next token's; 90% show" in text
    rows = {row.split("|")[1].strip(): row.split("|")[-3].strip() for row in text.splitlines() if row.startswith("|")}
    assert rows["method"] == "log p loss (bundled model)"
    assert [rows[name] for name in ("a (chosen)", "b", "c", "next token")] == ["0.13", "-", "0.00", "0.00"]
    assert trials.trials_report(tried, verdict)["trials"][1]["quality"]["agreement"] == 0.9
    assert draw(trials.trials_chart(tried, verdict, "")).shape[1] == WIDTH


def test_the_chart_has_the_methods_that_ran_and_marks_what_was_chosen():
    tried = [PLAIN, trial("a", 4, 5, 6), trial("b", note="did not fit in memory")]
    chart = trials.trials_chart(tried, judge(tried, 0), "The setting.")
    assert [(row.name, row.chosen) for row in chart.rows] == [("a", True), ("next token", False)]
    image = draw(chart)
    rows = [image[HEAD + i * ROW : HEAD + (i + 1) * ROW] for i in range(2)]
    assert [bool((row == CHOSEN).all(-1).any()) for row in rows] == [True, False]
    assert all((row == EXACT).all(-1).any() for row in rows)
