"""Generative adversarial distillation: the discriminator's loss on pairs, and what the student is paid."""

from collections.abc import Sequence

import torch
from torch import Tensor


def bradley_terry_loss(teacher_scores_P: Tensor, student_scores_P: Tensor) -> Tensor:
    """How badly a discriminator tells the teacher's answer from the student's, for each of P pairs, in nats.

        margin = D(y_teacher) - D(y_student)
        loss   = -log sigmoid(margin)            d loss / d margin = -sigmoid(-margin)

    log 2 where both have the same score. Only differences count: a constant added to all scores changes nothing.

    Args:
        teacher_scores_P: D of the teacher's answers, any finite size; carries the gradient.
        student_scores_P: D of the student's answers to the same prompts.

    Returns:
        [P], float32 (float64 stays float64).

    Source: GAD (arXiv 2511.10643), Eq. 3.
    """
    margin_P = teacher_scores_P - student_scores_P
    return -torch.nn.functional.logsigmoid(margin_P if margin_P.dtype == torch.float64 else margin_P.float())


def pair_accuracy(margin_P: Tensor) -> Tensor:
    """1 where the teacher's answer has the higher score, 0 where the student's has, 0.5 where they are equal; [P]."""
    return 0.5 * (1 + margin_P.sign())


def adversarial_rewards(
    student_scores: Sequence[float], teacher_scores: Sequence[float], *, clip: float | None = None
) -> list[float]:
    """What the student's answers earn: the discriminator's score, counted from that of the teacher's answer.

        r_i = clamp(D(y_student,i) - D(y_teacher), -clip, clip)

    Where all answers of a group are paired with the same teacher's answer, the term D(y_teacher) is one constant: it
    leaves group-relative advantages as they are, and gives the bound a meaning that no shift of D changes.

    Args:
        student_scores: D of each answer.
        teacher_scores: D of the teacher's answer that each is paired with.
        clip: bound > 0 on both sides; None leaves rewards free. Answers beyond it all earn the same.

    Source: GAD (arXiv 2511.10643), Eq. 2 (reward D(y_student)); the bound is ours.
    """
    differences = [student - teacher for student, teacher in zip(student_scores, teacher_scores, strict=True)]
    return differences if clip is None else [min(max(difference, -clip), clip) for difference in differences]
