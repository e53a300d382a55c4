"""Selection of pivots: the rule of D_adv, and what must hold for any profile."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.pivots.profiled import Profiled
from mopdctl.pivots.select import Rule, report, select
from mopdctl.pivots.wilson import Z_95, wilson

REWARD = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1), st.none())


def one(candidate_id: str, rewards: list[float | None], *, tool: str = "find", depth: int = 0) -> Profiled:
    states = Counter("timeout" if reward is None else "ok" for reward in rewards)
    return Profiled(candidate_id, "function_call", tool, depth, tuple(rewards), dict(states))


def passing(candidate_id: str, passed: int, *, of: int = 8, tool: str = "find", depth: int = 0) -> Profiled:
    return one(candidate_id, [1.0] * passed + [0.0] * (of - passed), tool=tool, depth=depth)


@st.composite
def profiles(draw: st.DrawFn) -> list[Profiled]:
    rows = draw(
        st.lists(
            st.tuples(
                st.one_of(st.lists(REWARD, min_size=2, max_size=8), st.floats(0, 1).map(lambda r: [r] * 5)),
                st.sampled_from("ab"),
                st.integers(0, 2),
            ),
            max_size=12,
        )
    )
    return [one(f"t{i}#0", rewards, tool=tool, depth=depth) for i, (rewards, tool, depth) in enumerate(rows)]


LIMIT = st.none() | st.integers(1, 4)
RULES = st.builds(
    Rule,
    lambda_diff=st.floats(0, 1, exclude_min=True),
    min_ok=st.integers(1, 4),
    per_tool=LIMIT,
    per_depth=LIMIT,
    maximum=LIMIT,
    seed=st.integers(0, 3),
)


@given(profiles(), RULES)
def test_what_is_kept_has_mixed_rewards_and_a_mean_below_lambda(profile: list[Profiled], rule: Rule) -> None:
    for kept in select(profile, rule).kept:
        assert len(set(kept.ok_rewards)) > 1
        assert kept.variance is not None
        assert kept.variance > 0
        assert kept.mean is not None
        assert kept.mean < rule.lambda_diff
        assert len(kept.ok_rewards) >= rule.min_ok


@given(profiles(), profiles(), RULES)
def test_every_candidate_is_kept_or_dropped_with_one_reason(
    profile: list[Profiled], newer: list[Profiled], rule: Rule
) -> None:
    selection = select(profile, rule, fresh={p.candidate_id: p for p in newer})
    kept = [p.candidate_id for p in selection.kept]
    assert sorted([*kept, *selection.dropped]) == sorted(p.candidate_id for p in profile)
    assert all(selection.dropped.values())
    assert len(kept) <= selection.advantageous <= len(profile)


@given(profiles(), RULES, st.randoms(use_true_random=False))
def test_the_order_of_the_profile_changes_nothing(profile: list[Profiled], rule: Rule, random) -> None:  # type: ignore[no-untyped-def]
    shuffled = random.sample(profile, len(profile))
    assert select(shuffled, rule) == select(profile, rule)


@given(profiles(), profiles(), RULES, st.floats(0, 1, exclude_min=True))
def test_a_larger_lambda_keeps_all_that_a_smaller_one_keeps(
    profile: list[Profiled], newer: list[Profiled], rule: Rule, other: float
) -> None:
    fresh = {p.candidate_id: p for p in newer}
    low, high = sorted((rule.lambda_diff, other))
    few = select(profile, replace(rule, lambda_diff=low), fresh=fresh).kept
    many = select(profile, replace(rule, lambda_diff=high), fresh=fresh).kept
    assert {p.candidate_id for p in few} <= {p.candidate_id for p in many}


@given(profiles(), RULES)
def test_limits_hold_and_what_they_leave_is_in_order_of_difficulty(profile: list[Profiled], rule: Rule) -> None:
    kept = select(profile, rule).kept
    assert max(Counter(p.tool for p in kept).values(), default=0) <= (rule.per_tool or math.inf)
    assert max(Counter(p.depth for p in kept).values(), default=0) <= (rule.per_depth or math.inf)
    assert len(kept) <= (rule.maximum or math.inf)
    means = [p.mean for p in kept]
    assert means == sorted(means, key=float)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([0.0] * 8, "all_fail"),
        ([1.0] * 8, "all_pass"),
        ([0.1] * 3, "all_equal"),  # the computed variance of three times 0.1 is not 0
        ([1.0] * 5 + [0.0] * 3, "too_easy"),
        ([1.0] * 3 + [0.0] * 2, "too_easy"),  # exactly lambda is not below it
        ([1.0, 0.0, *[None] * 6], "too_few_ok"),
        ([None] * 8, "too_few_ok"),
    ],
)
def test_a_dropped_candidate_says_why(rewards: list[float | None], reason: str) -> None:
    assert select([one("t#0", rewards)], Rule(0.6, 3)).dropped == {"t#0": reason}


def test_states_are_no_failures() -> None:
    """Of eight answers four timed out: the mean is that of the other four."""
    found = one("t#0", [1.0, None, 0.0, None, 0.0, None, 0.0, None])
    assert (found.mean, found.variance) == (0.25, 0.1875)
    assert select([found], Rule(0.6, 4)).kept == (found,)


def test_mean_and_variance_are_those_of_the_paper() -> None:
    found = passing("t#0", 2, of=5)
    assert found.mean == 0.4
    assert found.variance == pytest.approx((2 * 0.6**2 + 3 * 0.4**2) / 5, abs=1e-15)


def test_the_hardest_come_first_and_the_easiest_fall_to_the_limit() -> None:
    profile = [passing("easy#0", 4), passing("hard#0", 1), passing("middle#0", 2)]
    selection = select(profile, Rule(0.6, 4, maximum=2))
    assert [p.candidate_id for p in selection.kept] == ["hard#0", "middle#0"]
    assert selection.dropped == {"easy#0": "balance_max"}
    assert select(profile, Rule(0.6, 4, per_tool=1)).dropped == {"middle#0": "balance_tool", "easy#0": "balance_tool"}
    assert select(profile, Rule(0.6, 4, per_depth=2)).dropped == {"easy#0": "balance_depth"}


def test_the_seed_decides_among_equals() -> None:
    profile = [passing(f"t{i}#0", 2) for i in range(20)]
    first = [{p.candidate_id for p in select(profile, Rule(0.6, 4, maximum=5, seed=seed)).kept} for seed in (0, 0, 1)]
    assert first[0] == first[1] != first[2]


def test_a_fresh_profile_drops_what_the_policy_has_learned_or_never_saw() -> None:
    profile = [passing("learned#0", 2), passing("still#0", 2), passing("unseen#0", 2), passing("solved#0", 8)]
    fresh = {p.candidate_id: p for p in (passing("learned#0", 8), passing("still#0", 4), passing("solved#0", 2))}
    selection = select(profile, Rule(0.6, 4), fresh=fresh)
    assert [p.candidate_id for p in selection.kept] == ["still#0"]
    assert selection.dropped == {"learned#0": "fresh_all_pass", "unseen#0": "fresh_missing", "solved#0": "all_pass"}


@pytest.mark.parametrize(
    ("passed", "alarm"),
    [([1, 8, 8], None), ([1, 1, 8, 8], None), ([1, 1, 8], "66.7 %"), ([0, 8, 8], "none of 3")],
)
def test_an_alarm_is_raised_where_nothing_or_more_than_half_is_kept(passed: list[int], alarm: str | None) -> None:
    profile = [passing(f"t{i}#0", count) for i, count in enumerate(passed)]
    rule = Rule(0.6, 4, maximum=1)  # the limit has no say in it
    found = report(profile, rule, select(profile, rule))["alarm"]
    assert (found is None) if alarm is None else (alarm in found)


def test_the_report_counts_what_other_lambdas_would_keep() -> None:
    profile = [passing(f"t{passed}#0", passed, of=10) for passed in range(11)]
    rule = Rule(0.6, 4)
    found = report(profile, rule, select(profile, rule))
    assert found["sensitivity"] == {"0.4": 3, "0.5": 4, "0.6": 5, "0.7": 6, "0.8": 7, "0.9": 8}
    assert (found["profiled"], found["kept"], found["keep_rate_pct"]) == (11, 5, 45.455)
    assert found["dropped"] == {"all_fail": 1, "all_pass": 1, "too_easy": 4}
    assert found["kept_by"] == {"action": {"function_call": 5}, "tool": {"find": 5}, "depth": {"0": 5}}


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_an_interval_holds_its_mean_and_mirrors(counts: tuple[int, int]) -> None:
    passed, count = counts
    low, high = wilson(passed / count, count)
    assert 0 <= low <= passed / count <= high <= 1
    assert high > low
    mirrored = wilson((count - passed) / count, count)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=1e-12)


@pytest.mark.parametrize(("mean", "count"), [(0.25, 8), (0.5, 8), (0.9, 64)])
def test_an_interval_ends_where_a_score_test_begins_to_reject(mean: float, count: int) -> None:
    for end in wilson(mean, count):
        assert abs(mean - end) == pytest.approx(Z_95 * math.sqrt(end * (1 - end) / count), rel=1e-12)
    assert wilson(0, 8)[0] == 0
    assert wilson(1, 8)[1] == 1


def test_an_interval_needs_an_outcome() -> None:
    with pytest.raises(ValueError, match="at least one"):
        wilson(0.5, 0)
