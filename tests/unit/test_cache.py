"""Whatever was fed, kept, dropped or rearranged before: cached logits equal those of a teacher-forced pass."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ..support.models import of_ids
from ..support.tiny import CAPTION, caption_features, fill, llamagen
from ..support.tiny_text import text_model

BATCH = 3
KINDS = ("captions", "classes", "sequence")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Rotated on a grid after features of captions and of classes, and along one line after words."""
    grids = {kind: llamagen(tmp_path_factory.mktemp("model"), kind == "captions") for kind in KINDS[:2]}
    return grids | {"sequence": text_model()}


class Script:
    """A model driven by hand, with the tokens every row has committed and logits to compare with."""

    def __init__(self, model, kind: str, guided: bool, negative_length: int):
        self.model, self.guided, self.length, self.negative = model, guided, model.layout().length, None
        if kind == "sequence":
            self.positive, other = of_ids(model, [35, 37, 36, 39, 34, 5]), of_ids(model, [36] * negative_length)
        else:
            self.positive = (
                model.encode_features(caption_features()) if kind == "captions" else model.encode_prompt("3")
            )
            other = model.encode_features(fill("negative embedding", (1, negative_length, CAPTION)))
        if kind != "classes" and guided and negative_length:
            self.negative = other
        self.state = model.start(self.positive, self.negative, BATCH, model.layout(), slack=8, guided=guided)
        self.tokens: list[list[int]] = [[] for _ in range(BATCH)]
        self.compare(self.state.prefill.logits[:, 0], [[] for _ in range(BATCH)])

    def reference(self, prefixes: list[list[int]]) -> torch.Tensor:
        """Logits [branches * BATCH, VOCAB] after each row's prefix, by one uncached pass each."""
        padded = torch.tensor([row + [0] * (self.length - len(row)) for row in prefixes])
        last = torch.tensor([min(len(row), self.length - 1) for row in prefixes])  # the end has no next token
        with torch.inference_mode():
            features = self.positive[0][0]
            embedded = [self.model.prefix(features).expand(BATCH, -1, -1)]
            if self.guided:
                prefix, negative = self.model.prefix, self.negative
                null = prefix(negative[0][0]) if negative else prefix.unconditional(features, self.model.grid)
                embedded.append(null.expand(BATCH, -1, -1))
            return torch.cat([self.model(e, padded)[torch.arange(BATCH), last] for e in embedded])

    def compare(self, logits: torch.Tensor, prefixes: list[list[int]]) -> None:
        inside = [i for i, row in enumerate(prefixes) if len(row) < self.length] * (1 + self.guided)
        rows = torch.tensor([i + BATCH * (n >= len(inside) // (1 + self.guided)) for n, i in enumerate(inside)]).long()
        assert torch.allclose(logits[rows], self.reference(prefixes)[rows], atol=1e-4)

    def feed(self, parents: list[int], counts: list[int], seed: int) -> None:
        """One pass over a tree of fresh tokens (parents[i] < i, or -1), of which every row keeps part of a path."""
        size = len(parents)
        ancestors = []
        for i, parent in enumerate(parents):
            ancestors.append((ancestors[parent] if parent >= 0 else []) + [i])
        tokens = torch.randint(self.model.vocab, (BATCH, size), generator=torch.Generator().manual_seed(seed))
        mask = torch.zeros(size, size, dtype=torch.bool)
        for i, line in enumerate(ancestors):
            mask[i, line] = True
        chain = parents == list(range(-1, size - 1))
        committed = torch.tensor([len(row) for row in self.tokens])
        positions = committed[:, None] + torch.tensor([len(line) - 1 for line in ancestors])
        with torch.inference_mode():
            out = self.model.step(self.state, tokens, positions, None if chain else mask.expand(BATCH, -1, -1))
            for i, line in enumerate(ancestors):
                prefixes = [row + tokens[b, line].tolist() for b, row in enumerate(self.tokens)]
                self.compare(out.logits[:, i], [p[: self.length] for p in prefixes])
            leaf = [ancestors[-1] if chain else ancestors[(seed + b) % size] for b in range(BATCH)]
            kept = [
                line[: min(c, self.length - 1 - len(row))]
                for line, c, row in zip(leaf, counts, self.tokens, strict=True)
            ]
            longest = max(map(len, leaf))
            path = torch.tensor([line + [0] * (longest - len(line)) for line in leaf])
            self.model.commit(self.state, torch.tensor([len(line) for line in kept]), None if chain else path)
        for b, line in enumerate(kept):
            self.tokens[b] += tokens[b, line].tolist()


@st.composite
def passes(draw):
    size = draw(st.integers(1, 6))
    if draw(st.booleans()):
        parents = list(range(-1, size - 1))
    else:
        parents = [draw(st.integers(-1, i - 1)) for i in range(size)]
    return parents, draw(st.lists(st.integers(0, 6), min_size=BATCH, max_size=BATCH)), draw(st.integers(0, 99))


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(KINDS), st.booleans(), st.sampled_from([0, 3, 7, 11]), st.lists(passes(), min_size=1, max_size=6)
)
def test_cached_logits_equal_teacher_forced_ones(models, kind, guided, negative_length, script):
    driven = Script(models[kind], kind, guided, negative_length)
    for parents, counts, seed in script:
        driven.feed(parents, counts, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_reached_the_end_disturbs_nobody(models, kind):
    """One row runs to the end and then commits nothing while windows after the image go on being fed to it."""
    driven = Script(models[kind], kind, guided=True, negative_length=3)
    chain = list(range(-1, 5))
    for n in range(8):
        driven.feed(chain, [6, 1, 2], seed=n)
    assert [len(row) for row in driven.tokens] == [driven.length - 1, 8, driven.length - 1]
