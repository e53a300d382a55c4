"""The SFT on teachers' answers: what is trained on, in which shares, and that only its tokens make the loss."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mopdctl.config.train import OnPolicyConfig
from mopdctl.config.warmup import WarmUp
from mopdctl.distill import warmup
from mopdctl.distill.warmup import answer_sequences, warm_up
from mopdctl.engines.hf import HFModel
from mopdctl.records import Sample
from mopdctl.runs import read_metrics
from mopdctl.train.batch import TrainSequence

Fresh = Callable[[], HFModel]


@pytest.fixture
def fresh(tiny: Path) -> Fresh:
    return lambda: HFModel.load(str(tiny / "models" / "student"), train=True)


def sequence(teacher: str, number: int, response: Sequence[int], mask: Sequence[int] | None = None) -> TrainSequence:
    return TrainSequence(f"{teacher}/{number}", (3, 20 + number, 4), response, mask or [1] * len(response), teacher)


def three_teachers(sizes: dict[str, int]) -> dict[str, list[TrainSequence]]:
    return {
        teacher: [sequence(teacher, i, [30 + 7 * at + i, 40 + i, 1]) for i in range(size)]
        for at, (teacher, size) in enumerate(sizes.items())
    }


def train_config(**changes: Any) -> OnPolicyConfig:
    return OnPolicyConfig.model_validate({"steps": 100, "batch_size": 6, "learning_rate": 1e-3} | changes)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[TrainSequence]]:
    """The sequences of each optimizer step, as they come."""
    found: list[list[TrainSequence]] = []
    real = warmup.update

    def update(student: Any, optimizers: Any, sequences: Sequence[TrainSequence], *rest: Any) -> Any:
        found.append(list(sequences))
        return real(student, optimizers, sequences, *rest)

    monkeypatch.setattr(warmup, "update", update)
    return found


def drawn(batches: list[list[TrainSequence]]) -> Counter[str]:
    return Counter(s.teacher_id for batch in batches for s in batch)


def test_an_answer_is_trained_on_token_for_token_and_a_tool_is_context() -> None:
    tokens, mask = [3, 20, 4, 50, 51, 60, 61, 52, 1], [0, 0, 0, 1, 1, 0, 0, 1, 1]
    sample = Sample(
        sample_id="p/teacher/0@0",
        prompt_id="p",
        group_id="p",
        generation_index=0,
        domain="errands",
        teacher_id="agent",
        policy_version_min=0,
        policy_version_max=0,
        tokens=np.array(tokens, np.int32),
        prompt_length=3,
        loss_mask=np.array(mask, np.bool_),
        behavior_logprobs=np.zeros(4, np.float32),
        finish_reason="stop",
    )
    (found,) = answer_sequences([sample])
    assert (found.prompt_ids, found.response_ids, found.loss_mask) == (tokens[:3], tokens[3:], mask[3:])
    assert (found.teacher_id, found.weight, found.streams) == ("agent", 1.0, {})


def test_teachers_have_equal_shares_of_every_step_however_many_answers_each_has(
    fresh: Fresh, tmp_path: Path, batches: list[list[TrainSequence]]
) -> None:
    answers = three_teachers({"a": 1, "b": 5, "c": 40})
    warm_up(fresh(), answers, WarmUp(steps=4), train_config(), tmp_path)
    assert [drawn([batch]) for batch in batches] == [{"a": 2, "b": 2, "c": 2}] * 4
    # All of one are used before any comes again.
    for teacher, times in (("b", {1, 2}), ("c", {1}), ("a", {8})):
        counts = Counter(s.sample_id for batch in batches for s in batch if s.teacher_id == teacher)
        assert set(counts.values()) <= times


def test_shares_that_are_given_hold_over_the_steps(
    fresh: Fresh, tmp_path: Path, batches: list[list[TrainSequence]]
) -> None:
    answers = three_teachers({"a": 9, "b": 9, "c": 9})
    settings = WarmUp(steps=8, batch_size=3, shares={"a": 4.0, "b": 3.0})
    warm_up(fresh(), answers, settings, train_config(), tmp_path)
    assert [len(batch) for batch in batches] == [3] * 8
    assert drawn(batches) == {"a": 12, "b": 9, "c": 3}


def nll(model: HFModel, sequences: Sequence[TrainSequence]) -> list[list[float]]:
    """-log p of each token with loss, one unpadded row at a time in float64."""
    wide = type(model.model)(model.model.config).eval()
    wide.load_state_dict(model.model.state_dict())
    found = []
    for s in sequences:
        with torch.no_grad():
            logits = wide.double()(torch.tensor([[*s.prompt_ids, *s.response_ids]])).logits[0, :, : model.vocab_size]
        logprobs = torch.log_softmax(logits, -1)
        first = len(s.prompt_ids) - 1
        found.append([-float(logprobs[first + t, s.response_ids[t]]) for t, on in enumerate(s.loss_mask) if on])
    return found


@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_loss_and_nll_per_teacher_are_those_of_the_tokens_with_loss(
    fresh: Fresh, tmp_path: Path, reduction: str
) -> None:
    answers = {
        "a": [sequence("a", 0, [30, 31, 60, 61, 32, 1], [1, 1, 0, 0, 1, 1])],
        "b": [sequence("b", 1, [50, 1]), sequence("b", 2, [51, 52, 53, 1])],
    }
    student = fresh()
    by_hand = {teacher: nll(student, found) for teacher, found in answers.items()}
    settings = WarmUp(steps=1, batch_size=3, shares={"b": 2.0})
    warm_up(student, answers, settings, train_config(loss_reduction=reduction), tmp_path)
    (row,) = read_metrics(tmp_path)
    rows = [losses for found in by_hand.values() for losses in found]
    expected = (
        np.mean([v for losses in rows for v in losses]) if reduction == "token" else np.mean([*map(np.mean, rows)])
    )
    assert row["train/loss"] == pytest.approx(expected, rel=1e-5)
    means = {teacher: np.mean([v for losses in found for v in losses]) for teacher, found in by_hand.items()}
    assert row["sft/loss_nats"] == pytest.approx(means, rel=1e-5)
    assert row["policy/token_share"] == {"a": 0.4, "b": 0.6}
    assert row["train/loss_tokens"] == 10


def test_what_a_tool_wrote_changes_the_loss_of_no_token_but_as_context(fresh: Fresh, tmp_path: Path) -> None:
    def first_gradient(told: list[int], folder: str) -> float:
        # the told tokens come last, so that nothing with loss has them as context
        answers = {"a": [sequence("a", 0, [30, 31, *told], [1, 1, *[0] * len(told)])]}
        warm_up(fresh(), answers, WarmUp(steps=1, batch_size=1), train_config(), tmp_path / folder)
        (row,) = read_metrics(tmp_path / folder)
        return float(row["train/grad_norm"])

    one, other = first_gradient([60, 61], "one"), first_gradient([70, 71], "other")
    assert one == pytest.approx(other, rel=1e-6)
    assert one > 0


def test_settings_of_its_own_go_over_the_loops_and_the_rest_is_the_loops(fresh: Fresh, tmp_path: Path) -> None:
    answers = three_teachers({"a": 4})
    loop = train_config(schedule="linear", final_learning_rate_share=0.0, inner_steps=3)
    warm_up(fresh(), answers, WarmUp(steps=4, learning_rate=8e-3), loop, tmp_path / "own")
    assert [row["train/learning_rate"] for row in read_metrics(tmp_path / "own")] == [8e-3, 6e-3, 4e-3, 2e-3]
    warm_up(fresh(), answers, WarmUp(steps=2), loop, tmp_path / "loops")
    assert [row["train/learning_rate"] for row in read_metrics(tmp_path / "loops")] == [1e-3, 5e-4]


def test_it_lowers_the_loss_on_the_answers(fresh: Fresh, tmp_path: Path) -> None:
    student, answers = fresh(), three_teachers({"a": 3, "b": 3})
    before = nll(student, answers["a"] + answers["b"])
    warm_up(student, answers, WarmUp(steps=30, learning_rate=1e-2), train_config(), tmp_path)
    after = nll(student, answers["a"] + answers["b"])
    assert np.concatenate(after).mean() < 0.2 * np.concatenate(before).mean()


class StopError(Exception):
    pass


def test_broken_off_at_any_step_it_ends_with_the_same_bits_and_a_finished_one_is_not_trained_again(
    fresh: Fresh, tmp_path: Path
) -> None:
    answers = three_teachers({"a": 3, "b": 5})
    settings, loop = WarmUp(steps=7), train_config(checkpoint_every=2, optimizer="muon", schedule="cosine")
    straight = fresh()
    warm_up(straight, answers, settings, loop, tmp_path / "straight")
    expected = straight.model.state_dict()
    for last in (1, 2, 5, 7):

        def on_step(done: int, row: dict[str, Any], last: int = last) -> None:
            if done == last:
                raise StopError

        with pytest.raises(StopError):
            warm_up(fresh(), answers, settings, loop, tmp_path / "broken", on_step=on_step)
    begun: list[int] = []
    for _ in range(2):
        student = fresh()
        warm_up(student, answers, settings, loop, tmp_path / "broken", on_step=lambda done, row: begun.append(done))
        found = student.model.state_dict()
        assert all(found[name].equal(weight) for name, weight in expected.items())
    assert begun == [7]

    def without_times(folder: str) -> list[dict[str, Any]]:
        rows = read_metrics(tmp_path / folder)
        return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows]

    assert without_times("broken") == without_times("straight")
    assert [row["step"] for row in without_times("broken")] == list(range(7))


def test_the_moments_of_its_optimizer_end_with_it(fresh: Fresh, tmp_path: Path) -> None:
    student = fresh()
    warm_up(student, three_teachers({"a": 3}), WarmUp(steps=2), train_config(), tmp_path)
    (state,) = (tmp_path / "state").iterdir()
    assert state.name == "step-000002"
    assert (state / "optimizer.safetensors").stat().st_size < 100
    assert all(p.grad is None for p in student.model.parameters())
