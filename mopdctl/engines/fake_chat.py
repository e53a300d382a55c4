r"""A chat model without weights: every answer hangs on a hash of its request alone. For tests, demos and benchmarks.

The last user message decides what kind of answer it is; the first of these that applies:

1. a judge prompt, with `<score>`: some words and `<score>K</score>`, K from a hash of what stands in `<answer>`, on the
   scale that the prompt gives as `from LOW to HIGH` (1 to 10 where it gives none);
2. a pair prompt, with `<winner>`: the winner of `<answer_a>` and `<answer_b>` by their hashes, so that an answer that
   wins also wins in the other place;
3. tools, and no result of one yet: a call of the first tool, or of the one that `tool_choice` names;
4. a sum such as `17 + 25`, `3 * 4 + 1` or `9 - 2`: `The answer is \boxed{42}.`, or a number near it;
5. a JSON schema in a fenced block: an instance in the format that the prompt names, with nothing around it;
6. anything else: English sentences.

A token is a word between white space. What only cuts or reports (`max_tokens`, `stop`, `n`, `logprobs`) changes no
answer: more tokens give the same answer, longer.
"""

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any

from mopdctl.engines.fake_settings import FakeChat
from mopdctl.engines.fake_text import NOUNS, REFUSALS, Draw, german, instance, pick, prose, sentence, structured
from mopdctl.errors import InputError

_CUTS_OR_REPORTS = frozenset({"max_tokens", "max_completion_tokens", "stop", "n", "logprobs", "top_logprobs"})
_COUNTS = (
    ("n", 1, 128),
    ("top_logprobs", 0, 20),
    ("max_tokens", 1, 1 << 31),
    ("max_completion_tokens", 1, 1 << 31),
)
"""Field, least and most."""
_MADE = 1_735_689_600
"""Time of every answer (2025-01-01), because an answer may not hang on the clock."""


def answer(body: Mapping[str, Any]) -> dict[str, Any]:
    """The `chat.completion` document for an OpenAI request body: the same in every process and at any time.

    At temperature 0 neither the seed nor the choice index counts. Raises InputError for a body that an OpenAI server
    would refuse, and for an unknown setting in the model's name.
    """
    settings = _checked(body)
    asked = next((text_of(m) for m in reversed(body["messages"]) if m["role"] == "user"), "")
    drawn = {key: value for key, value in body.items() if key not in _CUTS_OR_REPORTS and key != "seed"}
    seed, greedy = body.get("seed"), body.get("temperature") == 0
    if greedy:
        del drawn["temperature"]  # 0 and 0.0 are one temperature
    prompt = _digest(_canonical(drawn).encode())
    same = greedy or int.from_bytes(prompt[:4], "big") < settings.copy * 2**32
    keys = [prompt if same else _digest(prompt + f"{seed!r} {i}".encode()) for i in range(body.get("n") or 1)]
    choices, counts = zip(*(_choice(body, asked, settings, key) for key in keys), strict=True)
    completion_tokens = sum(counts)
    prompt_tokens = sum(len(text_of(message).split()) for message in body["messages"])
    prompt_tokens += len(_canonical(body["tools"]).split()) if body.get("tools") else 0
    return {
        "id": f"chatcmpl-{keys[0].hex()}",
        "object": "chat.completion",
        "created": _MADE,
        "model": body["model"],
        "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def score(messages: Sequence[Mapping[str, Any]]) -> float:
    """The reward of a conversation, in [-4, 4]."""
    return round(8 * _share(_canonical(list(messages))) - 4, 4)


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message, of its text blocks if it is in blocks."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(block.get("text") or "") for block in content if isinstance(block, Mapping))
    return content if isinstance(content, str) else ""


# --------------------------------------------------------------------------------------------------------- the request


def _checked(body: Mapping[str, Any]) -> FakeChat:
    messages, tools = body.get("messages"), body.get("tools")
    if not isinstance(body.get("model"), str):
        raise InputError("model: missing, or no text; name a model")
    if not isinstance(messages, list) or not messages:
        raise InputError("messages: missing, or no list with at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"messages[{number}]: not an object with a role")
    if tools is not None and not (isinstance(tools, list) and tools and all(map(_is_function, tools))):
        raise InputError("tools: not a list of at least one function; leave it out where there are none")
    if body.get("tool_choice") is not None and tools is None:
        raise InputError("tool_choice: only allowed when 'tools' are specified")
    for name, least, most in _COUNTS:
        value = body.get(name)
        if value is not None and not (type(value) is int and least <= value <= most):
            raise InputError(f"{name}: {value!r} is no whole number from {least} to {most}")
    stops = body.get("stop")
    if not isinstance(stops, str | None) and not (isinstance(stops, list) and all(isinstance(s, str) for s in stops)):
        raise InputError("stop: neither a text nor a list of texts")
    if body.get("stream"):
        raise InputError("stream: this server answers in one piece only")
    return FakeChat.parse(body["model"])


def _is_function(tool: Any) -> bool:
    match tool:
        case {"function": {"name": str()}}:
            return True
    return False


_canonical = json.JSONEncoder(sort_keys=True).encode
"""ASCII, so that half a surrogate pair in a request is a text like any other."""


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _draws(key: bytes) -> Iterator[float]:
    for block in count():
        state = hashlib.blake2b(key + block.to_bytes(4, "big"))
        yield from (number / 2**32 for number in struct.unpack("<16I", state.digest()))


def _share(text: str) -> float:
    """A number in [0, 1) that hangs on the text alone."""
    return int.from_bytes(_digest(text.encode("utf-8", "surrogatepass"))[:7], "big") / 2**56


# ---------------------------------------------------------------------------------------------------------- the answer


def _draft(
    body: Mapping[str, Any], asked: str, settings: FakeChat, draw: Draw
) -> tuple[str, str, Mapping[str, Any] | None]:
    """Reasoning, text, and the function that the text is the arguments of, before anything is cut."""
    thinks, odd = draw(), draw()
    thinking = thinks < settings.think + settings.inline_think
    reasoning = prose(asked, settings.words, draw) if thinking else ""
    text, function = _said(body, asked, settings, draw, odd)
    if not thinking or thinks < settings.think:
        return reasoning, text, function
    return "", text if function else f"<think>\n{reasoning}\n</think>\n\n{text}", function


def _said(
    body: Mapping[str, Any], asked: str, settings: FakeChat, draw: Draw, odd: float
) -> tuple[str, Mapping[str, Any] | None]:
    """Text, and the function that it is the arguments of; `odd`, from [0, 1), decides on the quirk."""
    if "<score>" in asked or "<winner>" in asked:
        verdict = "" if draw() < settings.bad_judge else _verdict(asked)
        return f"{sentence(draw)} {sentence(draw)}{verdict}", None
    quirk = ""
    for name, share in settings.quirks():
        odd -= share
        if odd < 0:
            quirk = name
            break
    match quirk:
        case "empty":
            return "", None
        case "refuse":
            return pick(draw, REFUSALS), None
        case "foreign":
            return german(settings.words, draw), None
        case "repeat":
            return " ".join([sentence(draw)] * max(12, round(settings.words / 2))), None
    function = _function(body)
    if function is not None:
        return json.dumps(instance({**(function.get("parameters") or {}), "type": "object"}, draw)), function
    text = _sum(asked, settings, draw)
    if text is None:
        text = structured(asked, draw)
    if text is None:
        text = prose(asked, settings.words, draw)
    if quirk == "leak_think":
        words = text.split(" ")
        words.insert(max(1, len(words) // 2), pick(draw, ("</think>", "<|im_end|>")))
        text = " ".join(words)
    return text, None


def _choice(body: Mapping[str, Any], asked: str, settings: FakeChat, key: bytes) -> tuple[dict[str, Any], int]:
    """A choice without its index, and its tokens."""
    reasoning, text, function = _draft(body, asked, settings, _draws(key).__next__)
    stops = body.get("stop") or ()
    for stop in [stops] if isinstance(stops, str) else stops:
        if function is None and stop and stop in text:
            text = text[: text.index(stop)]
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or math.inf
    thought, said = len(reasoning.split()), len(text.split())
    reason = "length" if thought + said > limit else "tool_calls" if function else "stop"
    content = text
    if reason == "length":
        reasoning, content = _first_words(reasoning, limit), _first_words(text, limit - thought)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reason == "length" and thought >= limit:
        message["content"] = None
    elif function:
        call = {"name": function["name"], "arguments": content}
        message["content"] = None
        message["tool_calls"] = [{"id": f"call_{key.hex()[:24]}", "type": "function", "function": call}]
    if reasoning:
        message["reasoning_content"] = reasoning
    choice = {"message": message, "logprobs": None, "finish_reason": reason}
    if body.get("logprobs"):
        choice["logprobs"] = {"content": _logprobs(message["content"] or "", body.get("top_logprobs") or 0)}
    return choice, int(min(thought + said, limit))


def _first_words(text: str, most: float) -> str:
    if most <= 0:
        return ""
    last = next(islice(re.finditer(r"\S+", text), int(most) - 1, None), None)
    return text if last is None else text[: last.end()]


def _logprobs(text: str, top: int) -> list[dict[str, Any]]:
    """OpenAI's list, one entry per token; the token that was taken is the likeliest, and all of them sum to below 1."""
    entries = []
    for place, token in enumerate(re.findall(r"\s*\S+(?:\s+\Z)?", text)):
        taken = -0.001 - 0.998 * _share(f"{place} {token}")
        rest = math.log(-math.expm1(taken))
        others = [noun for noun in NOUNS[place % 20 :] if noun != token.strip()]
        ranked = [(token, taken), *((f" {other}", rest - k * math.log(2)) for k, other in enumerate(others, start=1))]
        entries.append({**_entry(token, taken), "top_logprobs": [_entry(*one) for one in ranked[:top]]})
    return entries


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "surrogatepass"))}


# ------------------------------------------------------------------------------------------------------ kinds of answer

_SCALE = re.compile(r"\bfrom (-?\d+) to (-?\d+)")
_SUM = re.compile(r"(?<![\w.,])\d{1,9}(?: ?[+*×] ?\d{1,9}| - \d{1,9})+(?![.,]?\d|\w| ?[/^*+])")  # noqa: RUF001


def _between(text: str, tag: str) -> tuple[str, str]:
    """What the last pair of these tags encloses, since a quoted conversation before it may hold one too; the rest."""
    before, found, after = text.rpartition(f"<{tag}>")
    inside, _, after = after.partition(f"</{tag}>") if found else ("", "", after)
    return inside.strip(), f"{before} {after}"


def _verdict(asked: str) -> str:
    if "<score>" in asked:
        judged, rest = _between(asked, "answer")
        scales = _SCALE.findall(rest)
        low, high = sorted(map(int, scales[-1])) if scales else (1, 10)
        return f"\n<score>{low + int(_share(judged) * (high - low + 1))}</score>"
    first, second = _between(asked, "answer_a")[0], _between(asked, "answer_b")[0]
    # A hash of the text alone, so that the winner does not hang on its place.
    winner = "tie" if first == second else "A" if _share(first) > _share(second) else "B"
    return f"\n<winner>{winner}</winner>"


def _function(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The function to call, if one is to be called."""
    if not body.get("tools") or body.get("tool_choice") == "none":
        return None
    roles = [message["role"] for message in body["messages"]]
    last_user = max((i for i, role in enumerate(roles) if role == "user"), default=0)
    if "tool" in roles[last_user:]:
        return None
    functions = [tool["function"] for tool in body["tools"]]
    match body.get("tool_choice"):
        case {"function": {"name": name}}:
            for function in functions:
                if function["name"] == name:
                    return function
            raise InputError(f"tool_choice: no tool is named {name!r}")
    return functions[0]


def _sum(asked: str, settings: FakeChat, draw: Draw) -> str | None:
    # What stands in a fenced block is a schema or data, not a question.
    found = _SUM.search(asked.partition("```")[0])
    if found is None:
        return None
    value = 0
    for sign, factors in re.findall(r"([+-]?)(\d+(?:\*\d+)*)", found[0].replace("×", "*").replace(" ", "")):  # noqa: RUF001
        value += (-1 if sign == "-" else 1) * math.prod(map(int, factors.split("*")))
    if draw() < settings.wrong:
        value += pick(draw, (1, -1)) * (1 + int(9 * draw()))
    return f"The answer is \\boxed{{{value}}}."
