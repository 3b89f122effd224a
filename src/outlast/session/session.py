"""One worker's session: it restores, heartbeats, saves, stops in time, and stays out of the way.

Leaving has two ways. An orderly end (``steps()`` is through, or a notice was agreed upon) waits until what
was saved is committed. Anything else (an exception, ``sys.exit`` in the body) waits for nobody: the groups'
connections are cut, so that a crashed rank is gone at once and its peers learn of it, even while one of them
hangs.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from outlast.chaos.simulated import arm_configured
from outlast.config import Config, FaultToleranceConfig
from outlast.env import WorkerEnv
from outlast.errors import ExitReason, OutlastError, Untrusted
from outlast.incidents import EventKind
from outlast.monitor.rank_monitor import RankMonitor, SectionTimer
from outlast.policy.slots import OWN_VERDICTS
from outlast.runtime.consensus import Consensus
from outlast.runtime.device import training_device
from outlast.runtime.group import Group, connect_world, settle
from outlast.runtime.journal import Journal
from outlast.session.attempts import Attempt, Attempts
from outlast.session.beginning import restore
from outlast.session.departure import Departure
from outlast.session.enclosure import Enclosure
from outlast.session.place import as_initialised, is_initialised, say_what_is_off
from outlast.session.pulse import Pulse
from outlast.session.replicas import ReplicaWatch
from outlast.session.resuming import Resuming
from outlast.session.rhythm import Due
from outlast.session.rounds import Rounds
from outlast.session.saves import Saves

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from outlast.chaos import ArmedFaults
    from outlast.checkpoint import SaveHandle

__all__ = ["Session"]

log = logging.getLogger(__name__)


class Session:
    """What a training script needs of this package; made by :func:`outlast.init`.

    Args:
        config: The settings.
        place: This worker's place.
        fault_tolerance: The timeouts in use.

    Collective: all ranks of the world make it.
    Thread: that of the training loop; :meth:`section` from any thread that trains.
    """

    def __init__(self, config: Config, place: WorkerEnv, fault_tolerance: FaultToleranceConfig) -> None:
        self.config = config
        self.fault_tolerance = fault_tolerance
        self.run_dir = place.run_dir or config.run_dir
        """Where this run keeps its journal and stacks; ``None`` = nowhere."""
        self._place = place = dataclasses.replace(as_initialised(place), run_dir=self.run_dir)
        self._iteration = 0
        self._in_steps = False
        self._stepped = False
        self._closed = False
        self._world: Group | None = None
        self._saves: Saves | None = None
        self._replicas: ReplicaWatch | None = None
        self._consensus: Consensus | None = None
        self._enclosure = Enclosure(config)
        with self._enclosure.undivided():
            self._open()
        with self._section("setup"):
            if place.world_size > 1 and not is_initialised():
                self._world = connect_world(place)
            self._consensus = Consensus(["stop", "save"], world_size=place.world_size)
            if config.checkpoint is not None:
                self._saves = Saves(
                    config.checkpoint, place, self._journal, self._monitor, partial(self._section, "checkpointing")
                )
        self._faults = faults = arm_configured(config, fault_tolerance, place, self._journal)
        if faults is not None:
            for name in faults.sections:
                self._monitor.call_in(name, partial(self._strike_section, faults, name))
        self._attempts = Attempts(
            config.rerun_state_machine,
            place,
            self._journal,
            consensus=self._consensus,
            wishes=self._wishes,
            faults=faults,
        )
        if self._enclosure.is_restart:
            self._attempts.replay = None  # it was for the cycle's begin
        self._rounds = Rounds(self._consensus, self._attempts, self._wishes)
        self._state: Mapping[str, Any] = {}
        self._journal.write(
            EventKind.SESSION_STARTED,
            rank=place.global_rank,
            world_size=place.world_size,
            launcher=place.launcher,
        )
        if place.global_rank == 0:
            say_what_is_off(
                config.checkpoint, place, self._monitor.config, watches_signals=self._departure.watches_signals
            )

    def _open(self) -> None:
        """Take what no peer takes part in, and have it given back."""
        self._journal = Journal(
            self.run_dir,
            run_id=self._place.run_id,
            job=self._place.job,
            node=self._place.node,
            proc=f"rank-{self._place.global_rank}",
        )
        self._journal.cycle = self._place.cycle
        self._monitor = RankMonitor(self._place, self.fault_tolerance, self.run_dir)
        self._departure = Departure(
            journal=self._journal,
            rank=self._place.global_rank,
            stop_requested=self._monitor.stop_requested,
            write_end=self._write_end,
        )
        self._pulse = Pulse(self._enclosure, self._monitor, self._journal, self._place.global_rank)
        self._resuming: Resuming | None = None
        if self._enclosure.call is not None:
            self._resuming = Resuming(self._enclosure.call, self._place, self._journal)
            self._enclosure.call.on_leave(self._abandon)
        atexit.register(self._at_exit)

    @property
    def iteration(self) -> int:
        """Number of optimizer steps done, over all cycles and jobs of the run."""
        return self._iteration

    @property
    def global_rank(self) -> int:
        """This worker's rank in the world."""
        return self._place.global_rank

    @property
    def local_rank(self) -> int:
        """This worker's rank on its node."""
        return self._place.local_rank

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self._place.world_size

    @property
    def device(self) -> torch.device:
        """The device that this worker trains on: its GPU, else the CPU."""
        return training_device(self._place.local_rank)

    def section(self, name: str) -> SectionTimer:
        """Return a context manager, also usable as a decorator, that names what the code within does.

        A section has a timeout of its own (``rank_section_timeouts``); sections nest.
        """
        return self._monitor.section(name)

    def steps(
        self,
        state: Mapping[str, Any],
        *,
        total: int,
        replicas: dist.ProcessGroup | DeviceMesh | None = None,
    ) -> Iterator[int]:
        """Yield the numbers of the iterations that are still to do; the loop's body does one.

        Before the first, the newest generation that can be trusted is loaded into ``state`` (section ``setup``).
        Around each body the section ``step`` is open. After it the iteration counts as done, and every
        ``save_interval`` iterations the state is saved to all tiers, every ``non_persistent_save_interval`` to the
        near ones (section ``checkpointing``). After the last one the state is saved to all tiers, unless that was
        just done, and the call waits until everything is committed.

        When any rank was told to leave (SIGTERM, or its agent asked it to), all ranks stop after the same
        iteration, commit one generation, and ``SystemExit(75)`` (``ExitReason.PREEMPTED``) is raised here. A
        second signal, a second or more after the first, gives up that save. What was not saved is not claimed
        to be: then, and without a checkpoint directory, the exit code is 128 plus the signal's number.
        ``SystemExit(17)`` (``ExitReason.FAILED_VALIDATION``) says that every generation led to invalid results.
        Before the first iteration a notice waits for that one's end; after the last, SIGTERM ends the process.

        ``break`` leaves the loop without a save; an exception in the body passes through untouched.

        Args:
            state: Name to what is saved: anything with ``state_dict()`` and ``load_state_dict()`` (a module
                wrapped in DDP counts as the module within), tensors, and plain values, which are replaced in
                the mapping.
            total: Number of iterations at which the run is complete.
            replicas: Ranks that hold the same tensors, for ``replica_digest``: a process group, or a mesh such as
                ``mesh["dp"]``; ``None`` = all ranks. DTensors say that themselves.

        Yields:
            The iteration's number from 0: how many optimizer steps were done before it.

        Raises:
            CheckpointError: Saving failed too often in a row.
            PeerLost: A peer left or did not reach the step's end in time.
            SystemExit: The run was told to leave, there is no generation left to trust, or replicas differ.

        Collective: all ranks, with the same ``total``.
        Blocks: at the end of each step until all ranks have begun it.
        """
        if self._stepped:
            raise OutlastError("steps() was called before; call it once for each outlast.init()")
        self._stepped = self._in_steps = True
        self._state = state
        self._attempts.watch(state)
        with self._section("setup"):
            self._restore(state, replicas)
            if self.config.replica_digest is not None and self.config.replica_digest.interval:
                self._replicas = ReplicaWatch(self.config.replica_digest, state, replicas, self._place, self._journal)
        try:
            while self._iteration < total:
                if self._faults is not None:
                    self._faults.before_step(self._iteration, state, has_durable=self._has_durable())
                self._pulse.begin_step()
                self._rounds.begin(self._iteration)
                yield self._iteration
                agreed = self._end_step()
                if agreed["stop"] and self._iteration < total:
                    self._leave(state, agreed["stop"])
                self._between_steps(state, agreed["save"], is_last=self._iteration >= total)
        except GeneratorExit:
            if self._saves is not None:
                self._saves.finish_staging()  # the script may now change what is being copied
            self._monitor.end_all_sections()
            self._departure.close()
            self._in_steps = False
            raise
        self._finish(state)
        self._in_steps = False

    def attempts(self, batches: Any = None) -> Iterator[Attempt]:
        """Yield the runs of a step: one, and another one if a result was invalid; in the body of :meth:`steps`.

        The body of the loop computes the gradients and validates what it likes; the optimizer's step comes after it.
        If any rank's result is rejected, all ranks put back random numbers, batches, gradients and the buffers that a
        module changes as it computes, and run the body again. Is the result another one then, and valid, training
        goes on with it. Is it the same, the state is saved for diagnosis and all ranks leave with
        ``SystemExit(16)``: the launcher has the step replayed elsewhere. ``rerun_state_machine`` says what is invalid.

        Gradients are put back to what they were only as far as they were ``None`` or zero: accumulate within the body.

        Args:
            batches: What :meth:`Attempt.next_batch` draws from: an iterator, or a list of several. It is drawn from in
                the same order by all steps; ``None`` = the body gets its batches itself, the same for the same step.

        Yields:
            The run of the step.

        Raises:
            OutlastError: It is called outside of :meth:`steps`.
            PeerLost: A peer left, or did not end its run in time.
            SystemExit: An invalid result came again (16), or was judged (17).

        Collective: all ranks, in the same steps; none leaves the loop early.
        Blocks: after each run until all ranks have ended theirs.
        """
        if not self._in_steps:
            raise OutlastError("attempts() belongs into the body of steps(): for iteration in run.steps(...): ...")
        yield from self._attempts.run(self._iteration, batches)
        decision = self._attempts.decision
        if decision.exit_code is not None:
            self._leave_invalid(decision.exit_code, must_save=decision.must_save)

    def roll_back(self) -> NoReturn:
        """Leave, with all ranks, so that the launcher starts them again from the newest generation that is trusted.

        For results that a script finds bad itself, such as ``NonFiniteDetector(on_rollback=...)``. Bounded: without
        progress in between it is granted ``max_same_device_reruns`` times, then the run stops.

        Raises:
            SystemExit: Always, with code 16.

        Collective: all ranks, in the same step.
        """
        log.error("iteration %d: rolling back to the newest generation", self._iteration)
        self._exit(ExitReason.RESUME_TO_DISAMBIGUATE)

    def save(self, state: Mapping[str, Any], *, suspect: bool = False) -> SaveHandle:
        """Save ``state`` now to all tiers as that of :attr:`iteration`, and return once it is copied.

        Call it before the body's optimizer step, or after the loop: what is saved must be what that many
        steps made.

        Args:
            state: As for :meth:`steps`.
            suspect: The state is of interest for a diagnosis only: it goes to ``suspect/``, and is never loaded.

        Returns:
            A handle to wait for the commit with.

        Raises:
            ConfigError: There is no checkpoint directory.
            CheckpointError: Saving failed too often in a row.

        Collective: all ranks, at the same iteration.
        Blocks: while the state is copied; with ``async_save`` off, until it is committed.
        """
        if self._saves is None:
            raise OutlastError("there is nowhere to save to; give outlast.init() a checkpoint.directory")
        return self._saves.save(state, self._attempts, self._iteration, suspect=suspect)

    def close(self) -> None:
        """End the session in order: wait for what was saved, then let go of everything. Idempotent.

        Collective: all ranks, if something was saved that is not committed.
        Blocks: until what was saved is committed, up to ``checkpoint.save_timeout``.
        Thread: the main thread.
        """
        if self._closed:
            return
        if self._saves is not None:
            self._saves.wait()
            self._saves.close()
        self._let_go()
        if self._world is not None and is_initialised():
            import torch.distributed as dist

            dist.destroy_process_group()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code in OWN_VERDICTS:
                self._monitor.set_leaving(error.code)
            self._let_go()

    def _restore(self, state: Mapping[str, Any], replicas: dist.ProcessGroup | DeviceMesh | None) -> None:
        try:
            self._iteration = restore(state, self._attempts, self._saves, self._resuming, replicas)
        except Untrusted as error:
            if self._place.untrusted is None:
                raise
            log.error("no generation is left to trust: %s", error)
            self._exit(ExitReason.FAILED_VALIDATION)
        if self._iteration:
            self._monitor.set_iteration(self._iteration)

    def _section(self, name: str) -> AbstractContextManager[None]:
        return self._enclosure.section(self._monitor, name)

    def _wishes(self) -> dict[str, int]:
        """Return what this rank asks all ranks for: to leave on a signal, and to save after the step."""
        save = self._saves.wish(self._iteration) if self._saves is not None else 0
        return {"stop": self._departure.asked(), "save": save}

    def _end_step(self) -> dict[str, int]:
        """Count the step; return what all ranks agreed on: the signal on which they leave now, what they save."""
        if self._resuming is not None:
            self._resuming.note(self._iteration + 1)
        agreed = self._rounds.finish()
        self._iteration += 1
        took_s = self._pulse.end_step(self._iteration)
        if self._saves is not None:
            self._saves.note_step(took_s)
        return agreed

    def _between_steps(self, state: Mapping[str, Any], agreed: int, *, is_last: bool) -> None:
        due = self._saves.due(self._iteration, agreed) if self._saves is not None else Due.NOTHING
        self._check_replicas(saves=due != Due.NOTHING)
        if due == Due.ALL:
            self.save(state)
        elif due == Due.NEAR and not is_last and self._saves is not None:  # the end saves to all tiers
            self._saves.save(state, self._attempts, self._iteration, near=True)
        if self._faults is not None:
            self._faults.after_step(self._iteration, state, has_durable=self._has_durable())

    def _strike_section(self, faults: ArmedFaults, name: str) -> None:
        faults.enter_section(name, self._iteration)

    def _has_durable(self) -> bool:
        """Say whether there is something to come back from, or nothing is saved at all."""
        return self._saves is None or self._saves.has_durable

    def _finish(self, state: Mapping[str, Any]) -> None:
        self._attempts.finish()
        if self._saves is not None:
            if not self._saves.is_saved(self._iteration):
                self._check_replicas(saves=True)
                self.save(state)
            self._saves.wait()
        self._departure.close()
        self._monitor.finish()
        self._write_end(ExitReason.FINISHED)

    def _leave(self, state: Mapping[str, Any], number: int) -> None:
        """Save if there is where to, and raise SystemExit; ``number`` is the signal that was agreed upon."""
        self._attempts.finish()
        self._check_replicas(saves=self._saves is not None)
        log.info("stopping after iteration %d, on all ranks", self._iteration)
        code = 128 + number
        if self._saves is None:
            log.warning("nothing is saved: there is no checkpoint.directory; exit code %d", code)
        elif self._saves.wait_unless_told(self.save(state), self._departure):
            code = int(ExitReason.PREEMPTED)
            log.info("iteration %d is saved; exit code %d", self._iteration, code)
        else:
            log.warning("told to leave again: the save of iteration %d is given up", self._iteration)
        self._exit(code)

    def _check_replicas(self, *, saves: bool) -> None:
        """Compare the replicas if it is time to; if they differ, leave with all ranks, and save nothing."""
        if self._replicas is None:
            return
        with self._section("checkpointing"):
            code = self._replicas.verdict(self._iteration, saves=saves)
        if code is not None:
            self._exit(code)

    def _leave_invalid(self, code: int, *, must_save: bool) -> NoReturn:
        """Save the state of before the step for diagnosis, if there is where to, and leave."""
        self._monitor.end_section("step")
        if must_save and self._saves is not None:
            try:
                self._saves.save_suspect(self._state, self._attempts, self._iteration)
                log.error("iteration %d is saved for diagnosis; exit code %d", self._iteration, code)
            except OutlastError as error:
                log.error("the state could not be saved for diagnosis: %s", error)
        self._exit(code)

    def _exit(self, code: int) -> NoReturn:
        self._monitor.set_leaving(code)
        self._monitor.finish()
        self._write_end(code)
        # torchrun ends the others when the first rank has left: their exit codes must still be this one.
        self._let_go(keep_notices=True)
        raise SystemExit(code)

    def _write_end(self, code: int) -> None:
        self._journal.write(
            EventKind.SESSION_ENDED, rank=self.global_rank, iteration=self._iteration, exit_code=int(code)
        )

    def _at_exit(self) -> None:
        if self._saves is not None and not self._closed and self._in_steps:
            log.warning("left in the middle of a step; what was not committed by now is lost")
        self._let_go()

    def _abandon(self) -> None:
        """Give up what is under way, since the function around this session was left. Blocks: some milliseconds."""
        if self._saves is not None:
            self._saves.close()
        if hasattr(self, "_attempts"):  # else the call was left while the session was being made
            self._attempts.close()
        self._let_go()
        if self._resuming is not None:
            self._resuming.release()

    def _let_go(self, *, keep_notices: bool = False) -> None:
        """Close everything that closes without waiting for a peer.

        Where a restart was ordered it is the end of the call that does it: see :meth:`_abandon`.
        """
        with self._enclosure.undivided():
            self._close_all(keep_notices=keep_notices)

    def _close_all(self, *, keep_notices: bool) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        if self._replicas is not None:
            self._replicas.close()
        if self._consensus is not None:
            self._consensus.close()
        if self._world is not None:
            self._world.cut()
            if self._enclosure.call is None:  # who called us waits for more than the world
                settle()
        if not keep_notices:
            self._departure.close()
        self._monitor.close()
        self._journal.close()
