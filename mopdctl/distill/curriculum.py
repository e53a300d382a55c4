"""A curriculum by pass rate: prompts come up that the student sometimes passes, and it follows the student.

What a run knows of pass rates is a function of the rewards in its rollout store. A run that goes on reads the commits
of the steps that are behind it, and knows to the bit what an undisturbed one does. (Who has the store of a running run
verified anew changes its curriculum.)

Source: PACED (arXiv 2603.11178), which weighs prompts with p^a (1-p)^b in the loss; here they are drawn with it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mopdctl.config.balance import CurriculumConfig
from mopdctl.engines.base import stream_seed
from mopdctl.errors import InputError
from mopdctl.records import Prompt, Sample
from mopdctl.rollouts.verdicts import earned
from mopdctl.store.store import Store
from mopdctl.train.distributed import gather_objects


class Outcome(NamedTuple):
    """What one answer earned."""

    prompt_id: str
    teacher_id: str
    reward: float | None
    """In [0, 1], and a pass rate is a mean of these; None if the answer could not be checked."""


def outcomes_of(samples: Iterable[Sample]) -> list[Outcome]:
    """The outcomes of the judged samples of all ranks. Every rank must call it."""
    own = [Outcome(s.prompt_id, s.teacher_id, earned(s.reward, s.verdict)) for s in samples]
    return [one for found in gather_objects(own) for one in found]


def outcome_metrics(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """`curriculum/reward`, the mean of a step, and `curriculum/unchecked`, the answers it leaves out, per teacher."""
    rewards: dict[str, list[float]] = {}
    unchecked: dict[str, int] = {}
    for one in sorted(outcomes, key=lambda o: o.teacher_id):
        earned = rewards.setdefault(one.teacher_id, [])
        if one.reward is None:
            unchecked[one.teacher_id] = unchecked.get(one.teacher_id, 0) + 1
        else:
            earned.append(one.reward)
    means = {alias: math.fsum(earned) / len(earned) if earned else None for alias, earned in rewards.items()}
    return {"curriculum/reward": means, **({"curriculum/unchecked": unchecked} if unchecked else {})}


class PassRates:
    """The student's running pass rate at each prompt.

    Of a prompt whose answers earned r_1 ... r_K in a step:

        passed <- memory passed + sum r_k,  tried <- memory tried + K,  p = (passed + m prior) / (tried + m)

    with m = `prior_answers`. Because memory is below 1, `tried` is bounded and p never reaches 0 or 1: no prompt is
    given up for good, nor thought mastered for good.
    """

    def __init__(self, config: CurriculumConfig, prompts: Sequence[Prompt]) -> None:
        self._config = config
        self._rows = {prompt.prompt_id: row for row, prompt in enumerate(prompts)}
        self._passed_P = np.zeros(len(prompts))
        self._tried_P = np.zeros(len(prompts))

    def observe(self, outcomes: Iterable[Outcome]) -> None:
        """Takes in all outcomes of one step, in any order."""
        by_prompt: dict[str, list[float]] = {}
        for one in outcomes:
            if one.reward is not None:
                by_prompt.setdefault(one.prompt_id, []).append(one.reward)
        for prompt_id, rewards in by_prompt.items():
            row = self._rows[prompt_id]
            self._passed_P[row] = self._config.memory * self._passed_P[row] + math.fsum(rewards)
            self._tried_P[row] = self._config.memory * self._tried_P[row] + len(rewards)

    def resume(self, store: Store, step: int) -> None:
        """Takes in the committed answers of the steps before `step`. Later ones belong to steps that are repeated."""
        table = store.meta_table(["prompt_id", "teacher_id", "group_id", "reward", "verdict"])
        steps: dict[int, list[Outcome]] = {}
        for row in table.to_pylist():
            made_in = int(row["group_id"].rpartition("/")[2])
            if made_in < step:
                reward = earned(row["reward"], row["verdict"])
                steps.setdefault(made_in, []).append(Outcome(row["prompt_id"], row["teacher_id"], reward))
        for _, outcomes in sorted(steps.items()):
            self.observe(outcomes)

    def rates(self, rows: Sequence[int]) -> NDArray[np.float64]:
        """The pass rates p of some prompts, each in (0, 1)."""
        strength = self._config.prior_answers
        passed_P, tried_P = self._passed_P[list(rows)], self._tried_P[list(rows)]
        found: NDArray[np.float64] = (passed_P + strength * self._config.prior) / (tried_P + strength)
        return found

    def metrics(self, pools: Mapping[str, Sequence[int]]) -> dict[str, dict[str, float]]:
        """`curriculum/pass_rate`, the mean p, and `curriculum/seen_share`, the share that was answered, per teacher."""
        return {
            "curriculum/pass_rate": {alias: float(self.rates(rows).mean()) for alias, rows in pools.items()},
            "curriculum/seen_share": {
                alias: float((self._tried_P[list(rows)] > 0).mean()) for alias, rows in pools.items()
            },
        }


def log_weights(rates_P: NDArray[np.float64], config: CurriculumConfig) -> NDArray[np.float64]:
    """log(p^a (1-p)^b) of pass rates in (0, 1)."""
    found: NDArray[np.float64] = config.pass_exponent * np.log(rates_P) + config.fail_exponent * np.log1p(-rates_P)
    return found


def curriculum_rows(
    base_rows: Sequence[int],
    teachers: Sequence[str],
    pools: Mapping[str, Sequence[int]],
    rates: PassRates,
    config: CurriculumConfig,
    *,
    step: int,
    seed: int,
) -> list[int]:
    """The rows of a step: whose turn it is stays as in `base_rows`, which of his prompts it is the pass rates say.

    A teacher's prompts are drawn one after another in proportion to their weights, none twice before all have come.

    Args:
        base_rows: The step's rows without a curriculum (`draw_run`).
        teachers: Alias of each row's teacher.
        pools: Alias to its rows.
        rates: What is known of the student before this step.
        config: The exponents.
        step: From 0.
        seed: Of the run.
    """
    turns = [teachers[row] for row in base_rows]
    drawn: dict[str, list[int]] = {}
    for alias in sorted(set(turns)):
        logs_P = log_weights(rates.rates(pools[alias]), config)
        order = weighted_order(logs_P, turns.count(alias), stream_seed(seed, "curriculum", step, alias))
        drawn[alias] = [pools[alias][i] for i in order][::-1]
    return [drawn[alias].pop() for alias in turns]


def weighted_order(log_weights_P: NDArray[np.float64], count: int, seed: int) -> list[int]:
    """`count` of P things, the first drawn in proportion to the weights, each next one so among those left.

    A race of exponential clocks, thing i ticking at rate w_i. Once all have come, another race begins. More weight
    never makes a thing come later. Source: Efraimidis & Spirakis 2006, algorithm A-Res.
    """
    found: list[int] = []
    for lap in range(-(-count // len(log_weights_P))):
        random = np.random.Generator(np.random.Philox(key=stream_seed(seed, lap))).random(len(log_weights_P))
        # log of -log(1 - u) / w; in logs, so that no weight is too small to be told from 0.
        with np.errstate(divide="ignore"):
            arrival_P = np.log(-np.log1p(-random)) - log_weights_P
        found += np.argsort(arrival_P, kind="stable").tolist()
    return found[:count]


def check_curriculum(prompts: Sequence[Prompt]) -> None:
    """Raises InputError naming the first prompt without a verifier: nobody could say whether the student passes it."""
    for prompt in prompts:
        if prompt.verifier is None:
            raise InputError(f"{prompt.place}: names no verifier; train.curriculum needs one to know its pass rate")
