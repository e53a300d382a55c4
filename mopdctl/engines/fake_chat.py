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

import csv
import hashlib
import io
import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import count, islice
from typing import Any
from xml.sax.saxutils import escape

from mopdctl.errors import InputError

_CUTS_OR_REPORTS = frozenset({"max_tokens", "max_completion_tokens", "stop", "n", "logprobs", "top_logprobs"})
_COUNTS = (
    ("n", 1, 128),
    ("top_logprobs", 0, 20),
    ("max_tokens", 1, 1 << 31),
    ("max_completion_tokens", 1, 1 << 31),
)
"""Field, least and most."""
_MAX_ITEMS = 100
"""Most items of an array and characters of a string, whatever a schema asks for."""
_MADE = 1_735_689_600
"""Time of every answer (2025-01-01), because an answer may not hang on the clock."""

_Draw = Callable[[], float]
"""The next of an answer's random numbers, in [0, 1)."""


@dataclass(frozen=True, slots=True)
class FakeChat:
    """What the model does. Written `fake-chat` or `fake-chat:words=40,refuse=0.05`; all but `words` are shares."""

    words: float = 60.0
    """Mean length of prose and of reasoning; one answer's own is drawn from half to one and a half of it."""
    think: float = 0.0
    """Answers with a separate `reasoning_content`."""
    inline_think: float = 0.0
    """Answers whose content begins with `<think>...</think>`. Tool calls have no content and so none of it."""
    leak_think: float = 0.0
    """Answers with a bare `</think>` or `<|im_end|>` inside their text. Tool calls go on without."""
    refuse: float = 0.0
    """Answers that refuse."""
    repeat: float = 0.0
    """Answers that loop one sentence."""
    empty: float = 0.0
    """Answers without text."""
    copy: float = 0.0
    """Prompts whose answer is the same for every seed and every choice."""
    foreign: float = 0.0
    """Answers in German."""
    wrong: float = 0.2
    """Sums that are wrong by 1 to 9."""
    bad_judge: float = 0.0
    """Judge replies without a verdict. No other quirk but the thinking touches a judge reply."""

    @classmethod
    @lru_cache(maxsize=256)
    def parse(cls, model: str) -> "FakeChat":
        """Reads the settings from a model's name; a name that is not `fake-chat` has the defaults.

        Raises InputError naming a setting that is unknown or out of range.
        """
        name, colon, options = model.partition(":")
        if name != "fake-chat" or not colon:
            return cls()
        known = [field.name for field in fields(cls)]
        found: dict[str, float] = {}
        for option in filter(None, options.split(",")):
            key, _, value = option.partition("=")
            try:
                found[known[known.index(key)]] = float(value)
            except ValueError:
                raise InputError(
                    f"model {model!r}: {option!r} is no setting of fake-chat; it has {', '.join(known)}, each a number"
                ) from None
        settings = cls(**found)
        shares = [getattr(settings, name) for name in known if name != "words"]
        if not (
            1 <= settings.words <= 100_000
            and all(0 <= share <= 1 for share in shares)
            and settings.think + settings.inline_think <= 1
            and sum(share for _, share in settings.quirks()) <= 1 + 1e-9
        ):
            raise InputError(
                f"model {model!r}: fake-chat takes words from 1 to 100000 and shares from 0 to 1; think and "
                f"inline_think are at most 1 together, and so are {', '.join(name for name, _ in settings.quirks())}"
            )
        return settings

    def quirks(self) -> tuple[tuple[str, float], ...]:
        """The quirks of which an answer has at most one, with their shares."""
        names = ("refuse", "repeat", "empty", "foreign", "leak_think")
        return tuple((name, getattr(self, name)) for name in names)


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
    body: Mapping[str, Any], asked: str, settings: FakeChat, draw: _Draw
) -> tuple[str, str, Mapping[str, Any] | None]:
    """Reasoning, text, and the function that the text is the arguments of, before anything is cut."""
    thinks, odd = draw(), draw()
    thinking = thinks < settings.think + settings.inline_think
    reasoning = _prose(asked, settings, draw) if thinking else ""
    text, function = _said(body, asked, settings, draw, odd)
    if not thinking or thinks < settings.think:
        return reasoning, text, function
    return "", text if function else f"<think>\n{reasoning}\n</think>\n\n{text}", function


def _said(
    body: Mapping[str, Any], asked: str, settings: FakeChat, draw: _Draw, odd: float
) -> tuple[str, Mapping[str, Any] | None]:
    """Text, and the function that it is the arguments of; `odd`, from [0, 1), decides on the quirk."""
    if "<score>" in asked or "<winner>" in asked:
        verdict = "" if draw() < settings.bad_judge else _verdict(asked)
        return f"{_sentence(draw)} {_sentence(draw)}{verdict}", None
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
            return _pick(draw, _REFUSALS), None
        case "foreign":
            return " ".join(_german(draw) for _ in range(max(2, round(_length(settings, draw) / 9)))), None
        case "repeat":
            return " ".join([_sentence(draw)] * max(12, round(settings.words / 2))), None
    function = _function(body)
    if function is not None:
        return json.dumps(_instance({**(function.get("parameters") or {}), "type": "object"}, draw)), function
    text = _sum(asked, settings, draw)
    if text is None:
        text = _structured(asked, draw)
    if text is None:
        text = _prose(asked, settings, draw)
    if quirk == "leak_think":
        words = text.split(" ")
        words.insert(max(1, len(words) // 2), _pick(draw, ("</think>", "<|im_end|>")))
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
        others = [noun for noun in _NOUNS[place % 20 :] if noun != token.strip()]
        ranked = [(token, taken), *((f" {other}", rest - k * math.log(2)) for k, other in enumerate(others, start=1))]
        entries.append({**_entry(token, taken), "top_logprobs": [_entry(*one) for one in ranked[:top]]})
    return entries


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "surrogatepass"))}


# ------------------------------------------------------------------------------------------------------ kinds of answer

_SCALE = re.compile(r"\bfrom (-?\d+) to (-?\d+)")
_SUM = re.compile(r"(?<![\w.,])\d{1,9}(?: ?[+*×] ?\d{1,9}| - \d{1,9})+(?![.,]?\d|\w| ?[/^*+])")  # noqa: RUF001
_FENCED = re.compile(r"```json\s*\n(.*?)\n\s*```", re.DOTALL)
_FORMAT = re.compile(r"\b(YAML|XML|TOML|CSV)\b", re.IGNORECASE)


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


def _sum(asked: str, settings: FakeChat, draw: _Draw) -> str | None:
    # What stands in a fenced block is a schema or data, not a question.
    found = _SUM.search(asked.partition("```")[0])
    if found is None:
        return None
    value = 0
    for sign, factors in re.findall(r"([+-]?)(\d+(?:\*\d+)*)", found[0].replace("×", "*").replace(" ", "")):  # noqa: RUF001
        value += (-1 if sign == "-" else 1) * math.prod(map(int, factors.split("*")))
    if draw() < settings.wrong:
        value += _pick(draw, (1, -1)) * (1 + int(9 * draw()))
    return f"The answer is \\boxed{{{value}}}."


def _structured(asked: str, draw: _Draw) -> str | None:
    block = _FENCED.search(asked) if "```json" in asked else None
    if block is None:
        return None
    prose = asked.replace(block[0], "")
    named = _FORMAT.search(prose)  # before JSON: "as YAML, by this JSON schema" asks for YAML
    if named is None and "json" not in prose.lower():
        return None
    try:
        schema = json.loads(block[1])
    except (ValueError, RecursionError):
        return None
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return None
    return _WRITERS[named[1].upper() if named else "JSON"](_instance(schema, draw))


def _instance(schema: Mapping[str, Any], draw: _Draw) -> Any:
    """A value of a JSON schema's type, within its enum and bounds; a keyword that is not named here has no effect."""
    if "const" in schema:
        return schema["const"]
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return _pick(draw, schema["enum"])
    kinds = schema.get("type")
    match next((kind for kind in kinds if kind != "null"), "null") if isinstance(kinds, list) else kinds:
        case "object":
            properties = schema.get("properties")
            return {
                key: _instance(part if isinstance(part, Mapping) else {}, draw)
                for key, part in (properties.items() if isinstance(properties, Mapping) else ())
            }
        case "array":
            least = _bound(schema, "minItems", 1)
            size = int(min(_MAX_ITEMS, least + draw() * (1 + _bound(schema, "maxItems", least + 2) - least)))
            items = schema.get("items")
            return [_instance(items if isinstance(items, Mapping) else {}, draw) for _ in range(size)]
        case "boolean":
            return draw() < 0.5
        case "null":
            return None
        case "integer":
            low = math.ceil(_bound(schema, "minimum", _bound(schema, "exclusiveMinimum", 0) + 1))
            high = math.floor(_bound(schema, "maximum", _bound(schema, "exclusiveMaximum", low + 100) - 1))
            return min(low, high) + int(draw() * max(1, high - low + 1))
        case "number":
            least = _bound(schema, "minimum", _bound(schema, "exclusiveMinimum", 0))
            most = _bound(schema, "maximum", _bound(schema, "exclusiveMaximum", least + 100))
            return min(most, max(least, round(least + (most - least) * (0.1 + 0.8 * draw()), 3)))
    return _string(schema, draw)


def _bound(schema: Mapping[str, Any], keyword: str, default: float) -> float:
    value = schema.get(keyword)
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else default


def _string(schema: Mapping[str, Any], draw: _Draw) -> str:
    day = f"20{10 + int(20 * draw())}-0{1 + int(9 * draw())}-{10 + int(19 * draw())}"
    name = f"{_pick(draw, _ADJECTIVES)} {_pick(draw, _NOUNS)}"
    formats = {
        "date": day,
        "date-time": f"{day}T08:30:00Z",
        "email": f"{name.replace(' ', '.')}@example.org",
        "uri": f"https://example.org/{name.replace(' ', '/')}",
    }
    text = formats.get(str(schema.get("format")), name)
    least = min(_MAX_ITEMS, int(_bound(schema, "minLength", 0)))
    return text.ljust(least, "x")[: max(0, int(_bound(schema, "maxLength", 1e6)))]


# ------------------------------------------------------------------------------------------------------------- formats

# Not one of the words that YAML reads as something else. ASCII, or [a-z] would match the dotted capital I of Turkish.
_BARE = re.compile(r"(?!(?:true|false|null|yes|no|on|off|y|n)\Z)[a-z_][a-z0-9_-]*", re.IGNORECASE | re.ASCII)


def _scalar(value: Any) -> str:
    """JSON, which YAML reads too, and TOML where it is neither null nor an object."""
    return json.dumps(value, ensure_ascii=False)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _scalar(key)


def _yaml(value: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield f"{indent}{_key(key)}:"
            yield from _yaml(item, indent + "  ")
        elif isinstance(item, list) and item:
            yield f"{indent}{_key(key)}:"
            yield from (f"{indent}  - {_scalar(one)}" for one in item)
        else:
            yield f"{indent}{_key(key)}: {_scalar(item)}"


def _toml(value: Mapping[str, Any]) -> Iterator[str]:
    pairs = [(key, item) for key, item in value.items() if item is not None]  # TOML has no null
    yield from (f"{_key(key)} = {_toml_value(item)}" for key, item in pairs if not isinstance(item, dict))
    for key, item in pairs:
        if isinstance(item, dict):
            yield f"\n[{_key(key)}]"
            yield from (f"{_key(k)} = {_toml_value(v)}" for k, v in item.items() if v is not None)


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_toml_value(v)}" for k, v in value.items() if v is not None) + "}"
    return f"[{', '.join(map(_toml_value, value))}]" if isinstance(value, list) else _scalar(value)


def _xml(value: Any, name: str, indent: str = "") -> Iterator[str]:
    tag = re.sub(r"\A(?![A-Za-z_])", "_", re.sub(r"[^A-Za-z0-9_.-]", "_", name))
    if isinstance(value, dict | list):
        yield f"{indent}<{tag}>"
        for key, item in value.items() if isinstance(value, dict) else (("item", item) for item in value):
            yield from _xml(item, key, indent + "  ")
        yield f"{indent}</{tag}>"
    else:
        yield f"{indent}<{tag}>{escape(_plain(value))}</{tag}>"


def _plain(value: Any) -> str:
    """A value where there are no types: text as it is, lists joined, null empty."""
    if isinstance(value, list):
        return "; ".join(map(_plain, value))
    return value if isinstance(value, str) else "" if value is None else _scalar(value)


def _csv(value: Mapping[str, Any]) -> str:
    """A header and one row; the fields of an object get columns of their own, `address.city`."""
    row: dict[str, Any] = {}
    for key, item in value.items():
        row |= {f"{key}.{k}": v for k, v in item.items()} if isinstance(item, dict) else {key: item}
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([list(row), [_plain(item) for item in row.values()]])
    return text.getvalue().rstrip("\n")


_WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "JSON": lambda value: json.dumps(value, ensure_ascii=False, indent=2),
    "YAML": lambda value: "\n".join(_yaml(value)) or "{}",
    "TOML": lambda value: "\n".join(_toml(value)).lstrip("\n"),
    "XML": lambda value: "\n".join(_xml(value, "document")),
    "CSV": _csv,
}

# --------------------------------------------------------------------------------------------------------------- words


def _pick(draw: _Draw, things: Sequence[Any]) -> Any:
    return things[int(draw() * len(things))]


def _length(settings: FakeChat, draw: _Draw) -> float:
    return settings.words * (0.5 + draw())


def _prose(asked: str, settings: FakeChat, draw: _Draw) -> str:
    words = _length(settings, draw)
    named = _NAMED.findall(asked[:400])
    sentences = [f'As for "{_pick(draw, named)}", {_clause(draw)}.' if named else _sentence(draw)]
    so_far = len(sentences[0].split())
    while so_far < words - 5:  # half a sentence, so that the mean is met
        sentences.append(_sentence(draw))
        so_far += sentences[-1].count(" ") + 1
    return " ".join(sentences)


def _sentence(draw: _Draw) -> str:
    form = draw()
    if form < 0.5:
        return f"The {_pick(draw, _ADJECTIVES)}{_clause(draw)[3:]} {_pick(draw, _ENDS)}."
    if form < 0.75:
        return f"{_pick(draw, _ENDS).capitalize()}, {_clause(draw)}."
    return f"{_clause(draw).capitalize()}, and {_clause(draw)}."


def _clause(draw: _Draw) -> str:
    return f"the {_pick(draw, _NOUNS)} {_pick(draw, _VERBS)} {_pick(draw, _OBJECTS)}"


def _german(draw: _Draw) -> str:
    return " ".join(_pick(draw, part) for part in _GERMAN) + "."


_NAMED = re.compile(r"\b[A-Za-z]{6,}\b")
_ADJECTIVES, _NOUNS, _VERBS, _ENDS = (
    line.strip().split("|")
    for line in """
small|quiet|bright|narrow|wooden|early|simple|heavy|common|gentle|steady|curious|distant|patient|clear|careful|golden|\
broken|hidden|modern|northern|open|rapid|silver|sturdy|tall|warm|young|fresh|plain
garden|river|teacher|bridge|letter|engine|market|window|kitchen|village|harbour|doctor|planet|picture|forest|method|\
question|record|winter|station|reader|island|painter|number|valley|journey|teapot|lantern|signal|captain|basket|theory|\
sailor|museum|ladder|orchard|compass|student|meadow|carpenter|blanket|archive|pattern|machine|neighbour|recipe|clock|\
mountain|farmer|library
follows|carries|explains|repairs|describes|measures|crosses|supports|compares|finds|keeps|paints|brings|reaches|opens|\
answers|holds|improves|changes|protects|counts|remembers|visits|shows|joins
before noon|in the spring|after a short walk|with great care|near the old wall|for many years|at the end of the day|\
without any noise|on most days|from one side to the other|every second week|in a few steps|under the same roof|\
by the light of a lamp|during a long evening|with the help of a friend|as the notes say|a little later
""".strip().splitlines()
)
_OBJECTS = [f"the {adjective} {noun}" for adjective in _ADJECTIVES for noun in _NOUNS]
_GERMAN = (
    ("Der alte Lehrer", "Die junge Gärtnerin", "Das kleine Dorf", "Ein ruhiger Nachbar", "Die neue Brücke"),
    ("zeigt", "beschreibt", "verbindet", "erklärt", "findet", "verändert"),
    ("den langen Weg", "die einfache Frage", "das große Fenster", "den schönen Garten", "die schwere Aufgabe"),
    ("am frühen Morgen", "nach einer kurzen Pause", "ohne jede Eile", "im nächsten Frühling", "mit großer Geduld"),
)
_REFUSALS = (
    "I'm sorry, but I can't help with that.",
    "I cannot assist with this request.",
    "I'm sorry, but I am unable to help with that request.",
)
