"""Files of trajectories: which format, which place, and what is wrong with a document."""

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.errors import InputError
from mopdctl.pivots.audit import Reason, Skip
from mopdctl.pivots.formats import IMPORTERS, detect_format, import_document, read_trajectories
from mopdctl.pivots.trajectory import Trajectory

CHAT = {"id": "c", "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
RESPONSES = {"id": "r", "input": "q", "output": [{"role": "assistant", "content": "a"}]}
ATIF = {
    "schema_version": "ATIF-v1.5",
    "session_id": "t",
    "agent": {"name": "x", "version": "1"},
    "steps": [
        {"step_id": 1, "source": "user", "message": "q"},
        {"step_id": 2, "source": "agent", "message": "a"},
    ],
}


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def read(*paths: Path, **options: Any) -> list[Trajectory | Skip]:
    return list(read_trajectories(paths, **options))


def test_each_format_is_found_by_its_fields_and_they_say_the_same(tmp_path: Path) -> None:
    found = read(jsonl(tmp_path / "t.jsonl", CHAT, RESPONSES, ATIF))
    assert all(isinstance(t, Trajectory) for t in found)
    assert [t.trajectory_id for t in found] == ["c", "r", "t"]
    assert len({json.dumps([s.message for s in t.steps]) for t in found if isinstance(t, Trajectory)}) == 1
    assert [t.source for t in found if isinstance(t, Trajectory)] == [f"{tmp_path}/t.jsonl:{n}" for n in (1, 2, 3)]


def test_a_bad_line_is_a_skip_with_its_place_and_the_rest_is_read(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", CHAT, "{", "", "[1]", {"rows": 1}, {"messages": 3, "id": "m"}, ATIF)
    with path.open("ab") as file:
        file.write(b'\xef\xbb\xbf{"messages": "\xff"}\n{"id": 1, "messa')
    found = read(path)
    assert [(f.place.rpartition(":")[2], f.reason) for f in found if isinstance(f, Skip)] == [
        ("2", Reason.NOT_JSON),
        ("4", Reason.MALFORMED),
        ("5", Reason.UNKNOWN_FORMAT),
        ("6", Reason.MALFORMED),
        ("8", Reason.NOT_JSON),
        ("9", Reason.NOT_JSON),
    ]
    assert [f.trajectory_id for f in found if isinstance(f, Trajectory)] == ["c", "t"]
    last = found[-1]
    assert isinstance(last, Skip)
    assert "may be torn" in last.detail


def test_a_document_a_file_a_list_and_json_lines_under_another_name_are_read(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(ATIF))
    (tmp_path / "list.json").write_text(json.dumps([CHAT, ATIF]))
    lines = jsonl(tmp_path / "lines.json", CHAT, RESPONSES)
    found = read(tmp_path / "one.json", tmp_path / "list.json", lines)
    places = [f.source.rpartition("/")[2] for f in found if isinstance(f, Trajectory)]
    assert places == ["one.json#0", "list.json#0", "list.json#1", "lines.json:1", "lines.json:2"]


def test_parquet_rows_are_read_with_lists_and_with_json_text(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([CHAT, CHAT | {"id": "d"}]), tmp_path / "a.parquet")
    pq.write_table(
        pa.Table.from_pylist([{"id": "e", "messages": json.dumps(CHAT["messages"])}]), tmp_path / "b.parquet"
    )
    found = read(tmp_path / "a.parquet", tmp_path / "b.parquet")
    assert [t.trajectory_id for t in found] == ["c", "d", "e"]
    assert [t.source.rpartition("/")[2] for t in found if isinstance(t, Trajectory)] == [
        "a.parquet#0",
        "a.parquet#1",
        "b.parquet#0",
    ]
    assert all(isinstance(t, Trajectory) and t.steps[1].message["content"] == "a" for t in found)


def test_a_format_that_is_asked_for_is_used(tmp_path: Path) -> None:
    both = CHAT | {"input": "other"}
    path = jsonl(tmp_path / "t.jsonl", both)
    assert detect_format(both) == "chat"
    (items,) = read(path, format="responses")
    assert isinstance(items, Trajectory)
    assert [step.message["content"] for step in items.steps] == ["other"]
    (skip,) = read(jsonl(tmp_path / "u.jsonl", ATIF), format="chat")
    assert isinstance(skip, Skip)
    assert (skip.trajectory_id, skip.reason) == ("t", Reason.MALFORMED)


EMPTY = dict.fromkeys(["messages", "input", "items", "output", "response", "responses_create_params", "steps"])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (CHAT | {"output": "done"}, "chat"),
        (CHAT | {"input": "do it", "items": [], "responses_create_params": None}, "chat"),
        (CHAT | {"messages": json.dumps(CHAT["messages"]), "input": "do it"}, "chat"),
        (CHAT | {"steps": 12, "agent": "swe"}, "chat"),
        (CHAT | {"responses_create_params": {"input": "q"}}, "responses"),
        (EMPTY | CHAT, "chat"),
        (EMPTY | RESPONSES, "responses"),
        (EMPTY | {"messages": [], "items": [{"role": "user", "content": "q"}]}, "responses"),
        (EMPTY | ATIF, "atif"),
        ({"messages": []}, "chat"),
        ({"input": ""}, "responses"),
        ({"steps": [], "agent": {}}, "atif"),
        ({"rows": 1}, None),
    ],
)
def test_fields_that_are_empty_and_columns_of_the_users_own_do_not_decide(row: Any, expected: str | None) -> None:
    assert detect_format(row) == expected


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"a": value}
    return value


SAID = CHAT["messages"]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (f'{{"messages": {json.dumps(SAID)}, "reward": {"9" * 400}}}', "'reward'"),
        (f'{{"messages": {json.dumps(SAID)}, "reward": 1e999}}', "'reward'"),
        (ATIF | {"steps": [{"source": ["agent"], "message": "x"}]}, "none of the sources"),
        (ATIF | {"subagent_trajectories": 5}, "must be a list"),
        (ATIF | {"subagent_trajectories": True}, "must be a list"),
        (CHAT | {"id": "a\ud800"}, "half a character"),
        (CHAT | {"domain": "a\ud800"}, "half a character"),
        (CHAT | {"environment": nested(900)}, "nested"),
        (CHAT | {"environment": nested(101)}, "nested"),
        (CHAT | {"tools": [{"type": "function", "function": {"name": "f", "parameters": nested(101)}}]}, "nested"),
        (CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "x": nested(101)}]}]}, "nested"),
    ],
)
def test_a_row_of_an_odd_shape_is_malformed_and_the_rest_is_read(tmp_path: Path, document: Any, said: str) -> None:
    skip, after = read(jsonl(tmp_path / "t.jsonl", document, CHAT))
    assert isinstance(skip, Skip)
    assert (skip.reason, skip.place) == (Reason.MALFORMED, f"{tmp_path}/t.jsonl:1")
    assert said in skip.detail
    assert isinstance(after, Trajectory)


@pytest.mark.parametrize("error", [TypeError, ValueError, OverflowError, KeyError, AttributeError, RecursionError])
def test_what_no_importer_thought_of_is_malformed(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def broken(row: dict[str, Any], place: str) -> Iterator[Trajectory]:
        raise error("odd")

    monkeypatch.setitem(IMPORTERS, "chat", broken)
    (skip,) = import_document(CHAT, "p")
    assert isinstance(skip, Skip)
    assert (skip.reason, skip.trajectory_id) == (Reason.MALFORMED, "c")


def test_files_and_formats_that_cannot_be_read_are_input_errors(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"messages": [}')
    (tmp_path / "bad.parquet").write_text("x")
    for path, said in [
        (tmp_path / "none.jsonl", "No such file"),
        (tmp_path / "none.json", "no such file"),
        (tmp_path / "bad.json", "bad.json:1:15: not JSON"),
        (tmp_path / "bad.parquet", "not Parquet"),
    ]:
        with pytest.raises(InputError, match=said):
            read(path)
    with pytest.raises(InputError, match="'atfi'; did you mean 'atif'"):
        read(tmp_path / "bad.json", format="atfi")


@pytest.mark.parametrize(
    ("content", "said"),
    [('"\\ud83d"', "half a character"), ('[{"type": "text", "text": "x", "score": NaN}]', "JSON cannot")],
)
def test_what_could_not_be_written_again_is_a_skip(tmp_path: Path, content: str, said: str) -> None:
    (skip,) = read(jsonl(tmp_path / "t.jsonl", f'{{"messages": [{{"role": "user", "content": {content}}}]}}'))
    assert isinstance(skip, Skip)
    assert said in skip.detail


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type"]), inner),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["messages", "tools", "input", "output", "items", "response", "responses_create_params", "steps", "agent", "id"]
)
ROLES = st.sampled_from(["user", "assistant", "tool", "agent", "system"])
ODD_MESSAGE = st.dictionaries(
    st.sampled_from(["content", "tool_calls", "tool_call_id", "reasoning", "type", "output", "observation", "message"]),
    JSON,
).flatmap(lambda fields: ROLES.map(lambda role: {"role": role, "source": role} | fields))


@given(st.dictionaries(KEYS, JSON | st.lists(ODD_MESSAGE, max_size=3), max_size=4))
def test_any_document_is_a_trajectory_or_a_skip_with_a_reason(document: dict[str, Any]) -> None:
    found = list(import_document(document, "p"))
    assert found
    assert all(isinstance(f, Trajectory) or (f.turn is None and f.detail) for f in found)


def test_memory_does_not_grow_with_the_number_of_trajectories(tmp_path: Path) -> None:
    big = CHAT | {"messages": [{"role": "user", "content": "x" * 50_000}, {"role": "assistant", "content": "a"}]}
    path = jsonl(tmp_path / "t.jsonl", *[big] * 100)
    tracemalloc.start()
    count = sum(1 for _ in read_trajectories([path]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 100
    assert peak < 1_500_000
