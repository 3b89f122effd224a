"""The injector: strikes a run from outside, beside its agents, and says when faults with ``at_s`` are due.

It knows the run by its run directory alone. What costs a restart strikes only while all ranks train, and, so that the
budgets of restarts are not spent by the plan itself, once the newest cycle has committed something, or has had
``PATIENCE_S`` for it. All agents that are to be struck run on this machine, under this user.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from outlast import clock
from outlast.chaos.copies import damage_copy, find_copies, lose_folder, node_folder
from outlast.chaos.netns import NodeNetwork
from outlast.chaos.plan import (
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
from outlast.incidents import EventKind
from outlast.journal import JournalTail
from outlast.runtime.injection import DiskTrouble, Injection
from outlast.runtime.journal import Journal

log = logging.getLogger(__name__)
PATIENCE_S = 15.0
"""How long a cycle may train without a commit before it is struck all the same."""
PROC = "chaos"
"""Its name in the journal."""
SURVIVED_S = 20.0
"""A cycle that trains so long after it was struck is not going to end of it."""
_SETTLE_S = 10.0
"""How long a fault that a rank is told to cause may take until it is on record."""
_GONE_S = 5.0
_SIGNALS = {
    FaultKind.KILL_AGENT: signal.SIGKILL,
    FaultKind.KILL_COORDINATOR: signal.SIGKILL,
    FaultKind.LOSE_NODE: signal.SIGKILL,
    FaultKind.STOP_AGENT: signal.SIGSTOP,
    FaultKind.STOP_COORDINATOR: signal.SIGSTOP,
}


@dataclass(frozen=True, slots=True)
class _Later:
    """What is undone later."""

    at_s: float
    undo: Callable[[], object]


def disk_injection(run_dir: str | os.PathLike[str]) -> Injection:
    """Return what the agents are to be started with, so that their disks can be full or slow."""
    return Injection(point="checkpoint.file.made", do="disk", path=os.fspath(_troubles_path(run_dir)))


def clear_leftovers(run_dir: str | os.PathLike[str]) -> None:
    """Remove what an injector that was killed has left in a run directory and would strike on."""
    _troubles_path(run_dir).unlink(missing_ok=True)


def _troubles_path(run_dir: str | os.PathLike[str]) -> Path:
    return Path(run_dir).absolute() / "faults" / "disks.json"


class Injector:
    """Strike a run with those faults of a plan that come from outside, and release those that wait for ``at_s``.

    Args:
        plan: The faults.
        run_dir: The run directory; may not exist yet.
        network: Where the nodes are hosts of their own.
        host_of: A node's host there.

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
        self.killed: list[str] = []
        """Nodes whose agent was killed, in that order; one may occur more than once."""
        clear_leftovers(run_dir)
        self._tail = JournalTail(self.run_dir)
        self._pending = [
            one
            for one in planned_faults(plan)
            if (FaultKind(one.fault.kind).is_outside or one.fault.at_s is not None)
            and not marker_of(run_dir, one.fault_id).exists()
        ]
        self._pending.sort(key=lambda one: one.fault.at_s or 0.0)
        self._began_s: float | None = None
        self._trains_since_s = 0.0
        self._cycle: tuple[str, int] = ("", -1)
        self._struck_cycle: tuple[str, int] = ("", -1)
        """The newest one that was struck by something that costs a restart."""
        self._struck_s = 0.0
        self._awaited: dict[str, float] = {}
        """Faults that a rank was told to cause, and until when they are waited for."""
        self._later: list[_Later] = []
        self._stopped: dict[str, int] = {}
        self._troubles: list[DiskTrouble] = []
        self._journals: dict[str, Journal] = {}

    @property
    def num_pending(self) -> int:
        """Faults that have not struck, and were not released."""
        return len(self._pending)

    @property
    def next_at_s(self) -> float | None:
        """When the next one is due, in seconds from now; ``None``: none is left, or that is not known."""
        if not self._pending or self._began_s is None:
            return None
        return (self._pending[0].fault.at_s or 0.0) - (clock.now_s() - self._began_s)

    def look(self) -> Sight:
        """Learn what has happened, and undo what is to end now."""
        for event in self._tail.read_new():
            self.sight.take(event)
            if event.kind == EventKind.FAULT_SIMULATED:
                self._awaited.pop(str(event.data.get("fault_id")), None)
        now_s = clock.now_s()
        for later in [one for one in self._later if one.at_s <= now_s]:
            self._later.remove(later)
            later.undo()
        cycle = (self.sight.job, self.sight.cycle)
        if self.sight.is_training and cycle != self._cycle:
            self._cycle, self._trains_since_s = cycle, now_s
            self._began_s = now_s if self._began_s is None else self._began_s
        self._awaited = {name: until_s for name, until_s in self._awaited.items() if until_s > now_s}
        return self.sight

    def strike(self) -> PlannedFault | None:
        """Cause the first fault that is due and can be caused now; return it, ``None``: nothing was done."""
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
            if (one.fault.iteration or 0) <= self.sight.iteration and self._may(one.fault) and self._cause(one):
                self._pending.remove(one)
                return one
        return None

    def close(self) -> None:
        """Undo what lasts, and end the journal. Idempotent."""
        while self._later:
            self._later.pop().undo()
        clear_leftovers(self.run_dir)
        for journal in self._journals.values():
            journal.close()

    def _may(self, fault: Fault) -> bool:
        """Return whether it does not befall what another fault has just struck."""
        kind = FaultKind(fault.kind)
        if kind.is_of_copies or kind in (FaultKind.DISK_FULL, FaultKind.SLOW_DISK, FaultKind.DELAY, FaultKind.LOSS):
            return True
        is_struck = self._cycle == self._struck_cycle and clock.now_s() < self._struck_s + SURVIVED_S
        if is_struck or self._awaited:
            return False
        is_progress = bool(self.sight.committed_now) or clock.now_s() > self._trains_since_s + PATIENCE_S
        return is_progress or kind.is_gentle

    def _cause(self, one: PlannedFault) -> bool:
        kind = FaultKind(one.fault.kind)
        if not kind.is_outside:
            return self._release(one)
        if kind.is_of_copies:
            return self._damage(one)
        if kind.is_of_disks:
            return self._trouble(one)
        if kind.is_of_networks:
            return self._trouble_network(one)
        return self._signal(one)

    def _release(self, one: PlannedFault) -> bool:
        claim_marker(marker_of(self.run_dir, one.fault_id, due=True))
        self._awaited[one.fault_id] = clock.now_s() + _SETTLE_S
        if not FaultKind(one.fault.kind).is_gentle:
            self._struck_cycle, self._struck_s = self._cycle, clock.now_s()
        return True

    def _signal(self, one: PlannedFault) -> bool:
        kind = FaultKind(one.fault.kind)
        carrying = set(self.sight.ranks.values())
        nodes = [node for node in self.sight.living() if node in carrying and node not in self._stopped]
        if kind in (FaultKind.KILL_COORDINATOR, FaultKind.STOP_COORDINATOR):
            nodes = [node for node in self.sight.living() if node == self.sight.coordinator]
        elif one.fault.node is not None:
            nodes = [node for node in self.sight.living() if node == one.fault.node]
        if not nodes:
            return False
        node = nodes[one.draw(len(nodes), "node")]
        process = self.sight.agents[node]
        if not self._claim(one):
            return True
        self._struck_cycle, self._struck_s = self._cycle, clock.now_s()
        number = _SIGNALS[kind]
        facts: dict[str, Any] = {"node": node, "pid": process.pid}
        self._note(one, f"agent of {node} (pid {process.pid})", done=number.name, **facts)
        if number == signal.SIGSTOP:
            os.kill(process.pid, number)
            self._stopped[node] = process.pid
            if one.fault.duration_s is not None:
                self._undo_in(one.fault.duration_s, lambda: self._continue(node, process.pid))
            return True
        self.killed.append(node)
        family = _family(process.pid)
        os.kill(process.pid, number)
        if kind == FaultKind.LOSE_NODE:
            _await_end(family)
            if self.sight.local_directory is not None:
                lose_folder(node_folder(self.sight.local_directory, node))
        return True

    def _continue(self, node: str, pid: int) -> None:
        self._stopped.pop(node, None)
        process = self.sight.agents.get(node)
        if process is not None and process.pid == pid and node in self.sight.living():
            os.kill(pid, signal.SIGCONT)

    def _damage(self, one: PlannedFault) -> bool:
        fault = one.fault
        assert fault.tier is not None
        copies = [
            copy
            for copy in find_copies(self.sight, fault.tier, fault.generation)
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
        self._note(one, copy.describe(), done=done, tier=copy.tier, generation=copy.generation, node=copy.node)
        return True

    def _trouble(self, one: PlannedFault) -> bool:
        fault = one.fault
        assert fault.duration_s is not None
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
        if not self._claim(one):
            return True
        trouble = DiskTrouble(folder=folder, delay_s=fault.delay_s or 0.0)
        self._note(one, folder, done=f"for {fault.duration_s:g} s", tier=fault.tier, node=node)
        self._set_troubles([*self._troubles, trouble])
        self._undo_in(
            fault.duration_s, lambda: self._set_troubles([other for other in self._troubles if other is not trouble])
        )
        return True

    def _trouble_network(self, one: PlannedFault) -> bool:
        fault, network = one.fault, self._network
        assert fault.duration_s is not None
        carrying = set(self.sight.ranks.values())
        nodes = [node for node in self.sight.living() if node in ({fault.node} if fault.node else carrying)]
        hosts = [(node, host) for node in nodes if (host := self._host_of(node)) is not None]
        if network is None or not hosts:
            return False
        node, host = hosts[one.draw(len(hosts), "node")]
        if not self._claim(one):
            return True
        self._note(one, f"network of {node}", done=f"for {fault.duration_s:g} s", node=node)
        if fault.kind == FaultKind.PARTITION:
            self._struck_cycle, self._struck_s = self._cycle, clock.now_s()
            network.cut(host)
            self._undo_in(fault.duration_s, lambda: network.join(host))
        else:
            network.impair(host, delay_s=fault.delay_s or 0.0, share=fault.share or 0.0)
            self._undo_in(fault.duration_s, lambda: network.repair(host))
        return True

    def _set_troubles(self, troubles: Collection[DiskTrouble]) -> None:
        self._troubles = list(troubles)
        path = _troubles_path(self.run_dir)
        if not troubles:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(self._troubles))
        new.rename(path)

    def _undo_in(self, duration_s: float, undo: Callable[[], object]) -> None:
        self._later.append(_Later(clock.now_s() + duration_s, undo))

    def _claim(self, one: PlannedFault) -> bool:
        return claim_marker(marker_of(self.run_dir, one.fault_id))

    def _note(self, one: PlannedFault, target: str, **facts: Any) -> None:
        """Write that a fault strikes, before it does: what follows from it comes later in the journal."""
        sight = self.sight
        sight.look_at_boards()
        if (journal := self._journals.get(sight.job)) is None:
            journal = Journal(self.run_dir, run_id=sight.run_id, job=sight.job, node=PROC, proc=PROC)
            self._journals[sight.job] = journal
        log.info("%s: %s", one.fault.label, target)
        label, kind = one.fault.label, one.fault.kind
        journal.write(
            EventKind.FAULT_SIMULATED,
            cycle=sight.cycle,
            iteration=sight.iteration,
            fault=label,
            fault_kind=kind,
            target=target,
            fault_id=one.fault_id,
            **facts,
        )


def _await_end(processes: Collection[psutil.Process]) -> None:
    """Wait until none of some processes runs, without reaping any: their exit codes belong to whoever started them."""
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
