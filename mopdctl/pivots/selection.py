"""`mopdctl pivots select`: reads a profile, keeps the pivots, writes them with a report of what became of the rest."""

from typing import Any

from mopdctl.errors import InputError
from mopdctl.pivots import folder as folders
from mopdctl.pivots.select import Rule, report, select
from mopdctl.runs import Workspace, locked


def run_select(
    name: str,
    workspace: Workspace,
    *,
    lambda_diff: float,
    profile: str | None = None,
    fresh: str | None = None,
    min_ok: int | None = None,
    per_tool: int | None = None,
    per_depth: int | None = None,
    maximum: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Writes `selected.jsonl` and, last, `selection.json`, which it returns.

    `profile` and `fresh` are labels of profiles (None: the only one; no newer one). `min_ok` None asks for half of the
    profile's rollouts. See `Rule` for the rest.
    """
    if not 0 < lambda_diff <= 1:
        raise InputError(f"--lambda-diff {lambda_diff}: a mean reward, above 0 and at most 1")
    place, manifest = folders.open_set(workspace, name)
    about, found = folders.load_profile(place, profile)
    newer_about, newer = folders.load_profile(place, fresh) if fresh else (None, [])
    by_id = {p.candidate_id: p for p in newer} if fresh else None
    rule = Rule(lambda_diff, min_ok or -(-about["config"]["rollouts"] // 2), per_tool, per_depth, maximum, seed)
    selection = select(found, rule, fresh=by_id)
    document: dict[str, Any] = {
        "set": name,
        "candidates": manifest["candidates"]["count"],
        "not_profiled": manifest["candidates"]["count"] - len(found),
        **report(found, rule, selection, fresh=by_id),
        "profile": folders.about_profile(about),
        "fresh": folders.about_profile(newer_about) if newer_about else None,
        "candidates_digest": manifest["candidates"]["digest"],
    }
    rows = [folders.selected_row(p, by_id[p.candidate_id] if by_id else None) for p in selection.kept]
    with locked(place):
        folders.write_selection(place, rows, document)
    return document
