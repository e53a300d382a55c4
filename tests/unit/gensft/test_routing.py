"""Who answers which seed: shares, tiers, fall-backs, and requests that depend on nothing else."""

from collections import Counter
from typing import Any

import pytest

from mopdctl.config.base import parse
from mopdctl.config.committee import CommitteeFile, Sampling
from mopdctl.errors import InputError
from mopdctl.files import digest
from mopdctl.gensft.records import Seed
from mopdctl.gensft.routing import REFERENCE, Router, pick


def seed(number: int = 0, domain: str = "math", difficulty: float | None = None, **more: Any) -> Seed:
    messages = more.pop("messages", ({"role": "user", "content": f"question {number}"},))
    return Seed(digest(str(number)), messages, None, domain, "test", "mit", difficulty, **more)


def committee(routes: dict[str, Any], **members: dict[str, Any]) -> CommitteeFile:
    plain = {alias: {"engine": "fake", "model": f"m-{alias}"} for alias in "abc"}
    document = {"members": plain | members, "routes": routes}
    return parse(CommitteeFile, document, source="committee.yaml")


def router(routes: dict[str, Any], *, samples: int = 1, run_seed: int = 0, **members: dict[str, Any]) -> Router:
    found = committee(routes, **members)
    return Router(found, dict.fromkeys(found.members, "fake"), samples=samples, seed=run_seed)


def test_shares_follow_the_weights_and_the_choice_is_the_seeds_own() -> None:
    routes = router({"math": {"members": {"a": 3, "b": 1}}})
    found = Counter(routes.chains(seed(i))[0][1][0].member for i in range(2000))
    assert 0.72 < found["a"] / 2000 < 0.78
    again = [routes.chains(seed(i))[0][1][0] for i in reversed(range(100))][::-1]
    assert again == [routes.chains(seed(i))[0][1][0] for i in range(100)]


def test_hard_seeds_go_to_the_frontier_and_those_without_a_difficulty_to_the_bulk() -> None:
    tiers = {"middle": {"members": {"a": 1}}, "frontier": {"members": {"b": 1}, "min_difficulty": 0.8}}
    routes = router({"math": {"tiers": tiers}})
    found = {d: routes.chains(seed(difficulty=d))[0][1][0].member for d in (None, 0.0, 0.79, 0.8, 1.0)}
    assert found == {None: "a", 0.0: "a", 0.79: "a", 0.8: "b", 1.0: "b"}


def test_fall_backs_follow_in_their_order_without_the_chosen_one() -> None:
    routes = router({"math": {"members": {"b": 1}, "fallbacks": ["c", "b", "a"]}})
    assert [request.member for request in routes.chains(seed())[0][1]] == ["b", "c", "a"]


def test_the_reference_is_asked_once_and_last() -> None:
    routes = router({"math": {"members": {"a": 1}, "reference": "c", "samples": 3}}, samples=1)
    assert [(i, chain[0].member) for i, chain in routes.chains(seed())] == [
        (0, "a"),
        (1, "a"),
        (2, "a"),
        (REFERENCE, "c"),
    ]


def test_an_unknown_domain_takes_the_default_route_or_is_an_error_that_names_the_row() -> None:
    assert router({"default": {"members": {"a": 1}}}).route(seed(domain="poetry")).members == {"a": 1}
    with pytest.raises(InputError, match=r"seeds.jsonl:3: domain 'poetry' has no route.*has: math"):
        router({"math": {"members": {"a": 1}}}).route(seed(domain="poetry", place="seeds.jsonl:3"))


def test_the_system_prompt_for_generating_does_not_replace_the_seeds_own() -> None:
    routes = router({"math": {"members": {"a": 1}, "system_prompt": "Think."}})
    assert routes.chains(seed())[0][1][0].body["messages"][0] == {"role": "system", "content": "Think."}
    own = ({"role": "system", "content": "Mine."}, {"role": "user", "content": "q"})
    assert routes.chains(seed(messages=own))[0][1][0].body["messages"] == list(own)


def test_sampling_of_the_route_goes_over_the_members_and_nothing_unset_is_sent() -> None:
    base = {"engine": "fake", "model": "m", "sampling": {"temperature": 0.7, "max_tokens": 9, "extra": {"a": 1}}}
    routes = router({"math": {"members": {"a": 1}, "sampling": {"temperature": 0, "extra": {"b": 2}}}}, a=base)
    body = routes.chains(seed())[0][1][0].body
    assert {k: v for k, v in body.items() if k not in ("messages", "model", "seed")} == {
        "temperature": 0,
        "max_tokens": 9,
        "a": 1,
        "b": 2,
    }
    assert "top_p" not in body
    assert Sampling().body() == {}


def test_every_sample_has_a_seed_and_a_key_of_its_own() -> None:
    routes = router({"math": {"members": {"a": 1}}}, samples=8)
    requests = [chain[0] for i in range(20) for _, chain in routes.chains(seed(i))]
    assert len({r.key for r in requests}) == len({r.body["seed"] for r in requests}) == 160
    assert all(0 <= r.body["seed"] < 2**31 for r in requests)
    other = router({"math": {"members": {"a": 1}}}, samples=8, run_seed=1)
    assert not {r.key for r in requests} & {c[0].key for i in range(20) for _, c in other.chains(seed(i))}


# NVIDIA-NeMo/Gym #1925
def test_a_request_without_tools_names_none() -> None:
    body = router({"math": {"members": {"a": 1}}}).chains(seed())[0][1][0].body
    assert not {"tools", "tool_choice"} & body.keys()


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ({"math": {"members": {"d": 1}}}, "route 'math' names 'd', which is no member"),
        ({"math": {"members": {"a": 0}}}, "weight of 'a' must be above 0"),
        ({"math": {}}, "give either members or tiers"),
        ({"math": {"tiers": {"x": {"members": {"a": 1}, "min_difficulty": 0.5}}}}, "easy seeds have nobody"),
        ({"math": {"members": {"a": 1}, "reference": "a"}}, "must not also answer"),
        ({"math": {"members": {"a": 1}, "sampling": {"extra": {"temperature": 1}}}}, "has a field of its own"),
        ({"math": {"members": {"a": 1}, "fallback": ["b"]}}, "did you mean 'fallbacks'"),
    ],
)
def test_a_committee_that_cannot_work_is_refused(routes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        committee(routes)


def test_pick_meets_its_edges() -> None:
    weights = {"a": 1.0, "b": 1.0}
    assert [pick(weights, n) for n in (0, 2**127 - 2**80, 2**127, 2**128 - 1)] == ["a", "a", "b", "b"]
