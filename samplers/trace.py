"""What happened to every token of a run, kept on the device until the end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from ..kernels.sampling import at, entropy
from .constants import constant
from .layout import TokenLayout

SCHEMA = "specar.trace/3"


class Source(IntEnum):
    """Where a final token came from."""

    PREFILL = 0  # sampled in the prompt's forward pass, or by the model alone before any drafting
    ACCEPTED = 1  # a draft token that the exact rule accepts
    RELAXED = 2  # a draft token that only a relaxed rule accepts
    RESIDUAL = 3  # resampled after a draft token was rejected
    BONUS = 4  # sampled after the last draft token, from the same forward pass
    FORCED = 5  # kept by the user, or fixed by the layout (an end of line)
    SKIPPED = 6  # a draft token accepted unverified


POSITION_FIELDS = {  # of models of token ids: name -> dtype
    "finalised_at": torch.int32,  # forward pass that decided the token (skipped: the last before); the prompt's is 0
    "source": torch.uint8,  # a Source
    "depth": torch.int32,  # position in the draft of the draft token verified here, from 1 (0: no draft token)
    "p": torch.float32,  # target probability of the final token
    "q": torch.float32,  # draft probability of the draft token verified here (0: no draft token)
    "ratio": torch.float32,  # p / q of the draft token verified here, unclipped (0: no draft token)
    "drift_bound": torch.float32,  # bound on the total variation that a relaxed rule adds here (0: none, or none known)
    "entropy": torch.float32,  # of the target's distribution, in nats
    "top1": torch.float32,  # largest target probability
    "refinements": torch.int32,  # passes that the position spent in the Jacobi window before the one that decided it
    "rank": torch.int32,  # of the draft token verified here among its siblings, from 0
    "tree_depth": torch.int32,  # levels of the draft tree of the round that decided the token (0: no tree)
    "tree_width": torch.int32,  # largest number of draft tokens on one level of that tree
    "draft_tv": torch.float32,  # total variation of target and drafter here (0: no draft, or not sampled by a drafter)
    "similarity": torch.float32,  # of that tree's paths, the S of VVS (0: no tree, or another method)
}

CONTINUOUS_FIELDS = {  # of models of vectors: name -> dtype
    "finalised_at": torch.int32,
    "source": torch.uint8,
    "depth": torch.int32,
    "log_ratio": torch.float32,  # log of target over draft density of the draft token verified here (0: none)
    "distance": torch.float32,  # between the two models' own samples here, in latent units (0: no draft token)
    "block": torch.int32,  # the round that drafted the token, from 1 (0: no draft token)
    "tries": torch.int32,  # proposals of the residual's rejection sampling (0: none; negative: none was accepted)
    "order": torch.int32,  # position in the generation order, kept tokens first
}


@dataclass
class Trace:
    """The record of a run.

    rows, cols, stride, lead: see TokenLayout. positions: name -> tensor [B, S] (see POSITION_FIELDS,
    CONTINUOUS_FIELDS); rounds: name -> tensor [passes] or [passes, B]; totals: JSON-ready numbers, those that the run
    counted (target_passes, draft_passes, tokens, seed, ...) and those of :func:`derived_totals`; settings: JSON-ready
    method settings.
    """

    rows: int
    cols: int
    stride: int
    positions: dict[str, Tensor] = field(repr=False)
    rounds: dict[str, Tensor] = field(repr=False)
    totals: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    lead: int = 0

    @property
    def continuous(self) -> bool:
        """Is this the record of a model that draws vectors?"""
        return "log_ratio" in self.positions

    @property
    def notices(self) -> list[str]:
        """What the run did not use of what it was asked for (words of a prompt, ...), a sentence each."""
        return list(self.settings.get("notices", ()))

    @property
    def layout(self) -> TokenLayout:
        length = self.positions["source"].shape[1]
        forced = torch.full((1, length), -1, dtype=torch.int64)
        return TokenLayout(self.rows, self.cols, self.stride, forced, self.lead)

    def grid(self, name: str) -> Tensor:
        """A per-position record as images [B, rows, cols]."""
        return self.layout.to_grid(self.positions[name])

    def _comfy_cache_tensors(self) -> list[Tensor]:
        """The tensors that ComfyUI counts when main memory is short and it looks for cached outputs to drop."""
        return [*self.positions.values(), *self.rounds.values()]

    @property
    def drift_bound(self) -> float | None:
        """The drift bound of an image: summed over its tokens, the mean of a batch. None where it is not counted, of
        vectors, or not known: of SJD++ as printed, which tests kept drafts with a distribution that is not theirs, and
        where sampled trees decide by themselves whether they are verified (VVS, dynamic)."""
        known = self.settings.get("bounded", self.settings.get("reuse") != "threshold_paper")
        if self.continuous or not known:
            return None
        return self.totals["drift_bound"] / self.totals["images"]

    @property
    def draft_tv(self) -> float | None:
        """How far apart drafter and model were where a draft was tested (mean total variation). None where that was not
        measured: without a drafter, and where drafts are its most likely tokens (dynamic trees, ADT-Tree)."""
        if self.continuous:
            return None
        if distance := self.totals["draft_tv"]:
            return distance
        ratio = self.positions["ratio"][was_tested(self.positions)]
        alike = self.totals["draft_passes"] > 0 and len(ratio) > 0 and bool((ratio == 1).all())
        return 0.0 if alike else None

    def summary(self) -> dict[str, Any]:
        """Numbers of the whole run, as they were computed at its end; but drift_bound per image, and None for it and
        for draft_tv where they are not known. With those of :func:`tree_sizes`."""
        unknown = {} if self.continuous else {"draft_tv": self.draft_tv}
        return self.totals | {"drift_bound": self.drift_bound} | unknown | tree_sizes(self.positions, self.rounds)

    def report(self) -> dict[str, Any]:
        """The versioned JSON report: schema, settings and summary."""
        return {
            "schema": SCHEMA,
            "grid": [self.rows, self.cols, self.stride],
            "settings": self.settings,
            "totals": self.summary(),
        }


def was_tested(positions: dict[str, Tensor]) -> Tensor:
    """Where a draft was tested [B, S] (bool)."""
    source = positions["source"]
    return (source != Source.FORCED) & (source != Source.SKIPPED) & (positions["depth"] > 0)


def derived_totals(positions: dict[str, Tensor], counted: dict[str, Any]) -> dict[str, Any]:
    """Numbers of a whole run that follow from its records and from what it counted, forced tokens excluded.

    They are computed once, when the run ends, and stored with it. Sums are exact and rounded once, so they depend
    neither on the number of threads nor on how the records lie in memory. prefix_tokens: tokens before the first one
    and after the last one that was sampled, on which no pass was spent. acceptance_rate: of the positions at which a
    draft was tested, the fraction decided by an accepted one; of a chain this is the alpha of Leviathan et al. (section
    3.1), and siblings of a tree that are tested at a position count once. drift_bound: the sum of the position field
    over all images. draft_tv: the mean of that field over the positions at which a draft was tested (Cool-SD,
    assumption 2 and table 3), 0 where it was not measured.
    """
    source = positions["source"]
    free, verified = source != Source.FORCED, was_tested(positions)
    accepted = int(((source == Source.ACCEPTED) | (source == Source.RELAXED)).sum())
    prefix = int((~free & (positions["finalised_at"] == 0)).sum())
    passes = max(sum(counted["passes_per_image"]), 1)
    continuous = "log_ratio" in positions
    return {
        "accepted_drafts": accepted,
        "acceptance_rate": accepted / int(verified.sum()) if verified.any() else 0.0,
        "accepted_length": counted["tokens"] / passes,
        "step_compression": (source.numel() - prefix) / passes,
        "prefix_tokens": prefix,
        **(_continuous_numbers(positions, verified) if continuous else _discrete_numbers(positions, free, verified)),
        "sources": {s.name.lower(): int((source == s).sum()) for s in Source if (source == s).any()},
    }


def tree_sizes(positions: dict[str, Tensor], rounds: dict[str, Tensor]) -> dict[str, float]:
    """mean_depth and mean_width: levels of a draft tree and its most drafts on one level, over rounds and images;
    empty for methods without trees. Where the size of trees is chosen by what pays, also mean_nodes, their drafts, and
    expected_length: the accepted_length that was expected of them.

    The tree of a round is recorded at the tokens that it decided, of which it decided one at least.
    """
    if "nodes" not in rounds:
        return {}
    committed, last = rounds["committed"], positions["tree_depth"].shape[1] - 1
    first = committed.cumsum(0)[:-1].clamp(0, last).t()  # position that each round after the prompt's decided first
    drafted = (committed[1:] > 0).t()
    sizes = {
        f"mean_{name}": _mean(positions[f"tree_{name}"].gather(1, first)[drafted].tolist())
        for name in ("depth", "width")
    }
    if "expected" in rounds:
        sizes["mean_nodes"] = _mean(rounds["nodes"][1:].t()[drafted].tolist())
        sizes["expected_length"] = _mean(rounds["expected"][1:, None].expand_as(drafted.t()).t()[drafted].tolist())
    return sizes


def _discrete_numbers(positions: dict[str, Tensor], free: Tensor, verified: Tensor) -> dict[str, float]:
    log_p = [math.log(max(p, 1e-30)) for p in positions["p"][free].tolist()]
    return {
        "drift_bound": math.fsum(positions["drift_bound"].flatten().tolist()),
        "mean_log_p": _mean(log_p),
        "draft_tv": _mean(positions["draft_tv"][verified].tolist()),
    }


def _continuous_numbers(positions: dict[str, Tensor], verified: Tensor) -> dict[str, float]:
    """The paper's E||x^q - x^p||^2 (its table 4), and how often resampling failed, so that the last try was taken."""
    distances = positions["distance"][verified].tolist()
    squares = [distance**2 for distance in distances if math.isfinite(distance)]  # a drafter may draw garbage
    return {"mean_square_distance": _mean(squares), "failed_resamples": int((positions["tries"] < 0).sum())}


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


ROUND_FIELDS = {  # name -> dtype, of every round and image
    "accepted": torch.int64,  # accepted drafts, forced ones not counted
    "committed": torch.int64,  # tokens decided
    "width": torch.int64,  # tokens fed to the target
    "nodes": torch.int64,  # drafts of the tree
    "depth": torch.int64,  # its levels
    "skipped": torch.bool,  # was the draft accepted unverified
}


@dataclass(frozen=True)
class Record:
    """The tokens and the trace of a run while they grow, on the device: written in place, as key/value caches are, and
    no shape depends on what is written.

    tokens [B, S + 1] (int64), positions [B, S + 1, F] (fp32, which holds all the integers exactly) and rounds
    [N + 1, B, G] (int64), F and G being the ``fields`` and ``round_fields``; their last places are for what is not to
    be kept. count [1] (int64): rounds so far.
    """

    tokens: Tensor
    positions: Tensor
    rounds: Tensor
    count: Tensor
    fields: tuple[str, ...]
    round_fields: tuple[str, ...]

    @classmethod
    def empty(
        cls,
        length: int,
        batch: int,
        device: torch.device,
        fields: Iterable[str] = POSITION_FIELDS,
        round_fields: Iterable[str] = ("accepted", "committed", "width"),
    ) -> Record:
        """Of a run of ``length`` positions, which has at most that many rounds (each decides a token) and the prompt's.

        round_fields: none where rounds follow from the positions (see ``finish``).
        """
        fields, round_fields = tuple(fields), tuple(round_fields)
        tokens = torch.zeros((batch, length + 1), dtype=torch.int64, device=device)
        positions = torch.zeros((batch, length + 1, len(fields)), device=device)
        rounds = torch.zeros((length + 2, batch, len(round_fields)), dtype=torch.int64, device=device)
        return cls(tokens, positions, rounds, torch.zeros(1, dtype=torch.int64, device=device), fields, round_fields)

    @property
    def image(self) -> Tensor:
        """The tokens so far [B, S], 0 where there is none yet."""
        return self.tokens[:, :-1]

    @property
    def p(self) -> Tensor:
        """Target probabilities of the tokens so far [B, S]."""
        return self.positions[:, :-1, self.fields.index("p")]

    def begin(self, tokens: Tensor, count: Tensor, layout: TokenLayout) -> None:
        """Forget everything; the first ``count`` [B] of tokens [B, S + 1] were read with the prompt, to whose pass,
        the first, they count, as do those after the layout's end."""
        certain = {"finalised_at": 0.0, "source": float(Source.FORCED), "p": 1.0, "top1": 1.0}
        row = torch.tensor([certain.get(name, 0.0) for name in self.fields], device=self.positions.device)
        place = torch.arange(self.positions.shape[1], device=count.device)
        after = (place >= layout.end[:, None]) & (place < layout.length)
        given = (place < count[:, None]) | after
        self.tokens.copy_(torch.where(after, torch.nn.functional.pad(layout.forced, (0, 1)), tokens))
        self.positions.copy_(given[..., None] * row)
        self.rounds.zero_()
        self.count.zero_()

    def write(
        self,
        position: Tensor,
        committed: Tensor,
        token: Tensor | None = None,
        p: Tensor | None = None,
        **values: Tensor | int | float | None,
    ) -> None:
        """Final tokens [B, T] at positions [B, T] where ``committed`` [B, T]; fields not named (or None) stay as they
        are. That a token is forced need not be written, see ``finish``.

        p [B, T, V+]: target probabilities, None where unknown; token None where it is not discrete. ``values`` are
        per-token tensors [B, T] or scalars, named as the record's fields.
        """
        known = {name: _filled(value, position) for name, value in values.items() if value is not None}
        names = sorted(known, key=lambda name: known[name].is_floating_point())
        listed = names if p is None else [*names, "p", "entropy", "top1"]
        columns = constant(tuple(map(self.fields.index, listed)), position.device, torch.int64)
        store(self.positions, self.tokens, position, committed, token, p, columns, tuple(known[n] for n in names))

    def round(self, **values: Tensor | int) -> None:
        """One more round: a scalar or [B] tensor for each of the record's round fields."""
        like = self.rounds[0, :, 0]
        row = torch.stack([_filled(values[name], like).long() for name in self.round_fields], dim=-1)
        self.rounds.index_put_((self.count.clamp(max=len(self.rounds) - 1),), row[None])
        self.count.add_(1)

    def finish(
        self,
        layout: TokenLayout,
        seed: int,
        settings: dict[str, Any],
        seconds: float,
        draft_passes: int = 0,
        width: int = 1,
        expected: Sequence[float] = (),
    ) -> Trace:
        """The trace, on the CPU. Rounds in which nothing was decided (a GPU is one ahead) are left out, and tokens that
        the layout forces have that source.

        width: tokens that every pass after the prompt's is fed, where rounds are not recorded. expected: tokens that
        every round was expected to decide, where that chose its tree. A round in which all images skip verification is
        no pass. Raises ValueError where the model's predictions were NaN.
        """
        types = POSITION_FIELDS | CONTINUOUS_FIELDS
        values = self.positions[:, :-1].to("cpu", copy=True).unbind(-1)  # the next run writes there
        positions = {name: value.to(types[name]).contiguous() for name, value in zip(self.fields, values, strict=True)}
        positions["source"] = torch.where(layout.forced.cpu() >= 0, Source.FORCED, positions["source"])
        if "p" in positions:
            check_predicted(positions["p"])
        rounds = self._rounds() if self.round_fields else rounds_of(positions, width, layout.end.cpu())
        if expected:
            rounds["expected"] = torch.tensor(expected[: len(rounds["width"])])
        verified = rounds["committed"] > 0
        if "skipped" in rounds:
            verified &= ~rounds["skipped"]
        totals = {
            "target_passes": int(verified.any(1).sum()),
            "passes_per_image": verified.sum(0).tolist(),
            "draft_passes": draft_passes,
            "images": len(self.positions),
            "tokens": int((positions["source"] != Source.FORCED).sum()),
            "seed": seed,
            "seconds": round(seconds, 3),
        }
        totals |= derived_totals(positions, totals)
        return Trace(layout.rows, layout.cols, layout.stride, positions, rounds, totals, settings, layout.lead)

    def _rounds(self) -> dict[str, Tensor]:
        """The rounds recorded, without those that decided nothing."""
        rounds = self.rounds.cpu()
        happened = rounds[..., self.round_fields.index("committed")].sum(1) > 0
        rounds = dict(zip(self.round_fields, rounds[happened].unbind(-1), strict=True))
        rounds = {name: value.to(ROUND_FIELDS[name]) for name, value in rounds.items()}
        return rounds | {"width": rounds["width"][:, 0]}


def rounds_of(positions: dict[str, Tensor], width: int, end: Tensor) -> dict[str, Tensor]:
    """The rounds of a run in which every pass decides tokens of all images that are not complete, and after the
    prompt's is fed ``width`` tokens: what each decided stands at the positions before ``end`` [1 or B]."""
    fixed, source = positions["finalised_at"].long(), positions["source"]
    passes = int(fixed.max()) + 1
    accepted = (source == Source.ACCEPTED) | (source == Source.RELAXED)

    def counted(these: Tensor) -> Tensor:
        return torch.zeros((len(fixed), passes), dtype=torch.int64).scatter_add(1, fixed, these.long()).t().contiguous()

    decided = (torch.arange(fixed.shape[1]) < end[:, None]).expand_as(fixed)
    widths = torch.tensor([1] + [width] * (passes - 1))
    return {"accepted": counted(accepted), "committed": counted(decided), "width": widths}


def check_predicted(p: Tensor) -> None:
    """Raise ValueError if the probabilities p [B, S] of the tokens show that a model's predictions were no numbers."""
    flawed = p.isnan().nonzero()
    if len(flawed):
        image, token = flawed[flawed[:, 1].argmin()].tolist()
        raise ValueError(
            f"The model's predictions became NaN or infinite at token {token + 1} of {p.shape[1]} (image {image + 1} "
            "of the run): its arithmetic overflowed, or its weights are damaged. Choose bf16 or fp32 as its dtype in "
            "the loader, or lower cfg; if that does not help, download the model's file again."
        )


def _filled(value: Any, like: Tensor) -> Tensor:
    """A tensor or scalar, spread to the shape of ``like``."""
    if isinstance(value, int | float):
        kind = torch.float32 if isinstance(value, float) else torch.int64
        return constant((value,), like.device, kind).expand(like.shape)
    return value.expand(like.shape)


def store(
    table: Tensor,
    tokens: Tensor,
    position: Tensor,
    meant: Tensor,
    token: Tensor | None,
    p: Tensor | None,
    columns: Tensor,
    values: tuple[Tensor, ...],
) -> None:
    """At positions [B, T] (int64), where ``meant`` [B, T] (bool), store tokens and numbers, in place.

    ``columns`` [n] (int64) of table [B, S + 1, F] (fp32) get the ``values``, each [B, T], integers before floats;
    tokens [B, S + 1] (int64) get token [B, T] (None: unchanged). With probabilities p [B, T, V] the last three columns
    get p of the token, the entropy of p in nats, and its largest probability. The last slot is scratch, for positions
    that are not meant, and is cleared.
    """
    slot = torch.where(meant, position, table.shape[1] - 1)
    if token is not None:
        tokens.scatter_(1, slot, token)
        tokens[:, -1].zero_()
    numbers = [value.float() for value in values]
    if p is not None:
        numbers += [at(p, token), entropy(p), p.amax(-1)]
    rows = torch.arange(len(table), device=table.device)[:, None, None]
    table[rows, slot.unsqueeze(-1), columns] = torch.stack(numbers, dim=-1)
    table[:, -1].zero_()
