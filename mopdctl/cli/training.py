"""What the commands that train share: the progress line."""

from collections.abc import Callable
from typing import Any

from mopdctl.cli.output import Progress


def step_progress(label: str, total: int) -> Callable[[int, dict[str, Any]], None]:
    """A callback for trainers that shows one line per step."""
    progress: Progress | None = None

    def on_step(done: int, metrics: dict[str, Any]) -> None:
        nonlocal progress
        progress = progress or Progress(label, total, done=done - 1)
        progress.update(done, summary(metrics))

    return on_step


def summary(metrics: dict[str, Any]) -> str:
    """The few figures of a step that fit on a line, per teacher by name where they have one."""
    parts = [metrics["train/stage"]] if "train/stage" in metrics else []
    parts.append(f"loss {metrics['train/loss']:.4f}")
    if "train/trainable_share" in metrics:
        parts.append(f"{metrics['perf/tokens_per_s']:.0f} tokens/s, {metrics['train/trainable_share']:.1%} with loss")
    kl = metrics.get("distill/kl_exact_nats") or metrics.get("distill/kl_k3_nats")
    if kl:
        parts.append("kl " + " ".join(f"{alias}={value:.3f}" for alias, value in kl.items()))
        kept = metrics["policy/kept_fraction"]
        parts.append(f"kept {min(kept.values()):.3f}")
    if "rl/reward" in metrics:
        shown = {name: "-" if v is None else f"{v:.2f}" for name, v in metrics["rl/reward"].items()}
        parts.append("reward " + " ".join(f"{name}={v}" for name, v in shown.items()))
    if "held_out/recovery_pct" in metrics:
        shown = {a: "-" if v is None else f"{v:.0f}%" for a, v in metrics["held_out/recovery_pct"].items()}
        parts.append("recovery " + " ".join(f"{a}={v}" for a, v in shown.items()))
    return "  ".join(parts)
