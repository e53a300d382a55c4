"""The prompts of an RL run: several environments mixed by weight, and which of them are sampled together."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mopdctl.config.rl import RlConfig, RlTrainConfig
from mopdctl.engines.base import stream_seed
from mopdctl.records import Prompt
from mopdctl.rollouts.book import AnswerSettings, PromptBook
from mopdctl.rollouts.held_out import check_all_verifiable
from mopdctl.rollouts.jobs import Job, make_job
from mopdctl.rollouts.prompts import read_prompts
from mopdctl.train.order import draw_mixture


@dataclass(frozen=True, slots=True)
class Mixture:
    """All prompts, environment after environment in the order of the file."""

    prompts: list[Prompt]
    """Their ids begin with the environment's name, and `routing["environment"]` is it."""
    sizes: list[int]
    weights: list[float]
    taught: frozenset[int] = frozenset()
    """Numbers of the environments whose answers a teacher judges: they earn nothing and form no groups."""

    def rows(self, step: int, train: RlTrainConfig) -> list[int]:
        """The rows of optimizer step `step` (from 0). An environment uses every row once before any again."""
        first = step * train.batch_size
        count = max(train.steps * train.batch_size, first + train.batch_size)
        drawn = _draw(count, tuple(self.sizes), tuple(self.weights), train.seed)
        return [int(row) for row in drawn[first : first + train.batch_size]]

    def more_rows(
        self, step: int, round_: int, count: int, train: RlTrainConfig, *, used: Collection[int] = ()
    ) -> list[int]:
        """Up to `count` further rows for round `round_` (from 1) of a step, in place of groups that teach nothing.

        They are different rows of rewarded environments, and none of `used`. Fewer come where an environment has so few
        that its turn brings none that is new.
        """
        parts = [part for part in range(len(self.sizes)) if part not in self.taught]
        sizes, weights = [self.sizes[part] for part in parts], [self.weights[part] for part in parts]
        seed = stream_seed(train.seed, "resample", step, round_)
        drawn = draw_mixture(count + len(used), sizes, weights, seed)
        # From rows of these parts laid end to end to rows of all of them.
        ends, starts = np.cumsum(sizes), [0, *accumulate(self.sizes)]
        part_of = np.searchsorted(ends, drawn, side="right")
        moved = np.array([starts[part] for part in parts]) - (ends - np.array(sizes))
        fresh = dict.fromkeys(int(row) for row in drawn + moved[part_of])
        return [row for row in fresh if row not in used][:count]


@lru_cache(maxsize=2)
def _draw(count: int, sizes: tuple[int, ...], weights: tuple[float, ...], seed: int) -> NDArray[np.int64]:
    """All rows of a run, drawn at once: a draw for each step would cost more with every step."""
    return draw_mixture(count, sizes, weights, seed)


def read_mixture(config: RlConfig, *, base: Path) -> Mixture:
    """Reads every environment's prompts. Raises InputError naming the row for one whose answers nobody can check."""
    prompts: list[Prompt] = []
    checked: list[Prompt] = []
    sizes = []
    for name, environment in config.environments.items():
        found = read_prompts(base / environment.prompts, ())
        if environment.asks_verifier:  # a teacher's prompts need no verifier; if they have one, it is asked as well
            checked += [p for p in found if environment.teacher is None or p.verifier is not None]
        for prompt in found:
            routing = {"environment": name}
            prompts.append(replace(prompt, prompt_id=f"{name}/{prompt.prompt_id}", routing=routing))
        sizes.append(len(found))
    check_all_verifiable(checked)
    weights = [environment.weight for environment in config.environments.values()]
    taught = frozenset(n for n, e in enumerate(config.environments.values()) if e.teacher is not None)
    return Mixture(prompts, sizes, weights, taught)


def answer_settings(config: RlConfig, prompt: Prompt) -> AnswerSettings:
    """The token budget of a prompt: that of its environment, else the run's."""
    environment = config.environments[prompt.routing["environment"]]
    return AnswerSettings(environment.max_new_tokens or config.train.max_new_tokens)


def group_jobs(book: PromptBook, rows: Sequence[int], *, step: int, round_: int, config: RlConfig) -> list[Job]:
    """The jobs of one round: G answers to each prompt, one to each prompt of a teacher.

    A prompt that comes twice in a round makes two groups. Streams hang on seed, step, round, prompt and number alone.
    """
    jobs = []
    seen: dict[int, int] = {}
    for row in rows:
        prompt = book.prompts[row]
        name = prompt.routing["environment"]
        taught = config.environments[name].teacher is not None
        times = seen[row] = seen.get(row, -1) + 1
        place = f"{step}.{round_}.{times}"
        for number in range(1 if taught else config.train.group_size):
            jobs.append(
                make_job(
                    prompt,
                    f"{place}/{number}",
                    seed=config.train.seed,
                    group_id=f"{prompt.prompt_id}/{place}",
                    generation_index=number,
                    domain=name,
                    teacher_id=name if taught else "",
                    prompt_ids=book.token_ids(row),
                    max_new_tokens=book.budget(prompt),
                )
            )
    return jobs


def sampled_together(
    jobs: Sequence[Job], lengths: Mapping[str, float], seconds: Mapping[str, float]
) -> list[list[Job]]:
    """The jobs in batches of environments with answers of similar length, so that short ones do not wait for long ones.

    `lengths` is the mean response length of each environment so far, in tokens (its budget where there is none yet):
    one power of two is one batch. `seconds` is how long checking an environment's answers took: the batch that takes
    longest to check is sampled first, so that its checks run while the others are sampled. The order changes no answer.
    """
    batches: dict[int, list[Job]] = {}
    for job in jobs:
        batches.setdefault(int(lengths.get(job.domain, job.max_new_tokens)).bit_length(), []).append(job)

    def cost(length_class: int) -> tuple[float, int]:
        return -max(seconds.get(job.domain, 0.0) for job in batches[length_class]), length_class

    return [batches[length_class] for length_class in sorted(batches, key=cost)]
