"""Health checks of a node, apart from the agent's loop.

A check of a network disk or of a driver can take its whole time, so none is made in the agent's own loop, nor in its
process: a thread asks a probe process and puts the result into the agent's mailbox. That process stays for the next
checks, which then cost some milliseconds, within the time that ending the workers takes. GPUs get a process of their
own each time, as one that stayed would keep memory of theirs. Nothing here imports torch.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from outlast.config import HealthConfig
from outlast.health.devices import has_gpus, probe_devices
from outlast.health.node import probe_node
from outlast.health.probing import CheckResult, Prober, Status

_CLOSE_S = 3.0


class Occasion(StrEnum):
    """Why a node is checked."""

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
    """Check one node, one check-up after the other.

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
        self._asked: queue.SimpleQueue[tuple[Occasion, bool, bool, bool] | None] = queue.SimpleQueue()
        self._probers = (Prober(), Prober())
        self._thread = threading.Thread(target=self._run, name="outlast-checkups", daemon=True)
        self._thread.start()

    def begin(self, occasion: Occasion, *, gpus: bool, computes: bool = True, places: bool = True) -> None:
        """Begin a check; one :class:`CheckedUp` will be delivered. Blocks: never.

        Args:
            occasion: Why.
            gpus: Check its GPUs as well, if it has any.
            computes: Let its processor compute something, which takes longer than all the rest.
            places: Check the folders and URLs that the run writes to; one that hangs takes ``check_timeout``.
        """
        self._asked.put((occasion, gpus, computes, places))

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
                occasion, gpus, computes, places = asked
                try:
                    results = self._look(lasting, passing, gpus=gpus, computes=computes, places=places)
                except Exception as error:  # noqa: BLE001 - whatever it is, the agent waits for an answer
                    why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                    results = (
                        CheckResult(name="check-up", target="node", status=Status.ERROR, reason=why, took_s=0.0),
                    )
                self._deliver(CheckedUp(occasion, results))

    def _look(
        self, lasting: Prober, passing: Prober, *, gpus: bool, computes: bool, places: bool
    ) -> tuple[CheckResult, ...]:
        results = probe_node(
            lasting,
            self.config,
            places=self._places if places else (),
            node=self._node,
            network=self._network,
            num_products=int(computes),
        )
        if gpus and has_gpus():
            with passing:
                found = tuple(probe_devices(passing, self.config, node=self._node))
            results += tuple(one for one in found if (one.name, one.target) != ("compute", "cpu"))
        return results
