"""The controls of a MOPD run: what a team would do instead, on the budget that the run has.

A recovery without them can look good while a merge of weights, or plain SFT on the teachers' answers, would have done
better (Open-MOPD, DN-MOPD). All begin with the run's student; those that train take its steps and its number of
sequences per step.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mopdctl.config.balance import BalanceConfig
from mopdctl.config.base import parse
from mopdctl.config.merge import MergeConfig, MergeMethod
from mopdctl.config.rl import RlConfig, RlTrainConfig
from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.merging.run import merge_teachers
from mopdctl.distill.merging.sources import open_sources
from mopdctl.distill.prompts import common_file, own_files, read_run_prompts, serving_of, teacher_of
from mopdctl.distill.run import run_distill
from mopdctl.distill.warmup import run_seqkd
from mopdctl.errors import InputError
from mopdctl.files import write_jsonl
from mopdctl.rl.run import run_rl
from mopdctl.rollouts.prompts import read_prompts
from mopdctl.runs import Workspace, check_name
from mopdctl.train.rows import iterate_rows
from mopdctl.train.session import OnStep

GROUP_SIZE = 8
"""Answers per prompt of the RL control, where the run itself takes one."""
MERGES: dict[str, MergeMethod] = {"merge": "task-arithmetic", "linear": "linear", "ties": "ties"}


@dataclass(frozen=True, slots=True)
class Control:
    """One control of a run."""

    name: str
    """Of its checkpoint: that of the run, a dot, and its kind."""
    what: str
    run: Callable[[OnStep], Path] | None
    """Makes it, or finds it made; None if it cannot be made here."""
    missing: str = ""
    """Why not."""


def controls_of(config: TeachersFile, workspace: Workspace, *, base: Path) -> list[Control]:
    """The controls of a run, in order of their cost: merges, SeqKD, a student of each teacher alone, RL.

    Scales of merges are chosen on the held-out prompts where the run has some. Every control is a function of the run's
    configuration: made once, it is left as it is.
    """
    found = [_merge(kind, method, config, workspace, base) for kind, method in MERGES.items()]
    found.append(_seqkd(config, workspace, base))
    if len(config.teachers) > 1:
        others = (alias for alias, teacher in sorted(config.teachers.items()) if teacher.kind != "self")
        found += [_single(alias, config, workspace, base) for alias in others]
    found.append(_rl(config, workspace, base))
    return found


def _merge(kind: str, method: MergeMethod, config: TeachersFile, workspace: Workspace, base: Path) -> Control:
    name, search = f"{config.name}.{kind}", config.train.eval_prompts is not None

    def run(on_step: OnStep) -> Path:
        return merge_teachers(config, MergeConfig(method=method, search=search), workspace, base=base, name=name)

    scales = "scales chosen on held-out prompts" if search else "default scale"
    what = f"weights merged by {method}, {scales}"
    try:
        open_sources(config, workspace, base=base)
    except InputError as error:  # black boxes and adapters have no weights to merge; the other controls need none
        return Control(name, what, None, str(error))
    return Control(name, what, run)


def _seqkd(config: TeachersFile, workspace: Workspace, base: Path) -> Control:
    name = f"{config.name}.seqkd"

    def run(on_step: OnStep) -> Path:
        return run_seqkd(config.model_copy(update={"name": name}), workspace, base=base, on_step=on_step)

    what = "SFT on the teachers' answers"
    silent = [alias for alias, teacher in sorted(config.teachers.items()) if teacher.is_black_box]
    if len(silent) == len(config.teachers):
        return Control(name, what, None, "every teacher is a black box, of whom nothing can be asked")
    return Control(name, f"{what}, without {', '.join(silent)}" if silent else what, run)


def _single(alias: str, config: TeachersFile, workspace: Workspace, base: Path) -> Control:
    """The student of one teacher, on its prompts alone."""
    name, what = f"{config.name}.only-{alias}", f"distilled from {alias} alone"
    try:
        check_name(name)
    except InputError as error:
        return Control(name, what, None, str(error))

    def run(on_step: OnStep) -> Path:
        teacher = config.teachers[alias]
        train = config.train.model_copy(update={"eval_every": 0, "eval_prompts": None} | _for_one(config, alias))
        update = {
            "name": name,
            # Prompts of its own need not say whose they are, so that they stay with it.
            "prompts": _prompts_of(alias, config, workspace, name, base) if teacher.prompts is None else None,
            "teachers": {alias: teacher},
            "tiers": None,
            "train": train,
        }
        return run_distill(config.model_copy(update=update), workspace, base=base, on_step=on_step)

    return Control(name, what, run)


def _for_one(config: TeachersFile, alias: str) -> dict[str, Any]:
    """Settings of `train` that name several teachers, or ask what a black box does not give, for a run with one."""
    if config.teachers[alias].is_black_box:
        return {"balance": BalanceConfig(), "warm_up": None, "warm_start": "none"}
    warm_up = config.train.warm_up
    return {"balance": BalanceConfig(), "warm_up": warm_up and warm_up.model_copy(update={"shares": {}})}


def _rl(config: TeachersFile, workspace: Workspace, base: Path) -> Control:
    """GRPO on the run's prompts, one environment for those of each teacher, as many answers per step."""
    name, train = f"{config.name}.rl", config.train
    what = "RL on the verified rewards of the same prompts"
    found = read_run_prompts(config, base=base)
    unverifiable = next((prompt for prompt in found.prompts if prompt.verifier is None), None)
    if unverifiable is not None:
        return Control(name, what, None, f"{unverifiable.place} names no verifier")
    quant = train.student_quant != "none"
    for setting, there in (("train.lora", train.lora), ("train.student_quant", quant), ("efforts", config.efforts)):
        if there:
            return Control(name, what, None, f"RL knows no `{setting}`, so that it would be another budget")

    def run(on_step: OnStep) -> Path:
        group = train.samples_per_prompt if train.samples_per_prompt > 1 else GROUP_SIZE
        own = {"batch_size", "eval_every", "eval_prompts", "reference"}
        shared = (RlTrainConfig.model_fields.keys() & type(train).model_fields.keys()) - own
        document = {
            "model": workspace.resolve_model(config.student, relative_to=base),
            "name": name,
            "environments": {
                alias: {"prompts": str(_prompts_of(alias, config, workspace, name, base, first=True)), "weight": count}
                for alias, count in Counter(found.first_choice).items()
            },
            "train": train.model_dump(mode="json", include=set(shared))
            | {"batch_size": max(1, train.batch_size * train.samples_per_prompt // group), "group_size": group},
        }
        return run_rl(parse(RlConfig, document, source=f"control {name}"), workspace, base=base, on_step=on_step)

    return Control(name, what, run)


def _prompts_of(
    alias: str, config: TeachersFile, workspace: Workspace, control: str, base: Path, *, first: bool = False
) -> Path:
    """The prompts that one teacher may serve as a file: its own, or its rows of the common one.

    With `first`, those alone that are its own as long as nothing is known of them: every prompt then is in one file.
    """
    if alias in (own := own_files(config, base)):
        return own[alias].resolve()
    common = common_file(config, base)
    assert common is not None
    prompts = read_prompts(common, config.routing_keys)
    rows = [
        dict(row)
        for prompt, (_, row) in zip(prompts, iterate_rows(common), strict=True)
        if (teacher_of(prompt.routing, config) == alias if first else alias in serving_of(prompt, config).values())
    ]
    return _written(workspace, control, alias, rows)


def _written(workspace: Workspace, control: str, part: str, rows: list[dict[str, Any]]) -> Path:
    """The rows as a prompt file of the workspace."""
    path = (workspace.root / "controls" / control / f"{part}.jsonl").resolve()
    if path.parent.name != control:
        raise InputError(f"{part!r}: cannot be part of a file's name; rename the teacher")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(path, rows)
    return path
