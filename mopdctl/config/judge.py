"""`judge` in an environment of `rl.yaml`: a model that compares the answers of a group, and what its word counts."""

from pydantic import Field, field_validator

from mopdctl.config.base import Strict
from mopdctl.config.committee import Sampling
from mopdctl.config.server import KeyName, ServerUrl


class JudgeReward(Strict):
    """A generative judge at an OpenAI-compatible server. It sees two answers at a time, each pair in both orders."""

    base_url: ServerUrl
    """Where the server is, up to `/v1`, e.g. `http://127.0.0.1:8000/v1`."""
    model: str
    """The model's name at the server."""
    api_key_env: KeyName | None = None
    """Name of the environment variable that holds the API key. A key itself never stands in a file."""
    revision: str | None = None
    """Commit or date of the weights behind the name, for the record."""
    sampling: Sampling = Sampling(temperature=0.6, top_p=0.95, max_tokens=4096)
    """How the judge answers. The defaults are those of Ultra's judge; whoever gives some gives all."""
    takes_seed: bool = True
    """Whether the server knows the field `seed`. Without it the rounds differ by the server's chance alone."""
    max_concurrency: int = Field(default=64, gt=0)
    """Most requests under way at once; fewer after a 429."""
    timeout_s: float = Field(default=600, gt=0)
    """Seconds until an answer is given up."""
    max_attempts: int = Field(default=6, gt=0)
    """Tries of one request that end in an error; a 429 is none, it only delays."""
    rounds: int = Field(default=1, gt=0)
    """Rounds of comparisons. In each, every answer meets two others, or one where the group halves into pairs; each
    round pairs anew until all pairs have met, and then asks about them once more."""
    principles: list[str] = []
    """What to judge by, one sentence each; none leaves it to the judge what a good answer is."""
    scale: tuple[int, int] = (1, 5)
    """The worst and the best score that the judge may give."""
    weight: float = Field(default=1.0, gt=0)
    """An answer earns (verifier_weight * verifier + weight * judge) / (verifier_weight + weight)."""
    verifier_weight: float = Field(default=1.0, ge=0)
    """Weight of the verifier's reward. 0 leaves verifiers out: prompts then need none."""

    @field_validator("principles")
    @classmethod
    def _say_something(cls, value: list[str]) -> list[str]:
        if not all(text.strip() for text in value):
            raise ValueError("holds an empty text")
        return value

    @field_validator("scale")
    @classmethod
    def _ascending(cls, value: tuple[int, int]) -> tuple[int, int]:
        if value[0] >= value[1]:
            raise ValueError("must be the worst score, then the best, e.g. [1, 5]")
        return value
