"""A real cluster on one machine: several ``outlast run`` agents, each one a node with processes of its own.

Nothing here is simulated. Agents and workers are real processes that can be killed and stopped with real
signals; what they did is read from the run's journal and from their output. Whatever happens in the test,
no process of the cluster outlives its ``with`` block: every one carries a token in its environment by which
it is found, even when its agent is gone.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from outlast import clock
from outlast.env import DEVICE, environ
from outlast.errors import DeadlineExceeded
from outlast.incidents import Event, EventKind
from outlast.journal import read
from outlast.testing.ranks import (
    TOKEN,
    LoggedProcess,
    describe_process,
    end_processes,
    free_port,
    processes_with,
)

_COMMAND = (sys.executable, "-c", "import sys; from outlast.cli.main import main; sys.exit(main())", "run")
_POLL_S = 0.02


class Agent(LoggedProcess):
    """One ``outlast run`` process, a node; made by a :class:`Cluster`."""

    def wait(self, timeout_s: float) -> int:
        """Return the agent's exit code; negative: the signal that ended it.

        Blocks: up to ``timeout_s``.

        Raises:
            DeadlineExceeded: It still runs; the message holds the end of its output.
        """
        try:
            return super().wait(timeout_s)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"agent {error}", node=self.name) from None


class Cluster:
    """Run a script on several nodes of this machine.

    Use as a context manager; entering starts the agents, leaving ends every process of the cluster::

        with Cluster("train.py", run_dir=tmp_path, num_nodes=2, num_spares=1) as cluster:
            cluster.wait_for(lambda event: event.iteration == 20, timeout_s=60)
            os.kill(cluster.worker_pid(3), signal.SIGKILL)
            assert cluster.wait(timeout_s=60) == [0, 0, 0]

    Args:
        script: The training script.
        args: The script's own arguments.
        run_dir: The run directory; the agents' output goes to ``agents/`` below it.
        num_nodes: Nodes that carry ranks.
        num_spares: Nodes more, which wait for a slot.
        num_started: Agents that entering starts; ``None`` = all. The others are for :meth:`add_node`.
        nproc_per_node: Workers on each node.
        options: More options of ``outlast run``, such as ``--max-restarts=3``.
        environment: Variables to add to this process's own.
        devices: Node name (``node-0``, ``node-1``, ... in the order of their start, spares last) to the name of the
            hardware that it computes on, where that is not to be the node's own name: two nodes of one device are the
            same hardware to whoever looks for another one.

    Thread: one.
    """

    def __init__(
        self,
        script: str | os.PathLike[str],
        *args: str,
        run_dir: str | os.PathLike[str],
        num_nodes: int = 2,
        num_spares: int = 0,
        num_started: int | None = None,
        nproc_per_node: int = 2,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        devices: Mapping[str, str] | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.run_id = f"test-{uuid.uuid4().hex[:8]}"
        self.agents: list[Agent] = []
        self._num_started = num_nodes + num_spares if num_started is None else num_started
        self._token = uuid.uuid4().hex
        self._devices = dict(devices or {})
        self._environment = {
            **environ(),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            **(environment or {}),
            TOKEN: self._token,
        }
        self._options = [
            f"--nnodes={num_nodes}:{num_nodes + num_spares}",
            f"--nproc-per-node={nproc_per_node}",
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-id={self.run_id}",
            f"--run-dir={self.run_dir}",
            *options,
        ]
        self._script = [os.fspath(script), *args]

    def __enter__(self) -> Cluster:
        (self.run_dir / "agents").mkdir(parents=True, exist_ok=True)
        try:
            for _ in range(self._num_started):
                self.add_node()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add_node(
        self,
        name: str | None = None,
        *,
        options: Sequence[str] = (),
        device: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Agent:
        """Start one more agent, as another node or as one that returns.

        Args:
            name: The node's name; a new one when not given.
            options: More options of ``outlast run`` for this agent alone.
            device: Name of the hardware that it computes on; by default as in ``devices``, else the node's name.
            environment: Variables to add for this agent alone.
        """
        name = name or f"node-{len(self.agents)}"
        command = [*_COMMAND, *self._options, f"--node-name={name}", *options, *self._script]
        variables = {**self._environment, **(environment or {})}
        if (device := device or self._devices.get(name)) is not None:
            variables[DEVICE] = device
        agent = Agent(name, command, variables, self.run_dir / "agents" / f"{name}.log")
        self.agents.append(agent)
        return agent

    def agent(self, which: int | str) -> Agent:
        """Return an agent by the order of its start, or the newest one of a node by its name."""
        if isinstance(which, int):
            return self.agents[which]
        return next(agent for agent in reversed(self.agents) if agent.name == which)

    def events(self) -> list[Event]:
        """Return what the journal holds so far, by wall time."""
        return list(read(self.run_dir))

    def worker_pid(self, global_rank: int) -> int:
        """Return the process id of a rank in the newest cycle that started it.

        Raises:
            LookupError: No cycle started that rank.
        """
        for event in reversed(self.events()):
            if event.kind == EventKind.CYCLE_STARTED and global_rank in event.data["ranks"]:
                pid: int = event.data["pids"][event.data["ranks"].index(global_rank)]
                return pid
        raise LookupError(f"no cycle has started rank {global_rank}\n{self.tails()}")

    def wait_for(self, what: str | Callable[[Event], bool], timeout_s: float) -> Event | None:
        """Wait until a text is printed by any node, or an event fulfils a condition; earlier ones count too.

        Args:
            what: The text, or a function that returns whether an event is the one.
            timeout_s: Seconds to wait at most.

        Returns:
            The first such event; ``None`` when a text was waited for.

        Raises:
            DeadlineExceeded: It did not happen in time, or every agent has ended without it; the message
                holds the end of every agent's output.
        """
        deadline = clock.now_s() + timeout_s
        while True:
            over = not any(agent.running for agent in self.agents)  # asked before the look: none is missed
            if isinstance(what, str):
                if any(what in agent.output() for agent in self.agents):
                    return None
            elif (event := next(filter(what, self.events()), None)) is not None:
                return event
            if over or clock.now_s() >= deadline:
                wanted = repr(what) if isinstance(what, str) else "the event"
                why = "all agents ended" if over else f"{timeout_s} s passed"
                raise DeadlineExceeded(f"{why} without {wanted}\n{self.tails()}")
            time.sleep(_POLL_S)

    def wait(self, timeout_s: float) -> list[int]:
        """Return all agents' exit codes, in the order of their start.

        Blocks: up to ``timeout_s`` for all together.

        Raises:
            DeadlineExceeded: Some agent still runs; the message holds the end of every agent's output.
        """
        deadline = clock.now_s() + timeout_s
        try:
            return [agent.wait(max(0.0, deadline - clock.now_s())) for agent in self.agents]
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{str(error).splitlines()[0]}\n{self.tails()}", node=error.node) from None

    def tails(self) -> str:
        """Return the end of every agent's output."""
        return "\n".join(agent.tail() for agent in self.agents)

    def processes(self) -> list[psutil.Process]:
        """Return every living process of the cluster, orphans too."""
        return processes_with(self._token)

    def orphans(self) -> list[psutil.Process]:
        """Return the processes of the cluster that no living agent is responsible for."""
        owners = {agent.pid for agent in self.agents if agent.running}
        return [process for process in self.processes() if owners.isdisjoint(_lineage(process))]

    def assert_no_orphans(self, within_s: float) -> None:
        """Check that what belonged to ended agents ends too.

        Blocks: up to ``within_s``.

        Raises:
            AssertionError: Some process is left; the message names each.
        """
        deadline = clock.now_s() + within_s
        while orphans := self.orphans():
            if clock.now_s() >= deadline:
                named = "; ".join(describe_process(process) for process in orphans)
                raise AssertionError(f"still running {within_s} s after their agent ended: {named}")
            psutil.wait_procs(orphans, timeout=max(0.0, min(0.1, deadline - clock.now_s())))

    def close(self) -> None:
        """End every process of the cluster and reap the agents; may be called twice.

        Blocks: 60 s at most.

        Raises:
            DeadlineExceeded: A process could not be ended.
        """
        for agent in self.agents:
            if agent.running:
                agent.kill()
        end_processes(self._token, within_s=60.0)


def _lineage(process: psutil.Process) -> Iterator[int]:
    yield process.pid
    with contextlib.suppress(psutil.NoSuchProcess):
        yield from (parent.pid for parent in process.parents())
