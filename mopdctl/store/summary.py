"""What is in a store, in figures: `mopdctl store inspect`."""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from mopdctl.errors import InputError, MopdctlError
from mopdctl.store.replay import replay, writers
from mopdctl.store.store import Store

if TYPE_CHECKING:
    import polars as pl

SAMPLED_ROWS = 4096
"""Log-probabilities are summed up over at most so many samples, evenly spread: lengths need no payload, these do."""


def summarize(store: Store) -> dict[str, Any]:
    """Counts, lengths, endings and log-probabilities of a store, per domain and teacher."""
    import polars as pl

    meta = store.meta()
    manifest = store.manifest
    waiting, warnings = _waiting(store, meta["sample_id"].to_list())
    files = [entry.bytes for entry in manifest.files.values()]
    return {
        "store": str(store.folder),
        "commit": manifest.number,
        "made_by": manifest.identity.get("command"),
        "samples": len(meta),
        "waiting_in_log": waiting,
        "tokens": manifest.tokens,
        "loss_tokens": int(meta["loss_tokens"].sum()),
        "bytes": sum(files),
        "files": len(files),
        "policy_versions": _range(meta, "policy_version_min", "policy_version_max"),
        "resumed": int((meta["attempt"] > 1).sum()),
        "groups": [
            {"domain": domain, "teacher_id": teacher, **_figures(store, part)}
            for (domain, teacher), part in sorted(
                meta.with_row_index("row").group_by("domain", "teacher_id"), key=lambda item: [str(k) for k in item[0]]
            )
        ],
        "finish_reasons": dict(sorted(meta.group_by("finish_reason").agg(pl.len()).iter_rows())),
        "verdicts": verdict_counts(meta["verdict"].to_list()),
        "verifiers": dict(sorted(Counter(meta["verifier"].drop_nulls().to_list()).items())),
        "warnings": [*store.warnings, *warnings, *_versions(meta["verifier"].drop_nulls().unique().to_list())],
    }


UNJUDGED = "unjudged"
"""Stands for the samples that nobody checked, among the counts of verdicts."""


def verdict_counts(verdicts: Iterable[str | None]) -> dict[str, int]:
    """How often each state occurs, and how many samples have none."""
    return dict(sorted(Counter(UNJUDGED if verdict is None else verdict for verdict in verdicts).items()))


def _versions(verifiers: list[str]) -> list[str]:
    """A warning for each verifier of which two versions have scored."""
    by_name: dict[str, list[str]] = {}
    for verifier in sorted(verifiers):
        by_name.setdefault(verifier.rpartition("/")[0], []).append(verifier)
    return [
        f"scored by {' and '.join(found)}, which may differ; `mopdctl rollout --reverify` scores all by one"
        for found in by_name.values()
        if len(found) > 1
    ]


def _waiting(store: Store, committed: Collection[str]) -> tuple[int | None, list[str]]:
    """How many samples are in the log alone; None, and why, if it is damaged."""
    folder = store.folder / "wal"
    try:
        logged = {name for writer in writers(folder) for name in replay(folder, writer=writer).samples}
    except InputError:
        raise
    except MopdctlError as error:
        return None, [str(error)]
    return len(logged.difference(committed)), []


def _range(meta: "pl.DataFrame", low: str, high: str) -> list[int] | None:
    return [int(meta[low].min()), int(meta[high].max())] if len(meta) else None  # type: ignore[arg-type]


def _figures(store: Store, part: "pl.DataFrame") -> dict[str, Any]:
    lengths = part["response_length"].to_numpy()
    rewards = part["reward"].drop_nulls()
    spread = np.unique(np.linspace(0, len(part) - 1, min(len(part), SAMPLED_ROWS)).astype(int))
    samples = store.read(part["row"].to_numpy()[spread])
    behavior = np.concatenate([s.behavior_logprobs for s in samples])
    teacher = [(s.teacher_logprobs, s.behavior_logprobs) for s in samples if s.teacher_logprobs is not None]
    gaps = np.concatenate([t - b for t, b in teacher]) if teacher else None
    return {
        "samples": len(part),
        "prompt_length": round(float(part["prompt_length"].to_numpy().mean()), 1),
        "response_length": {
            "mean": round(float(lengths.mean()), 1),
            "p50": int(np.median(lengths)),
            "p95": int(np.quantile(lengths, 0.95)),
            "max": int(lengths.max()),
        },
        "truncated_pct": round(100 * float((part["finish_reason"] == "length").to_numpy().mean()), 1),
        "behavior_logprob": _mean(behavior),
        "teacher_logprob": _mean(np.concatenate([t for t, _ in teacher])) if teacher else None,
        "teacher_minus_behavior": _mean(gaps),
        "reward": round(float(rewards.to_numpy().mean()), 4) if len(rewards) else None,
        "rewarded_pct": round(100 * len(rewards) / len(part), 1) if part["verdict"].null_count() < len(part) else None,
        "verdicts": verdict_counts(part["verdict"].to_list()),
        "logprobs_of": len(samples),
    }


def _mean(values: Any) -> float | None:
    return round(float(values.mean()), 4) if values is not None and len(values) else None


def text(summary: dict[str, Any]) -> str:
    """The summary for people, without its warnings."""
    total, size = summary["samples"], summary["bytes"]
    megabytes = f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
    maker = f", made by mopdctl {summary['made_by']}" if summary["made_by"] else ""
    lines = [
        f"{summary['store']}{maker} (commit {summary['commit']})",
        f"{total:,} samples, {summary['tokens']:,} tokens ({summary['loss_tokens']:,} with loss), "
        f"{megabytes} in {summary['files']} files",
    ]
    if summary["resumed"]:
        lines.append(f"{summary['resumed']:,} of them were interrupted and went on from their last token")
    if summary["waiting_in_log"]:
        lines.append(f"{summary['waiting_in_log']:,} more wait in the log; the same command goes on with them")
    if summary["policy_versions"]:
        low, high = summary["policy_versions"]
        lines.append(f"sampled by policy version {low}" + (f" to {high}" if high > low else ""))
    if total:
        endings = ", ".join(f"{reason} {count:,}" for reason, count in summary["finish_reasons"].items())
        lines.append(f"endings: {endings}")
        if summary["verifiers"]:
            states = ", ".join(f"{state} {count:,}" for state, count in summary["verdicts"].items())
            lines.append(f"verdicts: {states} (by {_printable(', '.join(summary['verifiers']))})")
        lines += ["", *_table(summary["groups"]), "", *_legend(summary["groups"])]
    return "\n".join(lines)


# Head of the column, a line on what it is, its value; those of the third kind are left out if no group has one.
_NAMES = {"domain": "domain", "teacher": "teacher_id"}
_LENGTHS = {"mean": "mean", "median": "p50", "p95": "p95", "max": "max"}
_OPTIONAL = {
    "student": (
        "behavior_logprob",
        "mean log-probability of a sampled token under the student that sampled it, in nats",
    ),
    "teacher": ("teacher_logprob", "the same under its teacher"),
    "gap": ("teacher_minus_behavior", "teacher - student; at temperature 1 an estimate of -KL(student || teacher)"),
    "rewarded %": ("rewarded_pct", "answers whose verdict is ok: only they have a reward"),
    "reward": ("reward", "mean reward of these, from 0 to 1"),
}


def _table(groups: list[dict[str, Any]]) -> list[str]:
    shown = _shown(groups)
    head = [*_NAMES, "samples", "prompt", *_LENGTHS, "truncated %", *shown]
    body = [
        [
            *(_printable(g[key]) or "-" for key in _NAMES.values()),
            f"{g['samples']:,}",
            f"{g['prompt_length']:.1f}",
            *(f"{g['response_length'][key]:,}" for key in _LENGTHS.values()),
            f"{g['truncated_pct']:.1f}",
            *("-" if (value := g[_OPTIONAL[name][0]]) is None else f"{value:.{_digits(name)}f}" for name in shown),
        ]
        for g in groups
    ]
    widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
    return [
        "  ".join(
            cell.ljust(w) if i < len(_NAMES) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in [head, *body]
    ]


def _digits(name: str) -> int:
    return 1 if name.endswith("%") else 3


def _legend(groups: list[dict[str, Any]]) -> list[str]:
    entries = {
        "prompt": "mean length of the prompts, in tokens",
        "mean .. max": "lengths of the answers, in tokens",
        "truncated %": "answers that their token budget ended",
        **{name: _OPTIONAL[name][1] for name in _shown(groups)},
    }
    lines = [f"{name:<11}  {what}" for name, what in entries.items()]
    sampled, total = (sum(g[key] for g in groups) for key in ("logprobs_of", "samples"))
    if sampled < total:
        lines.append(f"Log-probabilities are those of {sampled:,} of the {total:,} samples, evenly spread.")
    return lines


def _shown(groups: list[dict[str, Any]]) -> list[str]:
    return [name for name, (key, _) in _OPTIONAL.items() if any(g[key] is not None for g in groups)]


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)
