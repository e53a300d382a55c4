"""The domains of the tiny world. Each module has `make(values) -> Example` and wrong answers that are nearly right."""

from collections.abc import Callable

from mopdctl.world.domains import arithmetic, errands, instructions, lookup, structured, tools
from mopdctl.world.examples import Example, Values

DOMAINS: dict[str, Callable[[Values], Example]] = {
    "arithmetic": arithmetic.make,
    "instructions": instructions.make,
    "structured": structured.make,
    "tools": tools.make,
    "lookup": lookup.make,
    "errands": errands.make,
}
NEAR_MISSES: dict[str, Callable[[Example], list[str]]] = {
    "arithmetic": arithmetic.near_misses,
    "instructions": instructions.near_misses,
    "structured": structured.near_misses,
    "tools": tools.near_misses,
    "lookup": lookup.near_misses,
}
"""Wrong answers to an example with a single answer, made by a rule: what its check must refuse."""
CARELESS: dict[str, tuple[Callable[[Example], Example], float]] = {
    "lookup": (lookup.careless, 0.5),
    "errands": (errands.careless, 0.7),
}
"""Domains whose hard examples the SFT mixture answers carelessly: how, and in what share of them."""
SPECIALIST_DOMAINS = ("arithmetic", "instructions", "structured", "tools")
SELF_DOMAIN = "lookup"
AGENT_DOMAIN = "errands"
"""The one domain of several turns, each answered by a tool."""
