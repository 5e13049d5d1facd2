"""An autoregressive model small enough to write down the probability of every image.

Its logits are a table over all prefixes, so that nothing stands between a sampler and the exact distribution but the
sampler. It keeps the ARModel contract strictly: a step must continue where the commits ended, row by row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from comfyui_specar.device.graphs import recording
from comfyui_specar.samplers.contract import Request, SamplingParams, StepOut
from comfyui_specar.samplers.layout import TokenLayout
from comfyui_specar.samplers.methods.skipping import Skipping
from comfyui_specar.samplers.methods.speculative import DraftTree
from comfyui_specar.samplers.methods.vvs import VVS
from comfyui_specar.samplers.rules.acceptance import AcceptanceRule, Exact
from torch import Tensor
from torch.nn.functional import pad

VOCAB = 3


def captured() -> bool:
    """Is the step being captured or compiled? Then it must not be watched, which needs values."""
    return recording() or torch.compiler.is_compiling()


@dataclass
class ToyState:
    """Committed prefix of every row as its length and its number in base V+; then what was fed since.

    tokens, positions [B, n] and who of them sees whom [B, n, n], the first ``fed`` valid; prefill is the prompt's own
    prediction.
    """

    length: Tensor
    code: Tensor
    prefill: StepOut
    tokens: Tensor
    positions: Tensor
    seen: Tensor
    fed: int = 0

    def make_room(self, count: int) -> None:
        """For that many tokens. What is large enough stays where it is, as in a cache."""
        if (more := count - self.tokens.shape[1]) > 0:
            self.tokens, self.positions = (pad(each, (0, more)) for each in (self.tokens, self.positions))
            self.seen = pad(self.seen, (0, more, 0, more))


class ToyModel:
    """Tables of logits, one for the prompt and one for guidance, over every prefix of up to ``length`` tokens.

    memory: how many of the last tokens the tables depend on (0: the position alone; default: all). Special tokens have
    logits too: a sampler must mask them.
    """

    device, dtype = torch.device("cpu"), torch.float32
    codebook = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])

    def __init__(
        self, layout: TokenLayout, specials: int = 0, sharpness: float = 1.5, memory: int | None = None, seed: int = 1
    ):
        self.vocab, self.vocab_total = VOCAB, VOCAB + specials
        self.defaults, self.sessions = SamplingParams(), {}
        self._layout = layout
        generator = torch.Generator().manual_seed(seed)
        sizes = [self.vocab_total**n for n in range(layout.length + 1)]
        self.begin = torch.tensor([sum(sizes[:n]) for n in range(layout.length + 1)])
        rows = [self.vocab_total ** min(n, n if memory is None else memory) for n in range(layout.length + 1)]
        self.tables = [
            torch.cat(
                [
                    (torch.randn(r, self.vocab_total, generator=generator) * sharpness).repeat(size // r, 1)
                    for r, size in zip(rows, sizes, strict=True)
                ]
            )
            for _ in range(2)
        ]

    def layout(self, rows: int | None = None, cols: int | None = None) -> TokenLayout:
        return self._layout

    def logits(self, length: Tensor, code: Tensor, branches: int) -> Tensor:
        """Logits [branches * B, T, V+] after prefixes of the given lengths and numbers [B, T]."""
        length = length.clamp(max=len(self.begin) - 1)
        row = self.begin[length] + code % self.vocab_total**length
        return torch.cat([table[row] for table in self.tables[:branches]])

    def parameters(self) -> Iterator[Tensor]:
        return iter(())

    def start(
        self,
        conditioning: Any,
        negative: Any,
        batch: int,
        layout: TokenLayout,
        slack: int,
        guided: bool,
        into: Any = None,
    ) -> Any:
        zeros = torch.zeros((batch, 1), dtype=torch.int64)
        out = self.out(zeros, zeros, 1 + guided)
        none, nothing = torch.zeros((2, batch), dtype=torch.int64), torch.zeros((2, batch, 0), dtype=torch.int64)
        state = into or ToyState(*none, out, *nothing, torch.zeros((batch, 0, 0), dtype=torch.bool))
        state.length.zero_()
        state.code.zero_()
        return state

    def set_attention_length(self, state: ToyState, tokens: int | None) -> int:
        assert tokens is None or tokens >= int(state.length.max()), "a promise that is broken already"
        return len(self.begin)

    def out(self, length: Tensor, code: Tensor, branches: int) -> StepOut:
        """Prediction after prefixes [B, T]; as hidden state [R, T, 1], the number of the prefix."""
        return StepOut(self.logits(length, code, branches), code[..., None].repeat(branches, 1, 1).double())

    def step(
        self, state: ToyState, tokens: Tensor, positions: Tensor, tree_mask: Tensor | None = None, uncommitted: int = 0
    ) -> StepOut:
        count = tokens.shape[1]
        if tree_mask is None:
            tree_mask = torch.ones((count, uncommitted + count), dtype=torch.bool).tril(uncommitted)
            tree_mask = tree_mask.expand(len(tokens), -1, -1)
            expected = state.length[:, None] + uncommitted + torch.arange(count)
            assert captured() or torch.equal(positions, expected), "a chain must continue the committed tokens"
        state.fed = uncommitted + count
        state.make_room(state.fed)
        state.tokens[:, uncommitted : state.fed] = tokens
        state.positions[:, uncommitted : state.fed] = positions
        state.seen[:, :, uncommitted : state.fed] = False
        state.seen[:, uncommitted : state.fed, : state.fed] = tree_mask
        code = state.code[:, None].expand(-1, count)
        for j, token in enumerate(state.tokens[:, : state.fed].unbind(1)):
            code = torch.where(tree_mask[:, :, j], code * self.vocab_total + token[:, None], code)
        length = state.length[:, None] + tree_mask.sum(-1)
        return self.out(length, code, state.prefill.logits.shape[0] // len(tokens))

    def commit(self, state: ToyState, count: Tensor, path: Tensor | None = None) -> None:
        fed = state.fed
        if path is None:
            path = torch.arange(fed).expand(len(count), -1)
        rows, line, code = torch.arange(len(count)), torch.zeros((len(count), fed), dtype=torch.bool), state.code
        for i, place in enumerate(path.unbind(1)):
            kept = i < count
            line = line | ((torch.arange(fed) == place[:, None]) & kept[:, None])
            stands, sees = state.positions[rows, place], state.seen[rows, place, :fed]
            assert captured() or (stands == state.length + i)[kept].all(), "a kept token stands elsewhere"
            assert captured() or torch.equal(sees[kept], line[kept]), "a kept token saw others than those before it"
            code = torch.where(kept, code * self.vocab_total + state.tokens[rows, place], code)
        state.length.add_(count)
        state.code.copy_(code)

    def neighbours(self, count: int) -> Tensor:
        return torch.tensor([[j for j in range(self.vocab) if j != i] for i in range(self.vocab)])[:, :count]

    def distribution(self, layout: TokenLayout, params: SamplingParams) -> dict[tuple[int, ...], float]:
        """The probability of every image of a layout whose forced row is the first, in plain double arithmetic."""
        forced = layout.forced[0].tolist()
        choices = [[f] if f >= 0 else list(range(self.vocab)) for f in forced]
        distribution = {}
        for image in itertools.product(*choices):
            probability, code = 1.0, 0
            for n, token in enumerate(image):
                if forced[n] < 0:
                    row = int(self.begin[n]) + code
                    conditional, unconditional = (table[row].tolist() for table in self.tables)
                    probability *= next_token_probs(conditional, unconditional, self.vocab, params)[token]
                code = code * self.vocab_total + token
            distribution[image] = probability
        return distribution


def next_token_probs(
    conditional: list[float], unconditional: list[float], vocab: int, params: SamplingParams
) -> list[float]:
    """Guidance, temperature, top-k and top-p (in this order) on the first ``vocab`` logits, written independently. With
    an entropy temperature the filters come before the temperature."""
    heat = 1.0 if params.entropy else params.temperature
    z = [(u + params.cfg * (c - u)) / heat for c, u in zip(conditional, unconditional[:vocab], strict=False)]
    ranked = sorted(range(vocab), key=lambda i: -z[i])
    if params.top_k:
        ranked = ranked[: params.top_k]
    weight = {i: math.exp(z[i] - max(z)) for i in ranked}
    kept, mass = [], 0.0
    for i in ranked:
        if mass <= params.top_p * sum(weight.values()):
            kept.append(i)
        mass += weight[i]
    total = sum(weight[i] for i in kept)
    if params.entropy:
        first, decay, last = params.entropy
        entropy = -sum(weight[i] / total * math.log(weight[i] / total) for i in kept)
        heat = params.temperature * (first * math.exp(-entropy / decay) + last)
        weight = {i: weight[i] ** (1 / heat) for i in kept}
        total = sum(weight.values())
    return [weight[i] / total if i in kept else 0.0 for i in range(vocab)]


def plain(rows: int, cols: int) -> TokenLayout:
    return TokenLayout.plain(rows, cols)


def with_line_ends(rows: int, cols: int) -> TokenLayout:
    """Every row ends with the special token V, and V + 1 ends the image: two specials."""
    forced = torch.full((rows, cols + 1), -1)
    forced[:, cols] = VOCAB
    return TokenLayout(rows, cols, cols + 1, torch.cat((forced.flatten(), torch.tensor([VOCAB + 1])))[None])


def with_kept_tokens(rows: int, cols: int) -> TokenLayout:
    """An image of which the user keeps the first and the last-but-one token."""
    layout = plain(rows, cols)
    keep = torch.zeros((1, rows, cols), dtype=torch.bool)
    keep.view(-1)[[0, -2]] = True
    return layout.keeping(torch.ones((1, rows, cols), dtype=torch.int64), keep)


def request(
    model: ToyModel,
    layout: TokenLayout,
    params: SamplingParams | None = None,
    seed: int = 0,
    batch: int = 1,
    callback=None,
) -> Request:
    return Request(model, None, layout, params or SamplingParams(), seed=seed, batch=batch, callback=callback)


def chi_square(tokens: Tensor, distribution: dict[tuple[int, ...], float]) -> SimpleNamespace:
    """How far images [M, S] are from a distribution: TV distance, and z, the standard score of the chi-square
    statistic.

    Cells expecting fewer than 5 are pooled. An image of probability zero gives z = inf.
    """
    total = len(tokens)
    images, counts = tokens.unique(dim=0, return_counts=True)
    seen = {tuple(image): count for image, count in zip(images.tolist(), counts.tolist(), strict=True)}
    if any(distribution.get(image, 0.0) == 0 for image in seen):
        return SimpleNamespace(z=math.inf, tv=1.0)
    cells, rare = [], [0.0, 0.0]
    for image, probability in distribution.items():
        cell = (probability * total, seen.get(image, 0))
        if cell[0] >= 5:
            cells.append(cell)
        else:
            rare = [rare[0] + cell[0], rare[1] + cell[1]]
    if rare[0] >= 5:
        cells.append(tuple(rare))
    statistic = sum((observed - expected) ** 2 / expected for expected, observed in cells)
    freedom = len(cells) - 1
    spread = 2 / (9 * freedom)  # Wilson and Hilferty (1931): the cube root is nearly normal, of few cells too
    distance = sum(abs(seen.get(image, 0) / total - probability) for image, probability in distribution.items()) / 2
    return SimpleNamespace(z=((statistic / freedom) ** (1 / 3) - 1 + spread) / math.sqrt(spread), tv=distance)


def marginal(distribution: dict[tuple[int, ...], float], places: list[int]) -> dict[tuple[int, ...], float]:
    """The distribution of some positions of the image."""
    out: dict[tuple[int, ...], float] = {}
    for image, probability in distribution.items():
        key = tuple(image[i] for i in places)
        out[key] = out.get(key, 0.0) + probability
    return out


def draft_tree(
    drafter: Any, structure: Any, rule: AcceptanceRule = Exact(), skipping: Skipping | None = None
) -> DraftTree:
    """The method, and VVS where rounds are skipped."""
    return VVS(drafter, structure, rule, skipping=skipping) if skipping else DraftTree(drafter, structure, rule)


class ToyDrafter:
    """A drafter with tables of its own: the target's logits, with noise on them.

    Strict about what it is given: unless ``stale`` hidden states are to be expected, that before a token must be the
    number of the prefix before it.
    """

    kind = "toy"

    def __init__(self, target: ToyModel, noise: float = 1.0, stale: bool = False, seed: int = 7):
        self.model, self.stale = ToyModel(target._layout, target.vocab_total - target.vocab, seed=seed), stale
        self.model.tables = [t + noise * n for t, n in zip(target.tables, self.model.tables, strict=True)]
        self.module = self.model

    def __repr__(self) -> str:
        return "ToyDrafter"  # without an address, so that every process gives its tests the same names

    def start(self, target_state, conditioning, negative, batch, layout, slack, guided, into=None):
        return self.model.start(conditioning, negative, batch, layout, slack, guided, into)

    def set_attention_length(self, state, tokens):
        return self.model.set_attention_length(state, tokens)

    def observe(self, state, tokens, positions, hidden, count):
        if not self.stale and not captured():
            code, kept = state.code.clone(), torch.arange(tokens.shape[1]) < count[:, None]
            for i, token in enumerate(tokens.unbind(1)):
                state_of = hidden[: len(code), i, 0]
                assert torch.equal(state_of[kept[:, i]], code[kept[:, i]].double()), "a hidden state of another prefix"
                code = code * self.model.vocab_total + token
        out = self.model.step(state, tokens, positions)
        self.model.commit(state, count)
        last = (count - 1).clamp(min=0)
        state.expanded = 0
        return StepOut(
            *(x[torch.arange(len(x)), last.repeat(len(x) // len(last))][:, None] for x in (out.logits, out.hidden))
        )

    def expand(self, state, tokens, positions, hidden, tree_mask):
        out = self.model.step(state, tokens, positions, tree_mask, uncommitted=state.expanded)
        state.expanded += tokens.shape[1]
        return out

    def rewind(self, state, count):
        state.length.sub_(count)
        state.code.floor_divide_(self.model.vocab_total**count)
