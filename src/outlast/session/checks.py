"""What a session checks between steps: that all ranks answer, that replicas are identical, and that no rank is slow.

All ranks are asked before they agree on what follows a step: that would wait for a silent rank for half an hour. They
answer on a group of their own, so that neither the question nor what follows touches the training's groups.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
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
from outlast.runtime.journal import Journal
from outlast.runtime.postmortem import leave_diagnosis

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from outlast.numerics.replica_digest import Agreement
    from outlast.straggler import Report

__all__ = ["RankLiveness", "ReplicaWatch", "SlowRanks"]

log = logging.getLogger(__name__)
NO_PART_OF_A_STEP = frozenset({"setup", "checkpointing", "evaluation", "validation"})
"""Sections that are left out of a step's time, and compared with nothing."""
STEP = "step"


class RankLiveness:
    """Ask the ranks.

    Args:
        config: How often; the interval is not 0.
        place: This worker's place.
        journal: Where it is written who did not answer.

    Raises:
        RendezvousError: The ranks did not find each other.

    Collective: all ranks make it.
    Thread: that of the training loop.
    """

    def __init__(self, config: HealthConfig, place: WorkerEnv, journal: Journal) -> None:
        self._interval = config.process_group_interval
        self._place, self._journal = place, journal
        self._check = ProcessGroupCheck(timeout_s=config.process_group_timeout)

    def check(self, iteration: int) -> None:
        """Ask, if it is time to.

        Args:
            iteration: Number of optimizer steps done, the one that ends included.

        Raises:
            PeerLost: A rank is gone, or silent; the message says which.
            UnhealthyRank: A rank answered wrongly; the message says which.

        Collective: all ranks, alike.
        Blocks: until all ranks have come, up to ``process_group_timeout`` and some seconds.
        """
        if iteration % self._interval == 0 and (result := self._check.run()).has_failed:
            self._judge(result, iteration)

    def close(self) -> None:
        """Give the group back, however the peers fare."""
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
            # Of one that is gone its launcher tells, with how it ended.
            kind = IncidentKind.WRONG_ANSWER if is_wrong else IncidentKind.WORKER_HUNG
            self._write(kind, ranks, message, iteration)
        if is_wrong:
            raise UnhealthyRank(
                f"{message}; what it computes is not to be trusted: run outlast doctor on its node",
                rank=rank,
                iteration=iteration,
            )
        raise PeerLost(f"{message}; see the log of that rank", rank=rank, iteration=iteration)

    def _write(self, kind: IncidentKind, ranks: list[int], message: str, iteration: int) -> None:
        place = self._place
        is_neighbour = ranks[0] // max(1, place.local_world_size) == place.node_rank
        incident = Incident(
            kind=kind,
            job=place.job,
            cycle=place.cycle,
            node=place.node if is_neighbour else "",
            rank=ranks[0],
            iteration=iteration,
            evidence={"summary": message, "ranks": ranks},
        )
        self._journal.write(EventKind.INCIDENT, rank=ranks[0], iteration=iteration, incident=incident)


class ReplicaWatch:
    """Compare the replicas every so many steps, and before saves.

    Args:
        config: How often; the interval is not 0.
        state: What the ranks hold, without wrappers such as DDP.
        among: Ranks that hold the same plain tensors; ``None`` = all.
        place: This worker's place.
        journal: Where incidents are written.

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

    def verdict(self, iteration: int, *, saves: bool) -> ExitReason | None:
        """Compare the replicas, if it is time to; return the exit code with which all ranks leave, or ``None``.

        Args:
            iteration: Number of optimizer steps done.
            saves: Whether the state is about to be saved.

        Raises:
            PeerLost: A peer left.

        Collective: all ranks, alike.
        Blocks: while this rank's replicas are digested, and until all ranks have come.
        """
        if self._checked == iteration or not (saves or self._digest.should_check(iteration)):
            return None
        self._checked = iteration
        agreement = self._digest.check(iteration)
        return None if agreement.agrees else self._judge(agreement)

    def close(self) -> None:
        """Give the group back, however the peers fare."""
        self._digest.close()

    def _judge(self, agreement: Agreement) -> ExitReason:
        """Write a diagnosis of whose replica differs. Without a majority only running the steps again can tell."""
        if agreement.culprits:
            blamed, others = agreement.culprits[0], agreement.culprits
            finding, code = Finding.PERSISTENT, ExitReason.FAILED_VALIDATION
        else:
            blamed, others = agreement.undecided[0], agreement.undecided
            finding, code = Finding.SPLIT, ExitReason.RESUME_TO_DISAMBIGUATE
        is_known = finding == Finding.PERSISTENT
        diagnosis = Diagnosis(
            finding=finding,
            rank=blamed.rank,
            node=blamed.node if is_known else "",
            device=blamed.device if is_known else "",
            iteration=agreement.iteration,
            what=blamed.tensor or "state",
            message=agreement.describe(),
            rejected_ranks=tuple(one.rank for one in others),
        )
        leave_diagnosis(self._place, diagnosis, self._journal)
        return code


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

    def wants_report(self) -> bool:
        """Return whether it is time for a report, as far as this rank knows."""
        return self._detector.wants_report()

    def report(self) -> Report:
        """Compare the ranks; see :meth:`outlast.straggler.StragglerDetector.report`.

        Raises:
            PeerLost: A peer is gone, or did not come in time.

        Collective: all ranks, after the same step.
        Blocks: until all ranks have come, and while the machine of a rank that is named is looked at.
        """
        return self._detector.report()

    def diagnose(self, report: Report) -> None:
        """Name to the launcher the rank for which all of them leave; where there are several, the slowest."""
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
