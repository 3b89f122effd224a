"""Check-ups: an agent has its node looked at, without waiting for what is found.

A check of a network disk or of a driver can take its whole time, so none is made in the agent's own loop, nor in its
process: a thread asks a probe process and puts what it found into the agent's mailbox. That process stays for the next
check-up, which then costs some milliseconds, within the time that ending the workers takes. GPUs get a process of
their own each time, as one that stayed would keep memory of theirs. Nothing here imports torch.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from outlast.config import HealthConfig
from outlast.health.gpu import check_gpu, has_gpus
from outlast.health.node import check_node
from outlast.health.prober import Prober
from outlast.health.result import CheckResult, Status

__all__ = ["CheckedUp", "Checkups", "Occasion"]

_CLOSE_S = 3.0


class Occasion(StrEnum):
    """Why a node is looked at."""

    JOINING = "before it joins"
    FAULT = "after a fault"
    TRAINING = "while it trains"


@dataclass(frozen=True, slots=True)
class CheckedUp:
    """What was found; for the agent's mailbox."""

    occasion: Occasion
    results: tuple[CheckResult, ...]

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        """The checks that failed."""
        return tuple(result for result in self.results if result.has_failed)


class Checkups:
    """Look at one node, one check-up after the other.

    Args:
        config: What the node must have.
        places: Folders and URLs that the run writes to.
        node: The node's name.
        network: The node needs its network, also where no interface is named.
        deliver: Called in a thread of this with what was found.

    Thread: any; owns one.
    """

    def __init__(
        self,
        config: HealthConfig,
        *,
        places: Sequence[str],
        node: str,
        network: bool,
        deliver: Callable[[CheckedUp], None],
    ) -> None:
        self.config = config
        self._places, self._node, self._network = tuple(places), node, network
        self._deliver = deliver
        self._asked: queue.SimpleQueue[tuple[Occasion, bool, bool] | None] = queue.SimpleQueue()
        self._probers = (Prober(), Prober())
        self._thread = threading.Thread(target=self._run, name="outlast-checkups", daemon=True)
        self._thread.start()

    def begin(self, occasion: Occasion, *, gpus: bool, computes: bool = True) -> None:
        """Have the node looked at; one :class:`CheckedUp` will be delivered. Blocks: never.

        Args:
            occasion: Why.
            gpus: Look at its GPUs as well, if it has any.
            computes: Have its processor compute something, which takes longer than all the rest.
        """
        self._asked.put((occasion, gpus, computes))

    def abandon(self) -> None:
        """Give up what is under way, and end its processes. Blocks: hardly."""
        for prober in self._probers:
            prober.abandon()

    def close(self) -> None:
        """Give up what is under way, and end its processes. Idempotent. Blocks: hardly, at most 3 s."""
        self._asked.put(None)
        for prober in self._probers:
            prober.abandon()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        # The probe processes end with this thread: the kernel sees to it.
        lasting, passing = self._probers
        with lasting:
            while (asked := self._asked.get()) is not None:
                occasion, gpus, computes = asked
                try:
                    results = self._look(lasting, passing, gpus=gpus, computes=computes)
                except Exception as error:  # noqa: BLE001 - whatever it is, the agent waits for an answer
                    why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                    results = (
                        CheckResult(name="check-up", target="node", status=Status.ERROR, reason=why, took_s=0.0),
                    )
                self._deliver(CheckedUp(occasion, results))

    def _look(self, lasting: Prober, passing: Prober, *, gpus: bool, computes: bool) -> tuple[CheckResult, ...]:
        results = check_node(
            self.config,
            places=self._places,
            node=self._node,
            network=self._network,
            num_products=int(computes),
            prober=lasting,
        )
        if gpus and has_gpus():
            with passing:
                found = check_gpu(config=self.config, node=self._node, prober=passing)
            results += tuple(one for one in found if (one.name, one.target) != ("compute", "cpu"))
        return results
