"""Scores on held-out prompts while training: greedy answers, verified."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mopdctl.config.train import OnPolicyConfig
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError, MopdctlError
from mopdctl.records import Prompt
from mopdctl.rollouts.book import PromptBook
from mopdctl.rollouts.generate import RolloutLog, Tools, generate
from mopdctl.rollouts.jobs import make_job
from mopdctl.rollouts.prompts import read_prompts
from mopdctl.rollouts.tools import environment_tools
from mopdctl.rollouts.verdicts import check_verifiable, judge
from mopdctl.verifiers import VERIFIERS, VerdictState
from mopdctl.verifiers.pool import VerifierPool


def read_held_out(train: OnPolicyConfig, routing_keys: tuple[str, ...], *, base: Path) -> list[Prompt]:
    """The prompts in `train.eval_prompts`, which has to name a file.

    Raises InputError for a prompt whose verifier or reference is unusable.
    """
    assert train.eval_prompts is not None
    prompts = read_prompts(base / train.eval_prompts, routing_keys)
    check_all_verifiable(prompts)
    return prompts


def check_all_verifiable(prompts: Sequence[Prompt]) -> None:
    """Raises InputError naming the first prompt whose answers nobody could check."""
    for prompt in prompts:
        if prompt.verifier is None:
            raise InputError(f"{prompt.place}: names no verifier; it is one of {', '.join(VERIFIERS)}")
    with VerifierPool() as pool:
        check_verifiable(prompts, pool)


def mean_reward(model: HFModel, book: PromptBook, rows: Sequence[int]) -> float:
    """The mean reward of greedy answers, on 0-100; see `held_out_score`."""
    prompts = {book.prompts[row].prompt_id: book.prompts[row] for row in rows}
    tools = environment_tools(prompts, model, variables=book.template_kwargs)
    with VerifierPool() as pool:
        return held_out_score(model, book, rows, tools, pool).score


class HeldOutScore(NamedTuple):
    """What a model's greedy answers earned."""

    score: float
    """Mean reward, on 0-100."""
    unchecked: int
    """Answers that the mean leaves out, because their check broke."""


def held_out_score(
    model: HFModel, book: PromptBook, rows: Sequence[int], tools: Tools | None, pool: VerifierPool
) -> HeldOutScore:
    """The mean reward of greedy answers to some prompts of the book.

    An answer that cannot be parsed, or hangs its check, earns 0; one whose check broke counts neither for nor against.
    `tools` are those of the prompts. Raises InputError for a reference that is unusable, and MopdctlError if not one
    answer could be checked.
    """
    prompts = [book.prompts[row] for row in rows]
    jobs = [
        make_job(
            prompt,
            str(number),
            seed=0,
            group_id="",
            generation_index=0,
            domain="",
            teacher_id="",
            prompt_ids=book.token_ids(row),
            max_new_tokens=book.budget(prompt),
        )
        for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True))
    ]
    with tempfile.TemporaryDirectory() as folder, RolloutLog(Path(folder), writer="held-out", level="off") as log:
        samples = list(
            generate(
                jobs,
                model,
                log,
                temperature=0,
                policy_version=0,
                tokenizer_fingerprint="",
                sampling_fingerprint="",
                tools=tools,
            )
        )
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    samples = judge(samples, by_id, model, pool)
    for sample in samples:
        if sample.verdict == VerdictState.INVALID_REFERENCE:
            raise InputError(f"{by_id[sample.prompt_id].place}: its reference is unusable")
    checked = [sample.reward or 0.0 for sample in samples if sample.verdict != VerdictState.INFRA_ERROR]
    if not checked:
        place = by_id[samples[0].prompt_id].place
        raise MopdctlError(f"{place}: no held-out answer could be checked; `mopdctl doctor verifiers` tries the checks")
    return HeldOutScore(100 * sum(checked) / len(checked), len(samples) - len(checked))
