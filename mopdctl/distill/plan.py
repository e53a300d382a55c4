"""A run before its first step and after its last: what can be checked without a model, its record, its card."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mopdctl.config.teachers import Teacher, TeachersFile
from mopdctl.distill import held_out
from mopdctl.distill.answers import check_answers
from mopdctl.distill.balance import check_balance
from mopdctl.distill.blackbox.book import check_answered
from mopdctl.distill.blackbox.texts import read_answers
from mopdctl.distill.curriculum import check_curriculum
from mopdctl.distill.merging.sources import open_sources
from mopdctl.distill.prompts import RunPrompts, read_run_prompts
from mopdctl.distill.teachers import check_identity, teacher_source
from mopdctl.distill.warmup import REPORT, WARM_UP
from mopdctl.engines.fake_quant import TRAINED
from mopdctl.engines.tokenizers import ChatTokenizer, identify
from mopdctl.errors import InputError
from mopdctl.files import file_digest, read_json
from mopdctl.rollouts.held_out import check_all_verifiable
from mopdctl.runs import Workspace, check_name_is_ours, model_identity, read_metrics
from mopdctl.train.rows import count_rows, data_files


def plan_distill(config: TeachersFile, workspace: Workspace, *, base: Path, dry_run: bool = False) -> dict[str, Any]:
    """Everything that can be checked without loading a model: prompts, routing, model arguments. Writes nothing.

    `dry_run` also checks tokenizers and whether the name is free: that reads all weights, and `run_distill` does it
    anyway.
    """
    found = read_run_prompts(config, base=base)
    scoring = [alias for alias, teacher in config.teachers.items() if not teacher.is_black_box]
    scored_before = bool(scoring) and config.train.objective == "sampled"
    check_balance(config.train.balance, scoring, scored_before=scored_before)
    if config.train.curriculum is not None:
        check_curriculum(found.prompts)
    if config.train.warm_up is not None:
        check_answers(config, found.prompts, config.train.warm_up)
    if config.train.outcome_weight or config.train.curriculum is not None:
        check_all_verifiable(found.prompts)
    if config.train.eval_prompts:
        held_out.read(config, base=base)
    student = workspace.resolve_model(config.student, relative_to=base)
    teachers = {alias: _teacher_model(alias, config, workspace, base) for alias in config.teachers}
    _check_answers(config, workspace, found, base)
    if config.train.warm_start == "merge":
        open_sources(config, workspace, base=base)
    if config.train.anchor.sft_data is not None:
        count_rows(base / config.train.anchor.sft_data)
    if config.train.reference is not None:
        workspace.resolve_model(config.train.reference, relative_to=base)
    if dry_run:
        _check_tokenizers(config, student, teachers)
        record = run_record(config, workspace, base)
        check_name_is_ours(workspace.checkpoint(config.name), workspace.run(config.name), record)
    return {
        "name": config.name,
        "student": student,
        "teachers": teachers,
        "prompts": len(found.prompts),
        "prompts_per_teacher": found.per_teacher(),
        "objective": config.train.objective,
        "warm_up_steps": config.train.warm_up.steps if config.train.warm_up else 0,
        "steps": config.train.steps,
        "samples": config.train.steps * config.train.batch_size * config.train.samples_per_prompt,
        "train": config.train.model_dump(mode="json", exclude_unset=True),
    }


def _teacher_model(alias: str, config: TeachersFile, workspace: Workspace, base: Path) -> str | None:
    """What to load for a teacher, None for one that is known by its answers alone. Raises InputError naming it."""
    teacher = config.teachers[alias]
    return teacher_source(alias, teacher, workspace, base=base).path if teacher.model else None


def _check_tokenizers(config: TeachersFile, student: str, teachers: Mapping[str, str | None]) -> None:
    """Raises InputError naming the first teacher that does not read the student's tokens, or cannot be read."""
    own, known = identify(ChatTokenizer.load(student)), {student}
    for alias, path in teachers.items():
        if path is not None and path not in known:
            try:
                found = identify(ChatTokenizer.load(path))
            except InputError as error:
                raise InputError(f"teacher {alias!r}: {error}") from None
            check_identity(f"teacher {alias!r} ({config.teachers[alias].model})", found, config.student, own)
            known.add(path)


def _check_answers(config: TeachersFile, workspace: Workspace, found: RunPrompts, base: Path) -> None:
    """Raises InputError naming the first prompt that a file of answers leaves open."""
    for alias, teacher in config.teachers.items():
        if teacher.answers is not None:
            prompts = [p for p, who in zip(found.prompts, found.first_choice, strict=True) if who == alias]
            files = data_files(teacher.answers, base=base, workspace=workspace.root)
            check_answered(alias, teacher, prompts, read_answers(files, prompts))


def run_record(config: TeachersFile, workspace: Workspace, base: Path) -> dict[str, Any]:
    """The resolved configuration with the digests of all inputs: what a resumed run must share with its first part."""
    record = config.model_dump(mode="json")
    record["student"] = model_identity(workspace.resolve_model(config.student, relative_to=base))
    for alias, teacher in config.teachers.items():
        record["teachers"][alias] |= _teacher_digests(alias, teacher, workspace, base)
    train = config.train
    if train.reference is not None:
        record["train"]["reference"] = model_identity(workspace.resolve_model(train.reference, relative_to=base))
    record["prompts"] = file_digest(base / config.prompts) if config.prompts else None
    if train.eval_prompts:
        record["train"]["eval_prompts"] = file_digest(base / train.eval_prompts)
    if train.anchor.sft_data is not None:
        record["train"]["anchor"]["sft_data"] = file_digest(base / train.anchor.sft_data)
    # It may be allowed once the run was refused: nothing that was sampled until then comes out differently.
    del record["train"]["allow_quant_noise"]
    # Teachers are keyed by alias and sorted: their order in the file means nothing.
    record["teachers"] = dict(sorted(record["teachers"].items()))
    return record


def _teacher_digests(alias: str, teacher: Teacher, workspace: Workspace, base: Path) -> dict[str, Any]:
    """The fields of a teacher that name files, as what is in them."""
    found: dict[str, Any] = {"model": None}
    if teacher.model:
        source = teacher_source(alias, teacher, workspace, base=base)
        found["model"] = model_identity(source.model)
        if source.adapter is not None:
            found |= {"model": model_identity(str(source.adapter)), "base": model_identity(source.model)}
    if teacher.answers is not None:
        files = data_files(teacher.answers, base=base, workspace=workspace.root)
        found["answers"] = {file.name: file_digest(file) for file in files}
    if teacher.prompts is not None:
        found["prompts"] = file_digest(base / teacher.prompts)
    return found


def run_card(config: TeachersFile, record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the checkpoint says about itself."""
    card: dict[str, Any] = {
        "name": config.name,
        "algorithm": f"mopd/{config.train.objective}",
        "parent": config.student,
        "warm_start": config.train.warm_start,
        "teachers": {
            alias: {
                "model": teacher.model,
                "kind": teacher.kind,
                "domains": teacher.domains,
                "benchmarks": teacher.benchmarks or teacher.domains,
                "eval": Path(teacher.model).name,
                "digest": record["teachers"][alias]["model"],
            }
            for alias, teacher in sorted(config.teachers.items())
        },
    }
    if config.train.student_quant != "none":
        card["student_quant"] = {
            "format": config.train.student_quant,
            "method": TRAINED,
            "weights": f"not quantized; `mopdctl quantize --method {TRAINED}` makes of them what was trained",
        }
    if (warmed := folder / WARM_UP / REPORT).exists():
        card["warm_up"] = read_json(warmed)
    rows = read_metrics(folder)
    for alias, teacher in config.teachers.items():
        if teacher.quant != "none":
            noise = {key: rows[0][f"teacher/{key}"][alias] for key in ("quant_kl_nats", "student_kl_nats")}
            card["teachers"][alias] |= {"quant": teacher.quant, **noise}
    history = [row for row in rows if "held_out/score" in row]
    if history:
        card["steps_to_reach_teacher"] = held_out.reached(history)
    return card
