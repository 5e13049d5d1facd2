"""Find Fastest: short trials of several methods on the user's own model and device."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
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
from ..samplers.methods.jacobi import SJD
from ..samplers.methods.speculative import DraftTree
from . import candidates
from .comfy_runtime import runs
from .comfy_runtime.memory import out_of_memory
from .comfy_runtime.progress import Report
from .comfy_runtime.runs import LoadedDrafter, LoadedModel
from .diagnostics import as_images, preview
from .method import ChosenMethod
from .samplers import Inputs, request_of
from .schema import schema
from .search import REPORT
from .sockets import ARDrafter, ARMethod
from .widgets import common_inputs, negative_input

RUNS = 3  # per method that may be the fastest
REPEAT_WITHIN = 1.5  # times the fastest: a slower method is not repeated
STOP_AFTER = 2.0  # times the next-token sampler: a first run that takes longer is stopped
FEWEST = 32  # tokens of a trial, if the image has as many
WARM = 32  # tokens of a run for warm-up or estimation
PER_METHOD = 1.5  # average time per method with warm-up, in runs of the next-token sampler; one more to capture steps
UNIT = 1000  # progress per method

clock = time.perf_counter


class GivenUpError(Exception):
    """A run was stopped because it took too long."""


@dataclass
class Search:
    """Trials of methods for a request. until: deadline, as clock(); captured: whether steps are captured as CUDA
    graphs, which makes the first runs of a method slower.

    layout: the part of request.layout that a run samples. trials: the first is the baseline. warm: sessions that its
    runs left with the model.
    """

    request: Request
    report: Report
    until: float
    budget: float
    captured: bool
    layout: TokenLayout
    trials: list[Trial[ChosenMethod]] = field(default_factory=list)
    warm: dict[Any, Any] = field(default_factory=dict)
    stage: int = -1  # index in the progress bar
    lap: int = 0
    laps: int = 1

    # Runs

    def run(self, method: ChosenMethod, layout: TokenLayout, seed: int = 0, until: float = math.inf) -> tuple:
        """Sample the tokens of ``layout``: seconds and trace. Raises GivenUpError after ``until``."""

        def watch(progress: Progress) -> None:
            share = (self.lap + float(progress.committed.float().mean()) / layout.length) / self.laps
            self.report(replace(progress, committed=torch.tensor(UNIT * (self.stage + min(1.0, share)))))
            if clock() > until:
                raise GivenUpError

        seed = self.request.seed + seed * self.request.batch
        request = replace(self.request, layout=layout, seed=seed, callback=watch)
        with runs.place(method.model, method.drafter, method.method, request):
            began = clock()
            result = method.method.sample(request)
            seconds = clock() - began
        self.lap += 1
        return seconds, result.trace

    def measure(self, trial: Trial[ChosenMethod], until: float = math.inf) -> None:
        """One measured run; the n-th run has the same seed for all methods."""
        seconds, trace = self.run(trial.method, self.layout, len(trial.seconds), until)
        totals = trace.totals
        trial.seconds.append(seconds / totals["tokens"])
        trial.tokens += totals["tokens"]
        trial.passes += sum(totals["passes_per_image"])
        trial.drift_bound += totals["drift_bound"]

    def warm_up(self, method: ChosenMethod, until: float = math.inf) -> None:
        """Warm-up runs: one, or two if steps are captured, because the second still captures."""
        layout = self.layout if self.captured else self.layout.beginning(max(WARM, method.method.width(self.request)))
        for _ in range(1 + self.captured):
            self.run(method, layout, 0, until)

    # Methods

    def begin(self, laps: int) -> None:
        """Start the next stage, of ``laps`` runs."""
        self.stage, self.lap, self.laps = self.stage + 1, 0, laps

    def baseline(self, method: ChosenMethod, tokens: int, methods: int) -> None:
        """Measure the next-token sampler, without a time limit, and choose the number of tokens per run: at most
        ``tokens``, and fewer if the time does not suffice for ``methods`` methods."""
        self.begin(2 + 4 * self.captured)
        beginning = self.request.layout.beginning(WARM)
        seconds, trace = [self.run(method, beginning) for _ in range(1 + 2 * self.captured)][-1]
        per_token = seconds * self.request.batch / trace.totals["tokens"]
        affordable = int((self.until - clock()) / (methods * (PER_METHOD + self.captured) * per_token))
        self.layout = self.request.layout.beginning(min(tokens, max(FEWEST, affordable)))
        self.trials.append(Trial(method))
        sessions = method.model.model.sessions
        sessions.clear()  # sessions of the estimate have another length
        if self.captured:
            self.warm_up(method)
        self.warm = dict(sessions)
        self.measure(self.trials[0])

    def once(self, methods: Iterable[ChosenMethod]) -> None:
        """Measure methods once, while enough time is left to repeat the fastest (or half of the time)."""
        tokens = self.trials[0].tokens  # of a run
        whole, half = self.trials[0].seconds[0] * tokens, (clock() + self.until) / 2
        for method in methods:
            self.begin(2 + self.captured)
            trial = Trial(method)
            self.trials.append(trial)
            if method.drafter is None and 2 * method.method.width(self.request) > self.layout.length:
                trial.note = f"not tried: trials of {self.layout.sampled_tokens} tokens are too short for it"
                continue
            best = min(other.seconds[0] for other in self.trials if other.seconds) * tokens
            enough = max(self.until - (RUNS - 1 + self.captured) * (whole + best), half)
            if clock() >= enough:
                trial.note = TIME_UP
                continue
            with self.noting(trial, enough):
                self.warm_up(method, enough)
                self.measure(trial, min(enough, clock() + STOP_AFTER * whole))

    def repeat(self) -> None:
        """Repeat the methods that may be the fastest, alternating with the baseline; the fastest one even after the
        deadline."""
        plain, others = self.trials[0], [trial for trial in self.trials[1:] if self.promising(trial)]
        self.begin(len(others) * (2 * (RUNS - 1) + 2 * self.captured))
        for place, trial in enumerate(sorted(others, key=lambda trial: trial.median)):
            if place and clock() >= self.until:
                trial.note = "run only once: time was up"
                continue
            with self.noting(trial):
                if self.captured:
                    self.warm_up(trial.method)
                sessions = trial.method.model.model.sessions
                if any(sessions.get(key) is not session for key, session in self.warm.items()):
                    self.warm_up(plain.method)  # memory was short, and weights were moved
                while len(trial.seconds) < RUNS:
                    self.measure(plain)
                    self.measure(trial)

    @contextmanager
    def noting(self, trial: Trial[ChosenMethod], until: float = math.inf) -> Iterator[None]:
        """Record why a method could not be measured, and remove its sessions from the model."""
        sessions = trial.method.model.model.sessions
        try:
            yield
        except GivenUpError:
            slow = f"stopped: it took more than {STOP_AFTER:g} times as long as next token"
            trial.note = TIME_UP if clock() >= until else slow
        except (RuntimeError, runs.TooLargeError) as error:
            if not isinstance(error, runs.TooLargeError) and not out_of_memory(error):
                raise
            trial.note = "did not fit in memory"
        if trial.tokens and not trial.within(self.budget):
            trial.note = f"over leak_budget (drift bound {trial.drift_bound_per_token:.3f} per token)"
        for key in sessions.keys() - self.warm.keys():
            del sessions[key]  # a model keeps few, and must keep the baseline's

    def promising(self, trial: Trial[ChosenMethod]) -> bool:
        """Whether it may be the fastest."""
        medians = [other.median for other in self.trials if other.seconds and other.within(self.budget)]
        return trial.within(self.budget) and trial.median <= REPEAT_WITHIN * min(medians)

    def bases(self) -> list[ChosenMethod]:
        """The fastest window and the fastest tree so far, unless they are too slow for any rule to help."""
        ran = [trial for trial in self.trials if trial.seconds]
        of = [[t for t in ran if isinstance(t.method.method, kind)] for kind in (SJD, DraftTree)]
        best = [min(trials, key=lambda trial: trial.median) for trials in of if trials]
        limit = STOP_AFTER * min(trial.median for trial in ran)
        return [trial.method for trial in best if trial.median <= limit]


def search(
    request: Request, model: LoadedModel, drafter: LoadedDrafter | None, budget: float, tokens: int, seconds: float
) -> tuple[list[Trial[ChosenMethod]], TokenLayout]:
    """Measure methods for about ``seconds``, the next-token sampler first. Returns the trials and the layout of a run.

    No session is left with the model, because other runs have another length.
    """
    until, plain = clock() + seconds, candidates.next_token(model, request)
    exact = candidates.exact_methods(model, drafter, request)
    codes = 0 if model.model.codebook is None else model.model.vocab
    rules = len(candidates.relaxed_methods(exact[:1], budget, codes, request)) if budget else 0
    planned = 1 + len(exact) + rules * (1 if drafter is None else 2)
    captured = capturable(model.patcher.load_device)
    tried = Search(request, Report((planned + 1) * UNIT, None), until, budget, captured, request.layout)
    model.patcher.release()
    try:
        tried.baseline(plain, tokens, planned)
        tried.once(exact)
        if budget:
            tried.once(candidates.relaxed_methods(tried.bases(), budget, codes, request))
        tried.repeat()
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
                *(trial_seed_input() if i.id == "seed" else i for i in common_inputs()),
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
        setting = setting_text(request, layout)
        chart = trials.chart(tried, verdict, setting)
        image = as_images([draw(chart)])
        shown = {
            "text": [trials.summary(tried, verdict, setting, leak_budget)],
            "specar": [trials.report(tried, verdict)],
            "specar_chart": [json.dumps(asdict(chart))],
        }
        text = trials.in_words(tried, verdict, setting, leak_budget)
        return io.NodeOutput(verdict.chosen.method, image, text, ui=preview(image, cls) | shown)


def trial_seed_input() -> io.Input:
    return io.Int.Input("trial_seed", default=0, min=0, max=0xFFFFFFFFFFFFFFFF)


def setting_text(request: Request, layout: TokenLayout) -> str:
    """Description of the trials' settings."""
    drawn, total = layout.sampled_tokens, request.layout.sampled_tokens
    what = f"{total} tokens" if drawn == total else f"the first {drawn} of {total} tokens"
    images = "an image" if request.batch == 1 else f"each of {request.batch} images"
    return f"Trials sampled {what} of {images} on {request.model.device}, {drawing(asdict(request.params))}."
