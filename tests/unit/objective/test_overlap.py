import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mopdctl.errors import InputError
from mopdctl.objective.overlap import support_overlap

LOGITS = st.lists(st.floats(-20, 20), min_size=5, max_size=5, unique=True)


def logprobs(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def shares(policy_NV: Tensor, teacher_NV: Tensor, k: int) -> list[float]:
    return [float(share_N[0]) for share_N in support_overlap(policy_NV, teacher_NV, k)]


def test_shares_by_hand_on_five_tokens() -> None:
    student, teacher = logprobs(0.4, 0.3, 0.15, 0.1, 0.05), logprobs(0.05, 0.5, 0.3, 0.1, 0.05)
    # top-2: student {0, 1}, teacher {1, 2}; one of them is shared
    assert shares(student, teacher, 2) == pytest.approx([0.5, 0.3 + 0.15, 0.05 + 0.5], rel=1e-12)
    # top-1: student {0}, teacher {1}
    assert shares(student, teacher, 1) == pytest.approx([0.0, 0.3, 0.05], rel=1e-12)
    # top-3: student {0, 1, 2}, teacher {1, 2, 3}
    assert shares(student, teacher, 3) == pytest.approx([2 / 3, 0.3 + 0.15 + 0.1, 0.05 + 0.5 + 0.3], rel=1e-12)


@given(LOGITS, st.integers(1, 5))
def test_a_model_overlaps_with_itself_wholly(logits: list[float], k: int) -> None:
    own = torch.log_softmax(torch.tensor([logits], dtype=torch.float64), dim=-1)
    overlap, student_mass, teacher_mass = shares(own, own, k)
    top = math.fsum(sorted(own.exp()[0].tolist())[-k:])
    assert overlap == 1.0
    assert student_mass == teacher_mass == pytest.approx(min(top, 1.0), rel=1e-12)


@given(LOGITS, LOGITS, st.integers(1, 5))
def test_changing_sides_changes_the_masses(one: list[float], other: list[float], k: int) -> None:
    a, b = (torch.log_softmax(torch.tensor([x], dtype=torch.float64), dim=-1) for x in (one, other))
    overlap, student_mass, teacher_mass = shares(a, b, k)
    assert shares(b, a, k) == [overlap, teacher_mass, student_mass]
    assert all(0 <= share <= 1 for share in (overlap, student_mass, teacher_mass))


@given(LOGITS, LOGITS)
def test_the_whole_vocabulary_holds_everything(one: list[float], other: list[float]) -> None:
    a, b = (torch.log_softmax(torch.tensor([x], dtype=torch.float64), dim=-1) for x in (one, other))
    assert shares(a, b, 5) == pytest.approx([1.0, 1.0, 1.0], rel=1e-12)


def test_opposite_distributions_share_nothing() -> None:
    up = torch.log_softmax(torch.arange(8.0).unsqueeze(0), dim=-1)
    assert shares(up, up.flip(-1), 4)[0] == 0.0


def test_a_probability_of_zero_is_no_mass() -> None:
    student, teacher = logprobs(0.5, 0.5, 0.0, 0.0, 0.0), logprobs(0.0, 0.0, 0.0, 0.4, 0.6)
    assert shares(student, teacher, 2) == [0.0, 0.0, 0.0]


def test_every_token_is_measured_on_its_own() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.log_softmax(torch.randn(6, 5, generator=generator), dim=-1) for _ in range(2))
    for share_N, rows in zip(
        support_overlap(a, b, 2),
        zip(*(shares(a[i : i + 1], b[i : i + 1], 2) for i in range(6)), strict=True),
        strict=True,
    ):
        assert share_N.shape == (6,)
        assert share_N.tolist() == list(rows)


@pytest.mark.parametrize("k", [0, 6, -1])
def test_a_support_that_is_not_of_the_vocabulary_is_refused(k: int) -> None:
    with pytest.raises(InputError, match=f"top_k {k}: the vocabulary has 5 tokens"):
        support_overlap(torch.zeros(1, 5), torch.zeros(1, 5), k)
