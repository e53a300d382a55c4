"""The words of a text, and the parts of a test question that are judged."""

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

Hashes = npt.NDArray[np.uint64]

MIN_WORDS = 6
"""Fewer words cannot be told from chance."""
PARTS = ("question", "question without its choices", "answer")

_CHOICES = re.compile(r"^[ \t]*A[.):]|\(A\)", re.MULTILINE)
_END_OF_LINE_HYPHEN = re.compile(r"[-\u2010\u00ad](?<=[^\W\d_].)[ \t\r]*\n[\s>]*(?=[^\W\d_])")
_IDEOGRAPHS = re.compile(r"[\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff]")


@dataclass(frozen=True, slots=True)
class Document:
    """One test question with its choices, if it has any; what comes before "A." or "(A)" is also judged alone."""

    benchmark: str
    document_id: str
    text: str
    answer: str = ""


def normalise(text: str) -> str:
    """The words of a text, a blank between two.

    NFKC, case folded. Letters, marks and digits make words; everything else separates them, so that line breaks,
    quoting, Markdown and punctuation do not matter, nor does the sign of a number. Chinese and Japanese characters are
    words of their own. Scripts that part neither words nor sentences, such as Khmer, make few and long words.
    """
    return " ".join(unicodedata.normalize("NFKC", text).casefold().translate(_CHARACTERS).split())


class _Characters(dict[int, str]):
    """What becomes of each character, worked out when it is first met."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        category = unicodedata.category(character)
        if category == "Cf":  # soft hyphens and joiners stand inside words
            self[code] = ""
        elif _IDEOGRAPHS.match(character):
            self[code] = f" {character} "
        else:
            self[code] = character if category[0] in "LMN" else " "
        return self[code]


_CHARACTERS = _Characters()


def readings(text: str) -> Iterator["Words"]:
    """The words of a text as it stands and, if that differs, with the words joined that end in a hyphen at a line."""
    joined = _END_OF_LINE_HYPHEN.sub("", text) if "\n" in text else text
    for reading in (text,) if joined == text else (text, joined):  # the hyphen may be one of the word's own
        yield Words.of(normalise(reading))


@dataclass(frozen=True, slots=True)
class Words:
    """A normalised text as bytes, with the places where its words begin and end."""

    data: bytes
    starts: list[int]
    ends: list[int]

    @classmethod
    def of(cls, text: str) -> "Words":
        """From a normalised text."""
        data = text.encode()
        blanks = np.flatnonzero(np.frombuffer(data, np.uint8) == ord(" "))
        return cls(data, [0, *(blanks + 1).tolist()], [*blanks.tolist(), len(data)])

    def span(self, start: int, end: int) -> bytes:
        """The words from number `start` to before number `end`."""
        return self.data[self.starts[start] : self.ends[end - 1]]

    def hash(self, start: int, end: int) -> int:
        """The hash of those words."""
        return xxh3_64_intdigest(self.span(start, end))

    def hashes(self, size: int) -> Hashes:
        """The hash of each run of `size` words. Inlined `hash`: this is where the time goes."""
        data, bounds = self.data, zip(self.starts, self.ends[size - 1 :], strict=False)
        return np.array([xxh3_64_intdigest(data[start:end]) for start, end in bounds], np.uint64)


@dataclass(frozen=True, slots=True)
class Part:
    """Something of a document that is judged by itself."""

    owner: int
    """Number of its document within the benchmark."""
    name: int
    """Number in `PARTS`."""
    size: int
    """In words."""
    text: str
    """Normalised."""


def judged_parts(group: Sequence[Document], ngram: int, most: int) -> list[Part]:
    """The parts of the documents of one benchmark that are long enough: an answer needs `ngram` words, the others 6.

    What more than half of the documents, and more than `most`, begin or end with is left out.
    """
    stems = [_CHOICES.split(document.text, maxsplit=1) for document in group]
    kinds = (
        _without_template([normalise(document.text) for document in group], most),
        _without_template([normalise(stem[0]) if len(stem) > 1 else "" for stem in stems], most),
        _without_template([normalise(document.answer) for document in group], most),
    )
    least = (MIN_WORDS, MIN_WORDS, ngram)
    return [
        Part(owner, name, size, text)
        for owner, texts in enumerate(zip(*kinds, strict=True))
        for name, text in enumerate(texts)
        if (size := text.count(" ") + 1) >= least[name]
    ]


def _without_template(texts: list[str], most: int) -> list[str]:
    """The texts without what more than half of them, and more than `most`, begin or end with."""
    for _ in range(2):  # once from the front and once, with the words turned round, from the back
        template = _shared_beginning(texts, most)
        rests = [text.removeprefix(template) for text in texts]
        kept = (rest if rest.count(" ") + 1 >= MIN_WORDS else text for rest, text in zip(rests, texts, strict=True))
        texts = [" ".join(reversed(text.split(" "))) for text in kept]
    return texts


def _shared_beginning(texts: Iterable[str], most: int) -> str:
    ordered = sorted(f"{text} " for text in texts if text)
    shared = ""
    for word in ordered[len(ordered) // 2].split() if ordered else ():  # what most begin with, the middle one does too
        longer = f"{shared}{word} "
        count = bisect_left(ordered, f"{longer}\U0010ffff") - bisect_left(ordered, longer)
        if count <= max(most, len(ordered) / 2):
            break
        shared = longer
    return shared
