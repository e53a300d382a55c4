"""Evaluating a checkpoint on lm-eval tasks, saved whole under a name.

```
evals/NAME/scores.json, samples.jsonl    normalised, see `scores` and `normalise`
evals/NAME/card.json                     what made them; its `request` is what makes an evaluation the same
evals/NAME/lm_eval/                      lm-eval's own files, as it wrote them
```
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mopdctl.errors import InputError
from mopdctl.evals.scores import has_scores, write_scores
from mopdctl.files import file_digest, fingerprint
from mopdctl.records import Score
from mopdctl.runs import Workspace, building, checkpoint_digest, read_card, shipped, told_differences, write_card

Limit = int | None | Mapping[str, int | None]
DEFAULT_BATCH_SIZE = 64


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """What an evaluation would do."""

    name: str
    model: str
    """As the user named it."""
    path: str
    """What transformers loads."""
    target: Path
    folders: tuple[Path, ...]
    """Folders of task files: those that come with mopdctl, then the user's."""
    limits: dict[str, int | None]
    """Task, group or tag to the number of documents it is cut to."""
    request: dict[str, Any]
    """What makes two evaluations the same."""
    done: bool
    """Whether the target already holds the evaluation."""


def plan_eval(
    name: str,
    model: str,
    tasks: Sequence[str],
    workspace: Workspace,
    *,
    limit: Limit = None,
    include: Sequence[Path] = (),
    seed: int = 0,
    chat_template: bool = True,
    force: bool = False,
) -> EvalPlan:
    """Resolves all that needs no heavy import. Raises InputError for what cannot be evaluated under this name."""
    target = workspace.evaluation(name)
    if not tasks:
        raise InputError("tasks: none given; name at least one")
    path = workspace.resolve_model(model)
    if Path(path).is_dir():  # absolute, because a relative one of two words would pass for a hub id
        path = str(Path(path).resolve())
    limits = _limits(tasks, limit)
    folders = (shipped("tasks"), *include)
    request = {
        "model": checkpoint_digest(Path(path)) if Path(path).is_dir() else path,
        "tasks": sorted(limits),
        "limits": limits,
        "task_files": _task_files(folders),
        "seed": seed,
        "chat_template": chat_template,
        "lm_eval": version("lm_eval"),
    }
    before = read_card(target).get("request") if has_scores(target) else None
    done = before == request and not force
    if target.exists() and not done and not force:
        from mopdctl.evals.harness import load_tasks

        load_tasks(tasks, folders)  # a task that nobody knows is what is wrong, if there is one
        told = told_differences({key: before.get(key) for key in request}, request) if before else ""
        what = f"holds another evaluation ({told})" if before else "is in the way"
        raise InputError(f"{target}: {what}; use another name, or --force to replace it")
    return EvalPlan(name, model, path, target, folders, limits, request, done)


def run_eval(
    name: str,
    model: str,
    tasks: Sequence[str],
    workspace: Workspace,
    *,
    limit: Limit = None,
    batch_size: int = DEFAULT_BATCH_SIZE,
    include: Sequence[Path] = (),
    seed: int = 0,
    chat_template: bool = True,
    force: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_note: Callable[[str], None] = lambda text: None,
) -> Path:
    """Evaluates `model` and saves the evaluation `name`; returns its folder.

    `limit` cuts every task to its first documents, or by task where it is a mapping (tasks it does not name are whole).
    The same evaluation, if it is there already, is left as it is. `on_progress` gets (answers so far, requests) of a
    round; there is a round for each distinct limit. Raises InputError for unknown tasks, an unusable model and a name
    that is taken by another evaluation, unless `force`; MopdctlError if lm-eval did not write all of its results.
    """
    plan = plan_eval(
        name,
        model,
        tasks,
        workspace,
        limit=limit,
        include=include,
        seed=seed,
        chat_template=chat_template,
        force=force,
    )
    if plan.done:
        on_note(f"{plan.target}: already evaluated; left as it is")
        return plan.target
    from mopdctl.evals.harness import HarnessModel, listening, load_tasks, prompt_fingerprint, run_round
    from mopdctl.evals.normalise import scores_of

    began = time.perf_counter()
    scores: list[Score] = []
    rows: list[dict[str, Any]] = []
    documents: dict[str, Any] = {}
    with building(plan.target) as folder:
        with listening(on_note) as warnings:
            loaded = load_tasks(list(plan.limits), plan.folders)
            harness = HarnessModel(
                plan.path, batch_size=batch_size, chat_template=chat_template, on_progress=on_progress
            )
            chat = harness.uses_chat_template
            prompts = {
                task_name: prompt_fingerprint(task, chat_template=chat)
                for entry in loaded
                for task_name, task in entry.tasks.items()
            }
            for count in dict.fromkeys(plan.limits.values()):
                entries = [entry for entry in loaded if plan.limits[entry.name] == count]
                results, samples = run_round(
                    harness, entries, limit=count, seed=seed, folder=folder / "lm_eval", model_name=model
                )
                found = scores_of(results, samples, prompts)
                scores += found[0]
                rows += found[1]
                documents |= results["n-samples"]
        write_scores(folder, name, scores, rows)
        write_card(
            folder,
            {
                "name": name,
                "algorithm": "eval",
                "model": model,
                "model_path": plan.path,
                "request": plan.request,
                "fingerprint": fingerprint(plan.request),
                "tasks": {score.benchmark: score.identity["version"] for score in scores},
                "documents": documents,
                "chat_template": scores[0].identity["chat_template"] if scores else None,
                "seeds": dict.fromkeys(("python", "numpy", "torch", "fewshot"), seed),
                "batch_size": batch_size,
                "device": str(harness.device),
                "dtype": str(harness.model.dtype).removeprefix("torch."),
                "world_size": harness.world_size,
                "warnings": warnings,
                "seconds": round(time.perf_counter() - began, 2),
            },
        )
    return plan.target


def _limits(tasks: Sequence[str], limit: Limit) -> dict[str, int | None]:
    if isinstance(limit, Mapping):
        unknown = sorted(set(limit) - set(tasks))
        if unknown:
            raise InputError(f"limit: names {', '.join(unknown)}, which is not among the tasks {', '.join(tasks)}")
        limits = {task: limit.get(task) for task in tasks}
    else:
        limits = dict.fromkeys(tasks, limit)
    for task, count in limits.items():
        if count is not None and count < 1:
            raise InputError(f"limit of {task}: {count}; needs a number of documents from 1")
    return limits


def _task_files(folders: Sequence[Path]) -> str:
    """The digest of all task files and of the documents that come with mopdctl, by name and content."""
    files = [path for folder in folders for path in folder.rglob("*") if "__pycache__" not in path.parts]
    files += shipped("sample_data").glob("*_test.jsonl")
    return fingerprint(sorted([path.name, file_digest(path)] for path in files if path.is_file()))
