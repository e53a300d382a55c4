"""What a step trains on where the teacher is a black box, each part under its own loss component."""

from collections import Counter
from collections.abc import Mapping, Sequence

from mopdctl.distill.blackbox.book import AnswerBook
from mopdctl.distill.blackbox.discriminators import Discriminators
from mopdctl.records import Sample
from mopdctl.train import distributed
from mopdctl.train.batch import TrainSequence
from mopdctl.train.policy import over_response, train_sequence

ANSWERS, DISCRIMINATOR = "answers", "discriminator"
"""The loss components. Each has its own denominators, so that none dilutes another or the teachers with scores."""
COMPONENTS = (ANSWERS, DISCRIMINATOR)


def sequences_for(
    drawn: Sequence[tuple[str, str]],
    samples: Sequence[Sample],
    books: Mapping[str, AnswerBook],
    discriminators: Discriminators,
    *,
    step: int,
    turn: int,
    weights: Mapping[str, float],
    prox_logprobs: Mapping[str, Sequence[float]] | None = None,
) -> list[TrainSequence]:
    """All that black boxes teach in one step. Every rank must call it.

    A teacher that gives answers, and one whose discriminator still warms up, teaches by them (component `answers`);
    another's discriminator pays for the student's own answers (component `discriminator`).

    Args:
        drawn: (alias, prompt id) of all prompts of the step that a black box teaches, those of all ranks, in order.
        samples: The student's answers on this rank; those of other teachers are passed over.
        books: Alias to its answers.
        discriminators: Those of the run, before their own step.
        step: From 0.
        turn: How often the prompts were drawn before.
        weights: Alias to lambda.
        prox_logprobs: See `policy_sequences`.
    """
    paid = {alias for alias in discriminators.aliases if not discriminators.is_warming_up(alias, step)}
    by_answers = [(alias, prompt_id) for alias, prompt_id in drawn if alias not in paid]
    own = [sample for sample in samples if sample.teacher_id in paid]
    return [
        *answer_sequences(by_answers, books, turn=turn, weights=weights),
        *policy_sequences(own, discriminators.advantages(own, turn=turn), weights=weights, prox_logprobs=prox_logprobs),
    ]


def answer_sequences(
    drawn: Sequence[tuple[str, str]],
    books: Mapping[str, AnswerBook],
    *,
    turn: int,
    weights: Mapping[str, float],
) -> list[TrainSequence]:
    """One answer of its teacher to each prompt that was drawn; of them, those of this rank.

    Args:
        drawn: (alias, prompt id) of all ranks, in order.
        books: Alias to its answers.
        turn: How often the prompts were drawn before; one that is drawn twice now goes on counting.
        weights: Alias to lambda.
    """
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for alias, prompt_id in drawn:
        again = seen[alias, prompt_id]
        seen[alias, prompt_id] += 1
        answer = books[alias].answer(prompt_id, turn + again)
        found.append(
            TrainSequence(
                sample_id=f"{answer.sample_id}#{again}",
                prompt_ids=answer.prompt_ids.tolist(),
                response_ids=answer.response_ids.tolist(),
                loss_mask=answer.response_mask.astype(int).tolist(),
                teacher_id=alias,
                weight=weights[alias],
                component=ANSWERS,
            )
        )
    return found[distributed.rank() :: distributed.world_size()]


def policy_sequences(
    samples: Sequence[Sample],
    advantages: Mapping[str, float],
    *,
    weights: Mapping[str, float],
    prox_logprobs: Mapping[str, Sequence[float]] | None = None,
) -> list[TrainSequence]:
    """The student's own answers with the advantage of each at all of its tokens (stream `advantages`).

    Args:
        samples: Of this rank.
        advantages: Sample id to advantage.
        weights: Alias to lambda.
        prox_logprobs: Sample id to one value per response token, where the learner is not the proximal policy.
    """
    found = []
    for sample in samples:
        streams: dict[str, Sequence[float]] = {
            "advantages": over_response(sample, [advantages[sample.sample_id]] * len(sample.behavior_logprobs))
        }
        if prox_logprobs is not None:
            streams["prox_logprobs"] = prox_logprobs[sample.sample_id]
        alias = sample.teacher_id
        found.append(train_sequence(sample, streams, judge=alias, weight=weights[alias], component=DISCRIMINATOR))
    return found
