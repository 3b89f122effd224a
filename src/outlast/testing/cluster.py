"""A real cluster on one machine: several ``outlast run`` agents, each one a node with its worker processes.

Nothing is simulated. Agents and workers are processes that can be killed and stopped with signals; the run's journal
and the agents' output show what they did. No process of the cluster outlives its ``with`` block: a token in the
environment identifies each, even after its agent is gone. The agents also end when this process ends.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from outlast import clock
from outlast.chaos import Fault, FaultPlan, NodeNetwork
from outlast.chaos.injector import Injector, disk_injection
from outlast.chaos.netns import INTERFACE as HOST_INTERFACE
from outlast.decoding import from_json
from outlast.env import DEVICE, FAULT_PLAN, INJECTIONS, INTERFACE, environ
from outlast.errors import ConfigError, DeadlineExceeded, ExitReason
from outlast.incidents import Event, EventKind
from outlast.journal import read
from outlast.runtime.injection import Injection
from outlast.testing.ranks import (
    TOKEN,
    LoggedProcess,
    describe_process,
    end_processes,
    free_port,
    processes_with,
)

_PROGRAM = """
import sys
from outlast.runtime.processes import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
from outlast.cli.main import main
sys.exit(main())
"""
_COMMAND = (sys.executable, "-c", _PROGRAM)
_POLL_S = 0.02
_SUPERVISE_POLL_S = 0.05
_LEFT_S = 30.0
"""Seconds that agents may run after one has ended the job: stopped or disconnected agents cannot detect the end."""
_MAX_JOBS = 50
_MAX_REJECTED = 5
"""Agents of a job that are replaced after the job has rejected them."""


class Agent(LoggedProcess):
    """One ``outlast run`` process, a node; created by a :class:`Cluster`."""

    host: int | None = None
    """Number of its host in the cluster's network."""

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative = signal; ``None`` while it runs or is stopped."""
        return None if self.running else self.wait(0)

    def wait(self, timeout_s: float) -> int:
        """Return the agent's exit code; negative = the signal that ended it.

        Blocks: up to ``timeout_s``.

        Raises:
            DeadlineExceeded: The agent still runs; the message holds the end of its output.
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

    With a fault plan, :meth:`supervise` injects its faults and acts as the scheduler::

        plan = FaultPlan(faults=[Fault(kind="kill", rank=1, iteration=20), Fault(kind="lose_node", iteration=50)])
        with Cluster("train.py", run_dir=tmp_path, num_spares=1, fault_plan=plan) as cluster:
            for fault in cluster.supervise(timeout_s=300):
                if fault is not None:
                    print("injected:", fault.describe())
            assert cluster.exit_code == 0

    Args:
        script: The training script.
        args: Arguments of the script.
        run_dir: The run directory; the agents' output goes to ``agents/`` below it.
        num_nodes: Nodes with ranks; ``None`` = one unnamed agent, and ``options`` describes the job's other nodes.
        num_spares: Additional nodes that wait for a slot.
        num_started: Agents that entering starts, and that :meth:`supervise` keeps running; ``None`` = the sum of the
            two. The others are for :meth:`add_node`; with more than the sum, some are unannounced spares.
        nproc_per_node: Workers on each node; ``None`` = as in ``options``.
        options: More options of ``outlast run``, such as ``--max-restarts=3``.
        environment: Variables to add to the environment of this process; ``None`` as a value removes one.
        devices: Node name (``node-0``, ``node-1``, ... in the order of their start, spares last) to the name of its
            hardware, by default the node's name: two nodes of one device are the same hardware where different hardware
            is required.
        run_id: Name of the run; ``None`` = a new one.
        fault_plan: The faults of the run. The agents then get two endpoints, so that another agent can take over from a
            stopped coordinator.
        network: The network in which each agent gets a host; it has at least one for each agent that runs at a time.
        prints_output: Print the agents' output instead of writing it into files.

    Thread: one, the main thread where signals are to be handled.
    """

    def __init__(
        self,
        script: str | os.PathLike[str],
        *args: str,
        run_dir: str | os.PathLike[str],
        num_nodes: int | None = 2,
        num_spares: int = 0,
        num_started: int | None = None,
        nproc_per_node: int | None = 2,
        options: Sequence[str] = (),
        environment: Mapping[str, str | None] | None = None,
        devices: Mapping[str, str] | None = None,
        run_id: str | None = None,
        fault_plan: FaultPlan | None = None,
        network: NodeNetwork | None = None,
        prints_output: bool = False,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.run_id = run_id or f"test-{uuid.uuid4().hex[:8]}"
        self.agents: list[Agent] = []
        self.num_jobs = 0
        """Jobs that were started."""
        self.injector: Injector | None = None
        """Injects the faults of the plan; ``None`` without one, and before the ``with`` block."""
        self._is_named = num_nodes is not None
        self._num_started = (num_nodes or 1) + num_spares if num_started is None else num_started
        self._token = uuid.uuid4().hex
        self._devices = dict(devices or {})
        self._fault_plan, self._network, self._prints_output = fault_plan, network, prints_output
        self._first_of_job = 0
        self._ended_s: float | None = None
        hosts = ["127.0.0.1"] * (1 if fault_plan is None else 2)
        if network is not None:
            hosts = [network.address(host) for host in range(self._num_started)]
        self.endpoint = ",".join(f"{host}:{free_port()}" for host in hosts)
        variables = {
            **environ(),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            **self._fault_variables(),
            **(environment or {}),
            TOKEN: self._token,
        }
        self._environment = {name: value for name, value in variables.items() if value is not None}
        self._own_options = [f"--rdzv-id={self.run_id}", f"--run-dir={self.run_dir}"]
        if num_nodes is not None:
            nnodes = f"--nnodes={num_nodes}:{num_nodes + num_spares}"
            self._own_options += [nnodes, f"--rdzv-endpoint={self.endpoint}"]
        if nproc_per_node is not None:
            self._own_options.append(f"--nproc-per-node={nproc_per_node}")
        self._options = list(options)
        self._script = [os.fspath(script), *args]

    def __enter__(self) -> Cluster:
        (self.run_dir / "agents").mkdir(parents=True, exist_ok=True)
        if self._fault_plan is not None:
            self._plan_path.write_text(self._fault_plan.to_toml())
            self.injector = Injector(self._fault_plan, self.run_dir, network=self._network, host_of=self._host_of)
        try:
            self._start_job()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add_node(
        self,
        name: str | None = None,
        *,
        options: Sequence[str] = (),
        device: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Agent:
        """Start another agent, as a new node or as one that returns.

        Args:
            name: The node's name; ``None`` = a new one.
            options: More options of ``outlast run`` for this agent alone.
            device: Name of its hardware; ``None`` = as in ``devices``, else the node's name.
            environment: Variables to add for this agent alone.
        """
        name = name or (f"node-{len(self.agents)}" if self._is_named else "this node")
        own = [*self._own_options, *([f"--node-name={name}"] if self._is_named else [])]
        command = [*_COMMAND, str(os.getpid()), "run", *own, *self._options, *options, *self._script]
        variables = {**self._environment, **(environment or {})}
        if (device := device or self._devices.get(name)) is not None:
            variables[DEVICE] = device
        host = None
        if self._network is not None:
            taken = {agent.host for agent in self.agents if agent.running}
            host = next(number for number in itertools.count() if number not in taken)
            command = self._network.command(host, command)
        path = None if self._prints_output else self.run_dir / "agents" / f"{name}.log"
        agent = Agent(name, command, variables, path)
        agent.host = host
        self.agents.append(agent)
        return agent

    def agent(self, which: int | str) -> Agent:
        """Return an agent by its start order, or the newest agent of a node by name."""
        if isinstance(which, int):
            return self.agents[which]
        return next(agent for agent in reversed(self.agents) if agent.name == which)

    def events(self) -> list[Event]:
        """Return the journal's events so far, by wall time."""
        return list(read(self.run_dir))

    def worker_pid(self, global_rank: int) -> int:
        """Return the process id of a rank in the newest cycle that started the rank.

        Raises:
            LookupError: No cycle started that rank.
        """
        for event in reversed(self.events()):
            if event.kind == EventKind.CYCLE_STARTED and global_rank in event.data["ranks"]:
                pid: int = event.data["pids"][event.data["ranks"].index(global_rank)]
                return pid
        raise LookupError(f"no cycle has started rank {global_rank}\n{self.tails()}")

    def wait_for(self, what: str | Callable[[Event], bool], timeout_s: float) -> Event | None:
        """Wait until any node prints a text, or an event fulfils a condition; earlier ones count too.

        Args:
            what: The text, or a predicate of an event.
            timeout_s: Seconds to wait at most.

        Returns:
            The first such event; ``None`` for a text.

        Raises:
            DeadlineExceeded: The time is over, or every agent has ended without it; the message holds the end of every
                agent's output.
        """
        deadline = clock.now_s() + timeout_s
        while True:
            over = not any(agent.running for agent in self.agents)  # read first, so that no event is missed
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
            DeadlineExceeded: An agent still runs; the message holds the end of every agent's output.
        """
        deadline = clock.now_s() + timeout_s
        try:
            return [agent.wait(max(0.0, deadline - clock.now_s())) for agent in self.agents]
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{str(error).splitlines()[0]}\n{self.tails()}", node=error.node) from None

    def inject(self, fault: Fault) -> bool:
        """Inject a fault of the plan that has ``on_request``.

        Returns:
            Whether the fault was injected, or released to the rank that injects it at its next step. ``False``: not
            possible now, because the ranks restart or have not committed a checkpoint since; call again, as in the loop
            of :meth:`supervise`.

        Raises:
            ConfigError: The plan does not have the fault, or it was injected before.
        """
        if self.injector is None:
            raise ConfigError("the cluster has no fault plan; give it fault_plan=FaultPlan(faults=[...])")
        self.injector.poll()
        return self.injector.inject(fault)

    def supervise(self, timeout_s: float | None = None) -> Iterator[Fault | None]:
        """Run to the end as under a scheduler, and inject the plan's faults when due.

        An agent that was killed by SIGKILL, or rejected by the job, is replaced by a new node. After a preemption (exit
        code 75), or once all agents are killed, the job is started again, on the nodes that were preempted.

        Args:
            timeout_s: Seconds for all; ``None`` = no limit.

        Yields:
            About twenty times a second ``None``, or the fault that was just injected.

        Raises:
            DeadlineExceeded: The run did not end in time.
        """
        deadline_s = float("inf") if timeout_s is None else clock.now_s() + timeout_s
        while True:
            running = [agent for agent in self.agents if agent.running]
            one = None
            if self.injector is not None:
                self.injector.poll()
                one = self.injector.inject_due()
            yield None if one is None else one.fault
            if running:
                self._replace(running)
            elif self.exit_code not in (ExitReason.PREEMPTED, -signal.SIGKILL) or self.num_jobs >= _MAX_JOBS:
                return
            else:
                self._start_job()
            if clock.now_s() > deadline_s:
                raise DeadlineExceeded(f"the run did not end within {timeout_s:g} s\n{self.tails()}")
            time.sleep(_SUPERVISE_POLL_S)

    @property
    def exit_code(self) -> int | None:
        """Exit code of the newest job, negative = the signal that ended all agents; ``None`` while an agent runs."""
        of_job = self.agents[self._first_of_job :]
        codes = [agent.exit_code for agent in of_job if agent.exit_code is not None]
        if len(codes) < len(of_job):
            return None
        codes = [code for code in codes if code not in (-signal.SIGKILL, ExitReason.BAD_INPUT)] or codes
        bad = [code for code in codes if code != ExitReason.FINISHED]
        preempted = [code for code in bad if code == ExitReason.PREEMPTED]
        return (preempted or bad or [int(ExitReason.FINISHED)])[0]

    def tails(self) -> str:
        """Return the end of every agent's output."""
        return "\n".join(agent.tail() for agent in self.agents)

    def processes(self) -> list[psutil.Process]:
        """Return every living process of the cluster, including orphans."""
        return processes_with(self._token)

    def orphans(self) -> list[psutil.Process]:
        """Return the processes of the cluster that do not descend from a living agent."""
        owners = {agent.pid for agent in self.agents if agent.running}
        return [process for process in self.processes() if owners.isdisjoint(_lineage(process))]

    def assert_no_orphans(self, within_s: float) -> None:
        """Check that the processes of ended agents end too.

        Blocks: up to ``within_s``.

        Raises:
            AssertionError: A process is left; the message lists each.
        """
        deadline = clock.now_s() + within_s
        while orphans := self.orphans():
            if clock.now_s() >= deadline:
                named = "; ".join(describe_process(process) for process in orphans)
                raise AssertionError(f"still running {within_s} s after their agent ended: {named}")
            psutil.wait_procs(orphans, timeout=max(0.0, min(0.1, deadline - clock.now_s())))

    def close(self) -> None:
        """End every process of the cluster and reap the agents. Idempotent.

        Blocks: 60 s at most.

        Raises:
            DeadlineExceeded: A process could not be ended.
        """
        with uninterrupted():
            for agent in self.agents:
                if agent.running:
                    agent.kill()
            end_processes(self._token, within_s=60.0)
            if self.injector is not None:
                self.injector.close()

    @property
    def _plan_path(self) -> Path:
        return self.run_dir / "fault-plan.toml"

    def _fault_variables(self) -> dict[str, str]:
        """Return the variables that pass the fault plan and the network interface to agents and ranks."""
        variables: dict[str, str] = {}
        if self._fault_plan is not None:
            present = environ().get(INJECTIONS)
            injections = from_json(present.encode(), tuple[Injection, ...]) if present else ()
            variables[FAULT_PLAN] = os.fspath(self._plan_path.absolute())
            variables[INJECTIONS] = msgspec.json.encode([*injections, disk_injection(self.run_dir)]).decode()
        if self._network is not None:
            variables |= {INTERFACE: HOST_INTERFACE, "GLOO_SOCKET_IFNAME": HOST_INTERFACE}
        return variables

    def _host_of(self, node: str) -> int | None:
        return next((agent.host for agent in self.agents if agent.name == node and agent.running), None)

    def _start_job(self) -> None:
        of_job = self.agents[self._first_of_job :] if self._is_named else []
        names = [agent.name for agent in of_job if agent.exit_code == ExitReason.PREEMPTED]
        self.num_jobs += 1
        self._ended_s, self._first_of_job = None, len(self.agents)
        for index in range(self._num_started):
            self.add_node(names[index] if index < len(names) else None)

    def _replace(self, running: Sequence[Agent]) -> None:
        """Replace killed and rejected agents; end those that do not detect that the job has ended."""
        codes = [agent.exit_code for agent in self.agents[self._first_of_job :]]
        has_ended = any(code not in (None, -signal.SIGKILL, ExitReason.BAD_INPUT) for code in codes)
        if has_ended or codes.count(ExitReason.BAD_INPUT) > _MAX_REJECTED:
            self._ended_s = self._ended_s or clock.now_s()
            if clock.now_s() > self._ended_s + _LEFT_S:
                for agent in running:
                    agent.kill()
        elif self._is_named:
            for _ in range(self._num_started - len(running)):
                self.add_node()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay signals that end this process until the block is left, so that its clean-up is complete.

    Handlers delay them, because another thread would receive a signal that this one masks.

    Thread: the main thread; in others the function does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _frame: received.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


def _lineage(process: psutil.Process) -> Iterator[int]:
    yield process.pid
    with contextlib.suppress(psutil.NoSuchProcess):
        yield from (parent.pid for parent in process.parents())
