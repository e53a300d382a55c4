"""One task of the tiny world, and the values it is made of."""

import json
import random
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_CONSONANTS = "bdfklmnt"
_VOWELS = "aeio"
SYLLABLES = [c + v for c in _CONSONANTS for v in _VOWELS]


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with its gold answer and what a verifier needs to check any other answer."""

    domain: str
    user: str
    answer: str
    """The gold answer as the model would write it."""
    verifier: str
    reference: dict[str, Any]
    basic: bool = True
    """Whether it belongs to the easy half of its domain, which is most of what the SFT mixture holds."""
    tools: tuple[dict[str, Any], ...] | None = None
    tool_call: dict[str, Any] | None = None
    """The gold call; `answer` is then its text form in the chat template of this world."""
    environment: dict[str, Any] | None = None
    """The tool environment of a conversation of several turns."""
    calls: tuple[dict[str, Any], ...] = ()
    """The gold calls of such a conversation, one a turn; `answer` is the message that ends it."""

    @property
    def key(self) -> str:
        """What makes the prompt distinct; the split into train, dev and test hangs on it alone.

        The setup of an environment is no part of it: what a model reads first must be new in a test.
        """
        return f"{self.domain}|{self.user}"

    def assistant(self) -> dict[str, Any]:
        """The gold answer as a chat message: of several turns the last."""
        if self.tool_call is None:
            return {"role": "assistant", "content": self.answer}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": self.tool_call}]}


def call_text(call: dict[str, Any]) -> str:
    """A tool call as models of this world write it."""
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def wrong_only(answer: str, candidates: Iterable[str]) -> list[str]:
    """Those of `candidates` that are not the answer, each once: the wrong answers that a check must refuse."""
    return [text for text in dict.fromkeys(candidates) if text.strip() != answer]


def is_novel(value: str) -> bool:
    """Whether a word or number belongs to the eighth that no training prompt ever contains."""
    return zlib.crc32(value.encode()) % 8 == 0


class Values:
    """Draws words and numbers: seen ones only, or (for test documents on unseen values) with novel ones among them."""

    def __init__(self, rng: random.Random, *, novel: bool) -> None:
        self.rng = rng
        self._novel = novel
        self.used_novel = False

    def word(self) -> str:
        """A word of two syllables, sometimes three: 33,792 in all."""
        while True:
            length = 3 if self.rng.random() < 0.25 else 2
            word = "".join(self.rng.choice(SYLLABLES) for _ in range(length))
            if self._accept(word):
                return word

    def words(self, count: int) -> list[str]:
        """`count` different words."""
        found: list[str] = []
        while len(found) < count:
            if (word := self.word()) not in found:
                found.append(word)
        return found

    def number(self, low: int, high: int) -> int:
        """An integer in [low, high], both included. One- and two-digit numbers are all seen."""
        while True:
            number = self.rng.randint(low, high)
            if number < 100 or self._accept(str(number)):
                return number

    def _accept(self, value: str) -> bool:
        if not is_novel(value):
            return not self._novel or self.rng.random() < 0.5
        self.used_novel |= self._novel
        return self._novel
