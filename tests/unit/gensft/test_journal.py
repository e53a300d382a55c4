"""The journal: what is in it survives, what is torn is cut and said, and nothing is asked for twice."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopdctl.errors import InputError
from mopdctl.files import digest
from mopdctl.gensft.journal import Journal, _Offsets

KEYS = [digest(str(i)) for i in range(50)]


def fill(path: Path, keys: list[str], state: str = "ok") -> None:
    journal = Journal(path)
    for key in keys:
        journal.sent(key)
        journal.add(key, state, attempt=1, latency_s=0.5, member="a", raw=b'{"text": "%s"}' % key.encode())
    journal.close()


def test_what_was_added_is_there_after_opening_again(tmp_path: Path) -> None:
    fill(tmp_path / "j", KEYS)
    journal = Journal(tmp_path / "j")
    assert len(journal) == 50
    assert journal.notes == []
    assert journal.calls == 0
    for key in KEYS:
        assert journal.state(key) == "ok"
        line = journal.get(key)
        assert line is not None
        assert line["r"] == {"text": key}
        assert (line["m"], line["a"], line["d"]) == ("a", 1, 0.5)
    assert journal.state(digest("another")) is None
    assert journal.get(digest("another")) is None


def test_tries_that_failed_are_kept_and_answer_nothing(tmp_path: Path) -> None:
    fill(tmp_path / "j", KEYS[:1], "rate_limited")
    fill(tmp_path / "j", KEYS[1:2], "rejected")
    journal = Journal(tmp_path / "j")
    assert journal.state(KEYS[0]) is None
    assert journal.state(KEYS[1]) == "rejected"
    assert [line["s"] for line in journal.entries()] == ["sent", "rate_limited", "sent", "rejected"]


# NousResearch/hermes-agent #112575, NVIDIA-NeMo/Skills generate.py: a torn line glued to the next, or crashing resume
def test_a_line_cut_at_any_byte_is_removed_and_the_next_one_is_whole(tmp_path: Path) -> None:
    fill(tmp_path / "whole", KEYS[:3])
    whole = (tmp_path / "whole").read_bytes()
    start = whole.rindex(b"\n", 0, len(whole) - 1) + 1
    for end in [start + 1, start + 7, *range(start + 8, len(whole), 11), len(whole) - 1]:
        path = tmp_path / "torn"
        path.write_bytes(whole[:end])
        journal = Journal(path)
        assert f"{end - start} bytes removed" in journal.notes[0]
        assert "1 requests were on their way" in journal.notes[1]
        assert journal.state(KEYS[2]) is None
        journal.add(KEYS[2], "ok", attempt=2, latency_s=0, member="a", raw=b"{}")
        journal.close()
        again = Journal(path)
        assert [again.state(key) for key in KEYS[:3]] == ["ok"] * 3
        assert again.notes == []
        again.close()


# PrimeIntellect-ai/verifiers #1564: a malformed line anywhere broke resume
@pytest.mark.parametrize("damage", [b"garbage\n", b'{"k":"zz","c":"00000000","s":"ok"}\n', b"\n", b"\xff\xfe\n"])
def test_a_bad_line_in_the_middle_is_passed_over_and_counted(tmp_path: Path, damage: bytes) -> None:
    fill(tmp_path / "j", KEYS[:4])
    lines = (tmp_path / "j").read_bytes().splitlines(keepends=True)
    (tmp_path / "j").write_bytes(b"".join([*lines[:4], damage, *lines[4:]]))
    journal = Journal(tmp_path / "j")
    assert "1 lines cannot be read" in journal.notes[0]
    assert [journal.state(key) for key in KEYS[:4]] == ["ok"] * 4


def test_a_flipped_byte_in_an_answer_makes_it_asked_for_again(tmp_path: Path) -> None:
    fill(tmp_path / "j", KEYS[:2])
    data = bytearray((tmp_path / "j").read_bytes())
    data[data.rindex(b'"text"') + 2] ^= 1
    (tmp_path / "j").write_bytes(data)
    journal = Journal(tmp_path / "j")
    assert journal.state(KEYS[0]) == "ok"
    assert journal.state(KEYS[1]) is None


# PrimeIntellect-ai/verifiers #1644: splitlines also splits at U+2028, U+0085 and form feed
@given(st.text(min_size=1))
def test_any_text_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    path = tmp_path_factory.mktemp("journal") / "j"
    journal = Journal(path)
    for ascii_only in (True, False):
        key = digest(f"{ascii_only}")
        pretty = json.dumps({"text": f"\u2028\u0085\f{text}"}, ensure_ascii=ascii_only, indent=2).encode()
        journal.add(key, "ok", attempt=1, latency_s=0, member="a", raw=pretty.replace(b"\n", b"\r\n"))
    journal.close()
    journal = Journal(path)
    for ascii_only in (True, False):
        line = journal.get(digest(f"{ascii_only}"))
        assert line is not None
        assert line["r"]["text"] == f"\u2028\u0085\f{text}"
    journal.close()


def test_answers_of_another_run_are_taken_over_once(tmp_path: Path) -> None:
    fill(tmp_path / "old", KEYS[:3])
    journal = Journal(tmp_path / "new", reuse=[tmp_path / "old"])
    assert journal.state(KEYS[1]) == "ok"
    assert len(journal) == 0
    assert (journal.get(KEYS[1]) or {})["r"] == {"text": KEYS[1]}
    assert (journal.get(KEYS[1]) or {})["r"] == {"text": KEYS[1]}
    assert len(journal) == 1
    journal.close()
    alone = Journal(tmp_path / "new")
    assert alone.state(KEYS[1]) == "ok"
    assert alone.state(KEYS[2]) is None
    assert len(list(alone.entries())) == 1


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    import resource
    import signal

    path = tmp_path / "j"
    fill(path, KEYS[:2])
    size = path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    journal = Journal(path)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, limits[1]))
        with pytest.raises(InputError, match="cannot be written"):
            journal.add(KEYS[3], "ok", attempt=1, latency_s=0, member="a", raw=b'"' + b"x" * 500 + b'"')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.stat().st_size == size


def test_the_map_finds_every_key_through_its_merges() -> None:
    found = _Offsets()
    keys = [bytes.fromhex(digest(str(i))) for i in range(10_000)]
    for number, key in enumerate(keys):
        found[key] = number
    assert len(found) == 10_000
    assert [found.get(key) for key in keys] == list(range(10_000))
    assert found.get(bytes.fromhex(digest("another"))) is None
