"""The prompts of a run: one file for all teachers or one for each, and how often each teacher's turn comes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mopdctl.config.teachers import TeachersFile
from mopdctl.errors import InputError
from mopdctl.records import Prompt
from mopdctl.rollouts.prompts import read_prompts
from mopdctl.train.order import draw_mixture


def read_pools(
    config: TeachersFile, common: Path | None, own: Mapping[str, Path]
) -> tuple[list[Prompt], list[str | None]]:
    """All prompts: those of the common file, then those of each teacher's own, and who owns each (None: the common).

    An own prompt's id begins with its teacher's alias. If its row names no domain, it has that of its teacher, if that
    serves only one. Raises InputError naming the row for a domain that its teacher does not serve, and for an id that
    stands twice.
    """
    prompts = read_prompts(common, config.routing_keys) if common else []
    owners: list[str | None] = [None] * len(prompts)
    places = {prompt.prompt_id: prompt.place for prompt in prompts}
    for alias, path in sorted(own.items()):
        for read in read_prompts(path, config.routing_keys, required=False):
            routing = _own_routing(read, alias, config)
            prompt = replace(read, prompt_id=f"{alias}/{read.prompt_id}", routing=routing)
            if prompt.prompt_id in places:
                raise InputError(
                    f"{prompt.place}: id {prompt.prompt_id!r} is that of {places[prompt.prompt_id]} too; rename one"
                )
            places[prompt.prompt_id] = prompt.place
            prompts.append(prompt)
            owners.append(alias)
    return prompts, owners


def _own_routing(prompt: Prompt, alias: str, config: TeachersFile) -> dict[str, str]:
    """The routing fields of a prompt in a teacher's own file. Raises InputError if that teacher does not serve them."""
    teacher = config.teachers[alias]
    domain_key, *other = config.routing_keys
    domain = prompt.routing.get(domain_key)
    if domain is None and len(teacher.domains) == 1:
        domain = teacher.domains[0]
    if domain is None:
        raise InputError(
            f"{prompt.place}: no text in routing field {domain_key!r}; teacher {alias!r} serves several domains "
            f"({', '.join(teacher.domains)})"
        )
    if domain not in teacher.domains:
        raise InputError(
            f"{prompt.place}: {domain_key} {domain!r} in the prompts of teacher {alias!r}, which serves "
            f"{', '.join(teacher.domains)}"
        )
    for key in other:
        effort = prompt.routing.get(key)
        if effort is None:
            raise InputError(f"{prompt.place}: no text in routing field {key!r}; every prompt needs one")
        if teacher.efforts and effort not in teacher.efforts:
            raise InputError(
                f"{prompt.place}: {key} {effort!r} in the prompts of teacher {alias!r}, which serves "
                f"{', '.join(teacher.efforts)}"
            )
    return {domain_key: domain, **{key: prompt.routing[key] for key in other}}


def assigned(prompts: Sequence[Prompt], owners: Sequence[str | None], teacher_of: Callable[[Prompt], str]) -> list[str]:
    """The alias of each prompt's teacher: its owner, else what `teacher_of` says of a common one.

    Raises InputError naming the row of a common prompt whose teacher has prompts of its own.
    """
    with_own = {owner for owner in owners if owner is not None}
    found = []
    for prompt, owner in zip(prompts, owners, strict=True):
        alias = owner if owner is not None else teacher_of(prompt)
        if owner is None and alias in with_own:
            raise InputError(
                f"{prompt.place}: routes to teacher {alias!r}, which has `prompts` of its own; move the row there or "
                "remove it"
            )
        found.append(alias)
    return found


def pools_of(teachers: Sequence[str]) -> dict[str, list[int]]:
    """Alias to the rows of its prompts, given the alias of each row's teacher; sorted by alias."""
    pools: dict[str, list[int]] = {}
    for row, alias in enumerate(teachers):
        pools.setdefault(alias, []).append(row)
    return dict(sorted(pools.items()))


def checked_sampling_weights(given: Mapping[str, float | None]) -> dict[str, float] | None:
    """The `sampling_weight` of every teacher; None if none has one. Raises InputError where only some have."""
    weights = {alias: weight for alias, weight in sorted(given.items()) if weight is not None}
    if weights and (missing := sorted(given.keys() - weights.keys())):
        raise InputError(
            f"teacher {missing[0]!r}: has no sampling_weight, but {next(iter(weights))!r} has; give it to all or none"
        )
    return weights or None


def draw_run(
    pools: Mapping[str, Sequence[int]],
    sampling_weights: Mapping[str, float] | None,
    *,
    steps: int,
    batch_size: int,
    seed: int,
) -> NDArray[np.int64]:
    """The rows of every step of a run, [steps, batch_size].

    Without weights all prompts are shuffled together, so that teachers come up in proportion to their prompts. With
    weights teachers take turns in proportion to these. Either way each row is used once before any of its pool again,
    step and seed alone say which rows come next, and a longer run begins with a shorter one.

    Args:
        pools: Alias to rows, none empty.
        sampling_weights: Alias to a positive weight in any common unit, for every pool; or None.
        steps: Optimizer steps.
        batch_size: Prompts per step.
        seed: Of the run.
    """
    if sampling_weights is None:
        parts, weights = [sorted(row for rows in pools.values() for row in rows)], [1.0]
    else:
        # By name, so that the order of teachers in the file means nothing.
        aliases = sorted(pools)
        parts, weights = [list(pools[a]) for a in aliases], [sampling_weights[a] for a in aliases]
    rows = np.array([row for part in parts for row in part], np.int64)
    drawn = draw_mixture(steps * batch_size, [len(part) for part in parts], weights, seed)
    return rows[drawn].reshape(steps, batch_size)


def sampling_factors(
    pools: Mapping[str, Sequence[int]],
    sampling_weights: Mapping[str, float] | None,
    *,
    of: Callable[[str], str] = lambda alias: "",
) -> dict[str, float]:
    """What each teacher's lambda is multiplied with, so that sampling weights do not change what is optimized.

        factor_d = p_d / q_d,    p_d = prompts of d / all prompts,    q_d = sampling_weight_d / sum of them

    The objective is the lambda-weighted mean over prompts, however often each is drawn. In a batch of B answers teacher
    d has about q_d B, so that with `loss_reduction: sequence` the expected loss of its answers is lambda_d p_d times
    their mean whatever the sampling weights; with `token` the ratio of any two teachers' is, while the number of loss
    tokens, by which all are divided, is that of the batch as drawn. 1 for all without weights.

    `of` names the denominator that a teacher's loss has: p and q are shares among those that have the same, since how
    often one is drawn changes nothing for another's mean.
    """
    if sampling_weights is None:
        return dict.fromkeys(sorted(pools), 1.0)
    found = {}
    for alias, rows in sorted(pools.items()):
        group = [other for other in pools if of(other) == of(alias)]
        share_of_prompts = len(rows) / sum(len(pools[other]) for other in group)
        found[alias] = share_of_prompts * sum(sampling_weights[other] for other in group) / sampling_weights[alias]
    return found
