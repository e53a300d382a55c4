import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.verifiers import VERIFIERS, Attempt, Verdict, VerdictState, verify
from mopdctl.verifiers.arguments import same_value
from mopdctl.verifiers.base import ParseError
from mopdctl.verifiers.fences import without_reasoning
from mopdctl.verifiers.registry import run_check
from mopdctl.verifiers.tool_call import parse_tool_calls
from mopdctl.verifiers.turns import parse_turn

ADD = {"name": "add", "arguments": {"a": 1, "b": 2}}
LOOK = {"name": "look", "arguments": {"city": "Ulm", "days": [1, 2.5], "exact": True, "note": None}}


def written(*calls: dict[str, Any]) -> str:
    return "\n".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)


def reward(response: str, *calls: dict[str, Any]) -> float | None:
    verdict = verify("tool_call", response, {"calls": list(calls)})
    assert verdict.state == VerdictState.OK, verdict
    return verdict.reward


def test_the_very_calls_in_their_order_are_right() -> None:
    assert reward(written(ADD), ADD) == 1.0
    assert reward(written(ADD, LOOK), ADD, LOOK) == 1.0
    assert reward(f"\n {written(ADD)} \n\n{written(ADD)}\n", ADD, ADD) == 1.0


def test_too_few_too_many_and_swapped_calls_are_wrong() -> None:
    assert reward(written(ADD), ADD, LOOK) == 0.0
    assert reward(written(ADD, ADD), ADD) == 0.0
    assert reward(written(LOOK, ADD), ADD, LOOK) == 0.0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"a": 1}, "b is missing"),
        ({"a": 1, "b": 2, "c": 3}, "c is not expected"),
        ({"a": 1, "b": 3}, "b is 3, not 2"),
        ({"a": 1, "b": "2"}, 'b is "2", not 2'),
        ({"a": True, "b": 2}, "a is true, not 1"),
        ({"a": 1, "b": None}, "b is null, not 2"),
        ({"a": 1, "b": [2]}, "b is [2], not 2"),
        ({"A": 1, "b": 2}, "a is missing"),
        ({}, "a is missing"),
    ],
)
def test_other_arguments_are_wrong_and_the_first_difference_is_named(arguments: dict[str, Any], why: str) -> None:
    verdict = verify("tool_call", written({"name": "add", "arguments": arguments}), {"calls": [ADD]})
    assert (verdict.reward, verdict.detail) == (0.0, f"arguments of 'add' differ: {why}")


def test_another_name_is_wrong() -> None:
    verdict = verify("tool_call", written(ADD | {"name": "Add"}), {"calls": [ADD]})
    assert (verdict.reward, verdict.detail) == (0.0, "calls 'Add' instead of 'add'")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (3, 3.0, True),
        (3, "3", False),
        (3.0, "3.0", False),
        (1, True, False),
        (0, False, False),
        (1.0, True, False),
        (True, True, True),
        (True, False, False),
        (None, None, True),
        (None, False, False),
        (None, 0, False),
        (2**53, float(2**53), True),
        (2**53 + 1, float(2**53), False),
        (0.1 + 0.2, 0.3, False),
        ([1, 2], [1, 2], True),
        ([1, 2], [2, 1], False),
        ([1], [1, 1], False),
        ([1], {"0": 1}, False),
        ({"a": 1, "b": 2}, {"b": 2.0, "a": 1}, True),
        ({"a": [True]}, {"a": [1]}, False),
        ("a", "A", False),
        ("", None, False),
    ],
)
def test_values_compare_by_json_type_and_numbers_by_value(one: Any, other: Any, same: bool) -> None:
    assert same_value(one, other) is same
    assert same_value(other, one) is same


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=3), st.text(min_size=1, max_size=8))
def test_every_call_equals_itself(arguments: dict[str, Any], name: str) -> None:
    call = {"name": name, "arguments": arguments}
    for text in (json.dumps(call).replace("<", "\\u003c"), json.dumps(call), json.dumps(call, ensure_ascii=False)):
        response = f"<tool_call>{text}</tool_call>"
        assert parse_tool_calls(response) == [call]
        assert reward(response, call) == 1.0


@pytest.mark.parametrize("form", ["{}", " \n{}\n ", "```json\n{}\n```", "\n```\n{}\n```\n"])
def test_the_tags_of_calls_are_data_within_a_string(form: str) -> None:
    write = {"name": "write", "arguments": {"text": f'say "</tool_call>" \\ {written(ADD)}', "</tool_call>": 1}}
    response = f"<tool_call>{form.replace('{}', json.dumps(write))}</tool_call>\n{written(ADD)}"
    assert parse_tool_calls(response) == [write, ADD]
    assert reward(response, write, ADD) == 1.0
    assert reward(response, ADD, write) == 0.0


@pytest.mark.parametrize(
    "response",
    [
        '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}',
        '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}} no</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>',
        '<tool_call>"</tool_call>"</tool_call>',
    ],
)
def test_a_call_with_tags_in_a_string_has_to_end_all_the_same(response: str) -> None:
    with pytest.raises(ParseError):
        parse_tool_calls(response)


@pytest.mark.parametrize("unit", ['<tool_call>{"a', '<tool_call>{"a":"</tool_call>', "<tool_call>{}</tool_call>"])
def test_many_broken_calls_are_read_quickly(unit: str) -> None:
    started = time.process_time()
    parse_turn(unit * 5_000)
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    "response",
    [
        "",
        "3",
        "I will add. " + written(ADD),
        written(ADD) + " Done.",
        json.dumps(ADD),
        "<tool_call>" + json.dumps(ADD),
        json.dumps(ADD) + "</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>add(1, 2)</tool_call>",
        "<tool_call>[]</tool_call>",
        f"<tool_call>{json.dumps([ADD])}</tool_call>",
        f"<tool_call>{json.dumps(ADD)}{json.dumps(ADD)}</tool_call>",
        f"<tool_call><tool_call>{json.dumps(ADD)}</tool_call></tool_call>",
        written({"name": "add"}),
        written({"arguments": {}}),
        written(ADD | {"id": 1}),
        written({"name": "add", "arguments": [1, 2]}),
        written({"name": "add", "arguments": '{"a": 1, "b": 2}'}),
        '<tool_call>{"name": "add", "name": "add", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1, "a": 1}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 64 + "]" * 64 + "}}</tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b',
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}</tool_call>',
        "<think>" + written(ADD),
        written({"name": 3, "arguments": {}}),
        "<TOOL_CALL>" + json.dumps(ADD) + "</TOOL_CALL>",
    ],
)
def test_anything_but_well_formed_calls_is_unreadable(response: str) -> None:
    verdict = verify("tool_call", response, {"calls": [ADD]})
    assert (verdict.state, verdict.reward) == (VerdictState.PARSE_ERROR, None)


@pytest.mark.parametrize(
    "reference",
    [
        None,
        {},
        {"calls": None},
        {"calls": {"name": "add", "arguments": {}}},
        {"calls": [None]},
        {"calls": ["add"]},
        {"calls": [{}]},
        {"calls": [{"name": "add"}]},
        {"calls": [{"arguments": {}}]},
        {"calls": [{"name": "add", "arguments": "{}"}]},
        {"calls": []},
        {"calls": [{"name": "add", "arguments": {"a": float("nan")}}]},
        {"calls": [ADD], "orderd": False},
        {"calls": [ADD], "ordered": "no"},
        {"calls": [ADD], "compat": "nemo"},
        {"calls": [ADD], "compat": "nemo-gym", "match": {"threshold": 0.1}},
        {"calls": [ADD], "compat": "nemo-gym", "match": {"word_count_similarity_threshold": "0.1"}},
        {"calls": [ADD], "match": ["exact"]},
        {"calls": [ADD], "match": {"arguments": "fuzzy"}},
        {"calls": [ADD], "match": {"arguments": ["exact"]}},
        {"calls": [ADD], "match": {"threshold": 0}},
        {"calls": [ADD], "match": {"threshold": 1.1}},
        {"calls": [ADD], "match": {"threshold": True}},
        {"calls": [ADD], "match": {"casefold": "yes"}},
        {"calls": [ADD], "match": {"similarity": "cosine"}},
        {"calls": [ADD], "match": {"content": "exact"}},
    ],
    ids=str,
)
def test_a_reference_without_usable_calls_is_blamed_whatever_the_response(reference: Any) -> None:
    for response in (written(ADD), written(ADD, ADD), "no call at all"):
        assert verify("tool_call", response, reference).state == VerdictState.INVALID_REFERENCE


# ------------------------------------------------------------------------------------------------ order, batches, tools

MOVE = {"name": "move", "arguments": {"to": "bemi"}}


def detailed(response: str, tools: Any = None, **reference: Any) -> tuple[float | None, str]:
    verdict = checked(response, tools, **reference)
    assert verdict.state == VerdictState.OK, verdict
    return verdict.reward, verdict.detail


def checked(response: str, tools: Any = None, **reference: Any) -> Verdict:
    return run_check(VERIFIERS["tool_call"], Attempt(response, reference, tools=tools))


def test_the_order_is_free_only_where_the_reference_says_so() -> None:
    swapped = written(LOOK, ADD)
    assert detailed(swapped, calls=[ADD, LOOK])[0] == 0.0
    assert detailed(swapped, calls=[ADD, LOOK], ordered=True)[0] == 0.0
    assert detailed(swapped, calls=[ADD, LOOK], ordered=False) == (1.0, "")


def test_in_a_free_order_every_call_counts_once() -> None:
    assert detailed(written(ADD, ADD), calls=[ADD, LOOK], ordered=False) == (0.0, "calls 'add' instead of 'look'")
    assert detailed(written(ADD, LOOK, ADD), calls=[ADD, ADD, LOOK], ordered=False)[0] == 1.0


@pytest.mark.parametrize(
    ("got", "binary", "fraction", "f1"),
    [
        ([ADD, LOOK], 1.0, 1.0, 1.0),
        ([ADD], 0.0, 1 / 2, 2 / 3),
        ([MOVE, ADD], 0.0, 1 / 2, 1 / 2),
        ([ADD, LOOK, MOVE], 0.0, 2 / 3, 4 / 5),
        ([ADD, ADD], 0.0, 1 / 2, 1 / 2),
        ([MOVE], 0.0, 0.0, 0.0),
    ],
)
def test_partial_rewards_cost_calls_that_are_missing_and_calls_too_many(
    got: list[Any], binary: float, fraction: float, f1: float
) -> None:
    for name, reward in (("binary", binary), ("fraction", fraction), ("f1", f1)):
        found, detail = detailed(written(*got), calls=[ADD, LOOK], ordered=False, match={"reward": name})
        assert found == pytest.approx(reward)
        assert (detail == "") == (reward == 1)


def test_in_order_a_partial_reward_goes_by_place() -> None:
    assert detailed(written(LOOK, ADD), calls=[ADD, LOOK], match={"reward": "f1"})[0] == 0.0
    assert detailed(written(ADD, MOVE), calls=[ADD, LOOK], match={"reward": "f1"})[0] == 0.5


def tool(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "additionalProperties": False, **more}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


CYCLE = {"type": "object", "properties": {"c": {"$ref": "#/$defs/c", "default": {}}}, "default": {}}
TOOLS = (
    tool("add", {"a": {"type": "integer"}, "b": {"type": "integer", "default": 2}}, required=["a"]),
    tool("book", {"city": {"type": "string"}, "tags": {"type": "array", "uniqueItems": True}}, required=["city"]),
)


@pytest.mark.parametrize(
    ("arguments", "reward", "detail"),
    [
        ({"a": 1, "b": 2}, 1.0, ""),
        ({"a": 1}, 1.0, ""),
        ({"a": 1.0, "b": None}, 1.0, ""),
        ({"b": 2}, 0.0, "arguments of 'add': 'a' is a required property"),
        ({"a": None, "b": 2}, 0.0, "arguments of 'add': a: None is not of type 'integer'"),
        ({"a": 1.5}, 0.0, "arguments of 'add': a: 1.5 is not of type 'integer'"),
        ({"a": True}, 0.0, "arguments of 'add': a: True is not of type 'integer'"),
        (
            {"a": 1, "c": 1},
            0.0,
            "arguments of 'add': Additional properties are not allowed ('c' was unexpected)",
        ),
    ],
)
def test_the_schema_of_the_tool_decides_what_arguments_mean(arguments: Any, reward: float, detail: str) -> None:
    assert detailed(written({"name": "add", "arguments": arguments}), TOOLS, calls=[ADD]) == (reward, detail)


def test_a_tool_that_there_is_not_is_named() -> None:
    found = detailed(written({"name": "sum", "arguments": {}}), TOOLS, calls=[ADD])
    assert found == (0.0, "calls 'sum' instead of 'add' (unknown tool 'sum')")


def test_free_order_of_a_list_is_the_schemas_choice() -> None:
    call = {"name": "book", "arguments": {"city": "Ulm", "tags": ["a", "b"]}}
    other = {"name": "book", "arguments": {"city": "Ulm", "tags": ["b", "a"]}}
    twice = {"name": "book", "arguments": {"city": "Ulm", "tags": ["b", "b"]}}
    assert detailed(written(other), TOOLS, calls=[call])[0] == 1.0
    assert detailed(written(other), calls=[call])[0] == 0.0
    assert detailed(written(twice), TOOLS, calls=[call]) == (0.0, "arguments of 'book': tags: has an item twice")


def test_tools_in_the_responses_style_are_read_too() -> None:
    flat = {"type": "function", **TOOLS[0]["function"]}
    assert detailed(written({"name": "add", "arguments": {"a": 1}}), (flat,), calls=[ADD])[0] == 1.0


def test_only_names_or_enough_words_where_the_reference_says_so() -> None:
    call = {"name": "search", "arguments": {"query": "cheap hotels near the old town"}}
    near = {"name": "search", "arguments": {"query": "hotels cheap near old town"}}
    assert detailed(written(near), calls=[call])[0] == 0.0
    assert detailed(written(near), calls=[call], match={"arguments": "words"})[0] == 1.0
    assert detailed(written(near), calls=[call], match={"arguments": "words", "threshold": 0.95})[0] == 0.0
    assert (
        detailed(written({"name": "search", "arguments": {}}), calls=[call], match={"arguments": "name_only"})[0] == 1
    )


def test_a_name_alone_is_not_enough_if_the_arguments_break_the_schema() -> None:
    found = detailed(written({"name": "add", "arguments": {}}), TOOLS, calls=[ADD], match={"arguments": "name_only"})
    assert found == (0.0, "arguments of 'add': 'a' is a required property")


@pytest.mark.parametrize(
    ("tools", "call", "why"),
    [
        (TOOLS, MOVE, "the expected call of 'move': unknown tool 'move'"),
        (
            TOOLS,
            {"name": "add", "arguments": {"a": "1"}},
            "the expected call of 'add': a: '1' is not of type 'integer'",
        ),
        ((tool("add", {"a": {"type": "int"}}),), ADD, "tool 'add': no usable JSON Schema: $.properties.a.type: "),
        (({"type": "function", "function": {"name": "add", "parameters": True}},), ADD, "tool 'add': the parameters"),
        (({"function": {}},), ADD, "a tool of the prompt has no name"),
        (
            (tool("add", {"c": {"$ref": "http://127.0.0.1:9/x"}}),),
            ADD,
            "tool 'add': no usable JSON Schema: 'http://127.0.0.1:9/x' points outside the schema",
        ),
        (
            (tool("add", {"c": {"$ref": "#/properties/c"}}),),
            ADD,
            "tool 'add': no usable JSON Schema: it leads back to itself without end",
        ),
        (
            (tool("add", {"c": {"$ref": "#/$defs/c"}}, **{"$defs": {"c": CYCLE}}),),
            ADD,
            "tool 'add': no usable JSON Schema: its defaults hold one another without end",
        ),
    ],
)
def test_tools_that_forbid_the_expected_call_or_are_none_are_the_documents_fault(
    tools: Any, call: Any, why: str
) -> None:
    for response in (written(call), "no call"):
        verdict = checked(response, tools, calls=[call])
        assert (verdict.state, verdict.reward) == (VerdictState.INVALID_REFERENCE, None)
        assert verdict.detail.startswith(why)


def test_a_pattern_that_would_run_for_ever_is_not_tried() -> None:
    slow = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}}
    slow["patternProperties"] = {"^(a+)+$": {"type": "integer"}}
    slow["additionalProperties"] = False
    text = "a" * 60 + "!"
    call = {"name": "f", "arguments": {"a": text}}
    tools = ({"type": "function", "function": {"name": "f", "parameters": slow}},)
    assert detailed(written(call), tools, calls=[call])[0] == 1.0


# ----------------------------------------------------------------------------------------------------------- reasoning


@pytest.mark.parametrize(
    ("response", "rest"),
    [
        ("<think>hm</think>\n3", "\n3"),
        (" \n<think>a <tool_call> b</think>x", "x"),
        ("hm, 3?</think>x", "x"),
        ("<think></think>x </think> y", "x </think> y"),
        ("x", "x"),
        ("x <think>", "x <think>"),
        ('<tool_call>{"a": "</think>"}</tool_call>', '<tool_call>{"a": "</think>"}</tool_call>'),
    ],
)
def test_reasoning_is_cut_off_by_its_first_end(response: str, rest: str) -> None:
    assert without_reasoning(response) == rest


def test_reasoning_that_never_ends_is_no_answer() -> None:
    with pytest.raises(ParseError, match="the reasoning never ends"):
        without_reasoning("<think>" + written(ADD))


def test_calls_within_the_reasoning_do_not_count() -> None:
    assert detailed(f"<think>{written(LOOK)}</think>\n{written(ADD)}", calls=[ADD]) == (1.0, "")


# ----------------------------------------------------------------------------------------------------------- multiples


# python-jsonschema/jsonschema #810
@pytest.mark.parametrize(
    ("step", "value", "fits"),
    [
        (0.1, 0.3, True),
        (0.01, 19.99, True),
        (0.01, 19.999, False),
        (0.1, 3, True),
        (1e-7, 3.5e-6, True),
        (0.3, 1, False),
        (0.1, 10**400, True),
        (3, 10**400, False),
        (2, 3.0, False),
        (0.1, -0.7, True),
    ],
)
def test_multiples_are_those_of_the_decimals_as_written(step: float, value: float, fits: bool) -> None:
    pay = {"name": "pay", "arguments": {"amount": value}}
    here = {"type": "number", "multipleOf": step}
    for properties in ({"amount": here}, {"amount": {"anyOf": [here, {"type": "null"}]}}):
        verdict = checked(written(pay), (tool("pay", properties),), calls=[pay])
        assert verdict.state == (VerdictState.OK if fits else VerdictState.INVALID_REFERENCE)


DRAFTS = ["https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#"]


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_part_that_names_its_draft_is_checked_like_any_other(draft: str) -> None:
    slow = {"multipleOf": 0.1, "pattern": "^(a+)+$"}
    within = tool("f", {"a": {"$schema": draft, **slow}})
    behind = tool("f", {"a": {"$ref": "#"}}, **slow, **{"$schema": draft, "type": ["object", "number", "string"]})
    for value in (0.3, "a" * 60 + "!"):
        call = {"name": "f", "arguments": {"a": value}}
        for offered in (within, behind):
            assert detailed(written(call), (offered,), calls=[call]) == (1.0, "")


@pytest.mark.parametrize("step", [float("inf"), float("nan")])
def test_a_step_that_is_no_number_is_the_documents_fault(step: float) -> None:
    pay = {"name": "pay", "arguments": {"amount": 1}}
    verdict = checked(written(pay), (tool("pay", {"amount": {"multipleOf": step}}),), calls=[pay])
    assert verdict.state == VerdictState.INVALID_REFERENCE
