"""Invalid results on purpose: at the rate asked for, of the kind asked for."""

from __future__ import annotations

from itertools import count

import pytest
from rerun_training import Training, assert_same
from test_rerun_replay import replay_of

from outlast.config import RerunStateMachineConfig
from outlast.numerics.validation import ErrorInjector
from outlast.policy.rerun import Finding, StepRun


def injecting(kind: str, rate: int = 8) -> RerunStateMachineConfig:
    return RerunStateMachineConfig(error_injection_rate=rate, error_injection_type=kind)


def test_one_of_so_many_is_struck() -> None:
    """About one of as many validations is struck, another set for each cycle, and none at rate 0."""
    struck = []
    for name in ("j-0-0", "j-1-0"):
        injector = ErrorInjector(injecting("transient_error", 50), name)
        hits = set()
        for step in range(20_000):
            injector.struck.clear()
            hits |= {step} if injector.strikes(StepRun.FIRST_RUN, step, 0) else set()
        assert 300 < len(hits) < 500
        struck.append(hits)
    assert struck[0] != struck[1]
    never = ErrorInjector(RerunStateMachineConfig(), "j-0-0")
    assert not any(never.strikes(StepRun.FIRST_RUN, step, 0) for step in range(1000))


def test_transient_errors_leave_no_trace() -> None:
    """Training with transient errors ends with the weights of training without."""
    struck = Training(injecting("transient_error")).steps(20)
    assert struck.machine.state_dict()["found"][Finding.TRANSIENT] > 0
    assert_same(Training().steps(20), struck)


@pytest.mark.parametrize(
    ("kind", "finding"), [("persistent_error", Finding.PERSISTENT), ("correct_result", Finding.CORRECT)]
)
def test_kind_is_found_out_elsewhere(kind: str, finding: Finding) -> None:
    """A persistent error stays with its device, a correct result comes on another one too."""
    training = Training(injecting(kind))
    for _ in count():
        decision = training.step()
        if decision.exit_code is not None:
            break
    assert decision.diagnosis is not None
    assert decision.diagnosis.finding is Finding.REPRODUCED
    saved = training.save()
    here = Training(injecting(kind)).load(saved, replay_of(decision.diagnosis)).step()
    assert here.diagnosis is not None
    assert (here.exit_code, here.diagnosis.finding) == (16, Finding.REPRODUCED)
    elsewhere = Training(injecting(kind), device="second").load(saved, replay_of(decision.diagnosis)).step()
    assert elsewhere.diagnosis is not None
    assert (elsewhere.exit_code, elsewhere.diagnosis.finding) == (17, finding)
