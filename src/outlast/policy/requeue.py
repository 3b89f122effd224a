"""Whether the scheduler gets a job back that has ended: the exit-code table, and a budget for failures.

A pure function: from how the job ended and what is remembered of the run's earlier jobs it returns the answer
with what is to be remembered. Jobs that were shut down go back as often as it takes; failures at most
``num_job_retries_on_failure`` times in a row, because more of them are usually not transient. Progress, a durable
generation at a higher iteration than ever before, gives a run its retries back, where progress can be known.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from outlast.errors import ExitReason

TOLD_TO_LEAVE = {129: "SIGHUP", 130: "SIGINT", 138: "SIGUSR1", 140: "SIGUSR2", 143: "SIGTERM"}
"""Exit codes of a job that was shut down, with the signal's name: an agent had nothing to save, or not the time."""

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
    """What is remembered of a run from job to job."""

    failures: int = 0
    """Jobs in a row that failed and were given back, without progress in between."""
    best_durable: int | None = None
    """Highest durable iteration when a job last ended; ``None`` = none known."""
    excluded: tuple[str, ...] = ()
    """Nodes that the run's jobs keep away from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How a job ended."""

    exit_code: int
    """The highest exit code of its tasks; 128 + n: ended by signal n."""
    finished: bool = False
    """The run's own record has it as finished."""
    stopped_with: int | None = None
    """With which exit code the run's own record says that it was stopped; ``None`` = it was not. A node that stayed
    outside ends with a code of its own, which can be the highest."""
    durable_iteration: int | None = None
    """Highest durable iteration of the run; ``None`` = none, or not known."""
    quarantined: tuple[str, ...] = ()
    """Nodes that the run gives no slot any more."""

    def __post_init__(self) -> None:
        assert 0 <= self.exit_code <= 255, "an exit code is a byte"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """Whether a job goes back to the scheduler, and why."""

    requeue: bool
    reason: str
    """One line for people."""
    state: RequeueState
    """What to remember."""


def rule(state: RequeueState, end: JobEnd, *, num_job_retries_on_failure: int) -> Ruling:
    """Say whether a job that ended goes back to the scheduler.

    Args:
        state: What is remembered of the run's earlier jobs.
        end: How this one ended.
        num_job_retries_on_failure: Failures in a row, without progress in between, after which a job goes back.
    """
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
    if code in TOLD_TO_LEAVE:
        return Ruling(requeue=True, reason=f"shutdown requested by {TOLD_TO_LEAVE[code]}", state=state)
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
