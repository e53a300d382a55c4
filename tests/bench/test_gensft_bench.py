"""The gen-sft bench without its rivals: what it gives to both sides, what it counts, what it runs."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mopdctl.bench import frame, gensft
from mopdctl.bench.frame import Spent
from mopdctl.bench.gensft import Job, Runs, Side, Sizes
from mopdctl.bench.gensft_rivals import data_designer, httpx_loop
from mopdctl.config.base import load_config
from mopdctl.config.committee import CommitteeFile
from mopdctl.config.gensft import DedupConfig, FilterConfig, GenConfig
from mopdctl.errors import MopdctlError
from mopdctl.files import write_json

URL = "http://127.0.0.1:8399/v1"


def test_prompts_differ_and_a_longer_list_begins_with_the_shorter() -> None:
    found = list(gensft.prompts(500))
    assert len(set(found)) == 500
    assert list(gensft.prompts(20)) == found[:20]
    assert {len(prompt.split()) for prompt in found} == {14}


def test_our_configuration_is_the_defaults_with_64_at_once(tmp_path: Path) -> None:
    path = gensft.write_config(tmp_path, seeds=tmp_path / "seeds.jsonl", url=URL)
    config = load_config(GenConfig, path)
    assert (config.samples, config.judges, config.filter, config.dedup) == (1, [], FilterConfig(), DedupConfig())
    assert config.dedup.near
    (member,) = load_config(CommitteeFile, tmp_path / config.committee).members.values()
    assert (member.engine, member.base_url, member.max_concurrency) == ("openai", URL, 64)
    assert member.sampling.body() == {
        "temperature": data_designer.TEMPERATURE,
        "max_tokens": data_designer.MAX_TOKENS,
    }


def test_the_sides_ask_for_as_many_answers_at_once() -> None:
    assert httpx_loop.CONCURRENCY == data_designer.CONCURRENCY == 64
    assert httpx_loop.CONCURRENCY % httpx_loop.CLIENTS == 0


def test_bodies_are_those_that_gen_sft_sends(tmp_path: Path) -> None:
    gensft.write_prompts(tmp_path, 20)
    seeds, bodies = gensft.prompt_files(tmp_path, 20)
    asked = [json.loads(line)["prompt"] for line in seeds.read_text().splitlines()]
    found = [json.loads(line) for line in bodies.read_text().splitlines()]
    assert [body["messages"] for body in found] == [[{"role": "user", "content": prompt}] for prompt in asked]
    assert all(body.keys() == {"model", "messages", "temperature", "max_tokens", "seed"} for body in found)
    assert len({body["seed"] for body in found}) == 20


def test_our_command_makes_its_files_where_it_runs(tmp_path: Path) -> None:
    job = Job(tmp_path / "seeds.jsonl", tmp_path / "bodies.jsonl", 3, URL, tmp_path)
    command = gensft.our_command(job)
    assert command[1:4] == ["-m", "mopdctl", "gen-sft"]
    assert Path(command[command.index("--config") + 1]).is_file()
    assert Path(command[command.index("--workspace") + 1]).parent == tmp_path


def test_rows_of_each_side_are_counted_where_it_leaves_them(tmp_path: Path) -> None:
    write_json(tmp_path / "workspace" / "datasets" / "bench" / "manifest.json", {"rows": {"train": 5, "validation": 2}})
    (tmp_path / "out.jsonl").write_text("{}\n{}\n{}\n")
    (tmp_path / "artifacts" / "dataset").mkdir(parents=True)
    for number, rows in enumerate((2, 4)):
        pq.write_table(pa.table({"answer": ["x"] * rows}), tmp_path / "artifacts" / "dataset" / f"{number}.parquet")
    python = Path("python")
    assert gensft.OURS.rows_made(tmp_path) == 7
    assert gensft.loop_side(python).rows_made(tmp_path) == 3
    assert gensft.designer_side(python).rows_made(tmp_path) == 6


def runs(folder: Path, monkeypatch: pytest.MonkeyPatch, *, lost: int = 0, unasked: int = 0) -> tuple[Runs, list[str]]:
    """Runs of sides that do nothing, and the log of what was run. Rows cost 1 ms and 1 KiB over 1 MiB."""
    log: list[str] = []

    @contextmanager
    def fake_server(stats: Path) -> Iterator[str]:
        yield URL
        write_json(stats, {"billed": int(log[-1].split()[1]) - unasked})

    def side(name: str) -> Side:
        def command(job: Job) -> list[str]:
            assert not list(job.folder.iterdir())
            log.append(f"{name} {job.rows}")
            return [str(job.rows)]

        return Side(command, lambda folder: int(log[-1].split()[1]) - lost)

    monkeypatch.setattr(gensft, "fake_server", fake_server)
    monkeypatch.setattr(
        gensft, "spent", lambda command, cores: Spent(int(command[0]) / 1000, 2**20 + int(command[0]) * 2**10)
    )
    return Runs(folder, {name: side(name) for name in ("ours", "loop", "designer")}), log


@pytest.mark.parametrize(("lost", "unasked"), [(1, 0), (0, 1)])
def test_a_run_that_lacks_a_row_is_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int, unasked: int
) -> None:
    found, _ = runs(tmp_path, monkeypatch, lost=lost, unasked=unasked)
    with pytest.raises(MopdctlError, match="loop was billed"):
        found.run("loop", 7)
    assert not list(tmp_path.iterdir())


def test_what_was_timed_gives_the_memory_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, log = runs(tmp_path, monkeypatch)
    sizes = Sizes(loop_rows=1024, designer_rows=512, few_rows=256, many_rows=2048)
    rows = [frame.measure(case, runs=1) for case in gensft.cases(sizes, found)]
    assert [(row.unit, row.bar) for row in rows] == [
        ("s per 1,000", "ratio >= 0.7"),
        ("s per 1,000", "ratio >= 2"),
        ("MiB", "none"),
        ("MiB", "none"),
        ("times", "ours <= 1.25 times"),
    ]
    assert [row.ours for row in rows] == [1, 1, 2, 1.5, 2.4]
    assert log == [
        *("ours 256", "loop 256", "ours 1024", "loop 1024"),
        *("ours 256", "designer 256", "ours 512", "designer 512"),
        *("ours 2048", "loop 2048"),
    ]


@pytest.mark.slow
def test_a_run_of_ours_is_measured_against_the_server(tmp_path: Path) -> None:
    gensft.write_prompts(tmp_path, 70)
    found = Runs(tmp_path, {"ours": gensft.OURS}).run("ours", 70)
    assert 0 < found.wall_s < 120
    assert found.peak_bytes > 2**20
