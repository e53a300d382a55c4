"""The report of `mopdctl overlap` for a terminal."""

from collections.abc import Sequence
from typing import Any

_ROWS = {
    "top_k_overlap": ("top-{k} overlap", 100, "%"),
    "student_mass": ("student mass in the teacher's top-{k}", 100, "%"),
    "teacher_mass": ("teacher mass in the student's top-{k}", 100, "%"),
    "impossible_share": ("tokens with p_teacher < {impossible:g}", 100, "%"),
    "kl_reverse_nats": ("KL(student || teacher)", 1, "nats"),
    "kl_forward_nats": ("KL(teacher || student)", 1, "nats"),
    "student_entropy_nats": ("entropy of the student", 1, "nats"),
    "teacher_entropy_nats": ("entropy of the teacher", 1, "nats"),
    "entropy_gap_nats": ("entropy gap, student - teacher", 1, "nats"),
    "advantage_nats": ("advantage, log p_teacher - log p_student", 1, "nats"),
    "repeated_share": ("tokens that repeat a {ngram}-gram", 100, "%"),
    "truncated_share": ("answers cut off", 100, "%"),
}
"""Figure to its label, what it is multiplied with, and its unit."""


def to_text(document: dict[str, Any]) -> str:
    """The report as aligned tables, the advice below them."""
    settings, zero = document["settings"], document["zero_test"]
    words = {
        "k": settings["top_k"],
        "impossible": settings["impossible_below"],
        "ngram": settings["repeated_ngram"],
    }
    teachers: dict[str, dict[str, Any]] = document["teachers"]
    lines = [
        f"student {_plain(document['student']['model'])}, its own answers at temperature {settings['temperature']:g} "
        f"({document['rollouts']['answers']}, of them {document['rollouts']['new']} new)",
        "",
        *_table(["", *map(_plain, teachers)], [*_counts(teachers), *_figures(teachers, words), *_passes(teachers)]),
        "",
        *_table(["advantage by prefix length, nats", *map(_plain, teachers)], _by_prefix(teachers)),
        "",
        "a figure is a mean over the student's tokens (answers, prompts), +- its standard error over prompts",
    ]
    verdict = "nothing differs" if zero["exact"] else f"FAILED, KL up to {zero['kl_nats']:g} nats"
    lines.append(f"zero test: student against {_plain(zero['against'])}: {verdict} ({zero['tokens']} tokens)")
    lines += [f"{_plain(alias)}: not measured, {why}" for alias, why in document["not_measured"].items()]
    if "candidates" in document:
        lines += ["", *_candidates(document["candidates"])]
    lines.append("")
    for alias, one in teachers.items():
        lines.append(f"advice for {_plain(alias)}: {one['advice']['choice']} - {one['advice']['reason']}")
    advice = document["advice"]
    lines.append(f"advice: {advice['choice']} - {_plain(advice['reason'])}")
    lines.append(f"that is {_plain(advice['how'])}")
    return "\n".join(lines)


def _counts(teachers: dict[str, dict[str, Any]]) -> list[list[str]]:
    return [[name, *(str(one[name]) for one in teachers.values())] for name in ("prompts", "answers", "tokens")]


def _figures(teachers: dict[str, dict[str, Any]], words: dict[str, Any]) -> list[list[str]]:
    return [
        [f"{label.format(**words)}, {unit}", *(_estimate(one["figures"][name], scale) for one in teachers.values())]
        for name, (label, scale, unit) in _ROWS.items()
    ]


def _by_prefix(teachers: dict[str, dict[str, Any]]) -> list[list[str]]:
    bins = sorted({(one_bin["begin"], one_bin["end"]) for one in teachers.values() for one_bin in one["by_prefix"]})
    found = {
        alias: {one_bin["begin"]: one_bin["advantage_nats"] for one_bin in one["by_prefix"]}
        for alias, one in teachers.items()
    }
    return [
        [
            str(begin) if end == begin + 1 else f"{begin}-{end - 1}",
            *(_estimate(by_begin.get(begin), 1) for by_begin in found.values()),
        ]
        for begin, end in bins
    ]


def _passes(teachers: dict[str, dict[str, Any]]) -> list[list[str]]:
    own = [one["student"] for one in teachers.values()]
    rows = [["student pass@1, %", *(_estimate(one["pass_at_1"], 100) for one in own)]]
    k = own[0]["k"]
    if k > 1:
        rows.append([f"student pass@{k}, %", *(_estimate(one["pass_at_k"], 100) for one in own)])
    rows.append(["student, greedy score", *(_score(one["greedy_score"]) for one in own)])
    rows.append(["teacher, greedy score", *(_score(one["teacher"]["greedy_score"]) for one in teachers.values())])
    return rows


def _candidates(found: dict[str, Any]) -> list[str]:
    header = ["candidate", "support rank", "score rank", "student mass, %", "KL, nats", "greedy score", "advice"]
    rows = [
        [
            _plain(alias),
            str(one["support_rank"]),
            "-" if one["score_rank"] is None else str(one["score_rank"]),
            _estimate(one["figures"]["student_mass"], 100),
            _estimate(one["figures"]["kl_reverse_nats"], 1),
            _score(one["teacher"]["greedy_score"]),
            one["advice"]["choice"],
        ]
        for alias, one in found["models"].items()
    ]
    return [
        f"candidates for domain {_plain(found['domain'])}",
        *_table(header, rows),
        f"suggested: {_plain(found['suggested'])} - {_plain(found['reason'])}",
    ]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    rule = ["-" * width for width in widths]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join([first, *rest]).rstrip()

    return [line(cells) for cells in (header, rule, *rows)]


def _estimate(found: dict[str, Any] | None, scale: float) -> str:
    if found is None:
        return "-"
    places = 1 if scale == 100 else 3
    error = "" if found["stderr"] is None else f" +- {scale * found['stderr']:.{places}f}"
    return f"{round(scale * found['mean'], places) + 0.0:.{places}f}{error}"  # never -0.0


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _plain(text: str) -> str:
    """Text from files without what could move a cursor or break a row."""
    return "".join(c if c.isprintable() else "?" for c in text)
