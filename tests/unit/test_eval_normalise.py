"""What lm-eval's files say, as scores: one scale, null with a reason, nothing incomplete."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mopdctl.errors import MopdctlError
from mopdctl.evals.normalise import check_complete, is_share, scores_of
from mopdctl.evals.scores import read_scores, score_key, write_scores
from mopdctl.records import Score

Values = dict[str, list[Any]]


def task(
    name: str, entry: dict[str, Any], samples: dict[str, Values], *, better: dict[str, bool], of: int = 100
) -> Any:
    """One task's part of a results file, and its sample lines: filter to metric to one value per document."""
    lines = [
        {"doc_id": i, "doc_hash": f"{name}-{i}", "filter": f, "metrics": [m for m in metrics if i < len(metrics[m])]}
        | {metric: values[i] for metric, values in metrics.items() if i < len(values)}
        for f, metrics in samples.items()
        for i in range(max(map(len, metrics.values())))
    ]
    documents = len(lines) // len(samples)
    part = {
        "results": {name: {"name": name, "alias": name, "sample_len": documents, **entry}},
        "configs": {name: {"task": name, "generation_kwargs": {"until": ["<|end|>"]}}},
        "versions": {name: 1.0},
        "n-shot": {name: 0},
        "higher_is_better": {name: better},
        "n-samples": {name: {"original": of, "effective": documents}},
    }
    return part, {name: lines}


def merged(*parts: Any) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """A results file and the sample files of several tasks, through JSON as lm-eval writes it, bare NaN included."""
    results: dict[str, Any] = {"lm_eval_version": "0.4.13", "chat_template_sha": "5ha", "config": {"limit": 4}}
    samples: dict[str, Any] = {}
    for part, lines in parts:
        samples |= lines
        for key, value in part.items():
            results.setdefault(key, {}).update(value)
    return json.loads(json.dumps(results)), json.loads(json.dumps(samples))


def one(entry: dict[str, Any], values: Values, *, better: dict[str, bool] | None = None) -> Score:
    results, samples = merged(
        task("t", entry, {"none": values}, better=dict.fromkeys(values, True) if better is None else better)
    )
    (score,), _ = scores_of(results, samples, {"t": "p"})
    return score


@pytest.mark.parametrize(
    "metric",
    [
        "acc",
        "acc_norm",
        "ACC",
        "exact_match",
        "em",
        "f1",
        "pass@1",
        "pass_at_1",
        "math_verify",
        "prompt_level_strict_acc",
    ],
)
def test_shares(metric: str) -> None:
    assert is_share(metric)


@pytest.mark.parametrize(
    "metric",
    ["perplexity", "word_perplexity", "bits_per_byte", "bleu", "chrf", "ter", "mcc", "rouge1", "brier_score", "accent"],
)
def test_metrics_that_keep_their_scale(metric: str) -> None:
    assert not is_share(metric)


def test_share_is_shown_out_of_a_hundred() -> None:
    results, samples = merged(
        task(
            "t",
            {"acc,none": 0.75, "acc_stderr,none": 0.25},
            {"none": {"acc": [1, 1.0, True, 0.0]}},
            better={"acc": True},
        )
    )
    (score,), rows = scores_of(results, samples, {"t": "p"})
    assert (score.score, score.stderr, score.n, score.reason) == (75, 25, 4, None)
    assert (score.metric, score.filter, score.higher_is_better) == ("acc", "none", True)
    assert [(row["doc_hash"], row["value"]) for row in rows] == [("t-0", 100), ("t-1", 100), ("t-2", 100), ("t-3", 0)]
    assert score.identity == {
        "version": 1.0,
        "num_fewshot": 0,
        "prompt": "p",
        "generation": {"until": ["<|end|>"]},
        "limit": 4,
        "chat_template": "5ha",
        "lm_eval": "0.4.13",
    }


def test_other_metrics_keep_their_scale() -> None:
    score = one({"bits_per_byte,none": 0.9, "bits_per_byte_stderr,none": 0.1}, {"bits_per_byte": [0.9]})
    assert (score.score, score.stderr) == (0.9, 0.1)


def test_limit_that_cuts_nothing_is_no_limit() -> None:
    results, samples = merged(
        task("t", {"acc,none": 1.0}, {"none": {"acc": [1.0, 1.0]}}, better={"acc": True}, of=2),
    )
    assert scores_of(results, samples, {"t": "p"})[0][0].identity["limit"] is None


@pytest.mark.parametrize(
    ("metric", "value", "reason"),
    [
        ("acc", "N/A", "not a number"),
        ("acc", None, "not a number"),
        ("acc", math.nan, "not finite"),
        ("perplexity", math.inf, "not finite"),
        ("acc", 1.01, "outside"),
        ("f1", 76.0, "outside"),
        ("acc", -0.1, "outside"),
        ("bypass", 999, "predictions only"),
    ],
)
def test_what_is_no_score_is_null_with_a_reason(metric: str, value: Any, reason: str) -> None:
    score = one({f"{metric},none": value, f"{metric}_stderr,none": 0.1}, {metric: [0.5]})
    assert (score.score, score.stderr) == (None, None)
    assert score.reason is not None
    assert reason in score.reason


def test_direction_that_the_task_does_not_state_is_not_guessed() -> None:
    score = one({"loss,none": 0.5}, {"loss": [0.5]}, better={})
    assert score.score is None
    assert score.reason is not None
    assert "higher is better" in score.reason


@pytest.mark.parametrize("stderr", ["N/A", math.nan])
def test_absent_standard_error_is_null_and_the_score_stays(stderr: Any) -> None:
    score = one({"acc,none": 1.0, "acc_stderr,none": stderr}, {"acc": [1.0]})
    assert (score.score, score.stderr, score.reason) == (100, None, None)


def test_lower_is_better() -> None:
    assert not one({"perplexity,none": 9.0}, {"perplexity": [9.0]}, better={"perplexity": False}).higher_is_better


def test_two_filters_are_two_scores_with_their_own_samples() -> None:
    results, samples = merged(
        task(
            "gsm8k",
            {"exact_match,strict-match": 0.0, "exact_match,flexible-extract": 0.5},
            {"strict-match": {"exact_match": [0.0, 0.0]}, "flexible-extract": {"exact_match": [0.0, 1.0]}},
            better={"exact_match": True},
        )
    )
    scores, rows = scores_of(results, samples, {"gsm8k": "p"})
    assert [(s.filter, s.score, s.n) for s in scores] == [("strict-match", 0, 2), ("flexible-extract", 50, 2)]
    assert [(row["filter"], row["value"]) for row in rows][2:] == [("flexible-extract", 0), ("flexible-extract", 100)]


def test_metric_that_a_task_leaves_out_for_some_documents_counts_those_it_has() -> None:
    results, samples = merged(
        task(
            "t",
            {"acc,none": 0.5, "has_answer_acc,none": 1.0},
            {"none": {"acc": [1.0, 0.0, 1.0, 0.0], "has_answer_acc": [1.0]}},
            better={"acc": True, "has_answer_acc": True},
        )
    )
    scores, rows = scores_of(results, samples, {"t": "p"})
    assert [(s.metric, s.n) for s in scores] == [("acc", 4), ("has_answer_acc", 1)]
    assert sum(row["metric"] == "has_answer_acc" for row in rows) == 1


def test_corpus_level_metric_has_a_score_but_no_samples() -> None:
    results, samples = merged(
        task("t", {"f1,none": 0.5}, {"none": {"f1": [[0, 1], [1, 1]]}}, better={"f1": True}),
    )
    scores, rows = scores_of(results, samples, {"t": "p"})
    assert (scores[0].score, rows) == (50, [])


def with_group(entry: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    results, samples = merged(
        *(
            task(name, {"acc,none": value}, {"none": {"acc": [value]}}, better={"acc": True})
            for name, value in (("a", 0.0), ("b", 1.0))
        )
    )
    results["results"]["both"] = {"name": "both", "alias": "both", **entry}
    results["group_subtasks"] = {"both": ["a", "b"]}
    results["versions"]["both"] = "2"
    results["higher_is_better"]["both"] = {"acc": True}
    return results, samples


def test_group_has_a_score_after_its_tasks() -> None:
    entry = {"sample_len": 2, "acc,none": 0.5, "acc_stderr,none": "N/A", "sample_count": {"acc,none": 2}}
    results, samples = with_group(entry)
    scores, rows = scores_of(results, samples, {"a": "pa", "b": "pb"})
    assert [s.benchmark for s in scores] == ["a", "b", "both"]
    assert (scores[2].score, scores[2].n, scores[2].identity["version"]) == (50, 2, "2")
    assert scores[2].identity["prompt"] not in ("pa", "pb")
    assert {row["benchmark"] for row in rows} == {"a", "b"}


def test_group_that_only_collects_has_no_score() -> None:
    assert [s.benchmark for s in scores_of(*with_group({}), {"a": "pa", "b": "pb"})[0]] == ["a", "b"]


def test_group_whose_metric_no_task_has_is_null_with_a_reason() -> None:
    scores, _ = scores_of(*with_group({"sample_len": 2}), {"a": "pa", "b": "pb"})
    assert (scores[2].benchmark, scores[2].score) == ("both", None)
    assert scores[2].reason


def complete() -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    return merged(
        task("t", {"acc,none": 1.0}, {"a": {"acc": [1.0] * 4}, "b": {"acc": [1.0] * 4}}, better={"acc": True})
    )


def test_complete_results_pass() -> None:
    check_complete(*complete(), tasks={"t": 2}, groups=[], limit=4)


@pytest.mark.parametrize(
    ("tasks", "groups", "limit", "said"),
    [
        ({"t": 2, "u": 1}, [], 4, "without u"),
        ({}, [], 4, "unexpected t"),
        ({"t": 2}, ["g"], 4, "without g"),
        ({"t": 2}, [], 5, "4 documents instead of 5"),
        ({"t": 2}, [], None, "4 documents instead of 100"),
        ({"t": 3}, [], 4, "8 sample lines instead of 4 documents x 3"),
    ],
)
def test_incomplete_results_are_a_failure(
    tasks: dict[str, int], groups: list[str], limit: int | None, said: str
) -> None:
    with pytest.raises(MopdctlError, match=said) as failure:
        check_complete(*complete(), tasks=tasks, groups=groups, limit=limit)
    assert failure.value.exit_code == 1


@pytest.mark.parametrize("results", [{}, {"results": {"t": {}}}])
def test_results_that_lack_parts_are_a_failure(results: dict[str, Any]) -> None:
    with pytest.raises(MopdctlError):
        check_complete(results, {}, tasks={"t": 1}, groups=[], limit=1)


def test_scores_survive_their_file(tmp_path: Path) -> None:
    results, samples = merged(
        task("t", {"acc,none": 0.5, "bad,none": math.nan}, {"none": {"acc": [1.0, 0.0]}}, better={"acc": True})
    )
    scores, rows = scores_of(results, samples, {"t": "p"})
    write_scores(tmp_path, "m", scores, rows)
    found = read_scores(tmp_path)
    assert list(found.scores) == scores
    assert found.samples == {score_key(scores[0]): {"t-0": 100.0, "t-1": 0.0}}
