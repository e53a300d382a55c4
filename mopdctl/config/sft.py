"""The configuration of `mopdctl sft`."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from mopdctl.config.base import Strict
from mopdctl.config.train import TrainConfig


class SftConfig(Strict):
    """Supervised fine-tuning of one model on conversations."""

    model: str
    """Where to start: a name in the workspace, a folder (relative to this file) or a hub id."""
    data: list[Path] = Field(min_length=1)
    """JSONL or Parquet files of rows with `messages` and, where tools are used, `tools`; relative to this file."""
    name: str
    """Name of the checkpoint to make."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Train on the assistant's tokens, or on every token (as in pretraining)."""
    max_length: int = Field(default=4096, gt=1)
    """Longest conversation in tokens; a longer one is an error."""
    train: TrainConfig
    """Optimizer, schedule, precision and checkpoints."""
