"""`mopdctl rl` on a tiny model: closed forms of gradients, what is kept, and that a killed run repeats itself."""

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mopdctl.config.rl import RlConfig
from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.run import run_distill
from mopdctl.errors import InputError, MopdctlError
from mopdctl.files import write_jsonl
from mopdctl.rl.run import run_rl
from mopdctl.runs import Workspace, read_card, read_metrics
from mopdctl.store.store import Store
from mopdctl.train.session import Session
from mopdctl.verifiers import Verdict, VerdictState
from mopdctl.verifiers.pool import VerifierPool

Document = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def rl_document(tiny: Path) -> Document:
    """An `rl.yaml` as a mapping. A random model writes few characters now and then, which is what is asked for."""
    for name in ("short", "shorter"):
        limit = {"constraints": [{"kind": "characters", "max": 24 if name == "short" else 12}]}
        rows = [
            {
                "id": str(i),
                "prompt": f"{name} {i}-{i * i}",
                "domain": name,
                "verifier": "constraints",
                "reference": limit,
            }
            for i in range(12)
        ]
        write_jsonl(tiny / f"rl-{name}.jsonl", rows)

    def document(name: str = "grpo", *, environments: dict[str, Any] | None = None, **train: Any) -> dict[str, Any]:
        return {
            "name": name,
            "model": str(tiny / "models" / "student"),
            "environments": environments
            or {name: {"prompts": str(tiny / f"rl-{name}.jsonl")} for name in ("short", "shorter")},
            "train": {
                "steps": 2,
                "batch_size": 6,
                "group_size": 4,
                "max_new_tokens": 12,
                "learning_rate": 1e-3,
                "verifier_workers": 1,
            }
            | train,
        }

    return document


@pytest.fixture(scope="session")
def reinforce(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SimpleNamespace]:
    """Runs a document in this process and reads what it left."""

    def run(document: dict[str, Any], workspace: Path | None = None, **options: Any) -> SimpleNamespace:
        place = Workspace(workspace or tmp_path_factory.mktemp("workspace"))
        run_rl(RlConfig.model_validate(document), place, base=place.root, **options)
        return read(place, document["name"])

    return run


def read(place: Workspace, name: str) -> SimpleNamespace:
    rows = read_metrics(place.run(name))
    return SimpleNamespace(
        place=place,
        metrics=[{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows],
        weights=load_file(place.checkpoint(name) / "model.safetensors"),
        card=read_card(place.checkpoint(name)),
        samples={s.sample_id: s for s in Store(place.rollouts(name)).scan()},
    )


@pytest.fixture
def first_gradients(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """The gradients of every optimizer step, before clipping."""
    from mopdctl.train.optimizer import Optimizers

    found: list[dict[str, torch.Tensor]] = []
    made: list[Any] = []
    begin, step = Session.__init__, Optimizers.step

    def begun(self: Session, folder: Path, model: Any, config: Any, on_step: Any, **more: Any) -> None:
        begin(self, folder, model, config, on_step, **more)
        made.append(model.model)

    def stepped(self: Optimizers, rate: float, max_grad_norm: float) -> float:
        gradients = {n: p.grad.clone() for n, p in made[-1].named_parameters() if p.grad is not None}
        found.append(gradients)
        return step(self, rate, max_grad_norm)

    monkeypatch.setattr(Session, "__init__", begun)
    monkeypatch.setattr(Optimizers, "step", stepped)
    return found


def norm(gradients: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(g.double().pow(2).sum()) for g in gradients.values()))


# ------------------------------------------------------------------------------------------------------- closed forms


def test_answers_are_verified_kept_and_compared_within_their_group(
    rl_document: Document, reinforce: Callable[..., SimpleNamespace]
) -> None:
    run = reinforce(rl_document())
    assert len(run.samples) == 2 * 6 * 4
    assert {s.verifier for s in run.samples.values()} == {"constraints/2"}
    assert {s.verdict for s in run.samples.values()} == {"ok"}
    for step, row in enumerate(run.metrics):
        own = [s for s in run.samples.values() if s.policy_version_min == step]
        for name in ("short", "shorter"):
            rewards = [s.reward for s in own if s.domain == name]
            assert row["rl/reward"][name] == pytest.approx(sum(rewards) / len(rewards))
        groups: dict[str, list[float]] = {}
        for s in own:
            groups.setdefault(s.group_id, []).append(s.reward)
        assert {len(rewards) for rewards in groups.values()} == {4}
        useful = sum(len(set(rewards)) > 1 for rewards in groups.values())
        assert sum(counts.get("useful", 0) for counts in row["rl/groups"].values()) == useful > 0
    assert run.card["algorithm"] == "rl/grpo"


@pytest.mark.parametrize("handling", ["skip", "keep", "resample"])
def test_a_step_in_which_no_group_has_variance_moves_no_weight_and_is_counted(
    tiny: Path,
    tmp_path: Path,
    rl_document: Document,
    reinforce: Callable[..., SimpleNamespace],
    first_gradients: list[Any],
    handling: str,
) -> None:
    hard = {"verifier": "constraints", "reference": {"constraints": [{"kind": "characters", "min": 999}]}}
    write_jsonl(tmp_path / "hard.jsonl", [{"prompt": f"{i}", **hard} for i in range(20)])
    environments = {"hard": {"prompts": str(tmp_path / "hard.jsonl")}}
    document = rl_document(environments=environments, zero_variance=handling, weight_decay=0.1)
    run = reinforce(document)
    assert {s.reward for s in run.samples.values()} == {0.0}
    assert first_gradients == []
    start = load_file(tiny / "models" / "student" / "model.safetensors")
    assert all(torch.equal(run.weights[name], weight) for name, weight in start.items())
    for row in run.metrics:
        # Three rounds of six prompts, of which there are 20.
        assert row["rl/groups"] == {"hard": {"all_worst": 18 if handling == "resample" else 6}}
        assert (row["rl/updates"], row["train/grad_norm"], row["train/loss"]) == (0, 0.0, 0.0)
        assert row["rl/useful_share"] == {"hard": 0.0}
        assert (row["rollout/tokens"] > 0) == (handling == "keep")


def test_a_step_of_which_nothing_could_be_checked_ends_the_run_and_is_none_of_it(
    rl_document: Document,
    reinforce: Callable[..., SimpleNamespace],
    plain: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # NVIDIA-NeMo/RL #2394
    def broken(self: VerifierPool, attempts: Any) -> list[Verdict]:
        state = VerdictState.INFRA_ERROR
        return [Verdict(state, None, name, 2, f"no room\nfor {name}") for name, _ in attempts]

    with monkeypatch.context() as patch:
        patch.setattr(VerifierPool, "check", broken)
        with pytest.raises(MopdctlError) as caught:
            reinforce(rl_document(), tmp_path)
    assert str(caught.value) == (
        "step 0: none of 24 answers could be checked; short: 12 infra_error; shorter: 12 infra_error; tried again, the "
        "first says: no room for constraints; once checks work, the same command goes on at this step"
    )
    assert not isinstance(caught.value, InputError)
    del caught
    gc.collect()  # a process of its own would have let go of the store
    assert read_metrics(Workspace(tmp_path).run("grpo")) == []
    assert Store(Workspace(tmp_path).rollouts("grpo")).meta(["sample_id"]).is_empty()
    # Its answers are still in the log: they are checked anew, and all is as if nothing had been.
    again = reinforce(rl_document(), tmp_path)
    assert again.metrics == plain.metrics
    assert all(torch.equal(again.weights[name], plain.weights[name]) for name in plain.weights)


def test_checks_that_break_now_and_then_are_no_score_and_end_nothing(
    rl_document: Document, reinforce: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = VerifierPool.check

    def flaky(self: VerifierPool, attempts: Any) -> list[Verdict]:
        found = check(self, attempts)
        return [
            replace(v, state=VerdictState.INFRA_ERROR, reward=None) if n % 3 == 0 else v for n, v in enumerate(found)
        ]

    monkeypatch.setattr(VerifierPool, "check", flaky)
    run = reinforce(rl_document(steps=1))
    broken = [s for s in run.samples.values() if s.verdict == "infra_error"]
    assert {s.reward for s in broken} == {None}
    states = run.metrics[0]["rl/states"]
    assert sum(counts["infra_error"] for counts in states.values()) == len(broken) == 8
    assert sum(counts["ok"] for counts in states.values()) == 16
    assert run.metrics[0]["rl/updates"] == 1


def test_one_answer_with_a_teachers_advantage_has_the_gradient_of_distill(
    tiny: Path,
    tmp_path: Path,
    rl_document: Document,
    teachers_document: Document,
    reinforce: Callable[..., SimpleNamespace],
    first_gradients: list[Any],
) -> None:
    rows = [
        {"id": str(i), "prompt": f"{i}+{i}", "domain": "arithmetic"} for i in range(6)
    ]  # the same prompts, order and random streams need the same ids
    write_jsonl(tmp_path / "p.jsonl", rows)
    teacher = str(tiny / "models" / "arithmetic")
    environments = {"arithmetic": {"prompts": str(tmp_path / "p.jsonl"), "teacher": teacher}}
    run = reinforce(rl_document(environments=environments, group_size=1, steps=1))
    by_rl = first_gradients[-1]

    renamed = [row | {"id": f"arithmetic/{row['id']}"} for row in rows]
    write_jsonl(tmp_path / "q.jsonl", renamed)
    document = teachers_document(batch_size=6, steps=1) | {
        "prompts": str(tmp_path / "q.jsonl"),
        "teachers": {"arithmetic": {"model": teacher, "domains": ["arithmetic"]}},
    }
    answers = dict(zip([row["id"] for row in renamed], rows, strict=True))
    assert len(answers) == 6
    with pytest.MonkeyPatch.context() as patch:
        # Both loops draw an answer by its sample id; give distill those of rl.
        import mopdctl.distill.run as distill_run
        from mopdctl.rollouts.jobs import make_job

        def jobs(book: Any, rows: Any, teachers: Any, *, step: int, config: TeachersFile) -> list[Any]:
            return [
                make_job(
                    book.prompts[row],
                    f"{step}.0.0/0",
                    seed=config.train.seed,
                    group_id=f"{book.prompts[row].prompt_id}/{step}",
                    generation_index=0,
                    domain="arithmetic",
                    teacher_id="arithmetic",
                    prompt_ids=book.token_ids(row),
                    max_new_tokens=book.budget(book.prompts[row]),
                )
                for row in rows
            ]

        patch.setattr(distill_run, "step_jobs", jobs)
        place = Workspace(tmp_path / "w")
        run_distill(TeachersFile.model_validate(document), place, base=tmp_path)
    by_distill = first_gradients[-1]
    distilled = {s.sample_id: s for s in Store(place.rollouts("merged")).scan()}
    assert {i: s.tokens.tolist() for i, s in run.samples.items()} == {
        i: s.tokens.tolist() for i, s in distilled.items()
    }
    for sample_id, sample in run.samples.items():
        assert sample.teacher_logprobs is not None
        assert sample.teacher_logprobs.tolist() == distilled[sample_id].teacher_logprobs.tolist()
    assert norm(by_rl) > 1e-3
    for name, gradient in by_rl.items():
        torch.testing.assert_close(gradient, by_distill[name], rtol=1e-5, atol=1e-7)


def test_rewards_and_distillation_keep_their_own_denominators(
    tiny: Path, rl_document: Document, reinforce: Callable[..., SimpleNamespace], first_gradients: list[Any]
) -> None:
    rewards = {"short": {"prompts": str(tiny / "rl-short.jsonl")}}
    taught = {"taught": {"prompts": str(tiny / "rl-shorter.jsonl"), "teacher": str(tiny / "models" / "arithmetic")}}
    # Twelve prompts of each: a batch of all of them holds the same ones alone and together.
    reinforce(rl_document(environments=rewards, steps=1, batch_size=12))
    reinforce(rl_document(environments=taught, steps=1, batch_size=12))
    reinforce(rl_document(environments=rewards | taught, steps=1, batch_size=24))
    alone, distilled, together = first_gradients
    assert norm(alone) > 1e-3
    assert norm(distilled) > 1e-3
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, alone[name] + distilled[name], rtol=1e-3, atol=1e-6)


def test_micro_batches_change_nothing_but_rounding(
    rl_document: Document, reinforce: Callable[..., SimpleNamespace], first_gradients: list[Any]
) -> None:
    reinforce(rl_document(steps=1))
    reinforce(rl_document(steps=1, gradient_accumulation=5))
    one, five = first_gradients
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, five[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "train",
    [
        {"baseline": "leave_one_out", "scale": "none"},
        {"zero_variance": "resample"},
        {"overlong": "mask"},
        {"overlong": "fail"},
        {"overlong": "soft", "overlong_buffer": 6},
        {"kl_weight": 0.1},
        {"inner_steps": 2},
        {"staleness": 1, "correction": "tis"},
    ],
    ids=lambda train: next(iter(train)),
)
def test_every_choice_changes_what_is_learnt(
    rl_document: Document, reinforce: Callable[..., SimpleNamespace], plain: SimpleNamespace, train: dict[str, Any]
) -> None:
    run = reinforce(rl_document(**train))
    assert any(not torch.equal(run.weights[name], plain.weights[name]) for name in plain.weights)
    assert len(run.metrics) == 2


@pytest.fixture(scope="module")
def plain(rl_document: Document, reinforce: Callable[..., SimpleNamespace]) -> SimpleNamespace:
    return reinforce(rl_document())


def test_the_reference_is_the_model_at_the_start(
    rl_document: Document, reinforce: Callable[..., SimpleNamespace]
) -> None:
    run = reinforce(rl_document(kl_weight=0.1, steps=3))
    kl = [row["rl/kl_reference_nats"] for row in run.metrics]
    assert all(value == pytest.approx(0, abs=1e-6) for value in kl[0].values())
    assert all(value > 1e-6 for value in kl[2].values())


def test_masked_overlong_answers_train_nothing_and_are_counted(
    rl_document: Document, reinforce: Callable[..., SimpleNamespace]
) -> None:
    run = reinforce(rl_document(overlong="mask", steps=1))
    cut = sum(s.finish_reason == "length" for s in run.samples.values())
    assert 0 < cut < len(run.samples)
    assert sum(states.get("masked", 0) for states in run.metrics[0]["rl/states"].values()) == cut


def test_resampling_draws_other_prompts_for_groups_that_teach_nothing(
    rl_document: Document, reinforce: Callable[..., SimpleNamespace], plain: SimpleNamespace
) -> None:
    run = reinforce(rl_document(zero_variance="resample", max_resamples=2))
    rounds = [row["rl/resample_rounds"] for row in run.metrics]
    assert max(rounds) > 0
    assert len(run.samples) > len(plain.samples)
    for row in run.metrics:
        useful = sum(counts.get("useful", 0) for counts in row["rl/groups"].values())
        assert useful <= 6
        assert useful == 6 or row["rl/resample_rounds"] == 2


# ----------------------------------------------------------------------------------------------------------- resuming


class StopError(Exception):
    """Stands for a kill between two steps."""


def test_a_run_that_broke_off_time_and_again_equals_one_that_did_not(
    rl_document: Document, reinforce: Callable[..., SimpleNamespace], tmp_path: Path
) -> None:
    # A stale sampler's weights are part of the state. tests/integration/test_rl_resume.py has real kills.
    document = rl_document(steps=4, checkpoint_every=2, staleness=1, inner_steps=2, kl_weight=0.1)
    straight = reinforce(document)
    for last in (1, 3, 4):

        def on_step(done: int, metrics: dict[str, Any], last: int = last) -> None:
            if done == last:
                raise StopError

        with pytest.raises(StopError):
            reinforce(document, tmp_path, on_step=on_step)
    resumed = reinforce(document, tmp_path)
    assert resumed.metrics == straight.metrics
    assert all(torch.equal(resumed.weights[name], straight.weights[name]) for name in straight.weights)
    assert {i: (s.tokens.tolist(), s.reward) for i, s in resumed.samples.items()} == {
        i: (s.tokens.tolist(), s.reward) for i, s in straight.samples.items()
    }
