"""Which member answers which seed, and the request that it gets: a pure function of configuration and seed."""

import json
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from mopdctl.config.committee import CommitteeFile, Route
from mopdctl.engines.base import stream_seed
from mopdctl.errors import InputError
from mopdctl.files import digest
from mopdctl.gensft.ask import Request
from mopdctl.gensft.records import Message, Seed

REFERENCE = -1
"""Sample index of the reference member's answer."""


class Router:
    """Routes of a committee. `endpoints` says for each alias what stands behind it."""

    def __init__(self, committee: CommitteeFile, endpoints: Mapping[str, str], *, samples: int, seed: int) -> None:
        self._committee, self._endpoints = committee, endpoints
        self._samples, self._seed = samples, seed
        self._sampling: dict[tuple[int, str], dict[str, Any]] = {}

    def route(self, seed: Seed) -> Route:
        """The route of a seed's domain. Raises InputError if there is none."""
        route = self._committee.route(seed.domain)
        if route is None:
            known = ", ".join(sorted(self._committee.routes))
            raise InputError(f"{seed.place}: domain {seed.domain!r} has no route; add one, or `default` (has: {known})")
        return route

    def samples(self, seed: Seed) -> int:
        """Answers that this seed is to get."""
        return self.route(seed).samples or self._samples

    def chains(self, seed: Seed) -> list[tuple[int, tuple[Request, ...]]]:
        """(sample index, request and its fall-backs) for all answers of a seed, the reference's last."""
        route = self.route(seed)
        found = [(i, self._chain(seed, route, i)) for i in range(self.samples(seed))]
        if route.reference:
            found.append((REFERENCE, (self._request(seed, route, route.reference, REFERENCE),)))
        return found

    def _chain(self, seed: Seed, route: Route, index: int) -> tuple[Request, ...]:
        _, weights = route.tier(seed.difficulty)
        first = pick(weights, stream_seed(self._seed, "route", seed.seed_id, index))
        order = [first, *(alias for alias in route.fallbacks if alias != first)]
        return tuple(self._request(seed, route, alias, index) for alias in order)

    def _request(self, seed: Seed, route: Route, alias: str, index: int) -> Request:
        member = self._committee.members[alias]
        messages = list(seed.messages)
        if route.system_prompt and messages[0]["role"] not in ("system", "developer"):
            messages.insert(0, {"role": "system", "content": route.system_prompt})
        body: dict[str, Any] = {"model": member.model, "messages": messages}
        if seed.tools:
            body["tools"] = list(seed.tools)
        key = (id(route), alias)
        if key not in self._sampling:
            self._sampling[key] = route.sampling.over(member.sampling).body()
        body |= self._sampling[key]
        number = stream_seed(self._seed, "sample", seed.seed_id, index) % 2**31
        return self._keyed(alias, body, number)

    def judge_request(self, alias: str, seed: Seed, messages: list[Message], kind: str) -> Request:
        """The request of a judge about answers to a seed. Its random seed hangs on what it judges."""
        member = self._committee.members[alias]
        body: dict[str, Any] = {"model": member.model, "messages": messages}
        if kind == "chat":
            body |= member.sampling.body()
        number = stream_seed(self._seed, "judge", alias, seed.seed_id, json.dumps(messages)) % 2**31
        return self._keyed(alias, body, number, kind)

    def _keyed(self, alias: str, body: dict[str, Any], number: int, kind: str = "chat") -> Request:
        """A request under the fingerprint of all that its answer depends on; `number` is its random seed."""
        if kind == "chat" and self._committee.members[alias].takes_seed:
            body["seed"] = number
        what = [self._endpoints[alias], kind, number, body]
        text = json.dumps(what, sort_keys=True, ensure_ascii=False, allow_nan=False)
        return Request(digest(text), alias, body, kind)


def pick(weights: Mapping[str, float], number: int) -> str:
    """One of the names, with probability in proportion to its weight, as a 128-bit random `number` decides."""
    names = sorted(weights)
    edges = list(accumulate(weights[name] for name in names))
    return names[min(bisect_right(edges, number / 2**128 * edges[-1]), len(names) - 1)]
