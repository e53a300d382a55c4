"""The configuration of `mopdctl sft`."""

from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from mopdctl.config.base import Strict
from mopdctl.config.train import TrainConfig

LossOn = Literal["assistant", "last_assistant", "all"]
Packing = Literal["none", "best_fit"]
Overlong = Literal["error", "drop"]


class SftSource(Strict):
    """One part of a mixture."""

    path: Path
    """A data set in the workspace, a folder or a file of rows, as in `data`."""
    weight: float = Field(default=1.0, gt=0)
    """How many rows are taken from here, in proportion to the weights of the other parts."""


class SftStage(Strict):
    """One stage of a run. What it leaves out is as at the top of the file and in its `train`."""

    name: str = Field(min_length=1)
    """Names the stage in progress, metrics and results."""
    steps: int = Field(gt=0)
    """Optimizer steps."""
    data: list[SftSource] = []
    """A mixture of rows by weight; empty takes the file's `data`."""
    max_length: int | None = Field(default=None, gt=1)
    """Longest conversation in tokens; with packing also what a pack holds."""
    packing: Packing | None = None
    """Whether several conversations share one row of the batch."""
    batch_size: int | None = Field(default=None, gt=0)
    """Conversations (with packing: packs) per optimizer step, over all processes."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Peak learning rate."""
    schedule: Literal["constant", "cosine", "linear"] | None = None
    """How the learning rate goes on after warm-up. Every stage begins its schedule anew."""
    final_learning_rate_share: float | None = Field(default=None, ge=0, le=1)
    """What `cosine` and `linear` fall towards, as a share of the stage's peak; reached one step after the last."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Steps over which the learning rate rises linearly from zero at the beginning of the stage."""


class SftTrainConfig(TrainConfig):
    """Optimizer, schedule, precision and checkpoints of one training run."""

    model_config = ConfigDict(json_schema_extra=lambda schema: schema["required"].remove("steps"))

    steps: int = Field(gt=0)
    """Optimizer steps; with `stages` their sum, which need not be given."""


class SftConfig(Strict):
    """Supervised fine-tuning of one model on conversations."""

    model: str
    """Where to start: a name in the workspace, a folder (relative to this file) or a hub id."""
    data: list[Path] = []
    """Rows with `messages` and, where tools are used, `tools`: names of data sets in the workspace, or JSONL or Parquet
    files or folders relative to this file (of a folder, `data/train-*.parquet`, else `*.parquet` and `*.jsonl`)."""
    name: str
    """Name of the checkpoint to make."""
    loss_on: LossOn = "assistant"
    """Train on the assistant's tokens, on those of its last message, or on every token (as in pretraining). A row may
    say otherwise in a field of the same name."""
    max_length: int = Field(default=4096, gt=1)
    """Longest conversation in tokens; with packing also what a pack holds."""
    overlong: Overlong = "error"
    """A conversation longer than `max_length` is an error, or is left out and counted. None is ever cut."""
    packing: Packing = "none"
    """`best_fit` lets conversations share a row of up to `max_length` tokens without seeing each other; `batch_size`
    then counts such packs, each a micro-batch (`gradient_accumulation` does not count). It changes neither loss nor
    gradient, only how much of the batch is padding."""
    stages: list[SftStage] = []
    """Stages that follow each other with weights and optimizer state carried over; none makes the whole run one."""
    train: SftTrainConfig
    """Optimizer, schedule, precision and checkpoints."""

    @field_validator("stages")
    @classmethod
    def _names_differ(cls, stages: list[SftStage]) -> list[SftStage]:
        names = [stage.name for stage in stages]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two stages are called {twice[0]!r}; give each its own name")
        return stages

    @model_validator(mode="before")
    @classmethod
    def _steps_are_those_of_the_stages(cls, document: Any) -> Any:
        train, stages = (document.get(key) if isinstance(document, dict) else None for key in ("train", "stages"))
        if not isinstance(train, dict) or not isinstance(stages, list) or not stages or "steps" in train:
            return document
        steps = [stage.get("steps") if isinstance(stage, dict) else None for stage in stages]
        # anything else is reported where it stands, under `stages`
        total = sum(n for n in steps if isinstance(n, int))
        return document | {"train": train | {"steps": max(total, 1)}}

    @model_validator(mode="after")
    def _stages_fit_the_rest(self) -> "SftConfig":
        total = sum(stage.steps for stage in self.stages)
        if self.stages and self.train.steps != total:
            raise ValueError(f"train.steps {self.train.steps} contradicts the {total} steps of `stages`; leave it out")
        without = [stage.name for stage in self.stages if not stage.data]
        if not self.data and (without or not self.stages):
            place = f" or in stage {without[0]!r}" if without else ""
            raise ValueError(f"no data; name at least one file, folder or data set in `data`{place}")
        if self.data and self.stages and not without:
            raise ValueError("`data` is used by no stage, as each has its own; leave it out")
        return self
