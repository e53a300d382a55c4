"""Settings that every trainer shares."""

from typing import Literal

from pydantic import Field

from mopdctl.config.base import Strict

Dtype = Literal["float32", "bfloat16"]


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
