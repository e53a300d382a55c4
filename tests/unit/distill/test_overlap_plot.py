"""The picture and the table of a report."""

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from mopdctl.distill.overlap.plot import to_svg
from mopdctl.distill.overlap.report import to_text

NASTY = "a<b>&\"'</text><script>alert(1)</script>\x1b[31m\u202e"
SVG = "{http://www.w3.org/2000/svg}"


def estimate(mean: float, stderr: float | None = 0.01) -> dict[str, float | None]:
    return {"mean": mean, "stderr": stderr}


def teacher(overlap: float = 0.5, advantage: float = -1.0, bins: int = 3) -> dict[str, Any]:
    shares = ("top_k_overlap", "student_mass", "teacher_mass", "impossible_share", "repeated_share", "truncated_share")
    nats = ("kl_reverse", "kl_forward", "student_entropy", "teacher_entropy", "entropy_gap", "advantage")
    return {
        "prompts": 2,
        "answers": 4,
        "tokens": 30,
        "figures": {name: estimate(overlap) for name in shares} | {f"{n}_nats": estimate(-1e-9) for n in nats},
        "by_prefix": [
            {
                "begin": (0, 1, 2, 4, 8)[i],
                "end": (1, 2, 4, 8, 16)[i],
                "tokens": 10,
                "advantage_nats": estimate(advantage * i),
                "top_k_overlap": estimate(overlap),
                "kl_reverse_nats": estimate(0.1),
            }
            for i in range(bins)
        ],
        "student": {"pass_at_1": None, "pass_at_k": estimate(0.25), "k": 4, "greedy_score": None},
        "teacher": {"greedy_score": 80.0},
        "advice": {"choice": "exact", "reason": "because"},
    }


def document(**teachers: dict[str, Any]) -> dict[str, Any]:
    return {
        "student": {"model": "student"},
        "rollouts": {"answers": 8, "new": 0},
        "settings": {"top_k": 16, "impossible_below": 1e-4, "repeated_ngram": 4, "temperature": 1.0},
        "zero_test": {"against": "itself", "tokens": 5, "kl_nats": 0.0, "exact": True},
        "teachers": teachers or {"math": teacher(), "code": teacher(0.9, 2.0)},
        "not_measured": {},
        "advice": {"choice": "exact", "reason": "so for every teacher", "how": "objective: exact"},
    }


def drawn(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def test_words_of_the_report_cannot_become_markup() -> None:
    report = document(**{NASTY: teacher()})
    report["student"]["model"] = NASTY
    svg = to_svg(report)
    root = drawn(svg)
    assert not root.findall(f".//{SVG}script")
    assert "\x1b" not in svg
    assert "\u202e" not in svg
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert any(text.startswith('a<b>&"') and text.endswith(": exact") for text in texts)
    assert "\x1b" not in to_text(report)


def test_the_picture_has_title_axes_and_a_legend_with_the_advice() -> None:
    root = drawn(to_svg(document()))
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    for wanted in ("Support overlap of student", "top-16 overlap with the teacher, %", "prefix length, tokens", "2-3"):
        assert wanted in texts
    assert [text for text in texts if text.endswith(": exact")] == ["math: exact", "code: exact"]
    # a circle for each of three bins, in two panels, of two teachers
    assert len(list(root.iter(f"{SVG}circle"))) == 12


def test_values_stand_where_the_axis_says() -> None:
    root = drawn(to_svg(document(math=teacher(0.4, bins=1))))
    height = {
        element.text: float(element.attrib["y"]) - 4
        for element in root.iter(f"{SVG}text")
        if re.fullmatch(r"\d+", element.text or "") and element.attrib.get("text-anchor") == "end"
    }
    first = next(root.iter(f"{SVG}circle"))
    assert float(first.attrib["cy"]) == pytest.approx(height["40"], abs=0.2)


@pytest.mark.parametrize("bins", [1, 5])
@pytest.mark.parametrize("advantage", [0.0, -1e-12, -40.0, 7.3])
def test_every_point_lies_inside_the_picture(advantage: float, bins: int) -> None:
    root = drawn(to_svg(document(**{f"t{i}": teacher(1.0, advantage, bins) for i in range(11)})))
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    for circle in root.iter(f"{SVG}circle"):
        assert 0 <= float(circle.attrib["cx"]) <= width
        assert 0 <= float(circle.attrib["cy"]) <= height
    strokes = {
        (path.attrib["stroke"], path.attrib["stroke-dasharray"])
        for path in root.iter(f"{SVG}path")
        if "stroke" in path.attrib
    }
    assert len(strokes) == 11  # as many looks as teachers


def test_the_table_has_a_column_per_teacher_and_the_advice_below() -> None:
    lines = to_text(document()).split("\n")
    header = next(line for line in lines if "math" in line)
    assert header.split() == ["math", "code"]
    row = next(line for line in lines if line.startswith("top-16 overlap"))
    assert row.split()[-6:] == ["50.0", "+-", "1.0", "90.0", "+-", "1.0"]
    assert "-0.0" not in "\n".join(line for line in lines if line.startswith("KL"))
    assert "student pass@1, %" in next(line for line in lines if line.endswith("-") and "pass@1" in line)
    assert lines[-2:] == ["advice: exact - so for every teacher", "that is objective: exact"]
    assert "zero test: student against itself: nothing differs (5 tokens)" in lines
