"""Writing down what a pass decided: the Triton kernel writes what the torch reference writes, and compiles."""

import pytest
import torch
from comfyui_specar.kernels import records
from comfyui_specar.samplers.trace import POSITION_FIELDS, Record, Source

from ..support.triton_kernels import compiled_everywhere, interpreted

FIELDS = len(POSITION_FIELDS)


def problem(vocab: int, token: bool = True, probs: bool = True, batch: int = 2, count: int = 4, places: int = 9):
    """Tokens of images of 9 places, some of which are not meant or are past the end; a distribution has zeros."""
    generator = torch.Generator().manual_seed(vocab)
    table = torch.rand((batch, places + 1, FIELDS), generator=generator)
    tokens = torch.randint(0, vocab, (batch, places + 1), generator=generator)
    table[:, -1], tokens[:, -1] = 0, 0
    position = torch.tensor([[3], [7]])[:batch] + torch.arange(count)
    meant = (position < places) & (torch.arange(count) != 1)
    p = (3 * torch.randn((batch, count + 2, vocab), generator=generator)).softmax(-1)[:, :count]
    p[:, 0] = torch.nn.functional.one_hot(torch.tensor(vocab - 1), vocab)
    values = (
        torch.tensor([[5]]).expand(batch, count),
        torch.randint(0, 7, (batch, count), generator=generator),
        torch.rand((batch, count), generator=generator),
    )
    columns = torch.tensor([0, 2, 4, 3, 7, 8][: 3 + 3 * probs])
    sampled = p.argmax(-1) if token else None
    return table, tokens, position, meant, sampled, p if probs else None, columns, values


@pytest.mark.parametrize(
    ("vocab", "token", "probs"), [(5, True, True), (2500, True, True), (5, True, False), (5, False, False)]
)
def test_both_write_the_same(vocab, token, probs):
    given = problem(vocab, token, probs)
    table, tokens = given[0].clone(), given[1].clone()
    records.write(table, tokens, *given[2:])
    interpreted("records.write", *given)
    torch.testing.assert_close(given[0], table)
    assert torch.equal(given[1], tokens)
    assert not table[:, -1].any() and not tokens[:, -1].any()


@pytest.mark.parametrize("write", [records.write, lambda *given: interpreted("records.write", *given)])
def test_what_is_not_meant_stays(write):
    given = problem(5)
    table, tokens, position, meant, *_, columns, _ = given
    before = table.clone()
    write(*given)
    written = torch.zeros(2, 10, dtype=torch.bool).scatter(1, torch.where(meant, position, 9), True)
    written[:, -1] = False
    changed = (table != before).any(-1)
    assert torch.equal(changed, written)
    others = [field for field in range(FIELDS) if field not in columns.tolist()]
    assert torch.equal(table[..., others], before[..., others])


def test_a_record_is_written_by_name():
    record = Record.empty(3, 1, torch.device("cpu"))
    record.begin(torch.tensor([[2, 0, 0, 0]]), torch.tensor([1]))
    p = torch.tensor([[[0.5, 0.25, 0.25], [1, 0, 0]]])
    record.write(
        torch.tensor([[1, 2]]),
        torch.tensor([[True, False]]),
        torch.tensor([[1, 0]]),
        p,
        ratio=torch.tensor([[2.0, 3.0]]),
        source=Source.ACCEPTED,
        q=0.125,
        depth=torch.tensor([1, 2]),
    )
    found = dict(zip(record.fields, record.positions[0].T.tolist(), strict=True))
    assert record.image.tolist() == [[2, 1, 0]]
    assert found["source"] == [Source.FORCED, Source.ACCEPTED, 0, 0] and found["depth"] == [0, 1, 0, 0]
    assert found["p"] == [1, 0.25, 0, 0] and found["top1"] == [1, 0.5, 0, 0]
    assert found["entropy"] == pytest.approx([0, 1.5 * torch.tensor(2.0).log().item(), 0, 0])
    assert found["ratio"] == [0, 2, 0, 0] and found["q"] == [0, 0.125, 0, 0]
    record.begin(torch.zeros(1, 4, dtype=torch.int64), torch.tensor([0]))
    assert not record.positions.any() and not record.tokens.any()


@pytest.mark.parametrize("vocab", [4096, 16384, 184622])
def test_the_kernel_compiles(vocab):
    for probs in (False, True):
        given = problem(8, probs=probs)
        p = torch.empty(2, 4, vocab) if probs else None
        assert compiled_everywhere("records.write", *given[:5], p, *given[6:])
