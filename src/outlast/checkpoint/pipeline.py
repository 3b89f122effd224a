"""The way of a worker's saves: copied into an arena by training, taken to their tiers by threads behind its back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from outlast import clock
from outlast.checkpoint.arena import Arena, ArenaPool, Stager
from outlast.checkpoint.directory import SaveAttempt
from outlast.checkpoint.global_saves import GlobalSaves
from outlast.checkpoint.leases import Leases
from outlast.checkpoint.manifest import topology_digest
from outlast.checkpoint.near_lane import Committer, Retention
from outlast.checkpoint.outcomes import Outcomes, Reporter
from outlast.checkpoint.peers import Peers
from outlast.checkpoint.places import Places, plan_replication
from outlast.checkpoint.save import Save
from outlast.checkpoint.shard import Identity
from outlast.checkpoint.state import FlatState
from outlast.checkpoint.writer_client import WriterClient
from outlast.config import CheckpointConfig
from outlast.errors import CheckpointError
from outlast.policy.recovery_point import Tier

__all__ = ["Pipeline"]

ANSWER_S = 30.0
"""A writer that gives no memory within this hangs."""


class Pipeline:
    """Stage saves, and commit them to the near tiers and then to the global one.

    Args:
        config: Deadlines, tiers and retention.
        places: What all ranks know alike.
        peers: The other ranks.
        writer: Owns the memory, and writes.
        reporter: Is told of every outcome.
        rank: This rank.
        limit_s: Seconds in which a save, and the one before it, are decided.
        on_durable: Called with the iteration of each generation that a tier has committed. Thread: one of its own.
        leases: On the directories that this rank leads.
        at_stage: For fault injection: called by the committer with a stage's name just before it.

    Thread: that of the training loop.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        places: Places,
        peers: Peers,
        writer: WriterClient,
        reporter: Reporter,
        *,
        rank: int,
        limit_s: float,
        on_durable: Callable[[int], None],
        leases: Leases,
        at_stage: Callable[[str], None] | None = None,
    ) -> None:
        self._places, self._rank = places, rank
        self._topology = topology_digest(len(places.nodes))
        self._stager = Stager()
        may_steal = places.local is not None or not places.memory
        self.arenas = ArenaPool(
            writer, rank, limit_s=limit_s, answer_s=min(ANSWER_S, config.save_timeout), may_steal=may_steal
        )
        """This worker's memory for images."""
        self.outcomes = Outcomes(reporter, self.arenas, to_global=self._to_global, on_durable=on_durable)
        """What became of the saves."""
        self._global: GlobalSaves | None = None
        self._committer = Committer(
            places,
            rank=rank,
            topology=self._topology,
            store=peers.store(timeout_s=config.save_timeout),
            writer=writer,
            timeout_s=config.save_timeout,
            retention=Retention(most_recent_k=config.local_most_recent_k, suspect_window=config.suspect_window),
            replication=plan_replication(config, places, rank),
            on_committed=self.outcomes.near,
            on_failed=self.outcomes.failed,
            lease=leases.near,
            at_stage=at_stage,
        )
        if places.directory is None:
            return
        try:
            self._global = GlobalSaves(
                places.directory,
                peers.store(timeout_s=config.save_timeout),
                places,
                rank=rank,
                topology=self._topology,
                writer=writer,
                config=config,
                on_outcome=self.outcomes.far,
                lease=leases.far,
            )
        except BaseException:  # no thread stays, whatever failed
            self._committer.stop(0.2)
            raise

    def start_from(self, known: dict[int, set[Tier]], not_finite: frozenset[int]) -> None:
        """Take generations, and no others, for committed to these tiers. Only before the first save.

        Args:
            known: Each generation's tiers.
            not_finite: Generations that hold numbers that are infinite or NaN, known or not.
        """
        self._committer.start_from(known, not_finite)
        if self._global is not None:
            self._global.start_from((number for number, tiers in known.items() if Tier.GLOBAL in tiers), not_finite)

    def prepare(self, flat: FlatState, attempt: SaveAttempt) -> None:
        """Have memory ready for the first save, which is going to be about as large as the state is now."""
        self.arenas.prepare(self._stager.size_of(flat, self._identity(0, attempt)) + (1 << 16))

    def stage(self, save: Save, flat: FlatState, deferred: frozenset[str]) -> Save:
        """Copy a state; what goes wrong is the save's error, for all ranks.

        Args:
            save: What it is for.
            flat: The state.
            deferred: Names of tensors that may be copied after the return; they must not change before the save's
                ``guard`` has returned.

        Blocks: while the bytes that are not deferred are copied, and while both arenas are in use.
        """
        taken: list[Arena] = []

        def provide(num_bytes: int) -> Arena:
            taken.append(self.arenas.take(num_bytes))
            return taken[0]

        try:
            staged = self._stager.stage(flat, self._identity(save.iteration, save.attempt), provide, deferred=deferred)
        except (CheckpointError, RuntimeError, OSError, MemoryError) as error:
            if taken:
                self.arenas.give_back(taken[0])
            return dataclasses.replace(save, error=str(error))
        except BaseException:  # a signal's, in the middle of the copy: the memory serves the next save
            for arena in taken:
                self.arenas.give_back(arena)
            raise
        return dataclasses.replace(
            save,
            arena=staged.arena,
            num_bytes=staged.num_bytes,
            tensors=staged.tensors,
            guard=staged.wait if deferred else None,
            stall_s=(clock.now_ns() - save.started_ns) / 1e9,
        )

    def has(self, save: Save) -> bool:
        """Return whether a save's iteration is known to be in all of its tiers, so that nothing will be written."""
        return self._committer.has(save)

    def submit(self, save: Save) -> None:
        """Commit a save that was staged, or failed at that."""
        self._committer.submit(save)

    def stop(self, timeout_s: float) -> bool:
        """Give up what is not committed yet and end the threads; return whether they ended in time."""
        ended = self._committer.stop(timeout_s)
        return (self._global is None or self._global.stop(timeout_s)) and ended

    def close(self) -> None:
        """Let go of the memory, once the threads have been stopped."""
        self._stager.close()
        self.arenas.close()

    def _to_global(self, save: Save) -> None:
        """Hand a save on to the global tier. Thread: the committer's."""
        assert self._global is not None
        self._global.submit(save)

    def _identity(self, iteration: int, attempt: SaveAttempt) -> Identity:
        return Identity(
            run=self._places.run,
            topology=self._topology,
            rank=self._rank,
            world_size=len(self._places.nodes),
            iteration=iteration,
            attempt=str(attempt),
        )
