"""The objective bench without its rivals' environments: what both sides compute, what is counted, what is held."""

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mopdctl.bench import frame, objective
from mopdctl.bench.__main__ import BENCHES
from mopdctl.bench.objective import Workers
from mopdctl.bench.objective_rivals import sides
from mopdctl.bench.objective_rivals.sides import Inputs, Problem
from mopdctl.errors import MopdctlError

SMALL = Problem(num_tokens=6, vocab_size=40, width=16, teacher_width=24)
MIB = 2**20

FAKE = """
import json, pathlib, sys
side, folder = sys.argv[1], pathlib.Path(sys.argv[2])
answers, problem = json.loads(sys.argv[3]), json.loads(sys.argv[4])
for line in sys.stdin:
    with (folder / "asked").open("a") as log:
        log.write(f"{side} {problem['num_tokens']} {line}")
    print(json.dumps(answers[line.strip()]), flush=True)
"""
RIGHT = {"loss_error": 1e-6, "gradient_error": 1e-6}


def fake(folder: Path, **answers: dict[str, dict[str, float]]) -> dict[str, list[str]]:
    """Sides that answer what they are told to and write down what they were asked."""
    return {side: [sys.executable, "-c", FAKE, side, str(folder), json.dumps(said)] for side, said in answers.items()}


def side(
    seconds: float = 1.0, extra_bytes: float = 1.0, check: dict[str, float] | None = None
) -> dict[str, dict[str, float]]:
    return {"time": {"seconds": seconds}, "peak": {"extra_bytes": extra_bytes}, "check": check or RIGHT}


def asked(folder: Path) -> list[str]:
    return (folder / "asked").read_text().splitlines()


def test_the_bench_is_registered() -> None:
    assert "objective" in BENCHES


def test_inputs_are_the_same_each_time_and_their_logits_are_spread_as_said() -> None:
    problem = Problem(64, 500, 32, 48)
    one, other = sides.inputs_of(problem), sides.inputs_of(problem)
    assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in Inputs.__dataclass_fields__)
    student, teacher = one.hidden_NH @ one.weight_VH.T, one.target_hidden_NG @ one.target_weight_VG.T
    assert abs(float(student.detach().std()) - 2) < 0.1
    assert abs(float(teacher.std()) - 2) < 0.1


@pytest.mark.parametrize("name", ["ours", "naive", pytest.param("trl", marks=pytest.mark.slow)])
def test_every_exact_side_computes_the_mean_reverse_kl_and_its_gradients(name: str) -> None:
    if name == "trl":
        pytest.importorskip("trl.kernels.chunked_divergence")
    found = sides.errors(sides.SIDES[name], sides.inputs_of(SMALL))
    assert found["loss_error"] < 1e-5
    assert found["gradient_error"] < 1e-5


def test_the_check_sees_a_loss_that_is_off_and_a_gradient_that_is_off() -> None:
    def off(given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        loss, hidden_gradient, weight_gradient = sides.naive(given)
        return loss + 0.5, hidden_gradient, 1.25 * weight_gradient

    found = sides.errors(off, sides.inputs_of(SMALL))
    assert found["loss_error"] == pytest.approx(0.5, abs=1e-4)
    assert found["gradient_error"] == pytest.approx(0.25, abs=1e-4)


def test_the_float64_reference_is_the_sum_over_its_row_blocks() -> None:
    given = sides.inputs_of(Problem(150, 30, 8, 8))
    loss, hidden_gradient, weight_gradient = sides._float64(given)
    found = sides.naive(given)
    torch.testing.assert_close(found[0].double(), loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1].double(), hidden_gradient, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(found[2].double(), weight_gradient, rtol=1e-4, atol=1e-7)


def test_the_bare_products_have_the_shapes_of_the_gradients() -> None:
    given = sides.inputs_of(SMALL)
    _, hidden_gradient, weight_gradient = sides.products(given)
    assert hidden_gradient.shape == given.hidden_NH.shape
    assert weight_gradient.shape == given.weight_VH.shape


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_extra_memory_is_the_highest_less_what_was_there_and_less_the_gradients() -> None:
    there = torch.ones(100 * MIB // 4)

    def step(given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        if len(given.hidden_NH) != SMALL.num_tokens:
            return torch.zeros(()), torch.zeros(1), torch.zeros(1)
        working = torch.ones(64 * MIB // 4)  # on top of what is there, gone before the end
        gradient = torch.ones(32 * MIB // 4)
        return working.sum(), torch.zeros(1), gradient

    found = sides.extra_bytes(step, sides.inputs_of(SMALL))
    assert len(there) > 0
    assert found == pytest.approx(64 * MIB, abs=6 * MIB)


def test_a_side_is_checked_before_it_is_timed_and_stays_for_all_runs(tmp_path: Path) -> None:
    with ExitStack() as held:
        run = Workers(fake(tmp_path, ours=side(seconds=0.25)), held).time("ours", SMALL)
        assert [run(), run()] == [0.25, 0.25]
    assert asked(tmp_path) == ["ours 6 check", "ours 6 time", "ours 6 time"]


@pytest.mark.parametrize("wrong", [{"loss_error": 2e-5}, {"gradient_error": 2e-5}, {"loss_error": float("nan")}])
def test_a_side_that_is_off_is_not_timed(wrong: dict[str, float], tmp_path: Path) -> None:
    with ExitStack() as held:
        run = Workers(fake(tmp_path, naive=side(check=RIGHT | wrong)), held).time("naive", SMALL)
        with pytest.raises(MopdctlError, match="naive is off float64"):
            run()
    assert asked(tmp_path) == ["naive 6 check"]


def test_a_rival_in_bfloat16_is_shown_and_ours_is_held(tmp_path: Path) -> None:
    on_gpu = Problem(**(asdict(SMALL) | {"device": "cuda"}))
    off = side(check={"loss_error": 0.1, "gradient_error": 0.1})
    with ExitStack() as held:
        workers = Workers(fake(tmp_path, naive=off, ours=off), held)
        assert workers.time("naive", on_gpu)() == 1
        with pytest.raises(MopdctlError, match="ours is off float64"):
            workers.time("ours", on_gpu)()


def test_a_side_that_ends_is_named(tmp_path: Path) -> None:
    with ExitStack() as held:
        workers = Workers({"naive": [sys.executable, "-c", "import sys; sys.exit(7)"]}, held)
        with pytest.raises(MopdctlError, match="ended with 7"):
            workers.extra("naive", SMALL, 1)()


def test_memory_is_looked_at_once_in_a_fresh_process(tmp_path: Path) -> None:
    with ExitStack() as held:
        workers = Workers(fake(tmp_path, ours=side(extra_bytes=3 * MIB)), held)
        assert [workers.extra("ours", SMALL, MIB)(), workers.extra("ours", SMALL, MIB)()] == [3, 3]
        assert workers.growth("ours", SMALL)() == 1
    assert asked(tmp_path) == ["ours 6 peak", "ours 24 peak"]


def bars(bench: frame.Bench) -> list[tuple[str, str]]:
    return [(case.name.split(" | ")[-1], case.bar.text(case.unit) if case.bar else "none") for case in bench.cases]


def test_cases_and_bars_on_two_cores(tmp_path: Path) -> None:
    commands = fake(tmp_path, ours=side(1.0, 100.0), naive=side(1.2, 250.0), trl=side(3.0, 500.0))
    bench = objective.cpu_bench(commands, [SMALL], {"trl": "1"})
    assert bars(bench) == [
        ("TRL chunked kernel", "ratio >= 2.5"),
        ("naive torch", "ratio >= 0.909091"),
        ("naive torch", "ratio >= 2"),
        ("TRL chunked kernel", "none"),
        ("TRL chunked kernel", "ours <= 1.1 times"),
    ]
    document = frame.report(bench, runs=1)
    assert [round(row["ratio"], 6) for row in document["rows"]] == [3.0, 1.2, 2.5, 5.0, 1.0]
    assert frame.all_hold(document)


@pytest.mark.parametrize("liger", [True, False])
def test_cases_and_bars_on_a_gpu(liger: bool, tmp_path: Path) -> None:
    commands = fake(tmp_path, ours=side(), naive=side(), products=side(), **({"liger": side()} if liger else {}))
    shown = [(name, "none") for name in ["naive torch"] + ["Liger fused linear JSD"] * liger for _ in range(2)]
    held = [("bare head products", "ratio >= 0.666667"), ("bare head products", "ours <= 3 GiB")]
    with (bench := objective.gpu_bench(commands, [SMALL])).held:
        assert bars(bench) == held + shown


def test_a_side_answers_on_its_standard_output() -> None:
    problem = json.dumps(asdict(SMALL))
    command = [sys.executable, "-m", sides.__name__, "ours"]
    with ExitStack() as held:
        workers = Workers({"ours": command}, held)
        assert workers.time("ours", Problem(**json.loads(problem)))() > 0
