"""Prompts as tokens, budgets, and the answers of one step."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mopdctl.config.teachers import TeachersFile
from mopdctl.distill.jobs import answer_settings, step_jobs
from mopdctl.distill.prompts import teacher_of
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError
from mopdctl.records import Prompt, Sample
from mopdctl.rollouts.book import PromptBook
from mopdctl.rollouts.prompts import read_prompts
from mopdctl.rollouts.step import StepRollouts

Document = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def student(tiny: Path) -> HFModel:
    return HFModel.load(str(tiny / "models" / "student"))


def book_of(student: HFModel, config: TeachersFile, prompts: list[Prompt] | None = None) -> PromptBook:
    return PromptBook(student, prompts or read_prompts(config.prompts, config.routing_keys), answer_settings(config))


def aliases(book: PromptBook, config: TeachersFile) -> list[str]:
    return [teacher_of(prompt.routing, config) for prompt in book.prompts]


def roll_out(
    student: HFModel, book: PromptBook, rows: list[int], *, step: int, policy_version: int, config: TeachersFile
) -> list[Sample]:
    with tempfile.TemporaryDirectory() as folder:
        rollouts = StepRollouts(
            Path(folder) / "store",
            identity={"tokenizer": "t"},
            sampling={"model": "s"},
            temperature=config.train.temperature,
            durability=config.train.durability,
        )
        jobs = step_jobs(book, rows, aliases(book, config), step=step, config=config)
        found = rollouts.sample(student, jobs, policy_version=policy_version)
        rollouts.finish()
    return found


# ----------------------------------------------------------------------------------------------------- prompts, budgets

EFFORTS = {
    "routing": ["domain", "effort"],
    "efforts": {
        "high": {"chat_template_kwargs": {"think": True}},
        "low": {"chat_template_kwargs": {"think": False, "mark": "7"}, "max_new_tokens": 3},
    },
}


@pytest.fixture(scope="module")
def thinker(write_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> HFModel:
    """A student whose chat template opens the answer with a tag when it should think, and with `mark` where given."""
    model = HFModel.load(str(write_tiny_model(tmp_path_factory.mktemp("thinker"))))
    model.tokenizer.chat_template += "{% if think %}<tool_call>{% endif %}{{ mark }}"
    return model


def test_an_effort_brings_its_template_arguments_and_its_budget(thinker: HFModel, teachers_document: Document) -> None:
    config = TeachersFile.model_validate(teachers_document(top=EFFORTS, max_new_tokens=9, seed=1))
    prompts = [
        Prompt(effort, ({"role": "user", "content": "1+1"},), None, {"domain": "arithmetic", "effort": effort})
        for effort in ("high", "low")
    ]
    book = book_of(thinker, config, prompts)
    plain = thinker.tokenizer("<|user|>1+1<|end|><|assistant|>")["input_ids"]
    tag, seven = (thinker.tokenizer.convert_tokens_to_ids(token) for token in ("<tool_call>", "7"))
    assert [list(book.token_ids(row)) for row in (0, 1)] == [[*plain, tag], [*plain, seven]]
    assert [book.budget(prompt) for prompt in prompts] == [9, 3]
    high, low = roll_out(thinker, book, [0, 1], step=0, policy_version=0, config=config)
    assert [len(high.response_ids), len(low.response_ids)] == [9, 3]
    assert [high.finish_reason, low.finish_reason] == ["length", "length"]
    assert tuple(low.prompt_ids) == book.token_ids(1)


def test_prompt_and_budget_fill_the_context_and_no_token_more(student: HFModel, teachers_document: Document) -> None:
    content = "4-2 " * 20
    length = len(student.tokenizer(f"<|user|>{content}<|end|><|assistant|>")["input_ids"])
    prompts = [Prompt("0", ({"role": "user", "content": content},), None, {"domain": "arithmetic"}, place="p.jsonl:7")]

    def ids(budget: int) -> tuple[int, ...]:
        config = TeachersFile.model_validate(teachers_document(max_new_tokens=budget))
        return book_of(student, config, prompts).token_ids(0)

    assert len(ids(128 - length)) == length
    with pytest.raises(InputError) as caught:
        ids(128 - length + 1)
    assert str(caught.value).startswith(
        f"p.jsonl:7: prompt of {length} tokens and an answer of up to {129 - length} do not fit into the model's "
        "context of 128"
    )


# ------------------------------------------------------------------------------------------------------------- answers


def test_a_sample_hangs_on_seed_step_prompt_and_number_alone(student: HFModel, teachers_document: Document) -> None:
    def answers(rows: list[int], *, step: int = 3, seed: int = 0, count: int = 2) -> dict[str, tuple[int, ...]]:
        config = TeachersFile.model_validate(teachers_document(seed=seed, samples_per_prompt=count))
        found = roll_out(student, book_of(student, config), rows, step=step, policy_version=step, config=config)
        return {r.sample_id.removesuffix(f"@{seed}"): tuple(r.response_ids) for r in found}

    six = answers([0, 9, 17, 3, 20, 11])
    assert len(six) == len(set(six.values())) == 12
    assert answers([20, 3]) == {k: v for k, v in six.items() if k.rsplit("/", 2)[0] in ("tools/4", "arithmetic/3")}
    assert answers([9], count=1) == {"structured/1/3/0": six["structured/1/3/0"]}
    assert set(answers([0], step=4).values()).isdisjoint(six.values())
    assert set(answers([0], seed=1).values()).isdisjoint(six.values())


def test_a_prompt_that_comes_twice_in_a_step_gets_two_answers(student: HFModel, teachers_document: Document) -> None:
    # A batch that reaches into the next epoch holds some prompts twice.
    config = TeachersFile.model_validate(teachers_document())
    found = roll_out(student, book_of(student, config), [5, 2, 5], step=0, policy_version=0, config=config)
    assert [r.prompt_id for r in found] == ["arithmetic/5", "arithmetic/2", "arithmetic/5"]
    assert len({r.sample_id for r in found}) == 3
    assert found[0].response_ids.tolist() != found[2].response_ids.tolist()


def test_a_rollout_says_whose_it_is(student: HFModel, teachers_document: Document) -> None:
    config = TeachersFile.model_validate(teachers_document())
    found = roll_out(student, book_of(student, config), [0, 8, 16], step=5, policy_version=4, config=config)
    assert [(r.sample_id, r.group_id, r.domain, r.teacher_id, r.policy_version_min) for r in found] == [
        ("arithmetic/0/5/0@0", "arithmetic/0/5", "arithmetic", "arithmetic", 4),
        ("structured/0/5/0@0", "structured/0/5", "structured", "structured", 4),
        ("tools/0/5/0@0", "tools/0/5", "tools", "tools", 4),
    ]
    assert all(len(r.behavior_logprobs) == len(r.response_ids) for r in found)
