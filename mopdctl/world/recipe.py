"""The numbers of the quickstart: how long each stage trains, and how. Tuned on the dev split."""

from mopdctl.config.base import Strict


class Recipe(Strict):
    """Steps and learning rates of every stage. All stages use Muon beside AdamW unless said otherwise."""

    base_steps: int = 110
    student_steps: int = 100
    sft_batch: int = 128
    sft_rate: float = 6e-3
    student_rate: float = 4e-3
    mixture_weights: dict[str, int] = {"arithmetic": 4, "instructions": 1, "structured": 1, "tools": 1, "lookup": 1}
    """Rows of each domain in the SFT mixture, in proportion: short answers need more rows to weigh as much."""
    specialist_steps: dict[str, int] = {"arithmetic": 150, "instructions": 50, "structured": 50, "tools": 60}
    specialist_batch: int = 64
    specialist_rate: float = 1e-3
    refork: tuple[str, ...] = ("arithmetic", "tools")
    refork_steps: int = 60
    refork_rate: float = 1e-3
    mopd_batch: int = 96
    mopd1_steps: int = 70
    mopd2_steps: int = 70
    mopd_rate: float = 1e-3
    mopd_optimizer: str = "muon"
    objective: str = "exact"
    warm_start: str = "merge"
    warm_start_scale: float = 0.3
    merge_scale: float = 0.3
    """Scale of the merge control; the best of a small search on the dev split, so that the control is a strong one."""
