"""What importing and extracting did not take, and why: one record a skip, one a note."""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from mopdctl.pivots.candidates import Candidate, action_tool


class Reason(StrEnum):
    """Why a turn, or a whole trajectory, gives no candidate."""

    # A whole document or trajectory.
    NOT_JSON = "not_json"
    UNKNOWN_FORMAT = "unknown_format"
    UNKNOWN_VERSION = "unknown_version"
    PIVOT_ROW = "pivot_row"
    """The row holds one expected action: it is a pivot already, no trajectory."""
    MALFORMED = "malformed"
    LOW_REWARD = "low_reward"
    NO_TURN = "no_turn"
    """No message is an assistant's."""
    # What the source says of a turn.
    COPIED_CONTEXT = "copied_context"
    ERRORED = "errored"
    UNFINISHED = "unfinished"
    """Cut at a limit, or neither text nor a call."""
    REFUSAL = "refusal"
    NOT_A_MODEL_CALL = "not_a_model_call"
    SEVERAL_MODEL_CALLS = "several_model_calls"
    AFTER_COMPACTION = "after_compaction"
    """The model saw a summary in place of what the trajectory holds."""
    UNSUPPORTED_ITEM = "unsupported_item"
    """The state holds something that chat messages cannot."""
    INCOMPLETE_STATE = "incomplete_state"
    """The request goes on from something that the row does not hold."""
    # What the state before a turn shows.
    NO_PROMPT = "no_prompt"
    SPLIT_MODEL_CALL = "split_model_call"
    """Assistant messages in a row, with nothing new between them: parts of one model call, or of none."""
    INCOMPLETE_CALLS = "incomplete_calls"
    """An earlier call has no result, or a result no call."""
    LEAK = "leak"
    # What the action itself shows.
    NOT_TEXT = "not_text"
    INLINE_TOOL_CALL = "inline_tool_call"
    INLINE_REASONING = "inline_reasoning"
    """The text holds a tag of reasoning, so that whoever says it is read as saying less."""
    INVALID_ARGUMENTS = "invalid_arguments"
    UNKNOWN_TOOL = "unknown_tool"
    DUPLICATE = "duplicate"


@dataclass(frozen=True, slots=True)
class Skip:
    """A turn that gives no candidate; with `turn` None a whole trajectory whose turns are unknown."""

    trajectory_id: str
    turn: int | None
    reason: Reason
    place: str
    """`file:line` or `file#index`."""
    detail: str = ""
    """For a human."""
    action: str = ""
    """Type of the action, where it was known."""
    tool: str = ""
    """As `candidates.action_tool` says it, where it was known."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something unusual that was read all the same: a field nobody knows, a result without a call, ids that repeat."""

    trajectory_id: str
    kind: str
    place: str
    detail: str


class UnusableError(ValueError):
    """Raised where a document cannot become a trajectory."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(slots=True)
class Tally:
    """Counts of candidates and skips as they come: `turns` is always candidates plus skipped turns."""

    candidates: int = 0
    unread_trajectories: Counter[str] = field(default_factory=Counter)
    """Whole trajectories without known turns, by reason."""
    skipped: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    tools: Counter[str] = field(default_factory=Counter)
    depths: Counter[int] = field(default_factory=Counter)
    leaks: dict[str, Counter[str]] = field(default_factory=dict)
    """Of the turns skipped as a leak, counts by kind of leak, action type, tool and depth."""

    @property
    def turns(self) -> int:
        """Assistant turns seen."""
        return self.candidates + self.skipped.total()

    def add(self, found: Candidate | Skip) -> None:
        """Counts one."""
        if isinstance(found, Candidate):
            self.candidates += 1
            self.actions[str(found.action["type"])] += 1
            self.tools[action_tool(found.action)] += 1
            self.depths[found.turn] += 1
        elif found.turn is None:
            self.unread_trajectories[found.reason] += 1
        else:
            self.skipped[found.reason] += 1
            if found.reason is Reason.LEAK:
                named = {"kind": found.detail, "action": found.action, "tool": found.tool, "depth": str(found.turn)}
                for key, value in named.items():
                    self.leaks.setdefault(key, Counter())[value] += 1

    def document(self) -> dict[str, Any]:
        """All counts as JSON values, keys sorted."""
        counters: dict[str, Counter[Any]] = {
            "action": self.actions,
            "tool": self.tools,
            "depth": self.depths,
            "skip_reason": self.skipped,
            "unread_trajectories": self.unread_trajectories,
        }
        by: dict[str, Any] = {name: _sorted(counter) for name, counter in counters.items()}
        by["leak"] = {name: _sorted(counter) for name, counter in self.leaks.items()}
        return {"turns": self.turns, "candidates": self.candidates, "skipped": self.skipped.total(), "by": by}


def _sorted(counter: Counter[Any]) -> dict[str, int]:
    return {str(key): counter[key] for key in sorted(counter)}
