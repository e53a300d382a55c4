"""What a merge scores on the held-out prompts of each teacher."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mopdctl.config.teachers import TeachersFile
from mopdctl.distill import held_out
from mopdctl.distill.jobs import answer_settings
from mopdctl.distill.merging.methods import Combine
from mopdctl.distill.merging.search import Candidate
from mopdctl.distill.merging.sources import Scales, Sources, load_into
from mopdctl.engines.hf import HFModel
from mopdctl.engines.tokenizers import ChatTokenizer
from mopdctl.errors import InputError
from mopdctl.rollouts.book import PromptBook
from mopdctl.rollouts.generate import Tools
from mopdctl.rollouts.held_out import held_out_score
from mopdctl.rollouts.tools import environment_tools
from mopdctl.verifiers.pool import VerifierPool


@dataclass(frozen=True, slots=True)
class Questions:
    """Held-out prompts as the student's tokens, and which of them are whose."""

    book: PromptBook
    rows: dict[str, list[int]]
    """Alias of a teacher to the rows of the book that it serves."""
    tools: Tools | None


def read_questions(config: TeachersFile, student: str, *, base: Path) -> Questions:
    """The first `eval_size` rows of each teacher in `train.eval_prompts`, read without the student's weights.

    Raises InputError where no file is named, for a prompt that nobody could check or that does not fit into the
    student's context, and for a teacher without prompts.
    """
    if config.train.eval_prompts is None:
        raise InputError("a search for scales needs held-out prompts; name their file in `train.eval_prompts`")
    prompts, rows = held_out.read(config, base=base)
    if idle := sorted(config.teachers.keys() - rows.keys()):
        raise InputError(
            f"teacher {idle[0]!r}: no held-out prompt routes to it, so that nothing tells its scale; add prompts of "
            f"its domains to {config.train.eval_prompts}"
        )
    chat = ChatTokenizer.load(student)
    book = PromptBook(chat, prompts, answer_settings(config))
    used = sorted(row for found in rows.values() for row in found)
    for row in used:
        book.token_ids(row)
    tools = environment_tools(
        {prompts[row].prompt_id: prompts[row] for row in used}, chat, variables=book.template_kwargs
    )
    return Questions(book, dict(sorted(rows.items())), tools)


@contextmanager
def measuring(
    questions: Questions, sources: Sources, combine: Combine, student: HFModel
) -> Iterator[Callable[[Scales], Candidate]]:
    """What scores the merge with given scales, by greedy answers; it leaves the merged weights in the student."""
    with VerifierPool() as pool:

        def measure(scales: Scales) -> Candidate:
            load_into(student, sources.merge(combine, scales))
            found = {
                alias: held_out_score(student, questions.book, rows, questions.tools, pool)
                for alias, rows in questions.rows.items()
            }
            scores = {alias: one.score for alias, one in found.items()}
            return Candidate(scales, scores, sum(one.unchecked for one in found.values()))

        yield measure
