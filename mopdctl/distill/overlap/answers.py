"""The student's own answers to each teacher's prompts, kept in a rollout store: a second look samples nothing again."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.jobs import answer_settings
from mopdctl.engines.hf import HFModel
from mopdctl.engines.tokenizers import tokenizer_fingerprint
from mopdctl.environments.registry import ENVIRONMENTS
from mopdctl.files import digest
from mopdctl.records import Prompt, Sample
from mopdctl.rollouts.book import PromptBook
from mopdctl.rollouts.jobs import Job, make_job
from mopdctl.rollouts.step import OnNote, StepRollouts
from mopdctl.rollouts.tools import environment_tools
from mopdctl.rollouts.verdicts import Trouble, verdicts_on, with_verdict
from mopdctl.runs import Workspace
from mopdctl.verifiers.pool import VerifierPool

_COMMIT_EVERY = 256


def pick(prompts: Sequence[Prompt], rows: Sequence[int], *, limit: int, seed: int) -> tuple[int, ...]:
    """Up to `limit` of some rows, in order.

    Which ones hangs on seed and prompt id alone: more of them contain the fewer, and the file may be sorted in any way.
    """
    drawn = sorted(rows, key=lambda row: digest(f"{seed}/{prompts[row].prompt_id}"))
    return tuple(sorted(drawn[:limit]))


def student_answers(
    student: HFModel,
    book: PromptBook,
    rows: Sequence[int],
    config: TeachersFile,
    workspace: Workspace,
    *,
    store: str,
    samples: int,
    identity: Mapping[str, Any],
    pool: VerifierPool,
    on_progress: Callable[[int, int], None],
    on_note: OnNote,
) -> tuple[dict[int, list[Sample]], int]:
    """`samples` answers to each of some prompts, by row, and how many of them were sampled now.

    They are in the store `store`, verified where the prompt names a verifier. The store goes with student, prompts and
    sampling settings (`identity`), not with their number nor with teachers: what is there is read back. Raises
    InputError if the store was begun with others.
    """
    train = config.train
    by_id = {book.prompts[row].prompt_id: book.prompts[row] for row in rows}
    names = sorted({str(prompt.environment["name"]) for prompt in book.prompts if prompt.environment})
    jobs = {row: [_job(book, row, number, config) for number in range(samples)] for row in rows}
    wanted = [job for found in jobs.values() for job in found]
    settings = {
        "temperature": train.temperature,
        "max_new_tokens": train.max_new_tokens,
        "efforts": {name: effort.model_dump(mode="json") for name, effort in sorted(config.efforts.items())},
    }
    made_by = {
        "tokenizer": tokenizer_fingerprint(student),
        "command": "overlap",
        "environments": {name: ENVIRONMENTS[name].version for name in names},
        "seed": train.seed,
        **identity,
        **settings,
    }
    template = answer_settings(config)
    tools = environment_tools(by_id, student, variables=lambda prompt: template(prompt).template_kwargs)
    found: dict[str, Sample] = {}
    new, trouble = 0, Trouble()
    with StepRollouts(
        workspace.rollouts(store),
        identity=made_by,
        sampling={"model": identity["student"], **settings},
        temperature=train.temperature,
        durability=train.durability,
        tools=tools,
        on_note=on_note,
    ) as rollouts:
        on_progress(0, len(wanted))
        for start in range(0, len(wanted), _COMMIT_EVERY):
            answers = rollouts.sample(student, wanted[start : start + _COMMIT_EVERY], policy_version=0)
            fresh = [sample for sample in answers if not rollouts.is_kept(sample)]
            verdicts = verdicts_on(fresh, by_id, student, pool)
            trouble.see(fresh, verdicts)
            judged = [with_verdict(sample, verdict) for sample, verdict in zip(fresh, verdicts, strict=True)]
            rollouts.keep(judged)
            new += len(fresh)
            found |= {sample.sample_id: sample for sample in (*answers, *judged)}
            on_progress(len(found), len(wanted))
        rollouts.finish()
    for line in trouble.lines():
        on_note(line)
    return {row: [found[job.sample_id] for job in mine] for row, mine in jobs.items()}, new


def _job(book: PromptBook, row: int, number: int, config: TeachersFile) -> Job:
    prompt = book.prompts[row]
    return make_job(
        prompt,
        str(number),
        seed=config.train.seed,
        group_id=prompt.prompt_id,
        generation_index=number,
        domain=prompt.routing[config.routing_keys[0]],
        teacher_id="",
        prompt_ids=book.token_ids(row),
        max_new_tokens=book.budget(prompt),
    )
