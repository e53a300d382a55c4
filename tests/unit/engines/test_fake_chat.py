"""The chat model without weights: a function of the request, with quirks of known shares, in OpenAI's shapes."""

import contextlib
import csv
import io
import json
import math
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from statistics import fmean
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from mopdctl.engines.fake_chat import answer, score
from mopdctl.engines.fake_settings import FakeChat
from mopdctl.errors import InputError
from mopdctl.files import digest

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 3}},
            "required": ["city", "days"],
        },
    },
}


def body(text: str = "Tell me of rivers", model: str = "fake-chat", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **fields}


def choice(text: str = "Tell me of rivers", model: str = "fake-chat", **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer(body(text, model, **fields))["choices"][0]
    return found


def said(text: str = "Tell me of rivers", model: str = "fake-chat", **fields: Any) -> str:
    content: str = choice(text, model, **fields)["message"]["content"]
    return content


def near(count: int, share: float, of: int) -> bool:
    """Within four standard deviations."""
    return abs(count - share * of) < 4 * math.sqrt(of * share * (1 - share)) + 1e-9


BODIES = [
    body("What is 17 + 25?", seed=1),
    body("Hello", "fake-chat:think=0.5,refuse=0.5,words=20", seed=2, n=3),
    body("Weather?", tools=[TOOL], seed=3),
    body("Tell me of \ud800 and \u2028", "other/model", temperature=0.7, logprobs=True, top_logprobs=2),
]

# --------------------------------------------------------------------------------------- the same body, the same answer


def test_an_answer_is_the_same_in_every_process_and_needs_no_heavy_library() -> None:
    code = (
        "import json, sys\nfrom mopdctl.engines.fake_chat import answer\n"
        "print(json.dumps([answer(b) for b in json.loads(sys.argv[1])]))\n"
        "assert not {'torch', 'numpy', 'transformers', 'aiohttp'} & sys.modules.keys()"
    )
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps(BODIES)],
            capture_output=True,
            check=True,
            env={"PYTHONHASHSEED": hash_seed},
        )
        assert json.loads(done.stdout) == [answer(b) for b in BODIES]


def test_answers_stay_as_they_are() -> None:
    assert said("What is 17 + 25?", "fake-chat:wrong=0") == "The answer is \\boxed{42}."
    # Journals that people keep hold these texts; a change of this line is one to tell of.
    assert digest(said(seed=1, temperature=1.0)) == "7d320f5062a03549b291ef5ff7a9afd5"


def test_the_order_of_keys_does_not_matter() -> None:
    for b in BODIES:
        assert answer(dict(reversed(b.items()))) == answer(b)


# vllm-project/vllm #11953
def test_every_seed_has_an_answer_of_its_own_and_no_seed_is_one_answer() -> None:
    assert len({said(seed=seed) for seed in range(200)}) == 200
    assert said() == said()
    assert len({said("Tell me of rivers", model) for model in ("a", "b", "fake-chat")}) == 3


# BerriAI/litellm #822, QwenLM/Qwen-Agent #921, guidance-ai/guidance #1504, agno-agi/agno #8009
def test_temperature_zero_ignores_the_seed_and_differs_from_no_temperature() -> None:
    greedy = answer(body(seed=1, temperature=0))
    assert greedy == answer(body(seed=2, temperature=0.0)) == answer(body(temperature=0))
    assert greedy["choices"][0]["message"] != choice(seed=1)["message"]
    texts = [c["message"]["content"] for c in answer(body(n=3, temperature=0))["choices"]]
    assert texts == [greedy["choices"][0]["message"]["content"]] * 3
    assert said(seed=1, top_p=0) != said(seed=1)


def test_choices_differ_and_the_first_is_the_one_that_comes_alone() -> None:
    three = answer(body(n=3, seed=5))
    assert [c["index"] for c in three["choices"]] == [0, 1, 2]
    assert len({c["message"]["content"] for c in three["choices"]}) == 3
    assert three["choices"][0] == choice(seed=5)
    assert three["usage"]["completion_tokens"] == sum(len(c["message"]["content"].split()) for c in three["choices"])


# -------------------------------------------------------------------------------------------------------------- cutting


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_smaller_budget_gives_the_beginning_of_the_same_answer(field: str) -> None:
    whole = said(seed=1)
    words = whole.split()
    for most in (1, 7, len(words) - 1, len(words), 500):
        document = answer(body(seed=1) | {field: most})
        found = document["choices"][0]
        assert found["message"]["content"].split() == words[:most]
        assert whole.startswith(found["message"]["content"])
        assert found["finish_reason"] == ("length" if most < len(words) else "stop")
        assert document["usage"] == {
            "prompt_tokens": 4,
            "completion_tokens": min(most, len(words)),
            "total_tokens": 4 + min(most, len(words)),
        }


def test_an_answer_that_is_cut_inside_its_reasoning_has_no_content() -> None:
    model = "fake-chat:think=1"
    whole = choice(model=model, seed=1)["message"]
    thought, words = whole["reasoning_content"].split(), whole["content"].split()
    for most in (1, len(thought)):
        cut = choice(model=model, seed=1, max_tokens=most)
        assert (cut["message"]["content"], cut["finish_reason"]) == (None, "length")
        assert cut["message"]["reasoning_content"].split() == thought[:most]
    later = choice(model=model, seed=1, max_tokens=len(thought) + 3)
    assert later["message"]["content"].split() == words[:3]
    assert later["message"]["reasoning_content"] == whole["reasoning_content"]


def test_a_stop_string_ends_the_answer_before_it() -> None:
    whole = said(seed=1)
    found = choice(seed=1, stop=[". ", "nowhere"])
    assert found["message"]["content"] == whole.partition(". ")[0]
    assert found["finish_reason"] == "stop"
    assert said(seed=1, stop=" ") == whole.split()[0]


def test_logprobs_are_those_of_one_distribution_per_token() -> None:
    found = choice(seed=1, logprobs=True, top_logprobs=5)
    entries = found["logprobs"]["content"]
    assert "".join(e["token"] for e in entries) == found["message"]["content"]
    assert len(entries) == len(found["message"]["content"].split())
    for entry in entries:
        top = entry["top_logprobs"]
        values = [e["logprob"] for e in top]
        assert (top[0]["token"], top[0]["logprob"]) == (entry["token"], entry["logprob"])
        assert len({e["token"] for e in top}) == 5
        assert values == sorted(values, reverse=True)
        assert max(values) < 0
        assert sum(map(math.exp, values)) <= 1
        assert bytes(entry["bytes"]).decode() == entry["token"]
    assert choice(seed=1, logprobs=True)["logprobs"]["content"][0]["top_logprobs"] == []
    assert choice(seed=1)["logprobs"] is None


# --------------------------------------------------------------------------------------------------------------- judges


def rubric(judged: str, scale: str = "from 1 to 5", before: str = "") -> str:
    return f"{before}Judge.\n<answer>\n{judged}\n</answer>\nEnd with <score>K</score>, K a whole number {scale}."


def verdict(prompt: str, **fields: Any) -> int:
    found = re.findall(r"<score>(-?\d+)</score>", said(prompt, **fields))
    assert len(found) == 1
    return int(found[0])


def test_a_score_hangs_on_the_judged_answer_alone_and_lies_on_the_scale() -> None:
    scores = [verdict(rubric(f"answer {i}"), seed=i) for i in range(200)]
    assert set(scores) == {1, 2, 3, 4, 5}
    quoted = "Once <answer>\nwords from 7 to 9\n</answer> was here.\n"
    assert scores == [verdict(rubric(f"answer {i}", before=quoted), seed=0) for i in range(200)]
    assert {verdict(rubric(f"{i}", "from -2 to 0")) for i in range(60)} == {-2, -1, 0}
    assert {verdict(rubric(f"from 3 to {i}", "from 1 to 2")) for i in range(60)} == {1, 2}


def pair(first: str, second: str) -> str:
    return (
        f"<answer_a>\n{first}\n</answer_a>\n<answer_b>\n{second}\n</answer_b>\nEnd with <winner>A</winner>, B or "
        "<winner>tie</winner>."
    )


def test_the_same_answer_wins_in_both_orders() -> None:
    won = []
    for i in range(50):
        texts = f"first {i}", f"second {i}"
        found = [re.findall(r"<winner>(\w+)</winner>", said(pair(*t), seed=i)) for t in (texts, texts[::-1])]
        assert found in ([["A"], ["B"]], [["B"], ["A"]])
        won += found[0]
    assert set(won) == {"A", "B"}
    assert said(pair("same", " same ")).endswith("<winner>tie</winner>")


def test_a_bad_judge_gives_no_verdict_in_its_share_and_has_no_other_quirk() -> None:
    bad = sum("<score>" not in said(rubric("x"), "fake-chat:bad_judge=0.3", seed=i) for i in range(500))
    assert near(bad, 0.3, 500)
    assert all("<score>" in said(rubric("x"), "fake-chat:refuse=1", seed=i) for i in range(20))


# ---------------------------------------------------------------------------------------------------------------- tools


def test_tools_are_called_with_arguments_of_their_schema() -> None:
    other = {"type": "function", "function": {"name": "other", "parameters": {"type": "object"}}}
    for seed in range(20):
        found = choice(tools=[TOOL, other], seed=seed)
        assert (found["finish_reason"], found["message"]["content"]) == ("tool_calls", None)
        (call,) = found["message"]["tool_calls"]
        assert (call["type"], call["function"]["name"]) == ("function", "look_up")
        assert call["id"].startswith("call_")
        jsonschema.validate(json.loads(call["function"]["arguments"]), TOOL["function"]["parameters"])  # type: ignore[index]
    named = choice(tools=[TOOL, other], tool_choice={"type": "function", "function": {"name": "other"}})
    assert named["message"]["tool_calls"][0]["function"] == {"name": "other", "arguments": "{}"}
    assert choice(tools=[TOOL], tool_choice="none")["finish_reason"] == "stop"


def test_a_tool_that_has_answered_is_not_called_again_until_the_user_asks_again() -> None:
    called = choice(tools=[TOOL])["message"]
    result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "rain"}
    asked = body(tools=[TOOL])
    asked["messages"] += [called, result]
    assert answer(asked)["choices"][0]["finish_reason"] == "stop"
    asked["messages"] += [{"role": "assistant", "content": "Rain."}, {"role": "user", "content": "And tomorrow?"}]
    assert answer(asked)["choices"][0]["finish_reason"] == "tool_calls"


# NVIDIA-NeMo/Gym #1925
def test_a_tool_choice_without_tools_is_refused() -> None:
    for choice_of_tool in ("auto", "none", {"type": "function", "function": {"name": "look_up"}}):
        with pytest.raises(InputError, match="only allowed when 'tools' are specified"):
            answer(body(tool_choice=choice_of_tool))
    with pytest.raises(InputError, match="tools: not a list of at least one"):
        answer(body(tools=[], tool_choice="auto"))


# ----------------------------------------------------------------------------------------------------- sums and formats


@pytest.mark.parametrize(
    ("asked", "value"),
    [
        ("What is 17 + 25?", 42),
        ("3 * 4", 12),
        ("Compute 2+3*4 - 10.", 4),
        ("It is 7 × 8", 56),  # noqa: RUF001
        ("100 - 1 - 2", 97),
    ],
)
def test_sums_are_solved(asked: str, value: int) -> None:
    assert said(asked, "fake-chat:wrong=0") == f"The answer is \\boxed{{{value}}}."


@pytest.mark.parametrize("asked", ["On 2024-01-05", "17 + 2.5", "Is 12 + x 3?", "8 + 4 / 2", "```\n1 + 2\n```"])
def test_what_is_no_plain_sum_is_not_solved(asked: str) -> None:
    assert "boxed" not in said(asked)


@pytest.mark.parametrize(("model", "share"), [("fake-chat:wrong=0.5", 0.5), ("fake-chat", 0.2), ("any/model", 0.2)])
def test_sums_are_wrong_in_their_share_and_by_little(model: str, share: float) -> None:
    found = [int(re.findall(r"\{(-?\d+)\}", said("17 + 25", model, seed=i))[0]) for i in range(500)]
    assert near(sum(value != 42 for value in found), share, 500)
    assert max(abs(value - 42) for value in found) <= 9


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 4, "maxLength": 9},
        "on": {"type": "boolean"},
        "count": {"type": "integer", "minimum": -3, "maximum": -1},
        "mark": {"type": "number", "minimum": 0.5, "maximum": 0.75},
        "size & kind": {"enum": ['a "b"', "c: #d", "e,f <g>"]},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 4},
        "place": {"type": "object", "properties": {"city": {"type": "string"}, "1st": {"type": "integer"}}},
        "none": {"type": ["null", "string"]},
    },
    "required": ["name", "on", "count", "mark", "size & kind", "tags", "place", "none"],
    "additionalProperties": False,
}


def structured(form: str, schema: Any = SCHEMA, seed: int = 0) -> str:
    return said(f"Write it as {form} by this JSON schema:\n```json\n{json.dumps(schema)}\n```\nNo fence.", seed=seed)


READERS: dict[str, Callable[[str], Any]] = {
    "JSON": json.loads,
    "YAML": YAML(typ="safe").load,
    "TOML": tomllib.loads,
}


@pytest.mark.parametrize("form", READERS)
def test_formats_with_types_hold_an_instance_of_the_schema(form: str) -> None:
    for seed in range(30):
        jsonschema.validate(READERS[form](structured(form, seed=seed)), SCHEMA)


def test_xml_and_csv_hold_the_fields_of_the_schema() -> None:
    for seed in range(20):
        root = ElementTree.fromstring(structured("XML", seed=seed))
        assert [e.tag for e in root] == ["name", "on", "count", "mark", "size___kind", "tags", "place", "none"]
        assert root.findtext("size___kind") in SCHEMA["properties"]["size & kind"]["enum"]
        assert 2 <= len(root.findall("tags/item")) <= 4
        assert int(root.findtext("place/_1st") or "") > 0
        rows = list(csv.DictReader(io.StringIO(structured("csv", seed=seed))))
        assert len(rows) == 1
        assert rows[0]["size & kind"] in SCHEMA["properties"]["size & kind"]["enum"]
        assert rows[0]["on"] in ("true", "false")
        assert -3 <= int(rows[0]["count"]) <= -1
        assert {"place.city", "place.1st"} <= rows[0].keys()


TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cn", "Cs", "Zl", "Zp"], exclude_characters="<"), max_size=8
)


@settings(deadline=None)
@example({"\u0130": "", "no": True})  # a capital that [a-z] matches if case is ignored
@given(st.dictionaries(TEXT, TEXT | st.integers(-(2**60), 2**60) | st.booleans(), max_size=5))
def test_any_value_comes_back_from_json_yaml_and_toml(values: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {key: {"const": value} for key, value in values.items()}}
    for form, read in READERS.items():
        assert read(structured(form, schema)) == values


# ------------------------------------------------------------------------------------------------------------- settings


def test_a_name_with_settings_is_read() -> None:
    assert FakeChat.parse("fake-chat") == FakeChat.parse("org/model:main") == FakeChat.parse("fake-chat:") == FakeChat()
    assert FakeChat.parse("fake-chat:words=40,refuse=0.05") == FakeChat(words=40, refuse=0.05)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("fake-chat:length=3", "'length=3' is no setting of fake-chat; it has words, think, inline_think, leak_think"),
        ("fake-chat:words=many", "'words=many' is no setting"),
        ("fake-chat:refuse", "'refuse' is no setting"),
        *[
            (f"fake-chat:{settings}", "takes words from 1 to 100000 and shares from 0 to 1")
            for settings in (
                "words=0",
                "words=nan",
                "refuse=1.5",
                "copy=-1",
                "think=.6,inline_think=.6",
                "empty=1,repeat=.1",
            )
        ],
    ],
)
def test_a_name_with_a_setting_that_is_not_there_is_one_line(model: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        answer(body(model=model))
    assert "\n" not in str(caught.value)


def test_answers_have_the_mean_length_that_is_asked_for() -> None:
    for words in (20, 60, 200):
        lengths = [len(said(model=f"fake-chat:words={words}", seed=i).split()) for i in range(300)]
        assert abs(fmean(lengths) - words) < 0.12 * words
        assert min(lengths) < 0.8 * words < 1.2 * words < max(lengths)


def test_prose_names_a_word_of_the_prompt() -> None:
    assert said("Explain photosynthesis now").count("photosynthesis") == 1


def quirk_of(message: dict[str, Any]) -> str:
    content = message["content"]
    sentences = content.split(". ")
    if not content:
        return "empty"
    if re.match(r"I(?:'m sorry| cannot)", content):
        return "refuse"
    if len(sentences) > 5 and len({s.rstrip(".") for s in sentences}) == 1:
        return "repeat"
    if re.search(r"\b(?:der|die|das|den)\b", content):
        return "foreign"
    return "leak_think" if "</think>" in content or "<|im_end|>" in content else "none"


def test_each_quirk_has_its_share_and_an_answer_has_one_at_most() -> None:
    shares = {"refuse": 0.1, "repeat": 0.15, "empty": 0.05, "foreign": 0.2, "leak_think": 0.1}
    model = "fake-chat:" + ",".join(f"{name}={share}" for name, share in shares.items())
    found = [quirk_of(choice(model=model, seed=i)["message"]) for i in range(1000)]
    for name, share in {**shares, "none": 0.4}.items():
        assert near(found.count(name), share, 1000), name


def test_thinking_is_separate_or_inline_in_its_share() -> None:
    messages = [choice(model="fake-chat:think=0.3,inline_think=0.2", seed=i)["message"] for i in range(500)]
    inline = [m for m in messages if re.match(r"<think>\n.+\n</think>\n\n\S", m["content"])]
    separate = [m for m in messages if "reasoning_content" in m]
    assert near(len(separate), 0.3, 500)
    assert near(len(inline), 0.2, 500)
    assert not [m for m in inline if m in separate]
    assert sum("<think>" in m["content"] for m in messages) == len(inline)


def test_a_copied_prompt_has_one_answer_and_the_others_many() -> None:
    model, copied = "fake-chat:copy=0.4", 0
    for number in range(200):
        texts = {said(f"Question {number}", model, seed=seed) for seed in range(4)}
        assert len(texts) in (1, 4)
        copied += len(texts) == 1
    assert near(copied, 0.4, 200)


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "model: missing"),
        ({"messages": None}, "messages: missing"),
        ({"messages": []}, "messages: missing"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\]: not an object with a role"),
        ({"messages": ["x"]}, r"messages\[0\]"),
        ({"n": 0}, "n: 0 is no whole number from 1 to 128"),
        ({"max_tokens": True}, "max_tokens: True"),
        ({"max_tokens": 1.5}, "max_tokens: 1.5"),
        ({"top_logprobs": 21}, "top_logprobs: 21"),
        ({"stop": [1]}, "stop: neither"),
        ({"stream": True}, "stream: this server"),
        ({"tools": [{"name": "x"}]}, "tools: not a list"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "no tool is named 'x'"),
    ],
)
def test_a_body_that_a_server_would_refuse_is_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        answer(body() | changes)
    assert "\n" not in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "role", "name"]), inner),
    max_leaves=5,
)
KEYWORDS = st.sampled_from(
    ["type", "enum", "minimum", "exclusiveMaximum", "items", "properties", "minItems", "maxLength", "format"]
)


@settings(deadline=None)
@given(st.dictionaries(KEYWORDS, JSON | st.sampled_from(["integer", "array", "number", "string", "object"])))
def test_no_schema_is_too_odd_for_a_call(schema: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": schema}}}}
    call = choice(tools=[tool])["message"]["tool_calls"][0]
    assert list(json.loads(call["function"]["arguments"])) == ["x"]


@settings(deadline=None)
@given(st.fixed_dictionaries({}, optional={"tools": JSON, "tool_choice": JSON, "stop": JSON, "seed": JSON, "n": JSON}))
def test_any_other_body_is_answered_or_refused(fields: dict[str, Any]) -> None:
    ending = "refused"
    with contextlib.suppress(InputError):
        ending = answer(body(**fields))["choices"][0]["finish_reason"]
    assert ending in ("stop", "tool_calls", "refused")


# -------------------------------------------------------------------------------------------------------------- rewards


def test_a_reward_lies_in_its_range_and_hangs_on_the_messages() -> None:
    rewards = [score([{"role": "user", "content": f"{i}"}]) for i in range(500)]
    assert len(set(rewards)) > 490
    assert min(rewards) < -3.5
    assert max(rewards) > 3.5
    assert max(map(abs, rewards)) <= 4
    assert rewards == [score([{"content": f"{i}", "role": "user"}]) for i in range(500)]
