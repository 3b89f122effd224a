"""The arenas of a rank: shared memory that the writer owns, taken for a save and given back after it."""

from __future__ import annotations

import logging
import os
import threading
from functools import partial

import torch

from outlast import clock
from outlast.checkpoint.arena import Arena
from outlast.checkpoint.protocol import Done, Take
from outlast.checkpoint.writer_client import WriterClient, WriterSilent
from outlast.errors import CheckpointError
from outlast.runtime.device import start_driver_thread
from outlast.runtime.device_copies import copies_of

log = logging.getLogger(__name__)
PATIENCE_S = 10.0
"""Longest time that training waits for an earlier save to be committed to the first tier; the save is skipped then."""
SILENT_S = 1.0
"""Longest wait for a writer that did not respond to the request before."""


class ArenaPool:
    """Arenas that the writer owns, taken by the training thread and given back once unused.

    Args:
        limit_s: Longest time that :meth:`take` waits for an arena, if shorter than :data:`PATIENCE_S`.
        answer_s: Longest time that the writer may take to respond. While it is silent, later saves are skipped after
            :data:`SILENT_S`.
        may_steal: Whether the memory of the newest committed checkpoint may be taken when the other arena is in use.
    """

    def __init__(self, writer: WriterClient, rank: int, *, limit_s: float, answer_s: float, may_steal: bool) -> None:
        self._writer, self._rank, self._may_steal = writer, rank, may_steal
        self._limit_s, self._answer_s = limit_s, answer_s
        self._known: dict[int, Arena] = {}
        self._busy: set[int] = set()
        self._behind: set[int] = set()
        """Busy arenas that only late tiers still need."""
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._toucher: threading.Thread | None = None
        self._is_given_up = False
        self._is_writer_silent = self._is_late = False

    def take(self, num_bytes: int) -> Arena:
        """Return an arena of at least ``num_bytes``.

        Raises:
            CheckpointError: No arena became free in time, there is no memory or no writer, or :meth:`give_up` was
                called.

        Blocks: while earlier saves are being committed to memory, up to :data:`PATIENCE_S`, or :data:`SILENT_S` if the
            previous save was skipped, too; never for a tier that is behind.
        """
        limit_s = min(SILENT_S if self._is_late else PATIENCE_S, self._limit_s)
        end_ns = clock.now_ns() + int(limit_s * 1e9)
        with self._changed:
            while (arena := self._ask(num_bytes, self._may_steal)) is None:
                if self._behind and self._busy <= self._behind:
                    raise CheckpointError(
                        f"there is no memory for another {num_bytes} bytes while {len(self._behind)} earlier saves are "
                        "not in all of their tiers yet; this save is skipped"
                    )
                left_s = (end_ns - clock.now_ns()) / 1e9
                if self._is_given_up or left_s <= 0 or not self._changed.wait(left_s):
                    self._is_late = True
                    raise CheckpointError(
                        f"earlier saves have neither ended nor failed after {limit_s:g} s; this save is skipped"
                    )
            self._is_late = False
            return arena

    def give_back(self, arena: Arena) -> None:
        """Mark an arena as unused by this process. Idempotent; a lost arena stays in use. Thread: any."""
        with self._changed:
            self._behind.discard(arena.inode)
            if not arena.is_lost:
                self._busy.discard(arena.inode)
            self._changed.notify_all()

    def mark_behind(self, arena: Arena) -> None:
        """Record that only tiers that are behind still need an arena. Thread: any."""
        with self._changed:
            if arena.inode in self._busy:
                self._behind.add(arena.inode)
            self._changed.notify_all()

    def prepare(self, num_bytes: int, device: torch.device | None = None) -> None:
        """Pre-fault free arenas of that size in the background, so that the first save finds warm pages.

        Args:
            device: Device that copies there: the pages are pinned, too; ``None`` = copies from host memory only.

        Blocks: never. Thread: the training thread.
        """
        if self._toucher is not None and self._toucher.is_alive():
            return
        self._toucher = start_driver_thread(partial(self._prepare, num_bytes, device), "outlast-touch", self._stop)

    def stop(self) -> None:
        self._stop.set()

    def give_up(self) -> None:
        """End the waits of :meth:`take`. Thread: any."""
        self._is_given_up = True
        if self._changed.acquire(blocking=False):  # else a request to the writer is under way; a later call succeeds
            self._changed.notify_all()
            self._changed.release()

    def close(self) -> None:
        self.stop()
        if self._toucher is not None:
            self._toucher.join(2.0)
        with self._changed:
            for arena in self._known.values():
                arena.close()
            self._known.clear()

    def _ask(self, num_bytes: int, may_steal: bool) -> Arena | None:
        request = Take(
            rank=self._rank,
            num_bytes=num_bytes,
            busy=tuple(self._busy),
            may_steal=may_steal,
            num_behind=len(self._behind),
        )
        limit_s = min(SILENT_S, self._answer_s) if self._is_writer_silent else self._answer_s
        try:
            _, fd = self._writer.ask(request, Done, timeout_s=limit_s)
        except CheckpointError as error:
            self._is_writer_silent = isinstance(error, WriterSilent)  # a dead writer is replaced at once: wait
            raise
        self._is_writer_silent = False
        if fd is None:
            return None
        inode = os.fstat(fd).st_ino
        if inode in self._known:
            os.close(fd)
        else:
            self._forget_dropped(inode)
            self._known[inode] = Arena(fd)
        self._busy.add(inode)
        return self._known[inode]

    def _forget_dropped(self, newest: int) -> None:
        """Unmap memory that the writer has replaced by larger memory: only busy arenas and one more can still exist."""
        idle = [inode for inode in self._known if inode not in self._busy and inode != newest]
        for inode in idle[:-1]:
            self._known.pop(inode).close()

    def _prepare(self, num_bytes: int, device: torch.device | None) -> None:
        """Thread: the toucher's."""
        arenas = []
        with self._changed:
            try:
                while (arena := self._ask(num_bytes, False)) is not None:
                    arenas.append(arena)
            except CheckpointError as error:
                log.debug("no memory is prepared for saves: %s", error)  # the save that needs it reports the error
        for arena in arenas:
            self.give_back(arena)
        copies = None if device is None else copies_of(device)
        for arena in arenas:
            arena.touch(self._stop)
            if copies is not None:
                arena.pin(copies, self._stop)
