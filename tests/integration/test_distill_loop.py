"""The whole loop on a very small world: what it computes, what it writes, and what must not change a single bit.

FLOAT32 is what summing the same float32 terms in another order may change in a log-probability here.
"""

import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

from mopdctl.config.sft import SftConfig
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError, MopdctlError
from mopdctl.files import write_jsonl
from mopdctl.runs import Workspace
from mopdctl.train.sft import run_sft

Document = Callable[..., dict[str, Any]]
Distil = Callable[..., SimpleNamespace]

FLOAT32 = 1e-5
DOMAINS = ["arithmetic", "structured", "tools"]
OBJECTIVES = ["sampled", "exact"]


def assert_same_bits(one: SimpleNamespace, other: SimpleNamespace) -> None:
    assert other.metrics == one.metrics
    assert other.rollouts == one.rollouts
    assert other.weights.keys() == one.weights.keys()
    assert all(other.weights[name].equal(weight) for name, weight in one.weights.items())


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference between two sets of weights."""
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def rescored(model: Path | str, rollouts: list[dict[str, Any]]) -> list[list[float]]:
    return HFModel.load(str(model)).score([(r["prompt_ids"], r["response_ids"]) for r in rollouts])


def advantages(rollout: dict[str, Any]) -> list[float]:
    """teacher - behaviour, which is teacher - prox where the learner itself has sampled."""
    return [t - b for t, b in zip(rollout["teacher_logprobs"], rollout["behavior_logprobs"], strict=True)]


@pytest.fixture(scope="module")
def base(distil: Distil, teachers_document: Document) -> dict[str, SimpleNamespace]:
    """Three plain steps with either objective."""
    return {o: distil(teachers_document(steps=3, objective=o, grad_share_every=2)) for o in OBJECTIVES}


# -------------------------------------------------------------------------------------------- what must change nothing


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_student_that_is_its_own_teacher_does_not_move(
    tiny: Path, distil: Distil, teachers_document: Document, objective: str
) -> None:
    from safetensors.torch import load_file

    document = teachers_document(objective=objective, steps=3)
    for teacher in document["teachers"].values():
        teacher |= {"model": document["student"], "kind": "self"}
    run = distil(document)
    for row in run.metrics:
        assert row["train/loss"] == pytest.approx(0, abs=1e-6)
        assert row["train/grad_norm"] == pytest.approx(0, abs=1e-6)
        for name in ("distill/kl_k1_nats", "distill/kl_k3_nats", "distill/kl_exact_nats"):
            assert row.get(name, {}) == pytest.approx(dict.fromkeys(row.get(name, {}), 0.0), abs=1e-6)
    assert distance(load_file(tiny / "models" / "student" / "model.safetensors"), run.weights) <= 1e-6


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_order_of_teachers_in_the_file_means_nothing(
    base: dict[str, SimpleNamespace], distil: Distil, teachers_document: Document, objective: str
) -> None:
    document = teachers_document(steps=3, objective=objective, grad_share_every=2)
    document["teachers"] = dict(reversed(document["teachers"].items()))
    run = distil(document)
    assert_same_bits(base[objective], run)
    assert run.card["fingerprint"] == base[objective].card["fingerprint"]


def test_the_order_of_teachers_means_nothing_to_a_warm_start(distil: Distil, teachers_document: Document) -> None:
    document = teachers_document(warm_start="merge", steps=1)
    one = distil(document)
    document["teachers"] = dict(reversed(document["teachers"].items()))
    assert_same_bits(one, distil(document))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_two_aliases_of_a_checkpoint_are_one_teacher_of_both_domains(
    distil: Distil, teachers_document: Document, objective: str
) -> None:
    document = teachers_document(objective=objective, learning_rate=1e-4)
    model = document["teachers"]["arithmetic"]["model"]
    document["teachers"]["structured"]["model"] = model
    apart = distil(document)
    document["teachers"] = {
        "both": {"model": model, "domains": ["arithmetic", "structured"]},
        "tools": document["teachers"]["tools"],
    }
    together = distil(document)
    for one, other in zip(apart.metrics, together.metrics, strict=True):
        assert other["train/loss"] == pytest.approx(one["train/loss"], abs=1e-5)
        assert other["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=1e-4)
        shares = one["policy/token_share"]
        assert other["policy/token_share"]["both"] == pytest.approx(shares["arithmetic"] + shares["structured"])
    # Two steps of 1e-4 move a weight by up to 2e-4; in other micro-batches the sums differ by rounding alone.
    assert distance(apart.weights, together.weights) < 1e-5


def test_micro_batches_change_nothing_but_rounding(
    base: dict[str, SimpleNamespace], distil: Distil, teachers_document: Document
) -> None:
    for objective in OBJECTIVES:
        document = teachers_document(steps=1, objective=objective, gradient_accumulation=7, sampling_batch_size=5)
        one, other = base[objective].metrics[0], distil(document).metrics[0]
        assert other["train/loss"] == pytest.approx(one["train/loss"], abs=FLOAT32)
        assert other["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=FLOAT32)


# ------------------------------------------------------------------------------------------------ what a run writes


def test_every_sample_is_kept_with_the_scores_of_its_own_teacher(tiny: Path, base: dict[str, SimpleNamespace]) -> None:
    for run in base.values():
        assert [len(step) for step in run.rollouts] == [12, 12, 12]
        assert len({r["sample_id"] for step in run.rollouts for r in step}) == 36
        # 24 prompts in batches of 12: the first two steps are one epoch.
        assert len({r["prompt_id"] for step in run.rollouts[:2] for r in step}) == 24
        for step, rollouts in enumerate(run.rollouts):
            assert {r["policy_version"] for r in rollouts} == {step}
            for domain in DOMAINS:
                mine = [r for r in rollouts if r["teacher_id"] == domain]
                assert {r["prompt_id"].split("/")[0] for r in mine} == {domain}
                for rollout, row in zip(mine, rescored(tiny / "models" / domain, mine), strict=True):
                    assert rollout["teacher_logprobs"] == pytest.approx(row, abs=FLOAT32)
    assert base["sampled"].rollouts[0] == [
        r | {"teacher_logprobs": pytest.approx(r["teacher_logprobs"], abs=FLOAT32)} for r in base["exact"].rollouts[0]
    ]


def test_the_sampler_is_the_learner_as_long_as_nothing_is_stale(tiny: Path, base: dict[str, SimpleNamespace]) -> None:
    for run in base.values():
        first = run.rollouts[0]
        for rollout, row in zip(first, rescored(tiny / "models" / "student", first), strict=True):
            assert rollout["behavior_logprobs"] == pytest.approx(row, abs=FLOAT32)
        for row in run.metrics:
            assert row["policy/staleness_ratio"] == pytest.approx(dict.fromkeys(DOMAINS, 1.0), abs=1e-4)
            assert row["policy/kept_fraction"] == dict.fromkeys(DOMAINS, 1.0)


def test_metrics_are_those_of_the_rollouts(base: dict[str, SimpleNamespace]) -> None:
    for objective, run in base.items():
        assert [row["step"] for row in run.metrics] == [0, 1, 2]
        for row, rollouts in zip(run.metrics, run.rollouts, strict=True):
            by_teacher = {d: [r for r in rollouts if r["teacher_id"] == d] for d in DOMAINS}
            tokens = {d: sum(len(r["response_ids"]) for r in found) for d, found in by_teacher.items()}
            total = sum(tokens.values())
            log_ratios = {d: [a for r in found for a in advantages(r)] for d, found in by_teacher.items()}
            expected = {
                "distill/kl_k1_nats": {d: -fmean(found) for d, found in log_ratios.items()},
                "distill/kl_k3_nats": {d: fmean(k3(a) for a in found) for d, found in log_ratios.items()},
                "policy/token_share": {d: n / total for d, n in tokens.items()},
                "rollout/response_length": {d: tokens[d] / len(found) for d, found in by_teacher.items()},
                "rollout/truncated_share": {
                    d: fmean(r["finish_reason"] == "length" for r in found) for d, found in by_teacher.items()
                },
            }
            for name, values in expected.items():
                assert row[name] == pytest.approx(values, abs=FLOAT32), name
            assert sum(row["policy/token_share"].values()) == pytest.approx(1)
            assert row["rollout/tokens"] == total
            assert row["train/learning_rate"] == 1e-3
            assert all(0 < value < 6.3 for value in row["policy/entropy_nats"].values())  # log 504 = 6.22
            if objective == "sampled":
                loss = -sum(a for found in log_ratios.values() for a in found) / total
            else:
                loss = sum(row["distill/kl_exact_nats"][d] * n / total for d, n in tokens.items())
                assert all(value > 0 for value in row["distill/kl_exact_nats"].values())
            assert row["train/loss"] == pytest.approx(loss, abs=FLOAT32)
        measured = [row.get("policy/grad_share") for row in run.metrics]
        assert measured[1] is None
        for shares in (measured[0], measured[2]):
            assert list(shares) == DOMAINS
            assert sum(shares.values()) == pytest.approx(1)
            assert min(shares.values()) > 0
        for row in run.times:
            seconds = {"perf/rollout_s", "perf/score_s", "perf/update_s", "perf/store_s"}
            assert set(row) == seconds | {"perf/teacher_tokens"}
            assert all(row[name] >= 0 for name in seconds)


def k3(log_ratio: float) -> float:
    return math.exp(log_ratio) - 1 - log_ratio


def test_some_answers_end_and_some_are_cut(base: dict[str, SimpleNamespace]) -> None:
    rollouts = [r for step in base["sampled"].rollouts for r in step]
    assert {r["finish_reason"] for r in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        ended = rollout["response_ids"][-1] == 1
        assert rollout["finish_reason"] == ("stop" if ended else "length")
        assert len(rollout["response_ids"]) == 12 or ended
        assert 1 not in rollout["response_ids"][:-1]


def test_the_card_says_what_made_the_checkpoint(base: dict[str, SimpleNamespace], tiny: Path) -> None:
    card = base["exact"].card
    assert card["algorithm"] == "mopd/exact"
    assert card["parent"] == str(tiny / "models" / "student")
    assert card["warm_start"] == "none"
    assert list(card["teachers"]) == DOMAINS
    assert card["teachers"]["tools"] == {
        "model": str(tiny / "models" / "tools"),
        "kind": "rl",
        "domains": ["tools"],
        "benchmarks": ["tools"],
        "eval": "tools",
        "digest": card["config"]["teachers"]["tools"]["model"],
    }
    assert len({card["digest"], card["fingerprint"], *(t["digest"] for t in card["teachers"].values())}) == 5
    assert "steps_to_reach_teacher" not in card


# ----------------------------------------------------------------------------------------------------------- staleness


def test_a_stale_sampler_is_one_step_behind(tiny: Path, distil: Distil, teachers_document: Document) -> None:
    fast = {"learning_rate": 1e-2, "correction_low": 0.8, "correction_high": 1.25}
    stale = distil(teachers_document(steps=3, staleness=1, **fast))
    one_step = distil(teachers_document(steps=1, staleness=1, **fast))
    assert [{r["policy_version"] for r in step} for step in stale.rollouts] == [{0}, {0}, {1}]
    assert stale.metrics[0] == one_step.metrics[0]
    # The samplers of steps 0, 1 and 2 are the student as it began, twice, and as one step left it.
    student = tiny / "models" / "student"
    for rollouts, sampler in zip(stale.rollouts, (student, student, one_step.checkpoint), strict=True):
        for rollout, row in zip(rollouts, rescored(sampler, rollouts), strict=True):
            assert rollout["behavior_logprobs"] == pytest.approx(row, abs=FLOAT32)
    # At step 1 the learner is what one step left; ratio, mask and loss by hand.
    rollouts, row = stale.rollouts[1], stale.metrics[1]
    prox = rescored(one_step.checkpoint, rollouts)
    ratios: dict[str, list[float]] = {d: [] for d in DOMAINS}
    loss = 0.0
    for rollout, learner in zip(rollouts, prox, strict=True):
        values = zip(learner, rollout["behavior_logprobs"], rollout["teacher_logprobs"], strict=True)
        for prox_logprob, behavior_logprob, teacher_logprob in values:
            ratio = math.exp(prox_logprob - behavior_logprob)
            ratios[rollout["teacher_id"]].append(ratio)
            if 0.8 <= ratio <= 1.25:
                loss -= ratio * (teacher_logprob - prox_logprob)
    kept = {d: fmean(0.8 <= c <= 1.25 for c in found) for d, found in ratios.items()}
    assert row["policy/staleness_ratio"] == pytest.approx({d: fmean(c) for d, c in ratios.items()}, rel=1e-4)
    assert row["policy/kept_fraction"] == pytest.approx(kept)
    assert min(kept.values()) > 0
    assert max(kept.values()) < 1
    # Masked tokens stay in the denominator.
    assert row["train/loss"] == pytest.approx(loss / row["rollout/tokens"], abs=1e-4)


@pytest.mark.parametrize(
    ("objective", "change"),
    [
        ("sampled", {"correction": "none"}),
        ("sampled", {"correction": "icepop", "correction_low": 0.0, "correction_high": 1e30}),
        ("sampled", {"correction": "tis"}),
        ("exact", {"correction": "none"}),
    ],
)
def test_corrections_agree_where_there_is_nothing_to_correct(
    base: dict[str, SimpleNamespace],
    distil: Distil,
    teachers_document: Document,
    objective: str,
    change: dict[str, Any],
) -> None:
    row = distil(teachers_document(steps=1, objective=objective, **change)).metrics[0]
    plain = base[objective].metrics[0]
    assert row["train/loss"] == pytest.approx(plain["train/loss"], abs=FLOAT32)
    assert row["train/grad_norm"] == pytest.approx(plain["train/grad_norm"], rel=1e-4)
    assert row["policy/kept_fraction"] == dict.fromkeys(DOMAINS, 1.0)


# ----------------------------------------------------------------------------------------- weights, reductions, samples


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_lambda_scales_the_loss_and_gradient_of_its_teacher(
    base: dict[str, SimpleNamespace], distil: Distil, teachers_document: Document, objective: str
) -> None:
    document = teachers_document(steps=1, objective=objective)
    document["teachers"]["tools"]["weight"] = 3.0
    plain, row = base[objective].metrics[0], distil(document).metrics[0]
    shares = plain["policy/grad_share"]
    whole = shares["arithmetic"] + shares["structured"] + 3 * shares["tools"]
    expected = {d: shares[d] * (3 if d == "tools" else 1) / whole for d in DOMAINS}
    assert row["policy/grad_share"] == pytest.approx(expected, rel=1e-4)
    kl = plain["distill/kl_k1_nats" if objective == "sampled" else "distill/kl_exact_nats"]
    terms = {d: kl[d] * plain["policy/token_share"][d] for d in DOMAINS}
    assert row["train/loss"] == pytest.approx(sum(terms.values()) + 2 * terms["tools"], abs=FLOAT32)
    assert row["policy/token_share"] == plain["policy/token_share"]


def test_token_and_sequence_reduction(
    base: dict[str, SimpleNamespace], distil: Distil, teachers_document: Document
) -> None:
    run = distil(teachers_document(steps=1, loss_reduction="sequence"))
    rollouts = run.rollouts[0]
    assert rollouts == base["sampled"].rollouts[0]
    means = [fmean(advantages(r)) for r in rollouts]
    lengths = [len(r["response_ids"]) for r in rollouts]
    assert min(lengths) < max(lengths)
    assert run.metrics[0]["train/loss"] == pytest.approx(-fmean(means), abs=FLOAT32)
    by_token = -sum(mean * length for mean, length in zip(means, lengths, strict=True)) / sum(lengths)
    assert base["sampled"].metrics[0]["train/loss"] == pytest.approx(by_token, abs=FLOAT32)
    assert by_token != pytest.approx(-fmean(means), abs=1e-3)


def test_several_samples_of_a_prompt_are_different_answers(
    base: dict[str, SimpleNamespace], distil: Distil, teachers_document: Document
) -> None:
    rollouts = distil(teachers_document(steps=1, samples_per_prompt=2)).rollouts[0]
    assert len(rollouts) == 24
    assert len({r["prompt_id"] for r in rollouts}) == 12
    assert len({tuple(r["response_ids"]) for r in rollouts}) == 24
    firsts = {r["sample_id"]: r["response_ids"] for r in base["sampled"].rollouts[0]}
    assert {r["sample_id"]: r["response_ids"] for r in rollouts if r["sample_id"].endswith("/0@0")} == firsts


def test_a_batch_larger_than_the_prompts_holds_no_answer_twice(distil: Distil, teachers_document: Document) -> None:
    rollouts = distil(teachers_document(steps=1, batch_size=30)).rollouts[0]
    assert len(rollouts) == len({r["sample_id"] for r in rollouts}) == 30
    assert len({(r["prompt_id"], tuple(r["response_ids"])) for r in rollouts}) == 30


def test_inner_steps_leave_prox_until_the_clip_holds(
    base: dict[str, SimpleNamespace], distil: Distil, teachers_document: Document
) -> None:
    run = distil(teachers_document(steps=2, inner_steps=3, learning_rate=1e-2))
    once = base["sampled"].metrics[0]
    # The first of the inner steps is the plain one: prox is the policy itself.
    assert run.metrics[0]["train/loss"] == pytest.approx(once["train/loss"], abs=FLOAT32)
    assert run.metrics[0]["distill/kl_k1_nats"] == pytest.approx(once["distill/kl_k1_nats"], abs=FLOAT32)
    assert run.metrics[0]["policy/kept_fraction"] == dict.fromkeys(DOMAINS, 1.0)
    # After steps of 1e-2 many tokens have left [0.8, 1.28]; a figure that is always 0 would tell nobody.
    assert all(0 < value < 1 for value in run.metrics[0]["policy/clip_fraction"].values())
    free = distil(teachers_document(steps=2, inner_steps=3, learning_rate=1e-2, clip_low=1.0, clip_high=1e6))
    assert distance(run.weights, free.weights) > 1e-3


def test_one_inner_step_never_clips(base: dict[str, SimpleNamespace]) -> None:
    assert all(row["policy/clip_fraction"] == dict.fromkeys(DOMAINS, 0.0) for row in base["sampled"].metrics)


def test_a_bound_on_the_advantage_bounds_the_loss(distil: Distil, teachers_document: Document) -> None:
    run = distil(teachers_document(steps=1, advantage_clip=0.5))
    clipped = [max(-0.5, min(0.5, a)) for r in run.rollouts[0] for a in advantages(r)]
    assert run.metrics[0]["train/loss"] == pytest.approx(-fmean(clipped), abs=FLOAT32)


# ------------------------------------------------------------------------------------------------------ broken teachers


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_teacher_that_gives_no_number_stops_the_run_by_name(
    write_tiny_model: Callable[..., Path], tmp_path: Path, distil: Distil, teachers_document: Document, objective: str
) -> None:
    from safetensors.torch import load_file, save_file

    broken = write_tiny_model(tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    document = teachers_document(objective=objective)
    document["teachers"]["tools"]["model"] = str(broken)
    told = r"sample tools/\d/0/0@0: .* is nan; teacher 'tools'"
    if objective == "exact":  # whose head is tried before anything is sampled
        told = r"teacher 'tools': model .*/broken: its logits are no numbers"
    with pytest.raises(MopdctlError, match=told):
        distil(document)


# -------------------------------------------------------------------------------------------- learning, held-out scores


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory, tiny: Path, distil: Distil) -> SimpleNamespace:
    """Thirty steps on one domain, towards a teacher that answers `bo` to everything; beside it the student itself."""
    from mopdctl.world.data import generate

    root = tmp_path_factory.mktemp("learnt")
    questions = [e.user for e in islice(generate("arithmetic", "train", seed=1), 24)]
    conversations = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "bo"}]} for q in questions
    ]
    write_jsonl(root / "sft.jsonl", conversations)
    train = {"steps": 60, "batch_size": 24, "learning_rate": 1e-2}
    student = str(tiny / "models" / "student")
    sft = {"name": "teacher", "model": student, "data": ["sft.jsonl"], "train": train}
    run_sft(SftConfig.model_validate(sft), Workspace(root), base=root)
    prompts = [
        {"id": f"{domain}/{i}", "domain": domain, "prompt": q, "verifier": "exact_match", "reference": {"answer": "bo"}}
        for domain in ("easy", "other")
        for i, q in enumerate(questions)
    ]
    write_jsonl(root / "prompts.jsonl", [p for p in prompts if p["domain"] == "easy"] + prompts[24:26])
    write_jsonl(root / "dev.jsonl", prompts)
    document = {
        "name": "merged",
        "student": student,
        "prompts": "prompts.jsonl",
        "teachers": {
            "constant": {"model": "teacher", "domains": ["easy"]},
            "self": {"model": student, "kind": "self", "domains": ["other"]},
        },
        "train": {
            "steps": 30,
            "batch_size": 13,
            "max_new_tokens": 6,
            "learning_rate": 1e-2,
            "objective": "exact",
            "eval_every": 4,
            "eval_prompts": "dev.jsonl",
            "eval_size": 10,
        },
    }
    return distil(document, root)


def test_the_exact_kl_falls(learnt: SimpleNamespace) -> None:
    kl = [row["distill/kl_exact_nats"]["constant"] for row in learnt.metrics]
    assert kl[0] > 3
    assert fmean(kl[10:20]) < 0.5 * fmean(kl[:10])
    assert fmean(kl[20:]) < 0.1 * kl[0]


def test_held_out_scores_and_recovery_are_written_as_often_as_asked(learnt: SimpleNamespace) -> None:
    measured = {row["step"]: row for row in learnt.metrics if "held_out/score" in row}
    assert list(measured) == [3, 7, 11, 15, 19, 23, 27, 29]  # every fourth step, and the last
    for row in measured.values():
        assert set(row["held_out/score"]) == {"constant", "self"}
        # Ten prompts: scores come in tens. The teacher scores 100, the student 0 before, so recovery is the score.
        assert row["held_out/score"]["constant"] in range(0, 101, 10)
        assert row["held_out/recovery_pct"]["constant"] == row["held_out/score"]["constant"]
        assert row["held_out/recovery_pct"]["self"] is None  # it is not ahead of itself
    assert measured[29]["held_out/score"]["constant"] == 100


def test_the_card_says_how_many_steps_it_took_to_reach_the_teacher(learnt: SimpleNamespace) -> None:
    first = next(row["step"] for row in learnt.metrics if row.get("held_out/score", {}).get("constant") == 100)
    assert learnt.card["steps_to_reach_teacher"] == {"constant": first + 1, "self": None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "4-2 " * 80}, "do not fit into the model's context of 128"),
        ({"verifier": "exact"}, "verifier 'exact' is none of "),
        ({"domain": "poems"}, "domain 'poems': no teacher serves it"),
        ({"reference": {}}, "reference has no 'answer'"),
        ({"verifier": "integer"}, "'answer'"),
    ],
)
def test_unusable_held_out_prompts_stop_a_run_before_it_writes_anything(
    tmp_path: Path, teachers_document: Document, distil: Distil, change: dict[str, Any], message: str
) -> None:
    row: dict[str, Any] = {"domain": "tools", "prompt": "?", "verifier": "exact_match", "reference": {"answer": "x"}}
    write_jsonl(tmp_path / "dev.jsonl", [row, row | {"id": "second"} | change])
    workspace = tmp_path / "workspace"
    with pytest.raises(InputError) as caught:
        distil(teachers_document(eval_every=1, eval_prompts=str(tmp_path / "dev.jsonl")), workspace)
    assert f"{tmp_path / 'dev.jsonl'}:2: " in str(caught.value)
    assert message in str(caught.value)
    assert not workspace.exists()
