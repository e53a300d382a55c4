"""`mopdctl overlap`: the student's answers, each teacher's view of them, advice; all of it in `runs/overlap/NAME.json`.

The file stays beside the run that follows: it says what the student could do before (pass@k), and what was advised.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mopdctl.distill.jobs import answer_settings
from mopdctl.distill.merging.kinship import mean_cosine
from mopdctl.distill.merging.sources import open_sources
from mopdctl.distill.overlap.advice import against_merging
from mopdctl.distill.overlap.answers import student_answers
from mopdctl.distill.overlap.document import to_document
from mopdctl.distill.overlap.look import look_at
from mopdctl.distill.overlap.plan import OverlapSpec, Seat, make_plan
from mopdctl.distill.overlap.zero import zero_test
from mopdctl.engines.hf import HFModel
from mopdctl.engines.tokenizers import ChatTokenizer, differences, identify
from mopdctl.errors import InputError
from mopdctl.files import file_digest, fingerprint, write_json
from mopdctl.rollouts.book import PromptBook
from mopdctl.runs import Workspace, check_name, model_identity
from mopdctl.verifiers.pool import VerifierPool


def report_path(workspace: Workspace, name: str) -> Path:
    """Where the report of that name lies."""
    return workspace.run("overlap") / f"{check_name(name)}.json"


def plan_overlap(spec: OverlapSpec, workspace: Workspace) -> dict[str, Any]:
    """Everything that can be checked without loading a model. Writes nothing."""
    with VerifierPool() as pool:
        plan = make_plan(spec, workspace, pool)
    return {
        "name": spec.report_name,
        "student": plan.student,
        "teachers": {seat.alias: _path(seat) for seat in plan.teachers},
        "prompts_per_teacher": {seat.alias: len(seat.rows) for seat in plan.teachers},
        **({"domain": plan.domain, "candidates": {s.alias: _path(s) for s in plan.candidates}} if plan.domain else {}),
        "answers": len(plan.rows) * spec.samples,
        "store": str(workspace.rollouts(spec.store_name)),
        "report": str(report_path(workspace, spec.report_name)),
    }


def run_overlap(
    spec: OverlapSpec,
    workspace: Workspace,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_note: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Samples what is still missing, measures, and writes the report; returns it.

    Raises InputError for bad input, before anything is sampled where no weights are needed to see it.
    """
    with VerifierPool() as pool:
        document = _measured(spec, workspace, pool, on_progress, on_note)
    write_json(report_path(workspace, spec.report_name), document)
    return document


def _measured(
    spec: OverlapSpec,
    workspace: Workspace,
    pool: VerifierPool,
    on_progress: Callable[[int, int], None],
    on_note: Callable[[str], None],
) -> dict[str, Any]:
    plan = make_plan(spec, workspace, pool)
    config = spec.config
    seats = (*plan.teachers, *plan.candidates)
    digests = {source: source.identity for source in {seat.source for seat in seats}}
    made_by = {
        "student": model_identity(plan.student),
        "dtype": config.train.dtype,
        "prompts": fingerprint([file_digest(path) for path in plan.prompt_files]),
    }
    student = HFModel.load(plan.student, dtype=config.train.dtype, batch_size=config.train.sampling_batch_size)
    if spec.top_k > student.vocab_size:
        raise InputError(f"--top-k {spec.top_k}: the student's vocabulary has {student.vocab_size} tokens; take fewer")
    longest = min([student.max_length, *(_checked_length(seat, student) for seat in seats)])
    book = PromptBook(student, plan.prompts, answer_settings(config), max_length=longest)
    for row in plan.rows:
        book.token_ids(row)
    answers, new = student_answers(
        student,
        book,
        plan.rows,
        config,
        workspace,
        store=spec.store_name,
        samples=spec.samples,
        identity=made_by,
        pool=pool,
        on_progress=on_progress,
        on_note=on_note,
    )
    found = look_at(seats, student, book, answers, spec, workspace, pool=pool, on_note=on_note)
    zero = zero_test(
        student,
        [sample for row in plan.rows for sample in answers[row]],
        {
            seat.alias: one.streams
            for seat, one in zip(plan.teachers, found, strict=False)
            if digests[seat.source] == made_by["student"]
            and (seat.teacher.dtype, seat.teacher.quant) == (config.train.dtype, "none")
        },
        top_k=spec.top_k,
        room=spec.room,
    )
    if not zero.exact:
        on_note(
            f"zero test: the student differs from {zero.against} by up to {zero.kl_nats:g} nats where nothing should "
            "differ; do not trust smaller figures"
        )
    return to_document(
        spec,
        plan,
        found,
        zero,
        made_by=made_by,
        digests=digests,
        new=new,
        no_merge=_no_merge(spec, workspace),
    )


def _no_merge(spec: OverlapSpec, workspace: Workspace) -> str:
    """Why not to begin from a merge of student and teachers; empty if nothing speaks against it."""
    try:
        return against_merging(mean_cosine(open_sources(spec.config, workspace, base=spec.base)))
    except InputError as error:
        return str(error)


def _checked_length(seat: Seat, student: HFModel) -> int:
    """The context of a teacher, read without its weights.

    Raises InputError if it does not read the student's tokens. Of an adapter that is seen once it is loaded.
    """
    chat = ChatTokenizer.load(seat.source.model)
    found = []
    if seat.source.adapter is None:
        theirs = identify(chat)
        found = differences(identify(student), theirs)
    if found:
        raise InputError(
            f"teacher {seat.alias!r} ({seat.teacher.model}): differs from the student in {'; '.join(found)}; a teacher "
            "must read the student's tokens as the student wrote them"
        )
    return chat.max_length


def _path(seat: Seat) -> str:
    return str(seat.source.adapter or seat.source.model)
