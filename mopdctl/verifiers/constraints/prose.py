"""Words, sentences and the other parts of a text that constraints count. Rules, not models; each is linear in time."""

import re

_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
# Only from the start of a run of marks, and without giving back: else a long run of dots takes quadratic time.
_END = re.compile(
    r"(?<![.!?\u2026])[.!?\u2026]++[\"'\u201d\u2019)\]*_]*+(?=\s|\Z)"
    r"|[\u3002\uff01\uff1f]++[\u300d\u300f\u201d\u2019]*+"
    r"|\n[^\S\n]*\n"
)
_TITLES = ("Mr.", "Mrs.", "Ms.", "Dr.", "Prof.", "St.")
_NUMBERING = re.compile(r"\d{1,3}\.")
_BULLET = re.compile(r"[-*+\u2022]\s+\S")
_NUMBERED = re.compile(r"\d{1,3}[.)]\s+\S")
_HEADING = re.compile(r"#{1,6}\s+\S")
_PLACEHOLDER = re.compile(r"\[([^\[\]\n]+)\](?!\()")
_HIGHLIGHT = re.compile(r"(?<!\*)(\*{1,2})(?=[^\s*])([^*\n]+)(?<=\S)\1(?!\*)")
_TITLE = re.compile(r"<<([^<>\n]+)>>")


def words(text: str) -> list[str]:
    """Runs of letters and digits; an apostrophe or hyphen inside keeps them one. A run of Chinese is one word."""
    return _WORD.findall(text)


def sentences(text: str) -> list[str]:
    """Pieces that end with `. ! ? ...` before white space, with their CJK forms, or at a blank line.

    A dot ends none before a lower-case letter (e.g. this one), after a title (Dr.) or a list number (1.). A last piece
    without a mark counts; a piece without a letter or digit does not.
    """
    pieces: list[str] = []
    begin, first = 0, -1
    for found in _END.finditer(text):
        end = found.end()
        if found[0][0] == ".":
            if first < begin:
                first = begin + len(text[begin:end]) - len(text[begin:end].lstrip())
            if (
                text[end : end + 40].lstrip()[:1].islower()
                or text.endswith(_TITLES, first, end)
                or _NUMBERING.fullmatch(text, first, end)
            ):
                continue
        pieces.append(text[begin:end])
        begin = end
    pieces.append(text[begin:])
    return [piece.strip() for piece in pieces if any(map(str.isalnum, piece))]


def paragraphs(text: str, *, separator: str | None = None) -> list[str]:
    """What stands between separators, by default blank lines. Empty ones do not count."""
    if separator is not None:
        return [part.strip() for part in text.split(separator) if part.strip()]
    found: list[str] = []
    here: list[str] = []
    for line in [*text.split("\n"), ""]:
        if line.strip():
            here.append(line)
        elif here:
            found.append("\n".join(here).strip())
            here = []
    return found


def lines(text: str) -> list[str]:
    """Lines that are not blank, trimmed."""
    return [line.strip() for line in text.split("\n") if line.strip()]


def bullets(text: str) -> list[str]:
    """Lines that begin with `-`, `*`, `+` or a bullet, a space and something behind it."""
    return [line for line in lines(text) if _BULLET.match(line)]


def numbered_items(text: str) -> list[str]:
    """Lines such as `1. first` or `2) second`."""
    return [line for line in lines(text) if _NUMBERED.match(line)]


def headings(text: str) -> list[str]:
    """Markdown headings, `# so`."""
    return [line for line in lines(text) if _HEADING.match(line)]


def sections(text: str, *, marker: str) -> list[str]:
    """Lines that begin with the marker and a number, `Section 2`, marks of a heading or bold before it allowed."""
    found = []
    for line in lines(text):
        behind = line.lstrip("#*_ ")
        if behind.startswith(marker) and behind[len(marker) :].lstrip()[:1].isdigit():
            found.append(line)
    return found


def placeholders(text: str) -> list[str]:
    """`[address]`, but no Markdown link and no empty box."""
    return [inner for inner in _PLACEHOLDER.findall(text) if inner.strip()]


def highlights(text: str) -> list[str]:
    """`*so*` and `**so**`."""
    return [found[0] for found in _HIGHLIGHT.finditer(text)]


def titles(text: str) -> list[str]:
    """`<<so>>`, on one line."""
    return [inner for inner in _TITLE.findall(text) if inner.strip()]


def capital_words(text: str) -> list[str]:
    """Words of two letters or more, all of them capitals."""
    return [word for word in words(text) if word.isupper() and sum(map(str.isalpha, word)) > 1]


def phrase(text: str, wanted: str) -> int:
    """How often `wanted` stands in the text as a whole word or phrase, in any case."""
    return len(re.findall(rf"(?<!\w){re.escape(wanted)}(?!\w)", text, re.IGNORECASE))
