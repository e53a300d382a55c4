# ruff: noqa: RUF001 - full-width letters and punctuation are meant
"""Which rows hold test questions: all that do, in any layout, and none that share only what everybody says."""

import json
import random
import textwrap
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopdctl.errors import InputError
from mopdctl.gensft.decontaminate import Hit, report, scan, without_common
from mopdctl.gensft.question_index import Index, allowed_texts, build_index
from mopdctl.gensft.question_parts import Document, normalise

ALLOWED = allowed_texts()
VOCABULARY = [
    a + b + c for a in ("ba", "ce", "di", "fo", "gu") for b in ("la", "me", "ni", "ro", "tu") for c in "dklmnst"
]

GSM = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. "
    "How many clips did Natalia sell altogether in April and May?"
)
TEMPLATE = (
    "Answer the following multiple choice question about general knowledge, and think about it step by step "
    "before you give the letter of the right answer.\nQuestion: "
)
HAMLET = "To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer the slings and arrows of"


def speech(chance: random.Random, words: int) -> str:
    return " ".join(chance.choices(VOCABULARY, k=words)).capitalize() + "?"


def questions(count: int, *, words: int = 30, seed: int = 0) -> list[Document]:
    chance = random.Random(seed)
    return [Document("bench", f"q{i}", speech(chance, words)) for i in range(count)]


def index_of(*documents: Document, **options: int) -> Index:
    return build_index(documents, allow=ALLOWED, **options)


def hits(texts: list[str], index: Index, *, min_coverage: float = 0.5) -> list[Hit]:
    """The hits in one row."""
    return list(scan([(0, "row", texts)], index, min_coverage=min_coverage))


LAYOUTS: dict[str, Callable[[str], str]] = {
    "verbatim": str,
    # marin-community/marin #6852
    "wrapped at 40 columns": lambda text: textwrap.fill(text, 40),
    "embedded in a paragraph": lambda text: (
        f"As my teacher said the other day, {text} And nobody in the room knew why."
    ),
    "quoted": lambda text: "Somebody wrote:\n\n" + textwrap.indent(textwrap.fill(text, 50), "> ") + "\n\nIs it so?",
    "other case and punctuation": lambda text: "**" + text.upper().replace(" ", ", ", 3).replace("?", " !!") + "**",
    "one word a line": lambda text: "\r\n".join(text.split()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_planted_question_is_found_among_2000_rows_and_no_innocent_row_is(layout: str) -> None:
    chance = random.Random(1)
    documents = questions(60) + [Document("short", f"s{i}", speech(chance, 9)) for i in range(40)]
    index = build_index(documents, allow=ALLOWED)
    rows = [(i, f"row-{i}", [speech(chance, 40), speech(chance, 30)]) for i in range(2000)]
    planted = dict(zip(chance.sample(range(2000), len(documents)), documents, strict=True))
    for place, document in planted.items():
        rows[place][2][place % 2] = LAYOUTS[layout](document.text)
    found = list(scan(rows, index))
    assert [(hit.row, hit.row_id, hit.document_id) for hit in found] == [
        (place, f"row-{place}", planted[place].document_id) for place in sorted(planted)
    ]
    assert {hit.coverage for hit in found} == {1.0}
    assert all(hit.matched == normalise(planted[hit.row].text) for hit in found)
    assert all(hit.question == planted[hit.row].text[:200] for hit in found)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_row_that_contains_a_whole_indexed_question_is_always_found(data: st.DataObject) -> None:
    words = st.text(st.characters(categories=("L", "N", "P", "Z", "Cc")), min_size=1, max_size=8)
    text = " ".join(data.draw(st.lists(words, min_size=13, max_size=40)))
    index = build_index([Document("bench", "q", text), *questions(3)], allow=())
    if len(normalise(text).split()) >= 13:
        before, after = (" ".join(data.draw(st.lists(words, max_size=20))) for _ in range(2))
        row = f"{before} {text} {after}"
        assert ("q", 1.0) in [(hit.document_id, hit.coverage) for hit in hits(["innocent", row], index)]


@pytest.mark.parametrize("width", [20, 33, 40, 57])
def test_a_hyphen_at_the_end_of_a_line_may_or_may_not_belong_to_the_word(width: int) -> None:
    text = "A well-known mother-in-law sold twenty-one self-made pots to a half-blind merchant on his two-day trip"
    index = index_of(Document("bench", "q", text))
    assert hits([textwrap.fill(text, width)], index)[0].coverage == 1.0
    cut = text.replace("merchant", "mer-\n> chant").replace("known", "kno\u00ad\nwn")
    assert hits([cut], index)[0].coverage == 1.0


def test_words_are_folded_and_chinese_and_japanese_characters_are_words() -> None:
    assert normalise("Ｄｏｎ’t  STOP_now—\tÉtÉ,\u200b co\u00adop: 3.5km²!") == "don t stop now été coop 3 5km2"
    assert normalise("中国の首都is北京。") == "中 国 の 首 都 is 北 京"
    assert normalise("हिन्दी 한국어") == "हिन्दी 한국어"
    index = index_of(Document("bench", "q", "中国的首都是哪一座城市？请选择正确的答案。"))
    assert hits(["你好！中国的首都\n是哪一座城市?请选择正确的答案"], index)[0].coverage == 1.0
    assert not hits(["日本的首都是哪一个地方？请给出正确的解释。"], index)


def test_a_word_problem_with_one_other_number_is_a_hit_that_says_how_much_of_it_is_there() -> None:
    # What it teaches is how to solve the test; who wants only verbatim copies out asks for a coverage of 1.
    index = index_of(Document("gsm8k", "0", GSM))  # 31 words, the fifth is the number: 5 of 19 runs differ
    (hit,) = hits([GSM.replace("48", "52")], index)
    assert hit.coverage == pytest.approx(14 / 19)
    assert hit.matched == normalise(GSM.partition("48")[2])
    assert not hits([GSM.replace("48", "52")], index, min_coverage=1.0)
    short = index_of(Document("gsm8k", "1", "Tom has 3 apples and eats 2. What remains?"))
    assert hits(["Tom has 3 apples and eats 2. What remains?"], short)
    assert not hits(["Tom has 4 apples and eats 2. What remains?"], short)


def test_half_of_a_document_is_found_at_a_coverage_of_one_half() -> None:
    (document,) = questions(1, words=32)  # 20 runs of 13 words; the first 22 words are 10 of them
    index = index_of(document)
    half = " ".join(document.text.split()[:22])
    assert [(hit.coverage, hit.matched) for hit in hits([half], index)] == [(0.5, normalise(half))]
    assert not hits([half], index, min_coverage=0.51)
    assert not hits([" ".join(document.text.split()[:21])], index)
    pieces = [" ".join(document.text.split()[:16]), " ".join(document.text.split()[13:31])]
    assert [(hit.coverage, hit.matched) for hit in hits(pieces, index)] == [(0.5, normalise(pieces[1]))]


def test_what_a_benchmark_frames_its_questions_with_is_no_evidence_and_hides_none() -> None:
    chance = random.Random(2)
    bare = [speech(chance, 13 + i) for i in range(10)]
    documents = [Document("bench", str(i), f"{TEMPLATE}{text}\nLet us think.\nAnswer:") for i, text in enumerate(bare)]
    index = build_index(documents, allow=())
    assert not hits([f"{TEMPLATE}{speech(chance, 20)}\nLet us think.\nAnswer:"], index)
    assert [hits([text], index)[0].coverage for text in bare] == [1.0] * 10
    assert [hits([d.text], index)[0].document_id for d in documents] == [str(i) for i in range(10)]


def test_a_passage_with_many_questions_is_no_evidence_but_its_questions_are() -> None:
    chance = random.Random(3)
    passages = [speech(chance, 50) for _ in range(4)]
    documents = [Document("reading", f"{p}-{i}", passages[p] + speech(chance, 20)) for p in range(4) for i in range(5)]
    index = build_index(documents, allow=ALLOWED)
    assert not [hit for passage in passages for hit in hits([passage + speech(chance, 20)], index)]
    for document in documents:
        assert [hit.document_id for hit in hits([document.text], index)] == [document.document_id]
    assert report([], index)["benchmarks"]["reading"]["allowed_ngrams"] >= 4 * 38


@pytest.mark.parametrize("text", ALLOWED)
def test_an_instruction_or_quotation_that_everybody_uses_is_no_evidence(text: str) -> None:
    whole, part = Document("bench", "whole", text), Document("bench", "part", f"{text} Who wrote it in which year?")
    index = build_index([whole, part], allow=[text])
    assert not hits([f"My uncle says: {text} What did he mean by that?"], index)


def test_a_question_about_a_famous_quotation_is_found_by_its_own_words_alone() -> None:
    question = f'In which act and scene of the play does the prince of Denmark say the words "{HAMLET}"?'
    index = index_of(Document("bench", "q", question))
    assert hits([question], index)[0].coverage == 1.0
    assert not hits([f'Translate the words "{HAMLET}" into French.'], index)
    short = index_of(Document("bench", "q", f"Who said: {HAMLET}?"))  # all but two words are the quotation
    assert not hits([f"My neighbour said: {HAMLET}?"], short)
    assert report([], short)["benchmarks"]["bench"]["without_evidence"] == 1


def test_a_quotation_inside_a_long_question_is_no_hit_even_if_nobody_knows_it() -> None:
    chance = random.Random(4)
    quotation = speech(chance, 30)
    index = index_of(Document("bench", "q", f"{speech(chance, 40)} {quotation} {speech(chance, 40)}"))
    assert not hits([f"{speech(chance, 20)} {quotation} {speech(chance, 20)}"], index)


def test_texts_that_a_user_allows_come_from_files_a_paragraph_each(tmp_path: Path) -> None:
    chance = random.Random(5)
    motto, other = speech(chance, 20), speech(chance, 20)
    file = tmp_path / "ours.txt"
    file.write_text(f"\ufeff{textwrap.fill(motto, 30)}\n \n\n{other}\n", encoding="utf-8")
    texts = allowed_texts([file])
    assert len(texts) == len(ALLOWED) + 2
    documents = [Document("bench", "m", motto), Document("bench", "o", other), *questions(1)]
    assert [len(hits([motto, other], build_index(documents, allow=allow))) for allow in (texts, ALLOWED)] == [0, 2]
    file.write_text("The question is this:\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"ours.txt: 'The question is this:' has fewer than 6 words"):
        allowed_texts([file])


def test_what_many_prompts_of_the_data_set_share_is_no_evidence_but_a_leak_sampled_often_is() -> None:
    chance = random.Random(6)
    instruction, leaked, rare = speech(chance, 20), speech(chance, 30), speech(chance, 30)
    index = index_of(
        Document("a", "i", instruction),
        Document("a", "l", leaked),
        Document("b", "i", instruction + speech(chance, 30)),
    )
    rows = [(i, str(i), [f"{instruction} {speech(chance, 10)}", speech(chance, 20)]) for i in range(6)]
    rows += [(6 + i, str(6 + i), [leaked, speech(chance, 20)]) for i in range(50)]  # 50 samples of one prompt
    rows += [(56 + i, str(56 + i), [rare]) for i in range(3)]
    assert {hit.document_id for hit in scan(rows, index)} == {"i", "l"}
    common = without_common(rows, index, max_row_frequency=5)
    assert {hit.document_id for hit in scan(rows, common)} == {"l"}
    assert {hit.document_id for hit in scan(rows, without_common(rows, index, max_row_frequency=6))} == {"i", "l"}
    counts = report(scan(rows, common), common)["benchmarks"]
    # All 8 runs of the instruction; where it stands in a longer text, also those that lie mostly in it.
    assert (counts["a"]["common_ngrams"], counts["a"]["without_evidence"]) == (8, 1)
    assert (counts["b"]["common_ngrams"], counts["b"]["indexed"]) == (14, 1)
    assert (counts["a"]["documents_hit"], counts["a"]["rows_hit"]) == (1, 50)


@pytest.mark.parametrize(
    "choices",
    [
        "\nA. {}\nB. {}\nC. {}\nD. {}\nAnswer:",
        "\n\n(A) {} (B) {} (C) {} (D) {}",
        "\n  A) {}\n  B) {}\n  C) {}\n  D) {}",
    ],
)
def test_a_question_is_found_without_its_choices_and_apart_from_them(choices: str) -> None:
    chance = random.Random(7)
    stem, options = speech(chance, 8), choices.format(*(speech(chance, 15) for _ in range(4)))
    index = index_of(Document("mmlu", "0", stem + options))
    (hit,) = hits([f"Tell me, {stem}"], index)
    assert (hit.part, hit.coverage, hit.matched) == ("question without its choices", 1.0, normalise(stem))
    (hit,) = hits([stem, f"I choose among these: {options}"], index)
    assert hit.part == "question without its choices"
    (hit,) = hits([options], index)
    words = len(normalise(options).split())
    assert (hit.part, hit.coverage) == ("question", (words - 12) / (8 + words - 12))
    (hit,) = hits([stem + options], index)
    assert (hit.part, hit.coverage) == ("question", 1.0)


def test_a_long_answer_is_judged_by_itself_and_a_short_one_not_at_all() -> None:
    chance = random.Random(8)
    solution = speech(chance, 25)
    index = index_of(Document("bench", "long", speech(chance, 20), solution))
    assert [(hit.part, hit.coverage) for hit in hits(["A question in other words", solution], index)] == [
        ("answer", 1.0)
    ]
    short = index_of(Document("bench", "short", speech(chance, 20), "The cell is the unit of all life."))
    assert not hits(["The cell is the unit of all life."], short)


def test_a_document_counts_in_each_benchmark_that_has_it() -> None:
    (question,) = questions(1)
    index = index_of(question, Document("other", "7", question.text), Document("other", "8", question.text))
    found = hits([question.text], index)
    assert [(hit.benchmark, hit.document_id) for hit in found] == [("bench", "q0"), ("other", "7"), ("other", "8")]


def test_a_report_accounts_for_every_document_and_is_json() -> None:
    chance = random.Random(9)
    documents = [
        *questions(5),
        Document("bench", "tiny", "What is 2+2?"),
        Document("bench", "empty", " \n"),
        *(Document("sums", str(i), f"{i}+{i}=") for i in range(4)),
        *(Document("same", str(i), "Which of these is true, and which of these is false?") for i in range(4)),
    ]
    index = build_index(documents, allow=ALLOWED)
    row = (3, "r3", [documents[0].text, documents[1].text])
    rows = [row, (4, "r4", [speech(chance, 50)]), (5, "r5", [documents[0].text])]
    found = report(scan(rows, index), index)
    assert json.loads(json.dumps(found)) == {
        "rows_hit": 2,
        "benchmarks": {
            "bench": {
                "documents": 7,
                "indexed": 5,
                "too_short": 2,
                "without_evidence": 0,
                "allowed_ngrams": 0,
                "common_ngrams": 0,
                "documents_hit": 2,
                "rows_hit": 2,
            },
            "sums": {
                "documents": 4,
                "indexed": 0,
                "too_short": 4,
                "without_evidence": 0,
                "allowed_ngrams": 0,
                "common_ngrams": 0,
                "documents_hit": 0,
                "rows_hit": 0,
            },
            "same": {
                "documents": 4,
                "indexed": 0,
                "too_short": 0,
                "without_evidence": 4,
                "allowed_ngrams": 1,
                "common_ngrams": 0,
                "documents_hit": 0,
                "rows_hit": 0,
            },
        },
    }


def test_empty_rows_and_an_empty_index_find_nothing() -> None:
    odd: list[list[str]] = [[], [""], ["", " \n\t"], ["?!"], ["half a character: \ud83d, and six more words"]]
    rows = [(i, str(i), texts) for i, texts in enumerate(odd)]
    assert list(scan(rows, index_of(*questions(2)))) == []
    empty = build_index([], allow=())
    assert list(scan([*rows, (9, "9", [GSM])], empty)) == []
    assert list(scan([(9, "9", [GSM])], without_common(rows, empty))) == []
    assert report([], empty) == {"rows_hit": 0, "benchmarks": {}}
    assert report([], index_of(Document("none", "0", "")))["benchmarks"]["none"]["too_short"] == 1


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InputError, match=r"ngram: 5 words cannot be told from chance; use 6 or more"):
        index_of(ngram=5)
    with pytest.raises(InputError, match=r"max_document_frequency: 0 leaves no evidence"):
        index_of(max_document_frequency=0)
    for share in (0.0, 1.5, float("nan")):
        with pytest.raises(InputError, match=r"min_coverage: \S+ is no share"):
            scan([], index_of(), min_coverage=share)


def test_2000_questions_stay_under_4_mb_and_an_innocent_row_under_a_millisecond() -> None:
    chance = random.Random(10)
    words = [a + b for a in VOCABULARY for b in VOCABULARY[:40]]
    texts = [" ".join(chance.choices(words, k=60)) for _ in range(2000)]
    documents = (Document("bench", str(i), text) for i, text in enumerate(texts))
    tracemalloc.start()
    index = build_index(documents, allow=())
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held_bytes < 4e6
    rows = [(i, str(i), [" ".join(chance.choices(words, k=100))]) for i in range(300)]
    start = time.process_time()
    assert list(scan(rows, index)) == []
    assert (time.process_time() - start) / len(
        rows
    ) < 1e-3  # 0.13 ms against 100,000 questions; tests run on busy machines
