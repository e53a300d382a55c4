"""How much CPU the command line costs before it does any work.

Rival: `trl --help` of TRL 1.16, the post-training CLI nearest to ours (sft, grpo and distillation trainers behind one
command), which defers its heavy imports as we do. It runs in its own environment on our torch and transformers, so the
difference is the two command lines and nothing else; only TRL's own wheel is fetched. `lm-eval --help` would have been
free, being a dependency, but is the weaker rival: it takes nearly twice the CPU of `trl --help`.

`mopdctl recovery` has no counterpart there: it reads a file of scores and prints the table, and is held against the
same `trl --help`, which does less. Its point is the absolute bar: an answer from files must not load torch.
"""

import sys
from pathlib import Path

from mopdctl.bench.frame import Bar, Bench, Case, cpu_seconds, rival_environment
from mopdctl.runs import shipped

BAR = Bar(ours_at_most=0.5)


def bench() -> Bench:
    """The cases of `python -m mopdctl.bench cli`."""
    rival = rival_environment("trl", ["trl==1.16.*"], report_versions=["trl", "transformers"], share_ours=True)
    scores = shipped("sample_data") / "recovery" / "nemotron_3_ultra_table5.csv"
    recovery = ["recovery", "--scores", str(scores), "--before", "rlvr", "--after", "mopd2", "--teacher", "teacher"]
    trl_help: list[str | Path] = [rival.program("trl"), "--help"]
    mopdctl: list[str | Path] = [sys.executable, "-m", "mopdctl"]
    return Bench(
        cases=[
            Case(
                name="mopdctl --help | trl --help",
                unit="s",
                ours=lambda: cpu_seconds([*mopdctl, "--help"]),
                rival=lambda: cpu_seconds(trl_help),
                bar=BAR,
            ),
            Case(
                name="mopdctl recovery | trl --help",
                unit="s",
                ours=lambda: cpu_seconds([*mopdctl, *recovery]),
                rival=lambda: cpu_seconds(trl_help),
                bar=BAR,
            ),
        ],
        rival_versions=rival.versions,
    )
