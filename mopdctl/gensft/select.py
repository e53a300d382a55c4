"""Choosing which answers of a seed become rows, with a reason for each one that does not."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Literal

from mopdctl.config.gensft import SelectConfig
from mopdctl.gensft.records import Judged

DropReason = Literal[
    "not_verified",
    "verifier_failed",
    "below_min_score",
    "no_score",
    "below_reference",
    "no_answer_found",
    "no_majority",
    "outvoted",
    "not_best",
    "pending",
]
"""In the order in which they are looked for; an answer is dropped for the first that applies. `pending` is not given
here: the run was stopped before its judges were asked."""

DROP_REASONS: dict[DropReason, str] = {
    "not_verified": "The verifier says that it is wrong.",
    "verifier_failed": "The verifier could not read it, or its reference.",
    "below_min_score": "Scored below `min_score`.",
    "no_score": "A panel should have scored it and did not.",
    "below_reference": "Scored no higher than the reference member's answer.",
    "no_answer_found": "It holds no answer that could be counted.",
    "no_majority": "No answer to its prompt was given often enough, or two equally often.",
    "outvoted": "Most answers to its prompt say something else.",
    "not_best": "Other answers to its prompt were taken.",
    "pending": "The run was stopped before its judges were heard.",
}
"""What each reason means, for people."""

_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d{1,4})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Selection:
    """The answers of one seed whose state is `ok`, each in one of the two lists, by sample index."""

    kept: list[Judged]
    dropped: list[tuple[Judged, DropReason]]


def select(judged: Sequence[Judged], config: SelectConfig, *, reference: Judged | None) -> Selection:
    """Selects among the answers of one seed. `reference` is the reference member's answer, which is never a row.

    An answer that a panel should have scored and did not is dropped where a score is asked for: by `require_score`,
    `min_score` or `beat_reference`. With `best` an answer without a score is dropped as soon as another one of the seed
    has one.
    For `majority` every answer votes, also one that is dropped for another reason; an answer in which none can be found
    has no vote, and a tie for the first place has no winner.
    """
    answers = sorted((j for j in judged if j.answer.state == "ok"), key=lambda j: j.answer.sample_index)
    reasons: dict[int, DropReason] = {}
    winner: str | Decimal | None = None
    if config.strategy == "majority":
        texts = [voted_answer(str(j.answer.message["content"]), config.answer) for j in answers]
        votes = Counter(text for text in texts if text is not None)
        answers = [replace(j, votes=None if t is None else votes[t]) for j, t in zip(answers, texts, strict=True)]
        winner = _winner(votes, config.min_votes)
    for at, candidate in enumerate(answers):
        reason = _unfit(candidate, config, reference)
        if reason is None and config.strategy == "best" and candidate.score is None:
            reason = "no_score" if any(j.score is not None for j in answers) else None
        if reason is None and config.strategy == "majority":
            reason = _lost(texts[at], winner)
        if reason is not None:
            reasons[at] = reason
    if config.strategy != "all":
        left = sorted((at for at in range(len(answers)) if at not in reasons), key=lambda at: _rank(answers[at]))
        reasons |= dict.fromkeys(left[config.keep :], "not_best")
    return Selection(
        kept=[candidate for at, candidate in enumerate(answers) if at not in reasons],
        dropped=[(candidate, reasons[at]) for at, candidate in enumerate(answers) if at in reasons],
    )


def voted_answer(text: str, pattern: str) -> str | Decimal | None:
    """What a text votes for: the first group of the last match, None if there is none or it is empty.

    Case and runs of whitespace do not matter, and plain numbers compare by value: 42, 42.0 and 4.2e1 are one answer.
    """
    matches = re.findall(pattern, text)  # the texts of its one group
    found = " ".join(matches[-1].split()).casefold() if matches else ""
    return Decimal(found) if _NUMBER.fullmatch(found) else found or None


def _winner(votes: Counter[str | Decimal], min_votes: int) -> str | Decimal | None:
    first = votes.most_common(2)
    if not first or first[0][1] < min_votes or (len(first) == 2 and first[0][1] == first[1][1]):
        return None
    return first[0][0]


def _unfit(candidate: Judged, config: SelectConfig, reference: Judged | None) -> DropReason | None:
    """Why an answer is dropped whatever the others are."""
    if config.require_verified and candidate.verify_state is not None:
        if candidate.verify_state != "ok":
            return "verifier_failed"
        if candidate.reward is None or candidate.reward < 1:
            return "not_verified"
    score = candidate.score
    if score is None:
        beat = config.beat_reference and reference is not None and reference.score is not None
        compared = config.require_score or config.min_score is not None or beat
        return "no_score" if compared and candidate.score_state == "no_quorum" else None
    if config.min_score is not None and score < config.min_score:
        return "below_min_score"
    if config.beat_reference and reference is not None and reference.score is not None and score <= reference.score:
        return "below_reference"
    return None


def _lost(text: str | Decimal | None, winner: str | Decimal | None) -> DropReason | None:
    if text is None:
        return "no_answer_found"
    if winner is None:
        return "no_majority"
    return None if text == winner else "outvoted"


def _rank(candidate: Judged) -> tuple[bool, float, float, int]:
    """Sorts the best first: by score, then by the verifier's reward, then by sample index."""
    reward = -1.0 if candidate.reward is None else candidate.reward
    return candidate.score is None, -(candidate.score or 0.0), -reward, candidate.answer.sample_index
