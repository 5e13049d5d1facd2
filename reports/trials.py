"""What trials of several methods say: which one is to be chosen, in words, as a table and as a chart. No ComfyUI.

A method counts as faster than another only where the middle half of its runs was, and there were two at least of each.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Generic, Protocol, TypeVar

from .comparison import Chart, Column, Row, bars, written_table
from .quality import Quality

SCHEMA = "specar.trials/2"
TIME_UP = "not tried, as time was up"  # a note
ROUNDING = 1e-5  # of drift bounds, which are summed in fp32


class TrialMethod(Protocol):
    """What the reports need to know of a method; the nodes' ChosenMethod provides it."""

    @property
    def name(self) -> str: ...
    @property
    def acceptance(self) -> str: ...
    @property
    def by_hand(self) -> str: ...
    @property
    def exact(self) -> bool: ...
    @property
    def quality(self) -> Quality | None: ...


M = TypeVar("M", bound=TrialMethod)


@dataclass
class Trial(Generic[M]):
    """What was measured of a method: seconds per token of every run; tokens, passes of the model (summed over images)
    and drift_bound (the drift bound) of all runs together. note: why there are no numbers, or not all."""

    method: M
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    passes: int = 0
    drift_bound: float = 0.0
    note: str = ""

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def drift_bound_per_token(self) -> float:
        return self.drift_bound / self.tokens

    @property
    def passes_per_token(self) -> float:
        """Of one image: 1 is what the next-token sampler takes."""
        return self.passes / self.tokens

    @property
    def range(self) -> tuple[float, float]:
        """Least and most seconds per token of the middle half of the runs, without what disturbed single ones."""
        aside = len(self.seconds) // 4
        runs = sorted(self.seconds)[aside : len(self.seconds) - aside]
        return runs[0], runs[-1]

    def add(self, seconds: float, totals: dict[str, Any]) -> None:
        """A run, and the totals of its trace."""
        self.seconds.append(seconds / totals["tokens"])
        self.tokens += totals["tokens"]
        self.passes += sum(totals["passes_per_image"])
        self.drift_bound += totals["drift_bound"]

    def within(self, budget: float) -> bool:
        """Did it drift no further per token than allowed?"""
        return bool(self.tokens) and self.drift_bound_per_token <= budget * (1 + ROUNDING)

    def faster_than(self, other: Trial) -> bool:
        """For certain, as far as these runs can tell."""
        return min(len(self.seconds), len(other.seconds)) >= 2 and self.range[1] < other.range[0]


@dataclass(frozen=True)
class Verdict:
    """chosen: which method to use; faster: is it faster than next token; alike: others that are so too and that these
    runs cannot tell from the fastest."""

    chosen: Trial
    faster: bool
    alike: list[Trial]


def judge(trials: list[Trial], budget: float) -> Verdict:
    """Choose among trials, the first of which is of the next-token sampler: the fastest method within the drift
    budget that is faster than it, or else it itself. An exact one where speed cannot tell it from the fastest."""
    plain, *others = trials
    faster = [trial for trial in others if trial.within(budget) and trial.faster_than(plain)]
    if not faster:
        return Verdict(plain, False, [])
    fastest = min(faster, key=lambda trial: trial.median)
    alike = [trial for trial in faster if not fastest.faster_than(trial)]
    chosen = min([t for t in alike if t.method.exact] or alike, key=lambda trial: trial.median)
    return Verdict(chosen, True, [trial for trial in alike if trial is not chosen])


def speed(trial: Trial, plain: Trial) -> tuple[float, float, float]:
    """How many times as fast as the next-token sampler: by the medians, and the least and most by their ranges."""
    return plain.median / trial.median, plain.range[0] / trial.range[1], plain.range[1] / trial.range[0]


def summary(trials: list[Trial], verdict: Verdict, setting: str, budget: float) -> str:
    """What was chosen and why, how to set it by hand, and what was not measured. setting: what the trials sampled."""
    chosen = verdict.chosen
    if verdict.faster:
        times, least, most = speed(chosen, trials[0])
        lines = [
            f"Chosen: {trial_title(chosen)}. {times:.2f} times as fast as next token in these trials ({least:.2f} to "
            f"{most:.2f} in {len(chosen.seconds)} runs, outliers aside)."
        ]
        if verdict.alike:
            lines.append(
                f"Indistinguishable from the fastest in these runs: {'; '.join(map(trial_title, verdict.alike))}."
            )
    elif trials[1:] and all(trial.note == TIME_UP for trial in trials[1:]):
        lines = ["Chosen: next token, as there was no time to try any other method. Allow more seconds."]
    else:
        within = " within leak_budget" if budget else ""
        lines = [f"Chosen: next token. No other method{within} was clearly faster."]
        likely = [trial for trial in trials[1:] if trial.within(budget) and trial.median < trials[0].median]
        if likely:
            best = min(likely, key=lambda trial: trial.median)
            times, least, most = speed(best, trials[0])
            doubt = "ran only once" if len(best.seconds) < 2 else f"was {least:.2f} to {most:.2f} times as fast"
            lines = [
                f"Too noisy to tell; probably {trial_title(best)} ({times:.1f} times). Raise seconds, or measure when "
                "the machine is idle.",
                *lines,
                f"{trial_title(best)} {doubt}.",
            ]
    if not chosen.method.exact and (found := chosen.method.quality):
        lines.append(
            f"Images with such settings, measured on the bundled model ({found.images} images): log p per "
            f"token {_sign(-found.loss)} ± {found.error:.2f} from next token's; {found.agreement:.0%} show "
            f"what was asked for (next token: {found.plain_agreement:.0%})."
        )
    notes: dict[str, list[str]] = {}
    for trial in trials:
        notes.setdefault(trial.note, []).append(trial_title(trial))
    noted = [f"{note[0].upper()}{note[1:]}: {'; '.join(titles)}." for note, titles in notes.items() if note]
    return "\n".join([*lines, f"By hand: {chosen.method.by_hand}.", setting, *noted])


def in_words(trials: list[Trial], verdict: Verdict, setting: str, budget: float) -> str:
    """The summary, and all measurements as a table."""
    return f"{summary(trials, verdict, setting, budget)}\n\n{trials_table(trials, verdict)}"


def trials_report(trials: list[Trial], verdict: Verdict) -> dict[str, Any]:
    """The same for programs (JSON-ready)."""
    return {
        "schema": SCHEMA,
        "chosen": trials.index(verdict.chosen),
        "faster": verdict.faster,
        "trials": [
            {
                "method": t.method.name,
                "acceptance": t.method.acceptance,
                "exact": t.method.exact,
                "by_hand": t.method.by_hand,
                "seconds_per_token": t.seconds,
                "tokens": t.tokens,
                "passes": t.passes,
                "drift_bound": t.drift_bound,
                "quality": t.method.quality and asdict(t.method.quality),
                "note": t.note,
            }
            for t in trials
        ],
    }


def trial_title(trial: Trial) -> str:
    return trial.method.name + ("" if trial.method.exact else f", {trial.method.acceptance}")


def by_speed(trials: list[Trial]) -> list[Trial]:
    """The fastest first; at the end those without a measurement."""
    return sorted(trials, key=lambda trial: trial.median if trial.seconds else math.inf)


def trial_columns(trials: list[Trial], plain: Trial) -> list[Column]:
    """The measures of these trials, and their ranges. plain: the next-token sampler's."""
    measured = [trial if trial.seconds else None for trial in trials]
    speeds = [t and speed(t, plain) for t in measured]
    chosen = [
        Column(
            "time",
            "ms per token",
            [t and 1000 * t.median for t in measured],
            "{:.3g}".format,
            [t and (1000 * t.range[0], 1000 * t.range[1]) for t in measured],
        ),
        Column(
            "speed",
            "times next token",
            [s and s[0] for s in speeds],
            "{:.2f}".format,
            [s and s[1:] if t is not plain else None for t, s in zip(trials, speeds, strict=True)],
        ),
        Column("model passes", "per token", [t and t.passes_per_token for t in measured], "{:.2f}".format),
    ]
    if any(not trial.method.exact for trial in trials):
        bounds = [t and t.drift_bound_per_token for t in measured]
        chosen.append(Column("drift bound", "per token", bounds, "{:.3f}".format))
    qualities = [trial.method.quality for trial in trials]
    if any(quality and not trial.method.exact for trial, quality in zip(trials, qualities, strict=True)):
        losses = [t and q and q.loss for t, q in zip(measured, qualities, strict=True)]
        chosen.append(Column("log p loss", "bundled model", losses, lambda loss: _sign(loss).lstrip("+")))
    return chosen


def _sign(value: float) -> str:
    """With its sign, but 0.00 without."""
    return f"{round(value, 2):+.2f}" if round(value, 2) else "0.00"


def trials_table(trials: list[Trial], verdict: Verdict) -> str:
    """The measurements as a Markdown table, the fastest first; medians, and in brackets the middle half of the runs."""
    rows, measures = by_speed(trials), trial_columns(by_speed(trials), trials[0])
    head = ["method", "acceptance", *(f"{c.name} ({c.unit})" for c in measures), "runs"]
    lines = [
        [
            trial.method.name + (" (chosen)" if trial is verdict.chosen else ""),
            trial.method.acceptance,
            *(c.range_text(i) for c in measures),
            str(len(trial.seconds)),
        ]
        for i, trial in enumerate(rows)
    ]
    return written_table(head, lines)


def trials_chart(trials: list[Trial], verdict: Verdict, setting: str) -> Chart:
    """The trials that ran, the fastest first: passes, time, and the drift bound of those that are not exact."""
    rows = [trial for trial in by_speed(trials) if trial.seconds]
    measures = [column for column in trial_columns(rows, trials[0]) if column.name in ("model passes", "time")]
    shown = [
        Row(
            trial.method.name,
            f"{trial.method.acceptance}; {trial.note}" if trial.note else trial.method.acceptance,
            list(cells),
            "same" if trial.method.exact else f"drift <= {trial.drift_bound_per_token:.3f}",
            trial.method.exact,
            trial is verdict.chosen,
        )
        for trial, cells in zip(rows, zip(*map(bars, measures), strict=True), strict=True)
    ]
    return Chart([(column.name, column.unit) for column in measures], shown, setting)
