import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.gensft.answers import AnswerState, is_json_object, parse_answer

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}


def response(finish_reason: Any = "stop", **message: Any) -> dict[str, Any]:
    return {
        "object": "chat.completion",
        "choices": [{"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", **message}}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3},
    }


def test_a_plain_answer_is_taken_as_it_is() -> None:
    parsed = parse_answer(response(content=" The sum is 3.\n"))
    assert parsed.state == AnswerState.OK
    assert parsed.message == {"role": "assistant", "content": " The sum is 3.\n"}
    assert (parsed.finish_reason, parsed.prompt_tokens, parsed.completion_tokens) == ("stop", 7, 3)
    assert (parsed.detail, parsed.notes) == ("", ())


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": None, "completion_tokens": True}, "none", []])
def test_tokens_that_the_server_does_not_count_are_none_and_not_0(usage: Any) -> None:
    parsed = parse_answer(response(content="x") | {"usage": usage})
    assert (parsed.prompt_tokens, parsed.completion_tokens) == (None, None)
    assert parsed.notes == ("usage_missing",)
    assert parse_answer(response(content="x") | {"usage": {"prompt_tokens": 5, "completion_tokens": 0}}).notes == ()


# vllm-project/vllm #35296: thinking that was cut came back as the answer.
# NVIDIA-NeMo/DataDesigner #754: "parse failed" hid that the text was cut. vllm-project/vllm #52640: cut to null.
@pytest.mark.parametrize(
    "message",
    [
        {"content": "First, I add one and"},
        {"content": '{"answer": [1, 2'},
        {"content": "<think>First, I add"},
        {"content": None, "reasoning_content": "First, I add"},
        {"content": None, "tool_calls": [CALL]},
        {"content": 5},
        {"content": "I cannot", "refusal": "I cannot"},
    ],
)
def test_a_length_cut_is_truncated_whatever_the_content(message: dict[str, Any]) -> None:
    parsed = parse_answer(response("length", **message))
    assert parsed.state == AnswerState.TRUNCATED
    assert "max_tokens" in parsed.detail


# vllm-project/speculators #835: "0 truncated" was reported while a third was cut.
def test_truncated_answers_are_as_many_as_finish_reasons_of_length() -> None:
    reasons = ["stop", "length", "length", "stop", "content_filter", "length", "abort", None]
    states = [parse_answer(response(reason, content="x")).state for reason in reasons]
    assert states.count(AnswerState.TRUNCATED) == reasons.count("length")
    assert states == ["ok", "truncated", "truncated", "ok", "refused", "truncated", "malformed", "malformed"]


def test_a_content_filter_and_a_refusal_field_are_refused() -> None:
    assert parse_answer(response("content_filter", content="Well,")).state == AnswerState.REFUSED
    parsed = parse_answer(response(content=None, refusal="I can't\nhelp."))
    assert (parsed.state, parsed.detail) == (AnswerState.REFUSED, "I can't help.")
    assert parse_answer(response(content=[{"type": "refusal", "refusal": "No."}])).state == AnswerState.REFUSED
    assert parse_answer(response(content="Yes.", refusal=None)).state == AnswerState.OK
    assert parse_answer(response(content="Yes.", refusal="")).state == AnswerState.OK  # some servers write every field


# NVIDIA-NeMo/DataDesigner #672: of n choices only the first was kept.
def test_another_number_of_choices_than_asked_for_is_malformed_and_none_is_lost_otherwise() -> None:
    one = response(content="a")
    two = one | {"choices": [*one["choices"], *response(content="b")["choices"]]}
    assert parse_answer(two).state == AnswerState.MALFORMED
    assert parse_answer(two).detail == "2 choices where 1 were asked for"
    assert parse_answer(one | {"choices": []}).state == AnswerState.MALFORMED
    assert parse_answer(one, requested_n=2).state == AnswerState.MALFORMED
    assert [parse_answer(two, requested_n=2, choice=k).message["content"] for k in range(2)] == ["a", "b"]


# huggingface/datatrove #496: reasoning was lost where the field had another name, and null content crashed.
# NVIDIA-NeMo/Automodel #2348: a converter copied the content only. vllm-project/vllm #34625: <think> in the content.
@pytest.mark.parametrize(
    ("message", "notes"),
    [
        ({"content": "3", "reasoning_content": "1 + 2"}, ()),
        ({"content": "3", "reasoning": "1 + 2"}, ("reasoning_moved",)),
        ({"content": "3", "thinking": "1 + 2"}, ("reasoning_moved",)),
        ({"content": "3", "reasoning": "1 + 2", "reasoning_content": "1 + 2"}, ()),
        ({"content": "<think>\n1 + 2\n</think>\n\n3"}, ("reasoning_moved",)),
        ({"content": "\n<think>1 + 2</think>3", "reasoning": None}, ("reasoning_moved",)),
        ({"content": "<think></think><think>1 + 2</think>3"}, ("reasoning_moved",)),
        (
            {"content": [{"type": "thinking", "thinking": "1 + 2"}, {"type": "text", "text": "3"}]},
            ("content_was_blocks", "reasoning_moved"),
        ),
    ],
)
def test_reasoning_of_any_field_or_inline_ends_in_one_field(message: dict[str, Any], notes: tuple[str, ...]) -> None:
    parsed = parse_answer(response(**message))
    assert parsed.state == AnswerState.OK
    assert parsed.message == {"role": "assistant", "content": "3", "reasoning_content": "1 + 2"}
    assert parsed.notes == notes


# huggingface/trl #6363: with a closing tag only, the reasoning was corrupted.
def test_with_a_closing_tag_only_the_text_is_split_there() -> None:
    parsed = parse_answer(response(content="abc</think>def"))
    assert parsed.message == {"role": "assistant", "content": "def", "reasoning_content": "abc"}
    assert (parsed.state, parsed.notes) == (AnswerState.OK, ("think_close_only", "reasoning_moved"))


def test_thinking_that_does_not_end_is_truncated_and_no_content() -> None:
    parsed = parse_answer(response("stop", content="<think>so far"))
    assert (parsed.state, parsed.notes) == (AnswerState.TRUNCATED, ("think_unclosed", "reasoning_moved"))
    assert parsed.message == {"role": "assistant", "content": "", "reasoning_content": "so far"}


def test_different_reasoning_in_two_places_is_joined_and_said() -> None:
    parsed = parse_answer(response(content="<think>b</think>3", reasoning_content="a"))
    assert parsed.message == {"role": "assistant", "content": "3", "reasoning_content": "a\n\nb"}
    assert parsed.notes == ("reasoning_moved", "reasoning_joined")


def test_blank_reasoning_is_no_reasoning() -> None:
    parsed = parse_answer(response(content="<think>\n\n</think>\n\n3", reasoning=" "))
    assert parsed.message == {"role": "assistant", "content": "3"}
    assert parsed.notes == ()


def test_tags_inside_a_text_stay_for_the_filter_to_find() -> None:
    parsed = parse_answer(response(content="Write <think> and </think> around it."))
    assert parsed.message == {"role": "assistant", "content": "Write <think> and </think> around it."}


# PrimeIntellect-ai/verifiers #1259: "" and null compared as different.
@pytest.mark.parametrize("content", [{"content": ""}, {"content": None}, {}])
def test_content_of_a_tool_call_is_empty_text_and_never_none(content: dict[str, Any]) -> None:
    parsed = parse_answer(response("tool_calls", tool_calls=[CALL], **content))
    assert parsed.state == AnswerState.OK
    assert parsed.message == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert parsed.notes == (() if content.get("content") == "" else ("content_was_null",))


# vllm-project/vllm #52640
@pytest.mark.parametrize(
    "message", [{"content": None}, {"content": " \n"}, {"content": []}, {"content": None, "reasoning": "1 + 2"}]
)
def test_an_answer_without_text_and_calls_is_empty(message: dict[str, Any]) -> None:
    parsed = parse_answer(response(**message))
    assert parsed.state == AnswerState.EMPTY
    assert parsed.detail == ("only reasoning" if "reasoning" in message else "no text and no tool call")


def test_text_blocks_are_joined_and_other_blocks_are_malformed() -> None:
    parsed = parse_answer(response(content=[{"type": "text", "text": "a"}, {"type": "output_text", "text": "b"}, "c"]))
    assert (parsed.message["content"], parsed.notes) == ("abc", ("content_was_blocks",))
    parsed = parse_answer(response(content=[{"type": "image_url", "image_url": {"url": "x"}}]))
    assert (parsed.state, parsed.message["content"]) == (AnswerState.MALFORMED, "")


# areal-project/AReaL #1501: arguments that are an array, null or broken crashed.
@pytest.mark.parametrize("arguments", ["[1]", "null", '{"a":', "", "3", '{"a": NaN}', "[" * 100_000])
def test_arguments_that_are_no_object_are_kept_verbatim_and_flagged(arguments: str) -> None:
    call = {**CALL, "function": {"name": "add", "arguments": arguments}}
    parsed = parse_answer(response("tool_calls", content="", tool_calls=[call]))
    assert parsed.state == AnswerState.OK
    assert parsed.message["tool_calls"] == [call]
    assert parsed.notes == ("arguments_not_an_object",)
    assert not is_json_object(arguments)


def test_arguments_given_as_an_object_become_text() -> None:
    call = {**CALL, "function": {"name": "add", "arguments": {"city": "Köln"}}}
    parsed = parse_answer(response("tool_calls", content="", tool_calls=[call]))
    assert parsed.message["tool_calls"][0]["function"]["arguments"] == '{"city": "Köln"}'
    assert parsed.notes == ("arguments_were_not_text",)


# agentforce314/clawcodex #394, diegosouzapw/OmniRoute #2976: empty call ids.
@pytest.mark.parametrize("call_id", [{}, {"id": None}, {"id": ""}])
def test_a_missing_call_id_is_kept_empty_and_flagged(call_id: dict[str, Any]) -> None:
    call = {"type": "function", "function": CALL["function"], **call_id}
    parsed = parse_answer(response("tool_calls", content="", tool_calls=[call]))
    assert parsed.message["tool_calls"] == [{**CALL, "id": ""}]
    assert parsed.notes == ("tool_call_id_missing",)


def test_the_old_function_call_field_is_a_call_without_an_id() -> None:
    parsed = parse_answer(response("function_call", content=None, function_call=CALL["function"]))
    assert parsed.state == AnswerState.OK
    assert parsed.message["tool_calls"] == [{**CALL, "id": ""}]
    assert parsed.notes == ("content_was_null", "function_call_used", "tool_call_id_missing")


@pytest.mark.parametrize(
    ("raw", "detail"),
    [
        (None, "a NoneType where a JSON object is needed"),
        ([], "a list where a JSON object is needed"),
        ({}, "no list 'choices'"),
        ({"error": {"message": "out of\nmemory", "code": 500}}, "error document: out of memory"),
        ({"choices": [None]}, "choice 0 has no 'message'"),
        ({"choices": [{"text": "a completion", "finish_reason": "stop"}]}, "choice 0 has no 'message'"),
        (response(content="x", role="user"), "the message has the role 'user'"),
        (response(content=5), "'content' is a int where text is needed"),
        (response(content="x", reasoning={"effort": "low"}), "'reasoning' is a dict where text is needed"),
        (response(content="x", tool_calls={}, function_call=3), "tool call 0 has no function with a name"),
        (response(content="x", tool_calls="add"), "'tool_calls' is a str where a list is needed"),
        (response(content="x", tool_calls=[{"id": "1"}]), "tool call 0 has no function with a name"),
        (response(content="x\ud800"), "holds half a character (a lone surrogate)"),
        (response("tool_calls", content="x"), "finish_reason is 'tool_calls', but the message has no tool calls"),
        (response("abort", content="x"), "finish_reason 'abort' does not say that the answer is complete"),
    ],
)
def test_what_is_no_chat_completion_is_malformed_with_one_line(raw: Any, detail: str) -> None:
    parsed = parse_answer(raw)
    assert (parsed.state, parsed.detail) == (AnswerState.MALFORMED, detail)
    assert parsed.message["role"] == "assistant"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
calls = st.lists(
    st.fixed_dictionaries(
        {},
        optional={"id": json_values, "function": st.dictionaries(st.sampled_from(["name", "arguments"]), json_values)},
    ),
    max_size=2,
)
texts = st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "\n"]), max_size=6).map("".join)
messages = st.fixed_dictionaries(
    {},
    optional={
        "role": st.just("assistant") | json_values,
        "content": texts | json_values,
        "reasoning": texts | json_values,
        "reasoning_content": texts | json_values,
        "tool_calls": calls | json_values,
        "function_call": json_values,
        "refusal": st.none() | json_values,
    },
)
choices = st.fixed_dictionaries(
    {"message": messages | json_values},
    optional={"finish_reason": st.sampled_from(["stop", "length", "tool_calls", None]) | json_values},
)
documents = st.fixed_dictionaries({"choices": st.lists(choices, min_size=1, max_size=1) | json_values})


@given(documents | json_values)
def test_any_json_value_gives_a_state_and_a_message_that_can_be_written(raw: Any) -> None:
    parsed = parse_answer(raw)
    json.dumps(parsed.message, ensure_ascii=False, allow_nan=False).encode()
    parsed.detail.encode()
    assert isinstance(parsed.message["content"], str)
    assert parsed.message.keys() <= {"role", "content", "reasoning_content", "tool_calls"}
    assert "\n" not in parsed.detail
    assert (parsed.detail == "") == (parsed.state == AnswerState.OK)
    if parsed.state == AnswerState.OK:
        assert parsed.message["content"].strip() or parsed.message["tool_calls"]


# bespokelabsai/curator's parse path: responses are stored and parsed again, so parsing must not depend on the time.
@given(documents)
def test_a_stored_document_parses_to_the_same_again(raw: dict[str, Any]) -> None:
    once = parse_answer(raw)
    assert parse_answer(raw) == once
    assert repr(parse_answer(json.loads(json.dumps(raw)))) == repr(once)
    if once.state == AnswerState.OK and not once.message["content"].count("</think>"):
        reason = "tool_calls" if "tool_calls" in once.message else "stop"
        again = parse_answer({"choices": [{"finish_reason": reason, "message": once.message}]})
        assert again.message == once.message
