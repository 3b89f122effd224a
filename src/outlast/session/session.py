"""One worker's session: restores, sends heartbeats, saves, and stops in time.

One module because it is one state machine: each public method is a transition, with its contract.

:meth:`Session.steps` drives a script's loop; a loop owned by other code (a trainer) calls the methods on which
``steps()`` is written::

    iteration = run.restore(state)
    while iteration < total:
        run.begin_step()
        ...
        decision = run.end_step()
        run.save_due(state)
        if decision.stop:
            break
        iteration = run.iteration
    run.finish(state)

An orderly end (:meth:`Session.finish`, :meth:`Session.leave`, :meth:`Session.close`) waits until all saves are
committed. Any other end (an exception, ``sys.exit`` in the body) does not wait: the groups' connections are closed at
once, so that the peers detect a crashed rank even while one of them hangs.

All resources of a session are in one exit stack and are closed in reverse order, however the session ends.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from enum import Enum
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

from outlast import clock, env, logs
from outlast.chaos.armed import arm_configured
from outlast.checkpoint.outage import Outage
from outlast.config import Config
from outlast.config.sources import load_config
from outlast.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    ExitReason,
    OutlastError,
    PeerLost,
    Untrusted,
)
from outlast.incidents import EventKind
from outlast.monitor.rank_monitor import PlacedRankMonitor, SectionTimer
from outlast.policy.causes import OWN_DECISIONS
from outlast.policy.deadlines import CHECKPOINTING
from outlast.policy.recovery_point import decode_excluded
from outlast.runtime import postmortem
from outlast.runtime.consensus import Consensus
from outlast.runtime.device import training_device
from outlast.runtime.diagnoses import leave_diagnosis
from outlast.runtime.exits import at_exit, forget_at_exit
from outlast.runtime.journal import Journal
from outlast.runtime.process_groups import connect_world, is_initialised, settle
from outlast.session.checks import FiniteEnd, RankLiveness, ReplicaWatch, SlowRanks
from outlast.session.environment import (
    announce_session,
    has_node_local_tier,
    monitor_settings,
    read_place,
    seed_random_numbers,
)
from outlast.session.inprocess_scope import InProcessScope
from outlast.session.preemption import Preemption
from outlast.session.samplers import warn_of_global_order
from outlast.session.saves import OWN_STATE, DueSave, Saves, restore, saved_state, unwrap_ddp
from outlast.session.step import QUESTIONS, Attempt, Attempts, ProgressReporter, StepConsensus, StepDecision

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from outlast.checkpoint import SaveHandle
    from outlast.checkpoint.manager import CheckpointEngine

log = logging.getLogger(__name__)


def init(
    config: Config | str | os.PathLike[str] | None = None,
    *,
    log_metrics: Callable[[dict[str, float], int], object] | None = None,
    saved_by: str | None = None,
) -> Session:
    """Start the session of this worker.

    Works the same under ``outlast run``, ``torchrun``, ``srun`` and plain ``python``. With more than one rank
    ``torch.distributed`` is initialised (NCCL with GPUs, gloo otherwise) unless that was done before; a group that the
    script initialised ends no faster than in torch when a peer hangs. The fault tolerance settings and the run
    directory given to ``outlast run``, by option or file, override those of ``config``, field by field. Unless logging
    was configured, the package logs to stderr: all warnings, and the rest on rank 0.

    Args:
        config: The settings, or a ``.toml``, ``.yaml`` or ``.json`` file of them; ``None`` = the defaults, which save
            nothing.
        log_metrics: Called with metrics by name and the number of optimizer steps done, for a logger such as W&B or
            TensorBoard: on each rank that passes one, in the thread of the training loop, at the end of every step and
            after every save. The documentation lists the names. An exception is logged once and training continues.
            ``outlast.integrations.metrics`` has non-blocking loggers.
        saved_by: Who saves and restores instead of this session, such as ``"the trainer"``, for the log lines on
            missing protection; only without ``checkpoint`` settings.

    Returns:
        The session; use it as a context manager, or call :meth:`Session.close`, to end it before the process does.

    Raises:
        ConfigError: A setting is wrong.
        RendezvousError: The ranks did not find each other.

    Collective: all ranks of the world.
    Blocks: until all ranks have come.
    Thread: the main thread; in another one, signals (SIGTERM) are not handled.
    """
    postmortem.begin_with_hook()
    place = env.read_worker()
    logs.read_settings()
    logs.configure_worker(place.global_rank, place.node)
    if isinstance(config, str | os.PathLike):
        config = load_config(config)
    elif config is not None and not isinstance(config, Config):
        raise ConfigError(f"init() takes an outlast.Config or the path of a config file, not {type(config).__name__}")
    return Session(config or Config(), log_metrics=log_metrics, saved_by=saved_by)


class _Phase(Enum):
    """Phase of the loop; the value says which call is expected."""

    OPENED = "call restore(state) first"
    BETWEEN = "call begin_step() first"
    STEPPING = "call end_step() first"
    STOPPING = "all ranks agreed to stop: call finish(state) or leave(state)"
    OVER = "the loop has ended; to continue training in this process, start a new session with outlast.init()"


class Session:
    """The interface of a training script; created by :func:`outlast.init`.

    Args:
        config: The settings.
        log_metrics: Takes metrics; see :func:`outlast.init`.
        saved_by: Who saves instead; see there.

    Raises:
        ConfigError: A setting is wrong.
        RendezvousError: The ranks did not find each other.

    Collective: all ranks of the world create it.
    Thread: that of the training loop; :meth:`section` from any thread that trains.
    """

    _failed: ClassVar[list[CheckpointEngine]] = []

    def __init__(
        self,
        config: Config,
        *,
        log_metrics: Callable[[dict[str, float], int], object] | None = None,
        saved_by: str | None = None,
    ) -> None:
        if saved_by is not None and config.checkpoint is not None:
            raise ConfigError(f"saved_by={saved_by!r} contradicts the checkpoint settings; drop one of them")
        self.config = config
        self._iteration = 0
        self._phase = _Phase.OPENED
        self._decision: StepDecision | None = None
        self._state: Mapping[str, Any] = {}
        self._stack = ExitStack()
        self._is_closed = False
        self._has_failed = self._is_exiting = self._has_ended = False
        self._scope = InProcessScope(config)
        self._place = place = read_place(config, self._scope)
        self.run_dir = place.run_dir
        """Directory of the run's journal and stacks; ``None`` = none."""
        self._saves: Saves | None = None
        self._slow_ranks: SlowRanks | None = None
        self._liveness: RankLiveness | None = None
        self._replicas: ReplicaWatch | None = None
        self._finite_end: FiniteEnd | None = None
        self._owns_world = place.world_size > 1 and not is_initialised()
        try:
            with self._scope.undivided():
                self._open_alone()
            self._progress = ProgressReporter(self._scope, self._monitor, self._journal, place, log_metrics)
            self._stack.callback(self._end_metrics)
            with self._section("setup"):
                self._open_together()
            self._faults = arm_configured(config, self._monitor.config, place, self._journal)
            for name in () if self._faults is None else self._faults.sections:
                self._monitor.call_in(name, partial(self._inject_faults, name))
            self._step_consensus = StepConsensus(
                self._consensus, self._preemption, self._saves, self._slow_ranks, decides=place.global_rank == 0
            )
            self._attempts = Attempts(
                config.rerun_state_machine,
                place,
                self._journal,
                consensus=self._step_consensus,
                faults=self._faults,
                goodput=self._progress.goodput,
            )
            self._scope.on_leave(self._attempts.close)
            watches_signals = self._preemption.watches_signals
            announce_session(
                config,
                place,
                self._scope,
                self._journal,
                self._monitor,
                watches_signals=watches_signals,
                saved_by=saved_by,
            )
        except BaseException as error:
            if isinstance(error, Outage):  # a restart could only wait again, on all ranks
                self._leave_unsaved(error)
            self._abort(error)
            raise

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
        """The device on which this worker trains: its GPU, else the CPU."""
        return training_device(self._place.local_rank)

    def section(self, name: str) -> SectionTimer:
        """Return a context manager, also usable as a decorator, that names the work within.

        A section has a separate timeout (``rank_section_timeouts``); sections nest. With ``straggler_detection`` the
        time of a section within a step is compared with the other ranks, except ``checkpointing``, ``setup``,
        ``evaluation`` and ``validation``, which are excluded.
        """
        section = self._monitor.section(name)
        return section if self._slow_ranks is None else self._slow_ranks.timed(name, section)

    # -- the loop --------------------------------------------------------------------------------------------------

    def steps(
        self,
        state: Mapping[str, Any],
        *,
        total: int,
        replicas: dist.ProcessGroup | DeviceMesh | None = None,
        missing: Literal["error", "keep"] | None = None,
    ) -> Iterator[int]:
        """Yield the numbers of the iterations that are still to do; the loop's body does one.

        Before the first, the newest trusted checkpoint is loaded into ``state`` (section ``setup``). The section
        ``step`` is open around each body; afterwards the iteration counts as done. Every ``save_interval`` iterations
        the state is saved to all tiers, every ``non_persistent_save_interval`` to the node-local ones (section
        ``checkpointing``). After the last iteration the state is saved to all tiers, unless that was just done, and the
        call waits until all saves are committed.

        When the shutdown of any rank is requested (SIGTERM, or another source of ``preemption``), all ranks stop after
        the same iteration, commit one checkpoint, and raise ``SystemExit(75)`` (``ExitReason.PREEMPTED``) here. A
        second signal at least a second after the first, and the deadline (``shutdown_timeout``), abandon that save; the
        exit code is 75 all the same, and a line says which iterations are lost. Without any checkpoint to resume from
        the exit code is 128 plus the signal's number. Before the first iteration a notice waits for the end of that
        one; after the last, a signal ends the process.

        Other exit codes: ``SystemExit(17)`` (``ExitReason.FAILED_VALIDATION``): every checkpoint led to invalid
        results, or weights are NaN or infinite after the last iteration. ``SystemExit(93)``
        (``ExitReason.NO_PROGRESS``): a checkpoint directory belongs to another run, so that nothing can be saved there,
        or no checkpoint that survives the end of the job was committed for ``checkpoint.max_durable_lag``.
        ``SystemExit(18)`` (``ExitReason.STRAGGLER``): a rank is so slow that its node must be replaced, with
        ``straggler_detection.stop_if_detected``; the state is saved as for a notice.

        ``break`` leaves the loop without a save; an exception in the body passes through.

        Equivalent to :meth:`restore`, then :meth:`begin_step`, :meth:`end_step` and :meth:`save_due` around each body,
        then :meth:`finish`.

        Args:
            state: Name to object to save: anything with ``state_dict()`` and ``load_state_dict()`` (a module wrapped in
                DDP counts as the inner module), tensors, and plain values. A load fills tensors, arrays, dicts and
                lists in place, and replaces other plain values in the mapping.
            total: Number of iterations at which the run is complete.
            replicas: Ranks that hold the same tensors, for ``replica_digest``: a process group, or a mesh such as
                ``mesh["dp"]``; ``None`` = all ranks. DTensors have that information.
            missing: As for :meth:`restore`.

        Yields:
            The iteration's number from 0: the number of optimizer steps done before it.

        Raises:
            CheckpointError: Saving failed too often in a row.
            PeerLost: A peer left, did not reach the step's end in time, or does not respond.
            UnhealthyRank: A peer returned a wrong result.
            SystemExit: A shutdown was requested, no trusted checkpoint is left, replicas differ, or a rank is slow.

        Collective: all ranks, with the same ``total``.
        Blocks: at the end of each step until all ranks have begun it.
        """
        if self._phase != _Phase.OPENED:
            raise OutlastError("steps() was called before; call it once for each outlast.init()")
        if self._saves is not None and self._place.is_first:
            self._stack.callback(warn_of_global_order())
        self.restore(state, replicas=replicas, missing=missing)
        try:
            self._progress.total = total
            while self._iteration < total:
                self.begin_step()
                yield self._iteration
                decision = self.end_step(is_last=self._iteration + 1 >= total)
                if decision.stop:
                    self.leave(state)
                self.save_due(state)
        except GeneratorExit:
            self.break_off()
            raise
        self.finish(state)

    def restore(
        self,
        state: Mapping[str, Any],
        *,
        replicas: dist.ProcessGroup | DeviceMesh | None = None,
        missing: Literal["error", "keep"] | None = None,
        restored_iteration: int = 0,
    ) -> int:
        """Load the newest trusted checkpoint into ``state``; return the iteration to continue from.

        After an in-process restart the state may still be in memory; then nothing is loaded. The section is ``setup``.

        Args:
            state: As for :meth:`steps`; pass the same mapping to the other methods.
            replicas: As for :meth:`steps`.
            missing: ``"keep"``: entries of ``state`` that the checkpoint lacks (a name, a key of a module, a parameter
                of an optimizer) keep their values, and one log line lists them; ``"error"``: the load fails. ``None`` =
                as in ``checkpoint.missing``.
            restored_iteration: Number of optimizer steps that ``state`` has done because the script or its trainer
                loaded a checkpoint; only without ``checkpoint`` settings.

        Returns:
            Number of optimizer steps that ``state`` has done; 0 = there is no checkpoint, and training begins.

        Raises:
            ConfigError: ``state`` uses a name reserved for the session, or ``restored_iteration`` has no effect.
            CheckpointError: There are checkpoints, but none that all ranks can load.
            OutlastError: The method was called before.
            PeerLost: A peer left.
            SystemExit: No trusted checkpoint is left (17), or a directory belongs to another run (93).

        Collective: all ranks, once, before the first step.
        Blocks: until all ranks have read and verified their parts.
        """
        self._expect("restore()", _Phase.OPENED)
        if OWN_STATE in state:
            raise ConfigError(f"state[{OWN_STATE!r}] is the session's own; choose another name")
        if restored_iteration and self._saves is not None:
            raise ConfigError(
                f"restored_iteration={restored_iteration} has no effect with checkpoint settings, from which this "
                "session restores itself; drop one of them"
            )
        self._state = state
        self._attempts.watch(state)
        saves = self.config.checkpoint
        replay = self._attempts.replay
        with self._section("setup"):
            if saves is None or saves.prefer_finite:  # otherwise NaN and infinity may be valid
                self._finite_end = FiniteEnd(state, self._place, is_saved=saves is not None)
            try:
                self._iteration = restore(
                    state,
                    self._attempts,
                    self._saves,
                    self._scope,
                    replicas,
                    suspect_iteration=None if replay is None else replay.iteration,
                    place=self._place,
                    journal=self._journal,
                    missing=missing,
                )
            except Outage as error:  # a restart could only wait again, on all ranks
                self._leave_unsaved(error)
            except Untrusted as error:
                if self._refusal is not None:
                    self._leave_unsaved()
                if all(one.is_last_resort for one in decode_excluded(self._place.untrusted)):
                    raise
                self._log(logging.ERROR, "no usable checkpoint is left: %s", error)
                self._exit(ExitReason.FAILED_VALIDATION)
            if restored_iteration:
                self._iteration = restored_iteration
                self._monitor.set_durable_iteration(restored_iteration)
            if restored_iteration or (self._saves is not None and self._saves.has_loaded):
                self._monitor.set_restored()
            if self._iteration:
                self._monitor.set_iteration(self._iteration)
            digests = self.config.replica_digest
            if digests is not None and digests.interval:
                self._replicas = ReplicaWatch(digests, unwrap_ddp(state), replicas, self._place, self._journal)
                self._stack.callback(self._replicas.close)
            if self._slow_ranks is not None:
                self._slow_ranks.detector.watch(state)
        self._monitor.report_set_up()
        self._phase = _Phase.BETWEEN
        self._progress.begin_run(self._iteration)
        return self._iteration

    def begin_step(self) -> None:
        """Begin an optimizer step: heartbeat, section ``step``, and the reduction in which all ranks agree.

        With gradient accumulation a step is all micro-batches up to the optimizer's step.

        Raises:
            OutlastError: The call is out of order; the message says what to call instead.

        Collective: all ranks.
        Blocks: never.
        """
        self._expect("begin_step()", _Phase.BETWEEN)
        self._inject_faults()
        self._phase = _Phase.STEPPING
        self._progress.begin_step(self._iteration)
        self._attempts.begin_step(self._iteration)
        self._step_consensus.begin(self._iteration, with_attempts=self._attempts.have_reduction)

    def end_step(self, *, is_last: bool = False) -> StepDecision:
        """End the step: the step counts as done, and all ranks agree on what follows.

        Call it after the optimizer's step. Checks that are due also run here: replicas (``replica_digest``), whether
        all ranks respond (``health.process_group_interval``), and stragglers (``straggler_detection``). Nothing is
        saved yet.

        Args:
            is_last: Training is complete with this step, on all ranks: no rank stops for a notice or a straggler any
                more, and :meth:`finish` saves.

        Returns:
            What all ranks agreed on. After ``decision.stop`` the loop ends, and :meth:`finish` or :meth:`leave` ends
            the process.

        Raises:
            OutlastError: The call is out of order; the message says what to call instead.
            PeerLost: A peer left, did not reach the step's end in time, or does not respond.
            UnhealthyRank: A peer returned a wrong result.
            SystemExit: A peer exited because a shutdown was requested, before all ranks could agree on it.

        Collective: all ranks, with the same ``is_last``.
        Blocks: until all ranks have begun the step.
        """
        self._expect("end_step()", _Phase.STEPPING)
        self._scope.note_iteration(self._iteration + 1)
        if self._liveness is not None:  # before the agreement, which would wait for a silent rank
            with self._section("checkpointing"):
                self._liveness.check(self._iteration + 1)
        try:
            agreed = self._step_consensus.finish()
        except PeerLost as error:
            if not self._preemption.is_requested:
                raise
            log.error("a peer ended before all ranks could stop together: %s", error)
            self._exit(self._preemption.log_exit())
        self._iteration += 1
        self._phase = _Phase.BETWEEN
        took_s = self._progress.end_step(self._iteration, self._attempts.loss)
        due = DueSave.NOTHING
        if self._saves is not None:
            self._saves.schedule.note_step(took_s)
            due = self._saves.schedule.due(self._iteration, agreed["save"])
        metrics: dict[str, float] = {}
        reason = None
        if agreed["refused"]:
            reason = ExitReason.NO_PROGRESS
        elif agreed["stop"] and not is_last:
            self._preemption.start_leaving()
            reason = ExitReason.PREEMPTED
        elif agreed["overdue"] and not is_last:  # after the last step finish() waits for the commits
            reason = ExitReason.NO_PROGRESS
        elif agreed["report"]:
            if self._slow_ranks is None:
                raise OutlastError("straggler_detection is on for another rank, off for this one; give all the same")
            report = self._slow_ranks.detector.report()
            metrics = report.metrics()
            self._progress.goodput.note_slow_ranks(report.findings.relative, report.named_ranks)
            if report.should_stop and not is_last:
                self._slow_ranks.diagnose(report)
                reason = ExitReason.STRAGGLER
        save: Literal["near", "all"] | None = None
        if reason != ExitReason.NO_PROGRESS:
            if self._saves is not None and (reason is not None or due == DueSave.ALL):
                save = "all"
            elif due == DueSave.NEAR and not is_last:  # finish() saves to all tiers
                save = "near"
            if (differ := self._check_replicas(saves=save is not None)) is not None:
                reason, save = differ, None
        signal = agreed["stop"] if reason == ExitReason.PREEMPTED else None
        self._decision = StepDecision(iteration=self._iteration, save=save, reason=reason, signal=signal)
        if self._decision.stop:
            self._phase = _Phase.STOPPING
        self._progress.log_step(self._iteration, took_s, metrics)
        return self._decision

    def heartbeat(self) -> None:
        """Send a heartbeat where steps are far apart, as in a long validation.

        Collective: no.
        Blocks: never.
        """
        self._scope.ping()
        self._monitor.heartbeat()

    def request_save(self, *, near: bool = False) -> None:
        """Request that all ranks save after the step that begins next, for example by a clock.

        Of several requests before that step the larger one counts.

        Args:
            near: Save to memory, local tier and replicas only; without any of these, to all tiers.

        Raises:
            OutlastError: No checkpoint directory is set.

        Collective: no; one rank's request suffices.
        Blocks: never.
        """
        if self._saves is None:
            raise OutlastError("there is nowhere to save to; give outlast.init() a checkpoint.directory")
        is_near = near and has_node_local_tier(self._saves.manager.config, self._place)
        schedule = self._saves.schedule
        schedule.wanted = max(schedule.wanted, DueSave.NEAR if is_near else DueSave.ALL)

    def save_due(self, state: Mapping[str, Any]) -> SaveHandle | None:
        """Save if the newest decision says that a save is due. Does not end the process.

        Args:
            state: As for :meth:`steps`.

        Returns:
            A handle to wait for the commit with; ``None`` = nothing was due.

        Raises:
            OutlastError: The call is out of order; the message says what to call instead.
            CheckpointError: Saving failed too often in a row.

        Collective: all ranks, after :meth:`end_step` and before the next :meth:`begin_step`.
        Blocks: while the state is copied; with ``async_save`` off, until it is committed.
        """
        self._expect("save_due()", _Phase.BETWEEN, _Phase.STOPPING)
        decision, saves = self._decision, self._saves
        if decision is None or decision.save is None or saves is None or saves.is_saved(self._iteration):
            return None
        return self._save(state, DueSave.ALL if decision.save == "all" else DueSave.NEAR)

    def finish(self, state: Mapping[str, Any]) -> None:
        """End the loop: save to all tiers unless that was just done, and wait until all saves are committed.

        After a decision to stop, calls :meth:`leave`.

        Args:
            state: As for :meth:`steps`.

        Raises:
            OutlastError: The call is out of order; the message says what to call instead.
            CheckpointError: The state could not be saved.
            PeerLost: A peer left.
            SystemExit: All ranks agreed to stop, replicas differ, a directory belongs to another run, nothing was
                committed for ``max_durable_lag`` (93), or weights are NaN or infinite (17).

        Collective: all ranks, after the same iteration.
        Blocks: until all saves are committed, up to the rest of ``checkpoint.max_durable_lag``, or twice
        ``checkpoint.save_timeout`` if that is longer.
        """
        if self._phase == _Phase.STOPPING:
            self.leave(state)
        self._expect("finish()", _Phase.BETWEEN)
        if self._decision is None and self._iteration and self._scope.call_number == 0:
            self._log(
                logging.INFO,
                "iteration %d is done: nothing was left to train; to train on, raise the number of iterations (total, "
                "train_iters, max_steps) and launch again with the same --run-dir or checkpoint directory",
                self._iteration,
            )
        self._inject_faults(is_last=True)
        self._attempts.finish()
        broken = None
        if self._finite_end is not None:
            broken = self._finite_end.agree(state, self._iteration, self._consensus)
        if self._saves is not None:
            if not self._saves.is_saved(self._iteration):
                if (differ := self._check_replicas(saves=True)) is not None:
                    self._exit(differ)
                self._save(state)
            try:
                self._wait_for_commits(self._saves)
            except Untrusted:
                if self._refusal is None:
                    raise
                self._leave_unsaved()
        if broken is not None:
            leave_diagnosis(self._place, broken, self._journal)
            self._exit(ExitReason.FAILED_VALIDATION)
        self._end_notices()
        self._end(ExitReason.FINISHED)

    def leave(self, state: Mapping[str, Any]) -> NoReturn:
        """Save, wait for the commit as long as there is time, and exit, after all ranks agreed to stop.

        Args:
            state: As for :meth:`steps`.

        Raises:
            OutlastError: The ranks did not agree to stop.
            SystemExit: Always otherwise, with an exit code of :meth:`steps`.

        Collective: all ranks, after the same decision.
        Blocks: until the save is committed, a second signal comes, or the deadline is near.
        """
        decision = self._decision
        if decision is None or decision.reason is None or self._phase != _Phase.STOPPING:
            raise OutlastError("leave() without an agreement to stop; call finish(state), or begin_step() to continue")
        if decision.reason == ExitReason.NO_PROGRESS:
            self._leave_unsaved()
        if decision.reason not in (ExitReason.PREEMPTED, ExitReason.STRAGGLER):
            self._exit(decision.reason)
        self._save_to_leave(state)
        self._exit(self._preemption.log_exit() if decision.reason == ExitReason.PREEMPTED else decision.reason)

    def break_off(self) -> None:
        """End the loop without a save, as ``break`` does in :meth:`steps`.

        Idempotent. Collective: no; what all ranks do next must not need a step's end. Blocks: while state is copied.
        """
        if self._saves is not None:
            self._saves.manager.finish_staging()  # the script may now change the state
        self._monitor.end_all_sections()
        self._monitor.promise_heartbeats(False)
        self._end_notices()
        self._phase = _Phase.OVER

    # -- within a step ---------------------------------------------------------------------------------------------

    def attempts(self, batches: Any = None) -> Iterator[Attempt]:
        """Yield the attempts of a step: one, and a second one after an invalid result; within a step.

        The body computes the gradients and validates results; the optimizer's step comes after the loop. If any rank's
        result is rejected, all ranks restore random numbers, batches, gradients and the buffers that a module changes,
        and run the body again. If the second result differs and is valid, training continues with it. If it is the
        same, the state is saved for diagnosis and all ranks exit with ``SystemExit(16)``: the launcher has the step
        replayed elsewhere. ``rerun_state_machine`` defines what is invalid.

        Gradients are restored only if they were ``None`` or zero: accumulate within the body.

        Args:
            batches: Source of :meth:`Attempt.next_batch`: an iterator, or a list of several, from which all steps draw
                in the same order; ``None`` = the body gets its batches, the same for the same step.

        Yields:
            The attempt.

        Raises:
            OutlastError: The call is outside of a step.
            PeerLost: A peer left, or did not end its attempt in time.
            SystemExit: An invalid result was repeated (16), or was judged (17).

        Collective: all ranks, in the same steps; no rank leaves the loop early.
        Blocks: after each attempt until all ranks have ended theirs.
        """
        if self._phase != _Phase.STEPPING:
            raise OutlastError(
                "attempts() belongs into the body of steps(): for iteration in run.steps(...): ...; in a loop of "
                "another kind, between begin_step() and end_step()"
            )
        yield from self._attempts.run(self._iteration, batches)
        decision = self._attempts.decision
        if decision.exit_code is not None:
            self._leave_invalid(decision.exit_code, must_save=decision.must_save)

    def roll_back(self) -> NoReturn:
        """Exit, with all ranks, so that the launcher restarts them from the newest trusted checkpoint.

        For invalid results that the script detects, such as ``NonFiniteDetector(on_rollback=...)``. Without progress in
        between, the run stops after ``max_same_device_reruns`` times.

        Raises:
            SystemExit: Always, with code 16.

        Collective: all ranks, in the same step.
        """
        self._log(logging.ERROR, "iteration %d: rolling back to the newest checkpoint", self._iteration)
        self._exit(ExitReason.RESUME_TO_DISAMBIGUATE)

    def save(self, state: Mapping[str, Any], *, suspect: bool = False) -> SaveHandle:
        """Save ``state`` now to all tiers as that of :attr:`iteration`, and return once it is copied.

        Call it before the optimizer's step, or between steps: the state must be that of exactly :attr:`iteration`
        steps.

        Args:
            state: As for :meth:`steps`.
            suspect: The state is for diagnosis only: it is saved to ``suspect/`` and never loaded.

        Returns:
            A handle to wait for the commit with.

        Raises:
            OutlastError: There is no checkpoint directory.
            CheckpointError: Saving failed too often in a row.

        Collective: all ranks, at the same iteration.
        Blocks: while the state is copied; with ``async_save`` off, until it is committed.
        """
        return self._save(state, suspect=suspect)

    def close(self) -> None:
        """End the session in order: wait for the commits, then close everything. Idempotent.

        Raises:
            SystemExit: The loop ended without :meth:`finish`, and this rank's weights are NaN or infinite (17).

        Collective: all ranks, if a save is not committed.
        Blocks: until all saves are committed, as in :meth:`finish`.
        Thread: the main thread.
        """
        if self._is_closed:
            return
        if self._saves is not None:
            self._wait_for_commits(self._saves)
            with self._scope.undivided():
                self._saves.manager.close()
        broken_off = None if self._has_ended else self._finite_end
        if broken_off is not None and (broken := broken_off.judge(self._state, self._iteration)) is not None:
            leave_diagnosis(self._place, broken, self._journal)
            self._exit(ExitReason.FAILED_VALIDATION)
        self._let_go()
        if self._owns_world and is_initialised():
            import torch.distributed as dist

            if self._scope.is_active:
                settle()  # a thread that frees tensors needs the interpreter's lock, which is held from here on
            dist.destroy_process_group()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif error is not None:
            if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code in OWN_DECISIONS:
                self._monitor.set_leaving(error.code)
            self._abort(error)

    # -- opening and closing ---------------------------------------------------------------------------------------

    def _open_alone(self) -> None:
        """Open the resources that need no peer; they are closed also when the wrapped call is left."""
        config, place = self.config, self._place
        self._scope.on_leave(self._scope.release)
        self._scope.on_leave(self._let_go)
        if config.seed is not None:
            seed_random_numbers(config.seed + place.global_rank)
        proc = f"rank-{place.global_rank}"
        self._journal = Journal(place.run_dir, run_id=place.run_id, job=place.job, node=place.node, proc=proc)
        self._stack.callback(self._journal.close)
        self._journal.cycle = place.cycle
        # With background saves the time in this section varies too much to learn a timeout.
        varies = config.checkpoint is not None and config.checkpoint.async_save
        self._monitor = PlacedRankMonitor(
            place, monitor_settings(config, place), place.run_dir, not_learned=(CHECKPOINTING,) if varies else ()
        )
        self._stack.callback(self._end_monitor)
        self.fault_tolerance = self._monitor.config
        """The fault tolerance settings in force."""
        self._monitor.promise_heartbeats(True)
        self._preemption = Preemption(config.preemption, place=place, journal=self._journal, monitor=self._monitor)
        self._stack.callback(self._preemption.close)
        at_exit(self._at_exit)
        self._stack.callback(forget_at_exit, self._at_exit)

    def _open_together(self) -> None:
        config, place = self.config, self._place
        if self._owns_world:
            world = connect_world(place)
            if not self._scope.is_active:  # the wrapper settles more than the world
                self._stack.callback(settle)
            self._stack.callback(world.cut)
        self._consensus = Consensus(QUESTIONS, world_size=place.world_size)
        self._stack.callback(self._consensus.close)
        if config.straggler_detection is not None and config.straggler_detection.enabled:
            self._slow_ranks = SlowRanks(config.straggler_detection, place, self._journal, self._consensus)
            self._stack.callback(self._slow_ranks.detector.close)
        if config.checkpoint is not None:
            self._close_failed()
            self._saves = Saves(config.checkpoint, place, self._journal, self._scope)
            self._scope.on_leave(self._saves.manager.close)
            self._preemption.manager = self._saves.manager
            if self._saves.schedule.is_automatic:
                self._monitor.report_progress()
        if config.health is not None and config.health.process_group_interval and place.world_size > 1:
            self._liveness = RankLiveness(config.health, place, self._journal)
            self._stack.callback(self._liveness.close)

    @classmethod
    def _close_failed(cls) -> None:
        """Close the checkpoint managers of earlier sessions that failed: they may use the same directory.

        Until then, or until the process exits, such a manager commits the saves that had begun.
        """
        while cls._failed:
            cls._failed.pop().close()

    def _end_notices(self) -> None:
        """Stop handling signals, atomically: a half-closed listener is never closed."""
        with self._scope.undivided():
            self._preemption.close()

    def _let_go(self) -> None:
        """Close everything that closes without waiting for a peer. Idempotent."""
        with self._scope.undivided():
            self._is_closed = True
            self._stack.close()

    def _end_metrics(self) -> None:
        """Write pending metrics, after the peers have detected that this rank exits."""
        is_being_left = self._scope.is_left and not self._is_exiting  # at exit, no peer waits for a call that was left
        self._progress.end_run(is_orderly=not (self._has_failed or is_being_left))

    def _end_monitor(self) -> None:
        if self._has_failed and not self._scope.is_active:  # an in-process restart does not end a cycle
            self._monitor.note_failure()
        self._monitor.close()

    def _abort(self, error: BaseException) -> None:
        self._has_failed = not isinstance(error, SystemExit)
        self._scope.note_failure(error)
        if self._has_failed and (kept := postmortem.recorder()) is not None:
            kept.exception(error)  # before peers detect that this rank is gone
        if self._saves is not None and not self._scope.is_active:
            self._failed.append(self._saves.manager)
        self._let_go()

    def _at_exit(self) -> None:
        self._is_exiting = True
        if self._saves is not None and not self._is_closed and self._phase not in (_Phase.OPENED, _Phase.OVER):
            log.warning("the session ended in the middle of a step; saves that were not committed are lost")
        self._let_go()

    # -- details of a step -----------------------------------------------------------------------------------------

    def _expect(self, what: str, *expected: _Phase) -> None:
        if self._phase in expected:
            return
        if self._phase == _Phase.BETWEEN and expected == (_Phase.OPENED,):
            raise OutlastError(f"{what} was called before; continue with begin_step(), or call finish(state)")
        raise OutlastError(f"{what} is out of order: {self._phase.value}")

    def _section(self, name: str) -> AbstractContextManager[None]:
        """Open one of the session's sections, in which in-process restarts have no deadlines."""
        section = self._scope.section(self._monitor, name)
        return section if self._slow_ranks is None else self._slow_ranks.left_out(section)

    def _inject_faults(self, section: str | None = None, *, is_last: bool = False) -> None:
        """Inject the faults that are due in a section or, without one, between two steps."""
        if self._faults is None:
            return
        if section is not None:
            return self._faults.enter_section(section, self._iteration)
        has_durable = self._saves is None or self._saves.manager.durability.worker is not None
        if self._decision is not None:
            self._faults.after_step(self._iteration, self._state, has_durable=has_durable)
        if not is_last:
            self._faults.before_step(self._iteration, self._state, has_durable=has_durable)

    def _check_replicas(self, *, saves: bool) -> ExitReason | None:
        """Compare the replicas if due; return the exit code if they differ."""
        if self._replicas is None:
            return None
        with self._section("checkpointing"):
            return self._replicas.decision(self._iteration, saves=saves)

    def _save(self, state: Mapping[str, Any], scope: DueSave = DueSave.ALL, *, suspect: bool = False) -> SaveHandle:
        if self._saves is None:
            raise OutlastError("there is nowhere to save to; give outlast.init() a checkpoint.directory")
        with self._section("checkpointing"):
            saved = saved_state(state, self._attempts)
            handle = self._saves.save(saved, self._iteration, scope=scope, suspect=suspect)
        if (stall_s := self._saves.last_stall_s) is not None:
            self._progress.log_save(self._iteration, stall_s)
        return handle

    # -- leaving ---------------------------------------------------------------------------------------------------

    def _save_to_leave(self, state: Mapping[str, Any]) -> None:
        """Save within the time that is left before all ranks exit."""
        self._attempts.finish()
        iteration, saves = self._iteration, self._saves
        if saves is None:
            if self._monitor.board_state.durable_iteration == iteration:  # saved by the script or its trainer
                return self._log(logging.INFO, "stopping after iteration %d, on all ranks", iteration)
            what = "stopping after iteration %d, on all ranks; there is no checkpoint.directory to save to"
            return self._log(logging.WARNING, what, iteration)
        self._log(logging.INFO, "stopping after iteration %d, on all ranks, and saving a checkpoint", iteration)
        try:
            handle = saves.newest if saves.is_saved(iteration) and saves.newest is not None else self._save(state)
            end_ns = clock.now_ns() + int(saves.manager.config.save_timeout * 1e9)
            with self._section("checkpointing"):
                while not saves.manager.is_over(handle) and clock.now_ns() < end_ns:
                    if self._preemption.wait_to_give_up(0.02):
                        return self._log(logging.WARNING, "the save of iteration %d is abandoned", iteration)
            if handle.done:
                handle.wait()
        except (CheckpointError, DeadlineExceeded, PeerLost) as error:  # a peer may have abandoned the save
            self._log(logging.ERROR, "the save of iteration %d failed: %s", iteration, error)

    @property
    def _refusal(self) -> CheckpointError | None:
        """The error for which no save can succeed any more (a directory belongs to another run), or ``None``."""
        return None if self._saves is None else self._saves.manager.refusal

    def _leave_unsaved(self, why: CheckpointError | None = None) -> NoReturn:
        """Exit, with all ranks, because nothing that survives the end of the job can be saved or loaded.

        A directory belongs to another run, whose state a restart would load; no commit succeeded for
        ``max_durable_lag``; or ``why``: checkpoints cannot be listed.
        """
        why = why or self._refusal
        if why is None and self._saves is not None and self._saves.manager.durable_lag_s > 0:
            why = CheckpointError(self._saves.manager.describe_overdue(self._iteration))
        what = why or "nothing can be saved; another rank's log has the reason"
        log.log(logging.ERROR if self._place.local_rank == 0 else logging.DEBUG, "%s", what)
        self._exit(ExitReason.NO_PROGRESS, why)

    def _wait_for_commits(self, saves: Saves) -> None:
        """Wait until all saves are committed; exit if no commit succeeded for ``max_durable_lag``.

        Raises: CheckpointError, DeadlineExceeded. Blocks: up to :attr:`Saves.final_wait_s`.
        """

        def begin_wait() -> AbstractContextManager[None]:
            self.heartbeat()
            return self._section("checkpointing")

        try:
            saves.wait(saves.final_wait_s, begin_wait)
        except DeadlineExceeded:
            if not saves.is_overdue:
                raise
            self._leave_unsaved()

    def _leave_invalid(self, code: int, *, must_save: bool) -> NoReturn:
        """Save the state before the step for diagnosis, if possible, and exit."""
        self._monitor.end_section("step")
        if must_save and self._saves is not None:
            try:
                handle = self._save(self._state, suspect=True)
                with self._section("checkpointing"):
                    handle.wait()
                self._log(logging.ERROR, "iteration %d is saved for diagnosis; exit code %d", self._iteration, code)
            except OutlastError as error:
                log.error("the state could not be saved for diagnosis: %s", error)
        self._exit(code)

    def _log(self, level: int, text: str, *values: object) -> None:
        """Log on rank 0 what is the same on all ranks."""
        log.log(level if self._place.global_rank == 0 else logging.DEBUG, text, *values)

    def _end(self, code: int) -> None:
        self._monitor.finish()
        self._journal.write(
            EventKind.SESSION_ENDED, rank=self._place.global_rank, iteration=self._iteration, exit_code=int(code)
        )
        self._phase, self._has_ended = _Phase.OVER, True

    def _exit(self, code: int, why: OutlastError | None = None) -> NoReturn:
        self._monitor.set_leaving(code)
        self._end(code)
        self._preemption.outlive_session()
        self._let_go()
        raise SystemExit(code) from why
