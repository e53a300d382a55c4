"""Arithmetic: a number plus or minus a digit or a round ten. Short answers; the hard half needs a carry or a borrow."""

from mopdctl.world.examples import Example, Values


def make(values: Values) -> Example:
    """`412 + 90` -> `502`."""
    a = values.number(100, 9999)
    b = values.rng.randint(1, 9) * values.rng.choice((1, 10))
    if values.rng.random() < 0.5:
        user, answer = f"{a}+{b}", a + b
    else:
        user, answer = f"{a}-{b}", a - b
    return Example("arithmetic", user, str(answer), "integer", {"answer": answer})
