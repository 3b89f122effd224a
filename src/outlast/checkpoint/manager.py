"""The manager: what training calls to save and to load."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from outlast import clock
from outlast import env as environment
from outlast.checkpoint.arena import Arena, Stager
from outlast.checkpoint.commit import GRACE_S, Committer, Save
from outlast.checkpoint.directory import Attempt, Directory, agree_directory
from outlast.checkpoint.handle import SaveHandle, SaveResult
from outlast.checkpoint.load import TIER, Restored, Shard, agree_and_read
from outlast.checkpoint.manifest import TensorEntry, topology_digest
from outlast.checkpoint.peers import Peers
from outlast.checkpoint.random_numbers import capture_random, restore_random
from outlast.checkpoint.restore import check_fit, restore_into
from outlast.checkpoint.shard import Identity
from outlast.checkpoint.state import FlatState, capture, decode, flatten, meshes_of
from outlast.checkpoint.writer_client import WriterClient
from outlast.config import CheckpointConfig
from outlast.env import WorkerEnv
from outlast.errors import CheckpointError, ConfigError, DeadlineExceeded
from outlast.incidents import EventKind, Incident, IncidentKind
from outlast.runtime.journal import Journal

__all__ = ["CheckpointManager"]

log = logging.getLogger(__name__)
NUM_ARENAS = 2


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
        self._journal = journal or Journal(
            None, run_id=place.run_id, job=place.job, node=place.node, proc=f"rank-{place.global_rank}"
        )
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
        self._free: queue.SimpleQueue[Arena | None] = queue.SimpleQueue()
        for _ in range(NUM_ARENAS):
            self._free.put(None)
        self._stop_touching = threading.Event()
        self._ordinal = 0
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
            return None
        loaded.shard.release()
        restore_into(state, saved.pop("state"))
        restore_random(saved["random"])
        self._committer.forget(loaded.abandoned)
        self._restored_from = self._durable = loaded.generation
        restored = Restored(
            iteration=loaded.generation,
            generation=loaded.generation,
            tier=TIER,
            rejected=loaded.rejected,
            load_s=(clock.now_ns() - started_ns) / 1e9,
        )
        self._report(restored)
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
            CheckpointError: ``max_consecutive_save_failures`` saves failed in a row, or a value cannot be saved.

        Collective: all ranks, with the same iterations in the same order.
        Blocks: while the state is copied, and while two earlier saves are under way; with ``async_save`` off, until
            the save is committed or has failed.
        """
        started_ns = clock.now_ns()
        if self._closed:
            raise CheckpointError("the manager is closed")
        limit = self.config.max_consecutive_save_failures
        if 0 < limit <= self._num_failures:
            raise CheckpointError(
                f"{self._num_failures} saves in a row failed, the last with: {self._last_error}. "
                "Make room or repair the directory; max_consecutive_save_failures sets how many are tolerated",
                rank=self._place.global_rank,
                iteration=iteration,
            )
        handle = SaveHandle(iteration)
        if iteration == self._restored_from:
            log.info("iteration %d is committed already; it is not written again", iteration)
            handle.succeed(SaveResult(generation=iteration, num_bytes=0, duration_s=0.0, stall_s=0.0))
            return handle
        attempt = Attempt(job=self._place.job, cycle=self._place.cycle, token=self._agreed.token, ordinal=self._ordinal)
        flat = flatten({"state": capture(state), "random": capture_random()})
        self._start_writer()
        arena, num_bytes, spans = self._stager.stage(flat, self._identity(iteration, attempt), self._provide)
        self._ordinal += 1
        stall_s = (clock.now_ns() - started_ns) / 1e9
        shapes = {named.name: named.global_shape for named in flat.tensors}
        self._pending = [*(pending for pending in self._pending if not pending.done), handle]
        self._newest = handle
        log.info("Scheduling async checkpoint save of iteration %d, tier %s", iteration, TIER)
        self._journal.write(
            EventKind.SAVE_SCHEDULED, rank=self._place.global_rank, iteration=iteration, stall_s=stall_s
        )
        self._committer.submit(
            Save(
                iteration=iteration,
                attempt=attempt,
                arena=arena,
                num_bytes=num_bytes,
                tensors=tuple(
                    TensorEntry(
                        name=span.name,
                        dtype=span.dtype,
                        shape=span.shape,
                        global_shape=shapes.get(span.name, span.shape),
                        offset=span.offset,
                    )
                    for span in spans
                ),
                handle=handle,
                started_ns=started_ns,
                stall_s=stall_s,
                restored_from=self._restored_from,
            )
        )
        if not self.config.async_save:
            self._wait_for([handle], None)
        elif self._ordinal == 1:
            self._touch_others(arena.num_bytes)
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
        self._stop_touching.set()
        ended = self._committer.stop(0.0 if all(handle.done for handle in self._pending) else 0.5)
        if not ended and any(not handle.done for handle in self._pending):
            self._writer.kill()
            ended = self._committer.stop(2.0)
        self._writer.close()
        if not (ended or self._committer.stop(2.0)):
            log.warning("a store that does not answer keeps the committing thread; it ends with the process")
        self._peers.close()
        self._stager.close()
        while not self._free.empty():
            if (arena := self._free.get()) is not None:
                arena.close()

    def _at_exit(self) -> None:
        """Leave fast, in the middle of whatever: the process ends, and perhaps a peer hangs."""
        self._stop_touching.set()
        self._peers.cut()
        self._writer.kill()
        self._committer.stop(0.5)

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

    def _provide(self, num_bytes: int) -> Arena:
        """Return a free arena of at least that size; waits for one."""
        try:
            arena = self._free.get(timeout=2 * (self.config.save_timeout + GRACE_S))
        except queue.Empty:
            raise CheckpointError("earlier saves neither end nor fail; does the store's host still run?") from None
        if arena is None or arena.num_bytes < num_bytes:
            if arena is not None:
                arena.close()
            try:
                arena = Arena(num_bytes + (num_bytes >> 6) + (1 << 16))  # plain values may grow a little
            except OSError as error:
                self._free.put(None)
                raise CheckpointError(f"there is no memory to copy {num_bytes} bytes of state into: {error}") from error
        return arena

    def _prepare(self, state: Mapping[str, Any]) -> None:
        """Have memory ready for the first save, which is going to be as large as what was loaded."""
        flat: FlatState = flatten({"state": capture(state), "random": capture_random()})
        identity = self._identity(0, Attempt(job=self._place.job, cycle=0, token=self._agreed.token, ordinal=0))
        self._touch_others(self._stager.size_of(flat, identity) + (1 << 16))

    def _touch_others(self, num_bytes: int) -> None:
        """Touch arenas in the background, in the place of free ones that are too small."""
        fresh = []
        for _ in range(NUM_ARENAS):
            try:
                arena = self._free.get_nowait()
            except queue.Empty:
                break
            if arena is None or arena.num_bytes < num_bytes:
                if arena is not None:
                    arena.close()
                arena = Arena(num_bytes)
                fresh.append(arena)
            self._free.put(arena)
        if fresh:
            threading.Thread(target=self._touch, args=(fresh,), name="outlast-touch", daemon=True).start()

    def _touch(self, arenas: list[Arena]) -> None:
        for arena in arenas:
            arena.touch(self._stop_touching)

    def _wait_for(self, handles: list[SaveHandle], timeout_s: float | None) -> None:
        limit_s = 2 * (self.config.save_timeout + GRACE_S) if timeout_s is None else timeout_s
        end_ns = clock.now_ns() + int(limit_s * 1e9)
        for handle in handles:
            try:
                handle.wait(max(0.0, (end_ns - clock.now_ns()) / 1e9))
            except DeadlineExceeded:
                raise
            except CheckpointError:
                continue  # the handle has it

    def _after(self, save: Save, error: CheckpointError | None, result: SaveResult | None) -> None:
        """Report a save's outcome. Thread: the committer's."""
        self._free.put(save.arena)
        rank = self._place.global_rank
        if error is not None:
            self._num_failures += 1
            self._last_error = error
            log.warning("save failed: %s (%d in a row)", error, self._num_failures)
            self._write_incident(IncidentKind.SAVE_FAILED, save.iteration, str(error), {})
            return
        self._num_failures = 0
        if result is None:
            return
        self._durable = max(self._durable or 0, save.iteration)
        log.info("committed iteration %d, tier %s, in %.2f s", save.iteration, TIER, result.duration_s)
        self._journal.write(
            EventKind.SAVE_COMMITTED,
            rank=rank,
            iteration=save.iteration,
            generation=save.iteration,
            duration_s=result.duration_s,
            num_bytes=result.num_bytes,
        )
        if self.on_commit is not None:
            self.on_commit(save.iteration)

    def _report(self, restored: Restored) -> None:
        for rejection in restored.rejected:
            if rejection.rank == self._place.global_rank:
                log.warning("passed over: %s", rejection)
                evidence = {"generation": rejection.generation, "tier": rejection.tier, "file": rejection.file}
                self._write_incident(IncidentKind.COPY_REJECTED, rejection.generation, str(rejection), evidence)
        log.info("loaded iteration %d, tier %s, in %.2f s", restored.iteration, restored.tier, restored.load_s)
        self._journal.write(
            EventKind.RESTORED,
            rank=self._place.global_rank,
            iteration=restored.iteration,
            generation=restored.generation,
            tier=restored.tier,
            rejected=[str(rejection) for rejection in restored.rejected],
            load_s=restored.load_s,
        )

    def _write_incident(self, kind: IncidentKind, iteration: int, summary: str, evidence: dict[str, Any]) -> None:
        place = self._place
        incident = Incident(
            kind=kind,
            job=place.job,
            cycle=place.cycle,
            node=place.node,
            rank=place.global_rank,
            iteration=iteration,
            evidence={"summary": summary, **evidence},
        )
        self._journal.write(EventKind.INCIDENT, rank=place.global_rank, iteration=iteration, incident=incident)


def _is_initialised() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _place_here() -> WorkerEnv:
    place = environment.read_worker()
    if not _is_initialised():
        return place
    import torch.distributed as dist

    return dataclasses.replace(place, global_rank=dist.get_rank(), world_size=dist.get_world_size())
