"""What judges replied survives the end of its writer at any byte."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from mopdctl.rl.judge_journal import OK, Entry, ReplyJournal

ENTRIES = [Entry("a" * 32, OK, '{"choices": ["\u2028\n\x85"]}'), Entry("b" * 32, "timeout", "null", "no answer")]


def written(path: Path, entries: list[Entry]) -> bytes:
    with ReplyJournal(path) as journal:
        for entry in entries:
            journal.add(entry)
    return path.read_bytes()


def test_a_journal_cut_anywhere_keeps_all_whole_entries_and_can_be_written_on(tmp_path: Path) -> None:
    # NousResearch/hermes-agent #112575: the next row was glued to the torn one
    path = tmp_path / "deep" / "step.jsonl"
    whole = written(path, ENTRIES)
    first = whole.index(b"\n") + 1
    later = Entry("c" * 32, OK, "{}")
    for size in {*range(0, len(whole), 9), first - 2, first - 1, first, first + 1, len(whole) - 1}:
        path.write_bytes(whole[:size])
        with ReplyJournal(path) as journal:
            assert journal.get("a" * 32) == (ENTRIES[0] if size >= first else None)
            assert journal.get("b" * 32) is None
            assert len(journal.notes) == (size not in (0, first))
            journal.add(later)
        with ReplyJournal(path) as journal:
            assert journal.get(later.key) == later
            assert journal.notes == []


def test_of_two_entries_the_later_one_counts(tmp_path: Path) -> None:
    answered = Entry("b" * 32, OK, "{}")
    written(tmp_path / "j", [*ENTRIES, answered])
    with ReplyJournal(tmp_path / "j") as journal:
        assert journal.get("b" * 32) == answered
        assert journal.get("a" * 32) == ENTRIES[0]


def test_a_line_that_was_changed_is_no_entry(tmp_path: Path) -> None:
    # PrimeIntellect-ai/verifiers #1564: a bad line anywhere broke the resume
    whole = written(tmp_path / "j", ENTRIES)
    (tmp_path / "j").write_bytes(whole.replace(b"choices", b"chances") + b'{"crc": "00000000", "entry": {}}\n7\n\xff\n')
    with ReplyJournal(tmp_path / "j") as journal:
        assert journal.get("a" * 32) is None
        assert journal.get("b" * 32) == ENTRIES[1]
        assert journal.notes == [f"{tmp_path / 'j'}: 4 lines cannot be read; what they held is asked for again"]


@given(st.text(st.characters(codec="utf-8")), st.text())
def test_any_text_is_one_line(raw: str, detail: str) -> None:
    line = Entry("k", OK, raw, detail).line()
    assert line.count(b"\n") == 1
    assert line.isascii()
