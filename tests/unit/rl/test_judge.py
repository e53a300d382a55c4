"""Who meets whom, what the judge is asked, what its replies are worth."""

import json
import re
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.config.judge import JudgeReward
from mopdctl.records import Prompt
from mopdctl.rl.judge import (
    Answer,
    Reading,
    Scores,
    Tally,
    answer_of,
    compare,
    group_rewards,
    pair_messages,
    pairings,
    plan_group,
    read_reply,
)
from mopdctl.verifiers.base import Attempt

SCALE = (1, 5)
PROMPT = Prompt("p", ({"role": "user", "content": "Write a line on {rain}."},), None, {})


def settings(**changes: Any) -> JudgeReward:
    return JudgeReward.model_validate({"base_url": "http://127.0.0.1:1/v1", "model": "m", **changes})


def said(text: str) -> Answer:
    return ({"role": "assistant", "content": text},)


def shown(body: dict[str, Any]) -> tuple[str, str]:
    """The two answers in a request, as the judge sees them."""
    text = body["messages"][0]["content"]
    one, other = (re.search(rf"<response_{n}-(\w+)>\n(.*)\n</response_{n}-\1>", text, re.DOTALL) for n in (1, 2))
    assert one is not None
    assert other is not None
    return one[2], other[2]


def judged(
    texts: list[str], score: Callable[[str], float], judge: JudgeReward, *, fails: frozenset[str] = frozenset()
) -> tuple[list[float | None], Tally]:
    """The rewards by a judge that gives each answer its score, and no verdict where one of `fails` is shown first."""
    plan = plan_group(PROMPT, [said(t) for t in texts], judge, seed=0)
    readings: dict[str, Reading] = {}
    for pair in plan.pairs:
        for request in pair.asked:
            first, second = shown(request.body)
            scores = Scores(score(first), score(second), 2 if score(first) >= score(second) else 5)
            readings[request.key] = "timeout" if first in fails else scores
    tally = Tally()
    return group_rewards(plan, readings.__getitem__, judge.scale, tally), tally


# ------------------------------------------------------------------------------------------------------ who meets whom


@given(count=st.integers(1, 9), rounds=st.integers(1, 9))
def test_every_answer_is_in_equally_many_comparisons(count: int, rounds: int) -> None:
    found = pairings(count, rounds)
    times = Counter(place for one, other, _ in found for place in (one, other))
    assert times.keys() == set(range(count))
    assert len(set(times.values())) == 1


@pytest.mark.parametrize("count", range(2, 9))
def test_no_pair_meets_twice_before_all_have_met(count: int) -> None:
    found = pairings(count, 2 * (count // 2))
    for repeat in (0, 1):
        met = [tuple(sorted((one, other))) for one, other, again in found if again == repeat]
        assert sorted(met) == list(combinations(range(count), 2))


def test_each_pair_is_asked_in_both_orders() -> None:
    plan = plan_group(PROMPT, [said(t) for t in "abcd"], settings(rounds=2), seed=0)
    assert len(plan.pairs) == 6
    for pair in plan.pairs:
        one, other = (shown(request.body) for request in pair.asked)
        assert one == other[::-1]
        assert one[0] != one[1]


def test_equal_answers_earn_the_same_and_one_alone_meets_itself() -> None:
    rewards, tally = judged(["long one", "no", "no", "no"], len, settings(scale=[0, 10]))
    assert rewards == [0.8, 0.2, 0.2, 0.2]
    assert tally.comparisons == 1
    rewards, tally = judged(["same", "same"], len, settings(scale=[0, 8]))
    assert rewards == [pytest.approx(0.5)] * 2
    # The same text in both places says nothing of places.
    assert tally.metrics()["position_bias"] is None


@given(
    st.lists(st.text(st.characters(codec="utf-8"), max_size=6), min_size=2, max_size=8), st.integers(1, 3), st.data()
)
def test_answers_in_another_order_earn_the_same(texts: list[str], rounds: int, data: st.DataObject) -> None:
    judge = settings(rounds=rounds, scale=[0, 8])
    order = data.draw(st.permutations(range(len(texts))))
    rewards, tally = judged(texts, len, judge)
    again, tally_again = judged([texts[i] for i in order], len, judge)
    assert again == [rewards[i] for i in order]
    assert (tally.comparisons, tally.decided) == (tally_again.comparisons, tally_again.decided)


def test_another_seed_pairs_otherwise() -> None:
    def met(seed: int) -> set[frozenset[str]]:
        plan = plan_group(PROMPT, [said(t) for t in "abcdefgh"], settings(), seed=seed)
        return {frozenset(shown(pair.asked[0].body)) for pair in plan.pairs}

    assert len(met(0)) == len(met(1)) == 8
    assert met(0) != met(1)


# ---------------------------------------------------------------------------------------------------- what it is asked


def test_principles_reach_the_judge() -> None:
    text = pair_messages(PROMPT, said("a"), said("b"), settings(principles=["Be brief.", "Rhyme {well}."]))[0][
        "content"
    ]
    assert "principles:\n1. Be brief.\n2. Rhyme {well}.\n" in text
    assert "principles" not in pair_messages(PROMPT, said("a"), said("b"), settings())[0]["content"]


# meta-llama/synthetic-data-kit #54: braces in a text met str.format
@given(st.text(st.characters(codec="utf-8")), st.text(st.sampled_from('<>/{}"\\response_12-abcdef0123456789\n')))
def test_no_answer_closes_its_quotation(one: str, other: str) -> None:
    text = pair_messages(PROMPT, said(one), said(other), settings())[0]["content"]
    mark = re.search(r"<conversation-(\w{12})>", text)
    assert mark is not None
    tags = re.findall(rf"<(/?\w+)-{mark[1]}[^>]*>", text)
    assert tags == ["conversation", "turn", "/turn", "/conversation"] + [
        f"{slash}response_{n}" for n in (1, 2) for slash in ("", "/")
    ]
    assert f"<response_1-{mark[1]}>\n{one}\n</response_1-{mark[1]}>" in text
    assert f"<response_2-{mark[1]}>\n{other}\n</response_2-{mark[1]}>" in text


def test_a_copied_request_for_another_verdict_stays_inside_the_quotation() -> None:
    inner = pair_messages(PROMPT, said("a"), said("b"), settings())[0]["content"]
    text = pair_messages(PROMPT, said(inner), said("b"), settings())[0]["content"]
    assert shown({"messages": [{"content": text}]}) == (inner, "b")


def test_tools_and_turns_are_shown_and_reasoning_is_not() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "find_person", "arguments": {"name": "kalo"}}}
    turns = (
        {"role": "assistant", "content": "", "reasoning_content": "secret", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "name": "find_person", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    )
    answer = answer_of(Attempt("It is 3.", turns=turns))
    prompt = Prompt("p", PROMPT.messages, ({"type": "function", "function": {"name": "find_person"}},), {})
    text = pair_messages(prompt, answer, said("4"), settings())[0]["content"]
    assert '{"tool_call": {"name": "find_person", "arguments": {"name": "kalo"}}}' in text
    assert text.index('role="tool">\n3\n') < text.index("It is 3.") < text.index("<response_2")
    assert re.search(r'<tools-\w+>\n\{"type": "function"', text)
    assert "secret" not in text


@pytest.mark.parametrize(
    ("response", "seen"), [("<think>hm</think> 4 ", "4"), ("hm</think>\n4", "4"), ("<think>hm", ""), (" 4\n", "4")]
)
def test_the_judge_sees_answers_without_their_reasoning(response: str, seen: str) -> None:
    assert answer_of(Attempt(response)) == said(seen)


def test_each_setting_that_could_change_a_reply_changes_the_key() -> None:
    # bespokelabsai/curator #135: stale answers after settings were changed
    def key(seed: int = 0, **changes: Any) -> str:
        return plan_group(PROMPT, [said("a"), said("b")], settings(**changes), seed=seed).pairs[0].asked[0].key

    changed: list[dict[str, Any]] = [
        {},
        {"seed": 1},
        {"base_url": "http://127.0.0.1:2/v1"},
        {"model": "n"},
        {"revision": "r"},
        {"principles": ["Be brief."]},
        {"scale": [1, 10]},
        {"sampling": {"temperature": 0.0}},
        {"sampling": {"temperature": 0.0, "max_tokens": 9}},
        {"sampling": {"extra": {"reasoning_effort": "low"}}},
    ]
    assert len({key(**changes) for changes in changed}) == len(changed)
    assert key(max_concurrency=3, timeout_s=5, weight=2) == key()


def test_a_pair_that_meets_again_is_asked_anew() -> None:
    # UKGovernmentBEIS/inspect_ai #2580: n samples collapsed to one
    for takes_seed in (True, False):
        plan = plan_group(PROMPT, [said("a"), said("b")], settings(rounds=3, takes_seed=takes_seed), seed=0)
        assert len({request.key for pair in plan.pairs for request in pair.asked}) == 6
        assert all(("seed" in request.body) == takes_seed for pair in plan.pairs for request in pair.asked)


def test_a_temperature_of_zero_is_sent() -> None:
    # BerriAI/litellm #822
    judge = settings(sampling={"temperature": 0, "max_tokens": 7})
    body = plan_group(PROMPT, [said("a"), said("b")], judge, seed=0).pairs[0].asked[0].body
    assert (body["temperature"], body["max_tokens"], body["model"]) == (0, 7, "m")


# ----------------------------------------------------------------------------------------------- what replies are worth


def reply(content: Any, finish_reason: Any = "stop", **message: Any) -> str:
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **message}}
    return json.dumps({"choices": [{**choice, "finish_reason": finish_reason}]})


VERDICT = '{"score_1": 4, "score_2": 2.5, "ranking": 2}'


@pytest.mark.parametrize(
    "content",
    [
        VERDICT,
        f"Both try.\n\n{VERDICT}\n",
        f"Both try.\n```json\n{VERDICT}\n```",
        f"<think>5 or 1?</think>{VERDICT}",
        '{"score_1": 4, "score_2": 2.5, "ranking": 2, "why": {"tone": "a } b {"}}',
        # What an answer said of itself, quoted by the judge, is not the judge's verdict.
        f'Response 2 holds {{"score_1": 1, "score_2": 5, "ranking": 6}} and "SCORE A: 10".\n{VERDICT}',
    ],
)
def test_the_verdict_is_what_the_message_ends_with(content: str) -> None:
    assert read_reply(reply(content), SCALE) == Scores(4, 2.5, 2)


def verdict(first: Any, second: Any, ranking: Any) -> str:
    return reply(json.dumps({"score_1": first, "score_2": second, "ranking": ranking}))


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (reply(VERDICT, "length"), "truncated"),  # NVIDIA-NeMo/DataDesigner #754: the limit hidden behind a parse error
        (reply("<think>so many words"), "truncated"),
        (reply(VERDICT, "content_filter"), "refused"),
        (reply(None, refusal="I cannot."), "refused"),
        (reply(None, reasoning_content=VERDICT), "empty"),
        (reply(" \n"), "empty"),
        (reply(VERDICT, None), "malformed"),
        (reply([1]), "malformed"),
        ("[]", "malformed"),
        ('{"choices": []}', "malformed"),
        (json.dumps({"choices": [*json.loads(reply(VERDICT))["choices"]] * 2}), "malformed"),
        ("half a doc", "malformed"),
        (reply("SCORE A: 10, SCORE B: 2"), "no_verdict"),
        (reply("There are 5 reasons. I give a score of 4."), "no_verdict"),  # OpenAgentHQ/openagent-eval #74
        (reply(f"{VERDICT} or so"), "no_verdict"),
        (reply('{"score_1": 4, "score_2": 2}'), "no_verdict"),
        (reply('[{"score_1": 4}]'), "no_verdict"),
        (verdict("4", 2, 2), "no_number"),
        (verdict(True, 1, 2), "no_number"),
        (verdict(90, 2, 1), "off_scale"),  # modelscope/evalscope #1575: 90 was clamped to full credit
        (verdict(4, 0, 1), "off_scale"),
        (verdict(float("nan"), 2, 1), "no_verdict"),
        (reply('{"score_1": 1, "score_1": 5, "score_2": 4, "ranking": 3}'), "no_verdict"),
        (reply('{"score_1": 5, "score_2": 4, "ranking": 6, "ranking": 3}'), "no_verdict"),
        (reply('{"why": {"a": 1, "a": 2}, "score_1": 5, "score_2": 4, "ranking": 3}'), "no_verdict"),
        (reply(f'{VERDICT}\n{{"score_1": 1, "score_1": 5, "score_2": 4, "ranking": 3}}'), "no_verdict"),
        (verdict(4, 2, 0), "off_scale"),
        (verdict(4, 2, 2.5), "off_scale"),
        (verdict(4, 2, 5), "inconsistent"),
        (verdict(2, 4, 3), "inconsistent"),
    ],
)
def test_a_reply_without_one_clear_verdict_is_a_reason_and_no_score(raw: str, reason: str) -> None:
    # NVIDIA-NeMo/Gym genrm_compare gives both answers 3.0 here
    assert read_reply(raw, SCALE) == reason


@given(st.text(max_size=200))
def test_no_text_of_a_judge_raises(text: str) -> None:
    assert isinstance(read_reply(reply(text), SCALE), str)
    assert isinstance(read_reply(text, SCALE), str)


def test_an_answer_gets_the_mean_of_both_orders() -> None:
    assert compare(Scores(5, 3, 1), Scores(2, 4, 5), SCALE) == (0.875, 0.375, False)


def test_orders_that_contradict_each_other_are_a_tie() -> None:
    assert compare(Scores(5, 2, 1), Scores(4, 3, 3), SCALE) == (0.625, 0.625, True)
    # Equal scores, and the one in front is always slightly better.
    assert compare(Scores(3, 3, 3), Scores(3, 3, 3), SCALE) == (0.5, 0.5, True)


def test_the_ranking_decides_between_equal_scores_within_the_scale() -> None:
    a, b, contradicted = compare(Scores(3, 3, 1), Scores(3, 3, 6), SCALE)  # type: ignore[misc]
    assert (a, b, contradicted) == (0.625, 0.375, False)
    assert compare(Scores(5, 5, 1), Scores(5, 5, 6), SCALE) == (1.0, 0.875, False)


@pytest.mark.parametrize("orders", [("timeout", Scores(5, 1, 1)), (Scores(5, 1, 1), "timeout"), ("timeout", "empty")])
def test_one_order_alone_is_no_comparison(orders: tuple[Reading, Reading]) -> None:
    assert compare(*orders, SCALE) == "timeout"


scores = st.builds(
    lambda one, other, ranking: Scores(one, other, ranking if one == other else 1 if one > other else 6),
    st.floats(1, 5),
    st.floats(1, 5),
    st.integers(1, 6),
)


@given(scores, scores)
def test_what_a_comparison_gives_lies_between_0_and_1_and_swaps_with_the_answers(one: Scores, other: Scores) -> None:
    a, b, contradicted = compare(one, other, SCALE)  # type: ignore[misc]
    assert 0 <= a <= 1
    assert 0 <= b <= 1
    assert not contradicted or a == b
    assert compare(other, one, SCALE) == (b, a, contradicted)


def test_a_judge_that_always_takes_the_first_separates_nobody_and_is_seen() -> None:
    plan = plan_group(PROMPT, [said(t) for t in "abcd"], settings(), seed=0)
    tally = Tally()
    assert group_rewards(plan, lambda key: Scores(5, 1, 1), SCALE, tally) == [0.5] * 4
    assert tally.metrics() == {
        "comparisons": 4,
        "decided": 4,
        "judge_error": {},
        "contradicted": 4,
        "position_bias": 1.0,
        "reward": 0.5,
        "unjudged_answers": 0,
    }


def test_a_comparison_that_failed_is_missing_and_no_score() -> None:
    # cvs-health/uqlm #458: one failed judge made the mean NaN
    texts = ["a", "bb", "ccc", "dddd"]
    rewards, tally = judged(texts, len, settings(rounds=2, scale=[0, 4]), fails=frozenset({"a"}))
    assert rewards == [None, 0.5, 0.75, 1.0]
    assert tally.errors == {"timeout": 3}
    assert (tally.comparisons, tally.decided, tally.unjudged) == (6, 3, 1)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"base_url": "127.0.0.1:8000"}, "must be an http or https address"),
        ({"base_url": "http://me:pw@host/v1"}, "must hold no name, password or query"),
        ({"api_key_env": "sk-123"}, "never the key itself"),
        ({"scale": [5, 5]}, "the worst score, then the best"),
        ({"principles": [" "]}, "holds an empty text"),
        ({"sampling": {"extra": {"api_key": "sk-1"}}}, "looks like a secret"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        settings(**changes)
