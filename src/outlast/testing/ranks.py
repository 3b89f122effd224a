"""Ranks of a script as plain processes of this machine, without any launcher.

Each gets the environment that ``torch.distributed`` reads. They can be killed, stopped and continued with real
signals; nothing but the test does anything about it. Whatever happens in the test, no process that a rank started
outlives the ``with`` block: every one carries a token in its environment, by which it is found wherever it got to.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TypeVar

import psutil

from outlast import clock
from outlast.env import NODE, environ
from outlast.errors import DeadlineExceeded

TOKEN = "OUTLAST_TEST_CLUSTER"
"""Environment variable that marks the processes of one test."""

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 20000  # below, many programs have ports of their own, Ray's workers among them
_NUM_TRIES = 100
_MAX_CLAIMS = 64
_claims: deque[int] = deque()
"""Descriptors of sockets whose names keep this process's last ports from being given to another; they end with it."""


def processes_with(token: str) -> list[psutil.Process]:
    """Return every living process that was started with the token, orphans too."""
    return [process for process in psutil.process_iter() if _carries(process.pid, token)]


def end_processes(token: str, *, within_s: float = 10.0) -> None:
    """SIGKILL every process that was started with the token, and wait until all are gone.

    Blocks: up to ``within_s``.

    Raises:
        DeadlineExceeded: One could not be ended; the message names it.
    """
    deadline = clock.now_s() + within_s
    while left := processes_with(token):
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(left, timeout=0.5)
        if clock.now_s() >= deadline:
            named = "; ".join(describe_process(process) for process in left)
            raise DeadlineExceeded(f"these processes of the test cannot be ended: {named}")


def describe_process(process: psutil.Process) -> str:
    """Return a line with the process's id, state and command."""
    try:
        return f"{process.pid} ({process.status()}) {' '.join(process.cmdline())[:120]}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (gone)"


def free_port() -> int:
    """Return a TCP port of this machine that nobody listened on a moment ago.

    It is drawn at random from those that the kernel gives to no outgoing connection, and while this process lives
    and has not asked for 64 more, no process on this machine is given it: what is to listen there may take its time,
    and may end and begin again.
    """
    low, high = _ephemeral_ports()
    candidates = [port for port in range(_FIRST_PORT, 1 << 16) if not low <= port <= high]
    draw = random.SystemRandom()  # a test's seed, or a fork, repeats no draw
    for port in [*draw.sample(candidates, min(_NUM_TRIES, len(candidates))), 0]:
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:  # somebody has it
                continue
            found: int = probe.getsockname()[1]
        if _claim(found) or not port:
            return found
    raise OSError("this machine has no free TCP port; end what holds them")


def _claim(port: int) -> bool:
    """Take a port for this process, if no other on this machine has; both see the same ports and the same names."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0outlast-test-port-{port}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim.detach())
    if len(_claims) > _MAX_CLAIMS:
        os.close(_claims.popleft())
    return True


def _ephemeral_ports() -> tuple[int, int]:
    try:
        low, high = _EPHEMERAL.read_text().split()
    except OSError:  # the kernel's default
        return 32768, 60999
    return int(low), int(high)


def _carries(pid: int, token: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or of another user
        return False
    return f"{TOKEN}={token}".encode() in environment.split(b"\0")  # a zombie's is empty


T = TypeVar("T")

_POLL_S = 0.01
_TAIL_LINES = 40
_END_S = 60.0  # for a SIGKILL to be done, on a machine that has much else to do
_OF_LAUNCHERS = (
    *("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_"),
    *("OUTLAST_", "TORCHELASTIC_", "SLURM_"),
)


class LoggedProcess:
    """A process in a session of its own whose output goes to a file."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log_path: Path, *, stdin: bool = False
    ) -> None:
        self.name = name
        self.log_path = log_path
        with log_path.open("ab") as log:  # not a pipe: a full one would stop the process
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.stdin = self._process.stdin
        """Its standard input, where that is a pipe."""

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it still runs (or is stopped)."""
        return self._process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal to it alone, not to what it started."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL it alone, as when a node is lost, and reap it.

        Blocks: until the process is gone, 60 s at most.
        """
        self._process.kill()
        self._process.wait(timeout=_END_S)

    def wait(self, timeout_s: float) -> int:
        """Return its exit code; negative: the signal that ended it.

        Blocks: up to ``timeout_s``.

        Raises:
            DeadlineExceeded: It still runs; the message holds the end of its output.
        """
        try:
            return self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(f"{self.name} still runs after {timeout_s} s\n{self.tail()}") from None

    def output(self) -> str:
        """Return all that it, and what it started, has printed so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def tail(self, num_lines: int = _TAIL_LINES) -> str:
        """Return the last lines of the output, under a heading with name and state."""
        code = self._process.poll()
        state = "running" if code is None else f"ended with {code}"
        return "\n".join([f"--- {self.name} ({state}) ---", *self.output().splitlines()[-num_lines:]])


class RankProcesses:
    """Run a script as several ranks.

    Use as a context manager; entering starts the ranks, leaving ends every process that came of them::

        with RankProcesses("train.py", world_size=5, directory=tmp_path) as ranks:
            ranks.wait_for("step 3", timeout_s=30, ranks=range(5))
            ranks.kill(1)
            assert ranks.wait(timeout_s=60) == [0, -signal.SIGKILL, 0, 0, 0]

    Args:
        script: The script; with ``module``, a module's name; with ``code``, the program itself.
        args: The script's own arguments.
        world_size: Number of ranks.
        directory: Folder for the ranks' output, a file each; a temporary one when not given.
        nodes: For each rank the name of its node; by default all are on one, which is not named.
        module: Run it as ``python -m``.
        code: Run it as ``python -c``.
        stdin: Give each rank a pipe as its standard input, for :meth:`send`; otherwise that is empty.
        environment: Variables to add to this process's own, of which those of launchers are left out; ``None`` as a
            value removes one.
        environments: For each rank variables of its own, which also replace or remove those named above.

    Raises:
        ValueError: ``nodes`` or ``environments`` are not as many as there are ranks; both ``module`` and ``code``.

    Thread: one.
    """

    def __init__(
        self,
        script: str | os.PathLike[str],
        *args: str,
        world_size: int,
        directory: str | os.PathLike[str] | None = None,
        nodes: Sequence[str] | None = None,
        module: bool = False,
        code: bool = False,
        stdin: bool = False,
        environment: Mapping[str, str | None] | None = None,
        environments: Sequence[Mapping[str, str | None]] | None = None,
    ) -> None:
        if nodes is not None and len(nodes) != world_size:
            raise ValueError(f"nodes names {len(nodes)} nodes for {world_size} ranks; name one for each rank")
        if environments is not None and len(environments) != world_size:
            raise ValueError(f"environments has {len(environments)} entries for {world_size} ranks; give each rank one")
        if module and code:
            raise ValueError("module and code exclude each other; choose one of them")
        self.world_size = world_size
        self._command = [sys.executable, *(["-m"] * module), *(["-c"] * code), os.fspath(script), *args]
        self._nodes = nodes
        self._stdin = stdin
        self._environments = environments
        self._read_bytes = [0] * world_size
        self._token = uuid.uuid4().hex
        self._directory = None if directory is None else Path(directory)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._ranks: list[LoggedProcess] = []
        self._common: dict[str, str | None] = {
            **{name: value for name, value in environ().items() if not name.startswith(_OF_LAUNCHERS)},
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            **(environment or {}),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }

    def __enter__(self) -> RankProcesses:
        if self._directory is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="outlast-ranks-")
            self._directory = Path(self._temporary.name)
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            for rank in range(self.world_size):
                self._ranks.append(self._start(rank))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, rank: int) -> LoggedProcess:
        nodes = self._nodes or [""] * self.world_size
        own: dict[str, str | None] = {
            "RANK": str(rank),
            "LOCAL_RANK": str(nodes[:rank].count(nodes[rank])),
            "LOCAL_WORLD_SIZE": str(nodes.count(nodes[rank])),
        }
        if self._nodes is not None:
            own[NODE] = nodes[rank]
        if self._environments is not None:
            own |= self._environments[rank]
        variables = {**self._common, **own, TOKEN: self._token}
        environment = {name: value for name, value in variables.items() if value is not None}
        self._log_path(rank).unlink(missing_ok=True)
        return LoggedProcess(f"rank {rank}", self._command, environment, self._log_path(rank), stdin=self._stdin)

    def pid(self, rank: int) -> int:
        """Return the process id of a rank."""
        return self._ranks[rank].pid

    def running(self, rank: int) -> bool:
        """Return whether a rank still runs (or is stopped)."""
        return self._ranks[rank].running

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank alone, not to what it started."""
        self._ranks[rank].signal(number)

    def kill(self, rank: int) -> None:
        """SIGKILL a rank alone, and reap it.

        Blocks: until the process is gone, 60 s at most.
        """
        self._ranks[rank].kill()

    def stop(self, rank: int) -> None:
        """SIGSTOP a rank: it neither runs nor ends until it is continued or killed."""
        self.signal(rank, signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        """SIGCONT a rank that was stopped."""
        self.signal(rank, signal.SIGCONT)

    def wait(self, timeout_s: float, ranks: Collection[int] | None = None) -> list[int]:
        """Return the ranks' exit codes, in order; negative: the signal that ended one.

        Args:
            timeout_s: Seconds for all together.
            ranks: Those to wait for; all by default.

        Raises:
            DeadlineExceeded: One still runs; the message holds the end of every rank's output.

        Blocks: up to ``timeout_s``.
        """
        deadline = clock.now_s() + timeout_s
        codes: list[int] = []
        for rank in range(self.world_size) if ranks is None else ranks:
            try:
                codes.append(self._ranks[rank].wait(max(0.0, deadline - clock.now_s())))
            except DeadlineExceeded:
                text = f"rank {rank} still runs after {timeout_s} s\n{self.tails()}"
                raise DeadlineExceeded(text, rank=rank) from None
        return codes

    def wait_until_gone(self, timeout_s: float) -> list[int]:
        """Return the ranks' exit codes once no process that came of them is left: no writer, no data loader's worker.

        Raises:
            DeadlineExceeded: One still runs; the message names it and holds the end of every rank's output.

        Blocks: up to ``timeout_s``.
        """
        deadline = clock.now_s() + timeout_s
        codes = self.wait(timeout_s)
        while left := self.processes():
            if clock.now_s() >= deadline:
                named = "; ".join(describe_process(process) for process in left)
                raise DeadlineExceeded(f"these processes still run after {timeout_s} s: {named}\n{self.tails()}")
            psutil.wait_procs(left, timeout=min(0.5, max(0.0, deadline - clock.now_s())))
        return codes

    def send(self, rank: int, line: str) -> None:
        """Write a line to a rank's standard input; the ranks were started with ``stdin=True``.

        Raises:
            BrokenPipeError: The rank has ended.
        """
        pipe = self._pipe(rank)
        pipe.write(line.encode() + b"\n")
        pipe.flush()

    def end_input(self, rank: int) -> None:
        """Close a rank's standard input: its reads come to the end."""
        self._pipe(rank).close()

    def next_line(self, rank: int, timeout_s: float, *, containing: str = "") -> str:
        """Return the next line that a rank prints, without its end; each line is returned or skipped once.

        Args:
            rank: The rank.
            timeout_s: Seconds to wait for it.
            containing: Skip lines without this text.

        Raises:
            DeadlineExceeded: It was not printed in time, or the rank has ended without; the message holds the end of
                every rank's output.

        Blocks: up to ``timeout_s``.
        """
        deadline = clock.now_s() + timeout_s
        while True:
            over = not self.running(rank)  # asked before the look: no line is missed
            with self._ranks[rank].log_path.open("rb") as log:
                log.seek(self._read_bytes[rank])
                for line in log:
                    if not line.endswith(b"\n") and not over:
                        break
                    self._read_bytes[rank] += len(line)
                    text = line.decode("utf-8", "replace").removesuffix("\n")
                    if containing in text:
                        return text
            if over or clock.now_s() >= deadline:
                why = "it ended" if over else f"{timeout_s} s passed"
                raise DeadlineExceeded(
                    f"{why} without a line with {containing!r} from rank {rank}\n{self.tails()}", rank=rank
                )
            time.sleep(_POLL_S)

    def wait_for(self, text: str, timeout_s: float, *, ranks: Collection[int] | None = None, times: int = 1) -> None:
        """Wait until ranks have printed a text.

        Args:
            text: What is looked for.
            timeout_s: Seconds for all together.
            ranks: All of them must have printed it; by default any one suffices.
            times: How often each must have printed it.

        Raises:
            DeadlineExceeded: It was not printed in time, or a rank that was to print it has ended without; the message
                holds the end of every rank's output.

        Blocks: up to ``timeout_s``.
        """
        deadline = clock.now_s() + timeout_s
        asked = range(self.world_size) if ranks is None else ranks
        while True:
            ended = [rank for rank in asked if not self.running(rank)]  # asked before the look: none is missed
            silent = [rank for rank in asked if self.output(rank).count(text) < times]
            if not silent or (ranks is None and len(silent) < len(asked)):
                return
            over = set(silent) <= set(ended) if ranks is None else bool(set(silent) & set(ended))
            if over or clock.now_s() >= deadline:
                why = "ranks ended" if over else f"{timeout_s} s passed"
                raise DeadlineExceeded(f"{why} without {text!r} from ranks {silent}\n{self.tails()}")
            time.sleep(_POLL_S)

    def wait_until(self, look: Callable[[], T | None], timeout_s: float) -> T:
        """Return what ``look`` returns as soon as that is not ``None``.

        Raises:
            DeadlineExceeded: It did not come in time, or all ranks have ended without; the message holds the end of
                every rank's output.

        Blocks: up to ``timeout_s``.
        """
        deadline = clock.now_s() + timeout_s
        while True:
            over = not any(self.running(rank) for rank in range(self.world_size))  # asked before the look
            if (found := look()) is not None:
                return found
            if over or clock.now_s() >= deadline:
                why = "all ranks ended" if over else f"{timeout_s} s passed"
                raise DeadlineExceeded(f"{why} without what was waited for\n{self.tails()}")
            time.sleep(_POLL_S)

    def output(self, rank: int) -> str:
        """Return all that a rank, and what it started, has printed so far."""
        return self._ranks[rank].output()

    def tails(self, num_lines: int = _TAIL_LINES) -> str:
        """Return the last lines of every rank's output, each under a heading with the rank and its state."""
        return "\n".join(process.tail(num_lines) for process in self._ranks)

    def processes(self) -> list[psutil.Process]:
        """Return every living process that came of the ranks, themselves and orphans too."""
        return processes_with(self._token)

    def close(self) -> None:
        """End every process that came of the ranks, and reap them; may be called twice.

        Blocks: until they are gone, a minute at most.

        Raises:
            DeadlineExceeded: A process could not be ended.
        """
        try:
            for process in self._ranks:
                process.signal(signal.SIGKILL)
            for process in self._ranks:
                process.wait(_END_S)
                if process.stdin is not None:
                    with contextlib.suppress(BrokenPipeError):
                        process.stdin.close()
            end_processes(self._token, within_s=_END_S)
        finally:
            if self._temporary is not None:
                self._temporary.cleanup()
                self._temporary = None

    def _pipe(self, rank: int) -> IO[bytes]:
        pipe = self._ranks[rank].stdin
        assert pipe is not None, "only ranks that are started with stdin=True can be written to"
        return pipe

    def _log_path(self, rank: int) -> Path:
        assert self._directory is not None, "the ranks are started by entering the with block"
        return self._directory / f"rank-{rank}.log"
