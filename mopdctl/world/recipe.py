"""The numbers of the quickstart: how long each stage trains, and how. Tuned on the dev split, seeds 0-2."""

from typing import Literal

from pydantic import Field

from mopdctl.config.base import Strict


class Recipe(Strict):
    """Steps and learning rates of every stage. All stages use Muon beside AdamW."""

    student_steps: int = 60
    student_batch: int = 96
    student_rate: float = 3e-3
    mixture_weights: dict[str, int] = Field(
        default={"arithmetic": 4, "instructions": 1, "structured": 1, "tools": 1, "lookup": 1, "errands": 4}
    )
    """Rows of each domain in the SFT mixture, in proportion: short answers need more rows to weigh as much."""
    rlvr_steps: int = 16
    rlvr_groups: int = 64
    """Prompts per step."""
    group_size: int = 8
    """Answers per prompt, here and for the agent."""
    rlvr_rate: float = 1.2e-3
    rlvr_weights: dict[str, int] = Field(default={"instructions": 3, "lookup": 1})
    """Prompts of each domain in the RL that makes the model MOPD begins with, in proportion."""
    trajectories: int = 150
    """Expert trajectories of errands, from which the agent's pivots are taken."""
    lambda_diff: float = 0.99
    """Only turns at which the student's mean reward lies below are pivots. With 0.8 nearly all pivots ask for one and
    the same call, which the agent then makes everywhere."""
    agent_steps: int = 30
    agent_groups: int = 32
    agent_rate: float = 7e-4
    specialist_steps: dict[str, int] = Field(
        default={"arithmetic": 200, "instructions": 70, "structured": 80, "tools": 60}
    )
    specialist_batch: int = 64
    specialist_rate: dict[str, float] = Field(
        default={"arithmetic": 7e-4, "instructions": 1e-3, "structured": 1.5e-3, "tools": 1e-3}
    )
    refork: tuple[str, ...] = ("arithmetic", "instructions")
    """Domains whose specialist is trained again from `mopd1`."""
    refork_steps: dict[str, int] = Field(default={"arithmetic": 120, "instructions": 50})
    mopd_batch: int = 104
    prompt_weights: dict[str, int] = Field(
        default={"arithmetic": 3, "instructions": 1, "structured": 1, "tools": 1, "lookup": 1, "errands": 1}
    )
    """Prompts of each domain for MOPD, in proportion."""
    mopd1_steps: int = 70
    mopd2_steps: int = 70
    mopd_rate: float = 2e-3
    objective: Literal["sampled", "exact"] = "exact"
    loss_reduction: Literal["token", "sequence"] = "sequence"
    warm_start: Literal["none", "merge"] = "merge"
    """How `mopd1` begins; `mopd2` always begins from `mopd1` itself."""
    warm_start_scale: float = 0.3
    merge_scale: float = 0.25
    """Scale of the merge control: the best on the dev split, so that the control is a strong one."""
    documents: int = 500
    """Test documents per task for the recovery table."""
    see_saw_documents: int = 200
    """Test documents per task for what a specialist forgot."""
