"""TIES: trim, elect sign and merge."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor


def ties(density: float) -> Callable[[Tensor, Iterable[Tensor], Sequence[float]], Tensor]:
    """The TIES merge that keeps the share `density` of each tensor's deltas.

    With d_i = teacher_i - student, per parameter p:

    1. trim: d_i is zero but for the `density` largest by magnitude;
    2. elect: sign_p = sign( sum_i scale_i d_ip ), the sign with the larger total mass;
    3. disjoint mean: m_p = mean of scale_i d_ip over the teachers i whose trimmed d_ip has this sign;
    4. student + m.

    Where both signs have the same mass, and where nothing is left to merge, the student's value stays. A teacher of
    scale 0 has no say in any step.

    Source: Yadav et al., "TIES-Merging: resolving interference when merging models" (2023), section 4, algorithm 1,
    with two changes: what is trimmed is each tensor, not all of them together, so that a merge needs one tensor of one
    teacher at a time; and each teacher may have its own scale. Where these are equal they are the paper's lambda.
    """

    def merge(student: Tensor, teachers: Iterable[Tensor], scales: Sequence[float]) -> Tensor:
        # Sum and number per sign say all of steps 2 and 3, so that no teacher's delta has to be kept. In place: an
        # embedding in float64 is large.
        up, down = torch.zeros_like(student), torch.zeros_like(student)
        num_up, num_down = (torch.zeros_like(student, dtype=torch.int16) for _ in range(2))
        for teacher, scale in zip(teachers, scales, strict=True):
            delta = teacher - student
            delta.masked_fill_(~largest(delta, density), 0).mul_(scale)
            up += delta.clamp(min=0)
            down += delta.clamp(max=0)
            num_up += delta > 0
            num_down += delta < 0
        mass = up + down
        means = torch.where(mass > 0, up.div_(num_up.clamp(min=1)), down.div_(num_down.clamp(min=1)))
        return means.masked_fill_(mass == 0, 0).add_(student)

    return merge


def largest(delta: Tensor, density: float) -> Tensor:
    """Where the round(density * n) entries that are largest by magnitude stand, but at least one of them.

    Of equals at the border the first ones in memory order are taken.
    """
    size = delta.numel()
    count = max(1, round(density * size))
    if count >= size:
        return torch.ones_like(delta, dtype=torch.bool)
    magnitudes = delta.abs().flatten()
    # `kthvalue` would keep an index for each entry, and takes longer.
    border = float(np.partition(magnitudes.numpy(), size - count)[size - count])
    found = magnitudes > border
    at_border = (magnitudes == border).nonzero().squeeze(-1)
    found[at_border[: count - int(found.sum())]] = True
    return found.view_as(delta)
