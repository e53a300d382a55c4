"""Does the state give the action away? What came legitimately earlier may say the same."""

from typing import Any

import pytest

from mopdctl.pivots.leaks import find_leak, reused_ids, split_reasoning

LONG = '{"command": "pytest tests/test_parser.py -k unicode"}'
THOUGHT = "The parser fails on unicode, so I run that one test."
USER = {"role": "user", "content": "fix the parser"}


def call(call_id: str, arguments: str = LONG, name: str = "bash", **more: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    } | more


def result(call_id: str, content: str = "ok") -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def leak(state: list[dict[str, Any]], action: dict[str, Any]) -> str:
    return find_leak(state, action, reused=reused_ids([*state, action]))


def test_a_retry_of_the_same_command_is_no_leak() -> None:
    assert leak([USER, call("a"), result("a")], call("b")) == ""


def test_a_retry_with_the_same_thought_is_no_leak() -> None:
    earlier = call("a", reasoning_content=THOUGHT)
    assert leak([USER, earlier, result("a")], call("b", reasoning_content=THOUGHT)) == ""


def test_what_the_user_dictates_and_what_a_result_says_is_no_leak() -> None:
    assert leak([{"role": "user", "content": f"run {LONG}"}], call("a")) == ""
    answer = "The tests of the parser pass on every platform."
    assert leak([USER, call("a"), result("a", answer)], {"role": "assistant", "content": answer}) == ""


@pytest.mark.parametrize("copy_id", ["a", "b", ""])
def test_the_action_at_the_end_of_its_own_state_is_a_leak_whatever_its_id(copy_id: str) -> None:
    assert leak([USER, call(copy_id)], call("a", reasoning_content=THOUGHT)) == "copied_action"


def test_a_copied_message_counts_even_without_its_think_block() -> None:
    copy = {"role": "assistant", "content": "done"}
    assert leak([USER, copy], {"role": "assistant", "content": f"<think>{THOUGHT}</think>\n\ndone"}) == "copied_action"


def test_a_call_that_was_logged_before_under_its_id_is_a_leak() -> None:
    assert leak([USER, call("a"), result("a")], call("a")) == "logged_before"


def test_ids_that_count_anew_in_every_turn_say_nothing() -> None:
    other = [USER, call("call_0", "{}"), result("call_0"), call("call_0"), result("call_0")]
    assert leak(other, call("call_0")) == ""


def test_a_reused_id_says_nothing_of_the_other_ids() -> None:
    reused = [call("x", "{}"), result("x"), USER, call("x", '{"a": 1}'), result("x")]
    assert reused_ids([USER, *reused]) == {"x"}
    assert leak([USER, call("a"), result("a"), *reused, USER], call("a")) == "logged_before"


@pytest.mark.parametrize(
    ("before", "after"),
    [('{"order": 1, "x": [2.0]}', '{"x":[2],"order":1}'), ('{"name": "\u00e9"}', '{"name":"é"}')],
)
def test_the_own_call_is_known_however_its_arguments_are_spelt(before: str, after: str) -> None:
    assert leak([USER, call("a", before), result("a"), USER], call("a", after)) == "logged_before"
    assert leak([USER, call("b", before)], call("a", after)) == "copied_action"
    assert reused_ids([call("a", before), call("a", after)]) == frozenset()


@pytest.mark.parametrize(("before", "after"), [('{"a": 1}', '{"a": true}'), ('{"a": 1}', '{"a": "1"}'), ("[", "[1")])
def test_arguments_that_differ_are_two_calls(before: str, after: str) -> None:
    assert reused_ids([call("a", before), call("a", after)]) == {"a"}


def test_arguments_said_in_the_open_turn_are_a_leak_however_they_are_spelt() -> None:
    said = {"role": "assistant", "content": 'Run {"command":"pytest tests/test_parser.py -k unicode"} now'}
    assert leak([USER, said], call("a")) == "open_turn"


@pytest.mark.parametrize(
    "content",
    [
        THOUGHT.replace(" ", "  "),
        THOUGHT.replace(", ", ",\n\t"),
        [{"type": "input_text", "text": THOUGHT}],
        [{"type": "text", "text": THOUGHT[:20]}, {"type": "output_text", "text": THOUGHT[20:]}],
        [{"type": "tool_result", "content": [{"type": "text", "text": THOUGHT}]}],
    ],
)
def test_own_reasoning_is_found_in_every_part_whatever_its_white_space(content: Any) -> None:
    state = [USER, {"role": "user", "content": content}]
    assert leak(state, call("a", reasoning_content=THOUGHT)) == "own_reasoning"


def test_a_result_before_its_call_is_a_leak() -> None:
    assert leak([USER, result("a")], call("a")) == "result_before_call"


def test_reasoning_split_off_into_its_own_message_is_a_leak() -> None:
    own = {"role": "assistant", "content": "", "reasoning_content": f"{THOUGHT} With {LONG}"}
    assert leak([USER, own], call("a")) == "open_turn"
    assert leak([USER, own], call("a", "{}", reasoning_content=THOUGHT)) == "open_turn"


def test_a_final_text_said_just_before_is_a_leak() -> None:
    text = "I changed the decoder and all the tests pass now."
    assert (
        leak([USER, {"role": "assistant", "content": f"Draft: {text}"}], {"role": "assistant", "content": text})
        == "open_turn"
    )


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_own_reasoning_in_the_words_of_another_is_a_leak(role: str) -> None:
    state = [USER, {"role": role, "content": [{"type": "text", "text": f"log: {THOUGHT}"}]}]
    assert leak(state, call("a", reasoning_content=THOUGHT)) == "own_reasoning"
    assert leak(state, {"role": "assistant", "content": f"{THOUGHT}\n</think>\nyes"}) == "own_reasoning"


def test_short_texts_may_be_there_by_chance() -> None:
    assert leak([{"role": "user", "content": "ok {}"}], call("a", "{}", reasoning_content="ok")) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think>b", ("a", "b")),
        ("<think>\na\n</think>\n\nb", ("a", "b")),
        ("a\n</think>\nb", ("a", "b")),
        ("<think>a", ("a", "")),
        ("end it with </think> then", ("", "end it with </think> then")),
        ("b", ("", "b")),
    ],
)
def test_a_think_block_is_reasoning_and_the_rest_is_not(text: str, expected: tuple[str, str]) -> None:
    assert split_reasoning({"role": "assistant", "content": text}) == expected


def test_both_reasoning_field_and_block_are_reasoning() -> None:
    message = {"role": "assistant", "content": "<think>b</think>c", "reasoning_content": "a"}
    assert split_reasoning(message) == ("a\nb", "c")
