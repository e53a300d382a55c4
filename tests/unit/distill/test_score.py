"""The streams of a batch: by whom a sample is scored, and that nothing missing is ever filled in."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.score import score
from mopdctl.distill.teachers import Teachers
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError, MopdctlError
from mopdctl.records import Sample
from mopdctl.train.policy import check_streams

Document = Callable[..., dict[str, Any]]
FLOAT32 = 5e-5  # float32 in another order than one unpadded row at a time in float64


def sample_of(
    name: str, teacher: str, prompt: Sequence[int], response: Sequence[int], logprobs: Sequence[float]
) -> Sample:
    return Sample(
        sample_id=name,
        prompt_id=name,
        group_id=name,
        generation_index=0,
        domain=teacher,
        teacher_id=teacher,
        policy_version_min=0,
        policy_version_max=0,
        tokens=np.array([*prompt, *response], np.int32),
        prompt_length=len(prompt),
        loss_mask=np.array([False] * len(prompt) + [True] * len(response)),
        behavior_logprobs=np.array(logprobs, np.float32),
        finish_reason="length",
    )


SAMPLE = sample_of("s/0/0", "math", (1, 2), (30, 40, 50), (-0.5, -0.25, -1.0))


def test_one_finite_value_per_token_is_what_a_stream_needs() -> None:
    check_streams(SAMPLE, {"behavior_logprobs": [-1.0, -2.0, -3.0], "teacher_logprobs": [0.0, -1e30, -2.0]})


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("teacher_logprobs", [-1.0, -1.0], "sample s/0/0: teacher 'math' scored 2 of 3 tokens"),
        ("prox_logprobs", [-1.0] * 4, "sample s/0/0: prox scored 4 of 3 tokens"),
        ("behavior_logprobs", [], "sample s/0/0: behavior scored 0 of 3 tokens"),
        (
            "teacher_logprobs",
            [-1.0, float("-inf"), -1.0],
            "sample s/0/0: teacher_logprobs of token 1 (id 40) is -inf; teacher 'math' gives it no probability",
        ),
        ("prox_logprobs", [-1.0, -1.0, float("nan")], "sample s/0/0: prox_logprobs of token 2 (id 50) is nan"),
    ],
)
def test_a_stream_with_a_hole_is_refused(name: str, values: Sequence[float], message: str) -> None:
    with pytest.raises(MopdctlError) as caught:
        check_streams(SAMPLE, {name: values})
    assert str(caught.value).startswith(message)
    assert not isinstance(caught.value, InputError)


@pytest.fixture(scope="module")
def models(tiny: Path) -> dict[str, HFModel]:
    return {p.name: HFModel.load(str(p)) for p in (tiny / "models").iterdir()}


SAMPLES = [
    sample_of(
        f"{teacher}/0/{n}",
        teacher,
        tuple(3 + (7 * i + j) % 400 for j in range(2 + n)),
        tuple(3 + (11 * i + 5 * j) % 400 for j in range(1 + 3 * n)),
        tuple(-0.5 * j for j in range(1 + 3 * n)),
    )
    for n in range(3)
    for i, teacher in enumerate(("tools", "arithmetic", "structured"), start=n)
]


def by_hand(model: HFModel, prompt: Sequence[int], response: Sequence[int]) -> list[float]:
    """One row at a time, unpadded, in float64."""
    wide = type(model.model)(model.model.config).eval()
    wide.load_state_dict(model.model.state_dict())
    with torch.no_grad():
        logits = wide.double()(torch.tensor([[*prompt, *response]])).logits[0]
    logprobs = torch.log_softmax(logits, -1)
    return [float(logprobs[len(prompt) + t - 1, token]) for t, token in enumerate(response)]


@pytest.mark.parametrize("inner_steps", [1, 2])
def test_each_sample_is_scored_by_its_own_teacher(
    models: dict[str, HFModel], teachers_document: Document, inner_steps: int
) -> None:
    config = TeachersFile.model_validate(teachers_document(inner_steps=inner_steps))
    sequences = score(SAMPLES, Teachers(models), models["student"], config)
    assert [s.sample_id for s in sequences] == [r.sample_id for r in SAMPLES]
    for sequence, sample in zip(sequences, SAMPLES, strict=True):
        pair = sample.prompt_ids.tolist(), sample.response_ids.tolist()
        assert (sequence.prompt_ids, sequence.response_ids, sequence.teacher_id) == (*pair, sample.teacher_id)
        assert sequence.loss_mask == [1] * len(sample.response_ids)
        assert sequence.streams["behavior_logprobs"] == sample.behavior_logprobs.tolist()
        expected = by_hand(models[sample.teacher_id], *pair)
        assert sequence.streams["teacher_logprobs"] == pytest.approx(expected, abs=FLOAT32)
        if inner_steps > 1:
            expected = by_hand(models["student"], *pair)
            assert sequence.streams["prox_logprobs"] == pytest.approx(expected, abs=FLOAT32)
        else:
            assert "prox_logprobs" not in sequence.streams


def test_the_exact_objective_scores_inside_its_loss(models: dict[str, HFModel], teachers_document: Document) -> None:
    config = TeachersFile.model_validate(teachers_document(objective="exact"))
    sequences = score(SAMPLES, Teachers(models), models["student"], config)
    assert {name for s in sequences for name in s.streams} == {"behavior_logprobs"}


def test_weights_are_those_of_the_teacher(models: dict[str, HFModel], teachers_document: Document) -> None:
    document = teachers_document()
    document["teachers"]["tools"]["weight"] = 2.5
    sequences = score(SAMPLES, Teachers(models), models["student"], TeachersFile.model_validate(document))
    assert [s.weight for s in sequences] == [2.5, 1.0, 1.0] * 3


def test_what_a_tool_wrote_is_context(models: dict[str, HFModel], teachers_document: Document) -> None:
    sample = replace(
        SAMPLES[3],
        loss_mask=np.array([False] * SAMPLES[3].prompt_length + [True, False, False, True]),
        behavior_logprobs=np.array([-0.5, -1.5], np.float32),
    )
    (sequence,) = score([sample], Teachers(models), models["student"], TeachersFile.model_validate(teachers_document()))
    assert sequence.loss_mask == [1, 0, 0, 1]
    assert sequence.streams["behavior_logprobs"] == [-0.5, 0.0, 0.0, -1.5]
    assert len(sequence.streams["teacher_logprobs"]) == 4
