"""`mopdctl gen-sft`."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mopdctl.cli.options import DEFAULT_WORKSPACE, DryRunOption, JsonOption, SetOption, WorkspaceOption
from mopdctl.cli.output import Progress, note, result, show, stdout_reserved

if TYPE_CHECKING:
    from mopdctl.gensft.ask import Progress as Asked
    from mopdctl.gensft.ask import Spending
    from mopdctl.gensft.question_parts import Document
    from mopdctl.gensft.spec import Spec
    from mopdctl.runs import Workspace


def gen_sft(
    config: Annotated[
        Path | None, typer.Option("--config", help="The gen.yaml: seeds, committee, judges, rules, name.")
    ] = None,
    from_teachers: Annotated[
        Path | None, typer.Option("--from-teachers", help="A teachers.yaml instead: its teachers answer its prompts.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the data set to make.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Take this many seeds at most.")] = None,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="Answers per seed.")] = None,
    max_cost: Annotated[float | None, typer.Option("--max-cost", help="Stop before more than this many USD.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Stop before more tokens.")] = None,
    preview: Annotated[int, typer.Option("--preview", min=0, help="Make rows of so many seeds and show them.")] = 0,
    retry_rejected: Annotated[
        bool, typer.Option("--retry-rejected", help="Ask again for what a server once refused for good.")
    ] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Build the data set of this name anew.")] = False,
    settings: SetOption = None,
    workspace: WorkspaceOption = DEFAULT_WORKSPACE,
    as_json: JsonOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Generate SFT data with a committee of models: sample, judge, filter, deduplicate, decontaminate, write.

    \b
    See one request per domain and what all of it may cost, then a few rows, then make the data set:
      mopdctl gen-sft --config gen.yaml --dry-run
      mopdctl gen-sft --config gen.yaml --preview 5
      mopdctl gen-sft --config gen.yaml --max-cost 20

    \b
    The same answers under other rules, as another data set, paid for once:
      mopdctl gen-sft --config gen.yaml --name strict --set filter.min_words=20 --set 'reuse=[sample-sft]'

    \b
    What the teachers of a distillation say to its prompts, where their verifiers pass it:
      mopdctl gen-sft --from-teachers teachers.yaml --name teachers-answers --samples 4

    A budget (--max-cost, --max-tokens) stops the run with exit code 0 and `complete: no`; a larger one goes on.

    Every response is in the run's journal before anything is made of it. A run that was stopped goes on when the same
    command is given again, and asks for nothing that it has.
    """
    from mopdctl.errors import InputError
    from mopdctl.runs import Workspace

    if (config is None) == (from_teachers is None):
        raise InputError("give one of --config gen.yaml and --from-teachers teachers.yaml")
    flags = {
        "name": name,
        "limit": preview or limit,
        "samples": samples,
        "max_cost": max_cost,
        "max_tokens": max_tokens,
    }
    place = Workspace(workspace)
    spec = _spec(config, from_teachers, place, flags, settings or [])
    with stdout_reserved():
        from mopdctl.gensft.spec import finished

        if dry_run:
            from mopdctl.gensft.estimate import dry_run as estimate

            if not preview:
                finished(spec, replace=replace)
            document = estimate(spec)
        else:
            from mopdctl.gensft.run import run

            document = run(
                spec,
                task_documents=_task_documents,
                replace=replace,
                preview=bool(preview),
                retry_rejected=retry_rejected,
                on_progress=_ProgressLine(spec.config.name),
                on_note=note,
            )
    if dry_run:
        show(document, as_json=as_json)
    elif preview:
        _preview(document, as_json=as_json)
    else:
        show(_summary(document, spec.target), as_json=as_json)


def _spec(
    config: Path | None, from_teachers: Path | None, place: "Workspace", flags: dict[str, Any], settings: list[str]
) -> "Spec":
    """What the one of the two files asks for that is given."""
    if config is not None:
        from mopdctl.config.gensft import GenConfig
        from mopdctl.config.overrides import load_with_overrides

        loaded = load_with_overrides(GenConfig, config, flags, settings)
        with stdout_reserved():
            from mopdctl.gensft.spec import prepare

            return prepare(loaded, place, base=config.parent)
    assert from_teachers is not None
    with stdout_reserved():
        from mopdctl.gensft.from_teachers import prepare_from_teachers

        return prepare_from_teachers(from_teachers, place, flags=flags, settings=settings)


def _task_documents(tasks: list[str]) -> "Iterable[Document]":
    if not tasks:
        return
    from mopdctl.evals.harness import listening
    from mopdctl.evals.texts import task_documents
    from mopdctl.gensft.question_parts import Document
    from mopdctl.runs import shipped

    with listening(note):
        for benchmark, document_id, question, answer in task_documents(tasks, shipped("tasks")):
            yield Document(benchmark, document_id, question, answer)


class _ProgressLine:
    """One line for each phase: rows, rate, tokens a second, cost, time left, failures by state."""

    def __init__(self, label: str) -> None:
        self._label, self._phase = label, ""
        self._done, self._next = -1, 0.0
        self._line: Progress | None = None
        self._began = time.monotonic()

    def __call__(self, phase: str, figures: "Asked", spending: "Spending") -> None:
        now = time.monotonic()
        last = figures.total is not None and figures.done >= figures.total
        if phase == self._phase and (figures.done == self._done or (now < self._next and not last)):
            return
        self._done, self._next = figures.done, now + 0.1
        if phase != self._phase or self._line is None:
            self._phase, self._began = phase, now
            self._line = Progress(f"{self._label}: {phase}", figures.total, done=figures.found)
        self._line.update(figures.done, self._detail(figures, spending))

    def _detail(self, figures: "Asked", spending: "Spending") -> str:
        parts = []
        if figures.tokens:
            parts.append(f"{figures.tokens / max(time.monotonic() - self._began, 1e-9):,.0f} tokens/s")
        if spending.cost:
            parts.append(f"{spending.cost:.4f} USD" + ("+" if spending.unpriced else ""))
        parts += [f"{state} {count:,}" for state, count in sorted(figures.states.items()) if state != "ok"]
        return "  ".join(parts)


def _summary(document: dict[str, Any], target: Path) -> dict[str, Any]:
    """What a person wants to know first; the rest is in the manifest."""
    shown = ("name", "rows", "complete", "stopped", "requests", "cost_usd", "domains", "warnings")
    stages = {
        s["stage"]: f"{s['in']} in, {s['out']} out"
        + (f" ({', '.join(f'{reason} {count}' for reason, count in s['dropped'].items())})" if s["dropped"] else "")
        for s in document["stages"]
    }
    return {"dataset": str(target)} | {k: document[k] for k in shown if k in document} | {"stages": stages}


def _preview(document: dict[str, Any], *, as_json: bool) -> None:
    import pyarrow.parquet as pq

    rows = []
    for path in sorted(Path(document["dataset"]).glob("data/*.parquet")):
        rows += pq.read_table(path, columns=["domain", "generator", "score", "messages", "tools"]).to_pylist()
    for row in rows:
        row["messages"] = [{k: v for k, v in m.items() if v is not None} for m in row["messages"]]
    if as_json:
        show({"rows": rows, "stages": document["stages"], "requests": document["requests"]}, as_json=True)
        return
    for row in rows:
        score = "" if row["score"] is None else f", score {row['score']:g}"
        result(f"--- {row['domain']}, by {row['generator']}{score}")
        for message in row["messages"]:
            if message.get("reasoning_content"):
                result(f"[{message['role']}, reasoning] {message['reasoning_content']}")
            calls = [f"{c['function']['name']}({c['function']['arguments']})" for c in message.get("tool_calls", [])]
            result(f"[{message['role']}] {' '.join([message.get('content') or '', *calls]).strip()}")
    result(f"{len(rows)} rows of {document['stages'][0]['out']} seeds; their answers are kept for the run")
