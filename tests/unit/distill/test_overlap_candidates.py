"""Who should teach a domain: both ranks, the suggestion, and how candidates are named."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.overlap.advice import Support
from mopdctl.distill.overlap.answers import pick
from mopdctl.distill.overlap.candidates import Candidate, rank, read_candidates, the_domain
from mopdctl.errors import InputError
from mopdctl.records import Prompt


def candidate(alias: str, mass: float, kl: float, score: float | None) -> Candidate:
    return Candidate(alias, Support(top_k_overlap=0.8, student_mass=mass, impossible_share=0.0), kl, score)


def config(*domains: str, **extra: Any) -> TeachersFile:
    return TeachersFile.model_validate(
        {
            "name": "merged",
            "student": "student",
            "prompts": "prompts.jsonl",
            "train": {"steps": 1},
            "teachers": {f"t-{domain}": {"model": f"m-{domain}", "domains": [domain]} for domain in domains} | extra,
        }
    )


# ------------------------------------------------------------------------------------------------------------- ranking


def test_the_best_model_need_not_be_the_best_teacher() -> None:
    found = rank(
        [candidate("far", 0.70, 2.0, 95.0), candidate("near", 0.99, 0.1, 60.0), candidate("good", 0.95, 0.5, 80.0)]
    )
    assert found.support == {"near": 1, "good": 2, "far": 3}
    assert found.score == {"far": 1, "good": 2, "near": 3}
    assert found.suggested == "good"
    assert "far scores more, but the student writes outside its support" in found.reason


def test_whole_percents_of_mass_come_before_the_kl() -> None:
    found = rank([candidate("a", 0.991, 0.5, 1.0), candidate("b", 0.994, 0.6, 1.0), candidate("c", 0.98, 0.1, 1.0)])
    assert found.support == {"a": 1, "b": 2, "c": 3}


def test_equals_share_a_place() -> None:
    found = rank([candidate("a", 0.99, 0.5, 80.0), candidate("b", 0.99, 0.5, 80.0), candidate("c", 0.95, 0.5, 70.0)])
    assert found.support == {"a": 1, "b": 1, "c": 3}
    assert found.score == {"a": 1, "b": 1, "c": 3}
    assert found.suggested == "a"
    assert found.reason == "the best score of those that hold 90 % of student mass"


def test_without_scores_support_decides() -> None:
    found = rank([candidate("a", 0.95, 0.5, None), candidate("b", 0.97, 0.5, None)])
    assert found.score == {"a": None, "b": None}
    assert found.suggested == "b"


def test_outside_every_support_the_nearest_is_suggested_after_a_warm_up() -> None:
    found = rank([candidate("a", 0.5, 3.0, 99.0), candidate("b", 0.8, 2.0, 50.0)])
    assert (found.suggested, "after a warm-up" in found.reason) == ("b", True)


def test_the_order_of_candidates_means_nothing() -> None:
    three = [candidate("a", 0.99, 0.5, 80.0), candidate("b", 0.95, 0.6, 90.0), candidate("c", 0.95, 0.7, None)]
    one, other = rank(three), rank(three[::-1])
    assert (one.support, one.score, one.suggested) == (other.support, other.score, other.suggested)


# ------------------------------------------------------------------------------------------------------------- reading


def test_candidates_stand_beside_the_teachers_of_the_domain() -> None:
    found = read_candidates("large=big/math, small = small-math", config("math", "code"), "math")
    assert {alias: (t.model, t.domains) for alias, t in found.items()} == {
        "t-math": ("m-math", ["math"]),
        "large": ("big/math", ["math"]),
        "small": ("small-math", ["math"]),
    }


def test_a_file_of_candidates_says_their_precision(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("candidates:\n  large: {model: big, dtype: bfloat16}\n", "utf-8")
    found = read_candidates(str(path), config("math"), "math")
    assert (found["large"].model, found["large"].dtype) == ("big", "bfloat16")


def test_a_black_box_of_the_domain_has_no_support_to_rank() -> None:
    box = {"box": {"gives": "answers", "answers": "a.jsonl", "domains": ["math"]}}
    assert set(read_candidates("x=y", config("math", **box), "math")) == {"t-math", "x"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("large=", "write alias=model,alias=model"),
        ("a=b,c", "write alias=model,alias=model"),
        ("a=b,a=c", "alias 'a' stands twice"),
        ("t-math=other", "'t-math' is a teacher's alias already"),
        ("nowhere.yaml", "nowhere.yaml: no such file"),
    ],
)
def test_badly_named_candidates_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_candidates(text, config("math"), "math")


def test_the_domain_is_the_one_asked_for_or_the_only_one() -> None:
    assert the_domain(config("math"), None) == "math"
    assert the_domain(config("math", "code"), "code") == "code"
    with pytest.raises(InputError, match="say for which domain with --domain; there are code, math"):
        the_domain(config("math", "code"), None)
    with pytest.raises(InputError, match="--domain 'chess': no teacher serves it; there are math"):
        the_domain(config("math"), "chess")


# ------------------------------------------------------------------------------------------------------------- picking


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", ({"role": "user", "content": "?"},), None, {"domain": "math"}) for i in range(count)]


def test_more_prompts_contain_the_fewer_and_stand_in_order() -> None:
    rows = range(3, 40)
    picks = [pick(prompts(50), rows, limit=limit, seed=0) for limit in (1, 5, 20, 37, 100)]
    assert [len(found) for found in picks] == [1, 5, 20, 37, 37]
    assert all(set(few) <= set(more) for few, more in itertools.pairwise(picks))
    assert all(list(found) == sorted(found) for found in picks)
    assert picks[-1] == tuple(rows)


def test_which_prompts_are_picked_hangs_on_seed_and_id_alone() -> None:
    given = prompts(30)
    ids = {given[row].prompt_id for row in pick(given, range(30), limit=10, seed=0)}
    turned = given[::-1]
    assert {turned[row].prompt_id for row in pick(turned, range(30), limit=10, seed=0)} == ids
    assert {given[row].prompt_id for row in pick(given, range(30), limit=10, seed=1)} != ids
    assert ids != {f"p{i}" for i in range(10)}  # a sorted file is not cut at its front
