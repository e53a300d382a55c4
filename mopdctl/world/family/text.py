"""The results as Markdown tables."""

from typing import Any

from mopdctl.world.domains import DOMAINS


def to_markdown(document: dict[str, Any]) -> str:
    """Arms of the base setting, steps to the teacher, and the advice by setting."""
    seeds = [seed["seed"] for seed in document["seeds"]]
    prompts = document["scale"]["scored_prompts"]
    summary = document["summary"]
    lines = [
        f"Seeds {', '.join(map(str, seeds))}; greedy answers to {prompts} dev prompts of each domain. Recovery is "
        "pooled over the domains whose teacher leads, +- its standard error over prompts (paired) and seeds.",
        "",
        *_table(
            ["arm", "what", "recovery, %", *DOMAINS, "s"],
            [_arm(name, found, document) for name, found in summary["arms"].items()],
        ),
    ]
    if summary["steps_to_teacher"]:
        shares = list(next(iter(summary["steps_to_teacher"].values())))
        rows = [
            [arm, *(", ".join("-" if step is None else str(step) for step in found[share]) for share in shares)]
            for arm, found in summary["steps_to_teacher"].items()
        ]
        lines += ["", "Steps, by seed, until the student had so much of its teachers' lead (- never):", ""]
        lines += _table(["arm", *(f"{share} %" for share in shares)], rows)
    told = {name: one for name, one in summary["advice"].items() if one}
    if told:
        right = sum(one["right"] for one in told.values())
        lines += ["", f"The advice, given before training, was right in {right} of {len(told)} settings:", ""]
        arms = list(next(iter(told.values()))["recovery"])
        header = ["setting", "what", *(f"{arm}, %" for arm in arms), "advised", "best", "lost, %", "right"]
        lines += _table(header, [_advice(name, one, arms, document) for name, one in told.items()])
    if document["pending"] or document["failed"]:
        lines += ["", f"Not there: {len(document['pending'])} stages pending, {len(document['failed'])} failed."]
    return "\n".join(lines)


def _arm(name: str, found: dict[str, Any] | None, document: dict[str, Any]) -> list[str]:
    what = "the student" if name == "none" else document["arms"][name]["what"]
    if found is None:
        return [name, what, *["-"] * (len(DOMAINS) + 2)]
    scores = [f"{found['scores'][domain]:.1f}" for domain in DOMAINS]
    return [
        name,
        what,
        _figure(found["recovery"]),
        *scores,
        "-" if found["seconds"] is None else f"{found['seconds']:.0f}",
    ]


def _advice(name: str, found: dict[str, Any], arms: list[str], document: dict[str, Any]) -> list[str]:
    advised = list(dict.fromkeys(found["advised"]))
    return [
        name,
        document["settings"][name]["what"],
        *(_figure(found["recovery"][arm]) for arm in arms),
        ", ".join(f"{arm} x{found['advised'].count(arm)}" if len(advised) > 1 else arm for arm in advised),
        found["best"],
        _figure(found["regret"]),
        "yes" if found["right"] else "no",
    ]


def _figure(figure: dict[str, Any] | None) -> str:
    if figure is None:
        return "-"
    return f"{figure['pct']:.1f} +- {figure['stderr_pct']:.1f}"


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
