import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopdctl.verifiers import VERIFIERS, Attempt, VerdictState, verify
from mopdctl.verifiers.documents import LANGUAGES
from mopdctl.verifiers.registry import run_check

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
DOCUMENTS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
)


def reward(response: str, value: Any) -> float | None:
    return verify("json_equal", response, {"value": value}).reward


def state(response: str, value: Any = None) -> VerdictState:
    return verify("json_equal", response, {"value": value}).state


@given(DOCUMENTS)
def test_every_document_equals_itself_in_any_layout(document: Any) -> None:
    compact = json.dumps(document, separators=(",", ":"))
    spread = json.dumps(document, indent=3, ensure_ascii=False)
    for text in (compact, spread, f"```json\n{spread}\n```", f"\n```\n{compact}\n```\n"):
        assert reward(text, document) == 1.0


@given(DOCUMENTS, DOCUMENTS)
def test_documents_are_equal_exactly_if_their_canonical_texts_are(one: Any, other: Any) -> None:
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    if one in (0, -0.0) or "-0.0" in json.dumps([one, other]):
        return  # -0.0 equals 0.0
    assert reward(json.dumps(one), other) == float(same)


@settings(max_examples=25)
@given(st.dictionaries(st.text(max_size=5), DOCUMENTS, min_size=2, max_size=5))
def test_the_order_of_keys_is_free_and_that_of_items_is_not(document: dict[str, Any]) -> None:
    backwards = dict(reversed(document.items()))
    assert reward(json.dumps(backwards), document) == 1.0
    assert reward("[1, 2]", [2, 1]) == 0.0


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("true", 1),
        ("1", True),
        ("0", False),
        ("3", 3.0),
        ("3.0", 3),
        ('"3"', 3),
        ("3", "3"),
        ("null", False),
        ("null", 0),
        ("[]", {}),
        ("{}", []),
        ('""', None),
        ("[[]]", []),
        ('{"a": 1}', {"a": 1, "b": 2}),
        ('{"a": 1, "b": 2}', {"a": 1}),
        ('{"a": null}', {}),
        ("{}", {"a": None}),
        ('{"a": [1, {"b": true}]}', {"a": [1, {"b": 1}]}),
        ('["str", "a"]', "a"),  # looks like a value tagged with its type
        ('"caf\u00e9"', "cafe\u0301"),
    ],
)
def test_values_of_another_type_or_shape_are_wrong(response: str, value: Any) -> None:
    assert reward(response, value) == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        " ",
        "{",
        '{"a": 1,}',
        "{'a': 1}",
        '{"a": 1} and so on',
        'Here it is: {"a": 1}',
        '{"a": 1}{"a": 1}',
        '{"a": 1, "a": 1}',
        '[{"x": {"a": 1, "a": 2}}]',
        "NaN",
        "[Infinity]",
        "-Infinity",
        '{"a": 1} // done',
        "\ufeff{}",
        "True",
        "None",
        '```json\n{"a": 1}\n```\nDone.',
        'Sure:\n```json\n{"a": 1}\n```',
        '```json\n{"a": 1}\n```\n```json\n{"a": 1}\n```',
        '```json\n```json\n{"a": 1}\n```\n```',
        '```python\n{"a": 1}\n```',
        '```json\n{"a": 1}',
        '{"a": 1}\n```',
        "1" * 5000,
        "1e999",
        "<think>{}",
    ],
)
def test_anything_but_one_strict_document_is_unreadable(response: str) -> None:
    verdict = verify("json_equal", response, {"value": {"a": 1}})
    assert (verdict.state, verdict.reward) == (VerdictState.PARSE_ERROR, None)


@pytest.mark.parametrize("reference", [None, {}, {"answer": 1}, [1], "value"])
def test_a_reference_without_a_value_is_blamed(reference: Any) -> None:
    verdict = verify("json_equal", "{}", reference)
    assert (verdict.state, verdict.reward) == (VerdictState.INVALID_REFERENCE, None)


def test_reasoning_before_the_document_does_not_count() -> None:
    assert reward('<think>{"a": 2}</think>\n```json\n{"a": 1}\n```', {"a": 1}) == 1.0
    assert reward('<think>{"a": 1}</think>{"a": 2}', {"a": 1}) == 0.0


def test_a_value_of_null_is_a_reference() -> None:
    assert reward("null", None) == 1.0


@pytest.mark.parametrize("depth", [100, 400, 900, 990, 5_000, 100_000])
def test_deeply_nested_responses_are_a_verdict_and_no_crash(depth: int) -> None:
    for response in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        assert state(response, {"a": 1}) in (VerdictState.OK, VerdictState.PARSE_ERROR)
        assert verify("json_equal", response, {"value": {"a": 1}}).reward != 1.0


@pytest.mark.parametrize(
    "response",
    [
        "```" + "\n" * 1_500,
        "```\n" + " \n" * 750 + "x",
        "\n" * 1_500 + "```json\n{}\n",
        "```json\n" * 1_500,
        "<tool_call>" * 4_000,
        "<tool_call>\n" * 4_000 + "</tool_call>",
    ],
    ids=["line breaks", "blank lines", "line breaks before", "open fences", "open calls", "open calls, one end"],
)
def test_what_a_degenerate_model_writes_is_read_in_linear_time(response: str) -> None:
    references = {"json_equal": {"value": 1}, "tool_call": {"calls": [{"name": "a", "arguments": {}}]}}
    for name, reference in references.items():
        began = time.process_time()
        assert verify(name, response, reference).reward is None
        assert time.process_time() - began < 0.5, name  # a few milliseconds; a quadratic search takes seconds


REFERENCES: dict[str, Any] = {
    "exact_match": {"answer": "x"},
    "integer": {"answer": 1},
    "json_equal": {"value": {"a": 1}},
    "constraints": {"constraints": [{"kind": "items", "separator": ",", "count": 2}]},
    "tool_call": {"calls": [{"name": "a", "arguments": {}}]},
    "abstention": {"answer": "x"},
} | {f"structured {form}": {"format": form, "schema": {"type": "object"}} for form in LANGUAGES}


@given(
    st.text(max_size=60) | st.text('{}[]",:`1 \ntruefalsn<>_/tool_call!&*-', max_size=60),
    st.sampled_from(sorted(REFERENCES)),
)
def test_no_response_makes_a_verifier_crash(response: str, name: str) -> None:
    verdict = run_check(VERIFIERS[name.split()[0]], Attempt(response, REFERENCES[name]))
    assert verdict.state in (VerdictState.OK, VerdictState.PARSE_ERROR), verdict
    assert (verdict.reward in (0.0, 1.0)) == (verdict.state == VerdictState.OK)


# python-jsonschema/jsonschema #810
@pytest.mark.parametrize(("value", "reward"), [("0.3", 1.0), ("1.1", 1.0), ("0.35", 0.0)])
def test_multiples_are_those_of_the_decimals_as_written(value: str, reward: float) -> None:
    attempt = Attempt(value, {"format": "json", "schema": {"multipleOf": 0.1}})
    assert run_check(VERIFIERS["structured"], attempt).reward == reward
