"""The two files in which an evaluation keeps what it measured.

```
evals/NAME/scores.json     {"schema": "mopdctl.scores/1", "name": NAME, "scores": [Score, ...]}
evals/NAME/samples.jsonl   {"benchmark", "metric", "filter", "doc_hash", "value"}, one line per score and document
```
`value` has the scale of `score`; it is null where it is not finite. `scores.json` is written last: an evaluation
without it did not finish.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from mopdctl.errors import InputError
from mopdctl.files import read_json, read_jsonl, write_json, write_jsonl
from mopdctl.records import Score

SCHEMA = "mopdctl.scores/1"

ScoreKey = tuple[str, str, str]
"""Benchmark, metric, filter."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one model scored, and on which documents."""

    name: str
    scores: tuple[Score, ...]
    samples: dict[ScoreKey, dict[str, float | None]]
    """Per score, document to value. A repeated document hash carries an ordinal: `hash`, `hash#1`, `hash#2`."""

    def find(self, benchmark: str, metric: str | None = None, filter_name: str | None = None) -> Score | None:
        """The first score of a benchmark, or the one with this metric and filter; None if there is none."""
        for score in self.scores:
            if score.benchmark == benchmark and metric in (None, score.metric) and filter_name in (None, score.filter):
                return score
        return None


def score_key(score: Score) -> ScoreKey:
    """What a score shares with its samples."""
    return (score.benchmark, score.metric, score.filter)


def write_scores(folder: Path, name: str, scores: Sequence[Score], samples: Iterable[dict[str, Any]]) -> None:
    """Writes `samples.jsonl`, then `scores.json`, each whole.

    Non-finite values become null; a score that becomes null without a reason says that it was not finite. A finished
    evaluation in the same folder stops being one before its samples are replaced.
    """
    (folder / "scores.json").unlink(missing_ok=True)
    write_jsonl(folder / "samples.jsonl", ({**row, "value": _finite_or_none(row["value"])} for row in samples))
    document = {"schema": SCHEMA, "name": name, "scores": [asdict(_clean(score)) for score in scores]}
    write_json(folder / "scores.json", document)


def has_scores(folder: Path) -> bool:
    """Whether the folder holds a finished evaluation."""
    return (folder / "scores.json").is_file()


def read_scores(folder: Path) -> Evaluation:
    """Reads a finished evaluation; without `samples.jsonl` it has no samples.

    Raises InputError for an evaluation that is absent or unfinished, and for a file that does not hold what it should.
    """
    if not has_scores(folder):
        raise InputError(_absence(folder))
    path = folder / "scores.json"
    document = read_json(path)
    listed = document.get("scores") if isinstance(document, dict) and document.get("schema") == SCHEMA else None
    if not isinstance(listed, list):
        raise InputError(f"{path}: not a {SCHEMA} file; evaluate again under this name")
    scores = tuple(_score(row, source=f"{path}: scores[{index}]") for index, row in enumerate(listed))
    return Evaluation(name=folder.name, scores=scores, samples=_read_samples(folder / "samples.jsonl"))


def _absence(folder: Path) -> str:
    if folder.is_dir():
        return f"{folder}: holds no scores.json, so the evaluation did not finish; run it again"
    known = sorted(path.name for path in folder.parent.glob("[!.]*") if has_scores(path))
    return f"{folder}: no evaluation of that name (there are: {', '.join(known) or 'none'}); evaluate the model first"


def _read_samples(path: Path) -> dict[ScoreKey, dict[str, float | None]]:
    samples: dict[ScoreKey, dict[str, float | None]] = {}
    seen: dict[tuple[ScoreKey, str], int] = {}
    if not path.exists():
        return samples
    for number, row in read_jsonl(path):
        words = [row.get(name) for name in ("benchmark", "metric", "filter", "doc_hash")]
        if not all(isinstance(word, str) for word in words):
            raise InputError(f"{path}:{number}: needs the texts benchmark, metric, filter and doc_hash; evaluate again")
        value = row.get("value")
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise InputError(f"{path}:{number}: value {value!r} is neither a number nor null; evaluate again")
        benchmark, metric, filter_name, document = map(str, words)
        key = (benchmark, metric, filter_name)
        ordinal = seen.get((key, document), 0)
        seen[key, document] = ordinal + 1
        samples.setdefault(key, {})[f"{document}#{ordinal}" if ordinal else document] = _finite_or_none(value)
    return samples


def _score(row: Any, *, source: str) -> Score:
    names = [field.name for field in fields(Score)]
    if not isinstance(row, dict) or sorted(row) != sorted(names):
        raise InputError(f"{source}: needs the keys {', '.join(names)}; evaluate again under this name")
    for name, kinds in _KINDS.items():
        if not isinstance(row[name], kinds) or (isinstance(row[name], bool) and bool not in kinds):
            raise InputError(f"{source}: {name} is {row[name]!r}; evaluate again under this name")
    return _clean(Score(**row))


_KINDS: dict[str, tuple[type, ...]] = {
    "benchmark": (str,),
    "metric": (str,),
    "filter": (str,),
    "higher_is_better": (bool,),
    "score": (int, float, type(None)),
    "stderr": (int, float, type(None)),
    "n": (int,),
    "reason": (str, type(None)),
    "identity": (dict,),
}


def _clean(score: Score) -> Score:
    reason = score.reason
    if score.score is not None and not math.isfinite(score.score):
        reason = reason or f"not finite ({score.score})"
    return replace(score, score=_finite_or_none(score.score), stderr=_finite_or_none(score.stderr), reason=reason)


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
