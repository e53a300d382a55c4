"""The data set's manifest and its card. Neither holds a time: the same data set gives the same bytes."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from mopdctl import __version__
from mopdctl.config.committee import CommitteeFile
from mopdctl.config.gensft import GenConfig
from mopdctl.files import file_digest, fingerprint
from mopdctl.gensft.filters import RULES
from mopdctl.gensft.plan import Plan
from mopdctl.gensft.report import Quarantine, Report
from mopdctl.gensft.select import DROP_REASONS


def manifest(record: dict[str, Any], report: Report, folder: Path, *, plan: Plan) -> dict[str, Any]:
    """What the data set is made of, its counts and its files' digests. Also writes the seeds' quarantine file."""
    bad = Quarantine(folder / "quarantine")
    for entry in plan.quarantined:
        bad.add("seeds", entry)
    bad.close()
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    reasons = Counter(re.split(r" \(|:", entry["reason"])[0] for entry in plan.quarantined)
    first = {
        "stage": "seeds",
        "in": plan.seeds + len(plan.quarantined),
        "out": plan.seeds,
        "dropped": dict(sorted(reasons.items())),
    }
    costs = [tally.cost_usd for tally in report.members.values()]
    return {
        "schema": "mopdctl.dataset/1",
        "made_by": f"mopdctl {__version__}",
        "name": record["config"]["name"],
        "fingerprint": fingerprint(record),
        "complete": report.complete,
        "rows": report.splits,
        "seeds_read": plan.read,
        "stages": [first, *(stage.document() for stage in report.stages)],
        "domains": dict(sorted(report.domains.items())),
        "shapes": dict(report.shapes.most_common(20)),
        "notes": dict(sorted(report.notes.items())),
        "licenses": [
            {"seed": seed, "generator": generator, "rows": count}
            for (seed, generator), count in sorted(report.licenses.items())
        ],
        "members": {
            alias: {
                "requests": tally.requests,
                "prompt_tokens": tally.prompt_tokens,
                "completion_tokens": tally.completion_tokens,
                "uncounted": tally.uncounted,
                "cost_usd": None if tally.cost_usd is None else round(tally.cost_usd, 6),
            }
            for alias, tally in sorted(report.members.items())
        },
        "cost_usd": None if any(cost is None for cost in costs) else round(sum(filter(None, costs)), 6),
        "judges": report.judges,
        "decontamination": report.decontamination,
        "warnings": report.warnings,
        "files": {str(p.relative_to(folder)): {"bytes": p.stat().st_size, "digest": file_digest(p)} for p in files},
        "record": record,
    }


def card(config: GenConfig, committee: CommitteeFile, document: dict[str, Any]) -> str:
    """The data set's README.md, as the Hugging Face hub reads it."""
    splits = [name for name in ("train", "validation") if document["rows"].get(name)]
    head = [
        "---",
        f"license: {json.dumps(config.write.license or 'other')}",
        "task_categories:",
        "- text-generation",
        "tags:",
        "- synthetic",
        "- sft",
        "- mopdctl",
        "configs:",
        "- config_name: default",
        "  data_files:" + ("" if splits else " []"),
        *(line for s in splits for line in (f"  - split: {s}", f"    path: data/{s}-*")),
        "---",
    ]
    rows = sum(document["rows"].values())
    cost = document["cost_usd"]
    body = [
        f"# {config.name}",
        "",
        f"{rows:,} conversations for supervised fine-tuning, made by `{document['made_by']}` from a committee of "
        "models.",
        "" if document["complete"] else "\n**Not complete**: some answers are missing; the same command goes on.\n",
        "Every row says in its own columns who wrote it, with which settings and seed, under which licence, and what "
        "judges and verifiers said of it. `mopdctl sft`, TRL and other trainers take `messages` and `tools` as they "
        "are.",
        "",
        "## From seeds to rows",
        "",
        _table(
            ["stage", "in", "out", "dropped"],
            [
                [s["stage"], f"{s['in']:,}", f"{s['out']:,}", ", ".join(f"{k} {v:,}" for k, v in s["dropped"].items())]
                for s in document["stages"]
            ],
        ),
        "",
        "What was dropped is in `quarantine/`, with the reason in every entry.",
        "",
        *_rules(document),
        "## Committee",
        "",
        _table(
            ["member", "model", "revision", "outputs' licence", "may train", "requests", "answer tokens", "USD"],
            [
                [
                    alias,
                    committee.members[alias].model,
                    committee.members[alias].revision or "-",
                    committee.members[alias].license or "unknown",
                    {True: "yes", False: "no", None: "unknown"}[committee.members[alias].outputs_may_train],
                    f"{found['requests']:,}",
                    f"{found['completion_tokens']:,}",
                    "unknown" if found["cost_usd"] is None else f"{found['cost_usd']:.4f}",
                ]
                for alias, found in document["members"].items()
            ],
        ),
        "",
        f"Cost: {'unknown, since a price or a token count is' if cost is None else f'{cost:.4f} USD'}.",
        "",
        "## Domains and routes",
        "",
        _table(
            ["domain", "rows", "answered by", "sampling"],
            [[domain, f"{count:,}", *_route(committee, domain)] for domain, count in document["domains"].items()],
        ),
        "",
        "## Licences",
        "",
        _table(
            ["seed", "generator", "rows"],
            [[found["seed"], found["generator"], f"{found['rows']:,}"] for found in document["licenses"]],
        ),
        "",
    ]
    if document["judges"]:
        body += ["## Judges", "", _judges(document), ""]
    if document["decontamination"]:
        body += ["## Decontamination", "", _decontamination(document), ""]
    if document["warnings"]:
        body += ["## Warnings", "", *(f"- {_cell(line)}" for line in document["warnings"]), ""]
    return "\n".join([*head, "", *body])


def _route(committee: CommitteeFile, domain: str) -> list[str]:
    route = committee.route(domain)
    if route is None:
        return ["-", "-"]
    tiers = {"": route.members} if route.members else {name: tier.members for name, tier in route.tiers.items()}
    who = "; ".join(
        (f"{name}: " if name else "") + ", ".join(f"{a} ({w:g})" for a, w in members.items())
        for name, members in tiers.items()
    )
    if route.fallbacks:
        who += f"; then {', '.join(route.fallbacks)}"
    aliases = sorted({alias for members in tiers.values() for alias in members})
    settings = {a: route.sampling.over(committee.members[a].sampling).body() for a in aliases}
    shown = "; ".join(
        f"{a}: {', '.join(f'{k}={v}' for k, v in found.items()) or 'defaults'}" for a, found in settings.items()
    )
    return [who, shown]


def _rules(document: dict[str, Any]) -> list[str]:
    """What the rules and reasons that dropped something mean."""
    dropped = next(stage["dropped"] for stage in document["stages"] if stage["stage"] == "filter")
    lines = [f"- `{name}`: {rule.description}" for name, rule in RULES.items() if name in dropped]
    chosen = next(stage["dropped"] for stage in document["stages"] if stage["stage"] == "select")
    lines += [f"- `{name}`: {what}" for name, what in DROP_REASONS.items() if name in chosen]
    return [*lines, ""] if lines else []


def _judges(document: dict[str, Any]) -> str:
    lines = []
    for panel in document["judges"]:
        for name, found in panel["judges"].items():
            swap = found["order_swap"]
            agreement = "-" if not swap or swap["agreement"] is None else f"{swap['agreement']:.0%}"
            mean = "-" if found["mean_score"] is None else f"{found['mean_score']:.2f}"
            states = ", ".join(f"{state} {count:,}" for state, count in found["states"].items() if count)
            lines.append([name, f"{found['verdicts']:,}", mean, states, agreement])
    return _table(["judge", "verdicts", "mean score", "states", "same verdict in both orders"], lines)


def _decontamination(document: dict[str, Any]) -> str:
    found = document["decontamination"]["benchmarks"]
    return _table(
        ["benchmark", "questions", "compared", "found in rows", "rows dropped"],
        [
            [name, f"{f['documents']:,}", f"{f['indexed']:,}", f"{f['documents_hit']:,}", f"{f['rows_hit']:,}"]
            for name, f in found.items()
        ],
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    """Text of others (servers, seeds, names) as plain words: no markup of theirs, no line break."""
    escaped = "".join("\\" + c if c in "\\`*_[]|!" else c for c in text.replace("&", "&amp;").replace("<", "&lt;"))
    return " ".join(escaped.split()) or "-"
