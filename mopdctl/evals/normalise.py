"""From the harness's own files to scores: one scale, one null, one reason.

Scale. A metric is a share if one of the words of its name is in `SHARE_WORDS` (`acc_norm`, `exact_match`, `pass@1`,
`prompt_level_strict_acc`); its score is then 100 times the harness's value, which has to lie in [0, 1]. All others
(`perplexity`, `bits_per_byte`, `bleu`, `mcc`, ...) keep the harness's scale. Only the name decides, so that two models
never differ in scale.

Null. `N/A`, NaN, infinity, the 999 that stands for "not scored" and shares outside [0, 1] become null with a reason.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mopdctl.errors import MopdctlError
from mopdctl.files import fingerprint
from mopdctl.records import Score

SHARE_WORDS = frozenset(
    {"acc", "accuracy", "em", "exact", "f1", "hallucination", "pass", "precision", "recall", "verify"}
)

Sample = dict[str, Any]


def is_share(metric: str) -> bool:
    """Whether a metric lies in [0, 1] and is shown times 100; see the module."""
    return not SHARE_WORDS.isdisjoint(re.split(r"[\W_]+", metric.lower()))


def check_complete(
    results: Mapping[str, Any],
    samples: Mapping[str, Sequence[Sample]],
    *,
    tasks: Mapping[str, int],
    groups: Iterable[str],
    limit: int | None,
) -> None:
    """Raises MopdctlError if the harness's files do not hold all of what was asked for.

    `tasks` maps each task to its number of filters. The harness ends well where it failed to write, or wrote a part.
    """
    found, wanted = set(results.get("results") or {}), {*tasks, *groups}
    if found != wanted:
        raise MopdctlError(f"lm-eval results: {_difference(wanted, found)}; evaluate again")
    for task, filters in tasks.items():
        counts = (results.get("n-samples") or {}).get(task) or {"original": 1, "effective": 0}
        expected = counts["original"] if limit is None else min(limit, counts["original"])
        if counts["effective"] != expected:
            raise MopdctlError(f"lm-eval results: {task} has {counts['effective']} documents instead of {expected}")
        lines = len(samples.get(task, ()))
        if lines != expected * filters:
            raise MopdctlError(
                f"lm-eval results: {task} has {lines} sample lines instead of {expected} documents x {filters} filters"
            )


def scores_of(
    results: Mapping[str, Any], samples: Mapping[str, Sequence[Sample]], prompts: Mapping[str, str]
) -> tuple[list[Score], list[dict[str, Any]]]:
    """The scores of one results file, tasks and then groups, and the sample rows that belong to them.

    `prompts` maps each task to the fingerprint of what makes its prompts.
    """
    subtasks: dict[str, list[str]] = results.get("group_subtasks") or {}
    scores: list[Score] = []
    rows: list[dict[str, Any]] = []
    for name in sorted(results["results"], key=lambda name: name in subtasks):
        found = list(_scores_of_one(name, results, samples, prompts))
        if not found and name in subtasks and "sample_len" in results["results"][name]:
            found = [_empty_group(name, results, prompts)]
        scores += found
        for score in found:
            if score.score is not None:
                rows += _rows(score, samples.get(name, ()))
    return scores, rows


def _scores_of_one(
    name: str, results: Mapping[str, Any], samples: Mapping[str, Sequence[Sample]], prompts: Mapping[str, str]
) -> Iterable[Score]:
    entry: Mapping[str, Any] = results["results"][name]
    for key, value in entry.items():
        metric, comma, filter_name = key.partition(",")
        if not comma or (metric.endswith("_stderr") and f"{metric.removesuffix('_stderr')},{filter_name}" in entry):
            continue
        higher = (results["higher_is_better"].get(name) or {}).get(metric)
        score, reason = _value(metric, value)
        if reason is None and higher is None:
            score, reason = None, "the task does not say whether higher is better"
        stderr = _number(entry.get(f"{metric}_stderr,{filter_name}"))
        yield Score(
            benchmark=name,
            metric=metric,
            filter=filter_name,
            higher_is_better=higher is not False,
            score=score,
            stderr=None if score is None or stderr is None else stderr * _factor(metric),
            n=_count(name, metric, filter_name, entry, samples),
            reason=reason,
            identity=_identity(name, results, prompts),
        )


def _value(metric: str, value: Any) -> tuple[float | None, str | None]:
    number = _number(value)
    if metric == "bypass":
        return None, "not scored: the harness was asked for predictions only"
    if isinstance(value, float) and not math.isfinite(value):
        return None, f"not finite ({value})"
    if number is None:
        return None, f"not a number ({str(value)[:40]!r})"
    if is_share(metric) and not 0 <= number <= 1:
        return None, f"{metric} counts as a share, but {number:g} is outside [0, 1]"
    return number * _factor(metric), None


def _factor(metric: str) -> int:
    return 100 if is_share(metric) else 1


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _count(
    name: str, metric: str, filter_name: str, entry: Mapping[str, Any], samples: Mapping[str, Sequence[Sample]]
) -> int:
    """Documents that the metric was computed on: a task may leave a metric out for some."""
    if name in samples:
        return sum(sample["filter"] == filter_name and metric in sample["metrics"] for sample in samples[name])
    return int((entry.get("sample_count") or {}).get(f"{metric},{filter_name}", entry.get("sample_len", 0)))


def _rows(score: Score, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """One row per document; none for a metric that has no number per document, such as a corpus-level one."""
    rows = []
    for sample in samples:
        if sample["filter"] != score.filter or score.metric not in sample["metrics"]:
            continue
        value = sample.get(score.metric)
        if not isinstance(value, int | float):
            return []
        rows.append(
            {
                "benchmark": score.benchmark,
                "metric": score.metric,
                "filter": score.filter,
                "doc_hash": sample["doc_hash"],
                "value": value * _factor(score.metric),
            }
        )
    return rows


def _empty_group(name: str, results: Mapping[str, Any], prompts: Mapping[str, str]) -> Score:
    reason = "the harness found no task of the group with the metric that the group asks for"
    return Score(name, "none", "none", True, None, None, 0, reason, _identity(name, results, prompts))


def _identity(name: str, results: Mapping[str, Any], prompts: Mapping[str, str]) -> dict[str, Any]:
    leaves = _leaves(name, results.get("group_subtasks") or {})
    generation = {leaf: results["configs"][leaf].get("generation_kwargs") for leaf in leaves}
    counts = [results["n-samples"][leaf] for leaf in leaves]
    return {
        "version": results["versions"].get(name),
        "num_fewshot": results["n-shot"].get(name),
        "prompt": prompts[name] if leaves == [name] else fingerprint({leaf: prompts[leaf] for leaf in leaves}),
        "generation": generation[name] if leaves == [name] else fingerprint(generation),
        "limit": results["config"].get("limit") if any(c["effective"] < c["original"] for c in counts) else None,
        "chat_template": results.get("chat_template_sha"),
        "lm_eval": results.get("lm_eval_version"),
    }


def _leaves(name: str, subtasks: Mapping[str, Sequence[str]]) -> list[str]:
    return [leaf for child in subtasks[name] for leaf in _leaves(child, subtasks)] if name in subtasks else [name]


def _difference(wanted: set[str], found: set[str]) -> str:
    parts = {"without": wanted - found, "with an unexpected": found - wanted}
    return " and ".join(f"{word} {', '.join(sorted(names))}" for word, names in parts.items() if names)
