import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.verifiers import VerdictState, verify
from mopdctl.verifiers.tool_call import parse_tool_calls, same_value

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
    "arguments",
    [
        {"a": 1},
        {"a": 1, "b": 2, "c": 3},
        {"a": 1, "b": 3},
        {"a": 1, "b": "2"},
        {"a": True, "b": 2},
        {"a": 1, "b": None},
        {"a": 1, "b": [2]},
        {"A": 1, "b": 2},
        {},
    ],
)
def test_other_arguments_are_wrong(arguments: dict[str, Any]) -> None:
    verdict = verify("tool_call", written({"name": "add", "arguments": arguments}), {"calls": [ADD]})
    assert (verdict.reward, verdict.detail) == (0.0, "arguments of 'add' differ")


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
    escaped = json.dumps(call).replace("<", "\\u003c")
    response = f"<tool_call>{escaped}</tool_call>"
    assert parse_tool_calls(response) == [call]
    assert reward(response, call) == 1.0


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
    ],
    ids=str,
)
def test_a_reference_without_usable_calls_is_blamed_whatever_the_response(reference: Any) -> None:
    for response in (written(ADD), written(ADD, ADD), "no call at all"):
        assert verify("tool_call", response, reference).state == VerdictState.INVALID_REFERENCE
