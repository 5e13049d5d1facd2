"""Calculate the mean depths of ADT-Tree's trees, with alpha counting the bonus token or not (Lei et al., 2025).

    python -m tools.benchmarks adt_depths

Ten trees' mean depths are in the paper, beside tau, the tokens per round. Here a draft token is accepted with one
probability everywhere, whatever the width, chosen so that tau is the paper's; depths are those of the chain of states
1 to 9 that eq. 2 makes with beta 1 and steps of 1. Reality is not that even, so the depths are only roughly the
paper's: the reading whose error is smaller is the likelier one.
"""

from __future__ import annotations

import torch

from .report import plain_command

DEEPEST = 9
PAPER = {  # tau, mean depth
    "I, T = 0": (3.40, 3.86),
    "I, T = 0, LANTERN": (4.86, 5.15),
    "I, T = 1": (1.10, 2.09),
    "I, T = 1, LANTERN": (1.87, 2.10),
    "II, T = 0": (2.79, 3.43),
    "II, T = 0, LANTERN": (3.97, 4.31),
    "II, T = 1": (1.17, 2.16),
    "II, T = 1, LANTERN": (1.78, 2.70),
    "V, LlamaGen-L": (2.85, 3.87),
    "V, LlamaGen-XL": (2.53, 3.51),
}


def depth_and_tau(accepted: float, bonus: bool) -> tuple[float, float]:
    """Mean depth and tau where a draft token is accepted with this probability (below 1)."""
    move = torch.zeros(DEEPEST, DEEPEST, dtype=torch.float64)
    depths = torch.arange(1, DEEPEST + 1, dtype=torch.float64)
    for row in range(DEEPEST):  # of a tree of row + 1 levels
        deeper = accepted ** (row if bonus else row + 1)
        move[row, min(row + 1, DEEPEST - 1)] += deeper
        move[row, max(row - 1, 0)] += 1 - deeper
    equations = torch.cat((move.T - torch.eye(DEEPEST, dtype=torch.float64), torch.ones(1, DEEPEST)))
    goal = torch.zeros(DEEPEST + 1, 1, dtype=torch.float64)
    goal[-1] = 1
    share = torch.linalg.lstsq(equations, goal).solution[:, 0]  # of the rounds that have each depth
    return float(share @ depths), 1 + float(share @ (accepted**depths).cumsum(0))


def depth_at(tau: float, bonus: bool) -> float:
    """The mean depth at which tau is this, found by bisection."""
    low, high = 0.0, 1 - 1e-9
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if depth_and_tau(middle, bonus)[1] < tau else (low, middle)
    return depth_and_tau(low, bonus)[0]


def main() -> None:
    plain_command(" adt_depths", __doc__).parse_args()
    errors = {False: 0.0, True: 0.0}
    print(f"{'table':20}   tau  paper  without  with the bonus token")
    for name, (tau, paper) in PAPER.items():
        found = {bonus: depth_at(tau, bonus) for bonus in errors}
        errors = {bonus: error + abs(found[bonus] - paper) / len(PAPER) for bonus, error in errors.items()}
        print(f"{name:20} {tau:5.2f} {paper:6.2f} {found[False]:8.2f} {found[True]:8.2f}")
    print(f"{'mean error':20} {errors[False]:21.2f} {errors[True]:8.2f}")


if __name__ == "__main__":
    main()
