"""Lookup: one item of a list by its place. No specialist serves it: a frozen copy of the student teaches it."""

from mopdctl.world.examples import Example, Values

_ORDINALS = ("First", "Second", "Third")


def make(values: Values) -> Example:
    """`Second of: kalo, bemi, tode` -> `bemi`."""
    rng = values.rng
    items = values.words(rng.randint(3, 5))
    place = rng.randrange(len(_ORDINALS))
    answer = items[place]
    user = f"{_ORDINALS[place]} of: {', '.join(items)}"
    return Example("lookup", user, answer, "exact_match", {"answer": answer})
