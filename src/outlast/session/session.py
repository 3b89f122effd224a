"""One worker's session: it restores, sends heartbeats, saves, and stops in time.

One module because it is one state machine: each public method is a transition, with its contract.

A script's own loop is driven by :meth:`Session.steps`, a loop that somebody else owns (a trainer's) by the methods on
which ``steps()`` itself is written::

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

A session ends in one of two ways. An orderly end (:meth:`Session.finish`, :meth:`Session.leave`, :meth:`Session.close`)
waits until what was saved is committed. Anything else (an exception, ``sys.exit`` in the body) waits for nobody: the
groups' connections are cut, so that a crashed rank is gone at once and its peers notice, even while one of them hangs.

What a session opens lies in one stack and is closed in the reverse order, however the session ends.
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
    Unavailable,
    Untrusted,
)
from outlast.incidents import EventKind
from outlast.monitor.rank_monitor import PlacedRankMonitor, SectionTimer
from outlast.policy.causes import OWN_VERDICTS
from outlast.policy.deadlines import CHECKPOINTING
from outlast.policy.recovery_point import decode_distrusted
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
    has_near_tier,
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
    it initialises ``torch.distributed`` (NCCL where there are GPUs, gloo otherwise) unless that was done
    before; a rank whose script initialised it leaves it no faster than torch does when a peer hangs. The
    fault tolerance settings that ``outlast run`` is given, by option or file, come before those of ``config``, field by
    field, and so does its run directory.
    Unless logging was configured, the package's own lines go to stderr: all warnings, the rest of rank 0.

    Args:
        config: The settings, or a ``.toml``, ``.yaml`` or ``.json`` file of them; ``None`` for the defaults,
            which save nothing.
        log_metrics: Called with figures by name and the number of optimizer steps done, for a logger such as W&B or
            TensorBoard: on each rank that gives one, in the thread of the training loop, at the end of every step and
            after every save. The documentation lists the names. If it raises, that is logged once; training continues.
            ``outlast.integrations.metrics`` has ready ones, which never hold the loop.
        saved_by: Who saves and restores in the place of this session, such as ``"the trainer"``, for the lines on what
            a run is protected against; only without ``checkpoint`` settings.

    Returns:
        The session; use it as a context manager, or call :meth:`Session.close`, to end it before the process
        does.

    Raises:
        ConfigError: A setting is wrong.
        RendezvousError: The ranks did not find each other.

    Collective: all ranks of the world.
    Blocks: until all ranks have come.
    Thread: the main thread, or notices (SIGTERM) are not handled.
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
    """Where the loop is; the value says what is to be called next."""

    OPENED = "call restore(state) first"
    BETWEEN = "call begin_step() first"
    STEPPING = "call end_step() first"
    STOPPING = "all ranks agreed to stop: call finish(state) or leave(state)"
    OVER = "the loop has ended; to continue training in this process, start a new session with outlast.init()"


class Session:
    """What a training script needs of this package; made by :func:`outlast.init`.

    Args:
        config: The settings.
        log_metrics: Takes figures; see :func:`outlast.init`.
        saved_by: Who saves in its place; see there.

    Raises:
        ConfigError: A setting is wrong.
        RendezvousError: The ranks did not find each other.

    Collective: all ranks of the world make it.
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
        """Where this run keeps its journal and stacks; ``None`` = nowhere."""
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
        except Unavailable as error:
            if isinstance(error, Outage):  # a restart could only wait again, on all ranks
                self._end_in_outage(error)
            self._abort(error)
            raise
        except BaseException as error:
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
        """The device that this worker trains on: its GPU, else the CPU."""
        return training_device(self._place.local_rank)

    def section(self, name: str) -> SectionTimer:
        """Return a context manager, also usable as a decorator, that names what the code within does.

        A section has a timeout of its own (``rank_section_timeouts``); sections nest. With ``straggler_detection`` its
        time within a step is compared with that of the other ranks, other than that of ``checkpointing``, ``setup``,
        ``evaluation`` and ``validation``, which are left out.
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

        Before the first, the newest generation that can be trusted is loaded into ``state`` (section ``setup``).
        Around each body the section ``step`` is open. After it the iteration counts as done, and every
        ``save_interval`` iterations the state is saved to all tiers, every ``non_persistent_save_interval`` to the
        near ones (section ``checkpointing``). After the last one the state is saved to all tiers, unless that was
        just done, and the call waits until everything is committed.

        When a shutdown of any rank was requested (SIGTERM, or what else ``preemption`` names), all ranks stop after the
        same iteration, commit one generation, and ``SystemExit(75)`` (``ExitReason.PREEMPTED``) is raised here. A
        second signal, a second or more after the first, and the deadline (``shutdown_timeout``) give up that save; the
        exit code is 75 then, too, and a line says which iterations are lost. Without any saved generation to resume
        from the exit code is 128 plus the signal's number.
        ``SystemExit(17)`` (``ExitReason.FAILED_VALIDATION``) says that every generation led to invalid results, or that
        weights are NaN or infinite after the last iteration.
        ``SystemExit(93)`` (``ExitReason.NO_PROGRESS``) says that a checkpoint directory is another run's, and
        nothing can be saved there, or that no checkpoint that survives the end of the job was committed for
        ``checkpoint.max_durable_lag``.
        ``SystemExit(18)`` (``ExitReason.STRAGGLER``) says that a rank is so slow that its node is to be replaced, with
        ``straggler_detection.stop_if_detected``; the state is saved as for a notice.
        Before the first iteration a notice waits for that one's end; after the last, a signal ends the process.

        ``break`` leaves the loop without a save; an exception in the body passes through untouched.

        It is :meth:`restore`, then :meth:`begin_step`, :meth:`end_step` and :meth:`save_due` around each body, then
        :meth:`finish`.

        Args:
            state: Name to what is saved: anything with ``state_dict()`` and ``load_state_dict()`` (a module
                wrapped in DDP counts as the module within), tensors, and plain values. A load fills tensors, arrays,
                dicts and lists in place, and replaces other plain values in the mapping.
            total: Number of iterations at which the run is complete.
            replicas: Ranks that hold the same tensors, for ``replica_digest``: a process group, or a mesh such as
                ``mesh["dp"]``; ``None`` = all ranks. DTensors say that themselves.
            missing: As for :meth:`restore`.

        Yields:
            The iteration's number from 0: how many optimizer steps were done before it.

        Raises:
            CheckpointError: Saving failed too often in a row.
            PeerLost: A peer left or did not reach the step's end in time, or does not answer.
            UnhealthyRank: A peer answered that wrongly.
            SystemExit: A shutdown was requested, there is no generation left to trust, replicas differ, or a rank is
                slow.

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
        """Load the newest generation that can be trusted into ``state``; return the iteration to continue from.

        After a restart in process the state may still be in memory; nothing is loaded then. The section is ``setup``.

        Args:
            state: As for :meth:`steps`; the same mapping is given to the other methods.
            replicas: As for :meth:`steps`.
            missing: ``"keep"``: what ``state`` holds and the checkpoint lacks (a name, a key of a module, a parameter
                of an optimizer) keeps its present value, and one line of the log lists it; ``"error"``: the load fails.
                ``None`` = as ``checkpoint.missing`` says.
            restored_iteration: Number of optimizer steps that ``state`` has done because the script, or its trainer,
                loaded a checkpoint of its own; only without ``checkpoint`` settings.

        Returns:
            Number of optimizer steps that ``state`` has done; 0 = there is no generation, and training begins.

        Raises:
            ConfigError: ``state`` uses a name that is the session's own, or ``restored_iteration`` has no effect.
            CheckpointError: There are generations, but none that all ranks can load.
            OutlastError: It was called before.
            PeerLost: A peer left.
            SystemExit: There is no generation left to trust (17), or a directory is another run's (93).

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
            if saves is None or saves.prefer_finite:  # otherwise NaN and infinity may belong there
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
            except Unavailable as error:
                if isinstance(error, Outage):  # a restart could only wait again, on all ranks
                    self._end_in_outage(error)
                raise
            except Untrusted as error:
                if self._refusal is not None:
                    self._leave_unsaved()
                if all(one.is_last_resort for one in decode_distrusted(self._place.untrusted)):
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
            OutlastError: It is not the time for it; the message names what to call instead.

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
        """End the step: it counts as done, and all ranks agree on what follows it.

        Call it once the optimizer has stepped. What is due is compared here, too: the replicas
        (``replica_digest``), whether all ranks answer (``health.process_group_interval``), and who is slow
        (``straggler_detection``). Nothing is saved yet.

        Args:
            is_last: Training is complete with this step, on all ranks: nobody stops for a notice or a slow rank any
                more, and :meth:`finish` saves.

        Returns:
            What all ranks agreed on. After ``decision.stop`` the loop ends, and :meth:`finish` or :meth:`leave` ends
            the process.

        Raises:
            OutlastError: It is not the time for it; the message names what to call instead.
            PeerLost: A peer left or did not reach the step's end in time, or does not answer.
            UnhealthyRank: A peer answered that wrongly.
            SystemExit: A peer left because a shutdown was requested, before all could agree on it.

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
        figures: dict[str, float] = {}
        reason = None
        if agreed["refused"]:
            reason = ExitReason.NO_PROGRESS
        elif agreed["stop"] and not is_last:
            self._preemption.start_leaving()
            reason = ExitReason.PREEMPTED
        elif agreed["overdue"] and not is_last:  # after the last step finish() waits for what is due
            reason = ExitReason.NO_PROGRESS
        elif agreed["report"]:
            if self._slow_ranks is None:
                raise OutlastError("straggler_detection is on for another rank, off for this one; give all the same")
            report = self._slow_ranks.detector.report()
            figures = report.metrics()
            self._progress.goodput.note_slow_ranks(report.findings.relative, report.named_ranks)
            if report.should_stop and not is_last:
                self._slow_ranks.diagnose(report)
                reason = ExitReason.STRAGGLER
        save: Literal["near", "all"] | None = None
        if reason != ExitReason.NO_PROGRESS:
            if self._saves is not None and (reason is not None or due == DueSave.ALL):
                save = "all"
            elif due == DueSave.NEAR and not is_last:  # the end saves to all tiers
                save = "near"
            if (differ := self._check_replicas(saves=save is not None)) is not None:
                reason, save = differ, None
        signal = agreed["stop"] if reason == ExitReason.PREEMPTED else None
        self._decision = StepDecision(iteration=self._iteration, save=save, reason=reason, signal=signal)
        if self._decision.stop:
            self._phase = _Phase.STOPPING
        self._progress.log_step(self._iteration, took_s, figures)
        return self._decision

    def heartbeat(self) -> None:
        """Send a heartbeat between two steps or within one, where they are far apart, as in a long validation.

        Collective: no.
        Blocks: never.
        """
        self._scope.ping()
        self._monitor.heartbeat()

    def request_save(self, *, near: bool = False) -> None:
        """Request that all ranks save after the step that begins next, by a clock for instance.

        Of several requests before that step the larger counts.

        Args:
            near: To memory, local tier and replicas alone, instead of to all tiers; where there are none of these, it
                is a save to all tiers.

        Raises:
            OutlastError: There is nowhere to save to.

        Collective: no; one rank's request suffices.
        Blocks: never.
        """
        if self._saves is None:
            raise OutlastError("there is nowhere to save to; give outlast.init() a checkpoint.directory")
        is_near = near and has_near_tier(self._saves.manager.config, self._place)
        schedule = self._saves.schedule
        schedule.wanted = max(schedule.wanted, DueSave.NEAR if is_near else DueSave.ALL)

    def save_due(self, state: Mapping[str, Any]) -> SaveHandle | None:
        """Save what the newest decision says is due now; nothing if nothing is. It does not end the process.

        Args:
            state: As for :meth:`steps`.

        Returns:
            A handle to wait for the commit with; ``None`` = nothing was due.

        Raises:
            OutlastError: It is not the time for it; the message names what to call instead.
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
        """End the loop: save to all tiers unless that was just done, and wait until everything is committed.

        After a decision to stop it is :meth:`leave`.

        Args:
            state: As for :meth:`steps`.

        Raises:
            OutlastError: It is not the time for it; the message names what to call instead.
            CheckpointError: The state could not be saved.
            PeerLost: A peer left.
            SystemExit: All ranks agreed to stop, replicas differ, a directory is another run's, nothing was committed
                for ``max_durable_lag`` (93), or weights are NaN or infinite (17).

        Collective: all ranks, after the same iteration.
        Blocks: until what was saved is committed, up to what is left of ``checkpoint.max_durable_lag``, or twice
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
        """Do what all ranks agreed on when they agreed to stop: save, wait as long as there is time, and exit.

        Args:
            state: As for :meth:`steps`.

        Raises:
            OutlastError: Nobody agreed to stop.
            SystemExit: Always else, with the exit code that :meth:`steps` lists.

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
        """End the loop here, without a save: what ``break`` does in :meth:`steps`.

        Idempotent. Collective: no; what all ranks do next must not need a step's end. Blocks: while state is copied.
        """
        if self._saves is not None:
            self._saves.manager.finish_staging()  # the script may now change what is being copied
        self._monitor.end_all_sections()
        self._monitor.promise_heartbeats(False)
        self._end_notices()
        self._phase = _Phase.OVER

    # -- within a step ---------------------------------------------------------------------------------------------

    def attempts(self, batches: Any = None) -> Iterator[Attempt]:
        """Yield the attempts of a step: one, and another one if a result was invalid; within a step.

        The body of the loop computes the gradients and validates what it likes; the optimizer's step comes after it.
        If any rank's result is rejected, all ranks put back random numbers, batches, gradients and the buffers that a
        module changes as it computes, and run the body again. If the second result differs and is valid, training
        continues with it. If it is the same, the state is saved for diagnosis and all ranks leave with
        ``SystemExit(16)``: the launcher has the step replayed elsewhere. ``rerun_state_machine`` says what is invalid.

        Gradients are put back to what they were only as far as they were ``None`` or zero: accumulate within the body.

        Args:
            batches: What :meth:`Attempt.next_batch` draws from: an iterator, or a list of several. It is drawn from in
                the same order by all steps; ``None`` = the body gets its batches itself, the same for the same step.

        Yields:
            The attempt.

        Raises:
            OutlastError: It is called outside of a step.
            PeerLost: A peer left, or did not end its attempt in time.
            SystemExit: An invalid result came again (16), or was judged (17).

        Collective: all ranks, in the same steps; none leaves the loop early.
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
        """Leave, with all ranks, so that the launcher starts them again from the newest generation that is trusted.

        For results that a script finds bad itself, such as ``NonFiniteDetector(on_rollback=...)``. Bounded: without
        progress in between it is granted ``max_same_device_reruns`` times, then the run stops.

        Raises:
            SystemExit: Always, with code 16.

        Collective: all ranks, in the same step.
        """
        self._log(logging.ERROR, "iteration %d: rolling back to the newest checkpoint", self._iteration)
        self._exit(ExitReason.RESUME_TO_DISAMBIGUATE)

    def save(self, state: Mapping[str, Any], *, suspect: bool = False) -> SaveHandle:
        """Save ``state`` now to all tiers as that of :attr:`iteration`, and return once it is copied.

        Call it before the step's optimizer step, or between steps: what is saved must be what that many steps made.

        Args:
            state: As for :meth:`steps`.
            suspect: The state is of interest for a diagnosis only: it goes to ``suspect/``, and is never loaded.

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
        """End the session in order: wait for what was saved, then close everything. Idempotent.

        Raises:
            SystemExit: The loop ended without :meth:`finish`, and this rank's weights are NaN or infinite (17).

        Collective: all ranks, if something was saved that is not committed.
        Blocks: until what was saved is committed, as in :meth:`finish`.
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
            if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code in OWN_VERDICTS:
                self._monitor.set_leaving(error.code)
            self._abort(error)

    # -- opening and closing ---------------------------------------------------------------------------------------

    def _open_alone(self) -> None:
        """Open what no peer takes part in. What is opened here is closed also if the call around is left."""
        config, place = self.config, self._place
        self._scope.on_leave(self._scope.release)
        self._scope.on_leave(self._let_go)
        if config.seed is not None:
            seed_random_numbers(config.seed + place.global_rank)
        proc = f"rank-{place.global_rank}"
        self._journal = Journal(place.run_dir, run_id=place.run_id, job=place.job, node=place.node, proc=proc)
        self._stack.callback(self._journal.close)
        self._journal.cycle = place.cycle
        # What a save costs training varies too much with saves in the background: from nothing to a whole save.
        varies = config.checkpoint is not None and config.checkpoint.async_save
        self._monitor = PlacedRankMonitor(
            place, monitor_settings(config, place), place.run_dir, not_learned=(CHECKPOINTING,) if varies else ()
        )
        self._stack.callback(self._end_monitor)
        self.fault_tolerance = self._monitor.config
        """What is in force."""
        self._monitor.promise_heartbeats(True)
        self._preemption = Preemption(config.preemption, place=place, journal=self._journal, monitor=self._monitor)
        self._stack.callback(self._preemption.close)
        at_exit(self._at_exit)
        self._stack.callback(forget_at_exit, self._at_exit)

    def _open_together(self) -> None:
        """Open what all ranks open together."""
        config, place = self.config, self._place
        if self._owns_world:
            world = connect_world(place)
            if not self._scope.is_active:  # the wrapper waits for more than the world
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
        """Close the managers of sessions of this process that an exception ended: their directory may be this one's.

        Until then, or until the process exits, such a manager commits the saves that had begun.
        """
        while cls._failed:
            cls._failed.pop().close()

    def _end_notices(self) -> None:
        """Let signals end this process again; as a whole, since what is half closed is never closed."""
        with self._scope.undivided():
            self._preemption.close()

    def _let_go(self) -> None:
        """Close everything that closes without waiting for a peer. Idempotent."""
        with self._scope.undivided():
            self._is_closed = True
            self._stack.close()

    def _end_metrics(self) -> None:
        """Have figures written that are not yet; after the peers have noticed that this rank leaves."""
        is_being_left = self._scope.is_left and not self._is_exiting  # a call that was left long ago holds nobody
        self._progress.end_run(is_orderly=not (self._has_failed or is_being_left))

    def _end_monitor(self) -> None:
        if self._has_failed and not self._scope.is_active:  # a restart in process is not the end of a cycle
            self._monitor.note_failure()
        self._monitor.close()

    def _abort(self, error: BaseException) -> None:
        """Close everything, since an exception ends the session."""
        self._has_failed = not isinstance(error, SystemExit)
        self._scope.note_failure(error)
        if self._has_failed and (kept := postmortem.recorder()) is not None:
            kept.exception(error)  # before peers notice that this rank is gone
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
        """Raise :class:`OutlastError` if it is not the time for a call."""
        if self._phase in expected:
            return
        if self._phase == _Phase.BETWEEN and expected == (_Phase.OPENED,):
            raise OutlastError(f"{what} was called before; continue with begin_step(), or call finish(state)")
        raise OutlastError(f"{what} is out of order: {self._phase.value}")

    def _section(self, name: str) -> AbstractContextManager[None]:
        """Return a section of the session's own, in which restarts in process have no deadlines."""
        section = self._scope.section(self._monitor, name)
        return section if self._slow_ranks is None else self._slow_ranks.left_out(section)

    def _inject_faults(self, section: str | None = None, *, is_last: bool = False) -> None:
        """Cause the faults that are due in a section; without one, those between the last step and the next one."""
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
        """Compare the replicas if it is time to; return the exit code with which all ranks leave if they differ."""
        if self._replicas is None:
            return None
        with self._section("checkpointing"):
            return self._replicas.verdict(self._iteration, saves=saves)

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
        """Save if there is where to, as far as there is time; all ranks agreed to leave."""
        self._attempts.finish()
        iteration, saves = self._iteration, self._saves
        if saves is None:
            if self._monitor.board_state.durable_iteration == iteration:  # saved by the script, or by its trainer
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
        except (CheckpointError, DeadlineExceeded, PeerLost) as error:  # a peer may have given it up
            self._log(logging.ERROR, "the save of iteration %d failed: %s", iteration, error)

    @property
    def _refusal(self) -> CheckpointError | None:
        """Why no save can succeed any more: a directory is another run's; ``None``: they can."""
        return None if self._saves is None else self._saves.manager.refusal

    def _leave_unsaved(self) -> NoReturn:
        """Exit, with all ranks, since nothing can be saved that survives the end of the job.

        A directory is another run's, and a restart would only resume from that run's state; or no commit succeeded for
        ``max_durable_lag``.
        """
        why = self._refusal
        if why is None and self._saves is not None and self._saves.manager.durable_lag_s > 0:
            why = CheckpointError(self._saves.manager.describe_overdue(self._iteration))
        what = why or "nothing can be saved; another rank's log has the reason"
        log.log(logging.ERROR if self._place.local_rank == 0 else logging.DEBUG, "%s", what)
        self._exit(ExitReason.NO_PROGRESS, why)

    def _wait_for_commits(self, saves: Saves) -> None:
        """Wait until what was saved is committed; exit if no commit succeeded for ``max_durable_lag``.

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

    def _end_in_outage(self, error: Unavailable) -> NoReturn:
        """Exit on all ranks, since no checkpoint can be looked up; a restart would only wait again."""
        log.log(logging.ERROR if self._place.local_rank == 0 else logging.DEBUG, "%s", error)
        self._exit(ExitReason.NO_PROGRESS, error)

    def _leave_invalid(self, code: int, *, must_save: bool) -> NoReturn:
        """Save the state of before the step for diagnosis, if there is where to, and leave."""
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
        """Log what holds for all ranks alike: rank 0 does."""
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
