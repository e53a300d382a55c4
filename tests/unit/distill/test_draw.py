"""Which prompts a step takes: files, pools, sampling weights, and what these leave alone."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.draw import assigned, checked_sampling_weights, draw_run, pools_of, read_pools, sampling_factors
from mopdctl.distill.prompts import teacher_of
from mopdctl.errors import InputError
from mopdctl.objective.reduction import token_coefficients
from mopdctl.train.order import rows_of_step

# --------------------------------------------------------------------------------------------------------------- draws

POOLS = {"code": [1, 3, 5, 7], "math": [0, 2, 4, 6, 8, 9]}
pools_and_weights = st.dictionaries(
    st.sampled_from("abcd"), st.tuples(st.integers(1, 12), st.floats(0.1, 10)), min_size=1, max_size=4
)


def numbered(sizes: Mapping[str, int]) -> dict[str, list[int]]:
    """Pools of these sizes, whose rows lie mixed in the file."""
    teachers = sorted((i / size, name) for name, size in sizes.items() for i in range(size))
    return pools_of([name for _, name in teachers])


def test_without_weights_all_prompts_are_shuffled_together_as_ever() -> None:
    drawn = draw_run(POOLS, None, steps=7, batch_size=4, seed=3)
    assert drawn.tolist() == [rows_of_step(step, num_rows=10, batch_size=4, seed=3) for step in range(7)]


def test_teachers_take_turns_by_their_sampling_weights() -> None:
    drawn = draw_run(POOLS, {"math": 1.0, "code": 3.0}, steps=10, batch_size=4, seed=0)
    assert [sum(row in POOLS["code"] for row in step) for step in drawn] == [3] * 10


@given(pools_and_weights, st.integers(1, 6), st.integers(1, 7), st.integers(0, 5))
def test_a_longer_run_begins_with_a_shorter_one(
    found: dict[str, tuple[int, float]], steps: int, batch_size: int, more: int
) -> None:
    pools, weights = numbered({n: size for n, (size, _) in found.items()}), {n: w for n, (_, w) in found.items()}
    for sampling in (None, weights):
        short = draw_run(pools, sampling, steps=steps, batch_size=batch_size, seed=1)
        long = draw_run(pools, sampling, steps=steps + more, batch_size=batch_size, seed=1)
        assert short.shape == (steps, batch_size)
        assert long[:steps].tolist() == short.tolist()


@given(pools_and_weights, st.integers(1, 60))
def test_each_teacher_uses_its_own_rows_each_once_before_any_again(
    found: dict[str, tuple[int, float]], count: int
) -> None:
    pools, weights = numbered({n: size for n, (size, _) in found.items()}), {n: w for n, (_, w) in found.items()}
    drawn = draw_run(pools, weights, steps=count, batch_size=1, seed=2).ravel().tolist()
    for name, rows in pools.items():
        mine = [row for row in drawn if row in rows]
        assert abs(len(mine) - count * weights[name] / sum(weights.values())) <= len(pools)
        for epoch in range(0, len(mine), len(rows)):
            assert len(set(mine[epoch : epoch + len(rows)])) == len(mine[epoch : epoch + len(rows)])


def test_the_order_of_teachers_means_nothing() -> None:
    # Open-MOPD bound teachers to domains by position.
    weights = {"code": 2.0, "math": 1.0}
    backwards = draw_run(dict(reversed(POOLS.items())), dict(reversed(weights.items())), steps=5, batch_size=4, seed=0)
    assert backwards.tolist() == draw_run(POOLS, weights, steps=5, batch_size=4, seed=0).tolist()
    assert sampling_factors(dict(reversed(POOLS.items())), weights) == sampling_factors(POOLS, weights)


def test_a_seed_is_another_order() -> None:
    runs = [draw_run(POOLS, {"code": 1.0, "math": 1.0}, steps=5, batch_size=4, seed=s).tolist() for s in (0, 1)]
    assert runs[0] != runs[1]


# ---------------------------------------------------------------------------- the objective is not what is sampled most


def test_without_sampling_weights_there_is_no_correction() -> None:
    assert sampling_factors(POOLS, None) == {"code": 1.0, "math": 1.0}


def test_factors_are_shares_of_prompts_over_shares_of_samples() -> None:
    found = sampling_factors(POOLS, {"code": 3.0, "math": 1.0})
    assert found == {"code": pytest.approx(0.4 / 0.75), "math": pytest.approx(0.6 / 0.25)}
    in_proportion = sampling_factors(POOLS, {"code": 8.0, "math": 12.0})
    assert in_proportion == {"code": pytest.approx(1.0), "math": pytest.approx(1.0)}


def test_who_has_a_denominator_of_its_own_changes_no_others_factor() -> None:
    # A mean of its own is what it is however often its prompts come: among itself a teacher has every prompt.
    pools, weights = POOLS | {"box": list(range(20, 25))}, {"code": 3.0, "math": 1.0, "box": 7.0}
    found = sampling_factors(pools, weights, of=lambda alias: "answers" if alias == "box" else "logprobs")
    alone = sampling_factors(POOLS, {"code": 3.0, "math": 1.0})
    assert found == {"box": 1.0, **{alias: pytest.approx(factor) for alias, factor in alone.items()}}


LENGTHS = {"code": 50, "math": 3}
LOSSES = {"code": 0.7, "math": 2.0}
LAMBDAS = {"code": 1.0, "math": 0.5}


def mean_losses(sampling_weights: dict[str, float] | None, reduction: Any) -> dict[str, float]:
    """Each teacher's term of the loss, averaged over many steps; every token of a teacher costs alike."""
    factors = sampling_factors(POOLS, sampling_weights)
    of_row = {row: name for name, rows in POOLS.items() for row in rows}
    steps = 60
    terms = Counter[str]()
    for step in draw_run(POOLS, sampling_weights, steps=steps, batch_size=20, seed=0):
        names = [of_row[int(row)] for row in step]
        lengths = [LENGTHS[name] for name in names]
        coefficients = token_coefficients(
            lengths,
            [LAMBDAS[name] * factors[name] for name in names],
            reduction,
            total_tokens=sum(lengths),
            total_sequences=len(names),
        )
        for name, length, coefficient in zip(names, lengths, coefficients, strict=True):
            terms[name] += length * coefficient * LOSSES[name] / steps  # type: ignore[assignment]
    return dict(terms)


SAMPLINGS: list[dict[str, float] | None] = [
    None,
    {"code": 4.0, "math": 6.0},
    {"code": 8.0, "math": 6.0},
    {"code": 1.0, "math": 9.0},
]


@pytest.mark.parametrize("sampling_weights", SAMPLINGS)
def test_sampling_one_domain_more_leaves_the_expected_loss_of_all_unchanged(
    sampling_weights: dict[str, float] | None,
) -> None:
    # Automodel #3303
    found = mean_losses(sampling_weights, "sequence")
    # lambda_d p_d L_d, up to the parts of a turn that 60 steps of 20 leave over
    assert found == pytest.approx({"code": 1.0 * 0.4 * 0.7, "math": 0.5 * 0.6 * 2.0}, rel=0.01)


def test_by_token_the_ratio_of_domains_is_unchanged() -> None:
    ratios = [(found := mean_losses(weights, "token"))["code"] / found["math"] for weights in SAMPLINGS]
    assert ratios == pytest.approx([ratios[0]] * len(SAMPLINGS), rel=0.02)
    assert ratios[0] == pytest.approx(1.0 * 0.4 * 50 * 0.7 / (0.5 * 0.6 * 3 * 2.0), rel=0.02)


def test_sampling_weights_are_for_all_teachers_or_none() -> None:
    assert checked_sampling_weights({"math": None, "code": None}) is None
    assert checked_sampling_weights({"math": 2.0, "code": 1.0}) == {"code": 1.0, "math": 2.0}
    with pytest.raises(InputError) as caught:
        checked_sampling_weights({"math": 2.0, "code": None})
    assert str(caught.value) == "teacher 'code': has no sampling_weight, but 'math' has; give it to all or none"


# --------------------------------------------------------------------------------------------------------------- files


def teachers(routing: Any = "domain", **changes: Any) -> TeachersFile:
    found = {"m": {"model": "m", "domains": ["math", "logic"]}, "c": {"model": "m", "domains": ["code"]}} | changes
    return TeachersFile.model_validate(
        {
            "name": "merged",
            "student": "s",
            "prompts": "p.jsonl",
            "train": {"steps": 1},
            "routing": routing,
            "teachers": found,
        }
    )


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps({"prompt": "?"} | row) + "\n" for row in rows), "utf-8")
    return path


def test_own_prompts_follow_the_common_ones_and_carry_their_teacher(tmp_path: Path) -> None:
    common = write(tmp_path / "p.jsonl", {"domain": "math", "id": "7"}, {"domain": "logic"})
    own = write(tmp_path / "c.jsonl", {"id": "7"}, {"domain": "code"})
    prompts, owners = read_pools(teachers(), common, {"c": own})
    assert [p.prompt_id for p in prompts] == ["7", "1", "c/7", "c/1"]
    assert owners == [None, None, "c", "c"]
    assert [p.routing for p in prompts] == [{"domain": d} for d in ("math", "logic", "code", "code")]
    aliases = assigned(prompts, owners, lambda p: teacher_of(p.routing, teachers()))
    assert aliases == ["m", "m", "c", "c"]
    assert pools_of(aliases) == {"c": [2, 3], "m": [0, 1]}
    assert list(pools_of(aliases)) == ["c", "m"]


def test_a_run_needs_no_common_file(tmp_path: Path) -> None:
    own = {"c": write(tmp_path / "c.jsonl", {}), "m": write(tmp_path / "m.jsonl", {"domain": "logic"})}
    prompts, owners = read_pools(teachers(), None, own)
    assert [p.prompt_id for p in prompts] == ["c/0", "m/0"]
    assert owners == ["c", "m"]


def message(tmp_path: Path, alias: str, row: dict[str, Any], config: TeachersFile) -> str:
    with pytest.raises(InputError) as caught:
        read_pools(config, None, {alias: write(tmp_path / "own.jsonl", {"domain": "code", "effort": "high"}, row)})
    return str(caught.value).removeprefix(f"{tmp_path}/")


def test_an_own_prompt_of_a_foreign_domain_is_refused(tmp_path: Path) -> None:
    assert message(tmp_path, "c", {"domain": "math"}, teachers()) == (
        "own.jsonl:2: domain 'math' in the prompts of teacher 'c', which serves code"
    )


def test_an_own_prompt_without_domain_needs_a_teacher_of_one_domain(tmp_path: Path) -> None:
    config = teachers(m={"model": "m", "domains": ["code", "math"]})
    assert message(tmp_path, "m", {}, config) == (
        "own.jsonl:2: no text in routing field 'domain'; teacher 'm' serves several domains (code, math)"
    )


def test_the_effort_of_an_own_prompt_is_one_that_its_teacher_serves(tmp_path: Path) -> None:
    config = teachers(["domain", "effort"], c={"model": "m", "domains": ["code"], "efforts": ["high"]})
    assert message(tmp_path, "c", {"effort": "low"}, config) == (
        "own.jsonl:2: effort 'low' in the prompts of teacher 'c', which serves high"
    )
    assert message(tmp_path, "c", {}, config) == (
        "own.jsonl:2: no text in routing field 'effort'; every prompt needs one"
    )


def test_an_id_that_stands_twice_is_refused(tmp_path: Path) -> None:
    common = write(tmp_path / "p.jsonl", {"domain": "math", "id": "c/0"})
    with pytest.raises(InputError, match=r"c\.jsonl:1: id 'c/0' is that of .*p\.jsonl:1 too; rename one"):
        read_pools(teachers(), common, {"c": write(tmp_path / "c.jsonl", {})})


def test_a_common_prompt_of_a_teacher_with_its_own_file_is_refused_and_named(tmp_path: Path) -> None:
    common = write(tmp_path / "p.jsonl", {"domain": "math"}, {"domain": "code"})
    config = teachers()
    prompts, owners = read_pools(config, common, {"c": write(tmp_path / "c.jsonl", {})})
    with pytest.raises(InputError, match=r"p\.jsonl:2: routes to teacher 'c', which has `prompts` of its own"):
        assigned(prompts, owners, lambda p: teacher_of(p.routing, config))
