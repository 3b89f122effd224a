"""Probing endpoints: is the host known, and who answers at the port, before anything is started.

Who connects to a wrong host or port would otherwise wait in silence until ``join_timeout``.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from enum import Enum

from outlast import clock
from outlast.errors import ConfigError
from outlast.runtime.addresses import Endpoint

__all__ = ["Answer", "check_endpoints", "probe"]

_RESOLVE_S = 3.0
_CONNECT_S = 1.0
_ANSWER_S = 2.0
"""A store that hundreds of agents connect to at once may take its time."""
_AGAIN_S = 0.3
# What a client of torch's TCPStore sends first: it validates itself, and asks for a number back.
_VALIDATE, _PING, _MAGIC = 0, 13, 0x3C85F7CE
_QUESTION = struct.Struct("=BIBI")


class Answer(Enum):
    """What is at an endpoint."""

    STORE = "a store answers"
    NOBODY = "nobody listens there yet"
    UNREACHABLE = "it cannot be reached"
    FOREIGN = "another program answers there"
    SILENT = "a program listens there and does not answer"


def check_endpoints(endpoints: Sequence[Endpoint]) -> None:
    """Refuse endpoints that lead nowhere.

    Raises:
        ConfigError: No host of theirs is known, or what answers at one is no store.

    Blocks: about 0.01 s where all is well or nobody listens yet; some seconds where names or hosts do not answer.
    """
    unknown = []
    for endpoint in endpoints:
        if endpoint.port == 0:  # a free one will be taken
            continue
        if (why := _why_unknown(endpoint.host)) is not None:
            unknown.append(f"{endpoint.host!r} ({why})")
            continue
        if (answer := probe(endpoint)) in (Answer.FOREIGN, Answer.SILENT):
            raise ConfigError(
                f"--rdzv-endpoint={endpoint}: {answer.value}, no agent of a run; name a free port, or end that program"
            )
    if unknown and len(unknown) == len(endpoints):
        raise ConfigError(f"--rdzv-endpoint: no such host: {', '.join(unknown)}; check the name")


def probe(endpoint: Endpoint) -> Answer:
    """Return what is at an endpoint. Blocks: up to 3 s, where something listens and does not answer."""
    try:
        connection = socket.create_connection((endpoint.host, endpoint.port), timeout=_CONNECT_S)
    except OSError as error:
        return Answer.NOBODY if error.errno == errno.ECONNREFUSED else Answer.UNREACHABLE
    number = secrets.randbits(32)
    with connection:
        connection.settimeout(_ANSWER_S)
        data = b""
        try:
            connection.sendall(_QUESTION.pack(_VALIDATE, _MAGIC, _PING, number))
            while len(data) < 4 and (more := connection.recv(4 - len(data))):
                data += more
        except TimeoutError:
            return Answer.SILENT
        except OSError:
            return Answer.FOREIGN
    return Answer.STORE if data == struct.pack("=I", number) else Answer.FOREIGN


def _why_unknown(host: str) -> str | None:
    """Return why a host's name cannot be resolved; ``None`` = it can, or nobody has said within some seconds."""
    outcome: list[str | None] = []

    def resolve() -> None:
        until_s = clock.now_s() + 3 * _AGAIN_S
        while True:
            try:
                socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
                outcome.append(None)
                return
            except (OSError, UnicodeError) as error:
                passes = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
                if not passes or clock.now_s() > until_s:
                    outcome.append(getattr(error, "strerror", None) or str(error))
                    return
            threading.Event().wait(_AGAIN_S)

    thread = threading.Thread(target=resolve, name="outlast-resolve", daemon=True)
    thread.start()
    thread.join(_RESOLVE_S)
    with contextlib.suppress(IndexError):
        return outcome[0]
    return None
