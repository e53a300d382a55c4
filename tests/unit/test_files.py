import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopdctl.errors import InputError, MopdctlError
from mopdctl.files import (
    digest,
    dump_json,
    file_digest,
    fingerprint,
    read_json,
    read_jsonl,
    read_text,
    write_json,
    write_jsonl,
    write_text,
    writing,
)

# Writes two long texts in turn for as long as it lives.
WRITER = """
import sys
from pathlib import Path
from mopdctl.files import write_text
path = Path(sys.argv[1])
write_text(path, "a" * 200_000)
print("ready", flush=True)
while True:
    write_text(path, "b" * 300_000)
    write_text(path, "a" * 200_000)
"""


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    for pause_s in (0.0, 0.011, 0.027):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        until = time.monotonic() + 0.05
        while time.monotonic() < until:
            assert path.read_text() in ("a" * 200_000, "b" * 300_000)
        time.sleep(pause_s)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        assert path.read_text() in ("a" * 200_000, "b" * 300_000)


def test_writing_replaces_the_old_text_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file.txt"
    write_text(path, "one, and longer than two")
    write_text(path, "two")
    assert path.read_bytes() == b"two"
    assert [p.name for p in path.parent.iterdir()] == ["file.txt"]


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_json(path, {"a": 1})
    before = path.read_bytes()
    for broken in ({"a": float("nan")}, {"a": {1, 2}}):
        with pytest.raises((ValueError, TypeError)):
            write_json(path, broken)
        with pytest.raises((ValueError, TypeError)):
            write_jsonl(path, [{"fine": 1}, broken])
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half a surrogate pair \ud800")
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"]


def file_as_folder(folder: Path) -> Path:
    (folder / "file").write_text("kept")
    return folder / "file" / "below" / "rows.jsonl"


def folder_as_file(folder: Path) -> Path:
    (folder / "rows.jsonl").mkdir()
    return folder / "rows.jsonl"


def unwritable(folder: Path) -> Path:
    if os.geteuid() == 0:
        return Path("/proc/nothing/rows.jsonl")  # a folder in which the superuser makes nothing either
    (folder / "closed").mkdir(mode=0o500)
    return folder / "closed" / "rows.jsonl"


def too_long(folder: Path) -> Path:
    return folder / ("x" * 300 + ".jsonl")


@pytest.mark.parametrize("place", [file_as_folder, folder_as_file, unwritable, too_long])
def test_a_place_where_no_file_can_be_is_an_input_error_before_any_row_is_made(
    tmp_path: Path, place: Callable[[Path], Path]
) -> None:
    path = place(tmp_path)
    before = set(tmp_path.rglob("*"))
    made = []

    def rows() -> Iterator[dict[str, Any]]:
        made.append(1)
        yield {}

    writes: list[Callable[[], None]] = [
        lambda: write_jsonl(path, rows()),
        lambda: write_json(path, {}),
        lambda: write_text(path, "text"),
    ]
    for write in writes:
        with pytest.raises(InputError, match=r"cannot be written|is a folder") as caught:
            write()
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not made
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("size", [100, 1_000_000])
def test_a_file_beyond_a_limit_of_size_is_an_input_error_and_the_old_one_stays(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, hard))
    try:
        with pytest.raises(InputError, match=r"file: the disk is full or a size limit is reached"):
            write_text(path, "x" * size)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_device_is_told_and_is_not_the_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(MopdctlError, match=r"file: cannot be written \(Input/output error\)") as caught:
        write_text(tmp_path / "file", "x")
    assert not isinstance(caught.value, InputError)
    assert list(tmp_path.iterdir()) == []


def test_what_fails_with_another_file_while_one_is_written_is_not_said_of_that_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), writing(tmp_path / "file"):
        (tmp_path / "other").read_bytes()
    assert list(tmp_path.iterdir()) == []


def test_line_ends_are_written_and_read_as_they_are(tmp_path: Path) -> None:
    text = "a\nb\r\nc\rd\u2028e\x85f\x0b\n"
    write_text(tmp_path / "file", text)
    assert (tmp_path / "file").read_bytes() == text.encode()
    assert read_text(tmp_path / "file") == text


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "text"
    write_text(path, "\ufeff" + text)
    assert read_text(path) == text
    if not text.startswith("\ufeff"):
        write_text(path, text)
        assert read_text(path) == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@given(
    st.lists(
        st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=5), st.text('a\u2028\x85\n\r\\"'), max_size=3
        )
    )
)
def test_jsonl_rows_come_back_in_order(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, str]]) -> None:
    path = tmp_path_factory.getbasetemp() / "rows.jsonl"
    write_jsonl(path, rows)
    assert list(read_jsonl(path)) == list(enumerate(rows, start=1))


def test_json_is_written_in_the_order_given_and_unescaped(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"z": "\u00e9\u2028", "a": [1e-4, None]})
    assert (tmp_path / "a.json").read_text(
        "utf-8"
    ) == '{\n  "z": "\u00e9\u2028",\n  "a": [\n    0.0001,\n    null\n  ]\n}\n'
    assert read_json(tmp_path / "a.json") == {"z": "\u00e9\u2028", "a": [1e-4, None]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        dump_json(float("nan"))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"{", r"a\.json:1:2: not JSON"),
        (b'{"a": 1,\n "b": x}', r"a\.json:2:7: not JSON"),
        (b"", r"a\.json:1:1: not JSON"),
        (b"\xff", r"a\.json: not UTF-8 at byte 0"),
        (b'{"a": "\xe9"}', r"a\.json: not UTF-8 at byte 7"),
        (b"1" * 5000, r"a\.json.*: not JSON"),
        (b"[" * 100_000, r"a\.json.*: not JSON"),
    ],
    ids=["torn", "bad value", "empty", "no text", "latin 1", "number too long", "nested too deep"],
)
def test_what_is_no_json_is_named_with_its_place(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(InputError, match=complaint):
        read_json(tmp_path / "a.json")


def test_a_missing_file_and_a_folder_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none: no such file"):
        read_text(tmp_path / "none")
    with pytest.raises(InputError, match="is a folder"):
        read_text(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="file/below"):
        read_text(tmp_path / "file" / "below")


@settings(max_examples=40)
@given(st.dictionaries(st.text(max_size=5), JSON, max_size=5))
def test_a_fingerprint_depends_on_content_and_not_on_the_order_of_keys(document: dict[str, Any]) -> None:
    try:
        known = fingerprint(document)
    except UnicodeEncodeError:
        return  # half a surrogate pair is no text
    assert fingerprint(dict(reversed(document.items()))) == known
    assert fingerprint(json.loads(json.dumps(document))) == known
    assert fingerprint({**document, "another key": 1}) != known


def test_fingerprints_tell_types_apart() -> None:
    documents: list[Any] = [1, 1.0, True, "1", [1], {"1": 1}, None, "null", [], {}]
    assert len({fingerprint(d) for d in documents}) == len(documents)


def test_digests_are_fixed_for_ever() -> None:
    assert digest("") == "cae66941d9efbd404e4d88758ea67670"  # BLAKE2b-128 of nothing
    assert digest("caf\u00e9") == digest("caf\u00e9".encode())


def test_the_digest_of_a_file_is_that_of_its_bytes_across_pieces(tmp_path: Path) -> None:
    content = bytes(range(256)) * 4096 + b"tail"  # a piece of 1 MiB and a rest
    (tmp_path / "f").write_bytes(content)
    assert file_digest(tmp_path / "f") == digest(content)
    (tmp_path / "f").write_bytes(content[:-1] + b"x")
    assert file_digest(tmp_path / "f") != digest(content)
