import math
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopdctl.errors import InputError
from mopdctl.gensft.dedup import Duplicates, Pair, find_duplicates
from mopdctl.gensft.signatures import SignatureWriter, jaccard, normalised, shingles, text_digest

GERMAN = (
    "Die Straße über den Fluss wurde im Jahr 1901 gebaut, und seither fahren dort täglich viele Züge nach Süden; "
    "im Winter liegt oft Schnee auf den Gleisen, weshalb die Bahn früh am Morgen einen Räumdienst schickt."
)
CHINESE = "水在一个标准大气压下加热到一百摄氏度就会沸腾，变成水蒸气，而在零摄氏度以下会结成冰，体积也随之变大。"  # noqa: RUF001
CODE = """\
def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("no values")
    total = 0.0
    for value in values:
        total += value
    return total / len(values)
"""


def find(
    folder: Path,
    texts: Sequence[str],
    *,
    scores: Sequence[float] | None = None,
    threshold: float | None = 0.7,
    prior: int = 0,
    text_of: Callable[[int], str] | None = None,
) -> Duplicates:
    with SignatureWriter(folder) as writer:
        for text in texts:
            writer.add(text)
    array = np.full(len(texts), np.nan) if scores is None else np.array(scores, dtype=np.float64)
    return find_duplicates(folder, text_of or texts.__getitem__, scores=array, threshold=threshold, prior=prior)


def counted(texts: Sequence[str], calls: list[int]) -> Callable[[int], str]:
    def text_of(row: int) -> str:
        calls.append(row)
        return texts[row]

    return text_of


def zipf_texts(rng: np.random.Generator, count: int, *, shortest: int = 40, longest: int = 200) -> list[list[str]]:
    share = np.cumsum(1 / np.arange(1, 20_001))
    lengths = rng.integers(shortest, longest + 1, count)
    words = np.searchsorted(share / share[-1], rng.random(int(lengths.sum())))
    return [[f"w{word}" for word in part] for part in np.split(words, np.cumsum(lengths)[:-1])]


def edited(rng: np.random.Generator, words: Sequence[str]) -> str:
    """A copy with single words replaced until the similarity to the original lies within 0.8 and 0.9."""
    original = shingles(" ".join(words))
    while True:
        copy = list(words)
        for position in rng.permutation(len(words)).tolist():
            copy[position] = f"x{rng.integers(1 << 40)}"
            similarity = jaccard(original, shingles(" ".join(copy)))
            if similarity <= 0.9:
                break
        if similarity >= 0.8:
            return " ".join(copy)


def planted(seed: int, count: int, copies: int) -> tuple[list[str], set[tuple[int, int]]]:
    """Texts in random order, and the pairs (earlier row, later row) of an original and its edited copy."""
    rng = np.random.default_rng(seed)
    originals = zipf_texts(rng, count - copies)
    source = rng.choice(count - copies, copies, replace=False).tolist()
    texts = [" ".join(words) for words in originals] + [edited(rng, originals[row]) for row in source]
    order = rng.permutation(count)
    place = np.argsort(order).tolist()
    pairs = {(place[row], place[count - copies + copy]) for copy, row in enumerate(source)}
    return [texts[row] for row in order], {(min(pair), max(pair)) for pair in pairs}


def found_pairs(result: Duplicates) -> set[tuple[int, int]]:
    return {(min(pair.row, pair.alike), max(pair.row, pair.alike)) for pair in result.pairs()}


# ------------------------------------------------------------------------------------------------- words and shingles


def test_case_width_and_whitespace_do_not_make_a_text_different() -> None:
    assert normalised("  The\u00a0STRASSE\n\t\uff4e\uff4f. \u2460  ") == "the strasse no. 1"
    assert text_digest("Straße  1") == text_digest("STRASSE 1")
    assert text_digest("a") != text_digest("b")
    assert len(text_digest("a")) == 32


@given(st.text())
def test_composed_and_decomposed_forms_of_a_text_are_one(text: str) -> None:
    assert normalised(unicodedata.normalize("NFD", text)) == normalised(unicodedata.normalize("NFC", text))


def test_half_a_character_has_a_digest_and_shingles() -> None:
    assert text_digest("\ud83d") != text_digest("\ud83e")
    assert len(shingles("one two \ud83d")) == 1


def test_shingles_are_sorted_runs_of_three_words_each_once() -> None:
    found = shingles("a b c a b c a")
    assert len(found) == 3  # abc, bca, cab
    assert (np.diff(found.astype(object)) > 0).all()
    assert set(shingles("B c, a!").tolist()) < set(found.tolist())
    assert len(shingles("a b c d", words=2)) == 3


def test_the_order_of_words_matters() -> None:
    assert len({int(shingles(text)[0]) for text in ("a b c", "a c b", "b a c", "b c a", "c a b", "c b a")}) == 6


def test_sentence_punctuation_does_not_count_and_operators_do() -> None:
    assert shingles("“Yes,” he said: go now.").tolist() == shingles('"yes" he said go now').tolist()
    texts = ["what is 3 + 4", "what is 3 - 4", "what is 3 * 4", "what is 3 / 4", "what is 3 (4", "what is 3 \u00d7 4"]
    assert len({tuple(shingles(text).tolist()) for text in texts}) == len(texts)


def test_each_character_of_an_unspaced_script_is_a_word() -> None:
    assert len(shingles("水在一百度沸腾")) == 5
    assert len(shingles("みずはひゃくどで沸騰する")) == 10
    assert len(shingles("한국어는 띄어쓰기가 있다")) == 1


@given(st.text(st.characters(max_codepoint=127)))
def test_ascii_words_are_the_same_within_a_text_that_is_not_ascii(text: str) -> None:
    alone, beside = shingles(text, words=1), shingles(text + " é", words=1)
    if any(character.isalnum() for character in text):
        assert set(beside.tolist()) == set(alone.tolist()) | set(shingles("é", words=1).tolist())


# data-juicer/data-juicer #1051, OpenDCAI/DataFlow #526
def test_a_short_text_is_a_duplicate_only_of_itself(tmp_path: Path) -> None:
    result = find(tmp_path, ["cat", "dog", "cat"])
    assert result.root.tolist() == [0, 1, 0]
    assert result.keep.tolist() == [True, True, False]
    assert (result.exact, result.near, result.against) == (1, 0, 0)
    assert list(result.pairs()) == [Pair(row=2, kept=0, alike=0, similarity=1.0)]


# data-juicer/data-juicer #1051, OpenDCAI/DataFlow #526
def test_texts_without_words_do_not_fall_together(tmp_path: Path) -> None:
    texts = ["", "   ", "!", "?", "...", "?!", "😀", "😀😀", "cat dog", "cat, dog", "。"]
    assert find(tmp_path, texts).root.tolist() == [0, 0, 2, 3, 4, 5, 6, 7, 8, 9, 10]


# ------------------------------------------------------------------------------------------------------------- groups


def chain(links: int = 3, *, length: int = 60, step: int = 3) -> list[str]:
    """Each text is alike to the next; the first and the last of three are not."""
    words = [f"word{number}" for number in range(length + links * step)]
    return [" ".join(words[link * step : link * step + length]) for link in range(links)]


# data-juicer/data-juicer #906
def test_a_chain_of_duplicates_is_one_group_and_keeps_its_best(tmp_path: Path) -> None:
    texts = chain(step=6)
    first, second, third = (shingles(text) for text in texts)
    assert min(jaccard(first, second), jaccard(second, third)) >= 0.7 > jaccard(first, third)
    result = find(tmp_path, texts, scores=[0.2, 0.1, 0.9])
    assert result.root.tolist() == [2, 2, 2]
    assert result.keep.tolist() == [False, False, True]
    assert (result.exact, result.near, result.against) == (0, 2, 0)
    assert {(pair.row, pair.kept, pair.alike) for pair in result.pairs()} <= {(0, 2, 1), (1, 2, 0), (1, 2, 2)}


# data-juicer/data-juicer #906
def test_long_chains_are_found_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    texts, owner = [], []
    for number in range(50):
        texts += [f"c{number} ".join(["", *text.split()]) for text in chain(12)]
        owner += [number] * 12
    order = rng.permutation(len(texts))
    result = find(tmp_path, [texts[row] for row in order])
    groups: dict[int, set[int]] = {}
    for row, root in zip(order.tolist(), result.root.tolist(), strict=True):
        groups.setdefault(root, set()).add(owner[row])
    assert all(len(owners) == 1 for owners in groups.values())
    assert len(groups) == 50


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ([math.nan, math.nan, math.nan], 0),
        ([math.nan, -5.0, math.nan], 1),
        ([0.5, 0.5, 0.5], 0),
        ([0.1, 0.7, 0.7], 1),
        ([math.nan, -math.inf, math.nan], 1),
    ],
)
def test_the_best_score_is_kept_and_the_first_row_wins_a_tie(tmp_path: Path, scores: list[float], kept: int) -> None:
    result = find(tmp_path, ["same text", "Same text", "same  text"], scores=scores)
    assert np.flatnonzero(result.keep).tolist() == [kept]
    assert result.root.tolist() == [kept] * 3
    assert result.exact == 2
    assert {(pair.alike, pair.similarity) for pair in result.pairs()} == {(kept, 1.0)}


def test_a_copy_of_a_row_that_is_like_the_kept_one_counts_as_near(tmp_path: Path) -> None:
    left, right, _ = chain()
    result = find(tmp_path, [left, right, right, left], scores=[0, 0, 0, 1])
    similarity = jaccard(shingles(left), shingles(right))
    assert list(result.pairs()) == [Pair(0, 3, 3, 1.0), Pair(1, 3, 3, similarity), Pair(2, 3, 3, similarity)]
    assert (result.exact, result.near, result.against) == (1, 2, 0)


def test_a_group_with_a_prior_row_keeps_no_new_row(tmp_path: Path) -> None:
    left, right, _ = chain()
    other = " ".join(f"other{number}" for number in range(40))
    texts = [left, "prior alone", right, left, other, "prior alone", other]
    result = find(tmp_path, texts, prior=2, scores=[math.nan, math.nan, 9, 9, 1, 9, 2])
    assert result.keep.tolist() == [False, False, False, False, False, False, True]
    assert result.root.tolist() == [0, 1, 0, 0, 6, 1, 6]
    assert (result.exact, result.near, result.against) == (1, 0, 3)
    assert [(pair.row, pair.kept, pair.alike) for pair in result.pairs()] == [
        (2, 0, 0),
        (3, 0, 0),
        (4, 6, 6),
        (5, 1, 1),
    ]


def test_a_copy_of_a_prior_row_names_that_row(tmp_path: Path) -> None:
    left, right, _ = chain()
    result = find(tmp_path, [left, right, right, left + " x y z"], prior=2)
    assert result.against == 2
    pairs = {pair.row: pair for pair in result.pairs()}
    assert (pairs[2].alike, pairs[2].similarity) == (1, 1.0)


def test_prior_rows_are_not_compared_with_each_other(tmp_path: Path) -> None:
    calls: list[int] = []
    texts = chain(8)
    result = find(tmp_path, texts, prior=8, text_of=counted(texts, calls))
    assert result.root.tolist() == list(range(8))
    assert not result.keep.any()
    assert list(result.pairs()) == []
    assert calls == []


@pytest.mark.parametrize("text", [GERMAN, CHINESE, CODE], ids=["german", "chinese", "code"])
def test_an_edit_in_any_language_is_found_and_a_rewrite_is_not(tmp_path: Path, text: str) -> None:
    texts = [text, text[:-6], text[3:], text[::-1]]
    result = find(tmp_path, texts)
    assert result.root.tolist() == [0, 0, 0, 3]


def test_emoji_tell_texts_apart(tmp_path: Path) -> None:
    sequences = [" ".join(chr(0x1F600 + start + number) for number in range(12)) for start in (0, 12, 24)]
    families = "\U0001f468\u200d\U0001f469 and \U0001f469\u200d\U0001f469 are two"
    texts = [*sequences, sequences[0] + " !", families, families.replace("\U0001f468", "\U0001f469")]
    assert find(tmp_path, texts).root.tolist() == [0, 1, 2, 0, 4, 5]


# ---------------------------------------------------------------------------------------------- quality at some scale


def check_recall_and_precision(folder: Path, count: int, copies: int) -> None:
    texts, truth = planted(1, count, copies)
    found = found_pairs(find(folder, texts))
    assert len(found & truth) >= 0.95 * len(truth)
    assert len(found & truth) >= 0.98 * len(found)


def test_edited_copies_are_found_among_other_texts(tmp_path: Path) -> None:
    check_recall_and_precision(tmp_path, 2_000, 200)


@pytest.mark.slow
def test_500_edited_copies_are_found_among_20000_texts(tmp_path: Path) -> None:
    check_recall_and_precision(tmp_path, 20_000, 500)


def with_template(count: int, *, length: int) -> tuple[list[str], set[tuple[int, int]]]:
    """Texts that begin with the same 30 words, the last of them alike to the first."""
    rng = np.random.default_rng(2)
    template = " ".join(f"template{number}" for number in range(30))
    texts = [f"{template} {' '.join(words)}" for words in zipf_texts(rng, count, shortest=length, longest=length)]
    copies = {(row, count + row) for row in range(count // 20)}
    return texts + [texts[row] + f" more{row}" for row, _ in sorted(copies)], copies


def test_a_shared_template_does_not_make_texts_alike(tmp_path: Path) -> None:
    texts, copies = with_template(2_000, length=60)
    calls: list[int] = []
    assert found_pairs(find(tmp_path, texts, text_of=counted(texts, calls))) == copies
    assert len(calls) < 3 * len(copies)


# Half of each text is the template, so that a tenth of the corpus shares a bucket and all look a little alike.
def test_work_grows_with_rows_and_not_with_their_square(tmp_path: Path) -> None:
    calls: dict[int, list[int]] = {1_000: [], 2_000: []}
    for count, made in calls.items():
        texts, copies = with_template(count, length=18)
        found = found_pairs(find(tmp_path, texts, text_of=counted(texts, made)))
        assert copies <= found
    assert len(calls[2_000]) < 3 * len(calls[1_000])
    assert len(calls[2_000]) < 2 * 2_000


def test_a_bucket_of_all_rows_is_not_compared_pair_by_pair(tmp_path: Path) -> None:
    texts = [f"{' '.join(f'w{number}' for number in range(40))} end{row}" for row in range(2_000)]
    calls: list[int] = []
    result = find(tmp_path, texts, text_of=counted(texts, calls))
    assert result.near == 1_999
    assert len(calls) < 3 * len(texts)


# ------------------------------------------------------------------------------------------------- contracts of files


def test_two_runs_give_the_same_files_and_the_same_result(tmp_path: Path) -> None:
    texts = [*chain(6), "cat", "cat", GERMAN, GERMAN[:-6]]
    results = [find(tmp_path / name, texts) for name in "ab"]
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "ab"]
    assert files[0] == files[1]
    assert {name: len(data) for name, data in files[0].items() if not name.startswith("band")} == {
        "signatures.u32": 480 * len(texts),
        "exact.bin": 16 * len(texts),
    }
    assert list(results[0].pairs()) == list(results[1].pairs())


def test_signatures_are_the_same_on_every_machine(tmp_path: Path) -> None:
    find(tmp_path, [GERMAN])
    assert text_digest(GERMAN) == (tmp_path / "exact.bin").read_bytes().hex()
    assert np.fromfile(tmp_path / "signatures.u32", "<u4")[[0, 119]].tolist() == [157577363, 25500398]
    assert np.fromfile(tmp_path / "band-00.u64", "<u8").tolist() == [720355337251765387]


def test_equal_minima_estimate_the_similarity(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    texts = [text for words in zipf_texts(rng, 300) for text in (" ".join(words), edited(rng, words))]
    find(tmp_path, texts)
    signatures = np.fromfile(tmp_path / "signatures.u32", "<u4").reshape(-1, 2, 120)
    estimates = (signatures[:, 0] == signatures[:, 1]).mean(axis=1)
    exact = np.array([jaccard(shingles(a), shingles(b)) for a, b in zip(texts[::2], texts[1::2], strict=True)])
    errors = (estimates - exact) / np.sqrt(exact * (1 - exact) / 120)
    assert abs(errors.mean()) < 0.25
    assert 0.85 < errors.std() < 1.15


def test_more_rows_than_the_buffer_arrive_in_order(tmp_path: Path) -> None:
    texts = [f"row number {row % 2_000} of many" for row in range(2_500)]
    result = find(tmp_path, texts, threshold=1)
    assert result.exact == 500
    assert [(pair.row, pair.kept) for pair in result.pairs()] == [(row, row - 2_000) for row in range(2_000, 2_500)]


def test_no_rows_are_no_groups(tmp_path: Path) -> None:
    result = find(tmp_path, [])
    assert result.keep.shape == result.root.shape == (0,)
    assert (result.exact, result.near, result.against) == (0, 0, 0)


@pytest.mark.parametrize("threshold", [0.59, 1.01, math.nan])
def test_a_threshold_that_bands_cannot_serve_is_refused(tmp_path: Path, threshold: float) -> None:
    with pytest.raises(InputError, match=r"from 0\.6 to 1"):
        find(tmp_path, ["a"], threshold=threshold)


def test_without_a_threshold_only_the_same_text_is_a_duplicate(tmp_path: Path) -> None:
    calls: list[int] = []
    texts = ["one two three!", "one two three", "One  two three!"]
    assert find(tmp_path, texts, threshold=1).root.tolist() == [0, 0, 0]
    assert find(tmp_path, texts, threshold=None, text_of=counted(texts, calls)).root.tolist() == [0, 1, 0]
    assert calls == []


def test_files_of_another_number_of_rows_are_not_read(tmp_path: Path) -> None:
    find(tmp_path, ["a", "b", "c"])
    with pytest.raises(ValueError, match="1440 bytes where 2 rows take 960"):
        find_duplicates(tmp_path, str, scores=np.zeros(2))


SMALL = st.lists(st.sampled_from(["cat", "Cat", "dog", "", "!", *chain(5), GERMAN, GERMAN[:-6], CHINESE]), max_size=12)


@settings(max_examples=60, deadline=None)
@given(SMALL, st.data())
def test_every_row_is_kept_or_counted_once(texts: list[str], data: st.DataObject) -> None:
    prior = data.draw(st.integers(0, len(texts)))
    score = st.sampled_from([math.nan, 0.0, 0.5, 1.0])
    scores = data.draw(st.lists(score, min_size=len(texts), max_size=len(texts)))
    with TemporaryDirectory() as folder:
        result = find(Path(folder), texts, scores=scores, prior=prior)
    root, keep = result.root, result.keep
    assert (root[root] == root).all()
    assert keep.sum() + result.exact + result.near + result.against == len(texts) - prior
    for group in np.unique(root).tolist():
        members = np.flatnonzero(root == group)
        assert keep[members].sum() == (members.min() >= prior)
    for row, text in enumerate(texts):
        assert all(root[row] == root[other] for other in range(row) if normalised(texts[other]) == normalised(text))
    pairs = list(result.pairs())
    assert [pair.row for pair in pairs] == [row for row in range(prior, len(texts)) if not keep[row]]
    for pair in pairs:
        assert pair.kept == root[pair.row] == root[pair.alike]
        assert pair.similarity == jaccard(shingles(texts[pair.row]), shingles(texts[pair.alike])) >= 0.7
