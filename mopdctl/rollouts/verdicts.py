"""What verifiers say of rollouts: prompts that name a usable one, answers through the pool, verdicts onto samples."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from mopdctl.errors import InputError
from mopdctl.records import Prompt, Sample
from mopdctl.rollouts.generate import TOOL_LOST
from mopdctl.rollouts.tools import attempt_of
from mopdctl.train.spans import ChatModel
from mopdctl.verifiers import VERIFIERS, Attempt, Verdict, VerdictState
from mopdctl.verifiers.registry import run_check


class Pool(Protocol):
    """Runs checks; `verifiers.pool.VerifierPool` does so in processes that can be killed."""

    def check(self, asked: list[tuple[str, Attempt]]) -> list[Verdict]:
        """The verdicts on some attempts, each with the name of its verifier, in order."""
        ...


def check_verifiable(prompts: Iterable[Prompt], pool: Pool) -> None:
    """Raises InputError naming the first prompt whose verifier nobody knows or whose reference it cannot use.

    The reference is tried on an empty answer; of one that the verifier does not look at then, the verdicts will tell.
    Prompts without a verifier are left alone. `pool` runs only what may hang.
    """
    isolated: list[tuple[Prompt, tuple[str, Attempt]]] = []
    for prompt in prompts:
        if prompt.verifier is None:
            continue
        if not isinstance(prompt.verifier, str) or prompt.verifier not in VERIFIERS:
            near = difflib.get_close_matches(str(prompt.verifier), VERIFIERS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(f"{prompt.place}: verifier {prompt.verifier!r} is none of {', '.join(VERIFIERS)}{hint}")
        verifier = VERIFIERS[prompt.verifier]
        attempt = Attempt("", prompt.reference, prompt.messages, prompt.tools, prompt.environment)
        if verifier.isolated:
            isolated.append((prompt, (verifier.name, attempt)))
        else:
            _check_reference(prompt, run_check(verifier, attempt))
    for (prompt, _), verdict in zip(isolated, pool.check([item for _, item in isolated]), strict=True):
        _check_reference(prompt, verdict)


def _check_reference(prompt: Prompt, verdict: Verdict) -> None:
    if verdict.state is VerdictState.INVALID_REFERENCE:
        raise InputError(f"{prompt.place}: {verdict.detail}")


def verdicts_on(
    samples: Sequence[Sample], prompts: Mapping[str, Prompt], chat: ChatModel, pool: Pool, *, truncated: bool = True
) -> list[Verdict | None]:
    """What the verifiers that their prompts name say of some samples, in order; None where nobody is asked.

    A sample whose tool result was lost is an `infra_error` without being asked about: what the model would have
    answered, nobody knows.

    Args:
        samples: Finished ones, single answers or conversations with tools.
        prompts: By id; holds those of all samples.
        chat: Whose tokens they are.
        pool: Who runs the checks.
        truncated: Whether samples that did not come to their own end are checked like others, or not at all.
    """
    found: list[Verdict | None] = [None] * len(samples)
    asked: list[tuple[int, tuple[str, Attempt]]] = []
    for number, sample in enumerate(samples):
        prompt = prompts[sample.prompt_id]
        if prompt.verifier is None or (sample.finish_reason != "stop" and not truncated):
            continue
        if sample.finish_reason == TOOL_LOST:
            version = VERIFIERS[prompt.verifier].version
            found[number] = Verdict(
                VerdictState.INFRA_ERROR, None, prompt.verifier, version, "the result of a tool call was lost"
            )
        else:
            asked.append((number, (prompt.verifier, attempt_of(prompt, sample, chat))))
    verdicts = pool.check([item for _, item in asked]) if asked else []
    for (number, _), verdict in zip(asked, verdicts, strict=True):
        found[number] = verdict
    return found


def judge(
    samples: Sequence[Sample], prompts: Mapping[str, Prompt], chat: ChatModel, pool: Pool, *, truncated: bool = True
) -> list[Sample]:
    """The samples with their verdicts, in order; those of prompts without a verifier as they are. See `verdicts_on`."""
    verdicts = verdicts_on(samples, prompts, chat, pool, truncated=truncated)
    return [with_verdict(sample, verdict) for sample, verdict in zip(samples, verdicts, strict=True)]


def with_verdict(sample: Sample, verdict: Verdict | None) -> Sample:
    """The sample with a verdict; as it is for None."""
    return sample if verdict is None else replace(sample, **verdict_columns(verdict))


def verdict_columns(verdict: Verdict) -> dict[str, Any]:
    """A verdict as a sample and the store keep it. The reward is rounded to float32 as there."""
    return {
        "reward": None if verdict.reward is None else float(np.float32(verdict.reward)),
        "verdict": verdict.state.value,
        "verifier": f"{verdict.verifier}/{verdict.version}",
        "verdict_label": verdict.label or None,
    }


def earned(reward: float | None, verdict: str | None) -> float | None:
    """What an answer earned: 0 if it has no form or hangs its check, None if it could not be checked."""
    return 0.0 if verdict in (VerdictState.PARSE_ERROR, VerdictState.TIMEOUT) else reward


_TELLING = (VerdictState.INFRA_ERROR, VerdictState.TIMEOUT, VerdictState.INVALID_REFERENCE)


@dataclass(slots=True)
class Trouble:
    """The checks that came to no result, with an example of each state: the store keeps states without details."""

    counts: dict[VerdictState, int] = field(default_factory=dict)
    examples: dict[VerdictState, str] = field(default_factory=dict)

    def see(self, samples: Sequence[Sample], verdicts: Sequence[Verdict | None]) -> None:
        """Takes in some verdicts."""
        for sample, verdict in zip(samples, verdicts, strict=True):
            if verdict is not None and verdict.state in _TELLING:
                self.counts[verdict.state] = self.counts.get(verdict.state, 0) + 1
                self.examples.setdefault(verdict.state, f"{sample.sample_id}: {' '.join(verdict.detail.split())[:200]}")

    def lines(self) -> list[str]:
        """One line for each state."""
        return [f"{count} answers ended as {s}, the first {self.examples[s]}" for s, count in self.counts.items()]
