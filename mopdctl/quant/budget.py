"""Mixed precision under a budget of bits: which groups of weights are worth more of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from mopdctl.config.quant import Precision, PrecisionRule, QuantConfig
from mopdctl.errors import InputError
from mopdctl.quant.plan import Plan
from mopdctl.quant.sensitivity import Costs
from mopdctl.quant.targets import experts_of, matching

BITS: dict[Precision, float] = {"mxfp4": 4.25, "nvfp4": 4.5, "fp8": 8.0, "bf16": 16.0}
"""Of an element with its share of the block scales."""


@dataclass(frozen=True, slots=True)
class Group:
    """Modules that take one precision: those that an engine fuses, or all experts of a layer."""

    modules: tuple[str, ...]
    elements: int
    candidates: tuple[Precision, ...]
    """One alone where a rule has decided."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """A precision for each group."""

    precisions: dict[str, Precision]
    bits_per_element: float
    cost_nats: float
    """Sum of the groups' costs: an estimate of KL(full || quantized) per token."""
    gap_nats: float
    """No choice within the budget costs less than `cost_nats - gap_nats`."""


def decision_groups(plan: Plan, config: QuantConfig) -> dict[str, Group]:
    """All that is quantized, in groups by name: the first of their modules, or that of a layer's experts.

    Candidates are `config.format`, `fp8` and `bf16`, unless a rule of the configuration matches a module of the group.
    Experts are no candidates for `fp8` beside inputs in 16 bits, for which vLLM has no kernel.
    """
    decided = {name for rule in config.rules for name in matching(rule.match, [*plan.modules, *plan.absent])}
    members: dict[str, list[str]] = {}
    for name, module in plan.quantized.items():
        members.setdefault(experts_of(name) or module.group[0], []).append(name)
    groups: dict[str, Group] = {}
    for group, names in members.items():
        candidates: tuple[Precision, ...] = (plan.modules[names[0]].precision,)
        if not decided.intersection(names):
            candidates = ("fp8", "bf16") if config.format == "fp8" else (config.format, "fp8", "bf16")
            if experts_of(names[0]) and config.act == "none" and config.format != "fp8":
                candidates = (config.format, "bf16")
        elements = sum(plan.modules[name].shape[0] * plan.modules[name].shape[1] for name in names)
        groups[group] = Group(tuple(names), elements, candidates)
    return groups


def allocate(costs: Costs, elements: Mapping[str, int], bits: float) -> Allocation:
    """The precisions of least total cost with at most `bits` per element.

        minimise sum_g cost_g(precision_g)    subject to    sum_g elements_g bits(precision_g) <= bits sum_g elements_g

    Every group begins with its fewest bits. Steps to more of them, along the lower convex hull of each group's (bits,
    cost), are then taken in order of the cost that a bit saves; one that no longer fits is passed over, with all later
    ones of its group. Up to the first that does not fit this is the optimum of the problem in which precisions may be
    mixed within a group, so that no allocation costs less than it does with a part of that step: the gap is stated.
    More bits never cost more: what the first step that newly fits saves is at least what all that it displaces does.

    Args:
        costs: by group and precision, in nats a token; a group of one precision is fixed.
        elements: by group.
        bits: per element, over all groups.

    Raises:
        InputError: the fewest bits are too many.
    """
    total = sum(elements.values())
    room = bits * total
    hulls = {group: _hull(found, elements[group]) for group, found in costs.items()}
    chosen = {group: hull[0][2] for group, hull in hulls.items()}
    room -= sum(hull[0][0] for hull in hulls.values())
    cost = sum(hull[0][1] for hull in hulls.values())
    if room < -1e-9 * total:
        least = bits - room / total
        raise InputError(f"bits {bits:g}: at least {least:.2f} are needed here; raise it, or quantize more to 4 bits")
    steps = [
        ((before[1] - after[1]) / (after[0] - before[0]), group, before, after)
        for group, hull in hulls.items()
        for before, after in pairwise(hull)
    ]
    bound: float | None = None
    full: set[str] = set()
    for saving, group, before, after in sorted(steps, key=lambda step: -step[0]):
        size = after[0] - before[0]
        if group in full or size > room + 1e-9 * total:
            bound = cost - saving * room if bound is None else bound
            full.add(group)
            continue
        room -= size
        cost -= before[1] - after[1]
        chosen[group] = after[2]
    used = sum(elements[group] * BITS[precision] for group, precision in chosen.items())
    cost = sum(costs[group][precision] for group, precision in chosen.items())
    return Allocation(chosen, used / total, cost, 0.0 if bound is None else max(0.0, cost - bound))


_Point = tuple[float, float, Precision]
"""Bits of the whole group, cost, precision."""


def _hull(costs: Mapping[Precision, float], elements: int) -> list[_Point]:
    """The lower convex hull of a group's points, from the fewest bits on, as far as cost falls."""
    hull: list[_Point] = []
    for precision in sorted(costs, key=lambda p: BITS[p]):
        point = (elements * BITS[precision], costs[precision], precision)
        if hull and point[1] >= hull[-1][1]:
            continue
        while len(hull) > 1 and _slope(hull[-2], point) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    return hull


def _slope(before: _Point, after: _Point) -> float:
    return (after[1] - before[1]) / (after[0] - before[0])


def precision_rules(allocation: Allocation, groups: Mapping[str, Group], default: Precision) -> list[PrecisionRule]:
    """The rules of a recipe that say an allocation, for modules that are not of the default precision already."""
    rules = []
    for name, group in groups.items():
        precision = allocation.precisions[name]
        if len(group.candidates) > 1 and precision != default:
            experts = experts_of(group.modules[0])
            for match in [f"{experts}.*"] if experts else group.modules:
                rules.append(PrecisionRule(match=match, precision=precision))
    return rules
