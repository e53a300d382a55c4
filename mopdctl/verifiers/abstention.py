"""Answering or saying that one does not know: three outcomes, and the two figures that have to stand side by side."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from mopdctl.verifiers.base import Attempt, InvalidReferenceError, Outcome, ParseError, Verdict, VerdictState
from mopdctl.verifiers.fences import answer
from mopdctl.verifiers.limits import LimitError

LABELS = ("correct", "abstained", "wrong")
REWARDS = {"correct": 1.0, "abstained": 0.5, "wrong": 0.0}
PHRASES = (
    "I don't know", "I do not know", "I'm not sure", "I am not sure", "I can't answer", "I cannot answer",
    "not enough information", "insufficient information", "cannot be determined", "unanswerable",
)  # fmt: skip
_OWN_KEYS = {"verifier", "abstain", "rewards", "answerable"}

_RAISED = {
    VerdictState.PARSE_ERROR: ParseError,
    VerdictState.TIMEOUT: LimitError,
    VerdictState.INVALID_REFERENCE: InvalidReferenceError,
}
# What may stand beside an abstaining phrase without being an answer.
_FILLERS = frozenset(
    """
    about afraid am and answer answering as but certain clear correct exactly for from give given honest honestly i i'm
    information is it know me my of on question really right safely say so sorry specific sure tell that the there this
    to unfortunately what with you
    """.split()  # noqa: SIM905 - fifty quoted words are harder to read
)
_WORDS = re.compile(r"\w+(?:['\u2019]\w+)*")
_COMMAND = re.compile(r"\\[A-Za-z]+")


def abstention(attempt: Attempt) -> Outcome:
    """The reward of the label: `correct`, `abstained` or `wrong`, by default 1, 0.5 and 0 (`reference["rewards"]`).

    An answer abstains if it holds one of the phrases `reference["abstain"]` (default PHRASES; case and punctuation are
    free) and beside them only words such as "sorry, but" and "the answer to this question". With any other word beside
    it an answer abstains and answers, and is wrong. Any other answer goes to `reference["verifier"]` (default
    `exact_match`) with the rest of the reference; less than its full reward is wrong, and its parse errors stay such.
    With `"answerable": false` there is no answer to give: abstaining is correct, anything else wrong.
    """
    reference = attempt.reference
    rewards = _rewards(reference)
    phrases = _phrases(reference["abstain"] if reference.get("abstain") is not None else PHRASES)
    answerable = reference.get("answerable", True)
    if not isinstance(answerable, bool):
        raise InvalidReferenceError("'answerable' is neither true nor false")
    inner = {key: value for key, value in reference.items() if key not in _OWN_KEYS}
    _check_inner(reference, inner, phrases, answerable=answerable)
    text = answer(attempt.response)
    if not text.strip():
        raise ParseError("empty")
    words = _words(text)
    found, beside = phrases.search(words), phrases.sub(" ", words).split()
    if found and any(word not in _FILLERS for word in beside):
        label, detail = "wrong", "abstains and answers"
    elif found:
        label, detail = ("abstained", "") if answerable else ("correct", "abstains where there is no answer")
    elif not answerable:
        label, detail = "wrong", "answers where there is no answer"
    else:
        verdict = _judged(reference, replace(attempt, reference=inner))
        if verdict.state in _RAISED:
            raise _RAISED[verdict.state](verdict.detail)
        if verdict.state is not VerdictState.OK:
            raise RuntimeError(f"{verdict.verifier}: {verdict.detail}")
        label, detail = ("correct" if verdict.reward == 1 else "wrong"), verdict.detail
    return Outcome(rewards[label], detail, label)


class NonHallucination(NamedTuple):
    """What a set of labels comes to. The first figure alone is no merit: always abstaining makes it 1."""

    non_hallucination: float | None
    """Share of answers that are not wrong; None where nothing was judged."""
    accuracy: float | None
    """Share of answers that are correct; 0 for a model that always abstains where there are answers."""
    counts: dict[str, int]
    """Answers by label, and `unjudged`: those without one (their verdict is a state). These are in no share."""


def non_hallucination(labels: Iterable[str]) -> NonHallucination:
    """Share of answers that are not wrong, beside accuracy. An empty label is an answer that nobody could judge."""
    seen = Counter(labels)
    if unknown := seen.keys() - {*LABELS, ""}:
        raise ValueError(f"label {sorted(unknown)[0]!r} is none of {', '.join(LABELS)}")
    counts = {label: seen[label] for label in LABELS} | {"unjudged": seen[""]}
    judged = sum(seen[label] for label in LABELS)
    if not judged:
        return NonHallucination(None, None, counts)
    return NonHallucination((judged - seen["wrong"]) / judged, seen["correct"] / judged, counts)


def _rewards(reference: Any) -> dict[str, float]:
    if not isinstance(reference, dict):
        raise InvalidReferenceError("reference is not an object")
    rewards = REWARDS if reference.get("rewards") is None else reference["rewards"]
    if not isinstance(rewards, dict) or rewards.keys() != REWARDS.keys():
        raise InvalidReferenceError(f"'rewards' needs just {', '.join(LABELS)}")
    for label, value in rewards.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidReferenceError(f"'rewards': {label} {value!r} is not a number")
    if not 1 >= rewards["correct"] > rewards["abstained"] >= rewards["wrong"] >= 0:  # nor is one of them NaN
        raise InvalidReferenceError("'rewards' need 1 >= correct > abstained >= wrong >= 0")
    return {label: float(rewards[label]) for label in LABELS}


def _phrases(phrases: Any) -> re.Pattern[str]:
    """A pattern of the phrases as whole words, the longest first."""
    if not isinstance(phrases, list | tuple) or not phrases or not all(isinstance(text, str) for text in phrases):
        raise InvalidReferenceError("'abstain' is not a list of phrases")
    spelled = sorted({_words(text) for text in phrases}, key=len, reverse=True)
    if "" in spelled:
        raise InvalidReferenceError("'abstain' has a phrase without words")
    return re.compile(rf"(?<!\S)(?:{'|'.join(map(re.escape, spelled))})(?!\S)")


def _words(text: str) -> str:
    """The words of `text`, folded, with single spaces; LaTeX commands are none."""
    return " ".join(_WORDS.findall(_COMMAND.sub(" ", text))).replace("\u2019", "'").casefold()


def _check_inner(reference: Any, inner: dict[str, Any], phrases: re.Pattern[str], *, answerable: bool) -> None:
    """Raises InvalidReferenceError unless the inner verifier can use its reference, or there is nothing to use."""
    if not answerable:
        if inner:
            raise InvalidReferenceError(f"{sorted(map(str, inner))[0]!r} in a reference that has no answer")
        return
    answers = inner["answers"] if isinstance(inner.get("answers"), list) else [inner.get("answer")]
    for text in answers:
        if isinstance(text, str) and phrases.search(_words(text)):
            raise InvalidReferenceError(f"the answer {text!r} abstains itself")
    verdict = _judged(reference, Attempt("", inner))
    if verdict.state is VerdictState.INVALID_REFERENCE:
        raise InvalidReferenceError(verdict.detail)


def _judged(reference: dict[str, Any], attempt: Attempt) -> Verdict:
    """What the inner verifier says of an attempt against the rest of the reference."""
    from mopdctl.verifiers.registry import VERIFIERS, run_check  # the registry holds this verifier too

    name = reference.get("verifier", "exact_match")
    if not isinstance(name, str) or name not in VERIFIERS or name == "abstention":
        raise InvalidReferenceError(f"verifier {name!r} cannot judge the answers")
    return run_check(VERIFIERS[name], attempt)
