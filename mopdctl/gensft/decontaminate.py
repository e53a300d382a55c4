"""Decontamination: which rows of a data set hold questions of a benchmark.

A text becomes its words, see `question_parts`, and a document the 64-bit hashes of its runs of n words, see
`question_index`. What a row shares with a document counts only where it is evidence, and a run of n words is none if
half of it or more lies in

- text that more than `max_document_frequency` documents of the benchmark share: its template, or a passage with many
  questions about it,
- one of the allowed texts: instructions and quotations that everybody uses,
- text that many prompts of the data set share, see `without_common`.

The rule: a row is a hit if it holds at least `min_coverage` of a document's distinct runs that are evidence. The texts
of a row are read each on its own and counted together. A document is judged three times, and its best part counts: its
question, its question without the choices, its answer. So a quotation inside a long question is no hit, and a long word
problem with one number changed is a hit with a coverage below 1: what it teaches is how to solve the test.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mopdctl.errors import InputError
from mopdctl.gensft.question_index import Index, Match, matches, parts_with, without_runs
from mopdctl.gensft.question_parts import PARTS

Row = tuple[int, str, list[str]]
"""Number and id of a row, and its texts: what the user says and what is answered."""


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


def without_common(rows: Iterable[Row], index: Index, *, max_row_frequency: int = 100) -> Index:
    """The index without what more than `max_row_frequency` prompts share, such as the data set's own instructions.

    Rows with the same first text are samples of one prompt and count once, so that a leaked question stays evidence
    however often it was sampled. If it leaked into more prompts than that it does not: `report` counts what went.
    """
    prompts: dict[int, set[int]] = {}
    for _, _, texts in rows:
        for text in texts:
            for match in matches(text, index):
                seen = prompts.setdefault(match.postings.start, set())
                if len(seen) <= max_row_frequency:
                    seen.add(hash(texts[0]))
    shared = sorted(first for first, seen in prompts.items() if len(seen) > max_row_frequency)
    return without_runs(index, shared)


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


def _row_hits(row: Row, index: Index, min_coverage: float) -> Iterator[Hit]:
    number, row_id, texts = row
    held: dict[int, list[Match]] = {}
    for text in texts:
        for match in matches(text, index):
            for part in parts_with(match, index):
                held.setdefault(part, []).append(match)
    best: dict[int, tuple[float, int]] = {}
    for part, found in sorted(held.items()):
        coverage = len({match.postings.start for match in found}) / int(index.evidence.counts[part])
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


def _longest(found: Sequence[Match]) -> str:
    """The longest stretch of words that matches cover without a gap, the first of several."""
    best, size = b"", 0
    words, start, end = found[0].words, 0, -1
    for match in found:  # in order within each text
        if match.words is not words or match.start > end:
            words, start = match.words, match.start
        end = match.end
        if end - start > size:
            best, size = words.span(start, end), end - start
    return best.decode()
