"""Reading: find one fact among a few. The domain that no specialist serves: a frozen copy of the student teaches it."""

from mopdctl.world.examples import Example, Values

_THINGS = ("apples", "plums", "coins", "books")


def make(values: Values) -> Example:
    """`kalo has 31 plums, bremi has 7 coins. How many has bremi?` -> `7`."""
    rng = values.rng
    people = values.words(rng.randint(2, 4))
    facts = {person: (rng.randint(1, 99), rng.choice(_THINGS)) for person in people}
    asked = rng.choice(people)
    told = ", ".join(f"{person} has {number} {thing}" for person, (number, thing) in facts.items())
    answer = facts[asked][0]
    return Example("reading", f"{told}. How many has {asked}?", str(answer), "integer", {"answer": answer})
