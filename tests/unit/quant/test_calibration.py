"""Rows to calibrate on: which of a source, and as which tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.config.quant import CalibrationConfig
from mopdctl.engines.tokenizers import ChatTokenizer, tokenizer_fingerprint
from mopdctl.errors import InputError
from mopdctl.quant.calibration import CalibrationRows, calibration_rows
from mopdctl.records import Sample
from mopdctl.runs import Workspace
from mopdctl.store.store import StoreWriter
from mopdctl.train.rows import spread


@pytest.fixture(scope="module")
def model(
    tmp_path_factory: pytest.TempPathFactory, make_llama: Callable[..., Any], make_tokenizer: Any, chatml: str
) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_llama().save_pretrained(folder)
    make_tokenizer(chat_template=chatml).save_pretrained(folder)
    return str(folder)


def rows_of(model: str, root: Path, **settings: Any) -> CalibrationRows:
    return calibration_rows(CalibrationConfig(**settings), model, Workspace(root / "workspace"), base=root)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def sample(number: int, tokens: list[int], tokenizer: str) -> Sample:
    return Sample(
        sample_id=f"s{number}",
        prompt_id=f"p{number}",
        group_id=f"p{number}",
        generation_index=0,
        domain="math",
        teacher_id="",
        policy_version_min=0,
        policy_version_max=0,
        tokens=np.array(tokens, np.int32),
        prompt_length=1,
        loss_mask=np.array([0] + [1] * (len(tokens) - 1), np.bool_),
        behavior_logprobs=np.zeros(len(tokens) - 1, np.float32),
        finish_reason="stop",
        tokenizer_fingerprint=tokenizer,
    )


def fill(root: Path, name: str, samples: list[Sample]) -> None:
    with StoreWriter(Workspace(root / "workspace").rollouts(name), {}) as writer:
        for start in range(0, len(samples), 3):
            writer.commit(samples[start : start + 3])


# ---------------------------------------------------------------------------------------------------------------- text


def test_text_is_tokenized_and_messages_go_through_the_chat_template(model: str, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.load(model).tokenizer
    messages = [{"role": "user", "content": "add 2 and 3"}, {"role": "assistant", "content": "5"}]
    write(tmp_path / "rows.jsonl", [{"text": "the sum"}, {"messages": messages}])
    found = rows_of(model, tmp_path, data=Path("rows.jsonl"))
    rendered = "<|im_start|>user\nadd 2 and 3<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n"
    assert [tokenizer.decode(row) for row in found.token_ids] == ["the sum", rendered]
    assert (found.available, found.cut, found.empty) == (2, 0, 0)


def test_rows_are_cut_at_max_length_and_at_what_the_model_takes(model: str, tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [{"text": "x" * 1000}, {"text": "y" * 10}, {"text": ""}])
    found = rows_of(model, tmp_path, data=Path("rows.jsonl"), max_length=30)
    assert [len(row) for row in found.token_ids] == [30, 10]
    assert (found.available, found.cut, found.empty) == (3, 1, 1)
    assert max(len(row) for row in rows_of(model, tmp_path, data=Path("rows.jsonl")).token_ids) == 128


def test_rows_are_spread_over_the_whole_source_and_the_same_every_time(model: str, tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [{"text": f"row {i}"} for i in range(100)])
    found = rows_of(model, tmp_path, data=Path("rows.jsonl"), samples=4)
    tokenizer = ChatTokenizer.load(model).tokenizer
    assert [tokenizer.decode(row) for row in found.token_ids] == ["row 0", "row 25", "row 50", "row 75"]
    assert rows_of(model, tmp_path, data=Path("rows.jsonl"), samples=4) == found
    assert rows_of(model, tmp_path, data=Path("rows.jsonl"), samples=5).digest != found.digest


@given(st.integers(1, 500), st.integers(1, 500))
def test_spread_rows_are_distinct_in_range_and_evenly_apart(available: int, wanted: int) -> None:
    rows = spread(available, wanted)
    assert len(rows) == min(available, wanted)
    assert all(0 <= row < available for row in rows)
    gaps = [b - a for a, b in zip(rows, [*rows[1:], available], strict=True)]
    assert rows[0] == 0
    assert min(gaps) >= 1
    assert max(gaps) - min(gaps) <= 1
    assert spread(0, wanted) == []


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "only a question"}, "rows.jsonl:1: has neither 'messages' nor 'text'"),
        ({"text": 5}, "neither 'messages' nor 'text'"),
        ({"messages": [{"role": "usr", "content": "a"}]}, "did you mean 'user'"),
        ({"text": ""}, "holds no tokens"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(model: str, tmp_path: Path, row: dict[str, Any], said: str) -> None:
    write(tmp_path / "rows.jsonl", [row])
    with pytest.raises(InputError, match=said):
        rows_of(model, tmp_path, data=Path("rows.jsonl"))


def test_messages_without_a_chat_template_are_refused(
    tmp_path: Path, make_llama: Callable[..., Any], tokenizer: Any
) -> None:
    make_llama().save_pretrained(tmp_path / "bare")
    tokenizer.save_pretrained(tmp_path / "bare")
    write(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    with pytest.raises(InputError, match="no chat template"):
        rows_of(str(tmp_path / "bare"), tmp_path, data=Path("rows.jsonl"))


# --------------------------------------------------------------------------------------------------------------- store


def test_rows_of_a_store_are_its_tokens_prompt_and_answer(model: str, tmp_path: Path) -> None:
    own = tokenizer_fingerprint(ChatTokenizer.load(model))
    fill(tmp_path, "run", [sample(i, [i, i + 1, i + 2], own) for i in range(8)])
    found = rows_of(model, tmp_path, store="run", samples=4, max_length=2)
    assert found.token_ids == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert (found.source, found.available, found.cut) == ("run", 8, 4)
    assert found.document["tokens"] == 8


def test_a_store_of_another_tokenizer_is_refused(model: str, tmp_path: Path) -> None:
    fill(tmp_path, "run", [sample(0, [1, 2], "another")])
    with pytest.raises(InputError, match="another tokenizer"):
        rows_of(model, tmp_path, store="run")


def test_tokens_beyond_the_vocabulary_are_refused(model: str, tmp_path: Path) -> None:
    fill(tmp_path, "run", [sample(0, [1, 5000], "")])
    with pytest.raises(InputError, match="does not know"):
        rows_of(model, tmp_path, store="run")
