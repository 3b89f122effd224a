"""The meeting of a job's agent processes: the first rank publishes the coordinator's address in the launcher's
TCPStore.

The agent process of the first rank that reaches the store coordinates, so no rank's death before that delays the
others. Every rank reads one key, once; the store may end then.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

from outlast import clock, env
from outlast.errors import ConfigError, RendezvousError
from outlast.inprocess import protocol as m
from outlast.runtime.addresses import Endpoint
from outlast.runtime.run_key import accept_offer

_RETRY_S = 0.02
_ordinals = itertools.count()


class Bootstrap:
    """Agree on the agent process that coordinates, once for each call of a wrapper.

    Args:
        place: This worker's place.
        timeout_s: Time limit in seconds for the ranks' TCPStore.
    """

    def __init__(self, place: env.WorkerEnv, *, timeout_s: float) -> None:
        self._place, self._timeout_s = place, timeout_s
        # The launcher's store outlives its cycles.
        self._key = f"outlast/inprocess/{place.cycle}/{next(_ordinals)}"
        self._store: Any = None

    def run(self, own: m.Listening) -> m.Connect:
        """Return the address of the coordinator: of this rank's agent process, if no rank came before.

        Raises:
            ConfigError: The address of the launcher's TCPStore is not set, or the first rank has another run key.
            RendezvousError: The TCPStore cannot be reached in time.

        Blocks: until the TCPStore responds; up to the timeout.
        """
        if self._place.world_size == 1:
            return m.Connect(addresses=(own.address,), offer=own.offer)
        self._store = self._open()
        try:
            agreed = self._store.compare_set(self._key, "", f"{own.address} {own.offer}").decode()
        except RuntimeError as error:
            raise RendezvousError(f"the ranks' store does not respond in {self._timeout_s:g} s: {error}") from error
        address, _, offer = agreed.rpartition(" ")
        accept_offer(offer, m.COORDINATION)  # raises here, so that the rank reports an invalid offer
        return m.Connect(addresses=(address,), offer=offer)

    def close(self) -> None:
        self._store = None

    def _open(self) -> Any:
        from outlast.runtime import store as stores  # imports torch, which no agent process has
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
