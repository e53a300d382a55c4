"""`train:` of a `teachers.yaml`: the MOPD loop and what it matches."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from mopdctl.config.balance import BalanceConfig, CurriculumConfig
from mopdctl.config.base import Strict
from mopdctl.config.lora import Lora
from mopdctl.config.train import OnPolicyConfig, WeightQuant
from mopdctl.config.warmup import WarmUp


class Anchor(Strict):
    """Terms beside the teachers that hold the student near something else."""

    kl_weight: float = Field(default=0.0, ge=0)
    """Weight of KL(student || reference) at every loss token; 0 has none."""
    sft_weight: float = Field(default=0.0, ge=0)
    """Weight of the negative log-likelihood of `sft_data`, a loss with a denominator of its own; 0 has none."""
    sft_data: Path | None = None
    """Conversations as for `mopdctl sft`, JSONL or Parquet; relative to this file."""
    sft_batch_size: int = Field(default=16, gt=0)
    """Conversations per optimizer step, over all processes."""

    @model_validator(mode="after")
    def _data_and_weight(self) -> Self:
        if bool(self.sft_weight) != (self.sft_data is not None):
            raise ValueError("sft_weight and sft_data need each other")
        return self


class DistillTrainConfig(OnPolicyConfig):
    """The MOPD loop: OnPolicyConfig plus what is matched, to what, and where it begins.

    Every modifier has a neutral value, at which the loss is exactly that without it.
    """

    samples_per_prompt: int = Field(default=1, gt=0)
    """Answers sampled per prompt, G."""
    objective: Literal["sampled", "exact", "top_k"] = "sampled"
    """`sampled`: policy gradient on the sampled token. `exact`: a divergence over the whole vocabulary. `top_k`: over
    `top_k` candidates. All are gated by the correction of the sampled token."""
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    """Direction of `exact` and `top_k`. Reverse: what the student writes must be likely for the teacher."""
    jsd_teacher_share: float = Field(default=0.5, gt=0, lt=1)
    """The teacher's share of the mixture that `jsd` compares both with; towards 0 it is forward, towards 1 reverse."""
    top_k: int = Field(default=16, gt=0)
    """K, the candidates of `objective: top_k`."""
    top_k_support: Literal["student", "teacher", "union"] = "teacher"
    """Whose likeliest tokens are the candidates."""
    top_k_tail: Literal["bucket", "renormalize"] = "bucket"
    """`bucket`: all other tokens are one more outcome. `renormalize`: the candidates are all there is."""
    entropy_aware_weight: float = Field(default=0.0, ge=0)
    """Weight of a forward KL on the teacher's likeliest tokens where it is undecided; 0 has none. Not for `sampled`."""
    entropy_aware_nats: float = Field(default=0.8, ge=0)
    """The teacher's entropy above which it counts as undecided."""
    entropy_aware_top_k: int = Field(default=16, gt=0)
    """Tokens of that forward KL."""
    trust_region: float = Field(default=1.0, gt=0, le=1)
    """alpha: the target is alpha * teacher + (1 - alpha) * student. 1 is the teacher alone."""
    extrapolation: float = Field(default=1.0, gt=0)
    """lambda: the target is teacher * (teacher / reference)^(lambda - 1). 1 is the teacher, above 1 goes beyond it."""
    outcome_weight: float = Field(default=0.0, ge=0)
    """alpha of A + alpha * A_ORM, A_ORM the group-relative advantage of verified rewards. Needs `samples_per_prompt`
    above 1, prompts with a verifier, and `objective: sampled`."""
    reference: str | None = None
    """Model of `extrapolation` and `anchor.kl_weight`; None takes the student as the run begins."""
    reference_quant: WeightQuant = "none"
    """Quantizes the weights of that model as `quant` does a teacher's; what it moves is measured, and never refused."""
    anchor: Anchor = Anchor()
    """Terms beside the teachers."""
    advantage_clip: float | None = Field(default=None, gt=0)
    """Bound on the distillation advantage in nats, on both sides; None leaves it free. `objective: sampled` only."""
    chunk_tokens: int | None = Field(default=None, gt=0)
    """Tokens whose logits exist at a time in `exact` and `top_k`; None takes what suits the vocabulary."""
    teacher_hidden: Literal["memory", "store"] = "memory"
    """Where hidden states of teachers are kept for `exact` and `top_k`. `store` rounds them to bfloat16 and keeps them
    with the rollouts, so that a step that is done again asks no teacher."""
    teacher_residency: Literal["all", "one"] = "all"
    """`one` keeps a single teacher on the device at a time."""
    balance: BalanceConfig = BalanceConfig()
    """Factors on the teachers' weights."""
    curriculum: CurriculumConfig | None = None
    """Which prompts of a teacher come up, by the student's pass rate; None takes each as often as any other."""
    student_quant: WeightQuant = "none"
    """Quantization-aware distillation: wherever the student runs, it runs on its weights as FP4 holds them, while the
    optimizer moves the weights themselves (straight-through gradient). Scales are those of `--method max`, chosen anew
    after every step. The checkpoint holds the weights themselves; `mopdctl quantize NAME --method max` makes of them
    what the student was trained with, to the bit. With the student itself as the teacher, in full precision:

        name: mopd2-qad
        student: mopd2
        prompts: prompts.jsonl
        teachers: {itself: {model: mopd2, kind: self, domains: [math, code]}}
        train: {steps: 200, objective: exact, divergence: forward_kl, student_quant: nvfp4}
    """
    quant_noise_prompts: int = Field(default=16, gt=0)
    """Prompts of the first step, of each teacher with a `quant`, on which KL(teacher || quantized teacher) is measured
    beside KL(teacher || student)."""
    allow_quant_noise: bool = False
    """Train even if a quantized teacher lies as far from the teacher as the student does, or further."""
    lora: Lora | None = None
    """Train a LoRA adapter instead of all weights; the checkpoint holds the merged weights, and the adapter beside."""
    warm_up: WarmUp | None = None
    """A light SFT on the teachers' answers before the first step."""
    warm_start: Literal["none", "merge"] = "none"
    """`merge` begins from student + `warm_start_scale` times the sum of teacher deltas."""
    warm_start_scale: float = Field(default=0.3, gt=0)
    """Scale of the warm-start merge."""

    @property
    def needs_reference(self) -> bool:
        """Whether a third model takes part."""
        return self.extrapolation != 1 or self.anchor.kl_weight > 0

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> Self:
        """Refuses a setting that the objective would ignore, and a loss that teaches nothing."""
        given = self.model_fields_set
        vocabulary = given & {"divergence", "entropy_aware_weight", "chunk_tokens", "teacher_hidden"}
        if self.objective == "sampled" and vocabulary:
            raise ValueError(f"`{min(vocabulary)}` needs `objective: exact` or `top_k`: `sampled` sees one token")
        if self.objective != "top_k" and (ignored := given & {"top_k", "top_k_support", "top_k_tail"}):
            raise ValueError(f"`{min(ignored)}` needs `objective: top_k`")
        if self.objective != "sampled" and self.advantage_clip is not None:
            raise ValueError("`advantage_clip` needs `objective: sampled`: there is no advantage to clip")
        if self.divergence != "jsd" and "jsd_teacher_share" in given:
            raise ValueError("`jsd_teacher_share` needs `divergence: jsd`")
        if self.top_k == 1 and self.top_k_tail == "renormalize" and self.objective == "top_k":
            raise ValueError("`top_k: 1` renormalized is 0 whatever the models say; use `top_k_tail: bucket`")
        if self.objective == "sampled" and self.trust_region != 1 and self.extrapolation != 1:
            raise ValueError(
                "`trust_region` and `extrapolation` together need `objective: exact` or `top_k`: a mixture takes the "
                "extrapolated probability, of which the sampled token alone does not know the norm"
            )
        if self.outcome_weight and (self.objective != "sampled" or self.samples_per_prompt < 2):
            raise ValueError("`outcome_weight` needs `objective: sampled` and `samples_per_prompt` of at least 2")
        if self.lora and (self.optimizer == "muon" or self.warm_start == "merge"):
            raise ValueError(
                "`lora` needs `optimizer: adamw` and `warm_start: none`: the merge changes the base, and "
                "Muon is no optimizer for two thin factors"
            )
        if self.lora and self.student_quant != "none":
            raise ValueError(
                "`student_quant` trains all weights: an adapter over quantized ones is not what quantizing the merged "
                "weights gives; leave out `lora`"
            )
        for name, given_reference in (("reference", self.reference), ("reference_quant", self.reference_quant)):
            if given_reference not in (None, "none") and not self.needs_reference:
                raise ValueError(f"`{name}` needs `extrapolation` other than 1 or `anchor.kl_weight`")
        return self
