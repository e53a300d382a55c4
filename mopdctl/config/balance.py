"""`train.balance` and `train.curriculum`: how much each teacher counts, and which of its prompts come up."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mopdctl.config.base import Strict


class BalanceConfig(Strict):
    """Factors that multiply each teacher's `weight` in the loss."""

    mode: Literal["fixed", "share", "sigma", "observe"] = "fixed"
    """`fixed`: `weight` alone. `share`: factors that give each teacher its target share of the gradient norm.
    `sigma`: factors that level the spread of the teachers' signals (DN-MOPD). `observe`: both are computed and logged
    and none is applied: the run is that of `fixed`, to the bit."""
    target_shares: dict[str, Annotated[float, Field(gt=0)]] = {}
    """For `share` and `observe`: alias to its share of the gradient norm, in any common unit, for every teacher; empty
    takes the teachers' `weight`, equal shares where none is given."""
    memory: float = Field(default=0.5, ge=0, lt=1)
    """For `share`: how much of the old factor each measurement (see `grad_share_every`) keeps; 0 is undamped."""
    low: float = Field(default=0.25, gt=0, le=1)
    """For `sigma`: least factor."""
    high: float = Field(default=4.0, ge=1)
    """For `sigma`: largest factor."""

    @model_validator(mode="after")
    def _targets_have_a_use(self) -> "BalanceConfig":
        if self.target_shares and self.mode not in ("share", "observe"):
            raise ValueError(f"target_shares means nothing in mode {self.mode}; set mode: share")
        return self


class CurriculumConfig(Strict):
    """Prompts come up with weight p^a (1-p)^b among those of their teacher; p is the student's running pass rate."""

    pass_exponent: float = Field(default=1.0, ge=0)
    """a: how rarely prompts come up that the student hardly ever passes."""
    fail_exponent: float = Field(default=1.0, ge=0)
    """b: how rarely prompts come up that it nearly always passes."""
    memory: float = Field(default=0.8, ge=0, lt=1)
    """How much older answers to a prompt count each time newer ones are there; the student has moved on since."""
    prior: float = Field(default=0.5, gt=0, lt=1)
    """Pass rate of a prompt that was never answered."""
    prior_answers: float = Field(default=2.0, gt=0)
    """How many answers the prior is worth."""
