"""The manager: what training calls to save and to load."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import operator
from collections.abc import Callable, Mapping
from typing import Any

from outlast import clock
from outlast import env as environment
from outlast.checkpoint.arena import Arena, Stager
from outlast.checkpoint.arena_pool import ArenaPool
from outlast.checkpoint.commit import GRACE_S, Committer, Save
from outlast.checkpoint.directory import Attempt, Directory, agree_directory
from outlast.checkpoint.handle import SaveHandle, SaveResult
from outlast.checkpoint.load import TIER, Restored, agree_and_read
from outlast.checkpoint.manifest import describe, topology_digest
from outlast.checkpoint.peers import Peers
from outlast.checkpoint.random_numbers import capture_random, restore_random
from outlast.checkpoint.report import Reporter
from outlast.checkpoint.restore import check_fit, restore_into
from outlast.checkpoint.shard import Identity
from outlast.checkpoint.shard_reader import Shard
from outlast.checkpoint.state import FlatState, capture, decode, flatten, meshes_of
from outlast.checkpoint.writer_client import WriterClient
from outlast.config import CheckpointConfig
from outlast.env import WorkerEnv
from outlast.errors import CheckpointError, ConfigError, DeadlineExceeded
from outlast.runtime.journal import Journal

__all__ = ["CheckpointManager"]

log = logging.getLogger(__name__)


class CheckpointManager:
    """Save generations behind training's back; load the newest that every rank can prove.

    Args:
        config: Where and how.
        env: This worker's place; ``None``: as the environment and ``torch.distributed`` say.
        journal: Where events are written; ``None`` = nowhere.
        at_stage: For fault injection: called in the committer's thread just before ``data``, ``manifest``,
            ``rename`` and ``tracker``.
        writer_arguments: For fault injection: more arguments for the writer process.

    Raises:
        ConfigError: There are several ranks, and ``torch.distributed`` is not initialised.
        CheckpointError: The directory cannot be used.
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
        """Called in a thread of its own with each generation that this process saved, once committed."""
        self._place = place = env if env is not None else _place_here()
        self._reporter = Reporter(place, journal)
        if place.world_size > 1 and not _is_initialised():
            raise ConfigError(
                "torch.distributed is not initialised; call init_process_group() before, or outlast.init()"
            )
        self._topology = topology_digest(place.world_size)
        self._directory = Directory(config.directory)
        self._writer = WriterClient(writer_arguments)
        self._peers = Peers(place.global_rank, place.world_size, timeout_s=config.save_timeout)
        try:
            self._agreed = agree_directory(self._directory, self._peers)
            self._committer = Committer(
                self._directory,
                self._agreed,
                rank=place.global_rank,
                world_size=place.world_size,
                topology=self._topology,
                store=self._peers.store(timeout_s=config.save_timeout),
                writer=self._writer,
                timeout_s=config.save_timeout,
                most_recent_k=config.most_recent_k,
                on_outcome=self._after,
                at_stage=at_stage,
            )
        except BaseException:
            self._peers.close()
            raise
        self._stager = Stager()
        self._arenas = ArenaPool(limit_s=self._limit_s)
        self._ordinal = 0
        self._may_save = not self._agreed.generations
        self._newest: SaveHandle | None = None
        self._pending: list[SaveHandle] = []
        self._restored_from: int | None = None
        self._durable: int | None = None
        self._num_failures = 0
        self._last_error: CheckpointError | None = None
        self._closed = False
        atexit.register(self._at_exit)

    @property
    def durable_iteration(self) -> int | None:
        """The newest generation known to be committed, loaded or saved; ``None`` = none yet. Thread: any."""
        return self._durable

    def load_latest(self, state: Mapping[str, Any]) -> Restored | None:
        """Load the newest generation that every rank can prove.

        Args:
            state: As for :meth:`save`. What has a ``load_state_dict`` or is a tensor is loaded in place; plain
                values are replaced in their mapping. Nothing is touched before all ranks have agreed.

        Returns:
            What was loaded; ``None`` when there is no generation at all.

        Raises:
            CheckpointError: There are generations, but none that all ranks can load, or it does not fit ``state``.
            PeerLost: A peer left.

        Collective: all ranks, before the first save.
        Blocks: until all ranks have read and verified their parts.
        """
        if self._ordinal:
            raise CheckpointError("load_latest() comes before the first save(); make another manager to load again")
        started_ns = clock.now_ns()
        saved: dict[str, Any] = {}

        def usable(shard: Shard) -> None:
            saved.clear()
            saved.update(decode(shard.tree, shard.tensor, meshes_of(capture(state))))
            check_fit(state, saved["state"])

        loaded = agree_and_read(
            self._directory, self._peers, run=self._agreed.run, topology=self._topology, usable=usable
        )
        if loaded is None:
            self._may_save = True
            return None
        loaded.shard.release()
        restore_into(state, saved.pop("state"))
        restore_random(saved["random"])
        self._committer.start_from(loaded.held)
        self._may_save = True
        self._restored_from = self._durable = loaded.generation
        restored = Restored(
            iteration=loaded.generation,
            generation=loaded.generation,
            tier=TIER,
            rejected=loaded.rejected,
            load_s=(clock.now_ns() - started_ns) / 1e9,
        )
        self._reporter.restored(restored)
        self._prepare(state)
        return restored

    def save(self, state: Mapping[str, Any], iteration: int) -> SaveHandle:
        """Copy ``state`` and have it committed as the generation of ``iteration``.

        What is saved is the state at this call, whatever training does next. Random numbers are saved with it.
        A save that fails leaves what was committed before; the next one tries again.

        Args:
            state: Name to what is saved: anything with ``state_dict`` and ``load_state_dict``, tensors, plain values,
                mappings of these.
            iteration: Number of optimizer steps that the state has done.

        Returns:
            A handle; done at once when the generation is the one that was loaded.

        Raises:
            CheckpointError: ``max_consecutive_save_failures`` saves failed in a row, a value cannot be saved, or the
                directory holds generations and :meth:`load_latest` was not called.
            ConfigError: ``iteration`` is not a number of steps.

        Collective: all ranks, with the same iterations in the same order.
        Blocks: while the state is copied, and while two earlier saves are under way; with ``async_save`` off, until
            the save is committed or has failed.
        """
        started_ns = clock.now_ns()
        iteration = _checked(iteration)
        if self._closed:
            raise CheckpointError("the manager is closed")
        if not self._may_save:
            # They would be taken for newer than what this training saves, and be loaded in its place.
            raise CheckpointError(
                f"{self._directory.path} holds generations up to {max(self._agreed.generations)} that this training "
                "did not load; call load_latest() first, or give an empty directory"
            )
        limit = self.config.max_consecutive_save_failures
        if 0 < limit <= self._num_failures:
            raise CheckpointError(
                f"{self._num_failures} saves in a row failed, the last with: {self._last_error}. "
                "Make room or repair the directory; max_consecutive_save_failures sets how many are tolerated",
                rank=self._place.global_rank,
                iteration=iteration,
            )
        handle = SaveHandle(iteration, limit_s=self._limit_s)
        if iteration == self._restored_from:
            log.info("iteration %d is committed already; it is not written again", iteration)
            handle.succeed(SaveResult(generation=iteration, num_bytes=0, duration_s=0.0, stall_s=0.0))
            return handle
        save = Save(
            iteration=iteration,
            attempt=self._next_attempt(),
            handle=handle,
            started_ns=started_ns,
            stall_s=0.0,
            restored_from=self._restored_from,
        )
        try:
            flat = flatten({"state": capture(state), "random": capture_random()})
        except Exception as error:
            self._submit(dataclasses.replace(save, error=str(error)))
            raise
        self._start_writer()
        save = self._stage(save, flat)
        self._submit(save)
        if not self.config.async_save:
            self._wait_for([handle], None)
        elif save.attempt.ordinal == 0 and save.arena is not None:
            self._arenas.prepare(save.arena.num_bytes)
        return handle

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is under way.

        Raises:
            CheckpointError: The newest save failed; older ones are what they were.
            DeadlineExceeded: Something still is under way.

        Blocks: up to ``timeout_s``; ``None``: up to the saves' own deadlines.
        """
        self._wait_for(self._pending, timeout_s)
        if self._newest is not None and self._newest.error is not None:
            raise self._newest.error

    def close(self) -> None:
        """End the writer process and the threads; what is not committed yet is given up. Idempotent.

        Blocks: up to 10 s, whatever the peers do.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        self._arenas.stop()
        ended = self._committer.stop(0.0 if all(handle.done for handle in self._pending) else 0.5)
        if not ended and any(not handle.done for handle in self._pending):
            self._writer.kill()
            ended = self._committer.stop(2.0)
        self._writer.close()
        if not (ended or self._committer.stop(2.0)):
            log.warning("a store that does not answer keeps the committing thread; it ends with the process")
        self._peers.close()
        self._stager.close()
        self._arenas.close()

    def _at_exit(self) -> None:
        """Leave fast, in the middle of whatever: the process ends, and perhaps a peer hangs."""
        self._arenas.stop()
        self._peers.cut()
        self._writer.kill()
        self._committer.stop(0.5)

    @property
    def _limit_s(self) -> float:
        """Seconds in which a save, and the one before it, are decided."""
        return 2 * (self.config.save_timeout + GRACE_S)

    def _next_attempt(self) -> Attempt:
        """Name an attempt; failed ones count, so that the ranks' counts stay alike."""
        place, ordinal = self._place, self._ordinal
        self._ordinal += 1
        return Attempt(job=place.job, cycle=place.cycle, token=self._agreed.token, ordinal=ordinal)

    def _stage(self, save: Save, flat: FlatState) -> Save:
        """Copy a state; what goes wrong is the save's error, for all ranks."""
        taken: list[Arena] = []

        def provide(num_bytes: int) -> Arena:
            taken.append(self._arenas.take(num_bytes))
            return taken[0]

        try:
            arena, num_bytes, spans = self._stager.stage(flat, self._identity(save.iteration, save.attempt), provide)
        except (CheckpointError, RuntimeError, OSError, MemoryError) as error:
            if taken:
                self._arenas.give_back(taken[0])
            return dataclasses.replace(save, error=str(error))
        return dataclasses.replace(
            save,
            arena=arena,
            num_bytes=num_bytes,
            tensors=describe(flat, spans),
            stall_s=(clock.now_ns() - save.started_ns) / 1e9,
        )

    def _submit(self, save: Save) -> None:
        self._pending = [*(pending for pending in self._pending if not pending.done), save.handle]
        self._newest = save.handle
        if save.error is None:
            self._reporter.scheduled(save.iteration, stall_s=save.stall_s)
        self._committer.submit(save)

    def _start_writer(self) -> None:
        try:
            self._writer.start()
        except OSError as error:
            log.warning("no writer process can be started (%s); this save fails", error)

    def _identity(self, iteration: int, attempt: Attempt) -> Identity:
        return Identity(
            run=self._agreed.run,
            topology=self._topology,
            rank=self._place.global_rank,
            world_size=self._place.world_size,
            iteration=iteration,
            attempt=str(attempt),
        )

    def _prepare(self, state: Mapping[str, Any]) -> None:
        """Have memory ready for the first save, which is going to be as large as what was loaded."""
        flat: FlatState = flatten({"state": capture(state), "random": capture_random()})
        identity = self._identity(0, Attempt(job=self._place.job, cycle=0, token=self._agreed.token, ordinal=0))
        self._arenas.prepare(self._stager.size_of(flat, identity) + (1 << 16))

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

    def _after(self, save: Save, error: CheckpointError | None, result: SaveResult | None) -> None:
        """Take note of a save's outcome. Thread: the committer's."""
        if save.arena is not None:
            self._arenas.give_back(save.arena)
        if error is not None:
            self._num_failures += 1
            self._last_error = error
            self._reporter.failed(save.iteration, error, num_failures=self._num_failures)
            return
        self._num_failures = 0
        if result is None:
            return
        self._durable = max(self._durable or 0, save.iteration)
        self._reporter.committed(result)
        if self.on_commit is not None:
            self.on_commit(save.iteration)


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
