"""What two models are compared on, as tokens: prompts that both answer, answers that are given, held-out text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mopdctl.engines.hf import HFModel
from mopdctl.errors import InputError
from mopdctl.files import read_text
from mopdctl.runs import Workspace
from mopdctl.store.store import Store
from mopdctl.train.data import conversation_ids, prompt_token_ids, row_messages, row_tools
from mopdctl.train.rows import Row, count_rows, iterate_rows, spread


@dataclass(frozen=True, slots=True)
class Passage:
    """T tokens, of which those with mask 1 are weighed."""

    token_ids: tuple[int, ...]
    mask: tuple[int, ...]

    @property
    def pair(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What comes before the first weighed token, and the rest: as scorers take it."""
        start = self.mask.index(1)
        return self.token_ids[:start], self.token_ids[start:]

    @property
    def rest_mask(self) -> tuple[int, ...]:
        """The mask of the rest."""
        return self.mask[self.mask.index(1) :]


@dataclass(frozen=True, slots=True)
class Material:
    """Everything that a comparison is made on."""

    prompts: tuple[tuple[int, ...], ...]
    """Each once; both models answer them."""
    unanswered: frozenset[int]
    """Which of them come without an answer, so that the one of the unquantized model is weighed."""
    answers: tuple[Passage, ...]
    text: tuple[Passage, ...]
    dropped: int
    """Rows in which no token is left to weigh or to answer once they are cut."""


def read_material(
    model: HFModel, sources: Sequence[str], workspace: Workspace, *, rows: int, max_length: int, base: Path
) -> Material:
    """Reads up to `rows` rows of each source, spread over all of it, cut to `max_length` tokens (the model's at most).

    A source is a rollout store of the workspace by its name (its prompts and answers, tokens as they are stored); a
    JSONL or Parquet file of `messages`, of `prompt`, or of held-out `text`; or a `.txt` file, which is held-out text
    and is cut into windows. Conversations that end with the assistant give a prompt and an answer, others a prompt.
    Raises InputError for a source that is absent, or a row that cannot be used.
    """
    check_sources(sources, workspace, base=base)
    longest = min(max_length, model.max_length)
    prompts: dict[tuple[int, ...], None] = {}
    answered: set[tuple[int, ...]] = set()
    answers: list[Passage] = []
    text: list[Passage] = []
    dropped = 0
    for source in sources:
        for prompt, passage in _read(model, source, workspace, rows, longest, base):
            if prompt is None:
                kept = _cut(passage, longest)
                text += [kept] if kept else []
                dropped += kept is None
                continue
            kept = _cut(passage, longest) if passage else None
            if len(prompt) >= longest or (passage and not kept):
                dropped += 1
                continue
            prompts.setdefault(prompt)
            if kept:
                answered.add(prompt)
                answers.append(kept)
    unanswered = frozenset(i for i, prompt in enumerate(prompts) if prompt not in answered)
    return Material(tuple(prompts), unanswered, tuple(answers), tuple(text), dropped)


def check_sources(sources: Sequence[str], workspace: Workspace, *, base: Path) -> None:
    """Raises InputError for a source that is neither a file nor a rollout store, or whose rows are of no known kind.

    Said before long work, not after.
    """
    for source in sources:
        path = base / source
        if not path.is_file():
            if not _is_store(source, workspace):
                raise InputError(f"{source!r}: neither a file nor a rollout store in {workspace.root}; check the name")
        elif path.suffix != ".txt":
            for place, row in iterate_rows(path):
                if not _is_text(row):
                    row_messages(row, place)


def _is_store(source: str, workspace: Workspace) -> bool:
    return Path(source).name == source and workspace.rollouts(source).is_dir()


_Found = tuple[tuple[int, ...] | None, Passage | None]
"""Prompt and answer; without a prompt, held-out text."""


def _read(model: HFModel, source: str, workspace: Workspace, rows: int, longest: int, base: Path) -> Iterator[_Found]:
    path = base / source
    if not path.is_file():
        return _of_store(Store(workspace.rollouts(source)), rows)
    if path.suffix == ".txt":
        windows = _windows(model, path, longest)
        return (windows[number] for number in spread(len(windows), rows))
    wanted = set(spread(count_rows(path), rows))
    found = (entry for number, entry in enumerate(iterate_rows(path)) if number in wanted)
    return (_of_row(model, row, place) for place, row in found)


def _of_store(store: Store, rows: int) -> Iterator[_Found]:
    samples = store.read(spread(int(store.manifest.rows), rows))
    store.close()
    for sample in samples:
        prompt = tuple(sample.prompt_ids.tolist())
        mask = [0] * len(prompt) + sample.response_mask.astype(int).tolist()
        yield prompt, Passage(tuple(sample.tokens.tolist()), tuple(mask))


def _of_row(model: HFModel, row: Row, place: str) -> _Found:
    if _is_text(row):
        return None, _plain(_tokens(model, row["text"]))
    messages, tools = row_messages(row, place), row_tools(row, place)
    if messages[-1]["role"] != "assistant":
        return tuple(prompt_token_ids(model, messages, tools, {}, place=place)), None
    prompt = tuple(prompt_token_ids(model, messages[:-1], tools, {}, place=place))
    ids, mask = conversation_ids(model, messages, tools, place=place, loss_on="last_assistant")
    return prompt, Passage(tuple(ids), tuple(mask))


def _is_text(row: Row) -> bool:
    return isinstance(row.get("text"), str) and "messages" not in row and "prompt" not in row


def _windows(model: HFModel, path: Path, longest: int) -> list[_Found]:
    ids = _tokens(model, read_text(path))
    return [(None, _plain(ids[start : start + longest])) for start in range(0, len(ids), longest)]


def _tokens(model: HFModel, text: str) -> list[int]:
    return list(model.tokenizer(text, add_special_tokens=False)["input_ids"])


def _plain(token_ids: Sequence[int]) -> Passage:
    """Text: every token is weighed but the first, which nothing comes before."""
    return Passage(tuple(token_ids), tuple([0] + [1] * (len(token_ids) - 1))[: len(token_ids)])


def _cut(passage: Passage | None, longest: int) -> Passage | None:
    """The passage up to so many tokens; None if none is left to weigh, or the first of all is to be."""
    if passage is None:
        return None
    mask = passage.mask[:longest]
    return Passage(passage.token_ids[:longest], mask) if any(mask) and not mask[0] else None
