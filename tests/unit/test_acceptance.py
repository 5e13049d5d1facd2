"""The exact acceptance rule against hand-computed numbers, and what accept_or_redraw makes of it."""

import torch
from comfyui_specar.kernels.sampling import point_mass
from comfyui_specar.samplers.acceptance import Draft, Exact, accept_or_redraw

P = torch.tensor([0.5, 0.3, 0.15, 0.05])
Q = torch.tensor([0.2, 0.2, 0.3, 0.3])
DEPTH = torch.ones(4, dtype=torch.int64)
ONE = torch.ones(4)


def test_golden_numbers_of_the_exact_rule():
    """P and Q are 0.4 apart: 0.6 of the drafts are kept and the rest redrawn from (.75, .25, 0, 0)."""
    accept = Exact().accept_probability(P.expand(4, -1), Q.expand(4, -1), torch.arange(4), DEPTH, ONE)
    assert torch.allclose(accept, torch.tensor([1, 1, 0.5, 0.166667]), atol=1e-6)
    assert abs(float((Q * accept).sum()) - 0.6) < 1e-6
    rest = Exact().residual(P, Q, torch.tensor(2), DEPTH[0], ONE[0])
    assert torch.allclose(rest / rest.sum(), torch.tensor([0.75, 0.25, 0, 0]), atol=1e-6)
    kernel = Q * accept + (1 - (Q * accept).sum()) * rest / rest.sum()
    assert torch.allclose(kernel, P, atol=1e-6)


def test_a_token_of_target_probability_zero_is_never_kept():
    p = torch.tensor([[0.0, 1.0]])
    assert float(Exact().accept_probability(p, torch.tensor([[1.0, 0.0]]), torch.tensor([0]), DEPTH[:1], ONE[:1])) == 0


def run(p, q, exists=True, draws=100_000):
    """Frequencies of (token, accepted) over a grid of drafts drawn from q and independent u, v."""
    generator = torch.Generator().manual_seed(0)
    token = torch.multinomial(q if exists else p, draws, replacement=True, generator=generator)[:, None]
    u, v = torch.rand((2, draws, 1), generator=generator)
    there = torch.full_like(token, exists).bool()
    draft = Draft(token, (q * exists).expand(draws, 1, -1), torch.ones_like(token), there)
    outcome = accept_or_redraw(Exact(), p.expand(draws, 1, -1), draft, u, v, torch.ones_like(u))
    assert not outcome.relaxed.any()
    return outcome.token[:, 0], outcome.accepted[:, 0], token[:, 0]


def test_the_result_follows_p_and_is_kept_as_often_as_possible():
    out, accepted, token = run(P, Q)
    assert (out.bincount(minlength=4) / len(out) - P).abs().max() < 0.006
    assert abs(float(accepted.float().mean()) - 0.6) < 0.006
    assert torch.equal(out[accepted], token[accepted])
    assert (out[~accepted] < 2).all()


def test_equal_laws_keep_everything():
    out, accepted, token = run(P, P)
    assert accepted.all() and torch.equal(out, token)


def test_without_a_draft_the_token_is_drawn_from_p():
    out, accepted, _ = run(P, Q, exists=False)
    assert not accepted.any()
    assert (out.bincount(minlength=4) / len(out) - P).abs().max() < 0.006


def test_forced_positions_are_point_masses_on_both_sides():
    mass = point_mass(torch.tensor(3), 4)
    out, accepted, _ = run(mass, mass, draws=100)
    assert accepted.all() and (out == 3).all()
    out, accepted, _ = run(mass, Q, draws=100)
    assert (out == 3).all()
