"""Means, errors, bins, repetition and pass@k, by hand."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.distill.overlap.compare import STREAMS, Streams
from mopdctl.distill.overlap.measures import (
    Estimate,
    clustered_mean,
    measure,
    pass_at_k,
    pass_rates,
    repeated_tokens,
)
from mopdctl.records import Sample


def sample(
    prompt_id: str,
    response: list[int],
    *,
    mask: list[int] | None = None,
    finish_reason: str = "stop",
    reward: float | None = None,
    verdict: str | None = None,
) -> Sample:
    sampled = mask or [1] * len(response)
    return Sample(
        sample_id=prompt_id,
        prompt_id=prompt_id,
        group_id=prompt_id,
        generation_index=0,
        domain="math",
        teacher_id="",
        policy_version_min=0,
        policy_version_max=0,
        tokens=np.array([9, 9, *response], np.int32),
        prompt_length=2,
        loss_mask=np.array([0, 0, *sampled], np.bool_),
        behavior_logprobs=np.zeros(sum(sampled), np.float32),
        finish_reason=finish_reason,
        reward=reward,
        verdict=verdict,
    )


def streams(count: int, **given: Any) -> Streams:
    return {name: np.array(given.get(name, [0.0] * count), np.float32) for name in STREAMS}


# --------------------------------------------------------------------------------------------------------------- means


def test_means_are_over_tokens_and_errors_over_prompts() -> None:
    samples = [sample("a", [1, 2, 3]), sample("b", [1]), sample("a", [4, 5])]
    found = measure(
        samples,
        [
            streams(3, kl_reverse_nats=[1, 2, 3], student_logprobs=[-1, -2, -3], teacher_logprobs=[-1, -1, -10]),
            streams(1, kl_reverse_nats=[10], student_logprobs=[-0.5], teacher_logprobs=[-0.25]),
            streams(2, kl_reverse_nats=[4, 4], student_entropy_nats=[1, 2], teacher_entropy_nats=[3, 0.5]),
        ],
    )
    assert (found.prompts, found.answers, found.tokens) == (2, 3, 6)
    kl = found.figures["kl_reverse_nats"]
    assert kl.mean == pytest.approx(24 / 6)
    # prompt a: sum 14 of 5 tokens, b: 10 of 1; residuals 14 - 4 * 5 and 10 - 4
    assert kl.stderr == pytest.approx(math.sqrt(2 / 1 * (36 + 36)) / 6)
    assert found.figures["advantage_nats"].mean == pytest.approx((0 + 1 - 7 + 0.25) / 6)
    assert found.figures["entropy_gap_nats"].mean == pytest.approx((1 - 3 + 2 - 0.5) / 6)
    # log 1e-4 is -9.2: one token of six
    assert found.figures["impossible_share"].mean == pytest.approx(1 / 6)


def test_one_prompt_alone_has_no_error() -> None:
    assert clustered_mean(np.array([1.0, 2.0]), np.array([0, 0])) == Estimate(1.5, None)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=20))
def test_with_one_value_per_owner_the_error_is_that_of_a_mean(values: list[float]) -> None:
    found = clustered_mean(np.array(values), np.arange(len(values)))
    assert found.mean == pytest.approx(np.mean(values), abs=1e-12)
    assert found.stderr == pytest.approx(np.std(values, ddof=1) / math.sqrt(len(values)), abs=1e-12)


def test_values_written_twice_by_each_owner_say_no_more() -> None:
    values, owner = np.array([0.0, 1.0, 5.0]), np.arange(3)
    once, twice = clustered_mean(values, owner), clustered_mean(np.repeat(values, 2), np.repeat(owner, 2))
    assert twice.mean == pytest.approx(once.mean)
    assert twice.stderr == pytest.approx(once.stderr)


def test_bins_of_prefix_length_double_and_count_what_tools_said() -> None:
    # five sampled tokens, two of a tool between them: prefixes 0, 1, 4, 5, 6
    one = sample("a", [1, 2, 7, 7, 3, 4, 5], mask=[1, 1, 0, 0, 1, 1, 1])
    found = measure([one], [streams(5, teacher_logprobs=[0, 1, 2, 3, 4], top_k_overlap=[1, 0, 1, 1, 0])])
    assert [(b.begin, b.end, b.tokens, b.advantage_nats.mean) for b in found.by_prefix] == [
        (0, 1, 1, 0.0),
        (1, 2, 1, 1.0),
        (4, 8, 3, 3.0),
    ]
    assert found.by_prefix[2].top_k_overlap.mean == pytest.approx(2 / 3)


@given(st.integers(0, 5000))
def test_every_prefix_lies_in_its_bin(prefix: int) -> None:
    mask = [0] * prefix + [1]
    (only,) = measure([sample("a", [1] * (prefix + 1), mask=mask)], [streams(1)]).by_prefix
    assert only.begin <= prefix < only.end
    assert (only.begin, only.end) == (0, 1) or only.end == 2 * only.begin


def test_an_answer_that_did_not_end_by_itself_is_cut_off() -> None:
    samples = [sample(str(i), [1], finish_reason=reason) for i, reason in enumerate(("stop", "length", "max_turns"))]
    assert measure(samples, [streams(1)] * 3).figures["truncated_share"].mean == pytest.approx(2 / 3)


# ---------------------------------------------------------------------------------------------------------- repetition


def test_a_token_repeats_where_it_ends_an_n_gram_that_was_there() -> None:
    assert repeated_tokens([1, 2, 3, 1, 2, 4, 1, 2, 3], n=2).tolist() == [0, 0, 0, 0, 1, 0, 0, 1, 1]
    assert repeated_tokens([5] * 6, n=4).tolist() == [0, 0, 0, 0, 1, 1]
    assert not repeated_tokens([1, 2, 3], n=4).any()


def test_repetition_counts_sampled_tokens_alone() -> None:
    loop = sample("a", [1, 2, 3, 4, 1, 2, 3, 4], mask=[1, 1, 1, 1, 0, 0, 0, 1])
    assert measure([loop], [streams(5)]).figures["repeated_share"].mean == pytest.approx(1 / 5)


# -------------------------------------------------------------------------------------------------------------- pass@k


@pytest.mark.parametrize("answers", [1, 2, 5])
def test_pass_at_k_is_the_share_of_draws_with_a_pass(answers: int) -> None:
    for passed, k in itertools.product(range(answers + 1), range(1, answers + 1)):
        draws = list(itertools.combinations([True] * passed + [False] * (answers - passed), k))
        assert pass_at_k(answers, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize("k", [0, 3])
def test_pass_at_k_needs_k_answers(k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} of 2 answers"):
        pass_at_k(2, 1, k)


def test_pass_rates_leave_out_what_could_not_be_checked_and_count_the_unreadable_as_failed() -> None:
    ok, half = {"verdict": "ok", "reward": 1.0}, {"verdict": "ok", "reward": 0.5}
    samples = [
        *(sample("a", [1], **ok), sample("a", [1], **half)),  # one of two passes
        *(sample("b", [1], verdict="parse_error"), sample("b", [1], verdict="timeout")),  # none
        *(sample("c", [1], **ok), sample("c", [1], verdict="infra_error")),  # does not count
        *(sample("d", [1], **ok), sample("d", [1], **ok)),  # has no verifier of its own
    ]
    found = pass_rates(samples, frozenset("abc"), k=2)
    assert (found.prompts, found.unchecked, found.reason) == (2, 1, None)
    assert found.pass_at_1 == Estimate(0.25, pytest.approx(0.25))
    assert found.pass_at_k == Estimate(0.5, pytest.approx(0.5))


def test_without_verdicts_there_is_no_rate_but_a_reason() -> None:
    nobody = pass_rates([sample("a", [1])], frozenset(), k=1)
    broken = pass_rates([sample("a", [1], verdict="infra_error")], frozenset("a"), k=1)
    assert (nobody.pass_at_1, nobody.pass_at_k, nobody.reason) == (None, None, "no prompt names a verifier")
    assert (broken.pass_at_1, broken.unchecked, broken.reason) == (None, 1, "no answer could be checked")
