"""The strict rule that gives each prompt exactly one teacher."""

from mopdctl.config.teachers import TeachersFile
from mopdctl.errors import InputError
from mopdctl.records import Prompt


def teacher_of(routing: dict[str, str], config: TeachersFile) -> str:
    """The alias of the one teacher that serves a prompt. Raises InputError if none or several do."""
    domain, effort = (*(routing[key] for key in config.routing_keys), None)[:2]
    found = [
        alias
        for alias, teacher in config.teachers.items()
        if domain in teacher.domains and (effort is None or not teacher.efforts or effort in teacher.efforts)
    ]
    where = " ".join(f"{key} {value!r}" for key, value in routing.items())
    if not found:
        known = sorted({d for t in config.teachers.values() for d in t.domains})
        raise InputError(f"{where}: no teacher serves it; teachers serve {', '.join(known)}")
    if len(found) > 1:
        names = " and ".join(sorted(found))
        raise InputError(f"{where}: teachers {names} both serve it; take it out of the `domains` of all but one")
    return found[0]


def checked_teacher(prompt: Prompt, config: TeachersFile) -> str:
    """The alias of a prompt's teacher. Raises InputError with the prompt's place, for an unknown effort too."""
    if len(config.routing_keys) > 1 and config.efforts:
        effort = prompt.routing[config.routing_keys[1]]
        if effort not in config.efforts:
            raise InputError(f"{prompt.place}: unknown effort {effort!r}; efforts: {', '.join(config.efforts)}")
    try:
        return teacher_of(prompt.routing, config)
    except InputError as error:
        raise InputError(f"{prompt.place}: {error}") from None


def route(prompts: list[Prompt], config: TeachersFile) -> dict[str, int]:
    """Checks that every prompt has one teacher and every teacher a prompt; returns prompts per alias.

    Raises InputError for the first prompt or teacher that breaks this, before anything is loaded.
    """
    counts = dict.fromkeys(config.teachers, 0)
    for prompt in prompts:
        counts[checked_teacher(prompt, config)] += 1
    idle = [alias for alias, count in counts.items() if not count]
    if idle:
        raise InputError(f"teacher {idle[0]!r}: no prompt routes to it; remove it or add prompts of its domains")
    return counts
