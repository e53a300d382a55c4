"""What is asked of the teachers themselves: answers to train on, before the loop (warm-up) or in its place (SeqKD)."""

import math
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from mopdctl.config.base import Strict


class TeacherAnswers(Strict):
    """The routed teachers' own answers to the training prompts, and which of them are trained on.

    Budgets and template arguments are those of the loop. Answers that did not come to their own end never train.
    """

    samples: int = Field(default=1, gt=0)
    """Answers asked for per prompt."""
    keep: int = Field(default=1, gt=0)
    """Answers of a prompt that train: those of the highest reward, among equals the likeliest per token."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature of the teachers; 0 takes the likeliest token each time."""
    wrong: Literal["drop", "keep"] = "drop"
    """What becomes of answers that their prompt's verifier does not pass; without a verifier all count as right."""
    shares: dict[str, float] = {}
    """Teacher to its weight in the draw of answers; 1 for one that is not named, so that all have equal shares."""

    @field_validator("shares")
    @classmethod
    def _positive(cls, value: dict[str, float]) -> dict[str, float]:
        for alias, share in value.items():
            if not 0 < share < math.inf:
                raise ValueError(f"share of {alias!r} must be above 0")
        return value

    @model_validator(mode="after")
    def _enough_of_them(self) -> Self:
        if self.keep > self.samples:
            raise ValueError("keep is above samples: no prompt has so many answers")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError("temperature 0 gives the same answer each time; take samples: 1, or a temperature above 0")
        return self


class WarmUp(TeacherAnswers):
    """A light SFT on the teachers' answers before the MOPD loop. Optimizer, schedule and reduction are the loop's."""

    steps: int = Field(gt=0)
    """Optimizer steps of it, before and beside those of the loop."""
    batch_size: int | None = Field(default=None, gt=0)
    """Answers per step, over all processes; None takes the loop's `batch_size`."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Peak learning rate; None takes the loop's."""
