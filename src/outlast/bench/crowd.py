"""The crowd: hundreds of simulated agents in a few processes of this machine."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType

import msgspec

from outlast import clock, env
from outlast.bench.crowd_member import Answer, Order
from outlast.decoding import from_json
from outlast.errors import OutlastError
from outlast.testing.reaping import free_port

__all__ = ["Crowd"]

_NUM_MEMBERS = 4
_TIMEOUT_S = 240.0


class Crowd:
    """Let simulated agents meet; use as a context manager, which ends every process.

    The first agent, which hosts the store, has a process of its own; the others share a few.

    Thread: one.
    """

    def __init__(self) -> None:
        self._members: list[tuple[subprocess.Popen[bytes], Connection]] = []
        self._num_meetings = 0

    def __enter__(self) -> Crowd:
        variables = env.environ() | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
        # torch looks up the name of each peer address; where no name server answers, that shall not take long.
        variables |= {"RES_OPTIONS": "timeout:1 attempts:1"}
        for _ in range(1 + _NUM_MEMBERS):
            ours, theirs = multiprocessing.Pipe()
            command = [sys.executable, "-m", "outlast.bench.crowd_member", str(theirs.fileno())]
            process = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], stdout=sys.stderr
            )
            theirs.close()
            self._members.append((process, ours))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, connection in self._members:
            connection.close()
            try:
                process.wait(5.0 if kind is None else 0.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10.0)
        self._members.clear()

    def meet(self, kind: str, num_agents: int) -> float:
        """Return the seconds from the word that all shall join until the last agent had its rank.

        Args:
            kind: ``outlast`` or ``c10d``.
            num_agents: How many meet.

        Raises:
            OutlastError: They did not come to a rank each.

        Blocks: several minutes at most.
        """
        self._num_meetings += 1
        port, run_id = free_port(), f"bench-{self._num_meetings}"
        shares = _shares(num_agents - 1, _NUM_MEMBERS)
        firsts = [1 + sum(shares[:index]) for index in range(len(shares))]
        orders = [
            Order(
                do="gather",
                timeout_s=_TIMEOUT_S,
                kind=kind,
                first=first,
                count=count,
                num_agents=num_agents,
                port=port,
                run_id=run_id,
            )
            for first, count in zip([0, *firsts], [1, *shares], strict=True)
        ]
        self._tell(orders[:1], first=0)  # the others need the store that it hosts
        self._tell(orders[1:], first=1)
        joined_ns = clock.now_ns()
        answers = self._tell([Order(do="join", timeout_s=_TIMEOUT_S)] * len(self._members), first=0)
        ranks = sorted(rank for answer in answers for rank in answer.ranks)
        if ranks != list(range(num_agents)):
            raise OutlastError(f"{num_agents} agents of {kind} met and their ranks are not 0 to {num_agents - 1}")
        self._tell([Order(do="finish", timeout_s=_TIMEOUT_S)] * len(self._members), first=0)
        leave = Order(do="leave", timeout_s=_TIMEOUT_S)
        self._tell([leave] * _NUM_MEMBERS, first=1)
        self._tell([leave], first=0)  # the store's host goes last
        return (max(answer.last_ns for answer in answers) - joined_ns) / 1e9

    def _tell(self, orders: Sequence[Order], *, first: int) -> list[Answer]:
        """Send orders to as many processes, and return their answers once all are there."""
        asked = self._members[first : first + len(orders)]
        for (_, connection), order in zip(asked, orders, strict=True):
            connection.send_bytes(msgspec.json.encode(order))
        answers = []
        for (process, connection), order in zip(asked, orders, strict=True):
            try:
                if not connection.poll(order.timeout_s + 10.0):
                    raise OutlastError(f"process {process.pid} of simulated agents gave no answer to {order.do!r}")
                answer = from_json(connection.recv_bytes(), Answer)
            except EOFError:
                raise OutlastError(f"process {process.pid} of simulated agents died; its output is above") from None
            if answer.error is not None:
                raise OutlastError(f"simulated agents could not {order.do}: {answer.error}")
            answers.append(answer)
        return answers


def _shares(total: int, parts: int) -> list[int]:
    """Return ``total`` in as equal parts as can be."""
    return [total // parts + (index < total % parts) for index in range(parts)]
