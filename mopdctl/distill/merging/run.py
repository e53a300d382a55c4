"""A merge from teachers.yaml to checkpoint, its scales given or chosen on held-out prompts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mopdctl.config.merge import MergeConfig
from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.merging.measure import Questions, measuring, read_questions
from mopdctl.distill.merging.methods import method_of
from mopdctl.distill.merging.search import COMMON_SCALES, FACTORS, Candidate, most_measurements, search
from mopdctl.distill.merging.sources import Scales, Sources, load_into, open_sources
from mopdctl.engines.hf import HFModel
from mopdctl.files import file_digest, fingerprint
from mopdctl.runs import (
    Workspace,
    building,
    check_name_is_ours,
    checkpoint_digest,
    finished,
    model_identity,
    write_card,
)
from mopdctl.train import distributed
from mopdctl.train.session import sole_writer

OnCandidate = Callable[[int, int, Candidate], None]
"""Told of each measured candidate: how many there are, how many there will be at most, the last."""


def plan_merge(
    config: TeachersFile, how: MergeConfig, workspace: Workspace, *, base: Path, name: str
) -> dict[str, Any]:
    """Checks all that can be checked before weights are read; says what would be done. Writes nothing."""
    target = workspace.checkpoint(name)
    sources, questions = _inputs(config, how, workspace, base)
    check_name_is_ours(target, workspace.run(name), _record(config, how, sources, questions, base))
    plan = {"name": name, "checkpoint": str(target)} | _settings(how)
    if questions:
        return plan | {"measurements": most_measurements(how.method, len(_movable(how, sources)))}
    return plan | {"scales": sources.by_alias(sources.scales(how))}


def merge_teachers(
    config: TeachersFile,
    how: MergeConfig,
    workspace: Workspace,
    *,
    base: Path,
    name: str,
    on_candidate: OnCandidate = lambda done, most, candidate: None,
) -> Path:
    """Writes the checkpoint `name`, in float32; returns its folder. The same merge is left as it is.

    In memory are the student, the merged weights once or twice, and one tensor of one teacher. The card holds all
    candidates of a search. Raises InputError if something else has the name or another process is making it.
    """
    target, folder = workspace.checkpoint(name), workspace.run(name)
    sources, questions = _inputs(config, how, workspace, base)
    record = _record(config, how, sources, questions, base)
    distributed.start()
    if finished(target, folder, record):
        return target
    with sole_writer(folder, target, record) as ours:
        if not ours:
            return target
        train = config.train
        student = HFModel.load(
            sources.student.path, dtype=train.dtype, train=True, batch_size=train.sampling_batch_size
        )
        card: dict[str, Any] = {"name": name, "algorithm": f"merge/{how.method.replace('-', '_')}"}
        if questions:
            scales, card["search"] = _search(how, sources, questions, student, on_candidate)
        else:
            scales = sources.scales(how)
        load_into(student, sources.merge(method_of(how), scales))
        card |= {"parent": config.student, "scales": sources.by_alias(scales)}
        if distributed.rank() == 0:
            with building(target) as temporary:
                student.save(temporary)
                made_by = {"config": record, "fingerprint": fingerprint(record)}
                write_card(temporary, card | made_by | {"digest": checkpoint_digest(temporary)})
        distributed.barrier()
    return target


def _inputs(
    config: TeachersFile, how: MergeConfig, workspace: Workspace, base: Path
) -> tuple[Sources, Questions | None]:
    """Checked checkpoints, and for a search checked questions. Raises InputError for scales that do not fit them."""
    sources = open_sources(config, workspace, base=base)
    sources.scales(how)
    return sources, read_questions(config, sources.student.path, base=base) if how.search else None


def _search(
    how: MergeConfig, sources: Sources, questions: Questions, student: HFModel, on_candidate: OnCandidate
) -> tuple[Scales, dict[str, Any]]:
    """The best scales, and what the card says of the search."""
    movable = _movable(how, sources)
    most, done = most_measurements(how.method, len(movable)), 0
    with measuring(questions, sources, method_of(how), student) as measure:

        def told(scales: Scales) -> Candidate:
            nonlocal done
            candidate = measure(scales)
            done += 1
            on_candidate(done, most, candidate)
            return candidate

        best, all_ = search(COMMON_SCALES[how.method], len(sources.teachers), movable, told)
    candidates = [
        {"scales": sources.by_alias(c.scales), "score": c.mean, "scores": dict(c.scores), "unchecked": c.unchecked}
        for c in all_
    ]
    return best.scales, {"score": best.mean, "candidates": candidates}


def _movable(how: MergeConfig, sources: Sources) -> list[int]:
    """The teachers whose own scale can change the merge: not the student itself, and not the only one of a mean."""
    if how.method == "linear":
        return list(range(len(sources.teachers))) if len(sources.teachers) > 1 else []
    student = Path(sources.student.path).resolve()
    return [i for i, one in enumerate(sources.teachers) if Path(one.weights.path).resolve() != student]


def _settings(how: MergeConfig) -> dict[str, Any]:
    return {"method": how.method} | ({"density": how.density} if how.method == "ties" else {})


def _record(
    config: TeachersFile, how: MergeConfig, sources: Sources, questions: Questions | None, base: Path
) -> dict[str, Any]:
    """What decides the merge: its settings and the digests of all inputs."""
    digests = {source.weights.path: model_identity(source.weights.path) for source in sources.teachers}
    paths = {alias: source.weights.path for source in sources.teachers for alias in source.aliases}
    record = {
        "student": model_identity(sources.student.path),
        "teachers": {alias: digests[path] for alias, path in sorted(paths.items())},
    } | _settings(how)
    if questions is None:
        return record | {"scales": sources.by_alias(sources.scales(how))}
    assert config.train.eval_prompts is not None
    return record | {
        "search": {
            "common": list(COMMON_SCALES[how.method]),
            "factors": list(FACTORS),
            "eval_prompts": file_digest(base / config.train.eval_prompts),
            "rows": fingerprint(questions.rows),
            "efforts": config.model_dump(mode="json", include={"efforts"})["efforts"],
            **config.train.model_dump(mode="json", include={"max_new_tokens", "dtype"}),
        }
    }
