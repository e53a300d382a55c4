import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mopdctl.errors import InputError
from mopdctl.train.data import row_conversation, row_tools
from mopdctl.train.rows import count_rows, data_files, iterate_rows

FUNCTION = pa.struct([("name", pa.string()), ("arguments", pa.string())])
CALL = pa.struct([("id", pa.string()), ("type", pa.string()), ("function", FUNCTION)])
MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("reasoning_content", pa.string()),
        ("tool_calls", pa.list_(CALL)),
        ("tool_call_id", pa.string()),
        ("name", pa.string()),
    ]
)
SCHEMA = pa.schema([("id", pa.string()), ("messages", pa.list_(MESSAGE)), ("tools", pa.string())])
"""The fixed schema of generated data sets."""

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {}, "b": None}}}}]
CALLED = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": null}'}}
ROWS: list[dict[str, Any]] = [
    {
        "id": "0",
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
        "tools": None,
    },
    {
        "id": "1",
        "messages": [
            {"role": "user", "content": "1 + 2?"},
            {"role": "assistant", "content": None, "reasoning_content": "a sum", "tool_calls": [CALLED]},
            {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"},
            {"role": "assistant", "content": "It is 3."},
        ],
        "tools": json.dumps(TOOLS),
    },
]


def write(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path, **options)
    return path


def files(path: Path | str, base: Path) -> list[str]:
    found = data_files(Path(path), base=base, workspace=base / "workspace")
    return [str(file.relative_to(base)) for file in found]


def test_a_row_of_the_fixed_schema_is_decoded_for_the_template(tmp_path: Path) -> None:
    (_, one), (place, other) = iterate_rows(write(tmp_path / "rows.parquet", ROWS))
    assert (row_conversation(one, "f"), row_tools(one, "f")) == (ROWS[0]["messages"], None)
    assert row_tools(other, place) == TOOLS
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    assert row_conversation(other, place)[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "a sum",
        "tool_calls": [call],
    }
    assert row_conversation(other, place)[2] == ROWS[1]["messages"][2]


def test_parquet_is_read_row_group_by_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "rows.parquet", [ROWS[0] | {"id": str(n)} for n in range(10)], row_group_size=3)
    read: list[int] = []
    original = pq.ParquetFile.iter_batches

    def spy(self: Any, *arguments: Any, **options: Any) -> Any:
        read.extend(options["row_groups"])
        return original(self, *arguments, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    rows = iterate_rows(path)
    assert [row["id"] for _, row in (next(rows) for _ in range(4))] == ["0", "1", "2", "3"]
    assert read == [0, 1]
    assert [(place, row["id"]) for place, row in rows] == [(f"{path} row {n}", str(n)) for n in range(4, 10)]


def test_rows_of_parquet_are_counted_from_the_footer_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.parquet", ROWS * 50)
    data = bytearray(path.read_bytes())
    data[4:64] = b"\0" * 60  # the first page
    path.write_bytes(data)
    assert count_rows(path) == 100


def test_blank_lines_of_jsonl_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n  \n{"a": "\u2028"}', "utf-8")
    assert count_rows(path) == len(list(iterate_rows(path))) == 2


def test_a_data_path_is_a_file_a_folder_or_a_data_set_of_the_workspace(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        write(tmp_path / f"set/data/train-{number:05d}.parquet", ROWS)
        write(tmp_path / f"workspace/datasets/chat/data/train-{number:05d}.parquet", ROWS)
    write(tmp_path / "set/data/test-00000.parquet", ROWS)
    write(tmp_path / "set/extra.parquet", ROWS)
    write(tmp_path / "flat/b.parquet", ROWS)
    (tmp_path / "flat/a.jsonl").write_text("{}\n", "utf-8")
    (tmp_path / "flat/notes.txt").write_text("x", "utf-8")
    assert files("set/extra.parquet", tmp_path) == ["set/extra.parquet"]
    assert files("set", tmp_path) == [f"set/data/train-{n:05d}.parquet" for n in (1, 2, 10)]
    assert files("flat", tmp_path) == ["flat/a.jsonl", "flat/b.parquet"]
    assert files("chat", tmp_path) == [f"workspace/datasets/chat/data/train-{n:05d}.parquet" for n in (1, 2, 10)]
    assert files(tmp_path / "flat" / "b.parquet", tmp_path) == ["flat/b.parquet"]


def test_a_path_that_means_no_file_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "workspace" / "datasets").mkdir(parents=True)
    with pytest.raises(InputError, match=r"empty: a folder with neither data/train-\*\.parquet nor"):
        files("empty", tmp_path)
    for missing in ("missing", "missing.jsonl", "../nowhere"):
        with pytest.raises(InputError, match="no such file"):
            files(missing, tmp_path)


def test_a_torn_parquet_file_is_an_input_error(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.parquet", ROWS)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(InputError, match=r"rows\.parquet: not Parquet"):
        list(iterate_rows(path))
    with pytest.raises(InputError, match=r"rows\.parquet: not Parquet"):
        count_rows(path)
