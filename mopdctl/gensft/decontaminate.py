"""Decontamination: which rows of a data set hold questions of a benchmark.

A text becomes its words (see `normalise`), a document the 64-bit hashes of its runs of n words. What a row shares with
a document counts only where it is evidence, and a run of n words is none if half of it or more lies in

- text that more than `max_document_frequency` documents of the benchmark share: its template, or a passage with many
  questions about it,
- one of the allowed texts: instructions and quotations that everybody uses,
- text that many prompts of the data set share, see `without_common`.

The rule: a row is a hit if it holds at least `min_coverage` of a document's distinct runs that are evidence. The texts
of a row are read each on its own and counted together. A document is judged three times, and its best part counts: its
question, its question without the choices, its answer. So a quotation inside a long question is no hit, and a long word
problem with one number changed is a hit with a coverage below 1: what it teaches is how to solve the test.
"""

import re
import unicodedata
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from mopdctl.errors import InputError
from mopdctl.files import read_text

Row = tuple[int, str, list[str]]
"""Number and id of a row, and its texts: what the user says and what is answered."""
Hashes = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.integer[Any]]
Bits = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]

MIN_WORDS = 6
"""Fewer words cannot be told from chance."""
PARTS = ("question", "question without its choices", "answer")

_CHOICES = re.compile(r"^[ \t]*A[.):]|\(A\)", re.MULTILINE)
_END_OF_LINE_HYPHEN = re.compile(r"[-\u2010\u00ad](?<=[^\W\d_].)[ \t\r]*\n[\s>]*(?=[^\W\d_])")
_IDEOGRAPHS = re.compile(r"[\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff]")


@dataclass(frozen=True, slots=True)
class Document:
    """One test question with its choices, if it has any; what comes before "A." or "(A)" is also judged alone."""

    benchmark: str
    document_id: str
    text: str
    answer: str = ""


@dataclass(frozen=True, slots=True)
class Hit:
    """A row that holds a document."""

    row: int
    row_id: str
    benchmark: str
    document_id: str
    coverage: float
    """Share of the evidence of `part` that the row holds."""
    matched: str
    """The longest stretch of words that row and part share."""
    question: str
    """The first 200 characters of the document."""
    part: str
    """What the row covers best, one of `PARTS`."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The runs of words that are evidence, at 14 to 16 bytes each."""

    keys: Hashes
    """Sorted hashes of runs, a run once for each part that has it."""
    positions: Numbers
    """Number of the first word of each run, see `Index.part_bounds`."""
    counts: Numbers
    """How many distinct runs each part has."""
    sieve: Bits
    """A bit for the leading digits of every key, which spares most runs of most rows the search."""


@dataclass(frozen=True, slots=True)
class Index:
    """Documents, their parts that are long enough to be judged, and the evidence for them."""

    ngram: int
    documents: tuple[Document, ...]
    """With the first 200 characters of their texts."""
    part_documents: Numbers
    part_names: Numbers
    part_bounds: Numbers
    """Number of the first word of each part, words being numbered through all parts, and one more for the end."""
    evidence: Evidence
    heads: Hashes
    """Sorted hashes of the first words of parts with fewer than n words, which are one run each."""
    short_sizes: tuple[int, ...]
    """Numbers of words that such parts have."""
    allowed: Mapping[str, int]
    """Benchmark to the number of its distinct runs that are no evidence."""
    common: Mapping[str, int]
    """Benchmark to the number of those that `without_common` took out."""


def normalise(text: str) -> str:
    """The words of a text, a blank between two.

    NFKC, case folded. Letters, marks and digits make words; everything else separates them, so that line breaks,
    quoting, Markdown and punctuation do not matter, nor does the sign of a number. Chinese and Japanese characters are
    words of their own. Scripts that part neither words nor sentences, such as Khmer, make few and long words.
    """
    return " ".join(unicodedata.normalize("NFKC", text).casefold().translate(_CHARACTERS).split())


class _Characters(dict[int, str]):
    """What becomes of each character, worked out when it is first met."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        category = unicodedata.category(character)
        if category == "Cf":  # soft hyphens and joiners stand inside words
            self[code] = ""
        elif _IDEOGRAPHS.match(character):
            self[code] = f" {character} "
        else:
            self[code] = character if category[0] in "LMN" else " "
        return self[code]


_CHARACTERS = _Characters()


def allowed_texts(files: Iterable[Path] = ()) -> list[str]:
    """The texts that come with mopdctl and those in `files`: one a paragraph, with blank lines between.

    Raises InputError for a text of fewer than 6 words: it would have no effect.
    """
    found = []
    for file in (Path(__file__).with_name("allowed_texts.txt"), *files):
        for text in filter(str.strip, re.split(r"\n\s*\n", read_text(file))):
            if len(normalise(text).split()) < MIN_WORDS:
                raise InputError(
                    f"{file}: {text.strip()!r} has fewer than {MIN_WORDS} words, which has no effect; cut it"
                )
            found.append(text)
    return found


def build_index(
    documents: Iterable[Document], *, ngram: int = 13, allow: Iterable[str], max_document_frequency: int = 3
) -> Index:
    """Indexes documents by their runs of `ngram` words; a part with 6 to `ngram` - 1 words is one run.

    Words that more than half of a benchmark's documents begin or end with ("Question:", "Answer:") are left out, since
    a row may hold the question without them. An answer needs `ngram` words: shorter ones come up by themselves. 100,000
    questions of 60 words take about 115 MB, and three times that for a moment if they are one benchmark. Raises
    InputError if `ngram` is below 6 or `max_document_frequency` below 1.
    """
    if ngram < MIN_WORDS:
        raise InputError(f"ngram: {ngram} words cannot be told from chance; use {MIN_WORDS} or more")
    if max_document_frequency < 1:
        raise InputError(f"max_document_frequency: {max_document_frequency} leaves no evidence; use 1 or more")
    groups: dict[str, list[Document]] = {}
    for document in documents:
        groups.setdefault(document.benchmark, []).append(document)
    allowed_keys = _every_run(allow, ngram)
    labels: list[Document] = []
    keys: list[Hashes] = []
    positions: list[Numbers] = []
    owners: list[int] = []
    names: list[int] = []
    bounds = [0]
    heads: list[int] = []
    allowed: dict[str, int] = {}
    while groups:  # taken out one by one, so that texts are let go before the large sort at the end
        benchmark = next(iter(groups))
        parts = _parts(groups[benchmark], ngram, max_document_frequency)
        documents_before, words_before = len(labels), bounds[-1]
        labels += [replace(document, text=document.text[:200], answer="") for document in groups.pop(benchmark)]
        hashes, starts, ends, run_parts = _runs(parts, ngram)
        run_owners = np.array([part.owner for part in parts], np.int32)[run_parts]
        barred = _among(hashes, allowed_keys) | _among(hashes, _frequent(hashes, run_owners, max_document_frequency))
        evidence = _outside(starts, ends, barred)
        allowed[benchmark] = len(np.unique(hashes[~evidence]))
        keys.append(hashes[evidence])
        positions.append((starts[evidence] + words_before).astype(np.uint32))
        for part in parts:
            owners.append(documents_before + part.owner)
            names.append(part.name)
            bounds.append(bounds[-1] + part.size)
            if part.size < ngram:
                heads.append(_Words.of(part.text).hash(0, MIN_WORDS))
    part_bounds = np.array(bounds, np.int64)
    sizes = np.unique(np.diff(part_bounds))
    return Index(
        ngram=ngram,
        documents=tuple(labels),
        part_documents=np.array(owners, np.int64),
        part_names=np.array(names, np.int64),
        part_bounds=part_bounds,
        evidence=_evidence(keys, positions, part_bounds),
        heads=np.unique(np.array(heads, np.uint64)),
        short_sizes=tuple(sizes[sizes < ngram].tolist()),
        allowed=allowed,
        common={},
    )


def without_common(rows: Iterable[Row], index: Index, *, max_row_frequency: int = 100) -> Index:
    """The index without what more than `max_row_frequency` prompts share, such as the data set's own instructions.

    Rows with the same first text are samples of one prompt and count once, so that a leaked question stays evidence
    however often it was sampled. If it leaked into more prompts than that it does not: `report` counts what went.
    """
    prompts: dict[int, set[int]] = {}
    for _, _, texts in rows:
        for text in texts:
            for match in _matches(text, index):
                seen = prompts.setdefault(match.postings.start, set())
                if len(seen) <= max_row_frequency:
                    seen.add(hash(texts[0]))
    shared = sorted(first for first, seen in prompts.items() if len(seen) > max_row_frequency)
    keys, positions = index.evidence.keys, index.evidence.positions
    parts = _parts_at(index.part_bounds, positions)
    starts = positions.astype(np.int64)
    ends = starts + np.minimum(np.diff(index.part_bounds), index.ngram)[parts]
    kept = _outside(starts, ends, _among(keys, keys[shared]))
    gone = zip(index.part_documents[parts[~kept]].tolist(), keys[~kept].tolist(), strict=True)
    common = Counter(benchmark for benchmark, _ in {(index.documents[owner].benchmark, key) for owner, key in gone})
    evidence = _evidence([keys[kept]], [positions[kept]], index.part_bounds)
    return replace(index, evidence=evidence, common=common)


def scan(rows: Iterable[Row], index: Index, *, min_coverage: float = 0.5) -> Iterator[Hit]:
    """Yields a hit for every row and document that meet the rule at the top of this module, in the order of the rows.

    Raises InputError if `min_coverage` is not above 0 and up to 1.
    """
    if not 0 < min_coverage <= 1:
        raise InputError(f"min_coverage: {min_coverage} is no share that can be reached; use one above 0 and up to 1")
    return (hit for row in rows for hit in _row_hits(row, index, min_coverage))


def report(hits: Iterable[Hit], index: Index) -> dict[str, Any]:
    """Counts, ready for JSON. The `documents` of a benchmark are `indexed`, `too_short` or `without_evidence`."""
    judged = set(index.part_documents.tolist())
    indexed = set(index.part_documents[index.evidence.counts > 0].tolist())
    states: dict[str, Counter[str]] = {}
    for number, document in enumerate(index.documents):
        state = "indexed" if number in indexed else "without_evidence" if number in judged else "too_short"
        states.setdefault(document.benchmark, Counter())[state] += 1
    found = list(hits)
    return {
        "rows_hit": len({hit.row for hit in found}),
        "benchmarks": {
            name: {
                "documents": counts.total(),
                **{state: counts[state] for state in ("indexed", "too_short", "without_evidence")},
                "allowed_ngrams": index.allowed[name],
                "common_ngrams": index.common.get(name, 0),
                "documents_hit": len({hit.document_id for hit in found if hit.benchmark == name}),
                "rows_hit": len({hit.row for hit in found if hit.benchmark == name}),
            }
            for name, counts in states.items()
        },
    }


@dataclass(frozen=True, slots=True)
class _Words:
    """A normalised text as bytes, with the places where its words begin and end."""

    data: bytes
    starts: list[int]
    ends: list[int]

    @classmethod
    def of(cls, text: str) -> "_Words":
        data = text.encode()
        blanks = np.flatnonzero(np.frombuffer(data, np.uint8) == ord(" "))
        return cls(data, [0, *(blanks + 1).tolist()], [*blanks.tolist(), len(data)])

    def span(self, start: int, end: int) -> bytes:
        return self.data[self.starts[start] : self.ends[end - 1]]

    def hash(self, start: int, end: int) -> int:
        return xxh3_64_intdigest(self.span(start, end))

    def hashes(self, size: int) -> Hashes:
        """Of each run of `size` words. Inlined `hash`: this is where the time goes."""
        data, bounds = self.data, zip(self.starts, self.ends[size - 1 :], strict=False)
        return np.array([xxh3_64_intdigest(data[start:end]) for start, end in bounds], np.uint64)


@dataclass(frozen=True, slots=True)
class _Part:
    owner: int
    name: int
    size: int
    text: str


def _parts(group: Sequence[Document], ngram: int, most: int) -> list[_Part]:
    """What is judged of the documents of one benchmark."""
    stems = [_CHOICES.split(document.text, maxsplit=1) for document in group]
    kinds = (
        _without_template([normalise(document.text) for document in group], most),
        _without_template([normalise(stem[0]) if len(stem) > 1 else "" for stem in stems], most),
        _without_template([normalise(document.answer) for document in group], most),
    )
    least = (MIN_WORDS, MIN_WORDS, ngram)
    return [
        _Part(owner, name, size, text)
        for owner, texts in enumerate(zip(*kinds, strict=True))
        for name, text in enumerate(texts)
        if (size := text.count(" ") + 1) >= least[name]
    ]


def _without_template(texts: list[str], most: int) -> list[str]:
    """The texts without what more than half of them, and more than `most`, begin or end with."""
    for _ in range(2):  # once from the front and once, with the words turned round, from the back
        template = _shared_beginning(texts, most)
        rests = [text.removeprefix(template) for text in texts]
        kept = (rest if rest.count(" ") + 1 >= MIN_WORDS else text for rest, text in zip(rests, texts, strict=True))
        texts = [" ".join(reversed(text.split(" "))) for text in kept]
    return texts


def _shared_beginning(texts: Iterable[str], most: int) -> str:
    ordered = sorted(f"{text} " for text in texts if text)
    shared = ""
    for word in ordered[len(ordered) // 2].split() if ordered else ():  # what most begin with, the middle one does too
        longer = f"{shared}{word} "
        count = bisect_left(ordered, f"{longer}\U0010ffff") - bisect_left(ordered, longer)
        if count <= max(most, len(ordered) / 2):
            break
        shared = longer
    return shared


def _runs(parts: Sequence[_Part], ngram: int) -> tuple[Hashes, Numbers, Numbers, Numbers]:
    """All runs of some parts: hash, number of the first word and of the one after the last, number of the part."""
    sizes = np.array([part.size for part in parts], np.int32)
    lengths = np.minimum(sizes, ngram, dtype=np.int32)
    counts = sizes - lengths + 1
    numbers = np.repeat(np.arange(len(parts), dtype=np.int32), counts)
    words_before, runs_before = (np.cumsum(of, dtype=np.int32) - of for of in (sizes, counts))
    starts = np.arange(len(numbers), dtype=np.int32) + (words_before - runs_before)[numbers]
    hashes = np.empty(len(numbers), np.uint64)
    for part, before, count in zip(parts, runs_before.tolist(), counts.tolist(), strict=True):
        hashes[before : before + count] = _Words.of(part.text).hashes(min(part.size, ngram))
    return hashes, starts, starts + lengths[numbers], numbers


def _every_run(texts: Iterable[str], ngram: int) -> Hashes:
    """Sorted hashes of all runs that can be keys of an index."""
    words = [_Words.of(normalise(text)) for text in texts]
    found = [each.hashes(size) for each in words for size in range(MIN_WORDS, ngram + 1)]
    return np.unique(np.concatenate([np.zeros(0, np.uint64), *found]))


def _frequent(hashes: Hashes, owners: Numbers, most: int) -> Hashes:
    """Sorted hashes that more than `most` owners have; the owners come in order."""
    ordered = np.sort(hashes)
    often = np.unique(ordered[most:][ordered[most:] == ordered[:-most]])  # in one document maybe, as a refrain is
    places = np.flatnonzero(_among(hashes, often))
    places = places[np.argsort(hashes[places], kind="stable")]
    firsts = hashes[places][_first_of_each(hashes[places], owners[places])]
    values, counts = np.unique(firsts, return_counts=True)
    frequent: Hashes = values[counts > most]
    return frequent


def _first_of_each(keys: Hashes, owners: Numbers) -> Mask:
    """Which pairs differ from the one before."""
    first = np.ones(len(keys), np.bool_)
    first[1:] = (keys[1:] != keys[:-1]) | (owners[1:] != owners[:-1])
    return first


def _among(values: Hashes, among: Hashes) -> Mask:
    """Which values are in a sorted array."""
    if not len(among):
        return np.zeros(len(values), np.bool_)
    places = np.searchsorted(among, values)
    found: Mask = among[np.minimum(places, len(among) - 1, out=places)] == values
    return found


def _outside(starts: Numbers, ends: Numbers, barred: Mask) -> Mask:
    """Which runs have more than half of their words outside of all barred runs. No two runs begin or end together."""
    steps = np.zeros(int(ends.max(initial=0)) + 1, np.int32)
    steps[starts[barred]] += 1
    steps[ends[barred]] -= 1
    outside = np.append(0, np.cumsum(np.cumsum(steps, out=steps) == 0, dtype=np.int32))
    mostly: Mask = 2 * (outside[ends] - outside[starts]) > ends - starts
    return mostly


def _parts_at(part_bounds: Numbers, positions: Numbers) -> Numbers:
    return np.searchsorted(part_bounds, positions, side="right") - 1


def _evidence(keys_by_benchmark: list[Hashes], positions_by_benchmark: list[Numbers], part_bounds: Numbers) -> Evidence:
    """Puts keys in order, and a run that one part has twice there once. Empties the lists to spare memory."""
    keys = np.concatenate([np.zeros(0, np.uint64), *keys_by_benchmark])
    positions = np.concatenate([np.zeros(0, np.uint32), *positions_by_benchmark])
    keys_by_benchmark.clear()
    positions_by_benchmark.clear()
    order = np.argsort(keys, kind="stable")  # so that the parts of a key stay in order
    keys, positions = keys[order], positions[order]
    del order
    parts = _parts_at(part_bounds, positions)
    first = _first_of_each(keys, parts)
    counts = np.bincount(parts[first], minlength=len(part_bounds) - 1)
    del parts
    keys, positions = keys[first], positions[first]
    sieve = np.zeros(2 << max(len(keys), 32).bit_length(), np.uint8)  # 16 to 32 bits a key
    for start in range(0, len(keys), 1 << 16):
        slots = _slots(keys[start : start + (1 << 16)], sieve)
        np.bitwise_or.at(sieve, slots >> 3, _bits(slots))
    return Evidence(keys, positions, counts, sieve)


def _sieved(hashes: Hashes, sieve: Bits) -> Numbers:
    """Places of the hashes that may be keys: all that are, and at most one in sixteen of the others."""
    slots = _slots(hashes, sieve)
    return np.flatnonzero(sieve[slots >> 3] & _bits(slots))


def _slots(hashes: Hashes, sieve: Bits) -> Hashes:
    """Numbers of their bits in a sieve, whose size is a power of two."""
    return hashes >> np.uint64(65 - (8 * len(sieve)).bit_length())


def _bits(slots: Hashes) -> Bits:
    return np.uint8(1) << (slots & 7).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class _Match:
    """A run of words in a text that is evidence of at least one part."""

    words: _Words
    start: int
    end: int
    postings: slice
    """The run in `Evidence.keys`."""


def _matches(text: str, index: Index) -> Iterator[_Match]:
    joined = _END_OF_LINE_HYPHEN.sub("", text) if "\n" in text else text
    for reading in (text,) if joined == text else (text, joined):  # the hyphen may be one of the word's own
        words = _Words.of(normalise(reading))
        hashes = words.hashes(index.ngram)
        places = _sieved(hashes, index.evidence.sieve)
        runs = [(start, start + index.ngram) for start in places.tolist()]
        if len(index.heads):
            heads = np.flatnonzero(_among(words.hashes(MIN_WORDS), index.heads)).tolist()
            runs += [(at, at + size) for at in heads for size in index.short_sizes if at + size <= len(words.starts)]
        if not runs:
            continue
        short = [words.hash(*run) for run in runs[len(places) :]]
        found = np.append(hashes[places], np.array(short, np.uint64))
        for number in np.flatnonzero(_among(found, index.evidence.keys)).tolist():
            first = int(np.searchsorted(index.evidence.keys, found[number]))
            last = int(np.searchsorted(index.evidence.keys, found[number], side="right"))
            yield _Match(words, *runs[number], slice(first, last))


def _row_hits(row: Row, index: Index, min_coverage: float) -> Iterator[Hit]:
    number, row_id, texts = row
    held: dict[int, list[_Match]] = {}
    for text in texts:
        for match in _matches(text, index):
            for part in _parts_at(index.part_bounds, index.evidence.positions[match.postings]).tolist():
                held.setdefault(part, []).append(match)
    best: dict[int, tuple[float, int]] = {}
    for part, matches in sorted(held.items()):
        coverage = len({match.postings.start for match in matches}) / int(index.evidence.counts[part])
        document = int(index.part_documents[part])
        if coverage >= min_coverage and coverage > best.get(document, (0.0, 0))[0]:
            best[document] = (coverage, part)
    for document, (coverage, part) in sorted(best.items()):
        label = index.documents[document]
        yield Hit(
            row=number,
            row_id=row_id,
            benchmark=label.benchmark,
            document_id=label.document_id,
            coverage=coverage,
            matched=_longest(held[part]),
            question=label.text,
            part=PARTS[index.part_names[part]],
        )


def _longest(matches: Sequence[_Match]) -> str:
    """The longest stretch of words that matches cover without a gap, the first of several."""
    best, size = b"", 0
    words, start, end = matches[0].words, 0, -1
    for match in matches:  # in order within each text
        if match.words is not words or match.start > end:
            words, start = match.words, match.start
        end = match.end
        if end - start > size:
            best, size = words.span(start, end), end - start
    return best.decode()
