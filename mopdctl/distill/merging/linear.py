"""The weighted mean of the teachers."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def linear(student: Tensor, teachers: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_i weight_i * teacher_i / sum_i weight_i. The student counts only where it is one of the teachers.

    Source: Wortsman et al., "Model soups" (2022), the uniform soup, with weights. Some weight has to be above 0.
    """
    total = torch.zeros_like(student)
    for teacher, weight in zip(teachers, weights, strict=True):
        total.add_(teacher, alpha=weight)
    return total.div_(sum(weights))
