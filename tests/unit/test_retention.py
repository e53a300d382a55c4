# ruff: noqa: E501 - a terminal table is as wide as it is
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.evals.lengths import answer_lengths
from mopdctl.evals.pairing import pair_quantized
from mopdctl.evals.recovery import Entry, Figure, decimal_of
from mopdctl.evals.retention import Pair, Retained, Retention, mcnemar, retain, sign_flip, take_quantized
from mopdctl.evals.retention_report import to_json, to_markdown, to_text
from mopdctl.evals.scores import write_scores
from mopdctl.files import write_jsonl
from mopdctl.records import Score
from mopdctl.runs import Workspace

IDENTITY = {"version": 1, "num_fewshot": 0, "prompt": "p", "generation": {}}


def sampled(values: Sequence[float], *, start: int = 0, **identity: object) -> Figure:
    return Figure(
        decimal_of(sum(values) / len(values)),
        n=len(values),
        identity={**IDENTITY, **identity},
        samples={f"d{start + i:04}": float(value) for i, value in enumerate(values)},
    )


def plain(score: str) -> Figure:
    return Figure(Decimal(score))


def row_of(full: Figure, quantized: Figure, *, seed: int = 0, **changes: object) -> Retained:
    pair = replace(Pair("nvfp4", "gsm8k", "acc,none", full, quantized), **changes)  # type: ignore[arg-type]
    return retain([pair], full="mopd2", seed=seed, resamples=2000).rows[0]


def right(*documents: int, of: int = 40) -> list[float]:
    return [100.0 * (i in documents) for i in range(of)]


# ------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize(
    ("worse", "better", "p"),
    [(0, 0, 1.0), (5, 0, 2 / 32), (0, 5, 2 / 32), (1, 1, 1.0), (6, 1, 16 / 128), (9, 1, 22 / 1024)],
)
def test_mcnemar_closed_forms(worse: int, better: int, p: float) -> None:
    assert mcnemar(worse, better) == p


def test_mcnemar_takes_thousands_of_documents() -> None:
    assert mcnemar(5000, 5000) == 1.0
    assert 0 < mcnemar(600, 400) < 1e-9  # by the normal approximation 6.3 sigma


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=8))
def test_the_sign_flip_test_counts_every_pattern_of_signs(differences: list[int]) -> None:
    patterns = list(itertools.product([-1, 1], repeat=len(differences)))
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in patterns]
    expected = sum(total >= abs(sum(differences)) for total in sums) / len(patterns)
    assert sign_flip([float(d) for d in differences], stream="s", seed=0, draws=1) == expected


@given(worse=st.integers(0, 7), better=st.integers(0, 7))
def test_flipped_signs_of_right_and_wrong_are_mcnemar(worse: int, better: int) -> None:
    differences = [-100.0] * worse + [100.0] * better + [0.0] * 5
    assert sign_flip(differences, stream="s", seed=0, draws=1) == pytest.approx(mcnemar(worse, better), abs=1e-12)


def test_drawn_signs_come_near_the_exact_value_and_never_give_0() -> None:
    differences = [-100.0] * 14 + [100.0] * 6
    drawn = sign_flip(differences, stream="s", seed=0, draws=20_000)
    assert drawn == pytest.approx(mcnemar(14, 6), abs=0.01)
    assert drawn == sign_flip(differences, stream="s", seed=0, draws=20_000)
    assert drawn != sign_flip(differences, stream="s", seed=1, draws=20_000)
    assert sign_flip([1.0] * 60, stream="s", seed=0, draws=500) == 1 / 501


def test_decimal_fractions_that_sum_to_the_same_number_count_as_the_same() -> None:
    assert sign_flip([0.1, 0.2, -0.3], stream="s", seed=0, draws=1) == 1.0


# -------------------------------------------------------------------------------------------------------------- rows


def test_the_figures_of_one_row() -> None:
    # 20 right before, 17 after: it lost four of them and found another.
    row = row_of(sampled(right(*range(20))), sampled(right(*range(4, 20), 30)))
    assert (row.n, row.full, row.quantized, row.change) == (40, Decimal(50), Decimal("42.5"), Decimal("-7.5"))
    assert (str(row.retention_pct), row.status, row.note) == ("85.0", "ok", None)
    assert (row.worse, row.better, row.test, row.p_value) == (4, 1, "mcnemar", mcnemar(4, 1))
    assert row.ci is not None
    assert row.ci[0] < 85 < row.ci[1]
    assert row.change_ci is not None
    assert row.change_ci[0] < Decimal("-7.5") < row.change_ci[1]


def test_the_interval_is_that_of_paired_documents() -> None:
    # Equal answers move together: unpaired, two means of 40 documents would differ by some 30 % either way.
    same = sampled(right(*range(20)))
    row = row_of(same, same)
    assert (row.ci, row.change_ci) == ((Decimal("100.0"), Decimal("100.0")), (Decimal("0.00"), Decimal("0.00")))
    assert (row.p_value, row.worse, row.better) == (1.0, 0, 0)


def test_graded_documents_are_tested_by_their_signs() -> None:
    full, quantized = [50.0, 75.0, 20.0, 0.0], [40.0, 70.0, 0.0, 0.0]
    row = row_of(sampled(full), sampled(quantized))
    assert (row.test, row.p_value, row.worse, row.better) == ("sign_flip", 2 / 8, 3, 0)


def test_sides_exchanged_give_the_same_p_and_the_opposite_change() -> None:
    one, other = sampled(right(*range(20))), sampled(right(*range(3, 21)))
    there, back = row_of(one, other), row_of(other, one)
    assert there.p_value == back.p_value
    assert (there.change, there.worse, there.better) == (-(back.change or 0), back.better, back.worse)


def test_where_lower_is_better_more_is_a_loss() -> None:
    row = row_of(plain("10"), plain("12.5"), higher_is_better=False)
    assert (str(row.retention_pct), row.change) == ("80.0", Decimal("-2.5"))
    values = [1.0, 2.0, 3.0, 5.0]
    sampled_row = row_of(sampled(values), sampled([2 * v for v in values]), higher_is_better=False)
    assert (str(sampled_row.retention_pct), sampled_row.ci) == ("50.0", (Decimal("50.0"), Decimal("50.0")))
    assert (sampled_row.worse, sampled_row.better) == (4, 0)


def test_retention_is_not_clipped_and_rounds_half_up() -> None:
    assert str(row_of(plain("40"), plain("41")).retention_pct) == "102.5"
    assert str(row_of(plain("80"), plain("41.0")).retention_pct) == "51.3"


@pytest.mark.parametrize(
    ("full", "quantized", "lower", "share"),
    [
        ("0", "5", False, None),
        ("-3", "5", False, None),
        ("5", "0", False, "0.0"),
        ("5", "0", True, None),
        ("0", "5", True, "0.0"),
    ],
)
def test_a_share_of_nothing_has_a_status_instead_of_a_percentage(
    full: str, quantized: str, lower: bool, share: str | None
) -> None:
    row = row_of(plain(full), plain(quantized), higher_is_better=not lower)
    assert row.status == ("ok" if share else "no_ratio")
    assert row.retention_pct == (None if share is None else Decimal(share))
    assert row.change is not None


def test_what_is_missing_or_not_the_same_task_is_no_pair() -> None:
    whole = sampled(right(1, 2))
    missing = row_of(whole, Figure(None, reason="no score in evaluation 'nvfp4'"))
    assert (missing.status, missing.note) == ("missing", "quantized: no score in evaluation 'nvfp4'")
    broken = row_of(whole, Figure(Decimal("NaN"), reason="nan"))
    assert (broken.status, broken.quantized) == ("non_finite", None)
    other = row_of(whole, sampled(right(1), num_fewshot=5))
    assert (other.status, other.note) == ("mismatch", "differ: num_fewshot (before quantization 0, quantized 5)")
    for row in (missing, broken, other):
        assert (row.retention_pct, row.ci, row.test, row.p_value, row.worse) == (None,) * 5


def test_of_partly_shared_documents_the_shared_ones_count() -> None:
    row = row_of(sampled(right(0, 1, 2, 3, of=6)), sampled(right(0, 1, of=6), start=2))
    # d0002..d0005 are in both: right are d2, d3 before, d2, d3 after.
    assert (row.status, row.n, row.full, row.quantized) == ("partial", 4, Decimal(50), Decimal(50))
    assert (row.retention_pct, row.p_value, row.worse, row.better) == (None, 1.0, 0, 0)
    assert (row.note or "").startswith("4 of 8 documents shared")


def test_a_row_without_a_percentage_has_no_interval_of_one() -> None:
    row = row_of(sampled([100.0] * 30), sampled([100.0] * 30, start=5))
    assert (row.status, row.n, row.ci, row.change_ci) == ("partial", 25, None, (Decimal("0.00"), Decimal("0.00")))


def test_scores_without_documents_have_a_share_and_no_test() -> None:
    row = row_of(plain("50"), plain("45"))
    assert (str(row.retention_pct), row.test, row.p_value, row.ci) == ("90.0", None, None, None)
    corpus = replace(sampled([10.0, 20.0]), score=Decimal(40))
    found = row_of(corpus, corpus)
    assert (found.status, found.test) == ("ok", None)
    assert found.note == "no interval, because the score is not the mean of its documents"


def test_another_harness_is_a_note() -> None:
    row = row_of(sampled(right(1), lm_eval="0.4.12"), sampled(right(1), lm_eval="0.4.13"))
    assert (row.status, row.note) == ("ok", "lm_eval differs")


def test_the_median_is_that_of_the_ok_rows_of_a_checkpoint() -> None:
    scores = [("nvfp4", "50"), ("nvfp4", "45"), ("mxfp4", "40"), ("nvfp4", "20"), ("nvfp4", None)]
    pairs = [
        Pair(name, f"b{i}", None, plain("50"), plain(score) if score else Figure(None))
        for i, (name, score) in enumerate(scores)
    ]
    found = retain(pairs, full="mopd2")
    assert [(one.checkpoint, str(one.median_pct), one.n_ok) for one in found.checkpoints] == [
        ("nvfp4", "90.0", 3),
        ("mxfp4", "80.0", 1),
    ]
    none = retain([pairs[-1]], full="mopd2").checkpoints[0]
    assert (none.median_pct, none.n_ok) == (None, 0)


def test_the_length_ratio_is_that_of_shared_documents() -> None:
    full, quantized = {"a": 10.0, "b": 30.0, "c": 99.0}, {"a": 15.0, "b": 35.0, "d": 1.0}
    row = row_of(plain("50"), plain("50"), full_lengths=full, quantized_lengths=quantized)
    assert row.length_ratio == Decimal("1.25")
    for other in (None, {}, {"d": 1.0}):
        assert row_of(plain("50"), plain("50"), full_lengths=full, quantized_lengths=other).length_ratio is None
    assert row_of(plain("50"), plain("50"), full_lengths={"a": 0.0}, quantized_lengths=quantized).length_ratio is None


def test_columns_of_a_table_become_pairs_and_leave_the_controls() -> None:
    figures = [plain(str(i)) for i in range(6)]
    entry = Entry("b", figures[0], figures[1], figures[2], tuple(figures[3:]), higher_is_better=False)
    entries, pairs = take_quantized([entry], ["nvfp4", "mxfp4"])
    assert entries == [replace(entry, controls=(figures[3],))]
    assert pairs == [
        Pair(name, "b", None, figures[1], figure, False)
        for name, figure in zip(["nvfp4", "mxfp4"], figures[4:], strict=True)
    ]


# -------------------------------------------------------------------------------------------------------- evaluations


def lm_eval_row(document: str, answers: list[str], *, filter_name: str = "none") -> dict[str, object]:
    request = {"gen_args_0": {"arg_0": "question", "arg_1": {"until": ["\n"], "max_gen_toks": 8}}}
    return {"doc_hash": document, "arguments": request, "resps": [answers], "filter": filter_name}


def test_lengths_are_read_from_what_the_harness_left(tmp_path: Path) -> None:
    rows = [
        lm_eval_row("a", ["123", "1"]),
        lm_eval_row("a", [""]),
        lm_eval_row("b", ["\u00e91234"]),
        lm_eval_row("b", ["x"], filter_name="strict"),
    ]
    write_jsonl(tmp_path / "lm_eval" / "samples_math_2026-11-28T23-23-30.073564.jsonl", rows)
    write_jsonl(
        tmp_path / "lm_eval" / "samples_math_hard_2026-11-28T23-23-30.073564.jsonl", [lm_eval_row("z", ["12345"])]
    )
    assert answer_lengths(tmp_path, "math", "none") == {"a": 2.0, "a#1": 0.0, "b": 5.0}
    assert answer_lengths(tmp_path, "math", "strict") == {"b": 1.0}
    assert answer_lengths(tmp_path, "math_hard", "none") == {"z": 5.0}
    assert answer_lengths(tmp_path, "absent", "none") is None
    weighed = {
        "doc_hash": "a",
        "arguments": {"gen_args_0": {"arg_0": "q", "arg_1": " yes"}},
        "resps": [[["-1.5", "True"]]],
        "filter": "none",
    }
    write_jsonl(tmp_path / "lm_eval" / "samples_choice_2026-11-28T23-23-30.073564.jsonl", [weighed])
    assert answer_lengths(tmp_path, "choice", "none") is None


def test_every_benchmark_of_the_whole_model_is_paired_the_claimed_first(tmp_path: Path) -> None:
    space = Workspace(tmp_path)

    def evaluation(name: str, *scores: tuple[str, str, float]) -> None:
        write_scores(
            space.evaluation(name),
            name,
            [
                Score(task, metric, "none", metric != "ppl", score, None, 1, None, IDENTITY)
                for task, metric, score in scores
            ],
            [],
        )

    evaluation("mopd2", ("mmlu", "acc", 60.0), ("math", "acc", 40.0), ("math", "em", 30.0), ("wiki", "ppl", 8.0))
    evaluation("nvfp4", ("math", "em", 27.0), ("mmlu", "acc", 57.0))
    evaluation("mxfp4", ("wiki", "ppl", 10.0), ("mmlu", "acc", 54.0))
    for name, answer in (("mopd2", "1234"), ("nvfp4", "12345")):
        lines = [lm_eval_row("a", [answer]), lm_eval_row("a", ["of another filter"], filter_name="strict")]
        write_jsonl(space.evaluation(name) / "lm_eval" / "samples_math_2026-11-28T23-23-30.073564.jsonl", lines)
    pairs = pair_quantized(space, full="mopd2", quantized=["nvfp4", "mxfp4"], claimed=["math/em,none", "math/em,none"])
    names = [("math", "em,none"), ("mmlu", "acc,none"), ("wiki", "ppl,none")]
    assert [(pair.checkpoint, pair.benchmark, pair.metric) for pair in pairs] == [
        (c, *name) for c in ("nvfp4", "mxfp4") for name in names
    ]
    rows = retain(pairs, full="mopd2").rows
    assert [str(row.retention_pct) for row in rows] == ["90.0", "95.0", "None", "None", "90.0", "80.0"]
    assert [row.status for row in rows] == ["ok", "ok", "missing", "missing", "ok", "ok"]
    assert [row.length_ratio for row in rows] == [Decimal("1.25"), *[None] * 5]


# ------------------------------------------------------------------------------------------------------------ report


def shown() -> Retention:
    pairs = [
        Pair(
            "nvfp4",
            "gsm8k",
            "em,none",
            sampled(right(*range(20))),
            sampled(right(*range(4, 20), 30)),
            full_lengths={"d": 100.0},
            quantized_lengths={"d": 104.0},
        ),
        Pair("nvfp4", "a|b\x1b[2J", None, plain("20.25"), Figure(None, reason="no score")),
    ]
    found = retain(pairs, full="mopd2", resamples=100)
    ci, change_ci = (Decimal("70.0"), Decimal("98.1")), (Decimal("-17.50"), Decimal("0.00"))
    return replace(found, rows=(replace(found.rows[0], ci=ci, change_ci=change_ci), found.rows[1]))


def test_the_terminal_table_to_the_letter() -> None:
    assert to_text(shown()) == (
        "checkpoint  benchmark  metric    n   full  quantized  change  retention %  retention 95%  worse  better  test          p  length  status\n"
        "----------  ---------  -------  --  -----  ---------  ------  -----------  -------------  -----  ------  -------  ------  ------  -------\n"
        "nvfp4       gsm8k      em,none  40  50.00      42.50   -7.50         85.0   [70.0, 98.1]      4       1  mcnemar  0.3750   1.04x  ok\n"
        "nvfp4       a|b?[2J    -         -  20.25          -       -            -              -      -       -  -             -       -  missing\n"
        "\n"
        "retention = quantized / mopd2, in percent, turned round where lower is better; it is not recovery.\n"
        "p: that nothing changed, by pairs: exact McNemar, or sign flips of graded documents; not corrected for rows.\n"
        "length: of the quantized checkpoint's answers over that before, in characters.\n"
        "nvfp4: median retention 85.0 % (rows: 1)\n"
        "nvfp4 a|b?[2J: quantized: no score"
    )


def test_markdown_keeps_its_columns_whatever_the_names_hold() -> None:
    lines = to_markdown(shown()).split("\n")
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines[:4]} == {16}
    assert lines[3].startswith("| nvfp4 | a\\|b?[2J | - | - | 20.25 | - |")
    assert lines[-1] == "- nvfp4 a\\|b?[2J: quantized: no score"


def test_json_has_null_for_what_is_absent_and_says_retention_alone() -> None:
    document = to_json(shown())
    assert document["schema"] == "mopdctl.retention/1"
    assert document["rows"][0] == {
        "checkpoint": "nvfp4", "benchmark": "gsm8k", "metric": "em,none", "n": 40, "full": 50.0, "quantized": 42.5,
        "change": -7.5, "change_ci_low": -17.5, "change_ci_high": 0.0, "retention_pct": 85.0, "ci_low": 70.0,
        "ci_high": 98.1, "test": "mcnemar", "p_value": 0.375, "worse": 4, "better": 1, "length_ratio": 1.04,
        "status": "ok", "note": None,
    }  # fmt: skip
    assert {key for key, value in document["rows"][1].items() if value is None} == {
        "metric", "n", "quantized", "change", "change_ci_low", "change_ci_high", "retention_pct", "ci_low", "ci_high",
        "test", "p_value", "worse", "better", "length_ratio",
    }  # fmt: skip
    assert document["checkpoints"] == [{"checkpoint": "nvfp4", "median_pct": 85.0, "n_ok": 1}]
    assert "recovery" not in json.dumps(document, allow_nan=False)
