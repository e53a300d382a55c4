"""Which answers of a store are checked again, and which keep what they had."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mopdctl.files import write_jsonl
from mopdctl.records import Sample
from mopdctl.rollouts.reverify import reverify
from mopdctl.runs import Workspace
from mopdctl.store.store import Store, StoreWriter

MIXED, JUDGED, PLAIN = "mix:exact_match/2+judge/2", "judge/2", "exact_match/2"


def answer(group: str, number: int, reward: float | None, verdict: str, verifier: str) -> Sample:
    return Sample(
        f"{group}/{number}", "chat/q", group, number, "chat", "", 0, 0,
        tokens=np.array([*prompt_ids(), 7, 1], np.int32),
        prompt_length=len(prompt_ids()),
        loss_mask=np.array([False] * len(prompt_ids()) + [True, True]),
        behavior_logprobs=np.zeros(2, np.float32),
        finish_reason="stop",
        reward=reward,
        verdict=verdict,
        verifier=verifier,
    )  # fmt: skip


def prompt_ids() -> list[int]:
    from mopdctl.engines.fake import FakeModel

    return list(FakeModel.parse("fake").prompt_ids("question"))


def rewards(workspace: Workspace) -> dict[str, tuple[float | None, str | None]]:
    return {s.sample_id: (s.reward, s.verdict) for s in Store(workspace.rollouts("r")).scan()}


@pytest.mark.parametrize("judge", [MIXED, JUDGED])
def test_no_answer_of_a_group_in_which_a_judge_had_a_say_is_given_a_reward_without_it(
    tmp_path: Path, judge: str
) -> None:
    workspace = Workspace(tmp_path)
    samples = [
        # The verifier gave the first none at the time, so that it kept the verifier's name.
        answer("chat/q/0.0.0", 0, None, "timeout", PLAIN),
        answer("chat/q/0.0.0", 1, 0.625, "ok", judge),
        answer("chat/q/0.0.0", 2, None, "infra_error", judge),
        answer("chat/q/1.0.0", 0, None, "timeout", PLAIN),
        answer("chat/q/1.0.0", 1, 0.0, "ok", PLAIN),
    ]
    identity: dict[str, Any] = {"model": "fake", "tokenizer": "t"}
    with StoreWriter(workspace.rollouts("r"), identity) as writer:
        writer.commit(samples[:1])  # of two commits, and the judged ones come later
        writer.commit(samples[1:])
    row = {"id": "q", "domain": "chat", "prompt": "question", "verifier": "exact_match", "reference": {"answer": "7"}}
    write_jsonl(tmp_path / "prompts.jsonl", [row])
    before, notes = rewards(workspace), list[str]()
    found = reverify("r", tmp_path / "prompts.jsonl", workspace, on_note=notes.append)
    assert (found["judged_by_a_model"], found["changed"]) == (
        3,
        {"timeout -> ok": 1, "ok -> ok, higher reward": 1},
    )
    changed = {"chat/q/1.0.0/0": (1.0, "ok"), "chat/q/1.0.0/1": (1.0, "ok")}
    assert rewards(workspace) == before | changed
    assert [line for line in notes if line.startswith("3 answers keep what they had: a judge had a say")]
