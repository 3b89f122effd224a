"""The search for slow ranks, as a session's steps go by, and what the launcher is told when one is found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from outlast.config import StragglerDetectionConfig
from outlast.env import WorkerEnv
from outlast.monitor.rank_monitor import SectionTimer
from outlast.policy.rerun import Diagnosis, Finding
from outlast.runtime.consensus import Consensus
from outlast.runtime.device import device_name
from outlast.runtime.diagnoses import leave_diagnosis
from outlast.runtime.journal import Journal

if TYPE_CHECKING:
    from outlast.straggler import Report

__all__ = ["SlowRanks"]

NO_PART_OF_A_STEP = frozenset({"setup", "checkpointing", "evaluation", "validation"})
"""Sections that are left out of a step's time, and compared with nothing."""
STEP = "step"


class SlowRanks:
    """Time this rank's steps and sections, and compare them with those of the others when all ranks agree on it.

    Args:
        config: What is compared, and how often.
        place: This worker's place.
        journal: Where reports and incidents go.
        consensus: How the ranks agree; waiting in it is nobody's own time.

    Thread: that of the training loop, which makes it.
    """

    def __init__(
        self, config: StragglerDetectionConfig, place: WorkerEnv, journal: Journal, consensus: Consensus
    ) -> None:
        from outlast.straggler import StragglerDetector

        self._place, self._consensus = place, consensus
        self._detector: StragglerDetector = StragglerDetector(config, place=place, journal=journal)
        self._detector.wrap(consensus, "agree", waits=True)
        self._waited_before_s = 0.0

    def watch(self, state: Any) -> None:
        """Time the forward of the modules in a state, and the step of the optimizers."""
        self._detector.watch(state)

    def timed(self, name: str, section: SectionTimer) -> SectionTimer:
        """Return a section that is timed too; one that is no part of a step is left out instead.

        Args:
            name: Its name.
            section: What marks it for the watchdog.
        """
        if name == STEP:
            return section
        mark = self._detector.leave_out() if name in NO_PART_OF_A_STEP else self._detector.section(name)

        def open_(_: int) -> None:
            section.__enter__()
            mark.__enter__()

        def shut(_: int) -> None:
            mark.__exit__(None, None, None)
            section.__exit__()

        return SectionTimer(0, open_, shut)

    @contextmanager
    def left_out(self, section: AbstractContextManager[None]) -> Iterator[None]:
        """Return a section of the session's own that is no part of a step."""
        with section, self._detector.leave_out():
            yield

    def begin_step(self, iteration: int) -> None:
        """Begin to time a step, ``iteration`` of which are done."""
        self._waited_before_s = self._consensus.waited_s
        self._detector.begin_step(iteration)

    def end_step(self) -> None:
        """End the step's time: this rank is done, and has not yet waited for the others."""
        self._detector.end_step()

    def note_wait(self) -> None:
        """Take in how long this rank has waited for the others, now that they have come."""
        self._detector.note_wait(self._consensus.waited_s - self._waited_before_s)

    def wish(self) -> int:
        """Return 1 if it is time for a report, as far as this rank knows; else 0."""
        return int(self._detector.wishes_report())

    def report(self) -> Report:
        """Compare the ranks; see :meth:`outlast.straggler.StragglerDetector.report`.

        Raises:
            PeerLost: A peer is gone, or did not come in time.

        Collective: all ranks, after the same step.
        Blocks: until all ranks have come, and while the machine of a rank that is named is looked at.
        """
        return self._detector.report()

    def leave_word(self, report: Report) -> None:
        """Tell the launcher for which rank all of them leave; where there are several, for the slowest."""
        place, rank = self._place, report.stop_for[0]
        one = next(one for one in report.findings.named if one.rank == rank)
        causes = [verdict.describe() for verdict in report.machines if verdict.rank == rank]
        diagnosis = Diagnosis(
            finding=Finding.SLOW,
            rank=rank,
            node=one.node,
            device=device_name(place.device or place.node, place.local_rank) if rank == place.global_rank else "",
            iteration=report.iteration,
            what=one.section,
            message="; ".join((one.describe(), *causes)),
        )
        leave_diagnosis(place, diagnosis)

    def close(self) -> None:
        """Take away what was put around modules, optimizers and functions. Idempotent. Blocks: never."""
        self._detector.close()
