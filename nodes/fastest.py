"""Find Fastest: short trials of several methods on the user's own model and device, in rounds until the time is up."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from comfy_api.latest import io

from ..device.graphs import capturable
from ..reports import trials
from ..reports.comparison import draw
from ..reports.run_report import drawing
from ..reports.trials import TIME_UP, Trial
from ..samplers.contract import Progress, Request
from ..samplers.layout import TokenLayout
from . import candidates
from .chosen_method import ChosenMethod
from .comfy_runtime import runs
from .comfy_runtime.memory import is_out_of_memory
from .comfy_runtime.progress import Report
from .comfy_runtime.runs import LoadedDrafter, LoadedModel
from .diagnostics import as_images, preview
from .samplers import Inputs, request_of
from .schema import schema
from .search import REPORT
from .sockets import ARDrafter, ARMethod
from .widgets import common_inputs, negative_input

RUNS = 2  # of a method in a round: one proves nothing
STOP_AFTER = 2.0  # times the next-token sampler: a run that takes longer is stopped, and the method left out
FEWEST = 32  # tokens of a trial, if the image has as many, and of a run for warm-up where no steps are captured
UNIT = 1000  # of the progress bar

clock = time.perf_counter


class GivenUpError(Exception):
    """A run was stopped because it took too long."""


@dataclass
class Search:
    """Trials of methods for a request, the first of them the next-token sampler.

    layout: the part of request.layout that a run samples; began: as clock(); seconds: for all trials; captured: whether
    steps are captured as CUDA graphs; reached: positions that the last run decided.
    """

    request: Request
    report: Report
    trials: list[Trial[ChosenMethod]]
    layout: TokenLayout
    seconds: float
    captured: bool
    began: float
    reached: int = 0

    @property
    def until(self) -> float:
        return self.began + self.seconds

    def run(self, method: ChosenMethod, layout: TokenLayout, seed: int = 0, until: float = math.inf) -> tuple:
        """Sample the tokens of ``layout``: seconds and trace. Raises GivenUpError after ``until``."""

        def watch(progress: Progress) -> None:
            self.reached = int(progress.committed.min())
            share = min(1.0, (clock() - self.began) / self.seconds)
            self.report(replace(progress, committed=torch.tensor(UNIT * share)))
            if clock() > until:
                raise GivenUpError

        seed = self.request.seed + seed * self.request.batch
        request = replace(self.request, layout=layout, seed=seed, callback=watch)
        with runs.place(method.model, method.drafter, method.method, request):
            began = clock()
            result = method.method.sample(request)
            seconds = clock() - began
        return seconds, result.trace

    def shorten(self) -> None:
        """Make trials as long as the next-token sampler gets in its share of the time, so that a round fits into it."""
        try:
            self.run(self.trials[0].method, self.layout, 0, clock() + self.seconds / (RUNS * len(self.trials)))
        except GivenUpError:
            sampled = (self.layout.forced[:, : self.reached] < 0).sum(1).min()
            self.layout = self.layout.beginning(max(FEWEST, int(sampled)))

    def measure(self, trial: Trial[ChosenMethod], until: float, longest: float) -> None:
        """A method's runs in a round, of ``longest`` seconds each, after those for warm-up; the n-th run has the same
        seed for all methods. A model keeps the captured steps of few methods: each round captures them again, in two
        runs. Raises GivenUpError."""
        if self.captured:
            for _ in range(2):
                self.run(trial.method, self.layout, 0, until)
        elif not trial.seconds:
            beginning = self.layout.beginning(max(FEWEST, trial.method.method.width(self.request)))
            self.run(trial.method, beginning, 0, until)
        for _ in range(RUNS):
            seconds, trace = self.run(trial.method, self.layout, len(trial.seconds), min(until, clock() + longest))
            trial.add(seconds, trace.totals)

    def rounds(self, budget: float) -> None:
        """Measure the methods in turn until the time is up, the next-token sampler at least once. What has a note is
        left out."""
        plain, *others = self.trials
        for trial in others:
            if trial.method.drafter is None and 2 * trial.method.method.width(self.request) > self.layout.length:
                trial.note = f"not tried: trials of {self.layout.sampled_tokens} tokens are too short for it"
        self.measure(plain, math.inf, math.inf)
        longest = STOP_AFTER * plain.median * plain.tokens / len(plain.seconds)
        turn = others
        while clock() < self.until and not all(trial.note for trial in others):
            for trial in turn:
                if not trial.note and clock() < self.until:
                    with self.noting(trial, budget):
                        self.measure(trial, self.until, math.inf if trial is plain else longest)
            turn = self.trials
        for trial in others:
            if len(trial.seconds) < RUNS and not trial.note:
                trial.note = "run only once: time was up" if trial.seconds else TIME_UP

    @contextmanager
    def noting(self, trial: Trial[ChosenMethod], budget: float) -> Iterator[None]:
        """Record why a method is measured no further."""
        try:
            yield
        except GivenUpError:
            if clock() < self.until:
                trial.note = f"stopped: it took more than {STOP_AFTER:g} times as long as next token"
        except (RuntimeError, runs.TooLargeError) as error:
            if not isinstance(error, runs.TooLargeError) and not is_out_of_memory(error):
                raise
            trial.note = "did not fit in memory"
        if trial.tokens and not trial.within(budget):
            trial.note = f"over leak_budget (drift bound {trial.drift_bound_per_token:.3f} per token)"


def search(
    request: Request, model: LoadedModel, drafter: LoadedDrafter | None, budget: float, tokens: int, seconds: float
) -> tuple[list[Trial[ChosenMethod]], TokenLayout]:
    """Measure methods for about ``seconds``, the next-token sampler first. Returns the trials and the layout of a run.

    No session is left with the model, because other runs have another length.
    """
    began, codes = clock(), 0 if model.model.codebook is None else model.model.vocab
    methods = candidates.methods(model, drafter, request, budget, codes)
    captured, layout = capturable(model.patcher.load_device), request.layout.beginning(tokens)
    tried = Search(request, Report(UNIT, None), [*map(Trial, methods)], layout, seconds, captured, began)
    model.patcher.release()
    try:
        tried.shorten()
        tried.rounds(budget)
        tried.report.finish()
    finally:
        model.patcher.release()
    return tried.trials, tried.layout


class FindFastest(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARFindFastest",
            category="SpecAR/diagnostics",
            search=(*REPORT, "benchmark", "fast", "speed", "auto tune"),
            inputs=[
                *(
                    io.Int.Input("trial_seed", default=0, min=0, max=0xFFFFFFFFFFFFFFFF) if i.id == "seed" else i
                    for i in common_inputs()
                ),
                io.Float.Input("leak_budget", default=0, min=0, max=1, step=0.01, round=0.001),
                io.Int.Input("tokens", default=256, min=16, max=65536),
                io.Int.Input("seconds", default=60, min=1, max=3600),
                ARDrafter.Input("drafter", optional=True),
                negative_input(),
            ],
            outputs=[ARMethod.Output("method"), io.Image.Output("chart"), io.String.Output("report")],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls,
        model: LoadedModel,
        trial_seed: int,
        leak_budget: float,
        tokens: int,
        seconds: int,
        drafter: LoadedDrafter | None = None,
        **inputs: Any,
    ) -> io.NodeOutput:
        if model.model.continuous:
            raise ValueError(
                f"{model.name} is a continuous model; Find Fastest supports only models of token ids. "
                "To compare continuous samplers, connect their traces to Compare Runs."
            )
        if drafter is not None:
            drafter.follow(model)
        request = request_of(Inputs(model=model, seed=trial_seed, **inputs))
        assert isinstance(request, Request), "the model's tokens are ids"
        if not request.layout.sampled_tokens:
            raise ValueError(
                "The noise mask of latent_image keeps every token, so there is nothing to generate. Mask "
                "the part to generate, or connect Empty AR Latent."
            )
        tried, layout = search(request, model, drafter, leak_budget, tokens, seconds)
        verdict = trials.judge(tried, leak_budget)
        setting = setting_text(request, layout, seconds)
        chart = trials.trials_chart(tried, verdict, setting)
        image = as_images([draw(chart)])
        shown = {
            "text": [trials.summary(tried, verdict, setting, leak_budget)],
            "specar": [trials.trials_report(tried, verdict)],
            "specar_chart": [json.dumps(asdict(chart))],
        }
        text = trials.in_words(tried, verdict, setting, leak_budget)
        return io.NodeOutput(verdict.chosen.method, image, text, ui=preview(image, cls) | shown)


def setting_text(request: Request, layout: TokenLayout, seconds: int) -> str:
    """Description of the trials' settings."""
    drawn, total = layout.sampled_tokens, request.layout.sampled_tokens
    what = f"{total} tokens" if drawn == total else f"the first {drawn} of {total} tokens"
    images = "an image" if request.batch == 1 else f"each of {request.batch} images"
    setting = drawing(asdict(request.params))
    return (
        f"Trials sampled {what} of {images} on {request.model.device}, {setting}, by turns until {seconds} s were up."
    )
