"""What the stages hand to each other."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Seed:
    """One prompt to be answered."""

    seed_id: str
    """32 hex digits: the digest of source, messages, tools and the row's own id; the same in every run."""
    messages: tuple[Message, ...]
    """Ends before the assistant speaks. Tool call arguments are JSON text."""
    tools: tuple[dict[str, Any], ...] | None
    domain: str
    source: str
    license: str | None
    difficulty: float | None
    """In [0, 1]; routes to a tier."""
    reference: Any = None
    """What the verifier compares an answer with."""
    verifier: str | None = None
    extra: dict[str, Any] | None = None
    """The other fields of the row."""
    place: str = ""
    """Where it was read, for messages."""


class AnswerState(StrEnum):
    """How asking for an answer ended. Only `ok` can become a row; the others are states, never scores."""

    OK = "ok"
    TRUNCATED = "truncated"
    """Cut at the token limit, whatever the text looks like: ask again with more tokens."""
    REFUSED = "refused"
    """The server said so: a content filter or a `refusal` field. A refusal in words is for the rules to find."""
    EMPTY = "empty"
    """Ended by itself with neither text nor a tool call."""
    MALFORMED = "malformed"
    """No usable chat completion: an error document, too many choices, fields of the wrong type."""
    INFRA_ERROR = "infra_error"
    """Tries used up, or the member down."""
    REJECTED = "rejected"
    """The server will never take it: a prompt too long, say."""
    PENDING = "pending"
    """Not asked yet: a budget or an interrupt stopped the run."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of one member to one seed, as parsed from its raw response."""

    sample_index: int
    """-1 for the reference member's answer."""
    state: AnswerState
    message: Message
    """role, content (never None), and where they exist reasoning_content and tool_calls (arguments as JSON text)."""
    finish_reason: str | None
    member: str
    """Alias of who gave it."""
    body: dict[str, Any]
    """The request body that it answers."""
    request_key: str
    """Its key in the journal."""
    prompt_tokens: int | None
    completion_tokens: int | None
    detail: str = ""
    notes: tuple[str, ...] = ()


VerdictState = Literal["ok", "parse_error", "infra_error", "truncated", "abstain"]


@dataclass(frozen=True, slots=True)
class JudgeVerdict:
    """What one judge said of one answer."""

    judge: str
    """Alias."""
    state: VerdictState
    score: float | None
    """On the panel's scale, in [0, 1] (`pairwise`: share of comparisons won), or the reward; None if not `ok`."""
    detail: str = ""
    request_keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Judged:
    """An answer with all that was said about it."""

    answer: Answer
    verdicts: tuple[JudgeVerdict, ...] = ()
    score: float | None = None
    """Mean over the judges that reached a verdict, if they are a quorum."""
    score_state: Literal["ok", "no_quorum", "not_judged"] = "not_judged"
    verify_state: str | None = None
    """State of the seed's verifier; None without one."""
    reward: float | None = None
    """The verifier's reward in [0, 1]."""
    verifier_version: int | None = None
    votes: int | None = None
    """Answers of the seed that agree with this one, itself included; None where nothing was counted."""
