"""The API through which training saves and loads.

:class:`CheckpointEngine` does the work with dependencies from its constructor; the public :class:`CheckpointManager`
finds the worker's place by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from outlast import clock
from outlast.checkpoint.arena import Arena, Stager
from outlast.checkpoint.arena_pool import ArenaPool
from outlast.checkpoint.copy_guard import CopyGuard, changed_only_by_step
from outlast.checkpoint.dcp.global_lane import GlobalLane
from outlast.checkpoint.directory import Claim, DirectoryRefused, Refusal, SaveAttempt
from outlast.checkpoint.infinities import infinite_buffers
from outlast.checkpoint.lane import GRACE_S, Lane
from outlast.checkpoint.node_lanes import LocalLane, MemoryLane
from outlast.checkpoint.outcomes import Outcomes
from outlast.checkpoint.places import (
    Claims,
    Committed,
    Peers,
    Places,
    agree_places,
    agreement_timeout_s,
    warn_of_copies,
)
from outlast.checkpoint.recovery import CheckpointRecovery, VerifiedCheckpoint
from outlast.checkpoint.save import Save, SaveHandle, SaveResult
from outlast.checkpoint.shard import Identity
from outlast.checkpoint.state import FlatState, capture, flatten, without_collection
from outlast.checkpoint.tiers import Restored
from outlast.checkpoint.writer_client import WriterClient
from outlast.config import CheckpointConfig
from outlast.config.checkpoint import check_missing
from outlast.env import WorkerEnv
from outlast.errors import CheckpointError, ConfigError, DeadlineExceeded
from outlast.policy.checkpoint_plan import RetentionRules
from outlast.policy.durability import Durability
from outlast.policy.lineage import Lineage, processes_of
from outlast.policy.recovery_point import Tier, decode_excluded
from outlast.runtime.exits import at_exit, forget_at_exit
from outlast.runtime.journal import Journal
from outlast.runtime.process_groups import current_place, is_initialised
from outlast.runtime.random_numbers import capture_random

log = logging.getLogger(__name__)
KEEPER_PATIENCE_S = 20.0
"""Seconds in which a Ray node gets another writer after the actor that kept the first one died."""
LOOK_S = 0.02
"""Seconds between two checks of a wait for a save."""
COST_WEIGHT = 0.3
"""Weight of the earlier saves in the mean of save costs."""
ANSWER_S = 10.0
"""Longest time that training waits for the writer to provide memory; the save is skipped then."""


class CheckpointEngine:
    """Save and load checkpoints for a worker whose place is known; see :class:`CheckpointManager`.

    Args:
        place: The worker's place.
        journal: Journal for events; ``None`` = none.
        is_left: Returns whether the call around training has ended. Saves that fail then, or up to 2 s before, are
            abandoned: they are not incidents, and do not count as failures. ``None`` = there is no call. Thread: those
                of the lanes.

    Raises, collective, thread: as for :class:`CheckpointManager`.
    """

    _reports_loads = True

    def __init__(
        self,
        config: CheckpointConfig,
        place: WorkerEnv,
        journal: Journal | None = None,
        *,
        is_left: Callable[[], bool] | None = None,
    ) -> None:
        self.config, self._place = config, place
        if place.world_size > 1 and not is_initialised():
            raise ConfigError(
                "torch.distributed is not initialised; call init_process_group() before, or outlast.init()"
            )
        patience_s = KEEPER_PATIENCE_S if place.launcher == "ray" else 0.0
        with contextlib.ExitStack() as opened:  # closes everything if the constructor fails
            self._writer = WriterClient(place.writer, place=place, patience_s=patience_s)
            opened.callback(self._writer.close)
            self._peers = Peers(
                place.global_rank,
                place.world_size,
                timeout_s=config.save_timeout,
                gather_timeout_s=agreement_timeout_s(config),
            )
            opened.callback(self._peers.close)
            self._places = places = agree_places(config, place, self._peers, self._writer)
            self._refusal = Refusal()
            self._claims = Claims(config, place, places, self._refusal)
            self._stager = Stager(config.save_timeout)
            self._arenas = ArenaPool(
                self._writer,
                place.global_rank,
                limit_s=self._limit_s,
                answer_s=min(ANSWER_S, config.save_timeout),
                may_steal=places.local is not None or not places.memory,
            )
            self._outcomes = Outcomes(
                place,
                journal,
                self._arenas,
                self._refusal,
                suspect_window=config.suspect_window,
                tiers=places.tiers,
                where=_lasting_place(places),
                is_left=is_left,
            )
            opened.callback(self._outcomes.close)
            self._lanes: tuple[Lane, ...] = ()
            """The first one gets every save and passes it on to the others."""
            opened.callback(self._stop_lanes, 0.2)
            if places.directory is not None:
                rules = self._rules(config.most_recent_k, config.save_retain_interval)
                self._lanes += (self._open_lane(GlobalLane, self._claims.far, rules),)
            if places.local is not None:
                rules = self._rules(config.local_most_recent_k)
                self._lanes += (self._open_lane(LocalLane, self._claims.near, rules),)
            if places.memory or places.directory is not None:
                rules = self._rules(config.local_most_recent_k)
                self._lanes = (self._open_lane(MemoryLane, None, rules, next_lanes=self._lanes), *self._lanes)
            if place.global_rank == 0:
                self._outcomes.late.start(_describe_tiers(places))
            opened.pop_all()
        if place.is_first:
            warn_of_copies(config, places)
        self._has_claimed = False
        self._recovery = CheckpointRecovery(
            config, places, self._peers, self._writer, self._arenas, reclaim=self._reclaim
        )
        self._guard = CopyGuard()
        self._ordinal = 0
        self._may_save = not places.checkpoints and places.global_error is None
        self._newest: SaveHandle | None = None
        self._pending: list[SaveHandle] = []
        self._safe_since: tuple[SaveHandle, int] | None = None
        """The save that is waited for, and since when it is known to survive the end of the job."""
        self._restored: Restored | None = None
        self._branch = Lineage().begin(self._processes, None, 0)
        self._infinite: Mapping[str, str] = {}
        self._restored_tiers = frozenset[Tier]()
        self._cost_s: float | None = None
        self._closed = False
        at_exit(self._at_exit)

    def _rules(self, most_recent_k: int, interval: int = 0) -> RetentionRules:
        window = self.config.suspect_window
        return RetentionRules(most_recent_k=most_recent_k, retain_interval=interval, suspect_window=window)

    def _open_lane(
        self, kind: type[Lane], claim: Claim | None, retention: RetentionRules, next_lanes: tuple[Lane, ...] = ()
    ) -> Lane:
        return kind(
            self._places,
            rank=self._place.global_rank,
            store=self._peers.store(),
            writer=self._writer,
            timeout_s=self.config.save_timeout,
            claim=claim,
            retention=retention,
            outcomes=self._outcomes,
            next_lanes=next_lanes,
        )

    @property
    def durability(self) -> Durability:
        """The newest checkpoint that survives each failure, loaded or saved. Thread: any."""
        return self._outcomes.durability

    @property
    def durable_iteration(self) -> int | None:
        """The newest checkpoint that survives the end of the job; ``None`` = none yet. Thread: any."""
        return self._outcomes.durability.job

    @property
    def durable_lag_s(self) -> float:
        """Seconds for which a commit that survives the end of the job has been due; 0 = none is due. Thread: any.

        Counts from the begin of the oldest save not covered by such a commit, including earlier cycles of the job under
        ``outlast run``. Without a tier that outlives the job, nothing is due.
        """
        return self._outcomes.durable_lag_s

    def describe_overdue(self, iteration: int) -> str:
        """Return the reason why training stops after ``max_durable_lag``, for people; ``iteration`` = optimizer steps
        done.
        """
        return self._outcomes.describe_overdue(self.config.max_durable_lag, iteration)

    @property
    def refusal(self) -> CheckpointError | None:
        """Why no save can succeed: a directory is another run's. ``None`` = saves can succeed. Thread: any."""
        return self._refusal.error

    @property
    def save_cost_s(self) -> float | None:
        """Seconds that a save cost training lately: copying, and waiting for a copy; ``None`` = no save yet."""
        return self._cost_s

    def claim(self) -> None:
        """Claim the directories for this run, before anything is loaded; the first save does so, too.

        A program that only loads, to evaluate for example, need not call it, and may load checkpoints of another run.

        Raises:
            CheckpointError: Another run writes to a directory, or saved its checkpoints: :attr:`refusal` has the
                reason.
            PeerLost: A peer left.

        Collective: all ranks, before they load.
        Blocks: to find out whether an owner on another machine is alive, 10 s; 50 s in an object store.
        """
        self._claim(again=False)

    def _reclaim(self) -> None:
        """Claim directories that did not respond when the others were claimed. Raises, collective: as :meth:`claim`."""
        if self._has_claimed:
            self._claim(again=True)

    def _claim(self, *, again: bool) -> None:
        self._has_claimed = True
        refused = self._claims.acquire(again=again)
        if text := self._peers.find_first(str(refused or "")):
            self._refusal.error = DirectoryRefused(text)
            raise self._refusal.error

    def load_latest(
        self, state: Mapping[str, Any], *, has: tuple[int, str] | None = None, missing: str | None = None
    ) -> Restored | None:
        """Load the newest checkpoint that every rank can verify, each rank's part from the nearest tier.

        Args:
            state: As for :meth:`save`. Tensors and objects with a ``load_state_dict`` are loaded in place; plain values
                are replaced in their mapping. Nothing is changed before all ranks have agreed.
            has: Iteration and attempt that this rank's ``state`` equals, random numbers aside. If the other ranks can
                load, or have, that checkpoint and none newer, nothing of this rank is read or changed.
            missing: ``"keep"``: names, module keys and optimizer parameters of ``state`` that the checkpoint lacks keep
                their present values, and one log line lists them; ``"error"``: they are an error on all ranks, for
                names before anything is changed. ``None`` = ``config.missing``.

        Returns:
            The loaded checkpoint; ``None`` when there is none at all.

        Raises:
            CheckpointError: There are checkpoints, but none that all ranks can load, or it does not fit ``state``; or a
                file changed between its verification and its use, and ``state`` is unusable.
            ConfigError: ``missing`` is another value.
            PeerLost: A peer left.

        Collective: all ranks, before the first save.
        Blocks: until all ranks have read and verified their parts.
        """
        if self._ordinal:
            raise CheckpointError("load_latest() comes before the first save(); make another manager to load again")
        started_ns = clock.now_ns()
        keeps = check_missing(self.config.missing if missing is None else missing) == "keep"
        excluded = decode_excluded(self._place.untrusted)
        loaded, is_ours = self._recovery.newest(state, excluded, has, keeps_missing=keeps)
        if loaded is not None:
            self._restore(loaded, state, started_ns, is_ours=is_ours)
        else:
            self._branch = self._recovery.branches.begin(self._processes, None, 0)
        self._begin_saving(state)
        return self._restored

    def go_on(self, state: Mapping[str, Any], iteration: int, origin: Restored | None) -> None:
        """Continue from a state that all ranks have in memory already, instead of loading one.

        Args:
            state: As for :meth:`save`; it is not changed.
            iteration: Number of optimizer steps that the state has done.
            origin: The checkpoint that the state descends from, as an earlier manager loaded it; ``None`` = none.

        Raises:
            PeerLost: A peer left.

        Collective: all ranks, before the first save.
        Blocks: until all ranks have listed the checkpoints.
        """
        committed = self._recovery.committed(iteration, decode_excluded(self._place.untrusted))
        self._restored = None if origin is None else dataclasses.replace(origin, iteration=iteration)
        source = None if origin is None else (origin.attempt, origin.checkpoint)
        self._branch = self._recovery.branches.resume(self._processes, source, iteration)
        if self._restored is not None:
            self._outcomes.report_origin(self._restored)
        self._start_from(committed, iteration)
        self._begin_saving(state)

    def load_suspect(self, state: Mapping[str, Any], iteration: int) -> Restored | None:
        """Load a save for diagnosis, to repeat the step that follows it.

        Args:
            state: As for :meth:`load_latest`.
            iteration: Number of optimizer steps that the state had done.

        Returns:
            The loaded save; ``None`` = not all ranks have it, and nothing was changed.

        Raises:
            CheckpointError: It does not fit ``state``.
            PeerLost: A peer left.

        Collective: all ranks, before the first save.
        Blocks: until all ranks have read and verified their parts.
        """
        started_ns = clock.now_ns()
        loaded = self._recovery.suspect(state, iteration, decode_excluded(self._place.untrusted))
        if loaded is None:
            return None
        self._restore(loaded, state, started_ns, is_ours=True)
        self._begin_saving(state)
        return self._restored

    def save(
        self,
        state: Mapping[str, Any],
        iteration: int,
        *,
        tiers: Collection[str] | None = None,
        suspect: bool = False,
    ) -> SaveHandle:
        """Copy ``state`` and commit it in the background as the checkpoint of ``iteration``.

        Saves the state as of this call, and random numbers with it, regardless of later training. A failed save leaves
        earlier checkpoints unchanged; the next save tries again.

        Args:
            state: Maps names to tensors, plain values, objects with ``state_dict`` and ``load_state_dict``, or mappings
                of these.
            iteration: Number of optimizer steps that the state has done.
            tiers: Names of the tiers to save to, unconfigured ones being ignored; ``None`` = all that are configured.
            suspect: For diagnosis only: the checkpoint goes to ``suspect/`` and is never loaded by :meth:`load_latest`.

        Returns:
            A handle; done at once if the checkpoint is the loaded one, and in all these tiers.

        Raises:
            CheckpointError: ``max_consecutive_save_failures`` saves failed in a row, a value cannot be saved, a
                directory is another run's, or there are checkpoints and :meth:`load_latest` was not called.
            ConfigError: ``iteration`` is not a number of steps, or a tier does not exist.

        Collective: all ranks, with the same iterations and tiers in the same order.
        Blocks: while the state is copied, and while earlier saves are being committed to memory; never for a tier that
            is behind. With ``async_save`` off, until the save is committed or has failed, up to ``save_timeout``.
        """
        started_ns = clock.now_ns()
        iteration = _checked_iteration(iteration)
        wanted = self._wanted_tiers(tiers)
        self._check_may_save(iteration, suspect=suspect)
        self.finish_staging()
        restored = self._restored
        if restored is not None and iteration == restored.iteration and not suspect and wanted <= self._restored_tiers:
            log.debug("iteration %d is committed already; it is not written again", iteration)
            handle = SaveHandle(iteration, limit_s=self._limit_s, attempt=restored.attempt)
            handle.succeed(SaveResult(checkpoint=iteration, num_bytes=0, duration_s=0.0, stall_s=0.0))
            return handle
        if not suspect:
            self._outcomes.saving(iteration, wanted)
        attempt = self._attempt(self._ordinal)
        self._ordinal += 1  # failed ones count, too, so that the ranks' counts agree
        handle = SaveHandle(iteration, limit_s=self._limit_s, attempt=str(attempt))
        save = Save(
            iteration=iteration,
            attempt=attempt,
            handle=handle,
            started_ns=started_ns,
            stall_s=0.0,
            tiers=wanted,
            suspect=suspect,
            restored_from=restored.checkpoint if restored is not None else None,
            restored_attempt=restored.attempt if restored is not None else None,
            branch=self._branch,
            infinite=self._infinite,
        )
        with without_collection():  # almost none of these objects become garbage
            try:
                flat = flatten({"state": capture(state), "random": capture_random()})
            except Exception as error:  # a state_dict() may raise anything; the peers wait for this rank's message
                self._submit(dataclasses.replace(save, error=str(error)))
                raise
            deferred = frozenset[str]()
            if self.config.overlap_staging:
                deferred = changed_only_by_step(self._guard.stepping(state, iteration), flat)
            save = self._stage(save, flat, deferred)
            device = device_of(flat)
            del flat
        self._submit(save)
        if save.error is None:
            self._cost_s = save.stall_s + COST_WEIGHT * (self._cost_s - save.stall_s) if self._cost_s else save.stall_s
        if not self.config.async_save:
            with contextlib.suppress(CheckpointError, DeadlineExceeded):  # reported once the save is decided
                handle.wait(self.config.save_timeout + GRACE_S)
        elif save.attempt.ordinal == 0 and save.arena is not None:
            self._arenas.prepare(save.arena.num_bytes, device)
        if self.refusal is not None:  # only now: other ranks may not know it yet, and wait for this one
            raise self.refusal
        return handle

    def finish_staging(self) -> None:
        """Wait until the copies that ``overlap_staging`` defers are done. Optimizers' steps wait by themselves.

        Raises:
            CheckpointError: A device hangs.

        Blocks: up to the rest of one memory copy.
        """
        self._guard.wait()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until no save is under way.

        Raises:
            CheckpointError: The newest save does not survive the end of the job, and has failed in one of its tiers;
                older checkpoints are unchanged.
            DeadlineExceeded: A save is still under way, or is retried after a failure.

        Blocks: up to ``timeout_s``, including retries in a failed tier; ``None`` = up to the saves' own deadlines, and
            up to ``save_timeout`` for retries. If the newest save survives the end of the job, 10 s for the other
            tiers.
        """
        self.finish_staging()
        newest, begun_ns = self._newest, clock.now_ns()
        if newest is None:
            return
        while not self.is_over(newest) or not all(handle.done for handle in self._pending):
            waited_s = (clock.now_ns() - begun_ns) / 1e9
            retry_s = self.config.save_timeout if newest.done else self._limit_s
            if waited_s >= (retry_s if timeout_s is None else timeout_s) or self._is_safe_for_long(newest):
                break
            newest.wait_settled(LOOK_S)
        if self._is_safe(newest):
            return
        if (error := newest.error) is not None:
            if newest.is_settled or timeout_s is None:
                raise error
            raise DeadlineExceeded(f"{error}; it is retried", iteration=newest.iteration)
        if not newest.done:
            raise DeadlineExceeded(
                f"the save of iteration {newest.iteration} is neither committed nor failed after "
                f"{(clock.now_ns() - begun_ns) / 1e9:.0f} s; wait longer",
                iteration=newest.iteration,
            )

    def is_over(self, handle: SaveHandle) -> bool:
        """Return whether nothing more of a save needs to be waited for.

        It is in all of its tiers, or is not retried in the others; or it survives the end of the job, and its other
        tiers have had 10 s more. Thread: that of the training loop.
        """
        return handle.is_settled or self._is_safe_for_long(handle)

    def _is_safe(self, handle: SaveHandle) -> bool:
        return self.durability.job is not None and self.durability.job >= handle.iteration

    def _is_safe_for_long(self, handle: SaveHandle) -> bool:
        if not self._is_safe(handle):
            return False
        if self._safe_since is None or self._safe_since[0] is not handle:
            self._safe_since = handle, clock.now_ns()
        return clock.now_ns() - self._safe_since[1] >= GRACE_S * 1e9

    def close(self) -> None:
        """End the threads and this manager's own writer process, and abandon uncommitted saves. Idempotent.

        Blocks: up to 10 s, whatever the peers do.
        """
        if self._closed:
            return
        self._closed = True
        forget_at_exit(self._at_exit)
        self._guard.close()
        self._arenas.stop()
        is_idle = all(handle.is_settled for handle in self._pending)
        ended = self._stop_lanes(0.5 if is_idle else 0.2)
        self._writer.close()
        if not (ended := ended or self._stop_lanes(2.0)):
            log.warning(
                "a checkpoint directory, or the ranks' store, does not respond: its thread ends with the process"
            )
        self._claims.release(is_idle=ended)
        self._peers.close()
        self._stager.close()
        self._arenas.close()
        self._outcomes.close()

    def give_up(self) -> None:
        """Fail all waits for saves, as the surrounding call ends; :meth:`close` follows. Idempotent.

        Blocks: never. Thread: any; repeat it while the training thread may still begin to wait.
        """
        for handle in self._pending:
            handle.fail(CheckpointError(f"the save of iteration {handle.iteration} is abandoned"))
        self._arenas.give_up()
        self._peers.cut()

    # -- loading -----------------------------------------------------------------------------------------------

    def _restore(self, loaded: VerifiedCheckpoint, state: Mapping[str, Any], started_ns: int, *, is_ours: bool) -> None:
        loaded.restore(state)
        load_s = (clock.now_ns() - started_ns) / 1e9
        self._restored = restored = loaded.describe(self._place.global_rank, load_s=load_s)
        attempt = restored.attempt if is_ours else None
        self._branch = self._recovery.branches.begin(self._processes, attempt, restored.checkpoint)
        if is_ours:
            self._start_from(loaded.committed, restored.checkpoint)
        self._outcomes.skipped(restored)
        if self._reports_loads:
            self._outcomes.loaded(restored)

    def _start_from(self, committed: Committed, iteration: int) -> None:
        """Set the checkpoints that were committed before this manager; the state is that of ``iteration``."""
        self._restored_tiers = frozenset(committed.tiers.get(iteration, ()))
        self._outcomes.start_from(committed.held)
        for lane in self._lanes:
            lane.start_from(committed)

    # -- saving ------------------------------------------------------------------------------------------------

    @property
    def _limit_s(self) -> float:
        return 2 * (self.config.save_timeout + GRACE_S)

    def _check_may_save(self, iteration: int, *, suspect: bool) -> None:
        if self._closed:
            raise CheckpointError("the manager is closed")
        if not self._may_save and not suspect:
            # Checkpoints that were not loaded would count as newer than those that this training saves, and be loaded
            # instead.
            newest = max(self._places.checkpoints, default="unknown")
            raise CheckpointError(
                f"there are checkpoints (newest: {newest}) that this training did not load; call load_latest() first, "
                "or give an empty directory"
            )
        if not suspect:
            self._outcomes.check(self.config.max_consecutive_save_failures, iteration=iteration)

    def _attempt(self, ordinal: int) -> SaveAttempt:
        place = self._place
        return SaveAttempt(job=place.job, cycle=place.cycle, token=self._places.token, ordinal=ordinal)

    @property
    def _processes(self) -> str:
        return processes_of(str(self._attempt(0)))

    def _submit(self, save: Save) -> None:
        self._pending = [*(pending for pending in self._pending if not pending.is_settled), save.handle]
        self._newest = save.handle
        lanes = [lane for lane in self._lanes if lane.takes(save)]
        if save.error is None and not all(lane.has(save) for lane in lanes):
            self._outcomes.scheduled(save, is_async=self.config.async_save)
        self._outcomes.begin(save, [lane.name for lane in lanes])
        lanes[0].submit(save)

    def _wanted_tiers(self, tiers: Collection[str] | None) -> frozenset[Tier]:
        """Return the configured ones of the requested tiers; ``None`` = all. Raises: ConfigError, if there is none."""
        there = self._places.tiers
        if tiers is None:
            return there
        names = {str(tier): tier for tier in Tier}
        if unknown := [name for name in tiers if name not in names]:
            raise ConfigError(f"there is no tier {unknown[0]!r}; the tiers are {', '.join(names)}")
        wanted = frozenset(names[name] for name in tiers) & there
        if not wanted:
            raise ConfigError(
                f"none of the tiers {', '.join(tiers)} is configured; there are {sorted(map(str, there))}"
            )
        return wanted

    def _begin_saving(self, state: Mapping[str, Any]) -> None:
        """Allow saves, and prepare memory of the state's present size for the first one."""
        self._may_save = True
        flat = flatten({"state": capture(state), "random": capture_random()})
        self._infinite = infinite_buffers(state, flat)
        if self.config.overlap_staging:
            self._guard.stepping(state)
        num_bytes = self._stager.size_of(flat, self._identity(0, self._attempt(0))) + (1 << 16)
        self._arenas.prepare(num_bytes, device_of(flat))

    def _stage(self, save: Save, flat: FlatState, deferred: frozenset[str]) -> Save:
        """Copy a state; errors become the save's error, for all ranks.

        Args:
            deferred: Names of tensors that may be copied after the return; they must not change before the save's
                ``guard`` has returned.

        Blocks: while the bytes that are not deferred are copied, and while both arenas are in use.
        """
        taken: list[Arena] = []

        def provide(num_bytes: int) -> Arena:
            taken.append(self._arenas.take(num_bytes))
            return taken[0]

        try:
            staged = self._stager.stage(flat, self._identity(save.iteration, save.attempt), provide, deferred=deferred)
        except BaseException as error:  # also a signal's, during the copy: the memory serves the next save
            for arena in taken:
                self._arenas.give_back(arena)
            if isinstance(error, CheckpointError | RuntimeError | OSError | MemoryError):
                return dataclasses.replace(save, error=str(error))
            raise
        if deferred:
            self._guard.watch(staged)
        return dataclasses.replace(
            save,
            arena=staged.arena,
            num_bytes=staged.num_bytes,
            tensors=staged.tensors,
            guard=staged.finish if deferred else None,
            stall_s=(clock.now_ns() - save.started_ns) / 1e9,
        )

    def _identity(self, iteration: int, attempt: SaveAttempt) -> Identity:
        return Identity(
            run=self._places.run,
            topology=self._places.topology,
            rank=self._place.global_rank,
            world_size=len(self._places.nodes),
            iteration=iteration,
            attempt=str(attempt),
        )

    # -- ending ------------------------------------------------------------------------------------------------

    def _at_exit(self) -> None:
        """Stop without waiting: the process ends, and a peer may hang."""
        self._outcomes.abandon()
        self._stop_lanes(0.0)  # before their resources are released
        self._arenas.stop()
        self._peers.cut()
        self._writer.close()
        self._claims.release(is_idle=self._stop_lanes(0.5))

    def _stop_lanes(self, timeout_s: float) -> bool:
        """Abandon uncommitted saves and end the lanes' threads; return whether they ended in time."""
        for lane in self._lanes:
            lane.stop(0.0)
        return [lane.stop(timeout_s) for lane in self._lanes].count(False) == 0


def _lasting_place(places: Places) -> str:
    if places.directory is not None:
        return f"the global directory {places.directory.url}"
    return "" if places.local is None else f"the local directory {places.local.path}"


class ReadingEngine(CheckpointEngine):
    """An engine whose :meth:`load_latest` only reads; its caller reports whether training continues from the result."""

    _reports_loads = False

    def report_used(self, suspect_window: int) -> None:
        if self._restored is not None:
            self._outcomes.loaded(self._restored, suspect_window=suspect_window)

    def report_leaving(self, iteration: int, exit_code: int) -> None:
        self._outcomes.leaving(iteration, exit_code)


def _describe_tiers(places: Places) -> dict[str, str]:
    found = {}
    if places.directory is not None:
        found[GlobalLane.name] = f"the global tier ({places.directory.url})"
    if places.local is not None:
        found[LocalLane.name] = f"the local tier ({places.local.path.parent})"
    return found


def device_of(flat: FlatState) -> torch.device | None:
    return next((named.device for named in flat.tensors if named.device.type != "cpu"), None)


def _checked_iteration(iteration: int) -> int:
    try:
        number = operator.index(iteration)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(f"iteration={iteration!r} must be the number of optimizer steps done, 0 or more")
    return number


def open_manager(
    config: CheckpointConfig,
    *,
    env: WorkerEnv | None = None,
    journal: Journal | None = None,
    is_left: Callable[[], bool] | None = None,
) -> CheckpointEngine:
    return CheckpointEngine(config, env if env is not None else current_place(), journal, is_left=is_left)


class CheckpointManager(CheckpointEngine):
    """Save checkpoints in the background, and load the newest one that every rank can verify.

    Args:
        config: Directories, tiers, intervals. The worker's place comes from the environment and ``torch.distributed``.

    Raises:
        ConfigError: There are several ranks, and ``torch.distributed`` is not initialised; or a setting cannot work.
        CheckpointError: A folder cannot be used.
        PeerLost: A peer left.

    Collective: all ranks.
    Thread: that of the training loop, for all methods.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        super().__init__(config, current_place())
