"""`gen-sft` on the command line: bad input is one line and exit 2, nothing is written that was not asked for."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mopdctl.files import write_text

Cli = Callable[..., SimpleNamespace]
GOOD: dict[str, Any] = {
    "committee": {
        "members": {"a": {"engine": "fake", "model": "fake-chat:words=30", "license": "mit"}},
        "routes": {"chat": {"members": {"a": 1}}},
    },
    "gen": {"name": "made", "committee": "committee.yaml", "seeds": [{"path": "seeds.jsonl", "license": "mit"}]},
    "seeds": "".join(json.dumps({"prompt": f"Say something about {w}.", "domain": "chat"}) + "\n" for w in "abcdef"),
}


def write(folder: Path, *, committee: Any = None, gen: Any = None, seeds: str | None = None) -> Path:
    write_text(folder / "committee.yaml", json.dumps(GOOD["committee"] | (committee or {})))
    write_text(folder / "gen.yaml", json.dumps(GOOD["gen"] | (gen or {})))
    write_text(folder / "seeds.jsonl", GOOD["seeds"] if seeds is None else seeds)
    return folder / "gen.yaml"


def test_one_command_makes_the_data_set_and_says_what_became_of_every_row(tmp_path: Path, cli: Cli) -> None:
    path = write(tmp_path)
    shown = cli("gen-sft", "--config", path, "--workspace", tmp_path / "w", "--json")
    assert shown.code == 0, shown.stderr
    document = json.loads(shown.stdout)
    assert document["requests"] == 6
    assert sum(document["rows"].values()) == 6
    assert document["stages"]["generate"] == "6 in, 6 out"
    card = (tmp_path / "w" / "datasets" / "made" / "README.md").read_text("utf-8")
    assert "| a | fake-chat:words=30 | - | mit | unknown | 6 |" in card


def test_a_dry_run_shows_a_request_per_domain_and_the_cost_and_writes_nothing(tmp_path: Path, cli: Cli) -> None:
    price = {"input_per_million": 1.0, "output_per_million": 2.5}
    members = {"a": {"engine": "fake", "model": "m", "price": price, "sampling": {"max_tokens": 1000}}}
    path = write(tmp_path, committee={"members": members}, gen={"samples": 2})
    before = sorted(tmp_path.rglob("*"))
    shown = cli("gen-sft", "--config", path, "--workspace", tmp_path / "w", "--dry-run", "--json")
    document = json.loads(shown.stdout)
    assert sorted(tmp_path.rglob("*")) == before
    assert document["requests"] == 12
    assert document["members"]["a"]["most_completion_tokens"] == 12_000
    assert document["most_cost_usd"] == pytest.approx(0.03 + 12 * (22 + 32) / 1e6)
    assert document["examples"]["chat"]["body"]["messages"] == [{"role": "user", "content": "Say something about a."}]


def test_a_preview_shows_rows_publishes_nothing_and_its_answers_are_kept(tmp_path: Path, cli: Cli) -> None:
    path = write(tmp_path)
    shown = cli("gen-sft", "--config", path, "--workspace", tmp_path / "w", "--preview", "2")
    assert "[user] Say something about a." in shown.stdout
    assert "2 rows of 2 seeds" in shown.stdout
    assert not (tmp_path / "w" / "datasets").exists()
    done = cli("gen-sft", "--config", path, "--workspace", tmp_path / "w", "--json")
    assert json.loads(done.stdout)["requests"] == 4


def test_more_seeds_than_an_earlier_limit_go_on_from_there(tmp_path: Path, cli: Cli) -> None:
    path = write(tmp_path)
    limited = cli("gen-sft", "--config", path, "--workspace", tmp_path / "w", "--limit", "2", "--json")
    assert json.loads(limited.stdout)["requests"] == 2
    refused = cli("gen-sft", "--config", path, "--workspace", tmp_path / "w")
    assert refused.code == 2
    assert "config.limit was " in refused.stderr
    all_of_them = cli("gen-sft", "--config", path, "--workspace", tmp_path / "w", "--replace", "--json")
    assert json.loads(all_of_them.stdout)["requests"] == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gen": {"sample": 2}}, "unknown key 'sample'; did you mean 'samples'?"),
        ({"gen": {"committee": "nothing.yaml"}}, "nothing.yaml: no such file"),
        ({"gen": {"seeds": [{"path": "nothing.jsonl"}]}}, "nothing.jsonl: no such file"),
        (
            {"gen": {"seeds": [{"path": "seeds.jsonl", "dataset": "x/y"}]}},
            "exactly one of path, dataset and attributes",
        ),
        ({"gen": {"judges": [{"members": ["b"]}]}}, "judge 'b' is no member (has: a)"),
        ({"gen": {"judges": [{"members": ["a"], "quorum": 2}]}}, "quorum 2 of 1 judges can never be reached"),
        ({"gen": {"judges": [{"members": ["a"], "scale": [5, 5]}]}}, "scale"),
        ({"gen": {"filter": {"off": ["langauge"]}}}, "did you mean 'language'?"),
        ({"gen": {"filter": {"languages": ["english"]}}}, "english"),
        ({"gen": {"select": [{"answer": "("}]}}, "not a regular expression"),
        ({"gen": {"reuse": ["nobody"]}}, "'nobody' has no journal"),
        ({"gen": {"dedup": {"against": ["nobody"]}}}, "nobody: no such file"),
        ({"gen": {"decontaminate": {"files": ["nothing.txt"]}}}, "nothing.txt: no such file"),
        ({"gen": {"judges": [{"members": ["a"], "domains": ["chats"]}]}}, "domain 'chats'; did you mean 'chat'?"),
        ({"gen": {"select": [{"domains": ["poetry"]}]}}, "no seed and no route has the domain 'poetry'"),
        ({"gen": {"max_tokens": 1000}}, "give member 'a' sampling.max_tokens"),
        ({"gen": {"name": "../up"}}, "name '../up'"),
        ({"gen": {"max_cost": 1}}, "the price of member 'a' is unknown"),
        ({"committee": {"routes": {"math": {"members": {"a": 1}}}}}, "seeds.jsonl:1: domain 'chat' has no route"),
        ({"committee": {"members": {"a": {"engine": "openai", "model": "m"}}}}, "engine openai needs base_url"),
        ({"committee": {"members": {"a": {"engine": "hf", "model": "nobody"}}}}, "model 'nobody': neither a folder"),
        ({"seeds": ""}, "seeds.jsonl"),
        ({"seeds": "no json\n"}, "seeds.jsonl"),
        (
            {"seeds": json.dumps({"prompt": "q", "domain": "chat", "verifier": "exact"}) + "\n"},
            "unknown verifier 'exact'",
        ),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_made(
    tmp_path: Path, cli: Cli, change: dict[str, Any], message: str
) -> None:
    path = write(tmp_path, **change)
    shown = cli("gen-sft", "--config", path, "--workspace", tmp_path / "w")
    assert shown.code == 2, shown.stderr
    lines = [line for line in shown.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in shown.stderr
    assert not (tmp_path / "w" / "datasets").exists()


def test_a_data_set_of_another_maker_is_not_replaced(tmp_path: Path, cli: Cli) -> None:
    path = write(tmp_path)
    write_text(tmp_path / "w" / "datasets" / "made" / "mine.txt", "precious")
    for more in ([], ["--replace"]):
        shown = cli("gen-sft", "--config", path, "--workspace", tmp_path / "w", *more)
        assert shown.code == 2
        assert "was not made by gen-sft" in shown.stderr
    assert (tmp_path / "w" / "datasets" / "made" / "mine.txt").read_text("utf-8") == "precious"
