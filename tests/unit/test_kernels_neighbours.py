"""LANTERN's neighbours: the Triton kernel counts what the torch reference counts, and compiles."""

import pytest
import torch
from comfyui_specar.kernels import neighbours

from ..support.triton_kernels import compiled, interpreted


@pytest.mark.parametrize("vocab, specials, count", [(8, 0, 1), (9, 2, 6), (1300, 3, 1100)])
def test_the_same_neighbours_count(vocab, specials, count):
    """Among the drafts special tokens, budgets of zero and of everything, and neighbours without mass."""
    generator = torch.Generator().manual_seed(vocab)
    codes, shape = vocab - specials, (2, 4)
    table = torch.rand((codes, codes), generator=generator).argsort(1)[:, : codes - 1].to(torch.int32)
    p = (torch.randn((*shape, vocab), generator=generator) * 2).softmax(-1)
    p[0, :, ::2] = 0
    token = torch.randint(vocab, shape, generator=generator)
    token[0, 0], token[1, 0] = vocab - 1, 0
    budget = torch.rand(shape, generator=generator)
    budget[0, 1], budget[1, 1] = 0, 2
    mass, number = neighbours.aggregate(p, token, budget, table, count)
    kernel_mass, kernel_number = interpreted("neighbours.aggregate", p, token, budget, table, count)
    assert torch.equal(kernel_number, number) and torch.allclose(kernel_mass, mass, atol=1e-6)
    assert number[0, 1] == mass[0, 1] == 0 and number[1, 1] == count
    assert (number[0, 0] == 0) == (specials > 0)


def test_the_kernel_compiles():
    table = torch.empty(16384, 1000, dtype=torch.int32)
    assert compiled(
        "neighbours.aggregate",
        torch.empty(1, 5, 16384),
        torch.zeros(1, 5, dtype=torch.int64),
        torch.empty(1, 5),
        table,
        1000,
    )
