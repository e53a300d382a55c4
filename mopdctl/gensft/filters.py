"""The named rules that a candidate row has to pass, in their order.

A row is a mapping with `messages`, `tools`, `license`, `finish_reason`, `answer_state` and whatever else. Its answer is
every assistant message after the last one from the user. A rule returns None or a short reason; it never raises and
changes nothing, so that each dropped row can stand in the quarantine file with its reasons.
"""

import difflib
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from mopdctl.errors import InputError
from mopdctl.gensft.answers import is_json_object, text_of
from mopdctl.gensft.languages import (
    check_languages,
    foreign_language,
    mentions_self,
    mentions_source,
    names_source,
    refusal,
)

Row = Mapping[str, Any]


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
    allow_control_tokens: bool = False
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


def apply_rules(row: Row, settings: FilterSettings) -> tuple[str, str] | None:
    """The first rule that the row fails and the reason, or None."""
    for name, rule in RULES.items():
        if name not in settings.off and (reason := rule.check(row, settings)):
            return name, reason
    return None


def all_failures(row: Row, settings: FilterSettings) -> list[tuple[str, str]]:
    """Every rule that the row fails with the reason, in order."""
    return [
        (name, reason)
        for name, rule in RULES.items()
        if name not in settings.off and (reason := rule.check(row, settings))
    ]


def role_histogram(rows: Iterable[Row]) -> Counter[str]:
    """How many rows have which sequence of roles, such as `user assistant`."""
    return Counter(" ".join(str(message.get("role")) for message in _messages(row)) for row in rows)


def _truncated(row: Row, _: FilterSettings) -> str | None:
    if row.get("answer_state") == "truncated" or row.get("finish_reason") in ("length", "max_tokens"):
        return "cut at the token limit"
    return None


def _empty(row: Row, _: FilterSettings) -> str | None:
    state = row.get("answer_state")
    if state not in (None, "ok", "truncated", "refused"):
        return f"the answer is {state}"
    answer = _answer(row)
    if answer and not _content(answer[-1]).strip() and not _calls(answer[-1]):
        return "neither text nor a tool call"
    return None


def _refusal(row: Row, settings: FilterSettings) -> str | None:
    if row.get("answer_state") == "refused" or row.get("finish_reason") == "content_filter":
        return "refused by the server"
    for message in _answer(row):
        text = _content(message)
        if words := refusal(text) or _found(settings.refusal_patterns, text):
            return f"refuses: {_quoted(words)}"
    return None


_THINK = re.compile(r"</?think|think>|\[/?think\]|◁/?think▷|<\|(?:begin|end)_of_thought\|>")


def _think_leak(row: Row, _: FilterSettings) -> str | None:
    for message in _messages(row):
        text = _content(message).lower()
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


def _control_tokens(row: Row, settings: FilterSettings) -> str | None:
    if settings.allow_control_tokens:
        return None
    for number, message in enumerate(_messages(row)):
        written = [_content(message), _reasoning(message), *(_arguments(call) for call in _calls(message))]
        for text in written:
            if ("<" in text or "[" in text) and (found := _CONTROL.search(text)):
                return f"{found[0]!r} in message {number}"
        if message.get("role") != "assistant" or not (row.get("tools") or _calls(message)):
            continue
        if "<" in written[0] and (found := _CALL_MARKUP.search(written[0])):
            return f"{found[0]!r} in the text of message {number}: a tool call that was not parsed"
    return None


def _leakage(row: Row, settings: FilterSettings) -> str | None:
    for message in _answer(row):
        text = _content(message)
        if words := mentions_source(text):
            asked = (_content(other) for other in _messages(row) if other.get("role") != "assistant")
            if not any(map(names_source, asked)):  # who is given a text may speak of it
                return f"speaks of a text that the row does not hold: {_quoted(words)}"
        if words := mentions_self(text) or _found(settings.leakage_patterns, text):
            return f"gives its making away: {_quoted(words)}"
    return None


# Which turn may follow which.
_FOLLOWS = {
    "the beginning": ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant", "assistant with calls"),
    "assistant": ("user",),
    "assistant with calls": ("tool",),
    "tool": ("tool", "assistant", "assistant with calls"),
}


def _role_order(row: Row, _: FilterSettings) -> str | None:
    messages = row.get("messages")
    if not isinstance(messages, list | tuple) or not messages:
        return "no messages"
    before = "the beginning"
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        turn = "assistant with calls" if role == "assistant" and _calls(message) else role
        if turn not in _FOLLOWS[before]:
            return f"message {number} is {'of no role' if role is None else role}, after {before}"
        before = turn
    return None if before in ("assistant", "assistant with calls") else f"the last message is {before}"


def _tool_pairing(row: Row, _: FilterSettings) -> str | None:
    tools = row.get("tools")
    known = [_function(tool).get("name") for tool in tools] if isinstance(tools, list | tuple) else []
    waiting: list[str] = []
    messages = _messages(row)
    for number, message in enumerate(messages):
        if message.get("role") == "tool":
            if (call_id := message.get("tool_call_id")) not in waiting:
                return f"message {number} is the result of no open call ({call_id!r})"
            waiting.remove(call_id)
            continue
        if waiting:
            return f"no result for the call {waiting[0]!r}"
        for call in _calls(message):
            name, call_id = _function(call).get("name"), call.get("id") if isinstance(call, Mapping) else None
            if not isinstance(call_id, str) or not call_id:
                return f"message {number} calls {name!r} without an id"
            if call_id in waiting:
                return f"message {number} has two calls with the id {call_id!r}"
            if name not in known:
                return f"message {number} calls {name!r}, which is not among the tools"
            if not is_json_object(_arguments(call)):
                return f"message {number}: the arguments of {name!r} are not the text of a JSON object"
            waiting.append(call_id)
    # A row may end with calls, but not with the results of some of them.
    return f"no result for the call {waiting[0]!r}" if waiting and messages[-1].get("role") == "tool" else None


def _tool_schema(row: Row, _: FilterSettings) -> str | None:
    tools = row.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        return f"'tools' is a {type(tools).__name__} where a list is needed"
    names = set()
    for number, tool in enumerate(tools):
        function = _function(tool)
        name = function.get("name")
        if not isinstance(name, str) or not name or tool.get("type", "function") != "function":
            return f"tool {number} is no function with a name"
        if name in names:
            return f"two tools are called {name!r}"
        names.add(name)
        parameters = function.get("parameters") or {}
        # A property without a schema (null) is common and allows any value.
        if not isinstance(parameters, Mapping) or not isinstance(parameters.get("properties") or {}, Mapping):
            return f"the parameters of tool {name!r} are no object schema"
    return None


def _language(row: Row, settings: FilterSettings) -> str | None:
    if not settings.languages:
        return None
    found = foreign_language("\n".join(map(_content, _answer(row))), settings.languages)
    return f"written in {found!r}, not in {', '.join(settings.languages)}" if found else None


_CJK = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_CJK}]|[^\s{_CJK}]+")


def _words(text: str) -> int:
    """Words between blanks, each character of Chinese and Japanese as its own."""
    return len(text.split()) if text.isascii() else len(_WORD.findall(text))


def _length(row: Row, settings: FilterSettings) -> str | None:
    answer = _answer(row)
    if not answer or _calls(answer[-1]):  # a call may stand alone
        return None
    words = sum(_words(_content(message)) for message in answer)
    if words < settings.min_words:
        return f"{words} words, fewer than {settings.min_words}"
    if settings.max_words is not None and words > settings.max_words:
        return f"{words} words, more than {settings.max_words}"
    return None


_WINDOW_BYTES = 2000  # the ratio falls with length: a long honest table would look like a short loop
_SHORT_BYTES = 300  # the ratio of less says little
_MOST_IN_A_ROW = 4  # as in a refrain
_LONGEST_LOOP = 20  # lines or sentences that are repeated as a block


def _repetition(row: Row, settings: FilterSettings) -> str | None:
    for message in _answer(row):
        for text in (_content(message), _reasoning(message)):
            ratio = _least_ratio(text)
            if ratio is not None and ratio < settings.max_repetition:
                return f"compresses to {ratio:.3f} of its size, below {settings.max_repetition}"
            if words := _repeated(text):
                return f"more than {_MOST_IN_A_ROW} times in a row: {_quoted(words)}"
    return None


def _least_ratio(text: str) -> float | None:
    """Compressed over raw size of the stretch of text that compresses best; None for a short text."""
    data = " ".join(text.split()).encode(errors="replace")  # indented JSON and padded tables are mostly blanks
    if len(data) < _SHORT_BYTES:
        return None
    last = max(len(data) - _WINDOW_BYTES, 0)
    pieces = [data[start : start + _WINDOW_BYTES] for start in (*range(0, last, _WINDOW_BYTES), last)]
    return min(_compressed_bytes(piece) / len(piece) for piece in pieces)


def _compressed_bytes(data: bytes) -> int:
    # The default buffers of 256 KB take six times longer to set up than a window takes to compress.
    stream = zlib.compressobj(wbits=12, memLevel=5)
    return len(stream.compress(data) + stream.flush())


_FENCE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_UNIT = re.compile(r"[^\n.!?。！？]+[.!?。！？]*")  # noqa: RUF001 - a line or sentence
_WORDS = re.compile(r"[^\W\d_]{2,} [^\W\d_]{2,}|[\u3040-\u30ff\u3400-\u9fff]{4}")


def _repeated(text: str) -> str | None:
    """A line or sentence outside code with which too many equal blocks of lines or sentences begin."""
    units: list[str] = [unit for part in _UNIT.findall(_FENCE.sub("\n", text)) if (unit := part.strip())]
    if len(set(units)) > len(units) - _MOST_IN_A_ROW:
        return None
    for period in range(1, min(_LONGEST_LOOP, len(units) // (_MOST_IN_A_ROW + 1)) + 1):
        run = 0
        for at, (unit, later) in enumerate(zip(units, units[period:], strict=False), start=1):
            run = run + 1 if unit == later else 0
            # Rulers, brackets and figures may recur: a block counts if there are words in it.
            for words in units[at - period : at] if run >= _MOST_IN_A_ROW * period else ():
                if _WORDS.search(words):
                    return words
    return None


def _licence(row: Row, settings: FilterSettings) -> str | None:
    if settings.require_training_terms and row.get("outputs_may_train") is not True:
        known = row.get("outputs_may_train") is False
        return "the member's terms forbid training" if known else "whether the member's terms allow training is unknown"
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
    for message in _answer(row):
        if (reasoning := _reasoning(message).split()) and reasoning == _content(message).split():
            return "the reasoning is the answer"
    return None


def _messages(row: Row) -> list[Mapping[str, Any]]:
    messages = row.get("messages")
    return [m for m in messages if isinstance(m, Mapping)] if isinstance(messages, list | tuple) else []


def _answer(row: Row) -> list[Mapping[str, Any]]:
    messages = _messages(row)
    start = max((number for number, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    return [message for message in messages[start + 1 :] if message.get("role") == "assistant"]


def _content(message: Mapping[str, Any]) -> str:
    return text_of(message.get("content"))


def _reasoning(message: Mapping[str, Any]) -> str:
    return text_of(message.get("reasoning_content"))


def _calls(message: Mapping[str, Any]) -> list[Any]:
    calls = message.get("tool_calls")
    return list(calls) if isinstance(calls, list | tuple) else []


def _function(entry: Any) -> Mapping[str, Any]:
    """The `function` of a tool or tool call; empty if it has none."""
    function = entry.get("function") if isinstance(entry, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def _arguments(call: Any) -> str:
    return text_of(_function(call).get("arguments"))


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
            "role_order", "Turns in an order that templates do not take; the last must be the assistant's.", _role_order
        ),
        Rule("tool_pairing", "Calls without results, results without calls, unusable ids or arguments.", _tool_pairing),
        Rule("tool_schema", "The tools are no list of functions.", _tool_schema),
        Rule("language", "The answer is surely written in none of the languages.", _language),
        Rule("length", "Too few or too many words.", _length),
        Rule("repetition", "The answer or its reasoning runs in a loop.", _repetition),
        Rule("licence", "A licence that is not allowed, or terms that do not allow training.", _licence),
        Rule("identical_reasoning", "The reasoning is the answer once more.", _identical_reasoning),
    )
}
"""All rules by name, in the order in which they are applied."""
