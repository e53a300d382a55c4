"""`teachers.yaml`: student, prompts, teachers and how prompts find their teacher. All that `mopdctl distill` needs."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from mopdctl.config.base import Strict, load_config
from mopdctl.config.train import Dtype, OnPolicyConfig


class Teacher(Strict):
    """One teacher. Several aliases may share a checkpoint, which is then loaded once."""

    model: str
    """A name in the workspace, a folder (relative to this file) or a hub id."""
    kind: Literal["rl", "sft", "self", "stage"] = "rl"
    """How it was made: by RL, by SFT, a frozen copy of the student, or an earlier stage of the same lineage."""
    domains: list[str] = Field(min_length=1)
    """Values of the first routing key that this teacher serves."""
    efforts: list[str] = []
    """Values of the second routing key that it serves; empty serves all."""
    benchmarks: list[str] = []
    """lm-eval tasks on which `recovery` compares the student with this teacher; empty takes the domains' names."""
    weight: float = Field(default=1.0, gt=0)
    """lambda: the weight of its samples in the loss."""
    dtype: Dtype = "float32"
    """Precision in which the teacher scores."""


class Effort(Strict):
    """A reasoning-effort mode."""

    chat_template_kwargs: dict[str, str | bool | int] = {}
    """Arguments for the chat template, e.g. `{enable_thinking: false}`."""
    max_new_tokens: int | None = Field(default=None, gt=0)
    """Token budget of this mode; None takes the run's own."""


class DistillTrainConfig(OnPolicyConfig):
    """The MOPD loop: OnPolicyConfig plus objective and warm start."""

    samples_per_prompt: int = Field(default=1, gt=0)
    """Answers sampled per prompt."""
    objective: Literal["sampled", "exact"] = "sampled"
    """`sampled`: policy gradient on the sampled token. `exact`: reverse KL over the whole vocabulary."""
    advantage_clip: float | None = Field(default=None, gt=0)
    """Bound on the distillation advantage in nats, on both sides; None leaves it free."""
    warm_start: Literal["none", "merge"] = "none"
    """`merge` begins from student + `warm_start_scale` times the sum of teacher deltas."""
    warm_start_scale: float = Field(default=0.3, gt=0)
    """Scale of the warm-start merge."""


class TeachersFile(Strict):
    """Everything one MOPD run is made of."""

    student: str
    """The checkpoint to start from: a name in the workspace, a folder (relative to this file) or a hub id."""
    prompts: Path
    """JSONL or Parquet rows with `messages` or `prompt` and the routing keys; relative to this file."""
    name: str
    """Name of the checkpoint to make."""
    train: DistillTrainConfig
    """The loop."""
    routing: str | list[str] = "domain"
    """Field of a prompt row that says which teacher serves it; a second field may hold the reasoning effort."""
    efforts: dict[str, Effort] = {}
    """Reasoning-effort modes by name, for the second routing field."""
    teachers: dict[str, Teacher] = Field(min_length=1)
    """Alias to teacher."""

    @field_validator("routing")
    @classmethod
    def _one_or_two_keys(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, list) and not 1 <= len(value) <= 2:
            raise ValueError("name one or two fields")
        return value

    @property
    def routing_keys(self) -> tuple[str, ...]:
        """The routing fields, the domain's first."""
        return (self.routing,) if isinstance(self.routing, str) else tuple(self.routing)

    @model_validator(mode="after")
    def _efforts_have_a_key(self) -> "TeachersFile":
        if len(self.routing_keys) == 1 and (self.efforts or any(t.efforts for t in self.teachers.values())):
            raise ValueError("efforts need a second routing field, e.g. routing: [domain, effort]")
        return self


def load_teachers(path: Path) -> TeachersFile:
    """Reads and checks a `teachers.yaml`."""
    return load_config(TeachersFile, path)
