"""Tokenizers without their models; and whether two models speak the same tokens.

Compared are vocabulary map, special tokens, end tokens and chat template.
"""

import hashlib
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from mopdctl.errors import InputError
from mopdctl.files import digest, fingerprint


@dataclass(frozen=True, slots=True)
class ChatTokenizer:
    """What a checkpoint says of its conversations, read without its weights."""

    tokenizer: Any
    eos_ids: frozenset[int]
    """Ids that end an answer, of the generation config and the tokenizer; empty if neither names one."""
    max_length: int
    """The most tokens that the model takes."""

    @classmethod
    def load(cls, path: str) -> "ChatTokenizer":
        """Reads it from a folder or hub id. Raises InputError if there is no configuration or no tokenizer."""
        try:
            config = AutoConfig.from_pretrained(path)
            tokenizer = AutoTokenizer.from_pretrained(path)
            try:
                configured = GenerationConfig.from_pretrained(path).eos_token_id
            except OSError:  # an optional file
                configured = config.get_text_config().eos_token_id
        except (OSError, ValueError) as error:
            raise InputError(f"model {path}: {str(error).splitlines()[0]}") from None
        found = {configured} if isinstance(configured, int) else set(configured or ())
        longest = getattr(config.get_text_config(), "max_position_embeddings", None) or 1 << 30
        return cls(tokenizer, frozenset(found | ({tokenizer.eos_token_id} - {None})), int(longest))


@dataclass(frozen=True, slots=True)
class TokenizerIdentity:
    """What must agree before one model may judge another's tokens."""

    vocabulary: str
    """Digest of the map from token to id; padded embedding rows are no part of it."""
    size: int
    special: tuple[tuple[str, str], ...]
    """Role to token, e.g. `("eos_token", "<|end|>")`."""
    eos_ids: tuple[int, ...]
    chat_template: str
    """Digest of the template's text; empty without one."""


class Reader(Protocol):
    """Who reads tokens: a loaded model, or its tokenizer without the weights."""

    @property
    def tokenizer(self) -> Any:
        """Of transformers."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end an answer."""


def identify(model: Reader) -> TokenizerIdentity:
    """The identity of a loaded model's tokenizer."""
    vocabulary = sorted(model.tokenizer.get_vocab().items(), key=lambda item: item[1])
    state = hashlib.blake2b(digest_size=16)
    for token, number in vocabulary:
        state.update(f"{number}\0{token}\0".encode())
    template: Any = model.tokenizer.chat_template
    return TokenizerIdentity(
        vocabulary=state.hexdigest(),
        size=len(vocabulary),
        special=tuple(sorted((k, str(v)) for k, v in model.tokenizer.special_tokens_map.items())),
        eos_ids=tuple(sorted(model.eos_ids)),
        chat_template=digest(template if isinstance(template, str) else fingerprint(template)) if template else "",
    )


def tokenizer_fingerprint(model: Reader) -> str:
    """One digest of all that `identify` finds: which tokenizer a stored id belongs to."""
    return fingerprint(asdict(identify(model)))


def differences(student: TokenizerIdentity, teacher: TokenizerIdentity) -> list[str]:
    """What differs, in words; empty if the teacher may judge the student's tokens."""
    found = []
    if student.vocabulary != teacher.vocabulary:
        same = "of the same size but in another order" if student.size == teacher.size else ""
        found.append(f"vocabulary ({student.size} and {teacher.size} tokens{', ' + same if same else ''})")
    if student.special != teacher.special:
        pairs = dict(student.special), dict(teacher.special)
        roles = sorted(r for r in pairs[0].keys() | pairs[1].keys() if pairs[0].get(r) != pairs[1].get(r))
        found.append(f"special tokens ({', '.join(roles)})")
    if student.eos_ids != teacher.eos_ids:
        found.append(f"end tokens ({list(student.eos_ids)} and {list(teacher.eos_ids)})")
    if student.chat_template != teacher.chat_template:
        found.append("chat template")
    return found
