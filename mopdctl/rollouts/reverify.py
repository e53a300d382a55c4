"""`mopdctl rollout --reverify`: the rollouts of a store are checked again, without a model and without a new token."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mopdctl.engines.fake import FakeModel
from mopdctl.errors import InputError
from mopdctl.records import Prompt, Sample
from mopdctl.rollouts.prompts import read_prompts
from mopdctl.rollouts.run import FakeText, plain_token_ids, scores
from mopdctl.rollouts.verdicts import Pool, Trouble, check_verifiable, verdict_columns, verdicts_on
from mopdctl.runs import Workspace
from mopdctl.store import schema
from mopdctl.store.store import Store, StoreWriter
from mopdctl.train.spans import ChatModel
from mopdctl.verifiers.pool import VerifierPool

BATCH = 1024
"""Samples that are in memory together, more or less."""
NO_PROMPT, OTHER_PROMPT, NO_VERIFIER, JUDGED = "no_prompt", "other_prompt", "no_verifier", "judged_by_a_model"

OnNote = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Reader:
    """What turns a store's tokens into text and a prompt into the store's tokens."""

    chat: ChatModel
    token_ids: Callable[[Prompt], tuple[int, ...]]


def reverify(
    name: str,
    prompts: Path,
    workspace: Workspace,
    *,
    model: str | None = None,
    dry_run: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_note: OnNote = lambda line: None,
) -> dict[str, Any]:
    """Checks the committed samples of the store `name` with what their prompts in the file say now; returns counts.

    Verdicts are replaced in one commit; tokens and their streams stay where they are. A process that dies on the way
    leaves all old verdicts. A sample keeps what it had if the file does not have its prompt, has another one under its
    id, or names no verifier for it. `dry_run` checks everything and writes nothing.

    `model` is the checkpoint whose tokenizer reads the tokens; None looks in the workspace for one that fits. Raises
    InputError if there is no store, no such tokenizer, or a prompt whose verifier or reference is unusable.
    """
    folder = workspace.rollouts(name)
    store = Store(folder)
    by_id = {prompt.prompt_id: prompt for prompt in read_prompts(prompts, ("domain",), required=False)}
    with ExitStack() as held:
        pool = held.enter_context(VerifierPool())
        check_verifiable(by_id.values(), pool)
        reader = find_reader(store.manifest.identity, workspace, name=name, model=model)
        writer = None
        if not dry_run:
            writer = held.enter_context(StoreWriter(folder, store.manifest.identity))
            store = writer.store
        for line in store.warnings:
            on_note(f"warning: {line}")
        before = store.meta_table(["reward", "verdict"]).to_pydict()
        tally = Tally()
        for done in _check(store, by_id, reader, pool, tally):
            on_progress(done, store.manifest.rows)
        if writer:
            writer.rescore(tally.changes)
        for line in [*tally.trouble.lines(), *tally.left_lines(prompts)]:
            on_note(line)
        return tally.document(folder, before)


@dataclass(slots=True)
class Tally:
    """What became of each sample."""

    changes: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Row of `meta` to the new values of its verdict columns, where one of them differs."""
    unchanged: int = 0
    judged: Counter[str] = field(default_factory=Counter)
    """States of those that had no verdict before."""
    changed: Counter[str] = field(default_factory=Counter)
    left: dict[str, list[str]] = field(
        default_factory=lambda: {NO_PROMPT: [], OTHER_PROMPT: [], NO_VERIFIER: [], JUDGED: []}
    )
    """Prompt ids of the samples that keep what they had, by reason."""
    trouble: Trouble = field(default_factory=Trouble)

    def see(self, row: int, sample: Sample, columns: dict[str, Any]) -> None:
        """Takes in one verdict."""
        if all(getattr(sample, column) == columns[column] for column in schema.VERDICT):
            self.unchanged += 1
            return
        self.changes[row] = columns
        if sample.verdict is None:
            self.judged[columns["verdict"]] += 1
        else:
            self.changed[_transition(sample, columns)] += 1

    def left_lines(self, prompts: Path) -> list[str]:
        """What stays as it was although it could not be checked, for a human."""
        why = {NO_PROMPT: f"{prompts} does not have their prompts", OTHER_PROMPT: f"{prompts} has other prompts there"}
        lines = []
        why[JUDGED] = "a judge had a say in the rewards of their groups, and a verifier alone cannot give them again"
        for reason, text in why.items():
            if ids := self.left[reason]:
                names = sorted(set(ids))
                shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
                lines.append(f"{len(ids)} answers keep what they had: {text} ({shown})")
        return lines

    def document(self, folder: Path, before: dict[str, list[Any]]) -> dict[str, Any]:
        """The result: every sample in one of the counts, and the store's scores before and after."""
        after = {name: list(values) for name, values in before.items()}
        for row, columns in self.changes.items():
            for name in after:
                after[name][row] = columns[name]
        return {
            "store": str(folder),
            "samples": len(before["verdict"]),
            "unchanged": self.unchanged,
            "newly_judged": dict(sorted(self.judged.items())),
            "changed": dict(sorted(self.changed.items())),
            **{reason: len(ids) for reason, ids in self.left.items()},
            "before": scores(before),
            **scores(after),
        }


def _transition(sample: Sample, columns: dict[str, Any]) -> str:
    states = f"{sample.verdict} -> {columns['verdict']}"
    old, new = sample.reward, columns["reward"]
    if old is None or new is None:
        return states if sample.verdict != columns["verdict"] else f"{states}, by {columns['verifier']}"
    if old == new:
        return f"{states}, same reward, by {columns['verifier']}"
    return f"{states}, {'higher' if new > old else 'lower'} reward"


def _check(store: Store, by_id: dict[str, Prompt], reader: Reader, pool: Pool, tally: Tally) -> Iterator[int]:
    """Checks all samples in store order; yields how many are done after each batch."""
    judged = _judged_groups(store)
    prompts: dict[str, Prompt] = {}
    same: dict[tuple[str, bytes], bool] = {}
    waiting: list[tuple[int, Sample]] = []
    done = 0

    def flush() -> None:
        verdicts = verdicts_on([sample for _, sample in waiting], prompts, reader.chat, pool)
        tally.trouble.see([sample for _, sample in waiting], verdicts)
        for (row, sample), verdict in zip(waiting, verdicts, strict=True):
            assert verdict is not None, "only samples of prompts with a verifier wait"
            tally.see(row, sample, verdict_columns(verdict))
        waiting.clear()

    for _, _, samples in store.scan_groups():
        for row, sample in enumerate(samples, start=done):
            # `rl` puts the environment's name before the prompt's own id, and keeps it as the domain.
            prompt = by_id.get(sample.prompt_id) or by_id.get(sample.prompt_id.removeprefix(f"{sample.domain}/"))
            if prompt is None:
                tally.left[NO_PROMPT].append(sample.prompt_id)
                continue
            key = sample.prompt_id, sample.prompt_ids.tobytes()
            if key not in same:
                same[key] = _answers(sample, prompt, reader)
            if not same[key]:
                tally.left[OTHER_PROMPT].append(sample.prompt_id)
            elif sample.group_id in judged:
                tally.left[JUDGED].append(sample.prompt_id)
            elif prompt.verifier is None:
                tally.left[NO_VERIFIER].append(sample.prompt_id)
            else:
                prompts[sample.prompt_id] = prompt
                waiting.append((row, sample))
        done += len(samples)
        if len(waiting) >= BATCH:
            flush()
            yield done
    flush()
    yield done


def _judged_groups(store: Store) -> set[str]:
    """Groups in which a judge had a say.

    An answer that the verifier gave no reward keeps the verifier's name there. A reward without the judge's part would
    stand beside mixed ones.
    """
    found = store.meta_table(["group_id", "verifier"]).to_pydict()
    pairs = zip(found["group_id"], found["verifier"], strict=True)
    return {group_id for group_id, verifier in pairs if (verifier or "").startswith(("mix:", "judge/"))}


def _answers(sample: Sample, prompt: Prompt, reader: Reader) -> bool:
    """Whether a sample answers this prompt, and not another one that has the same id in another file.

    Its tokens are those that the chat template makes of the prompt, or their text holds the last message: a run may
    have given the template further arguments.
    """
    with suppress(InputError):  # the template cannot write it: then it did not
        if reader.token_ids(prompt) == tuple(sample.prompt_ids.tolist()):
            return True
    content = prompt.messages[-1].get("content")
    asked = "".join(content.split()) if isinstance(content, str) else ""
    return bool(asked) and asked in "".join(reader.chat.tokenizer.decode(sample.prompt_ids.tolist()).split())


def find_reader(identity: dict[str, Any], workspace: Workspace, *, name: str, model: str | None) -> Reader:
    """The tokenizer of a store: that of `model`, or of a model that the store or the workspace knows.

    A store keeps its tokenizer's fingerprint and, of a local checkpoint, no path: one may be moved. Raises InputError
    if the fingerprint of `model` is another, or if nothing fits.
    """
    wanted = str(identity.get("tokenizer"))
    maker = str(identity.get("model"))
    if maker.partition(":")[0] == "fake":
        fake = FakeModel.parse(maker)
        return Reader(FakeText(), lambda prompt: fake.prompt_ids(str(prompt.messages[-1].get("content") or "")))
    tried = [model] if model else [*_hub_ids(identity), *_checkpoints(workspace, name)]
    for candidate in tried:
        try:
            chat, found = _load(workspace.resolve_model(candidate))
        except InputError:
            if model:
                raise
            continue
        if found == wanted:
            return Reader(chat, partial(plain_token_ids, chat))
    place = workspace.rollouts(name)
    if model:
        raise InputError(
            f"--model {model}: its tokenizer is not the one that wrote {place}; name a checkpoint that has it"
        )
    raise InputError(
        f"{place}: no checkpoint in {workspace.root} has the tokenizer that wrote it; name one with --model"
    )


def _load(path: str) -> tuple[ChatModel, str]:
    """A checkpoint's tokenizer and its fingerprint, without the weights."""
    from mopdctl.engines.tokenizers import ChatTokenizer, tokenizer_fingerprint

    chat: Any = ChatTokenizer.load(path)  # the fingerprint asks a loaded model for no more than this has
    return chat, tokenizer_fingerprint(chat)


def _hub_ids(identity: dict[str, Any]) -> list[str]:
    """Models of the hub that a store names as its maker; local ones are digests."""
    documents = [identity, identity.get("run") or {}]
    named = [document.get(key) for document in documents for key in ("model", "student")]
    return [value for value in named if isinstance(value, str) and "/" in value]


def _checkpoints(workspace: Workspace, name: str) -> list[str]:
    """The checkpoints of the workspace: first the one that the store's own run made."""
    found = sorted(path.name for path in (workspace.root / "checkpoints").glob("[!.]*") if path.is_dir())
    return sorted(found, key=lambda known: known != name)
