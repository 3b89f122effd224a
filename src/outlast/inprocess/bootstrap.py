"""How the monitor processes of a job find each other: initial rank 0 publishes an address in the launcher's store.

Every rank reads one key, once; from then on the store is not needed any more, and it may die.

A rank that dies before its monitor process knows where the hub is would keep the others waiting for as long as the
bootstrap may take. Its monitor process has no torch, which the launcher's store needs, so it starts a proxy process
that finishes the bootstrap: for any rank the proxy reads where the hub is, for initial rank 0 it publishes that the hub
is with its monitor process. Only that proxy imports torch."""

from __future__ import annotations

import datetime
import itertools
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from outlast import clock, env
from outlast.errors import ConfigError, OutlastError, RendezvousError
from outlast.inprocess import protocol as m
from outlast.runtime.addresses import Endpoint
from outlast.runtime.processes import ChildProcess, channel_to_parent, ignore_group_signals
from outlast.runtime.run_key import accept_offer, make_offer

log = logging.getLogger("outlast.inprocess.bootstrap")

_RETRY_S = 0.02
_ordinals = itertools.count()


class Bootstrap:
    """How the ranks learn where the hub is, once for each call of a wrapper.

    Args:
        place: This worker's place.
        timeout_s: How long initial rank 0 is waited for.
        key: Of a bootstrap that another process began; empty: a new one.
    """

    def __init__(self, place: env.WorkerEnv, *, timeout_s: float, key: str = "") -> None:
        self._place, self._timeout_s = place, timeout_s
        # The launcher's store outlives its cycles.
        self.key = key or f"outlast/inprocess/{place.cycle}/{next(_ordinals)}"
        self._store: Any = None

    def run(self, own: str, send: Callable[[m.Connect], None], *, known: m.Connect | None = None) -> None:
        """Send the monitor process where the hub is; initial rank 0 also publishes it for the others.

        Args:
            own: ``host port`` where this rank's monitor process listens.
            send: Called once; on initial rank 0 before anything is published, so that its monitor process knows what
                the others look for even if the rank dies.
            known: What was sent already, for the others.

        Raises:
            ConfigError: Nothing says where the launcher's store is, or initial rank 0 has another run key.
            RendezvousError: Initial rank 0 did not come in time.

        Blocks: until initial rank 0 has come; up to the timeout.
        """
        ours = known or m.Connect(hub=own, offer=make_offer())
        if self._place.world_size == 1:
            return send(ours)
        if self._place.global_rank == 0:
            send(ours)
        self._store = self._open()
        try:
            if self._place.global_rank == 0:
                self._store.set(self.key, f"{ours.hub} {ours.offer}")
                return None
            self._store.wait([self.key], datetime.timedelta(seconds=self._timeout_s))
            host, port, offer = self._store.get(self.key).decode().split(" ")
        except (RuntimeError, ValueError) as error:
            raise RendezvousError(f"initial rank 0 did not come in {self._timeout_s:g} s: {error}") from error
        accept_offer(offer, m.HUB)  # what is wrong with it, the rank reports
        return send(m.Connect(hub=f"{host} {port}", offer=offer))

    def close(self) -> None:
        """Stop hosting: every rank knows it. Idempotent."""
        self._store = None

    def _open(self) -> Any:
        from outlast.runtime import store as stores  # imports torch, which no monitor process has
        from outlast.runtime.process_groups import meeting_point

        point, variables = meeting_point(self._place), env.environ()
        if point == "env://":
            host, port = variables.get("MASTER_ADDR"), variables.get("MASTER_PORT")
        else:
            host, _, port = point.removeprefix("tcp://").rpartition(":")
        if not host or not port or not port.isdecimal():
            raise ConfigError("it is not known where the ranks meet; set MASTER_ADDR and MASTER_PORT")
        endpoint = Endpoint(host, int(port))
        is_hosted = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        end_s = clock.now_s() + self._timeout_s
        if self._place.global_rank == 0 and not is_hosted:
            store = stores.host(endpoint, timeout_s=self._timeout_s)
            if store is None:
                raise RendezvousError(f"{endpoint} is taken; set another MASTER_PORT")
            return store
        while True:
            left_s = end_s - clock.now_s()
            try:
                return stores.connect(endpoint, timeout_s=max(0.1, left_s), call_timeout_s=self._timeout_s)
            except RendezvousError:
                if clock.now_s() >= end_s:
                    raise
                threading.Event().wait(_RETRY_S)


class _ProxyTask(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the proxy has to do."""

    key: str
    address: str
    timeout_s: float
    known: m.Connect | None


def start_proxy(key: str, address: str, known: m.Connect | None, timeout_s: float) -> ChildProcess:
    """Finish the bootstrap in place of a rank that died; return the process that does it.

    It sends what the rank would have sent, or ends where that cannot be known, and hosts what has to be hosted until it
    is closed.

    Args:
        key: Of the bootstrap.
        address: ``host port`` where this process could host the hub.
        known: What initial rank 0 sent before it died; ``None``: nothing.
        timeout_s: How long initial rank 0 is waited for.
    """
    return ChildProcess(
        "outlast.inprocess.bootstrap",
        task=_ProxyTask(key=key, address=address, timeout_s=timeout_s, known=known),
        receives=m.Connect,
        own_session=False,
    )


def main() -> int:
    """Run as the proxy: answer, and then host what has to be hosted until it is ended; return 0 or 1."""
    ignore_group_signals()
    answers: list[m.Connect] = []
    with channel_to_parent(sys.argv[1], _ProxyTask) as parent:
        try:
            task = parent.receive()
            if task is None:
                return 1
            bootstrap = Bootstrap(env.read_worker(), timeout_s=task.timeout_s, key=task.key)
            bootstrap.run(task.address, answers.append, known=task.known)
        except (OSError, OutlastError) as error:
            log.warning("the rendezvous store cannot be reached: %s", error)
            return 1
        parent.send(answers[0])
        parent.receive()
        bootstrap.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
