"""Where a run begins: with its student, with a merge of its teachers, or after a light SFT on their answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.merge import merge_into
from mopdctl.distill.teachers import Teachers
from mopdctl.distill.warmup import WARM_UP, run_warm_up
from mopdctl.engines.hf import HFModel
from mopdctl.rollouts.book import PromptBook
from mopdctl.rollouts.generate import Tools
from mopdctl.rollouts.step import OnNote
from mopdctl.runs import Workspace
from mopdctl.train.session import is_fresh


def begin(
    config: TeachersFile,
    workspace: Workspace,
    book: PromptBook,
    teacher_of: Sequence[str],
    student: HFModel,
    teachers: Teachers,
    folder: Path,
    *,
    base: Path,
    record: dict[str, Any],
    tools: Tools | None,
    on_note: OnNote,
) -> None:
    """Gives the student the weights of a run's first step; one that has a state to go on from gets them from there.

    A merge comes before a warm-up. Both give the same weights whenever they are asked for again.
    """
    train = config.train
    if not is_fresh(folder):
        return
    if train.warm_start == "merge":
        merge_into(student, config, workspace, base=base, scale=train.warm_start_scale)
    if train.warm_up is not None:
        run_warm_up(
            config,
            train.warm_up,
            book,
            teacher_of,
            student,
            teachers.resident,
            folder / WARM_UP,
            record=record,
            tools=tools,
            on_note=on_note,
        )
