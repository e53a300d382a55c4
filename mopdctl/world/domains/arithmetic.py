"""Arithmetic: a number plus or minus a digit. Short answers; the hard half needs a carry or a borrow."""

from mopdctl.world.examples import Example, Values, wrong_only


def make(values: Values) -> Example:
    """`418+7` -> `425`. 157,000 prompts on seen numbers."""
    a, b = values.number(10, 9999), values.rng.randint(1, 9)
    if values.rng.random() < 0.5:
        user, answer, carries = f"{a}+{b}", a + b, a % 10 + b > 9
    else:
        user, answer, carries = f"{a}-{b}", a - b, a % 10 < b
    return Example("arithmetic", user, str(answer), "integer", {"answer": answer}, basic=not carries)


def near_misses(example: Example) -> list[str]:
    """Off by one or ten, the other operation, another sign, and the right number with something beside it."""
    answer, digit = int(example.answer), int(example.user[-1])
    other = answer - 2 * digit if "+" in example.user else answer + 2 * digit
    numbers = (answer + 1, answer - 1, answer + 10, other, -answer)
    beside = (f"{answer}.0", f"{answer}.", f"{example.user}={answer}", f"{answer} {answer}", f"about {answer}")
    return wrong_only(example.answer, [*map(str, numbers), *beside])
