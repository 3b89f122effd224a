"""The connection between an agent and the coordinator: handshake, introduction and one-shot queries.

Each agent has one TCP connection over :mod:`outlast.runtime.wire`. The coordinator sends an :class:`Introduction` (run
id and key fingerprint, readable by everyone); then both sides prove that they know the run key. The agent's first
message is a :class:`~outlast.launch.protocol.Hello`, which is refused with a reason if it does not match the job.
Afterwards both sides send messages and heartbeats.

:func:`ask` sends one query over a separate connection: for ``outlast status``, and between coordinators.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from outlast import clock
from outlast.errors import ConfigError, RendezvousError
from outlast.launch import protocol as m
from outlast.runtime.addresses import Endpoint, look_up
from outlast.runtime.run_key import KeySource, RunKey, key_of_directory
from outlast.runtime.wire import AuthenticationFailed, Handshake, MessageChannel, ProtocolError

PROTOCOL = "outlast control"
VERSION = 1
"""Raised whenever a message changes: agents of different versions refuse each other."""
_INTRODUCTION = struct.Struct("!8sB63s200s")
_SOURCES = tuple(KeySource)
_MAX_ANSWER_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdentity:
    """What all agents of a job must have in common."""

    run_id: str
    key: RunKey
    command: str = ""
    """Digest of the workers' command; empty: any command."""
    command_text: str = ""
    """The command for people, shortened."""
    run_dir: Path | None = None


@dataclass(frozen=True, slots=True)
class Introduction:
    """The unencrypted first message of a coordinator."""

    fingerprint: bytes
    """Fingerprint of the run key."""
    source: KeySource
    run_id: bytes
    """The first 63 bytes of the run's id."""
    run_dir: bytes = b""
    """The run directory, if the run key is stored there: a process that may read the directory may send queries."""

    @classmethod
    def of(cls, identity: JobIdentity) -> Introduction:
        key, run_dir = identity.key, b""
        if key.source is KeySource.RUN_DIRECTORY:
            run_dir = os.fsencode(identity.run_dir or "")
        return cls(key.fingerprint, key.source, _shorten(identity.run_id), run_dir if len(run_dir) <= 200 else b"")

    @classmethod
    def decode(cls, data: bytes) -> Introduction:
        """Decode an introduction.

        Raises:
            ProtocolError: The bytes are not an introduction.
        """
        fingerprint, source, run_id, run_dir = _INTRODUCTION.unpack(data)
        if source >= len(_SOURCES):
            raise ProtocolError("the program at this address is not a coordinator of this version of outlast")
        return cls(fingerprint, _SOURCES[source], run_id.rstrip(b"\0"), run_dir.rstrip(b"\0"))

    def encode(self) -> bytes:
        """Encode the introduction; the length is constant."""
        return _INTRODUCTION.pack(self.fingerprint, _SOURCES.index(self.source), self.run_id, self.run_dir)


def _shorten(run_id: str) -> bytes:
    return run_id.encode()[:63]


class WrongRun(AuthenticationFailed):
    """The coordinator serves another run, or has another run key; a retry does not help."""


def serve_handshake(identity: JobIdentity) -> Handshake:
    """Return the coordinator's side of the handshake."""
    return Handshake(
        identity.key.derive(PROTOCOL),
        PROTOCOL,
        is_server=True,
        version=VERSION,
        introduction=Introduction.of(identity).encode(),
    )


def join_handshake(run_id: str | None, key: RunKey | None) -> Handshake:
    """Return the agent's side of the handshake.

    Args:
        run_id: The expected run; ``None``: any run.
        key: The run key; ``None``: read from the place that the introduction names, if this process may read it.
    """

    def judge(data: bytes) -> bytes:
        theirs = Introduction.decode(data)
        their_id = theirs.run_id.decode(errors="replace")
        if run_id is not None and theirs.run_id != _shorten(run_id):
            raise WrongRun(
                f"it belongs to run {their_id!r}, and this is run {run_id!r}; give each run a separate endpoint, or "
                "all agents of one run the same --rdzv-id"
            )
        own = key
        if own is None:
            own = _find_key(theirs)
        if own is None:
            raise WrongRun(
                f"its run has a key, from {theirs.source}; name the run directory, or give --run-key-file or "
                "OUTLAST_RUN_KEY"
            )
        if own.fingerprint != theirs.fingerprint:
            raise WrongRun(
                f"its run key is another one (its own comes from {theirs.source}, this one's from {own.source}); give "
                "all agents the same --run-key-file or OUTLAST_RUN_KEY, or a run directory that they share"
            )
        return own.derive(PROTOCOL)

    return Handshake(
        None, PROTOCOL, is_server=False, version=VERSION, introduction=bytes(_INTRODUCTION.size), on_introduction=judge
    )


def _find_key(theirs: Introduction) -> RunKey | None:
    """Return a run's key if the introduction names its place and this process may read it."""
    if theirs.source is KeySource.RUN_ID:
        return RunKey.of_run_id(theirs.run_id.decode(errors="replace"))
    if theirs.source is KeySource.RUN_DIRECTORY and theirs.run_dir:
        with contextlib.suppress(ConfigError):
            return key_of_directory(Path(os.fsdecode(theirs.run_dir)), make=False)
    return None


def ask(
    endpoint: Endpoint, question: m.Question, *, run_id: str | None, key: RunKey | None, timeout_s: float
) -> m.Answer:
    """Send a query to the coordinator at an endpoint and return the answer.

    Args:
        run_id: The expected run; ``None``: any run.
        key: The run key; ``None``: as for :func:`join_handshake`.
        timeout_s: Limit for the name lookup, and again for everything after it.

    Raises:
        RendezvousError: The host is unknown, nothing listens, or the listener is not a coordinator of the run.

    Blocks: up to twice ``timeout_s``.
    """
    connection = connect(endpoint, timeout_s=timeout_s)
    end_s = clock.now_s() + timeout_s
    with MessageChannel[m.Answer](connection, m.Answer, max_bytes=_MAX_ANSWER_BYTES) as channel:
        try:
            if not channel.authenticate(join_handshake(run_id, key), within_s=timeout_s):
                raise ConnectionResetError("it ended the connection")
            left_s = max(0.01, end_s - clock.now_s())
            channel.send(question, within_s=left_s)
            answer = channel.receive(within_s=left_s)
            if answer is None:
                raise ConnectionResetError("it ended the connection")
            if isinstance(answer, m.Refused):
                raise AuthenticationFailed(answer.reason)
            return answer
        except TimeoutError:
            raise RendezvousError(
                f"{endpoint} accepts connections, but did not respond within {timeout_s:g} s; it is another program, "
                "or the first agent hangs"
            ) from None
        except AuthenticationFailed as error:
            raise RendezvousError(f"the coordinator at {endpoint} cannot be used: {error}") from None
        except OSError:
            raise RendezvousError(
                f"what listens at {endpoint} is not a coordinator of outlast; give the --rdzv-endpoint of the run"
            ) from None


def connect(endpoint: Endpoint, *, timeout_s: float) -> socket.socket:
    """Connect to an endpoint.

    Raises:
        RendezvousError: The host is unknown, or nothing listens there.

    Blocks: up to twice ``timeout_s``: for the name lookup and for the connection.
    """
    addresses = look_up(endpoint, timeout_s)
    if addresses is None:
        raise RendezvousError(
            f"no name server gave the address of {endpoint.host} within {timeout_s:g} s; give its IP address"
        )
    if isinstance(addresses, str):
        raise RendezvousError(
            f"the host {endpoint.host} is not known here ({addresses}); check its spelling, or give its IP address"
        )
    found = connect_to(addresses, timeout_s)
    if isinstance(found, OSError):
        why = "timed out" if isinstance(found, TimeoutError) else found.strerror or str(found)
        raise NoListener(
            f"no coordinator responds at {endpoint} ({why[:1].lower()}{why[1:]}); the job is over, its first agent "
            "has exited, or the address is wrong",
            is_refused=found.errno == errno.ECONNREFUSED,
        )
    return found


class NoListener(RendezvousError):
    """Nothing listens at an endpoint.

    Args:
        is_refused: The machine refused the connection; otherwise it is silent or unreachable.
    """

    def __init__(self, message: str, *, is_refused: bool) -> None:
        super().__init__(message)
        self.is_refused = is_refused


def connect_to(addresses: Sequence[tuple[int, tuple[str, int]]], timeout_s: float) -> socket.socket | OSError:
    """Connect to the first address that accepts; return the last error if none does."""
    problem, end_s = OSError("it has no address"), clock.now_s() + timeout_s
    for family, address in addresses:
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(max(0.01, end_s - clock.now_s()))
            connection.connect(address)
            return connection
        except OSError as error:
            connection.close()
            problem = error
    return problem


class Occupant(Enum):
    COORDINATOR = "a coordinator responds"
    NO_LISTENER = "no process listens there yet"
    UNREACHABLE = "it cannot be reached"
    UNKNOWN = "there is no such host"
    LEAVING = "a coordinator of this run listens there and is shutting down"
    FOREIGN = "another program listens there"
    SILENT = "a program listens there and does not respond"


_RESOLVE_S, _CONNECT_S, _ANSWER_S = 3.0, 1.0, 2.0
_MAX_PROBES, _PAUSE_S = 3, 0.2
"""Limits of :func:`probe`; a coordinator to which thousands of agents connect at once may be slow."""


def probe(endpoint: Endpoint, run_id: str, key: RunKey) -> tuple[Occupant, str]:
    """Find out what listens at an endpoint before this process starts anything.

    Returns:
        The occupant, and an explanation where one is needed.

    Raises:
        WrongRun: A coordinator of another run, or with another key, listens there.

    Blocks: about 0.01 s where a coordinator responds or nothing listens; seconds where names or hosts do not respond.
    """
    for _ in range(_MAX_PROBES):
        occupant, why = _probe_once(endpoint, run_id, key)
        if occupant is not Occupant.LEAVING and (occupant is not Occupant.FOREIGN or why):
            break
        threading.Event().wait(_PAUSE_S)  # a coordinator that was killed closes its connections without a message, too
    return occupant, why


def _probe_once(endpoint: Endpoint, run_id: str, key: RunKey) -> tuple[Occupant, str]:
    addresses = look_up(endpoint, _RESOLVE_S)
    if isinstance(addresses, str):
        return Occupant.UNKNOWN, addresses
    found = connect_to(addresses or [], _CONNECT_S)
    if isinstance(found, OSError):
        refused = found.errno == errno.ECONNREFUSED
        return (Occupant.NO_LISTENER if refused else Occupant.UNREACHABLE), ""
    with MessageChannel[m.Answer](found, m.Answer) as channel:
        handshake = join_handshake(run_id, key)
        try:
            is_open = channel.authenticate(handshake, within_s=_ANSWER_S)
        except WrongRun:
            raise
        except AuthenticationFailed as error:
            if isinstance(error.__cause__, ConnectionError):
                return Occupant.LEAVING, ""
            return Occupant.FOREIGN, str(error)
        except TimeoutError:
            return Occupant.SILENT, ""
        except OSError:  # a listener that introduced itself with this run's id and key is not foreign
            return (Occupant.LEAVING if handshake.is_introduced else Occupant.FOREIGN), ""
    return (Occupant.COORDINATOR if is_open else Occupant.FOREIGN), ""
