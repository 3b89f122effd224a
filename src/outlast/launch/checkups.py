"""Health checks of a node, outside the agent's loop.

A check of a network disk or of a driver can block for its whole time limit, so a thread has a probe process run the
checks and puts the results into the agent's mailbox. The probe process stays for later checks, which then take
milliseconds. GPU checks get a new process each time: a lasting one would keep GPU memory. Nothing here imports torch.
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
    """The reason for a health check."""

    JOINING = "before it joins"
    FAULT = "after a fault"
    TRAINING = "while it trains"


@dataclass(frozen=True, slots=True)
class CheckedUp:
    """The results of a health check, for the agent's mailbox."""

    occasion: Occasion
    results: tuple[CheckResult, ...]

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        return tuple(result for result in self.results if result.has_failed)


class Checkups:
    """Run the health checks of one node, one after the other.

    Args:
        places: Directories and URLs that the run writes to.
        network: Check the network also if the config names no interface.
        deliver: Receives the results, in this object's thread.

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
        """Begin a health check, which delivers one :class:`CheckedUp`. Blocks: never.

        Args:
            occasion: The reason for the check.
            gpus: Check the node's GPUs, if any.
            computes: Run a computation on the processor, which takes longer than the other checks.
            places: Check the directories and URLs; one that hangs takes ``check_timeout``.
        """
        self._asked.put((occasion, gpus, computes, places))

    def abandon(self) -> None:
        """Cancel the running check and end its processes. Blocks: milliseconds."""
        for prober in self._probers:
            prober.abandon()

    def close(self) -> None:
        """Cancel the running check and end the thread. Idempotent. Blocks: at most 3 s."""
        self._asked.put(None)
        for prober in self._probers:
            prober.abandon()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        with self._probers[0]:  # the kernel ends the probe processes with this thread
            while (asked := self._asked.get()) is not None:
                occasion, *which = asked
                try:
                    results = self._look(*which)
                except Exception as error:  # noqa: BLE001 - the agent waits for a result whatever happened
                    why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                    failed = CheckResult(name="check-up", target="node", status=Status.ERROR, reason=why, took_s=0.0)
                    results = (failed,)
                self._deliver(CheckedUp(occasion, results))

    def _look(self, gpus: bool, computes: bool, places: bool) -> tuple[CheckResult, ...]:
        lasting, passing = self._probers
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
