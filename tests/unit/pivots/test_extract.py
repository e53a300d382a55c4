"""Which assistant turns are candidates, and the reason for each that is none."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.pivots.audit import Note, Reason, Skip, Tally
from mopdctl.pivots.candidates import Candidate, read_candidates, write_candidates
from mopdctl.pivots.chat import import_chat
from mopdctl.pivots.extract import extract, extract_files
from mopdctl.pivots.leaks import find_leak
from mopdctl.pivots.responses import chat_to_responses
from mopdctl.verifiers.base import Attempt
from mopdctl.verifiers.registry import VERIFIERS, run_check

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("find", "open")]
USER = {"role": "user", "content": "What does kalo have?"}


def call(call_id: str, name: str = "find", arguments: str = '{"name": "kalo"}') -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*made: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(made)} | more


def result(call_id: str, content: str = "3") -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def say(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | more


def found(*rows: list[dict[str, Any]], notes: list[Note] | None = None, **options: Any) -> list[Candidate | Skip]:
    documents = [{"messages": messages, "tools": TOOLS, "id": "t"} for messages in rows]
    trajectories = [t for document in documents for t in import_chat(document, "f:1")]
    taker = notes.append if notes is not None else lambda note: None
    return list(extract(trajectories, note=taker, **options))


def reasons(*rows: list[dict[str, Any]], **options: Any) -> list[Reason | None]:
    return [f.reason if isinstance(f, Skip) else None for f in found(*rows, **options)]


GOOD = [
    USER,
    calls(call("a")),
    result("a"),
    calls(call("b", "open", '{"number": 3}')),
    result("b", "tode"),
    say("tode"),
]


def test_every_turn_of_a_clean_trajectory_is_a_candidate_with_all_before_it() -> None:
    candidates = found(GOOD)
    assert all(isinstance(c, Candidate) for c in candidates)
    first, second, third = [c for c in candidates if isinstance(c, Candidate)]
    assert [c.candidate_id for c in (first, second, third)] == ["t#0", "t#1", "t#2"]
    assert first.messages == (USER,)
    assert second.messages == tuple(GOOD[:3])
    assert third.messages == tuple(GOOD[:5])
    assert first.action == {"type": "function_call", "name": "find", "arguments": '{"name": "kalo"}'}
    assert third.action == {"type": "message", "content": "tode"}
    assert first.tools == third.tools == tuple(TOOLS)
    assert first.source == "f:1"


def test_parallel_calls_are_one_batch_in_order() -> None:
    (one,) = found([USER, calls(call("a"), call("b", "open", "{}"), content="Both.")])
    assert isinstance(one, Candidate)
    assert one.action == {
        "type": "function_call_batch",
        "calls": [{"name": "find", "arguments": '{"name": "kalo"}'}, {"name": "open", "arguments": "{}"}],
    }


def test_reasoning_stays_in_the_states_of_later_turns_and_out_of_the_own_action() -> None:
    messages = [USER, calls(call("a"), reasoning="I look."), result("a"), say("<think>\nit is 3\n</think>\n\nthree")]
    first, second = found(messages)
    assert isinstance(first, Candidate)
    assert isinstance(second, Candidate)
    assert first.messages == (USER,)
    assert second.messages[1]["reasoning_content"] == "I look."
    assert second.action == {"type": "message", "content": "three"}


CUT = calls(call("a", arguments='{"name": "ka'))


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([say("Hello."), USER, say("yes")], [Reason.NO_PROMPT, None]),
        ([{"role": "system", "content": "s"}, say("Hello.")], [Reason.NO_PROMPT]),
        ([USER, CUT], [Reason.INVALID_ARGUMENTS]),
        # NVIDIA-NeMo/Gym #1180: bad arguments are a state of that turn; the error is what the next one saw.
        ([USER, CUT, result("a", "error"), say("no")], [Reason.INVALID_ARGUMENTS, None]),
        ([USER, calls(call("a", arguments="[1]"))], [Reason.INVALID_ARGUMENTS]),
        ([USER, calls(call("a", arguments='{"x": NaN}'))], [Reason.INVALID_ARGUMENTS]),
        ([USER, calls(call("a"), call("b", arguments=""))], [Reason.INVALID_ARGUMENTS]),
        ([USER, calls(call("a", "fly"))], [Reason.UNKNOWN_TOOL]),
        ([USER, say("")], [Reason.UNFINISHED]),
        ([USER, say("<think>hm")], [Reason.UNFINISHED]),
        ([USER, say("", reasoning="hm")], [Reason.UNFINISHED]),
        # vllm-project/vllm #52640: a cut answer has no content, only reasoning.
        ([USER, {"role": "assistant", "content": None, "reasoning": "hm"}], [Reason.UNFINISHED]),
        ([USER, say("ok", finish_reason="length")], [Reason.UNFINISHED]),
        ([USER, say("<tool_call>{}</tool_call>")], [Reason.INLINE_TOOL_CALL]),
        ([USER, say("end it with </tool_call> then")], [Reason.INLINE_TOOL_CALL]),
        ([USER, say("end it with </think> then")], [Reason.INLINE_REASONING]),
        ([USER, say("<think>a</think><think>b</think>c")], [Reason.INLINE_REASONING]),
        ([USER, say("it is <think>")], [None]),
        ([USER, calls(call("a", arguments='{"x": 1, "x": 2}'))], [Reason.INVALID_ARGUMENTS]),
        ([USER, calls(call("a", arguments='{"x": 1e999}'))], [Reason.INVALID_ARGUMENTS]),
        ([USER, calls(call("a", arguments='{"x": ' + "[" * 101 + "]" * 101 + "}"))], [Reason.INVALID_ARGUMENTS]),
        ([USER, calls(call("a", arguments='```json\n{"x": 1}\n```'))], [Reason.INVALID_ARGUMENTS]),
        ([USER], [Reason.NO_TURN]),
        ([USER, say([{"type": "image_url", "image_url": {"url": "u"}}])], [Reason.NOT_TEXT]),
        ([USER, calls(call("a")), USER, say("x")], [None, Reason.INCOMPLETE_CALLS]),
        (
            [USER, calls(call("a"), call("b")), result("b"), say("x"), result("a"), say("y")],
            [None, Reason.INCOMPLETE_CALLS, None],
        ),
        ([USER, result("z"), say("x")], [Reason.INCOMPLETE_CALLS]),
        ([USER, say("Let me look."), calls(call("a"))], [Reason.SPLIT_MODEL_CALL] * 2),
        ([USER, say("", error="429"), say("tode")], [Reason.ERRORED, None]),
        ([USER, say("so", error="429")], [Reason.ERRORED]),
        ([USER, say("x", is_copied_context=True), USER, say("y")], [Reason.COPIED_CONTEXT, None]),
        ([USER, say("x", is_copied_context=True), say("x")], [Reason.COPIED_CONTEXT, Reason.LEAK]),
        ([USER, calls(call("a")), result("a"), calls(call("a")), result("a"), say("y")], [None, Reason.LEAK, None]),
        ([USER, calls(call("a")), result("a"), calls(call("b")), result("b"), say("y")], [None, None, None]),
    ],
)  # fmt: skip
def test_each_turn_is_a_candidate_or_has_its_reason(
    messages: list[dict[str, Any]], expected: list[Reason | None]
) -> None:
    assert reasons(messages) == expected


def test_an_errored_turn_that_was_retried_is_in_no_state() -> None:
    _, retried, last = found([USER, say("API down", error="503"), calls(call("a")), result("a"), say("y")])
    assert isinstance(retried, Candidate)
    assert retried.messages == (USER,)
    assert retried.candidate_id == "t#1"
    assert isinstance(last, Candidate)
    assert [m["role"] for m in last.messages] == ["user", "assistant", "tool"]


def test_the_same_state_and_action_is_taken_once_whatever_its_ids() -> None:
    again = json.loads(json.dumps(GOOD).replace('"a"', '"x"').replace('"b"', '"y"'))
    other = [*GOOD[:5], say("unknown")]
    notes: list[Note] = []
    assert reasons(GOOD, again, other, notes=notes) == [None] * 3 + [Reason.DUPLICATE] * 5 + [None]
    assert [note.kind for note in notes] == ["trajectory_id_repeated"] * 2
    ids = [f.candidate_id for f in found(GOOD, other) if isinstance(f, Candidate)]
    assert ids == ["t#0", "t#1", "t#2", "t~2#2"]


def test_ids_that_count_anew_are_unique_in_the_state() -> None:
    messages = [USER, calls(call("0")), result("0"), calls(call("0", "open", "{}")), result("0"), say("y")]
    last = found(messages)[2]
    assert isinstance(last, Candidate)
    assert [m["tool_calls"][0]["id"] for m in last.messages if m["role"] == "assistant"] == ["0", "0~2"]
    assert [m["tool_call_id"] for m in last.messages if m["role"] == "tool"] == ["0", "0~2"]


def test_trajectories_of_low_reward_give_no_candidate_and_unknown_reward_is_not_low() -> None:
    rows = [{"messages": GOOD, "id": str(reward), "reward": reward} for reward in (0, 1, None)]
    trajectories = [t for row in rows for t in import_chat(row, "p")]
    outcome = list(extract(trajectories, min_reward=1.0))
    assert [f.reason for f in outcome if isinstance(f, Skip)] == [Reason.LOW_REWARD] * 3 + [Reason.DUPLICATE] * 3
    assert [f.trajectory_id for f in outcome if isinstance(f, Candidate)] == ["1"] * 3


CALL_ID = st.sampled_from(["", "a", "b", "c"])
TOOL = st.sampled_from(["find", "open", "fly"])
CALLS = st.lists(st.builds(call, CALL_ID, TOOL, st.sampled_from(["{}", "{"])), max_size=2)
MESSAGE = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, st.sampled_from(["x", "y"])),
    st.builds(lambda text, made: say(text, tool_calls=made), st.sampled_from(["", "z"]), CALLS),
    st.builds(result, CALL_ID),
)


@given(st.lists(st.lists(MESSAGE, min_size=1, max_size=9), max_size=4))
def test_turns_are_counted_and_states_are_complete_whatever_comes(rows: list[list[dict[str, Any]]]) -> None:
    outcome = found(*rows)
    tally = Tally()
    for one in outcome:
        tally.add(one)
    turns = [sum(message["role"] == "assistant" for message in row) for row in rows]
    assert tally.turns == sum(turns)
    assert tally.unread_trajectories == ({"no_turn": turns.count(0)} if 0 in turns else {})
    assert tally.turns == tally.candidates + tally.skipped.total()
    document = tally.document()
    assert sum(document["by"]["action"].values()) == tally.candidates
    assert sum(document["by"]["leak"].get("kind", {}).values()) == document["by"]["skip_reason"].get("leak", 0)
    candidates = [one for one in outcome if isinstance(one, Candidate)]
    assert len({c.candidate_id for c in candidates}) == len(candidates)
    for candidate in candidates:
        made = [c["id"] for m in candidate.messages for c in m.get("tool_calls", ())]
        results = [m["tool_call_id"] for m in candidate.messages if m["role"] == "tool"]
        assert len(set(made)) == len(made)
        assert sorted(made) == sorted(results)
        assert candidate.messages[-1]["role"] != "assistant"
        roles = [message["role"] for message in candidate.messages]
        if ("assistant", "assistant") not in pairwise(roles):
            items = chat_to_responses(candidate.messages)
            assert [item["call_id"] for item in items if item["type"] == "function_call"] == made


@given(st.lists(MESSAGE, min_size=1, max_size=9), st.integers(0, 8))
def test_an_action_put_at_the_end_of_its_own_state_is_caught(row: list[dict[str, Any]], at: int) -> None:
    candidates = [c for c in found(row) if isinstance(c, Candidate)]
    for candidate in candidates[at:][:1]:
        action = candidate.action
        made = [] if action["type"] == "message" else action.get("calls", [action])
        message = say(action.get("content", ""), tool_calls=[call("new", c["name"], c["arguments"]) for c in made])
        assert find_leak([*candidate.messages, message], message, reused=frozenset()) == "copied_action"


def test_candidates_are_written_and_read_back_and_documents_without_a_trajectory_are_one_skip(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in [{"messages": GOOD, "id": "é"}, {"rows": []}]) + "\n")
    outcome = list(extract_files([path]))
    candidates = [one for one in outcome if isinstance(one, Candidate)]
    assert write_candidates(tmp_path / "c.jsonl", candidates) == 3
    assert list(read_candidates(tmp_path / "c.jsonl")) == candidates
    last = outcome[-1]
    assert isinstance(last, Skip)
    assert (last.turn, last.reason, last.place) == (None, Reason.UNKNOWN_FORMAT, f"{path}:2")


def test_every_message_that_is_a_candidate_scores_when_it_is_said_again() -> None:
    texts = ["tode", "a </think> b", "<think> a", "a <tool_call> b", "a </tool_call> b", "a <think> b", "</think>a"]
    outcome = found(*[[{"role": "user", "content": str(n)}, say(text)] for n, text in enumerate(texts)])
    candidates = [one for one in outcome if isinstance(one, Candidate)]
    assert [c.action["content"] for c in candidates] == ["tode", "a <think> b"]
    for candidate in candidates:
        reference = candidate.action | {"match": {"content": "exact"}}
        assert run_check(VERIFIERS["action"], Attempt(candidate.action["content"], reference)).reward == 1
