import datetime
import decimal
import json
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mopdctl.config.gensft import Attributes, SeedSource
from mopdctl.errors import InputError
from mopdctl.gensft.records import Seed
from mopdctl.gensft.seeds import check_sources, read_plan, read_seeds, write_plan

BOM = b"\xef\xbb\xbf"
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def line(**fields: Any) -> bytes:
    """A usable row of JSONL."""
    return json.dumps({"prompt": "hello", "domain": "chat"} | fields, ensure_ascii=False).encode() + b"\n"


def jsonl(path: Path, *lines: bytes) -> SeedSource:
    path.write_bytes(b"".join(lines))
    return SeedSource(path=path)


def parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> SeedSource:
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return SeedSource(path=path)


def read(
    *sources: SeedSource, base: Path = Path(), limit: int | None = None
) -> tuple[list[Seed], list[dict[str, Any]], Counter[str]]:
    bad: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    seeds = list(read_seeds(sources, base=base, limit=limit, quarantine=bad.append, counts=counts))
    assert counts["rows"] == counts["seeds"] + counts["quarantined"]
    assert (counts["seeds"], counts["quarantined"]) == (len(seeds), len(bad))
    return seeds, bad, counts


def prompts(seeds: Iterable[Seed]) -> list[str]:
    return [seed.messages[-1]["content"] for seed in seeds]


def chat(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": f"{role} {number}"} for number, role in enumerate(roles)]


# ------------------------------------------------------------------------------------------------- encodings and lines


# infiniflow/ragflow #19179, microsoft/promptflow #4172
@pytest.mark.parametrize("rows", [1, 6])
def test_a_byte_order_mark_costs_no_row_in_the_first_file_or_a_later_one(tmp_path: Path, rows: int) -> None:
    lines = [line(prompt=f"question {i}") for i in range(rows)]
    files = [jsonl(tmp_path / f"{name}.jsonl", BOM, *lines) for name in "ab"]
    assert prompts(read(*files)[0]) == 2 * [f"question {i}" for i in range(rows)]


def test_a_byte_order_mark_in_the_middle_of_joined_files_costs_no_row(tmp_path: Path) -> None:
    seeds, bad, _ = read(jsonl(tmp_path / "a.jsonl", BOM, line(prompt="1"), BOM, line(prompt="2")))
    assert (prompts(seeds), bad) == (["1", "2"], [])


# huggingface/datasets #5969
@pytest.mark.parametrize(
    ("encoding", "said"), [("utf-16", "UTF-16 "), ("utf-16-le", "UTF-16LE "), ("utf-16-be", "UTF-16BE ")]
)
def test_utf_16_is_refused_before_reading_and_the_message_says_how_to_convert(
    tmp_path: Path, encoding: str, said: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"prompt": "hi", "domain": "chat"}\r\n'.encode(encoding))
    with pytest.raises(InputError, match=r"a\.jsonl:1: .*iconv -f UTF-16") as error:
        read_seeds([SeedSource(path=Path("a.jsonl"))], base=tmp_path, limit=None, quarantine=print)
    assert said in str(error.value)


# jingyaogong/minimind #551
def test_a_bad_byte_puts_its_line_in_quarantine_with_its_place_and_reading_goes_on(tmp_path: Path) -> None:
    lines = [line(prompt="1"), line(prompt="2"), b'{"prompt": "\xff", "domain": "chat"}\n', line(prompt="4")]
    source = jsonl(tmp_path / "a.jsonl", *lines)
    seeds, bad, counts = read(source)
    assert prompts(seeds) == ["1", "2", "4"]
    assert bad == [
        {
            "file": str(tmp_path / "a.jsonl"),
            "line": 3,
            "byte_offset": len(lines[0]) + len(lines[1]),
            "reason": "not UTF-8 at byte 12 of the line",
            "text": '{"prompt": "\ufffd", "domain": "chat"}\n',
        }
    ]
    assert counts["rows"] == 4
    assert (tmp_path / "a.jsonl").read_bytes()[bad[0]["byte_offset"] :].startswith(lines[2])


# PrimeIntellect-ai/verifiers #1644
def test_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\u0085d e"
    source = jsonl(tmp_path / "a.jsonl", line(prompt=text), line(prompt="x\\f"))
    assert prompts(read(source)[0]) == [text, "x\\f"]


def test_crlf_blank_lines_and_a_missing_last_line_feed_are_no_errors(tmp_path: Path) -> None:
    lines = [line(prompt="1")[:-1] + b"\r\n", b"\n", b"  \r\n", line(prompt="2").rstrip()]
    seeds, bad, counts = read(jsonl(tmp_path / "a.jsonl", *lines))
    assert (prompts(seeds), bad, counts["rows"]) == (["1", "2"], [], 2)
    assert [seed.place.rpartition(":")[2] for seed in seeds] == ["1", "4"]


@pytest.mark.parametrize(
    ("bad_line", "reason"),
    [
        (b'{"prompt": "a", "prompt": "b", "domain": "chat"}\n', "not JSON (key 'prompt' stands twice)"),
        (b'{"prompt": "a", "domain": "chat", "x": {"y": 1, "y": 2}}\n', "not JSON (key 'y' stands twice)"),
        (b'{"prompt": "a", "domain": "chat", "score": NaN}\n', "not JSON (NaN is no JSON number)"),
        (b'{"prompt": "a", "domain": "chat", "score": -Infinity}\n', "not JSON (-Infinity is no JSON number)"),
        (b'{"prompt": "a", "domain": "chat", "score": 1e999}\n', "not JSON (1e999 is beyond a float)"),
        (b'{"prompt": "a \\ud83d", "domain": "chat"}\n', "holds half a character (a lone surrogate)"),
        (b'{"prompt": "a", "domain": "chat", "x\\uD83D": 1}\n', "holds half a character (a lone surrogate)"),
        (line(tools='[{"function": {"name": "\\ud83d"}}]'), "'tools': holds half a character (a lone surrogate)"),
        (b'["prompt"]\n', "a list where a JSON object is needed"),
        (b"null\n", "a NoneType where a JSON object is needed"),
        (b"[" * 100_000 + b"\n", "not JSON (maximum recursion depth exceeded"),
        (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}\n", "not JSON (Exceeds the limit"),
        (b'{"prompt": "a", "dom', "torn last line: not JSON (Unterminated string starting at column 17)"),
        (b'{"prompt": "\xc3', "torn last line: not UTF-8 at byte 12 of the line"),
        (line(domain=None), "no domain"),
        (line(domain=""), "no domain"),
        (line(domain=3), "'domain' is a int where text is needed"),
        (line(prompt=None), "message 0 has no text in 'content'"),
        (b'{"text": "a", "domain": "chat"}\n', "has neither 'messages' nor 'prompt'"),
        (line(messages=[]), "'messages' must be a list with at least one message"),
        (line(messages="hi"), "'messages' must be a list with at least one message"),
        (line(messages=chat("usr")), "message 0 has the unknown role 'usr'; did you mean 'user'?"),
        (line(messages=[{"role": "user"}]), "message 0 has no text in 'content'"),
        (line(messages=chat("assistant")), "nobody asks anything: no user message before the assistant's last turn"),
        (line(messages=chat("system", "assistant")), "nobody asks anything: no user message before the assistant"),
        (line(tools={"name": "f"}), "'tools' must be a list of functions"),
        (line(tools="[{"), "'tools': not JSON (Expecting property name"),
        (line(difficulty=1.5), "'difficulty' is 1.5; a number from 0 to 1 is needed"),
        (line(difficulty="hard"), "'difficulty' is 'hard'; a number from 0 to 1 is needed"),
        (line(difficulty=True), "'difficulty' is True; a number from 0 to 1 is needed"),
        (line(license=["mit"]), "'license' is a list where text is needed"),
        (line(id=1.5), "id is a float; text or a whole number is needed"),
    ],
)
def test_one_unusable_line_goes_to_quarantine_with_its_reason(tmp_path: Path, bad_line: bytes, reason: str) -> None:
    good = line(prompt="good")
    seeds, bad, _ = read(jsonl(tmp_path / "a.jsonl", good, bad_line))
    assert prompts(seeds) == ["good"]
    assert [(entry["line"], entry["byte_offset"]) for entry in bad] == [(2, len(good))]
    assert bad[0]["reason"].startswith(reason)
    assert len(bad[0]["text"]) <= 500
    json.dumps(bad, allow_nan=False).encode()


@given(st.binary(max_size=60))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_line_holds_it_is_a_seed_or_in_quarantine(tmp_path: Path, content: bytes) -> None:
    lines = [line(prompt="first"), content + b"\n", line(prompt="last")]
    seeds, _, counts = read(jsonl(tmp_path / "a.jsonl", *lines))
    assert prompts(seeds)[0] == "first"
    assert prompts(seeds)[-1] == "last"
    assert counts["rows"] == 2 + sum(bool(part.strip()) for part in content.split(b"\n"))


# ------------------------------------------------------------------------------------------------------------- sources


def test_a_missing_file_is_said_before_anything_is_read(tmp_path: Path) -> None:
    sources = [jsonl(tmp_path / "a.jsonl", line()), SeedSource(path=Path("b.jsonl"))]
    for check in (check_sources, lambda s, base: read_seeds(s, base=base, limit=1, quarantine=print)):
        with pytest.raises(InputError, match=r"b\.jsonl: no such file"):
            check(sources, tmp_path)
    (tmp_path / "b.jsonl").mkdir()
    with pytest.raises(InputError, match="is not a file"):
        check_sources(sources, tmp_path)


def test_broken_attributes_are_said_before_anything_is_read(tmp_path: Path) -> None:
    made = SeedSource(attributes=Attributes(count=1, axes={"a": {"x": 1}}, prompt="{{ b }}"), domain="chat")
    with pytest.raises(InputError, match="'b' is no axis"):
        check_sources([made], tmp_path)


def test_a_source_without_a_usable_row_is_an_error_that_shows_the_first_problem(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no rows"):
        read(jsonl(tmp_path / "empty.jsonl", b"\n \n"))
    bad: list[dict[str, Any]] = []
    seeds = read_seeds([jsonl(tmp_path / "a.jsonl", b"{\n", b"[]\n")], base=tmp_path, limit=None, quarantine=bad.append)
    with pytest.raises(InputError, match=r"none of the rows can be used; the first one is .*a\.jsonl:1: not JSON"):
        list(seeds)
    assert len(bad) == 2


# NVIDIA-NeMo/Skills #661, #441
@pytest.mark.parametrize("parts", [1, 3, 4, 11])
def test_a_set_in_several_files_gives_every_row_once_and_in_order(tmp_path: Path, parts: int) -> None:
    lines = [line(prompt=f"question {i}") for i in range(11)]
    per_file = -(-len(lines) // parts)
    chunks = [lines[at : at + per_file] for at in range(0, len(lines), per_file)]
    sources = [jsonl(tmp_path / f"{number}.jsonl", *chunk) for number, chunk in enumerate(chunks)]
    assert prompts(read(*sources)[0]) == [f"question {i}" for i in range(11)]


def test_limits_count_seeds_and_nothing_is_read_beyond_them(tmp_path: Path) -> None:
    lines = [b"{\n", *(line(prompt=str(i)) for i in range(5))]
    first = jsonl(tmp_path / "a.jsonl", *lines).model_copy(update={"limit": 2})
    second = jsonl(tmp_path / "b.jsonl", *lines)
    seeds, bad, _ = read(first, second, limit=3)
    assert (prompts(seeds), len(bad)) == (["0", "1", "0"], 2)


def test_names_of_domain_source_and_licence_come_from_the_source_else_from_the_row(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", line(source="web", license="cc0-1.0"), line())
    rows, named = read(source)[0], read(source.model_copy(update={"domain": "x", "source": "y", "license": "z"}))[0]
    assert [(s.domain, s.source, s.license) for s in rows] == [("chat", "web", "cc0-1.0"), ("chat", "a.jsonl", None)]
    assert [(s.domain, s.source, s.license) for s in named] == 2 * [("x", "y", "z")]
    assert named[0].extra == {"domain": "chat", "source": "web", "license": "cc0-1.0"}, "the row's own are not lost"


def test_another_field_can_hold_the_prompt(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", line(question="why?")).model_copy(update={"prompt_field": "question"})
    seeds, _, _ = read(source)
    assert (seeds[0].messages, seeds[0].extra) == (({"role": "user", "content": "why?"},), {"prompt": "hello"})


@pytest.mark.slow
def test_a_data_set_folder_is_read_like_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_bytes(line(prompt="1", at="x") + line(prompt="2"))
    seeds, bad, _ = read(SeedSource(dataset="set"), base=tmp_path)
    assert (prompts(seeds), bad) == (["1", "2"], [])
    assert [seed.place for seed in seeds] == ["set row 0", "set row 1"]
    with pytest.raises(InputError, match="set: cannot be loaded"):
        read(SeedSource(dataset="set", split="test"), base=tmp_path)


def test_reading_holds_one_line_in_memory_and_not_the_file(tmp_path: Path) -> None:
    long = line(prompt="x" * 50_000)
    source = jsonl(tmp_path / "a.jsonl", *[long] * 200)
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_seeds([source], base=tmp_path, limit=None, quarantine=print))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 200
    assert peak < 2_000_000, "of a file of 10 MB"


# huggingface/dataset-viewer #1519, #1497 (the reading side)
def test_a_parquet_file_is_read_in_pieces_whatever_its_row_groups(tmp_path: Path) -> None:
    rows = [{"prompt": f"question {i}", "domain": "chat"} for i in range(1000)]
    for size in (7, 1000):
        source = parquet(tmp_path / "a.parquet", rows, row_group_size=size)
        assert prompts(read(source)[0]) == [row["prompt"] for row in rows]
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(InputError, match="not Parquet"):
        read(SeedSource(path=tmp_path / "b.parquet"))


# ----------------------------------------------------------------------------------------------------- types of fields


# huggingface/datasets #7222
def test_a_field_that_is_null_for_long_may_hold_text_later(tmp_path: Path) -> None:
    seeds, bad, _ = read(jsonl(tmp_path / "a.jsonl", *[line(x=None)] * 2000, line(x="text")))
    assert ([seeds[0].extra, seeds[-1].extra], bad) == ([{"x": None}, {"x": "text"}], [])


# huggingface/datasets #6162
def test_a_field_that_only_one_file_has_is_kept(tmp_path: Path) -> None:
    seeds, _, _ = read(jsonl(tmp_path / "a.jsonl", line()), jsonl(tmp_path / "b.jsonl", line(more=[1, {"a": None}])))
    assert [seed.extra for seed in seeds] == [None, {"more": [1, {"a": None}]}]


# RUC-NLPIR/FlashRAG #132, ShishirPatil/gorilla #371
def test_ids_become_text_and_answers_of_any_type_stay_what_they_are(tmp_path: Path) -> None:
    rows = [line(id=1, reference=7), line(id="1", reference="7"), line(id="a", reference={"answer": [7, None]})]
    seeds, _, _ = read(jsonl(tmp_path / "a.jsonl", *rows))
    assert [seed.extra for seed in seeds] == [{"id": "1"}, {"id": "1"}, {"id": "a"}]
    assert [seed.reference for seed in seeds] == [7, "7", {"answer": [7, None]}]
    assert len({seed.seed_id for seed in seeds}) == 3


# huggingface/datasets #7059
def test_nulls_inside_nested_lists_keep_their_places(tmp_path: Path) -> None:
    nested = [None, [1, None], [[None]]]
    seeds, _, _ = read(jsonl(tmp_path / "a.jsonl", line(x=nested)))
    assert seeds[0].extra == {"x": nested}
    write_plan(tmp_path / "plan.jsonl", seeds)
    assert list(read_plan(tmp_path / "plan.jsonl")) == seeds


# datasets 5.2.0 types ISO text as a timestamp, and decodes JSON-looking text
def test_text_that_looks_like_something_else_stays_text(tmp_path: Path) -> None:
    texts = {"created_at": "2026-01-02T03:04:05", "flag": "true", "number": "123", "object": '{"a": 1}'}
    for prompt in ("123", "true", '{"a": 1}'):
        seeds, _, _ = read(jsonl(tmp_path / "a.jsonl", line(prompt=prompt, **texts)))
        write_plan(tmp_path / "plan.jsonl", seeds)
        assert prompts(read_plan(tmp_path / "plan.jsonl")) == [prompt]
        assert seeds[0].extra == texts


def test_parquet_times_become_iso_text_and_decimals_text(tmp_path: Path) -> None:
    row = {
        "prompt": "hi",
        "domain": "chat",
        "at": datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
        "day": datetime.date(2026, 1, 2),
        "time": datetime.time(3, 4),
        "price": decimal.Decimal("1.10"),
        "tags": ["a", None],
    }
    seeds, _, _ = read(parquet(tmp_path / "a.parquet", [row]))
    assert seeds[0].extra == {
        "at": "2026-01-02T03:04:05+00:00",
        "day": "2026-01-02",
        "time": "03:04:00",
        "price": "1.10",
        "tags": ["a", None],
    }


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"raw", "field 'x' holds bytes, which JSON cannot; drop or convert it"),
        (float("nan"), "field 'x' holds nan, which is no JSON number"),
        (datetime.timedelta(1), "field 'x' holds timedelta, which JSON cannot; drop or convert it"),
    ],
)
def test_parquet_values_that_json_cannot_hold_put_their_row_in_quarantine(
    tmp_path: Path, value: Any, reason: str
) -> None:
    rows = [{"prompt": "a", "domain": "chat", "x": None}, {"prompt": "b", "domain": "chat", "x": value}]
    seeds, bad, _ = read(parquet(tmp_path / "a.parquet", rows))
    assert prompts(seeds) == ["a"]
    assert [(e["line"], e["byte_offset"], e["reason"]) for e in bad] == [(1, None, reason)]


def test_parquet_text_that_is_not_utf_8_puts_its_row_in_quarantine(tmp_path: Path) -> None:
    texts = _unchecked([b"a", b"\xff", b"c"])
    pq.write_table(pa.table({"prompt": texts, "domain": ["chat"] * 3}), tmp_path / "a.parquet")
    seeds, bad, _ = read(SeedSource(path=tmp_path / "a.parquet"))
    assert (prompts(seeds), [e["reason"] for e in bad]) == (["a", "c"], ["holds text that is not UTF-8"])


def _unchecked(values: list[bytes]) -> pa.Array:
    """A string array that Arrow has not checked."""
    array = pa.array(values)
    return pa.Array.from_buffers(pa.string(), len(array), array.buffers())


def test_parquet_nulls_in_messages_and_tools_are_absent_fields(tmp_path: Path) -> None:
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}},
        {"type": "function", "function": {"name": "g", "parameters": {"properties": {"b": {"type": "string"}}}}},
    ]
    messages = [*chat("user"), {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "5"}]
    seeds, _, _ = read(parquet(tmp_path / "a.parquet", [{"messages": messages, "tools": tools, "domain": "x"}]))
    assert seeds[0].tools == tuple(tools)
    assert seeds[0].messages == (
        {"role": "user", "content": "user 0"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "5"},
    )


# -------------------------------------------------------------------------------------------------- messages and tools


def test_a_conversation_that_ends_with_the_assistant_is_cut_before_its_last_turns_and_counted(tmp_path: Path) -> None:
    rows = [
        line(messages=chat("user", "assistant", "user", "assistant", "assistant")),
        line(messages=chat("system", "user")),
    ]
    seeds, bad, counts = read(jsonl(tmp_path / "a.jsonl", *rows))
    assert [[m["role"] for m in seed.messages] for seed in seeds] == [["user", "assistant", "user"], ["system", "user"]]
    assert (bad, counts["answers_cut"]) == ([], 1)


# huggingface/smol-course #260; modelscope/ms-swift #5831, unslothai/unsloth #334
@pytest.mark.parametrize(
    "roles",
    [
        ("user", "assistant", "user", "user"),
        ("user", "user"),
        ("assistant", "user"),
        ("user", "system", "user"),
        ("user", "tool"),
    ],
)
def test_uneven_roles_are_kept_as_they_are_and_counted(tmp_path: Path, roles: tuple[str, ...]) -> None:
    seeds, bad, counts = read(jsonl(tmp_path / "a.jsonl", line(messages=chat(*roles))))
    assert list(seeds[0].messages) == chat(*roles)
    assert (bad, counts["uneven_roles"]) == ([], 1)


@pytest.mark.parametrize(
    "roles",
    [("user",), ("system", "developer", "user"), ("user", "assistant", "user"), ("user", "assistant", "tool", "tool")],
)
def test_roles_in_turn_are_not_counted_as_uneven(tmp_path: Path, roles: tuple[str, ...]) -> None:
    assert read(jsonl(tmp_path / "a.jsonl", line(messages=chat(*roles))))[2]["uneven_roles"] == 0


# areal-project/AReaL #1501
@pytest.mark.parametrize(
    ("given_arguments", "kept", "odd"),
    [
        ({"a": 1, "b": "\u00e9"}, '{"a": 1, "b": "\u00e9"}', 0),
        ('{"a":1}', '{"a":1}', 0),
        ("[1]", "[1]", 1),
        ([1], "[1]", 1),
        ("null", "null", 1),
        ('{"a":', '{"a":', 1),
        ('{"a": NaN}', '{"a": NaN}', 1),
        (None, "", 1),
    ],
)
def test_tool_call_arguments_become_json_text_and_odd_ones_are_kept_and_counted(
    tmp_path: Path, given_arguments: Any, kept: str, odd: int
) -> None:
    call = {"id": 3, "function": {"name": "f", "arguments": given_arguments}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": 3, "content": "done"},
    ]
    seeds, bad, counts = read(jsonl(tmp_path / "a.jsonl", line(messages=messages)))
    assert bad == []
    assert seeds[0].messages[1:] == (
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "3", "type": "function", "function": {"name": "f", "arguments": kept}}],
        },
        {"role": "tool", "tool_call_id": "3", "content": "done"},
    )
    assert counts["arguments_not_an_object"] == odd


@pytest.mark.parametrize("call", ["f", {"name": "f"}, {"function": {"name": ""}}, {"function": None}])
def test_a_tool_call_without_a_function_name_is_unusable(tmp_path: Path, call: Any) -> None:
    messages = [*chat("user"), {"role": "assistant", "tool_calls": [call]}, *chat("tool")]
    _, bad, _ = read(jsonl(tmp_path / "a.jsonl", line(), line(messages=messages)))
    assert [entry["reason"] for entry in bad] == ["message 1: tool call 0 has no function with a name"]


# deepfabric #474
@pytest.mark.parametrize("as_text", [False, True])
def test_a_null_property_in_a_tool_schema_is_tolerated(tmp_path: Path, as_text: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": None}}}}]
    seeds, _, _ = read(jsonl(tmp_path / "a.jsonl", line(tools=json.dumps(tools) if as_text else tools)))
    assert seeds[0].tools == tuple(tools)


# NVIDIA-NeMo/Gym #1925
@pytest.mark.parametrize("tools", [[], "[]", "", " ", "null", None])
def test_empty_tools_are_no_tools(tmp_path: Path, tools: Any) -> None:
    assert read(jsonl(tmp_path / "a.jsonl", line(tools=tools)))[0][0].tools is None


# ---------------------------------------------------------------------------------------------------------------- ids


def test_identical_rows_are_two_seeds_and_an_unrelated_row_changes_no_id(tmp_path: Path) -> None:
    same, other = line(prompt="same"), line(prompt="other")
    before = [seed.seed_id for seed in read(jsonl(tmp_path / "a.jsonl", same, same))[0]]
    after = [seed.seed_id for seed in read(jsonl(tmp_path / "a.jsonl", other, same, b"{\n", same, other))[0]]
    assert after[1:3] == before
    assert len(set(after)) == 4
    assert all(len(seed_id) == 32 for seed_id in after)


def test_an_id_hangs_on_source_own_id_messages_and_tools_alone(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    variants: list[dict[str, Any]] = [{}, {"source": "s"}, {"id": 1}, {"prompt": "x"}, {"tools": tools}]
    ids = [read(jsonl(tmp_path / "a.jsonl", line(**fields)))[0][0].seed_id for fields in variants]
    assert len(set(ids)) == len(variants)
    for fields in ({"difficulty": 0.5}, {"note": "x"}, {"domain": "math"}, {"reference": 3}):
        assert read(jsonl(tmp_path / "a.jsonl", line(**fields)))[0][0].seed_id == ids[0]


def test_the_same_file_given_twice_and_repeated_attributes_get_ids_of_their_own(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", line())
    made = SeedSource(attributes=Attributes(count=3, axes={"a": {"x": 1}}, prompt="{{ a }}"), domain="chat")
    seeds, _, _ = read(source, source, made, made)
    assert len({seed.seed_id for seed in seeds}) == 8


def test_seeds_from_attributes_carry_their_values(tmp_path: Path) -> None:
    attributes = Attributes(
        count=1,
        axes={"topic": {"tea": 1}, "difficulty": {"hard": 1}},
        tables={"topic": {"tea": {"plant": "camellia"}}},
        prompt="{{ topic.plant }}",
        difficulty={"hard": 0.9},
    )
    seeds, _, _ = read(SeedSource(attributes=attributes, domain="chat", source="made", license="cc0-1.0"))
    found = seeds[0]
    assert found.messages == ({"role": "user", "content": "camellia"},)
    assert (found.domain, found.source, found.license, found.difficulty) == ("chat", "made", "cc0-1.0", 0.9)
    assert (found.extra, found.place) == ({"topic": "tea", "difficulty": "hard"}, "made row 0")


# ------------------------------------------------------------------------------------------------------------ the plan

TEXT = st.text(
    st.characters(exclude_categories=["Cs"]) | st.sampled_from("\u2028\u2029\u0085\f\n\U0001f600"), max_size=8
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=3)
SEEDS = st.builds(
    Seed,
    seed_id=TEXT,
    messages=st.lists(OBJECT, min_size=1, max_size=3).map(tuple),
    tools=st.none() | st.lists(OBJECT, min_size=1, max_size=2).map(tuple),
    domain=TEXT,
    source=TEXT,
    license=st.none() | TEXT,
    difficulty=st.none() | st.floats(0, 1),
    reference=JSON,
    verifier=st.none() | TEXT,
    extra=st.none() | OBJECT,
    place=TEXT,
)


@given(st.lists(SEEDS, max_size=4))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_plan_is_read_back_as_it_was_written(tmp_path: Path, seeds: list[Seed]) -> None:
    assert write_plan(tmp_path / "plan.jsonl", iter(seeds)) == len(seeds)
    assert list(read_plan(tmp_path / "plan.jsonl")) == seeds


def test_what_was_read_is_what_the_plan_gives_back(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": None}}}}]
    messages = [*chat("user"), {"role": "assistant", "content": None, "tool_calls": [CALL]}, *chat("tool")]
    rows = [line(x=[None, [{"y": None}]]), line(messages=messages, tools=tools, id=4, reference="1"), line()]
    seeds, _, _ = read(jsonl(tmp_path / "a.jsonl", *rows))
    write_plan(tmp_path / "plan.jsonl", seeds)
    assert list(read_plan(tmp_path / "plan.jsonl")) == seeds


# NVIDIA-NeMo/Gym #2313
def test_a_plan_is_written_into_folders_that_are_not_there_yet(tmp_path: Path) -> None:
    seeds, _, _ = read(jsonl(tmp_path / "a.jsonl", line()))
    assert write_plan(tmp_path / "x" / "y" / "plan.jsonl", seeds) == 1


def test_a_plan_that_fails_half_way_leaves_the_old_one_and_nothing_beside_it(tmp_path: Path) -> None:
    (found,) = read(jsonl(tmp_path / "a.jsonl", line()))[0]
    folder = tmp_path / "run"
    write_plan(folder / "plan.jsonl", [found, found])

    def failing() -> Iterator[Seed]:
        yield found
        raise InputError("no more")

    with pytest.raises(InputError, match="no more"):
        write_plan(folder / "plan.jsonl", failing())
    assert len(list(read_plan(folder / "plan.jsonl"))) == 2
    assert [path.name for path in folder.iterdir()] == ["plan.jsonl"]


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"messages": [], "tools": null, "other": 1}'])
def test_what_is_no_plan_is_said_with_its_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.jsonl").write_text(text + "\n")
    with pytest.raises(InputError, match=r"plan\.jsonl:1: no seed of this version"):
        list(read_plan(tmp_path / "plan.jsonl"))
    with pytest.raises(InputError, match="cannot be read"):
        list(read_plan(tmp_path / "missing.jsonl"))
