"""Ranks of a script as plain processes of this machine, without a launcher.

Each rank gets the environment that ``torch.distributed`` reads. The test can kill, stop and continue ranks with
signals; nothing else reacts to them. No process that a rank started outlives the ``with`` block: a token in the
environment identifies each.
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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

import psutil

from outlast import clock
from outlast.env import NODE, environ
from outlast.errors import DeadlineExceeded

TOKEN = "OUTLAST_TEST_CLUSTER"
"""Environment variable that marks the processes of one test."""

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_PORT = 20000  # many programs use lower ports, such as Ray's workers
_NUM_TRIES = 100
_MAX_CLAIMS = 64
claims: deque[int] = deque()
"""Sockets whose names reserve this process's newest ports on this machine; the reservations end with the process."""


def processes_with(token: str) -> list[psutil.Process]:
    """Return every living process that was started with the token, including orphans."""
    return [process for process in psutil.process_iter() if _carries(process.pid, token)]


def end_processes(token: str, *, within_s: float = 10.0) -> None:
    """SIGKILL every process that was started with the token, and wait until all are gone.

    Blocks: up to ``within_s``.

    Raises:
        DeadlineExceeded: A process could not be ended; the message describes it.
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


def having_argument(processes: Iterable[psutil.Process], argument: str) -> list[psutil.Process]:
    """Return the processes whose command line has an argument; those that end meanwhile are left out."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if argument in process.cmdline():
                found.append(process)
    return found


def describe_process(process: psutil.Process) -> str:
    try:
        return f"{process.pid} ({process.status()}) {' '.join(process.cmdline())[:120]}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (gone)"


def free_port() -> int:
    """Return a free TCP port of this machine.

    The port is drawn at random from those that the kernel does not use for outgoing connections. No process on this
    machine is given the same port while this process lives and has not asked for 64 more: a server may start late, and
    restart.
    """
    low, high = ephemeral_ports()
    candidates = [port for port in range(FIRST_PORT, 1 << 16) if not low <= port <= high]
    draw = random.SystemRandom()  # independent of a test's seed and of forks
    for port in [*draw.sample(candidates, min(_NUM_TRIES, len(candidates))), 0]:
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:  # in use
                continue
            found: int = probe.getsockname()[1]
        if _claim(found) or not port:
            return found
    raise OSError("this machine has no free TCP port; end what holds them")


def _claim(port: int) -> bool:
    """Reserve a port for this process; fail if another process of this machine has."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0outlast-test-port-{port}")
    except OSError:
        claim.close()
        return False
    claims.append(claim.detach())
    if len(claims) > _MAX_CLAIMS:
        os.close(claims.popleft())
    return True


def ephemeral_ports() -> tuple[int, int]:
    try:
        low, high = _EPHEMERAL.read_text().split()
    except OSError:  # the kernel's default
        return 32768, 60999
    return int(low), int(high)


def _carries(pid: int, token: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or owned by another user
        return False
    return f"{TOKEN}={token}".encode() in environment.split(b"\0")  # a zombie's is empty


T = TypeVar("T")

_POLL_S = 0.01
_TAIL_LINES = 40
_END_S = 60.0  # time for a SIGKILL to take effect on a busy machine
_OF_LAUNCHERS = (
    *("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_"),
    *("OUTLAST_", "TORCHELASTIC_", "SLURM_"),
)


class LoggedProcess:
    """A process in a separate session whose output goes to a file.

    Args:
        name: Name in failures.
        command: The command line.
        environment: The complete environment of the process.
        log_path: File to which the process and its children append output; ``None`` = the output is printed.
        stdin: Connect standard input to a pipe; otherwise it is empty.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_path: Path | None,
        *,
        stdin: bool = False,
    ) -> None:
        self.name = name
        self.log_path = log_path
        with contextlib.ExitStack() as stack:
            # Not a pipe: a full one would stop the process.
            log = None if log_path is None else stack.enter_context(log_path.open("ab"))
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=log,
                stderr=None if log is None else subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process alone
            )
        self.stdin = self._process.stdin
        """Standard input, if it is a pipe."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process runs (or is stopped)."""
        return self._process.poll() is None

    def signal(self, number: int) -> None:
        """Send a signal to this process only, not to its children."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL this process only, as when a node is lost, and reap it.

        Blocks: until the process is gone, 60 s at most.
        """
        self._process.kill()
        self._process.wait(timeout=_END_S)

    def wait(self, timeout_s: float) -> int:
        """Return the exit code; negative = the signal that ended the process.

        Blocks: up to ``timeout_s``.

        Raises:
            DeadlineExceeded: The process still runs; the message holds the end of its output.
        """
        try:
            return self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(f"{self.name} still runs after {timeout_s} s\n{self.tail()}") from None

    def output(self) -> str:
        """Return the output so far of the process and its children; empty without a file."""
        return "" if self.log_path is None else self.log_path.read_text(encoding="utf-8", errors="replace")

    def tail(self, num_lines: int = _TAIL_LINES) -> str:
        """Return the last lines of the output, under a heading with name and state."""
        code = self._process.poll()
        state = "running" if code is None else f"ended with {code}"
        return "\n".join([f"--- {self.name} ({state}) ---", *self.output().splitlines()[-num_lines:]])


class RankProcesses:
    """Run a script as several ranks.

    Use as a context manager; entering starts the ranks, leaving ends all their processes::

        with RankProcesses("train.py", world_size=5, directory=tmp_path) as ranks:
            ranks.wait_for("step 3", timeout_s=30, ranks=range(5))
            ranks.kill(1)
            assert ranks.wait(timeout_s=60) == [0, -signal.SIGKILL, 0, 0, 0]

    Args:
        script: The script; with ``module``, a module's name; with ``code``, the program text.
        args: Arguments of the script.
        world_size: Number of ranks.
        directory: Folder for the ranks' output, a file each; ``None`` = a temporary one.
        nodes: The name of each rank's node; ``None`` = all are on one unnamed node.
        module: Run as ``python -m``.
        code: Run as ``python -c``.
        stdin: Connect each rank's standard input to a pipe, for :meth:`send`; otherwise it is empty.
        environment: Variables to add to the environment of this process, from which those of launchers are removed;
            ``None`` as a value removes one.
        environments: For each rank additional variables, which override those above.

    Raises:
        ValueError: ``nodes`` or ``environments`` do not have one entry per rank; both ``module`` and ``code``.

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

    def __exit__(self, *_: object) -> None:
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
        """Return whether a rank runs (or is stopped)."""
        return self._ranks[rank].running

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank only, not to its children."""
        self._ranks[rank].signal(number)

    def kill(self, rank: int) -> None:
        """SIGKILL a rank only, and reap it.

        Blocks: until the process is gone, 60 s at most.
        """
        self._ranks[rank].kill()

    def stop(self, rank: int) -> None:
        """SIGSTOP a rank."""
        self.signal(rank, signal.SIGSTOP)

    def resume(self, rank: int) -> None:
        """SIGCONT a stopped rank."""
        self.signal(rank, signal.SIGCONT)

    def wait(self, timeout_s: float, ranks: Collection[int] | None = None) -> list[int]:
        """Return the ranks' exit codes, in order; negative = the signal that ended a rank.

        Args:
            timeout_s: Seconds for all together.
            ranks: Ranks to wait for; ``None`` = all.

        Raises:
            DeadlineExceeded: A rank still runs; the message holds the end of every rank's output.

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
        """Return the ranks' exit codes once all their processes are gone, such as writers and data loader workers.

        Raises:
            DeadlineExceeded: A process still runs; the message describes it and holds the end of every rank's output.

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
        """Write a line to a rank's standard input; needs ``stdin=True``.

        Raises:
            BrokenPipeError: The rank has ended.
        """
        pipe = self._pipe(rank)
        pipe.write(line.encode() + b"\n")
        pipe.flush()

    def end_input(self, rank: int) -> None:
        """Close a rank's standard input, so that its reads return end of file."""
        self._pipe(rank).close()

    def next_line(self, rank: int, timeout_s: float, *, containing: str = "") -> str:
        """Return the next line that a rank prints, without its line end; each line is returned or skipped once.

        Args:
            rank: The rank.
            timeout_s: Seconds to wait.
            containing: Skip lines without this text.

        Raises:
            DeadlineExceeded: The time is over, or the rank has ended without it; the message holds the end of every
                rank's output.

        Blocks: up to ``timeout_s``.
        """
        deadline = clock.now_s() + timeout_s
        while True:
            over = not self.running(rank)  # read first, so that no line is missed
            with self._log_path(rank).open("rb") as log:
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
            text: The text.
            timeout_s: Seconds for all together.
            ranks: All of these must have printed the text; ``None`` = any one suffices.
            times: Number of times that each must have printed the text.

        Raises:
            DeadlineExceeded: The time is over, or a required rank has ended without it; the message holds the end of
                every rank's output.

        Blocks: up to ``timeout_s``.
        """
        deadline = clock.now_s() + timeout_s
        asked = range(self.world_size) if ranks is None else ranks
        while True:
            ended = [rank for rank in asked if not self.running(rank)]  # read first, so that no output is missed
            silent = [rank for rank in asked if self.output(rank).count(text) < times]
            if not silent or (ranks is None and len(silent) < len(asked)):
                return
            over = set(silent) <= set(ended) if ranks is None else bool(set(silent) & set(ended))
            if over or clock.now_s() >= deadline:
                why = "ranks ended" if over else f"{timeout_s} s passed"
                raise DeadlineExceeded(f"{why} without {text!r} from ranks {silent}\n{self.tails()}")
            time.sleep(_POLL_S)

    def wait_until(self, look: Callable[[], T | None], timeout_s: float) -> T:
        """Return the result of ``look`` as soon as it is not ``None``.

        Raises:
            DeadlineExceeded: The time is over, or all ranks have ended without it; the message holds the end of every
                rank's output.

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
        """Return the output so far of a rank and its children."""
        return self._ranks[rank].output()

    def tails(self, num_lines: int = _TAIL_LINES) -> str:
        """Return the last lines of every rank's output, each under a heading with the rank and its state."""
        return "\n".join(process.tail(num_lines) for process in self._ranks)

    def processes(self) -> list[psutil.Process]:
        """Return every living process that the ranks started, including themselves and orphans."""
        return processes_with(self._token)

    def close(self) -> None:
        """End all processes of the ranks and reap the ranks. Idempotent.

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
