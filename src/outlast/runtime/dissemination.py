"""The largest of each rank's numbers, on all ranks, over connections of their own.

What all ranks must decide together has to be agreed on at every step, so it must cost next to nothing. A gloo
all-reduce of eight bytes takes 0.1 ms in a tight loop and three times that after a real step, since its threads have to
be woken (measured, torch 2.13, two ranks on one machine); a message over a connection takes 0.03 ms. And gloo can miss
that its connections were cut while data was on its way, and then waits out its timeout; a socket cannot.

The algorithm is the dissemination barrier of Hensgen, Finkel and Manber (1988), with numbers: in round k each rank
tells the one 2^k further what it knows and hears from the one 2^k before. After ceil(log2 n) rounds everybody has
heard from everybody; as the largest of numbers does not change when some come twice, any number of ranks will do.

Rejected: a star (its centre talks to all), recursive doubling (needs a special case for worlds that are no power of
two), a tree (twice the rounds).
"""

from __future__ import annotations

import hmac
import math
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from outlast import clock, env
from outlast.errors import OutlastError, PeerLost, RendezvousError
from outlast.runtime import connections
from outlast.runtime.addresses import own_address

__all__ = ["Dissemination"]

_TOKEN_BYTES = 16
_GREET_S = 10.0
"""Seconds in which whoever connects has to say who it is."""
_HELLO = struct.Struct(f"<{_TOKEN_BYTES}sI")
_HEAD = struct.Struct("<II")


class Dissemination:
    """Tell all ranks the largest of each of their numbers.

    Args:
        to: For each round, the connection to the rank that hears from this one.
        of: For each round, the connection from the rank that this one hears.
        timeout_s: Seconds that a peer may be late.

    Thread: one at a time; :meth:`cut` from any.
    """

    def __init__(self, to: Sequence[socket.socket], of: Sequence[socket.socket], *, timeout_s: float) -> None:
        self._to, self._of, self._timeout_s = tuple(to), tuple(of), timeout_s
        self._ordinal = 0
        self._pending: list[int] | None = None
        self._first_error: OSError | None = None
        for connection in (*to, *of):
            connection.setblocking(True)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            whole_s, part_s = divmod(timeout_s, 1)
            patience = struct.pack("@ll", int(whole_s), int(part_s * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        connections.register(self)

    @classmethod
    def open(cls, *, timeout_s: float) -> Dissemination:
        """Connect all ranks of the default group.

        The ranks find each other through the group's store, and each connection begins with a secret from there.

        Raises:
            RendezvousError: The ranks did not find each other.

        Collective: all ranks of the default group, in the same order.
        Blocks: up to ``timeout_s``.
        """
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        rank, world_size = dist.get_rank(), dist.get_world_size()
        store: Any = _get_default_store()
        try:
            # Counted in the store: a process that joins a restart has made fewer than its peers.
            ordinal = store.add(f"outlast/dissemination/made-by/{rank}", 1)
            return cls._connect(store, f"outlast/dissemination/{ordinal}", rank, world_size, timeout_s)
        except (RuntimeError, OSError, ValueError) as error:
            raise RendezvousError(
                f"the ranks could not connect ({error}); see the log of the rank that left"
            ) from error

    @classmethod
    def _connect(cls, store: Any, name: str, rank: int, world_size: int, timeout_s: float) -> Dissemination:
        end_ns = clock.now_ns() + int(timeout_s * 1e9)
        rounds = [1 << number for number in range(math.ceil(math.log2(world_size)))]
        if rank == 0:
            store.set(f"{name}/token", os.urandom(_TOKEN_BYTES).hex())
        host = own_address(env.read_worker().master_addr)
        with ExitStack() as opened, _listen(host) as listener:
            store.set(f"{name}/{rank}", f"{host} {listener.getsockname()[1]}")
            to = []
            peers = [f"{name}/{(rank + distance) % world_size}" for distance in rounds]
            store.wait([f"{name}/token", *peers], timedelta(seconds=timeout_s))
            token = bytes.fromhex(store.get(f"{name}/token").decode())
            for key in peers:
                peer_host, port = store.get(key).decode().split(" ")
                connection = socket.create_connection((peer_host, int(port)), timeout=_left_s(end_ns))
                to.append(opened.enter_context(connection))
                connection.sendall(_HELLO.pack(token, rank))
            expected = {(rank - distance) % world_size for distance in rounds}
            came: dict[int, socket.socket] = {}
            while expected - came.keys():
                listener.settimeout(_left_s(end_ns))
                connection = opened.enter_context(listener.accept()[0])
                peer = _greet(connection, token, timeout_s=min(_GREET_S, _left_s(end_ns)))
                if peer not in expected or peer in came:
                    connection.close()  # a stranger
                    continue
                came[peer] = connection
            opened.pop_all()
        return cls(to, [came[(rank - distance) % world_size] for distance in rounds], timeout_s=timeout_s)

    def start(self, values: Sequence[int]) -> None:
        """Tell the first peer this rank's numbers, each within 64 bits; if it is gone, :meth:`finish` says so.

        Collective: all ranks, with as many numbers, followed by :meth:`finish`.
        Blocks: never.
        """
        assert self._pending is None, "start() again before finish()"
        self._pending = list(values)
        self._ordinal = (self._ordinal + 1) & 0xFFFFFFFF
        self._first_error = None
        if self._to:
            try:
                self._tell(0)
            except OSError as error:
                self._first_error = error

    def finish(self) -> list[int]:
        """Return the largest of all ranks' numbers, one by one.

        Raises:
            PeerLost: A peer is gone, or did not come in time.
            OutlastError: The ranks were asked different things.

        Collective: all ranks, after :meth:`start`.
        Blocks: until all ranks have started; up to the timeout.
        """
        assert self._pending is not None, "finish() without start()"
        try:
            self._go_round()
        except OSError as error:
            late = isinstance(error, BlockingIOError | TimeoutError)
            why = "it did not come in time" if late else str(error)
            raise PeerLost(
                f"a peer left or did not reach this step within {self._timeout_s:g} s ({why}); "
                "its own log or the launcher's report says why"
            ) from error
        finally:
            values, self._pending = self._pending, None
        return values

    @property
    def pending(self) -> bool:
        """Whether :meth:`start` was called and :meth:`finish` was not."""
        return self._pending is not None

    def cut(self) -> None:
        """Shut down the connections: whatever waits on them, here or at a peer, fails at once. Idempotent."""
        for connection in (*self._to, *self._of):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # its other end was faster

    def close(self) -> None:
        """Let go of the connections. Idempotent. Blocks: never; peers that wait for this rank fail."""
        for connection in (*self._to, *self._of):
            connection.close()

    def _go_round(self) -> None:
        if self._first_error is not None:
            raise self._first_error
        for number, connection in enumerate(self._of):
            if number:
                self._tell(number)
            self._hear(connection)

    def _tell(self, number: int) -> None:
        assert self._pending is not None
        count = len(self._pending)
        self._to[number].sendall(_HEAD.pack(self._ordinal, count) + struct.pack(f"<{count}q", *self._pending))

    def _hear(self, connection: socket.socket) -> None:
        assert self._pending is not None
        count = len(self._pending)
        data = _receive(connection, _HEAD.size, _HEAD.size + 8 * count)
        ordinal, told = _HEAD.unpack_from(data)
        if (ordinal, told) != (self._ordinal, count):
            raise OutlastError(
                f"the ranks do different things: this one agrees on {count} numbers, another one on {told}; "
                "do all of them run the same code?"
            )
        data += _receive(connection, _HEAD.size + 8 * count - len(data))
        self._pending = list(map(max, self._pending, struct.unpack_from(f"<{count}q", data, _HEAD.size)))


def _listen(host: str) -> socket.socket:
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, 0), family=family)


def _greet(connection: socket.socket, token: bytes, *, timeout_s: float) -> int | None:
    """Return who connected; ``None``: somebody who does not know the secret."""
    connection.settimeout(timeout_s)
    try:
        secret, rank = _HELLO.unpack(_receive(connection, _HELLO.size))
    except (OSError, struct.error):
        return None
    return int(rank) if hmac.compare_digest(secret, token) else None


def _receive(connection: socket.socket, least: int, most: int | None = None) -> bytes:
    """Return at least so many bytes, and of what follows what is there, up to ``most``; ``None`` = nothing."""
    most, data = most or least, b""
    while len(data) < least:
        more = connection.recv(most - len(data))
        if not more:
            raise ConnectionResetError("the connection ended")
        data += more
    return data


def _left_s(end_ns: int) -> float:
    return max(0.001, (end_ns - clock.now_ns()) / 1e9)
