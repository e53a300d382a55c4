"""`mopdctl pivots extract`: trajectories of experts into a set of candidates."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO

from mopdctl.errors import InputError
from mopdctl.files import file_digest, fingerprint, read_json, write_json, writing
from mopdctl.pivots.audit import Note, Skip, Tally
from mopdctl.pivots.candidates import Candidate, write_candidates
from mopdctl.pivots.extract import extract_files
from mopdctl.pivots.folder import CANDIDATES, MANIFEST, NOTES, SKIPPED
from mopdctl.runs import Workspace, locked, package_versions
from mopdctl.verifiers.base import InvalidReferenceError
from mopdctl.verifiers.matching import read_match
from mopdctl.verifiers.nemo_gym import comparator


def collect(
    paths: Sequence[Path],
    workspace: Workspace,
    name: str,
    *,
    format: str | None = None,
    domain: str | None = None,
    match: dict[str, Any] | None = None,
    compat: str | None = None,
    on_progress: Callable[[int], None] = lambda turns: None,
) -> dict[str, Any]:
    """Writes candidates, skipped turns and documents, notes on what was unusual and, last, `manifest.json`.

    Returns the manifest; the one that is there already if the same files made it. `domain` is that of trajectories
    which name none. `match` and `compat` become part of every action: how the verifier `action` compares with it, by
    our rules or by those of another project (`nemo-gym`, `nemo-gym-swe`), which then also say what `match` may hold.

    Raises InputError if other files have the name, if there is not one candidate, or for an unknown option in `match`.
    """
    for path in paths:
        if not path.is_file():
            raise InputError(f"{path}: {'is a folder; name its files' if path.is_dir() else 'no such file'}")
    try:
        if compat is None:
            read_match(match, content=True)
        else:
            comparator(compat, match, [{"name": "any", "arguments": {}}])
    except (InvalidReferenceError, TypeError) as error:
        raise InputError(f"--match: {error}") from None
    inputs = [{"path": str(path), "digest": file_digest(path)} for path in paths]
    config = {"inputs": [entry["digest"] for entry in inputs], "format": format, "domain": domain, "match": match}
    config |= {"compat": compat} if compat else {}
    try:
        identity = fingerprint(config)
        fingerprint([entry["path"] for entry in inputs])  # no part of it, but written too
    except ValueError:
        raise InputError("a path, --domain or --match holds what JSON cannot: half a character or NaN") from None
    folder = workspace.pivots(name)
    with locked(folder):
        if (folder / MANIFEST).is_file():
            before = dict(read_json(folder / MANIFEST))
            if before["fingerprint"] != identity:
                raise InputError(f"{folder}: other trajectories or options have this name; use another name")
            return before
        tally, kinds, trajectories = Tally(), Counter[str](), set[str]()
        with writing(folder / SKIPPED) as skipped, writing(folder / NOTES) as notes:

            def note(found: Note) -> None:
                kinds[found.kind] += 1
                _append(notes, found)

            def candidates() -> Iterator[Candidate]:
                for found in extract_files(paths, format=format, note=note):
                    tally.add(found)
                    on_progress(tally.turns)
                    if isinstance(found, Skip):
                        _append(skipped, found)
                    else:
                        trajectories.add(found.trajectory_id)
                        action = found.action | ({"match": match} if match else {})
                        action |= {"compat": compat} if compat else {}
                        yield replace(found, domain=found.domain or domain or "", action=action)
                if not tally.candidates:
                    raise InputError(f"{paths[0]}: holds no candidate ({_why(tally)}); name the right file or --format")

            write_candidates(folder / CANDIDATES, candidates())
        counts = tally.document()
        manifest = {
            "schema": "mopdctl.pivots/1",
            "inputs": inputs,
            "format": format,
            "domain": domain,
            "match": match,
            "compat": compat,
            "fingerprint": identity,
            "trajectories": len(trajectories),
            "turns": counts["turns"],
            "candidates": {"count": counts["candidates"], "digest": file_digest(folder / CANDIDATES)},
            "skipped": {"count": counts["skipped"], "digest": file_digest(folder / SKIPPED)},
            "notes": dict(sorted(kinds.items())),
            "by": counts["by"],
            "versions": package_versions(),
        }
        write_json(folder / MANIFEST, manifest)
    return manifest


def _append(file: BinaryIO, found: Skip | Note) -> None:
    # What is told of a row may quote half a character of it.
    file.write(json.dumps(asdict(found), ensure_ascii=False).encode(errors="replace") + b"\n")


def _why(tally: Tally) -> str:
    reasons = [*tally.skipped.most_common(), *tally.unread_trajectories.most_common()]
    return ", ".join(f"{reason} {count}" for reason, count in reasons) or "no assistant turn"
