"""Token layouts: positions, grids, forced and kept tokens."""

import torch

from ..support.toy import VOCAB, plain, with_line_ends


def test_a_plain_grid():
    layout = plain(2, 3)
    assert layout.length == 6
    assert layout.to_grid(torch.arange(12).view(2, 6)).tolist() == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]


def test_line_ends_are_no_part_of_the_image():
    layout = with_line_ends(2, 2)
    assert layout.length == 7
    assert layout.to_grid(torch.arange(7)).tolist() == [[0, 1], [3, 4]]
    assert layout.forced.tolist() == [[-1, -1, VOCAB, -1, -1, VOCAB, VOCAB + 1]]


def test_keeping_forces_the_users_tokens_and_nothing_else():
    layout = with_line_ends(2, 2)
    tokens = torch.tensor([[[0, 1], [2, 0]], [[1, 1], [1, 1]]])
    keep = torch.tensor([[[True, False], [False, True]], [[False, False], [False, True]]])
    kept = layout.keeping(tokens, keep)
    assert kept.forced.tolist() == [[0, -1, 3, -1, 0, 3, 4], [-1, -1, 3, -1, 1, 3, 4]]
    assert layout.forced.tolist() == [[-1, -1, 3, -1, -1, 3, 4]], "the original layout is unchanged"
    assert torch.equal(kept.keeping(tokens, keep).forced, kept.forced)
    assert kept.keeping(tokens, torch.ones_like(keep)).to_grid(kept.forced).shape == (2, 2, 2)
