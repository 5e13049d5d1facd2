"""Token layouts: positions, grids, forced and kept tokens."""

import torch
from comfyui_specar.samplers.layout import TokenLayout

from ..support.toy import VOCAB, plain, with_line_ends


def test_a_plain_grid():
    layout = plain(2, 3)
    assert layout.length == 6 and layout.position(1, 2) == 5
    assert layout.to_grid(torch.arange(12).view(2, 6)).tolist() == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]


def test_line_ends_are_no_part_of_the_image():
    layout = with_line_ends(2, 2)
    assert layout.length == 7 and layout.position(1, 1) == 4
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


def test_the_beginning_of_a_layout_generates_what_is_asked():
    layout = with_line_ends(2, 2)
    assert layout.sampled_tokens == 4
    assert layout.beginning(2).forced.tolist() == [[-1, -1]]
    assert layout.beginning(3).forced.tolist() == [[-1, -1, VOCAB, -1]]
    assert layout.beginning(4).forced.tolist() == [[-1, -1, VOCAB, -1, -1]]
    assert layout.beginning(9) is layout, "there are no more"
    assert layout.beginning(2).rows == 2
    keep = torch.tensor([[[True, False], [False, False]], [[False, False], [False, True]]])
    kept = layout.keeping(torch.zeros((2, 2, 2), dtype=torch.int64), keep)
    assert kept.sampled_tokens == 3 and kept.beginning(2).length == 4, (
        "the first image has one token less in its first row"
    )
    assert kept.beginning(3).length == 5 and kept.keeping(keep.long(), torch.ones_like(keep)).sampled_tokens == 0


def test_a_layout_moves_between_devices():
    layout = TokenLayout.plain(2, 2).to("meta")
    assert layout.forced.device.type == "meta" and (layout.rows, layout.cols, layout.stride) == (2, 2, 2)
