"""`rl.yaml`: a model, weighted environments of prompts that can be checked, and how GRPO trains on them."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from mopdctl.config.base import Strict
from mopdctl.config.judge import JudgeReward
from mopdctl.config.train import OnPolicyConfig

Overlong = Literal["score", "fail", "mask", "soft"]
ZeroVariance = Literal["skip", "keep", "resample"]


class StateRewards(Strict):
    """What an answer earns whose check ended without a reward; null leaves it out of its group."""

    parse_error: float | None = Field(default=0.0, ge=0, le=1)
    """For a response without the form that was asked for."""
    timeout: float | None = Field(default=0.0, ge=0, le=1)
    """For a response whose check ran past its limits."""


class RlEnvironment(Strict):
    """Prompts of one kind, and what pays for answers to them."""

    prompts: Path
    """JSONL or Parquet rows with `messages` or `prompt`, `verifier` and `reference`; relative to this file."""
    weight: float = Field(default=1.0, gt=0)
    """How many of a step's prompts come from here, in proportion to the weights of the others."""
    loss_weight: float = Field(default=1.0, gt=0)
    """lambda: the weight of its samples in the loss."""
    max_new_tokens: int | None = Field(default=None, gt=0)
    """Longest answer in tokens; None takes the run's own."""
    teacher: str | None = None
    """A model whose log-probabilities train these prompts instead of a reward (the distillation advantage, one answer
    each). Distillation has its own denominators: it neither dilutes the rewards' loss nor is diluted by it."""
    judge: JudgeReward | None = None
    """A model that compares the answers of a group with each other; its reward is mixed with the verifier's."""

    @property
    def asks_verifier(self) -> bool:
        """Whether what a verifier says of answers counts."""
        return self.judge is None or self.judge.verifier_weight > 0

    @model_validator(mode="after")
    def _teacher_or_judge(self) -> "RlEnvironment":
        if self.teacher is not None and self.judge is not None:
            raise ValueError("give either teacher or judge: answers to a teacher's prompts earn nothing")
        return self


class RlTrainConfig(OnPolicyConfig):
    """GRPO: OnPolicyConfig plus groups, advantages and what is done about answers that teach nothing."""

    batch_size: int = Field(default=32, gt=0)
    """Prompts per optimizer step, over all processes."""
    group_size: int = Field(default=8, gt=0)
    """G: answers per prompt, which are compared with each other."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What an answer's reward is compared with: its group's mean, or the mean of the others."""
    scale: Literal["std", "none"] = "std"
    """`std` divides by the group's standard deviation, so that all groups weigh the same; `none` does not."""
    zero_variance: ZeroVariance = "skip"
    """Groups whose rewards are all equal have no gradient. `skip` leaves them out of batch and denominators, `keep`
    leaves them in the denominators, `resample` draws other prompts in their place (DAPO's dynamic sampling)."""
    max_resamples: int = Field(default=2, ge=0)
    """Rounds of further prompts that `resample` may draw in a step."""
    overlong: Overlong = "score"
    """Answers that ran out of tokens or turns: `score` verifies them like others, `fail` gives them 0, `mask` leaves
    them out of loss and baseline, `soft` takes off up to 1 within `overlong_buffer` of the budget (DAPO, Eq. 13)."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Tokens before the end of the budget over which `soft` grows from 0 to 1."""
    state_rewards: StateRewards = StateRewards()
    """What an answer earns whose check ended without a reward. Broken checks and references never earn anything."""
    kl_weight: float = Field(default=0.0, ge=0)
    """Weight of KL(policy || reference) in the loss, estimated by k3 on the sampled tokens; 0 has no reference."""
    reference: str | None = None
    """The reference of that KL: a name in the workspace, a folder or a hub id. None takes the model at the start."""
    verifier_seconds: float = Field(default=10.0, gt=0)
    """Seconds that one check may take, counted from its start."""
    verifier_memory_mb: int = Field(default=1024, gt=0)
    """Memory that one check may take."""
    verifier_workers: int | None = Field(default=None, gt=0)
    """Processes that check answers; None takes one per core, at most 8."""

    @model_validator(mode="after")
    def _settings_that_need_each_other(self) -> "RlTrainConfig":
        if (self.overlong == "soft") != (self.overlong_buffer > 0):
            raise ValueError("overlong: soft needs overlong_buffer, and nothing else does")
        if self.reference is not None and not self.kl_weight:
            raise ValueError("reference: is there for the KL; give kl_weight above 0, or leave it out")
        return self


class RlConfig(Strict):
    """Reinforcement learning of one model on answers that can be checked."""

    model: str
    """Where to start: a name in the workspace, a folder (relative to this file) or a hub id."""
    name: str
    """Name of the checkpoint to make."""
    environments: dict[str, RlEnvironment] = Field(min_length=1)
    """Name to environment; one run mixes them by weight."""
    train: RlTrainConfig
    """The loop."""

    @field_validator("environments")
    @classmethod
    def _plain_names(cls, value: dict[str, RlEnvironment]) -> dict[str, RlEnvironment]:
        # They begin the ids of prompts, so that a slash could make two of them equal.
        if bad := [name for name in value if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name)]:
            raise ValueError(f"name {bad[0]!r}: use letters, digits, '.', '_' or '-', beginning with a letter or digit")
        return value

    @model_validator(mode="after")
    def _groups_have_others(self) -> "RlConfig":
        if self.train.group_size < 2 and any(e.teacher is None for e in self.environments.values()):
            raise ValueError("train.group_size: an answer alone has nothing to be compared with; take 2 or more")
        shortest = min(e.max_new_tokens or self.train.max_new_tokens for e in self.environments.values())
        if self.train.overlong_buffer > shortest:
            raise ValueError(f"train.overlong_buffer: is longer than an answer of {shortest} tokens may be")
        return self
