"""From rows of a black box to tokens of the student: whose answer it is, what trains, what is left out and counted."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from mopdctl.config.blackbox import BlackBox, check_group_size
from mopdctl.distill.blackbox.book import AnswerBook, choose, open_book
from mopdctl.distill.blackbox.texts import Texts, Written, read_answers, written_by
from mopdctl.distill.blackbox.tokens import tokenized
from mopdctl.errors import InputError
from mopdctl.gensft.rows import table
from mopdctl.records import Prompt, Sample
from mopdctl.rollouts.book import AnswerSettings, PromptBook
from mopdctl.train.data import prompt_token_ids
from mopdctl.verifiers import VERIFIERS, Attempt, Verdict
from mopdctl.verifiers.registry import run_check


class Checks:
    """A pool that runs checks in this process."""

    def check(self, asked: list[tuple[str, Attempt]]) -> list[Verdict]:
        return [run_check(VERIFIERS[name], attempt) for name, attempt in asked]


def prompt(name: str, text: str = "How many?", **changes: Any) -> Prompt:
    fields: dict[str, Any] = {"messages": ({"role": "user", "content": text},), "tools": None, "routing": {}}
    return Prompt(prompt_id=name, place=f"prompts:{name}", **fields | changes)


def budget(_: Prompt) -> AnswerSettings:
    return AnswerSettings(16)


def rows(path: Path, *found: dict[str, Any]) -> list[Path]:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found), encoding="utf-8")
    return [path]


def said(texts: Texts) -> list[tuple[str, Any]]:
    return [(answer.prompt_id, answer.turns[-1]["content"]) for answer in texts.written]


def written(text: str, *, prompt_id: str = "p", **changes: Any) -> Written:
    return Written("a", prompt_id, ({"role": "assistant", "content": text},), place="answers:1", **changes)


@pytest.fixture(scope="module")
def student(tiny_tokenizer: Any) -> SimpleNamespace:
    """A byte-level tokenizer whose template has generation tags."""
    return SimpleNamespace(
        tokenizer=tiny_tokenizer, eos_ids=frozenset({tiny_tokenizer.eos_token_id}), max_length=64, pad_id=0
    )


@pytest.fixture(scope="module")
def chatml_student(make_tokenizer: Callable[..., Any], chatml: str) -> SimpleNamespace:
    """A tokenizer of characters; its template has no tags, and writes a line break after each end token."""
    tokenizer = make_tokenizer(chat_template=chatml)
    return SimpleNamespace(tokenizer=tokenizer, eos_ids=frozenset({tokenizer.eos_token_id}), max_length=128)


def tokens(
    chat: SimpleNamespace, answers: Sequence[Written], *prompts: Prompt, within: bool = False, longest: int = 64
) -> tuple[list[Sample], Counter[str]]:
    book = PromptBook(chat, prompts, budget, max_length=chat.max_length)
    return tokenized(
        answers,
        book,
        chat,
        alias="api",
        domains={p.prompt_id: "math" for p in prompts},
        max_length=longest,
        within_budget=within,
    )


# ------------------------------------------------------------------------------------------------------------ reading


def test_an_answer_finds_its_prompt_by_id_or_by_what_was_said(tmp_path: Path) -> None:
    prompts = [prompt("a", "one?"), prompt("b", "two?", messages=({"role": "user", "content": "two?"},)), prompt("7")]
    files = rows(
        tmp_path / "answers.jsonl",
        {"prompt_id": "a", "answer": "by id"},
        {"prompt_id": 7, "answer": "by a number"},
        {"prompt": "two?", "answer": "by the prompt"},
        {"prompt_id": "b", "messages": [{"role": "assistant", "content": "alone"}]},
        {
            "messages": [
                {"role": "system", "content": "Only the teacher was told this."},
                {"role": "user", "content": "two?"},
                {"role": "assistant", "content": "by its messages"},
            ]
        },
    )
    found = read_answers(files, prompts)
    assert said(found) == [
        ("a", "by id"),
        ("7", "by a number"),
        ("b", "by the prompt"),
        ("b", "alone"),
        ("b", "by its messages"),
    ]
    assert len({answer.answer_id for answer in found.written}) == 5


def test_answers_to_prompts_of_another_run_are_counted_and_not_used(tmp_path: Path) -> None:
    files = rows(
        tmp_path / "answers.jsonl",
        {"prompt_id": "a", "answer": "1"},
        {"prompt_id": "elsewhere", "answer": "2"},
        {"prompt": "never asked", "answer": "3"},
        {"prompt_id": "elsewhere", "messages": [{"role": "user", "content": "?"}]},
    )
    found = read_answers(files, [prompt("a")])
    assert said(found) == [("a", "1")]
    assert found.foreign == 3


def test_an_answer_to_equal_prompts_serves_them_all(tmp_path: Path) -> None:
    files = rows(tmp_path / "answers.jsonl", {"prompt": "same?", "answer": "1"})
    found = read_answers(files, [prompt("a", "same?"), prompt("b", "same?")])
    assert said(found) == [("a", "1"), ("b", "1")]


def test_a_prompt_that_holds_earlier_turns_is_answered_by_the_last_alone(tmp_path: Path) -> None:
    earlier = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two?"},
    ]
    row = {"messages": [*earlier, {"role": "assistant", "content": "2"}]}
    prompts = [prompt("long", messages=tuple(earlier)), prompt("short", "one?")]
    found = read_answers(rows(tmp_path / "answers.jsonl", row), prompts)
    # With the short one, a user would speak within the answer.
    assert said(found) == [("long", "2")]
    assert len(found.written[0].turns) == 1


def test_calls_and_results_of_tools_belong_to_the_answer(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "find", "arguments": '{"name": "kalo"}'}}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "Locker 3."},
    ]
    row = {"messages": [{"role": "user", "content": "where?"}, *turns]}
    found = read_answers(rows(tmp_path / "answers.jsonl", row), [prompt("a", "where?")])
    assert [turn["role"] for turn in found.written[0].turns] == ["assistant", "tool", "assistant"]
    assert found.written[0].turns[0]["tool_calls"][0]["function"]["arguments"] == {"name": "kalo"}


def test_a_parquet_file_with_columns_for_all_rows_reads_as_lines_do(tmp_path: Path) -> None:
    written_table = pa.table(
        {
            "messages": [
                [{"role": "user", "content": "one?", "name": None}, {"role": "assistant", "content": "1", "name": None}]
            ],
            "reward": [0.5],
            "finish_reason": ["length"],
        }
    )
    pq.write_table(written_table, tmp_path / "train-00000-of-00001.parquet")
    (found,) = read_answers([tmp_path / "train-00000-of-00001.parquet"], [prompt("a", "one?")]).written
    assert (found.turns, found.reward, found.finish_reason) == (
        ({"role": "assistant", "content": "1"},),
        0.5,
        "length",
    )


def test_a_data_set_of_gen_sft_gives_its_answers(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"name": "kalo"}'}}
    messages = [
        {"role": "system", "content": "Added to the row."},
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    row = {"id": "x", "messages": messages, "seed_id": "s", "reward": 1.0, "finish_reason": "tool_calls"}
    pq.write_table(table([row]), tmp_path / "train-00000-of-00001.parquet")
    (found,) = read_answers([tmp_path / "train-00000-of-00001.parquet"], [prompt("a", "one?")]).written
    assert (found.prompt_id, found.reward, found.finish_reason) == ("a", 1.0, "tool_calls")
    (turn,) = found.turns
    assert turn["tool_calls"][0]["function"] == {"name": "find", "arguments": {"name": "kalo"}}


def test_separators_of_unicode_neither_break_a_line_nor_an_answer(tmp_path: Path) -> None:
    # huggingface/tau #354
    text = "one\u2028two\u2029three\x85four"
    assert said(read_answers(rows(tmp_path / "answers.jsonl", {"prompt_id": "a", "answer": text}), [prompt("a")])) == [
        ("a", text)
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt_id": "a"}, "has neither 'messages' nor 'prompt'"),
        ({"prompt_id": "a", "answer": None}, "'answer' is a NoneType, not text"),
        ({"prompt_id": 1.5, "answer": "1"}, "'prompt_id' is a float; give the id of a prompt"),
        ({"answer": "1"}, "names no prompt; give 'prompt_id', or the prompt's 'messages' or 'prompt'"),
        ({"prompt": "one?"}, "holds no answer; give it as 'answer' or as the last of 'messages'"),
        (
            {"prompt_id": "a", "prompt": "two?", "answer": "2"},
            "its messages are not those of prompt 'a' (prompts:a) and an answer",
        ),
        ({"prompt_id": "a", "answer": "1", "reward": "good"}, "'reward' is 'good'; give a finite number or leave it"),
        ({"prompt_id": "a", "answer": "1", "reward": True}, "'reward' is True; give a finite number or leave it out"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    files = rows(tmp_path / "answers.jsonl", {"prompt_id": "a", "answer": "1"}, row)
    with pytest.raises(InputError) as error:
        read_answers(files, [prompt("a", "one?")])
    assert str(error.value).startswith(f"{files[0]}:2: {message}")


# ------------------------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("text", ["12", "one\u2028two\u2029three\x85four", "e\u0301 \U0001f600 \u4e2d\u6587", " 3 \n"])
def test_exactly_the_answer_and_its_end_token_train(student: SimpleNamespace, text: str) -> None:
    # TRL #5885, rLLM: characters of several tokens; huggingface/tau #354: separators
    asked = prompt("p")
    ((found,), dropped) = tokens(student, [written(text)], asked)
    expected = student.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert found.prompt_ids.tolist() == prompt_token_ids(student, asked.messages, None, {})
    assert found.response_ids.tolist() == [*expected, student.tokenizer.eos_token_id]
    assert found.response_mask.all()
    assert not found.loss_mask[: found.prompt_length].any()
    assert student.tokenizer.decode(found.response_ids[:-1]) == text
    assert (found.prompt_id, found.teacher_id, found.domain, found.finish_reason) == ("p", "api", "math", "stop")
    assert np.isnan(found.behavior_logprobs).all()
    assert not dropped


def test_what_the_template_writes_after_the_end_token_is_no_part_of_the_answer(chatml_student: SimpleNamespace) -> None:
    # A discriminator would tell the teacher by it: no sampled answer goes on after its end token.
    ((found,), _) = tokens(chatml_student, [written("12")], prompt("p"))
    assert chatml_student.tokenizer.decode(found.response_ids) == "12<|im_end|>"
    assert found.response_mask.tolist() == [True] * 3


def test_an_answer_in_another_tokenizer_trains_the_students_tokens_of_its_text(
    student: SimpleNamespace, chatml_student: SimpleNamespace
) -> None:
    other = chatml_student.tokenizer
    ids = [*other("the 12th", add_special_tokens=False)["input_ids"], other.eos_token_id]
    sampled = Sample(
        sample_id="s",
        prompt_id="p",
        group_id="p",
        generation_index=0,
        domain="math",
        teacher_id="api",
        policy_version_min=0,
        policy_version_max=0,
        tokens=np.array([5, 6, *ids], np.int32),
        prompt_length=2,
        loss_mask=np.array([False, False, *[True] * len(ids)]),
        behavior_logprobs=np.zeros(len(ids), np.float32),
        finish_reason="stop",
    )
    (text,) = written_by([sampled], chatml_student)
    assert text.turns == ({"role": "assistant", "content": "the 12th"},)
    ((found,), _) = tokens(student, [text], prompt("p"))
    own = student.tokenizer
    assert found.response_ids.tolist() == [*own("the 12th", add_special_tokens=False)["input_ids"], own.eos_token_id]
    with_tools = replace(sampled, loss_mask=np.array([False, False, *[True] * (len(ids) - 1), False]))
    with pytest.raises(InputError, match="answer s: a conversation with tools in the tokens of another model"):
        written_by([with_tools], chatml_student)


def test_results_of_tools_stand_in_the_context_and_train_nothing(chatml_student: SimpleNamespace) -> None:
    # TRL #4976
    call = {"type": "function", "function": {"name": "find", "arguments": {}}}
    turns = (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "Locker 3."},
    )
    ((found,), _) = tokens(chatml_student, [Written("a", "p", turns, place="answers:1")], prompt("p"), longest=128)
    decode = chatml_student.tokenizer.decode
    assert decode(found.response_ids[found.response_mask]) == "<call>find {}<|im_end|>Locker 3.<|im_end|>"
    assert "<|im_start|>tool\n3<|im_end|>" in decode(found.response_ids)


def test_earlier_answers_within_a_prompt_do_not_train(chatml_student: SimpleNamespace) -> None:
    earlier = (
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two?"},
    )
    ((found,), _) = tokens(chatml_student, [written("2")], prompt("p", messages=earlier), longest=128)
    assert chatml_student.tokenizer.decode(found.tokens[found.loss_mask]) == "2<|im_end|>"


def test_an_answer_that_runs_into_the_end_of_the_prompt_is_left_out(chatml_student: SimpleNamespace) -> None:
    # The prompt's ids would not be those that the student samples from.
    tokenizer = chatml_student.tokenizer
    bound = SimpleNamespace(**vars(chatml_student))
    bound.tokenizer = _Template(
        tokenizer, "{{ messages[0].content }}t{% if messages[1:] %}{{ messages[1].content }}<|im_end|>{% endif %}"
    )
    found, dropped = tokens(bound, [written("he"), written("xx")], prompt("p"))
    assert [tokenizer.decode(s.response_ids) for s in found] == ["xx<|im_end|>"]
    assert dropped == {"misaligned": 1}


class _Template:
    """A tokenizer with another chat template."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        self._tokenizer, self.chat_template = tokenizer, template

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._tokenizer(*arguments, **options)

    def get_chat_template(self, tools: Any = None) -> str:
        return self.chat_template

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        return self._tokenizer.apply_chat_template(messages, **options | {"chat_template": self.chat_template})


def test_empty_and_overlong_answers_are_counted(student: SimpleNamespace) -> None:
    long = written("1 2 3 4 5 6 7 8 9 1 2 3 4 5 6 7 8 9")
    found, dropped = tokens(student, [written(""), long, written("1")], prompt("p"), within=True)
    assert len(found) == 1
    assert dropped == {"empty": 1, "overlong": 1}
    # Beyond the budget an answer may still be learnt from; beyond the context it may not.
    assert len(tokens(student, [long], prompt("p"))[0]) == 1
    assert tokens(student, [long], prompt("p"), longest=20)[1] == {"overlong": 1}


def test_text_that_would_become_an_end_token_is_refused(student: SimpleNamespace) -> None:
    with pytest.raises(InputError, match=r"answers:1: message 1 holds the control token '<\|end\|>' as text"):
        tokens(student, [written("1<|end|>2")], prompt("p"))


# ------------------------------------------------------------------------------------------------------------- choice


def answer(name: str, prompt_id: str = "p", **changes: Any) -> Sample:
    fields: dict[str, Any] = {"reward": None, "verdict": None, "finish_reason": "stop"}
    return Sample(
        sample_id=name,
        prompt_id=prompt_id,
        group_id=prompt_id,
        generation_index=0,
        domain="math",
        teacher_id="api",
        policy_version_min=0,
        policy_version_max=0,
        tokens=np.array([1, 2, 3], np.int32),
        prompt_length=1,
        loss_mask=np.array([False, True, True]),
        behavior_logprobs=np.zeros(2, np.float32),
        **fields | changes,
    )


def right(name: str, reward: float, prompt_id: str = "p") -> Sample:
    return answer(name, prompt_id, verdict="ok", reward=reward)


API = BlackBox(gives="answers", answers=Path("answers.jsonl"))


def test_the_best_answers_of_a_prompt_take_turns() -> None:
    book = choose("api", API, [prompt("p")], [right("a", 0.5), right("b", 1.0), right("c", 1.0), answer("d")])
    assert [book.answer("p", turn).sample_id for turn in range(5)] == ["b", "c", "b", "c", "b"]
    assert book.report() == {
        "prompts": 1,
        "prompts_without_answer": 0,
        "in": 4,
        "out": 2,
        "dropped": {"not_best": 2},
    }


def test_answers_that_nobody_checks_all_take_turns() -> None:
    book = choose("api", API, [prompt("p")], [answer("a"), answer("b"), answer("c")])
    assert [book.answer("p", turn).sample_id for turn in range(4)] == ["a", "b", "c", "a"]


def test_answers_without_an_end_of_their_own_never_train() -> None:
    # KDFlow: an end token that the teacher did not write
    answers = [answer(r, finish_reason=r) for r in ("stop", "tool_calls", "length", "content_filter", "max_turns")]
    book = choose("api", API, [prompt("p")], answers)
    assert [s.sample_id for s in book.by_prompt["p"]] == ["stop", "tool_calls"]
    assert book.dropped == {"unfinished": 3}


def test_wrong_answers_are_left_out_unless_they_are_wanted() -> None:
    answers = [right("wrong", 0.0, "a"), answer("unread", "a", verdict="parse_error"), right("fair", 0.5, "a")]
    book = choose("api", API, [prompt("a")], answers)
    assert [s.sample_id for s in book.by_prompt["a"]] == ["fair"]
    assert book.dropped == {"wrong": 2}
    keep = API.model_copy(update={"wrong_answers": "keep"})
    assert choose("api", keep, [prompt("a")], answers[:1]).answer("a", 0).sample_id == "wrong"
    # A check that broke says nothing of the answer, nor does a reward of 0 on a scale that is not a verifier's.
    unknown = [answer("broken", "b", verdict="timeout"), answer("other scale", "a", reward=0.0)]
    assert not choose("api", API, [prompt("a"), prompt("b")], unknown).dropped


def test_a_prompt_without_an_answer_is_refused_or_left_out_by_name() -> None:
    prompts, answers = [prompt("a"), prompt("b"), prompt("c")], [answer("1", "a"), right("2", 0.0, "b")]
    with pytest.raises(InputError) as error:
        choose("api", API, prompts, answers, dropped={"foreign": 2})
    assert str(error.value) == (
        "prompts:b: teacher 'api' has no usable answer to prompt 'b', nor to 1 others of 3 "
        "(answers left out: 2 foreign, 1 wrong); answer them, or set `without_answer: drop`"
    )
    drop = API.model_copy(update={"without_answer": "drop"})
    book = choose("api", drop, prompts, answers, dropped={"foreign": 2})
    assert book.without == ("b", "c")
    assert book.report() == {
        "prompts": 1,
        "prompts_without_answer": 2,
        "in": 4,
        "out": 1,
        "dropped": {"foreign": 2, "wrong": 1},
    }
    with pytest.raises(InputError, match="prompts:b: teacher 'api' has no usable answer to prompt 'b'"):
        choose("api", drop, prompts[1:], answers[1:])


def test_a_file_becomes_a_book_with_verdicts(tmp_path: Path, student: SimpleNamespace) -> None:
    asked = prompt("a", "7 + 5?", verifier="integer", reference={"answer": 12})
    files = rows(
        tmp_path / "answers.jsonl",
        {"prompt_id": "a", "answer": "13", "reward": 1.0},
        {"prompt_id": "a", "answer": "12"},
        {"prompt_id": "a", "answer": "12", "finish_reason": "length"},
        {"prompt_id": "other", "answer": "12"},
    )
    book: AnswerBook = open_book(
        "api",
        API,
        [asked],
        student,
        budget,
        files=files,
        domains={"a": "math"},
        max_length=64,
        pool=Checks(),
    )
    (kept,) = book.by_prompt["a"]
    assert student.tokenizer.decode(kept.response_ids) == "12<|end|>"
    assert (kept.reward, kept.verdict) == (1.0, "ok")
    assert book.dropped == {"foreign": 1, "unfinished": 1, "wrong": 1}


def test_a_reference_that_no_answer_could_be_held_against_is_refused(tmp_path: Path, student: SimpleNamespace) -> None:
    asked = prompt("a", verifier="integer", reference=12)
    files = rows(tmp_path / "answers.jsonl", {"prompt_id": "a", "answer": "12"})
    with pytest.raises(InputError, match="prompts:a: reference has no 'answer'"):
        open_book(
            "api", API, [asked], student, budget, files=files, domains={"a": "math"}, max_length=64, pool=Checks()
        )


# -------------------------------------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "`model` is missing"),
        ({"model": "m", "answers": "a.jsonl"}, "set `gives: answers` or `gives: discriminator`"),
        ({"model": "m", "without_answer": "drop"}, "set `gives: answers` or `gives: discriminator`"),
        ({"gives": "answers"}, "`gives: answers` needs either `answers`, a file, or `model`"),
        ({"gives": "answers", "answers": "a.jsonl", "model": "m"}, "needs either `answers`, a file, or `model`"),
        ({"gives": "answers", "model": "m", "discriminator": {}}, "`discriminator` needs `gives: discriminator`"),
    ],
)
def test_a_setting_that_says_nothing_is_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        BlackBox.model_validate(document)


def test_what_is_dumped_is_read_again() -> None:
    for document in ({"model": "m"}, {"gives": "discriminator", "model": "m", "discriminator": {"warm_up_steps": 3}}):
        config = BlackBox.model_validate(document)
        assert BlackBox.model_validate(config.model_dump()) == config


def test_a_discriminator_needs_groups() -> None:
    check_group_size("discriminator", 2)
    check_group_size("answers", 1)
    with pytest.raises(ValueError, match=r"set train\.samples_per_prompt to 2 or more"):
        check_group_size("discriminator", 1)
