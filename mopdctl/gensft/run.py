"""`mopdctl gen-sft`: plan the seeds, ask the members, ask the judges, build the data set.

A run's folder holds `seeds.jsonl` (the plan), `journal.jsonl` (every raw response) and nothing else that matters.
Asking goes on where the journal ends; everything after it is computed anew.
"""

import asyncio
import errno
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mopdctl.errors import InputError, MopdctlError
from mopdctl.files import write_json
from mopdctl.gensft.ask import Asking, Progress, Spending
from mopdctl.gensft.assess import Assessor
from mopdctl.gensft.build import build
from mopdctl.gensft.card import card, manifest
from mopdctl.gensft.journal import Journal
from mopdctl.gensft.members import enlist
from mopdctl.gensft.plan import Plan, make_plan
from mopdctl.gensft.prior import read_texts
from mopdctl.gensft.question_index import allowed_texts
from mopdctl.gensft.question_parts import Document
from mopdctl.gensft.questions import read_questions
from mopdctl.gensft.report import Report
from mopdctl.gensft.spec import Spec, finished, run_folder
from mopdctl.runs import building, locked

TaskDocuments = Callable[[list[str]], Iterable[Document]]
OnProgress = Callable[[str, Progress, Spending], None]
"""(phase, figures of the phase, what was spent since the command began)"""


_UNWRITABLE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EEXIST,
)


def run(
    spec: Spec,
    *,
    task_documents: TaskDocuments = lambda tasks: (),
    replace: bool = False,
    preview: bool = False,
    retry_rejected: bool = False,
    on_progress: OnProgress = lambda phase, progress, spending: None,
    on_note: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Makes the data set, or what is left to make of it, and returns its manifest with what this command did.

    `preview` leaves the data set in the run's folder, as `preview/`, and publishes nothing. `retry_rejected` asks again
    for what a server once refused. Raises KeyboardInterrupt after an interrupt, once the answers under way are in the
    journal, and InputError where the workspace cannot be written.
    """
    if not preview and (done := finished(spec, replace=replace)) and not retry_rejected:
        return done | {"requests": 0}
    reused = _reused(spec)
    try:
        with locked(spec.folder):
            if not preview and (done := finished(spec, replace=replace)) and not retry_rejected:
                return done | {"requests": 0}
            plan = make_plan(spec, on_note, name="preview" if preview else "seeds")
            journal = Journal(spec.folder / "journal.jsonl", reuse=reused, retry_rejected=retry_rejected)
            try:
                for line in journal.notes:
                    on_note(line)
                return _make(spec, plan, journal, task_documents, preview, on_progress, on_note)
            finally:
                journal.close()
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        what = error.filename or spec.folder
        raise InputError(f"{what}: cannot be written ({error.strerror}); nothing before is lost") from None


def _reused(spec: Spec) -> list[Path]:
    paths = [run_folder(spec.workspace, name) / "journal.jsonl" for name in spec.config.reuse]
    for name, path in zip(spec.config.reuse, paths, strict=True):
        if not path.exists():
            raise InputError(
                f"reuse: {name!r} has no journal in {spec.workspace.root}; name a data set that was made there"
            )
    return paths


def _make(
    spec: Spec,
    plan: Plan,
    journal: Journal,
    task_documents: TaskDocuments,
    preview: bool,
    on_progress: OnProgress,
    on_note: Callable[[str], None],
) -> dict[str, Any]:
    assessor = Assessor(spec.config, spec.committee, spec.router, journal)
    spending = _spent(spec, journal)
    why = asyncio.run(_ask(spec, plan, journal, spending, assessor, on_progress, on_note))
    if why:
        on_note(f"stopped: {why}; answers so far are kept")
    if why == "interrupted":
        raise KeyboardInterrupt
    assessor.over = not why
    out = spec.folder / "preview" if preview else spec.target
    with building(out) as folder:
        report = _build(spec, plan, assessor, folder, task_documents, partial(on_progress, "build"), spending)
        if not why and report.stages[0].entered and not report.stages[0].left:
            raise MopdctlError(
                f"no answer can be used, so that no data set is made: {report.warnings[0]}. "
                "Once that is mended, --retry-rejected asks again for what was refused"
            )
        report.complete &= not why
        for line in report.warnings:
            on_note(f"warning: {line}")
        document = manifest(spec.record, report, folder, plan=plan)
        (folder / "README.md").write_text(card(spec.config, spec.committee, document), "utf-8")
        write_json(folder / "manifest.json", document)
    return document | {"requests": journal.calls, "stopped": why or None, "dataset": str(out)}


def _spent(spec: Spec, journal: Journal) -> Spending:
    """What earlier runs of this data set have spent, where there is a budget to keep."""
    spending = Spending(spec.config.max_cost, spec.config.max_tokens)
    unended: dict[str, list[Any]] = {}
    if spec.config.max_cost is not None or spec.config.max_tokens is not None:
        for line in journal.entries():
            if "o" in line:
                continue
            if line["s"] == "sent":
                unended[line["k"]] = line["w"]
                continue
            unended.pop(line["k"], None)
            if "w" in line:
                spending.book(*line["w"])
        for most in unended.values():  # on their way when a run was killed: perhaps charged
            spending.book(*most)
    return spending


async def _ask(
    spec: Spec,
    plan: Plan,
    journal: Journal,
    spending: Spending,
    assessor: Assessor,
    on_progress: OnProgress,
    on_note: Callable[[str], None],
) -> str:
    """Both rounds of asking; returns why they stopped early, or ""."""
    parties = {alias: enlist(alias, spec.committee.members[alias], spec.workspace) for alias in spec.aliases}
    loop = asyncio.get_running_loop()
    try:
        for phase in ("generate", "judge"):
            if phase == "judge" and not spec.config.judges:
                break
            asking = Asking(
                parties,
                journal,
                spending,
                may_fail=phase == "judge",
                on_progress=partial(_report, on_progress, phase, spending),
                on_note=on_note,
            )
            if threading.current_thread() is threading.main_thread():  # signals are its alone
                loop.add_signal_handler(signal.SIGTERM, asking.stop, "interrupted")
            if phase == "generate":
                chains = (chain for seed in plan for _, chain in spec.router.chains(seed))
            else:
                chains = (chain for seed in plan for chain in assessor.judge_chains(seed))
            if why := await asking.ask(chains, total=plan.answers(spec) if phase == "generate" else None):
                return why
            assessor.over = True
        if spec.config.judges:
            _check_judges(spec, asking.lost)
        return ""
    finally:
        for party in parties.values():
            await party.engine.close()


def _report(on_progress: OnProgress, phase: str, spending: Spending, progress: Progress) -> None:
    on_progress(phase, progress, spending)


def _check_judges(spec: Spec, down: set[str]) -> None:
    for panel in spec.config.judges:
        if len(dead := down & set(panel.members)) > len(panel.members) - panel.needed:
            raise MopdctlError(
                f"judges {', '.join(sorted(dead))} are down, which leaves fewer than the {panel.needed} that make a "
                "score; nothing is lost, the same command goes on when they are back"
            )


def _build(
    spec: Spec,
    plan: Plan,
    assessor: Assessor,
    folder: Path,
    task_documents: TaskDocuments,
    on_progress: Callable[[Progress, Spending], None],
    spending: Spending,
) -> Report:
    settings = spec.config.decontaminate

    def documents() -> Iterator[Document]:
        yield from task_documents(settings.tasks)
        for path in settings.files:
            yield from read_questions(spec.base / path)

    stage = spec.folder / "stage"
    shutil.rmtree(stage, ignore_errors=True)
    try:
        return build(
            plan,
            assessor,
            config=spec.config,
            committee=spec.committee,
            router=spec.router,
            stage=stage,
            out=folder,
            prior_texts=(
                text
                for name in spec.config.dedup.against
                for text in read_texts(spec.workspace, spec.base, name, spec.config.dedup.on)
            ),
            documents=documents(),
            allow=allowed_texts(spec.base / path for path in settings.allow),
            on_progress=lambda done: on_progress(Progress(plan.seeds, done), spending),
        )
    finally:
        shutil.rmtree(stage, ignore_errors=True)
