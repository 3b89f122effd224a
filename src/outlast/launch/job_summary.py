"""The totals of a job for its last log line."""

from __future__ import annotations

import os

from outlast.goodput.ledger import PREEMPTED, Ledger
from outlast.wording import count


def describe_job(run_dir: str | os.PathLike[str], job: str) -> str:
    """Read the run's journal and return the counts of one job as text.

    Incidents are the causes of a cycle's end or of an in-process restart, not their consequences for peers. An
    iteration is lost if it was done and has to be done again: a later cycle or call began before it, or the job ended
    before the run's end without a durable checkpoint of it. A script without a session reports no iterations.
    """
    ledger = Ledger.read(run_dir, job=job)
    causes = [one for one in ledger.incidents if one.recovery_level != "rerun_step" and one.kind != PREEMPTED]
    lost = "lost iterations unknown (no session)"
    if ledger.lost_iterations is not None:
        lost = f"{'at least ' * ledger.lost_is_minimum}{count(ledger.lost_iterations, 'iteration')} lost"
    num_cycles = sum(bool(cycle.nodes) for cycle in ledger.cycles)
    parts = [count(num_cycles, "cycle"), count(len(causes), "incident"), lost]
    if ledger.num_in_process:
        parts.append(f"{count(ledger.num_in_process, 'restart')} in process")
    if ledger.num_spared:
        parts.append(f"{count(ledger.num_spared, 'rank')} lost and not replaced")
    return ", ".join(parts)
