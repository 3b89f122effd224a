"""The injector: injects faults from outside into a run, alongside its agents, and releases those with ``at_s``.

It knows the run from its run directory alone. A fault that costs a restart is injected only while all ranks train and,
so that the plan does not use up the restart budget, once the newest cycle has committed a checkpoint, or after
``PATIENCE_S`` without one. All agents must run on this machine, under this user.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from outlast import clock
from outlast.chaos.copies import Replicas, damage_copy, find_copies, lose_folder, node_folder
from outlast.chaos.netns import NodeNetwork
from outlast.chaos.plan import (
    LOST_NODES,
    Fault,
    FaultKind,
    FaultPlan,
    FaultTier,
    PlannedFault,
    claim_marker,
    marker_of,
    planned_faults,
)
from outlast.chaos.sight import Sight
from outlast.errors import ConfigError
from outlast.incidents import EventKind
from outlast.journal import JournalTail
from outlast.runtime.injection import DiskFault, Injection
from outlast.runtime.journal import Journal

log = logging.getLogger(__name__)
PATIENCE_S = 15.0
"""Seconds for which a cycle may train without a commit before faults that cost a restart are injected all the same."""
PROC = "chaos"
"""Its process name in the journal."""
SURVIVED_S = 20.0
"""A cycle that trains for this long after a fault does not end because of it."""
_SETTLE_S = 10.0
"""How long a rank may take to record a released fault."""
_GONE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Later:
    """A fault to undo later."""

    at_s: float
    undo: Callable[[], object]


def disk_injection(run_dir: str | os.PathLike[str]) -> Injection:
    """Return the injection for agents whose disks can be full or slow."""
    return Injection(point="checkpoint.file.made", do="disk", path=os.fspath(_disk_faults_path(run_dir)))


def clear_leftovers(run_dir: str | os.PathLike[str]) -> None:
    """Remove the file of an injector that was killed, which would impair the disks of a later run."""
    _disk_faults_path(run_dir).unlink(missing_ok=True)


def _disk_faults_path(run_dir: str | os.PathLike[str]) -> Path:
    return Path(run_dir).absolute() / "faults" / "disks.json"


class Injector:
    """Inject a plan's faults from outside into a run, and release those that wait for ``at_s``.

    Args:
        plan: The faults.
        run_dir: The run directory; need not exist yet.
        network: The network in which the nodes are separate hosts.
        host_of: Returns a node's host in the network.

    Thread: one.
    """

    def __init__(
        self,
        plan: FaultPlan,
        run_dir: str | os.PathLike[str],
        *,
        network: NodeNetwork | None = None,
        host_of: Callable[[str], int | None] = lambda _node: None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self._network, self._host_of = network, host_of
        self.sight = Sight()
        clear_leftovers(run_dir)
        self._tail = JournalTail(self.run_dir)
        left = [one for one in planned_faults(plan) if not marker_of(run_dir, one.fault_id).exists()]
        self._requestable = [one for one in left if one.fault.on_request]
        self._pending = sorted(
            (
                one
                for one in left
                if not one.fault.on_request and (one.is_released or FaultKind(one.fault.kind).is_outside)
            ),
            key=lambda one: one.fault.at_s or 0.0,
        )
        self._began_s: float | None = None
        self._trains_since_s = 0.0
        self._cycle: tuple[str, int] = ("", -1)
        self._faulted_cycle: tuple[str, int] = ("", -1)
        """The newest cycle with a fault that costs a restart."""
        self._faulted_s = 0.0
        self._released: dict[str, float] = {}
        """Deadlines of released faults that no rank has recorded yet, by fault id."""
        self._later: list[_Later] = []
        self._stopped: dict[str, int] = {}
        self._disk_faults: list[DiskFault] = []
        self._journals: dict[str, Journal] = {}

    @property
    def num_pending(self) -> int:
        """Number of faults that were neither injected nor released."""
        return len(self._pending) + len(self._requestable)

    def poll(self) -> Sight:
        """Read the journal's new events, and undo the faults that end now."""
        for event in self._tail.read_new():
            self.sight.take(event)
            if event.kind == EventKind.FAULT_SIMULATED:
                self._released.pop(str(event.data.get("fault_id")), None)
        now_s = clock.now_s()
        for later in [one for one in self._later if one.at_s <= now_s]:
            self._later.remove(later)
            later.undo()
        cycle = (self.sight.job, self.sight.cycle)
        if self.sight.is_training and cycle != self._cycle:
            self._cycle, self._trains_since_s = cycle, now_s
            self._began_s = now_s if self._began_s is None else self._began_s
        self._released = {name: until_s for name, until_s in self._released.items() if until_s > now_s}
        return self.sight

    def inject_due(self) -> PlannedFault | None:
        """Inject the first fault that is due and possible now, and return it; ``None``: there is none."""
        if self._began_s is None or not self.sight.is_training:
            return None
        now_s = clock.now_s()
        looked = False
        for one in self._pending:
            if one.fault.at_s is not None and now_s < self._began_s + one.fault.at_s:
                break
            if one.fault.iteration is not None and not looked:
                self.sight.look_at_boards()
                looked = True
            if (one.fault.iteration or 0) <= self.sight.iteration and self._may(one.fault) and self._inject(one):
                self._pending.remove(one)
                return one
        return None

    def inject(self, fault: Fault) -> bool:
        """Inject a fault of the plan with ``on_request``.

        Returns:
            Whether it was injected, or released to its rank for the next step; false while the ranks restart, or have
                not
            committed a checkpoint since.

        Raises:
            ConfigError: The plan does not contain the fault, or it was injected before.
        """
        one = next((one for one in self._requestable if one.fault == fault), None)
        if one is None:
            raise ConfigError(
                f"{fault.describe()}: not a fault of the plan with on_request=True that is still to be injected; "
                "add it to the plan"
            )
        if not self.sight.is_training or not self._may(fault) or not self._inject(one):
            return False
        self._requestable.remove(one)
        return True

    def close(self) -> None:
        """Undo lasting faults, and close the journal. Idempotent."""
        while self._later:
            self._later.pop().undo()
        clear_leftovers(self.run_dir)
        for journal in self._journals.values():
            journal.close()

    def _may(self, fault: Fault) -> bool:
        """Return whether the run has recovered from the last fault, as far as this one requires."""
        kind = FaultKind(fault.kind)
        if kind.is_of_copies or kind.is_of_disks or kind in (FaultKind.DELAY, FaultKind.LOSS):
            return True
        is_faulted = self._cycle == self._faulted_cycle and clock.now_s() < self._faulted_s + SURVIVED_S
        if is_faulted or self._released:
            return False
        committed = self.sight.committed_now
        if kind == FaultKind.LOSE_NODE_AND_REPLICAS:
            return bool(committed & self.sight.committed.get(FaultTier.GLOBAL, set()))
        return bool(committed) or clock.now_s() > self._trains_since_s + PATIENCE_S or kind.is_gentle

    def _inject(self, one: PlannedFault) -> bool:
        kind = FaultKind(one.fault.kind)
        if not kind.is_outside:
            return self._release(one)
        if kind.is_of_copies:
            return self._damage_copy(one)
        if kind.is_of_disks:
            return self._impair_disk(one)
        if kind.is_of_networks:
            return self._impair_network(one)
        return self._signal_agent(one)

    def _release(self, one: PlannedFault) -> bool:
        claim_marker(marker_of(self.run_dir, one.fault_id, due=True))
        self._released[one.fault_id] = clock.now_s() + _SETTLE_S
        if not FaultKind(one.fault.kind).is_gentle:
            self._note_faulted()
        return True

    def _signal_agent(self, one: PlannedFault) -> bool:
        kind = FaultKind(one.fault.kind)
        is_stop = kind in (FaultKind.STOP_AGENT, FaultKind.STOP_COORDINATOR)
        if kind in (FaultKind.KILL_COORDINATOR, FaultKind.STOP_COORDINATOR):
            nodes = [node for node in self.sight.living() if node == self.sight.coordinator]
        else:
            nodes = [node for node in self._nodes(one.fault.node) if one.fault.node or node not in self._stopped]
        if not nodes:
            return False
        node = nodes[one.draw(len(nodes), "node")]
        pid = self.sight.agents[node].pid
        replicas = Replicas(self.sight, node) if kind == FaultKind.LOSE_NODE_AND_REPLICAS else None
        if not self._claim(one):
            return True
        self._note_faulted()
        facts: dict[str, Any] = {} if replicas is None else {"replicas_corrupted": replicas.corrupt()}
        number = signal.SIGSTOP if is_stop else signal.SIGKILL
        self._record(one, f"agent of {node} (pid {pid})", done=number.name, node=node, pid=pid, **facts)
        family = _family(pid)
        os.kill(pid, number)
        if is_stop:
            self._stopped[node] = pid
            if one.fault.duration_s is not None:
                self._undo_in(one.fault.duration_s, lambda: self._continue(node, pid))
        if kind in LOST_NODES:
            _await_end(family)
            if self.sight.local_directory is not None:
                lose_folder(node_folder(self.sight.local_directory, node))
        if replicas is not None:
            replicas.corrupt()  # those written in between
        return True

    def _continue(self, node: str, pid: int) -> None:
        self._stopped.pop(node, None)
        process = self.sight.agents.get(node)
        if process is not None and process.pid == pid and node in self.sight.living():
            os.kill(pid, signal.SIGCONT)

    def _damage_copy(self, one: PlannedFault) -> bool:
        fault = one.fault
        assert fault.tier is not None
        copies = [
            copy
            for copy in find_copies(self.sight, fault.tier, fault.checkpoint)
            if fault.node in (None, copy.node) and fault.rank in (None, copy.rank)
        ]
        if not copies:
            return False
        copy = copies[one.draw(len(copies), "copy")]
        try:
            done = damage_copy(fault.kind, copy)
        except OSError as error:
            log.warning("%s: %s", fault.describe(), error)
            return False
        if done is None:
            return False
        self._claim(one)
        self._record(one, copy.describe(), done=done, tier=copy.tier, generation=copy.checkpoint, node=copy.node)
        return True

    def _impair_disk(self, one: PlannedFault) -> bool:
        fault = one.fault
        if fault.tier == FaultTier.GLOBAL:
            folder, node = self.sight.directory, ""
            if folder is None or "://" in folder:
                return False
        else:
            nodes = sorted({fault.node} if fault.node else set(self.sight.ranks.values()))
            if self.sight.local_directory is None or not nodes:
                return False
            node = nodes[one.draw(len(nodes), "node")]
            folder = os.fspath(node_folder(self.sight.local_directory, node))
        disk_fault = DiskFault(folder=folder, delay_s=fault.delay_s or 0.0)
        return self._impair(
            one,
            folder,
            lambda: self._set_disk_faults([*self._disk_faults, disk_fault]),
            lambda: self._set_disk_faults([other for other in self._disk_faults if other is not disk_fault]),
            tier=fault.tier,
            node=node,
        )

    def _impair_network(self, one: PlannedFault) -> bool:
        fault, network = one.fault, self._network
        hosts = [(node, host) for node in self._nodes(fault.node) if (host := self._host_of(node)) is not None]
        if network is None or not hosts:
            return False
        node, host = hosts[one.draw(len(hosts), "node")]
        target = f"network of {node}"
        if fault.kind != FaultKind.PARTITION:
            delay_s, share = fault.delay_s or 0.0, fault.share or 0.0
            begin = lambda: network.impair(host, delay_s=delay_s, share=share)  # noqa: E731
            return self._impair(one, target, begin, lambda: network.repair(host), node=node)
        self._note_faulted()
        return self._impair(one, target, lambda: network.cut(host), lambda: network.join(host), node=node)

    def _impair(
        self, one: PlannedFault, target: str, begin: Callable[[], object], undo: Callable[[], object], **facts: Any
    ) -> bool:
        """Inject a fault that lasts for its duration, unless it was injected before."""
        duration_s = one.fault.duration_s
        assert duration_s is not None
        if self._claim(one):
            self._record(one, target, done=f"for {duration_s:g} s", **facts)
            begin()
            self._undo_in(duration_s, undo)
        return True

    def _nodes(self, name: str | None) -> list[str]:
        """Return the living nodes of that name; without a name, those that carry ranks."""
        wanted = set(self.sight.ranks.values()) if name is None else {name}
        return [node for node in self.sight.living() if node in wanted]

    def _note_faulted(self) -> None:
        self._faulted_cycle, self._faulted_s = self._cycle, clock.now_s()

    def _set_disk_faults(self, disk_faults: Collection[DiskFault]) -> None:
        self._disk_faults = list(disk_faults)
        path = _disk_faults_path(self.run_dir)
        if not disk_faults:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(self._disk_faults))
        new.rename(path)

    def _undo_in(self, duration_s: float, undo: Callable[[], object]) -> None:
        self._later.append(_Later(clock.now_s() + duration_s, undo))

    def _claim(self, one: PlannedFault) -> bool:
        return claim_marker(marker_of(self.run_dir, one.fault_id))

    def _record(self, one: PlannedFault, target: str, **facts: Any) -> None:
        """Record a fault before it is injected, so that its consequences follow it in the journal."""
        sight = self.sight
        sight.look_at_boards()
        if (journal := self._journals.get(sight.job)) is None:
            journal = Journal(self.run_dir, run_id=sight.run_id, job=sight.job, node=PROC, proc=PROC)
            self._journals[sight.job] = journal
        log.info("%s: %s", one.fault.label, target)
        journal.write(
            EventKind.FAULT_SIMULATED,
            cycle=sight.cycle,
            iteration=sight.iteration,
            fault=one.fault.label,
            fault_kind=one.fault.kind,
            target=target,
            fault_id=one.fault_id,
            **facts,
        )


def _await_end(processes: Iterable[psutil.Process]) -> None:
    """Wait until the processes have ended, without reaping them: their exit codes belong to their parents."""
    deadline_s = clock.now_s() + _GONE_S
    while any(_runs(process) for process in processes) and clock.now_s() < deadline_s:
        time.sleep(0.02)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
