"""`mopdctl pivots profile`: K rollouts of a reference model at every candidate, judged against the expert's action."""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopdctl.engines.tokenizers import ChatTokenizer
from mopdctl.errors import InputError, MopdctlError
from mopdctl.files import file_digest, fingerprint, read_json, write_json, write_jsonl
from mopdctl.pivots.candidates import Candidate
from mopdctl.pivots.folder import load_candidates, open_set
from mopdctl.pivots.profiled import OK, Profiled, profile_row, profiled
from mopdctl.pivots.prompting import VERIFIER, prompt_of, reference_problem
from mopdctl.records import Prompt
from mopdctl.rollouts.run import RolloutSpec, run_rollout
from mopdctl.runs import Workspace, locked, model_identity, open_run, package_versions, told_differences
from mopdctl.store.store import Store
from mopdctl.train.data import prompt_token_ids
from mopdctl.verifiers.base import VerdictState

TRUNCATED, TOO_LONG, REFUSED = "truncated", "prompt_too_long", "prompt_refused"
"""States that no verifier gives: an answer without its end, a prompt without room for an answer, one that the chat
template does not take. The last two are that of all rollouts of their candidate, none of which is asked for; so is
`invalid_reference` where the expert's action is one that the verifier cannot use."""


@dataclass(frozen=True, slots=True)
class ProfileSpec:
    """What `mopdctl pivots profile` is asked for."""

    name: str
    model: str
    rollouts: int = 8
    """K, answers per candidate."""
    temperature: float = 1.0
    max_new_tokens: int = 512
    seed: int = 0
    limit: int | None = None
    """Only the first so many candidates."""
    reprofile: bool = False
    """Whether the model's name may have another profile already."""
    batch_size: int = 64


def run_profile(
    spec: ProfileSpec,
    workspace: Workspace,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_note: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Profiles what is still missing and returns `profile.json` with its `path`.

    A killed run goes on where it was: the answers are in the store, the profile is a function of the store.
    """
    if not 0 < spec.temperature < math.inf:
        raise InputError(f"--temperature {spec.temperature}: must be a number above 0; at 0 all rewards are equal")
    folder, manifest = open_set(workspace, spec.name)
    path = workspace.resolve_model(spec.model)
    config = {
        "candidates": manifest["candidates"]["digest"],
        "model": model_identity(path),
        "verifier": f"{VERIFIER.name}/{VERIFIER.version}",
        "rollouts": spec.rollouts,
        "temperature": spec.temperature,
        "max_new_tokens": spec.max_new_tokens,
        "seed": spec.seed,
        "limit": spec.limit,
    }
    label = _label(folder, spec, config)
    place = folder / "profiles" / label
    with locked(place):
        open_run(place, config)
        if not (place / "profile.json").is_file():
            candidates = load_candidates(folder)[: spec.limit]
            prompts, unusable = usable_prompts(candidates, ChatTokenizer.load(path), spec.max_new_tokens)
            for reason, details in _by_reason(unusable):
                on_note(f"{len(details)} candidates are not asked, {reason}: {details[0]}")
            store = f"{spec.name}.profile-{label}"
            if prompts:
                _sample(spec, store, prompts, workspace, on_progress, on_note)
            asked = [prompt.prompt_id for prompt in prompts]
            outcomes = _outcomes(workspace.rollouts(store), asked, spec.rollouts) if prompts else {}
            found = [
                profiled(c, outcomes.get(c.candidate_id) or [(unusable[c.candidate_id][0], None)] * spec.rollouts)
                for c in candidates
            ]
            write_jsonl(place / "profile.jsonl", map(profile_row, found))
            write_json(place / "profile.json", _document(spec, label, config, store, found, place))
    return {**read_json(place / "profile.json"), "path": str(place)}


def usable_prompts(
    candidates: Sequence[Candidate], chat: ChatTokenizer, max_new_tokens: int
) -> tuple[list[Prompt], dict[str, tuple[str, str]]]:
    """The candidates that can be asked and judged, as prompts; the others by id, each with its state and why."""
    prompts, unusable = [], {}
    for candidate in candidates:
        place = f"candidate {candidate.candidate_id} ({candidate.source})"
        try:
            prompt = prompt_of(candidate, place)
            tools = list(prompt.tools) if prompt.tools else None
            length = len(prompt_token_ids(chat, list(prompt.messages), tools, {}, place=place))
        except InputError as error:
            unusable[candidate.candidate_id] = (REFUSED, str(error))
            continue
        if length + max_new_tokens > chat.max_length:
            detail = f"{place}: {length} tokens and an answer of {max_new_tokens} do not fit into {chat.max_length}"
            unusable[candidate.candidate_id] = (TOO_LONG, detail)
            continue
        if problem := reference_problem(prompt):
            unusable[candidate.candidate_id] = (VerdictState.INVALID_REFERENCE.value, f"{place}: {problem}")
            continue
        prompts.append(prompt)
    return prompts, unusable


def _sample(
    spec: ProfileSpec,
    store: str,
    prompts: Sequence[Prompt],
    workspace: Workspace,
    on_progress: Callable[[int, int], None],
    on_note: Callable[[str], None],
) -> None:
    run_rollout(
        RolloutSpec(
            name=store,
            model=spec.model,
            prompts=tuple(prompts),
            samples=spec.rollouts,
            max_new_tokens=spec.max_new_tokens,
            temperature=spec.temperature,
            seed=spec.seed,
            batch_size=spec.batch_size,
        ),
        workspace,
        on_progress=on_progress,
        on_note=on_note,
    )


def _outcomes(folder: Path, asked: Sequence[str], rollouts: int) -> dict[str, list[tuple[str, float | None]]]:
    """State and reward of each rollout by candidate, in the order of the rollouts.

    Raises MopdctlError if a candidate has not all of its rollouts, or one that nobody judged.
    """
    columns = ["prompt_id", "generation_index", "finish_reason", "verdict", "reward"]
    found: dict[str, dict[int, tuple[str, float | None]]] = {candidate_id: {} for candidate_id in asked}
    for row in Store(folder).meta_table(columns).to_pylist():
        if row["verdict"] is None:
            raise MopdctlError(f"{folder}: an answer to {row['prompt_id']} was never judged; see `rollout --reverify`")
        state = row["verdict"] if row["finish_reason"] == "stop" else TRUNCATED
        found[row["prompt_id"]][row["generation_index"]] = (state, row["reward"] if state == OK else None)
    for candidate_id, by_number in found.items():
        if sorted(by_number) != list(range(rollouts)):
            raise MopdctlError(f"{folder}: {len(by_number)} of {rollouts} answers to {candidate_id}; profile again")
    return {candidate_id: [by_number[n] for n in range(rollouts)] for candidate_id, by_number in found.items()}


def _label(folder: Path, spec: ProfileSpec, config: dict[str, Any]) -> str:
    """The model's name; where that names another profile, with the first digits of the configuration's fingerprint.

    Raises InputError naming what differs from that other profile unless `--reprofile` was given.
    """
    label = re.sub(r"[^A-Za-z0-9._-]", "-", Path(spec.model).name).lstrip("._-")[:40] or "model"
    begun = folder / "profiles" / label / "config.json"
    if not begun.is_file() or read_json(begun) == config:
        return label
    if not spec.reprofile:
        how = told_differences(read_json(begun), config)
        raise InputError(
            f"{begun.parent}: a profile by that model has the name, of another configuration ({how}); "
            "give --reprofile to make one beside it"
        )
    return f"{label}-{fingerprint(config)[:8]}"


def _by_reason(unusable: dict[str, tuple[str, str]]) -> list[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for reason, detail in unusable.values():
        found.setdefault(reason, []).append(detail)
    return sorted(found.items())


def _document(
    spec: ProfileSpec,
    label: str,
    config: dict[str, Any],
    store: str,
    found: Sequence[Profiled],
    place: Path,
) -> dict[str, Any]:
    states = Counter[str]()
    for one in found:
        states.update(one.states)
    rewards = [reward for one in found for reward in one.ok_rewards]
    return {
        "schema": "mopdctl.pivot-profile/1",
        "label": label,
        "model": spec.model,
        "config": config,
        "fingerprint": fingerprint(config),
        "store": store,
        "candidates": len(found),
        "profiled": sum(bool(one.ok_rewards) for one in found),
        "rollouts": states.total(),
        "states": dict(sorted(states.items())),
        "mean_reward": round(math.fsum(rewards) / len(rewards), 6) if rewards else None,
        "mixed": sum(bool(one.variance) for one in found),
        "digest": file_digest(place / "profile.jsonl"),
        "versions": package_versions(),
    }
