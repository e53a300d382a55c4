"""Chat messages and Responses items, each way without loss."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.pivots.chat import chat_tools
from mopdctl.pivots.responses import KEPT, ConversionError, chat_to_responses, responses_to_chat, without_items

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
WORD = st.text(st.sampled_from("abcxyz_"), min_size=1, max_size=6)
ARGUMENTS = st.one_of(TEXT, st.sampled_from(['{"a": 1}', '{"a":1}', '{"b": "\\u00e9", "a": 1.0}', '{"cmd": "ls', ""]))
TEXT_PART = st.builds(lambda text: {"type": "text", "text": text}, TEXT)
IMAGE_PART = st.one_of(
    st.just({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}),
    st.just({"type": "image_url", "image_url": {"url": "https://x/y.png", "detail": "low"}, "cache": True}),
    st.just({"type": "image_url", "image_url": {"url": "https://x/y.png", "id": 3}}),
    st.just({"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}),
    st.just({"type": "image", "source": {"media_type": "image/png", "path": "a.png"}}),
)
CONTENT = st.one_of(TEXT, st.lists(st.one_of(TEXT_PART, IMAGE_PART), max_size=3))


@st.composite
def assistant_message(draw: st.DrawFn, number: int, joins: bool) -> dict[str, Any]:
    parts = st.lists(TEXT_PART, min_size=2, max_size=3)
    message: dict[str, Any] = {"role": "assistant", "content": draw(st.one_of(TEXT, parts))}
    if draw(st.booleans()):
        message["reasoning_content"] = draw(TEXT.filter(bool))
    if names := draw(st.lists(WORD, max_size=3)):
        message["tool_calls"] = [
            {"id": f"c{number}.{i}", "type": "function", "function": {"name": name, "arguments": draw(ARGUMENTS)}}
            for i, name in enumerate(names)
        ]
        if joins and not message["content"] and "reasoning_content" not in message:
            message["content"] = "so:"
    return message


@st.composite
def conversation(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number in range(draw(st.integers(0, 6))):
        role = draw(st.sampled_from(["system", "developer", "user", "assistant", "assistant", "tool"]))
        if role == "assistant":
            before = bool(messages) and messages[-1]["role"] == "assistant"
            messages.append(draw(assistant_message(number, before)))
        elif role == "tool":
            named = draw(st.sampled_from([{}, {"name": "ls"}]))
            messages.append({"role": "tool", "content": draw(CONTENT), "tool_call_id": draw(WORD)} | named)
        else:
            messages.append({"role": role, "content": draw(CONTENT)})
    return messages


@given(conversation())
def test_chat_messages_come_back_from_items_exactly(messages: list[dict[str, Any]]) -> None:
    items = chat_to_responses(messages)
    assert responses_to_chat(items) == messages
    calls = [(i["call_id"], i["name"], i["arguments"]) for i in items if i["type"] == "function_call"]
    assert calls == [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for message in messages
        for call in message.get("tool_calls", ())
    ]
    ids = [item["id"] for item in items if "id" in item]
    assert len(ids) == len(set(ids))


STATUS = st.sampled_from([{}, {"status": "completed"}, {"status": "incomplete"}])
ITEM_ID = st.sampled_from([{}, {"id": "rs_0"}, {"id": "msg_68a1"}])
OUTPUT_PART = st.one_of(
    st.builds(lambda text: {"type": "output_text", "text": text, "annotations": []}, TEXT),
    st.builds(lambda text: {"type": "output_text", "text": text, "annotations": [{"type": "x"}], "logprobs": []}, TEXT),
    st.builds(lambda text: {"type": "output_text", "text": text}, TEXT),
    st.builds(lambda text: {"type": "refusal", "refusal": text}, TEXT),
)
INPUT_PART = st.one_of(
    st.builds(lambda text: {"type": "input_text", "text": text}, TEXT),
    st.just({"type": "input_image", "image_url": "https://x/y.png", "detail": "auto"}),
    st.just({"type": "input_image", "file_id": "file-1", "detail": "auto"}),
    st.just({"type": "input_file", "file_id": "file-1"}),
    st.just({"type": "text", "text": "chat part in an item"}),
)
INPUT_CONTENT = st.one_of(TEXT, st.lists(INPUT_PART, max_size=3))
SUMMARY = st.lists(st.builds(lambda text: {"type": "summary_text", "text": text}, TEXT), max_size=2)
ITEM = st.one_of(
    st.builds(
        lambda role, content, more, kind: {"role": role, "content": content} | more | kind,
        st.sampled_from(["system", "user", "developer"]),
        INPUT_CONTENT,
        st.one_of(STATUS, ITEM_ID),
        st.sampled_from([{}, {"type": "message"}]),
    ),
    st.builds(
        lambda content, more, name: {"type": "message", "role": "assistant", "content": content} | more | name,
        st.one_of(TEXT, st.lists(OUTPUT_PART, max_size=3)),
        STATUS,
        st.one_of(ITEM_ID, st.just({"phase": "commentary"})),
    ),
    st.builds(
        lambda summary, more, name: {"type": "reasoning", "summary": summary} | more | name,
        SUMMARY,
        st.sampled_from([{}, {"encrypted_content": "gAAA"}, {"content": [{"type": "reasoning_text", "text": "hm"}]}]),
        ITEM_ID,
    ),
    st.builds(
        lambda name, arguments, more: (
            {"type": "function_call", "call_id": f"call_{name}", "name": name, "arguments": arguments} | more
        ),
        WORD,
        ARGUMENTS,
        st.one_of(STATUS, st.just({"namespace": "shop", "id": "fc_9"})),
    ),
    st.builds(
        lambda call_id, output, more: {"type": "function_call_output", "call_id": call_id, "output": output} | more,
        WORD,
        INPUT_CONTENT,
        st.one_of(STATUS, st.just({"name": "ls"}), st.just({"name": None})),
    ),
)


@given(st.lists(ITEM, max_size=8))
def test_items_come_back_from_chat_exactly(items: list[dict[str, Any]]) -> None:
    messages = responses_to_chat(items)
    assert chat_to_responses(messages) == items
    plain = [without_items(message) for message in messages]
    calls = [call for message in plain for call in message.get("tool_calls", ())]
    assert [(call["id"], call["function"]["arguments"]) for call in calls] == [
        (item["call_id"], item["arguments"]) for item in items if item.get("type") == "function_call"
    ]
    results = [message["tool_call_id"] for message in plain if message["role"] == "tool"]
    assert results == [item["call_id"] for item in items if item.get("type") == "function_call_output"]


CALL = {"type": "function_call", "call_id": "c1", "name": "ls", "arguments": '{"p":  1}'}


def test_one_model_call_is_one_message_with_its_parallel_calls_together() -> None:
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "look"}]},
        {
            "type": "message",
            "id": "msg_2",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "annotations": [], "text": "Looking."}],
        },
        CALL,
        CALL | {"call_id": "c2"},
        {"type": "function_call_output", "call_id": "c2", "output": "b"},
        {"type": "function_call_output", "call_id": "c1", "output": "a"},
        CALL | {"call_id": "c3"},
    ]
    messages = [without_items(message) for message in responses_to_chat(items)]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert messages[1]["reasoning_content"] == "look"
    assert messages[1]["content"] == "Looking."
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["c1", "c2"]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"p":  1}'
    assert [message["tool_call_id"] for message in messages[2:4]] == ["c2", "c1"]
    assert [call["id"] for call in messages[4]["tool_calls"]] == ["c3"]


def test_prior_calls_are_completed_items_and_empty_text_beside_calls_is_no_item() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "why"},
        {"role": "tool", "content": "", "tool_call_id": "c1"},
        {"role": "assistant", "content": ""},
    ]
    assert chat_to_responses(messages) == [
        {"type": "reasoning", "id": "rs_0", "summary": [{"type": "summary_text", "text": "why"}]},
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "c1",
            "name": "ls",
            "arguments": "{}",
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "c1", "output": ""},
        {
            "type": "message",
            "id": "msg_3",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "annotations": [], "text": ""}],
        },
    ]


def test_items_that_plain_messages_give_are_not_kept_twice() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello", "reasoning_content": "x"}]
    assert KEPT not in responses_to_chat(chat_to_responses(messages))[1]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "user", "content": "hi", "mood": "good"}, "'mood'"),
        ({"role": "user", "content": "hi", "name": "bo"}, "'name' of a user message"),
        ({"role": "assistant", "content": None}, "'content'"),
        ({"role": "assistant", "content": [{"type": "text", "text": "x"}]}, "'content'"),
        ({"role": "assistant", "content": "", "refusal": "no"}, "'refusal'"),
        ({"role": "tool", "content": "x"}, "without an id"),
        ({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}, "without an id"),
        ({"role": "user", "content": [{"type": "input_text", "text": "x"}]}, "come back as another"),
        ({"role": "narrator", "content": "x"}, "'narrator'"),
    ],
)
def test_what_items_cannot_hold_is_refused_by_name(message: dict[str, Any], named: str) -> None:
    with pytest.raises(ConversionError, match=r"message 1.*") as error:
        chat_to_responses([{"role": "user", "content": "hi"}, message])
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("item", "named"),
    [
        ({"type": "web_search_call", "id": "ws_1", "status": "completed"}, "'web_search_call'"),
        ({"type": "compaction", "encrypted_content": "g"}, "'compaction'"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}, "'arguments'"),
        ({"type": "function_call_output", "output": "x"}, "'call_id'"),
        ({"type": "message", "role": "critic", "content": "x"}, "'critic'"),
        ({"type": "reasoning", "summary": ["x"]}, "no text"),
        ("x", "where an item is needed"),
    ],
)
def test_what_chat_cannot_hold_is_refused_by_name(item: Any, named: str) -> None:
    with pytest.raises(ConversionError, match=r"item 1.*") as error:
        responses_to_chat([{"role": "user", "content": "hi"}, item])
    assert named in str(error.value)


def test_an_assistant_message_that_would_join_the_one_before_is_refused() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
    two = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(ConversionError, match=r"message 1: .* would join"):
        chat_to_responses(two)


def test_a_message_that_was_edited_since_is_refused() -> None:
    (message,) = responses_to_chat([{"role": "user", "content": "hi", "id": "msg_1"}])
    with pytest.raises(ConversionError, match="was changed"):
        chat_to_responses([message | {"content": "ho"}])


def test_responses_tools_become_chat_tools_and_server_tools_are_refused() -> None:
    function = {"name": "ls", "parameters": {"type": "object", "properties": {}}, "strict": True}
    chat = {"type": "function", "function": function}
    assert chat_tools([{"type": "function", **function}, chat, function]) == (chat, chat, chat)
    with pytest.raises(ValueError, match="'web_search'"):
        chat_tools([{"type": "web_search"}])
