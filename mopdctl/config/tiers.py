"""`tiers`: which of several teachers of a domain serves which prompt, by a profile taken before the first step."""

from typing import Literal

from pydantic import Field, model_validator

from mopdctl.config.base import Strict

Tier = Literal[1, 2, 3]
"""1 frontier, 2 specialist, 3 self."""


class TiersConfig(Strict):
    """The frontier teacher (tier 1) only where it is needed, the student's own copy (tier 3) where it is enough."""

    samples: int = Field(default=4, gt=0)
    """Answers of the student per prompt that its pass rate is measured with."""
    frontier_below_pass_rate: float | None = Field(default=0.25, ge=0, le=1)
    """Prompts that the student passes less often go to tier 1; None does not ask."""
    frontier_below_confidence: float | None = Field(default=0.5, ge=0, le=1)
    """Prompts go to tier 1 on whose greedy answer the tier-2 teacher is less confident (geometric mean of its tokens'
    probabilities); None does not ask."""
    self_from_pass_rate: float | None = Field(default=1.0, gt=0, le=1)
    """Prompts that the student passes so often are mastered and go to tier 3; None does not ask."""

    @model_validator(mode="after")
    def _bands_are_apart(self) -> "TiersConfig":
        below, since = self.frontier_below_pass_rate, self.self_from_pass_rate
        if below is not None and since is not None and below > since:
            raise ValueError(
                f"frontier_below_pass_rate ({below:g}) is above self_from_pass_rate ({since:g}): a prompt would be "
                "too hard and mastered at once"
            )
        return self
