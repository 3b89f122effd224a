"""Checks between steps: all ranks respond, replicas are identical, no rank is slow, the final weights are finite.

The liveness check runs before the agreement at a step's end, which would wait half an hour for a silent rank, and in a
separate process group, so that it cannot disturb the training's groups.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from outlast.config import HealthConfig, ReplicaDigestConfig, StragglerDetectionConfig
from outlast.env import WorkerEnv
from outlast.errors import ExitReason, PeerLost, UnhealthyRank
from outlast.health import CheckResult, ProcessGroupCheck, Status
from outlast.incidents import EventKind, Incident, IncidentKind
from outlast.monitor.rank_monitor import SectionTimer
from outlast.policy.rerun import Diagnosis, Finding
from outlast.runtime.consensus import Consensus
from outlast.runtime.device import device_name
from outlast.runtime.diagnoses import leave_diagnosis
from outlast.runtime.journal import Journal

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from outlast.numerics.replica_digest import Agreement
    from outlast.straggler import Report


log = logging.getLogger(__name__)
NO_PART_OF_A_STEP = frozenset({"setup", "checkpointing", "evaluation", "validation"})
"""Sections that are excluded from a step's time and not compared between ranks."""
STEP = "step"
_MAX_NAMED = 3
"""Weights that a message lists by name."""


class RankLiveness:
    """Check that all ranks respond.

    Args:
        config: The interval is not 0.

    Raises:
        RendezvousError: The ranks did not find each other.

    Collective: all ranks create it.
    Thread: that of the training loop.
    """

    def __init__(self, config: HealthConfig, place: WorkerEnv, journal: Journal) -> None:
        self._interval = config.process_group_interval
        self._place, self._journal = place, journal
        self._check = ProcessGroupCheck(timeout_s=config.process_group_timeout)

    def check(self, iteration: int) -> None:
        """Check all ranks if the interval has passed.

        Raises:
            PeerLost: A rank is gone or silent; the message says which.
            UnhealthyRank: A rank returned a wrong result; the message says which.

        Collective: all ranks.
        Blocks: until all ranks have come, up to ``process_group_timeout`` and some seconds.
        """
        if iteration % self._interval == 0 and (result := self._check.run()).has_failed:
            self._judge(result, iteration)

    def close(self) -> None:
        """Release the process group without waiting for peers."""
        self._check.close()

    def _judge(self, result: CheckResult, iteration: int) -> NoReturn:
        is_wrong = result.status == Status.FAILED
        ranks: list[int] = result.facts.get("wrong_ranks" if is_wrong else "absent_ranks", [])
        rank = ranks[0] if ranks else None
        message = f"check of all ranks after iteration {iteration}: {result.reason}"
        answering = (other for other in range(self._place.world_size) if other not in ranks)
        reports = self._place.global_rank == next(answering, None)
        log.log(logging.ERROR if reports else logging.DEBUG, "%s", message)
        if ranks and reports and result.status != Status.LOST:
            # The launcher records the incident of a rank that is gone, with its exit code.
            is_neighbour = ranks[0] // max(1, self._place.local_world_size) == self._place.node_rank
            incident = Incident(
                kind=IncidentKind.WRONG_ANSWER if is_wrong else IncidentKind.WORKER_HUNG,
                job=self._place.job,
                cycle=self._place.cycle,
                node=self._place.node if is_neighbour else "",
                rank=ranks[0],
                iteration=iteration,
                evidence={"summary": message, "ranks": ranks},
            )
            self._journal.write(EventKind.INCIDENT, rank=ranks[0], iteration=iteration, incident=incident)
        if is_wrong:
            raise UnhealthyRank(
                f"{message}; what it computes is not to be trusted: run outlast doctor on its node",
                rank=rank,
                iteration=iteration,
            )
        raise PeerLost(f"{message}; see the log of that rank", rank=rank, iteration=iteration)


class ReplicaWatch:
    """Compare the replicas at an interval of steps, and before saves.

    Args:
        config: The interval is not 0.
        among: Ranks that hold the same plain tensors; ``None`` = all.

    Thread: that of the training loop.
    """

    def __init__(
        self,
        config: ReplicaDigestConfig,
        state: Mapping[str, Any],
        among: dist.ProcessGroup | DeviceMesh | None,
        place: WorkerEnv,
        journal: Journal,
    ) -> None:
        from outlast.numerics.replica_digest import ReplicaDigest

        self._place, self._journal = place, journal
        self._digest = ReplicaDigest(state, group=among, interval=config.interval, place=place)
        self._checked: int | None = None

    def decision(self, iteration: int, *, saves: bool) -> ExitReason | None:
        """Compare the replicas if due; return the exit code with which all ranks exit, or ``None``.

        Args:
            saves: Whether the state is about to be saved.

        Raises:
            PeerLost: A peer left.

        Collective: all ranks.
        Blocks: while this rank's replicas are digested, and until all ranks have come.
        """
        if self._checked == iteration or not (saves or self._digest.should_check(iteration)):
            return None
        self._checked = iteration
        agreement = self._digest.check(iteration)
        return None if agreement.agrees else self._judge(agreement)

    def close(self) -> None:
        """Release the process group without waiting for peers."""
        self._digest.close()

    def _judge(self, agreement: Agreement) -> ExitReason:
        """Record a diagnosis; without a majority only a replay can identify the faulty replica."""
        is_known = bool(agreement.deviating)
        others = agreement.deviating or agreement.undecided
        blamed = others[0]
        diagnosis = Diagnosis(
            finding=Finding.PERSISTENT if is_known else Finding.SPLIT,
            rank=blamed.rank,
            node=blamed.node if is_known else "",
            device=blamed.device if is_known else "",
            iteration=agreement.iteration,
            what=blamed.tensor or "state",
            message=agreement.describe(),
            rejected_ranks=tuple(one.rank for one in others),
        )
        leave_diagnosis(self._place, diagnosis, self._journal)
        return ExitReason.FAILED_VALIDATION if is_known else ExitReason.RESUME_TO_DISAMBIGUATE


class FiniteEnd:
    """Check whether the trained state is finite when a run ends.

    Args:
        state: The trained state before anything is loaded; see :class:`outlast.numerics.nonfinite.StateCheck`.

    Blocks: until the device has computed the state.
    """

    def __init__(self, state: Mapping[str, Any], place: WorkerEnv, *, is_saved: bool) -> None:
        from outlast.numerics.nonfinite import StateCheck

        self._place = place
        self._check = StateCheck(state, asks_objects=is_saved)

    def agree(self, state: Mapping[str, Any], iteration: int, consensus: Consensus) -> Diagnosis | None:
        """Return the diagnosis of the first rank with NaN or infinity, the same on all ranks; ``None`` = all are
        finite.

        Raises:
            PeerLost: A peer left.

        Collective: all ranks, between steps.
        Blocks: until the device has computed the state, and all ranks have come.
        """
        alone = self.judge(state, iteration)
        (first,) = consensus.agree([(self._place.world_size - self._place.global_rank) * (alone is not None)])
        return _diagnose_end(iteration, self._place.world_size - first) if first else None

    def judge(self, state: Mapping[str, Any], iteration: int) -> Diagnosis | None:
        """Return the diagnosis for this rank alone. Collective: no."""
        found = self._check.find(state)
        if not found:
            return None
        more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
        log.error("weights that are NaN or infinite on this rank: %s%s", ", ".join(found[:_MAX_NAMED]), more)
        return _diagnose_end(iteration, self._place.global_rank)


def _diagnose_end(iteration: int, rank: int) -> Diagnosis:
    message = f"training ended after iteration {iteration} with weights that are NaN or infinite on rank {rank}"
    return Diagnosis(finding=Finding.REPEATED, rank=rank, iteration=iteration, message=message)


class SlowRanks:
    """Time this rank's steps and sections, and compare them with the other ranks when all ranks agree to.

    Args:
        consensus: How the ranks agree; waits in it are excluded from this rank's time.

    Thread: that of the training loop, which creates it.
    """

    def __init__(
        self, config: StragglerDetectionConfig, place: WorkerEnv, journal: Journal, consensus: Consensus
    ) -> None:
        from outlast.straggler import StragglerDetector
        from outlast.straggler.report import record

        self._place, self._consensus = place, consensus
        self.detector: StragglerDetector = StragglerDetector(
            config,
            global_rank=place.global_rank,
            local_rank=place.local_rank,
            node=place.node,
            on_report=partial(record, place=place, journal=journal),
        )
        for name in ("agree", "finish"):
            self.detector.wrap(consensus, name, waits=True)
        self._waited_before_s = 0.0

    def timed(self, name: str, section: SectionTimer) -> SectionTimer:
        """Return a timed section; the time of a section in :data:`NO_PART_OF_A_STEP` is excluded."""
        if name == STEP:
            return section
        mark = self.detector.leave_out() if name in NO_PART_OF_A_STEP else self.detector.section(name)

        def open_(_: int) -> None:
            section.__enter__()
            mark.__enter__()

        def shut(_: int) -> None:
            mark.__exit__(None, None, None)
            section.__exit__()

        return SectionTimer(0, open_, shut)

    @contextmanager
    def left_out(self, section: AbstractContextManager[None]) -> Iterator[None]:
        """Open one of the session's sections with its time excluded."""
        with section, self.detector.leave_out():
            yield

    def begin_step(self, iteration: int) -> None:
        self._waited_before_s = self._consensus.waited_s
        self.detector.begin_step(iteration)

    def note_wait(self) -> None:
        """Record the time that this rank waited for the others in this step."""
        self.detector.note_wait(self._consensus.waited_s - self._waited_before_s)

    def diagnose(self, report: Report) -> None:
        """Record a diagnosis of the slowest rank for the launcher."""
        place, rank = self._place, report.stop_for[0]
        one = next(one for one in report.findings.named if one.rank == rank)
        causes = [decision.describe() for decision in report.machines if decision.rank == rank]
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
