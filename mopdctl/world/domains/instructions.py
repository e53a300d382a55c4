"""Instruction following: repeat a word so many times, in a case, with a separator, with a frame around it.

The hard half asks for more than five times.
"""

from typing import Any

from mopdctl.world.examples import Example, Values

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
