"""What the stages of a run train on: configuration, order, packs and the numbers that are reported."""

import json
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mopdctl.config.base import parse
from mopdctl.config.sft import SftConfig
from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError
from mopdctl.runs import Workspace
from mopdctl.train.optimizer import learning_rate
from mopdctl.train.order import rows_of_step
from mopdctl.train.stages import Stage, all_files, plan_stages
from mopdctl.train.tokens import tokenize

Make = Callable[..., Any]
Document = dict[str, Any]

BARE: Document = {"model": "m", "data": ["a.jsonl"], "name": "n", "train": {"steps": 3, "batch_size": 4}}
STAGES: Document = {
    "model": "m",
    "data": ["a.jsonl"],
    "name": "n",
    "stages": [{"name": "one", "steps": 2}, {"name": "two", "steps": 3, "learning_rate": 1e-4}],
    "train": {"batch_size": 4, "learning_rate": 1e-3},
}


@pytest.fixture(scope="module")
def model(make_llama: Make, make_tokenizer: Make, tagged_chatml: str) -> HFModel:
    return HFModel(make_llama(), make_tokenizer(chat_template=tagged_chatml))


def row(question: str, answer: str, **more: Any) -> Document:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def write(path: Path, rows: list[Document]) -> None:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), "utf-8")


@pytest.fixture
def plan(tmp_path: Path, model: HFModel) -> Callable[..., list[Stage]]:
    """Plans a document whose data are `a.jsonl` (10 rows) and `b.jsonl` (5 rows)."""
    write(tmp_path / "a.jsonl", [row(f"a{n}", "x" * (n + 1)) for n in range(10)])
    write(tmp_path / "b.jsonl", [row(f"b{n}", "y" * (n + 1)) for n in range(5)])

    def found(document: Document, *, max_positions: int = 1000) -> list[Stage]:
        config = SftConfig.model_validate(document)
        files = all_files(config, Workspace(tmp_path / "workspace"), base=tmp_path)
        return plan_stages(config, model, files, max_positions=max_positions)

    return found


# -------------------------------------------------------------------------------------------------------- configuration


def test_steps_are_the_sum_of_the_stages_and_need_not_be_given() -> None:
    assert SftConfig.model_validate(STAGES).train.steps == 5
    again = SftConfig.model_validate(SftConfig.model_validate(STAGES).model_dump(mode="json"))
    assert again == SftConfig.model_validate(STAGES)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"train": {"steps": 6}}, r"train\.steps 6 contradicts the 5 steps of `stages`; leave it out"),
        ({"stages": []}, r"key 'train\.steps' is missing"),
        ({"stages": [{"name": "one", "steps": 1}] * 2}, r"stages: two stages are called 'one'"),
        ({"stages": [{"name": "one"}]}, r"key 'stages\.0\.steps' is missing"),
        ({"stages": [{"name": "one", "steps": 0}]}, r"stages\.0\.steps: .*greater than 0"),
        ({"stages": [{"name": "one", "steps": 1, "warmup": 1}]}, r"unknown key 'stages\.0\.warmup'; did you mean"),
        (
            {"stages": [{"name": "a", "steps": 1, "data": [{"path": "x", "weight": 0}]}]},
            r"stages\.0\.data\.0\.weight: ",
        ),
        ({"data": []}, r"no data; .* or in stage 'one'"),
        (
            {"stages": [{"name": "one", "steps": 1, "data": [{"path": "b.jsonl"}]}]},
            "`data` is used by no stage, as each has its own; leave it out",
        ),
        ({"packing": "first_fit"}, r"packing: .*best_fit"),
    ],
)
def test_a_contradiction_is_refused_by_name(change: Document, complaint: str) -> None:
    with pytest.raises(InputError, match=rf"^sft\.yaml: (\(top level\): )?{complaint}"):
        parse(SftConfig, STAGES | change, source="sft.yaml")


def test_data_at_the_top_is_not_needed_where_every_stage_has_its_own() -> None:
    stages = [s | {"data": [{"path": "b.jsonl"}]} for s in STAGES["stages"]]
    assert SftConfig.model_validate(STAGES | {"data": [], "stages": stages}).data == []


# ---------------------------------------------------------------------------------------------------------------- order


def test_a_run_without_stages_takes_its_rows_as_ever(plan: Callable[..., list[Stage]]) -> None:
    (stage,) = plan(BARE | {"data": ["a.jsonl", "b.jsonl"]})
    rows = [[r for group in stage.batch(step) for r in group] for step in range(3)]
    assert rows == [rows_of_step(step, num_rows=15, batch_size=4, seed=0) for step in range(3)]
    assert stage.name == "sft"


def test_only_rows_that_are_used_are_tokenized(plan: Callable[..., list[Stage]]) -> None:
    (stage,) = plan(BARE | {"train": {"steps": 1, "batch_size": 4}})
    assert np.flatnonzero(stage.table.lengths).tolist() == sorted(rows_of_step(0, num_rows=10, batch_size=4, seed=0))


def test_one_stage_that_says_nothing_is_the_run_without_stages(plan: Callable[..., list[Stage]]) -> None:
    (bare,) = plan(BARE)
    (stage,) = plan(BARE | {"train": {"batch_size": 4}, "stages": [{"name": "one", "steps": 3}]})
    assert [stage.batch(step) for step in range(3)] == [bare.batch(step) for step in range(3)]
    assert stage.train == bare.train


def test_stages_follow_each_other_with_an_order_and_a_schedule_of_their_own(plan: Callable[..., list[Stage]]) -> None:
    stages = [
        {"name": "one", "steps": 5, "batch_size": 10, "schedule": "cosine", "warmup_steps": 1},
        {"name": "two", "steps": 4, "learning_rate": 1e-4, "schedule": "linear", "final_learning_rate_share": 0.5},
    ]
    one, two = plan(STAGES | {"stages": stages})
    assert (one.first_step, two.first_step) == (0, 5)
    assert one.batch(0) != two.batch(5)
    assert [len(one.batch(0)), len(two.batch(5))] == [10, 4]
    assert [learning_rate(step, two.train) for step in range(4)] == pytest.approx([1e-4, 8.75e-5, 7.5e-5, 6.25e-5])
    assert learning_rate(0, one.train) == pytest.approx(5e-4)
    assert two.train.warmup_steps == 0


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_a_mixture_is_drawn_by_weight(plan: Callable[..., list[Stage]], packing: str) -> None:
    data = [{"path": "a.jsonl", "weight": 3}, {"path": "b.jsonl"}]
    stage = {"name": "one", "steps": 10, "data": data, "batch_size": 4, "packing": packing, "max_length": 300}
    (found,) = plan(STAGES | {"data": [], "stages": [stage], "train": {"batch_size": 4}})
    drawn = Counter("b" if r >= 10 else "a" for step in range(10) for group in found.batch(step) for r in group)
    assert drawn["a"] / drawn.total() == pytest.approx(0.75, abs=2 / drawn.total())


# ---------------------------------------------------------------------------------------------------------------- packs


def test_packs_are_planned_and_reported(plan: Callable[..., list[Stage]]) -> None:
    (stage,) = plan(BARE | {"packing": "best_fit", "max_length": 120, "train": {"steps": 2, "batch_size": 2}})
    groups = [group for step in range(2) for group in stage.batch(step)]
    lengths = [sum(int(stage.table.lengths[r]) for r in group) for group in groups]
    report = stage.report()
    assert all(0 < n <= 120 for n in lengths)
    assert max(map(len, groups)) > 1
    assert report["packs"] == len(groups) == 4
    assert report["samples"] == sum(map(len, groups))
    assert report["tokens"] == sum(lengths)
    assert report["fill"] == pytest.approx(sum(lengths) / 480, abs=1e-6)
    trained = sum(int(stage.table.trainable[r]) for group in groups for r in group)
    assert report["trainable_share"] == pytest.approx(trained / sum(lengths), abs=1e-6)
    assert 0 < report["trainable_share"] < 1
    assert report["rows"] == 10


def test_what_is_not_packed_has_no_fill(plan: Callable[..., list[Stage]]) -> None:
    report = plan(BARE)[0].report()
    assert (report["packs"], report["fill"], report["dropped"]) == (None, None, {"overlong": 0})
    assert report["samples"] == 12


def test_rows_of_the_same_prompt_share_no_pack(tmp_path: Path, plan: Callable[..., list[Stage]]) -> None:
    write(tmp_path / "a.jsonl", [row(f"q{n % 3}", "x" * (n + 1)) for n in range(12)])
    (stage,) = plan(BARE | {"packing": "best_fit", "max_length": 400})
    for step in range(3):
        for group in stage.batch(step):
            assert len({r % 3 for r in group}) == len(group)


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_rows_that_are_too_long_are_an_error_or_counted(
    tmp_path: Path, plan: Callable[..., list[Stage]], packing: str
) -> None:
    write(tmp_path / "a.jsonl", [row(f"a{n}", "x" * (200 if n % 4 == 1 else 5)) for n in range(10)])
    document = BARE | {"packing": packing, "max_length": 100, "train": {"steps": 9, "batch_size": 4}}
    with pytest.raises(
        InputError, match=r"a\.jsonl:\d+: \d+ tokens, but at most 100 fit \(max_length\); shorten or drop the row"
    ):
        plan(document)
    (stage,) = plan(document | {"overlong": "drop"})
    assert stage.report()["dropped"] == {"overlong": 3}
    assert stage.report()["rows"] == 10
    used = {r for step in range(9) for group in stage.batch(step) for r in group}
    assert used == {0, 2, 3, 4, 6, 7, 8}
    with pytest.raises(InputError, match=r"a\.jsonl: every row has too many tokens"):
        plan(document | {"overlong": "drop", "max_length": 8})


def test_a_row_may_be_no_longer_than_the_model_though_a_pack_may(plan: Callable[..., list[Stage]]) -> None:
    document = BARE | {"packing": "best_fit", "max_length": 120}
    plan(document, max_positions=60)
    with pytest.raises(InputError, match=r"at most 30 fit"):
        plan(document, max_positions=30)


def test_a_data_set_smaller_than_a_pack_is_packed_once_per_pack(plan: Callable[..., list[Stage]]) -> None:
    (stage,) = plan(BARE | {"packing": "best_fit", "max_length": 100_000})
    assert [sorted(group) for step in range(3) for group in stage.batch(step)] == [list(range(10))] * 12


# --------------------------------------------------------------------------------------------------------------- tokens


# marin-community/marin #7237, huggingface/transformers #34172
def test_a_row_without_a_token_to_train_on_is_refused_by_name(
    tmp_path: Path, make_llama: Make, make_tokenizer: Make, chatml: str
) -> None:
    silent = HFModel(make_llama(), make_tokenizer(chat_template=chatml + "{% generation %}{% endgeneration %}"))
    with pytest.raises(InputError, match=r"^f:3: no token to train on"):
        tokenize(silent, [("f:3", row("q", "a"))], loss_on="assistant", limit=99, drop_overlong=False)


def test_a_first_token_that_nothing_predicts_is_refused_by_name(make_llama: Make, make_tokenizer: Make) -> None:
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    bare = HFModel(make_llama(), make_tokenizer(chat_template=template))
    with pytest.raises(InputError, match=r"^f:3: the assistant's first token has nothing before it"):
        tokenize(bare, [("f:3", row("q", "a"))], loss_on="assistant", limit=99, drop_overlong=False)


def test_a_row_says_what_it_is_trained_on(model: HFModel) -> None:
    messages = [*row("a", "b")["messages"], *row("c", "d")["messages"]]
    rows: list[Document] = [{"messages": messages, "loss_on": word} for word in (None, "last_assistant", "all")]
    table = tokenize(model, [("f", r) for r in rows], loss_on="assistant", limit=99, drop_overlong=False)
    assert table.trainable.tolist() == [4, 2, table.lengths[2] - 1]
    assert table.sequence(1).loss_mask == [1, 1, 0]


# THUDM/slime #2063
def test_a_table_gives_back_the_tokens_of_its_rows(model: HFModel) -> None:
    from mopdctl.train.data import conversation_ids

    rows = [row("first", "one"), row("second", "two, but longer")]
    table = tokenize(model, [("f", r) for r in rows], loss_on="assistant", limit=99, drop_overlong=False)
    for number, found in enumerate(rows):
        ids, mask = conversation_ids(model, found["messages"], None, place="f", loss_on="assistant")
        sequence = table.sequence(number)
        assert [*sequence.prompt_ids, *sequence.response_ids] == ids
        assert [*[0] * len(sequence.prompt_ids), *sequence.loss_mask] == mask
        assert sequence.sample_id == str(number)


def test_a_table_costs_a_few_bytes_a_token(model: HFModel) -> None:
    rows = (("f", row(f"q{n}", "x" * 100)) for n in range(600))
    tokenize(model, [("f", row("q", "a"))], loss_on="assistant", limit=999, drop_overlong=False)
    tracemalloc.start()
    table = tokenize(model, rows, loss_on="assistant", limit=999, drop_overlong=False)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 8 * table.lengths.sum()
