"""Injected invalid results have the configured rate and kind."""

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


def test_injection_follows_the_configured_rate() -> None:
    """About one in the configured number of validations is injected, a different set in each cycle, and none at rate
    0."""
    injected = []
    for name in ("j-0-0", "j-1-0"):
        injector = ErrorInjector(injecting("transient_error", 50), name)
        hits = set()
        for step in range(20_000):
            injector.injected.clear()
            hits |= {step} if injector.strikes(StepRun.FIRST_RUN, step, 0) else set()
        assert 300 < len(hits) < 500
        injected.append(hits)
    assert injected[0] != injected[1]
    never = ErrorInjector(RerunStateMachineConfig(), "j-0-0")
    assert not any(never.strikes(StepRun.FIRST_RUN, step, 0) for step in range(1000))


def test_transient_errors_do_not_change_training() -> None:
    """Training with transient errors ends with the same weights as without."""
    injected = Training(injecting("transient_error")).steps(20)
    assert injected.machine.state_dict()["found"][Finding.TRANSIENT] > 0
    assert_same(Training().steps(20), injected)


@pytest.mark.parametrize(
    ("kind", "finding"), [("persistent_error", Finding.PERSISTENT), ("correct_result", Finding.CORRECT)]
)
def test_injected_kind_is_identified_on_another_device(kind: str, finding: Finding) -> None:
    """A persistent error stays with its device; a correct result is reproduced on another one."""
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
