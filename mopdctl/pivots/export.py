"""Pivots as rows to train on: prompt rows for `mopdctl rl`, or rows for NeMo Gym."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mopdctl.engines.base import stream_seed
from mopdctl.errors import InputError
from mopdctl.files import file_digest, write_json, write_jsonl
from mopdctl.pivots.candidates import BATCH, Candidate
from mopdctl.pivots.folder import load_candidates, load_selection, open_set
from mopdctl.pivots.nemo_gym import AGENT, gym_row, validate_row
from mopdctl.pivots.prompting import prompt_of, reference_problem
from mopdctl.pivots.responses import without_items
from mopdctl.runs import Workspace, package_versions

Row = dict[str, Any]

EXAMPLES = 3
"""How many of the rows that could not be made are told in words."""


@dataclass(frozen=True, slots=True)
class ExportSpec:
    """What `mopdctl pivots export` is asked for."""

    format: Literal["rl", "nemo-gym"]
    every: bool = False
    """All candidates in place of the selected ones."""
    random: int | None = None
    """So many random candidates in place of the selected ones: the control of a selection."""
    seed: int = 0
    """Of the random choice."""
    agent: str = AGENT
    """Name in `agent_ref` of NeMo Gym rows."""
    batches: bool = False
    """Whether NeMo Gym rows may expect several calls at once, which not all of its verifiers take."""


def export(name: str, workspace: Workspace, out: Path, spec: ExportSpec) -> dict[str, Any]:
    """Writes `out` and, last, `<out>.manifest.json`, which it returns: counts in and out, by reason, and the source.

    Raises InputError if nothing is left to write, or if fewer than `spec.random` candidates can be written.
    """
    if out.suffix != ".jsonl":
        raise InputError(f"--out {out}: is written as JSON lines; give it the ending .jsonl")
    folder, manifest = open_set(workspace, name)
    control = spec.every or spec.random is not None
    selection, rows = (None, []) if control else load_selection(folder)
    figures = {row["candidate_id"]: row for row in rows}
    candidates = load_candidates(folder)
    if spec.random is not None:
        chosen = sorted(
            candidates, key=lambda c: (stream_seed(spec.seed, "pivots/random", c.candidate_id), c.candidate_id)
        )
    elif spec.every:
        chosen = candidates
    else:
        by_id = {candidate.candidate_id: candidate for candidate in candidates}
        chosen = [by_id[candidate_id] for candidate_id in figures]
    if not chosen:
        raise InputError(f"{folder}: the selection is empty; see its report, {folder / 'selection.json'}")
    make = _maker(spec, figures)
    made, skipped, examples = make_rows(chosen, make, limit=spec.random)
    if spec.random is not None and len(made) < spec.random:
        raise InputError(
            f"--random {spec.random}: only {len(made)} of {len(chosen)} candidates can be exported{_why(skipped)}"
        )
    if not made:
        raise InputError(f"{folder}: none of {len(chosen)} candidates can be exported{_why(skipped)}")
    write_jsonl(out, made)
    document = {
        "schema": "mopdctl.pivot-export/1",
        "file": str(out),
        "set": name,
        **asdict(spec),
        "candidates": len(candidates),
        "chosen": len(made) + skipped.total(),
        "rows": len(made),
        "skipped": dict(sorted(skipped.items())),
        "examples": examples,
        "candidates_digest": manifest["candidates"]["digest"],
        "selected_digest": selection["selected_digest"] if selection else None,
        "lambda_diff": selection["lambda_diff"] if selection else None,
        "digest": file_digest(out),
        "versions": package_versions(),
    }
    write_json(out.with_suffix(".manifest.json"), document)
    return document


def make_rows(
    candidates: Sequence[Candidate], make: Callable[[Candidate], Row | str], *, limit: int | None = None
) -> tuple[list[Row], Counter[str], list[str]]:
    """The rows of candidates in order, up to `limit` of them; what was skipped on the way by reason, and examples.

    `make` gives a row, or a reason followed by `: ` and what is wrong with that one.
    """
    made: list[Row] = []
    skipped, examples = Counter[str](), list[str]()
    for candidate in candidates:
        if limit is not None and len(made) == limit:
            break
        row = make(candidate)
        if isinstance(row, str):
            reason, _, detail = row.partition(": ")
            skipped[reason] += 1
            if detail and len(examples) < EXAMPLES:
                examples.append(f"{candidate.candidate_id}: {detail}")
        else:
            made.append(row)
    return made, skipped, examples


def rl_row(candidate: Candidate) -> Row | str:
    """A prompt row with the verifier `action`: one turn, so no environment. A reason where it is no prompt."""
    if candidate.messages[-1]["role"] == "assistant":
        return "ends_with_assistant"
    try:
        prompt = prompt_of(candidate, f"candidate {candidate.candidate_id}")
    except InputError as error:
        return f"unusable_messages: {error}"
    if problem := reference_problem(prompt):
        return f"invalid_reference: {problem}"
    return {
        "id": candidate.candidate_id,
        "domain": candidate.domain,
        "messages": [without_items(message) for message in candidate.messages],
        **({"tools": list(candidate.tools)} if candidate.tools else {}),
        "verifier": "action",
        "reference": candidate.action,
    }


def _maker(spec: ExportSpec, figures: Mapping[str, Row]) -> Callable[[Candidate], Row | str]:
    if spec.format == "rl":
        return rl_row

    def make(candidate: Candidate) -> Row | str:
        if candidate.action["type"] == BATCH and not spec.batches:
            return "batch"
        try:
            row = gym_row(candidate, agent=spec.agent, figures=figures.get(candidate.candidate_id))
        except InputError as error:
            return f"no_responses_form: {error}"
        # What is checked is what a reader of the file will see.
        problems = validate_row(json.loads(json.dumps(row)))
        return f"invalid_row: {problems[0]}" if problems else row

    return make


def _why(skipped: Counter[str]) -> str:
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(skipped.items()))
    return f" ({reasons})" if reasons else ""
