"""How the monitor processes of a job find each other: initial rank 0 publishes an address in the launcher's store.

Every rank reads one key, once; from then on the store is not needed any more, and it may die.

A rank that dies before its monitor process knows where the hub is would keep the others waiting for as long as the
bootstrap may take. Its monitor process has no torch, which the launcher's store needs, so it starts a proxy process
that finishes the bootstrap: for any rank the proxy reads where the hub is, for initial rank 0 it publishes that the hub
is with its monitor process. Only that proxy imports torch.
"""

from __future__ import annotations

import datetime
import itertools
import logging
import os
import secrets
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from outlast import clock, env
from outlast.decoding import from_json
from outlast.errors import ConfigError, OutlastError, RendezvousError
from outlast.inprocess import protocol as m
from outlast.runtime import addresses
from outlast.runtime.addresses import Endpoint

__all__ = ["Bootstrap", "BootstrapProxy", "main", "own_address"]


_RETRY_S = 0.02
_ordinals = itertools.count()


def own_address(place: env.WorkerEnv) -> str:
    """Return the address of this machine at which the other ranks reach it.

    Raises:
        RendezvousError: The machine of MASTER_ADDR cannot be found.
    """
    return addresses.own_address(None if place.world_size == 1 else place.master_addr)


class Bootstrap:
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
        from outlast.runtime import store as stores  # imports torch, which no monitor process has

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
    from outlast.runtime.process_groups import meeting_point  # imports torch, which no monitor process has

    point = meeting_point(place)
    variables = env.environ()
    if point == "env://":
        host, port = variables.get("MASTER_ADDR"), variables.get("MASTER_PORT")
    else:
        host, _, port = point.removeprefix("tcp://").rpartition(":")
    if not host or not port or not port.isdecimal():
        raise ConfigError("it is not known where the ranks meet; set MASTER_ADDR and MASTER_PORT")
    return Endpoint(host, int(port)), variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


log = logging.getLogger("outlast.inprocess.failover.bootstrap")


class _Errand(msgspec.Struct, frozen=True, kw_only=True):
    """What the other process is told."""

    key: str
    address: str
    timeout_s: float
    known: m.Connect | None


class BootstrapProxy:
    """Ask at the meeting.

    Args:
        selector: Of the process's loop; what it reports with a callable as data is called with the events.
        key: Of the meeting.
        address: ``host port`` where this process could host the hub.
        known: What initial rank 0 told before it died; ``None``: nothing.
        timeout_s: How long initial rank 0 is waited for.
        on_answer: Gets what the rank would have told; ``None``: it cannot be known.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        *,
        key: str,
        address: str,
        known: m.Connect | None,
        timeout_s: float,
        on_answer: Callable[[m.Connect | None], None],
    ) -> None:
        self._selector, self._on_answer = selector, on_answer
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "outlast.inprocess.failover.bootstrap"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._is_asking = True
        self._answer = b""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        errand = _Errand(key=key, address=address, timeout_s=timeout_s, known=known)
        try:
            self._stdin.write(msgspec.json.encode(errand) + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            pass  # its end is seen below
        selector.register(self._stdout, selectors.EVENT_READ, self._on_event)

    def _on_event(self, _: int) -> None:
        data = os.read(self._stdout.fileno(), m.MAX_PACKET_BYTES)
        self._answer += data
        if data and not self._answer.endswith(b"\n"):
            return
        self._stop_asking()
        try:
            answer = from_json(self._answer, m.Connect)
        except msgspec.DecodeError as error:
            log.warning("the hub cannot be located: %s", error)
            answer = None
        self._on_answer(answer)

    def close(self) -> None:
        """End the other process. Idempotent. Blocks: some milliseconds."""
        self._stop_asking()
        self._process.kill()
        self._process.wait()
        for end in (self._stdin, self._stdout):
            try:
                end.close()
            except BrokenPipeError:
                pass

    def _stop_asking(self) -> None:
        if self._is_asking:
            self._is_asking = False
            self._selector.unregister(self._stdout)


def main() -> int:
    """Run as the other process: answer, and then host what has to be hosted until nobody listens; return 0 or 1."""
    from outlast import env

    pass  # house: was a lazy import within this module

    told: list[m.Connect] = []
    try:
        errand = from_json(sys.stdin.buffer.readline(), _Errand)
        meeting = Bootstrap(env.read_worker(), timeout_s=errand.timeout_s, key=errand.key)
        meeting.meet(errand.address, told.append, known=errand.known)
    except (msgspec.DecodeError, OutlastError) as error:
        log.warning("the rendezvous store cannot be reached: %s", error)
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(told[0]) + b"\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()
    meeting.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
