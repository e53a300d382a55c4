"""From assessed answers to the files of a data set: duplicates, contamination, split, quarantine, counts.

Four passes over files, so that memory does not grow with the number of rows.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mopdctl.config.committee import CommitteeFile
from mopdctl.config.gensft import GenConfig
from mopdctl.gensft import decontaminate
from mopdctl.gensft.answers import usage
from mopdctl.gensft.assess import UNANSWERED, Assessed, Assessor
from mopdctl.gensft.dedup import find_duplicates
from mopdctl.gensft.judge_report import JudgeReport
from mopdctl.gensft.question_index import build_index
from mopdctl.gensft.question_parts import Document
from mopdctl.gensft.records import Answer, Seed
from mopdctl.gensft.report import Quarantine, Report, Stage, Tally
from mopdctl.gensft.routing import Router
from mopdctl.gensft.rows import compact, conversation, duplicate_text, make_row, row_id
from mopdctl.gensft.signatures import SignatureWriter
from mopdctl.gensft.write import SplitWriter, split_of

_FAILED_ALARM = 0.1
"""Share of requests that are rejected, or of answers that cannot be read, from which more is wrong than a row."""
_SAME_ANSWERS_ALARM = 0.5
"""Share of seeds whose answers are all equal from which a server that ignores the seed is suspected."""


class _Lines:
    """A file of JSON lines that is written once and then read by line number; 8 bytes of memory a line."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w+b")
        self._starts = array("q", [0])

    def __len__(self) -> int:
        return len(self._starts) - 1

    def add(self, document: Any) -> None:
        line = compact(document).encode() + b"\n"
        self._file.write(line)
        self._starts.append(self._starts[-1] + len(line))

    def __getitem__(self, number: int) -> Any:
        start, end = self._starts[number], self._starts[number + 1]
        self._file.seek(start)
        return json.loads(self._file.read(end - start))

    def size(self, number: int) -> int:
        return self._starts[number + 1] - self._starts[number]

    def close(self) -> None:
        self._file.close()


def build(
    seeds: Iterable[Seed],
    assessor: Assessor,
    *,
    config: GenConfig,
    committee: CommitteeFile,
    router: Router,
    stage: Path,
    out: Path,
    prior_texts: Iterable[str],
    documents: Iterable[Document],
    allow: list[str],
    on_progress: Callable[[int], None] = lambda seeds: None,
) -> Report:
    """Writes `out/data/` and `out/quarantine/`; `stage` is a folder for what is needed meanwhile."""
    quarantine = Quarantine(out / "quarantine")
    rows, prior = _Lines(stage / "rows.jsonl"), _Lines(stage / "prior.jsonl")
    answers, rules, chosen = Stage("generate"), Stage("filter"), Stage("select")
    report = Report([answers, rules, chosen])
    scores = array("d")
    try:
        with SignatureWriter(stage / "signatures", words=config.dedup.words) as signatures:
            for text in prior_texts:
                prior.add(text)
                signatures.add(text)
                scores.append(float("nan"))
            gather = _Gather(config, committee, router, report, quarantine)
            for number, seed in enumerate(seeds, start=1):
                for row, score in gather.rows(seed, assessor.assess(seed)):
                    rows.add(row)
                    signatures.add(duplicate_text(row["messages"], config.dedup.on))
                    scores.append(float("nan") if score is None else score)
                on_progress(number)
            gather.finish()
        keep = _without_duplicates(stage, rows, prior, np.array(scores), config, report, quarantine)
        keep = _without_questions(rows, keep, documents, allow, config, report, quarantine)
        _write(rows, keep, out / "data", config, report)
    finally:
        quarantine.close()
        rows.close()
        prior.close()
    return report


class _Gather:
    """Turns assessed seeds into rows and keeps the counts of the first stages."""

    def __init__(
        self, config: GenConfig, committee: CommitteeFile, router: Router, report: Report, quarantine: Quarantine
    ) -> None:
        self._config, self._committee, self._router = config, committee, router
        self._report, self._quarantine = report, quarantine
        self._answers, self._rules, self._chosen = report.stages
        self._missing = 0
        self._panels: dict[int, JudgeReport] = {}
        self._several = self._all_same = 0
        self._first_failure: dict[str, str] = {}

    def rows(self, seed: Seed, assessed: Assessed) -> Iterator[tuple[dict[str, Any], float | None]]:
        """The rows of one seed, each with its score."""
        route = self._router.route(seed)
        for alias, raw in assessed.responses.values():
            self._pay(alias, raw)
        self._count_answers(seed, assessed)
        self._missing += assessed.missing
        if assessed.verdicts is not None and (panel := self._config.panel(seed.domain)) is not None:
            self._panels.setdefault(self._config.judges.index(panel), JudgeReport()).add(assessed.verdicts)
        for answer in assessed.answers:
            if answer.state in UNANSWERED:
                continue
            self._rules.entered += 1
            if failed := assessed.failures.get(answer.sample_index):
                self._rules.dropped[failed[0][0]] += 1
                entry = _entry(seed, answer) | {
                    "reasons": [{"rule": rule, "reason": reason} for rule, reason in failed],
                    "messages": [
                        {k: v for k, v in m.items() if v is not None} for m in conversation(seed, answer.message, route)
                    ],
                }
                self._quarantine.add(failed[0][0], entry)
        self._chosen.entered += len(assessed.selection.kept) + len(assessed.selection.dropped)
        for judged, reason in assessed.selection.dropped:
            self._chosen.dropped[reason] += 1
            entry = _entry(seed, judged.answer) | {"reason": reason, "score": judged.score}
            self._quarantine.add("not_selected", entry | {"answer": judged.answer.message})
        for judged in assessed.selection.kept:
            member = self._committee.members[judged.answer.member]
            row = make_row(seed, judged, route=route, member=member, reference=assessed.reference)
            yield row, judged.score if judged.score is not None else judged.reward

    def _pay(self, alias: str, raw: Mapping[str, Any]) -> None:
        tally = self._report.members.setdefault(alias, Tally())
        price = self._committee.members[alias].price
        prompt, completion = usage(raw)
        tally.requests += 1
        tally.uncounted += prompt is None or completion is None
        tally.prompt_tokens += prompt or 0
        tally.completion_tokens += completion or 0
        if price is None or prompt is None or completion is None:
            tally.cost_usd = None
        elif tally.cost_usd is not None:
            tally.cost_usd += price.cost_usd(prompt, completion)

    def _count_answers(self, seed: Seed, assessed: Assessed) -> None:
        for answer in assessed.answers:
            self._answers.entered += 1
            self._report.notes.update(answer.notes)
            if answer.state in UNANSWERED:
                self._answers.dropped[answer.state] += 1
                self._report.complete &= answer.state not in ("pending", "infra_error")
                if answer.state in ("rejected", "malformed"):
                    self._first_failure.setdefault(answer.state, answer.detail)
                entry = _entry(seed, answer) | {"state": answer.state, "detail": answer.detail}
                self._quarantine.add("unanswered", entry)
        said = {
            (answer.message["content"], compact(answer.message.get("tool_calls")))
            for answer in assessed.answers
            if answer.state == "ok" and answer.body.get("temperature") != 0
        }
        if len(assessed.answers) > 1 and said:
            self._several += 1
            self._all_same += len(said) == 1

    def finish(self) -> None:
        """Adds what is known only at the end."""
        for number, panel in sorted(self._panels.items()):
            self._report.judges.append({"panel": number} | panel.document())
            self._report.warnings += panel.warnings()
        if self._missing:
            self._report.complete = False
            self._report.warnings.append(
                f"{self._missing} verdicts or reference answers are missing, since nobody gave them; the same command "
                "asks for them again"
            )
        for state, why in self._first_failure.items():
            if (count := self._answers.dropped[state]) > _FAILED_ALARM * self._answers.entered:
                self._report.warnings.append(
                    f"{count} of {self._answers.entered} answers are {state}, the first: {why}"
                )
        if self._several >= 10 and self._all_same > _SAME_ANSWERS_ALARM * self._several:
            self._report.warnings.append(
                f"all answers are equal for {self._all_same} of {self._several} prompts that were asked several times; "
                "does the server take the seed, and is the temperature above 0?"
            )


def _entry(seed: Seed, answer: Answer) -> dict[str, Any]:
    return {
        "id": row_id(seed, answer.sample_index),
        "seed_id": seed.seed_id,
        "sample_index": answer.sample_index,
        "domain": seed.domain,
        "place": seed.place,
        "member": answer.member,
        "request_key": answer.request_key,
    }


def _without_duplicates(
    stage: Path,
    rows: _Lines,
    prior: _Lines,
    scores: NDArray[np.float64],
    config: GenConfig,
    report: Report,
    quarantine: Quarantine,
) -> NDArray[np.bool_]:
    counts = Stage("dedup", len(rows))
    report.stages.append(counts)

    def text(number: int) -> str:
        if number < len(prior):
            return str(prior[number])
        return duplicate_text(rows[number - len(prior)]["messages"], config.dedup.on)

    found = find_duplicates(
        stage / "signatures",
        text,
        scores=scores,
        threshold=config.dedup.threshold if config.dedup.near else None,
        prior=len(prior),
        words=config.dedup.words,
    )
    counts.dropped.update({"exact": found.exact, "near": found.near, "against": found.against})
    counts.dropped = +counts.dropped
    for pair in found.pairs():
        row = rows[pair.row - len(prior)]
        quarantine.add(
            "duplicate",
            {
                "id": row["id"],
                "reason": "repeats the kept row" if pair.kept >= len(prior) else "repeats an earlier data set",
                "kept": rows[pair.kept - len(prior)]["id"] if pair.kept >= len(prior) else None,
                "similarity": round(pair.similarity, 4),
                "text": text(pair.row),
                "like": text(pair.alike),
            },
        )
    return found.keep[len(prior) :].copy()


def _without_questions(
    rows: _Lines,
    keep: NDArray[np.bool_],
    documents: Iterable[Document],
    allow: list[str],
    config: GenConfig,
    report: Report,
    quarantine: Quarantine,
) -> NDArray[np.bool_]:
    settings = config.decontaminate
    counts = Stage("decontaminate", int(keep.sum()))
    report.stages.append(counts)
    if not settings.tasks and not settings.files:
        return keep
    index = build_index(
        documents, ngram=settings.ngram, allow=allow, max_document_frequency=settings.max_document_frequency
    )

    def said() -> Iterator[decontaminate.Row]:
        for number in np.flatnonzero(keep).tolist():
            row = rows[number]
            own = [m for m in row["messages"] if m["role"] not in ("system", "developer")]
            others = [m for m in row["messages"] if m["role"] in ("system", "developer")]
            yield number, row["id"], [text for message in [*own, *others] for text in _texts(message)]

    hits = list(
        decontaminate.scan(said(), decontaminate.without_common(said(), index), min_coverage=settings.min_coverage)
    )
    report.decontamination = decontaminate.report(hits, index)
    for hit in hits:
        if keep[hit.row]:
            counts.dropped[hit.benchmark] += 1
            keep[hit.row] = False
        quarantine.add(
            "contaminated",
            {
                "id": hit.row_id,
                "reason": f"holds {hit.part} {hit.document_id} of {hit.benchmark}",
                "messages": [{k: v for k, v in m.items() if v is not None} for m in rows[hit.row]["messages"]],
                "benchmark": hit.benchmark,
                "document": hit.document_id,
                "part": hit.part,
                "coverage": round(hit.coverage, 4),
                "matched": hit.matched,
                "question": hit.question,
            },
        )
    return keep


def _texts(message: Mapping[str, Any]) -> list[str]:
    """Everything in a message that may hold a question, what is said first."""
    calls = [call["function"]["arguments"] or "" for call in message["tool_calls"] or []]
    return [text for text in (message["content"], message["reasoning_content"], *calls) if text]


def _write(rows: _Lines, keep: NDArray[np.bool_], folder: Path, config: GenConfig, report: Report) -> None:
    settings = config.write
    bounds = {"rows_per_file": settings.rows_per_file, "row_group_bytes": settings.row_group_mb * 1_000_000}
    with SplitWriter(folder, "train", **bounds) as train, SplitWriter(folder, "validation", **bounds) as validation:
        splits = {"train": train, "validation": validation}
        for number in np.flatnonzero(keep).tolist():
            row = rows[number]
            split = split_of(row["messages"], validation_share=settings.validation_share, seed=config.seed)
            splits[split].add(row, rows.size(number))
            report.domains[row["domain"]] += 1
            report.shapes["".join(message["role"][0].upper() for message in row["messages"])] += 1
            report.licenses[row["license"] or "unknown", row["generator_license"] or "unknown"] += 1
    report.splits = {name: writer.rows for name, writer in splits.items()}
    if not any(report.splits.values()):
        report.warnings.append("no row is left; the counts of the stages say where they went")
