"""How far a text repeats itself: as a whole, by what it compresses to, and in a loop of lines or sentences."""

import re
import zlib

MOST_IN_A_ROW = 4
"""Equal blocks that may follow each other, as in a refrain."""

_WINDOW_BYTES = 2000  # the ratio falls with length: a long honest table would look like a short loop
_SHORT_BYTES = 300  # the ratio of less says little
_LONGEST_LOOP = 20  # lines or sentences that are repeated as a block

_FENCE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_UNIT = re.compile(r"[^\n.!?。！？]+[.!?。！？]*")  # noqa: RUF001 - a line or sentence
_WORDS = re.compile(r"[^\W\d_]{2,} [^\W\d_]{2,}|[\u3040-\u30ff\u3400-\u9fff]{4}")


def least_ratio(text: str) -> float | None:
    """Compressed over raw size of the stretch of text that compresses best; None for a short text."""
    data = " ".join(text.split()).encode(errors="replace")  # indented JSON and padded tables are mostly blanks
    if len(data) < _SHORT_BYTES:
        return None
    last = max(len(data) - _WINDOW_BYTES, 0)
    pieces = [data[start : start + _WINDOW_BYTES] for start in (*range(0, last, _WINDOW_BYTES), last)]
    return min(_compressed_bytes(piece) / len(piece) for piece in pieces)


def _compressed_bytes(data: bytes) -> int:
    # The default buffers of 256 KB take six times longer to set up than a window takes to compress.
    stream = zlib.compressobj(wbits=12, memLevel=5)
    return len(stream.compress(data) + stream.flush())


def repeated(text: str) -> str | None:
    """A line or sentence outside code with which too many equal blocks of lines or sentences begin."""
    units: list[str] = [unit for part in _UNIT.findall(_FENCE.sub("\n", text)) if (unit := part.strip())]
    if len(set(units)) > len(units) - MOST_IN_A_ROW:
        return None
    for period in range(1, min(_LONGEST_LOOP, len(units) // (MOST_IN_A_ROW + 1)) + 1):
        run = 0
        for at, (unit, later) in enumerate(zip(units, units[period:], strict=False), start=1):
            run = run + 1 if unit == later else 0
            # Rulers, brackets and figures may recur: a block counts if there are words in it.
            for words in units[at - period : at] if run >= MOST_IN_A_ROW * period else ():
                if _WORDS.search(words):
                    return words
    return None
