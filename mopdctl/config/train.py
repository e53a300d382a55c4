"""Settings that every trainer shares."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from mopdctl.config.base import Strict

Dtype = Literal["float32", "bfloat16"]

WeightQuant = Literal["none", "nvfp4", "mxfp4"]
"""Precision of the weights that `mopdctl quantize` takes by default: the linear layers between embedding and head, the
matrices of experts. `none` leaves them as they are."""


class TrainConfig(Strict):
    """Optimizer, schedule, precision and checkpoints of one training run."""

    steps: int = Field(gt=0)
    """Optimizer steps."""
    batch_size: int = Field(default=128, gt=0)
    """Prompts (SFT: conversations) per optimizer step, over all processes."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` updates hidden matrices with Muon, scaled to the size of AdamW's updates, and the rest with AdamW."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """How the learning rate goes on after warm-up: it stays, or falls to `final_learning_rate_share` of its peak."""
    final_learning_rate_share: float = Field(default=0.1, ge=0, le=1)
    """What `cosine` and `linear` fall towards, as a share of the peak; reached one step after the last."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from zero."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay, on matrices only."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW decay of the second moment."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient norm above which gradients are scaled down."""
    gradient_accumulation: int = Field(default=1, gt=0)
    """Least number of micro-batches per optimizer step and process; never changes loss or gradient."""
    dtype: Dtype = "float32"
    """Compute precision; trained weights are float32 in any case."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    seed: int = Field(default=0, ge=0)
    """Seed of data order and sampling."""
    checkpoint_every: int = Field(default=50, gt=0)
    """Steps between resumable checkpoints."""
    keep_last: int = Field(default=1, gt=0)
    """Resumable checkpoints to keep."""


class OnPolicyConfig(TrainConfig):
    """What `distill` and `rl` share: sampling from the model that learns, and the policy-gradient correction."""

    max_new_tokens: int = Field(default=512, gt=0)
    """Longest answer in tokens; where tools answer, of the whole conversation after the prompt."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; behaviour log-probabilities are those of the tempered distribution."""
    top_p: float = 1.0
    """Must be 1: a truncated distribution gives some tokens no probability, and breaks the importance ratios."""
    sampling_batch_size: int = Field(default=256, gt=0)
    """Answers sampled or scored at the same time."""
    durability: Literal["off", "process", "host"] = "process"
    """What a sampled token survives at once: nothing, the death of the process, or that of the machine."""
    staleness: Literal[0, 1] = 0
    """1 samples from the weights before the last step, as an asynchronous sampler would."""
    inner_steps: int = Field(default=1, gt=0)
    """Optimizer steps on the same rollouts; above 1 the PPO clip begins to matter."""
    correction: Literal["icepop", "tis", "none"] = "icepop"
    """What is done about the ratio of learner to sampler."""
    correction_low: float = Field(default=0.5, ge=0)
    """Lower bound of the correction's band."""
    correction_high: float = Field(default=5.0, gt=0)
    """Upper bound of the correction's band."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """PPO clip below 1."""
    clip_high: float = Field(default=0.28, gt=0)
    """PPO clip above 1; larger than `clip_low` it is DAPO's clip-higher."""
    loss_reduction: Literal["token", "sequence"] = "token"
    """`token`: mean over all loss tokens. `sequence`: mean over answers of each one's mean: all count the same."""
    grad_share_every: int = Field(default=10, gt=0)
    """Steps between measurements of each teacher's (environment's) share of the gradient."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between scorings of `eval_prompts`; 0 never."""
    eval_prompts: Path | None = None
    """JSONL or Parquet rows like the prompts, with `verifier` and `reference`; relative to this file."""
    eval_size: int = Field(default=100, gt=0)
    """Rows of `eval_prompts` used per teacher (rl: per environment), the first in the file."""

    @field_validator("top_p")
    @classmethod
    def _whole_distribution(cls, value: float) -> float:
        if value != 1.0:
            raise ValueError("must be 1: truncated sampling breaks the importance ratios; use temperature")
        return value

    @model_validator(mode="after")
    def _band_and_held_out(self) -> Self:
        if self.correction_low > self.correction_high:
            raise ValueError("correction_low is above correction_high")
        if self.eval_every and self.eval_prompts is None:
            raise ValueError("eval_every needs eval_prompts")
        return self
