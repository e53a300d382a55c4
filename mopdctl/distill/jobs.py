"""The student's answers to ask for in each step."""

from collections import Counter
from collections.abc import Callable, Sequence

from mopdctl.config.teachers import TeachersFile
from mopdctl.records import Prompt
from mopdctl.rollouts.book import AnswerSettings, PromptBook
from mopdctl.rollouts.jobs import Job, make_job


def answer_settings(config: TeachersFile) -> Callable[[Prompt], AnswerSettings]:
    """The token budget and template arguments of a prompt: those of its effort, else the run's."""
    keys = config.routing_keys

    def settings(prompt: Prompt) -> AnswerSettings:
        effort = config.efforts.get(prompt.routing[keys[1]]) if len(keys) > 1 else None
        if effort is None:
            return AnswerSettings(config.train.max_new_tokens)
        return AnswerSettings(effort.max_new_tokens or config.train.max_new_tokens, effort.chat_template_kwargs)

    return settings


def step_jobs(
    book: PromptBook, rows: Sequence[int], teachers: Sequence[str], *, step: int, config: TeachersFile
) -> list[Job]:
    """One job for each of `samples_per_prompt` answers to each prompt of one step.

    A sample's random stream hangs on seed, step, prompt and sample number alone, so that batching and world size change
    nothing. `teachers` has the alias of each prompt of the book.
    """
    jobs = []
    seen: Counter[int] = Counter()
    for row in rows:  # a batch that reaches into the next epoch may hold a prompt twice
        prompt = book.prompts[row]
        for number in range(seen[row], seen[row] + config.train.samples_per_prompt):
            jobs.append(
                make_job(
                    prompt,
                    f"{step}/{number}",
                    seed=config.train.seed,
                    group_id=f"{prompt.prompt_id}/{step}",
                    generation_index=number,
                    domain=prompt.routing[config.routing_keys[0]],
                    teacher_id=teachers[row],
                    prompt_ids=book.token_ids(row),
                    max_new_tokens=book.budget(prompt),
                )
            )
        seen[row] += config.train.samples_per_prompt
    return jobs
