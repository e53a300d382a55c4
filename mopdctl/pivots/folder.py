"""`pivots/<name>/` of a workspace: what lies where, and that the files in it belong together.

candidates.jsonl  skipped.jsonl  manifest.json     what `extract` found
profiles/<label>/profile.jsonl  profile.json       what one model got at the candidates
selected.jsonl  selection.json                     what `select` kept
"""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mopdctl.errors import InputError
from mopdctl.files import file_digest, read_json, read_jsonl, write_json, write_jsonl
from mopdctl.pivots.candidates import Candidate, read_candidates
from mopdctl.pivots.profiled import Profiled, read_profile
from mopdctl.pivots.wilson import wilson
from mopdctl.runs import Workspace, package_versions

CANDIDATES, SKIPPED, NOTES, MANIFEST = "candidates.jsonl", "skipped.jsonl", "notes.jsonl", "manifest.json"
SELECTED, SELECTION = "selected.jsonl", "selection.json"


def open_set(workspace: Workspace, name: str) -> tuple[Path, dict[str, Any]]:
    """The folder of a set of candidates and its manifest. Raises InputError if `extract` has not made it."""
    folder = workspace.pivots(name)
    if not (folder / MANIFEST).is_file():
        known = sorted(path.parent.name for path in (workspace.root / "pivots").glob(f"*/{MANIFEST}"))
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"make it with `mopdctl pivots extract ... --out {name}`"
        raise InputError(f"{folder}: no candidates there; {hint}")
    manifest = dict(read_json(folder / MANIFEST))
    if file_digest(_present(folder / CANDIDATES)) != manifest["candidates"]["digest"]:
        raise InputError(f"{folder / CANDIDATES}: is not what was extracted; extract into another name")
    return folder, manifest


def load_candidates(folder: Path) -> list[Candidate]:
    """All candidates of a set, in order."""
    return list(read_candidates(folder / CANDIDATES))


def load_profile(folder: Path, label: str | None) -> tuple[dict[str, Any], list[Profiled]]:
    """A finished profile, `profile.json` and its lines: the one of that label, or else the only one there is.

    Raises InputError where there is none or the choice is open, and for one of other candidates.
    """
    known = sorted(path.parent.name for path in (folder / "profiles").glob("*/profile.json"))
    if label is None and len(known) != 1:
        hint = f"choose with --profile ({', '.join(known)})" if known else "make one with `mopdctl pivots profile`"
        raise InputError(f"{folder}: has {len(known) or 'no'} finished profiles; {hint}")
    label = known[0] if label is None else label
    if label not in known:
        raise InputError(f"{folder}: has no finished profile {label!r} (has: {', '.join(known) or 'none'})")
    place = folder / "profiles" / label
    document = dict(read_json(place / "profile.json"))
    if document["config"]["candidates"] != read_json(folder / MANIFEST)["candidates"]["digest"]:
        raise InputError(f"{place}: is a profile of other candidates; profile again")
    if file_digest(_present(place / "profile.jsonl")) != document["digest"]:
        raise InputError(f"{place / 'profile.jsonl'}: is not what was profiled; remove {place} and profile again")
    return document, read_profile(place / "profile.jsonl")


def about_profile(document: dict[str, Any]) -> dict[str, Any]:
    """What a report says of the profile that it stands on."""
    return {key: document[key] for key in ("label", "model", "store", "digest", "config")}


def selected_row(kept: Profiled, fresh: Profiled | None = None) -> dict[str, Any]:
    """A line of `selected.jsonl`: the figures that kept a candidate, with the 95 % Wilson interval of each mean."""
    return {
        "candidate_id": kept.candidate_id,
        "action": kept.action,
        "tool": kept.tool,
        "depth": kept.depth,
        **_figures(kept),
        **({"fresh": _figures(fresh)} if fresh else {}),
    }


def _figures(found: Profiled) -> dict[str, Any]:
    rewards, mean = found.ok_rewards, found.mean
    assert mean is not None
    low, high = wilson(mean, len(rewards))
    return {
        "rollouts": len(rewards),
        "passed": sum(reward == 1 for reward in rewards),
        "mean": mean,
        "mean_low": low,
        "mean_high": high,
        "variance": found.variance,
    }


def write_selection(folder: Path, rows: Sequence[dict[str, Any]], report: dict[str, Any]) -> None:
    """Writes `selected.jsonl` and, last, `selection.json` with its digest."""
    (folder / SELECTION).unlink(missing_ok=True)
    write_jsonl(folder / SELECTED, rows)
    digest = file_digest(folder / SELECTED)
    made = {"schema": "mopdctl.pivot-selection/1", **report, "selected_digest": digest, "versions": package_versions()}
    write_json(folder / SELECTION, made)


def load_selection(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """`selection.json` and the lines of `selected.jsonl`. Raises InputError if `select` has not made them."""
    if not (folder / SELECTION).is_file():
        raise InputError(
            f"{folder}: nothing is selected yet; run `mopdctl pivots select {folder.name} --lambda-diff ...`"
        )
    report = dict(read_json(folder / SELECTION))
    if file_digest(_present(folder / SELECTED)) != report["selected_digest"]:
        raise InputError(f"{folder / SELECTED}: is not what was selected; run `mopdctl pivots select` again")
    if report["candidates_digest"] != read_json(folder / MANIFEST)["candidates"]["digest"]:
        raise InputError(f"{folder / SELECTION}: is a selection of other candidates; run `mopdctl pivots select` again")
    return report, [row for _, row in read_jsonl(folder / SELECTED)]


def _present(path: Path) -> Path:
    if not path.is_file():
        raise InputError(f"{path}: is missing; make it again")
    return path
