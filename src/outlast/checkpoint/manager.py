"""The manager: what training calls to save and to load."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

from outlast import clock
from outlast import env as environment
from outlast.checkpoint.arena import Arena, Stager
from outlast.checkpoint.arena_pool import ArenaPool
from outlast.checkpoint.commit import GRACE_S, Committer, Retention, Save
from outlast.checkpoint.directory import Attempt
from outlast.checkpoint.global_saves import GlobalSaves
from outlast.checkpoint.handle import SaveHandle, SaveResult
from outlast.checkpoint.load import Loaded, Restored
from outlast.checkpoint.loading import Loader
from outlast.checkpoint.manifest import topology_digest
from outlast.checkpoint.outcomes import Outcomes
from outlast.checkpoint.overlap import Guard, changed_only_by_step
from outlast.checkpoint.peers import Peers
from outlast.checkpoint.places import agree_places
from outlast.checkpoint.replication import plan_replication
from outlast.checkpoint.report import Reporter
from outlast.checkpoint.shard import Identity
from outlast.checkpoint.state import FlatState, capture, flatten
from outlast.checkpoint.writer_client import WriterClient
from outlast.config import CheckpointConfig
from outlast.env import WorkerEnv
from outlast.errors import CheckpointError, ConfigError, DeadlineExceeded
from outlast.policy.quarantine import decode_distrusted
from outlast.policy.recovery_point import Tier
from outlast.runtime.journal import Journal
from outlast.runtime.random_numbers import capture_random, restore_random

__all__ = ["CheckpointManager"]

log = logging.getLogger(__name__)
COST_WEIGHT = 0.3
"""Of the newest save in the mean of what saves cost."""


class CheckpointManager:
    """Save generations behind training's back; load the newest that every rank can prove.

    Args:
        config: Where and how.
        env: This worker's place; ``None``: as the environment and ``torch.distributed`` say.
        journal: Where events are written; ``None`` = nowhere.
        at_stage: For fault injection: called in the committer's thread just before ``data``, ``manifest``,
            ``rename`` and ``tracker``.
        writer_arguments: For fault injection: more arguments for a writer process of this worker's own.

    Raises:
        ConfigError: There are several ranks, and ``torch.distributed`` is not initialised; or a setting cannot work.
        CheckpointError: A folder cannot be used.
        PeerLost: A peer left.

    Collective: all ranks.
    Thread: that of the training loop, for all methods.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        env: WorkerEnv | None = None,
        journal: Journal | None = None,
        at_stage: Callable[[str], None] | None = None,
        writer_arguments: tuple[str, ...] = (),
    ) -> None:
        self.config = config
        self.on_commit: Callable[[int], None] | None = None
        """Called in a thread of its own with each generation that this process saved, once committed to some tier."""
        self._place = place = env if env is not None else _place_here()
        self._reporter = Reporter(place, journal)
        if place.world_size > 1 and not _is_initialised():
            raise ConfigError(
                "torch.distributed is not initialised; call init_process_group() before, or outlast.init()"
            )
        self._topology = topology_digest(place.world_size)
        self._writer = WriterClient(place.writer, writer_arguments)
        self._peers = Peers(place.global_rank, place.world_size, timeout_s=config.save_timeout)
        try:
            self._places = agree_places(config, place, self._peers, self._writer)
            self._arenas = self._open_arenas()
            self._outcomes = Outcomes(
                self._reporter, self._arenas, to_global=self._to_global, on_durable=self._tell_durable
            )
            self._committer = self._open_committer(at_stage)
            self._global = self._open_global()
        except BaseException:  # nothing that was opened stays, whatever failed
            self._peers.close()
            self._writer.close()
            if hasattr(self, "_committer"):
                self._committer.stop(0.2)
            raise
        self._say_what_is_off()
        self._loader = Loader(config, self._places, self._peers, self._writer, self._arenas, topology=self._topology)
        self._stager = Stager()
        self._guard = Guard()
        self._ordinal = 0
        self._may_save = not self._places.generations and self._places.global_error is None
        self._newest: SaveHandle | None = None
        self._pending: list[SaveHandle] = []
        self._restored: Restored | None = None
        self._restored_tiers = frozenset[Tier]()
        self._cost_s: float | None = None
        self._closed = False
        atexit.register(self._at_exit)

    @property
    def durable_iteration(self) -> int | None:
        """The newest generation known to be committed, loaded or saved; ``None`` = none yet. Thread: any."""
        return self._outcomes.durable

    @property
    def save_cost_s(self) -> float | None:
        """What a save cost training lately, in seconds: copying, and waiting for a copy; ``None`` = no save yet."""
        return self._cost_s

    @property
    def guard_stall_s(self) -> float:
        """Seconds that optimizers' steps waited for overlapped copies so far."""
        return self._guard.stall_s

    def load_latest(self, state: Mapping[str, Any]) -> Restored | None:
        """Load the newest generation that every rank can prove, each rank's part from the nearest tier.

        Args:
            state: As for :meth:`save`. What has a ``load_state_dict`` or is a tensor is loaded in place; plain
                values are replaced in their mapping. Nothing is touched before all ranks have agreed.

        Returns:
            What was loaded; ``None`` when there is no generation at all.

        Raises:
            CheckpointError: There are generations, but none that all ranks can load, or it does not fit ``state``;
                or a file changed between its proof and its use, and ``state`` is of no use any more.
            PeerLost: A peer left.

        Collective: all ranks, before the first save.
        Blocks: until all ranks have read and verified their parts.
        """
        if self._ordinal:
            raise CheckpointError("load_latest() comes before the first save(); make another manager to load again")
        started_ns = clock.now_ns()
        loaded, is_ours = self._loader.newest(state, decode_distrusted(self._place.untrusted))
        if loaded is not None:
            self._restore(loaded, state)
            self._note_loaded(loaded, started_ns, is_ours=is_ours)
        self._may_save = True
        self._prepare(state)
        return self._restored

    def go_on(self, state: Mapping[str, Any], iteration: int, origin: Restored | None) -> None:
        """Go on from a state that all ranks have in memory already, instead of loading one.

        Args:
            state: As for :meth:`save`; nothing of it is touched.
            iteration: Number of optimizer steps that it has done.
            origin: What it goes back to, as an earlier manager loaded it; ``None`` = it was never loaded.

        Raises:
            PeerLost: A peer left.

        Collective: all ranks, before the first save.
        Blocks: until all ranks have looked at what there is.
        """
        known = self._loader.known(iteration, decode_distrusted(self._place.untrusted))
        self._restored = None if origin is None else dataclasses.replace(origin, iteration=iteration)
        self._take_for_committed(known, iteration)
        self._may_save = True
        self._prepare(state)

    def load_suspect(self, state: Mapping[str, Any], iteration: int) -> Restored | None:
        """Load what was saved at ``iteration`` for diagnosis, to look at the step that follows it once more.

        Args:
            state: As for :meth:`load_latest`.
            iteration: Number of optimizer steps that the state had done.

        Returns:
            What was loaded; ``None``: not all ranks have it, and nothing was touched.

        Raises:
            CheckpointError: It does not fit ``state``.
            PeerLost: A peer left.

        Collective: all ranks, before the first save.
        Blocks: until all ranks have read and verified their parts.
        """
        started_ns = clock.now_ns()
        loaded = self._loader.suspect(state, iteration, decode_distrusted(self._place.untrusted))
        if loaded is None:
            return None
        self._restore(loaded, state)
        self._may_save = True
        self._note_loaded(loaded, started_ns, is_ours=True)
        self._prepare(state)
        return self._restored

    def save(
        self,
        state: Mapping[str, Any],
        iteration: int,
        *,
        tiers: Collection[str] | None = None,
        suspect: bool = False,
    ) -> SaveHandle:
        """Copy ``state`` and have it committed as the generation of ``iteration``.

        What is saved is the state at this call, whatever training does next. Random numbers are saved with it.
        A save that fails leaves what was committed before; the next one tries again.

        Args:
            state: Name to what is saved: anything with ``state_dict`` and ``load_state_dict``, tensors, plain values,
                mappings of these.
            iteration: Number of optimizer steps that the state has done.
            tiers: Names of the tiers to save to; ``None`` = all that are configured. Those that are not are left out.
            suspect: For diagnosis only: the generation goes to ``suspect/`` and is never loaded.

        Returns:
            A handle; done at once when the generation is the one that was loaded, and in all these tiers.

        Raises:
            CheckpointError: ``max_consecutive_save_failures`` saves failed in a row, a value cannot be saved, or
                there are generations and :meth:`load_latest` was not called.
            ConfigError: ``iteration`` is not a number of steps, or there is no such tier.

        Collective: all ranks, with the same iterations and tiers in the same order.
        Blocks: while the state is copied, and while two earlier saves are under way; with ``async_save`` off, until
            the save is committed or has failed.
        """
        started_ns = clock.now_ns()
        iteration = _checked(iteration)
        wanted = self._wanted(tiers)
        self._check_may_save(iteration, suspect=suspect)
        self.finish_staging()
        handle = SaveHandle(iteration, limit_s=self._limit_s)
        restored = self._restored
        if restored is not None and iteration == restored.iteration and not suspect and wanted <= self._restored_tiers:
            log.info("iteration %d is committed already; it is not written again", iteration)
            handle.succeed(SaveResult(generation=iteration, num_bytes=0, duration_s=0.0, stall_s=0.0))
            return handle
        save = Save(
            iteration=iteration,
            attempt=self._next_attempt(),
            handle=handle,
            started_ns=started_ns,
            stall_s=0.0,
            tiers=wanted,
            suspect=suspect,
            restored_from=restored.generation if restored is not None else None,
            restored_attempt=restored.attempt if restored is not None else None,
        )
        try:
            captured = capture(state)
            flat = flatten({"state": captured, "random": capture_random()})
        except Exception as error:  # a state_dict() may raise anything; the peers wait for this rank's word
            self._submit(dataclasses.replace(save, error=str(error)))
            raise
        deferred = changed_only_by_step(state, flat) if self.config.overlap_staging else frozenset[str]()
        save = self._stage(save, flat, deferred)
        if save.guard is not None:
            self._guard.watch(state, save.guard)
        self._submit(save)
        self._cost_s = save.stall_s + COST_WEIGHT * (self._cost_s - save.stall_s) if self._cost_s else save.stall_s
        if not self.config.async_save:
            self._wait_for([handle], None)
        elif save.attempt.ordinal == 0 and save.arena is not None:
            self._arenas.prepare(save.arena.num_bytes)
        return handle

    def finish_staging(self) -> None:
        """Wait until what ``overlap_staging`` copies beside training is copied. Optimizers' steps do it by themselves.

        Blocks: up to the rest of one memory copy.
        """
        self._guard.wait()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is under way.

        Raises:
            CheckpointError: The newest save failed; older ones are what they were.
            DeadlineExceeded: Something still is under way.

        Blocks: up to ``timeout_s``; ``None``: up to the saves' own deadlines.
        """
        self.finish_staging()
        self._wait_for(self._pending, timeout_s)
        if self._newest is not None and self._newest.error is not None:
            raise self._newest.error

    def close(self) -> None:
        """End the threads, and a writer process of our own; what is not committed yet is given up. Idempotent.

        Blocks: up to 10 s, whatever the peers do.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        self._guard.close()
        self._arenas.stop()
        is_idle = all(handle.done for handle in self._pending)
        ended = self._stop_threads(0.5 if is_idle else 0.2)
        self._writer.close()
        if not (ended or self._stop_threads(2.0)):
            log.warning("a store that does not answer keeps a thread; it ends with the process")
        self._peers.close()
        self._stager.close()
        self._arenas.close()

    # -- opening -----------------------------------------------------------------------------------------------

    def _open_arenas(self) -> ArenaPool:
        return ArenaPool(
            self._writer,
            self._place.global_rank,
            limit_s=self._limit_s,
            may_steal=self._places.local is not None or not self._places.memory,
        )

    def _open_committer(self, at_stage: Callable[[str], None] | None) -> Committer:
        config = self.config
        return Committer(
            self._places,
            rank=self._place.global_rank,
            topology=self._topology,
            store=self._peers.store(timeout_s=config.save_timeout),
            writer=self._writer,
            timeout_s=config.save_timeout,
            retention=Retention(most_recent_k=config.local_most_recent_k, suspect_window=config.suspect_window),
            replication=plan_replication(config, self._places, self._place.global_rank),
            on_committed=self._outcomes.near,
            on_failed=self._outcomes.failed,
            at_stage=at_stage,
        )

    def _open_global(self) -> GlobalSaves | None:
        if self._places.directory is None:
            return None
        return GlobalSaves(
            self._places.directory,
            self._peers.store(timeout_s=self.config.save_timeout),
            self._places,
            rank=self._place.global_rank,
            topology=self._topology,
            writer=self._writer,
            config=self.config,
            on_outcome=self._outcomes.far,
        )

    def _to_global(self, save: Save) -> None:
        """Hand a save on to the global tier. Thread: the committer's."""
        assert self._global is not None
        self._global.submit(save)

    def _tell_durable(self, iteration: int) -> None:
        if self.on_commit is not None:
            self.on_commit(iteration)

    def _say_what_is_off(self) -> None:
        places = self._places
        if self._place.global_rank != 0 or self.config.replication is False:
            return
        if places.local is None and not places.memory:
            return
        if len(places.leaders) == 1:
            log.info("one node: nothing is copied to other nodes")
        elif self.config.replication_factor > len(places.leaders):
            log.warning(
                "replication_factor=%d, but there are %d nodes: each shard has %d copies",
                self.config.replication_factor,
                len(places.leaders),
                len(places.leaders),
            )

    # -- loading -----------------------------------------------------------------------------------------------

    def _restore(self, loaded: Loaded, state: Mapping[str, Any]) -> None:
        try:
            random = loaded.copy.restore(state)
        finally:
            loaded.copy.close()
        if random is not None:
            restore_random(random)
        else:
            log.info("saved by another number of ranks: every rank's random numbers begin afresh")

    def _note_loaded(self, loaded: Loaded, started_ns: int, *, is_ours: bool) -> None:
        point = loaded.point
        mine = point.copies[self._place.global_rank]
        self._restored = Restored(
            iteration=point.generation,
            generation=point.generation,
            attempt=point.attempt,
            tier=str(mine.tier),
            tiers=tuple(str(copy.tier) for copy in point.copies),
            rejected=loaded.rejected,
            load_s=(clock.now_ns() - started_ns) / 1e9,
            bytes_read={str(mine.tier): loaded.copy.num_bytes_read},
        )
        if is_ours:
            self._take_for_committed(loaded.known, point.generation)
        self._reporter.restored(self._restored)

    def _take_for_committed(self, known: dict[int, set[Tier]], iteration: int) -> None:
        """Count on generations that were committed before this manager, ``iteration`` being the one of the state."""
        self._restored_tiers = frozenset(known.get(iteration, ()))
        self._outcomes.durable = max(known, default=None)
        self._committer.start_from(known)
        if self._global is not None:
            self._global.start_from(number for number, tiers in known.items() if Tier.GLOBAL in tiers)

    # -- saving ------------------------------------------------------------------------------------------------

    @property
    def _limit_s(self) -> float:
        """Seconds in which a save, and the one before it, are decided."""
        return 2 * (self.config.save_timeout + GRACE_S)

    def _wanted(self, tiers: Collection[str] | None) -> frozenset[Tier]:
        """Return those of the tiers asked for that exist here."""
        places = self._places
        there = {Tier.MEMORY} if places.memory else set[Tier]()
        there |= {Tier.LOCAL} if places.local is not None else set()
        there |= {Tier.REPLICA} if places.targets else set()
        there |= {Tier.GLOBAL} if places.directory is not None else set()
        if tiers is None:
            return frozenset(there)
        names = {str(tier): tier for tier in Tier}
        if unknown := [name for name in tiers if name not in names]:
            raise ConfigError(f"there is no tier {unknown[0]!r}; the tiers are {', '.join(names)}")
        wanted = frozenset(names[name] for name in tiers) & there
        if not wanted:
            raise ConfigError(
                f"none of the tiers {', '.join(tiers)} is configured; there are {sorted(map(str, there))}"
            )
        return wanted

    def _check_may_save(self, iteration: int, *, suspect: bool) -> None:
        if self._closed:
            raise CheckpointError("the manager is closed")
        if suspect:
            return
        if not self._may_save:
            # They would be taken for newer than what this training saves, and be loaded in its place.
            newest = max(self._places.generations, default="unknown")
            raise CheckpointError(
                f"there are generations (newest: {newest}) that this training did not load; call load_latest() first, "
                "or give an empty directory"
            )
        limit = self.config.max_consecutive_save_failures
        if 0 < limit <= self._outcomes.num_failures:
            raise CheckpointError(
                f"{self._outcomes.num_failures} saves in a row failed, the last with: {self._outcomes.last_error}. "
                "Make room or repair the directory; max_consecutive_save_failures sets how many are tolerated",
                rank=self._place.global_rank,
                iteration=iteration,
            )

    def _next_attempt(self) -> Attempt:
        """Name an attempt; failed ones count, so that the ranks' counts stay alike."""
        place, ordinal = self._place, self._ordinal
        self._ordinal += 1
        return Attempt(job=place.job, cycle=place.cycle, token=self._places.token, ordinal=ordinal)

    def _stage(self, save: Save, flat: FlatState, deferred: frozenset[str]) -> Save:
        """Copy a state; what goes wrong is the save's error, for all ranks."""
        taken: list[Arena] = []

        def provide(num_bytes: int) -> Arena:
            taken.append(self._arenas.take(num_bytes))
            return taken[0]

        try:
            staged = self._stager.stage(flat, self._identity(save.iteration, save.attempt), provide, deferred=deferred)
        except (CheckpointError, RuntimeError, OSError, MemoryError) as error:
            if taken:
                self._arenas.give_back(taken[0])
            return dataclasses.replace(save, error=str(error))
        except BaseException:  # a signal's, in the middle of the copy: the memory serves the next save
            for arena in taken:
                self._arenas.give_back(arena)
            raise
        return dataclasses.replace(
            save,
            arena=staged.arena,
            num_bytes=staged.num_bytes,
            tensors=staged.tensors,
            guard=staged.wait if deferred else None,
            stall_s=(clock.now_ns() - save.started_ns) / 1e9,
        )

    def _submit(self, save: Save) -> None:
        self._pending = [*(pending for pending in self._pending if not pending.done), save.handle]
        self._newest = save.handle
        if save.error is None:
            self._reporter.scheduled(save.iteration, save.tiers, stall_s=save.stall_s)
        self._committer.submit(save)

    def _identity(self, iteration: int, attempt: Attempt) -> Identity:
        return Identity(
            run=self._places.run,
            topology=self._topology,
            rank=self._place.global_rank,
            world_size=self._place.world_size,
            iteration=iteration,
            attempt=str(attempt),
        )

    def _prepare(self, state: Mapping[str, Any]) -> None:
        """Have memory ready for the first save, which is going to be about as large as the state is now."""
        flat: FlatState = flatten({"state": capture(state), "random": capture_random()})
        identity = self._identity(0, Attempt(job=self._place.job, cycle=0, token=self._places.token, ordinal=0))
        self._arenas.prepare(self._stager.size_of(flat, identity) + (1 << 16))

    # -- ending ------------------------------------------------------------------------------------------------

    def _wait_for(self, handles: list[SaveHandle], timeout_s: float | None) -> None:
        limit_s = self._limit_s if timeout_s is None else timeout_s
        end_ns = clock.now_ns() + int(limit_s * 1e9)
        for handle in handles:
            try:
                handle.wait(max(0.0, (end_ns - clock.now_ns()) / 1e9))
            except DeadlineExceeded:
                raise
            except CheckpointError:
                continue  # the handle has it

    def _stop_threads(self, timeout_s: float) -> bool:
        ended = self._committer.stop(timeout_s)
        return (self._global is None or self._global.stop(timeout_s)) and ended

    def _at_exit(self) -> None:
        """Leave fast, in the middle of whatever: the process ends, and perhaps a peer hangs."""
        self._arenas.stop()
        self._peers.cut()
        self._writer.close()
        self._stop_threads(0.5)


def _checked(iteration: int) -> int:
    try:
        number = operator.index(iteration)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(f"iteration={iteration!r} must be the number of optimizer steps done, 0 or more")
    return number


def _is_initialised() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _place_here() -> WorkerEnv:
    place = environment.read_worker()
    if not _is_initialised():
        return place
    import torch.distributed as dist

    return dataclasses.replace(place, global_rank=dist.get_rank(), world_size=dist.get_world_size())
