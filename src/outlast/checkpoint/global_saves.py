"""The way of a worker's saves to the global tier: from the arena, through the writer, in the lane's own thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from outlast.checkpoint.claim import Held
from outlast.checkpoint.dcp.assemble import Assemble, Assembled
from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.dcp.global_lane import GlobalLane, GlobalRetention, GlobalSave
from outlast.checkpoint.places import Places
from outlast.checkpoint.save import Save
from outlast.checkpoint.writer_client import WriterClient
from outlast.config import CheckpointConfig
from outlast.errors import CheckpointError

__all__ = ["GlobalSaves"]


class GlobalSaves:
    """Save to the global tier what was staged.

    Args:
        directory: The global tier.
        store: A store connection for the lane's thread alone.
        places: What all ranks know alike.
        rank: This rank.
        topology: Digest of the ranks' arrangement.
        writer: Puts the files together.
        config: Deadlines and retention.
        on_outcome: Called in the lane's thread with each save and, if it failed, its error.
        lease: On the directory, on rank 0.
    """

    def __init__(
        self,
        directory: GlobalDirectory,
        store: Any,
        places: Places,
        *,
        rank: int,
        topology: str,
        writer: WriterClient,
        config: CheckpointConfig,
        on_outcome: Callable[[Save, CheckpointError | None], None],
        lease: Held | None,
    ) -> None:
        self._writer, self._on_outcome = writer, on_outcome
        self._lane = GlobalLane(
            directory,
            store,
            rank=rank,
            world_size=len(places.nodes),
            token=places.token,
            run=places.run,
            topology=topology,
            ask=self._assemble,
            timeout_s=config.save_timeout,
            retention=GlobalRetention(
                most_recent_k=config.most_recent_k,
                retain_interval=config.save_retain_interval,
                suspect_window=config.suspect_window,
            ),
            on_outcome=self._after,
            seen=places.seen_global,
            lease=lease,
        )

    def start_from(self, generations: Iterable[int], not_finite: frozenset[int]) -> None:
        """Take generations for committed to the global tier. Only before the first save.

        Args:
            generations: Which.
            not_finite: Generations that hold numbers that are infinite or NaN.
        """
        self._lane.start_from(generations, not_finite)

    def submit(self, save: Save) -> None:
        """Save what lies in the save's arena. Thread: the committer's."""
        assert save.arena is not None
        self._lane.submit(
            GlobalSave(
                iteration=save.iteration,
                attempt=save.attempt,
                fd=save.arena.fd,
                image=save.arena.view(save.num_bytes),
                tensors=save.tensors,
                restored_from=save.restored_from,
                restored_attempt=save.restored_attempt,
                suspect=save.suspect,
                context=save,
            )
        )

    def stop(self, timeout_s: float) -> bool:
        """Give up what is under way; return whether the thread ended in time."""
        return self._lane.stop(timeout_s)

    def _assemble(self, request: Assemble, fd: int, timeout_s: float) -> Assembled:
        """Have the writer put a file together. Thread: the lane's, and its helpers'."""
        try:
            return self._writer.ask(request, Assembled, timeout_s=timeout_s, fd=fd)[0]
        except CheckpointError as error:
            return Assembled(error=str(error))

    def _after(self, done: GlobalSave, error: CheckpointError | None) -> None:
        assert isinstance(done.context, Save)
        self._on_outcome(done.context, error)
