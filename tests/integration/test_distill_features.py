"""What a run may have beside its teachers' word: rewards, an anchor, balance, pools, tiers, a warm-up, black boxes.

FLOAT32 is what summing the same float32 terms in another order may change in a log-probability here.
"""

import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, pstdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mopdctl.config.teachers import TeachersFile
from mopdctl.distill import losses
from mopdctl.distill.run import run_distill
from mopdctl.distill.score import from_bits
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError, MopdctlError
from mopdctl.files import read_jsonl, write_json, write_jsonl
from mopdctl.records import Sample
from mopdctl.runs import Workspace
from mopdctl.store.store import Store
from mopdctl.verifiers import Attempt, Verdict, VerdictState
from mopdctl.verifiers.pool import VerifierPool

Document = Callable[..., dict[str, Any]]
Distil = Callable[..., SimpleNamespace]

FLOAT32 = 1e-5
DOMAINS = ["arithmetic", "structured", "tools"]
# What an answer of the tiny student may or may not have, what it always has, what it never has.
SOMETIMES, ALWAYS, NEVER = (
    {"kind": "letter", "letter": "e", **bounds} for bounds in ({"min": 1}, {"max": 99}, {"min": 99})
)

pytestmark = pytest.mark.slow  # every test trains


class StopError(Exception):
    pass


def asks(row: dict[str, Any], constraint: dict[str, Any]) -> dict[str, Any]:
    """The prompt, passed by answers that meet one constraint."""
    return row | {"verifier": "constraints", "reference": {"constraints": [constraint]}}


def prompt_rows(tiny: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_jsonl(tiny / "prompts.jsonl")]


@pytest.fixture(scope="module")
def checked(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The prompts with one verifier: of each eight, answers pass five now and then, two never, one always."""
    path = tmp_path_factory.mktemp("checked") / "prompts.jsonl"
    kinds = [SOMETIMES] * 5 + [NEVER, NEVER, ALWAYS]
    write_jsonl(path, [asks(row, kinds[i % 8]) for i, row in enumerate(prompt_rows(tiny))])
    return str(path)


def samples_of(run: SimpleNamespace) -> list[dict[str, Sample]]:
    """The stored samples of each step by id."""
    steps: dict[int, dict[str, Sample]] = {}
    for sample in Store(run.folder.parents[1] / "rollouts" / run.folder.name).scan():
        steps.setdefault(int(sample.group_id.rpartition("/")[2]), {})[sample.sample_id] = sample
    return [found for _, found in sorted(steps.items())]


def advantages(sample: Sample) -> list[float]:
    """teacher - behaviour of each loss token, which is teacher - prox where the learner itself has sampled."""
    assert sample.teacher_logprobs is not None
    return (sample.teacher_logprobs.astype(float) - sample.behavior_logprobs.astype(float)).tolist()


# ------------------------------------------------------------------------------------------------------- hidden states


def test_the_store_holds_the_hidden_states_of_the_routed_teacher(
    tiny: Path, distil: Distil, teachers_document: Document
) -> None:
    run = distil(teachers_document(steps=1, objective="exact", teacher_hidden="store"))
    samples = list(samples_of(run)[0].values())
    assert len(samples) == 12
    for domain in DOMAINS:
        mine = [s for s in samples if s.teacher_id == domain]
        teacher = HFModel.load(str(tiny / "models" / domain))
        pairs = [(s.prompt_ids.tolist(), s.response_ids.tolist()) for s in mine]
        states = teacher.hidden_states(pairs, [[1] * len(response) for _, response in pairs])
        for sample, state_NH in zip(mine, states, strict=True):
            assert sample.teacher_hidden is not None
            assert (sample.teacher_hidden.dtype, sample.teacher_hidden.shape) == ("uint16", (len(state_NH), 32))
            # bfloat16 keeps eight bits
            torch.testing.assert_close(from_bits(sample.teacher_hidden).float(), state_NH, rtol=2**-8, atol=1e-4)


def test_memory_and_store_are_equal_where_teachers_compute_in_bfloat16(
    distil: Distil, teachers_document: Document
) -> None:
    runs = []
    for place in ("memory", "store"):
        document = teachers_document(objective="exact", teacher_hidden=place, inner_steps=2)
        for teacher in document["teachers"].values():
            teacher["dtype"] = "bfloat16"
        runs.append(distil(document))
    assert runs[0].metrics == runs[1].metrics
    assert runs[0].rollouts == runs[1].rollouts
    assert all(runs[1].weights[name].equal(weight) for name, weight in runs[0].weights.items())


@pytest.mark.parametrize("residency", ["all", pytest.param("one", marks=pytest.mark.slow)])
def test_a_step_that_is_done_again_from_the_store_asks_no_teacher(
    tmp_path: Path,
    distil: Distil,
    finished: Callable[..., SimpleNamespace],
    teachers_document: Document,
    monkeypatch: pytest.MonkeyPatch,
    residency: str,
) -> None:
    settings = {"steps": 3, "objective": "exact", "teacher_hidden": "store", "teacher_residency": residency}
    document = teachers_document(**settings)
    straight = distil(document)
    asked: list[int] = []
    real = losses.active_hidden

    def counted(model: Any, layout: Any, active_BR: Any) -> Any:
        asked.append(int(layout.attention_mask_BT.sum()))
        return real(model, layout, active_BR)

    monkeypatch.setattr(losses, "active_hidden", counted)

    def stop(done: int, row: dict[str, Any]) -> None:
        if done == 2:
            raise StopError

    config, place = TeachersFile.model_validate(document), Workspace(tmp_path)
    with pytest.raises(StopError):
        run_distill(config, place, base=tmp_path, on_step=stop)
    assert not (place.run("merged") / "state").exists()  # both steps are committed, and no state was kept
    first = sum(asked)
    run_distill(config, place, base=tmp_path)
    again = finished(tmp_path)
    tokens = [sum(row["perf/teacher_tokens"].values()) for row in straight.times]
    assert first == sum(tokens[:2])
    assert sum(asked) - first == tokens[2]  # once more from the first step on, and only the third asks
    assert [row["perf/teacher_tokens"] for row in again.times] == [{}, {}, straight.times[2]["perf/teacher_tokens"]]
    assert again.metrics == straight.metrics
    assert again.rollouts == straight.rollouts
    assert all(again.weights[name].equal(weight) for name, weight in straight.weights.items())


# ------------------------------------------------------------------------------------------------------ what is counted


@pytest.mark.parametrize(
    "train",
    [
        pytest.param({"objective": "exact"}, marks=pytest.mark.slow),
        {"objective": "exact", "inner_steps": 2, "gradient_accumulation": 4, "teacher_residency": "one"},
        {"inner_steps": 2, "gradient_accumulation": 4},
    ],
    ids=["exact", "exact-twice", "sampled"],
)
def test_ten_teachers_over_three_checkpoints_cost_three_loads_and_the_routed_tokens_once(
    tiny: Path, tmp_path: Path, distil: Distil, teachers_document: Document, monkeypatch: pytest.MonkeyPatch, train: Any
) -> None:
    rows = [row | {"domain": f"domain-{i % 10}"} for i, row in enumerate(prompt_rows(tiny)[:20])]
    write_jsonl(tmp_path / "prompts.jsonl", rows)
    document = teachers_document(steps=2, batch_size=20, **train) | {"prompts": str(tmp_path / "prompts.jsonl")}
    document["teachers"] = {
        f"teacher-{i}": {"model": str(tiny / "models" / DOMAINS[i % 3]), "domains": [f"domain-{i}"]} for i in range(10)
    }
    loads: list[str] = []
    load = HFModel.load.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        HFModel, "load", classmethod(lambda cls, path, **options: loads.append(path) or load(cls, path, **options))
    )
    run = distil(document)
    assert sorted(loads) == sorted([document["student"], *(str(tiny / "models" / d) for d in DOMAINS)])
    for row, rollouts in zip(run.times, run.rollouts, strict=True):
        routed: Counter[str] = Counter()
        for rollout in rollouts:
            routed[rollout["teacher_id"]] += len(rollout["prompt_ids"]) + len(rollout["response_ids"])
        assert len(routed) == 10
        assert row["perf/teacher_tokens"] == dict(sorted(routed.items()))


# ------------------------------------------------------------------------------------------------------------- rewards


def test_rewards_are_kept_and_mixed_into_the_advantage_of_their_group(
    checked: str, distil: Distil, teachers_document: Document
) -> None:
    # NeMo-RL: keys for an outcome reward that nobody reads
    train = {"steps": 1, "samples_per_prompt": 4, "outcome_weight": 0.5}
    run = distil(teachers_document(**train) | {"prompts": checked})
    plain = distil(teachers_document(steps=1, samples_per_prompt=4) | {"prompts": checked})
    (samples,) = samples_of(run)
    assert len(samples) == 48
    assert {s.verifier for s in samples.values()} == {"constraints/2"}
    groups: dict[str, list[Sample]] = {}
    for sample in samples.values():
        groups.setdefault(sample.group_id, []).append(sample)
    mixed, alone, level = [], [], 0
    for members in groups.values():
        rewards = [s.reward for s in members if s.reward is not None]
        assert len(rewards) == len(members) == 4
        level += len(set(rewards)) == 1
        for sample, reward in zip(members, rewards, strict=True):
            outcome = (reward - fmean(rewards)) / (pstdev(rewards) + 1e-6)  # 0 where nothing varies
            alone += advantages(sample)
            mixed += [a + 0.5 * outcome for a in advantages(sample)]
    assert 2 <= level <= 10  # both kinds of groups are there
    assert run.metrics[0]["train/loss"] == pytest.approx(-fmean(mixed), abs=FLOAT32)
    assert plain.metrics[0]["train/loss"] == pytest.approx(-fmean(alone), abs=FLOAT32)
    assert run.metrics[0]["train/grad_norm"] != pytest.approx(plain.metrics[0]["train/grad_norm"], rel=1e-2)
    assert run.rollouts == plain.rollouts
    assert all(s.reward is None for s in samples_of(plain)[0].values())


def test_where_no_reward_varies_the_teachers_word_stands_alone_to_the_bit(
    tiny: Path, tmp_path: Path, distil: Distil, teachers_document: Document
) -> None:
    write_jsonl(tmp_path / "prompts.jsonl", [asks(row, NEVER) for row in prompt_rows(tiny)])
    prompts = {"prompts": str(tmp_path / "prompts.jsonl")}
    plain, run = (
        distil(teachers_document(samples_per_prompt=2, outcome_weight=alpha) | prompts) for alpha in (0.0, 5.0)
    )
    assert run.metrics == plain.metrics
    assert all(run.weights[name].equal(weight) for name, weight in plain.weights.items())


def test_a_step_that_nobody_can_check_ends_the_run(
    checked: str, distil: Distil, teachers_document: Document, monkeypatch: pytest.MonkeyPatch
) -> None:
    # DN-MOPD: a judge that is down counts as wrong answers
    def down(self: VerifierPool, asked: list[tuple[str, Attempt]]) -> list[Verdict]:
        return [Verdict(VerdictState.INFRA_ERROR, None, name, 1, "down", None) for name, _ in asked]

    monkeypatch.setattr(VerifierPool, "check", down)
    document = teachers_document(samples_per_prompt=2, outcome_weight=1.0) | {"prompts": checked}
    with pytest.raises(MopdctlError, match="step 0: no answer could be checked; "):
        distil(document)


# -------------------------------------------------------------------------------------------------------------- anchor


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Five conversations to be held near."""
    path = tmp_path_factory.mktemp("talk") / "sft.jsonl"
    said = [("hello", "hi there"), ("7 + 5", "12"), ("name?", "kalo"), ("9 - 2", "7"), ("colour?", "red")]
    write_jsonl(
        path, [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in said]
    )
    return str(path)


@pytest.mark.parametrize("objective", ["exact", pytest.param("sampled", marks=pytest.mark.slow)])
def test_an_sft_anchor_has_a_denominator_of_its_own_and_what_it_holds_gets_likelier(
    talk: str, distil: Distil, teachers_document: Document, objective: str
) -> None:
    # prime-rl: mixed components change each other's scale
    train = {"objective": objective, "learning_rate": 3e-3}
    plain = distil(teachers_document(steps=1, **train)).metrics[0]
    for size, steps in ((5, 5), (10, 1)):
        anchor = {"sft_weight": 0.3, "sft_data": talk, "sft_batch_size": size}
        run = distil(teachers_document(steps=steps, anchor=anchor, **train))
        first = run.metrics[0]
        held = [row["sft/loss_nats"]["sft_anchor"] for row in run.metrics]
        assert first["train/loss"] == pytest.approx(plain["train/loss"] + 0.3 * held[0], abs=FLOAT32)
        for name in ("distill/kl_k1_nats", "rollout/response_length", "policy/kept_fraction"):
            assert first[name] == plain[name], name
        shares = [
            {d: row["policy/grad_share"][d] / row["policy/grad_share"]["tools"] for d in DOMAINS}
            for row in (first, plain)
        ]
        assert shares[0] == pytest.approx(shares[1], rel=1e-4)
        assert steps == 1 or held[-1] < held[0] - 0.5


# ------------------------------------------------------------------------------------- balance, sampling weights, pools


@pytest.mark.parametrize("objective", ["sampled", "exact"])
def test_shares_of_the_gradient_become_what_is_asked_for(
    talk: str, distil: Distil, teachers_document: Document, objective: str
) -> None:
    # Open-MOPD, DN-MOPD: one domain has 94 % of the gradient or vanishes
    target = {"arithmetic": 0.2, "structured": 0.2, "tools": 0.6}
    balance = {"mode": "share", "target_shares": target, "memory": 0.0}
    anchor = {"sft_weight": 0.3, "sft_data": talk}
    train = {"objective": objective, "steps": 2, "batch_size": 24, "grad_share_every": 1, "learning_rate": 1e-5}
    one, two = distil(teachers_document(**train, balance=balance, anchor=anchor)).metrics
    measured = one["policy/grad_share"]
    assert one["balance/factor"] == dict.fromkeys(DOMAINS, 1.0)
    wanted = {d: target[d] / measured[d] for d in DOMAINS}
    factors = {d: 3 * value / sum(wanted.values()) for d, value in wanted.items()}
    assert two["balance/factor"] == pytest.approx(factors, rel=1e-6)
    # all prompts are in both steps and the student hardly moves: the second step has the shares
    of_teachers = sum(two["policy/grad_share"][d] for d in DOMAINS)
    for domain in DOMAINS:
        share = two["policy/grad_share"][domain] / of_teachers
        assert abs(share - target[domain]) < 0.3 * target[domain]
    assert one["policy/grad_share"]["sft_anchor"] > 0


def test_sampling_weights_say_how_often_and_not_how_much(distil: Distil, teachers_document: Document) -> None:
    # Automodel #3303: sampling ratio and weight in the objective are coupled
    document = teachers_document(steps=2, batch_size=12, loss_reduction="sequence")
    for domain, weight in zip(DOMAINS, (2.0, 1.0, 1.0), strict=True):
        document["teachers"][domain]["sampling_weight"] = weight
    run = distil(document)
    # drawn 2 : 1 : 1 where a third of the prompts is each one's
    factors = {"arithmetic": (1 / 3) / (1 / 2), "structured": (1 / 3) / (1 / 4), "tools": (1 / 3) / (1 / 4)}
    for row, samples in zip(run.metrics, samples_of(run), strict=True):
        assert Counter(s.teacher_id for s in samples.values()) == {"arithmetic": 6, "structured": 3, "tools": 3}
        terms = [-factors[s.teacher_id] * fmean(advantages(s)) for s in samples.values()]
        assert row["train/loss"] == pytest.approx(fmean(terms), abs=1e-4)


def test_a_teachers_own_prompts_are_its_own(
    tiny: Path, tmp_path: Path, distil: Distil, teachers_document: Document
) -> None:
    rows = prompt_rows(tiny)
    write_jsonl(tmp_path / "common.jsonl", [row for row in rows if row["domain"] != "tools"])
    own = [{k: v for k, v in row.items() if k != "domain"} for row in rows if row["domain"] == "tools"]
    write_jsonl(tmp_path / "own.jsonl", [row | {"id": f"own-{i}"} for i, row in enumerate(own)])
    document = teachers_document(batch_size=12) | {"prompts": str(tmp_path / "common.jsonl")}
    document["teachers"]["tools"]["prompts"] = str(tmp_path / "own.jsonl")
    run = distil(document)
    drawn = {r["prompt_id"]: r["teacher_id"] for step in run.rollouts for r in step}
    assert len(drawn) == 24
    assert {p for p, teacher in drawn.items() if teacher == "tools"} == {f"tools/own-{i}" for i in range(8)}
    # the tokens are those of the prompts in the common file: a plain run has them too
    plain = distil(teachers_document(batch_size=12))
    prompts = [{tuple(r["prompt_ids"]) for step in x.rollouts for r in step} for x in (run, plain)]
    assert prompts[0] == prompts[1]
    document["prompts"] = str(tiny / "prompts.jsonl")
    with pytest.raises(InputError, match="routes to teacher 'tools', which has `prompts` of its own"):
        distil(document)


def test_the_curriculum_leaves_what_the_student_never_passes(
    checked: str, distil: Distil, teachers_document: Document
) -> None:
    curriculum = {"pass_exponent": 9.0, "fail_exponent": 0.0, "prior_answers": 0.01, "memory": 0.5}
    train = {"steps": 6, "batch_size": 9, "samples_per_prompt": 2, "max_new_tokens": 6, "curriculum": curriculum}
    run = distil(teachers_document(**train) | {"prompts": checked})
    plain = distil(
        teachers_document(steps=6, batch_size=9, samples_per_prompt=2, max_new_tokens=6) | {"prompts": checked}
    )
    pools = {d: {f"{d}/{i}" for i in range(8)} for d in DOMAINS}
    passed: set[str] = set()
    failed: set[str] = set()
    again = 0
    for samples, usual in zip(samples_of(run), samples_of(plain), strict=True):
        turns = [Counter(s.teacher_id for s in found.values()) for found in (samples, usual)]
        assert turns[0] == turns[1]  # whose turn it is stays; which of his prompts it is changes
        by_teacher = {d: {s.prompt_id for s in samples.values() if s.teacher_id == d} for d in DOMAINS}
        for domain, drawn in by_teacher.items():
            if drawn & failed:  # only once all that are left have come
                assert drawn >= pools[domain] - failed
                again += 1
        rewards: dict[str, list[float]] = {}
        for sample in samples.values():
            assert sample.reward is not None
            rewards.setdefault(sample.prompt_id, []).append(sample.reward)
        passed |= {prompt for prompt, earned in rewards.items() if any(earned)}
        failed = (failed | rewards.keys()) - passed
    assert len(failed) >= 6
    assert again < 9
    last = run.metrics[-1]
    assert last["curriculum/reward"].keys() == last["curriculum/pass_rate"].keys() == set(DOMAINS)
    assert run.metrics[0]["curriculum/reward"] == {
        d: fmean(s.reward for s in samples_of(run)[0].values() if s.teacher_id == d and s.reward is not None)
        for d in DOMAINS
    }


# ---------------------------------------------------------------------------------------------------- several processes

RANKS: dict[str, dict[str, Any]] = {
    "exact": {"objective": "exact", "teacher_hidden": "store", "balance": {"mode": "share"}, "curriculum": {}},
    "sampled": {"outcome_weight": 0.5, "samples_per_prompt": 3, "balance": {"mode": "sigma"}, "trust_region": 0.8},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_two_processes_do_what_one_does(
    talk: str,
    checked: str,
    tmp_path: Path,
    distil: Distil,
    finished: Callable[..., SimpleNamespace],
    teachers_document: Document,
    name: str,
) -> None:
    # Seven prompts of three teachers, and groups of three: both lie across ranks.
    anchor = {"sft_weight": 0.3, "sft_data": talk, "sft_batch_size": 3}
    train = {"steps": 2, "batch_size": 7, "learning_rate": 1e-4, "checkpoint_every": 1, "grad_share_every": 1}
    document = teachers_document(**train, **RANKS[name], anchor=anchor) | {"prompts": checked}
    said = [{"prompt_id": f"tools/{i}", "answer": "be"} for i in range(8)]
    write_jsonl(tmp_path / "said.jsonl", said)
    box = {"gives": "answers", "answers": str(tmp_path / "said.jsonl"), "wrong_answers": "keep"}
    document["teachers"]["tools"] = {"domains": ["tools"], **box}
    write_json(tmp_path / "teachers.yaml", document)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launch += ["--master-addr", "127.0.0.1", "--master-port", str(port), "-m", "mopdctl", "distill"]
    launch += ["--teachers", str(tmp_path / "teachers.yaml"), "--workspace", str(tmp_path / "two")]
    environment = os.environ.copy()
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    one, two = distil(document), finished(tmp_path / "two")
    for alone, together, mine, ours in zip(one.metrics, two.metrics, one.rollouts, two.rollouts, strict=True):
        assert together.keys() == alone.keys()
        for metric, value in alone.items():
            assert together[metric] == pytest.approx(value, rel=1e-3, abs=1e-5), metric
        assert [r["response_ids"] for r in ours] == [r["response_ids"] for r in mine]
    for alone, together in zip(one.times, two.times, strict=True):
        assert together["perf/teacher_tokens"] == alone["perf/teacher_tokens"]
    rewards = [[s.reward for step in samples_of(run) for _, s in sorted(step.items())] for run in (one, two)]
    assert rewards[0] == rewards[1]
    assert max(float((two.weights[n] - w).abs().max()) for n, w in one.weights.items()) < 1e-5
