"""What a tool environment is."""

from dataclasses import dataclass
from typing import Any, Protocol


class SetupError(ValueError):
    """Raised by `start` for a setup that cannot be used: the document is at fault."""


class ToolError(ValueError):
    """Raised by `call` for a call that fails. Its text is what the model gets to read; the state is as before."""


class Environment(Protocol):
    """A deterministic world that tools act on.

    The same setup and the same calls give the same results and the same state, on any machine. Calls never see time,
    randomness or a network.
    """

    name: str
    version: int
    tools: tuple[dict[str, Any], ...]
    """OpenAI function schemas."""

    def start(self, setup: Any) -> Any:
        """A fresh state. Raises SetupError naming what is wrong with `setup` (JSON values)."""
        ...

    def call(self, state: Any, name: str, arguments: dict[str, Any]) -> str:
        """Runs one tool on the state, which it changes; returns the result as text. Raises ToolError."""
        ...

    def snapshot(self, state: Any) -> Any:
        """The state as JSON values in one spelling, to be compared with that of another run."""
        ...


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a model made."""

    name: str
    arguments: dict[str, Any]
