"""VVS's rounds of speculative decoding, in which some images skip verification (when and how: skipping.py).

An image that skips takes a path of its tree as it is. These tokens are decided, but not in the target's cache: they are
``uncached``, the last of them being the root, and the next round feeds them before its tree. With the uncached tokens
r s t and a tree of a, a', b:

    fed     r s t a a' b       P = 3 uncached tokens, the root t last, then the drafts
    sees    r: r    s: r s    t: r s t    a: r s t a    b: r s t a b

That pass tells what the target would have predicted at r, s and t, which is recorded, and gives the drafter their true
hidden states in place of the stale ones that it had to make do with (VVS, section 4.3).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels.sampling import at, images_where, take
from ...kernels.verification import EPS
from ..constants import counting
from ..contract import Extent, Request, StepOut
from ..drafts.trees import Tree
from ..engine.run import Halfway, Run
from ..rng import Purpose
from ..trace import Source, Trace
from ..verification.tree import Verified
from .skipping import (
    NONE_SKIPPED,
    Skipping,
    check_codebook,
    choose_path,
    decide,
    path_probability,
    push_features,
    similarity,
    stale_features,
    staleness,
    whole_shape,
)
from .speculative import DraftTree
from .tree_rounds import Observed, Round, accept, advance, draft, record_round, record_tokens


@dataclass(frozen=True)
class Uncached:
    """Decided tokens [B, P] (int64) that are not yet in the target's cache.

    The first ``count`` [B] are valid, the last of them is the root. q [B, P]: the draft probability of tokens that were
    accepted unverified.
    """

    token: Tensor
    q: Tensor
    count: Tensor

    def of_width(self, width: int) -> Uncached:
        """These with P = ``width``: with tokens that are not valid, or without some of these."""
        if width == self.token.shape[1]:
            return self
        change = (0, width - self.token.shape[1])
        return Uncached(pad(self.token, change), pad(self.q, change), self.count)

    @property
    def root(self) -> Tensor:
        return self.token.gather(1, self.count[:, None] - 1)[:, 0]


@dataclass(frozen=True)
class Decided:
    """The new tokens [B, L] of a round, the first ``count`` [B] valid."""

    token: Tensor
    count: Tensor
    observed: Observed

    def where(self, condition: Tensor, other: Decided) -> Decided:
        """These for the images where condition [B], else ``other``."""
        return Decided(
            images_where(condition, self.token, other.token),
            images_where(condition, self.count, other.count),
            self.observed.where(condition, other.observed),
        )


@dataclass(frozen=True)
class SkippingRound(Round):
    """A Round with ``uncached`` tokens; skipped [B]: did the last round skip verification; features [R, G, D], known
    [B]: the target's latest hidden states and their number."""

    uncached: Uncached
    skipped: Tensor
    features: Tensor
    known: Tensor


@dataclass(frozen=True)
class Choice(Halfway):
    """A round whose trees are drafted, of which those of the images ``skip`` [B] (bool) are taken as they are.

    planned [B, M + 1]: which drafts exist in the trees' whole shapes (``whole_shape``); alike [B]: how similar the
    paths of each tree are, for the record (None: the model has no codebook). extent [3] (int64), each 0 or 1: are there
    images that verify, images that skip, and some that skipped in the round before. (A round of complete images
    verifies.)
    """

    round: SkippingRound
    tree: Tree
    planned: Tensor
    alike: Tensor | None
    skip: Tensor
    extent: Tensor


@dataclass(frozen=True)
class VVS(DraftTree):
    """Speculative decoding that takes some drafts unverified, as ``skipping`` says."""

    skipping: Skipping = field(default_factory=Skipping)
    name: str = "vvs"

    @property
    def lossless(self) -> bool:
        return False

    @property
    def bounded(self) -> bool:
        """Is the drift bound known after a run? Not where sampled drafts decide themselves whether they are verified:
        neither those that are nor those that are not are a sample from the drafter any more."""
        return not (self.skipping.schedule == "dynamic" and self.structure.sampled)

    @property
    def max_drafter_inputs(self) -> int:
        """The new tokens, and with ``refresh`` those before again."""
        return 1 + 2 * self.structure.size()[1]

    def begin(self, run: Run, committed: Tensor, out: StepOut) -> SkippingRound:
        state, one = super().begin(run, committed, out), torch.ones_like(committed)
        levels = self.structure.size()[1]
        uncached = Uncached(state.root[:, None], torch.zeros_like(one[:, None], dtype=torch.float32), one)
        if run.pads:
            uncached = uncached.of_width(1 + levels)
        features = out.hidden.expand(-1, self.skipping.kept_features(levels), -1)
        return SkippingRound(**vars(state), uncached=uncached, skipped=one < 0, features=features, known=one)

    def step(self, run: Run, state: SkippingRound | Choice, extent: Extent = Extent()) -> Round | Halfway:
        """A round, in two halves: between them the host learns which images skip verification."""
        if isinstance(state, Choice):
            return self.commit(run, state, extent)
        return self.choose_skips(run, state, draft(self.structure, run, state, extent))

    def choose_skips(self, run: Run, state: SkippingRound, tree: Tree) -> Choice:
        """Choose the images whose trees are verified, and those whose trees are taken as they are."""
        active = state.committed < run.inputs.end
        alike = None if run.codebook is None else similarity(tree, run.codebook, self.skipping.decay)
        planned = whole_shape(tree, state.committed, run.inputs.layout)
        skip = active & decide(
            self.skipping,
            tree,
            planned,
            alike,
            state.index,
            state.committed,
            run.inputs.end,
            state.skipped,
            run.inputs.skippable,
        )
        skips = skip.any()
        extent = torch.stack(((active & ~skip).any() | ~skips, skips, state.skipped.any())).long()
        return Choice(state, tree, planned.exists, alike, skip, extent)

    def commit(self, run: Run, chosen: Choice, extent: Extent) -> Round:
        """Verify the trees, except those that are taken as they are. extent: the Choice's. Complete images stay as they
        are."""
        verifies, skips, skipped = extent.values
        # A tree remembers what is computed of it, and that is the step's own.
        chosen = replace(chosen, tree=replace(chosen.tree))
        state, tree, skip, alike = chosen.round, chosen.tree, chosen.skip, chosen.alike
        if not skipped:  # padding, but for the root
            state = replace(state, uncached=state.uncached.of_width(1))
        before, uncached, plan = state.committed, state.uncached, state.plan
        verifying, accepted = (before < run.inputs.end) & ~skip, torch.zeros_like(before)
        decided, verified, q, width = None, None, tree.probability, 0
        if verifies:
            width = uncached.token.shape[1] + tree.token.shape[1] - 1
            state, decided, verified, accepted = self.verify_with_uncached(run, state, tree, verifying, alike)
        if skips:
            taken, q = self.take_unverified(run, chosen)
            decided = taken if decided is None else decided.where(~skip, taken)
        assert decided is not None  # a round verifies or skips
        record_round(run, state, tree, accepted, decided.count, width, skip)
        history = self.structure.learn(
            state.history, plan, tree, verified, before, before + decided.count, accepted, verifying
        )
        uncached = next_uncached(uncached, decided, q, skip, 1 + skips * tree.levels)
        observed = decided.observed
        if run.pads:
            observed = observed.pad(self.max_drafter_inputs)
            uncached = uncached.of_width(1 + self.structure.size()[1])
        state = replace(state, history=history, uncached=uncached, skipped=skip, observed=observed)
        return advance(self.structure, run, state, decided.token, decided.count)

    def verify_with_uncached(
        self, run: Run, state: SkippingRound, tree: Tree, verifying: Tensor, alike: Tensor | None
    ) -> tuple[SkippingRound, Decided, Verified, Tensor]:
        """Verify the trees with one forward pass of the target: the state, new tokens, the outcome, and accepted drafts
        [B].

        Only the images ``verifying`` [B] (bool) advance. Uncached tokens stay decided; what the pass says about them is
        recorded, and their true key/value states are cached.
        """
        uncached = state.uncached
        width, count, slots = uncached.token.shape[1], uncached.count[:, None], tree.token.shape[1]
        offset = torch.cat((counting(width, count.device) - count, tree.depth[:, 1:] - 1), dim=1)
        position = (state.committed[:, None] + offset).clamp(min=0)
        token = torch.cat((uncached.token, tree.token[:, 1:]), dim=1)
        out = run.model.step(run.cache, token, position, fed_mask(uncached, tree))
        slot = counting(slots, count.device)
        fed = torch.where(slot > 0, slot + width, count) - 1  # where the slots of the tree are fed
        verified, probs_after = accept(
            self.structure, self.rule, run, state, tree, take(out.logits, fed), position.gather(1, fed)
        )

        path = commit_path(uncached, verified)
        kept = torch.where(verifying, uncached.count + verified.accepted, 0)
        run.keep(kept, path)
        refresh = self.skipping.refresh and width > 1
        if refresh:
            self.drafter.rewind(run.draft_state, torch.where(verifying, uncached.count - 1, 0))
        decided = after_verification(
            uncached, verified, out.hidden, path, state.committed, run.inputs.end, verifying, refresh
        )
        if not self.skipping.fresh:
            decided = replace(decided, observed=observe_stale(self.skipping, state, decided))
        record_tokens(run, state, tree, verified, decided.count, probs_after, similarity=column(alike))
        if width > 1:
            record_uncached(run, state, out.logits, position, verifying)
        state = replace(
            state,
            features=push_features(state.features, take(out.hidden, path), kept),
            known=state.known + kept,
            passes=state.passes + verifying,
        )
        return state, decided, verified, torch.where(verifying, verified.accepted, 0)

    def take_unverified(self, run: Run, chosen: Choice) -> tuple[Decided, Tensor]:
        """Take a path of the tree as if it were verified, for the images that skip; and its q [B, levels]."""
        state, tree, skip = chosen.round, chosen.tree, chosen.skip
        planned = replace(tree, exists=chosen.planned)
        u = run.inputs.stream.uniform(state.committed[:, None], Purpose.SKIP, state.index)[:, 0]
        slots, count = choose_path(self.skipping, tree, planned, u)
        count = torch.where(skip, count, 0)
        token, q = tree.token.gather(1, slots), path_probability(self.skipping, tree, planned, slots)
        index = counting(slots.shape[1], skip.device)
        stale = staleness(self.skipping, state.index, skipped=True)
        hidden = stale_features(state.features, state.known, count, index.expand_as(slots), stale)
        position = state.committed[:, None] + index
        depth, width = tree.spread()
        run.record.write(
            position,
            position < (state.committed + count)[:, None],
            token,
            None,
            source=Source.SKIPPED,
            finalised_at=state.passes[:, None] - 1,
            depth=tree.depth.gather(1, slots),
            q=q,
            rank=tree.rank.gather(1, slots),
            tree_depth=depth[:, None],
            tree_width=width[:, None],
            similarity=column(chosen.alike),
        )
        return Decided(token, count, Observed(token, state.committed, count, hidden)), q

    def notices(self, trace: Trace) -> list[str]:
        skipped = (trace.positions["source"] == Source.SKIPPED).any()
        return super().notices(trace) + ([] if skipped else [NONE_SKIPPED])

    def check(self, request: Request) -> None:
        super().check(request)
        self.skipping.check()
        check_codebook(self.skipping, request.model.codebook)

    def width(self, request: Request) -> int:
        """The root and the tree, and after a skipped round the tokens accepted unverified."""
        return super().width(request) + self.structure.size()[1]

    def target_passes(self, second: Extent) -> int:
        return second.values[0]

    def describe(self, request: Request) -> dict[str, Any]:
        settings = super().describe(request) | {"skipping": self.skipping.describe()}
        return settings if self.bounded else settings | {"bounded": False}


def column(values: Tensor | None) -> Tensor | None:
    """Numbers [B] of images as those of their tokens [B, 1]."""
    return None if values is None else values[:, None]


def observe_stale(settings: Skipping, state: SkippingRound, decided: Decided) -> Observed:
    """What the drafter observes of a verified round whose features are stale: the state's own are those before it.

    Tokens that it observes again (see after_verification) keep their true ones.
    """
    observed, stale = decided.observed, staleness(settings, state.index, skipped=False)
    place = counting(observed.token.shape[1], stale.device) - (observed.count - decided.count)[:, None]
    older = stale_features(state.features, state.known, decided.count, place.clamp(min=0), stale.clamp(min=0))
    is_older = (place >= 0) & (stale >= 0)
    rows = is_older.repeat(len(older) // len(is_older), 1)[..., None]
    return replace(observed, hidden=torch.where(rows, older, observed.hidden))


def record_uncached(run: Run, state: SkippingRound, logits: Tensor, position: Tensor, verifying: Tensor) -> None:
    """Record what the pass says about the tokens accepted unverified before it; logits and position as fed.

    Not testing a token drifts as accepting it for certain does: by [1 - p/q]+ with the q that it was taken with
    (path_probability), whose mean is the total variation of q and p.
    """
    uncached = state.uncached
    width, count, token = uncached.token.shape[1], uncached.count[:, None], uncached.token[:, 1:]
    p = run.probs(logits[:, : width - 1], position[:, : width - 1])
    index = counting(token.shape[1], token.device)
    ratio = at(p, token) / uncached.q[:, 1:].clamp(min=EPS)
    run.record.write(
        state.committed[:, None] - count + 1 + index,
        verifying[:, None] & (index < count - 1),
        token,
        p,
        ratio=ratio,
        drift_bound=(1 - ratio).clamp(min=0),
    )


def fed_mask(uncached: Uncached, tree: Tree) -> Tensor:
    """The tree mask [B, T, T] (bool) of the tokens fed: which fed tokens each of them attends to.

    An uncached token attends to those before it, a draft to all uncached tokens and its ancestors. Tokens that are not
    valid attend to themselves only.
    """
    batch, width = uncached.token.shape
    tree_mask = tree.tree_mask()
    if width == 1:  # only the root, which is slot 0 of the tree
        return tree_mask
    index = counting(width, uncached.token.device)
    valid = index < uncached.count[:, None]
    causal = (index <= index[:, None]) & valid[:, None] | torch.eye(width, dtype=torch.bool, device=index.device)
    drafts = tree_mask[:, 1:, 1:]
    uncached_rows = torch.cat((causal, drafts.new_zeros((batch, width, drafts.shape[1]))), dim=2)
    draft_rows = torch.cat((valid[:, None].expand(-1, drafts.shape[1], -1), drafts), dim=2)
    return torch.cat((uncached_rows, draft_rows), dim=1)


def commit_path(uncached: Uncached, verified: Verified) -> Tensor:
    """Indices [B, P + L] of the fed tokens that stay in the cache: the uncached ones, then the accepted path."""
    width, levels = uncached.token.shape[1], verified.path.shape[1]
    index = counting(width + levels, uncached.token.device)
    level = (index - uncached.count[:, None]).clamp(0, max(levels - 1, 0))
    drafts = verified.path if levels else torch.zeros_like(uncached.token[:, :1])  # a tree may have none
    # Slot s >= 1 of the tree is fed at index P + s - 1.
    return torch.where(index < uncached.count[:, None], index, width - 1 + drafts.gather(1, level))


def after_verification(
    uncached: Uncached,
    verified: Verified,
    hidden: Tensor,
    path: Tensor,
    committed: Tensor,
    end: Tensor,
    verifying: Tensor,
    refresh: bool,
) -> Decided:
    """The accepted drafts and the token after them, for the images ``verifying`` [B]; the others decide nothing.

    hidden [R, T, D]: of the forward pass; path: see commit_path(). The drafter observes the new tokens; with
    ``refresh`` also, once more, the uncached tokens after the first one. It has observed those after a skipped round
    with stale hidden states, and now gets the true ones.
    """
    width, levels = uncached.token.shape[1], verified.path.shape[1]
    count = torch.where(verifying, torch.minimum(verified.accepted + 1, end - committed), 0)
    again = uncached.count - 1 if refresh else torch.zeros_like(uncached.count)  # tokens observed once more
    index = counting(width + levels, path.device)
    old = uncached.token.gather(1, (index + 1).expand(len(path), -1).clamp(max=width - 1))
    new = verified.token.gather(1, (index - again[:, None]).clamp(0, levels))
    token = torch.where(index < again[:, None], old, new)
    # The token before the first new one is the root, number count - 1 of the path.
    first = uncached.count - 1 - again
    before = path.gather(1, (first[:, None] + index).clamp(max=path.shape[1] - 1))
    observed = Observed(token, committed - again, torch.where(verifying, count + again, 0), take(hidden, before))
    return Decided(verified.token, count, observed)


def next_uncached(uncached: Uncached, decided: Decided, q: Tensor, skip: Tensor, width: int) -> Uncached:
    """The uncached tokens [B, width] of the next round.

    After verification, the last new token alone (of a finished image the old root). Where verification was skipped,
    skip [B], the old uncached tokens and then the new ones, of draft probability q [B, L].
    """
    index = counting(width, skip.device)
    is_old = index < uncached.count[:, None]
    old_index = index.clamp(max=uncached.token.shape[1] - 1).expand(len(skip), -1)
    new_index = (index - uncached.count[:, None]).clamp(min=0)

    def joined(old: Tensor, new: Tensor) -> Tensor:
        return torch.where(is_old, old.gather(1, old_index), new.gather(1, new_index.clamp(max=new.shape[1] - 1)))

    last = decided.token.gather(1, (decided.count[:, None] - 1).clamp(min=0))
    last = torch.where(decided.count[:, None] > 0, last, uncached.root[:, None])
    token = torch.where(skip[:, None], joined(uncached.token, decided.token), last)
    return Uncached(token, joined(uncached.q, q), torch.where(skip, uncached.count + decided.count, 1))
