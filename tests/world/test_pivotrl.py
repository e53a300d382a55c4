"""The experiment behind PivotRL in the tiny world: what GRPO raises, and what chosen turns are worth."""

from pathlib import Path

import pytest

from mopdctl.runs import Workspace
from mopdctl.world.domains import DOMAINS
from mopdctl.world.pivotrl import compare


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_grpo_raises_the_student_and_pivots_are_worth_more_than_random_turns(tmp_path: Path) -> None:
    found = compare(Workspace(tmp_path / "w"), seed=0)
    scores = found["scores"]
    raised = [domain for domain in DOMAINS if scores["rlvr"][domain] >= scores["student"][domain] + 10]
    assert len(raised) >= 2
    # Sampled as it was trained: PivotRL does more errands than the same steps on random turns.
    assert found["success_sampled"]["pivots"] > found["success_sampled"]["random"]
    # Against SFT on the same trajectories: what the other domains keep.
    assert found["retained"]["pivots"] > found["retained"]["sft"]
