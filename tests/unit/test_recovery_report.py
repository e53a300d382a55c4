# ruff: noqa: E501 - a terminal table is as wide as it is
import csv
import json
import re
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from mopdctl.evals.csvtable import read_table
from mopdctl.evals.recovery import Control, Entry, Figure, Row, Table, recover
from mopdctl.evals.report import to_json, to_markdown, to_text

GOLDEN = Path(__file__).parent.parent / "golden" / "recovery"
SHIPPED = Path(__file__).parent.parent.parent / "sample_data" / "recovery"
ROW_KEYS = [
    "benchmark", "domain", "teacher_id", "metric", "n", "before", "after", "teacher", "gain", "gap",
    "after_minus_teacher", "recovery_pct", "ci_low", "ci_high", "gain_ci_low", "gain_ci_high", "status", "note",
]  # fmt: skip


def nemotron(**columns: object) -> list[Entry]:
    arguments = {"before": "rlvr", "after": "mopd2", "teacher": "teacher"} | columns
    return read_table(GOLDEN / "nemotron_3_ultra_table5.csv", **arguments)  # type: ignore[arg-type]


def mimo() -> Table:
    return recover(read_table(GOLDEN / "mimo_v2_flash_table7.csv", before="before", after="after", teacher="teacher"))


def golden_rows(name: str) -> list[dict[str, str]]:
    lines = (GOLDEN / name).read_text("utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def evaluated() -> Table:
    """One ok row with intervals and a control, one without a teacher."""
    entries = [
        Entry(
            "gsm8k",
            *(Figure(Decimal(x), n=500) for x in ("20", "60", "70")),
            (Figure(Decimal("50")),),
            metric="em,none",
        ),
        Entry("a|b\x1b[2J", Figure(Decimal("20.25")), Figure(Decimal("21")), Figure(None, reason="no evaluation 'x'")),
    ]
    entries[1] = replace(entries[1], controls=(Figure(None),))
    table = recover(entries, control_names=["merge"], notes=["not claimed by a teacher: mmlu"])
    ci, gain_ci = (Decimal("71.0"), Decimal("88.5")), (Decimal("36.10"), Decimal("43.90"))
    return replace(
        table,
        rows=(replace(table.rows[0], ci=ci, gain_ci=gain_ci), table.rows[1]),
        pooled=replace(table.pooled, ci=ci),
        controls=(replace(table.controls[0], ci=(Decimal("4.00"), Decimal("16.00"))),),
    )


def test_every_printed_recovery_of_the_nemotron_table_to_the_last_digit() -> None:
    printed = [row["recovery_printed"] for row in golden_rows("nemotron_3_ultra_table5.csv")]
    table = recover(nemotron())
    assert [str(row.recovery_pct) for row in table.rows] == printed
    assert [row.status for row in table.rows] == ["ok"] * 11
    assert (table.pooled.gain, table.pooled.gap, str(table.pooled.recovery_pct)) == (
        Decimal("102.8"),
        Decimal("131.9"),
        "77.9",
    )
    for shown in (to_text(table), to_markdown(table)):
        for row in golden_rows("nemotron_3_ultra_table5.csv"):
            line = next(line for line in shown.split("\n") if row["benchmark"] in line)
            assert re.search(rf"(?<![\d.+-]){re.escape(row['recovery_printed'])}(?![\d.])", line)


def test_the_mimo_rows_whose_teacher_equals_before_have_no_percentage() -> None:
    table = mimo()
    equal = [row for row in table.rows if row.teacher == row.before]
    assert [row.benchmark for row in equal] == [
        "MMLU-Pro",
        "GPQA-Diamond",
        "HLE",
        "Arena-Hard hard prompts",
        "Arena-Hard creative",
    ]
    assert {(row.status, row.recovery_pct) for row in equal} == {("teacher_not_better", None)}
    assert [str(row.after_minus_teacher) for row in equal] == ["0.2", "-0.6", "0.9", "4.1", "-3.9"]
    others = {row.benchmark: str(row.recovery_pct) for row in table.rows if row not in equal}
    assert others == {
        "AIME25": "104.3",
        "HMMT": "131.6",
        "LiveCodeBench": "111.8",
        "SWE-Bench Verified": "87.5",
        "Tau2": "118.9",
        "Tau2 Telecom": "113.0",
        "BrowseComp": "31.5",
    }
    assert "%" not in to_text(table).split("\n")[5]  # a row, not a heading or the pooled line


def test_the_shipped_tables_are_the_golden_ones() -> None:
    for path in GOLDEN.glob("*.csv"):
        assert (SHIPPED / path.name).read_bytes() == path.read_bytes()


def test_a_control_column() -> None:
    table = recover(nemotron(controls=["mopd1"]), control_names=["mopd1"])
    control = table.controls[0]
    gains = [Decimal(row["mopd1"]) - Decimal(row["rlvr"]) for row in golden_rows("nemotron_3_ultra_table5.csv")]
    assert sum(gains) == Decimal("89.1")
    assert (str(control.recovery_pct), str(control.after_minus_control)) == ("67.6", "1.25")


def test_json_has_the_keys_that_were_promised_and_null_for_what_is_absent() -> None:
    document = to_json(evaluated())
    assert list(document) == ["schema", "rows", "pooled", "controls", "notes"]
    assert document["schema"] == "mopdctl.recovery/1"
    first, second = document["rows"]
    assert list(first) == ROW_KEYS
    assert first == {
        "benchmark": "gsm8k", "domain": None, "teacher_id": None, "metric": "em,none", "n": 500,
        "before": 20.0, "after": 60.0, "teacher": 70.0, "gain": 40.0, "gap": 50.0, "after_minus_teacher": -10.0,
        "recovery_pct": 80.0, "ci_low": 71.0, "ci_high": 88.5, "gain_ci_low": 36.1, "gain_ci_high": 43.9,
        "status": "ok", "note": None,
    }  # fmt: skip
    assert [second[key] for key in ("teacher", "gap", "after_minus_teacher", "recovery_pct", "ci_low")] == [None] * 5
    assert (second["gain"], second["status"], second["note"]) == (0.75, "missing", "teacher: no evaluation 'x'")
    assert document["pooled"] == {
        "recovery_pct": 80.0, "ci_low": 71.0, "ci_high": 88.5, "gain": 40.0, "gap": 50.0, "n_ok": 1,
        "excluded": ["a|b\x1b[2J"],
    }  # fmt: skip
    assert document["controls"] == [
        {"name": "merge", "recovery_pct": 60.0, "after_minus_control": 10.0, "ci_low": 4.0, "ci_high": 16.0}
    ]
    assert document["notes"] == ["not claimed by a teacher: mmlu"]
    json.dumps(document, allow_nan=False)


def test_the_terminal_table_to_the_letter() -> None:
    assert to_text(evaluated()) == (
        "benchmark  metric     n  before  after  teacher    gain        gain 95%     gap    lead  recovery %  recovery 95%  status\n"
        "---------  -------  ---  ------  -----  -------  ------  --------------  ------  ------  ----------  ------------  -------\n"
        "gsm8k      em,none  500   20.00  60.00    70.00  +40.00  [36.10, 43.90]  +50.00  -10.00        80.0  [71.0, 88.5]  ok\n"
        "a|b?[2J    -          -   20.25  21.00        -   +0.75               -       -       -           -             -  missing\n"
        "\n"
        "gain = after - before, gap = teacher - before, lead = after - teacher, all in points; a positive one is good.\n"
        "pooled recovery: 80.0 % [71.0, 88.5] (gain +40.00 over gap +50.00; ok rows: 1)\n"
        "not in the pooled figure: a|b?[2J (missing)\n"
        "control merge: pooled recovery 60.0 %, after - merge +10.00 points [4.00, 16.00]\n"
        "a|b?[2J: teacher: no evaluation 'x'\n"
        "not claimed by a teacher: mmlu"
    )


def test_markdown_keeps_its_columns_whatever_the_names_hold() -> None:
    lines = to_markdown(evaluated()).split("\n")
    assert lines[1] == "| :--- | :--- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | :--- |"
    assert lines[3].startswith("| a\\|b?[2J | - | - | 20.25 | 21.00 | - |")
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines[:4]} == {14}
    assert lines[-1] == "- not claimed by a teacher: mmlu"


def test_no_ok_row_and_no_control_figure_are_said() -> None:
    entry = Entry("x", *(Figure(Decimal(50)) for _ in range(3)), (Figure(None),))
    shown = to_text(recover([entry], control_names=["merge"]))
    assert "pooled recovery: none, because no row is ok" in shown
    assert "control merge: no figure" in shown


@pytest.mark.parametrize("show", [to_text, to_markdown, lambda table: json.dumps(to_json(table))])
def test_the_same_input_gives_the_same_bytes(show) -> None:  # type: ignore[no-untyped-def]
    assert show(mimo()) == show(mimo())
    assert show(evaluated()) == show(evaluated())


def test_scores_with_two_decimals_are_shown_with_two() -> None:
    assert "| +0.0 |" in to_markdown(mimo())
    table = recover([Entry("x", *(Figure(Decimal(s)) for s in ("50.25", "60", "70")))])
    assert "| x | 50.25 | 60.00 | 70.00 | +9.75 | +19.75 | -10.00 | 49.4 | ok |" in to_markdown(table)


def test_row_and_control_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Control("merge", None, None).name = "other"  # type: ignore[misc]
    assert Row.__slots__
