"""The named rules that a candidate row has to pass, in their order.

A row is a mapping with `messages`, `tools`, `license`, `finish_reason`, `answer_state` and whatever else. Its answer is
every assistant message after the last one from the user. A rule returns None or a short reason; it never raises and
changes nothing, so that each dropped row can stand in the quarantine file with its reasons.
"""

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from mopdctl.errors import InputError
from mopdctl.gensft.languages import (
    check_languages,
    foreign_language,
    mentions_self,
    mentions_source,
    names_source,
    refusal,
)
from mopdctl.gensft.repetition import MOST_IN_A_ROW, least_ratio, repeated
from mopdctl.gensft.turns import (
    Row,
    answer_of,
    arguments_of,
    calls_of,
    content_of,
    messages_of,
    reasoning_of,
    role_order,
    tool_pairing,
    tool_schema,
)


@dataclass(frozen=True, slots=True)
class FilterSettings:
    """What the rules allow. Raises InputError for an unknown rule or language and for a broken pattern."""

    languages: tuple[str, ...] = ()
    """ISO 639-1 codes that an answer may be written in; empty checks nothing."""
    min_words: int = 1
    max_words: int | None = None
    max_repetition: float = 0.05
    """Compressed over raw size below which a stretch of text repeats itself. Prose has 0.4 to 0.6, code 0.2 to 0.4,
    long tables and JSON lists of like records 0.06 to 0.2; a phrase in a loop 0.03 to 0.045."""
    licenses_allowed: tuple[str, ...] | None = None
    """Licences of seed and member that may stand in the data set; None allows all, unknown ones too."""
    require_training_terms: bool = False
    """Whether `outputs_may_train` of the row, the member's terms, has to be true."""
    refusal_patterns: tuple[str, ...] = ()
    """More regular expressions, searched in the whole answer whatever the case."""
    leakage_patterns: tuple[str, ...] = ()
    """Likewise."""
    off: tuple[str, ...] = ()
    """Rules that are not applied, by name."""

    def __post_init__(self) -> None:
        """Checks everything that can be wrong before the first row."""
        for name in self.off:
            if name not in RULES:
                near = difflib.get_close_matches(name, RULES, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known rules: {', '.join(RULES)}"
                raise InputError(f"rule {name!r} cannot be turned off: no such rule; {hint}")
        for pattern in (*self.refusal_patterns, *self.leakage_patterns):
            try:
                re.compile(pattern)
            except re.error as error:
                raise InputError(f"pattern {pattern!r}: not a regular expression ({error})") from None
        if self.languages and "language" not in self.off:
            check_languages(self.languages)


@dataclass(frozen=True, slots=True)
class Rule:
    """One named check. `check(row, settings)` returns None if the row passes, else why not."""

    name: str
    description: str
    check: Callable[[Row, FilterSettings], str | None]


def all_failures(row: Row, settings: FilterSettings) -> list[tuple[str, str]]:
    """Every rule that the row fails with the reason, in order."""
    return [
        (name, reason)
        for name, rule in RULES.items()
        if name not in settings.off and (reason := rule.check(row, settings))
    ]


def _truncated(row: Row, _: FilterSettings) -> str | None:
    if row.get("answer_state") == "truncated" or row.get("finish_reason") in ("length", "max_tokens"):
        return "cut at the token limit"
    return None


def _empty(row: Row, _: FilterSettings) -> str | None:
    state = row.get("answer_state")
    if state not in (None, "ok", "truncated", "refused"):
        return f"the answer is {state}"
    answer = answer_of(row)
    if answer and not content_of(answer[-1]).strip() and not calls_of(answer[-1]):
        return "neither text nor a tool call"
    return None


def _refusal(row: Row, settings: FilterSettings) -> str | None:
    if row.get("answer_state") == "refused" or row.get("finish_reason") == "content_filter":
        return "refused by the server"
    for message in answer_of(row):
        text = content_of(message)
        if words := refusal(text) or _found(settings.refusal_patterns, text):
            return f"refuses: {_quoted(words)}"
    return None


_THINK = re.compile(r"</?think|think>|\[/?think\]|◁/?think▷|<\|(?:begin|end)_of_thought\|>")


def _think_leak(row: Row, _: FilterSettings) -> str | None:
    for message in messages_of(row):
        text = content_of(message).lower()
        if message.get("role") != "assistant" or not ("think" in text or "thought" in text):
            continue
        if found := _THINK.search(text):
            return f"{found[0]!r} in the answer"
    return None


# Not only those of one tokenizer: what is plain text to the teacher may be a control token to the student.
_CONTROL = re.compile(
    r"<\|[A-Za-z][A-Za-z0-9_-]{2,}\|>"  # Qwen, Llama 3, Phi, Harmony, Kimi, GLM: <|im_start|>, <|eot_id|>, <|call|>
    r"|<｜[^｜<>\n]{1,40}｜>"  # noqa: RUF001 - DeepSeek uses the full-width bar
    r"|<\|(?:turn|channel|tool|tool_call|tool_response|think)>|<(?:turn|channel|tool|tool_call|tool_response)\|>"
    r"|</?s>|<(?:bos|eos|pad|unk)>|</?(?:start|end)_of_turn>|\[gMASK\]|<SPECIAL_\d+>|<extra_id_\d+>"
    r"|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]|<</?SYS>>"
)
_CALL_MARKUP = re.compile(r"</?tool_calls?>|</?function_calls?>|<function=|<invoke name=|<\|?tool_sep\|?>")


def _control_tokens(row: Row, _: FilterSettings) -> str | None:
    for number, message in enumerate(messages_of(row)):
        written = [content_of(message), reasoning_of(message), *(arguments_of(call) for call in calls_of(message))]
        for text in written:
            if ("<" in text or "[" in text) and (found := _CONTROL.search(text)):
                return f"{found[0]!r} in message {number}"
        if message.get("role") != "assistant" or not (row.get("tools") or calls_of(message)):
            continue
        if "<" in written[0] and (found := _CALL_MARKUP.search(written[0])):
            return f"{found[0]!r} in the text of message {number}: a tool call that was not parsed"
    return None


def _leakage(row: Row, settings: FilterSettings) -> str | None:
    for message in answer_of(row):
        text = content_of(message)
        if words := mentions_source(text):
            asked = (content_of(other) for other in messages_of(row) if other.get("role") != "assistant")
            if not any(map(names_source, asked)):  # who is given a text may speak of it
                return f"speaks of a text that the row does not hold: {_quoted(words)}"
        if words := mentions_self(text) or _found(settings.leakage_patterns, text):
            return f"gives its making away: {_quoted(words)}"
    return None


def _language(row: Row, settings: FilterSettings) -> str | None:
    if not settings.languages:
        return None
    found = foreign_language("\n".join(map(content_of, answer_of(row))), settings.languages)
    return f"written in {found!r}, not in {', '.join(settings.languages)}" if found else None


_CJK = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_CJK}]|[^\s{_CJK}]+")


def _words(text: str) -> int:
    """Words between blanks, each character of Chinese and Japanese as its own."""
    return len(text.split()) if text.isascii() else len(_WORD.findall(text))


def _length(row: Row, settings: FilterSettings) -> str | None:
    answer = answer_of(row)
    if not answer or calls_of(answer[-1]):  # a call may stand alone
        return None
    words = sum(_words(content_of(message)) for message in answer)
    if words < settings.min_words:
        return f"{words} words, fewer than {settings.min_words}"
    if settings.max_words is not None and words > settings.max_words:
        return f"{words} words, more than {settings.max_words}"
    return None


def _repetition(row: Row, settings: FilterSettings) -> str | None:
    for message in answer_of(row):
        for text in (content_of(message), reasoning_of(message)):
            ratio = least_ratio(text)
            if ratio is not None and ratio < settings.max_repetition:
                return f"compresses to {ratio:.3f} of its size, below {settings.max_repetition}"
            if words := repeated(text):
                return f"more than {MOST_IN_A_ROW} times in a row: {_quoted(words)}"
    return None


def _license(row: Row, settings: FilterSettings) -> str | None:
    terms = row.get("outputs_may_train", True)  # a prompt has no member yet
    if settings.require_training_terms and terms is not True:
        return f"the member's terms {'forbid training' if terms is False else 'on training are unknown'}"
    if settings.licenses_allowed is None:
        return None
    allowed = {name.casefold() for name in settings.licenses_allowed}
    for key, whose in (("license", "seed"), ("member_license", "member")):
        licence = row.get(key)
        if licence is None and (key in row or key == "license"):
            return f"the licence of the {whose} is unknown"
        if licence is not None and str(licence).casefold() not in allowed:
            return f"the licence of the {whose} is {licence}"
    return None


def _identical_reasoning(row: Row, _: FilterSettings) -> str | None:
    for message in answer_of(row):
        if (reasoning := reasoning_of(message).split()) and reasoning == content_of(message).split():
            return "the reasoning is the answer"
    return None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)


def _found(patterns: Iterable[str], text: str) -> str | None:
    return next((found[0] for pattern in patterns if (found := _compiled(pattern).search(text))), None)


def _quoted(words: str) -> str:
    line = " ".join(words.split())
    return repr(line if len(line) <= 80 else line[:79] + "…")


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("truncated", "The answer was cut at the token limit.", _truncated),
        Rule("empty", "The answer has neither text nor a tool call, or did not come.", _empty),
        Rule("refusal", "The answer refuses.", _refusal),
        Rule("think_leak", "Tags of thinking, or pieces of them, stand outside the reasoning.", _think_leak),
        Rule("control_tokens", "Text that a tokenizer takes for control tokens or tool calls.", _control_tokens),
        Rule("leakage", "Phrases that give the making away, such as 'according to the given text'.", _leakage),
        Rule(
            "role_order",
            "Turns in an order that templates do not take; the last must be the assistant's.",
            lambda row, _: role_order(row),
        ),
        Rule(
            "tool_pairing",
            "Calls without results, results without calls, unusable ids or arguments.",
            lambda row, _: tool_pairing(row),
        ),
        Rule("tool_schema", "The tools are no list of functions.", lambda row, _: tool_schema(row)),
        Rule("language", "The answer is surely written in none of the languages.", _language),
        Rule("length", "Too few or too many words.", _length),
        Rule("repetition", "The answer or its reasoning runs in a loop.", _repetition),
        Rule("license", "A licence that is not allowed, or terms that do not allow training.", _license),
        Rule("identical_reasoning", "The reasoning is the answer once more.", _identical_reasoning),
    )
}
"""All rules by name, in the order in which they are applied."""
