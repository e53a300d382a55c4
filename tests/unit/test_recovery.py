import math
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.evals.recovery import (
    Entry,
    Figure,
    Row,
    Table,
    decimal_of,
    judge,
    paired_values,
    percent,
    recover,
    round_half_up,
)

IDENTITY = {"version": 1, "num_fewshot": 0, "prompt": "p", "generation": {"max_gen_toks": 64}}
POINTS = st.decimals(min_value=0, max_value=100, places=2)


def plain(score: str | None) -> Figure:
    return Figure(None if score is None else Decimal(score), reason="empty cell" if score is None else None)


def row_of(
    before: str | None, after: str | None, teacher: str | None, *, min_gap: str = "1", lower: bool = False
) -> Row:
    entry = Entry("b", plain(before), plain(after), plain(teacher), higher_is_better=not lower)
    return judge(entry, min_gap=Decimal(min_gap))


def sampled(values: Sequence[float], *, names: Sequence[str] | None = None, **identity: object) -> Figure:
    names = names or [f"d{i:04}" for i in range(len(values))]
    return Figure(
        decimal_of(math.fsum(values) / len(values)),
        n=len(values),
        identity={**IDENTITY, **identity},
        samples=dict(zip(names, map(float, values), strict=True)),
    )


def hits(count: int, of: int) -> list[float]:
    return [100.0] * count + [0.0] * (of - count)


def entry_of(before: Figure, after: Figure, teacher: Figure, *controls: Figure, name: str = "gsm8k") -> Entry:
    return Entry(name, before, after, teacher, controls, metric="acc,none")


def clear_entry(n: int = 100) -> Entry:
    """before 20, after 60, teacher 70, with teacher - before far above its error."""
    return entry_of(sampled(hits(n // 5, n)), sampled(hits(6 * n // 10, n)), sampled(hits(7 * n // 10, n)))


def with_intervals(entries: list[Entry], controls: Sequence[str] = (), seed: int = 0, resamples: int = 2000) -> Table:
    from mopdctl.evals.bootstrap import add_intervals

    return add_intervals(recover(entries, control_names=controls), entries, seed=seed, resamples=resamples)


# ------------------------------------------------------------------------------------------------------- arithmetic


def test_the_figures_of_one_row() -> None:
    row = row_of("44.5", "54.0", "50.0")
    assert (row.gain, row.gap, row.after_minus_teacher) == (Decimal("9.5"), Decimal("5.5"), Decimal("4.0"))
    assert (row.recovery_pct, row.status, row.note) == (Decimal("172.7"), "ok", None)


@pytest.mark.parametrize(
    ("value", "places", "shown"),
    [("51.25", 1, "51.3"), ("51.35", 1, "51.4"), ("-0.25", 1, "-0.3"), ("-0.04", 1, "0.0"), ("2.675", 2, "2.68")],
)
def test_rounding_is_half_up_and_knows_no_negative_zero(value: str, places: int, shown: str) -> None:
    assert str(round_half_up(Decimal(value), places)) == shown


def test_a_float_that_misses_its_tie_still_rounds_up() -> None:
    assert 0.1425 * 100 < 14.25
    assert round_half_up(decimal_of(0.1425 * 100), 1) == Decimal("14.3")


def test_recovery_is_not_clipped() -> None:
    assert row_of("50", "40", "60").recovery_pct == Decimal("-100.0")
    assert row_of("50", "90", "60").recovery_pct == Decimal("400.0")


@given(before=POINTS, teacher=POINTS)
def test_recovery_is_0_at_before_and_100_at_the_teacher(before: Decimal, teacher: Decimal) -> None:
    at_before, at_teacher = (row_of(str(before), str(x), str(teacher)) for x in (before, teacher))
    if teacher - before >= 1:
        assert (at_before.recovery_pct, at_teacher.recovery_pct) == (0, 100)
    else:
        assert at_before.recovery_pct is None
        assert at_teacher.recovery_pct is None
        assert at_before.status == ("low_gap" if teacher > before else "teacher_not_better")


@given(before=POINTS, after=POINTS, teacher=POINTS)
def test_a_metric_turned_upside_down_gives_the_same_row(before: Decimal, after: Decimal, teacher: Decimal) -> None:
    up = row_of(str(before), str(after), str(teacher))
    down = row_of(str(100 - before), str(100 - after), str(100 - teacher), lower=True)
    for name in ("gain", "gap", "after_minus_teacher", "recovery_pct", "status"):
        assert getattr(up, name) == getattr(down, name)


@given(before=POINTS, after=POINTS, teacher=POINTS)
def test_only_ok_rows_have_a_percentage(before: Decimal, after: Decimal, teacher: Decimal) -> None:
    row = row_of(str(before), str(after), str(teacher))
    assert (row.recovery_pct is not None) == (row.status == "ok") == (teacher - before >= 1)
    assert row.after_minus_teacher == after - teacher


def test_percent_takes_extreme_figures() -> None:
    assert percent(Decimal("1e90"), Decimal("1e-20")) == Decimal("1e112")
    assert percent(Decimal(1), Decimal(0)) is None


# --------------------------------------------------------------------------------------------------------- statuses


@pytest.mark.parametrize(("teacher", "status"), [("50", "teacher_not_better"), ("49", "teacher_not_better")])
def test_a_teacher_that_is_not_better_leaves_the_difference_to_say(teacher: str, status: str) -> None:
    row = row_of("50", "54.1", teacher)
    assert (row.status, row.recovery_pct) == (status, None)
    assert row.after_minus_teacher == Decimal("54.1") - Decimal(teacher)
    assert row.note == ("teacher equals before" if teacher == "50" else None)


def test_the_gap_at_min_gap_is_ok_and_under_it_is_low() -> None:
    assert row_of("50", "51", "51").status == "ok"
    low = row_of("50", "51", "50.99")
    assert (low.status, low.recovery_pct, low.note) == ("low_gap", None, "gap under --min-gap 1")
    assert row_of("50", "51", "50.99", min_gap="0").status == "ok"


def test_low_gap_by_two_standard_errors_of_the_paired_difference() -> None:
    # 100 documents, the teacher wins 4 and loses none: d has mean 4, sd 19.69, SE 1.969, so 2 SE = 3.94 < 4.
    before, teacher = hits(50, 100), hits(54, 100)
    assert judge(entry_of(sampled(before), sampled(before), sampled(teacher)), min_gap=Decimal(1)).status == "ok"
    # It wins 5 and loses 1: the same gap of 4, but sd 24.3 and 2 SE = 4.86.
    teacher = [0.0, *hits(54, 99)]
    row = judge(entry_of(sampled(before), sampled(before), sampled(teacher)), min_gap=Decimal(1))
    assert (row.gap, row.status, row.note) == (Decimal(4), "low_gap", "gap under two standard errors (4.86)")


def test_one_document_gives_no_standard_error() -> None:
    entry = entry_of(sampled([0.0]), sampled([100.0]), sampled([100.0]))
    row = judge(entry, min_gap=Decimal(1))
    assert row.status == "low_gap"
    assert row.note == "gap under two standard errors (unknown: one document); no interval from one document"


def test_missing_names_the_side_and_keeps_what_is_known() -> None:
    row = row_of("50", "55", None)
    assert (row.status, row.note) == ("missing", "teacher: empty cell")
    assert (row.gain, row.gap, row.after_minus_teacher) == (Decimal(5), None, None)


def test_non_finite_scores_and_documents() -> None:
    row = judge(Entry("b", plain("50"), replace(plain("nan"), reason="nan"), plain("60")), min_gap=Decimal(1))
    assert (row.status, row.note, row.after, row.gain, row.gap) == ("non_finite", "after: nan", None, None, Decimal(10))
    entry = clear_entry()
    holes = replace(entry.after, samples={**(entry.after.samples or {}), "d0003": None})
    row = judge(replace(entry, after=holes), min_gap=Decimal(1))
    assert (row.status, row.note) == ("non_finite", "after: 1 of 100 documents without a finite value")


@pytest.mark.parametrize(
    ("field", "value", "note"),
    [
        ("version", 2, "differ: version (before 1, after 1, teacher 2)"),
        ("num_fewshot", 5, "differ: num_fewshot (before 0, after 0, teacher 5)"),
        ("prompt", "q" * 64, "differ: prompt"),
        ("generation", {"max_gen_toks": 9}, "differ: generation"),
        ("filter", "strict", "differ: filter (before none, after none, teacher strict)"),
    ],
)
def test_mismatch_names_the_fields(field: str, value: object, note: str) -> None:
    entry = clear_entry()
    entry = replace(entry, teacher=replace(entry.teacher, identity={**IDENTITY, field: value}))
    row = judge(entry, min_gap=Decimal(1))
    assert (row.status, row.recovery_pct) == ("mismatch", None)
    assert (row.note or "").startswith(note)
    assert row.after_minus_teacher == Decimal(-10)


def test_a_different_chat_template_or_harness_is_a_note() -> None:
    entry = clear_entry()
    teacher = replace(entry.teacher, identity={**IDENTITY, "chat_template": "x", "lm_eval": "0.4.12"})
    row = judge(replace(entry, teacher=teacher), min_gap=Decimal(1))
    assert (row.status, row.note) == ("ok", "chat_template differs; lm_eval differs")


def test_overlapping_documents_are_partial_and_the_figures_are_those_of_the_intersection() -> None:
    names = [f"d{i:04}" for i in range(100)]
    before, after = sampled(hits(20, 100)), sampled(hits(60, 100))
    teacher = sampled(hits(70, 90), names=names[:90])
    row = judge(entry_of(before, after, teacher), min_gap=Decimal(1))
    assert (row.status, row.recovery_pct, row.n) == ("partial", None, 90)
    assert row.note == "90 of 100 documents shared (before 100, after 100, teacher 90)"
    assert (row.before, row.after) == (decimal_of(2000 / 90), decimal_of(6000 / 90))
    assert row.after_minus_teacher == decimal_of(6000 / 90) - decimal_of(7000 / 90)


def test_disjoint_documents_are_a_mismatch() -> None:
    entry = clear_entry()
    teacher = sampled(hits(70, 100), names=[f"x{i}" for i in range(100)])
    row = judge(replace(entry, teacher=teacher), min_gap=Decimal(1))
    assert row.status == "mismatch"
    assert row.note == "differ: documents (none shared; before 100, after 100, teacher 100)"


def test_without_documents_their_number_is_compared() -> None:
    entry = clear_entry()
    row = judge(replace(entry, teacher=replace(entry.teacher, samples=None, n=50)), min_gap=Decimal(1))
    assert (row.status, row.n) == ("mismatch", None)
    assert (row.note or "").startswith("differ: documents (before 100, after 100, teacher 50)")
    row = judge(replace(entry, teacher=replace(entry.teacher, samples=None)), min_gap=Decimal(1))
    assert (row.status, row.note) == ("ok", "no interval, because per-sample values are missing")


def test_the_first_of_several_statuses_is_shown() -> None:
    """Troubles are added from the last in the order to the first; each one takes over from the one before."""
    names = [f"d{i:04}" for i in range(100)]
    after = sampled(hits(60, 100))
    noisy = [0.0, *hits(54, 99)]
    steps = [
        ("low_gap", sampled(hits(50, 100)), sampled(noisy)),
        ("teacher_not_better", sampled(hits(50, 100)), sampled(hits(50, 100))),
        ("partial", sampled(hits(50, 100)), sampled(hits(50, 99), names=names[:99])),
        ("mismatch", sampled(hits(50, 100)), sampled(hits(50, 99), names=names[:99], version=2)),
        ("mismatch", sampled(hits(50, 100)), sampled(hits(50, 99), names=[f"x{i}" for i in range(99)])),
        ("non_finite", Figure(Decimal("NaN"), identity=IDENTITY), sampled(hits(50, 99), names=names[:99], version=2)),
        ("missing", Figure(Decimal("NaN"), identity=IDENTITY), Figure(None)),
    ]
    for status, before, teacher in steps:
        assert judge(entry_of(before, after, teacher), min_gap=Decimal(1)).status == status


# ----------------------------------------------------------------------------------------------- pooled and controls


def test_pooled_is_the_sum_of_gains_over_the_sum_of_gaps_of_ok_rows() -> None:
    scores = [("a", "10", "15", "20"), ("b", "10", "11", "50"), ("c", "50", "99", "50"), ("d", "1", "2", None)]
    table = recover([Entry(name, *map(plain, rest)) for name, *rest in scores])
    assert (table.pooled.gain, table.pooled.gap, table.pooled.n_ok) == (Decimal(6), Decimal(50), 2)
    assert table.pooled.recovery_pct == Decimal("12.0")
    assert table.pooled.excluded == (("c", "teacher_not_better"), ("d", "missing"))


def test_without_an_ok_row_there_is_no_pooled_figure() -> None:
    table = recover([Entry("c", plain("50"), plain("99"), plain("50"), (plain("60"),))], control_names=["merge"])
    assert (table.pooled.recovery_pct, table.pooled.gain, table.pooled.gap, table.pooled.n_ok) == (None, None, None, 0)
    assert table.controls[0].after_minus_control is None


def test_a_control_is_measured_on_the_same_ok_rows() -> None:
    entries = [
        Entry("a", plain("10"), plain("18"), plain("20"), (plain("15"),)),
        Entry("b", plain("30"), plain("25"), plain("20"), (plain("29"),), higher_is_better=False),
        Entry("c", plain("50"), plain("99"), plain("50"), (plain("0"),)),
    ]
    control = recover(entries, control_names=["merge"]).controls[0]
    assert control.recovery_pct == Decimal("30.0")  # (5 + 1) / (10 + 10)
    assert control.after_minus_control == Decimal("3.50")  # (3 + 4) / 2


def test_a_control_that_lacks_an_ok_row_has_no_figure_and_says_why() -> None:
    entries = [
        Entry("a", plain("10"), plain("18"), plain("20"), (plain("15"),)),
        Entry("b", plain("10"), plain("18"), plain("20"), (plain(None),)),
    ]
    table = recover(entries, control_names=["merge"])
    assert (table.controls[0].recovery_pct, table.controls[0].after_minus_control) == (None, None)
    assert table.notes == ("control merge: no figure, because b is missing there (merge: empty cell)",)


# --------------------------------------------------------------------------------------------------------- intervals


def graded(n: int, seed: int) -> list[Entry]:
    rng = random.Random(seed)
    base = [rng.uniform(0, 60) for _ in range(n)]
    after = [b + rng.uniform(0, 30) for b in base]
    teacher = [b + rng.uniform(5, 35) for b in base]
    control = [b + rng.uniform(-5, 20) for b in base]
    return [entry_of(sampled(base), sampled(after), sampled(teacher), sampled(control))]


def test_the_gain_interval_agrees_with_the_closed_form_standard_error() -> None:
    entries = graded(400, seed=1)
    row = with_intervals(entries, ["merge"], resamples=10_000).rows[0]
    before, after = paired_values([entries[0].before, entries[0].after]) or ((), ())
    d = [a - b for a, b in zip(after, before, strict=True)]
    mean = math.fsum(d) / 400
    stderr = math.sqrt(math.fsum((x - mean) ** 2 for x in d) / 399 / 400)
    assert row.gain_ci is not None
    low, high = map(float, row.gain_ci)
    assert low == pytest.approx(mean - 1.96 * stderr, abs=0.08 * stderr + 0.005)
    assert high == pytest.approx(mean + 1.96 * stderr, abs=0.08 * stderr + 0.005)


def test_the_recovery_interval_agrees_with_the_delta_method() -> None:
    entries = graded(400, seed=2)
    row = with_intervals(entries, ["merge"], resamples=10_000).rows[0]
    before, after, teacher = paired_values([entries[0].before, entries[0].after, entries[0].teacher]) or ((), (), ())
    gap = math.fsum(teacher) / 400 - math.fsum(before) / 400
    ratio = (math.fsum(after) / 400 - math.fsum(before) / 400) / gap
    residuals = [(a - b) - ratio * (t - b) for b, a, t in zip(before, after, teacher, strict=True)]
    stderr = 100 * math.sqrt(math.fsum(r * r for r in residuals) / 399 / 400) / gap
    assert row.ci is not None
    low, high = map(float, row.ci)
    assert low == pytest.approx(100 * ratio - 1.96 * stderr, abs=0.15 * stderr + 0.05)
    assert high == pytest.approx(100 * ratio + 1.96 * stderr, abs=0.15 * stderr + 0.05)


def test_pairing_by_document_removes_what_the_models_share() -> None:
    """after = before + 10 on every document: the gain is 10 in every resample, however much documents differ."""
    rng = random.Random(3)
    base = [rng.uniform(0, 80) for _ in range(50)]
    entry = entry_of(sampled(base), sampled([b + 10 for b in base]), sampled([b + 20 for b in base]))
    table = with_intervals([entry])
    assert table.rows[0].gain_ci == (Decimal("10.00"), Decimal("10.00"))
    assert table.rows[0].ci == table.pooled.ci == (Decimal("50.0"), Decimal("50.0"))


def test_the_control_interval_is_paired_too() -> None:
    rng = random.Random(4)
    base = [rng.uniform(0, 80) for _ in range(50)]
    sides = [sampled([b + shift for b in base]) for shift in (0, 10, 20, 7)]
    control = with_intervals([entry_of(*sides)], ["merge"]).controls[0]
    assert (control.recovery_pct, control.after_minus_control) == (Decimal("35.0"), Decimal("3.00"))
    assert control.ci == (Decimal("3.00"), Decimal("3.00"))


def test_intervals_are_those_of_the_mirrored_metric() -> None:
    entries = graded(80, seed=5)

    def mirrored(figure: Figure) -> Figure:
        return sampled([100 - (v or 0) for v in (figure.samples or {}).values()])

    e = entries[0]
    sides = (mirrored(e.before), mirrored(e.after), mirrored(e.teacher), mirrored(e.controls[0]))
    down = [replace(entry_of(*sides), higher_is_better=False)]
    up, turned = with_intervals(entries, ["merge"]), with_intervals(down, ["merge"])
    assert up.rows[0].ci == turned.rows[0].ci
    assert up.rows[0].gain_ci == turned.rows[0].gain_ci
    assert up.pooled.ci == turned.pooled.ci
    assert up.controls == turned.controls


def test_a_rows_interval_depends_on_the_seed_but_not_on_other_rows_or_the_order_of_documents() -> None:
    entry = replace(graded(60, seed=6)[0], controls=())
    other = replace(graded(60, seed=7)[0], controls=(), benchmark="ifeval")
    shuffled = replace(
        entry, before=replace(entry.before, samples=dict(reversed((entry.before.samples or {}).items())))
    )
    alone = with_intervals([entry]).rows[0]
    assert with_intervals([other, entry]).rows[1] == alone
    assert with_intervals([shuffled]).rows[0] == alone
    assert with_intervals([entry], seed=1).rows[0].ci != alone.ci


def test_no_interval_where_more_than_5_percent_of_the_resamples_have_no_gap() -> None:
    import numpy as np

    from mopdctl.evals.bootstrap import ratio_interval

    gains = np.full(100, 5.0)
    gaps = np.full(100, 10.0)
    gaps[:5] = -10.0
    assert ratio_interval(gains, gaps) == (Decimal("50.0"), Decimal("50.0"))
    gaps[5] = 0.0
    assert ratio_interval(gains, gaps) is None


def test_rows_without_recovery_still_have_the_interval_of_the_gain() -> None:
    rng = random.Random(8)
    base = [rng.uniform(0, 80) for _ in range(50)]
    better = sampled([b + 10 for b in base])
    names = [f"d{i:04}" for i in range(40)]
    ten = (Decimal("10.00"), Decimal("10.00"))
    for teacher, status, expected in [
        (sampled(base), "teacher_not_better", ten),
        (sampled([b + 20 for b in base][:40], names=names), "partial", ten),
        (Figure(None), "missing", ten),
        (sampled([b + 20 for b in base], version=2), "mismatch", ten),
    ]:
        row = with_intervals([entry_of(sampled(base), better, teacher)]).rows[0]
        assert (row.status, row.ci, row.gain_ci) == (status, None, expected)
    row = with_intervals([entry_of(sampled(base, version=2), better, sampled(base, version=2))]).rows[0]
    assert (row.status, row.gain_ci) == ("mismatch", None)


def test_a_score_that_is_not_the_mean_of_its_documents_has_no_interval() -> None:
    entry = clear_entry()
    corpus = replace(entry, after=replace(entry.after, score=Decimal("61.5")))
    table = with_intervals([corpus])
    row = table.rows[0]
    assert (row.status, row.recovery_pct, row.ci, row.gain_ci) == ("ok", Decimal("83.0"), None, None)
    assert row.note == "no interval, because the score is not the mean of its documents"
    assert table.pooled.ci is None
    assert table.notes == ("no pooled intervals, because these rows have none: gsm8k",)


def test_the_table_loads_without_heavy_libraries() -> None:
    heavy = {"torch", "transformers", "datasets", "lm_eval", "polars", "numpy", "pydantic", "vllm"}
    code = (
        "import sys; from mopdctl.evals import csvtable, pairing, recovery, report, scores\n"
        f"print(sorted({heavy} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
