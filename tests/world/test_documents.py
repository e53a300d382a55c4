"""The test documents of the tiny world are new to a model that was trained on it, and there is enough to train on."""

import json
import re
from collections import Counter
from functools import cache
from itertools import islice
from pathlib import Path

import pytest

from mopdctl.runs import shipped
from mopdctl.world import documents
from mopdctl.world.data import TEST_SIZE, generate, generate_mixture
from mopdctl.world.domains import DOMAINS, SPECIALIST_DOMAINS
from mopdctl.world.examples import Example, is_novel

SEEDS = (0, 1, 2, "another")
EXAMPLES = 20_000

every_domain = pytest.mark.parametrize("domain", DOMAINS)


@cache
def rows(domain: str) -> list[dict]:
    text = (shipped("sample_data") / f"{domain}_test.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


@cache
def training_prompts(domain: str) -> Counter[str]:
    return Counter(example.user for example in training(domain))


@cache
def training(domain: str) -> list[Example]:
    share = EXAMPLES // len(SEEDS)
    return [example for seed in SEEDS for example in islice(generate(domain, "train", seed=seed), share)]


def values(prompts) -> set[str]:
    return {value for prompt in prompts for value in re.findall(r"[a-z]+|[0-9]+", prompt)}


@every_domain
def test_documents_are_distinct_and_half_of_them_novel(domain: str) -> None:
    assert len({row.get("messages", row["prompt"]) for row in rows(domain)}) == len(rows(domain)) == TEST_SIZE
    assert [row["novel"] for row in rows(domain)] == [False, True] * (TEST_SIZE // 2)


@every_domain
def test_wrong_answers_are_several_and_never_the_right_one(domain: str) -> None:
    for row in rows(domain):
        assert len(set(row["wrong"])) == len(row["wrong"]) >= 4
        assert row["target"] not in [text.strip() for text in row["wrong"]]


@every_domain
def test_no_prompt_is_a_training_prompt(domain: str) -> None:
    assert not {row["prompt"] for row in rows(domain)} & training_prompts(domain).keys()


@every_domain
def test_novel_documents_hold_a_value_that_training_never_shows(domain: str) -> None:
    seen = values(training_prompts(domain))
    for row in rows(domain):
        unseen = {value for value in values([row["prompt"]]) if is_novel(value)} - seen
        assert bool(unseen) == row["novel"], row["prompt"]


@every_domain
def test_training_has_at_least_a_hundred_thousand_prompts(domain: str) -> None:
    # Of n draws with probabilities p, n (n - 1) / 2 * sum(p^2) pairs are equal, and 1 / sum(p^2) is at most the number
    # of different prompts: the fewer repeats, the more prompts there must be.
    # What lies in an environment is part of what is asked.
    different = Counter(json.dumps([example.user, example.environment]) for example in training(domain))
    repeats = sum(count * (count - 1) // 2 for count in different.values())
    assert EXAMPLES * (EXAMPLES - 1) / 2 / max(repeats, 1) >= 100_000


@pytest.mark.parametrize("domain", SPECIALIST_DOMAINS)
def test_the_mixture_holds_few_of_what_specialists_are_for(domain: str) -> None:
    mixture = islice(generate_mixture(domain, seed=0), 1000)
    assert 0.03 < sum(not example.basic for example in mixture) / 1000 < 0.15


def test_check_tells_stale_absent_and_left_over_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(documents, "document_files", lambda: {f"{name}_test.jsonl": "{}\n" for name in "abc"})
    assert documents.main(["--folder", str(tmp_path)]) == 0
    assert documents.main(["--check", "--folder", str(tmp_path)]) == 0
    stale, absent, *_ = sorted(tmp_path.glob("*_test.jsonl"))
    stale.write_text(stale.read_text("utf-8") + "\n", "utf-8")
    absent.unlink()
    (tmp_path / "gone_test.jsonl").write_text("", "utf-8")
    assert documents.main(["--check", "--folder", str(tmp_path)]) == 3
    said = capsys.readouterr().err
    assert all(name in said for name in (stale.name, absent.name, "gone_test.jsonl"))


def test_shipped_documents_are_fresh() -> None:
    assert documents.main(["--check"]) == 0
