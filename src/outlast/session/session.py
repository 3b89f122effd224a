"""One worker's session: it restores, heartbeats, saves, stops in time, and stays out of the way.

Leaving has two ways. An orderly end (``steps()`` is through, or a notice was agreed upon) waits until what
was saved is committed. Anything else (an exception, ``sys.exit`` in the body) waits for nobody: the groups'
connections are cut, so that a crashed rank is gone at once and its peers learn of it, even while one of them
hangs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from outlast.config import Config, FaultToleranceConfig
from outlast.env import WorkerEnv
from outlast.errors import CheckpointError, DeadlineExceeded, ExitReason, OutlastError, PeerLost, Untrusted
from outlast.monitor.rank_monitor import SectionTimer
from outlast.policy.causes import OWN_VERDICTS
from outlast.runtime import postmortem
from outlast.runtime.device import training_device
from outlast.session.attempts import Attempt
from outlast.session.beginning import restore
from outlast.session.equipment import Equipment
from outlast.session.replicas import ReplicaWatch
from outlast.session.rhythm import Due
from outlast.session.rounds import Rounds

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from outlast.checkpoint import SaveHandle

__all__ = ["Session"]

log = logging.getLogger(__name__)


class Session:
    """What a training script needs of this package; made by :func:`outlast.init`.

    Args:
        config: The settings.
        place: This worker's place.
        fault_tolerance: The script's own timeouts and the like; what a launcher was given comes before them.

    Collective: all ranks of the world make it.
    Thread: that of the training loop; :meth:`section` from any thread that trains.
    """

    def __init__(self, config: Config, place: WorkerEnv, fault_tolerance: FaultToleranceConfig) -> None:
        self.config = config
        self._stepped = False
        self._state: Mapping[str, Any] = {}
        self._has = has = Equipment(config, place, fault_tolerance)
        self.run_dir = has.place.run_dir
        """Where this run keeps its journal and stacks; ``None`` = nowhere."""
        self._place, self._monitor = has.place, has.monitor
        self.fault_tolerance = has.monitor.config
        """What is in force."""
        self._departure, self._pulse, self._faults = has.departure, has.pulse, has.faults
        self._attempts, self._saves = has.attempts, has.saves
        self._rounds = Rounds(has.consensus, has.attempts, has.wishes, has.slow_ranks)

    @property
    def iteration(self) -> int:
        """Number of optimizer steps done, over all cycles and jobs of the run."""
        return self._has.iteration

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

        A section has a timeout of its own (``rank_section_timeouts``); sections nest. With ``straggler_detection`` its
        time within a step is compared with that of the other ranks, other than that of ``checkpointing``, ``setup``,
        ``evaluation`` and ``validation``, which are left out.
        """
        section = self._monitor.section(name)
        return section if self._has.slow_ranks is None else self._has.slow_ranks.timed(name, section)

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

        When any rank was told to leave (SIGTERM, or what else ``preemption`` names), all ranks stop after the same
        iteration, commit one generation, and ``SystemExit(75)`` (``ExitReason.PREEMPTED``) is raised here. A
        second signal, a second or more after the first, and the deadline (``shutdown_timeout``) give up that save; the
        exit code is 75 then, too, and a line says which iterations are lost. Without any saved generation to go on
        from the exit code is 128 plus the signal's number.
        ``SystemExit(17)`` (``ExitReason.FAILED_VALIDATION``) says that every generation led to invalid results.
        ``SystemExit(93)`` (``ExitReason.NO_PROGRESS``) says that a checkpoint directory is another run's, and
        nothing can be saved there.
        ``SystemExit(18)`` (``ExitReason.STRAGGLER``) says that a rank is so slow that its node is to be replaced, with
        ``straggler_detection.stop_if_detected``; the state is saved as for a notice.
        Before the first iteration a notice waits for that one's end; after the last, a signal ends the process.

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
            PeerLost: A peer left or did not reach the step's end in time, or does not answer.
            UnhealthyRank: A peer answered that wrongly.
            SystemExit: The run was told to leave, there is no generation left to trust, replicas differ, or a rank is
                slow.

        Collective: all ranks, with the same ``total``.
        Blocks: at the end of each step until all ranks have begun it.
        """
        if self._stepped:
            raise OutlastError("steps() was called before; call it once for each outlast.init()")
        self._stepped = self._has.in_steps = True
        self._state = state
        self._attempts.watch(state)
        with self._has.section("setup"):
            self._restore(state, replicas)
            if self.config.replica_digest is not None and self.config.replica_digest.interval:
                self._has.replicas = ReplicaWatch(
                    self.config.replica_digest, state, replicas, self._place, self._has.journal
                )
            if self._has.slow_ranks is not None:
                self._has.slow_ranks.watch(state)
        try:
            while self._has.iteration < total:
                if self._faults is not None:
                    self._faults.before_step(self._has.iteration, state, has_durable=self._has_durable())
                self._pulse.begin_step()
                self._rounds.begin(self._has.iteration)
                yield self._has.iteration
                agreed = self._end_step()
                if agreed["refused"]:
                    self._leave_refused()
                if agreed["stop"] and self._has.iteration < total:
                    self._leave(state)
                if agreed["report"]:
                    self._report_slow_ranks(state, is_last=self._has.iteration >= total)
                self._between_steps(state, agreed["save"], is_last=self._has.iteration >= total)
        except GeneratorExit:
            if self._saves is not None:
                self._saves.finish_staging()  # the script may now change what is being copied
            self._monitor.end_all_sections()
            self._monitor.promise_heartbeats(False)
            self._departure.close()
            self._has.in_steps = False
            raise
        self._finish(state)
        self._has.in_steps = False

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
        if not self._has.in_steps:
            raise OutlastError("attempts() belongs into the body of steps(): for iteration in run.steps(...): ...")
        yield from self._attempts.run(self._has.iteration, batches)
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
        self._log(logging.ERROR, "iteration %d: rolling back to the newest generation", self._has.iteration)
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
        return self._saves.save(state, self._attempts, self._has.iteration, suspect=suspect)

    def close(self) -> None:
        """End the session in order: wait for what was saved, then let go of everything. Idempotent.

        Collective: all ranks, if something was saved that is not committed.
        Blocks: until what was saved is committed, up to ``checkpoint.save_timeout``.
        Thread: the main thread.
        """
        self._has.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            if not isinstance(error, SystemExit) and error is not None and (kept := postmortem.recorder()) is not None:
                kept.exception(error)  # before peers notice that this rank is gone
            if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code in OWN_VERDICTS:
                self._monitor.set_leaving(error.code)
            self._has.let_go()

    def _restore(self, state: Mapping[str, Any], replicas: dist.ProcessGroup | DeviceMesh | None) -> None:
        try:
            self._has.iteration = restore(state, self._attempts, self._saves, self._has.resuming, replicas)
        except Untrusted as error:
            if self._saves is not None and self._saves.refusal is not None:
                self._leave_refused()
            if self._place.untrusted is None:
                raise
            self._log(logging.ERROR, "no trusted generation is left: %s", error)
            self._exit(ExitReason.FAILED_VALIDATION)
        if self._has.iteration:
            self._monitor.set_iteration(self._has.iteration)

    def _end_step(self) -> dict[str, int]:
        """Count the step; return what all ranks agreed on: the signal on which they leave now, what they save."""
        if self._has.resuming is not None:
            self._has.resuming.note(self._has.iteration + 1)
        if self._has.liveness is not None:
            with self._has.section("checkpointing"):  # before the round, which would wait for a silent rank
                self._has.liveness.check(self._has.iteration + 1)
        try:
            agreed = self._rounds.finish()
        except PeerLost as error:
            if not self._departure.is_told:
                raise
            log.error("a peer ended before all ranks could stop together: %s", error)
            self._exit(self._departure.say_farewell())
        self._has.iteration += 1
        took_s = self._pulse.end_step(self._has.iteration)
        if self._saves is not None:
            self._saves.note_step(took_s)
        return agreed

    def _between_steps(self, state: Mapping[str, Any], agreed: int, *, is_last: bool) -> None:
        due = self._saves.due(self._has.iteration, agreed) if self._saves is not None else Due.NOTHING
        self._check_replicas(saves=due != Due.NOTHING)
        if due == Due.ALL:
            self.save(state)
        elif due == Due.NEAR and not is_last and self._saves is not None:  # the end saves to all tiers
            self._saves.save(state, self._attempts, self._has.iteration, near=True)
        if self._faults is not None:
            self._faults.after_step(self._has.iteration, state, has_durable=self._has_durable())

    def _has_durable(self) -> bool:
        """Say whether there is something to come back from, or nothing is saved at all."""
        return self._saves is None or self._saves.has_durable

    def _finish(self, state: Mapping[str, Any]) -> None:
        self._attempts.finish()
        if self._saves is not None:
            if not self._saves.is_saved(self._has.iteration):
                self._check_replicas(saves=True)
                self.save(state)
            try:
                self._saves.wait()
            except Untrusted:
                if self._saves.refusal is None:
                    raise
                self._leave_refused()
        self._departure.close()
        self._monitor.finish()
        self._has.write_end(ExitReason.FINISHED)

    def _leave(self, state: Mapping[str, Any]) -> None:
        """Save if there is where to, as far as there is time, and raise SystemExit; all ranks agreed to leave."""
        self._departure.start_leaving()
        self._save_to_leave(state)
        self._exit(self._departure.say_farewell())

    def _save_to_leave(self, state: Mapping[str, Any]) -> None:
        """Save if there is where to, as far as there is time; all ranks agreed to leave."""
        self._attempts.finish()
        self._check_replicas(saves=self._saves is not None)
        iteration = self._has.iteration
        if self._saves is None:
            what = "stopping after iteration %d, on all ranks; there is no checkpoint.directory to save to"
            self._log(logging.WARNING, what, iteration)
        else:
            self._log(logging.INFO, "stopping after iteration %d, on all ranks, and saving a checkpoint", iteration)
            try:
                if not self._saves.wait_unless_given_up(self.save(state), self._departure):
                    self._log(logging.WARNING, "the save of iteration %d is abandoned", iteration)
            except (CheckpointError, DeadlineExceeded, PeerLost) as error:  # a peer may have given it up
                self._log(logging.ERROR, "the save of iteration %d failed: %s", iteration, error)

    def _report_slow_ranks(self, state: Mapping[str, Any], *, is_last: bool) -> None:
        """Compare the ranks; leave with all of them if one is so slow that its node is to be replaced."""
        slow_ranks = self._has.slow_ranks
        if slow_ranks is None:
            raise OutlastError(
                "straggler_detection is on for another rank and off for this one; give all ranks the same"
            )
        report = slow_ranks.report()
        if report.should_stop and not is_last:
            slow_ranks.leave_word(report)
            self._save_to_leave(state)
            self._exit(ExitReason.STRAGGLER)

    def _check_replicas(self, *, saves: bool) -> None:
        """Compare the replicas if it is time to; if they differ, leave with all ranks, and save nothing."""
        if self._has.replicas is None:
            return
        with self._has.section("checkpointing"):
            code = self._has.replicas.verdict(self._has.iteration, saves=saves)
        if code is not None:
            self._exit(code)

    def _leave_refused(self) -> NoReturn:
        """Leave, with all ranks, since nothing can be saved; a restart would only take up the other run's state."""
        refusal = self._saves.refusal if self._saves is not None else None
        level = logging.ERROR if self._place.local_rank == 0 else logging.DEBUG
        log.log(
            level, "%s", refusal or "nothing can be saved: a directory is another run's; another rank's log names it"
        )
        self._exit(ExitReason.NO_PROGRESS, refusal)

    def _leave_invalid(self, code: int, *, must_save: bool) -> NoReturn:
        """Save the state of before the step for diagnosis, if there is where to, and leave."""
        self._monitor.end_section("step")
        if must_save and self._saves is not None:
            try:
                self._saves.save_suspect(self._state, self._attempts, self._has.iteration)
                iteration = self._has.iteration
                self._log(logging.ERROR, "iteration %d is saved for diagnosis; exit code %d", iteration, code)
            except OutlastError as error:
                log.error("the state could not be saved for diagnosis: %s", error)
        self._exit(code)

    def _log(self, level: int, text: str, *values: object) -> None:
        """Log what all ranks have to say alike: rank 0 does."""
        log.log(level if self._place.global_rank == 0 else logging.DEBUG, text, *values)

    def _exit(self, code: int, why: OutlastError | None = None) -> NoReturn:
        self._monitor.set_leaving(code)
        self._monitor.finish()
        self._has.write_end(code)
        # torchrun ends the others when the first rank has left: their exit codes must still be this one.
        self._has.let_go(keep_notices=True)
        raise SystemExit(code) from why
