"""The values that cross borders between features. Frozen, plain, without torch."""

from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as the user wrote it: what to say to the model, and what its routing keys are."""

    prompt_id: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None
    routing: dict[str, str]
    """Routing key to value, e.g. `{"domain": "math"}`."""
    reference: Any = None
    """What the verifier compares an answer with; None where nobody checks."""
    verifier: str | None = None
    place: str = ""
    """Where it was read, for error messages."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled answer: its tokens as they came, the end token included if it was sampled."""

    sample_id: str
    prompt_id: str
    teacher_id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]
    """Natural log of the probability that the sampling distribution gave each response token."""
    finish_reason: str
    """`stop` (an end token was sampled) or `length` (the token budget ran out)."""
    policy_version: int
    """Optimizer steps that the sampling weights had seen."""


@dataclass(frozen=True, slots=True)
class Score:
    """One benchmark figure of one model, on the metric's own 0-100 scale where it is a share."""

    benchmark: str
    metric: str
    filter: str
    higher_is_better: bool
    score: float | None
    stderr: float | None
    n: int
    reason: str | None
    """Why `score` is None; None otherwise."""
    identity: dict[str, Any]
    """What must be equal before two scores may be compared: version, num_fewshot, prompt, generation, ..."""
