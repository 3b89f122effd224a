"""Consensus: decisions that all ranks make together, for one small reduction a step.

A rank that must exit must not exit alone: its peers would wait for it in the next collective. So each rank passes its
requests (a few integers) at the begin of a step, and every rank reads their maximum at its end, when the step's own
collectives have synchronised the ranks anyway.

The reduction has connections of its own: it must not be ordered behind gradients, and can be abandoned at any moment. A
gloo all-reduce of eight bytes takes 0.1 ms, and 0.3 ms after a real step, since its threads must be woken (torch 2.13,
two ranks on one machine); a message over a connection takes 0.03 ms. Gloo can also miss that its connections were cut
and then waits for its timeout.

The algorithm is the dissemination barrier of Hensgen, Finkel and Manber (1988), with numbers: in round k each rank
sends its values to the rank 2^k after it and receives those of the rank 2^k before it; after ceil(log2 n) rounds every
rank has all values. Duplicates do not change a maximum, so any world size works.

Rejected: a star (its centre sends to all), recursive doubling (only worlds that are a power of two), a tree (twice the
rounds).
"""

from __future__ import annotations

import math
import selectors
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec

from outlast import clock, env
from outlast.errors import ConfigError, OutlastError, PeerLost, RendezvousError
from outlast.runtime import connections
from outlast.runtime.addresses import Endpoint, listen_at, own_address, parse_endpoint
from outlast.runtime.listener import Acceptor
from outlast.runtime.run_key import accept_offer, make_offer
from outlast.runtime.wire import BufferedChannel, Handshake, MessageChannel

_PROTOCOL = "consensus"
_MAX_BYTES = 1 << 16
_FIRST_LOOK_S, _LAST_LOOK_S = 1.0, 30.0
"""Seconds until a waiting rank checks whether another one has failed; each wait is twice as long as the last."""


class _RoundNumbers(msgspec.Struct, frozen=True, array_like=True):
    """The values of a rank in one round."""

    ordinal: int
    values: list[int]


class Dissemination:
    """Find the maximum of each of all ranks' numbers.

    Args:
        to: For each round, the connection to the rank that receives from this one.
        of: For each round, the connection to the rank that sends to this one.
        timeout_s: Seconds that a peer may be late.

    Thread: one at a time; :meth:`cut` any.
    """

    def __init__(self, to: Sequence[socket.socket], of: Sequence[socket.socket], *, timeout_s: float) -> None:
        self._to, self._of = (
            [
                MessageChannel[_RoundNumbers](one, _RoundNumbers, timeout_s=timeout_s, max_bytes=_MAX_BYTES)
                for one in side
            ]
            for side in (to, of)
        )
        self._timeout_s = timeout_s
        self.waited_s = 0.0
        """Total seconds for which this rank has waited for others."""
        self._ordinal = 0
        self._pending: list[int] | None = None
        self._first_error: OSError | None = None
        connections.register(self)

    def start(self, values: Sequence[int]) -> None:
        """Send this rank's numbers, each within 64 bits, to the first peer; if it is gone, :meth:`result` raises.

        Collective: all ranks, with equally many numbers, followed by :meth:`result`. Blocks: never.
        """
        assert self._pending is None, "start() again before result()"
        self._pending = list(values)
        self._ordinal = (self._ordinal + 1) & 0xFFFFFFFF
        self._first_error = None
        if self._to:
            try:
                self._to[0].send(_RoundNumbers(self._ordinal, self._pending))
            except OSError as error:
                self._first_error = error

    def result(self) -> list[int]:
        """Return the maximum of all ranks' numbers, one by one.

        Raises:
            PeerLost: A peer is gone, or was not in time.
            OutlastError: The ranks agree on different things.

        Collective: all ranks, after :meth:`start`. Blocks: until all ranks have started; up to the timeout.
        """
        assert self._pending is not None, "result() without start()"
        values, self._pending = self._pending, None
        if not self._of:  # this rank is alone
            return values
        begin_ns = clock.now_ns()
        try:
            if self._first_error is not None:
                raise self._first_error
            for number, connection in enumerate(self._of):
                if number:
                    self._to[number].send(_RoundNumbers(self._ordinal, values))
                received = connection.receive()
                if received is None:
                    raise ConnectionResetError("the connection ended")
                if (received.ordinal, len(received.values)) != (self._ordinal, len(values)):
                    raise OutlastError(
                        f"the ranks do different things: this one agrees on {len(values)} numbers, another one on "
                        f"{len(received.values)}; do all of them run the same code?"
                    )
                values = list(map(max, values, received.values))
        except OSError as error:
            why = "timed out" if isinstance(error, TimeoutError) else str(error)
            raise PeerLost(
                f"a peer exited or did not reach this step within {self._timeout_s:g} s ({why}); "
                "see the peer's log or the launcher's report"
            ) from error
        finally:
            self.waited_s += (clock.now_ns() - begin_ns) / 1e9
        return values

    @property
    def pending(self) -> bool:
        """Whether a reduction was started and its result not read."""
        return self._pending is not None

    def cut(self) -> None:
        """Shut down the connections, so that every wait on them, here or at a peer, fails at once. Idempotent."""
        for connection in (*self._to, *self._of):
            connection.abort()

    def close(self) -> None:
        """Close the connections; peers that wait for this rank fail. Idempotent. Blocks: never."""
        self.cut()
        for connection in (*self._to, *self._of):
            connection.close()


def connect_peers(timeout_s: float) -> tuple[list[socket.socket], list[socket.socket]]:
    """Connect all ranks of the default group; return the arguments of :class:`Dissemination`.

    The ranks find each other through the group's store and authenticate with a key that is derived from the run key or,
    without one, from an offer in the store.

    Raises:
        ConfigError: This rank has another run key than rank 0.
        RendezvousError: The ranks did not find each other.

    Collective: all ranks of the default group, in the same order. Blocks: up to ``timeout_s``.
    """
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    end_s = clock.now_s() + timeout_s
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rounds = [1 << number for number in range(math.ceil(math.log2(world_size)))]
    after = [(rank + distance) % world_size for distance in rounds]
    before = [(rank - distance) % world_size for distance in rounds]
    store: Any = _get_default_store()
    # Counted in the store, as a process that joins a restart has made fewer than its peers.
    try:
        name = f"outlast/dissemination/{store.add(f'outlast/dissemination/made-by/{rank}', 1)}"
    except (RuntimeError, OSError) as error:
        raise RendezvousError(f"the ranks' TCPStore does not respond ({error}); see the log of rank 0") from error

    def look() -> None:
        if store.check([f"{name}/failed"]):
            raise ConnectionError(store.get(f"{name}/failed").decode())

    try:
        if rank == 0:
            store.set(f"{name}/key", make_offer())
        host = own_address(env.read_worker().master_addr)
        with ExitStack() as opened, listen_at(host, backlog=128) as listener:
            store.set(f"{name}/{rank}", str(Endpoint(host, listener.getsockname()[1])))
            store.wait([f"{name}/key", *(f"{name}/{peer}" for peer in after)], timedelta(seconds=timeout_s))
            key = accept_offer(store.get(f"{name}/key").decode(), "step rounds")
            to = []
            for peer in after:
                endpoint = parse_endpoint(store.get(f"{name}/{peer}").decode())
                connection = socket.create_connection((endpoint.host, endpoint.port), timeout=_left_s(end_s))
                to.append(opened.enter_context(connection))
            came = authenticate_peers(listener, to, set(before), rank=rank, key=key, end_s=end_s, look=look)
            opened.pop_all()
        return to, [came[peer] for peer in before]
    except (RuntimeError, OSError, ValueError) as error:
        with suppress(RuntimeError, OSError):  # for ranks that wait for this one
            store.compare_set(f"{name}/failed", "", f"rank {rank}: {error}")
        if isinstance(error, ConfigError):
            raise
        raise RendezvousError(f"the ranks could not connect ({error}); see the log of the rank that left") from error


def authenticate_peers(
    listener: socket.socket,
    to: Sequence[socket.socket],
    expected: set[int],
    *,
    rank: int,
    key: bytes,
    end_s: float,
    look: Callable[[], None] = lambda: None,
) -> dict[int, socket.socket]:
    """Prove the key on connections that this rank opened, and accept those of expected ranks that prove it.

    Connections that do not prove the key, or come from another rank, do not delay the others.

    Args:
        look: Called now and then during the wait; raises ``OSError`` if waiting is pointless.

    Returns:
        The connection of each expected rank.

    Raises: OSError: A peer that this rank connected to does not prove the key, or not all ranks were in time.
    """
    opened = [BufferedChannel[_RoundNumbers](one, _RoundNumbers, handshake=_handshake(key, rank)) for one in to]
    came: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector, ExitStack() as strangers:

        def take(connection: socket.socket) -> None:
            channel = BufferedChannel[_RoundNumbers](connection, _RoundNumbers, handshake=_handshake(key, None))
            selector.register(channel, selectors.EVENT_READ, partial(receive, channel))
            strangers.callback(channel.close)

        def receive(channel: BufferedChannel[_RoundNumbers], _: int) -> None:
            try:
                channel.receive()
            except OSError:
                if channel in opened:
                    raise
                selector.unregister(channel)
                channel.close()
                return
            if channel.is_authenticated:
                selector.unregister(channel)
                if channel not in opened and channel.client_id in expected - came.keys():
                    came[channel.client_id] = channel.detach()

        acceptor = Acceptor(selector, [listener], take, name=f"rank {rank}")
        for channel in opened:
            selector.register(channel, selectors.EVENT_READ, partial(receive, channel))
        pause_s, look_s = _FIRST_LOOK_S, clock.now_s() + _FIRST_LOOK_S
        while expected - came.keys() or not all(channel.is_authenticated for channel in opened):
            if clock.now_s() >= look_s:
                look()
                pause_s = min(2 * pause_s, _LAST_LOOK_S)
                look_s = clock.now_s() + pause_s
            due_s = min(look_s, acceptor.deadline_s or look_s)
            for selected, events in selector.select(min(_left_s(end_s), max(0.0, due_s - clock.now_s()))):
                selected.data(events)
            acceptor.serve(clock.now_s())
    return came


def _handshake(key: bytes, rank: int | None) -> Handshake:
    return Handshake(key, _PROTOCOL, is_server=rank is None, client_id=rank or 0)


def _left_s(end_s: float) -> float:
    left_s = end_s - clock.now_s()
    if left_s <= 0:
        raise TimeoutError("not all ranks have come in time")
    return left_s


class Consensus(Dissemination):
    """Agree on the maximum of each rank's requests, once a step.

    Args:
        questions: Names of the requests, the same in the same order on all ranks.
        world_size: Number of ranks; 1 needs no ``torch.distributed``.

    Raises: RendezvousError: The ranks did not find each other.

    Collective: with more than one rank, all ranks of the default group must make it (they connect).
    Blocks: up to ``timeout_s``, until all ranks have connected. Thread: one at a time.
    """

    def __init__(self, questions: Sequence[str], *, world_size: int = 1, timeout_s: float = 1800.0) -> None:
        assert questions, "give at least one question"
        assert len(set(questions)) == len(questions), "a question is given twice"
        self.questions = tuple(questions)
        to, of = connect_peers(timeout_s) if world_size > 1 else ([], [])
        super().__init__(to, of, timeout_s=timeout_s)

    def begin(self, asked: Mapping[str, int]) -> None:
        """Start the step's reduction.

        Args:
            asked: Request to a number, 0 or absent for "no"; the maximum of all ranks is agreed on.

        Collective: once a step on every rank, followed by :meth:`finish`. Blocks: never.
        """
        self.start([int(asked.get(question, 0)) for question in self.questions])

    def finish(self) -> dict[str, int]:
        """Return each request's maximum over all ranks. Raises and blocks as :meth:`result`.

        Collective: once a step on every rank, after :meth:`begin`.
        """
        return dict(zip(self.questions, self.result(), strict=True))

    def agree(self, values: Sequence[int]) -> list[int]:
        """Return the maximum of all ranks' numbers, one by one, at once. Raises and blocks as :meth:`result`.

        Collective: all ranks, with equally many numbers; not between :meth:`begin` and :meth:`finish`.
        """
        self.start(values)
        return self.result()
