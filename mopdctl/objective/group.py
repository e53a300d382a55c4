"""Advantages of a group of answers to one prompt, from their rewards."""

from collections.abc import Sequence
from typing import Literal

Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["std", "none"]


def group_advantages(
    rewards: Sequence[float], *, baseline: Baseline = "mean", scale: Scale = "std", epsilon: float = 1e-6
) -> list[float]:
    """How much better each of G answers did than its group.

        mean:            A_i = r_i - (1/G) sum_j r_j
        leave_one_out:   A_i = r_i - (1/(G-1)) sum_{j != i} r_j  =  G/(G-1) (r_i - mean)
        std:             A_i / (sigma + epsilon),   sigma^2 = (1/G) sum_j (r_j - mean)^2

    They sum to zero up to rounding, and are exactly zero where all rewards are equal.

    Args:
        rewards: G >= 2 finite rewards of answers to the same prompt.
        baseline: what an answer is compared with.
        scale: `std` gives every group the same size of advantage; `none` keeps the rewards' own scale.
        epsilon: added to sigma.

    Returns:
        G advantages, in order.

    Raises:
        ValueError: for fewer than two rewards, which have nothing to be compared with.

    Source: PivotRL, section 3.1 (GRPO: mean and std, 1/G); `none`: Liu et al., "Understanding R1-Zero-like training"
    (Dr. GRPO); `leave_one_out`: Ahmadian et al., "Back to basics" (RLOO).
    """
    size = len(rewards)
    if size < 2:
        raise ValueError(f"a group of {size}: group-relative advantages need at least 2 rewards")
    if has_zero_variance(rewards):
        return [0.0] * size
    mean = sum(rewards) / size
    factor = size / (size - 1) if baseline == "leave_one_out" else 1.0
    if scale == "std":
        factor /= (sum((reward - mean) ** 2 for reward in rewards) / size) ** 0.5 + epsilon
    return [factor * (reward - mean) for reward in rewards]


def has_zero_variance(rewards: Sequence[float]) -> bool:
    """Whether all rewards are the same, so that the group has no gradient."""
    return min(rewards) == max(rewards)
