"""What a teacher gives: log-probabilities, or, as a black box, nothing but answers."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from mopdctl.config.base import Strict

Gives = Literal["logprobs", "answers", "discriminator"]


class DiscriminatorConfig(Strict):
    """The discriminator that stands in for a black-box teacher (GAD, arXiv 2511.10643)."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Constant learning rate of its AdamW."""
    warm_up_steps: int = Field(default=0, ge=0)
    """Optimizer steps at the beginning in which it learns, and the student trains on the teacher's answers instead."""
    reward_clip: float | None = Field(default=None, gt=0)
    """Bound on the student's reward, counted from the score of the teacher's answer, on both sides; None is free."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What an answer's reward is compared with: the mean of its group, or that of the others in it."""
    scale: Literal["std", "none"] = "std"
    """`std` divides advantages by the deviation of the group's rewards; `none` keeps the discriminator's scale."""


class BlackBox(Strict):
    """The part of a teacher that says what is known of it beside its name."""

    model: str = ""
    """A name in the workspace, a folder (relative to this file) or a hub id; empty for a teacher known by `answers`."""
    gives: Gives = "logprobs"
    """`logprobs`: it scores the student's tokens. `answers`: the student trains on its answers. `discriminator`: the
    student is rewarded for answers that a discriminator takes for the teacher's."""
    answers: Path | None = None
    """Its answers: JSONL or Parquet rows with `prompt_id` and `answer` or `messages`, or a data set of `gen-sft`."""
    wrong_answers: Literal["drop", "keep"] = "drop"
    """What becomes of answers to which the prompt's verifier gives 0; either way only the best of a prompt are used."""
    without_answer: Literal["refuse", "drop"] = "refuse"
    """What becomes of prompts without a usable answer: an error before the first step, or they are left out."""
    discriminator: DiscriminatorConfig | None = None
    """Settings for `gives: discriminator`; None takes their defaults."""

    @property
    def is_black_box(self) -> bool:
        """Whether nothing but its answers is used."""
        return self.gives != "logprobs"

    @model_validator(mode="after")
    def _says_where_it_is(self) -> Self:
        if not self.is_black_box:
            if not self.model:
                raise ValueError("`model` is missing: a teacher that gives log-probabilities is loaded")
            given = (self.answers, self.wrong_answers != "drop", self.without_answer != "refuse", self.discriminator)
            if any(given):
                raise ValueError(
                    "`answers`, `wrong_answers`, `without_answer` and `discriminator` belong to a black box; "
                    "set `gives: answers` or `gives: discriminator`"
                )
        elif (self.answers is None) == (not self.model):
            raise ValueError(
                f"`gives: {self.gives}` needs either `answers`, a file, or `model`, which then writes them"
            )
        if self.discriminator is not None and self.gives != "discriminator":
            raise ValueError("`discriminator` needs `gives: discriminator`")
        return self


def check_group_size(gives: Gives, samples_per_prompt: int) -> None:
    """Raises ValueError for a discriminator without groups: an answer alone has nothing to be compared with."""
    if gives == "discriminator" and samples_per_prompt < 2:
        raise ValueError(
            "`gives: discriminator` compares answers to one prompt: set train.samples_per_prompt to 2 or more"
        )
