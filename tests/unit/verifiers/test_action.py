import json
from typing import Any

import pytest

from mopdctl.verifiers import VERIFIERS, Attempt, Verdict, VerdictState
from mopdctl.verifiers.registry import run_check

TALK = {"type": "message", "content": "Your order has been sent."}
SEARCH = {"type": "function_call", "name": "search", "arguments": '{"query": "red shoes", "limit": 5}'}
LOOK = {"name": "look", "arguments": '{"place": "Ulm"}'}
BATCH = {"type": "function_call_batch", "calls": [{k: SEARCH[k] for k in ("name", "arguments")}, LOOK]}
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}, "limit": {"type": "integer", "default": 5}},
                "required": ["query"],
                "additionalProperties": False,
            },
        },
    },
)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


RIGHT, PLACE = call("search", query="red shoes", limit=5), call("look", place="Ulm")


def checked(response: str, reference: Any, tools: Any = None) -> Verdict:
    return run_check(VERIFIERS["action"], Attempt(response, reference, tools=tools))


def scored(response: str, reference: Any, tools: Any = None, **match: Any) -> tuple[float | None, str]:
    verdict = checked(response, {**reference, "match": match} if match else reference, tools)
    assert verdict.state == VerdictState.OK, verdict
    return verdict.reward, verdict.detail


# -------------------------------------------------------------------------------------------------------- call or talk


def test_a_message_where_a_call_is_expected_is_wrong_and_the_other_way_round() -> None:
    assert scored("I am looking for them.", SEARCH) == (0.0, "a message where a call of 'search' is expected")
    assert scored("I am looking for them.", BATCH) == (0.0, "a message where a call of 'search' is expected")
    assert scored(RIGHT, TALK) == (0.0, "calls 'search' where a message is expected")
    assert scored(f"It has been sent. {RIGHT}", TALK) == (0.0, "calls 'search' where a message is expected")


def test_any_message_will_do_where_one_is_expected() -> None:
    assert scored("Hello.", TALK) == (1.0, "")
    assert scored("<think>What now?</think> Hello.", TALK) == (1.0, "")


@pytest.mark.parametrize(
    ("match", "said", "reward"),
    [
        ({"content": None}, "Hello.", 1.0),
        ({"content": "exact"}, "Hello.", 0.0),
        ({"content": "exact"}, "  Your order has been sent.\n", 1.0),
        ({"content": "exact"}, "YOUR order has been sent.", 0.0),
        ({"content": "exact", "casefold": True}, "YOUR order has been sent.", 1.0),
        ({"content": "words"}, "Your order has been sent. Enjoy", 1.0),
        ({"content": "words", "threshold": 0.95}, "Your order has been sent. Enjoy", 0.0),
        ({"content": "words", "similarity": "jaccard", "threshold": 0.84}, "Your order has been sent. Enjoy", 0.0),
        ({"content": "words"}, "Your order has not been sent.", 0.0),
        ({"content": "words"}, "Hello.", 0.0),
    ],
)
def test_the_content_of_a_message_is_compared_where_that_is_asked_for(
    match: dict[str, Any], said: str, reward: float
) -> None:
    detail = "" if reward else "the message differs from the expected one"
    assert scored(said, TALK, **match) == (reward, detail)


# --------------------------------------------------------------------------------------------------------------- calls


def test_the_expected_call_is_right_with_or_without_words_and_reasoning_before_it() -> None:
    for response in (RIGHT, f"Let me see.\n{RIGHT}", f"<think>{PLACE}</think>\n\n{RIGHT}", f"hm</think>{RIGHT}\n"):
        assert scored(response, SEARCH) == (1.0, "")


@pytest.mark.parametrize(
    ("response", "detail"),
    [
        (PLACE, "calls 'look' instead of 'search'"),
        (call("search", query="red shoes"), "arguments of 'search' differ: limit is missing"),
        (
            call("search", query="Red shoes", limit=5),
            """arguments of 'search' differ: query is "Red shoes", not "red sho""",
        ),
        (RIGHT + RIGHT, "2 calls instead of 1"),
        (RIGHT + PLACE, "2 calls instead of 1"),
    ],
)
def test_another_call_or_one_too_many_is_wrong(response: str, detail: str) -> None:
    reward, why = scored(response, SEARCH)
    assert reward == 0.0
    assert why.startswith(detail)


def test_arguments_mean_what_the_tools_say() -> None:
    assert scored(call("search", query="red shoes"), SEARCH, TOOLS) == (1.0, "")
    assert scored(call("search", query="red shoes", limit=None), SEARCH, TOOLS) == (1.0, "")
    assert scored(call("search", query="red shoes", limit="5"), SEARCH, TOOLS)[0] == 0.0
    assert scored(call("find", query="red shoes"), SEARCH, TOOLS)[0] == 0.0


def test_only_the_name_or_enough_words_count_where_that_is_asked_for() -> None:
    assert scored(call("search"), SEARCH, arguments="name_only") == (1.0, "")
    assert scored(call("look"), SEARCH, arguments="name_only")[0] == 0.0
    near = call("search", query="shoes red", limit=5)
    assert scored(near, SEARCH, arguments="words") == (1.0, "")
    assert scored(call("search", query="blue shoes", limit=5), SEARCH, arguments="words", threshold=0.6)[0] == 0.0
    assert scored(call("search", query="blue shoes", limit=5), SEARCH, arguments="words", threshold=0.5)[0] == 1.0
    assert scored(call("search", query="RED shoes", limit=5), SEARCH, casefold=True)[0] == 1.0


@pytest.mark.parametrize(
    ("response", "binary", "fraction", "f1"),
    [
        (RIGHT + PLACE, 1.0, 1.0, 1.0),
        (PLACE + RIGHT, 1.0, 1.0, 1.0),
        (PLACE, 0.0, 1 / 2, 2 / 3),
        (PLACE + PLACE, 0.0, 1 / 2, 1 / 2),
        (RIGHT + PLACE + PLACE, 0.0, 2 / 3, 4 / 5),
        (call("search") + call("walk"), 0.0, 0.0, 0.0),
    ],
)
def test_a_batch_is_compared_as_a_multiset(response: str, binary: float, fraction: float, f1: float) -> None:
    assert scored(response, BATCH)[0] == binary
    for name, reward in (("binary", binary), ("fraction", fraction), ("f1", f1)):
        assert scored(response, BATCH, reward=name)[0] == pytest.approx(reward)


def test_coding_tools_can_be_compared_by_what_they_act_on() -> None:
    expected = {"type": "function_call", "name": "execute_bash", "arguments": '{"command": "pytest tests/a.py"}'}
    assert (
        scored(call("bash", command="cd /repo && FOO=1 pytest -x tests/a.py"), expected, arguments="target")[0] == 1.0
    )
    assert scored(call("bash", command="cat tests/a.py"), expected, arguments="target") == (
        0.0,
        "runs 'cat' instead of 'pytest'",
    )
    view = {"command": "view", "path": "a.py", "view_range": [9, 3]}
    broken = {"type": "function_call", "name": "edit", "arguments": view, "match": {"arguments": "target"}}
    assert checked(RIGHT, broken).state == VerdictState.INVALID_REFERENCE


# -------------------------------------------------------------------------------------------------------------- states


@pytest.mark.parametrize("expected", [SEARCH, BATCH, TALK, {**SEARCH, "compat": "nemo-gym"}], ids=lambda e: str(e)[:40])
@pytest.mark.parametrize(
    "response",
    [
        "",
        " \n",
        "<think>hm</think>",
        "<think>hm " + RIGHT,
        RIGHT[:-5],  # cut off: truncated arguments, NVIDIA-NeMo/Gym #1180, PrimeIntellect-ai/verifiers #1763
        RIGHT[:40],
        "Let me see. <tool_call>{",
        RIGHT + " Done.",
        "Done.</tool_call>",
        "<tool_call>search(red)</tool_call>",
        '<tool_call>{"name": "search", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "search", "arguments": {"a": Infinity}}</tool_call>',
    ],
)
def test_a_turn_that_cannot_be_read_is_a_state_whatever_was_expected(response: str, expected: Any) -> None:
    verdict = checked(response, expected)
    assert (verdict.state, verdict.reward) == (VerdictState.PARSE_ERROR, None)


@pytest.mark.parametrize(
    "reference",
    [
        None,
        [],
        "message",
        {},
        {"type": "call", "name": "search", "arguments": "{}"},
        {"type": "message"},
        {"type": "message", "content": None},
        {"type": "function_call", "arguments": "{}"},
        {"type": "function_call", "name": "search"},
        {"type": "function_call", "name": "search", "arguments": '{"query": '},
        {"type": "function_call", "name": "search", "arguments": "[]"},
        {"type": "function_call", "name": "search", "arguments": '{"query": NaN}'},
        {"type": "function_call", "name": "search", "arguments": {"n": float("inf")}},
        {"type": "function_call_batch", "calls": []},
        {"type": "function_call_batch", "calls": [SEARCH, "look"]},
        {**SEARCH, "matches": {}},
        {**SEARCH, "match": {"argument": "exact"}},
        {**SEARCH, "match": {"threshold": 1.5}},
        {**SEARCH, "match": {"reward": "recall"}},
        {**TALK, "match": {"content": "fuzzy"}},
        {**SEARCH, "compat": "gym"},
        {**TALK, "compat": "nemo-gym-swe"},
    ],
    ids=str,
)
def test_a_reference_that_cannot_be_used_is_blamed_whatever_the_response(reference: Any) -> None:
    for response in (RIGHT, "Hello.", ""):
        verdict = checked(response, reference)
        assert (verdict.state, verdict.reward) == (VerdictState.INVALID_REFERENCE, None)


def test_an_expected_call_that_the_tools_forbid_is_the_documents_fault() -> None:
    for arguments in ('{"limit": 5}', '{"query": 1}', '{"query": "a", "more": 1}'):
        verdict = checked(RIGHT, {**SEARCH, "arguments": arguments}, TOOLS)
        assert verdict.state == VerdictState.INVALID_REFERENCE
    assert checked(RIGHT, {"type": "function_call", **LOOK}, TOOLS).detail == (
        "the expected call of 'look': unknown tool 'look'"
    )


def test_items_of_the_responses_api_are_references_as_they_are() -> None:
    assert scored(RIGHT, {**SEARCH, "call_id": "c1", "id": "fc_1", "status": "completed"}) == (1.0, "")
