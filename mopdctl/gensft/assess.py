"""What is known of a seed's answers: parsed, checked against the rules, verified, judged and selected.

Everything here is computed from the journal, any number of times with the same result. The rules come before the
judges, since they cost nothing and a judge's verdict costs money.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from mopdctl.config.committee import CommitteeFile
from mopdctl.config.gensft import FilterConfig, GenConfig
from mopdctl.gensft.answers import parse_answer
from mopdctl.gensft.ask import Request
from mopdctl.gensft.filters import FilterSettings, all_failures
from mopdctl.gensft.journal import Journal
from mopdctl.gensft.judge import JudgeRequest, Verdicts, judge_requests, panel_score, verdicts
from mopdctl.gensft.records import Answer, AnswerState, Judged, Seed
from mopdctl.gensft.routing import REFERENCE, Router
from mopdctl.gensft.rows import conversation
from mopdctl.gensft.select import Selection, select
from mopdctl.gensft.verify import verify_answer

UNANSWERED = ("infra_error", "rejected", "pending", "malformed")
"""States of an answer that holds nothing to look at."""


@dataclass(frozen=True, slots=True)
class Assessed:
    """All that is known of one seed's answers."""

    answers: list[Answer]
    """Every answer that was asked for, in whatever state; the reference's is not among them."""
    failures: dict[int, list[tuple[str, str]]]
    """Sample index to the rules that the answer fails, each with its reason; empty lists are left out."""
    selection: Selection
    reference: Judged | None
    missing: int = 0
    """Verdicts and reference answers that nobody gave although they were asked for: a later run asks again."""
    verdicts: Verdicts | None = None
    responses: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    """Request key to alias and raw response of everything that was paid for: answers and verdicts."""


@dataclass(slots=True)
class _Heard:
    """What the members said of one seed, before any judge."""

    answers: list[Answer] = field(default_factory=list)
    failures: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    candidates: list[Judged] = field(default_factory=list)
    """Answers that pass the rules, verified."""
    reference: Judged | None = None
    missing: int = 0
    """1 if the reference was asked and did not answer."""
    responses: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)


def filter_settings(config: FilterConfig) -> FilterSettings:
    """The rules' settings of a configuration. Raises InputError for what the rules cannot use."""
    return FilterSettings(
        languages=tuple(config.languages),
        min_words=config.min_words,
        max_words=config.max_words,
        licenses_allowed=None if config.licenses is None else tuple(config.licenses),
        require_training_terms=config.require_training_terms,
        refusal_patterns=tuple(config.refusal_patterns),
        leakage_patterns=tuple(config.leakage_patterns),
        off=tuple(config.off),
    )


class Assessor:
    """Reads answers and verdicts out of a journal.

    `over`: asking has ended, so what is missing has failed. Until then it is pending, and an answer that waits for its
    judges is no row.
    """

    def __init__(self, config: GenConfig, committee: CommitteeFile, router: Router, journal: Journal) -> None:
        self._config, self._committee, self._router, self._journal = config, committee, router, journal
        self._settings = filter_settings(config.filter)
        self.over = False

    def judge_chains(self, seed: Seed) -> Iterator[tuple[Request, ...]]:
        """The requests to the judges of a seed's answers, none with a fall-back: a verdict is its judge's own."""
        for request, _ in self._judging(seed, self._hear(seed)):
            yield (request,)

    def assess(self, seed: Seed) -> Assessed:
        """Everything about one seed."""
        heard = self._hear(seed)
        asked = list(self._judging(seed, heard))
        lines = [self._journal.get(request.key) for request, _ in asked]
        raws = [line["r"] if line and line["s"] == "ok" else None for line in lines]
        heard.responses |= {r.key: (r.member, raw) for (r, _), raw in zip(asked, raws, strict=True) if raw is not None}
        panel = self._config.panel(seed.domain)
        said = None
        if panel is not None:
            said = verdicts([j for _, j in asked], raws, panel, keys=[request.key for request, _ in asked])

        def judged(candidate: Judged) -> Judged:
            own = said.of.get(candidate.answer.sample_index) if said else None
            if panel is None or own is None:
                return candidate
            score, state = panel_score(own, panel)
            return replace(candidate, verdicts=own, score=score, score_state=state)

        against = judged(heard.reference) if heard.reference else None
        scored = [judged(c) for c in heard.candidates]
        choice = self._config.selection(seed.domain)
        late = choice.beat_reference and against is not None and against.score_state == "no_quorum"
        waiting = [c for c in scored if not self.over and (late or c.score_state == "no_quorum")]
        found = select([c for c in scored if c not in waiting], choice, reference=against)
        selection = Selection(found.kept, [*found.dropped, *((c, "pending") for c in waiting)])
        missing = heard.missing + sum(line is None for line in lines)
        return Assessed(heard.answers, heard.failures, selection, against, missing, said, heard.responses)

    def _judging(self, seed: Seed, heard: _Heard) -> Iterator[tuple[Request, JudgeRequest]]:
        panel = self._config.panel(seed.domain)
        if panel is None:
            return
        strict = self._config.selection(seed.domain).require_verified
        worth = [c.answer for c in heard.candidates if not (strict and c.verify_state is not None and c.reward != 1.0)]
        if not worth:
            return
        if heard.reference is not None:
            worth.append(heard.reference.answer)
        for request in judge_requests(seed, worth, panel):
            yield self._router.judge_request(request.judge, seed, list(request.messages), request.kind), request

    def _hear(self, seed: Seed) -> _Heard:
        """Parses the answers to a seed, applies the rules, and verifies what passes."""
        route = self._router.route(seed)
        heard = _Heard()
        for index, chain in self._router.chains(seed):
            answer, raw = self._answer(index, chain)
            if raw is not None:
                heard.responses[answer.request_key] = (answer.member, raw)
            if index == REFERENCE:
                if answer.state == "ok":
                    heard.reference = _verified(seed, answer)
                heard.missing += answer.state in ("infra_error", "pending")
                continue
            heard.answers.append(answer)
            if answer.state in UNANSWERED:
                continue
            member = self._committee.members[answer.member]
            row = {
                "messages": conversation(seed, answer.message, route),
                "tools": list(seed.tools) if seed.tools else None,
                "domain": seed.domain,
                "license": seed.license,
                "member_license": member.license,
                "outputs_may_train": member.outputs_may_train,
                "finish_reason": answer.finish_reason,
                "answer_state": answer.state,
            }
            failed = all_failures(row, self._settings)
            if answer.state != "ok" and not failed:  # what is not whole is no row, whatever rules are off
                failed = [({"refused": "refusal"}.get(answer.state, answer.state), answer.detail)]
            if failed:
                heard.failures[index] = failed
            else:
                heard.candidates.append(_verified(seed, answer))
        return heard

    def _answer(self, index: int, chain: tuple[Request, ...]) -> tuple[Answer, dict[str, Any] | None]:
        """The first answer of a chain, with its raw response."""
        states, detail = [], ""
        for request in chain:
            line = self._journal.get(request.key)
            states.append(line["s"] if line else None)
            if line and line["s"] == "rejected":
                detail = detail or line.get("e", "")
            elif line:
                found = parse_answer(line["r"])
                answer = Answer(
                    sample_index=index,
                    state=found.state,
                    message=found.message,
                    finish_reason=found.finish_reason,
                    member=request.member,
                    body=request.body,
                    request_key=request.key,
                    prompt_tokens=found.prompt_tokens,
                    completion_tokens=found.completion_tokens,
                    detail=found.detail,
                    notes=found.notes,
                )
                return answer, line["r"]
        state = AnswerState.INFRA_ERROR if self.over else AnswerState.PENDING
        if all(s == "rejected" for s in states):
            state = AnswerState.REJECTED
        first = chain[0]
        return Answer(index, state, {}, None, first.member, first.body, first.key, None, None, detail), None


def _verified(seed: Seed, answer: Answer) -> Judged:
    state, reward, version = verify_answer(seed, answer)
    return Judged(answer, verify_state=state, reward=reward, verifier_version=version)
