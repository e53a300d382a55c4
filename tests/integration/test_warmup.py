"""From teachers to a warmed-up student, and to the control SeqKD: asked, chosen, trained, killed and gone on with."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from mopdctl.config.teachers import TeachersFile
from mopdctl.config.warmup import TeacherAnswers, WarmUp
from mopdctl.distill import answers, warmup
from mopdctl.distill.warmup import run_seqkd
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError
from mopdctl.files import write_json
from mopdctl.runs import Workspace, checkpoint_digest, read_card, read_metrics
from mopdctl.store.store import Store
from mopdctl.train.batch import TrainSequence

Document = Callable[..., dict[str, Any]]
ANSWERS = TeacherAnswers(samples=2, wrong="keep")  # the tiny teachers are hardly ever right


class StopError(Exception):
    pass


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[TrainSequence]:
    """The sequences of all optimizer steps."""
    found: list[TrainSequence] = []
    real = warmup.update

    def update(student: Any, optimizers: Any, sequences: Any, *rest: Any) -> Any:
        found.extend(sequences)
        return real(student, optimizers, sequences, *rest)

    monkeypatch.setattr(warmup, "update", update)
    return found


def test_seqkd_spends_the_budget_of_the_loop_on_answers_of_the_teachers(
    tiny: Path, teachers_document: Document, tmp_path: Path, trained: list[TrainSequence]
) -> None:
    document = teachers_document("control", steps=3, batch_size=6, samples_per_prompt=2, max_new_tokens=24)
    config, place, notes = TeachersFile.model_validate(document), Workspace(tmp_path), list[str]()
    target = run_seqkd(config, place, base=tiny, answers=ANSWERS, on_note=notes.append)
    # As many sequences per step as the loop has answers of the student, a third of them of each teacher.
    assert len(trained) == 3 * 6 * 2
    assert [sum(s.teacher_id == alias for s in trained) for alias in config.teachers] == [12, 12, 12]
    rows = read_metrics(place.run("control"))
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[0]["sft/loss_nats"].keys() == config.teachers.keys()

    store = {s.sample_id: s for s in Store(place.run("control") / "answers").scan()}
    student = HFModel.load(str(tiny / "models" / "student"))
    for sequence in trained:
        sample = store[sequence.sample_id]
        assert sample.teacher_id == sample.domain == sequence.teacher_id
        assert list(sequence.response_ids) == sample.response_ids.tolist()
        assert sample.finish_reason == "stop"
        assert sequence.response_ids[-1] in student.eos_ids

    card = read_card(target)
    assert (card["algorithm"], card["parent"]) == ("seqkd", config.student)
    assert card["digest"] == checkpoint_digest(target)
    assert card["teachers"]["tools"]["digest"] == checkpoint_digest(tiny / "models" / "tools")
    for alias, counts in card["answers"].items():
        own = [s for s in store.values() if s.teacher_id == alias]
        assert (counts["prompts"], counts["in"]) == (8, len(own) == 16 and 16)
        assert counts["in"] - sum(counts["dropped"].values()) == counts["out"]
        assert counts["dropped"].get("length", 0) == sum(s.finish_reason == "length" for s in own)
        assert any(note.startswith(f"teacher {alias!r}: {counts['out']} of 16 answers train") for note in notes)
    weights, before = load_file(target / "model.safetensors"), student.model.state_dict()
    assert any(not weights[name].equal(before[name]) for name in weights)

    # A finished one is left as it is; the same name for another is refused.
    del trained[:]
    assert run_seqkd(config, place, base=tiny, answers=ANSWERS) == target
    assert trained == []
    with pytest.raises(InputError, match=r"was begun with another configuration \(answers.keep was \d, now \d\)"):
        run_seqkd(config, place, base=tiny, answers=ANSWERS.model_copy(update={"keep": 2}))


def test_seqkd_that_broke_off_equals_one_that_did_not(
    tiny: Path, teachers_document: Document, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"steps": 4, "batch_size": 6, "checkpoint_every": 2, "max_new_tokens": 32}
    config = TeachersFile.model_validate(teachers_document("control", **settings))
    straight, broken = Workspace(tmp_path / "straight"), Workspace(tmp_path / "broken")
    run_seqkd(config, straight, base=tiny, answers=ANSWERS)
    loads: list[str] = []
    real = answers.load_teachers

    def load(alone: TeachersFile, *rest: Any, **options: Any) -> Any:
        loads.extend(alone.teachers)
        return real(alone, *rest, **options)

    monkeypatch.setattr(answers, "load_teachers", load)
    for last in (1, 3):

        def on_step(done: int, row: dict[str, Any], last: int = last) -> None:
            if done == last:
                raise StopError

        with pytest.raises(StopError):
            run_seqkd(config, broken, base=tiny, answers=ANSWERS, on_step=on_step)
    run_seqkd(config, broken, base=tiny, answers=ANSWERS)
    assert loads == ["arithmetic", "structured", "tools"]  # by the first process alone
    one, other = (load_file(p.checkpoint("control") / "model.safetensors") for p in (straight, broken))
    assert all(one[name].equal(other[name]) for name in one)
    assert read_card(straight.checkpoint("control")) == read_card(broken.checkpoint("control"))


def test_wrong_answers_of_a_teacher_do_not_train_and_a_teacher_that_is_never_right_is_named(
    tiny: Path, teachers_document: Document, tmp_path: Path
) -> None:
    config = TeachersFile.model_validate(teachers_document("control", max_new_tokens=16))
    with pytest.raises(Exception, match=r"teacher 'arithmetic': none of its 8 answers can be trained on \(.*\); raise"):
        run_seqkd(config, Workspace(tmp_path), base=tiny)
    assert not (tmp_path / "checkpoints").exists()


def test_a_prompt_that_its_verifier_cannot_check_is_refused_before_anything_is_loaded(
    tiny: Path, teachers_document: Document, tmp_path: Path
) -> None:
    row = {"prompt": "1+1", "domain": "tools", "verifier": "integer", "reference": {"answer": "two"}}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n", "utf-8")
    document = teachers_document() | {"prompts": "prompts.jsonl"}
    document["teachers"] = {"tools": {"model": "nowhere", "domains": ["tools"]}}
    with pytest.raises(InputError, match=r"prompts.jsonl:1: "):
        run_seqkd(TeachersFile.model_validate(document), Workspace(tmp_path / "w"), base=tmp_path)
    assert not (tmp_path / "w").exists()


def test_conversations_with_tools_are_sampled_whole_and_only_the_teachers_own_words_train(
    errands: Path, write_tiny_model: Callable[..., Path], tmp_path: Path, trained: list[TrainSequence]
) -> None:
    student = write_tiny_model(tmp_path / "student", noise=0.04, max_position_embeddings=256)
    document = {
        "name": "control",
        "student": str(student),
        "prompts": str(errands / "errands.jsonl"),
        "teachers": {"agent": {"model": str(errands / "model"), "domains": ["errands"]}},
        "train": {"steps": 2, "batch_size": 6, "max_new_tokens": 90, "learning_rate": 1e-3},
    }
    place = Workspace(tmp_path / "w")
    run_seqkd(TeachersFile.model_validate(document), place, base=tmp_path)
    model = HFModel.load(str(errands / "model"))
    store = {s.sample_id: s for s in Store(place.run("control") / "answers").scan()}
    assert all(store[s.sample_id].reward == 1 for s in trained)
    assert any(s.reward == 0 for s in store.values())
    told = [
        model.tokenizer.decode([t for t, on in zip(s.response_ids, s.loss_mask, strict=True) if not on])
        for s in trained
    ]
    assert sum(map(bool, told)) > len(told) / 2
    assert all(text.startswith("<|tool|>") for text in told if text)
    said = [
        model.tokenizer.decode([t for t, on in zip(s.response_ids, s.loss_mask, strict=True) if on]) for s in trained
    ]
    assert not any("<|tool|>" in text for text in said)
    assert len(set(chain.from_iterable(s.loss_mask for s in trained))) == 2


DRIVER = """
import sys
from pathlib import Path
from tests.integration.test_warmup import warm
warm(Path(sys.argv[1]), Path(sys.argv[2]))
"""
SETTINGS = WarmUp(steps=8, batch_size=6, samples=3, wrong="keep", learning_rate=1e-3)


def warm(document: Path, workspace: Path) -> HFModel:
    """The student of a run after its warm-up, as the run has it."""
    from mopdctl.distill.answers import one_at_a_time
    from mopdctl.distill.jobs import answer_settings
    from mopdctl.distill.prompts import teacher_of
    from mopdctl.rollouts.book import PromptBook
    from mopdctl.rollouts.prompts import read_prompts
    from mopdctl.train.runtime import prepare_runtime

    prepare_runtime()
    config, place = TeachersFile.model_validate_json(document.read_text("utf-8")), Workspace(workspace)
    student = HFModel.load(config.student, train=True, batch_size=config.train.sampling_batch_size)
    prompts = read_prompts(config.prompts, config.routing_keys)
    report = warmup.run_warm_up(
        config,
        SETTINGS,
        PromptBook(student, prompts, answer_settings(config)),
        [teacher_of(prompt.routing, config) for prompt in prompts],
        student,
        one_at_a_time(config, student, place, base=workspace),
        place.run(config.name) / "warm-up",
        record={"config": config.model_dump(mode="json")},
    )
    assert report["answers"].keys() == config.teachers.keys()
    return student


def killed_when(ready: Callable[[], bool], document: Path, workspace: Path) -> None:
    """Runs the driver and kills it once `ready`."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"GOMP_SPINCOUNT": "3000", "PYTHONPATH": str(root)}
    process = subprocess.Popen([sys.executable, "-c", DRIVER, document, workspace], env=environment)
    try:
        deadline = time.monotonic() + 120
        while not ready():
            assert process.poll() is None
            assert time.monotonic() < deadline, "no progress"
            time.sleep(0.001)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_while_teachers_write_and_while_the_student_learns_it_ends_with_the_same_bits(
    teachers_document: Document, tmp_path: Path, stopped_after: Callable[..., AbstractContextManager[None]]
) -> None:
    write_json(
        tmp_path / "run.json",
        teachers_document(max_new_tokens=60, checkpoint_every=2, sampling_batch_size=8, gradient_accumulation=2),
    )
    straight = warm(tmp_path / "run.json", tmp_path / "straight")
    killed = tmp_path / "killed"
    folder = killed / "runs" / "merged" / "warm-up"

    def logged(commits: int) -> Callable[[], bool]:
        """So many commits, and an answer that is being written."""

        def ready() -> bool:
            committed = len(list((folder / "answers" / "payload").glob("*.parquet")))
            try:
                return committed >= commits and any(p.stat().st_size > 3000 for p in (folder / "answers").glob("wal/*"))
            except FileNotFoundError:  # a segment whose samples were just committed
                return False

        return ready

    killed_when(logged(0), tmp_path / "run.json", killed)
    killed_when(logged(4), tmp_path / "run.json", killed)
    driver = [sys.executable, "-c", DRIVER, str(tmp_path / "run.json"), str(killed)]
    with stopped_after(folder / "metrics.jsonl", 5, driver):
        pass
    for _ in range(2):  # the second one finds it finished
        student = warm(tmp_path / "run.json", killed)
        assert all(
            weight.equal(student.model.state_dict()[name]) for name, weight in straight.model.state_dict().items()
        )
    one, other = (read_metrics(tmp_path / name / "runs" / "merged" / "warm-up") for name in ("straight", "killed"))
    assert [row["step"] for row in other] == list(range(8))
    assert [row["train/loss"] for row in other] == [row["train/loss"] for row in one]
    assert [row["sft/loss_nats"] for row in other] == [row["sft/loss_nats"] for row in one]
    stores = [Store(tmp_path / name / "runs" / "merged" / "warm-up" / "answers") for name in ("straight", "killed")]
    texts = [{s.sample_id: s.tokens.tobytes() for s in store.scan()} for store in stores]
    assert texts[0] == texts[1]
    assert max(s.attempt for s in stores[1].scan()) > 1
