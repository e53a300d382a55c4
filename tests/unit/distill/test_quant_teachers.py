"""Teachers that score with FP4 weights: who they are, what is shared, how their noise is measured and refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from mopdctl.config.lora import Lora
from mopdctl.config.teachers import TeachersFile
from mopdctl.distill import quant_noise
from mopdctl.distill.manifest import teacher_manifest
from mopdctl.distill.quant_noise import measure_quant_noise
from mopdctl.distill.teachers import Teachers, load_reference, load_teachers
from mopdctl.engines.fake_quant import quantize_weights
from mopdctl.engines.hf import HFModel
from mopdctl.errors import CheckFailedError
from mopdctl.records import Sample
from mopdctl.runs import Workspace
from mopdctl.train.lora import add_lora

Document = Callable[..., dict[str, Any]]
Load = Callable[..., tuple[TeachersFile, Teachers]]
PAIRS = [((3, 4 + i), tuple(range(10 + i, 16 + 2 * i))) for i in range(3)]


@pytest.fixture(scope="module")
def student(tiny: Path) -> HFModel:
    return HFModel.load(str(tiny / "models" / "student"), train=True)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "workspace")


@pytest.fixture
def load(student: HFModel, teachers_document: Document, workspace: Workspace, tmp_path: Path) -> Load:
    """Configuration and teachers from alias to entry."""

    def begin(
        teachers: dict[str, dict[str, Any]], *, of: HFModel = student, **train: Any
    ) -> tuple[TeachersFile, Teachers]:
        document = teachers_document(**train)
        document["teachers"] = {alias: {"domains": [alias]} | entry for alias, entry in teachers.items()}
        config = TeachersFile.model_validate(document)
        return config, load_teachers(config, of, workspace, base=tmp_path)

    return begin


def sample(alias: str, number: int, *, prompt: int | None = None) -> Sample:
    prompt_ids, response = [3, 4 + number], list(range(10 + number, 14 + 3 * number))
    return Sample(
        sample_id=f"{alias}/{number}",
        prompt_id=f"{alias}/{number if prompt is None else prompt}",
        group_id=alias,
        generation_index=0,
        domain=alias,
        teacher_id=alias,
        policy_version_min=0,
        policy_version_max=0,
        tokens=np.array([*prompt_ids, *response], np.int32),
        prompt_length=len(prompt_ids),
        # a tool wrote the second token
        loss_mask=np.array([False] * len(prompt_ids) + [True, False] + [True] * (len(response) - 2)),
        behavior_logprobs=np.full(len(response) - 1, -1.0, np.float32),
        finish_reason="length",
    )


def mean_kl(target: HFModel, other: HFModel, samples: list[Sample]) -> float:
    """KL(target || other) in float64 from whole logits, token by token."""
    values = []
    for one in samples:
        ids = torch.tensor(one.tokens.tolist())[None]
        with torch.no_grad():
            p_TV, q_TV = (torch.log_softmax(m.model(ids).logits[0].double(), -1) for m in (target, other))
        for t in np.flatnonzero(one.loss_mask):
            values.append(float((p_TV[t - 1].exp() * (p_TV[t - 1] - q_TV[t - 1])).sum()))
    return sum(values) / len(values)


def in_fp4(path: Path, quant: Any, **options: Any) -> HFModel:
    model = HFModel.load(str(path), **options)
    quantize_weights(model, str(path), quant)
    return model


# ----------------------------------------------------------------------------------------------------------- who it is


def test_one_checkpoint_in_three_precisions_is_three_teachers(tiny: Path, load: Load) -> None:
    path = tiny / "models" / "tools"
    kinds = {"plain": {}, "again": {}, "nv": {"quant": "nvfp4"}, "mx": {"quant": "mxfp4"}, "nv2": {"quant": "nvfp4"}}
    _, teachers = load({alias: {"model": str(path)} | extra for alias, extra in kinds.items()})
    assert teachers.loads == 3
    assert teachers["plain"] is teachers["again"]
    assert teachers["nv"] is teachers["nv2"]
    scores = {alias: teachers[alias].score(PAIRS) for alias in kinds}
    assert scores["plain"] == HFModel.load(str(path)).score(PAIRS)
    for alias, quant in (("nv", "nvfp4"), ("mx", "mxfp4")):
        assert scores[alias] == in_fp4(path, quant).score(PAIRS)
        assert scores[alias] != scores["plain"]
    assert scores["nv"] != scores["mx"]


def test_the_precision_it_scores_in_comes_after_quantization(tiny: Path, load: Load) -> None:
    path = tiny / "models" / "tools"
    _, teachers = load({"nv": {"model": str(path), "quant": "nvfp4", "dtype": "bfloat16"}})
    precise = in_fp4(path, "nvfp4").model.state_dict()
    found = teachers["nv"].model.state_dict()
    assert found["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert all(torch.equal(tensor, precise[name].bfloat16()) for name, tensor in found.items())


def test_adapters_share_a_quantized_base_and_stay_as_they_are(tiny: Path, load: Load, tmp_path: Path) -> None:
    path = tiny / "models" / "tools"
    for i in range(2):
        made = add_lora(HFModel.load(str(path)), Lora(rank=2), path=str(path), seed=i)
        for name, parameter in sorted(made.model.named_parameters()):
            if ".lora_B" in name:
                parameter.data += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
        made.save_adapter(tmp_path / f"a{i}")
    entries = {f"a{i}": {"model": f"./a{i}", "quant": "nvfp4"} for i in range(2)}
    _, teachers = load(entries | {"base": {"model": str(path), "quant": "nvfp4"}, "plain": {"model": "./a0"}})
    assert teachers.loads == 2
    assert teachers["a0"].model is teachers["a1"].model is teachers["base"].model
    assert teachers["base"].score(PAIRS) == in_fp4(path, "nvfp4").score(PAIRS)
    found = [teachers[alias].score(PAIRS) for alias in ("a0", "a1", "base", "plain")]
    assert all(one != other for i, one in enumerate(found) for other in found[:i])


def test_the_base_under_a_students_adapter_is_no_quantized_teacher(tiny: Path, load: Load) -> None:
    path = str(tiny / "models" / "student")
    student = add_lora(HFModel.load(path), Lora(rank=2), path=path, seed=0)
    _, teachers = load({"self": {"model": path, "quant": "nvfp4", "kind": "self"}}, of=student)
    assert teachers["self"].model is not student.model
    assert student.score(PAIRS) == HFModel.load(path).score(PAIRS)


def test_the_manifest_says_how_its_weights_were_quantized(tiny: Path, load: Load) -> None:
    path = str(tiny / "models" / "tools")
    kinds = {"plain": {}, "nv": {"quant": "nvfp4"}, "mx": {"quant": "mxfp4"}}
    config, teachers = load({alias: {"model": path} | extra for alias, extra in kinds.items()})
    found = teacher_manifest(config, teachers)["teachers"]
    assert "quant" not in found["plain"]
    assert found["nv"]["quant"] == {"format": "nvfp4", "method": "sweep"}
    assert found["mx"]["quant"] == {"format": "mxfp4", "method": "max"}
    assert len({one["weights"] for one in found.values()}) == 1


def test_a_reference_is_quantized_likewise(
    tiny: Path, student: HFModel, teachers_document: Document, workspace: Workspace, tmp_path: Path
) -> None:
    document = teachers_document(objective="exact", anchor={"kl_weight": 0.1}, reference_quant="mxfp4")
    config = TeachersFile.model_validate(document)
    reference = load_reference(config, student, workspace, base=tmp_path)
    assert reference.score(PAIRS) == in_fp4(tiny / "models" / "student", "mxfp4").score(PAIRS)


@pytest.mark.parametrize(
    ("change", "train", "message"),
    [
        ({"gives": "answers", "quant": "nvfp4"}, {}, "`quant` needs a teacher that scores"),
        ({"quant": "fp8"}, {}, "quant"),
        ({}, {"student_quant": "nvfp4", "lora": {}}, "`student_quant` trains all weights"),
        ({}, {"reference_quant": "nvfp4"}, "`reference_quant` needs `extrapolation` other than 1"),
    ],
)
def test_what_cannot_be_is_refused(
    teachers_document: Document, change: dict[str, Any], train: dict[str, Any], message: str
) -> None:
    document = teachers_document(**train)
    document["teachers"]["tools"] |= change
    with pytest.raises(ValidationError, match=message):
        TeachersFile.model_validate(document)


# ---------------------------------------------------------------------------------------------------- noise and signal


@pytest.mark.parametrize("residency", ["all", "one"])
def test_noise_and_signal_are_kl_divergences_from_the_teacher_without_quantization(
    tiny: Path, student: HFModel, load: Load, workspace: Workspace, tmp_path: Path, residency: str
) -> None:
    models = tiny / "models"
    entries = {
        "tools": {"model": str(models / "tools"), "quant": "mxfp4"},
        "structured": {"model": str(models / "structured"), "quant": "nvfp4"},
        "arithmetic": {"model": str(models / "arithmetic")},
        "idle": {"model": str(models / "tools"), "quant": "nvfp4"},
    }
    config, teachers = load(entries, allow_quant_noise=True, quant_noise_prompts=2, teacher_residency=residency)
    samples = [sample(alias, number) for alias in ("tools", "arithmetic", "structured") for number in range(3)]
    samples.append(sample("tools", 3, prompt=0))  # a second answer to a prompt that counts
    found = measure_quant_noise(samples, teachers, student, config, workspace, base=tmp_path)
    own = HFModel.load(str(models / "student"))
    noise, signal = {"idle": None}, {"idle": None}
    for alias, quant in (("tools", "mxfp4"), ("structured", "nvfp4")):
        exact = HFModel.load(str(models / alias))
        counted = [s for s in samples if s.teacher_id == alias and s.prompt_id[-1] in "01"]
        noise[alias] = pytest.approx(mean_kl(exact, in_fp4(models / alias, quant), counted), rel=1e-3)
        signal[alias] = pytest.approx(mean_kl(exact, own, counted), rel=1e-3)
    assert found == {"teacher/quant_kl_nats": noise, "teacher/student_kl_nats": signal}
    assert teachers.take_forwarded() == {}


def test_with_one_at_a_time_no_two_models_of_teachers_are_on_the_device(
    tiny: Path,
    student: HFModel,
    load: Load,
    workspace: Workspace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import weakref

    from mopdctl.distill import teachers as module

    entries = {a: {"model": str(tiny / "models" / a), "quant": "nvfp4"} for a in ("arithmetic", "structured", "tools")}
    config, teachers = load(entries, allow_quant_noise=True, teacher_residency="one")
    resident: list[Any] = []
    twins: list[weakref.ref[Any]] = []
    real = Teachers._move

    def move(self: Teachers, module: Any, device: torch.device) -> None:
        real(self, module, device)
        there = weakref.ref(module)
        resident[:] = [one for one in resident if one() is not None and one() is not module]
        if device is not module_host:
            resident.append(there)
            assert len(resident) == 1
            if self is not teachers:
                twins.append(there)

    module_host = module._HOST
    monkeypatch.setattr(Teachers, "_move", move)
    monkeypatch.setattr(module, "default_device", lambda: torch.device("cpu", 0))
    samples = [sample(alias, number) for alias in entries for number in range(2)]
    measure_quant_noise(samples, teachers, student, config, workspace, base=tmp_path)
    assert [twin() for twin in twins] == [None] * 3  # loaded, scored, freed


def test_a_reference_is_measured_and_never_refused(
    tiny: Path, student: HFModel, teachers_document: Document, workspace: Workspace, tmp_path: Path
) -> None:
    document = teachers_document(objective="exact", anchor={"kl_weight": 0.1}, reference_quant="nvfp4")
    config = TeachersFile.model_validate(document)
    teachers = load_teachers(config, student, workspace, base=tmp_path)
    reference = load_reference(config, student, workspace, base=tmp_path)
    samples = [sample(alias, number) for alias in ("tools", "structured") for number in range(2)]
    found = measure_quant_noise(samples, teachers, student, config, workspace, reference=reference, base=tmp_path)
    path = tiny / "models" / "student"
    expected = mean_kl(HFModel.load(str(path)), in_fp4(path, "nvfp4"), samples)
    assert found == {"reference/quant_kl_nats": pytest.approx(expected, rel=1e-3)}


def test_nothing_is_measured_where_nothing_is_quantized(
    tiny: Path, student: HFModel, load: Load, workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, teachers = load({"tools": {"model": str(tiny / "models" / "tools")}})
    monkeypatch.setattr(HFModel, "hidden_states", None)
    monkeypatch.setattr(quant_noise, "one_at_a_time", None)
    assert measure_quant_noise([sample("tools", 0)], teachers, student, config, workspace, base=tmp_path) == {}


def test_a_teacher_whose_noise_is_no_smaller_than_its_signal_is_refused_in_one_line(
    tiny: Path, student: HFModel, load: Load, workspace: Workspace, tmp_path: Path
) -> None:
    models = tiny / "models"
    entries = {
        "itself": {"model": str(models / "student"), "kind": "self", "quant": "nvfp4"},  # noise is all there is
        "tools": {"model": str(models / "tools"), "quant": "nvfp4"},
    }
    samples = [sample(alias, number) for alias in entries for number in range(2)]
    config, teachers = load(entries)
    with pytest.raises(CheckFailedError) as caught:
        measure_quant_noise(samples, teachers, student, config, workspace, base=tmp_path)
    message = str(caught.value)
    assert message.startswith("teacher 'itself': nvfp4 moves it by ")
    assert message.endswith(
        "nats a token, and the student is 0 away; leave out its `quant`, or set train.allow_quant_noise: true "
        "(the run then goes on)"
    )
    assert "tools" not in message
    assert caught.value.exit_code == 3
    config, teachers = load(entries, allow_quant_noise=True)
    found = measure_quant_noise(samples, teachers, student, config, workspace, base=tmp_path)
    noise, signal = found["teacher/quant_kl_nats"], found["teacher/student_kl_nats"]
    assert isinstance(noise, dict)
    assert isinstance(signal, dict)
    assert noise["itself"] > signal["itself"] == 0.0
    assert noise["tools"] < signal["tools"]
