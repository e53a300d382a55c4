"""Template probes of what becomes of a conversation's parts: tool calls, reasoning, and roles."""

import json
from itertools import pairwise

from mopdctl.train.template_render import (
    ANSWERS,
    ARGUMENTS,
    CALL,
    PLAIN,
    REASONED,
    THOUGHTS,
    TOOLS,
    Message,
    Probed,
    RefusedError,
    Verdict,
    assistant,
    attempt,
    call,
    chat,
    missing,
    render,
    rendered,
    tool_chat,
    trained_text,
    user,
)

_CALL_WORDS = {
    "tool name": ("called_tool",),
    "argument names": tuple(ARGUMENTS),
    "string value": ("string value",),
    "number": ("73519",),
    "nested value": ("inner_key", "inner value", "86420"),
    "unicode value": ("Zürich 東京",),
}
_DEFINITION_WORDS = {"tool definition": ("listed_tool", "listed_key"), "tool description": ("listed description",)}

# Roles that a template may write in another's name.
_TAKEN_FOR = {"developer": ("system", "user"), "user": ()}


def tools(model: Probed) -> Verdict:
    """Which parts of a tool call, its result and the definitions are rendered and carry loss, in which shapes."""
    messages = tool_chat(CALL)
    as_string = tool_chat(call("called_tool", json.dumps(ARGUMENTS, ensure_ascii=False)))
    try:
        text = render(model, messages, tools=TOOLS)
    except RefusedError as refused:
        if rendered(model, as_string, tools=TOOLS) is None:
            return "not_applicable", f"refuses tool turns ({refused})"
        return "bad", f"takes arguments as a JSON string alone, raises on a mapping ({refused})"

    bad, warn = [], []
    escaped = json.dumps(ARGUMENTS["unicode_key"]) in text
    words = _CALL_WORDS | {"tool result": ("tool result words",)}
    if lost := [part for part in missing(words, text) if not (part == "unicode value" and escaped)]:
        bad.append(f"lost: {', '.join(lost)}")
    if str(ARGUMENTS["nested_key"]) in text:
        bad.append("a mapping is printed as Python, not as JSON")
    covered = trained_text(model, messages, TOOLS)
    if covered is None:
        bad.append("no loss mask with tool turns")
    elif "called_tool" in text and "called_tool" not in covered:
        bad.append("no loss on tool calls")
    if undefined := missing(_DEFINITION_WORDS, text):
        warn.append(f"lost: {', '.join(undefined)}")
    if escaped:
        warn.append("unicode is escaped")
    shapes = {
        "arguments as a JSON string": attempt(model, as_string, _string_fate, tools=TOOLS),
        "content null": attempt(model, tool_chat(CALL, content=None), lambda t: _null_fate(t, text), tools=TOOLS),
        "two calls in one turn": attempt(
            model,
            tool_chat(CALL, call("second_tool", {"second_key": "second value"}, 2)),
            lambda t: "the second is lost" if missing({"": ("second_tool", "second value")}, t) else "fine",
            tools=TOOLS,
        ),
    }
    warn += [f"{shape}: {fate}" for shape, fate in shapes.items() if fate != "fine"]
    fine = ", ".join(shape for shape, fate in shapes.items() if fate == "fine")
    detail = "; ".join([*bad, *warn] or ["all parts are rendered"]) + (f"; fine: {fine}" if fine else "")
    return ("bad" if bad else "warn" if warn else "ok"), detail


def _string_fate(text: str) -> str:
    if '{\\"' in text:
        return "encoded twice"
    return "lost" if missing(_CALL_WORDS, text) else "fine"


def _null_fate(text: str, text_of_empty: str) -> str:
    if text == text_of_empty:
        return "fine"
    return "printed as None" if "None" in text else "not rendered like empty content"


def thinking(model: Probed) -> Verdict:
    """What becomes of reasoning in a field of its own, between think tags, and before a closing tag alone."""
    inline = [f"<think>\n{t}\n</think>\n\n{a}" for t, a in zip(THOUGHTS, ANSWERS, strict=True)]
    half = f"{THOUGHTS[0]}</think>{ANSWERS[0]}"
    field_text = render(model, REASONED)
    inline_text = render(model, chat(*map(assistant, inline)))
    half_text = render(model, chat(assistant(half)))
    early, late = (_thought_fate(field_text, thought, thought) for thought in THOUGHTS)
    inline_early, inline_late = (_thought_fate(inline_text, *pair) for pair in zip(inline, THOUGHTS, strict=True))
    half_fate = _thought_fate(half_text, half, THOUGHTS[0])
    if 0 < half_text.count("<think>") < half_text.count("</think>"):
        half_fate = "corrupted (closed twice)"

    detail = (
        f"reasoning_content: {late} in the last turn, {early} in an earlier one; inline <think>: {inline_late} in the "
        f"last turn, {inline_early} in an earlier one; </think> alone: {half_fate}"
    )
    if late == "stripped":
        other = [f for f in ("reasoning", "thinking") if THOUGHTS[0] in render(model, _reasoned_in(f))]
        detail += f"; reads {' and '.join(other)} instead of reasoning_content" if other else ""
    if any(a not in text for a in ANSWERS for text in (field_text, inline_text)) or ANSWERS[0] not in half_text:
        return "bad", f"an answer is lost; {detail}"
    if inline_late == "stripped":
        return "bad", detail
    covered = trained_text(model, REASONED[:2])
    if late == "kept" and covered is not None and THOUGHTS[0] not in covered:
        return "warn", f"no loss on reasoning; {detail}"
    careful = "stripped" in (early, late, inline_early, half_fate) or half_fate.startswith("corrupted")
    return ("warn" if careful else "ok"), detail


def _thought_fate(text: str, written: str, thought: str) -> str:
    if written in text:
        return "kept"
    return "rewritten" if thought in text else "stripped"


def _reasoned_in(field: str) -> list[Message]:
    return chat(assistant(ANSWERS[0], **{field: THOUGHTS[0]}))


def roles(model: Probed) -> Verdict:
    """Which roles and orders of roles are accepted, rewritten, refused or dropped."""
    question, answer, second_question, second_answer = PLAIN
    system = {"role": "system", "content": "system words"}
    cases = {
        "system": ([system, question], 0),
        "late system": ([question, answer, system, second_question], 2),
        "developer": ([system | {"role": "developer"}, question], 0),
        "tool": (tool_chat(CALL), 2),
        "two users in a row": ([question, user("more of it"), answer], 1),
        "assistant first": ([answer, question, second_answer], 0),
    }
    fates = {case: _role_fate(model, messages, place) for case, (messages, place) in cases.items()}
    detail = "; ".join(f"{case}: {fate}" for case, fate in fates.items())
    if "dropped" in (fates["system"], fates["tool"], fates["two users in a row"]):
        return "bad", detail
    return ("ok" if set(fates.values()) == {"accepted"} else "warn"), detail


def _role_fate(model: Probed, messages: list[Message], place: int) -> str:
    message = messages[place]
    tools = TOOLS if message["role"] == "tool" else None
    contents = [m["content"] for m in messages if m["content"]]
    # Pairs of neighbours with nothing but space between them stand in one turn.
    borders = [pair for pair in pairwise(contents) if message["content"] in pair]

    def judge(text: str) -> str:
        if missing({"": contents}, text):
            return "dropped"
        for role in _TAKEN_FOR.get(message["role"], ("user",)):
            renamed = [*messages[:place], message | {"role": role}, *messages[place + 1 :]]
            if rendered(model, renamed, tools=tools) == text:
                return f"rewritten as {role}"
        merged = any(not text.partition(one)[2].partition(other)[0].strip() for one, other in borders)
        return "merged with the turn beside it" if merged else "accepted"

    return attempt(model, messages, judge, tools=tools)
