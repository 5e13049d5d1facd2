"""Batch invariance: what a row gives on a CPU does not depend on how many others are computed with it, and who asks for
the same on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from comfyui_specar import api
from comfyui_specar.device import batch_invariant
from comfyui_specar.kernels.attention import additive, attend
from comfyui_specar.models.networks.cache import KVCache, cache_slots
from comfyui_specar.samplers.contract import Request
from comfyui_specar.samplers.methods.jacobi import SJD, Jacobi
from comfyui_specar.samplers.methods.next_token import NextToken
from torch import nn

from ..support.toy import ToyModel, plain

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COUNTS = (1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 36, 64, 65)


@pytest.mark.parametrize("shared", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_does_not_depend_on_the_others_nor_on_what_is_masked(dtype, shared):
    torch.manual_seed(0)
    most = batch_invariant.padded_length(256, dtype)
    q, k, v = (torch.randn(2, heads, most, 64).to(dtype) for heads in (6, 6 // shared, 6 // shared))

    def attention(first: int, count: int, reach: int) -> torch.Tensor:
        seen = torch.arange(reach) <= 130 + first + torch.arange(count)[:, None]
        mask = additive(seen.expand(2, 1, -1, -1), dtype)
        return attend(q[:, :, first : first + count], k[:, :, :reach], v[:, :, :reach], mask)

    together = attention(0, 64, most)
    for count in COUNTS[:-1]:
        for reach in {most, batch_invariant.padded_length(130 + count, dtype)}:
            assert torch.equal(attention(0, count, reach), together[:, :, :count])


@pytest.fixture
def forgetful():
    """What was found out about attention is found out again, and once more afterwards."""
    for found in (batch_invariant.invariant_lengths, batch_invariant.min_queries):
        found.cache_clear()
    yield
    for found in (batch_invariant.invariant_lengths, batch_invariant.min_queries):
        found.cache_clear()


@pytest.fixture
def fickle_attention(monkeypatch, forgetful):
    """On any machine, sums between 192 and 384 keys in another order."""

    def attention(q, k, v, attn_mask):
        return torch.full_like(q, 2.0 if 192 < k.shape[2] < 384 else 1.0)

    monkeypatch.setattr(batch_invariant.F, "scaled_dot_product_attention", attention)


@pytest.mark.parametrize(
    ("keys", "read"), [(0, 0), (1, 32), (192, 192), (193, 384), (385, 416), (512, 512), (514, 544), (705, 896)]
)
def test_lengths_at_which_keys_are_summed_otherwise_are_left_out(fickle_attention, keys, read):
    assert batch_invariant.padded_length(keys, torch.float32) == read


@pytest.mark.parametrize(("others", "found"), [((1, 2, 3), 4), ((1, 2, 3, 4), 8), ((1, 5), 8), ((1, 2, 6, 7), 8)])
def test_the_fewest_queries_of_a_block_are_found_by_trying(monkeypatch, forgetful, others, found):
    """If attention of so many queries (others) sums in another order."""

    def attention(q, k, v, attn_mask):
        return torch.full_like(q, 2.0 if q.shape[2] in others else 1.0)

    monkeypatch.setattr(batch_invariant.F, "scaled_dot_product_attention", attention)
    assert batch_invariant.min_queries(torch.bfloat16, 64) == found
    q, mask = torch.randn(1, 2, 33, 64).bfloat16(), torch.zeros(1, 1, 33, 96).bfloat16()
    padded, masks = batch_invariant.padded_queries(q, mask)
    assert padded.shape[2] == masks.shape[2] == 32 + found and padded[:, :, 32:].eq(q[:, :, 32:]).all()


def test_a_cache_has_a_length_that_can_be_read(fickle_attention):
    slots = cache_slots(1, 128, torch.bfloat16, torch.device("cpu"))
    cache = KVCache.of(1, 2, 3, slots, 8, torch.bfloat16, torch.device("cpu"))
    assert cache.capacity == cache.set_attention_length(None) == 384
    assert KVCache.of(1, 2, 3, slots, 8, torch.bfloat16, torch.device("cpu"), into=cache) is cache
    assert [cache.set_attention_length(n) for n in (100, 200, 500)] == [128, 384, 384]


class Fickle(nn.Module):
    """A product that sums a few rows, and more than ``most``, in other orders; it tells how many rows it was given."""

    def __init__(self, most: int):
        super().__init__()
        self.weight, self.most, self.given = torch.ones(5, 4), most, []

    def forward(self, rows):
        self.given.append(len(rows))
        order = 1.0 if len(rows) < batch_invariant.FEWEST else 2.0 if len(rows) > self.most else 3.0
        return F.linear(rows.float(), self.weight) + order


@pytest.mark.parametrize(("most", "block"), [(128, 128), (64, 64), (63, 32), (20, 16), (9, 8), (5, 4)])
def test_the_block_is_found_by_trying(most, block):
    assert batch_invariant.invariant_rows(Fickle(most), torch.randn(128, 4).bfloat16()) == block


@pytest.mark.parametrize("count", COUNTS)
def test_no_row_is_computed_among_too_few_nor_among_too_many(count):
    layer, rows = Fickle(16), torch.randint(9, (count, 4)).float()  # exact in any order
    assert torch.equal(batch_invariant.split(layer, rows, 16), F.linear(rows, layer.weight) + 3.0)
    assert min(layer.given) >= batch_invariant.FEWEST and max(layer.given) <= 16


@pytest.mark.parametrize("dtype", [*DTYPES[:2], pytest.param(DTYPES[2], marks=pytest.mark.whole)])
@pytest.mark.parametrize("window", [pytest.param(16, marks=pytest.mark.whole), 32])
def test_same_seed_same_image(dtype, window):
    """With guidance a window of 32 has 64 rows; next token has two, and a batch of two has four."""
    model = api.load_model(api.bundled("default"), dtype=dtype)
    conditioning = model.encode_prompt("cat, noto, on a yellow background")
    image = api.sample(model, conditioning, api.methods.NextToken(), seed=4, cfg=2.0).tokens
    sjd = api.methods.SJD(window=window, reuse="gumbel")
    assert torch.equal(api.sample(model, conditioning, sjd, seed=4, cfg=2.0).tokens, image)
    batch = api.sample(model, conditioning, api.methods.NextToken(), seed=3, batch_size=2, cfg=2.0).tokens
    assert torch.equal(batch[1:], image)


@pytest.mark.parametrize(
    ("method", "asks"),
    [
        (NextToken(), True),
        (SJD(3, reuse="gumbel"), True),
        (Jacobi(3), True),
        (SJD(3), False),
        (SJD(3, reuse="equality"), False),
    ],
)
def test_passes_that_must_give_next_tokens_image_ask_for_it(method, asks):
    """And nothing after them, also after one that fails."""
    model, asked = ToyModel(plain(2, 3)), []
    request, step = Request(model, None, plain(2, 3), model.defaults), model.step
    model.step = lambda *given: asked.append(batch_invariant.is_wanted()) or step(*given)
    method.sample(request)
    assert asked == [asks] * len(asked) and asked and not batch_invariant.is_wanted()
    model.step = lambda *given: 1 // 0
    with pytest.raises(ZeroDivisionError):
        method.sample(request)
    assert not batch_invariant.is_wanted()
