import math

import torch

from mopdctl.objective.advantage import distillation_advantage


def test_advantage_is_teacher_minus_proximal_policy() -> None:
    advantage = distillation_advantage(torch.tensor([-1.0, -3.0, -0.25]), torch.tensor([-2.5, -0.5, -0.25]))
    assert advantage.tolist() == [1.5, -2.5, 0.0]


def test_clip_bounds_both_sides_and_leaves_the_inside_alone() -> None:
    teacher, prox = torch.tensor([-1.0, -9.0, -1.0, -1.5]), torch.tensor([-9.0, -1.0, -1.5, -1.0])
    assert distillation_advantage(teacher, prox, clip=5.0).tolist() == [5.0, -5.0, 0.5, -0.5]
    assert distillation_advantage(teacher, prox).tolist() == [8.0, -8.0, 0.5, -0.5]


def test_half_precision_scores_are_subtracted_in_float32() -> None:
    # 1 - 1/256 has no bfloat16 neighbour closer than 1/256: the difference of the two is exact only in float32.
    teacher, prox = torch.tensor([-0.99609375], dtype=torch.bfloat16), torch.tensor([-128.0], dtype=torch.bfloat16)
    advantage = distillation_advantage(teacher, prox)
    assert advantage.dtype == torch.float32
    assert advantage.item() == 127.00390625


def test_non_finite_scores_stay_non_finite_without_a_clip() -> None:
    advantage = distillation_advantage(torch.tensor([-math.inf, math.nan]), torch.tensor([-1.0, -1.0]))
    assert advantage[0] == -math.inf
    assert math.isnan(advantage[1])
