"""The domains of the tiny world. Each module has `make(values) -> Example`."""

from collections.abc import Callable

from mopdctl.world.domains import arithmetic, instructions, lookup, structured, tools
from mopdctl.world.examples import Example, Values

DOMAINS: dict[str, Callable[[Values], Example]] = {
    "arithmetic": arithmetic.make,
    "instructions": instructions.make,
    "structured": structured.make,
    "tools": tools.make,
    "lookup": lookup.make,
}
SPECIALIST_DOMAINS = ("arithmetic", "instructions", "structured", "tools")
SELF_DOMAIN = "lookup"
