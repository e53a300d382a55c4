"""What is in a store, in figures: `mopdctl store inspect`."""

from typing import TYPE_CHECKING, Any

import numpy as np

from mopdctl.store.replay import replay
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
    waiting = replay(store.folder / "wal").samples.keys() - set(meta["sample_id"].to_list())
    files = [entry.bytes for entry in manifest.files.values()]
    return {
        "store": str(store.folder),
        "commit": manifest.number,
        "made_by": manifest.identity.get("command"),
        "samples": len(meta),
        "waiting_in_log": len(waiting),
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
        "warnings": store.warnings,
    }


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
        "logprobs_of": len(samples),
    }


def _mean(values: Any) -> float | None:
    return round(float(values.mean()), 4) if values is not None and len(values) else None


def text(summary: dict[str, Any]) -> str:
    """The summary for people."""
    total = summary["samples"]
    lines = [
        f"{summary['store']}  (commit {summary['commit']}, made by mopdctl {summary['made_by']})",
        f"{total} samples, {summary['tokens']} tokens ({summary['loss_tokens']} with loss), "
        f"{summary['bytes'] / 1e6:.1f} MB in {summary['files']} files",
    ]
    if summary["policy_versions"]:
        low, high = summary["policy_versions"]
        lines.append(f"sampled by policy versions {low} to {high}; {summary['resumed']} samples went on after a stop")
    if summary["waiting_in_log"]:
        lines.append(f"{summary['waiting_in_log']} more samples wait in the log; the same command goes on with them")
    if total:
        lines += ["", _table(summary["groups"]), ""]
        endings = ", ".join(f"{reason} {count}" for reason, count in summary["finish_reasons"].items())
        lines.append(f"endings: {endings}")
    return "\n".join([*lines, *(f"warning: {line}" for line in summary["warnings"])])


def _table(groups: list[dict[str, Any]]) -> str:
    head = ["domain", "teacher", "samples", "prompt", "answer", "p50", "p95", "max", "cut %", "log p", "teacher", "gap"]
    body = [
        [
            g["domain"] or "-",
            g["teacher_id"] or "-",
            str(g["samples"]),
            f"{g['prompt_length']:.1f}",
            f"{g['response_length']['mean']:.1f}",
            *(str(g["response_length"][k]) for k in ("p50", "p95", "max")),
            f"{g['truncated_pct']:.1f}",
            *("-" if g[k] is None else f"{g[k]:.3f}" for k in _LOGPROBS),
        ]
        for g in groups
    ]
    widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in [head, *body]
    )


_LOGPROBS = ("behavior_logprob", "teacher_logprob", "teacher_minus_behavior")
