"""The frame of the benches, on costs that are written down instead of measured."""

import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mopdctl.bench import frame
from mopdctl.bench.__main__ import main
from mopdctl.bench.frame import Bar, Bench, Case
from mopdctl.errors import MopdctlError


def costs(side: str, figures: list[float], calls: list[str]) -> Callable[[], float]:
    remaining = iter(figures)

    def run() -> float:
        calls.append(side)
        return next(remaining)

    return run


def case(bar: Bar, *, ours: list[float], rival: list[float], calls: list[str] | None = None) -> Case:
    calls = [] if calls is None else calls
    return Case("parse", "s", costs("ours", ours, calls), costs("rival", rival, calls), bar)


def bench(bar: Bar, *, ours: list[float], rival: list[float]) -> dict[str, Callable[[], Bench]]:
    return {"fake": lambda: Bench([case(bar, ours=ours, rival=rival)], {"rivalry": "1.0"})}


def test_figures_are_medians_without_the_first_run() -> None:
    # ours: median of 1, 9, 2 is 2; rival: median of 6, 5, 60 is 6; the first run (100) does not count
    row = frame.measure(case(Bar(ours_at_most=2.0), ours=[100, 1, 9, 2], rival=[100, 6, 5, 60]), runs=3)
    assert (row.ours, row.rival, row.ratio) == (2, 6, 3.0)


def test_sides_run_in_turn() -> None:
    calls: list[str] = []
    frame.measure(case(Bar(ours_at_most=1.0), ours=[1] * 3, rival=[1] * 3, calls=calls), runs=2)
    assert calls == ["ours", "rival"] * 3


@pytest.mark.parametrize(
    ("bar", "holds"),
    [
        (Bar(ours_at_most=2.0), True),
        (Bar(ours_at_most=1.9), False),
        (Bar(ratio_at_least=3.0), True),
        (Bar(ratio_at_least=3.1), False),
        (Bar(ours_at_most=2.0, ratio_at_least=3.1), False),
        (Bar(ours_at_most=1.9, ratio_at_least=3.0), False),
    ],
)
def test_bar_holds_where_it_is_reached_or_touched(bar: Bar, holds: bool) -> None:
    assert frame.measure(case(bar, ours=[2, 2], rival=[6, 6]), runs=1).holds is holds


def test_run_without_a_cost_is_an_error() -> None:
    with pytest.raises(MopdctlError, match="measured 0 and 1 s"):
        frame.measure(case(Bar(ours_at_most=1.0), ours=[0], rival=[1]), runs=1)


def test_json_is_one_document_with_the_agreed_keys(capsys: pytest.CaptureFixture[str]) -> None:
    fake = bench(Bar(ours_at_most=2.0, ratio_at_least=1.0), ours=[2, 2], rival=[6, 6])
    assert main(["fake", "--json"], benches=fake, runs=1) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["rows"] == [
        {
            "case": "parse",
            "ours": 2,
            "rival": 6,
            "unit": "s",
            "ratio": 3.0,
            "bar": "ours <= 2 s, ratio >= 1",
            "holds": True,
        }
    ]
    assert sorted(document) == ["machine", "rows", "versions"]
    assert document["versions"]["rival"] == {"rivalry": "1.0"}
    assert "mopdctl" in document["versions"]["ours"]
    assert document["machine"]["cores"] >= 1


def test_table_goes_to_stdout_and_progress_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fake"], benches=bench(Bar(ours_at_most=2.0), ours=[2, 2], rival=[6, 6]), runs=1) == 0
    output = capsys.readouterr()
    head, row = output.out.split("\n")[:2]
    assert head.split() == ["case", "ours", "rival", "unit", "ratio", "bar", "holds"]
    assert row.split() == ["parse", "2", "6", "s", "3.00", "ours", "<=", "2", "s", "yes"]
    assert output.err == "parse: run 1/1: ours 2 s, rival 6 s\n"


def test_missed_bar_exits_3_and_still_prints_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fake", "--json"], benches=bench(Bar(ours_at_most=1.0), ours=[2, 2], rival=[6, 6]), runs=1) == 3
    output = capsys.readouterr()
    assert json.loads(output.out)["rows"][0]["holds"] is False
    assert output.err.split("\n")[-2] == "error: bench fake: bar missed by parse (ours <= 1 s)"


def test_unknown_bench_exits_2_and_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fast"], benches=bench(Bar(ours_at_most=1.0), ours=[], rival=[])) == 2
    assert capsys.readouterr().err == "error: no bench 'fast'; there are: fake\n"


def test_bar_without_a_limit_cannot_be_written() -> None:
    with pytest.raises(AssertionError):
        Bar()


def test_case_without_a_bar_is_shown_and_holds() -> None:
    shown = frame.measure(Case("parse", "s", lambda: 6, lambda: 3, bar=None), runs=1)
    assert (shown.ratio, shown.bar, shown.holds) == (0.5, "none", True)


@pytest.mark.parametrize(("runs", "measured"), [(1, 1), (7, 2)])
def test_case_may_want_fewer_runs(runs: int, measured: int) -> None:
    calls: list[str] = []
    frame.measure(
        Case("parse", "s", costs("ours", [1] * 8, calls), costs("rival", [1] * 8, calls), bar=None, max_runs=2),
        runs=runs,
    )
    assert calls == ["ours", "rival"] * (1 + measured)


def test_what_a_bench_holds_goes_after_the_last_case() -> None:
    calls: list[str] = []
    held = Bench([case(Bar(ours_at_most=1), ours=[1] * 2, rival=[1] * 2, calls=calls)], {})
    held.held.callback(calls.append, "gone")
    frame.report(held, runs=1)
    assert calls == ["ours", "rival"] * 2 + ["gone"]


def test_spent_is_of_the_command_and_not_of_who_runs_it() -> None:
    mebibytes = bytearray(64 << 20)  # of ours
    found = frame.spent([sys.executable, "-S", "-c", "import time; time.sleep(0.2)"], cores=1)
    assert found.wall_s >= 0.2
    assert 1 << 20 < found.peak_bytes < len(mebibytes)
    program = "import os; x = b'1' * (96 << 20); assert len(os.sched_getaffinity(0)) == 1"
    assert frame.spent([sys.executable, "-S", "-c", program], cores=1).peak_bytes > 96 << 20


def test_failing_command_that_is_measured_is_an_error() -> None:
    with pytest.raises(MopdctlError, match=r"^`\S*python\S* -S -c .*` ended with 5: no such thing"):
        frame.spent(
            [sys.executable, "-S", "-c", "import sys; print('no such thing', file=sys.stderr); sys.exit(5)"], cores=1
        )


def test_cpu_seconds_counts_work_and_not_sleep() -> None:
    asleep = frame.cpu_seconds([sys.executable, "-S", "-c", "import time; time.sleep(0.3)"])
    work = "import time\nwhile time.process_time() < 0.3: pass"
    assert frame.cpu_seconds([sys.executable, "-S", "-c", work]) >= 0.3
    assert 0 < asleep < 0.3


def test_cpu_seconds_of_a_failing_command_is_an_error() -> None:
    with pytest.raises(MopdctlError, match="ended with 5: no such thing"):
        frame.cpu_seconds([sys.executable, "-c", "import sys; print('no such thing', file=sys.stderr); sys.exit(5)"])


def tiny_wheel(folder: Path) -> Path:
    path = folder / "rivalry-1.5-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        info = "rivalry-1.5.dist-info"
        wheel.writestr("rivalry.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: rivalry\nVersion: 1.5\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.slow
def test_rival_environment_is_made_once_and_again_only_when_cut_short(tmp_path: Path) -> None:
    pins = [str(tiny_wheel(tmp_path))]

    def make() -> frame.Environment:
        return frame.rival_environment(
            "tiny", pins, report_versions=["rivalry", "pytest"], share_ours=True, cache=tmp_path / "cache"
        )

    first = make()
    assert first.versions == {"rivalry": "1.5", "pytest": pytest.__version__}  # its own, and ours through the link
    (first.folder / "seen").touch()
    assert make() == first
    assert (first.folder / "seen").exists()
    (first.folder / "complete.json").unlink()
    assert make() == first
    assert not (first.folder / "seen").exists()


@pytest.mark.slow
def test_rival_that_cannot_be_installed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MopdctlError, match="pip install"):
        frame.rival_environment(
            "none", [str(tmp_path / "missing.whl")], report_versions=[], share_ours=False, cache=tmp_path
        )
