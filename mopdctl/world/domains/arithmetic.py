"""Arithmetic: a number plus or minus a digit. Short answers; the hard half needs a carry or a borrow."""

from mopdctl.world.examples import Example, Values


def make(values: Values) -> Example:
    """`418+7` -> `425`. 157,000 prompts on seen numbers."""
    a, b = values.number(10, 9999), values.rng.randint(1, 9)
    if values.rng.random() < 0.5:
        user, answer, carries = f"{a}+{b}", a + b, a % 10 + b > 9
    else:
        user, answer, carries = f"{a}-{b}", a - b, a % 10 < b
    return Example("arithmetic", user, str(answer), "integer", {"answer": answer}, basic=not carries)
