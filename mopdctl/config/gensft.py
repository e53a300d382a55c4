"""`gen.yaml`: one data set, from seeds to Parquet."""

from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from mopdctl.config.base import Strict


class Attributes(Strict):
    """Seeds made from tables of attributes, so that their mixture is the one asked for."""

    count: int = Field(gt=0)
    """Seeds to make."""
    axes: dict[str, dict[str, float]] = Field(min_length=1)
    """Axis to value to weight, e.g. `topic: {weather: 2, trade: 1}`. Each axis gets its shares exactly (to one row)."""
    tables: dict[str, dict[str, Any]] = {}
    """Axis to value to what the template sees for it instead of the bare word, e.g. a JSON schema."""
    prompt: str
    """Jinja template of the user message over the axes; `{{ schema | tojson }}` writes JSON."""
    difficulty: dict[str, float] = {}
    """Value of the axis `difficulty` to a number in [0, 1], for the tiers."""
    seed: int = Field(default=0, ge=0)
    """Seed of the combination."""


class SeedSource(Strict):
    """Where seeds come from: a file, a `datasets` data set, or tables of attributes."""

    path: Path | None = None
    """JSONL or Parquet rows with `messages` or `prompt`; relative to this file."""
    dataset: str | None = None
    """A hub id or folder for `datasets.load_dataset`."""
    config: str | None = None
    """Configuration of `dataset`."""
    split: str = "train"
    """Split of `dataset`."""
    revision: str | None = None
    """Revision of `dataset`."""
    attributes: Attributes | None = None
    """Makes the seeds here."""
    prompt_field: str = "prompt"
    """Field that holds the prompt where a row has no `messages`."""
    domain: str | None = None
    """Domain of all rows; None takes each row's own field `domain`."""
    source: str | None = None
    """Name of the source in the data set; None takes each row's `source`, else the file's or data set's name."""
    license: str | None = None
    """Licence of the seeds; None takes each row's `license`."""
    limit: int | None = Field(default=None, gt=0)
    """Take this many rows at most."""

    @model_validator(mode="after")
    def _one(self) -> "SeedSource":
        if sum(found is not None for found in (self.path, self.dataset, self.attributes)) != 1:
            raise ValueError("give exactly one of path, dataset and attributes")
        if self.attributes and self.domain is None:
            raise ValueError("seeds from attributes need a domain")
        return self


RUBRIC = """\
Judge how well the answer serves the person who asked. Look for what is wrong or missing before what is good.
The best answer is correct, complete, follows every instruction of the request, and says nothing beside the point."""


class JudgeConfig(Strict):
    """A panel that scores the answers of some domains."""

    members: list[str] = Field(min_length=1)
    """Aliases of the judges in the committee."""
    kind: Literal["rubric", "pairwise", "reward"] = "rubric"
    """`rubric`: each answer alone, on the scale. `pairwise`: each two answers of a seed, in both orders. `reward`: a
    reward model's number (vLLM's `/pooling`)."""
    domains: list[str] = []
    """Domains that it judges; empty judges those that no other panel does."""
    rubric: str = RUBRIC
    """What makes an answer good, in words."""
    scale: tuple[int, int] = (1, 10)
    """Lowest and highest score of `rubric`. A number outside is a parse error, never clamped."""
    quorum: int | None = Field(default=None, gt=0)
    """Judges that must have reached a verdict, else the answer has no score; None: more than half of them."""

    @model_validator(mode="after")
    def _sound(self) -> "JudgeConfig":
        if self.scale[0] >= self.scale[1]:
            raise ValueError("scale: the lowest score must be below the highest")
        if len(set(self.members)) != len(self.members):
            raise ValueError("members: a judge is named twice")
        if self.quorum is not None and self.quorum > len(self.members):
            raise ValueError(f"quorum {self.quorum} of {len(self.members)} judges can never be reached")
        return self

    @property
    def needed(self) -> int:
        """Verdicts that make a score."""
        return self.quorum or len(self.members) // 2 + 1


class SelectConfig(Strict):
    """Which answers of a seed become rows, for some domains."""

    domains: list[str] = []
    """Domains that it is for; empty takes those that no other entry names."""
    strategy: Literal["all", "best", "majority"] = "all"
    """`all`; `best`: the best-scored `keep`; `majority`: those that give the answer most often given."""
    keep: int = Field(default=1, gt=0)
    """Answers per seed, for `best` and `majority`."""
    min_score: float | None = None
    """Answers below are dropped; on the judge's scale."""
    min_votes: int = Field(default=2, gt=0)
    """Votes that the winning answer of `majority` needs; a tie for the first place has no winner."""
    answer: str = r"\\boxed\{([^{}]*)\}"
    """Regular expression whose first group is the answer that is counted; the last match in a text counts."""
    require_verified: bool = False
    """Drop what its verifier did not pass; answers without a verifier stay."""
    require_score: bool = False
    """Drop answers that a panel should have scored and did not (no quorum, judges failed)."""
    beat_reference: bool = False
    """Drop answers that score no higher than the reference member's."""

    @field_validator("answer")
    @classmethod
    def _has_a_group(cls, value: str) -> str:
        import re

        try:
            groups = re.compile(value).groups
        except re.error as error:
            raise ValueError(f"not a regular expression ({error})") from None
        if groups != 1:
            raise ValueError("needs exactly one group, the answer")
        return value


class FilterConfig(Strict):
    """The named rules that every row has to pass, and where each draws its line.

    In their order: truncated, empty, refusal, think_leak, control_tokens, leakage, role_order, tool_pairing,
    tool_schema, language, length, repetition, license, identical_reasoning.
    """

    languages: list[str] = []
    """ISO 639-1 codes that an answer may be written in; empty checks nothing."""
    min_words: int = Field(default=1, ge=0)
    """Shortest answer."""
    max_words: int | None = Field(default=None, gt=0)
    """Longest answer."""
    licenses: list[str] | None = None
    """Licences of seed and member that may stand in the data set; None allows all and writes them down."""
    require_training_terms: bool = False
    """Drop answers of members whose terms do not allow training, or are unknown."""
    refusal_patterns: list[str] = []
    """More regular expressions of refusals."""
    leakage_patterns: list[str] = []
    """More regular expressions of phrases that give the making away, e.g. `according to the passage`."""
    off: list[str] = []
    """Rules by name that are not applied."""


class DedupConfig(Strict):
    """Exact and near duplicates."""

    near: bool = True
    """Find near duplicates too (MinHash, then the true similarity)."""
    threshold: float = Field(default=0.7, ge=0.6, le=1)
    """Jaccard similarity of word n-grams from which two rows are near duplicates."""
    words: int = Field(default=3, gt=0)
    """n of the word n-grams."""
    on: Literal["conversation", "prompt", "answer"] = "conversation"
    """What is compared: the whole conversation, the prompt, or the last answer with its reasoning; never system
    messages. Samples of one prompt share its words: `answer` suits many samples, `conversation` short answers."""
    against: list[str] = []
    """Data sets that rows must not repeat: names in the workspace, folders or files."""


class DecontaminateConfig(Strict):
    """Benchmarks whose questions must not be in the data."""

    tasks: list[str] = []
    """lm-eval tasks, this project's own among them."""
    files: list[Path] = []
    """JSONL or Parquet files of questions (in `question`, `prompt`, `messages` or `text`), or plain text with a
    question a paragraph; relative to this file."""
    ngram: int = Field(default=13, ge=6)
    """Words per n-gram."""
    min_coverage: float = Field(default=0.5, gt=0, le=1)
    """Share of a question's n-grams that make a row a hit."""
    allow: list[Path] = []
    """Text files, a paragraph each, of what proves nothing: instruction templates, quotations."""
    max_document_frequency: int = Field(default=3, gt=0)
    """n-grams that stand in more questions than this of one benchmark are its template."""


class WriteConfig(Strict):
    """The files."""

    validation_share: float = Field(default=0.02, ge=0, lt=1)
    """Share of prompts (never of rows) that goes to the validation split."""
    rows_per_file: int = Field(default=100_000, gt=0)
    """Most rows in one Parquet file."""
    row_group_mb: int = Field(default=16, gt=0, le=128)
    """Most text in one row group, in MB before compression."""
    license: str | None = None
    """Licence of the data set on its card; None says `other` and lists those of its parts."""


class GenConfig(Strict):
    """One data set."""

    name: str
    """Name of the data set to make."""
    committee: Path
    """The committee.yaml; relative to this file."""
    seeds: list[SeedSource] = Field(min_length=1)
    """Where the prompts come from, in this order."""
    samples: int = Field(default=1, gt=0)
    """Answers per seed, each with a random seed of its own."""
    seed: int = Field(default=0, ge=0)
    """Seed of routing, sampling and split."""
    judges: list[JudgeConfig] = []
    """Panels; the first that names a row's domain judges it, else the first without domains."""
    select: list[SelectConfig] = []
    """Which answers become rows; the first entry that names a row's domain holds, else the first without domains, else
    all that the rules pass."""
    filter: FilterConfig = FilterConfig()
    """Rules that every row has to pass."""
    dedup: DedupConfig = DedupConfig()
    """Duplicates."""
    decontaminate: DecontaminateConfig = DecontaminateConfig()
    """Benchmarks to keep out."""
    write: WriteConfig = WriteConfig()
    """Split, sizes and licence of the files that are written."""
    reuse: list[str] = []
    """Names of other data sets of the workspace whose paid answers are taken where the request is the same."""
    limit: int | None = Field(default=None, gt=0)
    """Take this many seeds at most, over all sources."""
    max_cost: float | None = Field(default=None, gt=0)
    """USD; no request is begun that could go beyond."""
    max_tokens: int | None = Field(default=None, gt=0)
    """Prompt and answer tokens over the whole run; no request is begun that could go beyond."""

    def panel(self, domain: str) -> JudgeConfig | None:
        """Who judges a domain."""
        return _for_domain(self.judges, domain)

    def selection(self, domain: str) -> SelectConfig:
        """How answers of a domain are selected."""
        return _for_domain(self.select, domain) or SelectConfig()


EntryT = TypeVar("EntryT", JudgeConfig, SelectConfig)


def _for_domain(entries: list[EntryT], domain: str) -> EntryT | None:
    named = [entry for entry in entries if domain in entry.domains]
    return next(iter(named or [entry for entry in entries if not entry.domains]), None)
