"""Two- and three-tier routing: a profile before the first step says which teacher of a domain serves which prompt.

The profile is taken once and written whole to `routing.jsonl` in the run's folder; a run that goes on reads it.
"""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from mopdctl.config.tiers import TiersConfig
from mopdctl.engines.base import Sampler, Scorer
from mopdctl.errors import InputError
from mopdctl.files import read_jsonl, write_jsonl
from mopdctl.records import Prompt, Sample
from mopdctl.rollouts.book import PromptBook
from mopdctl.rollouts.generate import RolloutLog, Tools, generate
from mopdctl.rollouts.jobs import Job, make_job
from mopdctl.rollouts.verdicts import Pool, earned, judge
from mopdctl.train import distributed
from mopdctl.train.spans import ChatModel

FRONTIER, SPECIALIST, SELF = 1, 2, 3

Serving = Mapping[int, str]
"""Tier to the alias of the teacher that serves a prompt there."""


@dataclass(frozen=True, slots=True)
class Routed:
    """One line of `routing.jsonl`: what was measured of a prompt, and who serves it."""

    prompt_id: str
    pass_rate: float | None
    """Mean reward of the student's answers; None where no threshold asks, or no answer could be checked."""
    confidence: float | None
    """Geometric-mean probability of the tier-2 teacher's greedy answer; None where no threshold asks."""
    tier: int
    teacher: str


class Engine(Sampler, Scorer, Protocol):
    """A teacher that answers and says how sure it is."""


class Student(Sampler, ChatModel, Protocol):
    """A student that answers and whose answers can be read."""


# ----------------------------------------------------------------------------------------------------------- the rule


def by_tier(aliases: Sequence[str], tiers: Mapping[str, int], *, place: str) -> dict[int, str]:
    """The teachers that serve a prompt, by tier. Raises InputError for two of one tier, or several without tier 2."""
    found: dict[int, str] = {}
    for alias in sorted(aliases):
        if tiers[alias] in found:
            raise InputError(
                f"{place}: teachers {found[tiers[alias]]} and {alias} both serve it in tier {tiers[alias]}; take its "
                "domain from one or give them different tiers"
            )
        found[tiers[alias]] = alias
    if len(found) > 1 and SPECIALIST not in found:
        raise InputError(
            f"{place}: teachers {' and '.join(sorted(aliases))} serve it, but none in tier 2, which takes what is "
            "neither too hard nor mastered"
        )
    return found


def needs_pass_rate(serving: Serving, config: TiersConfig) -> str | None:
    """The threshold that asks for the student's pass rate at a prompt; None if none does."""
    if len(serving) > 1 and SELF in serving and config.self_from_pass_rate is not None:
        return "tiers.self_from_pass_rate"
    if len(serving) > 1 and FRONTIER in serving and config.frontier_below_pass_rate is not None:
        return "tiers.frontier_below_pass_rate"
    return None


def needs_confidence(serving: Serving, config: TiersConfig) -> str | None:
    """The threshold that asks for the tier-2 teacher's confidence at a prompt; None if none does."""
    asks = len(serving) > 1 and FRONTIER in serving and config.frontier_below_confidence is not None
    return "tiers.frontier_below_confidence" if asks else None


def check_tiers(prompts: Sequence[Prompt], serving: Sequence[Serving], config: TiersConfig) -> None:
    """All that can be checked before a model is loaded. `serving` has one entry per prompt.

    Raises InputError for a prompt without a verifier whose pass rate a threshold needs, and for a teacher of tier 1 or
    3 beside one of tier 2 to whom no threshold would ever give a prompt.
    """
    for prompt, teachers in zip(prompts, serving, strict=True):
        if prompt.verifier is None and (threshold := needs_pass_rate(teachers, config)):
            raise InputError(
                f"{prompt.place}: names no verifier, and {threshold} needs the student's pass rate; give it one or set "
                "the threshold to null"
            )
        if len(teachers) == 1:
            continue
        if FRONTIER in teachers and config.frontier_below_pass_rate is config.frontier_below_confidence is None:
            raise InputError(
                f"teacher {teachers[FRONTIER]!r}: tier 1 gets no prompt, for both its thresholds are null; set "
                "tiers.frontier_below_pass_rate or tiers.frontier_below_confidence"
            )
        if SELF in teachers and config.self_from_pass_rate is None:
            raise InputError(
                f"teacher {teachers[SELF]!r}: tier 3 gets no prompt, for tiers.self_from_pass_rate is null; set it"
            )


def assign(
    serving: Serving, pass_rate: float | None, confidence: float | None, config: TiersConfig, *, place: str
) -> int:
    """The tier that serves a prompt.

    Its only teacher's, if it has only one. Else, in this order: 3 if the student passes it often enough; 1 if the
    student passes it too rarely or the tier-2 teacher is too unsure; 2. What is mastered needs no frontier teacher,
    however unsure tier 2 is. Raises InputError, naming `place`, for a number that is unknown and asked for.
    """
    if len(serving) == 1:
        return next(iter(serving))
    if pass_rate is None and (threshold := needs_pass_rate(serving, config)):
        raise InputError(
            f"{place}: its pass rate is unknown (no verifier, or no answer could be checked), and {threshold} needs it"
        )
    if confidence is None and (threshold := needs_confidence(serving, config)):
        raise InputError(f"{place}: the confidence of tier 2 is unknown, and {threshold} needs it")
    if SELF in serving and _known(pass_rate) >= _or(config.self_from_pass_rate, math.inf):
        return SELF
    too_hard = _known(pass_rate) < _or(config.frontier_below_pass_rate, -math.inf)
    unsure = _known(confidence) < _or(config.frontier_below_confidence, -math.inf)
    return FRONTIER if FRONTIER in serving and (too_hard or unsure) else SPECIALIST


def _known(number: float | None) -> float:
    """NaN, which no comparison holds for, where a number is not asked for."""
    return math.nan if number is None else number


def _or(threshold: float | None, otherwise: float) -> float:
    return otherwise if threshold is None else threshold


# -------------------------------------------------------------------------------------------------------- the profile


def route_by_tiers(
    path: Path,
    book: PromptBook,
    serving: Sequence[Serving],
    config: TiersConfig,
    student: Student,
    resident: Callable[[str], AbstractContextManager[Engine]],
    pool: Pool,
    *,
    tools: Tools | None,
    temperature: float,
    seed: int,
) -> list[Routed]:
    """Who serves each prompt of the book, in order; profiled and written to `path` if that does not exist.

    Every rank must call it; each profiles a part of the prompts. `resident` lends the teacher of an alias. Raises
    InputError for a number that is unknown and asked for (see `assign`), and for a file of other prompts.
    """
    is_there = any(distributed.gather_objects(path.exists()))
    if not is_there:
        rates = pass_rates(
            book,
            _own([row for row, teachers in enumerate(serving) if needs_pass_rate(teachers, config)]),
            config.samples,
            student,
            pool,
            tools=tools,
            temperature=temperature,
            seed=seed,
        )
        sure: dict[int, float | None] = {}
        asked = [row for row, teachers in enumerate(serving) if needs_confidence(teachers, config)]
        for alias in sorted({serving[row][SPECIALIST] for row in asked}):
            rows = _own([row for row in asked if serving[row][SPECIALIST] == alias])
            with resident(alias) as teacher:
                sure |= confidences(book, rows, teacher, tools=tools, seed=seed)
        rates, sure = _everywhere(rates), _everywhere(sure)
        routed = []
        for row, (prompt, teachers) in enumerate(zip(book.prompts, serving, strict=True)):
            tier = assign(teachers, rates.get(row), sure.get(row), config, place=prompt.place)
            routed.append(Routed(prompt.prompt_id, rates.get(row), sure.get(row), tier, teachers[tier]))
        if distributed.rank() == 0:
            write_jsonl(path, map(asdict, routed))
        distributed.barrier()
    return read_routing(path, book.prompts, serving)


def pass_rates(
    book: PromptBook,
    rows: Sequence[int],
    samples: int,
    student: Student,
    pool: Pool,
    *,
    tools: Tools | None,
    temperature: float,
    seed: int,
) -> dict[int, float | None]:
    """The student's pass rate at some prompts: the mean reward of `samples` answers, of those that could be checked."""
    answers = _answers(book, rows, "tiers", samples, student, tools=tools, temperature=temperature, seed=seed)
    prompts = {prompt.prompt_id: prompt for prompt in (book.prompts[row] for row in rows)}
    rewards: dict[int, list[float]] = {row: [] for row in rows}
    judged = judge([sample for _, sample in answers], prompts, student, pool)
    for (row, _), sample in zip(answers, judged, strict=True):
        if (reward := earned(sample.reward, sample.verdict)) is not None:
            rewards[row].append(reward)
    return {row: math.fsum(found) / len(found) if found else None for row, found in rewards.items()}


def confidences(
    book: PromptBook, rows: Sequence[int], teacher: Engine, *, tools: Tools | None, seed: int
) -> dict[int, float | None]:
    """exp(mean over t of log p(y_t)) of the teacher's own greedy answer y to some prompts, p at temperature 1."""
    answers = _answers(book, rows, "tiers/greedy", 1, teacher, tools=tools, temperature=0.0, seed=seed)
    # What an engine says of a greedy answer's probabilities is those of a distribution with one token in it.
    scores = teacher.score([(s.prompt_ids.tolist(), s.response_ids.tolist()) for _, s in answers])
    sure: dict[int, float | None] = {}
    for (row, sample), logprobs in zip(answers, scores, strict=True):
        own = [value for value, active in zip(logprobs, sample.response_mask, strict=True) if active]
        sure[row] = math.exp(math.fsum(own) / len(own)) if own else None
    return sure


def _answers(
    book: PromptBook,
    rows: Sequence[int],
    use: str,
    samples: int,
    sampler: Sampler,
    *,
    tools: Tools | None,
    temperature: float,
    seed: int,
) -> list[tuple[int, Sample]]:
    """`samples` answers to each prompt, with its row. `use` keeps their random streams apart from those of training."""
    jobs: list[Job] = []
    row_of: dict[str, int] = {}
    for row in rows:
        prompt = book.prompts[row]
        for number in range(samples):
            job = make_job(
                prompt,
                f"{use}/{number}",
                seed=seed,
                group_id="",
                generation_index=number,
                domain="",
                teacher_id="",
                prompt_ids=book.token_ids(row),
                max_new_tokens=book.budget(prompt),
            )
            jobs.append(job)
            row_of[job.sample_id] = row
    with tempfile.TemporaryDirectory() as folder, RolloutLog(Path(folder), writer="tiers", level="off") as log:
        found = generate(
            jobs,
            sampler,
            log,
            temperature=temperature,
            policy_version=0,
            tokenizer_fingerprint="",
            sampling_fingerprint="",
            tools=tools,
        )
        return [(row_of[sample.sample_id], sample) for sample in found]


def _own(rows: list[int]) -> list[int]:
    """This rank's part of some rows."""
    return rows[distributed.rank() :: distributed.world_size()]


def _everywhere(own: dict[int, float | None]) -> dict[int, float | None]:
    """What all ranks found."""
    return {row: value for found in distributed.gather_objects(own) for row, value in found.items()}


# ----------------------------------------------------------------------------------------------------------- the file


def read_routing(path: Path, prompts: Sequence[Prompt], serving: Sequence[Serving]) -> list[Routed]:
    """The lines of `routing.jsonl`, one per prompt, in order.

    Raises InputError for a file of other prompts, and for a teacher that does not serve the prompt in its tier.
    """
    found = []
    for number, row in read_jsonl(path):
        try:
            found.append(Routed(**row))
        except TypeError:
            raise InputError(f"{path}:{number}: not a line of a routing; remove the file to profile again") from None
    if [routed.prompt_id for routed in found] != [prompt.prompt_id for prompt in prompts]:
        raise InputError(f"{path}: routes other prompts than the run has; remove the file to profile again")
    for routed, teachers in zip(found, serving, strict=True):
        if teachers.get(routed.tier) != routed.teacher:
            raise InputError(
                f"{path}: {routed.teacher!r} does not serve prompt {routed.prompt_id!r} in tier {routed.tier}; "
                "remove the file to profile again"
            )
    return found


def tier_counts(routing: Sequence[Routed]) -> dict[str, dict[str, int]]:
    """Tier to teacher to prompts, for the plan's notes."""
    counts: dict[str, dict[str, int]] = {}
    for routed in sorted(routing, key=lambda r: (r.tier, r.teacher)):
        of_tier = counts.setdefault(f"tier_{routed.tier}", {})
        of_tier[routed.teacher] = of_tier.get(routed.teacher, 0) + 1
    return counts
