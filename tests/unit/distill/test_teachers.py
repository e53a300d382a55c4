"""Teachers: what is loaded, who speaks the student's tokens, who is on the device; and the student is left alone."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mopdctl.config.lora import Lora
from mopdctl.config.teachers import TeachersFile
from mopdctl.distill import teachers as module
from mopdctl.distill.score import score
from mopdctl.distill.teachers import Teachers, load_teachers
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError
from mopdctl.records import Sample
from mopdctl.runs import Workspace
from mopdctl.train.lora import add_lora

Document = Callable[..., dict[str, Any]]
Write = Callable[..., Path]
PAIRS = [((3, 4 + i), tuple(range(10 + i, 16 + 2 * i))) for i in range(3)]


@pytest.fixture(scope="module")
def student(tiny: Path) -> HFModel:
    return HFModel.load(str(tiny / "models" / "student"), train=True)


@pytest.fixture(scope="module")
def write_adapter(tiny: Path) -> Write:
    """Writes a random adapter over one of the tiny models as a peft folder."""

    def write(folder: Path, over: str, *, seed: int) -> Path:
        base = tiny / "models" / over
        made = add_lora(HFModel.load(str(base)), Lora(rank=2), path=str(base), seed=seed)
        for name, parameter in sorted(made.model.named_parameters()):
            if ".lora_B" in name:
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
                parameter.data += 0.2 * noise.to(parameter.device)
        made.save_adapter(folder)
        return folder

    return write


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The checkpoints that were read into memory, by folder name."""
    found = []
    load = HFModel.load.__func__  # type: ignore[attr-defined]

    def counting(cls: type[HFModel], path: str, **options: Any) -> HFModel:
        found.append(Path(path).name)
        return load(cls, path, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(HFModel, "load", classmethod(counting))
    return found


@pytest.fixture
def load(student: HFModel, teachers_document: Document, tmp_path: Path) -> Callable[..., Teachers]:
    """Loads teachers from alias to model (or to a whole entry)."""

    def begin(models: dict[str, Any], *, of: HFModel = student, **train: Any) -> Teachers:
        document = teachers_document(**train)
        document["teachers"] = {
            alias: {"domains": [alias]} | (m if isinstance(m, dict) else {"model": str(m)})
            for alias, m in models.items()
        }
        config = TeachersFile.model_validate(document)
        return load_teachers(config, of, Workspace(tmp_path / "workspace"), base=tmp_path)

    return begin


def fingerprint_of(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def unchanged(model: Any, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def samples_of(routed: dict[str, int]) -> list[Sample]:
    """So many samples for each teacher, of different lengths."""
    found = []
    for alias, count in routed.items():
        for number in range(count):
            prompt, response = [3, 4 + number], list(range(10 + number, 13 + 3 * number))
            found.append(
                Sample(
                    sample_id=f"{alias}/{number}",
                    prompt_id=f"{alias}/{number}",
                    group_id=alias,
                    generation_index=0,
                    domain=alias,
                    teacher_id=alias,
                    policy_version_min=0,
                    policy_version_max=0,
                    tokens=np.array([*prompt, *response], np.int32),
                    prompt_length=len(prompt),
                    loss_mask=np.array([False] * len(prompt) + [True] * len(response)),
                    behavior_logprobs=np.full(len(response), -1.0, np.float32),
                    finish_reason="length",
                )
            )
    return found


# --------------------------------------------------------------------------------------------------------- loaded once


def test_ten_teachers_over_three_checkpoints_cost_three_loads(
    tiny: Path, load: Callable[..., Teachers], loads: list[str], write_adapter: Write, tmp_path: Path
) -> None:
    models: dict[str, Any] = {f"full{i}": tiny / "models" / ("tools", "structured")[i % 2] for i in range(4)}
    models |= {f"linked{i}": tmp_path / f"link{i}" for i in range(2)}
    for i in range(2):
        (tmp_path / f"link{i}").symlink_to(tiny / "models" / "tools")
    models |= {f"adapter{i}": write_adapter(tmp_path / f"a{i}", "arithmetic", seed=i) for i in range(3)}
    models["base"] = tiny / "models" / "arithmetic"
    loads.clear()
    teachers = load(models)
    assert len(teachers.by_alias) == 10
    assert sorted(loads) == ["arithmetic", "structured", "tools"]
    assert teachers.loads == 3
    assert len({id(model.model) for model in teachers.by_alias.values()}) == 3
    assert teachers["full0"] is teachers["full2"] is teachers["linked1"]
    # TRL #6530: adapters ignored
    found = [teachers[alias].score(PAIRS) for alias in ("adapter0", "adapter1", "adapter2", "base")]
    assert len({json.dumps(rows) for rows in found}) == 4
    assert found[3] == HFModel.load(str(tiny / "models" / "arithmetic")).score(PAIRS)


def test_a_black_box_is_not_loaded(tiny: Path, load: Callable[..., Teachers], loads: list[str], tmp_path: Path) -> None:
    loads.clear()
    box = {"gives": "answers", "model": str(tiny / "models" / "tools")}
    teachers = load({"box": box, "math": tiny / "models" / "arithmetic"})
    assert (loads, list(teachers.by_alias)) == (["arithmetic"], ["math"])


def test_a_step_runs_the_routed_tokens_through_a_teacher_once(
    tiny: Path, load: Callable[..., Teachers], write_adapter: Write, tmp_path: Path, teachers_document: Document
) -> None:
    models = {
        "one": write_adapter(tmp_path / "one", "tools", seed=1),
        "two": write_adapter(tmp_path / "two", "tools", seed=2),
        "full": tiny / "models" / "tools",
        "idle": tiny / "models" / "structured",
    }
    teachers = load(models, sampling_batch_size=2)
    samples = samples_of({"one": 3, "two": 5, "full": 2})
    document = teachers_document()
    document["teachers"] = {alias: {"model": str(m), "domains": [alias]} for alias, m in models.items()}
    seen = {"tools": 0, "structured": 0}

    def count(name: str) -> Callable[..., None]:
        def hook(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
            seen[name] += int(kwargs["attention_mask"].sum())

        return hook

    assert [teachers[alias].head.scale for alias in models] == [1.0] * 4  # found out once each, on few tokens
    for name, alias in (("tools", "one"), ("structured", "idle")):
        teachers[alias].model.base_model.register_forward_pre_hook(count(name), with_kwargs=True)
    student = HFModel.load(str(tiny / "models" / "student"))
    sequences = score(samples, teachers, student, TeachersFile.model_validate(document))
    assert all("teacher_logprobs" in s.streams for s in sequences)
    expected = {alias: sum(len(s.tokens) for s in samples if s.teacher_id == alias) for alias in ("full", "one", "two")}
    assert seen == {"tools": sum(expected.values()), "structured": 0}
    assert teachers.take_forwarded() == expected
    assert teachers.take_forwarded() == {}


def test_the_base_under_a_students_adapter_serves_as_a_teacher_without_a_load(
    tiny: Path, load: Callable[..., Teachers], loads: list[str]
) -> None:
    path = str(tiny / "models" / "student")
    student = add_lora(HFModel.load(path), Lora(rank=2), path=path, seed=0)
    loads.clear()
    teachers = load({"self": path, "tools": tiny / "models" / "tools"}, of=student, teacher_residency="one")
    assert loads == ["tools"]
    assert teachers["self"].model is student.model
    with torch.no_grad():
        for name, parameter in student.model.named_parameters():
            if ".lora_B" in name:
                parameter.add_(0.3)
    with teachers.resident("self") as model:
        assert model.score(PAIRS) == HFModel.load(path).score(PAIRS)
    with teachers.resident("tools"), teachers.resident("self"):
        pass  # the student is always there: it displaces no one
    assert student.score(PAIRS) != HFModel.load(path).score(PAIRS)
    assert all(p.requires_grad for n, p in student.model.named_parameters() if ".lora_" in n)
    # another precision is another model
    other = {"self": {"model": path, "dtype": "bfloat16"}}
    assert load(other, of=student)["self"].model is not student.model


# ------------------------------------------------------------------------------------------------------------ residency


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str]]:
    """Stands in for a GPU: every move of a model to a device, in order. Nothing moves."""
    from transformers import PreTrainedModel

    found: list[tuple[Any, str]] = []

    def to(self: Any, device: torch.device) -> Any:
        found.append((self, str(device)))
        return self

    monkeypatch.setattr(PreTrainedModel, "to", to)
    monkeypatch.setattr(module, "default_device", lambda: torch.device("cuda"))
    return found


def on_device(moves: list[tuple[Any, str]]) -> list[int]:
    """How many modules were on the device after each move."""
    place: dict[int, str] = {}
    counts = []
    for moved, device in moves:
        place[id(moved)] = device
        counts.append(sum(where == "cuda" for where in place.values()))
    return counts


@pytest.fixture(scope="module")
def rotating(tiny: Path, write_adapter: Write, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("rotating")
    adapters = {f"adapter{i}": write_adapter(root / f"a{i}", "tools", seed=i) for i in range(2)}
    return {"full": tiny / "models" / "arithmetic", "base": tiny / "models" / "tools"} | adapters


def test_never_are_two_on_the_device(
    load: Callable[..., Teachers], rotating: dict[str, Any], moves: list[tuple[Any, str]]
) -> None:
    # NeMo-RL #2772
    teachers = load(rotating, teacher_residency="one")
    loading = len(moves)
    assert {device for _, device in moves[:loading]} <= {"cpu"}
    for alias in ("full", "base", "adapter0", "full", "adapter1", "adapter0", "full"):
        with teachers.resident(alias) as model:
            assert model is teachers[alias]
            assert str(model.device) == "cuda"
        waiting = [m for m in teachers.by_alias.values() if m.model is not teachers[alias].model]
        assert all(str(m.device) == "cpu" for m in waiting)
    assert max(on_device(moves)) == 1
    # three changes of base after the first: adapters over one base come and go together
    assert [device for _, device in moves[loading:]] == ["cuda", *["cpu", "cuda"] * 4]
    teachers.park()
    assert on_device(moves)[-1] == 0
    assert all(str(m.device) == "cpu" for m in teachers.by_alias.values())
    teachers.park()
    assert len(moves) == loading + 10


def test_one_that_runs_is_not_displaced(load: Callable[..., Teachers], rotating: dict[str, Any]) -> None:
    teachers = load(rotating, teacher_residency="one")
    with (
        teachers.resident("adapter0"),
        teachers.resident("adapter1"),
        pytest.raises(RuntimeError, match="'full' would displace 'adapter1', which is running"),
        teachers.resident("full"),
    ):
        pytest.fail("two on the device")
    with teachers.resident("full"):
        pass


def test_one_that_waits_refuses_to_run(load: Callable[..., Teachers], rotating: dict[str, Any]) -> None:
    teachers = load(rotating, teacher_residency="one")
    for alias in rotating:
        with pytest.raises(RuntimeError, match="waits in the host's memory"):
            teachers[alias].score(PAIRS)
    for alias in rotating:
        with teachers.resident(alias) as model:
            model.score(PAIRS)
        teachers.park()
        with pytest.raises(RuntimeError, match="waits in the host's memory"):
            teachers[alias].score(PAIRS)


def test_residency_changes_no_score_and_rotation_no_weight(
    load: Callable[..., Teachers], rotating: dict[str, Any], student: HFModel
) -> None:
    # Dressage #15: the student's weights were not restored; verl-omni #427: the order was mixed up
    plain, turning = load(rotating), load(rotating, teacher_residency="one")
    before = fingerprint_of(student.model)
    own = {alias: fingerprint_of(model.model) for alias, model in turning.by_alias.items()}
    for alias in [*rotating, *reversed(rotating)]:
        with plain.resident(alias) as one, turning.resident(alias) as other:
            assert one.score(PAIRS) == other.score(PAIRS)
    assert unchanged(student.model, before)
    assert all(unchanged(turning[alias].model, weights) for alias, weights in own.items())
    # TRL #5862: a teacher's evaluation mode is its own affair
    assert student.model.training


def test_all_stay_where_they_are_by_default(
    load: Callable[..., Teachers], rotating: dict[str, Any], moves: list[tuple[Any, str]]
) -> None:
    teachers = load(rotating)
    loading = len(moves)
    for alias in rotating:
        with teachers.resident(alias), teachers.resident("full"):
            pass
        teachers[alias].score(PAIRS)
        teachers.head(alias)
    teachers.park()
    assert len(moves) == loading


@pytest.mark.gpu
def test_on_a_gpu_the_weights_are_those_of_one(load: Callable[..., Teachers], rotating: dict[str, Any]) -> None:
    teachers = load(rotating, teacher_residency="one")
    modules = {id(m.model): m.model for m in teachers.by_alias.values()}
    sizes = [sum(p.nbytes for p in module.parameters()) for module in modules.values()]

    def on_the_gpu() -> int:
        return sum(p.nbytes for module in modules.values() for p in module.parameters() if p.is_cuda)

    assert on_the_gpu() == 0
    for alias in [*rotating, *rotating]:
        with teachers.resident(alias) as model:
            model.score(PAIRS)
            assert {p.device.type for p in model.model.parameters()} == {"cuda"}
        assert teachers.head(alias).weight_VH.is_cuda
        assert 0 < on_the_gpu() <= max(sizes)
    teachers.park()
    for alias in rotating:
        assert teachers.head(alias).weight_VH.is_cuda
        assert {p.device.type for p in teachers[alias].model.parameters()} == {"cpu"}


# ------------------------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("residency", ["all", "one"])
def test_no_teacher_ever_takes_part_in_a_gradient(
    load: Callable[..., Teachers], rotating: dict[str, Any], residency: str
) -> None:
    # TRL #6526: the teacher's projection tracked gradients; AReaL #1367: loaded as an engine that trains
    teachers = load(rotating, teacher_residency=residency)
    for alias in rotating:
        with teachers.resident(alias) as model:
            (hidden_NG,) = model.hidden_states(PAIRS[:1], [[1] * len(PAIRS[0][1])])
        assert not hidden_NG.requires_grad
        head = teachers.head(alias)
        assert not head.weight_VH.requires_grad
        hidden_NG = hidden_NG.clone().requires_grad_()  # even where what comes in does ask for one
        (hidden_NG @ head.weight_VH.T).sum().backward()
    for model in teachers.by_alias.values():
        assert all(p.grad is None and not p.requires_grad for p in model.model.parameters())
        assert not model.model.training


def test_a_head_of_the_student_itself_is_cut_off_too(student: HFModel) -> None:
    assert student.head.weight_VH.requires_grad
    assert not Teachers({"self": student}).head("self").weight_VH.requires_grad


@pytest.mark.parametrize("residency", ["all", "one"])
def test_a_head_makes_the_teachers_logits(
    load: Callable[..., Teachers], rotating: dict[str, Any], residency: str
) -> None:
    teachers = load(rotating, teacher_residency=residency)
    masks = [[1] * len(response) for _, response in PAIRS]
    for alias in [*rotating, *rotating]:
        with teachers.resident(alias) as model:
            states, rows = model.hidden_states(PAIRS, masks), model.score(PAIRS)
        teachers.park()
        head = teachers.head(alias)
        for hidden_NG, (_, response), row in zip(states, PAIRS, rows, strict=True):
            logprobs_NV = torch.log_softmax(hidden_NG @ head.weight_VH.T, -1)
            assert logprobs_NV[range(len(response)), response].tolist() == pytest.approx(row, abs=5e-5)


def test_only_the_last_head_is_kept_and_no_teacher_moves_for_one(
    load: Callable[..., Teachers],
    rotating: dict[str, Any],
    moves: list[tuple[Any, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_detached", lambda head, device: replace(head, weight_VH=head.weight_VH.detach()))
    teachers = load(rotating, teacher_residency="one")
    for alias in ("full", "base"):
        teachers.head(alias)  # the first time each head is held against its model, on the device
    teachers.park()
    before = len(moves)
    first = teachers.head("full")
    assert teachers.head("full") is first
    second = teachers.head("base")
    assert second is not first
    assert teachers.head("full") is not first
    assert len(moves) == before
    with teachers.resident("base"):
        assert teachers._head is None  # a head makes room as its teacher does


# ----------------------------------------------------------------------------------------------------------- tokenizers


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(path.read_text("utf-8"))
    change(document)
    path.write_text(json.dumps(document), "utf-8")


def swap_two_tokens(tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["b"], vocabulary["d"] = vocabulary["d"], vocabulary["b"]


def test_a_permuted_vocabulary_of_equal_size_is_refused(
    tiny: Path, load: Callable[..., Teachers], tmp_path: Path
) -> None:
    # open-instruct #1847, SkyRL #2256: token ids that come back as they were sent prove nothing
    folder = shutil.copytree(tiny / "models" / "tools", tmp_path / "permuted")
    edit_json(folder / "tokenizer.json", swap_two_tokens)
    with pytest.raises(InputError, match="of the same size but in another order"):
        load({"math": folder})


def test_an_adapter_with_another_vocabulary_than_its_base_is_refused(
    tiny: Path, load: Callable[..., Teachers], write_adapter: Write, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "a", "tools", seed=1)
    for file in (tiny / "models" / "tools").iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder)
    load({"math": folder})
    edit_json(folder / "tokenizer.json", swap_two_tokens)
    with pytest.raises(InputError, match=r"teacher 'math' .*vocabulary"):
        load({"math": folder})


def test_padded_rows_take_no_part_however_large(
    tiny: Path, load: Callable[..., Teachers], student: HFModel, tmp_path: Path
) -> None:
    # TRL #2215, #3028, #6252: 151936 against 152064 rows; ms-swift `_align_vocab`: filled with the other model's logits
    from transformers import AutoModelForCausalLM

    folder = shutil.copytree(tiny / "models" / "tools", tmp_path / "padded")
    model = AutoModelForCausalLM.from_pretrained(folder)
    size = model.config.vocab_size
    model.resize_token_embeddings(size + 24, mean_resizing=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[size:] = 50.0
    model.save_pretrained(folder)
    teachers = load({"padded": folder, "plain": tiny / "models" / "tools"})
    assert teachers["padded"].vocab_size == student.vocab_size == size
    assert teachers.head("padded").weight_VH.shape[0] == size + 24
    assert teachers["padded"].score(PAIRS) == teachers["plain"].score(PAIRS)


def test_another_end_token_is_refused_before_the_first_step(
    tiny: Path, load: Callable[..., Teachers], tmp_path: Path
) -> None:
    # ms-swift #9526: base student and instruct teacher end their answers differently, and lengths explode
    folder = shutil.copytree(tiny / "models" / "tools", tmp_path / "other")
    edit_json(folder / "generation_config.json", lambda c: c.update(eos_token_id=[1, 7]))
    with pytest.raises(InputError, match=r"end tokens \(\[1\] and \[1, 7\]\)"):
        load({"math": folder})


def test_what_is_wrong_with_an_adapter_names_its_alias(
    load: Callable[..., Teachers], write_adapter: Write, tmp_path: Path, tiny: Path
) -> None:
    folder = write_adapter(tmp_path / "a", "tools", seed=1)
    with pytest.raises(InputError, match=r"^teacher 'math': adapter .*: no base, model '\./gone'"):
        load({"math": {"model": str(folder), "base": "./gone"}})
    with pytest.raises(InputError, match=r"^teacher 'math': .*`base` is given, but it is no adapter"):
        load({"math": {"model": str(tiny / "models" / "tools"), "base": "x"}})
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(InputError, match=r"^adapter .*: has no adapter_model\.safetensors"):
        load({"math": folder})
