"""TCP stores: hosting one, connecting to one, and asking in bounded time what listens at an endpoint.

A call on a store whose server died or stopped can block past the store's own timeout. Whoever must not block makes
its calls in a thread that it can give up on; nothing here hides that.

:func:`probe` and :func:`read_key` need no torch. Its own client waits without a limit for a foreign program that
accepts its connection and sends nothing, and takes seconds to import. What is needed of its protocol is little: each
request is a byte that names the operation; lengths are 64 bits in the order of the machine.

Rejected: asking in a thread and leaving it behind (the interpreter's end aborts a thread that is inside the client).
"""

from __future__ import annotations

import datetime
import errno
import queue
import secrets
import socket
import struct
import threading
from enum import Enum
from typing import Any

from outlast import clock, env
from outlast.errors import RendezvousError
from outlast.runtime.addresses import Endpoint, listen_at, listening_addresses

TCPStore = Any
"""torch's ``TCPStore``, whose type stubs lack half of its methods."""


def host(endpoint: Endpoint, *, timeout_s: float) -> TCPStore | None:
    """Host a store; return ``None`` when somebody else already listens there.

    Args:
        endpoint: Where; port 0 takes a free one.
        timeout_s: Timeout of the calls made through the returned store.
    """
    found = listening_addresses(endpoint.host, interface=env.interface())
    if not found:
        return None
    family, address = found[0]
    if len(found) > 1:  # torch's store has one socket: peers and local ranks are led to different addresses
        families = {one for one, _ in found}
        family, address = (socket.AF_INET6, "::") if socket.AF_INET6 in families else (socket.AF_INET, "0.0.0.0")
    try:
        # Bound by us, so that losing the race for a port is an answer, not an exception's text.
        listener = socket.create_server(
            (address, endpoint.port), family=family, backlog=2048, dualstack_ipv6=address == "::"
        )
    except OSError:
        return None
    return _serve(endpoint.host, listener, timeout_s)


def _serve(name: str, listener: socket.socket, timeout_s: float) -> TCPStore:
    endpoint = Endpoint(name, listener.getsockname()[1])
    return _torch_store(endpoint, timeout_s, is_master=True, master_listen_fd=listener.detach())


def connect(endpoint: Endpoint, *, timeout_s: float, call_timeout_s: float) -> TCPStore:
    """Connect to a store.

    Args:
        endpoint: Where it is hosted.
        timeout_s: How long to try.
        call_timeout_s: Timeout of the calls made through it.

    Raises:
        RendezvousError: Nobody answers there in time.

    Blocks: up to ``timeout_s``.
    """
    from torch.distributed import DistError

    try:
        # A plain connection first: it fails at once where nobody listens, and without lines of C++ log.
        socket.create_connection((endpoint.host, endpoint.port), timeout=timeout_s).close()
        store = _torch_store(endpoint, timeout_s, is_master=False)
    except (OSError, DistError, RuntimeError) as error:
        raise RendezvousError(
            f"no control store answers at {endpoint} ({error}); is the first agent running?"
        ) from error
    store.set_timeout(datetime.timedelta(seconds=call_timeout_s))
    return store


def _torch_store(endpoint: Endpoint, timeout_s: float, **options: Any) -> TCPStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = datetime.timedelta(seconds=timeout_s)
    return TCPStore(endpoint.host, endpoint.port, timeout=timeout, wait_for_workers=False, **options)


def open_cycle_store(addr: str, *, timeout_s: float = 600.0) -> TCPStore:
    """Host a cycle's own store on a fresh port of this machine; it dies with the last reference.

    Args:
        addr: This node's address, by which its own ranks reach the store as well.
        timeout_s: Timeout of the calls made through the returned store.

    Raises:
        RendezvousError: It is no address of this machine, or no port is free.
    """
    here = [address for _, address in listening_addresses(addr)]
    if not here:
        raise RendezvousError(
            f"{addr} is no address of this machine; name one that is with --local-addr or --interface"
        )
    try:
        listener = listen_at(here[-1], backlog=2048)  # the last one is what peers reach
    except OSError as error:
        raise RendezvousError(f"the ranks' store cannot listen at {addr} ({error.strerror or error})") from error
    return _serve(here[-1], listener, timeout_s)


_VALIDATE, _GET, _CHECK, _PING = 0, 3, 5, 13
_MAGIC = 0x3C85F7CE
_PREFIX = b"/"
"""What torch's client puts before each key."""
_MAX_BYTES = 64 * 2**20
_RESOLVE_S, _CONNECT_S = 3.0, 1.0
_ANSWER_S = 2.0
"""A store that hundreds of agents connect to at once may take its time."""
_AGAIN_S = 0.3
"""Between two questions to a name server that asks to be asked again; there are four."""

_Addresses = list[tuple[int, tuple[str, int]]]


class StoreAnswer(Enum):
    """What is at an endpoint."""

    STORE = "a store answers"
    NOBODY = "nobody listens there yet"
    UNREACHABLE = "it cannot be reached"
    UNKNOWN = "there is no such host"
    FOREIGN = "another program answers there"
    SILENT = "a program listens there and does not answer"


def probe(endpoint: Endpoint) -> tuple[StoreAnswer, str]:
    """Return what is at an endpoint, and why an unknown host is unknown.

    Blocks: about 0.01 s where a store answers or nobody listens; some seconds where names or hosts do not answer.
    """
    addresses = _look_up(endpoint, _RESOLVE_S)
    if isinstance(addresses, str):
        return StoreAnswer.UNKNOWN, addresses
    connection = _connect(addresses or [], clock.now_s() + _CONNECT_S)
    if isinstance(connection, OSError):
        refused = connection.errno == errno.ECONNREFUSED
        return (StoreAnswer.NOBODY if refused else StoreAnswer.UNREACHABLE), ""
    number = secrets.randbits(32)
    with connection:
        try:
            connection.settimeout(_ANSWER_S)
            connection.sendall(struct.pack("=BIBI", _VALIDATE, _MAGIC, _PING, number))
            data = _receive(connection, 4, clock.now_s() + _ANSWER_S)
        except TimeoutError:
            return StoreAnswer.SILENT, ""
        except (_Foreign, OSError):
            return StoreAnswer.FOREIGN, ""
    return (StoreAnswer.STORE if data == struct.pack("=I", number) else StoreAnswer.FOREIGN), ""


def read_key(endpoint: Endpoint, key: str, *, timeout_s: float) -> bytes | None:
    """Return what a control store holds under a key; ``None``: a store answers, and has no such key.

    Args:
        endpoint: Where the store is hosted.
        key: As given to the store's ``set``.
        timeout_s: For looking up the host's name, and again for all that follows.

    Raises:
        RendezvousError: The host's name is not known, nobody listens there, or what listens is not a control store.

    Blocks: up to twice ``timeout_s``.
    """
    addresses = _look_up(endpoint, timeout_s)
    if addresses is None:
        raise RendezvousError(
            f"no name server gave the address of {endpoint.host} within {timeout_s:g} s; give its IP address"
        )
    if isinstance(addresses, str):
        raise RendezvousError(
            f"the host {endpoint.host} is not known here ({addresses}); check its spelling, or give its IP address"
        )
    deadline_s = clock.now_s() + timeout_s
    connection = _connect(addresses, deadline_s)
    if isinstance(connection, OSError):
        why = "no answer" if isinstance(connection, TimeoutError) else connection.strerror or str(connection)
        raise RendezvousError(
            f"nobody answers at {endpoint} ({why[:1].lower()}{why[1:]}); the job is over, its first agent is gone, or "
            "the address is another one"
        )
    try:
        with connection:
            asked = _PREFIX + key.encode()
            name = struct.pack("=Q", len(asked)) + asked
            connection.sendall(struct.pack("=BIBQ", _VALIDATE, _MAGIC, _CHECK, 1) + name)
            there = _receive(connection, 1, deadline_s)[0]
            if there > 1:
                raise _Foreign
            if there == 1:
                return None
            connection.sendall(struct.pack("=B", _GET) + name)
            (length,) = struct.unpack("=Q", _receive(connection, 8, deadline_s))
            if length > _MAX_BYTES:
                raise _Foreign
            return _receive(connection, length, deadline_s)
    except _Foreign:
        raise RendezvousError(
            f"what listens at {endpoint} is not a control store of outlast; give the --rdzv-endpoint of the run"
        ) from None
    except TimeoutError:
        raise RendezvousError(
            f"{endpoint} accepts connections and did not answer within {timeout_s:g} s; it is another program, or the "
            "first agent hangs"
        ) from None
    except OSError as error:
        raise RendezvousError(f"the connection to {endpoint} broke ({error.strerror or error}); try again") from None


class _Foreign(Exception):
    """The answer is none that a store gives."""


def _look_up(endpoint: Endpoint, timeout_s: float) -> _Addresses | str | None:
    """Return the addresses of an endpoint, or why there are none; ``None``: no name server answered in time."""
    answers: queue.SimpleQueue[_Addresses | str] = queue.SimpleQueue()

    def ask() -> None:
        until_s = clock.now_s() + 3 * _AGAIN_S
        while True:
            try:
                found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
                answers.put([(one[0], one[4]) for one in found])  # type: ignore[misc]
                return
            except (OSError, UnicodeError) as error:
                passes = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
                if not passes or clock.now_s() > until_s:
                    answers.put(getattr(error, "strerror", None) or str(error))
                    return
            threading.Event().wait(_AGAIN_S)

    threading.Thread(target=ask, name="outlast-look-up", daemon=True).start()
    try:
        return answers.get(timeout=timeout_s)
    except queue.Empty:
        return None


def _connect(addresses: _Addresses, deadline_s: float) -> socket.socket | OSError:
    """Return a connection to the first address that accepts one, or what the last one answered."""
    problem = OSError("it has no address")
    for family, address in addresses:
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(max(0.01, deadline_s - clock.now_s()))
            connection.connect(address)
            return connection
        except OSError as error:
            connection.close()
            problem = error
    return problem


def _receive(connection: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        left_s = deadline_s - clock.now_s()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        try:
            piece = connection.recv(min(num_bytes - len(data), 2**20))
        except ConnectionResetError:
            raise _Foreign from None
        if not piece:
            raise _Foreign
        data += piece
    return bytes(data)
