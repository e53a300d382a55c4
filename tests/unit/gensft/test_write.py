"""The files: one schema whatever the rows hold, bounded row groups, a split by prompt."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.gensft.rows import SCHEMA, compact, duplicate_text, table
from mopdctl.gensft.write import SplitWriter, split_of


def row(number: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": "a"}]
    empty = dict.fromkeys(SCHEMA.names)
    return empty | {"id": str(number), "messages": messages, "sampling": "{}", "verdicts": "[]", "extra": "{}"} | fields


def write(folder: Path, rows: list[dict[str, Any]], **bounds: int) -> list[Path]:
    with SplitWriter(folder / "data", "train", **{"rows_per_file": 1000, "row_group_bytes": 10**6} | bounds) as writer:
        for one in rows:
            writer.add(one, len(compact(one)))
    return sorted((folder / "data").iterdir())


def test_files_are_numbered_out_of_their_number(tmp_path: Path) -> None:
    files = write(tmp_path, [row(i) for i in range(7)], rows_per_file=3)
    assert [p.name for p in files] == [f"train-0000{i}-of-00003.parquet" for i in range(3)]
    assert [pq.read_metadata(p).num_rows for p in files] == [3, 3, 1]


def test_a_split_without_rows_has_no_file(tmp_path: Path) -> None:
    assert write(tmp_path, []) == []


# huggingface/dataset-viewer #1519, #1497; betagouv/ComparIA #124
def test_row_groups_of_long_chats_stay_within_their_bytes(tmp_path: Path) -> None:
    long = [
        row(i, messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": str(i) * 3000}])
        for i in range(60)
    ]
    (file,) = write(tmp_path, long, row_group_bytes=40_000)
    metadata = pq.read_metadata(file)
    assert metadata.num_rows == 60
    assert metadata.num_row_groups > 3
    for number in range(metadata.num_row_groups):
        group = pq.ParquetFile(file).read_row_group(number).to_pylist()
        assert sum(len(compact(one)) for one in group) <= 44_000


# huggingface/datasets #7222, #6162
def test_files_whose_columns_are_all_null_have_the_schema_of_the_others(tmp_path: Path) -> None:
    import datasets

    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, null]}'}}
    full = row(
        9,
        tools='[{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": null}}}}]',
        messages=[
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [call]},
        ],
        license="mit",
        score=1.5,
    )
    files = write(tmp_path, [*(row(i) for i in range(8)), full], rows_per_file=2)
    assert len({pq.read_schema(p) for p in files}) == 1
    assert pq.read_table(files[0]).schema == pq.read_table(files[-1]).schema
    loaded = datasets.load_dataset(str(tmp_path), split="train")
    assert loaded.num_rows == 9
    last = loaded[8]
    assert last["messages"][1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": [1, None]}}
    assert last["tools"][0]["function"]["parameters"] == {"properties": {"x": None}}


# datasets 5.2.0: a string column of ISO dates becomes timestamps, JSON text in a JSON column becomes its value
@pytest.mark.parametrize("text", ["2024-01-01T00:00:00", "123", "true", "null", '{"a": 1}', "NaN", ""])
def test_text_that_looks_like_something_else_stays_text(tmp_path: Path, text: str) -> None:
    import datasets

    said = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    write(tmp_path, [row(0, messages=said, source=text, license=text)])
    found = datasets.load_dataset(str(tmp_path), split="train")[0]
    assert [m["content"] for m in found["messages"]] == [text, text]
    assert (found["source"], found["license"]) == (text, text)


# RUC-NLPIR/FlashRAG #132, huggingface/datasets #7059: free-form fields of changing types, nulls inside lists
@given(
    st.lists(st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3), st.lists, max_leaves=6))
)
def test_free_form_fields_of_any_type_come_back(values: list[Any]) -> None:
    rows = [row(i, extra=compact({"value": value})) for i, value in enumerate(values)]
    found = table(rows).column("extra").to_pylist()
    assert [json.loads(text)["value"] for text in found] == values


def test_polars_and_duckdb_read_json_columns_as_text(tmp_path: Path) -> None:
    import duckdb
    import polars as pl

    (file,) = write(tmp_path, [row(0, extra='{"a":1}')])
    assert pl.read_parquet(file)["extra"].to_list() == ['{"a":1}']
    assert duckdb.sql(f"select extra->>'a' from '{file}'").fetchall() == [("1",)]


def test_equal_prompts_land_in_one_split_and_shares_are_met() -> None:
    def split(prompt: str, answer: str, system: str = "") -> str:
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        return split_of(messages, validation_share=0.2, seed=0)

    for i in range(300):
        assert split(f"q{i}", "a") == split(f"q{i}", "another") == split(f"q{i}", "a", "Be kind.")
    share = sum(split(f"q{i}", "a") == "validation" for i in range(2000)) / 2000
    assert 0.17 < share < 0.23


def test_the_compared_text_is_what_was_asked_for() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "R"},
        {"role": "assistant", "content": "A"},
    ]
    assert duplicate_text(messages, "conversation") == "Q\nf {}\nR\nA"
    assert duplicate_text(messages, "prompt") == "Q\nf {}\nR"
    assert duplicate_text(messages, "answer") == "A"
