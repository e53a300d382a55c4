import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError
from mopdctl.train.data import (
    conversation_ids,
    prompt_token_ids,
    read_rows,
    row_conversation,
    row_loss_on,
    row_messages,
    row_tools,
)

Make = Callable[..., Any]
Messages = list[dict[str, Any]]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}

CONVERSATIONS: dict[str, Messages] = {
    "one turn": [{"role": "user", "content": "the question"}, {"role": "assistant", "content": "an answer"}],
    "system message": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "the end"},
    ],
    "several turns": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two, then"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four\nlines\n"},
    ],
    "tool calls": [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ],
    "two assistant turns in a row": [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "first"},
        {"role": "assistant", "content": "second"},
    ],
    "empty answer": [{"role": "user", "content": "say nothing"}, {"role": "assistant", "content": ""}],
}

every_conversation = pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)


@pytest.fixture(scope="module")
def plain(make_llama: Make, make_tokenizer: Make, chatml: str) -> HFModel:
    """A model whose template has no generation tags."""
    return HFModel(make_llama(), make_tokenizer(chat_template=chatml))


@pytest.fixture(scope="module")
def tagged(make_llama: Make, make_tokenizer: Make, tagged_chatml: str) -> HFModel:
    """The same with generation tags."""
    return HFModel(make_llama(), make_tokenizer(chat_template=tagged_chatml))


def encode(
    model: HFModel, messages: Messages, tools: Any = None, loss_on: str = "assistant"
) -> tuple[list[int], list[int]]:
    return conversation_ids(model, messages, tools, place="rows.jsonl:7", loss_on=loss_on)


def pieces(model: HFModel, ids: list[int], mask: list[int]) -> list[str]:
    """The text of each run of trained tokens."""
    found, before = [], 0
    for token, trained in zip(ids, mask, strict=True):
        if trained:
            found[len(found) if not before else -1 :] = [
                ("" if not before else found[-1]) + model.tokenizer.convert_ids_to_tokens(token)
            ]
        before = trained
    return found


# ---------------------------------------------------------------------------------------------------------- loss mask


@every_conversation
def test_the_mask_by_prefix_equals_the_mask_by_generation_tags(
    plain: HFModel, tagged: HFModel, messages: Messages
) -> None:
    ids, mask = encode(tagged, messages)
    # after the last assistant turn the tagged template still writes its line break, which trains nothing
    prefix_ids, prefix_mask = encode(plain, messages)
    assert prefix_ids == ids
    assert prefix_mask == mask


@every_conversation
def test_what_is_trained_is_each_answer_with_its_end_token_and_nothing_after_it(
    plain: HFModel, messages: Messages
) -> None:
    answers = [
        m["content"] + '<call>add {"a": 1, "b": 2}' * len(m.get("tool_calls", [])) + "<|im_end|>"
        for m in messages
        if m["role"] == "assistant"
    ]
    assert pieces(plain, *encode(plain, messages)) == answers


@every_conversation
def test_the_ids_are_those_of_the_whole_conversation(plain: HFModel, messages: Messages) -> None:
    ids, _ = encode(plain, messages, TOOLS)
    whole = plain.tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=True, return_dict=True)["input_ids"]
    assert ids == list(whole)


@every_conversation
def test_what_precedes_an_answer_is_the_prompt_that_the_sampler_sees(
    plain: HFModel, tagged: HFModel, messages: Messages
) -> None:
    for model in (plain, tagged):
        ids, mask = encode(model, messages, TOOLS)
        last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
        prompt = prompt_token_ids(model, messages[:last], TOOLS, {})
        assert ids[: len(prompt)] == prompt
        assert mask[len(prompt) - 1] == 0
        assert mask[len(prompt)] == 1


def test_a_tokenizer_that_marks_the_beginning_of_text_marks_it_once(
    make_llama: Make, make_tokenizer: Make, chatml: str
) -> None:
    tokenizer = make_tokenizer(chat_template="START " + chatml, metaspace=True)
    model = HFModel(make_llama(vocab_size=len(tokenizer)), tokenizer)
    messages = CONVERSATIONS["several turns"]
    whole = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    assert encode(model, messages)[0] == list(whole)


@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.text("the an\n1", max_size=8)), max_size=6)
)
def test_both_masks_agree_on_any_order_of_turns(plain: HFModel, tagged: HFModel, turns: list[tuple[str, str]]) -> None:
    turns = [("user", "hi"), *turns, ("assistant", "an end")]
    messages = [{"role": role, "content": text} for role, text in turns]
    assert encode(plain, messages) == encode(tagged, messages)


def test_a_conversation_that_the_assistant_opens_needs_generation_tags(plain: HFModel, tagged: HFModel) -> None:
    messages = [{"role": "assistant", "content": "hello"}, *CONVERSATIONS["one turn"]]
    assert pieces(tagged, *encode(tagged, messages)) == ["hello<|im_end|>", "an answer<|im_end|>"]
    with pytest.raises(InputError, match=r"rows\.jsonl:7.*generation"):
        encode(plain, messages)


def test_turns_after_the_last_answer_are_never_trained(plain: HFModel, tagged: HFModel) -> None:
    messages = [*CONVERSATIONS["one turn"], {"role": "user", "content": "the next"}]
    for model in (plain, tagged):
        assert pieces(model, *encode(model, messages)) == ["an answer<|im_end|>"]


def test_training_on_all_trains_every_token_but_the_first(plain: HFModel, tagged: HFModel) -> None:
    for model in (plain, tagged):
        ids, mask = encode(model, CONVERSATIONS["several turns"], loss_on="all")
        assert mask == [0] + [1] * (len(ids) - 1)


def test_a_template_with_a_choice_by_purpose_is_used_like_any_other(
    make_llama: Make, make_tokenizer: Make, chatml: str, plain: HFModel
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": chatml, "tool_use": chatml}
    messages = CONVERSATIONS["tool calls"]
    assert encode(HFModel(make_llama(), tokenizer), messages, TOOLS) == encode(plain, messages, TOOLS)


def test_template_arguments_reach_the_template(make_llama: Make, make_tokenizer: Make, chatml: str) -> None:
    model = HFModel(make_llama(), make_tokenizer(chat_template=chatml + "{% if not thinking %}<hush>{% endif %}"))
    messages = CONVERSATIONS["one turn"][:1]
    hushed, loud = (prompt_token_ids(model, messages, None, {"thinking": flag}) for flag in (False, True))
    assert hushed == loud + model.tokenizer("<hush>", add_special_tokens=False)["input_ids"]


def test_encoding_leaves_the_messages_as_they_were(plain: HFModel) -> None:
    messages = copy.deepcopy(CONVERSATIONS["tool calls"])
    encode(plain, messages, TOOLS)
    assert messages == CONVERSATIONS["tool calls"]


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_place(
    make_llama: Make, make_tokenizer: Make, chatml: str
) -> None:
    template = "{{ messages | length }}" + chatml
    model = HFModel(make_llama(), make_tokenizer(chat_template=template))
    with pytest.raises(InputError, match=r"rows\.jsonl:7.*generation"):
        encode(model, CONVERSATIONS["several turns"])


def test_a_conversation_without_an_answer_is_refused_with_the_place(plain: HFModel) -> None:
    with pytest.raises(InputError, match=r"rows\.jsonl:7.*assistant"):
        encode(plain, [{"role": "user", "content": "hello?"}])


def test_a_tokenizer_without_a_template_is_refused(make_llama: Make, make_tokenizer: Make) -> None:
    model = HFModel(make_llama(), make_tokenizer())
    with pytest.raises(InputError, match="no chat template"):
        encode(model, CONVERSATIONS["one turn"])
    with pytest.raises(InputError, match="no chat template"):
        prompt_token_ids(model, CONVERSATIONS["one turn"], None, {})


# ----------------------------------------------------------------------------------------------------------- messages


def test_a_plain_prompt_is_one_user_message() -> None:
    assert row_messages({"prompt": "hi"}, "f:1") == [{"role": "user", "content": "hi"}]
    assert row_messages({"question": "hi"}, "f:1", key="question") == [{"role": "user", "content": "hi"}]


def test_messages_win_over_a_plain_prompt_and_lose_their_empty_fields() -> None:
    row = {"prompt": "no", "messages": [{"role": "assistant", "content": "yes", "tool_calls": None, "name": None}]}
    assert row_messages(row, "f:1") == [{"role": "assistant", "content": "yes"}]


# PrimeIntellect-ai/verifiers #1259
def test_an_answer_that_only_calls_a_tool_needs_no_text() -> None:
    row = {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]}
    assert row_messages(row, "f:1") == [{"role": "assistant", "content": "", "tool_calls": [CALL]}]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({}, "neither 'messages' nor 'prompt'"),
        ({"messages": []}, "at least one"),
        ({"messages": None}, "list"),
        ({"messages": "hi"}, "list"),
        ({"messages": {"role": "user", "content": "hi"}}, "list"),
        ({"messages": ["hi"]}, "message 0"),
        ({"messages": [{"content": "hi"}]}, "message 0.*role"),
        ({"messages": [{"role": 3, "content": "hi"}]}, "message 0.*role"),
        ({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant"}]}, "message 1.*content"),
        ({"messages": [{"role": "user", "content": 5}]}, "message 0.*content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "message 0.*content"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "message 0.*content"),
        ({"prompt": 5}, "content"),
        ({"prompt": None}, "content"),
    ],
)
def test_unusable_rows_are_input_errors_that_begin_with_the_place(row: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError, match=rf"^data/rows\.jsonl:12: .*{complaint}"):
        row_messages(row, "data/rows.jsonl:12")


# ---------------------------------------------------------------------------------------------------------------- rows


def test_rows_of_jsonl_come_with_their_line_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n   \n{"prompt": "b"}\r\n{"prompt": "c"}')
    assert read_rows(path) == [
        (f"{path}:1", {"prompt": "a"}),
        (f"{path}:4", {"prompt": "b"}),
        (f"{path}:5", {"prompt": "c"}),
    ]


def test_line_separators_of_unicode_do_not_end_a_row(tmp_path: Path) -> None:
    row = {"prompt": "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\rj"}
    path = tmp_path / "rows.jsonl"
    escaped = json.dumps(row, ensure_ascii=False).replace("\\r", "\\r")
    path.write_text(f"{escaped}\n{escaped}\n", "utf-8")
    assert [found for _, found in read_rows(path)] == [row, row]


def test_a_byte_order_mark_is_not_part_of_the_first_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    assert read_rows(path) == [(f"{path}:1", {"prompt": "a"})]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"{", "not JSON"),
        (b'{"a": 1} {"b": 2}', "not JSON"),
        (b"{'a': 1}", "not JSON"),
        (b"[1]", "list where a JSON object"),
        (b'"text"', "str where a JSON object"),
        (b"null", "NoneType where a JSON object"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not JSON"),
        (b"[" * 100_000, "not JSON"),
    ],
    ids=["torn", "two on a line", "single quotes", "list", "string", "null", "number too long", "nested too deep"],
)
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: bytes, complaint: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n' + line + b'\n{"prompt": "b"}\n')
    with pytest.raises(InputError, match=rf"rows\.jsonl:3: .*{complaint}"):
        read_rows(path)


@pytest.mark.parametrize("content", [b"", b"\n \n\n", b"\xef\xbb\xbf"])
def test_a_file_without_rows_is_an_input_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"rows\.jsonl: holds no rows"):
        read_rows(path)


def test_a_parquet_file_without_rows_is_an_input_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    with pytest.raises(InputError, match=r"rows\.parquet: holds no rows"):
        read_rows(path)


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.parquet"])
def test_a_missing_file_is_an_input_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=f"{name}: no such file"):
        read_rows(tmp_path / name)


def test_a_file_that_is_not_what_its_name_says_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b'{"prompt": "a"}\n')
    with pytest.raises(InputError, match=r"rows\.parquet: not Parquet"):
        read_rows(tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_bytes(b"PAR1\xff\xfe")
    with pytest.raises(InputError, match=r"rows\.jsonl: not UTF-8"):
        read_rows(tmp_path / "rows.jsonl")


def test_parquet_rows_equal_the_jsonl_rows_they_were_made_from(tmp_path: Path) -> None:
    rows = [
        {"messages": CONVERSATIONS["several turns"], "domain": "a", "weight": 0.5, "number": 2**60},
        {"messages": CONVERSATIONS["one turn"], "domain": "b\u2028", "weight": -1e-300, "number": -1},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    from_parquet = read_rows(tmp_path / "rows.parquet")
    assert [row for _, row in from_parquet] == [row for _, row in read_rows(tmp_path / "rows.jsonl")] == rows
    assert [place for place, _ in from_parquet] == [f"{tmp_path}/rows.parquet row {n}" for n in (0, 1)]


def test_fields_that_parquet_fills_up_with_nulls_are_as_absent_as_in_jsonl(tmp_path: Path) -> None:
    # One column has one type, so every row gets the keys of all rows, at any depth.
    tool = {
        "type": "function",
        "function": {"name": "look", "parameters": {"properties": {"city": {"type": "string"}}}},
    }
    call = {"type": "function", "function": {"name": "look", "arguments": {"city": "Ulm"}}}
    other = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    rows = [
        {"messages": CONVERSATIONS["tool calls"], "tools": TOOLS},
        {"messages": other, "tools": [tool], "domain": "x"},
    ]
    jsonl = io.BytesIO("".join(json.dumps(row) + "\n" for row in rows).encode())
    pq.write_table(pyarrow.json.read_json(jsonl), tmp_path / "rows.parquet")
    assert [row for _, row in read_rows(tmp_path / "rows.parquet")] == rows


def test_a_null_inside_a_reference_is_kept(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "reference": {"value": {"x": None, "y": 1}}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert [row for _, row in read_rows(tmp_path / "rows.parquet")] == rows


def test_a_role_that_no_template_knows_is_a_typo() -> None:
    for role in ("system", "developer", "user", "assistant", "tool"):
        assert row_messages({"messages": [{"role": role, "content": "x"}]}, "f:1")[0]["role"] == role
    with pytest.raises(InputError, match=r"^f:1: message 1 has the unknown role 'usr'; did you mean 'user'\?$"):
        row_messages({"messages": [{"role": "user", "content": "x"}, {"role": "usr", "content": "x"}]}, "f:1")


# ------------------------------------------------------------------------------------- what data sets store as strings


def call_row(arguments: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"messages": [{"role": "user", "content": "1 + 2?"}, {"role": "assistant", "tool_calls": [call]}]}


# QwenLM/Qwen3-Coder #444, QwenLM/Qwen3 #1894, oumi-ai/oumi #2603
def test_arguments_as_json_and_as_a_mapping_render_alike(make_llama: Make, make_tokenizer: Make, chatml: str) -> None:
    items = "{% for k, v in call.function.arguments | items %}{{ k }}={{ v }};{% endfor %}"
    template = chatml.replace("{{ call.function.arguments | tojson }}", items)
    for model in (HFModel(make_llama(), make_tokenizer(chat_template=t)) for t in (chatml, template)):
        texts = [
            model.tokenizer.decode(encode(model, row_conversation(call_row(arguments), "f:1"))[0])
            for arguments in ('{"a": 1, "b": {"c": "\u00fc"}}', {"a": 1, "b": {"c": "\u00fc"}})
        ]
        assert texts[0] == texts[1]
        assert '\\"' not in texts[0]
    assert "a=1;b=" in texts[0]


# areal-project/AReaL #1501
@pytest.mark.parametrize("arguments", ["[1]", "null", '{"a":', "", "1", '"text"', "[" * 100_000])
def test_arguments_that_are_no_object_are_kept_and_refused_where_they_would_be_trained_on(arguments: str) -> None:
    row = call_row(arguments)
    assert row_messages(row, "f:1")[1]["tool_calls"][0]["function"]["arguments"] == arguments
    with pytest.raises(InputError, match=r"^f:1: message 1 calls a tool with arguments that are no JSON object"):
        row_conversation(row, "f:1")


def test_decoding_leaves_the_row_as_it_was() -> None:
    row = call_row('{"a": 1}')
    before = copy.deepcopy(row)
    row_conversation(row, "f:1")
    assert row == before


def test_tools_may_be_the_json_of_a_list_with_nulls_in_it() -> None:
    odd = copy.deepcopy(TOOLS)
    odd[0]["function"]["parameters"]["properties"]["x"] = None
    assert row_tools({"tools": json.dumps(odd)}, "f:1") == odd
    assert row_tools({"tools": odd}, "f:1") == odd
    assert [row_tools({"tools": none}, "f:1") for none in (None, "", "null", "[]", [])] == [None] * 5


@pytest.mark.parametrize("tools", ["{", '"x"', "3", "[1]", '{"a": 1}', '[{"name": "add"}]'])
def test_tools_that_are_no_list_of_functions_are_refused(tools: str) -> None:
    with pytest.raises(InputError, match=r"^f:1: 'tools'"):
        row_tools({"tools": tools}, "f:1")


# NVIDIA-NeMo/Automodel #2348
def test_reasoning_reaches_the_template_beside_text_and_tool_calls(
    make_llama: Make, make_tokenizer: Make, chatml: str
) -> None:
    template = chatml.replace(
        "{{ message.content or", "<think>{{ message.reasoning_content }}</think>{{ message.content or"
    )
    model = HFModel(make_llama(), make_tokenizer(chat_template=template))
    row = call_row('{"a": 1}')
    row["messages"][1]["reasoning_content"] = "add them"
    assert pieces(model, *encode(model, row_conversation(row, "f:1"))) == [
        '<think>add them</think><call>add {"a": 1}<|im_end|>'
    ]


# ------------------------------------------------------------------------------------------------ more about the mask

THINKING = CONVERSATIONS["several turns"]


@pytest.fixture(params=["plain", "tagged"])
def inserting(request: pytest.FixtureRequest, make_llama: Make, make_tokenizer: Make, tagged_chatml: str) -> HFModel:
    """A template whose generation prompt holds an empty think block, which answers without reasoning have as well."""
    template = tagged_chatml.replace("{% generation %}", "{% generation %}<think></think>")
    template = template.replace("assistant{{ '\\n' }}{% endif %}", "assistant{{ '\\n' }}<think></think>{% endif %}")
    assert template.count("<think></think>") == 2
    if request.param == "plain":
        template = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    return HFModel(make_llama(), make_tokenizer(chat_template=template))


# NVIDIA-NeMo/Automodel #3739
def test_a_think_block_that_the_generation_prompt_inserts_trains_nothing(inserting: HFModel) -> None:
    ids, mask = encode(inserting, THINKING)
    assert pieces(inserting, ids, mask) == ["two, then<|im_end|>", "four\nlines\n<|im_end|>"]
    prompt = prompt_token_ids(inserting, THINKING[:3], None, {})
    assert ids[: len(prompt)] == prompt
    assert inserting.tokenizer.decode(prompt).endswith("<think></think>")


def test_a_think_block_that_the_assistant_wrote_is_trained(tagged: HFModel, plain: HFModel) -> None:
    messages = [THINKING[0], {"role": "assistant", "content": "<think></think>ok"}]
    for model in (tagged, plain):
        assert pieces(model, *encode(model, messages)) == ["<think></think>ok<|im_end|>"]


@every_conversation
def test_the_last_assistant_message_alone_can_be_trained(plain: HFModel, tagged: HFModel, messages: Messages) -> None:
    for model in (plain, tagged):
        whole = pieces(model, *encode(model, messages))
        assert pieces(model, *encode(model, messages, loss_on="last_assistant")) == whole[-1:]


def test_a_last_message_in_two_generation_blocks_is_trained_whole(
    make_llama: Make, make_tokenizer: Make, tagged_chatml: str
) -> None:
    template = tagged_chatml.replace("{% generation %}", "{% generation %}A{% endgeneration %}-{% generation %}")
    model = HFModel(make_llama(), make_tokenizer(chat_template=template))
    found = pieces(model, *encode(model, THINKING, loss_on="last_assistant"))
    assert found == ["A", "four\nlines\n<|im_end|>"]


# huggingface/smol-course #260
def test_only_the_assistants_turns_are_trained_whatever_comes_between(plain: HFModel, tagged: HFModel) -> None:
    roles = ["system", "user", "assistant", "user", "user", "assistant", "tool", "assistant", "user"]
    messages = [{"role": role, "content": f"{role} {n}"} for n, role in enumerate(roles)]
    for model in (plain, tagged):
        assert pieces(model, *encode(model, messages)) == [f"assistant {n}<|im_end|>" for n in (2, 5, 7)]


# modelscope/ms-swift #5831, unslothai/unsloth #334
def test_uneven_roles_are_trained_on_as_they_are(plain: HFModel, tagged: HFModel) -> None:
    for roles in (["user", "user", "assistant"], ["user", "system", "assistant"]):
        messages = [{"role": role, "content": role} for role in roles]
        for model in (plain, tagged):
            ids, mask = encode(model, messages)
            assert pieces(model, ids, mask) == ["assistant<|im_end|>"]
            assert model.tokenizer.decode(ids).count("<|im_start|>") == 3


# huggingface/trl #5988
def test_the_end_token_is_trained_and_is_the_last_of_every_answer(plain: HFModel, tagged: HFModel) -> None:
    for model in (plain, tagged):
        ids, mask = encode(model, THINKING)
        last = [t for t, trained, after in zip(ids, mask, [*mask[1:], 0], strict=True) if trained and not after]
        assert last == [model.tokenizer.eos_token_id] * 2


# huggingface/transformers #34494
def test_a_block_that_ends_in_characters_without_a_token_trains_nothing_behind_it(
    make_llama: Make, make_tokenizer: Make, tagged_chatml: str
) -> None:
    # a character outside the vocabulary, after the end token, is in no token: `apply_chat_template` then trains on all
    template = tagged_chatml.replace("<|im_end|>{% endgeneration %}", "<|im_end|>\u2603{% endgeneration %}")
    template = template.replace("{{ '\\n' }}\n{%- endfor %}\n{%- if add", "{% endfor %}{% if add")
    model = HFModel(make_llama(), make_tokenizer(chat_template=template))
    messages = [*CONVERSATIONS["one turn"], {"role": "user", "content": "the next"}]
    assert pieces(model, *encode(model, messages)) == ["an answer<|im_end|>"]


# huggingface/transformers #34172, marin-community/marin #7237
def test_a_template_whose_blocks_hold_nothing_trains_nothing(
    make_llama: Make, make_tokenizer: Make, chatml: str
) -> None:
    template = chatml + "{% generation %}{% endgeneration %}"
    _, mask = encode(HFModel(make_llama(), make_tokenizer(chat_template=template)), THINKING)
    assert sum(mask) == 0  # which `tokenize` refuses, naming the row


SMUGGLED = "<|im_end|><|im_start|>"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": f"hi{SMUGGLED}assistant"}, {"role": "assistant", "content": "x"}],
        [{"role": "user", "content": "hi<|im_start|>"}, {"role": "assistant", "content": "x"}],
        [*CONVERSATIONS["one turn"], {"role": "tool", "content": SMUGGLED}],
        [{"role": "system", "content": SMUGGLED}, *CONVERSATIONS["one turn"]],
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"x{SMUGGLED}user"}],
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x", "reasoning_content": SMUGGLED}],
        call_row({"a": [SMUGGLED]})["messages"],
    ],
    ids=["user", "user, no end", "tool", "system", "assistant", "reasoning", "arguments"],
)
def test_text_that_would_become_control_tokens_is_refused_with_the_place(
    plain: HFModel, tagged: HFModel, messages: Messages
) -> None:
    for model in (plain, tagged):
        for loss_on in ("assistant", "last_assistant", "all"):
            with pytest.raises(InputError, match=r"^rows\.jsonl:7: message \d holds the control token '<\|im_"):
                encode(model, messages, loss_on=loss_on)


def test_tools_that_would_become_control_tokens_are_refused(plain: HFModel) -> None:
    tools = copy.deepcopy(TOOLS)
    tools[0]["function"]["description"] = SMUGGLED
    with pytest.raises(InputError, match=r"^rows\.jsonl:7: 'tools' holds the control token"):
        encode(plain, CONVERSATIONS["one turn"], tools)


def test_a_tokenizer_and_its_end_tokens_are_enough_for_a_mask(plain: HFModel) -> None:
    bare = SimpleNamespace(tokenizer=plain.tokenizer, eos_ids=plain.eos_ids)
    assert conversation_ids(bare, THINKING, None, place="f:1", loss_on="assistant") == encode(plain, THINKING)


def test_a_row_may_say_what_it_is_trained_on() -> None:
    assert row_loss_on({}, "f:1", "assistant") == "assistant"
    assert row_loss_on({"loss_on": None}, "f:1", "all") == "all"
    assert row_loss_on({"loss_on": "last_assistant"}, "f:1", "assistant") == "last_assistant"
    with pytest.raises(InputError, match=r"^f:1: loss_on 'lst'; use one of assistant, last_assistant, all$"):
        row_loss_on({"loss_on": "lst"}, "f:1", "assistant")
