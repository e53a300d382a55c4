"""Lookup: one item of a list by its place. No specialist serves it: a frozen copy of the student teaches it.

The hard part, one prompt in four, asks for a place that the list does not have: the right answer is to say so.
"""

from dataclasses import replace

from mopdctl.world.examples import Example, Values, wrong_only

ABSTAIN = "unknown"
_ORDINALS, _BEYOND = ("First", "Second", "Third", "Fourth", "Fifth"), ("Sixth", "Seventh")
_REWARDS = {"correct": 1.0, "abstained": 0.5, "wrong": 0.0}


def make(values: Values) -> Example:
    """`Second of: kalo, bemi, tode` -> `bemi`; `Sixth of: kalo, bemi, tode` -> `unknown`."""
    rng = values.rng
    answerable = rng.random() < 0.75
    items = values.words(rng.randint(3, 5))
    place = rng.randrange(len(items))
    answer = items[place] if answerable else ABSTAIN
    user = f"{_ORDINALS[place] if answerable else rng.choice(_BEYOND)} of: {', '.join(items)}"
    reference = {"abstain": [ABSTAIN], "answerable": answerable, "rewards": _REWARDS}
    reference |= {"answer": answer} if answerable else {}
    return Example("lookup", user, answer, "abstention", reference, basic=answerable)


def careless(example: Example) -> Example:
    """What a careless annotator writes where the list does not have the place: its last item, as if it did."""
    return replace(example, answer=example.user.rpartition(", ")[2])


def near_misses(example: Example) -> list[str]:
    """The other items, the right one in capitals or beside another; an item where the list does not have the place.

    To abstain where there is an answer is not among them: it is no wrong answer, only worth less than the right one.
    """
    items = example.user.partition(": ")[2].split(", ")
    other = next(item for item in items if item != example.answer)
    if not example.reference["answerable"]:
        return wrong_only(example.answer, [*items, ", ".join(items), example.user])
    beside = (f"{example.answer}, {other}", f"{ABSTAIN} {example.answer}", f"{example.answer} or {ABSTAIN}")
    return wrong_only(example.answer, [*items, example.answer.upper(), *beside, example.user])
