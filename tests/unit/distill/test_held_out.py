"""When the student reached its teacher."""

from typing import Any

from mopdctl.distill.held_out import reached


def row(step: int, **recovery: float | None) -> dict[str, Any]:
    return {"step": step, "held_out/recovery_pct": recovery}


def test_the_optimizer_steps_it_took_to_score_what_the_teacher_scores() -> None:
    # The figures of step 4 (from 0) are those of a student that has seen five steps.
    history = [row(4, math=80.0, code=100.0), row(9, math=100.0, code=90.0), row(14, math=130.0, code=101.0)]
    assert reached(history) == {"code": 5, "math": 10}


def test_never_is_none() -> None:
    assert reached([row(0, math=99.9, code=-20.0, tool=0.0), row(1, math=99.9, code=0.0, tool=None)]) == {
        "code": None,
        "math": None,
        "tool": None,
    }


def test_a_teacher_that_is_not_ahead_cannot_be_reached() -> None:
    assert reached([row(0, math=None), row(1, math=None)]) == {"math": None}
