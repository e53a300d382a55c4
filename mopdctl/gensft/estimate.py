"""The dry run: one rendered request per domain, and the most that all of it may cost."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from mopdctl.gensft.ask import Request, estimated_prompt_tokens, most_of, most_tokens
from mopdctl.gensft.judge import judge_requests
from mopdctl.gensft.plan import usable_seeds
from mopdctl.gensft.records import Answer, AnswerState, Seed
from mopdctl.gensft.spec import Spec


def dry_run(spec: Spec) -> dict[str, Any]:
    """Reads the seeds; writes nothing and asks nobody.

    `most_cost_usd` is an upper bound: prompts at a token a byte, answers at their limit (4096 tokens without one),
    every answer judged, every request at the dearest member that may come to answer it, none asked twice. None if a
    price is unknown.
    """
    domains: Counter[str] = Counter()
    examples: dict[str, Any] = {}
    members: dict[str, dict[str, Any]] = {}
    bad: list[dict[str, Any]] = []
    for seed in usable_seeds(spec, bad.append, Counter()):
        domains[seed.domain] += 1
        chains = spec.router.chains(seed)
        for _, chain in chains:
            examples.setdefault(seed.domain, {"member": chain[0].member, "body": chain[0].body})
            _add(spec, members, chain)
        for request, quoted in _judging(spec, seed, chains):
            _add(spec, members, (request,), quoted=quoted)
    costs = [found["most_cost_usd"] for found in members.values()]
    return {
        "name": spec.config.name,
        "seeds": domains.total(),
        "seeds_by_domain": dict(domains),
        "quarantined": len(bad),
        "requests": sum(found["requests"] for found in members.values()),
        "most_cost_usd": None if any(cost is None for cost in costs) else round(sum(costs), 6),
        "members": members,
        "examples": examples,
    }


def _judging(spec: Spec, seed: Seed, asked: list[tuple[int, tuple[Request, ...]]]) -> list[tuple[Request, int]]:
    """The requests to judges if every answer comes, each with the tokens that the answers it quotes may have."""
    panel = spec.config.panel(seed.domain)
    if panel is None:
        return []
    answers = [
        Answer(index, AnswerState.OK, {"role": "assistant", "content": ""}, "stop", r.member, r.body, r.key, None, None)
        for index, (r, *_) in asked
    ]
    longest = {index: max(most_tokens(request.body)[1] for request in chain) for index, chain in asked}
    return [
        (spec.router.judge_request(one.judge, seed, list(one.messages), one.kind), sum(longest[i] for i in one.answers))
        for one in judge_requests(seed, answers, panel)
    ]


def _add(spec: Spec, members: dict[str, dict[str, Any]], chain: Sequence[Request], *, quoted: int = 0) -> None:
    """Books a request to the first member of its chain. `quoted`: prompt tokens that are not there yet."""
    first = chain[0]
    empty = {"requests": 0, "prompt_tokens": 0, "most_completion_tokens": 0, "most_cost_usd": 0.0}
    found = members.setdefault(first.member, empty)
    found["requests"] += 1
    found["prompt_tokens"] += estimated_prompt_tokens(first.body) + quoted
    found["most_completion_tokens"] += most_tokens(first.body)[1]
    prices = [spec.committee.members[request.member].price for request in chain]
    if found["most_cost_usd"] is None or any(price is None for price in prices):
        found["most_cost_usd"] = None
        return
    most = max(
        most_of(request.body, price)[0] + (price.cost_usd(quoted, 0) if price else 0.0)
        for request, price in zip(chain, prices, strict=True)
    )
    found["most_cost_usd"] = round(found["most_cost_usd"] + most, 9)
