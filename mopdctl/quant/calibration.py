"""Rows of tokens that a model is run on to learn what its layers read: from a rollout store, or from rows of text."""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from mopdctl.config.quant import CalibrationConfig
from mopdctl.engines.tokenizers import ChatTokenizer, tokenizer_fingerprint
from mopdctl.errors import InputError
from mopdctl.files import fingerprint
from mopdctl.runs import Workspace
from mopdctl.store.store import Store
from mopdctl.train.data import row_messages, row_tools, template_errors
from mopdctl.train.rows import Row, count_rows, data_files, iterate_rows, spread


@dataclass(frozen=True, slots=True)
class CalibrationRows:
    """Token ids to run, and where they come from."""

    token_ids: tuple[tuple[int, ...], ...]
    source: str
    available: int
    """Rows that the source holds."""
    cut: int
    """Rows that were longer than `max_length`, of which the beginning was taken."""
    empty: int
    """Rows left out because they have no token."""

    @property
    def digest(self) -> str:
        """Of the token ids."""
        return fingerprint(self.token_ids)

    @property
    def document(self) -> dict[str, Any]:
        """What a checkpoint says of its calibration, as JSON."""
        return {
            "source": self.source,
            "rows": len(self.token_ids),
            "tokens": sum(map(len, self.token_ids)),
            "available": self.available,
            "cut": self.cut,
            "empty": self.empty,
            "digest": self.digest,
        }


def calibration_rows(config: CalibrationConfig, model: str, workspace: Workspace, *, base: Path) -> CalibrationRows:
    """Up to `samples` rows, spread evenly over all that the source holds, so that none of its parts is left out.

    Rows of a store are prompt and answer as their tokens were stored. Rows of a file are `messages`, written by the
    chat template, or `text`. The same source gives the same rows.

    Args:
        config: the source, how many rows, and the tokens at which they are cut (or what the model takes, if less).
        model: folder or hub id, whose tokenizer is used.
        workspace: where stores and data sets are.
        base: folder that a relative path in `config` starts from.

    Raises:
        InputError: the source is absent, holds no tokens, a row cannot be used, or a store holds another tokenizer's
            tokens.
    """
    reader = ChatTokenizer.load(model)
    if config.store is not None:
        source, (available, found) = config.store, _of_store(config, reader, workspace)
    else:
        assert config.data is not None  # the configuration has one of them
        source, (available, found) = str(config.data), _of_files(config.data, config.samples, reader, workspace, base)
    limit = min(config.max_length, reader.max_length)
    rows = tuple(row[:limit] for row in found if row)
    if not rows:
        raise InputError(f"calibration {source}: holds no tokens; give rows of `messages` or `text`")
    return CalibrationRows(rows, source, available, sum(len(row) > limit for row in found), found.count(()))


_Found = tuple[int, list[tuple[int, ...]]]
"""Rows that there are, and the tokens of those that were taken."""


def _of_store(config: CalibrationConfig, reader: ChatTokenizer, workspace: Workspace) -> _Found:
    folder = workspace.rollouts(str(config.store))
    store = Store(folder)
    available = int(store.manifest.rows)
    samples = store.read(spread(available, config.samples))
    store.close()
    own = tokenizer_fingerprint(reader)
    for sample in samples:
        if sample.tokenizer_fingerprint not in ("", own):
            raise InputError(
                f"{folder}: sample {sample.sample_id} was written by another tokenizer than the model's, so that its "
                "tokens mean something else; calibrate on a store of this model, or on text (`data`)"
            )
        if len(sample.tokens) and int(sample.tokens.max()) >= len(reader.tokenizer):
            raise InputError(f"{folder}: sample {sample.sample_id} holds tokens that the model does not know")
    return available, [tuple(sample.tokens.tolist()) for sample in samples]


def _of_files(data: Path, samples: int, reader: ChatTokenizer, workspace: Workspace, base: Path) -> _Found:
    files = data_files(data, base=base, workspace=workspace.root)
    available = sum(map(count_rows, files))
    wanted = set(spread(available, samples))
    rows = chain.from_iterable(map(iterate_rows, files))
    return available, [_tokens(reader, row, place) for number, (place, row) in enumerate(rows) if number in wanted]


def _tokens(reader: ChatTokenizer, row: Row, place: str) -> tuple[int, ...]:
    if "messages" not in row:
        if not isinstance(row.get("text"), str):
            raise InputError(f"{place}: has neither 'messages' nor 'text'; calibration needs one of them")
        return tuple(reader.tokenizer(row["text"])["input_ids"])
    messages, tools = row_messages(row, place), row_tools(row, place)
    if reader.tokenizer.chat_template is None:
        raise InputError(f"{place}: has 'messages', but the model's tokenizer has no chat template; give 'text'")
    with template_errors(place):
        found = reader.tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=True)
    return tuple(found["input_ids"])
