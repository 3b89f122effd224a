"""The zygote: a process that has imported torch and from which workers are forked.

This module is the agent's side. The process itself is :mod:`outlast.runtime.zygote_process`; both speak the
messages below over a ``SOCK_SEQPACKET`` pair, one message a packet.

Ownership: the agent owns the zygote, the zygote owns the workers. If the agent dies, the zygote sees the socket
close and kills every worker's process group before it ends; if the zygote dies, the kernel kills the workers
(``PR_SET_PDEATHSIG``) and the agent learns it from the socket. A worker that ended is not reaped before
:class:`Clear`, so that neither its pid nor its process group can be taken over by a stranger in between.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec

from outlast.decoding import msgpack_decoder
from outlast.errors import OutlastError

__all__ = ["Clear", "Cleared", "Exited", "FailedToStart", "Ready", "SendSignal", "Spawn", "Started", "Zygote"]

MAX_PACKET_BYTES = 1 << 20

_MAIN = """
import sys
if not sys.flags.safe_path:
    del sys.path[0]  # the working directory: what lies there is the script's, not ours to import
from outlast.runtime.zygote_process import main
main(sys.argv[1:])
"""


class Spawn(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start a worker in a session and process group of its own."""

    key: int
    """Names the worker in later messages; the caller's choice, unique until :class:`Clear`."""
    argv: tuple[str, ...]
    """The script (or module, or program) and its arguments."""
    kind: str = "script"
    """``script`` and ``module`` run in a fork of the zygote, ``exec`` is a program of its own."""
    env: dict[str, str]
    """The whole environment."""
    stdout: str = ""
    """File to append to; empty: the zygote's own."""
    stderr: str = ""
    on_start: str = ""
    """``module:function`` to call in a forked worker before its script; empty: none."""


class SendSignal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Send a signal to one worker, or to all (``key`` is ``None``)."""

    signal: int
    key: int | None = None
    group: bool = True
    """To the whole process group; otherwise to the worker alone."""


class Clear(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Kill what is left of all workers (SIGKILL to their groups), reap them, then say :class:`Cleared`."""

    token: int = 0


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The zygote has imported what it was told to."""

    import_s: float
    failed: dict[str, str] = {}
    """Modules that could not be imported, and why."""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker runs."""

    key: int
    pid: int


class FailedToStart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker could not be started."""

    key: int
    error: str


class Exited(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker ended."""

    key: int
    pid: int
    exit_code: int
    """Negative: the signal that ended it."""
    mono_ns: int
    """When the zygote learned it."""


class Cleared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Every worker is gone and reaped."""

    token: int = 0


Request = Spawn | SendSignal | Clear
Reply = Ready | Started | FailedToStart | Exited | Cleared

_encoder = msgspec.msgpack.Encoder()
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgpack_decoder(Reply)


class Zygote:
    """Start and drive a zygote process.

    Args:
        preload: Modules that it imports before the first worker; empty for fresh interpreters only. None of them is
            looked for in the working directory.
        own_preload: More of them, also looked for where the script looks for its own.
        folder: Where that is.
        env: Its environment. What libraries read when they are loaded (``OMP_NUM_THREADS``) must be here, not only in
            a worker's.

    Thread: one (the agent's main thread).
    """

    def __init__(
        self, *, preload: Sequence[str], env: Mapping[str, str], own_preload: Sequence[str] = (), folder: str = ""
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_PACKET_BYTES)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-u",
                    "-c",
                    _MAIN,
                    str(theirs.fileno()),
                    ",".join(preload),
                    ",".join(own_preload),
                    folder,
                ],
                pass_fds=(theirs.fileno(),),
                env=dict(env),
                start_new_session=True,
            )
        self._socket = ours
        self._has_spawned = False
        self.pid = self._process.pid

    def fileno(self) -> int:
        """Return the descriptor that is readable when :meth:`receive` has something."""
        return self._socket.fileno()

    def send(self, request: Request) -> None:
        """Send a request.

        Raises:
            OutlastError: The zygote is gone, or the request is larger than a packet.
        """
        data = _encoder.encode(request)
        if len(data) > MAX_PACKET_BYTES // 2:
            raise OutlastError(f"a worker's environment and arguments take {len(data)} bytes; make them smaller")
        self._has_spawned |= isinstance(request, Spawn)
        try:
            self._socket.send(data)
        except OSError as error:
            raise OutlastError(f"the process that starts workers (pid {self.pid}) is gone: {error}") from error

    def receive(self) -> Reply | None:
        """Return the next reply; ``None`` once the zygote is gone.

        Blocks: until there is one; call it when :meth:`fileno` is readable.
        """
        try:
            data = self._socket.recv(MAX_PACKET_BYTES)
        except ConnectionError:
            return None
        return _reply_decoder.decode(data) if data else None

    def kill(self) -> None:
        """End the zygote at once, and with it its workers; whoever started it reaps it. Blocks: never."""
        self._process.kill()

    def close(self, timeout_s: float = 5.0) -> None:
        """End the zygote, which first kills what is left of its workers; then reap it."""
        self._socket.close()
        if not self._has_spawned:
            self._process.kill()  # it may still be importing, and has no workers to end
        try:
            self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
