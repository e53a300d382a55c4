"""The teachers' answers: asked of the one teacher of their domain, once, and chosen by named rules."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopdctl.config.teachers import TeachersFile
from mopdctl.config.warmup import TeacherAnswers, WarmUp
from mopdctl.distill.answers import ask_teachers, check_answers, choose, one_at_a_time, rows_to_ask
from mopdctl.distill.jobs import answer_settings
from mopdctl.distill.prompts import teacher_of
from mopdctl.engines.base import SampleRequest, Step
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError, MopdctlError
from mopdctl.files import read_jsonl, write_jsonl
from mopdctl.records import Prompt, Sample
from mopdctl.rollouts.book import PromptBook
from mopdctl.rollouts.prompts import read_prompts
from mopdctl.runs import Workspace
from mopdctl.store.store import Store

Document = Callable[..., dict[str, Any]]


def sample(name: str, **changes: Any) -> Sample:
    """An answer `prompt/number` of teacher `math`, of three tokens."""
    prompt_id, _, number = name.rpartition("/")
    fields: dict[str, Any] = {
        "sample_id": name,
        "prompt_id": prompt_id,
        "group_id": prompt_id,
        "generation_index": int(number),
        "domain": "math",
        "teacher_id": "math",
        "policy_version_min": 0,
        "policy_version_max": 0,
        "tokens": np.array([9, 9, 5, 6, 0], np.int32),
        "prompt_length": 2,
        "loss_mask": np.array([False, False, True, True, True]),
        "behavior_logprobs": np.array([-1.0, -1.0, -1.0], np.float32),
        "finish_reason": "stop",
    }
    return Sample(**fields | changes)


def right(name: str, reward: float = 1.0, **changes: Any) -> Sample:
    return sample(name, verdict="ok", reward=reward, **changes)


def kept(given: list[Sample], /, **changes: Any) -> list[str]:
    return [s.sample_id for found in choose(given, TeacherAnswers(**changes)).samples.values() for s in found]


# -------------------------------------------------------------------------------------------------------------- choice


@pytest.mark.parametrize("reason", ["length", "max_turns", "tool_lost"])
@pytest.mark.parametrize("wrong", ["drop", "keep"])
def test_an_answer_without_an_end_of_its_own_never_trains_however_right_it_is(reason: str, wrong: str) -> None:
    # KDFlow notes, phantom EOS: a cut answer that trains as a whole one teaches to stop anywhere.
    chosen = choose([right("a/0", finish_reason=reason), right("b/0")], TeacherAnswers(wrong=wrong))  # type: ignore[arg-type]
    assert [s.sample_id for s in chosen.samples["math"]] == ["b/0"]
    assert chosen.counts["math"] == {"prompts": 2, "in": 2, "out": 1, "dropped": {reason: 1}}


def test_a_wrong_answer_is_dropped_and_counted_and_one_that_nobody_checked_stays() -> None:
    states = ("parse_error", "timeout", "infra_error", "invalid_reference")
    unread = [sample(f"{state}/0", verdict=state) for state in states]
    given = [right("a/0"), right("b/0", 0.0), right("c/0", 0.99), sample("d/0"), *unread]
    chosen = choose(given, TeacherAnswers())
    assert [s.sample_id for s in chosen.samples["math"]] == ["a/0", "d/0"]
    assert chosen.counts["math"]["dropped"] == {"wrong": 2} | dict.fromkeys(states, 1)
    assert kept(given, wrong="keep") == sorted(s.sample_id for s in given)


def test_the_best_has_the_highest_reward_then_the_likeliest_tokens_then_came_first() -> None:
    def likely(*logprobs: float) -> dict[str, Any]:
        length = len(logprobs)
        return {
            "tokens": np.array([9, *[5] * length], np.int32),
            "prompt_length": 1,
            "loss_mask": np.array([False, *[True] * length]),
            "behavior_logprobs": np.array(logprobs, np.float32),
        }

    given = [
        right("a/0", 0.5, **likely(0.0)),
        right("a/1", 1.0, **likely(-2.0)),
        right("a/2", 1.0, **likely(-1.0, -1.5, -0.5)),  # likelier per token, less likely as a whole
        right("a/3", 1.0, **likely(-1.0)),
        sample("a/4", verdict="timeout", **likely(0.0)),
    ]
    for count, expected in ((1, [2]), (2, [2, 3]), (3, [1, 2, 3]), (4, [0, 1, 2, 3]), (5, [0, 1, 2, 3, 4])):
        assert kept(given, samples=5, keep=count, wrong="keep") == [f"a/{n}" for n in expected]
    assert choose(given, TeacherAnswers(samples=5)).counts["math"]["dropped"] == {
        "not_best": 2,
        "timeout": 1,
        "wrong": 1,
    }


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_counts_add_up_and_the_order_of_the_answers_means_nothing(data: st.DataObject) -> None:
    given = []
    for number in range(data.draw(st.integers(1, 12))):
        verdict = data.draw(st.sampled_from([None, "ok", "timeout"]))
        given.append(
            sample(
                f"p{number // 4}/{number % 4}",
                teacher_id=f"t{number // 4 % 2}",
                finish_reason=data.draw(st.sampled_from(["stop", "length"])),
                verdict=verdict,
                reward=data.draw(st.sampled_from([0.0, 0.5, 1.0])) if verdict == "ok" else None,
            )
        )
    keep = data.draw(st.integers(1, 4))
    rules = TeacherAnswers(samples=4, keep=keep)
    try:
        chosen = choose(given, rules)
    except MopdctlError:
        return
    again = choose(data.draw(st.permutations(given)), rules)
    assert again.counts == chosen.counts
    assert {a: [s.sample_id for s in f] for a, f in again.samples.items()} == {
        a: [s.sample_id for s in f] for a, f in chosen.samples.items()
    }
    for alias, counts in chosen.counts.items():
        found = chosen.samples[alias]
        assert counts["in"] - sum(counts["dropped"].values()) == counts["out"] == len(found)
        assert all(sum(s.prompt_id == one.prompt_id for s in found) <= keep for one in found)


def test_a_teacher_without_a_usable_answer_is_named_with_the_reasons() -> None:
    with pytest.raises(MopdctlError) as caught:
        choose(
            [right("a/0", 0.0), sample("a/1", finish_reason="length"), right("b/0", teacher_id="code")],
            TeacherAnswers(),
        )
    assert str(caught.value).startswith(
        "teacher 'math': none of its 2 answers can be trained on (length 1, wrong 1); raise samples or max_new_tokens"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep": 2}, "keep is above samples"),
        ({"temperature": 0, "samples": 2}, "the same answer each time"),
        ({"shares": {"math": 0}}, "share of 'math' must be above 0"),
        ({"temperature": -1}, "temperature"),
        ({"keeps": 1}, "keeps"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WarmUp.model_validate({"steps": 1} | changes)


# -------------------------------------------------------------------------------------------------------------- asking


@pytest.fixture(scope="module")
def student(tiny: Path) -> HFModel:
    return HFModel.load(str(tiny / "models" / "student"), train=True)


def config_of(document: dict[str, Any]) -> TeachersFile:
    return TeachersFile.model_validate(document)


def aliases(prompts: Sequence[Prompt], config: TeachersFile) -> list[str]:
    return [teacher_of(prompt.routing, config) for prompt in prompts]


def test_as_many_prompts_are_asked_as_the_shares_have_use_for(teachers_document: Document) -> None:
    config = config_of(teachers_document())
    prompts = read_prompts(config.prompts, config.routing_keys)

    def asked(draws: int, **changes: Any) -> dict[str, int]:
        found = rows_to_ask(config, aliases(prompts, config), TeacherAnswers(**changes), draws)
        for alias, rows in found.items():
            assert {prompts[row].routing["domain"] for row in rows} == {alias}
            assert len(set(rows)) == len(rows)
        return {alias: len(rows) for alias, rows in found.items()}

    assert asked(12) == {"arithmetic": 4, "structured": 4, "tools": 4}
    assert asked(13) == {"arithmetic": 5, "structured": 5, "tools": 5}
    assert asked(10_000) == {"arithmetic": 8, "structured": 8, "tools": 8}
    assert asked(12, shares={"tools": 2.0}) == {"arithmetic": 3, "structured": 3, "tools": 6}
    assert asked(12, samples=4, keep=2) == {"arithmetic": 2, "structured": 2, "tools": 2}


def test_which_prompts_are_asked_hangs_on_the_seed_alone(teachers_document: Document) -> None:
    def asked(seed: int) -> list[int]:
        config = config_of(teachers_document(seed=seed))
        prompts = read_prompts(config.prompts, config.routing_keys)
        return rows_to_ask(config, aliases(prompts, config), TeacherAnswers(), 12)["tools"]

    assert asked(0) == asked(0)
    assert len({tuple(asked(seed)) for seed in range(8)}) > 4


def test_unknown_shares_and_verifiers_are_refused_before_anybody_is_asked(teachers_document: Document) -> None:
    config = config_of(teachers_document())
    with pytest.raises(InputError, match=r"shares: 'maths' is no teacher \(has: arithmetic, structured, tools\)"):
        check_answers(config, [], TeacherAnswers(shares={"maths": 1}))
    bad = Prompt(
        "0", ({"role": "user", "content": "?"},), None, {"domain": "tools"}, verifier="integr", place="p.jsonl:1"
    )
    with pytest.raises(InputError, match=r"p.jsonl:1: verifier 'integr' is none of .*; did you mean 'integer'\?"):
        check_answers(config, [bad], TeacherAnswers())


class Asking:
    """Asks in a folder, with teachers that count what they write, and can be made to break off."""

    def __init__(self, folder: Path, student: HFModel, config: TeachersFile, **changes: Any) -> None:
        self.store, self.student, self.config = folder / "answers", student, config
        self.settings = TeacherAnswers(**changes)
        prompts = read_prompts(config.prompts, config.routing_keys)
        self.book = PromptBook(student, prompts, answer_settings(config))
        self.rows = rows_to_ask(config, aliases(prompts, config), self.settings, 10_000)
        self.load = one_at_a_time(config, student, Workspace(folder), base=folder)
        self.loaded: list[str] = []
        self.written = 0
        self.left = math.inf

    @contextmanager
    def teacher(self, alias: str) -> Iterator[Any]:
        self.loaded.append(alias)
        with self.load(alias) as model:

            def stream(requests: Sequence[SampleRequest], *, temperature: float) -> Iterator[Step]:
                for step in model.stream(requests, temperature=temperature):
                    self.written += len(step.token_ids)
                    yield step
                    self.left -= 1
                    if self.left == 0:
                        raise KeyboardInterrupt

            yield SimpleNamespace(stream=stream, max_length=model.max_length)

    def run(self) -> list[Sample]:
        return ask_teachers(
            self.config, self.settings, self.rows, self.book, self.student, self.teacher, self.store, record={"n": 1}
        )


@pytest.fixture(scope="module")
def asked(
    tiny: Path, student: HFModel, teachers_document: Document, tmp_path_factory: pytest.TempPathFactory
) -> Asking:
    found = Asking(
        tmp_path_factory.mktemp("asked"),
        student,
        config_of(teachers_document(max_new_tokens=24, sampling_batch_size=7)),
        samples=2,
    )
    found.samples = found.run()  # type: ignore[attr-defined]
    return found


def test_every_answer_is_that_of_the_one_teacher_of_its_domain(asked: Asking, tiny: Path) -> None:
    samples: list[Sample] = asked.samples  # type: ignore[attr-defined]
    assert len(samples) == 48
    assert {(s.domain, s.teacher_id) for s in samples} == {(d, d) for d in ("arithmetic", "structured", "tools")}
    for alias in ("arithmetic", "tools"):
        own = [s for s in samples if s.teacher_id == alias]
        pairs = [(s.prompt_ids.tolist(), s.response_ids.tolist()) for s in own]
        scored = HFModel.load(str(tiny / "models" / alias)).score(pairs)
        other = asked.student.score(pairs)
        for one, row, students in zip(own, scored, other, strict=True):
            assert one.behavior_logprobs.tolist() == pytest.approx(row, abs=1e-3)
            assert one.behavior_logprobs.tolist() != pytest.approx(students, abs=1e-3)


def test_an_end_token_is_there_where_one_was_sampled_and_nowhere_else(asked: Asking) -> None:
    samples: list[Sample] = asked.samples  # type: ignore[attr-defined]
    reasons = {s.finish_reason for s in samples}
    assert reasons == {"stop", "length"}
    for one in samples:
        ends = [token in asked.student.eos_ids for token in one.response_ids.tolist()]
        assert not any(ends[:-1])
        assert ends[-1] == (one.finish_reason == "stop")
        assert one.loss_mask.sum() == len(one.response_ids) == len(one.behavior_logprobs)


def test_answers_are_checked_where_they_came_to_their_end(asked: Asking) -> None:
    samples: list[Sample] = asked.samples  # type: ignore[attr-defined]
    assert {s.verdict is not None for s in samples if s.finish_reason == "stop"} == {True}
    assert {s.verdict for s in samples if s.finish_reason == "length"} == {None}


def test_teachers_are_loaded_one_after_the_other_and_not_for_what_is_there(asked: Asking) -> None:
    assert list(dict.fromkeys(asked.loaded)) == ["arithmetic", "structured", "tools"]
    assert asked.loaded == sorted(asked.loaded)
    before, asked.loaded = asked.loaded, []
    again = asked.run()
    assert asked.loaded == []
    assert [s.sample_id for s in again] == [s.sample_id for s in asked.samples]  # type: ignore[attr-defined]
    asked.loaded = before


def test_a_teacher_is_dropped_before_the_next_and_a_checkpoint_is_loaded_once(
    student: HFModel, teachers_document: Document, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import weakref

    document = teachers_document()
    shared = document["teachers"]["arithmetic"]["model"]
    document["teachers"]["structured"]["model"] = shared
    real, alive, loads = HFModel.load, [], []

    def counted(path: str, **options: Any) -> HFModel:
        loads.append(Path(path).name)
        assert all(reference() is None for reference in alive)
        model = real(path, **options)
        alive.append(weakref.ref(model))
        return model

    monkeypatch.setattr(HFModel, "load", counted)
    load = one_at_a_time(config_of(document), student, Workspace(tmp_path), base=tmp_path)
    for alias in ("arithmetic", "structured", "structured", "tools"):
        with load(alias):
            pass
    assert loads == ["arithmetic", "tools"]


def test_interrupted_answers_end_as_if_nothing_had_happened_and_no_token_is_sampled_twice(
    asked: Asking, student: HFModel, tmp_path: Path
) -> None:
    broken = Asking(tmp_path, student, asked.config, samples=2)
    for steps in (3, 30, 31, 55):
        broken.left = steps
        with pytest.raises(KeyboardInterrupt):
            broken.run()
    broken.left = math.inf
    found = broken.run()
    expected: list[Sample] = asked.samples  # type: ignore[attr-defined]
    assert broken.written == sum(len(s.response_ids) for s in expected)
    for one, other in zip(found, expected, strict=True):
        assert one.sample_id == other.sample_id
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.behavior_logprobs.tobytes() == other.behavior_logprobs.tobytes()
        assert (one.finish_reason, one.verdict, one.reward) == (other.finish_reason, other.verdict, other.reward)
    assert max(s.attempt for s in found) > 1
    assert list((broken.store / "wal").iterdir()) == []


def test_the_answers_of_another_run_are_refused(asked: Asking) -> None:
    with pytest.raises(InputError, match=r"begun with another configuration \(run.n was \d+, now \d+\)"):
        ask_teachers(
            asked.config,
            asked.settings,
            asked.rows,
            asked.book,
            asked.student,
            asked.load,
            asked.store,
            record={"n": 2},
        )
    assert len(list(Store(asked.store).scan())) == 48


def test_a_prompt_that_a_teacher_cannot_take_is_refused(
    tiny: Path, student: HFModel, teachers_document: Document, tmp_path: Path, write_tiny_model: Callable[..., Path]
) -> None:
    document = teachers_document(max_new_tokens=40)
    short = write_tiny_model(tmp_path / "short", max_position_embeddings=64)
    document["teachers"]["tools"]["model"] = str(short)
    with pytest.raises(InputError, match=r"teacher 'tools': prompt of \d+ tokens .* its context of 64; shorten"):
        Asking(tmp_path, student, config_of(document)).run()


def test_a_teacher_that_does_not_speak_the_students_tokens_is_refused(
    student: HFModel, teachers_document: Document, tmp_path: Path, write_tiny_model: Callable[..., Path]
) -> None:
    import copy

    tokenizer = copy.deepcopy(student.tokenizer)
    tokenizer.add_tokens(["<another>"])
    document = teachers_document()
    document["teachers"]["tools"]["model"] = str(write_tiny_model(tmp_path / "other", tokenizer=tokenizer))
    load = one_at_a_time(config_of(document), student, Workspace(tmp_path), base=tmp_path)
    with pytest.raises(InputError, match=r"teacher 'tools' .*: differs from student"), load("tools"):
        pass


def test_budgets_and_template_arguments_of_an_effort_hold_for_its_teacher_too(
    tiny: Path, student: HFModel, teachers_document: Document, tmp_path: Path
) -> None:
    rows = [row | {"effort": "low"} for _, row in read_jsonl(tiny / "prompts.jsonl")]
    write_jsonl(tmp_path / "prompts.jsonl", rows)
    top = {"routing": ["domain", "effort"], "efforts": {"low": {"max_new_tokens": 2}}}
    document = teachers_document(top=top) | {"prompts": str(tmp_path / "prompts.jsonl")}
    found = Asking(tmp_path, student, config_of(document)).run()
    assert max(len(s.response_ids) for s in found) == 2


def test_the_choice_does_not_depend_on_which_other_teachers_there_are() -> None:
    samples = [right("a/0"), right("a/1", 0.0), right("b/0", teacher_id="code")]
    both, alone = choose(samples, TeacherAnswers(samples=2)), choose(samples[:2], TeacherAnswers(samples=2))
    assert both.counts["math"] == alone.counts["math"]
    assert choose([replace(s, domain="x") for s in samples], TeacherAnswers(samples=2)).counts == both.counts
