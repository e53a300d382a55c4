"""What a reference model got at one candidate: a reward for each rollout, or the state that it ended in."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopdctl.errors import InputError
from mopdctl.files import read_jsonl
from mopdctl.pivots.candidates import Candidate, action_tool

OK = "ok"


@dataclass(frozen=True, slots=True)
class Profiled:
    """One candidate with its K rollouts."""

    candidate_id: str
    action: str
    """`function_call`, `function_call_batch` or `message`."""
    tool: str
    """As `action_tool` says."""
    depth: int
    """Assistant turns before it."""
    rewards: tuple[float | None, ...]
    """[K], in the order of the rollouts; None where one ended in a state."""
    states: dict[str, int]
    """How many rollouts ended in which state, `ok` among them."""

    @property
    def ok_rewards(self) -> list[float]:
        """Of the rollouts that were judged."""
        return [reward for reward in self.rewards if reward is not None]

    @property
    def mean(self) -> float | None:
        """mu(s), over the rollouts that were judged; None if none was."""
        found = self.ok_rewards
        return math.fsum(found) / len(found) if found else None

    @property
    def variance(self) -> float | None:
        """var(s), the mean squared deviation over the rollouts that were judged; exactly 0 where all rewards agree."""
        found, mean = self.ok_rewards, self.mean
        if mean is None:
            return None
        return 0.0 if min(found) == max(found) else math.fsum((r - mean) ** 2 for r in found) / len(found)


def profiled(candidate: Candidate, outcomes: Sequence[tuple[str, float | None]]) -> Profiled:
    """A candidate with the state and the reward of each of its rollouts, in order."""
    return Profiled(
        candidate_id=candidate.candidate_id,
        action=str(candidate.action["type"]),
        tool=action_tool(candidate.action),
        depth=candidate.turn,
        rewards=tuple(reward if state == OK else None for state, reward in outcomes),
        states=dict(sorted(Counter(state for state, _ in outcomes).items())),
    )


def profile_row(found: Profiled) -> dict[str, Any]:
    """A line of `profile.jsonl`."""
    return {
        "candidate_id": found.candidate_id,
        "action": found.action,
        "tool": found.tool,
        "depth": found.depth,
        "rewards": list(found.rewards),
        "states": found.states,
        "mean": found.mean,
        "variance": found.variance,
    }


def read_profile(path: Path) -> list[Profiled]:
    """The lines of a `profile.jsonl`. Raises InputError naming the line for one that is none."""
    found = []
    for line, row in read_jsonl(path):
        try:
            if not all(r is None or (0 <= r <= 1 and not isinstance(r, bool)) for r in row["rewards"]):
                raise ValueError("a reward outside [0, 1]")
            found.append(
                Profiled(
                    candidate_id=str(row["candidate_id"]),
                    action=str(row["action"]),
                    tool=str(row["tool"]),
                    depth=int(row["depth"]),
                    rewards=tuple(row["rewards"]),
                    states=dict(row["states"]),
                )
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}:{line}: not a line of a profile ({error}); profile again") from None
    return found


def counts(values: Iterable[Any]) -> dict[str, int]:
    """How often each value comes, by value."""
    return {str(value): count for value, count in sorted(Counter(values).items())}
