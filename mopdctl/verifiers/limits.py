"""What one check may use before it is stopped."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one check, or of one program in the sandbox. Raises ValueError for one that is not positive."""

    seconds: float = 30.0
    """Wall clock, counted from the moment the work begins, not while it waits for its turn."""
    memory_mb: int = 2048
    """Resident memory of all its processes together, in MiB."""
    output_bytes: int = 1 << 20
    """Each of its outputs."""
    processes: int = 64
    """Alive at the same time."""

    def __post_init__(self) -> None:
        for name in ("seconds", "memory_mb", "output_bytes", "processes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; a limit has to be positive")


class LimitError(Exception):
    """Raised by a check whose response ran past a limit, e.g. `time: stopped after 5 s`. Becomes a `timeout`."""


def passed_limit(which: str, limits: Limits) -> str:
    """What to tell of a limit that was passed: `time`, `memory`, `processes` or `output`."""
    allowed = {
        "time": f"{limits.seconds:g} s",
        "memory": f"{limits.memory_mb} MiB",
        "processes": f"{limits.processes} processes",
        "output": f"{limits.output_bytes} bytes",
    }
    return f"{which}: stopped at {allowed[which]}"
