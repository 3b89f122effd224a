"""Reading one key of a control store, in bounded time and without torch.

torch's own client waits without a limit for a foreign program that accepts its connection and says nothing, and takes
seconds to import. What it takes to read one key is little: each request is a byte that says what is asked, and lengths
are 64 bits in the order of the machine.

Rejected: asking in a thread and leaving it behind (the interpreter's end aborts a thread that is inside the client).
"""

from __future__ import annotations

import queue
import socket
import struct
import threading

from outlast import clock
from outlast.errors import RendezvousError
from outlast.runtime.addresses import Endpoint

__all__ = ["read_key"]

_VALIDATE, _GET, _CHECK = 0, 3, 5
_MAGIC = 0x3C85F7CE
_PREFIX = b"/"
"""What torch's client puts before each key."""
_MAX_BYTES = 64 * 2**20


def read_key(endpoint: Endpoint, key: str, *, timeout_s: float) -> bytes | None:
    """Return what a control store holds under a key; ``None``: a store answers, and has no such key.

    Args:
        endpoint: Where the store is hosted.
        key: As given to the store's ``set``.
        timeout_s: For looking up the host's name, and again for all that follows.

    Raises:
        RendezvousError: The host's name is not known, nobody listens there, or who does is no control store.

    Blocks: up to twice ``timeout_s``.
    """
    addresses = _look_up(endpoint, timeout_s)
    deadline_s = clock.now_s() + timeout_s
    try:
        with _connect(endpoint, addresses, deadline_s) as connection:
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
            f"what listens at {endpoint} is no control store of outlast; give the --rdzv-endpoint of the run"
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


def _look_up(endpoint: Endpoint, timeout_s: float) -> list[tuple[int, tuple[str, int]]]:
    """Return the addresses of an endpoint; a name server that does not answer is given up."""
    answers: queue.SimpleQueue[list[tuple[int, tuple[str, int]]] | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
            answers.put([(one[0], one[4]) for one in found])  # type: ignore[misc]
        except (OSError, UnicodeError) as error:
            answers.put(OSError(str(error)) if isinstance(error, UnicodeError) else error)

    threading.Thread(target=ask, name="outlast-look-up", daemon=True).start()
    try:
        answer = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise RendezvousError(
            f"no name server told the address of {endpoint.host} within {timeout_s:g} s; give its IP address"
        ) from None
    if isinstance(answer, OSError):
        raise RendezvousError(
            f"the host {endpoint.host} is not known here ({answer.strerror or answer}); check its spelling, or give "
            "its IP address"
        )
    return answer


def _connect(endpoint: Endpoint, addresses: list[tuple[int, tuple[str, int]]], deadline_s: float) -> socket.socket:
    problem: OSError = OSError("it has no address")
    for family, address in addresses:
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(max(0.01, deadline_s - clock.now_s()))
            connection.connect(address)
            return connection
        except OSError as error:
            connection.close()
            problem = error
    why = "no answer" if isinstance(problem, TimeoutError) else problem.strerror or str(problem)
    raise RendezvousError(
        f"nobody answers at {endpoint} ({why[:1].lower()}{why[1:]}); the job is over, its first agent is gone, or the "
        "address is another one"
    )


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
