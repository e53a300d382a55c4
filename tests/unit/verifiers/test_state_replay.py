"""What an answer did to its environment decides, and the verdict says what counted."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.verifiers.base import Attempt, Verdict, VerdictState
from mopdctl.verifiers.registry import VERIFIERS, run_check
from mopdctl.verifiers.turns import Turn, WrittenCall, parse_turn, turn_of

SETUP = {"people": {"kalo": 3, "bemi": 7}, "lockers": {"3": "tode", "7": None}}
ENVIRONMENT = {"name": "errands", "setup": SETUP, "max_turns": 6}
MOVE = {"name": "move_item", "arguments": {"source": 3, "target": 7}}
FIND = {"name": "find_person", "arguments": {"name": "kalo"}}
REFERENCE = {"calls": [FIND, MOVE], "message": "bemi has tode", "basis": ["state", "message"]}


def text(*calls: Any) -> str:
    return "".join(f"<tool_call>{c if isinstance(c, str) else json.dumps(c)}</tool_call>" for c in calls)


def conversation(*turns: str) -> tuple[dict[str, Any], ...]:
    found: list[dict[str, Any]] = []
    for turn in turns:
        found += [{"role": "assistant", "content": turn}, {"role": "tool", "content": "whatever"}]
    return tuple(found[:-1])


def judge(*turns: str, reference: Any = REFERENCE, environment: Any = ENVIRONMENT) -> Verdict:
    attempt = Attempt(turns[-1], reference, environment=environment, turns=conversation(*turns))
    return run_check(VERIFIERS["state_replay"], attempt)


def test_the_expected_calls_and_message_pass() -> None:
    verdict = judge(text(FIND), text(MOVE), "bemi has tode")
    assert (verdict.state, verdict.reward, verdict.detail) == (VerdictState.OK, 1.0, "basis state, message")


def test_another_way_to_the_same_state_passes() -> None:
    there_and_back = [{"name": "move_item", "arguments": dict(zip(("source", "target"), way, strict=True))}
                      for way in ((3, 7), (7, 3), (3, 7))]  # fmt: skip
    assert judge(text(*there_and_back), "bemi has tode").reward == 1.0


@pytest.mark.parametrize("answer", ["  Bemi  has tode.", "BEMI HAS TODE", "<think>so</think>\nbemi has tode"])
def test_a_message_may_differ_in_case_spaces_and_full_stop(answer: str) -> None:
    assert judge(text(MOVE), answer).reward == 1.0


@pytest.mark.parametrize(
    ("turns", "failed"),
    [
        ((text(FIND), "bemi has tode"), "state: differs"),
        ((text(MOVE), "kalo has tode"), "message: 'kalo has tode' instead of 'bemi has tode'"),
        ((text(MOVE),), "message: the answer never came, the last turn calls tools"),
        (("bemi has tode " + text(MOVE),), "message: the answer never came"),
        ((text(MOVE), ""), "message: ''"),
    ],
)
def test_the_detail_says_which_part_failed(turns: tuple[str, ...], failed: str) -> None:
    verdict = judge(*turns)
    assert verdict.reward == 0.0
    assert verdict.detail.startswith(f"basis state, message; failed {failed}")


# sierra-research/tau2-bench #81, #224, #314
def test_what_is_not_in_the_basis_is_told_and_does_not_count() -> None:
    by_state = judge(text(MOVE), "no idea", reference=REFERENCE | {"basis": ["state"]})
    assert by_state.reward == 1.0
    assert by_state.detail == (
        "basis state; message (not in the basis): 'no idea' instead of 'bemi has tode'; "
        "calls (not in the basis): differ from the expected"
    )
    by_calls = judge(text(MOVE), "bemi has tode", reference=REFERENCE | {"basis": ["calls", "state"]})
    assert (by_calls.reward, by_calls.detail) == (0.0, "basis state, calls; failed calls: differ from the expected")
    assert judge(text(FIND, MOVE), "x", reference=REFERENCE | {"basis": ["calls"]}).reward == 1.0


def test_without_a_basis_the_state_counts_and_a_message_if_there_is_one() -> None:
    reference = {"calls": [MOVE]}
    assert judge(text(MOVE), "anything", reference=reference).reward == 1.0
    assert judge(text(MOVE), reference=reference).reward == 1.0  # nobody asks for an answer
    assert judge(text(MOVE), "anything", reference=reference | {"message": "bemi has tode"}).reward == 0.0


# sierra-research/tau2-bench #273
def test_a_call_that_the_environment_refuses_changes_nothing_and_breaks_nothing() -> None:
    broken = [
        {"name": "teleport", "arguments": {}},
        {"name": "move_item", "arguments": {"source": "3", "target": 7}},
        {"name": "move_item", "arguments": {"source": 3, "target": 3}},
        {"name": "move_item", "arguments": []},
        '{"name": "move_item", "argum',
        "[" * 100_000,
    ]
    assert judge(text(*broken), "bemi has tode").detail.startswith("basis state, message; failed state")
    assert judge(text(*broken, MOVE), "bemi has tode").reward == 1.0
    assert judge(text(MOVE), *map(text, broken), "bemi has tode").reward == 1.0


# sierra-research/tau2-bench #397
@pytest.mark.parametrize(("source", "target"), [(3.0, 7), (3, 7.0)])
def test_numbers_are_the_same_however_they_are_written(source: float, target: float) -> None:
    call = {"name": "move_item", "arguments": {"source": source, "target": target}}
    assert judge(text(FIND, call), "bemi has tode", reference=REFERENCE | {"basis": ["state", "calls"]}).reward == 1.0


# sierra-research/tau2-bench #316, #499
@pytest.mark.parametrize(
    ("reference", "environment", "said"),
    [
        ({"calls": [{"name": "move_item", "arguments": {"source": 7, "target": 3}}]}, ENVIRONMENT, "locker 7 is empty"),
        ({"calls": [{"name": "fly", "arguments": {}}]}, ENVIRONMENT, r"expected call 0 \(fly\) fails"),
        ({"calls": [MOVE, MOVE]}, ENVIRONMENT, r"expected call 1 \(move_item\) fails"),
        (REFERENCE, None, "use one of errands"),
        (REFERENCE, {"name": "airline", "setup": {}}, "environment 'airline'"),
        (REFERENCE, {"name": "errands", "setup": {"people": {}}}, "exactly the keys"),
        (None, ENVIRONMENT, "has the keys"),
        ({"calls": [], "massage": "x"}, ENVIRONMENT, "has the keys"),
        ({"calls": None}, ENVIRONMENT, "no list 'calls'"),
        ({"calls": ["move"]}, ENVIRONMENT, "needs calls"),
        ({"calls": [], "message": 3}, ENVIRONMENT, "neither text nor null"),
        ({"calls": [], "basis": []}, ENVIRONMENT, "'basis' is a list of state, message, calls"),
        ({"calls": [], "basis": ["db"]}, ENVIRONMENT, "'basis' is a list of state, message, calls"),
        ({"calls": [], "basis": ["message"]}, ENVIRONMENT, "names the message, and there is none"),
    ],
)
def test_a_document_that_cannot_be_replayed_is_at_fault_whatever_the_answer(
    reference: Any, environment: Any, said: str
) -> None:
    for turns in ((text(MOVE), "bemi has tode"), ("",)):
        verdict = judge(*turns, reference=reference, environment=environment)
        assert (verdict.state, verdict.reward) == (VerdictState.INVALID_REFERENCE, None)
        assert re.search(said, verdict.detail)


def test_calls_count_from_the_text_of_a_single_answer_and_from_chat_messages() -> None:
    single = Attempt(text(FIND, MOVE), REFERENCE | {"basis": ["state", "calls"]}, environment=ENVIRONMENT)
    assert run_check(VERIFIERS["state_replay"], single).reward == 1.0
    as_text = {"function": MOVE | {"arguments": json.dumps(MOVE["arguments"])}, "id": "1", "type": "function"}
    for calls in ([{"function": MOVE}], [as_text], [MOVE]):
        turns = ({"role": "assistant", "content": None, "tool_calls": calls},)
        attempt = Attempt("", {"calls": [MOVE]}, environment=ENVIRONMENT, turns=turns)
        assert run_check(VERIFIERS["state_replay"], attempt).reward == 1.0


def test_a_turn_is_taken_apart_into_reasoning_content_and_calls() -> None:
    turn = parse_turn(
        f'<think>{text(MOVE)}?</think>\nfirst {text(FIND)} and {text("{}", "no")} then <tool_call>{{"name"'
    )
    assert turn.reasoning == f"{text(MOVE)}?"
    assert turn.content == "first  and  then"
    assert turn.calls == (
        WrittenCall("find_person", {"name": "kalo"}),
        WrittenCall("", "{}"),
        WrittenCall("", "no"),
        WrittenCall("", '{"name"'),
    )
    assert parse_turn(f"<think>never ends {text(MOVE)}").calls == ()


CALLS = st.builds(
    lambda name, arguments: {"name": name, "arguments": arguments},
    st.text(st.characters(codec="utf-8"), max_size=8),
    st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), st.integers() | st.booleans() | st.none()),
)


@given(calls=st.lists(CALLS, min_size=1, max_size=4), first=st.integers(0, 9))
def test_a_turn_comes_back_from_its_chat_message(calls: list[dict[str, Any]], first: int) -> None:
    turn = parse_turn(f"<think>why</think>well {text(*calls)}")
    assert [{"name": c.name, "arguments": c.arguments} for c in turn.calls] == calls
    message = turn.message(first)
    assert [call["id"] for call in message["tool_calls"]] == [f"call{first + n:05d}" for n in range(len(calls))]
    back = turn_of(message)
    assert (back.content, back.calls) == (turn.content, turn.calls)


@pytest.mark.parametrize("reasoning", ["<think>hm</think>", "<think></think>", "hm</think>", "</think>"])
def test_reasoning_is_cut_off_once_also_on_the_way_through_a_chat_message(reasoning: str) -> None:
    turn = parse_turn(reasoning + "I refuse, nothing was</think>done")
    assert turn.content == "I refuse, nothing was</think>done"
    assert turn_of(turn.message(0)) == turn
    moved = {"role": "assistant", "content": "", "tool_calls": [{"function": MOVE}]}
    reference = {"calls": [MOVE], "message": "done"}
    attempt = Attempt("", reference, environment=ENVIRONMENT, turns=(moved, turn.message(1)))
    assert run_check(VERIFIERS["state_replay"], attempt).reward == 0.0
    honest = Attempt("", reference, environment=ENVIRONMENT, turns=(moved, parse_turn(reasoning + "done").message(1)))
    assert run_check(VERIFIERS["state_replay"], honest).reward == 1.0


def test_beside_reasoning_content_calls_in_the_text_still_count() -> None:
    message = {"role": "assistant", "content": f"so {text(MOVE)}", "reasoning_content": "hm"}
    assert turn_of(message) == Turn("hm", "so", (WrittenCall("move_item", MOVE["arguments"]),))


def test_a_closing_tag_in_a_string_does_not_end_a_call_of_a_turn() -> None:
    noted = {"name": "note", "arguments": {"text": f"</tool_call>{text(MOVE)}"}}
    turn = parse_turn(text(noted, '{"name": "move_item", "argum', MOVE))
    assert [(call.name, call.arguments) for call in turn.calls] == [
        ("note", noted["arguments"]),
        ("", '{"name": "move_item", "argum'),
        ("move_item", MOVE["arguments"]),
    ]
    assert turn.content == ""
