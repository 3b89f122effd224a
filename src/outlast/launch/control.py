"""The connection between an agent and the coordinator: who opens it, what both prove, what is asked without joining.

One TCP connection for each agent, over :mod:`outlast.runtime.wire`. The coordinator's side opens with an
:class:`Introduction`, which anybody who connects may read: the run's id and the fingerprint of its key. Then both prove
that they know the run key. The agent's first message is a :class:`~outlast.launch.protocol.Hello`; what does not fit is
refused with a line that says which part differs. From then on both send what they have and, in between, beats.

:func:`ask` asks one question on a connection of its own: ``outlast status``, and one coordinator another.
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
"""Raised whenever a message changes; agents of different versions do not meet."""
_INTRODUCTION = struct.Struct("!8sB63s200s")
_SOURCES = tuple(KeySource)
_MAX_ANSWER_BYTES = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class JobIdentity:
    """What all agents of a job must have in common."""

    run_id: str
    key: RunKey
    command: str = ""
    """Digest of what the workers run; empty: anything."""
    command_text: str = ""
    """The same for people, shortened."""
    run_dir: Path | None = None
    """The run directory."""


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a coordinator says openly."""

    fingerprint: bytes
    """Of its run key."""
    source: KeySource
    """Where its run key came from."""
    run_id: bytes
    """The first bytes of its run's id."""
    run_dir: bytes = b""
    """Its run directory, where the run key lies in it: who may read that may ask."""

    @classmethod
    def of(cls, identity: JobIdentity) -> Introduction:
        """Return a run's."""
        key, run_dir = identity.key, b""
        if key.source is KeySource.RUN_DIRECTORY:
            run_dir = os.fsencode(identity.run_dir or "")
        return cls(key.fingerprint, key.source, _shorten(identity.run_id), run_dir if len(run_dir) <= 200 else b"")

    @classmethod
    def decode(cls, data: bytes) -> Introduction:
        """Return what was said.

        Raises:
            ProtocolError: It is no introduction.
        """
        fingerprint, source, run_id, run_dir = _INTRODUCTION.unpack(data)
        if source >= len(_SOURCES):
            raise ProtocolError("the program at this address is not a coordinator of this version of outlast")
        return cls(fingerprint, _SOURCES[source], run_id.rstrip(b"\0"), run_dir.rstrip(b"\0"))

    def encode(self) -> bytes:
        """Return it as bytes, always as many."""
        return _INTRODUCTION.pack(self.fingerprint, _SOURCES.index(self.source), self.run_id, self.run_dir)


def _shorten(run_id: str) -> bytes:
    return run_id.encode()[:63]


class WrongRun(AuthenticationFailed):
    """What answers coordinates another run, or has another run key: asking again does not help."""


def serve_handshake(identity: JobIdentity) -> Handshake:
    """Return the coordinator's part in the proof of the run key."""
    return Handshake(
        identity.key.derive(PROTOCOL),
        PROTOCOL,
        is_server=True,
        version=VERSION,
        introduction=Introduction.of(identity).encode(),
    )


def join_handshake(run_id: str | None, key: RunKey | None) -> Handshake:
    """Return the other side's part.

    Args:
        run_id: Which run is meant; ``None``: whichever answers.
        key: The run key; ``None``: it is taken from where the introduction says it lies, if this process may read it.
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
    """Return a run's key as far as its introduction says where it is and this process may have it."""
    if theirs.source is KeySource.RUN_ID:
        return RunKey.of_run_id(theirs.run_id.decode(errors="replace"))
    if theirs.source is KeySource.RUN_DIRECTORY and theirs.run_dir:
        with contextlib.suppress(ConfigError):
            return key_of_directory(Path(os.fsdecode(theirs.run_dir)), make=False)
    return None


def ask(
    endpoint: Endpoint, question: m.Question, *, run_id: str | None, key: RunKey | None, timeout_s: float
) -> m.Answer:
    """Ask the coordinator at an endpoint.

    Args:
        endpoint: Where it may be.
        question: What is asked.
        run_id: Which run is meant; ``None``: whichever answers.
        key: The run key; ``None``: as for :func:`join_handshake`.
        timeout_s: For looking up the host's name, and again for all that follows.

    Raises:
        RendezvousError: The host's name is not known, nobody listens there, or who does is no coordinator of that run;
            one line with the remedy.

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
    """Return a connection to an endpoint.

    Raises:
        RendezvousError: The host's name is not known, or nobody listens there.

    Blocks: up to twice ``timeout_s``: for the host's name, and for its answer.
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
        raise Nobody(
            f"no coordinator responds at {endpoint} ({why[:1].lower()}{why[1:]}); the job is over, its first agent "
            "has exited, or the address is wrong",
            is_refused=found.errno == errno.ECONNREFUSED,
        )
    return found


class Nobody(RendezvousError):
    """Nobody listens at an endpoint.

    Args:
        is_refused: Its machine says so; otherwise it is silent, or out of reach.
    """

    def __init__(self, message: str, *, is_refused: bool) -> None:
        super().__init__(message)
        self.is_refused = is_refused


def connect_to(addresses: Sequence[tuple[int, tuple[str, int]]], timeout_s: float) -> socket.socket | OSError:
    """Return a connection to the first address that accepts one, or what the last one answered."""
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
    """What is at an endpoint."""

    COORDINATOR = "a coordinator responds"
    NOBODY = "no process listens there yet"
    UNREACHABLE = "it cannot be reached"
    UNKNOWN = "there is no such host"
    LEAVING = "a coordinator of this run listens there and is shutting down"
    FOREIGN = "another program listens there"
    SILENT = "a program listens there and does not respond"


_RESOLVE_S, _CONNECT_S, _ANSWER_S = 3.0, 1.0, 2.0
_MAX_PROBES, _PAUSE_S = 3, 0.2
"""For :func:`probe`; a coordinator to which thousands of agents connect at once may take its time."""


def probe(endpoint: Endpoint, run_id: str, key: RunKey) -> tuple[Occupant, str]:
    """Return what is at an endpoint before this process starts anything, and why, where that needs words.

    Raises:
        WrongRun: A coordinator of another run, or with another key.

    Blocks: about 0.01 s where a coordinator answers or nobody listens; some seconds where names or hosts do not answer.
    """
    for _ in range(_MAX_PROBES):
        occupant, why = _probe_once(endpoint, run_id, key)
        if occupant is not Occupant.LEAVING and (occupant is not Occupant.FOREIGN or why):
            break
        threading.Event().wait(_PAUSE_S)  # without a word: a coordinator that was killed ends its connections so, too
    return occupant, why


def _probe_once(endpoint: Endpoint, run_id: str, key: RunKey) -> tuple[Occupant, str]:
    addresses = look_up(endpoint, _RESOLVE_S)
    if isinstance(addresses, str):
        return Occupant.UNKNOWN, addresses
    found = connect_to(addresses or [], _CONNECT_S)
    if isinstance(found, OSError):
        refused = found.errno == errno.ECONNREFUSED
        return (Occupant.NOBODY if refused else Occupant.UNREACHABLE), ""
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
        except OSError:  # if it has named this run and its key, it is none of another
            return (Occupant.LEAVING if handshake.is_introduced else Occupant.FOREIGN), ""
    return (Occupant.COORDINATOR if is_open else Occupant.FOREIGN), ""
