"""Errands: the expert's conversations hold together, fit the tiny model, and become one test document a turn."""

import json
from itertools import islice
from typing import Any

import pytest

from mopdctl.environments.registry import begin
from mopdctl.runs import shipped
from mopdctl.verifiers.base import Attempt, Verdict, VerdictState
from mopdctl.verifiers.registry import VERIFIERS, run_check
from mopdctl.world.data import distinct, generate, generate_mixture, prompt_row, sft_row
from mopdctl.world.domains import AGENT_DOMAIN, DOMAINS, SPECIALIST_DOMAINS
from mopdctl.world.domains.errands import near_misses
from mopdctl.world.examples import Example
from mopdctl.world.trajectories import action_of, action_text, decision_points, expert_turns, trajectory_row


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return distinct(generate(AGENT_DOMAIN, "dev", seed="tests"), 200)


def judged(example: Example, turns: list[dict[str, Any]]) -> Verdict:
    row = prompt_row(example, "x")
    prompt = tuple(row["messages"]), tuple(row["tools"]), row["environment"]
    return run_check(VERIFIERS[row["verifier"]], Attempt(turns[-1]["content"], row["reference"], *prompt, tuple(turns)))


def test_the_expert_makes_two_calls_in_the_easy_half_and_three_or_one_in_the_hard_half(examples: list[Example]) -> None:
    kinds = {(example.basic, len(example.calls), example.user.split()[0]) for example in examples}
    assert kinds == {(True, 2, "What"), (False, 3, "Put"), (False, 1, "What")}
    stream = islice(generate(AGENT_DOMAIN, "train", seed="tests"), 500)
    assert 0.4 < sum(example.basic for example in stream) / 500 < 0.6


def test_the_expert_satisfies_its_verifier_and_no_result_is_an_error(examples: list[Example]) -> None:
    for example in examples:
        turns = expert_turns(example)
        verdict = judged(example, turns)
        assert (verdict.state, verdict.reward) == (VerdictState.OK, 1.0), verdict.detail
        assert not any(turn["content"].startswith("error") for turn in turns)


def test_another_message_or_a_call_left_out_fails(examples: list[Example]) -> None:
    for example in examples:
        turns = expert_turns(example)
        assert judged(example, [*turns[:-1], turns[-1] | {"content": "nothing"}]).reward == 0.0
        if len(example.calls) == 3:  # without the one that moves the item
            assert judged(example, [*turns[:-3], turns[-1]]).reward == 0.0


def test_each_argument_of_a_call_was_said_before_the_call(examples: list[Example]) -> None:
    for example in examples:
        for conversation, turn in decision_points(example):
            heard = " ".join(message["content"] for message in conversation).replace("?", "").split()
            for call in turn.get("tool_calls", []):
                assert {str(value) for value in call["function"]["arguments"].values()} <= set(heard)


def test_each_call_is_answered_under_its_id(examples: list[Example]) -> None:
    for example in examples:
        turns = expert_turns(example)
        ids = [call["id"] for turn in turns for call in turn.get("tool_calls", [])]
        assert [turn["tool_call_id"] for turn in turns if turn["role"] == "tool"] == ids
        assert len(set(ids)) == len(ids) == len(example.calls)


def test_rows_are_whole_conversations_with_tools_and_the_prompt_names_its_environment(examples: list[Example]) -> None:
    for example in examples[:20]:
        conversation = [{"role": "user", "content": example.user}, *expert_turns(example)]
        trained, trajectory, prompt = sft_row(example, "a"), trajectory_row(example, "b"), prompt_row(example, "c")
        assert trained["messages"] == trajectory["messages"] == conversation
        assert set(trained) == {"id", "domain", "messages", "tools"}
        assert trajectory["environment"] == prompt["environment"] == example.environment
        assert prompt["messages"] == conversation[:1]
        assert begin(prompt["environment"])[0].tools == example.tools == tuple(trained["tools"])


def test_conversations_fit_the_model_with_room_to_spare(tiny_tokenizer: Any, examples: list[Example]) -> None:
    longest: dict[int, int] = {}
    for example in examples:
        row = sft_row(example, "x")
        text = tiny_tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
        length = len(tiny_tokenizer(text)["input_ids"])
        longest[len(example.calls)] = max(length, longest.get(len(example.calls), 0))
    assert longest[1] < longest[2] <= 120 < longest[3] <= 150 < 0.6 * tiny_tokenizer.model_max_length


def test_every_turn_of_the_expert_is_trained_on_and_no_result(tiny_tokenizer: Any, examples: list[Example]) -> None:
    row = sft_row(next(example for example in examples if len(example.calls) == 3), "x")
    found = tiny_tokenizer.apply_chat_template(
        row["messages"], tools=row["tools"], return_dict=True, return_assistant_tokens_mask=True
    )
    trained = [token for token, kept in zip(found["input_ids"], found["assistant_masks"], strict=True) if kept]
    turns = [action_text(turn) for turn in row["messages"] if turn["role"] == "assistant"]
    assert tiny_tokenizer.decode(trained) == "".join(f"{turn}<|end|>" for turn in turns)


def test_the_mixture_answers_many_of_the_hard_half_carelessly() -> None:
    mixture = list(islice(generate_mixture(AGENT_DOMAIN, seed=0), 1000))
    hard = [example for example in mixture if not example.basic]
    assert 0.4 < len(hard) / 1000 < 0.6
    wrong = [e for e in hard if (list(e.calls), e.answer) != (e.reference["calls"], e.reference["message"])]
    assert 0.6 < len(wrong) / len(hard) < 0.8


def test_the_agents_domain_has_no_specialist_by_sft() -> None:
    assert AGENT_DOMAIN in DOMAINS
    assert AGENT_DOMAIN not in SPECIALIST_DOMAINS


def test_documents_are_all_turns_of_whole_trajectories() -> None:
    text = (shipped("sample_data") / f"{AGENT_DOMAIN}_test.jsonl").read_text("utf-8")
    depths: dict[str, list[int]] = {}
    last: dict[str, str] = {}
    for row in map(json.loads, text.splitlines()):
        messages = json.loads(row["messages"])
        depths.setdefault(row["prompt"], []).append(sum(message["role"] == "assistant" for message in messages))
        last[row["prompt"]] = json.loads(row["reference"])["type"]
    assert all(found == list(range(len(found))) for found in depths.values())
    assert {len(found) for found in depths.values()} == {2, 3, 4}
    easy = sum(len(found) for found in depths.values() if len(found) == 3)
    assert 240 <= easy <= 260
    assert set(last.values()) == {"message"}


def test_an_action_is_what_the_expert_does_and_its_near_misses_are_not(examples: list[Example]) -> None:
    for example in examples[:50]:
        for number, (conversation, turn) in enumerate(decision_points(example)):
            right, *wrong = [
                run_check(VERIFIERS["action"], Attempt(answer, action_of(turn), tuple(conversation), example.tools))
                for answer in (action_text(turn), *near_misses(example, number))
            ]
            assert right.reward == 1.0
            assert {verdict.state for verdict in wrong} <= {VerdictState.OK, VerdictState.PARSE_ERROR}
            assert {verdict.reward for verdict in wrong} <= {0.0, None}
