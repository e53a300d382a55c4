"""An index of test questions by their runs of words, and which of those runs a text holds."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mopdctl.errors import InputError
from mopdctl.files import read_text
from mopdctl.gensft.question_parts import MIN_WORDS, Document, Hashes, Part, Words, judged_parts, normalise, readings

Numbers = npt.NDArray[np.integer[Any]]
Bits = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]


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
        parts = judged_parts(groups[benchmark], ngram, max_document_frequency)
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
                heads.append(Words.of(part.text).hash(0, MIN_WORDS))
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


def without_runs(index: Index, firsts: list[int]) -> Index:
    """The index without some runs, given by their first places in `Evidence.keys`, and what lies mostly in them."""
    keys, positions = index.evidence.keys, index.evidence.positions
    parts = _parts_at(index.part_bounds, positions)
    starts = positions.astype(np.int64)
    ends = starts + np.minimum(np.diff(index.part_bounds), index.ngram)[parts]
    kept = _outside(starts, ends, _among(keys, keys[firsts]))
    gone = zip(index.part_documents[parts[~kept]].tolist(), keys[~kept].tolist(), strict=True)
    common = Counter(benchmark for benchmark, _ in {(index.documents[owner].benchmark, key) for owner, key in gone})
    evidence = _evidence([keys[kept]], [positions[kept]], index.part_bounds)
    return replace(index, evidence=evidence, common=common)


@dataclass(frozen=True, slots=True)
class Match:
    """A run of words in a text that is evidence of at least one part."""

    words: Words
    start: int
    end: int
    postings: slice
    """The run in `Evidence.keys`."""


def matches(text: str, index: Index) -> Iterator[Match]:
    """The runs of a text that the index holds; those of one part come in order within each of the `readings`."""
    for words in readings(text):
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
            yield Match(words, *runs[number], slice(first, last))


def parts_with(match: Match, index: Index) -> list[int]:
    """Numbers of the parts that have the run of a match."""
    parts: list[int] = _parts_at(index.part_bounds, index.evidence.positions[match.postings]).tolist()
    return parts


def _runs(parts: Sequence[Part], ngram: int) -> tuple[Hashes, Numbers, Numbers, Numbers]:
    """All runs of some parts: hash, number of the first word and of the one after the last, number of the part."""
    sizes = np.array([part.size for part in parts], np.int32)
    lengths = np.minimum(sizes, ngram, dtype=np.int32)
    counts = sizes - lengths + 1
    numbers = np.repeat(np.arange(len(parts), dtype=np.int32), counts)
    words_before, runs_before = (np.cumsum(of, dtype=np.int32) - of for of in (sizes, counts))
    starts = np.arange(len(numbers), dtype=np.int32) + (words_before - runs_before)[numbers]
    hashes = np.empty(len(numbers), np.uint64)
    for part, before, count in zip(parts, runs_before.tolist(), counts.tolist(), strict=True):
        hashes[before : before + count] = Words.of(part.text).hashes(min(part.size, ngram))
    return hashes, starts, starts + lengths[numbers], numbers


def _every_run(texts: Iterable[str], ngram: int) -> Hashes:
    """Sorted hashes of all runs that can be keys of an index."""
    words = [Words.of(normalise(text)) for text in texts]
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
