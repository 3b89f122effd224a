"""Watching whether replicas stay bit-identical, and what follows when they do not."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from outlast.config import ReplicaDigestConfig
from outlast.env import WorkerEnv
from outlast.errors import ExitReason
from outlast.incidents import EventKind, Incident, IncidentKind
from outlast.policy.rerun import Diagnosis, Finding
from outlast.runtime.diagnoses import write_diagnosis
from outlast.runtime.journal import Journal
from outlast.session.state import without_wrappers

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from outlast.numerics.replica_agreement import Agreement, Replica

__all__ = ["ReplicaWatch"]

log = logging.getLogger(__name__)


class ReplicaWatch:
    """Compare the replicas every so many steps, and before saves.

    Args:
        config: How often; the interval is not 0.
        state: What the ranks hold.
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
        self._digest = ReplicaDigest(without_wrappers(state), group=among, interval=config.interval, place=place)
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
        """Write down whose replica differs. Without a majority only running the steps again can tell."""
        if agreement.culprits:
            diagnosis = self._diagnose(agreement, agreement.culprits[0], Finding.PERSISTENT)
            self._leave_diagnosis(diagnosis)
            code = ExitReason.FAILED_VALIDATION
        else:
            diagnosis = self._diagnose(agreement, agreement.undecided[0], Finding.UNDECIDED)
            code = ExitReason.RESUME_TO_DISAMBIGUATE
        if self._place.global_rank == diagnosis.rank:
            incident = Incident(
                kind=IncidentKind.INVALID_RESULT,
                job=self._place.job,
                cycle=self._place.cycle,
                node=self._place.node,
                rank=self._place.global_rank,
                iteration=agreement.iteration,
                evidence={"summary": agreement.describe(), "diagnosis": msgspec.to_builtins(diagnosis)},
            )
            self._journal.write(
                EventKind.INCIDENT, rank=self._place.global_rank, iteration=agreement.iteration, incident=incident
            )
        return code

    def _diagnose(self, agreement: Agreement, replica: Replica, finding: Finding) -> Diagnosis:
        others = agreement.culprits or agreement.undecided
        return Diagnosis(
            finding=finding,
            rank=replica.rank,
            node=replica.node,
            device=replica.device,
            iteration=agreement.iteration,
            what=replica.tensor or "state",
            message=agreement.describe(),
            rejected_ranks=tuple(one.rank for one in others),
        )

    def _leave_diagnosis(self, diagnosis: Diagnosis) -> None:
        place = self._place
        if place.run_dir is None:
            return
        try:
            write_diagnosis(place.run_dir, place.job, place.cycle, place.global_rank, diagnosis)
        except OSError as error:
            log.error("the diagnosis cannot be written (%s); the launcher judges by the exit code alone", error)
