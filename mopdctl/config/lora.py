"""`lora:` of a training run: train a low-rank adapter instead of all weights."""

from typing import Literal

from pydantic import Field, field_validator

from mopdctl.config.base import Strict


class Lora(Strict):
    """A LoRA: each target matrix W becomes W + alpha / rank * B A, of which A and B are trained."""

    rank: int = Field(default=16, gt=0)
    """Columns of B and rows of A."""
    alpha: int = Field(default=32, gt=0)
    """The product is scaled by alpha / rank."""
    dropout: float = 0.0
    """Must be 0: the policy that is trained must be the policy that sampled."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Ends of module names, e.g. `[q_proj, v_proj]`; `all-linear` takes every linear layer but the output head."""

    @field_validator("dropout")
    @classmethod
    def _off(cls, value: float) -> float:
        if value != 0:
            raise ValueError("must be 0: the policy that is trained must be the policy that sampled")
        return value

    @field_validator("target_modules")
    @classmethod
    def _not_empty(cls, value: list[str] | str) -> list[str] | str:
        if not value:
            raise ValueError("name at least one module, or `all-linear`")
        return value
