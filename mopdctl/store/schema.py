"""Names, types and encodings of everything that a rollout store keeps. The one module that names columns.

T tokens of a sample (prompt and response), N of them loss-active, K candidates of a teacher, H its hidden size.
A per-token stream has one entry per loss-active token, in order: what carries no loss has no entry to be wrong about.
"""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

VERSION = 2
"""Raised when a reader of the old layout could misread the new one."""
NAME = f"mopdctl.store/{VERSION}"


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its type, whether it may be null, how its leaf is encoded, and what it says."""

    name: str
    type: pa.DataType
    doc: str
    nullable: bool = False
    encoding: str = "PLAIN"
    """`DICTIONARY`, `BYTE_STREAM_SPLIT` or `PLAIN` of the column's one leaf."""
    compression: str = "ZSTD"

    @property
    def leaf(self) -> str:
        """The path that Parquet knows the values by. pyarrow ignores options under any other name, without a word."""
        return f"{self.name}.list.element" if pa.types.is_list(self.type) else self.name

    @property
    def field(self) -> pa.Field:
        """The Arrow field."""
        return pa.field(self.name, self.type, nullable=self.nullable)


def _list(of: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", of, nullable=False))


# fmt: off
META_COLUMNS = (
    Column("sample_id", pa.string(), "Derived from prompt, sample number and seed; unique in the store."),
    Column("prompt_id", pa.string(), "The prompt's own id.", encoding="DICTIONARY"),
    Column("group_id", pa.string(), "Samples that are compared with each other share it.", encoding="DICTIONARY"),
    Column("generation_index", pa.int32(), "Number of the sample in its group, from 0."),
    Column("domain", pa.string(), "What the prompt is about; routes it to its teacher.", encoding="DICTIONARY"),
    Column("teacher_id", pa.string(), "Alias of the one teacher; empty if nobody judges.", encoding="DICTIONARY"),
    Column("policy_version_min", pa.int32(), "Optimizer steps that the weights of its oldest token had seen."),
    Column("policy_version_max", pa.int32(), "Optimizer steps that the weights of its newest token had seen."),
    Column("prompt_length", pa.int32(), "Tokens of the prompt."),
    Column("response_length", pa.int32(), "Tokens after the prompt, tool results included."),
    Column("loss_tokens", pa.int32(), "Loss-active tokens, N."),
    Column("finish_reason", pa.string(), "`stop`, `length`, `max_turns` or `tool_lost`.", encoding="DICTIONARY"),
    Column("reward", pa.float32(), "Reward of the whole sample, 0 to 1; null unless the verdict is `ok`.",
           nullable=True),
    Column("verdict", pa.string(), "How its verification ended, `ok` or a state; null if nobody checked.",
           nullable=True, encoding="DICTIONARY"),
    Column("verifier", pa.string(), "`name/version` of what checked it; null if nobody did.", nullable=True,
           encoding="DICTIONARY"),
    Column("verdict_label", pa.string(), "The verifier's class of the outcome; null where it knows none.",
           nullable=True, encoding="DICTIONARY"),
    Column("attempt", pa.int32(), "How many processes wrote at it before the one that finished it."),
    Column("tokenizer_fingerprint", pa.string(), "Which tokenizer the ids belong to.", encoding="DICTIONARY"),
    Column("sampling_fingerprint", pa.string(), "Model, temperature and budget it was sampled with.",
           encoding="DICTIONARY"),
    Column("payload_file", pa.string(), "Where its payload is: file inside the store,", encoding="DICTIONARY"),
    Column("payload_row_group", pa.int32(), "row group of that file,"),
    Column("payload_row", pa.int32(), "row of that group."),
    Column("payload_crc", pa.uint32(), "CRC-32 of its payload, column by column."),
)
PAYLOAD_COLUMNS = (
    Column("sample_id", pa.string(), "As in `meta`."),
    Column("tokens", _list(pa.int32()), "Prompt and response, [T].", encoding="DICTIONARY"),
    Column("loss_mask", _list(pa.bool_()), "True where a token carries loss, [T]; N are true."),
    Column("behavior_logprobs", _list(pa.float32()), "Natural log-probability under the sampler, [N].",
           encoding="BYTE_STREAM_SPLIT"),
    Column("teacher_logprobs", _list(pa.float32()), "Natural log-probability under the teacher, [N].", nullable=True,
           encoding="BYTE_STREAM_SPLIT"),
    Column("teacher_topk_ids", _list(pa.int32()), "The teacher's likeliest tokens, [N * K] flat.", nullable=True,
           encoding="DICTIONARY"),
    Column("teacher_topk_logprobs", _list(pa.float32()), "Their natural log-probabilities, [N * K] flat.",
           nullable=True, encoding="BYTE_STREAM_SPLIT"),
    Column("teacher_hidden", pa.binary(), "The teacher's last hidden states, [N * H] bfloat16, little-endian.",
           nullable=True, compression="UNCOMPRESSED"),
    Column("rewards", _list(pa.float32()), "Rewards as they came, one per judged event.", nullable=True),
)
# fmt: on

META = pa.schema([column.field for column in META_COLUMNS])
PAYLOAD = pa.schema([column.field for column in PAYLOAD_COLUMNS])

STREAMS = tuple(column.name for column in PAYLOAD_COLUMNS if column.name != "sample_id")
"""What a sample's CRC covers, in this order."""
LOCATION = ("payload_file", "payload_row_group", "payload_row", "payload_crc")
"""The columns of `meta` that the store fills in; all others are the sample's own."""

VERDICT = ("reward", "verdict", "verifier", "verdict_label")
"""The columns of `meta` that a later verification may replace; all others stay as they were committed."""
SINCE_2 = VERDICT[1:]
"""Columns of `meta` that layout 1 does not have; they are read as null there."""
OK = "ok"
"""The one verdict that carries a reward."""

DOMAIN = "domain"
TEACHER = "teacher_id"
POLICY_MIN = "policy_version_min"
POLICY_MAX = "policy_version_max"
PROMPT_LENGTH = "prompt_length"
RESPONSE_LENGTH = "response_length"
LOSS_TOKENS = "loss_tokens"
FINISH_REASON = "finish_reason"
PLANNING = (DOMAIN, TEACHER, POLICY_MIN, POLICY_MAX, PROMPT_LENGTH, RESPONSE_LENGTH, LOSS_TOKENS, FINISH_REASON)
"""The columns of `meta` that a plan may be made from."""

META_GROUP_ROWS = 128 * 1024
PAYLOAD_GROUP_ROWS = 64
PAYLOAD_GROUP_TOKENS = 512 * 1024
"""A payload row group ends at so many rows or tokens, whichever comes first; one longer sample is a group of its own.
One random row costs its whole group: 0.9 ms at 64 rows, 386 ms at 20,000."""


def document() -> dict[str, Any]:
    """The layout as a JSON document, kept in `schemas/store.json`."""
    tables = {"meta": META_COLUMNS, "payload": PAYLOAD_COLUMNS}
    return {
        "schema": NAME,
        "row_groups": {
            "meta": {"rows": META_GROUP_ROWS},
            "payload": {"rows": PAYLOAD_GROUP_ROWS, "tokens": PAYLOAD_GROUP_TOKENS},
        },
        **{
            table: [
                {
                    "name": column.name,
                    "type": str(column.type),
                    "nullable": column.nullable,
                    "encoding": column.encoding,
                    "compression": column.compression,
                    "doc": column.doc,
                }
                for column in columns
            ]
            for table, columns in tables.items()
        },
    }
