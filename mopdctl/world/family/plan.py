"""What the experiment on objectives is made of: its scale, its settings (who teaches whom) and its arms (how)."""

from dataclasses import dataclass, field
from typing import Any, Literal

from mopdctl.world.domains import AGENT_DOMAIN, DOMAINS, SPECIALIST_DOMAINS
from mopdctl.world.recipe import Recipe

TAUGHT = (*SPECIALIST_DOMAINS, AGENT_DOMAIN)
"""Domains that have a teacher of their own."""
BASE = "rlvr"
"""The setting in which every arm runs; in the others those of `ADVISED` do, and the merge start."""
ADVISED = {"sampled": "sampled", "exact": "exact", "warm-up first": "warm-up"}
"""What `mopdctl overlap` advises to the arm that does it."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything."""

    recipe: Recipe = field(default_factory=lambda: Recipe(mopd2_steps=1))
    """The quickstart's, with prompts for one MOPD run: every run reads all that there are."""
    scored_prompts: int = 200
    """Dev prompts of each domain that every model answers. None of them is among those that choose scales of merges."""
    search_prompts: int = 50
    """Dev prompts of each domain that choose scales of merges."""
    eval_prompts: int = 50
    """The first so many of the scored prompts are also answered while some arms train."""
    eval_every: int = 10
    overlap_prompts: int = 64
    overlap_samples: int = 4
    wrong_answers: Literal["drop", "keep"] = "drop"
    """What a warm-up and SeqKD do with teachers' wrong answers. Models that hardly trained have no others."""


def full_scale() -> Scale:
    """That of the results."""
    return Scale()


def quick_scale() -> Scale:
    """A few steps on a few prompts: whether everything runs. Its figures mean nothing."""
    recipe = Recipe(
        student_steps=9,
        student_batch=48,
        rlvr_steps=2,
        rlvr_groups=8,
        group_size=4,
        trajectories=10,
        agent_steps=1,
        agent_groups=2,
        specialist_steps=dict.fromkeys(SPECIALIST_DOMAINS, 4),
        specialist_batch=16,
        refork_steps={"arithmetic": 2, "instructions": 2},
        mopd_batch=16,
        mopd1_steps=4,
        mopd2_steps=4,
    )
    return Scale(
        recipe,
        scored_prompts=6,
        search_prompts=2,
        eval_prompts=2,
        eval_every=2,
        overlap_prompts=4,
        overlap_samples=2,
        wrong_answers="keep",
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """A student, its teachers and its budget."""

    what: str
    student: str
    """The checkpoint that it starts from."""
    teachers: dict[str, str]
    """Domain to checkpoint; the student itself teaches the domains that are not here."""
    budget: float = 1.0
    """Steps, as a multiple of the recipe's."""


def forks(start: str) -> dict[str, str]:
    """The teachers that are made from a checkpoint, by domain."""
    return {domain: f"{start}-{domain}" for domain in TAUGHT}


_OUTSIDE = forks("outside")
_AGAIN = {domain: f"mopd1-{domain}" for domain in Recipe().refork}

SETTINGS = {
    BASE: Setting("strong student after RL, teachers forked from it", "rlvr", forks("rlvr")),
    "sft": Setting("strong student after SFT alone, teachers forked from it", "student", forks("student")),
    "weak-rlvr": Setting("student of a third of the SFT, then RL; own forks", "weak-rlvr", forks("weak-rlvr")),
    "weak-sft": Setting("student of a third of the SFT; own forks", "weak", forks("weak")),
    "outside": Setting("strong student after RL, teachers made from the base model", "rlvr", _OUTSIDE),
    "sft-outside": Setting("strong student after SFT alone, teachers from the base model", "student", _OUTSIDE),
    "weak-outside": Setting("weak student after RL, teachers made from the base model", "weak-rlvr", _OUTSIDE),
    "missing": Setting(
        "one domain without a teacher",
        "rlvr",
        {domain: model for domain, model in forks("rlvr").items() if domain != "arithmetic"},
    ),
    "under": Setting("teachers of a third of the steps", "rlvr", forks("under")),
    "over": Setting("teachers of twice the steps", "rlvr", forks("over")),
    "mopd1": Setting("student distilled once, two teachers forked anew", "rlvr.exact", forks("rlvr") | _AGAIN),
    "short": Setting("a third of the budget", "rlvr", forks("rlvr"), budget=1 / 3),
    "long": Setting("twice the budget", "rlvr", forks("rlvr"), budget=2.0),
}

ArmKind = Literal["mopd", "task-arithmetic", "linear", "ties", "seqkd", "grpo"]


@dataclass(frozen=True, slots=True)
class Arm:
    """One way from the student and its teachers to a model."""

    what: str
    kind: ArmKind = "mopd"
    train: dict[str, Any] = field(default_factory=dict)
    """What differs from the base: exact reverse KL, uniform weights, no warm-up, the recipe's steps, batch and rate."""
    warm_up: float = 0.0
    """Share of the steps that are SFT on the teachers' answers, before the others."""
    samples: int = 1
    """Answers per prompt; the prompts are fewer, so that the answers of a step stay as many."""
    anchored: bool = False
    """Whether the student as it was is the reference."""
    budget: float = 1.0
    """Steps, as a multiple of the setting's."""
    watched: bool = False
    """Whether its scores are measured while it trains."""


_SAMPLED = {"objective": "sampled", "advantage_clip": 5.0}

ARMS = {
    "sampled": Arm("policy gradient on the sampled token", train=_SAMPLED, watched=True),
    "exact": Arm("exact reverse KL: the base", watched=True),
    "warm-up": Arm("exact, after SFT on the teachers' answers", warm_up=0.3, watched=True),
    "top-k": Arm("reverse KL on the teacher's 16 likeliest and the rest", train={"objective": "top_k", "top_k": 16}),
    "forward-kl": Arm("exact forward KL", train={"divergence": "forward_kl"}),
    "jsd": Arm("exact Jensen-Shannon divergence", train={"divergence": "jsd"}),
    "entropy-aware": Arm("exact, and forward KL where the teacher is undecided", train={"entropy_aware_weight": 1.0}),
    "orm": Arm(
        "sampled token and verified rewards, 4 answers each", train=_SAMPLED | {"outcome_weight": 0.5}, samples=4
    ),
    "exopd": Arm("exact, 1.25 of the way past the student", train={"extrapolation": 1.25}, anchored=True),
    "trust-region": Arm("exact, half-way to the teacher", train={"trust_region": 0.5}),
    "sampled-warm-up": Arm("sampled token, after SFT on the teachers' answers", train=_SAMPLED, warm_up=0.3),
    "merge-start": Arm("exact, from a merge at the recipe's scale", train={"warm_start": "merge"}, watched=True),
    "merge-start-half": Arm(
        "exact, from a merge at half of that scale", train={"warm_start": "merge", "warm_start_scale": 0.15}
    ),
    "merge-start-double": Arm(
        "exact, from a merge at twice that scale", train={"warm_start": "merge", "warm_start_scale": 0.6}
    ),
    "sampled-merge-start": Arm(
        "sampled token, from a merge at the recipe's scale", train=_SAMPLED | {"warm_start": "merge"}
    ),
    "jsd-merge-start": Arm(
        "Jensen-Shannon divergence, from a merge", train={"divergence": "jsd", "warm_start": "merge"}
    ),
    "trust-merge-start": Arm(
        "exact, half-way to the teacher, from a merge", train={"trust_region": 0.5, "warm_start": "merge"}
    ),
    "trust-merge-start-long": Arm(
        "exact, half-way to the teacher, from a merge, for twice the steps",
        train={"trust_region": 0.5, "warm_start": "merge"},
        budget=2.0,
    ),
    "jsd-merge-warm-up": Arm(
        "Jensen-Shannon divergence, from a merge and SFT on the teachers' answers",
        train={"divergence": "jsd", "warm_start": "merge"},
        warm_up=0.3,
    ),
    "jsd-merge-warm-up-long": Arm(
        "Jensen-Shannon divergence, from a merge and SFT on the teachers' answers, for twice the steps",
        train={"divergence": "jsd", "warm_start": "merge"},
        warm_up=0.3,
        budget=2.0,
    ),
    "balance": Arm("exact, equal shares of the gradient", train={"balance": {"mode": "share"}}),
    "token-mean": Arm("exact, mean over tokens in place of answers", train={"loss_reduction": "token"}),
    "merge": Arm("control: task arithmetic, scales searched", kind="task-arithmetic"),
    "linear": Arm("control: mean of the weights, shares searched", kind="linear"),
    "ties": Arm("control: TIES, scales searched", kind="ties"),
    "seqkd": Arm("control: SFT on the teachers' answers alone", kind="seqkd"),
    "seqkd-long": Arm("SeqKD for twice the steps", kind="seqkd", budget=2.0),
    "grpo": Arm("control: GRPO on the same prompts, as many answers", kind="grpo", watched=True),
    "grpo-long": Arm("GRPO for three times the steps", kind="grpo", budget=3.0, watched=True),
}


def arms_of(setting: str, wanted: tuple[str, ...]) -> list[str]:
    """The arms of a setting among those wanted."""
    elsewhere = {*ADVISED.values(), "merge-start"}
    return [arm for arm in ARMS if arm in wanted and (setting == BASE or arm in elsewhere)]


def domains_of(setting: Setting) -> dict[str, str]:
    """Domain to the checkpoint that teaches it, the student's own domains included."""
    return {domain: setting.teachers.get(domain, setting.student) for domain in DOMAINS}
