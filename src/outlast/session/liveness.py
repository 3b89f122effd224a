"""Asking all ranks, every so many steps, whether they are there: who is gone or silent is named before others hang.

It is asked before the ranks agree on what follows a step: that would wait for a silent rank for half an hour.
The ranks answer on a group of their own, so that neither the question nor what follows touches the training's groups.
"""

from __future__ import annotations

import logging
from typing import NoReturn

from outlast.config import HealthConfig
from outlast.env import WorkerEnv
from outlast.errors import PeerLost, UnhealthyRank
from outlast.health import CheckResult, ProcessGroupCheck, Status
from outlast.incidents import EventKind, Incident, IncidentKind
from outlast.runtime.journal import Journal

__all__ = ["Liveness"]

log = logging.getLogger(__name__)


class Liveness:
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
        speaks = self._place.global_rank == next(answering, None)
        log.log(logging.ERROR if speaks else logging.DEBUG, "%s", message)
        if ranks and speaks and result.status != Status.LOST:
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
