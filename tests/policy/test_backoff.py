"""Consecutive restarts without progress are delayed, each at least as long as the one before."""

from __future__ import annotations

from itertools import pairwise

from outlast.incidents import Decision, Incident, IncidentKind, RecoveryLevel
from outlast.policy.backoff import LONG_CYCLE_S
from outlast.policy.recovery_policy import CycleEnd, Limits, RecoveryState, decide

LIMITS = Limits(max_restarts=20, max_no_progress_cycles=100)


def _fail(state: RecoveryState, *, limits: Limits = LIMITS, **facts: object) -> tuple[RecoveryState, Decision]:
    incident = Incident(kind=IncidentKind.WORKER_DIED, node="a", rank=0, exit_code=-9)
    facts = {"cycle": 1, "incident": incident, "progress_known": True, **facts}
    return decide(state, CycleEnd(**facts), limits)  # type: ignore[arg-type]


def test_restart_delays_grow_from_zero_to_a_minute() -> None:
    """The first restart is immediate, later delays grow to 60 s, and each reason states its delay."""
    state, delays = RecoveryState(), []
    for _ in range(8):
        state, decision = _fail(state)
        assert decision.recovery_level == RecoveryLevel.RESTART_WORKERS
        assert (f"; restarting in {decision.delay_s:g} s" in decision.reason) == (decision.delay_s > 0)
        delays.append(decision.delay_s)
    assert delays[0] == 0.0
    assert all(before <= after for before, after in pairwise(delays))
    assert delays[2] > delays[1] > 0.0
    assert delays[-1] == 60.0


def test_progress_resets_the_delay() -> None:
    """The restart after a cycle that committed a checkpoint at a higher iteration is immediate."""
    state = RecoveryState()
    for _ in range(3):
        state, decision = _fail(state)
    assert decision.delay_s
    state, decision = _fail(state, durable_iteration=10)
    assert decision.delay_s == 0.0
    state, decision = _fail(state, durable_iteration=10)
    assert decision.delay_s > 0.0


def test_restart_after_a_long_cycle_is_immediate() -> None:
    """A run with unknown progress that fails every few hours restarts without delay."""
    state = RecoveryState()
    for _ in range(5):
        state, decision = _fail(state, progress_known=False, ran_s=LONG_CYCLE_S)
        assert decision.delay_s == 0.0


def test_in_process_restart_and_stop_have_no_delay() -> None:
    """A restart that has already happened and the end of the job have no delay."""
    state = RecoveryState()
    for _ in range(4):
        state, decision = _fail(state, recovered_in_process=True)
        assert (decision.recovery_level, decision.delay_s) == (RecoveryLevel.RESTART_IN_PROCESS, 0.0)
    _, decision = _fail(state, limits=Limits(max_restarts=4))
    assert (decision.recovery_level, decision.delay_s) == (RecoveryLevel.STOP, 0.0)


def test_delay_is_bounded_by_its_limit() -> None:
    """No delay exceeds ``max_restart_delay_s``; 0 turns delays off."""
    for max_s in (3.0, 0.0):
        state, delays, limits = RecoveryState(), [], Limits(max_restarts=20, max_restart_delay_s=max_s)
        for _ in range(2):
            state, decision = _fail(state, limits=limits, progress_known=False)
        for _ in range(4):
            state, decision = _fail(state, limits=limits, progress_known=False)
            delays.append(decision.delay_s)
        assert max(delays) == max_s
