"""What a session works with: opened in order, and let go all at once, whatever ends it."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import os
import re
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from outlast import __version__
from outlast.chaos.armed import arm_configured
from outlast.config import Config, FaultToleranceConfig
from outlast.env import WorkerEnv
from outlast.incidents import EventKind
from outlast.inprocess.call import current_handle
from outlast.monitor.rank_monitor import RankMonitor
from outlast.runtime.consensus import Consensus
from outlast.runtime.group import Group, connect_world, current_place, is_initialised, settle
from outlast.runtime.journal import Journal
from outlast.runtime.processes import describe_self
from outlast.session.attempts import Attempts
from outlast.session.departure import Departure
from outlast.session.enclosure import Enclosure
from outlast.session.place import describe_protection, say_what_is_off
from outlast.session.pulse import Pulse
from outlast.session.resuming import Resuming
from outlast.session.saves import Saves
from outlast.session.slow_ranks import SlowRanks

if TYPE_CHECKING:
    from outlast.chaos import ArmedFaults
    from outlast.session.liveness import Liveness
    from outlast.session.replicas import ReplicaWatch

__all__ = ["Equipment"]

log = logging.getLogger(__name__)


class Equipment:
    """Open what a session works with, and let it go.

    Args:
        config: The settings.
        place: This worker's place.
        fault_tolerance: The script's own timeouts and the like.

    Collective: all ranks of the world make it.
    Thread: the main thread, or that of the training loop.
    """

    def __init__(self, config: Config, place: WorkerEnv, fault_tolerance: FaultToleranceConfig) -> None:
        self.iteration = 0
        """Number of optimizer steps done."""
        self.in_steps = False
        """Whether the session's loop is under way."""
        self.place = _as_configured(current_place(place), config)
        self.saves: Saves | None = None
        self.replicas: ReplicaWatch | None = None
        self.slow_ranks: SlowRanks | None = None
        self.liveness: Liveness | None = None
        self._world: Group | None = None
        self._is_closed = False
        self._enclosure = Enclosure(config)
        with self._enclosure.undivided():
            self._open(config, fault_tolerance)
        with self.section("setup"):
            self._meet(config)
        self.faults = arm_configured(config, self.monitor.config, self.place, self.journal)
        if self.faults is not None:
            for name in self.faults.sections:
                self.monitor.call_in(name, partial(self._strike, self.faults, name))
        self.attempts = Attempts(
            config.rerun_state_machine,
            self.place,
            self.journal,
            consensus=self.consensus,
            wishes=self.wishes,
            faults=self.faults,
        )
        if self._enclosure.is_restart:
            self.attempts.replay = None  # it was for the cycle's begin
        self._say_hello(config)

    def section(self, name: str) -> AbstractContextManager[None]:
        """Return a section of the session's own, in which restarts in process have no deadlines."""
        section = self._enclosure.section(self.monitor, name)
        return section if self.slow_ranks is None else self.slow_ranks.left_out(section)

    def wishes(self) -> dict[str, int]:
        """Return what this rank asks all ranks for: to leave on a notice, to save after the step, to be compared, to
        leave because nothing can be saved any more."""
        save = self.saves.wish(self.iteration) if self.saves is not None else 0
        report = self.slow_ranks.wish() if self.slow_ranks is not None else 0
        is_refused = self.saves is not None and self.saves.refusal is not None
        return {"stop": self.departure.asked(), "save": save, "report": report, "refused": int(is_refused)}

    def write_end(self, code: int) -> None:
        """Write to the journal with which exit code the session ends."""
        self.journal.write(
            EventKind.SESSION_ENDED, rank=self.place.global_rank, iteration=self.iteration, exit_code=int(code)
        )

    def close(self) -> None:
        """Wait for what was saved, then let go of everything. Idempotent.

        Collective: all ranks, if something was saved that is not committed.
        Blocks: until what was saved is committed, up to ``checkpoint.save_timeout``.
        """
        if self._is_closed:
            return
        if self.saves is not None:
            self.saves.wait()
            self.saves.close()
        self.let_go()
        if self._world is not None and is_initialised():
            import torch.distributed as dist

            if self._enclosure.call is not None:
                settle()  # a thread that lets go of tensors needs the interpreter's lock, which is held from here on
            dist.destroy_process_group()

    def let_go(self, *, keep_notices: bool = False) -> None:
        """Close everything that closes without waiting for a peer. Idempotent.

        Where a restart was ordered it is the end of the call that does it: see :meth:`_abandon`.
        """
        with self._enclosure.undivided():
            self._let_go(keep_notices=keep_notices)

    # -- details -----------------------------------------------------------------------------------------------

    def _open(self, config: Config, fault_tolerance: FaultToleranceConfig) -> None:
        """Take what no peer takes part in, and have it given back."""
        place = self.place
        self.journal = Journal(
            place.run_dir,
            run_id=place.run_id,
            job=place.job,
            node=place.node,
            proc=f"rank-{place.global_rank}",
        )
        self.journal.cycle = place.cycle
        self.monitor = RankMonitor(place, fault_tolerance, place.run_dir)
        self.monitor.promise_heartbeats(True)
        self.departure = Departure(
            config.preemption,
            place=place,
            journal=self.journal,
            iteration=lambda: self.iteration,
            kept=lambda: None if self.saves is None else self.saves.durable_iteration,
            write_end=self.write_end,
            grace_s=self.monitor.config.shutdown_grace if place.board is not None else None,
        )
        self.pulse = Pulse(self._enclosure, self.monitor, self.journal, place.global_rank)
        self.resuming: Resuming | None = None
        if self._enclosure.call is not None:
            self.resuming = Resuming(self._enclosure.call, place, self.journal)
            self._enclosure.call.on_leave(self._abandon)
        atexit.register(self._at_exit)

    def _meet(self, config: Config) -> None:
        """Open what all ranks open together."""
        if self.place.world_size > 1 and not is_initialised():
            self._world = connect_world(self.place)
        self.consensus = Consensus(["stop", "save", "report", "refused"], world_size=self.place.world_size)
        if config.straggler_detection is not None and config.straggler_detection.enabled:
            self.slow_ranks = SlowRanks(config.straggler_detection, self.place, self.journal, self.consensus)
        if config.checkpoint is not None:
            self.saves = Saves(
                config.checkpoint, self.place, self.journal, self.monitor, partial(self.section, "checkpointing")
            )
        if config.health is not None and config.health.process_group_interval and self.place.world_size > 1:
            from outlast.session.liveness import Liveness

            self.liveness = Liveness(config.health, self.place, self.journal)

    def _say_hello(self, config: Config) -> None:
        place = self.place
        saves = config.checkpoint
        self.journal.write(
            EventKind.SESSION_STARTED,
            rank=place.global_rank,
            world_size=place.world_size,
            launcher=place.launcher,
            directory=None if saves is None or saves.directory is None else _without_user(str(saves.directory)),
            local_directory=None if saves is None or saves.local_directory is None else str(saves.local_directory),
            max_no_progress_cycles=self.monitor.config.max_no_progress_cycles,
            version=__version__,
            **describe_self(),
        )
        watches_signals = self.departure.watches_signals
        self.monitor.tell_protection(describe_protection(config, place, watches_signals=watches_signals))
        if place.is_first and not self._enclosure.is_restart:
            say_what_is_off(
                config,
                place,
                self.monitor.config,
                watches_signals=watches_signals,
                is_wrapped=self._enclosure.call is not None,
            )

    def _strike(self, faults: ArmedFaults, name: str) -> None:
        faults.enter_section(name, self.iteration)

    def _at_exit(self) -> None:
        if self.saves is not None and not self._is_closed and self.in_steps:
            log.warning("the session ended in the middle of a step; saves that were not committed are lost")
        self.let_go()

    def _abandon(self) -> None:
        """Give up what is under way, since the function around the session was left. Blocks: some milliseconds."""
        if self.saves is not None:
            self.saves.close()
        if hasattr(self, "attempts"):  # else the call was left while the session was being made
            self.attempts.close()
        self.let_go()
        if self.resuming is not None:
            self.resuming.release()

    def _let_go(self, *, keep_notices: bool) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._at_exit)
        if self.replicas is not None:
            self.replicas.close()
        if self.slow_ranks is not None:
            self.slow_ranks.close()
        if self.liveness is not None:
            self.liveness.close()
        if hasattr(self, "consensus"):
            self.consensus.close()
        if self._world is not None:
            self._world.cut()
            if self._enclosure.call is None:  # who called us waits for more than the world
                settle()
        if not keep_notices:
            self.departure.close()
        self.monitor.close()
        self.journal.close()


def _without_user(url: str) -> str:
    """Return a URL without the name and password that it may hold: others read the journal."""
    return re.sub(r"://[^/@]*@", "://", url)


def _as_configured(place: WorkerEnv, config: Config) -> WorkerEnv:
    """Return the place with what the config and the call around the session say of it."""
    call = current_handle()
    changed = dataclasses.replace(place, call=call.iteration if call is not None else 0)
    if place.run_dir is not None or config.run_dir is None:
        return changed
    name = f"directory {os.path.abspath(config.run_dir)}"
    return dataclasses.replace(changed, run_dir=config.run_dir, names=(*place.names, name))
