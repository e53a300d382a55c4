"""`committee.yaml`: who answers, who judges, at what price and under which licence, and which domain goes to whom."""

import json
import math
import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from mopdctl.config.base import Strict
from mopdctl.config.server import KeyName, ServerUrl

_RESERVED = {"model", "messages", "tools", "stream", "seed", "n", "temperature", "top_p", "max_tokens", "stop"}


class Sampling(Strict):
    """Sampling parameters. What is not given is not sent, and the server's own default holds."""

    temperature: float | None = Field(default=None, ge=0)
    """0 is sent as 0: the likeliest token each time."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling; data is generated, not trained on policy, so it may be below 1 here."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Longest answer in tokens, reasoning included."""
    stop: list[str] = []
    """Texts that end an answer."""
    extra: dict[str, Any] = {}
    """More keys of the request body, sent as they are, e.g. `{reasoning_effort: medium, top_k: 20}`."""

    @field_validator("extra")
    @classmethod
    def _not_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(_RESERVED & value.keys()):
            raise ValueError(f"{taken[0]!r} has a field of its own or is set by mopdctl")
        for key in value:
            if re.fullmatch(r"(?i).*(api[-_]?key|authorization|password|secret)|(access|auth|bearer)?[-_]?token", key):
                raise ValueError(f"{key!r} looks like a secret, and these settings stand in every row; use api_key_env")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError("holds something that JSON cannot say: a date, NaN or infinity") from None
        return value

    def over(self, other: "Sampling") -> "Sampling":
        """These settings, and `other`'s where these say nothing."""
        given = {k: v for k, v in self if v is not None and v != [] and v != {}}
        return other.model_copy(update=given | {"extra": {**other.extra, **self.extra}})

    def body(self) -> dict[str, Any]:
        """The keys of an OpenAI request body."""
        named = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens}
        found: dict[str, Any] = {key: value for key, value in named.items() if value is not None}
        return found | ({"stop": self.stop} if self.stop else {}) | self.extra


class Price(Strict):
    """What tokens cost."""

    input_per_million: float = Field(ge=0)
    """USD per million prompt tokens."""
    output_per_million: float = Field(ge=0)
    """USD per million answer tokens, reasoning included."""

    def cost_usd(self, prompt_tokens: int, completion_tokens: int) -> float:
        """USD of one answer."""
        return (prompt_tokens * self.input_per_million + completion_tokens * self.output_per_million) / 1e6


class Member(Strict):
    """One model that answers or judges."""

    engine: Literal["openai", "hf", "fake"]
    """`openai`: any OpenAI-compatible server (vLLM above all). `hf`: transformers in this process. `fake`: no model."""
    model: str
    """The model's name at the server; for `hf` a name in the workspace, a folder or a hub id."""
    base_url: ServerUrl | None = None
    """Where the server is, up to `/v1`, e.g. `http://127.0.0.1:8000/v1`. For `openai` only. It is part of every
    request's key: at another address everything is asked for again."""
    api_key_env: KeyName | None = None
    """Name of the environment variable that holds the API key. A key itself never stands in a file."""
    revision: str | None = None
    """Commit or date of the weights behind the name, for the record."""
    sampling: Sampling = Sampling()
    """Defaults of this member; a route's own go over them."""
    price: Price | None = None
    """None is unknown, not free: a budget in money then cannot be kept."""
    license: str | None = None
    """Licence of the model's outputs as an SPDX id or a name; None is unknown."""
    outputs_may_train: bool | None = None
    """Whether the terms allow training other models on the outputs; None is unknown."""
    takes_seed: bool = True
    """Whether the server knows the field `seed`. Without it samples of a prompt differ by the server's chance alone."""
    max_concurrency: int = Field(default=64, gt=0)
    """Most requests under way at once; fewer after a 429."""
    requests_per_minute: int | None = Field(default=None, gt=0)
    """Rate limit; None trusts to the server's 429."""
    tokens_per_minute: int | None = Field(default=None, gt=0)
    """Rate limit over prompt and answer tokens."""
    timeout_s: float = Field(default=600, gt=0)
    """Seconds until an answer is given up."""
    max_attempts: int = Field(default=6, gt=0)
    """Tries of one request that end in an error; a 429 is none, it only delays."""

    @model_validator(mode="after")
    def _fits_engine(self) -> "Member":
        if self.engine == "openai" and self.base_url is None:
            raise ValueError("engine openai needs base_url")
        if self.engine != "openai" and (self.base_url or self.api_key_env):
            raise ValueError(f"engine {self.engine} has no server: drop base_url and api_key_env")
        sampling = self.sampling
        if self.engine == "hf" and (sampling.top_p not in (None, 1.0) or sampling.stop or sampling.extra):
            raise ValueError("engine hf knows temperature and max_tokens only; drop top_p, stop and extra")
        return self


class Tier(Strict):
    """Members for seeds from some difficulty on."""

    members: dict[str, float] = Field(min_length=1)
    """Alias to weight: each seed and sample goes to one of them, in these shares."""
    min_difficulty: float = Field(default=0.0, ge=0, le=1)
    """Seeds of at least this difficulty, and below the next tier's; a seed without one counts as 0."""


class Route(Strict):
    """Who answers the seeds of a domain, and how."""

    members: dict[str, float] = {}
    """Alias to weight. Short for one tier."""
    tiers: dict[str, Tier] = {}
    """Tiers by name, e.g. `middle` for the bulk and `frontier` from difficulty 0.8."""
    fallbacks: list[str] = []
    """Aliases that answer, in this order, where the chosen member failed."""
    reference: str | None = None
    """A member (the student, say) that answers each seed once for comparison; its answers are never rows."""
    system_prompt: str | None = None
    """Put before the seed's messages when generating, unless they begin with a system message. Not part of the row."""
    row_system_prompt: str | None = None
    """System message of the training row where the seed has none."""
    sampling: Sampling = Sampling()
    """Over the members' own."""
    samples: int | None = Field(default=None, gt=0)
    """Answers per seed; None takes the run's."""
    loss_on: Literal["assistant", "last_assistant"] = "assistant"
    """Written to the rows for the trainer: every assistant turn, or the last one alone (as Nemotron's chat data)."""
    note: str = ""
    """For people: how this domain's answers are selected, where the route comes from."""

    @field_validator("members")
    @classmethod
    def _weights(cls, value: dict[str, float]) -> dict[str, float]:
        return _positive(value)

    @model_validator(mode="after")
    def _one_or_the_other(self) -> "Route":
        if bool(self.members) == bool(self.tiers):
            raise ValueError("give either members or tiers")
        starts = [tier.min_difficulty for tier in self.tiers.values()]
        if len(set(starts)) != len(starts):
            raise ValueError("two tiers begin at the same min_difficulty")
        if starts and min(starts) > 0:
            raise ValueError("one tier must begin at min_difficulty 0, or easy seeds have nobody")
        for tier in self.tiers.values():
            _positive(tier.members)
        return self

    def tier(self, difficulty: float | None) -> tuple[str, dict[str, float]]:
        """Name and members of the tier that a seed of this difficulty belongs to."""
        if self.members:
            return "", self.members
        reached = [(t.min_difficulty, name) for name, t in self.tiers.items() if t.min_difficulty <= (difficulty or 0)]
        name = max(reached)[1]
        return name, self.tiers[name].members

    @property
    def answering(self) -> set[str]:
        """Every member whose answers can become rows."""
        return {a for tier in self.tiers.values() for a in tier.members} | self.members.keys() | set(self.fallbacks)

    @property
    def aliases(self) -> set[str]:
        """Every member that this route can lead to."""
        return self.answering | ({self.reference} if self.reference else set())


def _positive(weights: dict[str, float]) -> dict[str, float]:
    for alias, weight in weights.items():
        if not 0 < weight < math.inf:
            raise ValueError(f"weight of {alias!r} must be above 0")
    return weights


class CommitteeFile(Strict):
    """The members, and the route of each domain."""

    members: dict[str, Member] = Field(min_length=1)
    """Alias to member."""
    routes: dict[str, Route] = Field(min_length=1)
    """Domain to route; `default` takes the domains that have none."""

    @model_validator(mode="after")
    def _known_aliases(self) -> "CommitteeFile":
        for domain, route in self.routes.items():
            if unknown := sorted(route.aliases - self.members.keys()):
                raise ValueError(f"route {domain!r} names {unknown[0]!r}, which is no member")
            if route.reference and route.reference in route.answering:
                raise ValueError(f"route {domain!r}: the reference {route.reference!r} must not also answer")
            if any(self.members[a].engine == "hf" for a in route.aliases) and _beyond_hf(route.sampling):
                raise ValueError(f"route {domain!r}: a member of engine hf knows temperature and max_tokens only")
        return self

    def route(self, domain: str) -> Route | None:
        """The route of a domain; None if it has none."""
        return self.routes.get(domain) or self.routes.get("default")


def _beyond_hf(sampling: Sampling) -> bool:
    return sampling.top_p not in (None, 1.0) or bool(sampling.stop) or bool(sampling.extra)
