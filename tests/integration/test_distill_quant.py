"""Distillation for FP4 and from FP4: a student on quantized weights, teachers on theirs, and runs that are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from mopdctl.config.quant import QuantConfig
from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.run import run_distill
from mopdctl.distill.teachers import load_frozen
from mopdctl.engines.fake_quant import fake_quantize_weights, quantizable, quantize_weights
from mopdctl.engines.hf import HFModel
from mopdctl.engines.weights import open_tensors, parameter_names, read_config, skeleton
from mopdctl.errors import CheckFailedError, InputError
from mopdctl.files import read_json, write_json
from mopdctl.objective.forward_kl import forward_kl
from mopdctl.objective.head import head_logits
from mopdctl.quant.plan import make_plan
from mopdctl.quant.run import quantize_model
from mopdctl.runs import Workspace, read_metrics

Document = Callable[..., dict[str, Any]]
Distil = Callable[..., SimpleNamespace]
Finished = Callable[..., SimpleNamespace]
Cli = Callable[..., SimpleNamespace]

FLOAT32 = 1e-5
DOMAINS = ["arithmetic", "structured", "tools"]


class StopError(Exception):
    pass


def assert_same_bits(one: SimpleNamespace, other: SimpleNamespace, *, but: tuple[str, ...] = ()) -> None:
    assert [{k: v for k, v in row.items() if k not in but} for row in one.metrics] == [
        {k: v for k, v in row.items() if k not in but} for row in other.metrics
    ]
    assert other.rollouts == one.rollouts
    assert other.weights.keys() == one.weights.keys()
    assert all(other.weights[name].equal(weight) for name, weight in one.weights.items())


def with_quant(document: dict[str, Any], quant: str = "nvfp4", **teachers: Any) -> dict[str, Any]:
    """The document with every teacher quantized."""
    for teacher in document["teachers"].values():
        teacher["quant"] = quant
    return document


def itself(document: dict[str, Any]) -> dict[str, Any]:
    """The document with the student as the one teacher: quantization-aware distillation, where `student_quant` says."""
    return document | {"teachers": {"self": {"model": document["student"], "kind": "self", "domains": DOMAINS}}}


def on_fp4_weights(path: Path | str, format: Any) -> HFModel:
    """A checkpoint that runs as a student with `student_quant` does."""
    model = HFModel.load(str(path))
    fake_quantize_weights(model.model, format)
    return model


def scores(model: HFModel, rollouts: list[dict[str, Any]]) -> list[list[float]]:
    return model.score([(r["prompt_ids"], r["response_ids"]) for r in rollouts])


# --------------------------------------------------------------------------------------------------------- the student


@pytest.mark.parametrize("objective", ["sampled", "exact"])
def test_the_student_samples_and_learns_on_quantized_weights(
    tiny: Path, distil: Distil, teachers_document: Document, objective: str
) -> None:
    document = itself(teachers_document(objective=objective, student_quant="mxfp4", steps=1))
    run = distil(document)
    (row,), (rollouts,) = run.metrics, run.rollouts
    student = on_fp4_weights(tiny / "models" / "student", "mxfp4")
    teacher = HFModel.load(document["student"])
    for said, model in (("behavior_logprobs", student), ("teacher_logprobs", teacher)):
        for found, one in zip(scores(model, rollouts), rollouts, strict=True):
            assert one[said] == pytest.approx(found, abs=FLOAT32)
    # Its own weights in full precision are the teacher: what it learns is what quantization has taken.
    assert row["train/grad_norm"] > 1e-3
    estimates = [
        behavior - told
        for one in rollouts
        for behavior, told in zip(one["behavior_logprobs"], one["teacher_logprobs"], strict=True)
    ]
    assert row["distill/kl_k1_nats"]["self"] == pytest.approx(sum(estimates) / len(estimates), abs=FLOAT32)
    assert row["distill/kl_k3_nats"]["self"] > 1e-3


@pytest.mark.slow
def test_distillation_from_itself_wins_back_what_quantization_took(
    tiny: Path, distil: Distil, teachers_document: Document
) -> None:
    settings = {"steps": 10, "batch_size": 24, "max_new_tokens": 6, "objective": "exact", "divergence": "forward_kl"}
    run = distil(itself(teachers_document(student_quant="mxfp4", schedule="cosine", **settings)))
    rollouts = [one for step in run.rollouts[-4:] for one in step]
    pairs = [(one["prompt_ids"], one["response_ids"]) for one in rollouts]
    masks = [[1] * len(one["response_ids"]) for one in rollouts]

    def logprobs(model: HFModel) -> torch.Tensor:
        with torch.no_grad():
            logits_NV = head_logits(
                torch.cat(model.hidden_states(pairs, masks)), model.head, vocab_size=model.vocab_size
            )
        return torch.log_softmax(logits_NV, -1)

    teacher, before, after = map(
        logprobs,
        (
            HFModel.load(str(tiny / "models" / "student")),
            on_fp4_weights(tiny / "models" / "student", "mxfp4"),
            on_fp4_weights(run.checkpoint, "mxfp4"),
        ),
    )
    lost, left = (float(forward_kl(one, teacher)[0].mean()) for one in (before, after))
    assert lost > 0.05
    assert left < 0.75 * lost


def test_the_checkpoint_holds_its_own_weights_and_says_what_they_are_for(
    tiny: Path, distil: Distil, teachers_document: Document
) -> None:
    run = distil(teachers_document(student_quant="nvfp4"))
    student = load_file(tiny / "models" / "student" / "model.safetensors")
    assert {name: (t.shape, t.dtype) for name, t in run.weights.items()} == {
        name: (t.shape, t.dtype) for name, t in student.items()
    }
    matrix = run.weights["model.layers.0.mlp.up_proj.weight"]
    assert len(matrix.unique()) > 0.99 * matrix.numel()  # no grid
    assert run.card["student_quant"]["format"] == "nvfp4"
    assert run.card["student_quant"]["method"] == "max"
    assert "not quantized" in run.card["student_quant"]["weights"]
    assert "quantization_config" not in read_json(run.checkpoint / "config.json")


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["sampled", "exact"])
def test_none_is_as_if_nothing_had_been_said(distil: Distil, teachers_document: Document, objective: str) -> None:
    plain = distil(teachers_document(objective=objective))
    said = distil(with_quant(teachers_document(objective=objective, student_quant="none"), "none"))
    assert_same_bits(plain, said)
    assert said.card == plain.card
    assert "student_quant" not in plain.card
    assert not any(name.startswith(("teacher/", "reference/")) for row in plain.metrics for name in row)


@pytest.mark.slow
@pytest.mark.parametrize(
    "train",
    [
        {"objective": "exact", "inner_steps": 2},
        {"staleness": 1, "optimizer": "muon", "warm_start": "merge"},
        {
            "gradient_checkpointing": True,
            "warm_up": {"steps": 2, "samples": 4, "wrong": "keep", "batch_size": 6},
            "max_new_tokens": 40,
        },
    ],
)
def test_a_run_that_broke_off_goes_on_to_the_same_bits(
    tmp_path: Path, finished: Finished, teachers_document: Document, train: dict[str, Any]
) -> None:
    settings = {"steps": 3, "checkpoint_every": 1, "max_new_tokens": 6, "batch_size": 6, "student_quant": "nvfp4"}
    config = TeachersFile.model_validate(with_quant(teachers_document(**settings | train, allow_quant_noise=True)))
    straight, broken = (Workspace(tmp_path / name) for name in ("straight", "broken"))
    run_distill(config, straight, base=tmp_path)
    for last in (1, 2):

        def on_step(done: int, metrics: dict[str, Any], last: int = last) -> None:
            if done == last:
                raise StopError

        with pytest.raises(StopError):
            run_distill(config, broken, base=tmp_path, on_step=on_step)
    run_distill(config, broken, base=tmp_path)
    one, other = finished(straight.root), finished(broken.root)
    assert_same_bits(one, other)
    assert other.card == one.card


@pytest.mark.slow
def test_gradient_checkpointing_and_the_number_of_micro_batches_change_nothing(
    distil: Distil, teachers_document: Document
) -> None:
    plain, checkpointed, cut = (
        distil(itself(teachers_document(objective="exact", student_quant="nvfp4", **train)))
        for train in ({}, {"gradient_checkpointing": True}, {"gradient_accumulation": 3})
    )
    assert_same_bits(plain, checkpointed)
    assert cut.metrics[0]["train/grad_norm"] == pytest.approx(plain.metrics[0]["train/grad_norm"], rel=1e-4)


# -------------------------------------------------------------------------------------------------------- the teachers


@pytest.fixture(scope="module")
def twins(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints that hold, in full precision, what each teacher is in NVFP4."""
    root, found = tmp_path_factory.mktemp("twins"), {}
    for domain in DOMAINS:
        model = HFModel.load(str(tiny / "models" / domain))
        quantize_weights(model, str(tiny / "models" / domain), "nvfp4")
        model.save(root / domain)
        found[domain] = str(root / domain)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["sampled", "exact"])
def test_a_quantized_teacher_is_the_checkpoint_that_quantization_would_have_made(
    distil: Distil, teachers_document: Document, twins: dict[str, str], objective: str
) -> None:
    run = distil(with_quant(teachers_document(objective=objective, allow_quant_noise=True)))
    document = teachers_document(objective=objective)
    for domain, path in twins.items():
        document["teachers"][domain]["model"] = path
    new = ("teacher/quant_kl_nats", "teacher/student_kl_nats")
    assert_same_bits(distil(document), run, but=new)
    first, second = run.metrics
    assert set(new) <= first.keys()
    assert not set(new) & second.keys()
    for domain in DOMAINS:
        noise, signal = (first[name][domain] for name in new)
        assert 0 < noise < 1
        assert 0 < signal < 5
        said = run.card["teachers"][domain]
        assert (said["quant"], said["quant_kl_nats"], said["student_kl_nats"]) == ("nvfp4", noise, signal)
    manifest = read_json(run.checkpoint / "teacher_manifest.json")["teachers"]
    assert {one["quant"]["method"] for one in manifest.values()} == {"sweep"}


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["sampled", "exact"])
def test_residency_changes_no_bit(distil: Distil, teachers_document: Document, objective: str) -> None:
    runs = [
        distil(with_quant(teachers_document(objective=objective, allow_quant_noise=True, teacher_residency=residency)))
        for residency in ("all", "one")
    ]
    assert_same_bits(*runs)


def test_a_teacher_that_is_but_noise_stops_the_run_before_its_first_update(
    tmp_path: Path, cli: Cli, teachers_document: Document, finished: Finished, distil: Distil
) -> None:
    document = with_quant(itself(teachers_document(objective="exact")))
    write_json(tmp_path / "teachers.yaml", document)
    arguments = ["distill", "--teachers", tmp_path / "teachers.yaml", "--workspace", tmp_path / "workspace"]
    ended = cli(*arguments)
    assert (ended.code, ended.stdout) == (3, "")
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: teacher 'self': nvfp4 moves it by ")
    assert line.endswith("set train.allow_quant_noise: true (the run then goes on)")
    workspace = Workspace(tmp_path / "workspace")
    assert read_metrics(workspace.run("merged")) == []
    assert not workspace.checkpoint("merged").exists()
    # Told so, it goes on with the answers it has.
    ended = cli(*arguments, "--set", "train.allow_quant_noise=true", "--json")
    assert ended.code == 0
    assert json.loads(ended.stdout)["checkpoint"] == str(workspace.checkpoint("merged"))
    document["train"]["allow_quant_noise"] = True
    assert_same_bits(distil(document), finished(workspace.root))


@pytest.mark.slow
def test_a_teacher_without_a_prompt_in_the_first_step_is_not_measured(
    distil: Distil, teachers_document: Document, tiny: Path
) -> None:
    document = teachers_document(steps=1, batch_size=2, allow_quant_noise=True)
    document["teachers"]["tools"] |= {"quant": "nvfp4", "sampling_weight": 1e-9}
    for domain in ("arithmetic", "structured"):
        document["teachers"][domain]["sampling_weight"] = 1.0
    (row,) = distil(document).metrics
    assert row["teacher/quant_kl_nats"] == row["teacher/student_kl_nats"] == {"tools": None}


@pytest.mark.slow
def test_a_quantized_teacher_of_another_precision_is_another_teacher_on_resume(
    tmp_path: Path, teachers_document: Document
) -> None:
    workspace = Workspace(tmp_path)
    settings = {"steps": 3, "checkpoint_every": 1, "allow_quant_noise": True}

    def on_step(done: int, metrics: dict[str, Any]) -> None:
        raise StopError

    config = TeachersFile.model_validate(with_quant(teachers_document(**settings)))
    with pytest.raises(StopError):
        run_distill(config, workspace, base=tmp_path, on_step=on_step)
    config = TeachersFile.model_validate(with_quant(teachers_document(**settings), "mxfp4"))
    with pytest.raises(InputError, match=r"teachers\.arithmetic\.quant"):
        run_distill(config, workspace, base=tmp_path)


@pytest.mark.slow
def test_noise_is_refused_by_the_library_too(teachers_document: Document, tmp_path: Path) -> None:
    config = TeachersFile.model_validate(with_quant(itself(teachers_document()), "mxfp4"))
    with pytest.raises(CheckFailedError, match="mxfp4 moves it by"):
        run_distill(config, Workspace(tmp_path), base=tmp_path)


# --------------------------------------------------------------------------------------------- beside `quantize` itself

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**COMMON)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**COMMON, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**COMMON)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**COMMON | EXPERTS)),
    "qwen3-next": lambda: Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **COMMON | EXPERTS,
            shared_expert_intermediate_size=32,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=1,
            linear_num_value_heads=2,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
        )
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_trains_quantized_is_what_the_tool_quantizes_by_default(tmp_path: Path, name: str) -> None:
    MODELS[name]().save_pretrained(tmp_path)
    tensors = open_tensors(str(tmp_path))
    plan = make_plan(QuantConfig(model=str(tmp_path), name="out", format="nvfp4"), tensors)
    names = parameter_names(skeleton(str(tmp_path), read_config(str(tmp_path))), tensors.places)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    groups = quantizable(model)
    expected = {frozenset(names[f"{one}.weight"] for one in module.group) for module in plan.quantized.values()}
    assert {frozenset(place.name for place in group) for group in groups} == expected


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, str, str], Path]:
    """Quantizes a checkpoint with the tool."""

    def write(model: Path, format: str, method: str) -> Path:
        root = tmp_path_factory.mktemp("quantized")
        config = QuantConfig.model_validate({"model": str(model), "name": "out", "format": format, "method": method})
        return quantize_model(config, Workspace(root), base=root)

    return write


@pytest.mark.parametrize("format", ["nvfp4", pytest.param("mxfp4", marks=pytest.mark.slow)])
def test_quantizing_the_checkpoint_gives_the_weights_that_were_trained(
    distil: Distil, teachers_document: Document, written: Callable[..., Path], format: str
) -> None:
    run = distil(teachers_document(student_quant=format, steps=1))
    trained, served = (
        on_fp4_weights(run.checkpoint, format).model,
        HFModel.load(str(written(run.checkpoint, format, "max"))),
    )
    state = dict(served.model.named_parameters())
    for name, _ in trained.named_parameters():
        module, _, last = name.rpartition(".")
        assert torch.equal(getattr(trained.get_submodule(module), last), state[name]), name
    quantized = [place for group in quantizable(trained) for place in group]
    assert all(not torch.equal(place.weight, state[place.name]) for place in quantized)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(trained(ids).logits, served.model(ids).logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("quant", "method"), [("nvfp4", "sweep"), ("mxfp4", "max")])
def test_a_quantized_teacher_has_the_weights_of_the_checkpoint_that_the_tool_writes(
    tiny: Path, written: Callable[..., Path], quant: Any, method: str, dtype: Any
) -> None:
    path = tiny / "models" / "tools"
    mine = load_frozen(str(path), dtype=dtype, quant=quant, batch_size=8)
    other = HFModel.load(str(written(path, quant, method)), dtype=dtype)
    state = other.model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in mine.model.state_dict().items())
    pairs = [((3, 4, 5), (6, 7, 8, 9))]
    assert mine.score(pairs) == other.score(pairs)


@pytest.mark.slow
def test_a_checkpoint_of_the_tool_serves_as_a_teacher_and_is_not_quantized_again(
    tiny: Path, written: Callable[..., Path], distil: Distil, teachers_document: Document, tmp_path: Path
) -> None:
    path = written(tiny / "models" / "tools", "nvfp4", "sweep")
    document = teachers_document(steps=1)
    document["teachers"]["tools"]["model"] = str(path)
    run = distil(document)
    manifest = read_json(run.checkpoint / "teacher_manifest.json")["teachers"]["tools"]
    assert manifest["quantization"]["quant_method"] == "compressed-tensors"
    assert "quant" not in manifest
    document["teachers"]["tools"]["quant"] = "nvfp4"
    with pytest.raises(InputError, match="quantized already; leave out `quant`"):
        run_distill(TeachersFile.model_validate(document), Workspace(tmp_path), base=tmp_path)
