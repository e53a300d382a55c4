"""What a build did, in figures, and where it puts what is not in the data set."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from mopdctl.gensft.rows import compact


@dataclass(slots=True)
class Stage:
    """Rows in, rows out, and why the others did not come out."""

    name: str
    entered: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def left(self) -> int:
        """Rows that came out."""
        return self.entered - self.dropped.total()

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {"stage": self.name, "in": self.entered, "out": self.left, "dropped": dict(sorted(self.dropped.items()))}


@dataclass(slots=True)
class Tally:
    """Requests and tokens of one member, as far as they are in the data set's making."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    uncounted: int = 0
    """Responses whose tokens the server did not count."""
    cost_usd: float | None = 0.0
    """None if the price or a count is unknown."""


@dataclass(slots=True)
class Report:
    """What a build did."""

    stages: list[Stage]
    members: dict[str, Tally] = field(default_factory=dict)
    judges: list[dict[str, Any]] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    """What was unusual in raw responses, by name."""
    shapes: Counter[str] = field(default_factory=Counter)
    """Role sequences of the rows, e.g. `UA`."""
    domains: Counter[str] = field(default_factory=Counter)
    licenses: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(licence of the seed, licence of the member) of the rows."""
    splits: dict[str, int] = field(default_factory=dict)
    decontamination: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    complete: bool = True
    """Whether no answer is pending or failed for want of a server."""


class Quarantine:
    """One JSONL file for each reason why something is not in the data set."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, BinaryIO] = {}

    def add(self, name: str, entry: Mapping[str, Any]) -> None:
        """Appends to `<name>.jsonl`."""
        if name not in self._files:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._files[name] = (self._folder / f"{name}.jsonl").open("wb")
        self._files[name].write(compact(entry).encode("utf-8", "backslashreplace") + b"\n")

    def close(self) -> None:
        """Closes all files."""
        for file in self._files.values():
            file.close()
