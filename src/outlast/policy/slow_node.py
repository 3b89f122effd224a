"""What follows when all ranks left because of a slow one (exit code 18).

The node of the slow rank gives its slot to a spare, and gets none any more. Without a spare the run stops: the same
workers on the same nodes would be as slow. Whoever starts the next job learns which node to leave out.
"""

from __future__ import annotations

from outlast.errors import ExitReason
from outlast.incidents import Rung, Verdict
from outlast.policy.budgets import count_of_restart, resume_point, spent_budget
from outlast.policy.ladder_state import CycleEnd, LadderState, Limits
from outlast.policy.rerun import Finding

__all__ = ["judge_slow_rank", "slow_node"]


def slow_node(end: CycleEnd) -> str:
    """Return the node of the slow rank because of which a cycle ended; empty where nobody said."""
    diagnosis = end.diagnosis
    return diagnosis.node if diagnosis is not None and diagnosis.finding == Finding.SLOW else ""


def judge_slow_rank(state: LadderState, end: CycleEnd, limits: Limits) -> Verdict:
    """Return what to do after a cycle that ended because of a slow rank.

    Args:
        state: What is remembered, this end included.
        end: How the cycle ended.
        limits: What is allowed.
    """
    assert end.is_slow_rank
    assert end.incident is not None
    what, node = end.incident.describe(), slow_node(end)
    quarantine, code = (node,) if node else (), ExitReason.STRAGGLER
    if (spent := spent_budget(state, limits)) is not None:
        why = spent
        if state.progress_known and state.cycles_without_progress >= limits.max_no_progress_cycles:
            code = ExitReason.NO_PROGRESS
    elif not node:
        why = "stopping, as nobody said which node is to be replaced"
    elif end.num_spares == 0:
        why = f"stopping, as no spare waits for the slot of node {node}"
    else:
        where = f", resuming {resume_point(state)}" if state.progress_known else ""
        reason = f"{what}; a spare takes the slot of node {node}{where} ({count_of_restart(state, limits)})"
        return Verdict(rung=Rung.REPLACE_NODE, reason=reason, quarantine=quarantine)
    return Verdict(rung=Rung.STOP, reason=f"{what}; {why}", exit_code=code, quarantine=quarantine)
