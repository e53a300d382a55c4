"""What the template probes have in common: conversations of known words, and how a stranger's template is run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mopdctl.train.data import conversation_ids

State = Literal["ok", "warn", "bad", "not_applicable"]
Verdict = tuple[State, str]
Message = dict[str, Any]

ANSWERS = ("an early answer", "a late answer")
THOUGHTS = ("early thoughts", "late thoughts")
ARGUMENTS = {
    "text_key": "string value",
    "number_key": 73519,
    "nested_key": {"inner_key": ["inner value", 86420]},
    "unicode_key": "Zürich 東京",
}
# Not the tool that is called, so that a name in the text is the call's or the definition's, never either.
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "listed_tool",
            "description": "listed description",
            "parameters": {
                "type": "object",
                "properties": {"listed_key": {"type": "string", "description": "what it is for"}},
                "required": ["listed_key"],
            },
        },
    }
]


@dataclass(frozen=True, slots=True)
class Probed:
    """A tokenizer and the ids that end an answer: all that `conversation_ids` asks of a model."""

    tokenizer: Any
    eos_ids: frozenset[int]


class RefusedError(Exception):
    """What the template or the tokenizer raised, as one line."""


def user(content: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": content}


def assistant(content: str | None, **more: Any) -> Message:
    """An assistant's message; `more` are further fields, such as `reasoning_content`."""
    return {"role": "assistant", "content": content, **more}


def call(name: str, arguments: Any, number: int = 1) -> Message:
    """A tool call."""
    # Some templates accept only ids of nine letters and digits.
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def chat(*answers: Message) -> list[Message]:
    """Up to two answers, each after a question."""
    questions = (user("first question"), user("second question"))
    return [m for pair in zip(questions, answers, strict=False) for m in pair]


def tool_chat(*calls: Message, content: str | None = "") -> list[Message]:
    """A question, tool calls, the result of the first and an answer."""
    result = {"role": "tool", "tool_call_id": "call00001", "name": "called_tool", "content": "tool result words"}
    return [user("first question"), assistant(content, tool_calls=list(calls)), result, assistant(ANSWERS[1])]


CALL = call("called_tool", ARGUMENTS)
PLAIN = chat(*map(assistant, ANSWERS))
REASONED = chat(*(assistant(a, reasoning_content=t) for a, t in zip(ANSWERS, THOUGHTS, strict=True)))


def guarded(run: Callable[[], Any]) -> Any:
    """What `run` returns. Raises RefusedError for anything that it raises."""
    try:
        return run()
    except Exception as error:  # a template is a stranger's program and may raise anything
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise RefusedError("".join(c if c.isprintable() else "?" for c in line)) from None


def template_text(model: Probed) -> str:
    """The template of a conversation without tools."""
    return str(guarded(model.tokenizer.get_chat_template))


def render(model: Probed, messages: Sequence[Message], *, prompt: bool = False, **variables: Any) -> str:
    """The text of a conversation, up to where the assistant begins to write if `prompt`. May raise RefusedError."""
    apply = model.tokenizer.apply_chat_template
    return str(guarded(lambda: apply(list(messages), tokenize=False, add_generation_prompt=prompt, **variables)))


def rendered(model: Probed, messages: Sequence[Message], **variables: Any) -> str | None:
    """The text of a conversation, None if the template refuses it."""
    try:
        return render(model, messages, **variables)
    except RefusedError:
        return None


def attempt(model: Probed, messages: Sequence[Message], judge: Callable[[str], str], **variables: Any) -> str:
    """What `judge` says of the text of a conversation, or `refused` with the reason."""
    try:
        return judge(render(model, messages, **variables))
    except RefusedError as refused:
        return f"refused ({refused})"


def trained_ids(model: Probed, messages: Sequence[Message], tools: Any = None) -> tuple[list[int], int]:
    """The token ids that carry loss, and of how many. May raise RefusedError."""
    ids, mask = guarded(lambda: conversation_ids(model, messages, tools, place="probe", loss_on="assistant"))
    return [token for token, on in zip(ids, mask, strict=True) if on], len(ids)


def trained_text(model: Probed, messages: Sequence[Message], tools: Any = None) -> str | None:
    """The text that carries loss; None if there is no loss mask, which the probe `generation_tags` reports."""
    try:
        return str(model.tokenizer.decode(trained_ids(model, messages, tools)[0]))
    except RefusedError:
        return None


def missing(words: Mapping[str, Sequence[str]], text: str) -> list[str]:
    """The keys of `words` of which not every word is in the text."""
    return [what for what, needed in words.items() if not all(word in text for word in needed)]
