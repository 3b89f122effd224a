"""Whether a job that ended is requeued: the exit-code table, and a budget for failures.

Pure: takes how the job ended and the state of the run's earlier jobs, returns the decision and the new state. Jobs that
were shut down are always requeued; failures at most ``num_job_retries_on_failure`` times in a row. Progress, a
checkpoint at a higher iteration than before that survives the job, restores the retries.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from outlast.errors import ExitReason

SHUTDOWN_SIGNALS = {129: "SIGHUP", 130: "SIGINT", 138: "SIGUSR1", 140: "SIGUSR2", 143: "SIGTERM"}
"""Exit codes of a job that was shut down, with the signal's name: an agent had nothing to save, or no time to."""

_FOR_A_PERSON = {
    ExitReason.BAD_INPUT: "the command line or a setting is wrong",
    ExitReason.FAILED_VALIDATION: "an invalid result was judged, the diagnosis is in the journal",
    ExitReason.NO_PROGRESS: "another try would get no further",
}
_FOR_ANOTHER_TRY = {
    ExitReason.RESUME_TO_DISAMBIGUATE: "an invalid result to disambiguate",
    ExitReason.STRAGGLER: "a slow node",
    ExitReason.UNHEALTHY_NODE: "a node that is unhealthy",
}


class RequeueState(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored from job to job of a run."""

    failures: int = 0
    """Jobs in a row that failed and were requeued, without progress in between."""
    best_durable: int | None = None
    """Highest durable iteration when a job last ended; ``None`` = not known."""
    excluded: tuple[str, ...] = ()
    """Nodes that the run's jobs avoid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    exit_code: int
    """The highest exit code of its tasks; 128 + n = ended by signal n."""
    finished: bool = False
    """The run's recovery state reports the run as finished."""
    stopped_with: int | None = None
    """Exit code of the stop in the run's recovery state; ``None`` = not stopped. A node that stayed outside exits with
    a code of its own, which can be the highest."""
    durable_iteration: int | None = None
    """Highest durable iteration of the run; ``None`` = none, or not known."""
    quarantined: tuple[str, ...] = ()
    """Nodes that get no slot any more."""

    def __post_init__(self) -> None:
        assert 0 <= self.exit_code <= 255, "an exit code is a byte"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    requeue: bool
    reason: str
    state: RequeueState


def rule(state: RequeueState, end: JobEnd, *, num_job_retries_on_failure: int) -> Ruling:
    """Return whether a job that ended is requeued."""
    assert num_job_retries_on_failure >= 0
    best, durable = state.best_durable, end.durable_iteration
    progressed = durable is not None and (best is None or durable > best)
    state = RequeueState(
        failures=0 if progressed else state.failures,
        best_durable=durable if progressed else best,
        excluded=tuple(dict.fromkeys((*state.excluded, *end.quarantined))),
    )
    code = end.exit_code
    if end.finished or code == ExitReason.FINISHED:
        return _keep(state, "the run is finished")
    for stopped_with in (code, end.stopped_with):
        if stopped_with in _FOR_A_PERSON:
            return _keep(state, f"{_FOR_A_PERSON[ExitReason(stopped_with)]} (exit code {stopped_with})")
    if code == ExitReason.PREEMPTED:
        return Ruling(requeue=True, reason="shutdown requested, with a saved checkpoint to resume from", state=state)
    if code in SHUTDOWN_SIGNALS:
        return Ruling(requeue=True, reason=f"shutdown requested by {SHUTDOWN_SIGNALS[code]}", state=state)
    what = _FOR_ANOTHER_TRY[ExitReason(code)] if code in _FOR_ANOTHER_TRY else "a failure"
    if state.failures >= num_job_retries_on_failure:
        limit = num_job_retries_on_failure
        spent = f"all {limit} retries are used" if limit else "no retry is allowed"
        return _keep(state, f"{what} (exit code {code}), and {spent} (num_job_retries_on_failure={limit})")
    state = msgspec.structs.replace(state, failures=state.failures + 1)
    count = f"retry {state.failures} of {num_job_retries_on_failure}"
    return Ruling(requeue=True, reason=f"{what} (exit code {code}), {count}", state=state)


def _keep(state: RequeueState, reason: str) -> Ruling:
    return Ruling(requeue=False, reason=reason, state=state)
