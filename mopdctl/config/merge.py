"""How `mopdctl merge` weighs the teachers against the student and each other."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mopdctl.config.base import Strict

MergeMethod = Literal["task-arithmetic", "linear", "ties"]

DEFAULT_SCALES: dict[MergeMethod, float] = {"task-arithmetic": 0.3, "linear": 1.0, "ties": 1.0}
"""Scale of a teacher for which none is given. TIES takes means, task arithmetic sums: their scales differ in size."""


class MergeConfig(Strict):
    """The method of a merge and its scales."""

    method: MergeMethod = "task-arithmetic"
    """`task-arithmetic`: student + sum of scaled deltas. `linear`: weighted mean. `ties`: means of agreeing deltas."""
    scale: float | None = Field(default=None, gt=0)
    """What every teacher's delta is multiplied with; None takes 0.3 for task arithmetic and 1 for TIES."""
    scales: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Alias to its own scale, in place of `scale`; for `linear` its weight in the mean, that of the others being 1."""
    density: float = Field(default=0.2, gt=0, le=1)
    """TIES: share of each tensor's deltas that is kept, the largest by magnitude."""
    search: bool = False
    """Choose the scales on held-out prompts (`train.eval_prompts` of the teachers.yaml)."""

    @model_validator(mode="after")
    def _settings_that_mean_something(self) -> Self:
        if self.method == "linear" and self.scale is not None:
            raise ValueError("a weighted mean has no common scale; leave it out or give weights in `scales`")
        if self.method != "ties" and "density" in self.model_fields_set:
            raise ValueError(f"only `ties` has a density; {self.method} uses every delta whole")
        if self.search and (self.scale is not None or self.scales):
            raise ValueError("`search` chooses the scales; leave out `scale` and `scales`")
        return self
