"""`teachers.yaml`: student, prompts, teachers and how prompts find their teacher. All that `mopdctl distill` needs."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from mopdctl.config.base import Strict, load_config
from mopdctl.config.blackbox import BlackBox, check_group_size
from mopdctl.config.distill import DistillTrainConfig
from mopdctl.config.tiers import Tier, TiersConfig
from mopdctl.config.train import Dtype, WeightQuant


class Teacher(BlackBox):
    """One teacher: full weights, a LoRA adapter, or a black box. Aliases that share a checkpoint load it once."""

    base: str | None = None
    """Base model of a LoRA adapter; None takes the one that the adapter names."""
    kind: Literal["rl", "sft", "self", "stage"] = "rl"
    """How it was made: by RL, by SFT, a frozen copy of the student, or an earlier stage of the same lineage."""
    domains: list[str] = Field(min_length=1)
    """Values of the first routing key that this teacher serves."""
    efforts: list[str] = []
    """Values of the second routing key that it serves; empty serves all."""
    benchmarks: list[str] = []
    """lm-eval tasks on which `recovery` compares the student with this teacher; empty takes the domains' names."""
    tier: Tier = 2
    """Several teachers may serve a domain if their tiers differ: 1 frontier, 2 specialist, 3 self. See `tiers`."""
    prompts: Path | None = None
    """Prompts of its own instead of those in the common file; relative to this file."""
    sampling_weight: float | None = Field(default=None, gt=0)
    """How often its prompts are drawn, in any common unit; all or none have one. None draws by numbers of prompts."""
    weight: float = Field(default=1.0, gt=0)
    """lambda: the weight of its samples in the loss, however often they are drawn."""
    dtype: Dtype = "float32"
    """Precision in which the teacher scores."""
    quant: WeightQuant = "none"
    """Scores with weights as FP4 holds them, quantized when it is loaded: nvfp4 by `sweep`, mxfp4 by the even rule. An
    adapter stays as it is, over a quantized base. See `train.allow_quant_noise`."""

    @model_validator(mode="after")
    def _something_to_load(self) -> Self:
        if self.base is not None and not self.model:
            raise ValueError("`base` needs `model`, the adapter over it")
        if self.quant != "none" and self.is_black_box:
            raise ValueError("`quant` needs a teacher that scores; a black box is known by its answers alone")
        return self


class Effort(Strict):
    """A reasoning-effort mode."""

    chat_template_kwargs: dict[str, str | bool | int] = {}
    """Arguments for the chat template, e.g. `{enable_thinking: false}`."""
    max_new_tokens: int | None = Field(default=None, gt=0)
    """Token budget of this mode; None takes the run's own."""


_RESERVED = {"sft_anchor"}
"""What stands beside the aliases in metrics."""


class TeachersFile(Strict):
    """Everything one MOPD run is made of."""

    student: str
    """The checkpoint to start from: a name in the workspace, a folder (relative to this file) or a hub id."""
    prompts: Path | None = None
    """JSONL or Parquet rows with `messages` or `prompt` and the routing keys; relative to this file. May be left out
    where every teacher has prompts of its own."""
    name: str
    """Name of the checkpoint to make."""
    train: DistillTrainConfig
    """The loop."""
    routing: str | list[str] = "domain"
    """Field of a prompt row that says which teacher serves it; a second field may hold the reasoning effort."""
    efforts: dict[str, Effort] = {}
    """Reasoning-effort modes by name, for the second routing field."""
    tiers: TiersConfig | None = None
    """How prompts find the tier of their domain's teachers; needed where a domain has several."""
    teachers: dict[str, Teacher] = Field(min_length=1)
    """Alias to teacher."""

    @field_validator("teachers", mode="before")
    @classmethod
    def _aliases_are_names(cls, value: Any) -> Any:
        """Aliases become parts of paths, ids and metrics."""
        for alias in value if isinstance(value, dict) else ():
            if not isinstance(alias, str) or not 1 <= len(alias) <= 100 or not alias.isprintable():
                raise ValueError(f"alias {alias!r}: use 1-100 printable characters")
            if alias.startswith(".") or alias in _RESERVED or not {"/", "\\"}.isdisjoint(alias):
                raise ValueError(
                    f"alias {alias!r}: use another one, without slashes, not beginning with a dot and none of "
                    f"{', '.join(sorted(_RESERVED))}"
                )
        return value

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
    def _prompts_for_all(self) -> Self:
        if self.prompts is None and (without := [a for a, t in self.teachers.items() if t.prompts is None]):
            raise ValueError(f"`prompts` is missing, and teacher {without[0]!r} has none of its own")
        return self

    @model_validator(mode="after")
    def _groups_for_discriminators(self) -> Self:
        for teacher in self.teachers.values():
            check_group_size(teacher.gives, self.train.samples_per_prompt)
        return self

    @model_validator(mode="after")
    def _efforts_have_a_key(self) -> Self:
        if len(self.routing_keys) == 1 and (self.efforts or any(t.efforts for t in self.teachers.values())):
            raise ValueError("efforts need a second routing field, e.g. routing: [domain, effort]")
        return self


def load_teachers(path: Path) -> TeachersFile:
    """Reads and checks a `teachers.yaml`."""
    return load_config(TeachersFile, path)
