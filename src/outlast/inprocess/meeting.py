"""How the monitor processes of a job find each other: initial rank 0 tells an address through the launcher's store.

Everybody reads one key, once; from then on the store is of no use any more, and it may die.
"""

from __future__ import annotations

import datetime
import itertools
import secrets
import threading
from collections.abc import Callable
from typing import Any

from outlast import clock, env
from outlast.errors import ConfigError, RendezvousError
from outlast.inprocess import messages as m
from outlast.runtime import addresses
from outlast.runtime import store as stores
from outlast.runtime.addresses import Endpoint
from outlast.runtime.group import meeting_point

__all__ = ["Meeting", "own_address"]

_RETRY_S = 0.02
_ordinals = itertools.count()


def own_address(place: env.WorkerEnv) -> str:
    """Return the address of this machine at which the other ranks reach it.

    Raises:
        RendezvousError: The machine of MASTER_ADDR cannot be found.
    """
    return addresses.own_address(None if place.world_size == 1 else place.master_addr)


class Meeting:
    """Where the ranks meet once, for one call of a wrapped function.

    Args:
        place: This worker's place.
        timeout_s: How long the others are waited for.
        key: Of the meeting of a rank that cannot come itself; empty: another meeting.
    """

    def __init__(self, place: env.WorkerEnv, *, timeout_s: float, key: str = "") -> None:
        self._place, self._timeout_s = place, timeout_s
        # The launcher's store outlives its cycles.
        self.key = key or f"outlast/inprocess/{place.cycle}/{next(_ordinals)}"
        self._store: Any = None

    def meet(self, own: str, tell: Callable[[m.Connect], None], *, known: m.Connect | None = None) -> None:
        """Tell the monitor process where the hub is, and have the others told, if that is with it.

        Args:
            own: ``host port`` where this rank's monitor process listens.
            tell: Called once. Initial rank 0's is told before the others are, so that it knows whom they look for
                even if the rank dies.
            known: What it was told already, for the others.

        Raises:
            ConfigError: It is not known where the ranks meet.
            RendezvousError: Initial rank 0 did not come in time.

        Blocks: until initial rank 0 has come; up to the timeout.
        """
        ours = known or m.Connect(hub=own, token=secrets.token_hex(16))
        if self._place.world_size == 1:
            return tell(ours)
        if self._place.global_rank == 0:
            tell(ours)
        self._store = self._open()
        try:
            if self._place.global_rank == 0:
                self._store.set(self.key, f"{ours.hub} {ours.token}")
                return None
            self._store.wait([self.key], datetime.timedelta(seconds=self._timeout_s))
            host, port, token = self._store.get(self.key).decode().split(" ")
        except (RuntimeError, ValueError) as error:
            raise RendezvousError(f"initial rank 0 did not come in {self._timeout_s:g} s: {error}") from error
        return tell(m.Connect(hub=f"{host} {port}", token=token))

    def close(self) -> None:
        """Stop hosting: everybody has met. Idempotent."""
        self._store = None

    def _open(self) -> Any:
        endpoint, is_hosted = _find(self._place)
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


def _find(place: env.WorkerEnv) -> tuple[Endpoint, bool]:
    """Return where the store is, and whether the launcher hosts it."""
    point = meeting_point(place)
    variables = env.environ()
    if point == "env://":
        host, port = variables.get("MASTER_ADDR"), variables.get("MASTER_PORT")
    else:
        host, _, port = point.removeprefix("tcp://").rpartition(":")
    if not host or not port or not port.isdecimal():
        raise ConfigError("it is not known where the ranks meet; set MASTER_ADDR and MASTER_PORT")
    return Endpoint(host, int(port)), variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
