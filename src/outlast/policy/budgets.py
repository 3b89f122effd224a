"""The ladder's budgets: whether another restart may be granted, and what is said about it."""

from __future__ import annotations

from outlast.policy.ladder_state import LadderState, Limits
from outlast.wording import count

__all__ = ["count_of_restart", "resume_point", "spent_budget"]


def spent_budget(state: LadderState, limits: Limits) -> str | None:
    """Return which budget leaves no restart, for people; ``None`` when all allow one."""
    cycles, point = state.cycles_without_progress, resume_point(state).removeprefix("from ")
    if state.progress_known and cycles >= limits.max_no_progress_cycles:
        return (
            f"stopping: {count(cycles, 'cycle')} in a row got no further than {point} "
            f"(max_no_progress_cycles={limits.max_no_progress_cycles}); look at the incidents in the journal"
        )
    if state.restarts_without_progress >= limits.max_restarts:
        if limits.max_restarts == 0:
            return "stopping: no restart is allowed (--max-restarts=0)"
        since = f" since {point}" if state.progress_known else ""
        if limits.max_restarts == 1:
            return f"stopping: the only restart{since} is used (--max-restarts=1)"
        return f"stopping: all {limits.max_restarts} restarts{since} are used (--max-restarts)"
    if limits.max_restarts_total is not None and state.restarts_total >= limits.max_restarts_total:
        return f"stopping: {count(state.restarts_total, 'restart')} in this run (--max-restarts-total)"
    return None


def count_of_restart(state: LadderState, limits: Limits) -> str:
    """Return which restart the next one would be, for people."""
    which = f"restart {state.restarts_without_progress + 1} of {limits.max_restarts}"
    return f"{which} without progress" if state.progress_known else which


def resume_point(state: LadderState) -> str:
    """Return from where a restarted run goes on, for people."""
    return "from the start" if state.best_durable is None else f"from iteration {state.best_durable}"
