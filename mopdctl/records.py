"""The values that cross borders between features. Frozen, plain, without torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # numpy takes a tenth of a second to load, and most commands that read this have no arrays
    import numpy as np
    from numpy.typing import NDArray

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
    environment: dict[str, Any] | None = None
    """The tool environment that its answers act in, `{"name": ..., "setup": ...}`; None for a single answer."""
    place: str = ""
    """Where it was read, for error messages."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One rollout: the tokens of prompt and response as they came, and what was said about them.

    T tokens, N of them loss-active: those that the policy sampled. The end token is one if it was sampled; what a tool
    answered is not. Streams have one entry per loss-active token, in order.
    """

    sample_id: str
    prompt_id: str
    group_id: str
    """Samples that are compared with each other share it."""
    generation_index: int
    domain: str
    teacher_id: str
    """Alias of its one teacher; empty if nobody judges."""
    policy_version_min: int
    """Optimizer steps that the weights of its oldest token had seen."""
    policy_version_max: int
    tokens: "NDArray[np.int32]"
    """[T]"""
    prompt_length: int
    loss_mask: "NDArray[np.bool_]"
    """[T]"""
    behavior_logprobs: "NDArray[np.float32]"
    """[N], natural log of the probability in the distribution that was sampled from."""
    finish_reason: str
    """`stop` (an end token was sampled), `length` (the budget of tokens ran out), `max_turns` (that of turns did) or
    `tool_lost` (the result of a command was)."""
    attempt: int = 1
    """How many processes wrote at it before the one that finished it, itself included."""
    tokenizer_fingerprint: str = ""
    sampling_fingerprint: str = ""
    teacher_logprobs: "NDArray[np.float32] | None" = None
    """[N], natural log of the teacher's probability at temperature 1."""
    teacher_topk_ids: "NDArray[np.int32] | None" = None
    """[N, K]"""
    teacher_topk_logprobs: "NDArray[np.float32] | None" = None
    """[N, K]"""
    teacher_hidden: "NDArray[np.uint16] | None" = None
    """[N, H], bfloat16 bits."""
    reward: float | None = None
    """In [0, 1] where the verdict is `ok`, else None."""
    verdict: str | None = None
    """How its verification ended: `ok` or a state that has no reward; None if nobody checked."""
    verifier: str | None = None
    """`name/version` of what checked it."""
    verdict_label: str | None = None
    """The verifier's class of the outcome, e.g. `abstained`; None where it knows none."""
    rewards: "NDArray[np.float32] | None" = None

    @property
    def prompt_ids(self) -> "NDArray[np.int32]":
        """The prompt's tokens."""
        return self.tokens[: self.prompt_length]

    @property
    def response_ids(self) -> "NDArray[np.int32]":
        """Everything after the prompt, [R]."""
        return self.tokens[self.prompt_length :]

    @property
    def response_mask(self) -> "NDArray[np.bool_]":
        """The loss mask of the response, [R]."""
        return self.loss_mask[self.prompt_length :]


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
