"""How far the judges of a panel can be trusted: what they said, how often, and how well they agree."""

from collections import Counter, defaultdict
from itertools import combinations
from typing import Any, get_args

from mopdctl.gensft.judge import Verdicts
from mopdctl.gensft.records import VerdictState

WARN_SHARE = 0.2
"""Share of a judge's verdicts without a score from which the report warns."""


class JudgeReport:
    """Counts what the judges of one panel did, so that a weak judge shows as more than missing rows.

    One report per panel: scores of two panels need not be on one scale.
    """

    def __init__(self) -> None:
        self._states: dict[str, Counter[str]] = defaultdict(Counter)
        self._score_sums: dict[str, float] = defaultdict(float)
        self._orders: dict[str, Counter[bool]] = defaultdict(Counter)
        self._between: dict[tuple[str, str], Counter[bool]] = defaultdict(Counter)

    def add(self, verdicts: Verdicts) -> None:
        """Counts the verdicts on one seed's answers."""
        for said in verdicts.of.values():
            for verdict in said:
                self._states[verdict.judge][verdict.state] += 1
                self._score_sums[verdict.judge] += verdict.score or 0
            scored = [verdict for verdict in said if verdict.state == "ok"]
            for one, other in combinations(scored, 2):
                self._between[one.judge, other.judge][one.score == other.score] += 1
        for comparison in verdicts.comparisons:
            if comparison.agree is not None:
                self._orders[comparison.judge][comparison.agree] += 1

    def document(self) -> dict[str, Any]:
        """The counts as JSON. A share or mean is null where the count that it is taken over is 0."""
        every = sum(self._states.values(), Counter[str]())
        return {
            "verdicts": every.total(),
            "drop_rate": _share(every.total() - every["ok"], every.total()),
            "judges": {judge: self._judge(judge) for judge in self._states},
            "same_score": [{"judges": list(pair), **_agreement(counts)} for pair, counts in self._between.items()],
        }

    def _judge(self, judge: str) -> dict[str, Any]:
        states = self._states[judge]
        return {
            "verdicts": states.total(),
            "states": {state: states[state] for state in get_args(VerdictState)},
            "drop_rate": _share(states.total() - states["ok"], states.total()),
            "mean_score": self._score_sums[judge] / states["ok"] if states["ok"] else None,
            "order_swap": _agreement(self._orders[judge]) if judge in self._orders else None,
        }

    def warnings(self) -> list[str]:
        """One line for each judge of whose verdicts more than `WARN_SHARE` have no score."""
        lines = []
        for judge, states in self._states.items():
            lost = states.total() - states["ok"]
            if lost > WARN_SHARE * states.total():
                why = ", ".join(f"{count} {state}" for state, count in states.most_common() if state != "ok")
                lines.append(
                    f"judge {judge!r}: {lost} of {states.total()} verdicts have no score ({why}); "
                    "read some of its replies before trusting this panel"
                )
        return lines


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _agreement(counts: Counter[bool]) -> dict[str, Any]:
    return {"compared": counts.total(), "agreed": counts[True], "agreement": _share(counts[True], counts.total())}
