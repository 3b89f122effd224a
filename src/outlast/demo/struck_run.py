"""A run under a fault plan: its agents as children of this process, an injector beside them, and who comes back.

Every process carries a token in its environment, by which it is found wherever it got to; each agent ends with this
process, however that ends. A node whose agent was killed by the plan is replaced, as a scheduler would do it. A job
that left after a notice is followed by another one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from outlast import clock, env
from outlast.chaos.injector import Injector, disk_injection
from outlast.chaos.netns import INTERFACE, NodeNetwork
from outlast.chaos.plan import FaultPlan, PlannedFault
from outlast.decoding import from_json
from outlast.demo.stage import uninterrupted
from outlast.errors import DeadlineExceeded, ExitReason
from outlast.runtime.injection import Injection
from outlast.testing.ranks import TOKEN, describe_process, end_processes, processes_with

_PROGRAM = """
import sys
from outlast.runtime.processes import die_with_parent
die_with_parent(int(sys.argv.pop(1)))
from outlast.cli.main import main
sys.exit(main())
"""
_POLL_S = 0.05
_LEFT_S = 30.0
"""How long agents may run after one has ended the job: those that were stopped, or cut off, do not know of it."""
_MAX_JOBS = 50
_MAX_REFUSED = 5
"""Agents of a job that are replaced after they were refused."""
_ORPHANS_S = 10.0


class StruckAgent:
    """One ``outlast run`` of a :class:`StruckRun`."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.process = process

    @property
    def running(self) -> bool:
        """Whether it runs, or is stopped."""
        return self.process.poll() is None

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended it."""
        return self.process.poll() == -signal.SIGKILL

    @property
    def was_refused(self) -> bool:
        """Whether it was refused: the job continues without it."""
        return self.process.poll() == ExitReason.BAD_INPUT


class StruckRun:
    """Run a command's agents under a plan; use as a context manager, which ends every process.

    Args:
        plan: The faults.
        arguments: What follows ``outlast run``, without the node's name.
        run_dir: The run directory that ``arguments`` name.
        plan_path: Where the plan is kept for the sessions; written here.
        num_agents: How many agents are to run; those that the plan kills are replaced.
        is_named: Name the nodes, each agent's own name; off: one agent alone, under the machine's name.
        log_dir: Folder of the agents' output; ``None`` = it goes where ours does.
        environment: Variables to add to this process's own.
        network: Where each agent gets a host of its own; made for ``num_agents`` of them.
        on_strike: Called with each fault that was caused from here.

    Thread: the main thread.
    """

    def __init__(
        self,
        plan: FaultPlan,
        arguments: Sequence[str],
        *,
        run_dir: Path,
        plan_path: Path,
        num_agents: int = 1,
        is_named: bool = False,
        log_dir: Path | None = None,
        environment: Mapping[str, str] | None = None,
        network: NodeNetwork | None = None,
        on_strike: Callable[[PlannedFault], None] | None = None,
    ) -> None:
        self.agents: list[StruckAgent] = []
        self.num_jobs = 0
        self.token = uuid.uuid4().hex
        self._plan, self._plan_path = plan, plan_path
        self._arguments, self._run_dir, self._log_dir = list(arguments), run_dir, log_dir
        self._num_agents, self._is_named, self._on_strike = num_agents, is_named, on_strike
        self._num_started = self._first_of_job = 0
        self._network = network
        self._hosts: dict[int, StruckAgent] = {}
        self._ended_s: float | None = None
        present = env.environ().get(env.INJECTIONS)
        injections = from_json(present.encode(), tuple[Injection, ...]) if present else ()
        self._environment = {
            **env.environ(),
            **(environment or {}),
            env.FAULT_PLAN: os.fspath(plan_path.absolute()),
            env.INJECTIONS: msgspec.json.encode([*injections, disk_injection(run_dir)]).decode(),
            **({} if network is None else {env.INTERFACE: INTERFACE, "GLOO_SOCKET_IFNAME": INTERFACE}),
            TOKEN: self.token,
        }
        self.injector: Injector

    def __enter__(self) -> StruckRun:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._plan_path.write_text(self._plan.to_toml())
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        self.injector = Injector(self._plan, self._run_dir, network=self._network, host_of=self._host_of)
        try:
            self._start_job()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def follow(self, *, limit_s: float | None = None, on_look: Callable[[], None] | None = None) -> int:
        """Strike, replace, start again, until the run is over; return its exit code.

        Args:
            limit_s: How long it may take; ``None`` = as long as it does.
            on_look: Called a few times a second.

        Raises:
            DeadlineExceeded: It took longer.
        """
        began_s = clock.now_s()
        while True:
            running = [agent for agent in self.agents if agent.running]
            self.injector.look()
            if (struck := self.injector.strike()) is not None and self._on_strike is not None:
                self._on_strike(struck)
            if on_look is not None:
                on_look()
            if not running:
                code = self._exit_code()
                if not self._goes_on(code) or self.num_jobs >= _MAX_JOBS:
                    return code
                self._start_job()
            else:
                self._replace(running)
            if limit_s is not None and clock.now_s() > began_s + limit_s:
                raise DeadlineExceeded(f"the run did not end within {limit_s:.0f} s")
            time.sleep(_POLL_S)

    def orphans(self) -> list[str]:
        """Return the processes of the run that still live, in words, once its agents have ended.

        Blocks: up to 10 s, while some end.
        """
        deadline_s = clock.now_s() + _ORPHANS_S
        while (left := processes_with(self.token)) and clock.now_s() < deadline_s:
            time.sleep(_POLL_S)
        return [describe_process(process) for process in left]

    def close(self) -> None:
        """End every process of the run; idempotent. Blocks: a minute at most."""
        with uninterrupted():
            for agent in self.agents:
                if agent.running:
                    agent.process.kill()
                agent.process.wait()
            end_processes(self.token, within_s=60.0)
            self.injector.close()

    def _start_job(self) -> None:
        self.num_jobs += 1
        self._ended_s, self._first_of_job = None, len(self.agents)
        for _ in range(self._num_agents):
            self._start_agent()

    def _start_agent(self) -> None:
        name = f"node-{self._num_started}" if self._is_named else "this node"
        self._num_started += 1
        own = [f"--node-name={name}"] if self._is_named else []
        command = [sys.executable, "-c", _PROGRAM, str(os.getpid()), "run", *own, *self._arguments]
        host = next(number for number in itertools.count() if not self._is_taken(number))
        if self._network is not None:
            command = self._network.command(host, command)
        with contextlib.ExitStack() as stack:
            out = None
            if self._log_dir is not None:
                out = stack.enter_context((self._log_dir / f"{name}.log").open("ab"))
            process = subprocess.Popen(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=None if out is None else subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends the agents
            )
        agent = StruckAgent(name, process)
        self.agents.append(agent)
        self._hosts[host] = agent

    def _is_taken(self, host: int) -> bool:
        return host in self._hosts and self._hosts[host].running

    def _host_of(self, node: str) -> int | None:
        """Return a node's host in the network."""
        found = (host for host, agent in self._hosts.items() if agent.name == node and agent.running)
        return None if self._network is None else next(found, None)

    def _exit_code(self) -> int:
        of_job = self.agents[self._first_of_job :]
        codes = [agent.process.returncode for agent in of_job if not agent.was_killed and not agent.was_refused]
        codes = codes or [agent.process.returncode for agent in of_job]
        bad = [code for code in codes if code != ExitReason.FINISHED]
        preempted = [code for code in bad if code == ExitReason.PREEMPTED]
        return (preempted or bad or [int(ExitReason.FINISHED)])[0]

    def _goes_on(self, code: int) -> bool:
        """Return whether a scheduler would start the job again: it left after a notice, or all of it was killed."""
        return code in (ExitReason.PREEMPTED, -signal.SIGKILL)

    def _replace(self, running: list[StruckAgent]) -> None:
        """Start an agent for each one that was killed or refused; end those that do not know that the job is over."""
        of_job = self.agents[self._first_of_job :]
        ended = [agent for agent in of_job if not agent.running and not agent.was_killed and not agent.was_refused]
        if ended or sum(agent.was_refused for agent in of_job) > _MAX_REFUSED:
            self._ended_s = self._ended_s or clock.now_s()
            if clock.now_s() > self._ended_s + _LEFT_S:
                for agent in running:
                    agent.process.kill()
            return
        if self._is_named:
            for _ in range(self._num_agents - len(running)):
                self._start_agent()
