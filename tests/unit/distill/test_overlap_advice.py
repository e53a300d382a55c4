"""The rule of advice, on both sides of each of its thresholds."""

from dataclasses import replace

import pytest

from mopdctl.distill.overlap import advice
from mopdctl.distill.overlap.advice import Advice, Support, advise, against_merging, how_to, overall

INSIDE = Support(top_k_overlap=0.9, student_mass=0.99, impossible_share=0.0)
TINY = 1e-9


def test_inside_the_support_the_exact_divergence_is_advised() -> None:
    assert advise(INSIDE) == Advice(
        "exact",
        "inside the teacher's support: student mass 99.0 %, top-k overlap 90.0 % (97.0 % and 72.0 % needed)",
    )


@pytest.mark.parametrize(
    ("measure", "limit"),
    [("student_mass", advice.EXACT_FROM_MASS), ("top_k_overlap", advice.EXACT_FROM_OVERLAP)],
)
def test_at_the_edge_the_sampled_token_is_advised(measure: str, limit: float) -> None:
    assert advise(replace(INSIDE, **{measure: limit})).choice == "exact"
    assert advise(replace(INSIDE, **{measure: limit - TINY})).choice == "sampled"


@pytest.mark.parametrize(
    ("measure", "last_inside", "first_outside", "word"),
    [
        ("student_mass", advice.WARM_UP_BELOW_MASS, advice.WARM_UP_BELOW_MASS - TINY, "student mass 90.0 %"),
        ("top_k_overlap", advice.WARM_UP_BELOW_OVERLAP, advice.WARM_UP_BELOW_OVERLAP - TINY, "top-k overlap 50.0 %"),
        ("impossible_share", advice.WARM_UP_FROM_IMPOSSIBLE - TINY, advice.WARM_UP_FROM_IMPOSSIBLE, "0.50 % of the"),
    ],
)
def test_outside_the_support_a_warm_up_is_advised_and_the_reason_is_the_measure(
    measure: str, last_inside: float, first_outside: float, word: str
) -> None:
    assert advise(replace(INSIDE, **{measure: last_inside})).choice != "warm-up first"
    found = advise(replace(INSIDE, **{measure: first_outside}))
    assert found.choice == "warm-up first"
    assert word in found.reason
    assert found.reason.count(";") == 0


def test_all_that_is_outside_is_named() -> None:
    reason = advise(Support(top_k_overlap=0.2, student_mass=0.5, impossible_share=0.3)).reason
    assert [word in reason for word in ("student mass 50.0 %", "top-k overlap 20.0 %", "30.0 % of the")] == [True] * 3


def test_the_most_careful_advice_decides_for_the_run() -> None:
    exact, sampled, warm_up = Advice("exact", ""), Advice("sampled", ""), Advice("warm-up first", "")
    assert overall({"a": exact, "b": exact}) == Advice("exact", "so for every teacher")
    assert overall({"a": exact, "b": sampled}) == Advice("sampled", "the most careful advice, that for b, decides")
    assert overall({"c": warm_up, "b": sampled, "a": warm_up}) == Advice(
        "warm-up first", "the most careful advice, that for a, c, decides"
    )


def test_a_warm_up_is_a_merge_where_student_and_teachers_can_be_merged() -> None:
    assert how_to("warm-up first", "").startswith("warm_start: merge, and trust_region: 0.5")
    assert how_to("warm-up first", "it is an adapter").endswith("no merge start: it is an adapter")
    assert "warm_start" not in how_to("warm-up first", "it is an adapter")
    assert (how_to("exact", ""), how_to("sampled", "")) == ("objective: exact", "objective: sampled")


def test_teachers_that_lie_in_one_direction_are_not_merged() -> None:
    assert against_merging(None) == against_merging(advice.NO_MERGE_FROM_COSINE - TINY) == ""
    assert "mean cosine 0.20, 0.2 or more" in against_merging(advice.NO_MERGE_FROM_COSINE)
