import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.errors import InputError
from mopdctl.gensft.records import Answer, Seed
from mopdctl.gensft.verify import check_verifier, verify_answer

ADD = {"name": "add", "arguments": {"a": 1, "b": "<b>"}}


def seed(verifier: str | None, reference: Any = None) -> Seed:
    user = {"role": "user", "content": "?"}
    return Seed("0" * 32, (user,), None, "math", "test", None, None, reference, verifier, None, "seeds.jsonl:7")


def answer(content: str, *, state: Any = "ok", **more: Any) -> Answer:
    message = {"role": "assistant", "content": content} | more
    return Answer(0, state, message, "stop", "member", {}, "key", 3, 1)


def calling(*calls: tuple[str, str], content: str = "") -> Answer:
    made = [
        {"id": f"c{i}", "type": "function", "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(calls)
    ]
    return answer(content, tool_calls=made)


def test_the_verifier_sees_the_content_without_the_reasoning() -> None:
    found = verify_answer(seed("integer", {"answer": 42}), answer("42", reasoning_content="It may be 41."))
    assert found == ("ok", 1.0, 2)


def test_a_wrong_answer_has_the_reward_0_and_an_unreadable_one_has_none() -> None:
    assert verify_answer(seed("integer", {"answer": 42}), answer("41")) == ("ok", 0.0, 2)
    assert verify_answer(seed("integer", {"answer": 42}), answer("I do not know")) == ("parse_error", None, 2)
    assert verify_answer(seed("integer", None), answer("42")) == ("invalid_reference", None, 2)


def test_without_a_verifier_or_a_whole_answer_there_is_nothing_to_check() -> None:
    assert verify_answer(seed(None), answer("42")) == (None, None, None)
    assert verify_answer(seed("integer", {"answer": 4}), answer("4", state="truncated")) == (None, None, None)


def test_structured_tool_calls_are_checked_as_written_ones_are() -> None:
    wanted = seed("tool_call", {"calls": [ADD]})
    assert verify_answer(wanted, calling(("add", '{"b": "<b>", "a": 1}'))) == ("ok", 1.0, 2)
    assert verify_answer(wanted, calling(("add", '{"a": 2, "b": "<b>"}'))) == ("ok", 0.0, 2)
    assert verify_answer(wanted, answer(f"<tool_call>{json.dumps(ADD)}</tool_call>")) == ("ok", 1.0, 2)


def test_what_is_said_beside_structured_calls_is_no_part_of_them() -> None:
    found = verify_answer(
        seed("tool_call", {"calls": [ADD]}), calling(("add", json.dumps(ADD["arguments"])), content="Hm.")
    )
    assert found == ("ok", 1.0, 2)


def test_an_answer_without_the_calls_that_are_wanted_is_unreadable() -> None:
    assert verify_answer(seed("tool_call", {"calls": [ADD]}), answer("It is 3.")) == ("parse_error", None, 2)


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "{a: 1}",
        "[1]",
        '"{}"',
        "null",
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": 1, "a": 1}',
        "```json\n{}\n```",
        '{}, "id": 1',
        '{}, "arguments": {}',
        '{}}</tool_call><tool_call>{"name": "add", "arguments": {}',
        '{"a":' * 5000,
    ],
    ids=lambda text: text[:30],
)
def test_arguments_that_are_no_json_object_are_a_parse_error_and_forge_no_call(arguments: str) -> None:
    for calls in ([{"name": "add", "arguments": {}}], [{"name": "add", "arguments": {}}] * 2):
        assert verify_answer(seed("tool_call", {"calls": calls}), calling(("add", arguments))) == (
            "parse_error",
            None,
            2,
        )


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)
CALLS = st.lists(
    st.tuples(st.text(min_size=1), st.dictionaries(st.text(max_size=4), VALUES, max_size=2)), min_size=1, max_size=2
)


@given(CALLS)
def test_every_answer_passes_against_its_own_calls(calls: list[tuple[str, dict[str, Any]]]) -> None:
    reference = {"calls": [{"name": name, "arguments": arguments} for name, arguments in calls]}
    made = calling(*((name, json.dumps(arguments)) for name, arguments in calls))
    assert verify_answer(seed("tool_call", reference), made) == ("ok", 1.0, 2)


def test_an_unknown_verifier_is_found_before_anything_is_asked() -> None:
    check_verifier(seed(None))
    check_verifier(seed("integer"))
    with pytest.raises(InputError, match=r"^seeds.jsonl:7: unknown verifier 'interger'; did you mean 'integer'\?$"):
        check_verifier(seed("interger"))
    with pytest.raises(InputError, match="unknown verifier 'xyz'; there are exact_match, integer, "):
        check_verifier(seed("xyz"))
