"""What `mopdctl overlap` had said of a student before it was distilled, beside what became of it."""

from collections.abc import Collection
from typing import Any

from mopdctl.files import read_json
from mopdctl.runs import Workspace, read_card


def foresight(workspace: Workspace, before: str, teachers: Collection[str]) -> dict[str, dict[str, Any]]:
    """Teacher to the student's pass@1, pass@k and k, and the advice, from the newest report on the checkpoint `before`.

    A report is on that checkpoint if it names its digest. A teacher of whom no report says anything is absent, and so
    are all if `before` is no checkpoint of the workspace.
    """
    digest = read_card(workspace.checkpoint(before)).get("digest")
    found: dict[str, dict[str, Any]] = {}
    if digest is None:
        return found
    reports = sorted((workspace.root / "runs" / "overlap").glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in reports:
        report = read_json(path)
        if report.get("student", {}).get("digest") != digest:
            continue
        for alias, one in report["teachers"].items():
            if alias in teachers:
                student = one["student"]
                found[alias] = {
                    "pass_at_1": _mean(student["pass_at_1"]),
                    "pass_at_k": _mean(student["pass_at_k"]),
                    "k": student["k"],
                    "advice": one["advice"]["choice"],
                    "report": path.stem,
                }
    return dict(sorted(found.items()))


def _mean(figure: Any) -> float | None:
    return None if figure is None else float(figure["mean"])


def lines(seen: dict[str, dict[str, Any]], before: str) -> list[str]:
    """One line for each teacher."""
    return [
        f"{before} before training, {alias}: pass@1 {_percent(one['pass_at_1'])}, pass@{one['k']} "
        f"{_percent(one['pass_at_k'])}, advice {one['advice']}"
        for alias, one in seen.items()
    ]


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.0f} %"
