"""Failures that others met in public, as properties of the distillation's parts: routing, losses, black boxes."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mopdctl.config.balance import BalanceConfig
from mopdctl.config.base import parse
from mopdctl.config.distill import DistillTrainConfig
from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.balance import balanced
from mopdctl.distill.losses import mopd_loss
from mopdctl.distill.outcome import outcome_advantages
from mopdctl.distill.plan import plan_distill
from mopdctl.distill.prompts import read_run_prompts
from mopdctl.distill.score import with_scores
from mopdctl.engines.layout import lay_out
from mopdctl.errors import InputError, MopdctlError
from mopdctl.files import write_jsonl
from mopdctl.objective.head import Head
from mopdctl.records import Sample
from mopdctl.runs import Workspace
from mopdctl.train.batch import MicroBatch, TrainSequence
from mopdctl.train.step import Accumulated

Document = Callable[..., dict[str, Any]]

# ------------------------------------------------------------------------------- objectives on one micro-batch

TOKENS = [0, 1, 2, 3, 4, 1]
LOGITS = torch.tensor([[0.1 * ((3 * n + 7 * v) % 11) for v in range(5)] for n in range(6)])
TEACHERS = [torch.tensor([[0.3 * ((k * n + 5 * v) % 7) for v in range(5)] for n in range(6)]) for k in (2, 3)]
REFERENCE = torch.tensor([[0.2 * ((n + 3 * v) % 5) for v in range(5)] for n in range(6)])

OBJECTIVES: dict[str, dict[str, Any]] = {
    "sampled": {},
    "sampled, clipped": {"advantage_clip": 0.5},
    "sampled, extrapolated": {"extrapolation": 1.25},
    "sampled, trust region": {"trust_region": 0.5},
    "sampled, outcome": {"outcome_weight": 1.0, "samples_per_prompt": 2},
    "sampled, anchored": {"anchor": {"kl_weight": 0.1}},
    "exact": {"objective": "exact"},
    "exact, forward": {"objective": "exact", "divergence": "forward_kl"},
    "exact, jsd": {"objective": "exact", "divergence": "jsd", "jsd_teacher_share": 0.3},
    "exact, entropy aware": {"objective": "exact", "entropy_aware_weight": 1.0, "entropy_aware_nats": 0.5},
    "exact, extrapolated": {"objective": "exact", "extrapolation": 1.25},
    "exact, trust region": {"objective": "exact", "trust_region": 0.5},
    "exact, anchored": {"objective": "exact", "anchor": {"kl_weight": 0.1}},
    "top_k, student": {"objective": "top_k", "top_k": 2, "top_k_support": "student"},
    "top_k, teacher": {"objective": "top_k", "top_k": 2, "top_k_support": "teacher"},
    "top_k, union": {"objective": "top_k", "top_k": 2, "top_k_support": "union"},
    "top_k, renormalized": {"objective": "top_k", "top_k": 3, "top_k_tail": "renormalize"},
}


class Heads:
    """Teachers whose hidden states are logits already; `bias` may rule tokens out."""

    def __init__(self, bias_V: Tensor | None = None) -> None:
        self._bias_V = bias_V

    def head(self, alias: str) -> Head:
        return Head(torch.eye(5), self._bias_V)


def step_of(
    name: str, teacher_NV: Tensor, *, bias_V: Tensor | None = None, temperature: float = 1.0
) -> tuple[float, Tensor, Tensor]:
    """Loss, its gradient, and c_t, of six tokens that the policy itself sampled at some temperature."""
    logits_NV = LOGITS.clone().requires_grad_()
    rows = torch.arange(len(TOKENS))

    def scores(logits: Tensor, temperature: float = 1.0) -> Tensor:
        return torch.log_softmax(logits.detach() / temperature, -1)[rows, TOKENS]

    streams = {
        "behavior_logprobs": scores(LOGITS, temperature),
        "teacher_logprobs": scores(teacher_NV),
        "reference_logprobs": scores(REFERENCE),
        "outcome_advantages": torch.ones(6),
    }
    sequence = TrainSequence("s", [0], TOKENS, [1] * 6, "math")
    layout = lay_out([[0]], [TOKENS], pad_id=0, device=torch.device("cpu"))
    batch = MicroBatch(
        [sequence],
        layout,
        layout.present_BR,
        layout.response_BR[0],
        torch.full((6,), 1 / 6),
        streams,
        {"teacher": teacher_NV, "reference": REFERENCE},
    )
    policy = SimpleNamespace(
        logits_NV=logits_NV, hidden_NH=logits_NV, head=Head(torch.eye(5)), vocab_size=5, computing=nullcontext
    )
    config = DistillTrainConfig(steps=1, correction_low=0.0, correction_high=1e6, **OBJECTIVES[name])
    loss = mopd_loss(config, Heads(bias_V), SimpleNamespace(head=Head(torch.eye(5))))  # type: ignore[arg-type]
    found = loss(policy, batch)  # type: ignore[arg-type]
    found.loss.backward()
    assert logits_NV.grad is not None
    return float(found.loss.detach()), logits_NV.grad, found.metrics["policy/staleness_ratio"]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_another_teacher_gives_another_gradient_in_every_objective(name: str) -> None:
    # AReaL's joint KDRL: a term in the loss whose gradient does not contain the teacher.
    one, other = (step_of(name, teacher_NV)[1] for teacher_NV in TEACHERS)
    assert float((one - other).abs().max()) > 1e-3
    assert bool(torch.isfinite(one).all())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_tempered_sampler_changes_each_tokens_weight_and_nothing_else(name: str) -> None:
    # TRL #4159, verl #6240: teacher and learner stand at temperature 1 whatever the sampler's is, so that only
    # c_t = p_prox(y_t) / p_behav(y_t) knows of it, and c_t multiplies every term of its token.
    _, plain_NV, one_N = step_of(name, TEACHERS[0])
    _, tempered_NV, c_N = step_of(name, TEACHERS[0], temperature=0.7)
    prox_NV, sampler_NV = (torch.log_softmax(LOGITS.double() / t, -1) for t in (1.0, 0.7))
    by_hand_N = (prox_NV - sampler_NV)[torch.arange(6), TOKENS].exp()
    assert one_N.tolist() == pytest.approx([1.0] * 6, abs=1e-6)
    torch.testing.assert_close(c_N.double(), by_hand_N, atol=1e-6, rtol=1e-5)
    assert float((c_N - 1).abs().min()) > 1e-3
    torch.testing.assert_close(tempered_NV, plain_NV * by_hand_N.float().unsqueeze(-1), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["exact", "top_k, teacher", "exact, trust region"])
def test_a_teacher_without_a_number_for_one_token_is_named_with_sample_and_place(name: str, bad: float) -> None:
    spoilt_NV = TEACHERS[0].clone()
    spoilt_NV[4] = bad
    with pytest.raises(MopdctlError, match=r"^sample s: the divergence at token 4 \(id 4\) is .* teacher 'math'"):
        step_of(name, spoilt_NV)


def test_a_token_that_the_teacher_rules_out_is_named_where_the_divergence_would_be_infinite() -> None:
    without_3_V = torch.tensor([0.0, 0.0, 0.0, -math.inf, 0.0])
    with pytest.raises(
        MopdctlError, match=r"token 0 \(id 0\) is inf; teacher 'math' gives no number, or no probability"
    ):
        step_of("exact", TEACHERS[0], bias_V=without_3_V)
    # The other direction, and a mixture with the student, give it a finite price.
    for name in ("exact, forward", "exact, jsd", "exact, trust region"):
        assert bool(torch.isfinite(step_of(name, TEACHERS[0], bias_V=without_3_V)[1]).all())


# ------------------------------------------------------------------------------------------------ configuration


def test_typos_are_errors_with_the_nearest_key_in_every_section(teachers_document: Document) -> None:
    # NeMo-RL's recipe for Ultra: keys that nobody reads. ms-swift #9711: settings that do not get through.
    sections: dict[tuple[str, ...], tuple[str, Any, str]] = {
        (): ("tier", {}, "tiers"),
        ("train",): ("divergance", "jsd", "divergence"),
        ("train", "anchor"): ("kl_wieght", 0.1, "kl_weight"),
        ("train", "balance"): ("moed", "share", "mode"),
        ("train", "curriculum"): ("pass_exponents", 1, "pass_exponent"),
        ("train", "warm_up"): ("temprature", 1, "temperature"),
        ("train", "lora"): ("ranks", 4, "rank"),
        ("tiers",): ("sample", 1, "samples"),
        ("teachers", "tools"): ("sampling_wieght", 1, "sampling_weight"),
        ("teachers", "tools", "discriminator"): ("reward_clipp", 1, "reward_clip"),
    }
    for path, (typo, value, meant) in sections.items():
        document = teachers_document()
        found = document
        for key in path:
            found = found.setdefault(key, {})
        found[typo] = value
        with pytest.raises(InputError) as caught:
            parse(TeachersFile, document, source="teachers.yaml")
        where = ".".join([*path, typo])
        assert str(caught.value) == f"teachers.yaml: unknown key {where!r}; did you mean {meant!r}?"


@pytest.mark.parametrize(
    ("alias", "what"),
    [
        ("", "1-100 printable characters"),
        ("a" * 101, "1-100 printable characters"),
        ("a\nb", "1-100 printable characters"),
        ("a\0b", "1-100 printable characters"),
        ("a\u2028b", "1-100 printable characters"),
        ("../../up", "without slashes"),
        ("/abs", "without slashes"),
        ("a\\b", "without slashes"),
        ("..", "not beginning with a dot"),
        ("sft_anchor", "none of sft_anchor"),
    ],
)
def test_an_alias_that_could_lead_out_of_a_folder_or_break_a_line_is_refused(
    teachers_document: Document, alias: str, what: str
) -> None:
    document = teachers_document()
    document["teachers"][alias] = document["teachers"].pop("tools")
    with pytest.raises(InputError) as caught:
        parse(TeachersFile, document, source="teachers.yaml")
    assert what in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("alias", ["teacher_model", "default", "数学", "maths & logic", "tools.v2", "sft-anchor"])
def test_no_alias_is_special(teachers_document: Document, tiny: Path, alias: str) -> None:
    # verl: an entry called `teacher_model` disappears when others are there. NeMo-RL #2780: a default that is no alias.
    document = teachers_document()
    document["teachers"][alias] = document["teachers"].pop("tools")
    config = parse(TeachersFile, document, source="teachers.yaml")
    found = read_run_prompts(config, base=tiny)
    assert found.per_teacher() == {"arithmetic": 8, "structured": 8, alias: 8}


def test_a_key_with_a_line_break_in_it_does_not_break_the_error(teachers_document: Document) -> None:
    document = teachers_document(balance={"mode": "share", "target_shares": {"a\nb": -1}})
    with pytest.raises(InputError, match=r"train\.balance\.target_shares\.a\\nb: ") as caught:
        parse(TeachersFile, document, source="teachers.yaml")
    assert str(caught.value).isprintable()


def test_a_base_without_an_adapter_over_it_is_refused(teachers_document: Document) -> None:
    document = teachers_document()
    document["teachers"]["tools"] = {"gives": "answers", "answers": "a.jsonl", "base": "x", "domains": ["tools"]}
    with pytest.raises(InputError, match=r"teachers\.tools: `base` needs `model`"):
        parse(TeachersFile, document, source="teachers.yaml")


# -------------------------------------------------------------------------------------------------- black boxes


def answered(tmp_path: Path, document: dict[str, Any], **teacher: Any) -> TeachersFile:
    """The document with a black box for tools, known by a file with one answer to each of its prompts."""
    write_jsonl(tmp_path / "answers.jsonl", [{"prompt_id": f"tools/{i}", "answer": "bo"} for i in range(8)])
    answers = {"gives": "answers", "answers": "answers.jsonl", "wrong_answers": "keep", "domains": ["tools"]}
    document["teachers"]["tools"] = answers | teacher
    return TeachersFile.model_validate(document)


def test_a_black_box_in_tier_2_has_no_confidence_to_ask_for(
    tmp_path: Path, tiny: Path, teachers_document: Document
) -> None:
    document = teachers_document(top={"tiers": {}})
    document["teachers"]["front"] = {"model": "front", "domains": ["tools"], "tier": 1}
    with pytest.raises(InputError, match=r"jsonl:17: teacher 'tools' is a black box, and tiers.frontier_below_conf"):
        read_run_prompts(answered(tmp_path, document), base=tmp_path)
    document["tiers"]["frontier_below_confidence"] = None
    assert read_run_prompts(answered(tmp_path, document), base=tmp_path).is_tiered


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"balance": {"mode": "sigma"}}, "mode sigma needs the teachers' log-probabilities before the update"),
        ({"warm_up": {"steps": 1}}, "teacher 'tools': a black box is not asked for answers, and there is no other"),
        ({"warm_start": "merge"}, "teacher 'tools': is known by its answers alone"),
    ],
)
def test_what_needs_more_than_answers_is_refused_before_the_run_where_all_teachers_are_black_boxes(
    tmp_path: Path, tiny: Path, teachers_document: Document, train: dict[str, Any], message: str
) -> None:
    rows = [{"id": f"tools/{i}", "domain": "tools", "prompt": f"{i}?"} for i in range(8)]
    write_jsonl(tmp_path / "prompts.jsonl", rows)
    document = teachers_document(**train, top={"prompts": "prompts.jsonl"})
    del document["teachers"]["arithmetic"], document["teachers"]["structured"]
    with pytest.raises(InputError, match=message):
        plan_distill(answered(tmp_path, document), Workspace(tmp_path / "workspace"), base=tmp_path)


def sample(name: str, teacher: str, *, reward: float | None = None, loss: bool = True) -> Sample:
    return Sample(
        sample_id=name,
        prompt_id="p",
        group_id="p/0",
        generation_index=0,
        domain="d",
        teacher_id=teacher,
        policy_version_min=0,
        policy_version_max=0,
        tokens=np.array([1, 2, 3], np.int32),
        prompt_length=1,
        loss_mask=np.array([False, loss, loss]),
        behavior_logprobs=np.full(2 * loss, -1, np.float32),
        finish_reason="stop",
        reward=reward,
    )


def test_what_nobody_scored_has_no_scores_and_is_not_given_empty_ones() -> None:
    scored, paid, silent = sample("a", "t"), sample("b", "box"), sample("c", "t", loss=False)
    sequence = TrainSequence("a", [1], [2, 3], [1, 1], "t", streams={"teacher_logprobs": [-0.5, -0.25]})
    result = Accumulated(0.0, {}, {}, {}, {})
    found = with_scores([scored, paid, silent], [sequence], result)
    assert found[0].teacher_logprobs is not None
    assert found[0].teacher_logprobs.tolist() == [-0.5, -0.25]
    assert found[1] is paid
    assert found[2].teacher_logprobs is not None
    assert found[2].teacher_logprobs.tolist() == []


def test_a_step_without_scored_answers_has_no_outcomes_and_one_that_nobody_could_check_ends_the_run() -> None:
    assert outcome_advantages([], 3) == {}
    with pytest.raises(MopdctlError, match="step 3: no answer could be checked"):
        outcome_advantages([sample("a", "t")], 3)
    pair = [sample("a", "t", reward=1.0), sample("b", "t", reward=0.0)]
    assert outcome_advantages(pair, 3) == pytest.approx({"a": 1.0, "b": -1.0}, abs=1e-5)


def test_a_step_of_black_boxes_alone_has_no_spread_to_level() -> None:
    config, weights = BalanceConfig(mode="sigma"), {"t": 1.0, "box": 1.0}
    found, metrics = balanced([], config, weights, last=None)
    assert found == []
    assert metrics["balance/factor"] == {"t": 1.0, "box": 1.0}
    unscored = TrainSequence("a", [1], [2], [1], "t", streams={"behavior_logprobs": [-1.0]})
    with pytest.raises(InputError, match="mode sigma"):
        balanced([unscored], config, weights, last=None)
    # What no teacher judges, an anchor's conversations say, needs no score.
    assert balanced([replace(unscored, teacher_id="sft")], config, weights, last=None)[0][0].weight == 1.0
