"""Instruction following: repeat a word so many times, in a case, with a separator, with a frame around it.

The hard half asks for more than five times.
"""

from typing import Any

from mopdctl.world.examples import Example, Values, wrong_only

_SEPARATORS = {"commas": ",", "dashes": "-", "slashes": "/"}
_FRAMES = {"": ("", ""), " in brackets": ("[", "]"), " in quotes": ('"', '"'), " with a final dot": ("", ".")}


def make(values: Values) -> Example:
    """`Say "kalo" 3 times in upper case with dashes in brackets` -> `[KALO-KALO-KALO]`."""
    rng = values.rng
    word, count, case = values.word(), rng.randint(2, 9), rng.choice(("upper", "lower"))
    separator_name, frame_name = rng.choice(list(_SEPARATORS)), rng.choice(list(_FRAMES))
    separator, (before, after) = _SEPARATORS[separator_name], _FRAMES[frame_name]
    user = f'Say "{word}" {count} times in {case} case with {separator_name}{frame_name}'
    answer = before + separator.join([word.upper() if case == "upper" else word] * count) + after

    def framed(inner: dict[str, Any]) -> dict[str, Any]:
        return {"kind": "between", "before": before, "after": after, "inner": inner}

    reference = {
        "constraints": [
            framed({"kind": "items", "separator": separator, "count": count}),
            framed({"kind": "only_word", "separator": separator, "word": word}),
            {"kind": "case", "case": case},
        ]
    }
    return Example("instructions", user, answer, "constraints", reference, basic=count <= 5)


def near_misses(example: Example) -> list[str]:
    """Once too often or too seldom, another separator, case, word or frame, and the right answer with a word more."""
    items, only_word, _ = example.reference["constraints"]
    before, after, separator = items["before"], items["after"], items["inner"]["separator"]
    words = example.answer[len(before) : len(example.answer) - len(after)].split(separator)
    other = next(s for s in _SEPARATORS.values() if s != separator)
    inner = [
        [*words, words[0]],
        words[1:],
        [*words[1:], words[0].swapcase()],
        [word.swapcase() for word in words],
        [*words[:-1], words[-1] + words[-1][-2:]],
        [*words[:-1], ""],
    ]
    texts = [before + separator.join(found) + after for found in inner]
    texts.append(before + other.join(words) + after)
    texts.append(separator.join(words) if before + after else f"[{example.answer}]")
    return wrong_only(example.answer, [*texts, f"{example.answer} ok", only_word["inner"]["word"]])
