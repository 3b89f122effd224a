"""Watching whether replicas stay bit-identical, and what follows when they do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from outlast.config import ReplicaDigestConfig
from outlast.env import WorkerEnv
from outlast.errors import ExitReason
from outlast.policy.rerun import Diagnosis, Finding
from outlast.runtime.diagnoses import leave_diagnosis
from outlast.runtime.journal import Journal
from outlast.session.state import without_wrappers

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from outlast.numerics.comparison import Agreement

__all__ = ["ReplicaWatch"]


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
        """Report whose replica differs. Without a majority only running the steps again can tell."""
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
